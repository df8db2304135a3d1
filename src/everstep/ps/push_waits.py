"""Counts the pushes that wait until mirrors have caught up, so that an overload of protection is seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PushWaits:
    """Counts pushes; thread-safe. A push that waits longer than a ps holds a request is asked again, and then waits
    once more: its time is counted, and the overload lasts until a push is let through."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._began_at = 0.0  # the sum of when those began that wait now
        self._waited_s = 0.0  # of those that wait no more
        self._reported_s = 0.0
        self._overloaded = False
        self.waiting = 0

    def __repr__(self) -> str:
        return f"<{self.waiting} pushes wait, {self.total_s:.1f} s so far>"

    @property
    def total_s(self) -> float:
        """Return how long pushes have waited, together."""
        with self._lock:
            return self._waited_s + self.waiting * self._now() - self._began_at

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the caller among those that wait."""
        with self._lock:
            at = self._now()
            self.waiting += 1
            self._began_at += at
            self._overloaded = True
        try:
            yield
        finally:
            with self._lock:
                self.waiting -= 1
                self._began_at -= at
                self._waited_s += self._now() - at

    def passed(self) -> float:
        """Return how long pushes waited in the overload that ends with this push; 0: there was none."""
        if not self._overloaded:
            return 0.0
        with self._lock:
            if not self._overloaded:
                return 0.0
            self._overloaded = False
            took_s, self._reported_s = self._waited_s - self._reported_s, self._waited_s
            return took_s
