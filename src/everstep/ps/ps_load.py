"""Measures which partitions are touched how much: rows pulled and pushed a second, from a sample of the requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from everstep.ids import PartitionId
from everstep.native import unique_route

EVERY = 16  # one request of so many is counted, for all of them
HALF_S = 10.0  # what was counted so long ago counts half
ANNOUNCED = 16  # of the hottest partitions the master is told


class PartitionLoad:
    """Measures the load of partitions; thread-safe. ``rows_per_s``: float64 [n_partitions], smoothed over about
    ``HALF_S``."""

    def __init__(self, n_partitions: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._all = np.arange(n_partitions, dtype=np.int32)
        self._requests = 0
        self._fresh: NDArray[np.float64] = np.zeros(n_partitions)  # since ``_at``
        self._rate: NDArray[np.float64] = np.zeros(n_partitions)
        self._at = now()

    def __repr__(self) -> str:
        return f"<load of {len(self._all)} partitions, {self._requests} requests>"

    def request(self) -> bool:
        """A pull or push came: whether its keys are to be counted."""
        self._requests += 1  # (a race loses a request of a sample)
        return self._requests % EVERY == 0

    def count(self, table: int, keys: NDArray[np.int64]) -> None:
        """Count ``keys`` (int64 [n]) of a request."""
        n = len(self._all)
        _, _, counts = unique_route(keys, n, table, self._all, n)
        with self._lock:
            self._fresh += np.asarray(counts, np.float64) * EVERY

    def rows_per_s(self) -> NDArray[np.float64]:
        with self._lock:
            now = self._now()
            span_s = now - self._at
            if span_s >= 0.5:
                kept = 0.5 ** (span_s / HALF_S)
                self._rate = kept * self._rate + (1 - kept) * self._fresh / span_s
                self._fresh[:] = 0.0
                self._at = now
            return self._rate.copy()

    def readings(self, owned: list[PartitionId]) -> dict[str, float]:
        """Return, for the beat, ``load`` of all of ``owned`` together and ``load.PARTITION`` of the hottest ones."""
        rate = self.rows_per_s()
        mine = rate[owned] if owned else np.zeros(0)
        hottest = np.argsort(-mine, kind="stable")[:ANNOUNCED].tolist()
        out = {"load": float(mine.sum())}
        out.update({f"load.{owned[i]}": float(mine[i]) for i in hottest if mine[i] > 0})
        return out
