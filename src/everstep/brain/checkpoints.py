"""Records checkpoints of the job, and says when a done shard may be forgotten.

Theory. A checkpoint needs no barrier: every ps snapshots its partitions when it gets to it, and a snapshot carries the
watermarks of its partition, so any set of snapshots, one of each partition, can be gone on from: what a partition lacks
is trained again for that partition alone. That makes every failure on the way harmless: a snapshot stays good whatever
becomes of its ps, partitions may move meanwhile (their new owner is asked for what is still lacking), and a checkpoint
that comes to nothing is only given up. It exists when its manifest is durable.

Two rules tie it to the shards:

1. *The tier rule.* A done shard is released, so that it can never be trained again, only when the durable tier of the
   job has it: with checkpoints configured, when every snapshot of a committed checkpoint does; with parity that is
   eager or may lag, when the ps have confirmed that their mirrors have it; else at once, since memory (or its
   acknowledged mirror) is all there is.
2. *Nothing is released while a checkpoint is being written.* A released shard has no watermark; a snapshot taken before
   it began and one taken after its release could not be told apart.

One checkpoint at a time; nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from everstep.brain.events import CommitManifest, DropCheckpoints, InstructionType, Note, OrderSnapshots, ReleaseShards
from everstep.brain.job import JobState
from everstep.brain.shards import RELEASE_BATCH, Shards
from everstep.config.spec import JobSpec
from everstep.ids import PartitionId, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.group import Position
from everstep.model.reasons import CheckpointReason
from everstep.model.shard import shard_key, split_key
from everstep.model.snapshot import Manifest, PartitionSnapshot
from everstep.model.table import TableSpec
from everstep.model.words import checkpoint_words
from everstep.policies.checkpoints import since_of
from everstep.policies.retention import CheckpointTaken, to_drop
from everstep.units import seconds

TRIES = 3  # errors that one ps may tell of one checkpoint
GIVE_UP_S = 900.0  # a checkpoint that is not complete after so long is given up
GIVE_UP_FINAL_S = 60.0  # so long a job waits at its end for a place that has never taken a checkpoint of it, or to stop
LOAD_TRIES = 2  # so often a checkpoint may kill or fail who loads it

Inputs = dict[str, str | int | float | bool]


def has_checkpoints(spec: JobSpec) -> bool:
    """Return whether checkpoints are the job's durable tier: done shards wait for them."""
    return bool(spec.checkpoint_every or spec.checkpoint_to)


def leaves_model(spec: JobSpec) -> bool:
    """Return whether the job leaves its model when it ends in order. (``everstep run`` says where; a spec alone does
    not.)"""
    return spec.model_to not in ("", "none")


def ends_with_checkpoint(spec: JobSpec) -> bool:
    """Return whether a job that ends in order takes a last checkpoint: of what it has, or to go on from."""
    return has_checkpoints(spec) or leaves_model(spec)


def waits_for_mirrors(spec: JobSpec) -> bool:
    """Return whether pushes are acknowledged before their mirrors have them."""
    return spec.parity not in ("", "0") and spec.protect != "acked"


class Writing(msgspec.Struct, kw_only=True, rename={"snapshots": "images", "partial": "draft"}):
    """Is the checkpoint in progress. ``since``: the one that its incremental snapshots build on, 0: none;
    ``failures``: errors told, by ps; ``manifest``: set once every partition has a snapshot and its writing was
    ordered. ``disowned``: partitions that went back to something older meanwhile: only a snapshot of their owner
    counts."""

    number: int
    since: int
    reason: CheckpointReason
    began_at: float
    snapshots: dict[int, PartitionSnapshot] = {}
    tables: dict[str, TableSpec] = {}
    failures: dict[int, int] = {}
    manifest: Manifest | None = None
    disowned: list[int] = []
    writer: Slot = Slot(-1)  # mode allreduce: who is to write the replica; -1: rank 0 of the group
    partial: Manifest | None = None  # mode allreduce with ps: it has the replica, and no snapshots yet

    @property
    def ends_job(self) -> bool:
        """Return whether the job ends with this one."""
        return self.reason in (CheckpointReason.FINAL, CheckpointReason.STOP)


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """Describes a committed checkpoint, for displays. ``since`` 0: a full one. ``bytes_written``: for this one
    alone."""

    number: int
    at: float
    since: int
    bytes_written: int
    took_s: float


class ResumedFrom(msgspec.Struct, array_like=True):
    """Is the checkpoint that this job began with, and where it lies; 0: it began with nothing."""

    checkpoint: int = 0
    url: str = ""


class FailedLoads(msgspec.Struct, array_like=True):
    """Says, by checkpoint, whom it killed or failed while it was loaded. ``aside``: the one that was set aside for it,
    0: none."""

    by_checkpoint: dict[int, list[str]] = {}
    aside: int = 0


class CheckpointRecords(msgspec.Struct):
    """Holds what is known of the job's checkpoints.

    ``numbers``: the last number used. ``begun_at``: of the last one begun. ``newest``: the newest one committed,
    also of the job that this one goes on from; ``committed``: it is this job's own. ``shown``: what displays say of it;
    ``taken``: this job's own that were not dropped.

    ``start``: the checkpoint that this job began with; its ``datasets`` are the first of this job.
    ``final``: the one that the job ends with is over; ``reruns``: of scripts that had ended, for shards that came back.
    ``usable``: a partition may fall back to its snapshot in ``newest``, since no shard was released that the snapshots
    lack. ``confirmed``: see :meth:`confirm`; ``covered``: see :meth:`cover`. ``stopping``: why the job ends once it has
    a last checkpoint; ``stopped``: it has, or gave that up.
    ``last``: the checkpoint that has all that the job ends with, 0: there is none. ``failed_loads``: those that could
    not be loaded.
    """

    numbers: int = 0
    begun_at: float = 0.0
    writing: Writing | None = None
    newest: Manifest | None = None
    committed: bool = False
    incrementals: int = 0
    shown: Kept | None = None
    taken: list[CheckpointTaken] = []
    given_up: int = 0
    start: ResumedFrom = msgspec.field(default_factory=ResumedFrom)
    datasets: int = 0
    final: bool = False
    reruns: int = 0
    usable: bool = False
    confirmed: float = 0.0
    covered: bool = False
    stopping: str = ""
    stopped: bool = False
    last: int = 0
    failed_loads: FailedLoads = msgspec.field(default_factory=FailedLoads)

    def __repr__(self) -> str:
        now = f"writing {self.writing.number}" if self.writing is not None else "idle"
        return f"<checkpoints {now}, newest {self.newest.checkpoint if self.newest is not None else 0}>"

    def newest_snapshot(self, partition: PartitionId) -> tuple[int, PartitionSnapshot] | None:
        """Return the checkpoint and the snapshot that a partition may fall back to; None: there is none. What the
        snapshot lacks of the done shards (``Shards.lacking``) must then be reopened (``Shards.reopen_done``)."""
        if self.newest is None or not self.usable:
            return None
        found = next((snapshot for snapshot in self.newest.snapshots if snapshot.partition == partition), None)
        return (self.newest.checkpoint, found) if found is not None else None

    @property
    def resumed(self) -> int:
        """Return the checkpoint that this job began with; 0: none."""
        return self.start.checkpoint

    @property
    def aside(self) -> int:
        """Return the checkpoint that was set aside, since it could not be loaded; 0: none."""
        return self.failed_loads.aside

    @property
    def aside_words(self) -> str:
        """Return why there is no going on."""
        found = self.failed_loads.by_checkpoint.get(self.aside, [])
        return (
            f"checkpoint {self.aside} is set aside, it could not be loaded {len(found)} times: {'; '.join(found)}; "
            f"go on from an older one: everstep resume --checkpoint N (everstep checkpoint ls shows them)"
        )

    @property
    def limit_s(self) -> float:
        """Return how long the one in progress may take."""
        never = self.writing is not None and self.writing.reason is CheckpointReason.FINAL and not self.committed
        return GIVE_UP_FINAL_S if never or self.stopping else GIVE_UP_S

    def validate(self, job: JobState) -> None:
        """Assert what must always hold."""
        assert self.newest is None or self.newest.checkpoint <= self.numbers, "a checkpoint from the future"
        if self.newest is not None and self.newest.replica is None:
            assert [i.partition for i in self.newest.snapshots] == list(range(self.newest.partitions)), (
                "images are missing"
            )
        if self.writing is not None:
            assert self.writing.number == self.numbers and self.writing.since < self.numbers
            manifest = self.writing.manifest
            whole = (
                manifest is None or manifest.replica is not None or len(self.writing.snapshots) == job.spec.partitions
            )
            assert whole, "a manifest that lacks images"


class Checkpoints(CheckpointRecords):
    """What happens to checkpoints: one is begun, taken part by part, committed or given up."""

    # ------------------------------------------------------------ for whoever restores partitions

    def first_snapshots(self, partitions: int) -> tuple[tuple[PartitionId, int], ...]:
        """Return what the first placement of a resumed job has its ps load: every partition."""
        return tuple((PartitionId(b), self.resumed) for b in range(partitions)) if self.resumed else ()

    def load_failed(self, checkpoint: int, who: str, why: str) -> list[InstructionType]:
        """``who`` could not load its part of it, or died of that. The second time it is set aside: whoever loads it
        next would fare no better."""
        found = self.failed_loads.by_checkpoint.setdefault(checkpoint, [])
        found.append(f"{who}: {why}")
        inputs: Inputs = {"checkpoint": checkpoint, "failures": len(found)}
        if len(found) < LOAD_TRIES:
            words = f"checkpoint {checkpoint}: {why}"
            return [Note(who, Decision("load failed", words, inputs, ("set it aside: another ps may load it",)))]
        self.failed_loads.aside = checkpoint
        return [Note("", Decision("set a checkpoint aside", self.aside_words, inputs))]

    # ------------------------------------------------------------ shards that may be forgotten

    def release_due(self, job: JobState, shards: Shards, finished: bool) -> list[InstructionType]:
        """After a shard was done (``finished``: the last one of its epoch): what may be released at once."""
        if not finished and len(shards.releasing) < RELEASE_BATCH:  # nearly always
            return []
        if self.writing is not None or has_checkpoints(job.spec) or waits_for_mirrors(job.spec) or not self.covered:
            return []
        return self._forget(job, shards.release_due(1 if finished else RELEASE_BATCH))

    def confirm(self, job: JobState, shards: Shards, before: float) -> list[InstructionType]:
        """Everything applied before ``before`` is on all mirrors."""
        self.confirmed = max(self.confirmed, before)
        return self._release(job, shards) if waits_for_mirrors(job.spec) else []

    def cover(self, job: JobState, shards: Shards) -> list[InstructionType]:
        """From now on memory is what the job's protection promises: the first mirrors have everything."""
        self.covered = True
        return [] if has_checkpoints(job.spec) or waits_for_mirrors(job.spec) else self._release(job, shards)

    def _release(self, job: JobState, shards: Shards) -> list[InstructionType]:
        """Release all that the tier rule allows by now."""
        if self.writing is not None or not (self.covered or has_checkpoints(job.spec)):
            return []
        keys = list(shards.releasing)
        if has_checkpoints(job.spec):
            if self.newest is None:
                return []
            lacking = shards.lacking(self.newest.snapshots)
            keys = [key for key in keys if key not in lacking]
        if waits_for_mirrors(job.spec):
            keys = [key for key in keys if shards.releasing[key].at < self.confirmed]
        return self._forget(job, shards.release(keys))

    def _forget(self, job: JobState, keys: tuple[ShardKey, ...]) -> list[InstructionType]:
        if not keys:
            return []
        self.usable = self.usable and has_checkpoints(job.spec)
        return [ReleaseShards(keys)]

    # ------------------------------------------------------------ one checkpoint

    def begin(
        self, job: JobState, at: float, reason: CheckpointReason, full: bool, what: str = ""
    ) -> list[InstructionType]:
        """Order snapshots from every ps; nothing if one is being written. ``what``: it will have, for people; "": those
        snapshots."""
        if self.writing is not None:
            return []
        self.numbers += 1
        newest = self.newest.checkpoint if self.newest is not None and self.committed else 0
        since = since_of(newest, self.incrementals, job.spec.checkpoint_full_every, full)
        self.writing = Writing(number=self.numbers, since=since, reason=reason, began_at=at)
        self.begun_at = at
        what = what or (f"what changed since checkpoint {since}" if since else "a base: every page")
        words = checkpoint_words(reason)
        inputs: Inputs = {"checkpoint": self.numbers, "since": since, "reason": words}
        why = Decision("checkpoint begun", f"checkpoint {self.numbers} ({words}): {what}", inputs)
        return [OrderSnapshots(self.numbers, since), Note("", why)]

    def take(
        self,
        job: JobState,
        shards: Shards,
        at: float,
        slot: Slot,
        checkpoint: int,
        snapshots: Iterable[PartitionSnapshot],
        tables: Iterable[TableSpec],
        error: str,
        owned: Collection[PartitionId] = (),
    ) -> list[InstructionType]:
        """A ps tells of its part. Snapshots are good for ever, so it does not matter who owns the partitions by now,
        unless they were disowned: then only those of what the ps owns now (``owned``) count."""
        writing = self.writing
        if writing is None or writing.number != checkpoint or writing.manifest is not None:
            return []
        if error:
            return self.failed(f"ps:{slot}", slot, error)
        for snapshot in snapshots:
            if writing.partial is not None and (lack := lacks(writing.partial, snapshot)):
                return self.give_up(lack)
            known = writing.snapshots.get(snapshot.partition)
            if snapshot.partition in writing.disowned and snapshot.partition not in owned:
                continue
            if 0 <= snapshot.partition < job.spec.partitions and (known is None or known.seq <= snapshot.seq):
                writing.snapshots[snapshot.partition] = snapshot
        writing.tables.update((table.name, table) for table in tables)
        if len(writing.snapshots) < job.spec.partitions:
            return []
        return self._complete(job, shards, writing, at)

    def disown(self, partitions: Collection[PartitionId]) -> list[InstructionType]:
        """These partitions go on from something older than what they were: their snapshots are of a past that was
        undone, and must not come back as the newest."""
        writing = self.writing
        if writing is None or not partitions:
            return []
        if writing.manifest is not None:
            return self.give_up(f"{len(partitions)} partitions went back behind their images")
        writing.disowned = sorted({*writing.disowned, *partitions})
        for partition in partitions:
            writing.snapshots.pop(partition, None)
        return []

    def failed(self, member: str, slot: int, error: str) -> list[InstructionType]:
        """Of the one in progress, ``member`` could not write its part."""
        writing = self.writing
        if writing is None:
            return []
        count = writing.failures[slot] = writing.failures.get(slot, 0) + 1
        out: list[InstructionType] = []
        if count == 1 or count >= TRIES:
            inputs: Inputs = {"checkpoint": writing.number, "failures": count}
            why = Decision("checkpoint not written", error, inputs, ("stop training: it does not need the checkpoint",))
            out.append(Note(member, why))
        if count >= TRIES:
            out += self.give_up(f"{member} failed {count} times, last: {error}")
        return out

    def _complete(self, job: JobState, shards: Shards, writing: Writing, at: float) -> list[InstructionType]:
        """Every partition has a snapshot: have the manifest written."""
        snapshots = tuple(writing.snapshots[b] for b in sorted(writing.snapshots))
        tables = tuple(writing.tables[name] for name in sorted(writing.tables))
        if writing.partial is not None:
            writing.manifest = msgspec.structs.replace(writing.partial, snapshots=snapshots, tables=tables)
            words = (
                f"step {writing.partial.replica.position.step}" if writing.partial.replica is not None else "a replica"
            )
            why = Decision("commit the checkpoint", f"{words}, all {len(snapshots)} partitions have an image")
            return [CommitManifest(writing.manifest, why)]
        positions = shards.positions(snapshots)
        manifest = Manifest(
            job=job.spec.name,
            checkpoint=writing.number,
            at=at,
            since=writing.since,
            seed=job.spec.seed,
            partitions=job.spec.partitions,
            tables=tables,
            snapshots=snapshots,
            datasets=positions,
            samples_done=shards.samples_done - sum(shards.releasing[key].samples for key in shards.lacking(snapshots)),
            spec=job.spec,
            master_incarnation=job.master_incarnation,
        )
        writing.manifest = manifest
        inputs: Inputs = {"checkpoint": writing.number, "bytes": _bytes_of(snapshots), "samples": manifest.samples_done}
        why = Decision("commit the checkpoint", f"all {len(snapshots)} partitions have an image", inputs)
        return [CommitManifest(manifest, why)]

    def commit(
        self, job: JobState, shards: Shards, at: float, checkpoint: int, error: str, pinned: Collection[int] = ()
    ) -> list[InstructionType]:
        """The manifest is durable, or could not be written. ``pinned``: checkpoints that are being loaded from."""
        writing = self.writing
        if writing is None or writing.number != checkpoint:
            return []
        if error:
            return self.give_up(error)
        manifest = writing.manifest
        if manifest is None:
            return []
        took_s = round(at - writing.began_at, 3)
        size_bytes = _bytes_of(manifest.snapshots)
        if manifest.replica is not None:
            size_bytes += manifest.replica.written_bytes(checkpoint)
        self.shown = Kept(checkpoint, at, writing.since, size_bytes, took_s)
        self.newest, self.writing, self.committed, self.usable = manifest, None, True, True
        self.final = writing.reason is CheckpointReason.FINAL
        self.stopped = writing.reason is CheckpointReason.STOP
        self.last = checkpoint if self.final or self.stopped else 0
        self.incrementals = self.incrementals + 1 if manifest.since else 0
        out = self._release(job, shards) if has_checkpoints(job.spec) else []
        inputs: Inputs = {
            "checkpoint": checkpoint,
            "since": manifest.since,
            "bytes": self.shown.bytes_written,
            "took_s": took_s,
            "samples": manifest.samples_done,
            "shards_not_covered": len(shards.releasing),
        }
        size = f"{self.shown.bytes_written} bytes written"
        kind = f"increment on {manifest.since}" if manifest.since else "base"
        why = Decision("checkpoint committed", f"checkpoint {checkpoint} ({kind}): {size} in {took_s:g} s", inputs)
        out += self._retire(job, manifest, pinned)
        return [Note("", why), *out]

    def _retire(self, job: JobState, manifest: Manifest, pinned: Collection[int]) -> list[InstructionType]:
        """Drop what retention does not keep. Those of the job that this one went on from are not this one's to drop."""
        self.taken.append(CheckpointTaken(manifest.checkpoint, manifest.at))
        every = job.spec.checkpoint_keep_every
        found = to_drop(self.taken, job.spec.checkpoint_keep, seconds(every) if every else 0.0)
        drop = tuple(number for number in found if number not in pinned)
        self.taken = [taken for taken in self.taken if taken.checkpoint not in drop]
        return [DropCheckpoints(drop)] if drop else []

    def give_up(self, reason: str) -> list[InstructionType]:
        """The checkpoint in progress comes to nothing; the one before stays the newest."""
        writing = self.writing
        if writing is None:
            return []
        self.writing = None
        self.final = writing.reason is CheckpointReason.FINAL
        self.stopped = writing.reason is CheckpointReason.STOP
        self.given_up += 1
        newest = f"checkpoint {self.newest.checkpoint}" if self.newest is not None else "none yet"
        inputs: Inputs = {"checkpoint": writing.number, "images": len(writing.snapshots)}
        words = f"checkpoint {writing.number}: {reason}; the newest stays {newest}"
        gone = DropCheckpoints((writing.number,))
        return [gone, Note("", Decision("checkpoint given up", words, inputs))]

    def late(self, at: float) -> list[InstructionType]:
        """Give up the one in progress if it has taken too long."""
        writing = self.writing
        if writing is None or writing.manifest is not None or at - writing.began_at < self.limit_s:
            return []
        return self.give_up(
            f"not complete after {at - writing.began_at:.0f} s ({len(writing.snapshots)} partitions are)"
        )

    def finish(self, job: JobState, at: float, can_save: bool) -> list[InstructionType] | None:
        """Every script has ended. With checkpoints configured the job ends with one that has everything: what leads
        there; None: it is over, committed or not. ``can_save``: there is still somebody who could write one."""
        if self.final or not ends_with_checkpoint(job.spec):
            return None
        if not can_save:  # (the last member did before it went)
            begun = self.writing is not None and (self.writing.manifest or self.writing.partial) is not None
            return [] if begun else None
        # (nothing while another is written, which may lack the end)
        return self.begin(job, at, CheckpointReason.FINAL, full=False)

    def not_the_end(self) -> None:
        """Training goes on after every script had ended: a last checkpoint that was begun will not be the last."""
        self.reruns += 1
        self.final, self.last = False, 0
        if self.writing is not None and self.writing.reason is CheckpointReason.FINAL:
            self.writing.reason = CheckpointReason.DUE

    def go_on(self) -> None:
        """The job did not end with its last checkpoint: it was suspended, and nobody writes one any more."""
        self.stopping, self.stopped, self.final, self.last = "", False, False, 0
        self.writing = None

    def cannot_stop(self) -> None:
        """The job was to be suspended, and could not be. What is written for another reason is written on."""
        self.stopping, self.stopped = "", False
        if self.writing is not None and self.writing.reason is CheckpointReason.STOP:
            self.writing = None

    # ------------------------------------------------------------ going on from another job's

    def resume(
        self, job: JobState, shards: Shards, manifest: Manifest, url: str, numbers: int
    ) -> list[InstructionType]:
        """Begin with what ``manifest`` has; nothing if this job has begun in any way. Raises nothing: whoever made the
        event checked that the manifest is whole and of as many partitions."""
        if self.resumed or shards.datasets or self.newest is not None:
            return []
        self.start = ResumedFrom(manifest.checkpoint, url)
        self.numbers = max(numbers, manifest.checkpoint)
        self.newest, self.usable = manifest, True
        self.datasets = len(manifest.datasets)
        shards.resume(manifest.datasets, manifest.snapshots)
        inputs: Inputs = {"checkpoint": manifest.checkpoint, "samples": shards.samples_done, "job": manifest.job}
        words = f"checkpoint {manifest.checkpoint} of {url}: {shards.samples_done} samples are in all of its images"
        return [Note("", Decision("resume", words + by_word(job), inputs))]


def by_word(job: JobState) -> str:
    """Return what is said of a checkpoint that the user said to trust; "" of any other."""
    if not job.spec.trusted:
        return ""
    return "; it was not written with the job's key, and is trusted by --trust-checkpoint"


def turned(position: Position, manifest: Manifest) -> Position:
    """The end of an epoch is the begin of the next."""
    if (
        position.dataset < len(manifest.datasets)
        and position.sample >= manifest.datasets[position.dataset].plan.samples
    ):
        return Position(position.step, position.dataset, position.epoch + 1, 0)
    return position


def replica_start(checkpoints: Checkpoints) -> tuple[Position, int]:
    """Return where a group begins of which nobody has a state: the position, and the checkpoint that has it (0: from
    nothing)."""
    newest = checkpoints.newest
    if newest is None or newest.replica is None:
        return Position(), 0
    return turned(newest.replica.position, newest), newest.checkpoint


def lacks(partial: Manifest, snapshot: PartitionSnapshot) -> str:
    """Return why this snapshot of a table's partition does not go with the replica of ``partial``: a job that went on
    from both would never train for that partition what the replica has had; "": it does."""
    if partial.replica is None:
        return ""
    position = partial.replica.position
    epoch, sample = position.epoch, position.sample
    if not sample and epoch and position.dataset < len(partial.datasets):
        epoch, sample = epoch - 1, partial.datasets[position.dataset].plan.samples
    shard = shard_key(position.dataset, epoch, 0)
    if partial.replica.waits_in >= 0:  # (the replica has the gradients from there on itself)
        shard, sample = ShardKey(partial.replica.waits_in), partial.replica.waits_from
        epoch = split_key(shard)[1]
    found = dict(snapshot.watermarks).get(shard, 0)
    if found >= sample:
        return ""
    return f"partition {snapshot.partition} is at sample {found} of epoch {epoch}, the replica at {sample}"


def _bytes_of(snapshots: Sequence[PartitionSnapshot]) -> int:
    return sum(snapshot.bytes_written for snapshot in snapshots)
