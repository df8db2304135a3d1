"""What an agent does about a master that it does not hear."""

from __future__ import annotations

from everstep.agent.mastersilence import REFUSED_S, CutOff, Hung, SilenceStep


def looks(cut: CutOff, unheard: list[float], start: float = 100.0, refused: float = 0.0) -> list[SilenceStep]:
    return [cut.look(start + n, s, refused) for n, s in enumerate(unheard)]


def test_short_silence_means_nothing() -> None:
    assert set(looks(CutOff(10.0, 20.0), [0.3, 1.0, 5.0, 9.0, 0.2, 4.0] * 5)) == {SilenceStep.NOTHING}


def test_a_long_one_ends_what_runs_here_once_and_then_it_comes_back() -> None:
    cut = CutOff(10.0, 100.0)
    said = looks(cut, [float(n) for n in range(40)])
    assert [n for n, step in enumerate(said) if step is not SilenceStep.NOTHING] == [10] and said[10] is SilenceStep.END
    assert cut.look(140.0, 0.1, 0.0) is SilenceStep.BACK
    assert cut.look(141.0, 0.1, 0.0) is SilenceStep.NOTHING


def test_it_leaves_after_its_time_or_when_nobody_listens_there() -> None:
    said = looks(CutOff(10.0, 20.0), [float(n) for n in range(40)])
    assert said.index(SilenceStep.LEAVE) == 30
    cut = CutOff(10.0, 2000.0)
    looks(cut, [float(n) for n in range(12)])
    assert cut.look(112.0, 12.0, REFUSED_S / 2) is SilenceStep.NOTHING
    assert cut.look(113.0, 13.0, REFUSED_S) is SilenceStep.LEAVE and cut.refused


def test_an_own_pause_says_nothing_of_the_master() -> None:
    cut, hung = CutOff(10.0, 20.0), Hung(5.0, 15.0)
    for at in (100.0, 101.0):
        assert cut.look(at, 0.2, 0.0) is SilenceStep.NOTHING and hung.look(at, 0.2, True) is SilenceStep.NOTHING
    for n in range(5):  # stopped for a minute: what the master said lies unread, or its connection is gone
        assert cut.look(161.0 + n, 60.0 + n, 0.0) is SilenceStep.NOTHING
        assert hung.look(161.0 + n, 60.0 + n, True) is SilenceStep.NOTHING
    assert hung.look(166.0, 65.0, True) is SilenceStep.SAY


def test_a_master_that_hangs_is_told_of_once_and_replaced() -> None:
    hung = Hung(5.0, 15.0)
    said = [hung.look(float(n), float(n), True) for n in range(16)]
    assert {n: s for n, s in enumerate(said) if s is not SilenceStep.NOTHING} == {
        5: SilenceStep.SAY,
        15: SilenceStep.REPLACE,
    }


def test_one_that_answers_again_is_told_of_and_one_that_starts_is_waited_for() -> None:
    hung = Hung(5.0, 15.0)
    assert [hung.look(float(n), float(n), True) for n in range(7)][5] is SilenceStep.SAY
    assert hung.look(7.0, 0.1, True) is SilenceStep.BACK
    assert {hung.look(8.0 + n, 8.0 + n, False) for n in range(60)} == {SilenceStep.NOTHING}
