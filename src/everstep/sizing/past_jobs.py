"""Holds what is remembered of a job, and finds the jobs that an estimate can use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from everstep.sizing.probe_readings import ProbeRun, ScriptReading
from everstep.sizing.size_choice import Estimated, Sizing
from everstep.units import human_bytes

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
    too_small: dict[str, int] = {}  # the largest limit of memory that a process died of, by role [bytes]
    memory: dict[str, int] = {}  # that processes had as a limit of their own when the job ended, by role [bytes]


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


class MemoryLesson(NamedTuple):
    """Says what an earlier job of the same script and arguments has taught of memory: a process of ``role`` died of
    ``died_bytes``, with ``among`` of them in the job. ``enough_bytes``: with so much the job came to its end; 0: it did
    not."""

    number: int
    role: str
    died_bytes: int
    among: int
    enough_bytes: int = 0

    def needed_bytes(self, count: int) -> int:
        """Return what each of ``count`` processes should have. Rows are divided among ps; workers share nothing."""
        each = self.enough_bytes or round(MORE * self.died_bytes)
        return -(-each * self.among // max(1, count)) if self.role == "ps" else each

    @property
    def words(self) -> str:
        """Return ``job 3: a ps died of 144.0 MiB (1 ps)``."""
        text = f"job {self.number}: a {self.role} died of {human_bytes(self.died_bytes)} of memory"
        text += f" ({self.among} ps)" if self.role == "ps" else ""
        return text + (f", and came to its end with {human_bytes(self.enough_bytes)}" if self.enough_bytes else "")


MORE: Final = 2.0
"""Times a limit that a process died of: what the next job should give it, if nobody knows how much is enough."""


def memory_lessons(kept: Iterable[KeptJob], script_id: str, args_id: str, mode: str) -> list[MemoryLesson]:
    """Return what jobs of this script and these arguments have taught of memory, also those that failed: of each role
    the newest."""
    found: dict[str, MemoryLesson] = {}
    for number, job in sorted(kept, key=lambda one: one.job.at):
        if (job.script_id, job.args_id, job.mode) != (script_id, args_id, mode):
            continue
        for role, died_bytes in job.too_small.items():
            if died_bytes <= 0 or role not in ("worker", "ps"):
                continue
            has = job.memory.get(role, 0)
            enough = has if job.phase == "done" and has > died_bytes else 0
            most = max(1, getattr(job, _COUNTS[role]), int(job.came.get(_COUNTS[role], 0)))
            found[role] = MemoryLesson(number, role, died_bytes, most, enough)
    return [found[role] for role in sorted(found)]


_COUNTS: Final = {"worker": "workers", "ps": "ps"}


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


def with_lessons(sizing: Sizing, lessons: Iterable[MemoryLesson]) -> Sizing:
    """Return the estimate with what earlier jobs died of: the memory of such a role is at least what it needs."""
    figures, notes = dict(sizing.figures), list(sizing.notes)
    for lesson in lessons:
        name = f"{lesson.role}_memory"
        figure = figures.get(name)
        if figure is None:
            continue
        needed = float(lesson.needed_bytes(sizing.size.ps))
        if needed > figure.value:
            figures[name] = Estimated(
                needed, max(figure.low, needed / MORE), max(figure.high, needed), figure.unit, lesson.words
            )
        notes.append(f"history: {lesson.words}: {human_bytes(needed)} for each {lesson.role}")
    return msgspec.structs.replace(sizing, figures=figures, notes=tuple(notes))


def _reach(figures: dict[str, Estimated], name: str, value: float) -> None:
    figure = figures[name]
    figures[name] = msgspec.structs.replace(figure, low=min(figure.low, value), high=max(figure.high, value))
