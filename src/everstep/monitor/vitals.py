"""Whether a process of this machine runs, seen from outside: it need not answer, so it may hold its interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

STOPPED: Final = "Tt"  # by a signal, or by a debugger
_GONE: Final = "ZXx"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Vitals(NamedTuple):
    """``state`` as in ``ps``: R runs, S sleeps, D waits for a disk, T is stopped. ``cpu_s``: on a processor so far."""

    state: str
    cpu_s: float

    @property
    def runs(self) -> bool:
        return self.state not in STOPPED


def stat_fields(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """Return what /proc/PID/stat says behind the process's name (proc_pid_stat(5), from its field 3 on). Raises
    OSError: there is no such process."""
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def read_vitals(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """None: there is no such process, or it has ended."""
    try:
        fields = stat_fields(pid, proc)
        state = fields[0].decode()
        if state in _GONE:
            return None
        return Vitals(state, (int(fields[11]) + int(fields[12])) / _TICKS)
    except (OSError, IndexError, ValueError):
        return None


def catches(pid: int, signo: int, proc: Path = Path("/proc")) -> bool:
    """Whether that process has a handler for this signal: one without would be ended by it."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except (OSError, ValueError):
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signo - 1) & 1)
    return False


def peak_bytes(pid: int | str, proc: Path = Path("/proc")) -> int:
    """Return the most resident memory that a process ever had. 0: there is no such process, or it is not told."""
    try:
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return 0


def children(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that this one has forked and that still are."""
    found: list[int] = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except (OSError, ValueError):
        return found
    return found
