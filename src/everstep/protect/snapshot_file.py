"""Reads and writes one file of a partition's snapshot: its marks, and pages as they lie in memory, or the changed rows
of pages.

    "EVSIMG\\r\\n" | u16 version | u16 0 | u32 crc32 of the 12 bytes before
    sections:  u32 kind | u32 number | u64 bytes | u32 crc32 of the payload | u32 crc32 of the 20 bytes before | payload
      0 HEAD   msgpack of SnapshotHead
      1 MARKS  the partition's marks as the store gives them (a blob of kind MARKS)
      n PAGES  u32 table, pages, page_bits, head_bytes, record_bytes, page_bytes; (u32 page number, u32 bytes) of each;
               then the bytes of each without the zeros at its end
      n ROWS   u32 table, rows, page_bits, head_bytes, record_bytes, page_bytes; u32 slots; used bits; i64 keys; records
      last END empty; nothing follows

Little-endian. All of it is under a checksum, so that whatever was changed or cut is found here without the manifest;
the manifest has the length and blake2b-128 of the whole file besides, so that a file of another moment is found too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.bounds import MALFORMED
from everstep.errors import CheckpointError, StorageError
from everstep.ids import PartitionId
from everstep.model.snapshot import CheckpointFile
from everstep.model.table import TableSpec

MAGIC = b"EVSIMG\r\n"
VERSION = 1
SECTION_MAX_BYTES = 64 << 20
"""No section is larger, so a reader never allocates more because of a few wrong bytes."""

_FILE = struct.Struct("<8sHHI")
_SECTION = struct.Struct("<IIQII")
_PAGES = struct.Struct("<IIIIII")


class _SnapshotKind:
    HEAD, MARKS, PAGE, END, ROWS = 1, 2, 3, 4, 5


class SnapshotHead(
    msgspec.Struct, frozen=True, kw_only=True, rename={"partition": "bucket", "partitions": "buckets", "full": "base"}
):
    """Says what the file is part of. ``full``: all pages are in it, else those that changed since the file before
    it."""

    job: str
    partition: PartitionId
    checkpoint: int
    full: bool
    seq: int
    partitions: int  # of the job
    tables: tuple[TableSpec, ...]


_snapshot_head_decoder = msgspec.msgpack.Decoder(SnapshotHead)


class PageLayout(NamedTuple):
    """Says how a page of a table lies in memory: ``2**page_bits`` slots; used bitmap and keys in the first
    ``head_bytes``; then records of ``record_bytes``; all ``page_bytes``, zeros where nothing is."""

    page_bits: int
    head_bytes: int
    record_bytes: int
    page_bytes: int

    @property
    def slots(self) -> int:
        return 1 << self.page_bits

    @property
    def bitmap_bytes(self) -> int:
        return -(-self.slots // 8)

    @property
    def keys_at(self) -> int:
        """Return where the keys begin; before them is the bitmap, padded to 64 bytes."""
        return (self.bitmap_bytes + 63) & ~63

    @property
    def sound(self) -> bool:
        """Return whether a page can be so."""
        return (
            self.page_bits <= 20
            and self.head_bytes == self.keys_at + 8 * self.slots
            and self.head_bytes + self.slots * self.record_bytes <= self.page_bytes <= SECTION_MAX_BYTES // 2
        )

    def used(self, pages: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which slots are used, [pages, slots], of uint8 [pages, page_bytes]."""
        return np.unpackbits(pages[:, : self.bitmap_bytes], axis=1, bitorder="little")[:, : self.slots].astype(bool)

    def keys(self, pages: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the keys, [pages, slots], a view where pages are rows of one array."""
        return pages[:, self.keys_at : self.head_bytes].view("<i8")

    def records(self, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the records, [pages, slots, record_bytes], a view."""
        body = pages[:, self.head_bytes : self.head_bytes + self.slots * self.record_bytes]
        return np.lib.stride_tricks.as_strided(
            body, (len(pages), self.slots, self.record_bytes), (pages.strides[0], self.record_bytes, 1)
        )


class Pages(NamedTuple):
    """Holds pages: ``data`` is uint8 [pages, page_bytes]."""

    table: int
    layout: PageLayout
    numbers: list[int]
    data: NDArray[np.uint8]


class Rows(NamedTuple):
    """Holds slots that changed: whether each is used now, its key and record; zeros where it is not.

    ``slots``: uint32 [n], counted through all pages; ``used``: bool [n]; ``records``: uint8 [n, record_bytes]."""

    table: int
    layout: PageLayout
    slots: NDArray[np.uint32]
    used: NDArray[np.bool_]
    keys: NDArray[np.int64]
    records: NDArray[np.uint8]


class MarksBlob(bytes):
    """Is the blob of marks, in a type of its own."""


Part = SnapshotHead | MarksBlob | Pages | Rows


def checksum() -> blake2b:
    """Return a new hash of the kind that manifests use."""
    return blake2b(digest_size=16)


class SnapshotFileWriter:
    """Writes the sections in order: ``head``, ``marks``, any number of ``pages``, ``end``. ``write`` takes the bytes;
    its errors pass through."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._hash = checksum()
        self._number = 0
        self.size_bytes = 0
        start = _FILE.pack(MAGIC, VERSION, 0, 0)[:12]
        self._put(start + struct.pack("<I", zlib.crc32(start)))

    def head(self, head: SnapshotHead) -> None:
        self._section(_SnapshotKind.HEAD, [msgspec.msgpack.encode(head)])

    def marks(self, blob: bytes) -> None:
        self._section(_SnapshotKind.MARKS, [blob])

    def pages(self, table: int, layout: PageLayout, numbers: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write pages: ``data`` is uint8, len(numbers) * page_bytes."""
        size = layout.page_bytes
        flat = np.ascontiguousarray(data).reshape(-1)
        if flat.size != len(numbers) * size:
            raise ValueError(f"{len(numbers)} pages of {size} bytes are not {flat.size} bytes")
        most = max(1, (SECTION_MAX_BYTES // 2) // (size + 8))
        for at in range(0, len(numbers), most):
            some = numbers[at : at + most]
            stored = [flat[(at + i) * size : (at + i + 1) * size].tobytes().rstrip(b"\0") for i in range(len(some))]
            index = np.array([[n, len(b)] for n, b in zip(some, stored, strict=True)], "<u4")
            self._section(_SnapshotKind.PAGE, [_PAGES.pack(table, len(some), *layout), index.tobytes(), *stored])

    def rows(self, rows: Rows) -> None:
        """At most as many as fit into a section: those of a chunk of pages do."""
        head = _PAGES.pack(rows.table, len(rows.slots), *rows.layout)
        used = np.packbits(rows.used, bitorder="little")
        columns = (rows.slots.astype("<u4"), used, rows.keys.astype("<i8"), np.ascontiguousarray(rows.records))
        self._section(_SnapshotKind.ROWS, [head, *(c.tobytes() for c in columns)])

    def end(self) -> None:
        self._section(_SnapshotKind.END, [])

    def checkpoint_file(self, path: str) -> CheckpointFile:
        """What the manifest says of the file, once it is complete."""
        return CheckpointFile(path, self.size_bytes, self._hash.hexdigest())

    def _section(self, kind: int, pieces: list[bytes]) -> None:
        payload = b"".join(pieces)
        if len(payload) > SECTION_MAX_BYTES:
            raise ValueError(f"section {self._number} of {len(payload)} bytes: at most {SECTION_MAX_BYTES}")
        start = _SECTION.pack(kind, self._number, len(payload), zlib.crc32(payload), 0)[:20]
        self._put(b"".join((start, struct.pack("<I", zlib.crc32(start)), payload)))
        self._number += 1

    def _put(self, data: bytes) -> None:
        self._write(data)
        self._hash.update(data)
        self.size_bytes += len(data)


def read_snapshot_file(file: BinaryIO, name: str, expected: CheckpointFile | None = None) -> Iterator[Part]:
    """The parts of a file in order: the head, the marks, then pages, each checked before it is handed out.

    Raises CheckpointError, one line that names the file and what is wrong, also at the end if its length or checksum is
    not that ``expected``: what was handed out before must not be used then. StorageError: it cannot be read.
    """
    reader = Reader(file, name)
    reader.begin(MAGIC, VERSION, "a snapshot of a partition")
    number, kind = 0, 0
    while kind != _SnapshotKind.END:
        kind, payload = reader.section(number)
        match (number, kind):
            case (0, _SnapshotKind.HEAD):
                try:
                    yield _snapshot_head_decoder.decode(payload)
                except MALFORMED as error:
                    raise CheckpointError(f"{name}: its head cannot be read: {error}") from None
            case (1, _SnapshotKind.MARKS):
                yield MarksBlob(payload)
            case (n, _SnapshotKind.PAGE) if n >= 2:
                yield _pages(payload, name, number)
            case (n, _SnapshotKind.ROWS) if n >= 2:
                yield _rows(payload, name, number)
            case (n, _SnapshotKind.END) if n >= 2 and not payload:
                pass
            case _:
                raise CheckpointError(f"{name}: section {number} is of kind {kind}, which cannot stand there")
        number += 1
    reader.end(expected)


class Reader:
    """Reads a file of sections, and sums up what it read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self.hash = checksum()
        self.size_bytes = 0

    def begin(self, magic: bytes, version: int, what: str) -> None:
        """Read the first bytes of the file. Raises CheckpointError if it is not ``what``, or of another version."""
        start = self.take(_FILE.size, "its beginning")
        found, other, _, crc = _FILE.unpack(start)
        if found != magic:
            raise CheckpointError(f"{self._name} is not {what}, or its beginning was changed")
        if crc != zlib.crc32(start[:12]):
            raise CheckpointError(f"{self._name} was changed: the checksum of its beginning is wrong")
        if other != version:
            raise CheckpointError(
                f"{self._name} is of version {other}, this everstep reads version {version}: install a newer one"
            )

    def some(self, n: int) -> bytes:
        try:
            data = self._file.read(n)
        except OSError as error:
            raise StorageError(f"cannot read {self._name}: {error.strerror or error}") from error
        self.hash.update(data)
        self.size_bytes += len(data)
        return data

    def take(self, n: int, what: str) -> bytes:
        data = self.some(n)
        if len(data) != n:
            raise CheckpointError(f"{self._name} was cut: it ends after {self.size_bytes} bytes, inside {what}")
        return data

    def end(self, expected: CheckpointFile | None) -> None:
        """Nothing follows, and it was the file that the manifest means."""
        if self.some(1):
            raise CheckpointError(f"{self._name} goes on after its end")
        if expected is not None and (self.size_bytes, self.hash.hexdigest()) != (
            expected.size_bytes,
            expected.checksum,
        ):
            raise CheckpointError(
                f"{self._name} is whole, but not the file that the manifest means: its checksum is another one"
            )

    def section(self, number: int) -> tuple[int, bytes]:
        what = f"section {number}"
        head = self.take(_SECTION.size, what)
        kind, its_number, n, crc, head_crc = _SECTION.unpack(head)
        if head_crc != zlib.crc32(head[:20]):
            raise CheckpointError(f"{self._name} was changed: the checksum of the head of section {number} is wrong")
        if its_number != number or n > SECTION_MAX_BYTES:
            raise CheckpointError(f"{self._name}: section {number} says it is {its_number}, of {n} bytes")
        payload = self.take(n, what)
        if crc != zlib.crc32(payload):
            raise CheckpointError(f"{self._name} was changed: the checksum of section {number} is wrong")
        return kind, payload


def _pages(payload: bytes, name: str, number: int) -> Pages:
    wrong = CheckpointError(f"{name}: section {number} does not hold the pages that it says")
    if len(payload) < _PAGES.size:
        raise wrong
    table, n, *rest = _PAGES.unpack_from(payload)
    layout = PageLayout(*rest)
    at = _PAGES.size + 8 * n
    if at > len(payload) or not layout.sound or n * layout.page_bytes > SECTION_MAX_BYTES:
        raise wrong
    index = np.frombuffer(payload, "<u4", 2 * n, _PAGES.size).reshape(n, 2)
    if at + int(index[:, 1].sum(dtype=np.int64)) != len(payload) or bool((index[:, 1] > layout.page_bytes).any()):
        raise wrong
    data = np.zeros((n, layout.page_bytes), np.uint8)
    source = np.frombuffer(payload, np.uint8)
    for i, stored in enumerate(index[:, 1].tolist()):
        data[i, :stored] = source[at : at + stored]
        at += stored
    return Pages(table, layout, index[:, 0].tolist(), data)


def _rows(payload: bytes, name: str, number: int) -> Rows:
    wrong = CheckpointError(f"{name}: section {number} does not hold the rows that it says")
    if len(payload) < _PAGES.size:
        raise wrong
    table, n, *rest = _PAGES.unpack_from(payload)
    layout = PageLayout(*rest)
    bitmap = -(-n // 8)
    if not layout.sound or len(payload) != _PAGES.size + 4 * n + bitmap + 8 * n + n * layout.record_bytes:
        raise wrong
    at = _PAGES.size
    slots = np.frombuffer(payload, "<u4", n, at)
    used = np.unpackbits(np.frombuffer(payload, np.uint8, bitmap, at + 4 * n), bitorder="little")[:n].astype(bool)
    keys = np.frombuffer(payload, "<i8", n, at + 4 * n + bitmap)
    records = np.frombuffer(payload, np.uint8, n * layout.record_bytes, at + 12 * n + bitmap)
    return Rows(table, layout, slots, used, keys, records.reshape(n, layout.record_bytes))


def changed_rows(pages: Pages, changed: NDArray[np.uint8]) -> Rows:
    """Return the rows of ``pages`` whose bits are set in ``changed`` (uint8 [pages, bitmap_bytes])."""
    layout, data = pages.layout, pages.data
    which = np.unpackbits(changed, axis=1, bitorder="little")[:, : layout.slots].astype(bool)
    page, slot = np.nonzero(which)
    numbers = np.asarray(pages.numbers, np.uint32)
    return Rows(
        pages.table,
        layout,
        (numbers[page] << np.uint32(layout.page_bits)) + slot.astype(np.uint32),
        layout.used(data)[page, slot],
        layout.keys(data)[page, slot],
        layout.records(data)[page, slot],
    )
