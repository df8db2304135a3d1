"""Holds what is remembered of a job, and finds the jobs that an estimate can use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from everstep.sizing.probe_readings import ProbeRun, ScriptReading
from everstep.sizing.size_choice import Estimated, Sizing

_FROM_HISTORY = 0.05
"""Relative standard error of the rate of one earlier job: machines and data are not quite the same."""


class PastJob(msgspec.Struct, frozen=True):
    """Is the record of one job: names and numbers, nothing of its data or its code.

    ``script_id``, ``args_id``: digests that tell the same script and arguments from others. ``planned``: as the job was
    asked for; ``came``: as it ended. Peaks are resident bytes of the largest process of a role, as heartbeats said."""

    at: float  # when it ended, seconds since 1970
    name: str
    script: str  # name of the file
    script_id: str
    args_id: str
    mode: str
    workers: int
    ps: int
    stages: int = 1
    parity: str = "0"
    consistency: str = "async"
    hardware: str = ""
    cores: int = 0
    phase: str = ""
    exit_code: int = 0
    samples: int = 0
    epochs: int = 1
    wall_s: float = 0.0
    training_s: float = 0.0  # from the first sample to the last that the display saw; 0: unknown
    samples_per_s: float = 0.0  # in that time
    worker_peak_bytes: int = 0
    ps_peak_bytes: int = 0
    master_peak_bytes: int = 0
    model_bytes: int = 0
    failures: dict[str, int] = {}
    planned: dict[str, float] = {}
    came: dict[str, float] = {}
    spent_usd: float | None = None


class Likeness(IntEnum):
    """Says how near an earlier job is, nearest last."""

    NONE = 0
    SCRIPT = 1
    ARGUMENTS = 2
    MACHINE = 3

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Likeness.NONE: "another script",
    Likeness.SCRIPT: "the same script, other arguments",
    Likeness.ARGUMENTS: "the same script and arguments, another machine",
    Likeness.MACHINE: "the same script, arguments and machine",
}


class KeptJob(NamedTuple):
    """Is a record with its number in the history."""

    number: int
    job: PastJob


class Similar(NamedTuple):
    """Is an earlier job that an estimate uses."""

    kept: KeptJob
    likeness: Likeness

    def __str__(self) -> str:
        job = self.kept.job
        size = f"{job.workers} workers" + (f", {job.ps} ps" if job.ps else "")
        return f"job {self.kept.number} ({self.likeness.words}; {size})"


def similar_jobs(
    kept: Iterable[KeptJob], script_id: str, args_id: str, mode: str, hardware: str, stages: int = 1
) -> list[Similar]:
    """Return the jobs of this script that ended well and said how fast they were, the nearest and newest first."""
    found = []
    for record in kept:
        job = record.job
        if job.script_id != script_id or job.mode != mode or job.exit_code or job.samples_per_s <= 0:
            continue
        if job.phase != "done" or job.stages != stages:
            continue
        likeness = Likeness.SCRIPT
        if job.args_id == args_id:
            likeness = Likeness.MACHINE if job.hardware == hardware else Likeness.ARGUMENTS
        found.append(Similar(record, likeness))
    return sorted(found, key=lambda s: (-s.likeness, -s.kept.job.at))


def as_probes(similar: Sequence[Similar], parity: str = "0") -> tuple[list[ProbeRun], list[Similar]]:
    """Return earlier jobs in the form of probes, and which they are: the newest of each size, only of the nearest
    likeness that there is, with the fewest workers first. Their rows are in their memory already."""
    nearest = [s for s in similar if s.likeness is similar[0].likeness]
    by_size: dict[tuple[int, int], Similar] = {}
    for one in nearest:
        job = one.kept.job
        if job.parity == parity:
            by_size.setdefault((job.workers, job.ps), one)
    used = [by_size[size] for size in sorted(by_size)]
    return [_as_probe(one.kept.job) for one in used], used


def _as_probe(job: PastJob) -> ProbeRun:
    epochs = max(1, job.epochs)
    script = ScriptReading(
        job.samples // epochs, epochs, 0, max(1, job.cores // max(1, job.workers)), 0.0, 0.0, 0, 0, partitions=64
    )
    return ProbeRun(
        job.workers,
        job.ps,
        max(1, job.cores),
        job.samples_per_s,
        _FROM_HISTORY,
        0.0,
        0.0,
        job.worker_peak_bytes,
        job.ps_peak_bytes,
        job.master_peak_bytes,
        max(0.0, job.wall_s - job.training_s) if job.training_s else 0.0,
        script,
        job.stages,
        recorded=True,
    )


def with_history(sizing: Sizing, similar: Sequence[Similar]) -> Sizing:
    """Return the estimate with what jobs of the same script, arguments and machine did at the chosen size: error bars
    reach to it, and notes say which jobs they were."""
    size = sizing.size
    same = [
        s
        for s in similar
        if s.likeness is Likeness.MACHINE and (s.kept.job.workers, s.kept.job.ps) == (size.workers, size.ps)
    ]
    figures, notes = dict(sizing.figures), list(sizing.notes)
    for one in same[:3]:
        job = one.kept.job
        _reach(figures, "samples_per_s", job.samples_per_s)
        notes.append(f"history: {one} made {job.samples_per_s:,.0f} samples/s; the error bar reaches to it")
    others = [s for s in similar if s not in same][:2]
    for one in others:
        notes.append(f"history: {one} made {one.kept.job.samples_per_s:,.0f} samples/s")
    return msgspec.structs.replace(sizing, figures=figures, notes=tuple(notes))


def _reach(figures: dict[str, Estimated], name: str, value: float) -> None:
    figure = figures[name]
    figures[name] = msgspec.structs.replace(figure, low=min(figure.low, value), high=max(figure.high, value))
