"""``auto`` finds the size of made-up jobs in every regime, in few changes, and leaves alone what it does not know."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sized_jobs import WINDOW_S, Demands, Trained, best, look, train

from everstep.brain.policy_control import as_plan, refuse
from everstep.model.observation import Observations, Pace
from everstep.model.plan import Plan, Scale
from everstep.policies.auto import AutoState, auto, candidates, memory_of, read_window
from everstep.policies.speed_model import SizeSeen, SpeedModel
from everstep.policies.stragglers.policy import SHIPPED, composed

REGIMES = {
    "workers": (Demands(1e-3, 0.0, 1e-5), (8, 4)),
    "ps": (Demands(1e-3, 0.0, 1e-3), (8, 8)),
    "ps alone": (Demands(1e-4, 0.0, 8e-4, 2.0), (8, 8)),
    "data": (Demands(1e-3, 4e-4, 1e-4), (16, 8)),
    "no overlap": (Demands(1e-3, 1e-4, 5e-4, 1.0), (8, 4)),
    "nothing to gain": (Demands(1e-3, 1e-1), (8, 8)),
    "no ps": (Demands(1e-3, 1e-4), (8, 0)),
}


def path(done: Trained) -> list[tuple[int, int]]:
    return [done.sizes[0], *(b for a, b in zip(done.sizes, done.sizes[1:], strict=False) if a != b)]


@pytest.mark.parametrize("name", REGIMES)
def test_it_finds_nearly_the_best_size_in_few_changes(name: str) -> None:
    demands, bounds = REGIMES[name]
    done = train(lambda at: demands, bounds, (1, 1 if bounds[1] else 0), noise=0.02, windows=40)
    assert done.rates[-1] >= 0.95 * best(demands, bounds), path(done)
    assert done.changes <= 6
    assert all(b >= 0.95 * a for a, b in zip(done.rates, done.rates[1:], strict=False)), "no step back"
    if name == "nothing to gain":
        assert path(done) == [(1, 1)]


def test_a_bound_of_memory_keeps_sizes_out() -> None:
    demands, mib = Demands(1e-3, 0.0, 1e-5), 1 << 20
    seen = look(100.0, (2, 1), demands, (8, 4))
    workers = tuple(msgspec.structs.replace(w, rss_bytes=100 * mib) for w in seen.workers)
    servers = tuple(msgspec.structs.replace(s, rss_bytes=90 * mib, row_bytes=40 * mib) for s in seen.servers)
    seen = msgspec.structs.replace(seen, workers=workers, servers=servers)
    assert memory_of(seen, (2, 1)) == 290 * mib and memory_of(seen, (3, 2)) == 440 * mib
    assert max(candidates(seen, (2, 1), 4)) == (8, 4)
    seen = msgspec.structs.replace(seen, max_memory_bytes=440 * mib)
    assert (3, 2) in candidates(seen, (2, 1), 4) and (3, 3) not in candidates(seen, (2, 1), 4)
    assert max(candidates(seen, (2, 1), 4)) == (3, 2)
    full = msgspec.structs.replace(seen, max_memory_bytes=mib)
    plan, _ = auto(full, AutoState(size=(2, 1), at=90.0))
    assert plan is None or not plan.actions, "it stays, if nothing fits"


@pytest.mark.parametrize("turned", [False, True])
def test_a_job_that_changes_midway_is_sized_anew(turned: bool) -> None:
    kinds = (Demands(1e-3, 1e-5, 1e-5), Demands(1e-3, 1e-5, 1e-3))
    before, after = kinds[::-1] if turned else kinds
    done = train(lambda at: before if at < 400 else after, (8, 8), noise=0.02, windows=80)
    assert done.rates[-1] >= 0.95 * best(after, (8, 8)), path(done)
    assert done.changes <= 6


EMULATED = {"workers": Demands(6e-3, 0.0, 5e-5), "ps": Demands(3e-3, 0.0, 2.5e-3), "data": Demands(6e-3, 1.5e-3, 5e-5)}
"""Jobs of benchmark autoscale."""


@pytest.mark.parametrize("name", EMULATED)
def test_it_is_there_within_a_minute(name: str) -> None:
    demands = EMULATED[name]
    done = train(lambda at: demands, (8, 4), noise=0.03, windows=12)
    assert done.reached(0.95 * best(demands, (8, 4))) <= 60.0, done.changed
    assert done.changes <= 3


@pytest.mark.parametrize("shifts_at", [200.0, 206.0])
def test_a_job_that_changes_in_the_middle_of_a_window_is_sized_by_what_it_is_now(shifts_at: float) -> None:
    """The window of the change is of both. The rate changes by a tenth only, but workers wait for the ps now."""
    before, after = EMULATED["workers"], EMULATED["ps"]
    done = train(lambda at: before if at < shifts_at else after, (8, 4), noise=0.03, windows=20)
    found = best(after, (8, 4))
    assert done.rates[-1] >= 0.95 * found, path(done)
    assert min(at for at, rate in done.changed if at > shifts_at and rate >= 0.95 * found) <= shifts_at + 60.0


@pytest.mark.parametrize(("sizes", "ends"), [("workers", (8, 1)), ("ps", (1, 4))])
def test_a_number_that_was_asked_for_stays(sizes: str, ends: tuple[int, int]) -> None:
    demands = Demands(4e-3, 0.0, 4e-3, 1.0)
    sought = train(lambda at: demands, (8, 4), noise=0.0, windows=20, sizes=sizes)
    other = 1 if sizes == "workers" else 0
    assert {size[other] for size in sought.sizes} == {1} and sought.changes >= 1
    assert sought.rates[-1] >= 0.9 * demands.rate(*ends)
    fewer = train(lambda at: demands, (8, 4), (4, 4), optimize="cost", noise=0.0, windows=20, sizes=sizes)
    assert {size[other] for size in fewer.sizes} == {4}


def test_a_plan_that_the_brain_drops_is_no_change_and_is_asked_for_again_later_and_later() -> None:
    demands, bounds = REGIMES["workers"]
    done = train(lambda at: demands, bounds, noise=0.0, windows=40, drops=lambda plan, n: n <= 3)
    assert done.rates[-1] >= 0.95 * best(demands, bounds) and done.state.changes == done.changes <= 6
    assert [plan.decision.inputs["changes_left"] for plan in done.plans[:4]] == [5, 5, 5, 5]
    never = train(lambda at: demands, bounds, noise=0.0, windows=60, drops=lambda plan, n: True)
    assert never.state.changes == 0 and 3 <= len(never.plans) <= 6, "it waits twice as long each time"


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    shared=st.floats(-3.0, -0.3),
    ps=st.floats(-2.5, 0.3),
    sharp=st.sampled_from([1.0, 1.5, 2.0, 4.0, 8.0]),
    max_workers=st.sampled_from([2, 4, 8, 16]),
    max_ps=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_any_job(shared: float, ps: float, sharp: float, max_workers: int, max_ps: int, seed: int) -> None:
    demands = Demands(1e-3, 1e-3 * 10**shared, 1e-3 * 10**ps, sharp)
    done = train(lambda at: demands, (max_workers, max_ps), seed=seed, noise=0.02, windows=24)
    assert done.rates[-1] >= 0.85 * best(demands, (max_workers, max_ps)), path(done)
    assert done.changes <= 6
    assert all(1 <= w <= max_workers and 1 <= p <= max_ps for w, p in done.sizes)
    assert all(b >= 0.93 * a for a, b in zip(done.rates, done.rates[1:], strict=False)), path(done)


def test_both_roles_are_scaled_together_or_one_alone_is_worse() -> None:
    """Where workers and ps are short by turns, a job that may change one role only ends far below."""
    demands, bounds = REGIMES["ps"]
    joint = train(lambda at: demands, bounds, windows=40).rates[-1]
    for alone in ((8, 1), (1, 8)):
        assert joint >= 2 * train(lambda at: demands, alone, windows=40).rates[-1]


def test_cost_and_waste_take_fewer() -> None:
    demands, bounds = REGIMES["data"]
    sizes = {
        what: train(lambda at: demands, bounds, optimize=what, windows=40).sizes[-1]
        for what in ("time", "waste", "cost")
    }
    assert sum(sizes["time"]) > sum(sizes["waste"]) > sum(sizes["cost"]) >= 2, sizes


def test_every_change_says_what_binds_and_what_was_not_done() -> None:
    demands, bounds = REGIMES["ps"]
    plans = train(lambda at: demands, bounds, noise=0.0, windows=40).plans
    changes = [plan for plan in plans if plan.actions]
    assert changes and not plans[-1].actions, "at last it says why it stays"
    for plan in changes:
        assert plan.decision.reason.endswith("%") and "instead of" in plan.decision.reason
        assert {"samples_per_s", "expected", "low", "high", "changes_left"} <= plan.decision.inputs.keys()
        assert as_plan(plan).actions == plan.actions
    assert "stay" in plans[-1].decision.reason and "binds" in plans[-1].decision.reason


# ---------------------------------------------------------------- what it is not told, or wrongly

DEMANDS, BOUNDS = REGIMES["workers"]


def asked(*looks: Observations) -> tuple[list[Plan], AutoState]:
    state, plans = None, []
    for seen in looks:
        plan, state = auto(seen, state)
        plans += [plan] if plan is not None else []
    assert state is not None
    return plans, state


def looks(n: int, **more: object) -> list[Observations]:
    return [look(100.0 + WINDOW_S * i, (1, 1), DEMANDS, BOUNDS, **more) for i in range(n)]  # type: ignore[arg-type]


def test_it_acts_on_whole_windows_only() -> None:
    assert len(asked(*looks(1))[0]) == 0
    assert len(asked(*looks(2))[0]) == 1
    assert not asked(*looks(4, pending=1))[0], "somebody is on the way"
    assert not asked(*looks(4, wanted_workers=2))[0], "one is not there yet"
    assert not asked(*looks(1, since=95.0), *looks(1, since=95.0))[0], "it came up in this window"


def test_a_window_with_a_move_or_a_worker_that_only_prepares_does_not_count() -> None:
    assert not asked(*looks(2, rest_since=105.0))[0], "partitions were on their way in it"
    assert asked(*looks(2, rest_since=100.0))[0]
    seen = looks(2)
    late = [
        msgspec.structs.replace(
            each, workers=tuple(msgspec.structs.replace(w, short=_share_of(w.short, 0.5)) for w in each.workers)
        )
        for each in seen
    ]
    assert not asked(*late)[0], "it trained for half of the window"


def _share_of(pace: Pace, share: float) -> Pace:
    phases = {name: share * seconds for name, seconds in pace.phases.items()}
    return msgspec.structs.replace(pace, samples=round(share * pace.samples), phases=phases)


def broken(**wrong: object) -> Observations:
    seen = looks(1)[0]
    pace = msgspec.structs.replace(seen.workers[0].short, **wrong)
    return msgspec.structs.replace(seen, workers=(msgspec.structs.replace(seen.workers[0], short=pace),))


@pytest.mark.parametrize(
    "wrong",
    [{"samples": 0}, {"phases": {}}, {"phases": {"forward": math.inf}}, {"phases": {"forward": 9.0, "data": -3.0}}],
)
def test_readings_that_cannot_be_true_are_none(wrong: dict[str, object]) -> None:
    assert read_window(broken(**wrong)) is None


def test_a_script_that_never_gets_to_its_loop_or_reads_nothing_is_left_alone() -> None:
    nobody = [msgspec.structs.replace(seen, workers=(), wanted_workers=1) for seen in looks(6)]
    silent = [msgspec.structs.replace(broken(samples=0, phases={}), at=100.0 + WINDOW_S * i) for i in range(6)]
    waits = {"data": WINDOW_S}  # for its first batch
    hungry = [msgspec.structs.replace(broken(samples=0, phases=waits), at=100.0 + WINDOW_S * i) for i in range(6)]
    for seen in (nobody, silent, hungry):
        plans, state = asked(*seen)
        assert not plans and not state.windows_of


def test_a_script_without_tables_gets_no_more_ps() -> None:
    """Workers never wait for a ps: more of them would bring nothing."""
    demands = Demands(1e-3, 1e-6, 0.0)
    done = train(lambda at: demands, (4, 4), noise=0.02, windows=12, optimize="waste")
    assert done.sizes[-1] == (4, 1), path(done)


def test_one_worker_that_tells_far_more_than_the_others_is_not_believed() -> None:
    seen = look(100.0, (3, 1), DEMANDS, BOUNDS)
    liar = msgspec.structs.replace(seen.workers[2], short=Pace(samples=10**9, phases={"forward": 10.0}))
    assert read_window(msgspec.structs.replace(seen, workers=(*seen.workers[:2], liar))) is None


def test_readings_that_the_done_samples_deny_change_nothing_and_are_told_once() -> None:
    lies = [
        look(100.0 + WINDOW_S * i, (1, 1), DEMANDS, BOUNDS, remaining_samples=10**6 - 100 * i)  # (1000/s told, 10 done)
        for i in range(8)
    ]
    plans, state = asked(*lies)
    assert len(plans) == 1 and not plans[0].actions and not state.windows_of
    assert "1,000 samples/s, but 10 are done" in plans[0].decision.reason


def test_a_model_that_fits_nothing_says_so_and_does_nothing() -> None:
    """More workers and ps are much slower than one: no law of the model says that."""
    state = AutoState()
    plans: list[Plan] = []
    rates = {(1, 1): 1.0, (2, 2): 0.1, (4, 4): 3.0, (8, 4): 0.02}
    at = 100.0
    for size, factor in rates.items():
        for _ in range(3):
            at += WINDOW_S
            plan, state = auto(look(at, size, DEMANDS, (8, 4), factor), state)
            plans += [plan] if plan is not None else []
    assert "no model of speed fits this job" in plans[-1].decision.reason and not plans[-1].actions
    assert sum("no model" in plan.decision.reason for plan in plans) == 1, "said once"


def test_a_reading_that_no_model_fits_is_forgotten_after_a_minute_once() -> None:
    """The first window was of a machine that was busy with something else: twice the size is five times as fast."""
    state, plans, at = AutoState(), [], 100.0
    for size, factor, windows in (((1, 1), 0.2, 2), ((2, 2), 1.0, 9)):
        for _ in range(windows):
            at += WINDOW_S
            plan, state = auto(look(at, size, DEMANDS, BOUNDS, factor), state)
            plans += [plan] if plan is not None else []
    words = [plan.decision.reason for plan in plans]
    assert "no model of speed fits this job: the best misses" in words[1]
    assert "other sizes than 2 workers and 2 ps is forgotten" in words[2] and plans[3].actions
    assert state.anew and set(state.windows_of) == {(2, 2)}


def test_what_a_young_process_did_before_its_loop_is_no_reading() -> None:
    for since, counts in ((85.0, False), (0.0, True)):
        found = []
        for seen in looks(2, since=since):
            slower = {name: 0.5 * seconds for name, seconds in seen.workers[0].short.phases.items()}
            pace = msgspec.structs.replace(seen.workers[0].short, phases={**slower, "outside": 0.5 * WINDOW_S})
            worker = msgspec.structs.replace(seen.workers[0], short=pace)
            found.append(msgspec.structs.replace(seen, workers=(worker,)))
        assert bool(asked(*found)[0]) is counts


def test_a_model_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="rate above 0"):
        SpeedModel({(1, 1): SizeSeen(())})


def test_its_uncertainty_holds_the_truth_and_shrinks() -> None:
    demands = Demands(1e-3, 1e-5, 3e-4)
    widths = []
    seen = {}
    for size in ((1, 1), (2, 2), (4, 2), (8, 4)):
        read = read_window(look(100.0, size, demands, (16, 8)))
        assert read is not None
        seen[size] = SizeSeen((read.rate,) * 3, read.data, read.ps, read.own_s)
        speed = SpeedModel(seen).speed(16, 8)
        assert speed.low * 0.9 <= demands.rate(16, 8) <= speed.high * 1.1
        widths.append(speed.high / speed.low)
    assert widths[-1] < widths[0]


def test_bounds_hold_also_where_a_role_is_beyond_them() -> None:
    seen = look(100.0, (6, 3), DEMANDS, (4, 2), min_workers=2, min_ps=2)
    found = candidates(seen, (6, 3), 4)
    assert {w for w, _ in found} == {3, 4, 5, 6} and {p for _, p in found} == {2, 3}
    assert {p for _, p in candidates(look(100.0, (2, 0), DEMANDS, (4, 0)), (2, 0), 4)} == {0}


def test_what_it_asks_for_is_taken() -> None:
    plan = asked(*looks(2))[0][0]
    assert refuse(as_plan(plan), looks(1)[0]) == ""
    alone = look(100.0, (2, 0), DEMANDS, (4, 0))
    why = Plan(actions=(Scale(workers=2, ps=2),), decision=plan.decision)
    assert refuse(why, alone) == "SCALE: 2 ps: this job has none"
    assert "must be from 0" in refuse(Plan(actions=(Scale(workers=2, ps=-1),), decision=plan.decision), looks(1)[0])


# ---------------------------------------------------------------- with another policy


def test_policies_are_composed_and_the_first_plan_counts() -> None:
    told: list[object] = []

    def other(seen: Observations, state: int | None) -> tuple[Plan | None, int]:
        told.append(state)
        return Plan(actions=(Scale(workers=1),), decision=asked(*looks(2))[0][0].decision), (state or 0) + 1

    both = composed([auto, other])
    plan, state = both(looks(1)[0], None)
    assert plan is not None and plan.actions == (Scale(workers=1),), "auto has no plan yet"
    plan, state = both(looks(2)[1], state)
    assert plan is not None and plan.actions != (Scale(workers=1),), "auto has one now"
    both(looks(3)[2], state)
    assert told == [None, 1, 1], "its plan did not count, so it is asked as before"
    assert composed([auto]) is auto and SHIPPED["auto"] is auto
