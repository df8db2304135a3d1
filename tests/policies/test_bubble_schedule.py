"""Copies of a stage's state in its idle spans: what every plan keeps, whatever spans and sizes are."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from everstep.policies.bubble_schedule import (
    CopyPhase,
    CopyPlan,
    CopyTask,
    SnapshotFit,
    SpanUse,
    both_ends,
    next_interval,
    plan_copies,
    snapshot_interval,
    still_fits,
)
from everstep.policies.idle_spans import IdleSpan

USE = SpanUse(share=0.8, deviations=2.0, chunk_bytes=1000, least_bytes=50, persist_iterations=60)
WHOLE = SpanUse(share=1.0, deviations=0.0, chunk_bytes=1000, least_bytes=1)


def spans_of(lengths: list[tuple[float, float, float]]) -> list[IdleSpan]:
    out, at = [], 0.0
    for gap, length, spread in lengths:
        out.append(IdleSpan(at + gap, length, spread))
        at += gap + length
    return out


SPANS = some.lists(
    some.tuples(some.floats(0.001, 1.0), some.floats(0.0, 2.0), some.floats(0.0, 0.3)), min_size=0, max_size=8
).map(spans_of)
TASKS = some.lists(
    some.tuples(
        some.sampled_from(CopyPhase),
        some.integers(0, 20_000),
        some.floats(100.0, 1e5),
        some.integers(0, 3),
        some.sampled_from([0.0, 0.01]),
    ),
    max_size=5,
).map(lambda facts: [CopyTask(f"task{n}", *fact) for n, fact in enumerate(facts)])
EVERY = some.integers(1, 4)


def ranges(plan: CopyPlan, task: CopyTask) -> list[tuple[int, int]]:
    return sorted((chunk.begin, chunk.end) for chunk in plan.chunks if chunk.task == task.name)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SPANS, TASKS, EVERY)
def test_what_every_plan_keeps(spans: list[IdleSpan], tasks: list[CopyTask], every: int) -> None:
    plan = plan_copies(spans, tasks, USE, every)
    by_name = {task.name: task for task in tasks}
    costs: dict[tuple[int, int], float] = defaultdict(float)
    whole_at = max([(c.span if c.span >= 0 else len(spans)) for c in plan.chunks if _snaps(by_name[c.task])], default=0)
    for chunk in plan.chunks:
        task = by_name[chunk.task]
        assert 0 < chunk.end - chunk.begin <= USE.chunk_bytes
        if chunk.span >= 0:
            costs[chunk.iteration, chunk.span] += task.cost_s(chunk.end - chunk.begin)
        if _snaps(task):
            assert chunk.iteration == 0  # no snapshot is of two steps
        else:
            assert chunk.span >= 0  # what is persisted never stalls,
            assert chunk.iteration or chunk.span >= whole_at  # and is of a snapshot that is whole
    for (iteration, span), cost in costs.items():
        if iteration and not iteration % every:  # the next snapshot is there, too
            cost += sum(costs_of_snapshot(plan, by_name, span))
        assert cost <= USE.budget_s(spans[span]) + 1e-9
    for task in tasks:
        found = ranges(plan, task)
        if _snaps(task) or plan.persisted_after >= 0:
            ends = [0, *(end for _, end in found)]
            assert [begin for begin, _ in found] == ends[:-1] and ends[-1] == task.size_bytes  # each byte once
    assert (plan.stall_s > 0) == (plan.fit is not SnapshotFit.WHOLE)
    assert still_fits(plan, spans, tasks, USE)


def _snaps(task: CopyTask) -> bool:
    return task.phase is CopyPhase.SNAPSHOT


def costs_of_snapshot(plan: CopyPlan, by_name: dict[str, CopyTask], span: int) -> list[float]:
    return [
        by_name[c.task].cost_s(c.end - c.begin)
        for c in plan.snapshot_iterations
        if c.span == span and _snaps(by_name[c.task])
    ]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(SPANS, TASKS, some.floats(0.1, 3.0))
def test_one_more_span_stalls_no_longer(spans: list[IdleSpan], tasks: list[CopyTask], length_s: float) -> None:
    end = spans[-1].offset_s + spans[-1].length_s if spans else 0.0
    longer = [*spans, IdleSpan(end + 1.0, length_s, 0.0)]
    # A rest below a whole chunk may cost one more beginning.
    slack = sum(task.start_s for task in tasks)
    assert plan_copies(longer, tasks, USE).stall_s <= plan_copies(spans, tasks, USE).stall_s + slack + 1e-9


def snapshot(size: int, rate: float = 1000.0, priority: int = 0) -> CopyTask:
    return CopyTask(f"snapshot{priority}", CopyPhase.SNAPSHOT, size, rate, priority)


def persist(size: int, rate: float = 1000.0, priority: int = 0) -> CopyTask:
    return CopyTask(f"persist{priority}", CopyPhase.PERSIST, size, rate, priority)


def test_a_snapshot_that_fits_and_a_rest_that_stalls() -> None:
    spans = [IdleSpan(1.0, 1.5, 0.0), IdleSpan(5.0, 1.0, 0.0)]
    whole = plan_copies(spans, [snapshot(2500)], WHOLE)
    assert (whole.fit, whole.stall_s, [c.span for c in whole.chunks]) == (SnapshotFit.WHOLE, 0.0, [0, 0, 1])
    rest = plan_copies(spans, [snapshot(3000)], WHOLE)
    assert (rest.fit, rest.chunks[-1].span) == (SnapshotFit.STALLS, -1)
    assert rest.stall_s == pytest.approx(0.5)


def test_no_bubble_no_pretence() -> None:
    plan = plan_copies([], [snapshot(3000), persist(3000)], WHOLE)
    assert (plan.fit, plan.persisted_after) == (SnapshotFit.NO_SPANS, -1)
    assert plan.stall_s == pytest.approx(3.0)
    short = plan_copies([IdleSpan(0.0, 0.04, 0.0)] * 50, [snapshot(3000)], WHOLE._replace(least_bytes=50))
    assert short.fit is SnapshotFit.NO_SPANS  # spans below the least chunk are of no use


def test_what_is_persisted_goes_on_in_later_iterations() -> None:
    spans = [IdleSpan(0.0, 1.0, 0.0), IdleSpan(3.0, 1.0, 0.0)]
    each = plan_copies(spans, [snapshot(1000), persist(2500)], WHOLE)
    assert each.persisted_after == 3  # one second of each iteration is left for it
    seldom = plan_copies(spans, [snapshot(1000), persist(2500)], WHOLE, every=5)
    assert seldom.persisted_after == 2
    full = plan_copies(spans, [snapshot(2000), persist(10)], WHOLE._replace(persist_iterations=9))
    assert full.persisted_after == -1  # snapshots take it all


def test_the_higher_priority_comes_first() -> None:
    spans = [IdleSpan(0.0, 1.0, 0.0)]
    tasks = [persist(800, priority=1), persist(800, priority=2), snapshot(100)]
    plan = plan_copies(spans, tasks, WHOLE)
    first = [chunk.iteration for chunk in plan.chunks if chunk.task == "persist2"]
    second = [chunk.iteration for chunk in plan.chunks if chunk.task == "persist1"]
    assert max(first) <= min(second) + 1 and first[0] == 0 and max(second) == 1


def test_spans_that_have_shrunk_are_seen() -> None:
    spans, tasks = [IdleSpan(0.0, 1.0, 0.0)], [snapshot(900)]
    plan = plan_copies(spans, tasks, WHOLE)
    assert still_fits(plan, [IdleSpan(0.0, 0.95, 0.0)], tasks, WHOLE)
    assert not still_fits(plan, [IdleSpan(0.0, 0.85, 0.0)], tasks, WHOLE)
    assert not still_fits(plan, [], tasks, WHOLE)


def test_a_copy_to_a_neighbour_needs_a_span_at_both_ends() -> None:
    mine = [IdleSpan(0.0, 2.0, 0.3), IdleSpan(5.0, 1.0, 0.0)]
    theirs = [IdleSpan(1.0, 3.0, 0.4), IdleSpan(5.5, 3.0, 0.0)]
    assert both_ends(mine, theirs) == [IdleSpan(1.0, 1.0, 0.5), IdleSpan(5.5, 0.5, 0.0)]
    assert both_ends(mine, []) == []


@pytest.mark.parametrize(
    ("stall_s", "iteration_s", "mean_s", "interval"),
    [
        (0.0, 1.0, math.inf, 1),  # it costs nothing: every iteration
        (0.01, 1.0, math.inf, 1),
        (0.05, 1.0, math.inf, 5),
        (0.02, 1.0, 10_000.0, 20),  # Young: sqrt(2 * 0.02 * 10000)
        (0.5, 1.0, 100.0, 50),  # the bound is above it
    ],
)
def test_how_often(stall_s: float, iteration_s: float, mean_s: float, interval: int) -> None:
    found = snapshot_interval(stall_s, iteration_s, 0.01, mean_s)
    assert found == interval
    assert stall_s / (found * iteration_s) <= 0.01 + 1e-12


def test_the_interval_follows_the_measured_overhead() -> None:
    assert [next_interval(4, overhead) for overhead in (0.02, 0.009, 0.001)] == [6, 4, 3]
    assert next_interval(1, 0.0) == 1
