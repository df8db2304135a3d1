"""What members measure and report: soft state for status, metrics and the summary; decides nothing.

A new master takes the values and the counters of the last line of ``metrics.jsonl`` over from the one before.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.checkpoints import has_checkpoints
from everstep.brain.watch import HeartbeatWatch
from everstep.ids import Incarnation, Slot
from everstep.model.member import MemberKey, MemberState, Role
from everstep.net.messages import (
    CheckpointStatus,
    EpochStatus,
    GroupStatus,
    MemberStatus,
    ProtectionStatus,
    StatusReport,
)
from everstep.policies.node_selection import HOME_NODE

METRICS_FILE = "metrics.jsonl"
_TAIL_BYTES = 64 * 1024
_LINES_READ = 30  # the newest: a minute
_EPOCHS_SHOWN = 20  # of each dataset, the newest


VALUES_MAX = 1000  # names of reported values
VALUE_NAME_MAX = 200  # characters


class MetricsLine(msgspec.Struct, kw_only=True):
    """One line of ``metrics.jsonl``. ``retried``: batches computed again, by ``slot.incarnation`` of the worker."""

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
    """``summary.json``: how the job ended."""

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


class Progress:
    """How far a number of things to do has come since it was nothing last. ``share``: of them, 0.0 to 1.0; ``left_s``:
    so long the rest takes at the pace until now, -1.0: not known."""

    def __init__(self) -> None:
        self.share, self.left_s = 0.0, -1.0
        self._left = self._total = 0
        self._began_at = 0.0

    def __repr__(self) -> str:
        return f"<progress {self._total - self._left} of {self._total}>"

    def look(self, left: int, at: float) -> None:
        """``left``: what is still to do, ``at`` (seconds)."""
        if not self._left and left:
            self._total, self._began_at = 0, at
        self._total += max(0, left - self._left)
        self._left = left
        done, took_s = self._total - left, at - self._began_at
        self.share = done / self._total if left else 0.0
        self.left_s = took_s / done * left if left and done and took_s > 0 else -1.0


class Readings:
    """Newest readings by member, values the script reported, counters that outlive their worker."""

    def __init__(self, run_dir: Path) -> None:
        self.values: dict[str, float] = {}
        self._by_member: dict[MemberKey, tuple[Incarnation, dict[str, float], float]] = {}
        self._retried: dict[str, int] = {}
        self._path = run_dir / METRICS_FILE
        self._last: tuple[float, int] | None = None
        self._rate = 0.0
        self.samples_told = 0  # by the lines of metrics, those of an earlier master included; never goes back
        self._steps: tuple[float, int] = (0.0, 0)
        self._steps_per_s = 0.0
        self._progress = Progress()
        self._levels: tuple[tuple[int, int, int], dict[str, int]] | None = None
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
                    self.samples_told = max(self.samples_told, line.samples_done)

    def reported(self, values: dict[str, float]) -> None:
        """What a script said with ``job.report``, newest of each name; of so many names as people can read."""
        for name, value in values.items():
            if name in self.values or (len(self.values) < VALUES_MAX and len(name) <= VALUE_NAME_MAX):
                self.values[name] = value

    def take(self, key: MemberKey, incarnation: Incarnation, readings: dict[str, float], at: float) -> None:
        known = self._by_member.get(key)
        if known is not None and known[0] > incarnation:
            return
        self._by_member[key] = (incarnation, readings, at)
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
        """Samples of done shards, plus what the workers say of those that they hold."""
        return brain.shards.samples_done + sum(
            max(0, watch.position(held.no, held.start) - held.start) for held in brain.doing()
        )

    def samples_per_s(self, brain: Brain) -> float:
        """Sum over the workers' own rates; where none tells, from the shards done lately."""
        told = [
            self.of(seat.member.key, seat.member.incarnation).get("samples_per_s", 0.0)
            for seat in brain.members.workers.values()
            if seat.running
        ]
        return sum(told) or self._rate

    def metrics(self, brain: Brain, watch: HeartbeatWatch, at: float) -> MetricsLine:
        done = self.samples_done(brain, watch)
        self.protection(brain, at)  # (how far it has come is counted by looking)
        if self._last is not None and at > self._last[0]:
            self._rate = max(0.0, (done - self._last[1]) / (at - self._last[0]))
        self._last = (at, done)
        self.samples_told = max(self.samples_told, done)
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

    def status(self, brain: Brain, watch: HeartbeatWatch, at: float, finishing: bool, master_pid: int) -> StatusReport:
        job = brain.job
        members = [
            MemberStatus(
                Role.MASTER,
                Slot(0),
                job.master_incarnation,
                HOME_NODE,
                master_pid,
                MemberState.ALIVE,
                job.master_failures,
            )
        ]
        for seat in brain.members.all():
            member = seat.member
            readings = self.of(member.key, member.incarnation)
            state = "waiting" if seat.waiting else str(member.state)
            if seat.stopping and seat.running:
                state = "leaving"
            members.append(
                MemberStatus(
                    member.role,
                    member.slot,
                    member.incarnation,
                    member.node,
                    member.pid,
                    state,
                    seat.losses,
                    brain.shards.name(seat.held[0]) if seat.held else brain.groups.words(seat),
                    readings.get("samples_per_s", 0.0) if seat.running else 0.0,
                    int(readings.get("rss_bytes", 0)) if seat.running else 0,
                    *(held(brain, member.slot) if member.role is Role.PS and seat.running else ()),
                )
            )
        epochs = [
            EpochStatus(
                dataset.plan.name,
                epoch.number,
                dataset.epochs_known,
                epoch.shards,
                epoch.todo,
                epoch.doing,
                epoch.done,
                dataset.plan.samples,
                epoch.samples_done,
            )
            for dataset in brain.shards.datasets
            for epoch in dataset.epochs[-_EPOCHS_SHOWN:]
        ]
        return StatusReport(
            job=job.spec.name,
            phase="finishing" if finishing else str(job.phase),
            at=at,
            started_at=job.started_at,
            master_incarnation=job.master_incarnation,
            members=tuple(members),
            epochs=tuple(epochs),
            samples_done=self.samples_done(brain, watch),
            samples_per_s=self.samples_per_s(brain),
            values=self.values,
            failures=failures(brain),
            batches_retried=self.batches_retried,
            exit_code=job.exit_code,
            error=job.error,
            checkpoint=checkpoint_status(brain),
            protection=self.protection(brain, at),
            group=self.group(brain),
            consistency=job.spec.consistency,
        )

    def group(self, brain: Brain) -> GroupStatus | None:
        """None: there is none, or not yet."""
        books, spec = brain.state.groups, brain.job.spec
        if books.group is None:
            return None
        return GroupStatus(
            generation=books.group.generation,
            members=books.group.size,
            joining=len(brain.groups.joining()),
            step=books.step,
            steps_per_s=round(self._steps_per_s, 2),
            strategy=spec.strategy,
            hold=books.group.hold,
            logical_workers=spec.logical_workers,
            voided=sum(v.last + 1 - v.first for v in books.voids),
        )

    def protection(self, brain: Brain, at: float) -> ProtectionStatus | None:
        """None: nothing is protected, and nothing moves. Counted anew when the books of it have changed."""
        keeper, spec = brain.keeper, brain.job.spec
        placement, books = brain.placement, keeper.books
        if placement is None or (not keeper.code.m and not books.missing and not placement.mirrors):
            return None
        key = (placement.version, len(books.ready), len(books.missing))
        if self._levels is None or self._levels[0] != key:
            self._levels = (key, keeper.levels())
        levels = self._levels[1]
        self._progress.look(keeper.moving() + keeper.rebuilding() + keeper.building(), at)
        members = [seat.member for seat in brain.members.servers.values() if seat.running]
        waiting = sum(self.of(m.key, m.incarnation).get("unconfirmed_bytes", 0.0) for m in members)
        return ProtectionStatus(
            parity=spec.parity,
            protect=spec.protect,
            full=levels["full"],
            less=levels["less"],
            none=levels["none"],
            moving=keeper.moving(),
            rebuilding=keeper.rebuilding(),
            building=keeper.building(),
            unconfirmed_bytes=int(waiting),
            done_share=round(self._progress.share, 3),
            left_s=round(self._progress.left_s, 1),
        )

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
            failures=failures(brain),
            batches_retried=self.batches_retried,
            shards_returned=brain.shards.returns,
            workers=len(brain.members.workers),
            ps=len(brain.members.servers),
            epochs=sum(epoch.finished for dataset in brain.shards.datasets for epoch in dataset.epochs),
            master_incarnation=job.master_incarnation,
            values=self.values,
            steps=brain.state.groups.step,
            generations=brain.state.groups.generations,
            steps_void=sum(v.last + 1 - v.first for v in brain.state.groups.voids),
            checkpoint=brain.checkpoints.last,
            set_aside=brain.checkpoints.aside,
            trusted=brain.checkpoints.resumed if job.spec.trusted else 0,
        )


def held(brain: Brain, slot: Slot) -> tuple[int, int]:
    """How many buckets and mirrors the map gives to a ps."""
    placement = brain.placement
    return (len(placement.owned_by(slot)), len(placement.mirrors_at(slot))) if placement is not None else (0, 0)


def failures(brain: Brain) -> dict[str, int]:
    """Failures survived so far, by role."""
    job = brain.job
    return {
        "worker": job.worker_failures,
        "ps": job.ps_failures,
        "master": job.master_failures,
        "node": job.node_failures,
    }


def checkpoint_status(brain: Brain) -> CheckpointStatus | None:
    """None: this job has nothing to do with checkpoints so far."""
    found = brain.checkpoints
    if not found.numbers and not has_checkpoints(brain.job.spec):
        return None
    last, writing = found.shown, found.writing
    return CheckpointStatus(
        newest=found.newest.checkpoint if found.newest is not None else 0,
        at=found.newest.at if found.newest is not None else 0.0,
        increment=last is not None and last.since > 0,
        bytes_written=last.bytes_written if last is not None else 0,
        took_s=last.took_s if last is not None else 0.0,
        writing=writing.number if writing is not None else 0,
        images=len(writing.images) if writing is not None else 0,
        buckets=brain.job.spec.buckets,
        given_up=found.given_up,
        resumed=found.resumed,
    )
