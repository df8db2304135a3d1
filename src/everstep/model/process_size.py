"""Says how many threads and how much memory each process of a role gets."""

from __future__ import annotations

import msgspec

from everstep.bounds import Threads, Whole


class ProcessSize(msgspec.Struct, frozen=True, array_like=True):
    """Is the size of each process of a role; in a wish 0 means "as before", in a size "as its node gives it".

    ``threads``: of a worker, those that compute (torch, OpenMP); of a ps, the processors that it may use (it has a
    thread for each connection). ``memory_bytes``: private writable memory, a limit of the kernel (RLIMIT_DATA)."""

    threads: Threads = 0
    memory_bytes: Whole = 0

    def with_wish(self, wish: ProcessSize) -> ProcessSize:
        """Return this size, with what ``wish`` names."""
        return ProcessSize(wish.threads or self.threads, wish.memory_bytes or self.memory_bytes)
