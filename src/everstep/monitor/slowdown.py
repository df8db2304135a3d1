"""A slowdown made on purpose (``everstep chaos --slow``): the one place where a member is slowed; nothing while off.

The member itself waits ``factor - 1`` times what it measured of its own work, at the end of that work, so that to all
others it looks like a machine that is ``factor`` times slower. It ends by itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

FACTOR_MAX = 1000.0
FOR_MAX_S = 7 * 86_400.0
PAUSE_MAX_S = 300.0  # of one wait: a member that was told nonsense stays within reach


class Slowdown:
    """``order`` comes from any thread; ``pause`` from the threads that work. ``burn``: compute instead of sleeping, so
    that others on this machine feel it, too."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._over.set()
        self._factor, self._until, self._burn = 1.0, 0.0, False
        self.on = False  # read without a lock wherever a pause could be due
        self.slept_s = 0.0

    def __repr__(self) -> str:
        return f"<Slowdown x{self._factor:g}{' burning' if self._burn else ''}>" if self.on else "<Slowdown off>"

    def order(self, factor: float, for_s: float, burn: bool = False) -> None:
        """Be, from now on, ``factor`` (>= 1) times slower for ``for_s`` seconds. A factor of 1, no time or nonsense:
        off, at once, also for those that wait now."""
        sane = math.isfinite(factor) and math.isfinite(for_s) and factor > 1.0 and for_s > 0.0
        with self._lock:
            if not sane:
                self._end()
                return
            self._factor, self._burn = min(factor, FACTOR_MAX), burn
            self._until = self._now() + min(for_s, FOR_MAX_S)
            self._over.clear()
            self.on = True

    def _end(self) -> None:
        self.on = False
        self._over.set()

    def pause(self, own_s: float) -> float:
        """Pause after ``own_s`` seconds of own work; call only where ``on``. Returns how long it was, in seconds."""
        now = self._now()
        if now >= self._until:
            with self._lock:  # (a new order may have come just now)
                if now >= self._until:
                    self._end()
            return 0.0
        wait_s = min((self._factor - 1.0) * max(0.0, own_s), PAUSE_MAX_S, self._until - now)
        if wait_s <= 0.0:
            return 0.0
        if self._burn:
            while self.on and self._now() < now + wait_s:
                pass
        else:
            self._over.wait(wait_s)
        slept_s = self._now() - now
        self.slept_s += slept_s
        return slept_s
