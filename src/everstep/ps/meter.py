"""Measures how long requests take a ps, and how many there are at a time."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_RECENT = 256  # requests of a kind between two beats that the median is taken of


class Meter:
    """Measures requests; thread-safe. Own time of a request is without what it waited for others (mirrors, a partition
    on its way): a slow mirror must not make all those look slow that wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._recent: tuple[list[float], list[float]] = ([], [])  # own seconds: of pulls, of pushes
        self._counts = [0, 0]  # since the last call of readings
        self.requests = self.bytes_in = self.bytes_out = 0
        self.own_s = 0.0  # of all requests, without waiting
        self.held_s = 0.0  # with it: this over time is how many requests there are at a time

    def __repr__(self) -> str:
        return f"<meter of {self.requests} requests>"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in here as time in which a request waits for others."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._mine.waited_s = getattr(self._mine, "waited_s", 0.0) + time.perf_counter() - began

    def own(self, spent_s: float) -> float:
        """Return, of ``spent_s`` seconds of a request, on the thread that did it, those that it did not wait; call
        once."""
        waited_s: float = getattr(self._mine, "waited_s", 0.0)
        self._mine.waited_s = 0.0
        return max(0.0, spent_s - waited_s)

    def served(self, own_s: float, held_s: float, bytes_in: int, bytes_out: int) -> None:
        """A pull (nothing came in) or push was answered."""
        with self._lock:
            self.requests += 1
            self.own_s += own_s
            self.held_s += held_s
            self.bytes_in += bytes_in
            self.bytes_out += bytes_out
            kind = int(bytes_in > 0)
            recent = self._recent[kind]
            if len(recent) < _RECENT:
                recent.append(own_s)
            else:
                recent[self._counts[kind] % _RECENT] = own_s
            self._counts[kind] += 1

    def readings(self) -> dict[str, float]:
        """Return, for the beat, counters, and the time of a request since the last call, where there was one: the
        medians of pulls and of pushes, by how many there were of each. (One median of both kinds would be now that of a
        pull, now that of a push, as chance has it.)"""
        with self._lock:
            recent, self._recent = self._recent, ([], [])
            counts, self._counts = self._counts, [0, 0]
            out = {
                "requests": float(self.requests),
                "service_total_s": self.own_s,
                "held_s": self.held_s,
                "bytes_in": float(self.bytes_in),
                "bytes_out": float(self.bytes_out),
            }
        if any(recent):
            total_s = sum(statistics.median(kind) * n for kind, n in zip(recent, counts, strict=True) if kind)
            out["service_s"] = total_s / sum(counts)
        return out
