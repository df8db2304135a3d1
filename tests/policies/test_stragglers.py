"""What the policies of stragglers do: transcripts, properties, and nothing where nothing is wrong."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from straggler_jobs import NODES, job, worker

from everstep.brain.policy_control import refuse
from everstep.ids import Incarnation, Slot
from everstep.model.member import Role
from everstep.model.plan import AdjustAccum, AdjustBatch, BackupWorkers, KillRestart, Plan
from everstep.policies.stragglers.exact import Device
from everstep.policies.stragglers.exclusive import by_kind, exclusive
from everstep.policies.stragglers.payoff import restart_gain_s
from everstep.policies.stragglers.policy import SHIPPED
from everstep.policies.stragglers.shared import SharedState, shared
from everstep.policies.stragglers.shares import even, proportional


def batches(plan: Plan | None) -> dict[Slot, int]:
    assert plan is not None and isinstance(plan.actions[0], AdjustBatch), plan
    return plan.actions[0].batch


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 4), st.integers(4, 60)), min_size=1, max_size=9),
    st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_shares_sum_up_within_their_limits(members: list[tuple[float, int, int]], total: int) -> None:
    speeds, least, most = map(list, zip(*members, strict=True))
    if not sum(least) <= total <= sum(most):
        with pytest.raises(ValueError, match=f"{total} samples"):
            proportional(total, speeds, least, most)
        return
    counts = proportional(total, speeds, least, most)
    assert sum(counts) == total
    assert all(low <= n <= high for low, n, high in zip(least, counts, most, strict=True))
    assert proportional(total, speeds, least, most) == counts


@example([10.0, 2.125, 4.25], 13)
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=4), st.integers(4, 14))
@settings(max_examples=60, deadline=None)
def test_no_other_division_has_a_faster_slowest_part(speeds: list[float], total: int) -> None:
    counts = proportional(total, speeds)
    others = product(range(1, total), repeat=len(speeds) - 1)
    every = [(*some, total - sum(some)) for some in others if sum(some) < total]
    best_s = min(max(n / speed for n, speed in zip(one, speeds, strict=True)) for one in every)
    if all(n > 1 for n in counts):  # (who is at the least it may have was set to it before)
        assert max(n / speed for n, speed in zip(counts, speeds, strict=True)) <= best_s * (1 + 1e-9)


def test_shares_are_in_proportion_and_equal_speeds_give_equal_ones() -> None:
    assert sorted(proportional(130, [4, 4, 4, 1])) == [10, 40, 40, 40]
    assert sorted(proportional(10, [2.0, 2.0, 2.0])) == sorted(even(10, 3)) == [3, 3, 4]


@pytest.mark.parametrize(("slowness", "share"), [(2, 0.14), (4, 0.23), (8, 0.28)])
@pytest.mark.parametrize("shares", [[64] * 4, [80, 80, 80, 16], []])
def test_a_restart_pays_below_a_share_of_what_a_healthy_job_would_take_whatever_the_split_is_now(
    slowness: float, share: float, shares: list[int]
) -> None:
    paces = [1.0, 1.0, 1.0, slowness]
    now_s = max(n * p for n, p in zip(shares, paces, strict=True)) / 256 if shares else 1 / (3 + 1 / slowness)
    remaining_s = 1000 * now_s / 0.25  # 1000 s of a healthy job, at today's speed
    assert restart_gain_s(paces, 3, 1.0, shares, (share - 0.01) * 1000, remaining_s) > 0
    assert restart_gain_s(paces, 3, 1.0, shares, (share + 0.01) * 1000, remaining_s) < 0
    assert restart_gain_s(paces, 3, slowness, shares, 0.1, remaining_s) < 0, "the new one would be no faster"
    assert restart_gain_s(paces, 3, 1.0, shares, 1.0, 0.0) < 0, "nobody knows what is left"
    # the speed is that of a step before the split: what is left is known apart from it
    assert restart_gain_s(paces, 3, 1.0, shares, (share - 0.01) * 1000, 3 * remaining_s, 4000) > 0
    assert restart_gain_s(paces, 3, 1.0, shares, (share + 0.01) * 1000, 3 * remaining_s, 4000) < 0


def test_a_slow_worker_gets_less_once_that_would_have_paid() -> None:
    slow = job([0.01, 0.01, 0.01, 0.04], remaining_s=60.0)
    plan, state = shared(slow, None)
    assert plan is None, "nobody knows yet whether the next window, of few, is like this one"
    plan, state = shared(slow, state)
    begun, _ = shared(job([0.01, 0.01, 0.01, 0.04], remaining_s=0.0), None)
    assert batches(begun) == batches(plan), "a job that has just begun"
    assert batches(plan) == {0: 40, 1: 39, 2: 39, 3: 10}
    shares = [batches(plan)[Slot(i)] for i in range(4)]
    assert sum(shares) == 128
    again, state = shared(job([0.01, 0.01, 0.01, 0.04], shares, remaining_s=60.0), state)
    assert again is None, "the same plan again"
    back, state = shared(job([0.01] * 4, shares, remaining_s=60.0), state)
    assert set(batches(back).values()) == {32}, "it is fast again"


def test_spells_as_short_as_a_window_are_left_alone() -> None:
    state: SharedState | None = None
    shares: list[int] | None = None
    for look in range(60):
        paces = [0.01] * 4
        if look % 4 == 0:
            paces[look // 4 % 4] = 0.04
        plan, state = shared(job(paces, shares, at=2.0 * look, places=()), state)
        assert (plan is None) == (look > 1), f"look {look}: {plan} (tried once, and taken back)"
        if plan is not None:
            shares = [batches(plan)[Slot(i)] for i in range(4)]
    assert shares == [32] * 4


def test_a_worker_that_stays_slow_is_restarted_if_there_is_a_place_and_nothing_pends() -> None:
    slow = job([0.01, 0.01, 0.01, 0.04])
    plan, _ = shared(slow, None)
    assert plan is not None and plan.actions == (
        KillRestart(role=Role.WORKER, slot=Slot(3), incarnation=Incarnation(1)),
    )
    assert plan.decision.inputs["slowness"] == 4.0 and plan.decision.inputs["place"] == NODES[0]
    for change in (
        {"pending": 1},
        {"places": ()},
        {"remaining_s": 60.0},
        {"remaining_s": 0.0},
        {"restarts": 8},
        {"restarts": 1, "restarted_at": 50.0},
    ):
        plan, _ = shared(msgspec.structs.replace(slow, **change), None)
        assert plan is None or not any(isinstance(a, KillRestart) for a in plan.actions), change


def test_a_worker_is_restarted_in_its_own_place_once_where_others_are_well() -> None:
    at_home = job([0.01, 0.01, 0.01, 0.04], places=(NODES[1],))
    plan, state = shared(at_home, None)
    assert plan is not None and plan.decision.inputs["place"] == NODES[1] == at_home.workers[3].node
    plan, state = shared(at_home, state)
    assert plan is not None and isinstance(plan.actions[0], KillRestart), "it is still there: the plan was dropped"
    again = msgspec.structs.replace(at_home.workers[3], incarnation=Incarnation(2))
    at_home = msgspec.structs.replace(at_home, workers=(*at_home.workers[:3], again))
    _, state = shared(at_home, state)
    plan, _ = shared(at_home, state)
    assert plan is not None and isinstance(plan.actions[0], AdjustBatch), "it did not help"


def test_a_worker_that_was_slow_for_a_moment_is_not_restarted() -> None:
    seen = job([0.01] * 4)
    short = worker(3, 0.04, 32, (0.01,) * 7 + (0.04,) * 3)
    seen = msgspec.structs.replace(seen, workers=(*seen.workers[:3], short))
    plan, _ = shared(seen, None)
    assert batches(plan)[Slot(3)] == 10
    plan, _ = shared(seen, SharedState(score=0.0))
    assert plan is None


def test_hardware_of_two_kinds_is_nobodys_fault() -> None:
    old = job([0.01, 0.01, 0.01, 0.04])
    seen = msgspec.structs.replace(old, workers=(*old.workers[:3], worker(3, 0.04, 32, hardware="old")))
    plan, _ = shared(seen, None)
    assert batches(plan)[Slot(3)] == 10, "its speed counts, and it is not restarted"


@given(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4), st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_calm_workers_are_left_alone(factors: list[float], looks: int) -> None:
    state: SharedState | None = None
    for look in range(looks):
        paces = [0.01 * f for f in factors[look % 4 :] + factors[: look % 4]]
        plan, state = shared(job(paces, at=2.0 * look), state)
        assert plan is None


def test_the_exact_split_is_asked_for_once() -> None:
    seen = job([0.01, 0.01, 0.02, 0.04], hardware="") if False else job([0.01, 0.01, 0.02, 0.04])
    plan, state = exclusive(seen, None)
    assert plan is not None
    batch, accum = plan.actions
    assert isinstance(batch, AdjustBatch) and isinstance(accum, AdjustAccum)
    assert sum(batch.batch.values()) == 128 and batch.batch[Slot(0)] > batch.batch[Slot(2)] > batch.batch[Slot(3)]
    assert all(-(-batch.batch[s] // accum.accum[s]) <= 32 for s in batch.batch), "no more than the loader's batch"
    workers = tuple(
        msgspec.structs.replace(
            w, share=batch.batch[w.slot], accum=accum.accum[w.slot], batch=batch.batch[w.slot] // accum.accum[w.slot]
        )
        for w in seen.workers
    )
    again, state = exclusive(msgspec.structs.replace(seen, workers=workers), state)
    assert again is None


def test_machines_of_one_kind_have_equal_parts_and_noise_is_not_followed() -> None:
    """The first step, one of 1.25 times, is cold; each reading after that is off by 1 % or so."""
    rng = random.Random(3)

    def look(paces_s: list[float], shares: list[int], state: Any) -> tuple[Plan | None, Any]:
        seen = job(paces_s, shares, loader_batch=64)
        workers = tuple(msgspec.structs.replace(w, memory_batch=128) for w in seen.workers)
        return exclusive(msgspec.structs.replace(seen, workers=workers), state)

    plan, state = look([0.0021, 0.0025, 0.0022, 0.016], [64] * 4, None)
    shares = list(batches(plan).values())
    assert max(shares[:3]) - min(shares[:3]) <= 1
    plans = 0
    for _ in range(200):
        plan, state = look([p * (1 + rng.gauss(0, 0.01)) for p in (0.002, 0.002, 0.002, 0.016)], shares, state)
        if plan is not None:
            plans += 1
            shares = list(batches(plan).values())
    assert shares == [82, 82, 82, 10]
    assert plans <= 5


def test_kinds_are_told_more_finely_by_more_readings() -> None:
    devices = [Device(p, 0.0, 64) for p in (0.0100, 0.0101, 0.0110, 0.0200)]
    assert [d.per_sample_s for d in by_kind(devices, 1)] == [0.0101, 0.0101, 0.0101, 0.02]
    assert [d.per_sample_s for d in by_kind(devices, 3)] == [0.0101, 0.0101, 0.0110, 0.02]
    assert by_kind(devices[:2], 1)[0] == devices[1] and by_kind([], 1) == ()
    roomy = [devices[0], msgspec.structs.replace(devices[0], memory_batch=128)]
    assert by_kind(roomy, 1) == tuple(roomy), "what fits is not a matter of noise"


def test_the_exact_split_is_as_large_as_each_worker_says_that_it_can_hold() -> None:
    seen = job([0.01] * 3 + [0.001])
    fits = (0, 8, 0, 128)
    workers = tuple(msgspec.structs.replace(w, memory_batch=n) for w, n in zip(seen.workers, fits, strict=True))
    seen = msgspec.structs.replace(seen, workers=workers)
    plan, _ = exclusive(seen, None)
    assert plan is not None and refuse(plan, seen) == ""
    batch, accum = plan.actions
    assert isinstance(batch, AdjustBatch) and isinstance(accum, AdjustAccum)
    assert batch.batch[Slot(3)] > 32 and accum.accum[Slot(3)] == 1, "larger than the loader's batch, in one pass"
    assert -(-batch.batch[Slot(1)] // accum.accum[Slot(1)]) <= 8 < batch.batch[Slot(1)], "smaller than it, in several"
    less = msgspec.structs.replace(workers[3], memory_batch=64)
    assert "its memory holds 64" in refuse(plan, msgspec.structs.replace(seen, workers=(*workers[:3], less)))


def test_the_exact_split_is_one_of_few_passes_though_nobody_knows_what_a_pass_costs() -> None:
    seen = job([0.01] * 3 + [0.04], shares=[64] * 4)
    plan, _ = exclusive(msgspec.structs.replace(seen, loader_batch=64), None)
    assert plan is not None
    batch, accum = plan.actions
    assert isinstance(batch, AdjustBatch) and isinstance(accum, AdjustAccum)
    assert sorted(accum.accum.values()) == [1, 2, 2, 2], "a pass of one sample is not free"
    assert max(batch.batch.values()) <= 80 and batch.batch[Slot(3)] <= 20


@pytest.mark.parametrize("name", ["shared", "exclusive"])
def test_a_worker_that_hiccups_while_another_is_slow_keeps_its_share(name: str) -> None:
    state, shares = None, [32] * 4
    for look in range(60):
        paces = [0.01, 0.01, 0.01, 0.04]
        if look >= 20 and look % 4 == 0:
            paces[look // 4 % 3] = 0.025
        plan, state = SHIPPED[name](job(paces, shares, at=2.0 * look, places=()), state)
        if plan is not None and look < 44:
            shares = [batches(plan)[Slot(i)] for i in range(4)]
        assert plan is None or look < 44, f"look {look}: {plan}"


@pytest.mark.parametrize("name", ["shared", "exclusive"])
def test_a_split_is_not_praised_by_the_step_that_it_came_too_late_for(name: str) -> None:
    def seen(slow_s: float, under_way: bool) -> Any:
        first, *others = job([slow_s, 0.01, 0.01, 0.01]).workers
        pace = msgspec.structs.replace(first.short, at_least_s=slow_s if under_way else 0.0)
        return msgspec.structs.replace(
            job([0.01] * 4, places=()), workers=(msgspec.structs.replace(first, short=pace), *others)
        )

    plan, state = SHIPPED[name](seen(0.03, True), None)
    assert plan is not None and state.score > 0
    longer, later = SHIPPED[name](seen(0.06, True), state)
    assert batches(longer)[Slot(0)] < batches(plan)[Slot(0)] and 0 < later.score <= state.score
    _, over = SHIPPED[name](seen(0.07, False), later)
    assert over.score > later.score


def test_backup_follows_how_many_are_slow() -> None:
    plan, state = SHIPPED["backup"](job([0.01] * 7 + [0.05]), None)
    assert plan is not None and plan.actions == (BackupWorkers(backup=1),)
    assert SHIPPED["backup"](job([0.01] * 7 + [0.05]), state)[0] is None
    plan, _ = SHIPPED["backup"](job([0.01] * 8), state)
    assert plan is not None and plan.actions == (BackupWorkers(backup=0),)


@pytest.mark.parametrize("name", sorted(SHIPPED))
@pytest.mark.parametrize("paces", [[], [0.0, 0.0], [0.01, 0.0, 0.01], [0.01]])
def test_without_readings_nothing_is_done(name: str, paces: list[float]) -> None:
    plan, state = SHIPPED[name](job(paces), None)
    assert plan is None
    assert SHIPPED[name](job(paces), state)[0] is None
