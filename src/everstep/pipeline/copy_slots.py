"""Keeps copies of the stages of a worker in memory that outlives it: two slots for each stage, and a page for all.

The memory is of the template (``agent.template``), which forks the worker and holds it open. A process that is killed
loses its own memory only; the one that is started in its place inherits the same slots. A slot is whole or it is not:
the word that it is whole is written last, behind checksums of every block, and is taken back before anything else in
the slot changes."""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from everstep.allreduce.serialize import SerializedState
from everstep.bounds import MALFORMED
from everstep.errors import CheckpointError, ConfigError, PlatformError
from everstep.model.group import Committed, Position
from everstep.model.stage_spans import COPIES_VARIABLE, COPY_SLOTS
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

logger = logging.getLogger("everstep.worker")


class CopyMeta(msgspec.Struct, frozen=True):
    """Says what a copy of all stages is of; in the slot of the first stage. ``lineage``: of the lineage;
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
        return _up(_PAGE + 4 * self.blocks)

    @property
    def body_at(self) -> int:
        return _up(self.text_at + self.meta_bytes + self.header_bytes)

    @property
    def size_bytes(self) -> int:
        return _up(self.body_at + self.body_bytes)


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
        _WHOLE.pack_into(memory, _WHOLE_AT, 0)
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

    def read(self, head: SlotHead, what: str) -> SerializedState:
        """Return the copy: its tensors are views of the slot. Raises CheckpointError: a block is damaged."""
        memory = self._mapped(0)
        body, sums = self._arrays(memory, head)
        for block in range(head.blocks):
            if crc32c(body[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].data) != int(sums[block]):
                raise CheckpointError(f"{what}: block {block} of {head.blocks} is damaged")
        return SerializedState(self._text(head, what)[head.meta_bytes :], torch.from_numpy(body))

    def _text(self, head: SlotHead, what: str) -> bytes:
        text = self._mapped(0)[head.text_at : head.text_at + head.meta_bytes + head.header_bytes]
        if crc32c(text) != head.text_crc:
            raise CheckpointError(f"{what}: its header is damaged")
        return text


class CopyPage:
    """Is what the stages tell each other of copies, in one page: ``step``: the one that is to be copied, by the first
    stage's word (-1: none); of each stage the newest step that is whole, in how many iterations it wants one copy, and
    whether it cannot copy."""

    def __init__(self, fd: int, stages: int) -> None:
        size = _up(8 * (1 + 3 * stages))
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        numbers = np.frombuffer(self._memory, np.int64, 1 + 3 * stages)
        self._step = numbers[:1]
        self.newest, self.wished, self.unable = numbers[1:].reshape(3, stages)

    @property
    def step(self) -> int:
        return int(self._step[0])

    @step.setter
    def step(self, value: int) -> None:
        self._step[0] = value

    @property
    def common(self) -> int:
        """Return the newest step of which all stages have a whole copy; -1: there is none."""
        return int(self.newest.min())


class CopyMemory:
    """Is the memory for copies of all stages of a worker, seen from one of its processes."""

    def __init__(self, fds: Sequence[int], stages: int) -> None:
        """Take ``fds``: the page, then the slots of each stage. Raises ConfigError: they are not as many."""
        if len(fds) != 1 + COPY_SLOTS * stages:
            raise ConfigError(f"{COPIES_VARIABLE} has {len(fds)} files for {stages} stages: set by everstep only")
        self.page = CopyPage(fds[0], stages)
        self.slots = [
            [CopySlot(fd) for fd in fds[1 + COPY_SLOTS * s : 1 + COPY_SLOTS * (s + 1)]] for s in range(stages)
        ]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], stages: int) -> CopyMemory | None:
        """Return the memory that the template keeps for this worker; None: there is none. Raises ConfigError."""
        text = environment.get(COPIES_VARIABLE, "")
        if not text or stages < 2:
            return None
        try:
            return cls([int(fd) for fd in text.split(",")], stages)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{COPIES_VARIABLE} = {text!r}: set by everstep for its own processes only ({error})"
            ) from None

    def clear(self) -> None:
        for slots in self.slots:
            for slot in slots:
                slot.clear()
        self.page.step = -1
        self.page.newest[:] = -1

    def newest(self) -> tuple[CopyMeta, list[SerializedState]] | None:
        """Return the newest copy that all stages have and that is intact, and its parts by stage: views of the slots.
        None: there is none."""
        heads = [{(h.step, h.life): (s, h) for s in slots if (h := s.head()) is not None} for slots in self.slots]
        for key in sorted(set.intersection(*map(set, heads)), reverse=True):
            slot, head = heads[0][key]
            try:
                meta = slot.meta(head)
                parts = [one[key][0].read(one[key][1], f"the copy of stage {s}") for s, one in enumerate(heads)]
            except CheckpointError as error:
                logger.warning("step %d: %s; an older copy is looked for", key[0], error)
                continue
            return meta, parts
        return None


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


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


__all__ = ["BLOCK_BYTES", "CopyMemory", "CopyMeta", "CopyPage", "CopySlot", "SlotHead"]
