"""Measures which partitions are touched how much, by which keys: from a sample of the requests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.ids import PartitionId, TableId
from everstep.model.graph_readings import NAME_MAX
from everstep.model.partition_load import ANNOUNCED, KEYS, HotKey, PartitionReading
from everstep.native import unique_route

EVERY = 16  # one request of so many is counted, for all of them
HALF_S = 5.0  # what was counted so long ago counts half
_COUNTED: Final = 256  # keys of a request, of the hottest partition, that are counted
_KNOWN: Final = 4096  # keys whose counts are kept; if there are more, the rare ones go

REQUESTS, ROWS, BYTES, TIME = range(4)


class _CountedRows(NamedTuple):
    """Says, of the request that a thread is at, how many rows of each partition it asks for, and their bytes."""

    rows: NDArray[np.float64]
    n_bytes: NDArray[np.float64]


class PartitionLoad:
    """Measures the load of partitions; thread-safe. All rates are smoothed over about ``HALF_S``."""

    def __init__(self, n_partitions: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._all = np.arange(n_partitions, dtype=np.int32)
        self._requests = 0
        self._fresh: NDArray[np.float64] = np.zeros((4, n_partitions))  # since ``_at``
        self._rate: NDArray[np.float64] = np.zeros((4, n_partitions))
        self._at = now()
        self._hottest = -1  # whose keys are counted
        self._keys: Counter[tuple[TableId, int]] = Counter()
        self._of_hottest = 0.0  # requests in which they were counted

    def __repr__(self) -> str:
        return f"<load of {len(self._all)} partitions, {self._requests} requests>"

    def request(self) -> bool:
        """A pull or push came: whether its keys are to be counted."""
        self._requests += 1  # (a race loses a request of a sample)
        return self._requests % EVERY == 0

    def count(self, parts: Sequence[tuple[TableId, NDArray[np.int64], int]]) -> None:
        """Count a request: of each table its keys (int64 [n], grouped by ascending partition) and the bytes of a row.
        ``served`` adds its time."""
        n = len(self._all)
        rows, n_bytes = np.zeros(n), np.zeros(n)
        for table, keys, row_bytes in parts:
            counts = np.asarray(unique_route(keys, n, table, self._all, n)[2], np.float64)
            rows += counts
            n_bytes += counts * row_bytes
            if self._hottest >= 0 and counts[self._hottest] > 0:
                begin = int(counts[: self._hottest].sum())
                some = keys[begin : begin + int(counts[self._hottest])][:_COUNTED].tolist()
                with self._lock:
                    self._keys.update((table, key) for key in some)
        with self._lock:
            self._fresh[REQUESTS] += EVERY * (rows > 0)
            self._fresh[ROWS] += EVERY * rows
            self._fresh[BYTES] += EVERY * n_bytes
            if self._hottest >= 0 and rows[self._hottest] > 0:
                self._of_hottest += 1
            if len(self._keys) > _KNOWN:
                self._keys = Counter(dict(self._keys.most_common(_KNOWN // 4)))
        self._mine.counted = _CountedRows(rows, n_bytes)

    def served(self, own_s: float) -> None:
        """The request of this thread took ``own_s`` seconds; if it was counted, its partitions share them by rows."""
        counted: _CountedRows | None = getattr(self._mine, "counted", None)
        if counted is None:
            return
        self._mine.counted = None
        total = float(counted.rows.sum())
        if total > 0:
            with self._lock:
                self._fresh[TIME] += counted.rows * (EVERY * own_s / total)

    def rates(self) -> NDArray[np.float64]:
        """Return float64 [4, n_partitions]: requests, rows, bytes and seconds, each in a second."""
        with self._lock:
            now = self._now()
            span_s = now - self._at
            if span_s >= 0.5:
                kept = 0.5 ** (span_s / HALF_S)
                self._rate = kept * self._rate + (1 - kept) * self._fresh / span_s
                self._fresh[:] = 0.0
                self._at = now
            return self._rate.copy()

    def total(self, owned: Sequence[PartitionId]) -> float:
        """Return the rows a second of all of ``owned``."""
        return float(self.rates()[ROWS][list(owned)].sum())

    def readings(
        self,
        owned: Sequence[PartitionId],
        held: Callable[[PartitionId], int] = lambda _: 0,
        names: Mapping[TableId, str] = {},
    ) -> tuple[PartitionReading, ...]:
        """Return the hottest ones of ``owned``, hottest first. ``held``: bytes of a partition; ``names``: of tables."""
        rates = self.rates()
        hottest = sorted((b for b in owned if rates[ROWS][b] > 0), key=lambda b: (-rates[ROWS][b], b))[:ANNOUNCED]
        self._watch(hottest[0] if hottest else -1)
        out = []
        for b in hottest:
            keys = self._hot_keys(names) if b == self._hottest else ()
            requests, rows, n_bytes, time_s = (round(float(rate), 6) for rate in rates[:, b])
            out.append(PartitionReading(int(b), requests, rows, n_bytes, time_s, held(b), keys))
        return tuple(out)

    def _watch(self, hottest: int) -> None:
        with self._lock:
            if hottest != self._hottest:
                self._hottest, self._of_hottest = hottest, 0.0
                self._keys.clear()
            elif self._of_hottest > 64:  # newer requests count more
                self._of_hottest /= 2
                self._keys = Counter({key: n // 2 for key, n in self._keys.items() if n > 1})

    def _hot_keys(self, names: Mapping[TableId, str]) -> tuple[HotKey, ...]:
        with self._lock:
            if not self._of_hottest:
                return ()
            most = self._keys.most_common(KEYS)
            return tuple(
                HotKey(names.get(table, str(table))[:NAME_MAX], key, min(1.0, round(n / self._of_hottest, 4)))
                for (table, key), n in most
            )
