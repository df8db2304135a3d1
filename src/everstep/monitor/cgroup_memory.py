"""Reads what cgroups of both versions say of memory: limits, what is used, and how often the system killed for it.

The parsers are pure: text in, numbers out. Text that is damaged or of another kind gives None, never a guess.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final, NamedTuple

_UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page below 2 ** 63."""
_FILES: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class LimitRead(NamedTuple):
    """Is a limit and what is used of it, in bytes."""

    limit: int
    used: int

    @property
    def room(self) -> int:
        return max(0, self.limit - self.used)


def parse_oom_kills(text: str) -> int | None:
    """Return how many processes the system's out-of-memory killer has ended: ``oom_kill`` of a ``memory.events``
    (version 2), a ``memory.oom_control`` (version 1, since Linux 4.13) or ``/proc/vmstat``. None: it does not say."""
    return _field(text, "oom_kill")


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a file with one number (``memory.max``, ``memory.limit_in_bytes``, ``memory.current``). None:
    no limit, or no number."""
    found = re.fullmatch(r"\s*(\d{1,19})\s*", text, re.ASCII)
    n = int(found[1]) if found is not None else _UNLIMITED
    return n if n < _UNLIMITED else None


def parse_reclaimable(text: str) -> int:
    """Return the bytes of files in memory that the system takes back before it kills, of a ``memory.stat``; 0: it does
    not say. Version 1 counts the cgroups below only in ``total_inactive_file``."""
    total = _field(text, "total_inactive_file")
    own = _field(text, "inactive_file")
    return total if total is not None else own if own is not None else 0


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name} (\d{{1,19}})$", text, re.ASCII | re.MULTILINE)
    return int(found[1]) if found is not None else None


class MemoryGroup:
    """Reads the cgroup of a process, and those around it. Where a file is missing its reading is, too."""

    def __init__(self, proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._folders = _folders(proc, cgroups)  # innermost first

    def __repr__(self) -> str:
        return f"<memory of cgroup {self._folders[0] if self._folders else 'unknown'}>"

    def kills(self) -> int | None:
        """Return how many processes of the cgroup, else of the machine, the system has ended for their memory."""
        for path in [
            *(folder / name for folder in self._folders[:1] for name in ("memory.events", "memory.oom_control")),
            self._proc.parent / "vmstat",
        ]:
            if (n := parse_oom_kills(_text(path))) is not None:
                return n
        return None

    def limit(self) -> LimitRead | None:
        """Return the limit that leaves least room; None: there is none."""
        found = []
        for folder in self._folders:
            for limit_file, used_file in _FILES:
                limit, used = parse_bytes(_text(folder / limit_file)), parse_bytes(_text(folder / used_file))
                if limit is not None and used is not None:
                    cached = parse_reclaimable(_text(folder / "memory.stat"))
                    found.append(LimitRead(limit, max(0, used - cached)))
        return min(found, key=lambda read: read.room) if found else None


def _folders(proc: Path, cgroups: Path) -> list[Path]:
    """Return the folders of a process's cgroup and of those around it, as far as they can be seen."""
    for line in _text(proc / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            roots = [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            roots = [cgroups / controllers, cgroups / "memory"]
        else:
            continue
        for root in roots:
            inside = root / path.strip("/")
            chain = [inside, *inside.parents]
            chain = chain[: chain.index(root) + 1] if root in chain else []
            here = [folder for folder in chain if any((folder / f).is_file() for pair in _FILES for f in pair)]
            if here:  # (a container that sees only itself has its own files at the root)
                return here
    return []


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""
