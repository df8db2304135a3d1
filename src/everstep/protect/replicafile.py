"""Reads and writes one file with the training state of a replica (mode allreduce), whatever is in it.

    "EVSREP\\r\\n" | u16 version | u16 0 | u32 crc32 of the 12 bytes before
    sections:  u32 kind | u32 number | u64 bytes | u32 crc32 of the payload | u32 crc32 of the 20 bytes before | payload
      0 HEAD   msgpack of ReplicaHead
      n DATA   the header of the state, then the tensors' bytes, cut into sections of at most 16 MiB
      last END empty; nothing follows

Little-endian, all of it under a checksum, as a partition's snapshot is (``snapshot_file``); what the header of the
state says is everstep.allreduce.serialize. Needs no torch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import CheckpointError
from everstep.model.group import Position
from everstep.model.snapshot import CheckpointFile
from everstep.protect.snapshot_file import Reader, checksum

MAGIC = b"EVSREP\r\n"
VERSION = 1
PART_BYTES = 16 << 20  # at most
WRITE_BYTES = 2 << 20  # of a section, as they are written: about 3 ms of work
HEADER_MAX_BYTES = 64 << 20

_FILE = struct.Struct("<8sHHI")
_SECTION = struct.Struct("<IIQII")


class _ReplicaKind:
    HEAD, DATA, END = 1, 2, 3


class ReplicaHead(msgspec.Struct, frozen=True, kw_only=True, rename={"position": "mark"}):
    """Has the sizes of the serialized state: ``header_bytes``, ``body_bytes``."""

    job: str
    checkpoint: int
    position: Position
    header_bytes: int
    body_bytes: int


_replica_head_decoder = msgspec.msgpack.Decoder(ReplicaHead)


def write_replica_file(
    write: Callable[[Any], object],
    head: ReplicaHead,
    header: bytes,
    body: memoryview,
    before: Callable[[int], None] = lambda size: None,
) -> CheckpointFile:
    """Write the file; return what the manifest says of it, but for its path. ``write`` takes bytes; its errors pass
    through. ``before``: called in front of each piece of work, with its bytes; it may wait."""
    hashed = checksum()
    size = 0
    number = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal size
        write(data)
        hashed.update(data)
        size += len(data)

    def section(kind: int, payload: bytes | memoryview) -> None:
        nonlocal number
        start = _SECTION.pack(kind, number, len(payload), zlib.crc32(payload), 0)[:20]
        put(start + struct.pack("<I", zlib.crc32(start)))
        if payload:
            put(payload)
        number += 1

    start = _FILE.pack(MAGIC, VERSION, 0, 0)[:12]
    put(start + struct.pack("<I", zlib.crc32(start)))
    section(_ReplicaKind.HEAD, msgspec.msgpack.encode(head))
    for whole in (memoryview(header), body):
        for at in range(0, len(whole), WRITE_BYTES):
            part = whole[at : at + WRITE_BYTES]
            before(len(part))
            section(_ReplicaKind.DATA, part)
    section(_ReplicaKind.END, b"")
    return CheckpointFile("", size, hashed.hexdigest())


def read_replica_file(
    file: BinaryIO, name: str, expected: CheckpointFile | None = None
) -> Iterator[ReplicaHead | bytes]:
    """The head, then the bytes of header and tensors in order, each part checked before it is handed out.

    Raises CheckpointError, one line that names the file and what is wrong, also at the end if it is not the file that
    is ``expected``: what was handed out must not be used then. StorageError: it cannot be read."""
    reader = Reader(file, name)
    reader.begin(MAGIC, VERSION, "the state of a replica")
    kind, payload = reader.section(0)
    if kind != _ReplicaKind.HEAD:
        raise CheckpointError(f"{name}: section 0 is of kind {kind}, which cannot stand there")
    try:
        head = _replica_head_decoder.decode(payload)
    except MALFORMED as error:
        raise CheckpointError(f"{name}: its head cannot be read: {error}") from None
    if not 0 <= head.header_bytes <= HEADER_MAX_BYTES or head.body_bytes < 0:
        raise CheckpointError(f"{name}: its head says {head.header_bytes} and {head.body_bytes} bytes")
    yield head
    left = head.header_bytes + head.body_bytes
    number = 1
    while True:
        kind, payload = reader.section(number)
        number += 1
        if kind == _ReplicaKind.END and not payload and not left:
            break
        if kind != _ReplicaKind.DATA or not 0 < len(payload) <= left:
            raise CheckpointError(f"{name}: section {number - 1} of {len(payload)} bytes cannot stand there")
        left -= len(payload)
        yield payload
    reader.end(expected)
