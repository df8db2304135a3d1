"""Counts distinct keys in little memory, and says how many there will be when only a part of the data was read.

The counter is exact until it holds ``capacity`` keys. Then it keeps only keys whose hash begins with zero bits, one bit
more each time that it is full (adaptive sampling, Wegman; Flajolet, Computing 1990). With C keys the relative standard
error is about 1.2 / sqrt(C): 0.2 % for the default. For each kept key the counter also knows whether it was seen once.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from everstep.sizing.probe_readings import DistinctKeys

CAPACITY: Final = 1 << 19
_BUFFER: Final = 1 << 20  # keys that are gathered before they are merged
_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)


def hashed(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 mixed bits of each key (the finaliser of splitmix64)."""
    z = keys.astype(np.int64, copy=False).view(np.uint64).copy()
    z ^= z >> np.uint64(30)
    z *= _M1
    z ^= z >> np.uint64(27)
    z *= _M2
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


class DistinctCounter:
    """Counts the distinct keys of a stream. ``curve``: (samples, distinct keys) after each merge."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 16:
            raise ValueError(f"a counter of {capacity} keys: at least 16")
        self.capacity = capacity
        self.samples = 0
        self.curve: list[tuple[int, float]] = []
        self._zero_bits = 0
        self._hashes = np.empty(0, np.uint64)  # ascending
        self._once = np.empty(0, np.bool_)
        self._waiting: list[NDArray[np.uint64]] = []
        self._n_waiting = 0

    def __repr__(self) -> str:
        return f"<DistinctCounter about {self.count():,.0f} keys of {self.samples:,} samples>"

    @property
    def sketched(self) -> bool:
        """Return whether keys were left out, so that the count is an estimate."""
        self._merge()
        return self._zero_bits > 0

    def add(self, keys: NDArray[np.int64], samples: int) -> None:
        """Take the keys (int64 [n], repeated ones too) of ``samples`` more samples."""
        self._waiting.append(self._kept(hashed(keys.reshape(-1))))
        self._n_waiting += len(self._waiting[-1])
        self.samples += samples
        if self._n_waiting >= _BUFFER:
            self._merge()

    def count(self) -> float:
        """Return how many distinct keys were seen, about."""
        self._merge()
        return float(len(self._hashes) << self._zero_bits)

    def once(self) -> float:
        """Return how many of them were seen exactly once, about."""
        self._merge()
        return float(int(self._once.sum()) << self._zero_bits)

    @property
    def error(self) -> float:
        """Return the relative standard error of ``count``."""
        return 1.2 / math.sqrt(max(1, len(self._hashes))) if self.sketched else 0.0

    def _kept(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        if not self._zero_bits:
            return hashes
        return np.asarray(hashes[hashes >> np.uint64(64 - self._zero_bits) == 0], np.uint64)

    def _merge(self) -> None:
        if not self._n_waiting:
            return
        new, counts = np.unique(self._kept(np.concatenate(self._waiting)), return_counts=True)
        self._waiting, self._n_waiting = [], 0
        at = np.searchsorted(self._hashes, new)
        known = np.zeros(len(new), np.bool_)
        inside = at < len(self._hashes)
        known[inside] = self._hashes[at[inside]] == new[inside]
        self._once[at[known]] = False
        hashes = np.concatenate([self._hashes, new[~known]])
        once = np.concatenate([self._once, counts[~known] == 1])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._once = hashes[order], once[order]
        while len(self._hashes) > self.capacity:
            self._zero_bits += 1
            kept = self._hashes >> np.uint64(64 - self._zero_bits) == 0
            self._hashes, self._once = self._hashes[kept], self._once[kept]
        self.curve.append((self.samples, float(len(self._hashes) << self._zero_bits)))


def expected_keys(counter: DistinctCounter, total: int, vocabulary: int | None = None) -> DistinctKeys:
    """Return how many distinct keys ``total`` samples have, of which the counter saw some, in random order.

    Where it saw all, the interval is that of the sketch (two standard errors). Else: not fewer than were seen; not
    more than if each further sample brought as many new keys as the last ones did (Good's estimate of that rate is the
    number of keys seen once over the samples; the rate only falls); and most likely as the curve of the second half
    goes on (Heaps' law, keys ~ samples ** exponent).
    """
    seen, count = counter.samples, counter.count()
    top = float(vocabulary) if vocabulary is not None else math.inf
    margin = 2 * counter.error * count
    if seen >= total:
        low, high = max(0.0, count - margin), min(top, count + margin)
        return DistinctKeys(low, min(count, top), high, seen, total, True, counter.sketched)
    if not seen:
        return DistinctKeys(0.0, 0.0, 0.0 if vocabulary is None else top, 0, total)
    rest = (total - seen) / seen
    high = min(top, count + counter.once() * rest + margin)
    exponent = _exponent(counter.curve, seen, count, counter.once())
    likely = min(high, count * (total / seen) ** exponent)
    return DistinctKeys(min(max(0.0, count - margin), likely), likely, high, seen, total, False, counter.sketched)


def _exponent(curve: list[tuple[int, float]], seen: int, count: float, once: float) -> float:
    """Return the slope of log keys over log samples at the end: from the middle of the curve to its end, and not more
    than the share of keys seen once (which is the slope at the very end)."""
    at_end = once / count if count else 0.0
    middle = [(n, d) for n, d in curve if 0 < n <= seen / 2 and d > 0]
    if not middle:
        return at_end
    n, d = middle[-1]
    slope = math.log(count / d) / math.log(seen / n) if count > d and seen > n else 0.0
    return max(0.0, min(slope, at_end))
