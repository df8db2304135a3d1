from everstep.agent.budget import RestartBudget


def test_first_restart_is_immediate_then_pauses_grow_to_a_limit() -> None:
    budget = RestartBudget(limit=20, longest_pause_s=1.0)
    pauses = [budget.died(0.5) for _ in range(8)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_gives_up_after_ten_deaths_in_a_row() -> None:
    budget = RestartBudget()
    pauses = [budget.died(1.0) for _ in range(10)]
    assert None not in pauses[:9]
    assert pauses[9] is None


def test_a_calm_life_forgives_twice_in_a_row() -> None:
    budget = RestartBudget()
    for _ in range(2):
        for _ in range(8):
            assert budget.died(0.1) is not None
        assert budget.died(10.0) == 0.0
