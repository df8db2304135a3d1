"""Builds and parses blobs: differences and contents of partitions, as ps send them to each other. The Python twin of
native/blob.h.

A blob is a header, a block of marks and parts, one a table; little-endian, packed. Production reads and writes blobs in
C++ only; here they are read for tests, and their checksums are made and checked (``seal``, ``check_seal``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from everstep.model.table import TRAVELLING
from everstep.native._native import crc32c

MAGIC = 0x42535645  # "EVSB"
VERSION = 2
LAST = 1  # flag of a part: contents up to the table's end
GRADIENTS = 2  # flag of a part of a change: a rate and gradients, not what they made of the rows
NO_PARTITION = 0xFFFFFFFF
MOST_COUNT = 1 << 62  # of a seq, clock or watermark: they go on being counted
MOST_SLOTS = 0xFF000000

_HEADER = struct.Struct("<IHHIIqII")
_MARKS = struct.Struct("<QqII")
_MARK = struct.Struct("<qqq")
_PART = struct.Struct("<6I")
_GRADIENTS = struct.Struct("<dII")


class BlobKind(IntEnum):
    CHANGE = 1  # a difference: XOR of what was and what is
    HEADS = 2  # contents: which slots are used, and their keys
    BODIES = 3  # contents: records
    MARKS = 4  # all marks; ends a sweep of contents


@dataclass
class BlobMarks:
    """Holds marks: ``shards``: (shard, watermark, fence); watermark -1: the mark is gone. ``initialised``: table
    ids."""

    fingerprint: int = 0
    clock: int = 0
    shards: list[tuple[int, int, int]] = field(default_factory=list)
    initialised: list[int] = field(default_factory=list)


@dataclass
class BlobPart:
    """Is a part of a blob: ``slots`` uint32 [n]. CHANGE: ``toggled`` bool [n], ``keys`` int64 of those, ``records``
    uint8 [n, record], both XOR; or, of a dense table, in place of records the ``gradients`` float32 [n, dim] of one
    update, its ``rate`` and its ``options`` (``TRAVELLING``; none: the table's own). HEADS: ``keys`` [n]. BODIES:
    ``records``. Contents cover the slots ``[lo, hi)``."""

    table: int
    slots: NDArray[np.uint32]
    toggled: NDArray[np.bool_] | None = None
    keys: NDArray[np.int64] | None = None
    records: NDArray[np.uint8] | None = None
    gradients: NDArray[np.float32] | None = None
    rate: float = 0.0
    options: tuple[float, ...] = ()
    lo: int = 0
    hi: int = 0
    flags: int = 0


@dataclass
class Blob:
    kind: BlobKind
    partition: int
    seq: int
    marks: BlobMarks
    parts: list[BlobPart] = field(default_factory=list)


def build(blob: Blob) -> bytes:
    """Return the bytes of a blob, sealed."""
    marks = _MARKS.pack(blob.marks.fingerprint, blob.marks.clock, len(blob.marks.shards), len(blob.marks.initialised))
    marks += b"".join(_MARK.pack(*mark) for mark in blob.marks.shards)
    marks += np.array(blob.marks.initialised, "<u4").tobytes()
    out = [_HEADER.pack(MAGIC, VERSION, blob.kind, blob.partition, len(blob.parts), blob.seq, len(marks), 0), marks]
    for part in blob.parts:
        n = len(part.slots)
        toggled = part.toggled if part.toggled is not None else np.zeros(0, np.bool_)
        out.append(_PART.pack(part.table, n, part.lo, part.hi, part.flags, int(toggled.sum())))
        out.append(part.slots.astype("<u4").tobytes())
        if blob.kind is BlobKind.CHANGE:
            bits = np.packbits(toggled, bitorder="little").tobytes()
            out.append(bits.ljust((n + 63) // 64 * 8, b"\0"))
        if part.keys is not None and blob.kind is not BlobKind.BODIES:
            out.append(part.keys.astype("<i8").tobytes())
        if part.gradients is not None:
            out.append(_GRADIENTS.pack(part.rate, part.gradients.shape[1], len(part.options)))
            out.append(np.array(part.options, "<f8").tobytes() + part.gradients.astype("<f4").tobytes())
        if part.records is not None and blob.kind is not BlobKind.HEADS:
            out.append(part.records.tobytes())
    return seal(b"".join(out))


def parse(data: bytes, record_bytes: Callable[[int], int] | None = None) -> Blob:
    """Return the blob in ``data``. ``record_bytes(table)``; not needed for marks. ValueError: it is none."""
    try:
        magic, version, kind_no, partition, n_parts, seq, marks_bytes, _ = _HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError("a blob does not begin as one of this version")
        kind, at = BlobKind(kind_no), _HEADER.size
        if not 0 <= seq <= MOST_COUNT:
            raise ValueError("a blob has a seq that cannot be")
        if kind is BlobKind.MARKS and n_parts:
            raise ValueError("a blob of marks has parts")
        fingerprint, clock, n_shards, n_initialised = _MARKS.unpack_from(data, at)
        if marks_bytes != _MARKS.size + n_shards * _MARK.size + n_initialised * 4:
            raise ValueError("a blob has marks of another size")
        at += _MARKS.size
        shards = [_MARK.unpack_from(data, at + i * _MARK.size) for i in range(n_shards)]
        at += n_shards * _MARK.size
        tables = struct.unpack_from(f"<{n_initialised}I", data, at)
        _check_marks(kind, clock, shards)
        out = Blob(kind, partition, seq, BlobMarks(fingerprint, clock, shards, list(tables)))
        at += n_initialised * 4

        def take(count: int, dtype: str) -> NDArray[np.generic]:
            nonlocal at
            array = np.frombuffer(data, dtype, count, at) if count else np.zeros(0, dtype)
            at += array.nbytes
            return array

        for _ in range(n_parts):
            table, n, lo, hi, flags, n_toggled = _PART.unpack_from(data, at)
            at += _PART.size
            part = BlobPart(table, take(n, "<u4").astype(np.uint32), lo=lo, hi=hi, flags=flags)
            if kind is BlobKind.CHANGE:
                bits = take((n + 63) // 64 * 8, "u1").astype(np.uint8)
                part.toggled = np.unpackbits(bits, bitorder="little")[:n].astype(np.bool_)
            if kind is not BlobKind.BODIES:
                part.keys = take(n_toggled if kind is BlobKind.CHANGE else n, "<i8").astype(np.int64)
            if kind is BlobKind.CHANGE and flags & GRADIENTS:
                part.rate, dim, n_options = _GRADIENTS.unpack_from(data, at)
                at += _GRADIENTS.size
                if n_options not in (0, len(TRAVELLING)):
                    raise ValueError("a blob of a change has another number of options")
                part.options = tuple(take(n_options, "<f8").tolist())
                part.gradients = take(n * dim, "<f4").astype(np.float32).reshape(n, dim)
            elif kind is not BlobKind.HEADS:
                if record_bytes is None:
                    raise ValueError("a blob of marks has records")
                width = record_bytes(table)
                part.records = take(n * width, "u1").astype(np.uint8).reshape(n, width)
            _check_part(kind, part, n_toggled)
            out.parts.append(part)
    except struct.error as error:
        raise ValueError(f"a blob ends too early: {error}") from None
    if at != len(data):
        raise ValueError("a blob goes on after its end")
    return out


def parse_marks(data: bytes) -> Blob:
    """Return the blob of a partition's marks. ValueError: it is none."""
    if len(data) < _HEADER.size:
        raise ValueError("a blob ends too early")
    if (kind := _HEADER.unpack_from(data)[2]) != BlobKind.MARKS:
        raise ValueError(f"these are not the marks of a partition: a blob of kind {kind}")
    return parse(data)


def _check_marks(kind: BlobKind, clock: int, shards: list[tuple[int, int, int]]) -> None:
    if not 0 <= clock <= MOST_COUNT:
        raise ValueError("a blob has a clock that cannot be")
    for shard, watermark, fence in shards:
        gone = kind is BlobKind.CHANGE and watermark == -1
        if shard < 0 or fence < 0 or (watermark < 0 and not gone):
            raise ValueError("a blob has a mark with a negative number")
        if watermark > MOST_COUNT:
            raise ValueError("a blob has a mark that cannot be")


def _check_part(kind: BlobKind, part: BlobPart, n_toggled: int) -> None:
    by_gradients = kind is BlobKind.CHANGE and part.flags == GRADIENTS
    if part.flags & ~LAST and not by_gradients:
        raise ValueError("a blob has unknown flags")
    slots = part.slots.astype(np.int64)
    if (slots >= MOST_SLOTS).any():
        raise ValueError("a blob has a slot that cannot be")
    if kind is BlobKind.CHANGE:
        assert part.toggled is not None
        if part.lo or part.hi or (part.flags and (not by_gradients or n_toggled)):
            raise ValueError("a blob of a change has a wrong part")
        if int(part.toggled.sum()) != n_toggled:
            raise ValueError("a blob toggles another number of rows than it says")
        return
    if n_toggled or part.lo > part.hi:
        raise ValueError("a blob of contents has a wrong part")
    if kind is BlobKind.BODIES and part.lo == 0 and part.hi == 0:
        return  # of listed slots
    if (slots < part.lo).any() or (not part.flags & LAST and (slots >= part.hi).any()):
        raise ValueError("a blob has a slot outside of what it covers")
    if (np.diff(slots) <= 0).any():
        raise ValueError("a blob has slots that do not ascend")


def _crc(data: bytes) -> int:
    return crc32c(data[_HEADER.size :], crc32c(data[:28]))


def seal(data: bytes) -> bytes:
    """Return the blob with its checksum (crc32c of all but the checksum) written into its header."""
    return data[:28] + struct.pack("<I", _crc(data)) + data[_HEADER.size :]


def check_seal(data: bytes) -> None:
    """ValueError: the blob's checksum is wrong."""
    if len(data) < _HEADER.size:
        raise ValueError("a blob ends too early")
    (crc,) = struct.unpack_from("<I", data, 28)
    if crc != _crc(data):
        raise ValueError("a blob's checksum is wrong: it is damaged")
