"""Shares memory of one worker with the ps of its node: a memfd, passed over the connection, never a name.

Nothing is left behind when processes die: the kernel frees a memfd with its last descriptor and mapping. It is
sealed against shrinking, so that a mapped page cannot vanish under the ps (SIGBUS).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Any

from everstep.errors import PlatformError, WireError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

ALIGN = 64
_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


class Arena:
    """Is ``size`` bytes (rounded up to pages) that this process and those it attaches to can read and write.

    ``alloc``/``free`` hand out regions, first fit, 64-byte aligned; when nothing fits, the arena grows (connections
    attach it again by themselves before the next message). Views of before stay valid: the pages are the same.
    Thread-safe. Contents begin as zeros.
    """

    def __init__(self, size: int, *, max_bytes: int = 64 << 30) -> None:
        """Raises PlatformError."""
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset, never adjacent
        self._used: dict[int, int] = {}
        self._returned: deque[int] = deque()  # lent, and not referred to any more: freed by whoever allocates next
        self.size = 0
        try:
            self.fd = os.memfd_create("everstep-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError as error:
            raise PlatformError(f"no shared memory: {error.strerror or error}") from error
        self._extend(max(size, _PAGE))

    def _extend(self, size: int) -> None:
        size = _round_up(size, _PAGE)
        if size > self.max_bytes:
            raise PlatformError(f"shared memory of {size} bytes wanted, at most {self.max_bytes} allowed")
        try:
            os.ftruncate(self.fd, size)
            mapping = mmap.mmap(self.fd, size)
        except OSError as error:
            raise PlatformError(f"no shared memory for {size} bytes: {error.strerror or error}") from error
        if size >= _HUGE:
            with contextlib.suppress(OSError):  # the kernel has none for shared memory: only slower
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapping)
        self._give_back(self.size, size - self.size)
        self.size = size

    def grow(self, size: int) -> None:
        """Have at least ``size`` bytes. Raises PlatformError."""
        with self._lock:
            if size > self.size:
                self._extend(size)

    def alloc(self, n: int) -> int:
        """Return the offset of ``n`` free bytes, a multiple of 64; the arena grows when need be. Raises
        PlatformError."""
        n = max(ALIGN, _round_up(n, ALIGN))
        with self._lock:
            while self._returned:
                back = self._returned.popleft()
                self._give_back(back, self._used.pop(back))
            while True:
                for i, (offset, free) in enumerate(self._free):
                    if free >= n:
                        if free == n:
                            del self._free[i]
                        else:
                            self._free[i] = (offset + n, free - n)
                        self._used[offset] = n
                        return offset
                self._extend(max(2 * self.size, self.size + n))

    def lend(self, n: int) -> tuple[int, Any]:
        """Do as ``alloc`` does, with a writable buffer of the ``n`` bytes; freed when nothing refers to the buffer any
        more."""
        offset = self.alloc(n)
        buffer = (ctypes.c_char * n).from_buffer(self.view, offset)
        weakref.finalize(buffer, self._returned.append, offset).atexit = False
        return offset, buffer

    def free(self, offset: int) -> None:
        """Give back what ``alloc`` returned. ValueError for anything else."""
        with self._lock:
            n = self._used.pop(offset, 0)
            if not n:
                raise ValueError(f"offset {offset} is not allocated")
            self._give_back(offset, n)

    def _give_back(self, offset: int, n: int) -> None:
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + n == self._free[at][0]:
            n += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            before, length = self._free.pop(at - 1)
            offset, n = before, length + n
        insort(self._free, (offset, n))

    def array(self, offset: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a writable view at ``offset``, C order."""
        import numpy

        made: np.ndarray[Any, np.dtype[Any]] = numpy.ndarray(shape, dtype, self.view, offset)
        return made

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._used.values()) - sum(self._used[offset] for offset in self._returned)

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last view. Harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")

    def __repr__(self) -> str:
        return f"<Arena {self.size} bytes, {len(self._used)} regions>"


def map_arena(fd: int, size_bytes: int, max_bytes: int) -> memoryview:
    """Map what a client passed; closes ``fd``. Raises WireError unless it is a memfd of at least that size that can
    never shrink."""
    try:
        if not 0 < size_bytes <= max_bytes:
            raise WireError(f"shared memory of {size_bytes} bytes offered, at most {max_bytes} allowed")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise WireError("the descriptor offered as shared memory is not a memfd") from None
        if not seals & fcntl.F_SEAL_SHRINK:
            raise WireError("the shared memory offered is not sealed against shrinking")
        actual = os.fstat(fd).st_size
        if actual < size_bytes:
            raise WireError(f"the shared memory offered has {actual} bytes, not {size_bytes}")
        try:
            return memoryview(mmap.mmap(fd, size_bytes))
        except (OSError, ValueError) as error:
            raise WireError(f"the shared memory offered cannot be mapped: {error}") from None
    finally:
        os.close(fd)
