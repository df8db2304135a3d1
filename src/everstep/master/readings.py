"""What members measure and report: soft state for status, metrics and the summary; decides nothing.

A new master takes the values and the counters of the last line of ``metrics.jsonl`` over from the one before.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.job import Phase
from everstep.brain.supervision import StageChange
from everstep.brain.watch import HeartbeatWatch
from everstep.ids import Incarnation
from everstep.model.member import MemberKey, MemberState
from everstep.model.memory_limit import OutOfMemory
from everstep.model.process_size import ProcessSize
from everstep.monitor.viewer import Measured, failures_view, is_protected

METRICS_FILE = "metrics.jsonl"
_TAIL_BYTES = 64 * 1024
_LINES_READ = 30  # the newest: a minute


VALUES_MAX = 1000  # names of reported values
VALUE_NAME_MAX = 200  # characters


class MetricsLine(msgspec.Struct, kw_only=True):
    """Is one line of ``metrics.jsonl``. ``retried``: batches computed again, by ``slot.incarnation`` of the worker."""

    at: float
    samples_done: int
    samples_per_s: float
    workers: int
    todo: int
    doing: int
    values: dict[str, float] = {}
    retried: dict[str, int] = {}


_metrics_line_decoder = msgspec.json.Decoder(MetricsLine)


class SummaryFile(msgspec.Struct, kw_only=True):
    """Is ``summary.json``: how the job ended."""

    job: str
    phase: str
    exit_code: int
    error: str
    samples_done: int
    wall_s: float
    samples_per_s: float
    failures: dict[str, int]
    batches_retried: int
    shards_returned: int
    workers: int
    ps: int
    epochs: int
    master_incarnation: int
    values: dict[str, float]
    steps: int = 0  # mode allreduce: committed
    generations: int = 0
    steps_void: int = 0  # committed once, and done again after every state was lost
    checkpoint: int = 0  # that has all that the job ended with, 0: there is none
    trusted: int = 0  # the checkpoint that it began with by the user's word (--trust-checkpoint), 0: none
    set_aside: int = 0  # a checkpoint that could not be loaded, for which the job ended; 0: none
    suspensions: int = 0  # of the job so far
    suspended: str = ""  # why it is suspended; "": it is not
    by_itself: bool = False  # it is suspended because of who was there: it goes on when capacity is back
    spent_usd: float | None = None  # None: the job has no prices
    budget_asked: bool = False  # it was asked to be suspended for its budget
    stages: tuple[StageChange, ...] = ()  # its last changes of state
    sizes: dict[str, ProcessSize] = {}  # of processes that started last, by role
    too_small: dict[str, OutOfMemory] = {}  # the largest limit of memory that a process died of, by role
    peaks: dict[str, int] = {}  # the most that was resident in one process, by role [bytes]


class Progress:
    """Says how far a number of things to do has come since it was nothing last. ``share``: of them, 0.0 to 1.0;
    ``left_s``: so long the rest takes at the pace until now, -1.0: not known."""

    def __init__(self) -> None:
        self.share, self.left_s = 0.0, -1.0
        self._left = self._total = 0
        self._began_at = 0.0

    def __repr__(self) -> str:
        return f"<progress {self._total - self._left} of {self._total}>"

    def look(self, left: int, at: float) -> None:
        """Look at the progress; ``left``: what is still to do, ``at`` (seconds)."""
        if not self._left and left:
            self._total, self._began_at = 0, at
        self._total += max(0, left - self._left)
        self._left = left
        done, took_s = self._total - left, at - self._began_at
        self.share = done / self._total if left else 0.0
        self.left_s = took_s / done * left if left and done and took_s > 0 else -1.0


class Readings:
    """Holds the newest readings by member, values the script reported, counters that outlive their worker."""

    def __init__(self, run_dir: Path) -> None:
        self.values: dict[str, float] = {}
        self._by_member: dict[MemberKey, tuple[Incarnation, dict[str, float], float]] = {}
        self._retried: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._path = run_dir / METRICS_FILE
        self._last: tuple[float, int] | None = None
        self._rate = 0.0
        self.samples_reported = 0  # by the lines of metrics, those of an earlier master included; never goes back
        self._steps: tuple[float, int] = (0.0, 0)
        self._steps_per_s = 0.0
        self._progress = Progress()
        self._levels: tuple[tuple[int, int, int], dict[str, int], tuple[str, int]] | None = None
        self._recover()

    def __repr__(self) -> str:
        return f"<readings of {len(self._by_member)} members, {len(self.values)} values>"

    def _recover(self) -> None:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # the last may be cut short
            for raw in lines[-_LINES_READ:]:
                with contextlib.suppress(msgspec.MsgspecError):  # so may the first
                    line = _metrics_line_decoder.decode(raw)
                    self.values, self._retried = line.values, line.retried
                    self.samples_reported = max(self.samples_reported, line.samples_done)

    def reported(self, values: dict[str, float]) -> None:
        """Take in what a script said with ``job.report``, newest of each name; of so many names as people can read."""
        for name, value in values.items():
            if name in self.values or (len(self.values) < VALUES_MAX and len(name) <= VALUE_NAME_MAX):
                self.values[name] = value

    def take(self, key: MemberKey, incarnation: Incarnation, readings: dict[str, float], at: float) -> None:
        known = self._by_member.get(key)
        if known is not None and known[0] > incarnation:
            return
        self._by_member[key] = (incarnation, readings, at)
        if peak := int(readings.get("peak_bytes", 0)):
            self._peaks[key.role.value] = max(peak, self._peaks.get(key.role.value, 0))
        if "retried" in readings:
            self._retried[f"{key.slot}.{incarnation}"] = int(readings["retried"])

    def of(self, key: MemberKey, incarnation: Incarnation) -> dict[str, float]:
        known = self._by_member.get(key)
        return known[1] if known is not None and known[0] == incarnation else {}

    @property
    def batches_retried(self) -> int:
        return sum(self._retried.values())

    # ------------------------------------------------------------ views

    def samples_done(self, brain: Brain, watch: HeartbeatWatch) -> int:
        """Return the samples of done shards, plus what the workers say of those that they hold."""
        return brain.shards.samples_done + sum(
            max(0, watch.position(held.no, held.start) - held.start) for held in brain.doing()
        )

    def samples_per_s(self, brain: Brain) -> float:
        """Sum over the workers' own rates; where none tells, from the shards done lately."""
        rates = [
            self.of(record.member.key, record.member.incarnation).get("samples_per_s", 0.0)
            for record in brain.members.workers.values()
            if record.running
        ]
        return sum(rates) or self._rate

    def metrics(self, brain: Brain, watch: HeartbeatWatch, at: float) -> MetricsLine:
        done = self.samples_done(brain, watch)
        self._look_at_protection(brain, at)
        if self._last is not None and at > self._last[0]:
            self._rate = max(0.0, (done - self._last[1]) / (at - self._last[0]))
        self._last = (at, done)
        self.samples_reported = max(self.samples_reported, done)
        step = brain.state.groups.step
        if 0 < self._steps[0] < at:
            self._steps_per_s = max(0.0, (step - self._steps[1]) / (at - self._steps[0]))
        self._steps = (at, step)
        epochs = [dataset.epochs[-1] for dataset in brain.shards.datasets if dataset.epochs]
        return MetricsLine(
            at=round(at, 3),
            samples_done=done,
            samples_per_s=round(self.samples_per_s(brain), 1),
            workers=sum(s.member.state is MemberState.ALIVE for s in brain.members.workers.values()),
            todo=sum(epoch.todo for epoch in epochs),
            doing=sum(epoch.doing for epoch in epochs),
            values=self.values,
            retried=self._retried,
        )

    def measured(self, brain: Brain, watch: HeartbeatWatch, at: float) -> Measured:
        """Return what the read model has beside the brain, but for what only the master's shell knows."""
        levels = self._look_at_protection(brain, at)
        done = self.samples_done(brain, watch)
        self.samples_reported = max(self.samples_reported, done)
        return Measured(
            samples_done=done,
            samples_total=self.samples_reported,
            samples_per_s=self.samples_per_s(brain),
            steps_per_s=self._steps_per_s,
            batches_retried=self.batches_retried,
            reported=self.values,
            of_member=self.of,
            levels=levels,
            cover=self._levels[2] if levels is not None and self._levels is not None else None,
            done_share=self._progress.share,
            left_s=self._progress.left_s,
        )

    def _look_at_protection(self, brain: Brain, at: float) -> dict[str, int] | None:
        """Return the partitions by the losses that they survive, counted anew when the state of it has changed; how
        far what moves has come is counted by looking. None: nothing is protected."""
        placement, partitions = brain.placement, brain.partitions
        if placement is None or not is_protected(brain):
            return None
        key = (placement.version, len(partitions.protection.ready), len(partitions.protection.missing))
        if self._levels is None or self._levels[0] != key:
            self._levels = (key, partitions.levels(), partitions.lost_with_one_machine())
        self._progress.look(partitions.moving() + partitions.rebuilding() + partitions.building(), at)
        return self._levels[1]

    def summary(self, brain: Brain, at: float) -> SummaryFile:
        job = brain.job
        wall_s = max(0.0, at - job.started_at)
        return SummaryFile(
            job=job.spec.name,
            phase=str(job.phase),
            exit_code=job.exit_code if job.exit_code is not None else 4,
            error=job.error,
            samples_done=brain.shards.samples_done,
            wall_s=round(wall_s, 3),
            samples_per_s=round(brain.shards.samples_done / wall_s, 1) if wall_s > 0 else 0.0,
            failures=failures_view(brain),
            batches_retried=self.batches_retried,
            shards_returned=brain.shards.returns,
            workers=len(brain.members.workers),
            ps=len(brain.members.servers),
            epochs=sum(epoch.finished for dataset in brain.shards.datasets for epoch in dataset.epochs),
            master_incarnation=job.master_incarnation,
            values=self.values,
            steps=brain.state.groups.step,
            generations=brain.state.groups.generations,
            steps_void=sum(v.last + 1 - v.first for v in brain.state.groups.history.voids),
            checkpoint=brain.checkpoints.last,
            set_aside=brain.checkpoints.aside,
            trusted=brain.checkpoints.resumed if job.spec.trusted else 0,
            suspensions=brain.state.supervision.suspensions,
            suspended=brain.state.supervision.suspending if job.phase is Phase.SUSPENDED else "",
            by_itself=job.phase is Phase.SUSPENDED and brain.state.supervision.by_itself,
            stages=tuple(brain.state.supervision.changes),
            sizes={role.value: size for role, size in job.sizes.items()},
            too_small={role.value: died for role, died in job.too_small.items()},
            peaks=self._peaks,
        )
