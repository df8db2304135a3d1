"""Keeps the rows of a ps within their memory: those that were not used for longest go to disk."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from everstep.errors import PlatformError
from everstep.native import Store

LOOK_S: Final = 0.05
OLDER_S: Final = 1.0
"""So often all rows in memory become older by one; 62 is the oldest that there is."""
BEGIN: Final = 0.95
"""Of the limit, from which on rows go to disk."""
DOWN_TO: Final = 0.92

logger = logging.getLogger("everstep.ps")


class ColdTierController:
    """Has a thread that moves rows to disk. ``close`` ends it."""

    def __init__(self, store: Store, folder: Path, limit_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        """Begin. ``limit_bytes``: memory for rows. Raises PlatformError: the folder takes no file."""
        self._store, self._folder, self._limit, self._now = store, folder, limit_bytes, now
        self._older_at = now() + OLDER_S
        self._over = threading.Event()
        self.errno = 0  # of the disk; 0: it takes what it is given
        try:
            store.begin_cold(folder)
        except OSError as error:
            why = error.strerror or str(error)
            raise PlatformError(
                f"cold_dir {folder}: {why}: make it a directory that the ps may write to, or leave it out"
            ) from None
        self._thread = threading.Thread(target=self._for_ever, name="everstep-cold", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ColdTierController {self._folder}, {self._limit} bytes>"

    def close(self) -> None:
        self._over.set()
        self._thread.join(5.0)

    def look(self) -> None:
        """Move rows to disk if there are too many in memory."""
        if self._now() >= self._older_at:
            self._older_at = self._now() + OLDER_S
            self._store.grow_older()
        if self._store.used_bytes() > BEGIN * self._limit:
            self._store.cool(int(DOWN_TO * self._limit))
            self._say(self._store.cold_counts().error)

    def _say(self, errno: int) -> None:
        if errno and errno != self.errno:
            words = f"cold_dir {self._folder}: {os.strerror(errno)}: rows stay in memory until there is room again"
            logger.warning("%s", words)
        self.errno = errno

    def _for_ever(self) -> None:
        while not self._over.wait(1.0 if self.errno else LOOK_S):
            self.look()

    def readings(self) -> dict[str, float]:
        """Return, for the beat, what is on disk and how often it was asked for."""
        counts = self._store.cold_counts()
        return {
            "cold_bytes": float(counts.disk_bytes),
            "cold_lookups": float(counts.lookups),
            "cold_misses": float(counts.misses),
            "cold_written_bytes": float(counts.written_bytes),
            "cold_error": float(counts.error),
        }
