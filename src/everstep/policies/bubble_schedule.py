"""Cuts copies of a stage's state into chunks that fit its idle spans: pure.

The scheduler is ours, after Gemini's division. There are two phases. A *snapshot* copies the state of one step; it has
to end before the next step changes the state. So all of it is in the spans of one iteration, and what does not fit
there stalls. *Persisting* works on a snapshot that is whole (to a neighbour, to storage); it goes on in later
iterations, and never stalls.

A chunk begins and ends inside of one span. Of a span only a part is used: its length may vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from everstep.policies.idle_spans import IdleSpan, StageIdle


class CopyPhase(Enum):
    """Is when a copy may happen."""

    SNAPSHOT = "snapshot"  # between two optimizer steps
    PERSIST = "persist"  # once there is a snapshot, at any time


class CopyTask(NamedTuple):
    """Is something to copy. ``priority``: higher ones come first, within their phase. ``start_s``: what beginning a
    chunk costs, besides its bytes."""

    name: str
    phase: CopyPhase
    size_bytes: int
    bytes_per_s: float
    priority: int = 0
    start_s: float = 0.0

    def cost_s(self, chunk_bytes: int) -> float:
        return self.start_s + chunk_bytes / self.bytes_per_s


class SpanUse(NamedTuple):
    """Says how spans are used. ``share``: of a span's length; ``deviations``: so many standard deviations are left out;
    ``chunk_bytes``, ``least_bytes``: of a chunk, at most and at least; ``persist_iterations``: a plan looks so far."""

    share: float = 0.8
    deviations: float = 2.0
    chunk_bytes: int = 4 << 20
    least_bytes: int = 64 << 10
    persist_iterations: int = 1000

    def budget_s(self, span: IdleSpan) -> float:
        """Return the time of ``span`` that may be used."""
        return max(0.0, self.share * span.length_s - self.deviations * span.spread_s)


class CopyChunk(NamedTuple):
    """Is bytes ``[begin, end)`` of a task, copied in span ``span`` of iteration ``iteration`` (0: the one behind the
    step that the snapshot is of). ``span`` -1: behind all spans, before the next step: it stalls."""

    task: str
    begin: int
    end: int
    iteration: int
    span: int


class SnapshotFit(Enum):
    """Says how a plan fits the spans."""

    WHOLE = "whole"  # the snapshot is inside of spans
    STALLS = "stalls"  # a rest of the snapshot makes the next step wait
    NO_SPANS = "no_spans"  # nothing of it is inside of spans


class CopyPlan(NamedTuple):
    """Says which bytes are copied when. ``stall_s``: what the snapshot makes a step wait; ``persisted_after``:
    iterations until all tasks of that phase are done; 0: there are none, -1: not within
    ``SpanUse.persist_iterations``."""

    fit: SnapshotFit
    chunks: tuple[CopyChunk, ...]
    stall_s: float
    persisted_after: int

    @property
    def snapshot_iterations(self) -> tuple[CopyChunk, ...]:
        """Return the chunks of the iteration that has the snapshot."""
        return tuple(chunk for chunk in self.chunks if not chunk.iteration)


class _Budgets:
    """Holds what is left of an iteration's spans."""

    def __init__(self, spans: Sequence[IdleSpan], use: SpanUse) -> None:
        self.left = [use.budget_s(span) for span in spans]
        self._use = use

    def fill(self, task: CopyTask, begin: int, iteration: int, first: int) -> tuple[list[CopyChunk], int, int]:
        """Return chunks of ``task`` from byte ``begin`` on, in spans from ``first`` on; the byte that they end at;
        and the span of the last one."""
        out: list[CopyChunk] = []
        last = first
        for number in range(first, len(self.left)):
            while begin < task.size_bytes:
                room = int((self.left[number] - task.start_s) * task.bytes_per_s)
                size = min(self._use.chunk_bytes, room, task.size_bytes - begin)
                if size < min(self._use.least_bytes, task.size_bytes - begin) or size <= 0:
                    break
                out.append(CopyChunk(task.name, begin, begin + size, iteration, number))
                self.left[number] = max(0.0, self.left[number] - task.cost_s(size))
                begin, last = begin + size, number
        return out, begin, last


def plan_copies(
    spans: Sequence[IdleSpan], tasks: Sequence[CopyTask], use: SpanUse = SpanUse(), every: int = 1
) -> CopyPlan:
    """Return when to copy what. ``spans``: of an iteration, in order; ``every``: a snapshot is taken in one of so many
    iterations, so the others have all of their spans for what is to be persisted."""
    first = _Budgets(spans, use)
    chunks: list[CopyChunk] = []
    stall_s, whole_at = 0.0, 0
    for task in _ordered(tasks, CopyPhase.SNAPSHOT):
        made, end, last = first.fill(task, 0, 0, 0)
        chunks += made
        whole_at = max(whole_at, last)
        while end < task.size_bytes:
            size = min(use.chunk_bytes, task.size_bytes - end)
            chunks.append(CopyChunk(task.name, end, end + size, 0, -1))
            stall_s += task.cost_s(size)
            end += size
    inside = any(chunk.span >= 0 for chunk in chunks)
    fit = SnapshotFit.WHOLE if stall_s <= 0.0 else SnapshotFit.STALLS if inside else SnapshotFit.NO_SPANS
    begin = len(spans) if stall_s > 0.0 else whole_at
    kept, after = _persist(spans, tasks, use, every, first, begin)
    return CopyPlan(fit, (*chunks, *kept), stall_s, after)


def _persist(
    spans: Sequence[IdleSpan], tasks: Sequence[CopyTask], use: SpanUse, every: int, first: _Budgets, begin: int
) -> tuple[list[CopyChunk], int]:
    """Place what is persisted, from span ``begin`` of the snapshot's iteration on: ``first`` is what is left there."""
    todo = _ordered(tasks, CopyPhase.PERSIST)
    done = dict.fromkeys(todo, 0)
    snapshot = _Budgets(spans, use)
    for task in _ordered(tasks, CopyPhase.SNAPSHOT):
        snapshot.fill(task, 0, 0, 0)
    chunks: list[CopyChunk] = []
    iteration = 0
    while todo:
        if iteration > use.persist_iterations:
            return chunks, -1
        budgets = first
        if iteration:
            budgets = _Budgets(spans, use)
            if not iteration % max(1, every):
                budgets.left = list(snapshot.left)
        for task in todo:
            made, done[task], _ = budgets.fill(task, done[task], iteration, 0 if iteration else begin)
            chunks += made
        todo = [task for task in todo if done[task] < task.size_bytes]
        iteration += 1
    return chunks, iteration


def _ordered(tasks: Sequence[CopyTask], phase: CopyPhase) -> list[CopyTask]:
    return sorted((task for task in tasks if task.phase is phase and task.size_bytes > 0), key=lambda t: -t.priority)


def both_ends(mine: Sequence[IdleSpan], theirs: Sequence[IdleSpan]) -> list[IdleSpan]:
    """Return the spans in which two stages are idle at once: a copy to a neighbour costs it, too."""
    out = []
    for one in mine:
        for other in theirs:
            begin = max(one.offset_s, other.offset_s)
            end = min(one.offset_s + one.length_s, other.offset_s + other.length_s)
            if end > begin:
                out.append(IdleSpan(begin, end - begin, math.hypot(one.spread_s, other.spread_s)))
    return sorted(out)


def snapshot_interval(
    stall_s: float, iteration_s: float, bound: float = 0.01, mean_time_to_failure_s: float = math.inf
) -> int:
    """Return in which of so many iterations a snapshot is taken. As often as the bound allows, where nobody knows how
    often stages are lost (``bound``: the share of time that stalls may cost); else as often as pays (Young), but no
    more often."""
    if stall_s <= 0.0 or iteration_s <= 0.0:
        return 1
    least = math.ceil(stall_s / (bound * iteration_s) - 1e-9)
    if math.isinf(mean_time_to_failure_s):
        return max(1, least)
    return max(1, least, round(math.sqrt(2.0 * stall_s * mean_time_to_failure_s) / iteration_s))


def next_interval(interval: int, measured_overhead: float, bound: float = 0.01) -> int:
    """Return the interval to go on with: two iterations more where the measured overhead is above the bound (as
    CheckFreq does), one less where it is below half of it."""
    if measured_overhead > bound:
        return interval + 2
    return max(1, interval - 1) if measured_overhead < bound / 2 else interval


class StageFit(NamedTuple):
    """Says what a copy of a stage's state in its idle spans would cost. ``inside_bytes``: of it in spans of one
    iteration; ``interval``: iterations between two copies, so that they cost no more than the bound."""

    plan: CopyPlan
    inside_bytes: int
    interval: int


def stage_fit(stage: StageIdle, window_s: float, bound: float = 0.01, use: SpanUse = SpanUse()) -> StageFit | None:
    """Return how a copy of a stage's state into its own memory fits what was measured. None: nobody knows how large it
    is, or how fast it is copied."""
    if not stage.state_bytes or stage.copy_bytes_per_s <= 0:
        return None
    task = CopyTask("state", CopyPhase.SNAPSHOT, stage.state_bytes, stage.copy_bytes_per_s)
    plan = plan_copies(stage.spans, [task], use)
    inside = sum(chunk.end - chunk.begin for chunk in plan.chunks if chunk.span >= 0)
    return StageFit(plan, inside, snapshot_interval(plan.stall_s, window_s, bound))


def still_fits(plan: CopyPlan, spans: Sequence[IdleSpan], tasks: Sequence[CopyTask], use: SpanUse = SpanUse()) -> bool:
    """Return whether all chunks are inside of what may be used of ``spans`` as they are now: else plan anew."""
    costs: dict[tuple[int, int], float] = {}
    by_name = {task.name: task for task in tasks}
    for chunk in plan.chunks:
        if chunk.span < 0:
            continue
        if chunk.span >= len(spans):
            return False
        place = chunk.iteration, chunk.span
        costs[place] = costs.get(place, 0.0) + by_name[chunk.task].cost_s(chunk.end - chunk.begin)
    return all(cost <= use.budget_s(spans[span]) * (1 + 1e-9) + 1e-12 for (_, span), cost in costs.items())
