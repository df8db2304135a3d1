"""Works out where the stages of a pipeline are idle, from measured iterations: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median, pstdev
from typing import Final, NamedTuple

from everstep.model.stage_spans import COMPUTE, SpanKind, StageIteration

_WARM: Final = 2  # first iterations of a size: buffers are made, connections begin
_BUBBLES: Final = frozenset({"ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"})


class IdleSpan(NamedTuple):
    """Is a span in which a stage does not compute. ``offset_s``: from the begin of the iteration; ``spread_s``:
    standard deviation of the length."""

    offset_s: float
    length_s: float
    spread_s: float


class StageIdle(NamedTuple):
    """Says how idle a stage is: medians over iterations. ``shares``: the 10th, 50th and 90th percentile.
    ``state_bytes``, ``copy_bytes_per_s``: as the stage said last."""

    stage: int
    compute_s: float
    idle_s: float
    shares: tuple[float, float, float]
    spans: tuple[IdleSpan, ...]
    state_bytes: int = 0
    copy_bytes_per_s: float = 0.0


class PipelineIdle(NamedTuple):
    """Is a pipeline of one worker in one generation of the group, with batches of one size. ``window_s``: from the
    first forward of any stage to the last backward; ``reduce_s``: gradients over the replicas, and the vote."""

    worker: int
    generation: int
    samples: int
    schedule: str
    microbatches: int
    parts: int
    iterations: int
    window_s: float
    reduce_s: float
    stages: tuple[StageIdle, ...]

    @property
    def expected(self) -> float | None:
        return expected_share(self.schedule, len(self.stages), self.parts, self.microbatches)


def expected_share(schedule: str, stages: int, parts: int, microbatches: int) -> float | None:
    """Return the idle share of each stage by the formula, (p-1)/(v*m+p-1). None: the schedule has another one."""
    if schedule not in _BUBBLES:
        return None
    return (stages - 1) / (parts // stages * microbatches + stages - 1)


Iteration = tuple[StageIteration, ...]
"""One iteration of all stages of a worker, by stage."""


def iterations(records: Iterable[StageIteration]) -> list[Iteration]:
    """Return the iterations of which all stages are known, in their order."""
    found: dict[tuple[int, int, int, float], dict[int, StageIteration]] = defaultdict(dict)
    newest: dict[tuple[int, int, int], float] = {}
    for record in sorted(records, key=lambda r: r.began_s):
        place = record.worker, record.generation, record.step
        begun = newest.get(place)
        if begun is None or record.stage in found[(*place, begun)]:  # (a step that was done again)
            begun = newest[place] = record.began_s
        found[(*place, begun)][record.stage] = record
    return [
        tuple(by_stage[stage] for stage in sorted(by_stage))
        for by_stage in found.values()
        if len(by_stage) == next(iter(by_stage.values())).stages
    ]


def window(iteration: Iteration) -> tuple[float, float]:
    """Return when the first computation of any stage begins and the last one ends. (0, 0): there is none."""
    spans = [(r.began_s + s.begin_s, r.began_s + s.end_s) for r in iteration for s in r.spans if s.kind in COMPUTE]
    return (min(b for b, _ in spans), max(e for _, e in spans)) if spans else (0.0, 0.0)


def gaps(record: StageIteration, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """Return offset and length of each gap between computations of a stage, from ``begin_s`` to ``end_s``. There are
    always as many: one more than computations."""
    out, at = [], begin_s
    for span in sorted((s for s in record.spans if s.kind in COMPUTE), key=lambda s: s.begin_s):
        out.append((at - begin_s, max(0.0, record.began_s + span.begin_s - at)))
        at = record.began_s + span.end_s
    return [*out, (at - begin_s, max(0.0, end_s - at))]


def measure(records: Iterable[StageIteration], least_s: float = 1e-4) -> list[PipelineIdle]:
    """Return how idle each worker's pipeline is, by generation and size of batches; the newest last. ``least_s``:
    shorter spans are not listed."""
    groups: dict[tuple[int, int, int], list[Iteration]] = defaultdict(list)
    for iteration in iterations(records):
        first = iteration[0]
        if min(r.seen for r in iteration) >= _WARM:
            groups[first.generation, first.worker, first.samples].append(iteration)
    return [_measured(groups[key], least_s) for key in sorted(groups)]


def _measured(found: Sequence[Iteration], least_s: float) -> PipelineIdle:
    first = found[0][0]
    windows = [window(iteration) for iteration in found]
    reduce_s = [sum(s.length_s for s in i[0].spans if s.kind is SpanKind.REDUCE) for i in found]
    stages = tuple(_stage([iteration[stage] for iteration in found], windows, least_s) for stage in range(first.stages))
    return PipelineIdle(
        first.worker,
        first.generation,
        first.samples,
        first.schedule,
        first.microbatches,
        first.parts,
        len(found),
        median(end - begin for begin, end in windows),
        median(reduce_s),
        stages,
    )


def _stage(records: Sequence[StageIteration], windows: Sequence[tuple[float, float]], least_s: float) -> StageIdle:
    lists = [gaps(record, *window) for record, window in zip(records, windows, strict=True)]
    usual = median(len(one) for one in lists)
    alike = [one for one in lists if len(one) == usual]
    spans = []
    for places in zip(*alike, strict=True):
        lengths = [length for _, length in places]
        if median(lengths) >= least_s:
            spans.append(IdleSpan(median(offset for offset, _ in places), median(lengths), pstdev(lengths)))
    idle = [sum(length for _, length in one) for one in lists]
    total = [end - begin for begin, end in windows]
    shares = sorted(i / t if t > 0 else 0.0 for i, t in zip(idle, total, strict=True))
    compute_s = median(t - i for i, t in zip(idle, total, strict=True))
    last = records[-1]
    facts = last.state_bytes, last.copy_bytes_per_s
    return StageIdle(last.stage, compute_s, median(idle), _percentiles(shares), tuple(spans), *facts)


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    last = len(values) - 1
    return values[round(last * 0.1)], median(values), values[round(last * 0.9)]


def typical(found: Sequence[Iteration]) -> Iteration:
    """Return the iteration whose window is the median one."""
    ordered = sorted(found, key=lambda iteration: window(iteration)[1] - window(iteration)[0])
    return ordered[len(ordered) // 2]


class SpanSampler:
    """Says which iterations are kept: the first ones of each generation and size, and then one in many."""

    def __init__(self, first: int = 20, then_every: int = 50) -> None:
        self._first, self._then_every = first, then_every
        self._generation = -1
        self._seen: dict[int, int] = {}

    def take(self, generation: int, samples: int) -> int:
        """Return how many iterations of this generation and size were before this one. -1: it is not kept."""
        if generation != self._generation:
            self._generation, self._seen = generation, {}
        seen = self._seen.get(samples, 0)
        self._seen[samples] = seen + 1
        return seen if seen < self._first or seen % self._then_every == 0 else -1
