"""Tells the agent of a node when the node's stages wait, so that it takes in neighbours' copies then. Without torch.

Each stage writes one small file of memory, and the agent reads all of them. Times are of the machine's monotonic clock,
which its processes share."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

from everstep.policies.receiving import StageNow

FOLDER: Final = "idle"
_ENTRY: Final = struct.Struct("<qdd")  # process, begin of the wait (below 0: it computes), its usual length
_LOOK_S: Final = 1.0  # for stages that came or went


class IdleEntry:
    """Is one stage's file, for the thread that trains."""

    def __init__(self, run_dir: Path, slot: int, stage: int) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        fd = os.open(folder / f"worker-{slot}.stage-{stage}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self.computes()

    def waits(self, since_s: float, usual_s: float) -> None:
        """Say that the stage waits. ``usual_s``: how long that takes, 0: not known."""
        _ENTRY.pack_into(self._memory, 0, os.getpid(), since_s, usual_s)

    def computes(self) -> None:
        _ENTRY.pack_into(self._memory, 0, os.getpid(), -1.0, 0.0)


class IdleBoard:
    """Reads what the stages of a node do, for the threads of its agent."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._files: dict[str, mmap.mmap] = {}
        self._looked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<IdleBoard of {len(self._files)} stages>"

    def stages(self) -> list[StageNow]:
        """Return what the stages do that are alive."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._files = self._found()
        return [StageNow(since_s, usual_s) for _, since_s, usual_s in map(_read, self._files.values())]

    def _found(self) -> dict[str, mmap.mmap]:
        found = {}
        for path in sorted(self._folder.glob("worker-*.stage-*")):
            memory = self._files.get(path.name)
            with contextlib.suppress(OSError, ValueError):  # (it is just being made)
                if memory is None:
                    with path.open("rb") as file:
                        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
                if _alive(_read(memory)[0]):
                    found[path.name] = memory
        return found


def _read(memory: mmap.mmap) -> tuple[int, float, float]:
    pid, since_s, usual_s = _ENTRY.unpack_from(memory)
    return int(pid), float(since_s), float(usual_s)


def _alive(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


__all__ = ["IdleBoard", "IdleEntry"]
