"""Reads one ps's audit log into columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.bounds import MALFORMED
from everstep.ids import Incarnation, Slot
from everstep.monitor.records import AcquiredRecord, Applied, AuditRecord, CutRecord, FinalCutRecord, ReleasedRecord
from everstep.storage.chain import BROKEN_CHAIN, read_chain

ALL = -1  # in PsLog.partitions: every partition owned then


class PartitionStint(NamedTuple):
    """Is one ps's time with one partition: the pushes ``[first, last)`` of its log, as far as they name the partition.

    ``acquired``: how it came; None: it began here, empty. ``released``: it left in order. ``at``: when it came, 0.0:
    unknown.
    """

    log: PsLog
    acquired: AcquiredRecord | None
    first: int
    last: int
    released: ReleasedRecord | None
    at: float


class CutSeen(NamedTuple):
    """A cut: how many pushes precede it, its record's number, the partitions owned then, their fingerprints
    (uint64)."""

    before: int
    seq: int
    owned: NDArray[np.int64]
    found: NDArray[np.uint64]


class PsLog:
    """Holds one ps's records as columns, in the order in which they were written.

    ``shard, lo, hi, lease, worker, incarnation, applied: int64 [n]``; ``skipped``, ``left_out: bool [n]`` (skipped by
    the script's own doing); ``joined: bool [n]`` (of the step of the record before); ``at: float64 [n]``
    (seconds since 1970); ``partitions: int64 [n]``, an index into ``bitmaps`` or -1 for all owned then. ``owned``: at
    the beginning; ``moved``: whether that changed. ``stints``: by partition, in order.
    """

    def __init__(self, slot: Slot, incarnation: Incarnation, n_partitions: int, owned: Sequence[int]) -> None:
        self.slot = slot
        self.life = incarnation
        self.n_partitions = n_partitions
        self.owned: NDArray[np.int64] = np.array(owned, np.int64)
        self.bitmaps: list[bytes] = []
        self.cuts: list[CutSeen] = []
        self.stints: dict[int, list[PartitionStint]] = {}
        self.moved = False
        self.closed = False
        self.problem: str | None = None
        self.bad: list[str] = []
        self.n = 0
        self._member: NDArray[np.bool_] | None = None
        self._now: set[int] = {int(b) for b in owned}
        self._owned_now = self.owned
        self._changes: list[tuple[int, NDArray[np.int64]]] = [(0, self.owned)]  # owned from this push on
        self._open: dict[int, tuple[AcquiredRecord | None, int]] = {int(b): (None, 0) for b in owned}
        self._rows: list[tuple[int, ...]] = []
        self._at: list[float] = []

    def __repr__(self) -> str:
        return f"<log of {self.name} #{self.life} {self.n} pushes {len(self.cuts)} cuts closed={self.closed}>"

    @property
    def name(self) -> str:
        return f"ps:{self.slot}"

    def fill(self, records: Iterable[bytes]) -> None:
        """Take the records of the file in; what is wrong with one by itself goes to ``bad``."""
        decoder = msgspec.msgpack.Decoder(AuditRecord)
        known: dict[bytes, int] = {}
        for seq, raw in enumerate(records):
            try:
                record = decoder.decode(raw)
            except MALFORMED as error:
                self.bad.append(f"bad record: number {seq} cannot be read: {error}")
                continue
            if record.seq != seq:
                self.bad.append(f"sequence: record {seq} says it is number {record.seq}")
            if self.closed:
                self.bad.append(f"bad record: number {seq} comes after the log was closed")
            if isinstance(record, Applied):
                index = ALL
                if record.partitions:
                    index = known.setdefault(record.partitions, len(known))
                    if index == len(self.bitmaps):
                        self.bitmaps.append(record.partitions)
                self._rows.append(
                    (
                        record.shard,
                        record.lo,
                        record.hi,
                        record.lease,
                        record.worker,
                        record.worker_incarnation,
                        record.applied,
                        index,
                        record.skipped,
                        record.left_out,
                        record.joined,
                    )
                )
                self._at.append(record.at)
            elif isinstance(record, AcquiredRecord | ReleasedRecord):
                self._change(record, seq)
            else:
                self._take_cut(record, seq)
        self.n = len(self._rows)
        columns = np.array(self._rows, np.int64).reshape(self.n, 11).T
        self.shard, self.lo, self.hi, self.lease, self.worker, self.incarnation = columns[:6]
        self.applied, self.partitions = columns[6], columns[7]
        self.skipped, self.left_out, self.joined = columns[8:11].astype(bool)
        self.at = np.array(self._at)
        self._rows, self._at = [], []
        for partition in list(self._open):
            self._end(partition, None)

    def _change(self, record: AcquiredRecord | ReleasedRecord, seq: int) -> None:
        partition = record.partition
        if not 0 <= partition < self.n_partitions or (partition in self._now) == isinstance(record, AcquiredRecord):
            word = "came" if isinstance(record, AcquiredRecord) else "left"
            self.bad.append(f"bad record: number {seq} says that partition {partition} {word}, which cannot be")
            return
        self.moved = True
        if isinstance(record, AcquiredRecord):
            if len(record.shards) % 16:
                self.bad.append(f"bad record: number {seq} has watermarks of {len(record.shards)} bytes")
            self._now.add(partition)
            self._open[partition] = (record, len(self._rows))
        else:
            self._now.discard(partition)
            self._end(partition, record)
        self._owned_now = np.array(sorted(self._now), np.int64)
        self._changes.append((len(self._rows), self._owned_now))

    def _end(self, partition: int, released: ReleasedRecord | None) -> None:
        acquired, first = self._open.pop(partition)
        last = len(self._rows) or self.n
        at = acquired.at if acquired is not None else 0.0
        self.stints.setdefault(partition, []).append(PartitionStint(self, acquired, first, last, released, at))

    def owned_spans(self) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        """``(first, last, owned)``: pushes ``[first, last)`` were made while these partitions were owned."""
        ends = [at for at, _ in self._changes[1:]] + [self.n]
        for (first, owned), last in zip(self._changes, ends, strict=True):
            if first < last:
                yield first, last, owned

    def _take_cut(self, record: CutRecord | FinalCutRecord, seq: int) -> None:
        self.closed = self.closed or isinstance(record, FinalCutRecord)
        if len(record.fingerprints) != 8 * len(self._owned_now):
            self.bad.append(f"bad record: number {seq} has fingerprints of {len(record.fingerprints) // 8} partitions")
            return
        found = np.frombuffer(record.fingerprints, "<u8").astype(np.uint64)
        self.cuts.append(CutSeen(len(self._rows), seq, self._owned_now, found))

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Return which partitions (bool [owned]) of those owned at first a record with this ``partitions`` index was
        applied to."""
        if index == ALL:
            return np.ones(len(self.owned), bool)
        return bits(self.bitmaps[index], self.n_partitions)[self.owned]

    def rows_of(self, partition: int, first: int, last: int) -> NDArray[np.int64]:
        """Return numbers of the pushes in ``[first, last)`` that were applied to ``partition``, which was owned
        then."""
        if self._member is None:
            self._member = np.ones((len(self.bitmaps) + 1, self.n_partitions), bool)  # [ALL]: the last row
            for i, bitmap in enumerate(self.bitmaps):
                self._member[i] = bits(bitmap, self.n_partitions)
        return np.flatnonzero(self._member[self.partitions[first:last], partition]) + first


def bits(bitmap: bytes, n: int) -> NDArray[np.bool_]:
    """Return a little-endian bitmap as bool [n]."""
    found = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").astype(bool)
    out = np.zeros(n, bool)
    out[: min(n, len(found))] = found[:n]
    return out


def read_log(path: Path) -> PsLog:
    """Return one audit log. What is wrong with it is in ``problem`` and ``bad``; raises only if it cannot be read at
    all."""
    header, records, problem = read_chain(path)
    try:
        slot, life, n = int(header["slot"]), int(header["incarnation"]), int(header["buckets"])
        owned = np.flatnonzero(bits(bytes.fromhex(str(header["owned"])), n)).tolist()
    except (KeyError, ValueError):
        problem = problem or f"{BROKEN_CHAIN}: the header of {path.name} is not that of an audit log"
        slot, life = _from_name(path)
        n, owned, records = 0, [], []
    log = PsLog(Slot(slot), Incarnation(life), n, owned)
    log.problem = problem
    log.fill(records)
    return log


def _from_name(path: Path) -> tuple[int, int]:
    slot, _, life = path.stem.removeprefix("ps-").partition(".")
    return (int(slot), int(life)) if slot.isdecimal() and life.isdecimal() else (-1, 0)
