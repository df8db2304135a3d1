"""Describes snapshots of partitions (snapshots), checkpoints, and what a ps holds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from everstep.bounds import Bits64, Checksum, Finite, Measured, SnapshotPath, Whole, WholeOrNone
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, PartitionId, ShardKey, Slot
from everstep.model.group import Position
from everstep.model.shard import ShardSchedule
from everstep.model.table import TableSpec

MANIFEST_VERSION = 1  # of tables
REPLICA_VERSION = 2  # with the state of a replica in it, which older readers do not look for
PARTS_VERSION = 3  # with such a state in several files, which older readers do not put together


class CheckpointFile(msgspec.Struct, frozen=True, array_like=True):
    """Names one file of a partition's snapshot: its path under the checkpoint directory, length and checksum
    (blake2b-128, hex)."""

    path: SnapshotPath
    size_bytes: Whole
    checksum: Checksum


class PartitionSnapshot(msgspec.Struct, frozen=True, kw_only=True, rename={"partition": "bucket"}):
    """Is one partition as of one moment: ``files``, a full one and then the pages changed since, in order: later pages
    win.

    ``seq``, ``fingerprint``: of the partition then. ``watermarks``: (shard, watermark) of every shard that was open
    there.
    """

    partition: PartitionId
    seq: WholeOrNone
    fingerprint: Bits64
    watermarks: tuple[tuple[ShardKey, Whole], ...]
    files: tuple[CheckpointFile, ...]
    rows: Whole = 0
    bytes_written: Whole = 0  # for this checkpoint; the older files were there


class ReplicaCopy(msgspec.Struct, frozen=True, kw_only=True, rename={"position": "mark", "lineage": "origin"}):
    """Is the training state of a group (mode allreduce) at ``position``. ``file``: see ``protect.replicafile``.
    ``parameters``: numbers in the models' parameters; ``lineage``: of the lineage that it belongs to.
    ``parts``: the files of the stages, if it is of several (mode pipeline): ``file`` then puts them together, and a
    part that did not change is of an earlier checkpoint.
    ``waits_in``, ``waits_from``: from this position of this shard on, up to the position, it has gradients of tables
    that wait for a step; -1: there are none."""

    position: Position
    file: CheckpointFile
    lineage: Whole = 0
    parameters: Whole = 0
    waits_in: WholeOrNone = -1
    waits_from: Whole = 0
    parts: tuple[CheckpointFile, ...] = ()

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        return self.file, *self.parts

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def written_bytes(self, checkpoint: int) -> int:
        """Return the bytes of the files that were written for this checkpoint."""
        return sum(f.size_bytes for f in self.files if int(f.path.split("/")[1]) == checkpoint)


class EpochPosition(msgspec.Struct, frozen=True, array_like=True):
    """Shards of one epoch that every snapshot covers: ``done`` are ranges [lo, hi) of shard numbers; ``quarantined``:
    set aside for good. ``samples_done``: of the shards in ``done``, those skipped not counted."""

    epoch: Whole
    done: tuple[tuple[Whole, Whole], ...]
    quarantined: tuple[Whole, ...] = ()
    samples_done: Whole = 0


class DatasetPosition(msgspec.Struct, frozen=True):
    """Says how far a dataset is in all snapshots. Its place in ``Manifest.datasets`` is its number, as in shard
    keys."""

    plan: ShardSchedule
    epochs: tuple[EpochPosition, ...]  # epochs without an entry that are finished: every sample of them counted
    finished_epochs: Whole = 0  # epochs [0, n) are over


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, rename={"partitions": "buckets", "snapshots": "images", "since": "base"}
):
    """A checkpoint: it exists when, and only when, its manifest does."""

    version: Whole = MANIFEST_VERSION
    everstep: str = ""
    job: str
    checkpoint: Whole
    at: Finite  # seconds since the epoch
    since: Whole = 0  # the checkpoint whose files its own incremental snapshots build on; 0: all are full
    seed: Whole
    partitions: Whole
    tables: tuple[TableSpec, ...] = ()
    snapshots: tuple[PartitionSnapshot, ...]
    datasets: tuple[DatasetPosition, ...] = ()
    values: dict[str, Measured] = {}
    samples_done: Whole = 0
    spec: JobSpec | None = None  # of the job that wrote it: what a resumed one begins with
    replica: ReplicaCopy | None = None  # mode allreduce: everything that is trained, but for tables on the ps
    skipped: tuple[tuple[Whole, Whole, Whole, Whole], ...] = ()  # with replica: (dataset, epoch, lo, hi) not applied
    master_incarnation: Incarnation = Incarnation(0)  # no fence in the snapshots is of a lease of a later master

    def files(self) -> Iterator[CheckpointFile]:
        """Yield all files that it needs."""
        for snapshot in self.snapshots:
            yield from snapshot.files
        if self.replica is not None:
            yield from self.replica.files


class Holdings(msgspec.Struct, frozen=True, kw_only=True, rename={"partitions": "buckets"}):
    """What a ps holds, told in its hello: partitions that are whole, and mirrors that have everything."""

    partitions: tuple[PartitionId, ...] = ()
    mirrors: tuple[WholeOrNone, ...] = ()
    placement: WholeOrNone = 0
    incarnation: Incarnation = Incarnation(0)
    slot: Slot = Slot(0)
