"""Computes pipelines in which nothing but forward and backward costs time: where their stages are idle. Pure."""

from __future__ import annotations

from enum import Enum
from itertools import pairwise

from everstep.model.stage_spans import SpanKind
from everstep.policies.idle_spans import IdleSpan

Order = list[tuple[SpanKind, int]]
Computed = tuple[SpanKind, int, float, float]
"""What is computed, of which microbatch, from when to when."""


class IdealSchedule(Enum):
    """Is a schedule with one part for each stage."""

    GPIPE = "ScheduleGPipe"
    ONE_F_ONE_B = "Schedule1F1B"


def order_of(schedule: IdealSchedule, stage: int, stages: int, microbatches: int) -> Order:
    """Return what a stage computes, one after the other."""
    ahead = microbatches if schedule is IdealSchedule.GPIPE else min(microbatches, stages - stage)
    order: Order = [(SpanKind.FORWARD, chunk) for chunk in range(ahead)]
    for chunk in range(microbatches):
        order.append((SpanKind.BACKWARD, chunk))
        if ahead + chunk < microbatches:
            order.append((SpanKind.FORWARD, ahead + chunk))
    return order


def timeline(
    schedule: IdealSchedule, stages: int, microbatches: int, forward_s: float, backward_s: float
) -> list[list[Computed]]:
    """Return by stage what is computed when, as early as it can be."""
    todo = [order_of(schedule, stage, stages, microbatches)[::-1] for stage in range(stages)]
    ends: dict[tuple[SpanKind, int, int], float] = {}
    out: list[list[Computed]] = [[] for _ in range(stages)]
    while any(todo):
        for stage, left in enumerate(todo):
            free = out[stage][-1][3] if out[stage] else 0.0
            while left:
                kind, chunk = left[-1]
                ready = _ready(ends, kind, stage, stages, chunk)
                if ready is None:
                    break
                begin = max(free, ready)
                free = ends[kind, stage, chunk] = begin + (forward_s if kind is SpanKind.FORWARD else backward_s)
                out[stage].append((kind, chunk, begin, free))
                left.pop()
    return out


def _ready(
    ends: dict[tuple[SpanKind, int, int], float], kind: SpanKind, stage: int, stages: int, chunk: int
) -> float | None:
    """Return from when on it can be computed; None: nobody knows yet."""
    if kind is SpanKind.FORWARD:
        return ends.get((kind, stage - 1, chunk)) if stage else 0.0
    return ends.get((kind, stage + 1, chunk) if stage + 1 < stages else (SpanKind.FORWARD, stage, chunk))


def ideal_spans(
    schedule: IdealSchedule, stages: int, microbatches: int, forward_s: float, backward_s: float
) -> list[list[IdleSpan]]:
    """Return by stage where it is idle, from the first forward of any stage to the last backward."""
    lines = timeline(schedule, stages, microbatches, forward_s, backward_s)
    end_s = max(line[-1][3] for line in lines)
    found = []
    for line in lines:
        bounds = [(0.0, 0.0), *((begin, end) for _, _, begin, end in line), (end_s, end_s)]
        idle = ((a_end, b_begin - a_end) for (_, a_end), (b_begin, _) in pairwise(bounds))
        found.append([IdleSpan(at, length, 0.0) for at, length in idle if length > 1e-9])
    return found
