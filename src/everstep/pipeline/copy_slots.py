"""Keeps copies of the stages of a worker in memory that outlives it: slots for each stage, and a page for all.

The memory is of the template (``agent.template``), which forks the worker and holds it open. A process that is killed
loses its own memory only; the one that is started in its place inherits the same slots."""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import torch

from everstep.allreduce.serialize import SerializedState
from everstep.errors import CheckpointError, ConfigError, PlatformError
from everstep.model.copy_places import CopyPlace
from everstep.model.stage_spans import COPIES_VARIABLE, COPY_SLOTS
from everstep.pipeline.slot_memory import BLOCK_BYTES, CopyMeta, CopySlot, SlotHead, up

_PLACE_BYTES: Final = 1024

logger = logging.getLogger("everstep.worker")
_place_decoder: Final = msgspec.json.Decoder(CopyPlace)


class CopyPage:
    """Is what the stages tell each other of copies, in one page. By the first stage's word: ``step``: the one that is
    to be copied, ``send``: the one that goes to the neighbour, too, ``held``: the one that a checkpoint is written from
    (-1: none), who the neighbour is, and the mean time between losses in ms (0: unknown). Of each stage:
    ``newest``: the newest step that is whole; ``wished``: in how many iterations it wants one copy; ``unable``: whether
    it cannot copy; ``sending``: the step that is on its way to the neighbour; ``kept``: the newest one that the
    neighbour has acknowledged."""

    def __init__(self, fd: int, stages: int) -> None:
        numbers_bytes = 8 * (5 + 5 * stages)
        size = up(numbers_bytes + _PLACE_BYTES)
        fresh = os.fstat(fd).st_size < size
        if fresh:
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        self._place_at = numbers_bytes
        numbers = np.frombuffer(self._memory, np.int64, 5 + 5 * stages)
        self._announced, self._version, self._failure_ms = numbers[:2], numbers[2:3], numbers[3:4]
        self._held = numbers[4:5]
        self.newest, self.wished, self.unable, self.sending, self.kept = numbers[5:].reshape(5, stages)
        if fresh:
            self.sending[:] = self.kept[:] = self._announced[:] = self._held[:] = -1

    @property
    def step(self) -> int:
        return int(self._announced[0])

    @step.setter
    def step(self, value: int) -> None:
        self._announced[0] = value

    @property
    def send(self) -> int:
        return int(self._announced[1])

    @send.setter
    def send(self, value: int) -> None:
        self._announced[1] = value

    @property
    def held(self) -> int:
        return int(self._held[0])

    @held.setter
    def held(self, value: int) -> None:
        self._held[0] = value

    @property
    def mean_time_to_failure_s(self) -> float:
        return float(self._failure_ms[0]) / 1e3 or math.inf

    @mean_time_to_failure_s.setter
    def mean_time_to_failure_s(self, value: float) -> None:
        self._failure_ms[0] = 0 if math.isinf(value) else max(1, round(1e3 * value))

    @property
    def common(self) -> int:
        """Return the newest step of which all stages have a whole copy; -1: there is none."""
        return int(self.newest.min())

    @property
    def common_kept(self) -> int:
        """Return the newest step of which the neighbour has acknowledged all stages; -1: there is none."""
        return int(self.kept.min())

    @property
    def place(self) -> CopyPlace | None:
        """Return the neighbour; None: there is none, or it is just being changed."""
        before = int(self._version[0])
        text = self._memory[self._place_at : self._place_at + _PLACE_BYTES].rstrip(b"\0")
        if before % 2 or before != int(self._version[0]) or not text:
            return None
        return _place_decoder.decode(text)

    @place.setter
    def place(self, value: CopyPlace | None) -> None:
        text = msgspec.json.encode(value) if value is not None else b""
        if len(text) > _PLACE_BYTES:
            raise PlatformError(f"the address of node {value and value.node} has more than {_PLACE_BYTES} bytes")
        self._version[0] += 1
        self._memory[self._place_at : self._place_at + _PLACE_BYTES] = text.ljust(_PLACE_BYTES, b"\0")
        self._version[0] += 1


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
        self.page.step = self.page.send = -1
        self.page.newest[:] = self.page.kept[:] = -1

    def newest(self) -> tuple[CopyMeta, list[SerializedState]] | None:
        """Return the newest copy that all stages have and that is intact, and its parts by stage: views of the slots.
        None: there is none."""
        heads = [{(h.step, h.life): (s, h) for s in slots if (h := s.head()) is not None} for slots in self.slots]
        for key in sorted(set.intersection(*map(set, heads)), reverse=True):
            slot, head = heads[0][key]
            try:
                meta = slot.meta(head)
                parts = [read_part(*one[key], f"the copy of stage {s}") for s, one in enumerate(heads)]
            except CheckpointError as error:
                logger.warning("step %d: %s; an older copy is looked for", key[0], error)
                continue
            return meta, parts
        return None


def read_part(slot: CopySlot, head: SlotHead, what: str) -> SerializedState:
    """Return what a slot has: its tensors are views of it. Raises CheckpointError: a block is damaged."""
    header, body = slot.read(head, what)
    return SerializedState(header, torch.from_numpy(body))


__all__ = ["BLOCK_BYTES", "CopyMemory", "CopyMeta", "CopyPage", "CopySlot", "SlotHead", "read_part"]
