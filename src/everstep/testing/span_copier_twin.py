"""Is the slow twin of ``native.SpanCopier``: what the C++ copies must be what this copies.

It copies when a span opens, on the calling thread, so no block ends behind its span."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray


def _table() -> NDArray[np.uint32]:
    out = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        out = np.where(out & 1, (out >> 1) ^ np.uint32(0x82F63B78), out >> 1).astype(np.uint32)
    return out


_CRC = [int(value) for value in _table()]


def slow_crc32c(data: bytes) -> int:
    """Return the checksum of ``native.crc32c``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


class SpanCopierTwin:
    """See the top of this file; methods are those of ``native.SpanCopier``."""

    def __init__(self, block_bytes: int) -> None:
        self._block = block_bytes
        self._next = self._inside = self._stalled = 0
        self._pieces: list[tuple[int, int, int]] = []
        self._into = np.empty(0, np.uint8)
        self._sums = np.empty(0, np.uint32)

    def load(
        self,
        from_: NDArray[np.uint64],
        at: NDArray[np.int64],
        sizes: NDArray[np.int64],
        into: NDArray[np.uint8],
        sums: NDArray[np.uint32],
    ) -> None:
        self._pieces = [(int(f), int(a), int(s)) for f, a, s in zip(from_, at, sizes, strict=True)]
        self._into, self._sums, self._next = into, sums, 0

    def _copy(self) -> int:
        lo = self._next * self._block
        hi = min(len(self._into), lo + self._block)
        block = np.zeros(hi - lo, np.uint8)
        for address, at, size in self._pieces:
            begin, end = max(lo, at), min(hi, at + size)
            if begin < end:
                found = ctypes.string_at(address + begin - at, end - begin)
                block[begin - lo : end - lo] = np.frombuffer(found, np.uint8)
        self._into[lo:hi] = block
        self._sums[self._next] = slow_crc32c(block.tobytes())
        self._next += 1
        return hi - lo

    def open(self, limit_bytes: int) -> None:
        while self.left and limit_bytes >= min(self._block, self.left):
            done = self._copy()
            limit_bytes -= done
            self._inside += done

    def close(self) -> None:
        """The span is over; all of its copies are done."""

    def finish(self) -> int:
        done = 0
        while self.left:
            done += self._copy()
        self._stalled += done
        return done

    def drop(self) -> None:
        self._pieces, self._into, self._sums, self._next = [], np.empty(0, np.uint8), np.empty(0, np.uint32), 0

    @property
    def left(self) -> int:
        return max(0, len(self._into) - self._next * self._block)

    def counts(self) -> tuple[int, int, int, int, float]:
        return self._inside, 0, self._stalled, 0, 0.0
