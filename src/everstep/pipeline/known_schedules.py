"""Knows the schedules of ``torch.distributed.pipelining``: which there are, where parts of the model live in them, and
what they ask of the number of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch.distributed import pipelining

from everstep.errors import ScriptError


class ScheduleKind(NamedTuple):
    """Says what a class of schedules needs. ``several``: a process has several parts of the model; ``folded``: two, of
    which the second ones go back from the last process to the first; ``full``: at least a microbatch for each
    process; ``rounds``: microbatches divide into rounds of about as many as there are processes."""

    several: bool = False
    folded: bool = False
    full: bool = False
    rounds: bool = False


KINDS: Final[dict[type[Any], ScheduleKind]] = {
    pipelining.ScheduleGPipe: ScheduleKind(),
    pipelining.Schedule1F1B: ScheduleKind(full=True),
    pipelining.ScheduleInterleaved1F1B: ScheduleKind(several=True, rounds=True),
    pipelining.ScheduleLoopedBFS: ScheduleKind(several=True),
    pipelining.ScheduleInterleavedZeroBubble: ScheduleKind(several=True, rounds=True),
    pipelining.ScheduleZBVZeroBubble: ScheduleKind(several=True, folded=True),
    pipelining.ScheduleDualPipeV: ScheduleKind(several=True, folded=True),
}
_PARTS: Final = 2  # of each process, where a schedule has several and nobody says how many


def kind_of(schedule: Any) -> ScheduleKind:
    """Return what is known of a class. Raises ScriptError: it is another one."""
    found = KINDS.get(schedule) if isinstance(schedule, type) else None
    if found is None:
        name = schedule.__name__ if isinstance(schedule, type) else repr(schedule)
        known = ", ".join(one.__name__ for one in KINDS)
        raise ScriptError(f"job.pipeline(schedule={name}): not a schedule that everstep knows; there are {known}")
    return found


def parts_wanted(schedule: Any, stages: int) -> int:
    """Return into how many parts a model is cut where the script does not say."""
    return stages * (_PARTS if kind_of(schedule).several else 1)


def check_schedule(schedule: Any, stages: int, parts: int, microbatches: int) -> None:
    """Raises ScriptError where ``parts`` of a model cannot run on ``stages`` processes with this schedule."""
    kind, name = kind_of(schedule), schedule.__name__
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ScriptError(f"job.pipeline(microbatches={microbatches!r}): must be a whole number from 1")
    if kind.folded and parts != 2 * stages:
        raise ScriptError(
            f"job.pipeline: {name} on {stages} stages (--stages) takes a model in {2 * stages} parts, two for each, "
            f"and this one has {parts}"
        )
    if kind.several and parts % stages:
        raise ScriptError(
            f"job.pipeline: {name} on {stages} stages (--stages) takes a model in a multiple of {stages} parts, and "
            f"this one has {parts}"
        )
    if not kind.several and parts != stages:
        raise ScriptError(
            f"job.pipeline: {name} on {stages} stages (--stages) takes a model in as many parts, and this one has "
            f"{parts}: run with --stages {parts}, or cut the model otherwise"
        )
    if kind.full and microbatches < stages:
        raise ScriptError(
            f"job.pipeline(microbatches={microbatches}): {name} needs at least as many as there are stages ({stages})"
        )
    rounds = max(1, microbatches // stages)
    if kind.rounds and microbatches % rounds:
        raise ScriptError(
            f"job.pipeline(microbatches={microbatches}): {name} on {stages} stages runs them in {rounds} rounds, and "
            f"they do not divide: take {microbatches - microbatches % rounds} or "
            f"{microbatches + rounds - microbatches % rounds}"
        )


def homes(schedule: Any, stages: int, parts: int) -> list[int]:
    """Return for each part the process that has it."""
    if kind_of(schedule).folded:
        return [part if part < stages else 2 * stages - 1 - part for part in range(parts)]
    return [part % stages for part in range(parts)]


def build_schedule(schedule: Any, own: Sequence[Any], microbatches: int, loss: Any) -> Any:
    """Return torch's schedule of this process. ``own``: its PipelineStages. Raises ScriptError, in torch's words."""
    given = list(own) if kind_of(schedule).several else own[0]
    try:
        return schedule(given, microbatches, loss_fn=loss, scale_grads=False)
    except ValueError as error:
        raise ScriptError(f"job.pipeline: {schedule.__name__}: {' '.join(str(error).split())}") from None
