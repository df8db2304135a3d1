"""Bounds the logs of a node's processes, which are the first to give way when the disk is full.

The processes write into them by inherited descriptors that append, so a log is cut in place: what it held goes into
``worker-0.log.1``, which replaces the one before. What is written while that is copied is kept as far as it was
copied; a script that prints faster than the disk copies loses lines, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from everstep.storage.space import disk_is_full

LOG_MAX_BYTES: Final = 32 << 20
LEFT_BYTES: Final = 64 << 10  # of each log when the disk is full
SAY_AGAIN_S: Final = 60.0


def keep_bounded(folder: Path, most: int = LOG_MAX_BYTES) -> None:
    """Cut every log that is larger than ``most``."""
    for path in _logs(folder):
        if _size(path) > most:
            older = path.with_name(path.name + ".1")
            with contextlib.suppress(OSError):
                shutil.copyfile(path, older)
                os.truncate(path, 0)


def give_way(folder: Path) -> int:
    """Free what logs take, but the last lines of each. Returns the bytes."""
    freed = 0
    for path in folder.glob("*.log.1"):
        with contextlib.suppress(OSError):
            freed += _size(path)
            path.unlink()
    for path in _logs(folder):
        size = _size(path)
        if size > 2 * LEFT_BYTES:
            with contextlib.suppress(OSError), path.open("r+b") as stream:
                stream.seek(-LEFT_BYTES, os.SEEK_END)
                tail = stream.read()
                stream.truncate(0)
                stream.seek(0)
                stream.write(tail)
            freed += size - LEFT_BYTES
    return freed


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class DiskWatch:
    """Says once a minute that the disk is full, and once that it is not any more; makes logs give way. ``wait_s``: so
    long the job waits."""

    def __init__(self, run_dir: Path, wait_s: float, say: Callable[[str], None]) -> None:
        self._run_dir, self._wait_s, self._say = run_dir, wait_s, say
        self._full_since = self._warned_at = 0.0

    def __repr__(self) -> str:
        return f"<DiskWatch {'full' if self._full_since else 'space'}>"

    def look(self) -> None:
        logs, now = self._run_dir / "logs", time.monotonic()
        keep_bounded(logs)
        if not disk_is_full(self._run_dir):
            if self._full_since:
                self._say(f"there is space again on the disk of {self._run_dir}")
            self._full_since = 0.0
            return
        if not self._full_since:
            self._full_since, self._warned_at = now, 0.0
            give_way(logs)
            if not disk_is_full(self._run_dir):
                self._full_since = 0.0
                return
        if now - self._warned_at >= SAY_AGAIN_S or not self._warned_at:
            self._warned_at = now
            left_s = max(0.0, self._wait_s - (now - self._full_since))
            self._say(
                f"no space left on the disk of {self._run_dir}: nothing can be recorded. Training goes on as far as it "
                f"can; free some space within {left_s:.0f} s, or the job ends"
            )
