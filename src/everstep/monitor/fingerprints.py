"""Computes fingerprints of ranges of samples, and whether intervals tile a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from everstep.ids import ShardKey
from everstep.model.shard import epoch_key
from everstep.monitor.journal_fold import JournalFold
from everstep.monitor.pslog import PsLog


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (uint64 [n] -> uint64 [n]), as in ``native/hash.h``."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _prefix(shard: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Return ``out[i]``: fingerprint of ``[start, start + i)``; uint64 [stop - start + 1]."""
    salt = mix64(np.full(1, epoch_key(ShardKey(shard)), dtype=np.uint64))
    out = np.zeros(stop - start + 1, np.uint64)
    positions: NDArray[np.uint64] = np.arange(start, stop).astype(np.uint64)
    np.cumsum(mix64(salt + positions), out=out[1:])
    return out


class Fingerprints:
    """Computes fingerprints of ranges, keeping the prefix sums of the shard last asked for."""

    def __init__(self, fold: JournalFold) -> None:
        self._fold = fold
        self._kept: dict[int, NDArray[np.uint64]] = {}

    def ranges(self, shard: int, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the fingerprints of ``[lo[i], hi[i])`` of one shard; clipped to it."""
        bounds = self._fold.bounds(ShardKey(shard))
        if bounds is None:
            return np.zeros(len(lo), np.uint64)
        start, stop = bounds
        prefix = self._kept.get(shard)
        if prefix is None:
            if len(self._kept) >= 4096:
                self._kept.clear()
            prefix = self._kept[shard] = _prefix(shard, start, stop)
        low = np.clip(lo, start, stop) - start
        high = np.maximum(np.clip(hi, start, stop) - start, low)
        return np.asarray(prefix[high] - prefix[low])

    def pushes(self, log: PsLog) -> NDArray[np.uint64]:
        """Return the fingerprint of each push of a log, 0 where it was skipped; uint64 [log.n]."""
        found = np.zeros(log.n, np.uint64)
        order = np.argsort(log.shard, kind="stable")
        keys, first = np.unique(log.shard[order], return_index=True)
        for key, rows in zip(keys.tolist(), np.split(order, first[1:]), strict=False):
            found[rows] = self.ranges(key, log.lo[rows], log.hi[rows])
        found[log.skipped] = 0
        return found

    def whole(self, shard: int) -> np.uint64:
        bounds = self._fold.bounds(ShardKey(shard))
        assert bounds is not None
        return np.uint64(self.ranges(shard, np.array([bounds[0]]), np.array([bounds[1]]))[0])


def tile(
    start: int, stop: int | None, limit: int, spans: Sequence[tuple[int, int, int]]
) -> Iterable[tuple[str, int, int, str]]:
    """Yield what keeps ``(lo, hi, lease)`` intervals from tiling ``[start, stop)`` once, in fence order.

    ``stop`` None: an open shard, complete only up to its last interval; ``limit``: the shard's end. Yields
    ``(what, lo, hi, detail)``.
    """
    at, fence = start, 0
    for lo, hi, lease in sorted(spans):
        if lo >= hi or lo < start or hi > limit:
            yield "outside", lo, hi, f"the shard is [{start}, {limit})"
            continue
        if lo > at:
            yield "missing", at, lo, ""
        elif lo < at:
            yield "twice", lo, min(at, hi), f"lease {lease}"
        if lease < fence:
            yield "after fence", lo, hi, f"lease {lease}, though {fence} had opened the shard"
        at, fence = max(at, hi), max(fence, lease)
    if stop is not None and at < stop:
        yield "missing", at, stop, ""
