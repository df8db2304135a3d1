"""Writes snapshots of a ps's partitions, while it goes on serving.

One thread of the ps reads snapshots (copy-on-write: a push never waits for the writing) and writes a file for each
partition: all pages, or those changed since an earlier checkpoint. A checkpoint exists only once the master has written
its manifest, so whatever dies here leaves the earlier ones as they were; a file has a name of its own each time.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everstep.brain.events import SnapshotsWritten
from everstep.config.load import read_spec
from everstep.errors import EverstepError, InternalError, StorageError
from everstep.ids import Incarnation, PartitionId, ShardKey, Slot
from everstep.model.snapshot import CheckpointFile, PartitionSnapshot
from everstep.model.table import TableSpec
from everstep.native.blob import parse_marks
from everstep.net.retry import retry
from everstep.protect.snapshot_file import PageLayout, Pages, SnapshotFileWriter, SnapshotHead, changed_rows
from everstep.storage.places import StoragePlace, open_place
from everstep.units import human_bytes

CHUNK_BYTES = 1 << 20
REMEMBERED = 8
"""Checkpoints that an incremental one may build on: the newest few."""

logger = logging.getLogger("everstep.protect")


class SnapshotStore(Protocol):
    """Is what is needed of ``everstep.native.Store``."""

    @property
    def n_partitions(self) -> int: ...
    def specs(self) -> list[TableSpec]: ...
    def layout(self, table: int) -> tuple[int, int, int]: ...
    def page_bytes(self, table: int) -> int: ...
    def snapshot_begin(self, partition: int, since: int) -> tuple[int, bytes]: ...
    def snapshot_next(self, partition: int, max_bytes: int) -> tuple[list[tuple[int, int]], NDArray[np.uint8]]: ...
    def snapshot_end(self, partition: int) -> None: ...
    def snapshot_slots(self, partition: int, table: int, page_nos: list[int]) -> NDArray[np.uint8] | None: ...
    def partition_rows(self, partition: int) -> dict[int, int]: ...


class MarksRead(NamedTuple):
    """Is what a manifest says of a partition's marks. ``watermarks``: (shard, watermark) of the open shards,
    ascending."""

    seq: int
    fingerprint: int
    watermarks: tuple[tuple[ShardKey, int], ...]


def read_marks(blob: bytes) -> MarksRead:
    """Reads a blob of kind MARKS (see native/blob.h). ValueError: it is none."""
    found = parse_marks(blob)
    marks = sorted((ShardKey(shard), watermark) for shard, watermark, _ in found.marks.shards)
    return MarksRead(found.seq, found.marks.fingerprint, tuple(marks))


def _only(pages: Pages, which: NDArray[np.bool_]) -> Pages:
    numbers = [n for n, wanted in zip(pages.numbers, which.tolist(), strict=True) if wanted]
    return Pages(pages.table, pages.layout, numbers, pages.data[which])


class _Written(NamedTuple):
    """A partition's part of a checkpoint, and the store's generation that the next incremental one goes on from."""

    snapshot: PartitionSnapshot
    generation: int


class _Wanted(NamedTuple):
    checkpoint: int
    since: int
    url: str
    partitions: tuple[PartitionId, ...]
    on_done: Callable[[SnapshotsWritten], None]


class _Dropped(Exception):
    """The partition left meanwhile: it is somebody else's to write now."""


class _Cancelled(Exception):
    """A newer order came, or the ps ends."""


class SnapshotWriter:
    """Writes snapshots: ``take`` returns at once; the work is done in a thread of its own, one checkpoint after the
    other.

    ``bytes_per_s``: the most that is written (0: no limit). ``retry_s``: how long a place that does not answer is tried
    again before the checkpoint is given up. ``places``: how a place is opened.
    """

    def __init__(
        self,
        store: SnapshotStore,
        run_dir: Path,
        *,
        slot: Slot = Slot(0),
        incarnation: Incarnation = Incarnation(0),
        job: str | None = None,
        bytes_per_s: float = 0.0,
        retry_s: float = 120.0,
        places: Callable[[str], StoragePlace] = open_place,
    ) -> None:
        self._store = store
        self._run_dir = run_dir
        self._slot, self._incarnation = slot, incarnation
        self._job = job
        self._bytes_per_s, self._retry_s = bytes_per_s, retry_s
        self._places = places
        self._lock = threading.Condition()
        self._wanted: _Wanted | None = None
        self._doing: _Wanted | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        # Of the newest checkpoints; only the thread and ``forget`` change it, under the lock.
        self._written: dict[int, dict[PartitionId, _Written]] = {}
        self.bytes_written = 0  # ever, for readings

    def __repr__(self) -> str:
        doing = self._doing
        return f"<ImageWriter {'idle' if doing is None else f'checkpoint {doing.checkpoint}'}>"

    def take(
        self,
        checkpoint: int,
        since: int,
        url: str,
        partitions: Collection[int],
        on_done: Callable[[SnapshotsWritten], None],
    ) -> None:
        """Write snapshots of ``partitions`` under ``url`` and tell ``on_done`` (from the writer's thread) when they are
        durable, or why not. ``since``: only pages changed since that checkpoint; a partition that was not part of it
        here is written whole. Cancels an older one that is not done (its ``on_done`` is not called). The same
        checkpoint again: what is written already is not written again; a partition that is not here (any more) is left
        out of the answer.
        """
        wanted = _Wanted(checkpoint, since, url, tuple(PartitionId(b) for b in sorted(partitions)), on_done)
        with self._lock:
            newest = max((w.checkpoint for w in (self._wanted, self._doing) if w is not None), default=0)
            if self._closed or checkpoint < newest:
                return
            doing = self._doing
            if doing is not None and self._wanted is None and doing[:4] == wanted[:4]:
                return
            self._wanted = wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="images", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def forget(self, partition: int) -> None:
        """This partition left the ps: its next snapshot, if it comes back, is a whole one."""
        with self._lock:
            for of_checkpoint in self._written.values():
                of_checkpoint.pop(PartitionId(partition), None)

    @property
    def checkpoint(self) -> int:
        """Return the checkpoint that is being written, 0: none."""
        doing = self._doing
        return 0 if doing is None else doing.checkpoint

    def close(self, timeout_s: float = 5.0) -> None:
        """Gives up what is not done."""
        with self._lock:
            self._closed, self._wanted = True, None
            self._lock.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._wanted is None and not self._closed:
                    self._lock.wait(60.0)
                if self._closed:
                    return
                doing = self._doing = self._wanted
                self._wanted = None
            assert doing is not None
            try:
                answer = self.write(doing.checkpoint, doing.since, doing.url, doing.partitions)
            except _Cancelled:
                continue
            except Exception as error:  # ours; the ps goes on without this checkpoint
                logger.exception("checkpoint %d", doing.checkpoint)
                text = f"{type(error).__name__}: {error}"
                answer = SnapshotsWritten(doing.checkpoint, error=text)
            finally:
                with self._lock:
                    self._doing = None
            doing.on_done(answer)

    def write(self, checkpoint: int, since: int, url: str, partitions: Sequence[PartitionId]) -> SnapshotsWritten:
        """Do what ``take`` does, in the caller's thread. Never raises for what goes wrong outside: it is in
        ``error``."""
        began = time.monotonic()
        snapshots: list[PartitionSnapshot] = []
        try:
            place = self._places(url)
            for partition in partitions:
                written = self._snapshot(place, checkpoint, since, partition)
                if written is not None:
                    snapshots.append(written.snapshot)
        except EverstepError as error:
            logger.warning("checkpoint %d is given up here: %s", checkpoint, error)
            return SnapshotsWritten(checkpoint, error=str(error))
        n = sum(i.bytes_written for i in snapshots)
        took_s = time.monotonic() - began
        logger.info("checkpoint %d: %d partitions, %s in %.1f s", checkpoint, len(snapshots), human_bytes(n), took_s)
        tables = tuple(self._store.specs())
        return SnapshotsWritten(checkpoint, tuple(snapshots), tables)

    def _snapshot(self, place: StoragePlace, checkpoint: int, since: int, partition: PartitionId) -> _Written | None:
        """Write one partition, tried again while the place does not answer. None: it is not here."""
        with self._lock:
            done = self._written.get(checkpoint, {}).get(partition)
            before = self._written.get(since, {}).get(partition) if since else None
        if done is not None:
            return done
        end = time.monotonic() + self._retry_s
        warned = False

        def again(error: StorageError) -> bool:
            nonlocal warned
            if not error.passing or time.monotonic() >= end:
                return False
            if not warned:
                logger.warning("checkpoint %d: %s; trying again, training goes on", checkpoint, error)
            warned = True
            return True

        written = retry(
            lambda: self._write(place, checkpoint, partition, before),
            StorageError,
            again=again,
            first_s=0.2,
            limit_s=10.0,
            wait=self._rest,
        )
        if written is not None:
            with self._lock:
                self._written.setdefault(checkpoint, {})[partition] = written
                for old in sorted(self._written)[:-REMEMBERED]:
                    del self._written[old]
        return written

    def _write(
        self, place: StoragePlace, checkpoint: int, partition: PartitionId, before: _Written | None
    ) -> _Written | None:
        store = self._store
        try:
            generation, marks = store.snapshot_begin(partition, -1 if before is None else before.generation)
        except KeyError:
            return None
        except RuntimeError as error:  # it is being rebuilt here
            raise StorageError(f"partition {partition} cannot be written yet: {error}") from None
        try:
            read = read_marks(marks)
            kind = "base" if before is None else "delta"
            path = f"images/{checkpoint:06d}/bucket-{partition:04d}-{kind}-{secrets.token_hex(4)}.img"
            head = SnapshotHead(
                job=self._job_name(),
                partition=partition,
                checkpoint=checkpoint,
                full=before is None,
                seq=read.seq,
                partitions=store.n_partitions,
                tables=tuple(store.specs()),
            )
            with place.create(path) as file:
                out = SnapshotFileWriter(file.write)
                out.head(head)
                out.marks(marks)
                began = time.monotonic()
                while True:
                    self._rest(0.0)
                    if not self._chunk(out, partition):
                        break
                    if self._bytes_per_s > 0:
                        self._rest(began + out.size_bytes / self._bytes_per_s - time.monotonic())
                rows = self._rows_of(partition)
                out.end()
                file.commit()
        except _Dropped:
            return None
        finally:
            store.snapshot_end(partition)
        self.bytes_written += out.size_bytes
        earlier: tuple[CheckpointFile, ...] = () if before is None else before.snapshot.files
        snapshot = PartitionSnapshot(
            partition=partition,
            seq=read.seq,
            fingerprint=read.fingerprint,
            watermarks=read.watermarks,
            files=(*earlier, out.checkpoint_file(path)),
            rows=rows,
            bytes_written=out.size_bytes,
        )
        return _Written(snapshot, generation)

    def _rows_of(self, partition: int) -> int:
        try:
            rows = self._store.partition_rows(partition)
            return sum(rows.get(spec.id, 0) for spec in self._store.specs())  # candidates are not rows yet
        except (KeyError, ValueError):
            raise _Dropped from None

    def _chunk(self, out: SnapshotFileWriter, partition: int) -> bool:
        """Write the next pages, one section for each stretch of pages of the same table; where only some rows of a page
        changed, those. False: that was all."""
        try:
            names, data = self._store.snapshot_next(partition, CHUNK_BYTES)
            tables = dict.fromkeys(table for table, _ in names)
            slots = {t: self._store.snapshot_slots(partition, t, [n for u, n in names if u == t]) for t in tables}
        except (KeyError, ValueError):
            raise _Dropped from None
        first, at = 0, 0
        while first < len(names):
            table = names[first][0]
            last = first
            while last < len(names) and names[last][0] == table:
                last += 1
            layout = PageLayout(*self._store.layout(table), self._store.page_bytes(table))
            size = (last - first) * layout.page_bytes
            numbers = [number for _, number in names[first:last]]
            pages = Pages(table, layout, numbers, data[at : at + size].reshape(len(numbers), -1))
            changed = slots[table]
            if changed is not None:
                changed = changed.reshape(len(numbers), -1)
                whole = np.unpackbits(changed, axis=1).sum(axis=1) * 2 > layout.slots
                if not whole.all():
                    out.rows(changed_rows(_only(pages, ~whole), changed[~whole]))
                pages = _only(pages, whole)
            if pages.numbers:
                out.pages(table, layout, pages.numbers, pages.data)
            first, at = last, at + size
        if at != len(data):
            raise InternalError(f"a snapshot gave {len(data)} bytes for {len(names)} pages, not {at}")
        return bool(names)

    def _rest(self, wait_s: float) -> None:
        """Wait, but not when a newer order has come: _Cancelled."""
        with self._lock:
            if wait_s > 0 and self._wanted is None and not self._closed:
                self._lock.wait(wait_s)
            if self._closed or self._wanted is not None:
                raise _Cancelled

    def _job_name(self) -> str:
        if self._job is None:
            self._job = read_spec(self._run_dir).name
        return self._job
