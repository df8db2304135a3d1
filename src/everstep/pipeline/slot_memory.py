"""Keeps one copy of a stage's state in a memory file that outlives the process which writes it. Without torch.

A slot is whole or it is not: the word that it is whole is written last, behind checksums of every block, and is taken
back before anything else in the slot changes."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.bounds import MALFORMED
from everstep.errors import CheckpointError, PlatformError
from everstep.model.group import Committed, Position
from everstep.native import crc32c

BLOCK_BYTES: Final = 256 << 10
"""A copy goes on by blocks of this size; each has a checksum."""

_MAGIC: Final = b"everCOPY"
_HEAD: Final = struct.Struct("<8sqqqqqqqI")  # magic, whole, a SlotHead; crc of that
_WHOLE: Final = struct.Struct("<q")
_WHOLE_AT: Final = 8
_PAGE: Final = 4096
_MOST_BYTES: Final = 1 << 42
_RESERVE: Final = 1 / 16  # of the machine's memory: not taken for copies


class CopyMeta(msgspec.Struct, frozen=True):
    """Says what a copy of all stages is of; in the slot of the first stage. ``lineage``: that its state belongs to;
    ``steps``: committed ones that the journal may lack."""

    position: Position = Position()
    loop: int = 0
    lineage: int = 0
    slot: int = 0
    incarnation: int = 0
    steps: tuple[Committed, ...] = ()


_meta_decoder: Final = msgspec.msgpack.Decoder(CopyMeta)


class SlotHead(NamedTuple):
    """Is what a whole slot says of itself: the step that is next, the life of the worker that wrote it, sizes, and the
    checksum of ``meta`` and header."""

    step: int
    life: int
    meta_bytes: int
    header_bytes: int
    body_bytes: int
    text_crc: int

    @property
    def blocks(self) -> int:
        return -(-self.body_bytes // BLOCK_BYTES)

    @property
    def text_at(self) -> int:
        return up(_PAGE + 4 * self.blocks)

    @property
    def body_at(self) -> int:
        return up(self.text_at + self.meta_bytes + self.header_bytes)

    @property
    def size_bytes(self) -> int:
        return up(self.body_at + self.body_bytes)


class CopySlot:
    """Is one slot, seen from one process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self._head: SlotHead | None = None  # of the copy that is being written

    def __repr__(self) -> str:
        return f"<CopySlot {self.head()}>"

    def _mapped(self, least: int) -> mmap.mmap:
        size = os.fstat(self._fd).st_size
        if size < least:
            missing = least - size
            free = free_memory()
            if missing > free:
                raise PlatformError(
                    f"no memory for a copy of this stage: it takes {missing / 1e6:.0f} MB more, and the machine has "
                    f"{free / 1e6:.0f} MB to spare"
                )
            try:
                os.ftruncate(self._fd, least)
                os.posix_fallocate(self._fd, 0, least)
            except OSError as error:
                raise PlatformError(f"no memory for a copy of this stage, {least / 1e6:.0f} MB: {error}") from None
            size = least
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._fd, size)
        return self._map

    def head(self) -> SlotHead | None:
        """Return what is there; None: nothing whole."""
        if os.fstat(self._fd).st_size < _PAGE:
            return None
        memory = self._mapped(0)
        magic, whole, *numbers, crc = _HEAD.unpack_from(memory)
        if magic != _MAGIC or whole != 1 or crc != _crc_of(numbers):
            return None
        found = SlotHead(*numbers)
        if min(found) < 0 or found.size_bytes > min(len(memory), _MOST_BYTES):
            return None
        return found

    def clear(self) -> None:
        """Have nothing whole there."""
        if os.fstat(self._fd).st_size >= _PAGE:
            _WHOLE.pack_into(self._mapped(0), _WHOLE_AT, 0)

    def begin(self, step: int, life: int, meta: bytes, header: bytes, body: int) -> tuple[Any, Any]:
        """Begin a copy: what was there is no more. Returns where its bytes belong, uint8 [body], and the checksums of
        its blocks, uint32. Raises PlatformError: there is no memory for it."""
        self.clear()
        head = self._head = SlotHead(step, life, len(meta), len(header), body, crc32c(meta + header))
        memory = self._mapped(head.size_bytes)
        memory[head.text_at : head.text_at + len(meta) + len(header)] = meta + header
        return self._arrays(memory, head)

    def end(self) -> None:
        """Say that the copy is whole."""
        head, memory = self._head, self._map
        assert head is not None and memory is not None
        _HEAD.pack_into(memory, 0, _MAGIC, 0, *head, _crc_of(head))
        _WHOLE.pack_into(memory, _WHOLE_AT, 1)
        self._head = None

    @staticmethod
    def _arrays(memory: mmap.mmap, head: SlotHead) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        body = np.frombuffer(memory, np.uint8, head.body_bytes, head.body_at)
        return body, np.frombuffer(memory, np.uint32, head.blocks, _PAGE)

    def meta(self, head: SlotHead) -> CopyMeta:
        """Raises CheckpointError."""
        data = self._text(head, "a stage's copy")[: head.meta_bytes]
        try:
            return _meta_decoder.decode(data)
        except MALFORMED as error:
            raise CheckpointError(f"a stage's copy cannot be read: {error}") from None

    def contents(self, head: SlotHead) -> tuple[bytes, NDArray[np.uint8], NDArray[np.uint32]]:
        """Return meta and header, the bytes, and the checksums of their blocks: views, not checked."""
        memory = self._mapped(0)
        text = memory[head.text_at : head.text_at + head.meta_bytes + head.header_bytes]
        return text, *self._arrays(memory, head)

    def read(self, head: SlotHead, what: str) -> tuple[bytes, NDArray[np.uint8]]:
        """Return the header of the state, and its bytes: a view of the slot. Raises CheckpointError: a block is
        damaged."""
        _, body, sums = self.contents(head)
        check_blocks(body, sums, 0, what)
        return self.header(head, what), body

    def header(self, head: SlotHead, what: str) -> bytes:
        """Return the header of the state. Raises CheckpointError: it is damaged."""
        return self._text(head, what)[head.meta_bytes :]

    def _text(self, head: SlotHead, what: str) -> bytes:
        text = self._mapped(0)[head.text_at : head.text_at + head.meta_bytes + head.header_bytes]
        if crc32c(text) != head.text_crc:
            raise CheckpointError(f"{what}: its header is damaged")
        return text


def check_blocks(body: NDArray[np.uint8], sums: NDArray[np.uint32], first: int, what: str) -> None:
    """Check blocks, of which the first one has the number ``first``. Raises CheckpointError: one is damaged."""
    for at, expected in enumerate(sums.tolist()):
        if crc32c(body[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].data) != expected:
            raise CheckpointError(f"{what}: block {first + at} is damaged")


def free_memory() -> int:
    """Return how many bytes may be taken without harm: of the machine, and of the control group that this process is
    in."""
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0]) << 10
    free = facts.get("MemAvailable", 0) - int(_RESERVE * facts.get("MemTotal", 0))
    limits = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        most, now = (path.read_text().strip() for path in limits)
        if most != "max":
            free = min(free, int(most) - int(now))
    except (OSError, ValueError):
        pass  # (no such limit)
    return max(0, free)


def _crc_of(numbers: Sequence[int]) -> int:
    return crc32c(struct.pack(f"<{len(numbers)}q", *numbers))


def up(size: int) -> int:
    """Return ``size`` in whole pages."""
    return -(-size // _PAGE) * _PAGE


__all__ = ["BLOCK_BYTES", "CopyMeta", "CopySlot", "SlotHead", "check_blocks", "free_memory", "up"]
