"""Tells processes that the system killed for their memory from those that anybody else killed."""

from __future__ import annotations

import signal
from typing import Final, Protocol

from everstep.model.failure import Cause
from everstep.model.memory_limit import MEMORY_STATUS, MemoryLimit, OutOfMemory
from everstep.monitor.cgroup_memory import LimitRead

CLAIM_S: Final = 5.0
"""A kill that no ended process has claimed for so long was of a process that is not ours (a helper of a script)."""


_GPU: Final = ("cuda", "hip", "cublas", "gpu")


class MemoryReadings(Protocol):
    """Is what is read of the cgroup (``monitor.cgroup_memory.MemoryGroup``)."""

    def kills(self) -> int | None: ...

    def limit(self) -> LimitRead | None: ...


class MemoryDeaths:
    """Compares the counter of kills with the processes that end. ``look`` at it now and then."""

    def __init__(self, group: MemoryReadings) -> None:
        self._group = group
        self._claimed = group.kills()
        self._since: float | None = None  # there has been a kill that nobody claimed

    def __repr__(self) -> str:
        return f"<deaths of memory: {self._claimed} known>"

    def look(self, at: float) -> None:
        """Forget kills that nobody has claimed; ``at``: in seconds."""
        kills = self._group.kills()
        if kills is None or self._claimed is None or kills <= self._claimed:
            self._claimed, self._since = kills, None
        elif self._since is None:
            self._since = at
        elif at - self._since > CLAIM_S:
            self._claimed, self._since = kills, None

    def why(self, status: int, asked: bool, limit_bytes: int = 0) -> OutOfMemory | None:
        """Return what a process died of, if that was memory. ``status``: as it ended; ``asked``: by this agent;
        ``limit_bytes``: the process's own limit, 0: it has none, or nobody knows."""
        if status == MEMORY_STATUS:
            return OutOfMemory(MemoryLimit.PROCESS, limit_bytes)
        if status != -signal.SIGKILL or asked:
            return None
        kills = self._group.kills()
        if kills is None or self._claimed is None or kills <= self._claimed:
            return None
        self._claimed += 1
        limit = self._group.limit()
        return OutOfMemory(MemoryLimit.CONTAINER, limit.limit) if limit else OutOfMemory(MemoryLimit.MACHINE)


def died_of_own_limit(cause: Cause, error: str, limit_bytes: int) -> OutOfMemory | None:
    """Return that a worker whose script raised ``error`` for want of memory had reached its own limit; None: it has
    none, or the memory is a GPU's."""
    gpu = any(word in error.lower() for word in _GPU)
    return OutOfMemory(MemoryLimit.PROCESS, limit_bytes) if cause == "memory" and limit_bytes and not gpu else None
