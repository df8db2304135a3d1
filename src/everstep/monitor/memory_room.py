"""Says which limit of memory leaves a ps least room, and how much of it is used."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path
from typing import Final

from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.monitor.cgroup_memory import LimitRead, MemoryGroup

_KINDS: Final = (("VmData", resource.RLIMIT_DATA), ("VmSize", resource.RLIMIT_AS))


def parse_process_bytes(text: str, name: str) -> int | None:
    """Return the bytes of a line of ``/proc/self/status``, such as ``VmData:  1234 kB``. None: it is not there."""
    found = re.search(rf"^{name}:\s+(\d{{1,15}}) kB$", text, re.ASCII | re.MULTILINE)
    return 1024 * int(found[1]) if found is not None else None


def limit_of_process(pid: int = 0) -> int:
    """Return the bytes of the tighter limit of a process (``ulimit -d``, ``ulimit -v``), also of one that has ended and
    was not reaped; 0: this one. 0 is returned if there is none, or nobody may know."""
    found = []
    for _, kind in _KINDS:
        with contextlib.suppress(OSError):
            soft = resource.prlimit(pid, kind)[0]
            found += [soft] if soft != resource.RLIM_INFINITY else []
    return min(found, default=0)


def memory_of_node(group: MemoryGroup, meminfo: Path = Path("/proc/meminfo")) -> tuple[int, MemoryLimit]:
    """Return the bytes that one process may have on this machine at most, and who says so: the machine, the container
    of this process, or the hard limit of its user. 0: nobody says."""
    found = []
    with contextlib.suppress(OSError):
        if total := parse_process_bytes(meminfo.read_text(), "MemTotal"):
            found.append((total, MemoryLimit.MACHINE))
    if (read := group.limit()) is not None:
        found.append((read.limit, MemoryLimit.CONTAINER))
    for _, kind in _KINDS:
        if (hard := resource.getrlimit(kind)[1]) != resource.RLIM_INFINITY:
            found.append((hard, MemoryLimit.PROCESS))
    return min(found, key=lambda each: each[0], default=(0, MemoryLimit.NONE))


def bound_memory(memory_bytes: int) -> int:
    """Give this process a limit of private writable memory; return it, or the hard limit if that is lower."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    bound = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    soft, most = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < bound:  # (its user's limit of addresses would come first)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return bound


def raise_limit(pid: int, memory_bytes: int) -> tuple[int, int]:
    """Have a process that runs have so much private writable memory, or its hard limit if that is lower; a limit is
    never made lower. Return the bytes of its tightest limit before and now; 0: none, or nobody may know."""
    before = limit_of_process(pid)
    for _, kind in _KINDS:
        with contextlib.suppress(OSError):
            soft, hard = resource.prlimit(pid, kind)
            most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
            if soft != resource.RLIM_INFINITY and soft < most:
                resource.prlimit(pid, kind, (most, hard))
    return before, limit_of_process(pid)


def is_unbound(pid: int) -> bool:
    """Return whether a process that was started by this one still has this one's limit of private writable memory."""
    with contextlib.suppress(OSError):
        return resource.prlimit(pid, resource.RLIMIT_DATA) == resource.getrlimit(resource.RLIMIT_DATA)
    return False


class MemoryRoom:
    """Reads the limits of this process again and again: they may be changed from outside."""

    def __init__(self, group: MemoryGroup | None = None, status: Path = Path("/proc/self/status")) -> None:
        self._group = group if group is not None else MemoryGroup()
        self._status = status

    def __repr__(self) -> str:
        return f"<room of {self._group!r}>"

    def readings(self, row_bytes: int, mapped_bytes: int, ceiling_bytes: int) -> dict[str, float]:
        """Return ``limit_bytes``, ``limit_used_bytes`` and ``limit_kind`` (number in ``LIMITS``) of the tightest limit;
        {}: there is none. ``row_bytes``: of what a store's pool has mapped, so much is in use: the rest is room.
        ``ceiling_bytes``: of rows; 0: none."""
        found: list[tuple[MemoryLimit, LimitRead]] = []
        if ceiling_bytes:
            found.append((MemoryLimit.STORE, LimitRead(ceiling_bytes, row_bytes)))
        spare = max(0, mapped_bytes - row_bytes)
        text = ""
        with contextlib.suppress(OSError):
            text = self._status.read_text()
        for name, kind in _KINDS:
            limit, used = resource.getrlimit(kind)[0], parse_process_bytes(text, name)
            if limit != resource.RLIM_INFINITY and used is not None:
                found.append((MemoryLimit.PROCESS, LimitRead(limit, max(0, used - spare))))
        if (group := self._group.limit()) is not None:
            found.append((MemoryLimit.CONTAINER, group))
        if not found:
            return {}
        which, read = min(found, key=lambda pair: pair[1].room)
        return {
            "limit_bytes": float(read.limit),
            "limit_used_bytes": float(read.used),
            "limit_kind": float(LIMITS.index(which)),
        }
