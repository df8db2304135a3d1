"""Describes snapshots of partitions (images), checkpoints, and what a ps holds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from everstep.bounds import Bits64, Checksum, Finite, ImagePath, Measured, Whole, WholeOrNone
from everstep.config.spec import JobSpec
from everstep.ids import BucketId, Incarnation, ShardKey, Slot
from everstep.model.group import Mark
from everstep.model.shard import ShardSchedule
from everstep.model.table import TableSpec

MANIFEST_VERSION = 1  # of tables
REPLICA_VERSION = 2  # with the state of a replica in it, which older readers do not look for


class ImageFile(msgspec.Struct, frozen=True, array_like=True):
    """Names one file of a partition's snapshot: its path under the checkpoint directory, length and checksum
    (blake2b-128, hex)."""

    path: ImagePath
    size_bytes: Whole
    checksum: Checksum


class BucketImage(msgspec.Struct, frozen=True, kw_only=True):
    """Is one partition as of one moment: ``files``, a full one and then the pages changed since, in order: later pages
    win.

    ``seq``, ``fingerprint``: of the bucket then. ``watermarks``: (shard, watermark) of every shard that was open there.
    """

    bucket: BucketId
    seq: WholeOrNone
    fingerprint: Bits64
    watermarks: tuple[tuple[ShardKey, Whole], ...]
    files: tuple[ImageFile, ...]
    rows: Whole = 0
    bytes_written: Whole = 0  # for this checkpoint; the older files were there


class ReplicaImage(msgspec.Struct, frozen=True, kw_only=True):
    """Is the training state of a group (mode allreduce) at ``mark``. ``file``: see ``protect.replicafile``.
    ``parameters``: numbers in the models' parameters; ``origin``: of the line of states that it belongs to.
    ``waits_in``, ``waits_from``: from this position of this shard on, up to the mark, it has gradients of tables that
    wait for a step; -1: there are none."""

    mark: Mark
    file: ImageFile
    origin: Whole = 0
    parameters: Whole = 0
    waits_in: WholeOrNone = -1
    waits_from: Whole = 0


class EpochPosition(msgspec.Struct, frozen=True, array_like=True):
    """Shards of one epoch that every image covers: ``done`` are ranges [lo, hi) of shard numbers; ``quarantined``:
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


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: it exists when, and only when, its manifest does."""

    version: Whole = MANIFEST_VERSION
    everstep: str = ""
    job: str
    checkpoint: Whole
    at: Finite  # seconds since the epoch
    base: Whole = 0  # the checkpoint whose files its own deltas build on; 0: it is a base
    seed: Whole
    buckets: Whole
    tables: tuple[TableSpec, ...] = ()
    images: tuple[BucketImage, ...]
    datasets: tuple[DatasetPosition, ...] = ()
    values: dict[str, Measured] = {}
    samples_done: Whole = 0
    spec: JobSpec | None = None  # of the job that wrote it: what a resumed one begins with
    replica: ReplicaImage | None = None  # mode allreduce: everything that is trained, but for tables on the ps
    skipped: tuple[tuple[Whole, Whole, Whole, Whole], ...] = ()  # with replica: (dataset, epoch, lo, hi) not applied
    master_incarnation: Incarnation = Incarnation(0)  # no fence in the images is of a lease of a later master

    def files(self) -> Iterator[ImageFile]:
        """Yield all files that it needs."""
        for image in self.images:
            yield from image.files
        if self.replica is not None:
            yield self.replica.file


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What a ps holds, told in its hello: buckets that are whole, and mirrors that have everything."""

    buckets: tuple[BucketId, ...] = ()
    mirrors: tuple[WholeOrNone, ...] = ()
    placement: WholeOrNone = 0
    incarnation: Incarnation = Incarnation(0)
    slot: Slot = Slot(0)
