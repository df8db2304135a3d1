"""Watermarks, fences and fingerprints of the buckets of one ps: the ledger of the store, without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from everstep.sim.truth import mix64

_MASK = (1 << 64) - 1


class Result(NamedTuple):
    """Counts over the addressed buckets, as in ``net.messages.Pushed``."""

    applied: int
    repeats: int
    gap: int
    fenced: bool


def nothing(bucket: int, shard: int, lo: int, hi: int) -> None:
    """``on_apply`` of a ledger that nobody watches."""


class Ledger:
    """``buckets``: those that this ps owns, ascending. ``on_apply(bucket, shard, lo, hi)`` runs with every apply."""

    def __init__(self, buckets: Iterable[int]) -> None:
        self.buckets = tuple(buckets)
        self.on_apply: Callable[[int, int, int, int], None] = nothing
        self.open_shards: dict[int, tuple[dict[int, int], dict[int, int]]] = {}  # shard -> (fences, watermarks)
        self.released: set[int] = set()
        self.fingerprints = dict.fromkeys(self.buckets, 0)

    def open(self, shard: int, start: int, lease: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Raise the fence to ``lease``; the watermarks by bucket, or None: fenced or released."""
        if shard in self.released:
            return None
        known = self.open_shards.get(shard)
        if known is None:
            known = dict.fromkeys(self.buckets, 0), dict.fromkeys(self.buckets, start)
            self.open_shards[shard] = known
        fences, marks = known
        if any(fences[b] > lease for b in self.buckets):
            return None
        for b in self.buckets:
            fences[b] = lease
        return self.buckets, tuple(marks[b] for b in self.buckets)

    def push(self, shard: int, lo: int, hi: int, lease: int, bitmap: bytes) -> Result:
        """Apply ``[lo, hi)`` to every addressed bucket (b"": all) whose watermark is ``lo``."""
        known = self.open_shards.get(shard)
        if known is None:
            return Result(0, 0, -1, True)
        fences, marks = known
        bits = int.from_bytes(bitmap, "little") if bitmap else -1
        applied = repeats = 0
        gap, fenced, amount = -1, False, -1
        for b in self.buckets:
            if not bits >> b & 1:
                continue
            mark = marks[b]
            if fences[b] > lease:
                fenced = True
            elif hi <= mark:
                repeats += 1
            elif lo == mark:
                if amount < 0:
                    base = mix64(shard >> 32)
                    amount = sum(mix64((base + p) & _MASK) for p in range(lo, hi))
                self.on_apply(b, shard, lo, hi)
                self.fingerprints[b] = (self.fingerprints[b] + amount) & _MASK
                marks[b] = hi
                applied += 1
            else:
                gap = mark if gap < 0 else min(gap, mark)
        return Result(applied, repeats, gap, fenced)

    def release(self, shards: Iterable[int]) -> None:
        """Forget these shards' watermarks and refuse them for ever."""
        for shard in shards:
            self.open_shards.pop(shard, None)
            self.released.add(shard)
