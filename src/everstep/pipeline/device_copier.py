"""Copies a stage's state from a device into a slot while its process waits, on a stream of its own.

It stands beside the native copier of the CPU and keeps the same promises: a chunk is begun inside of a wait only, so at
most one ends behind it, and when ``finish`` returns all is copied, so that the optimizer may step. The device may be
behind the thread that trains. So the stream first waits for all that was asked of the device before the copy begins,
which the optimizer's last step is part of; and a chunk counts as copied when the device says that it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from everstep.native import SpanCopier, crc32c
from everstep.pipeline.copy_slots import BLOCK_BYTES
from everstep.pipeline.state_layout import StateLayout

CHUNK_BLOCKS: Final = 8
"""A chunk has so many blocks: less does not fill the way from a device."""


class Copier(Protocol):
    """Is what copies one state at a time; ``native.SpanCopier`` says what each call does. ``chunk_blocks``: so many
    blocks of those that are not left may be in the making."""

    chunk_blocks: int

    def load(self, layout: StateLayout, into: NDArray[np.uint8], sums: NDArray[np.uint32]) -> None: ...

    def open(self, limit_bytes: int) -> None: ...

    def close(self) -> None: ...

    def finish(self) -> int: ...

    def drop(self) -> None: ...

    @property
    def left(self) -> int: ...

    def counts(self) -> tuple[int, int, int, int, float]: ...


class HostCopier:
    """Is the native copier, for states on the CPU."""

    chunk_blocks = 1

    def __init__(self) -> None:
        native = self._native = SpanCopier(BLOCK_BYTES)
        self.open, self.close, self.finish = native.open, native.close, native.finish
        self.drop, self.counts = native.drop, native.counts

    def load(self, layout: StateLayout, into: NDArray[np.uint8], sums: NDArray[np.uint32]) -> None:
        self._native.load(layout.addresses, layout.places, layout.sizes, into, sums)

    @property
    def left(self) -> int:
        return self._native.left


class CopyStream(Protocol):
    """Is an order of copies, apart from that in which the device computes. ``buffer``: uint8, what is copied into."""

    buffer: torch.Tensor

    def follow(self) -> None:
        """Let copies begin behind what the calling thread has asked of the device so far."""

    def copy(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy each piece (uint8, contiguous) to its place in ``buffer``; returns when all are there."""


class CudaStream:
    """Is a stream of a CUDA device beside the one that trains, into pinned memory."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        with torch.cuda.stream(self._stream):
            for at, piece in pieces:
                self.buffer[at : at + piece.numel()].copy_(piece, non_blocking=True)
            self._done.record(self._stream)
        self._done.synchronize()  # (sleeps, without Python's lock)


class HostStream:
    """Is the same for states on the CPU: copies are there at once."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8)

    def follow(self) -> None:
        pass

    def copy(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        for at, piece in pieces:
            self.buffer[at : at + piece.numel()].copy_(piece)


class DeviceCopier:
    """Is a ``Copier`` with a thread of its own. All calls are for the thread that trains."""

    def __init__(self, stream: CopyStream, block_bytes: int = BLOCK_BYTES) -> None:
        """Take ``stream``: its buffer has room for whole blocks; that is a chunk."""
        self._stream, self._block = stream, block_bytes
        self.chunk_blocks = stream.buffer.numel() // block_bytes
        self._chunk = self.chunk_blocks * block_bytes
        self._changed = threading.Condition()
        self._pieces: list[tuple[int, torch.Tensor]] = []
        self._into: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._sums: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._next = 0  # byte at which the next chunk begins
        self._limit = self._span = 0
        self._open = self._busy = self._stop = False
        self._inside = self._late = self._stalled = self._late_chunks = 0
        self._busy_s = 0.0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<DeviceCopier, {self.left} bytes left>"

    def load(self, layout: StateLayout, into: NDArray[np.uint8], sums: NDArray[np.uint32]) -> None:
        with self._changed:
            self._quiet()
            self._pieces = [(at, tensor.reshape(-1).view(torch.uint8)) for tensor, at in layout.held]
            self._into, self._sums, self._next = into, sums, 0
        self._stream.follow()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-device-copies", daemon=True)
            self._thread.start()

    def open(self, limit_bytes: int) -> None:
        with self._changed:
            if self._next < len(self._into):
                self._open, self._limit = True, limit_bytes
                self._span += 1
                self._changed.notify_all()

    def close(self) -> None:
        self._open = False

    def finish(self) -> int:
        with self._changed:
            self._quiet()
            done = 0
            while self._next < len(self._into):
                done += self._copy(self._claim())
            self._stalled += done
            return done

    def drop(self) -> None:
        with self._changed:
            self._quiet()
            self._pieces, self._into, self._sums = [], np.empty(0, np.uint8), np.empty(0, np.uint32)
            self._next = 0

    @property
    def left(self) -> int:
        return len(self._into) - self._next

    def counts(self) -> tuple[int, int, int, int, float]:
        return self._inside, self._late, self._stalled, self._late_chunks, self._busy_s

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._quiet()
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _quiet(self) -> None:
        self._open = False
        self._changed.wait_for(lambda: not self._busy)

    def _claim(self) -> tuple[int, int]:
        lo, self._next = self._next, min(self._next + self._chunk, len(self._into))
        return lo, self._next

    def _copy(self, chunk: tuple[int, int]) -> int:
        lo, hi = chunk
        buffer = self._stream.buffer[: hi - lo]
        parts, end = [], lo
        for at, piece in self._pieces:
            begin, to = max(lo, at), min(hi, at + piece.numel())
            if begin < to:
                buffer[end - lo : begin - lo].zero_()  # (gaps are zeros)
                parts.append((begin - lo, piece[begin - at : to - at]))
                end = to
        buffer[end - lo :].zero_()
        self._stream.copy(parts)
        copied = buffer.numpy()
        self._into[lo:hi] = copied
        for first in range(lo, hi, self._block):
            self._sums[first // self._block] = crc32c(copied[first - lo : first - lo + self._block].data)
        return hi - lo

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or (self._open and self._fits()))
                if self._stop:
                    return
                chunk, span = self._claim(), self._span
                self._limit -= chunk[1] - chunk[0]
                self._busy = True
            begin_s = time.perf_counter()
            size = self._copy(chunk)
            took_s = time.perf_counter() - begin_s
            with self._changed:
                self._busy = False
                if self._open and span == self._span:
                    self._inside += size
                    self._busy_s += took_s
                else:
                    self._late += size
                    self._late_chunks += 1
                self._changed.notify_all()

    def _fits(self) -> bool:
        return self._next < len(self._into) and self._limit >= min(self._chunk, len(self._into) - self._next)


def copier_for(device: torch.device) -> Copier:
    """Return what copies a state that lies on ``device``."""
    if device.type == "cuda":
        return DeviceCopier(CudaStream(device, CHUNK_BLOCKS * BLOCK_BYTES))
    return HostCopier()


__all__ = [
    "CHUNK_BLOCKS",
    "Copier",
    "CopyStream",
    "CudaStream",
    "DeviceCopier",
    "HostCopier",
    "HostStream",
    "copier_for",
]
