"""Is the exactly-once ledger of a ps on its own: fences, watermarks, fingerprints, released shards; no rows.

The same rules as ``Store``, in plain Python: the twin keeps its ledger with it, the simulator runs it.

A partition applies a push of ``[lo, hi)`` iff the shard is open there, no later lease fenced this one, and ``lo`` is
its watermark; then the watermark is ``hi``. ``hi <= watermark``: a repeat, acknowledged, nothing changes. Anything else
is a gap: the partition lacks samples before ``lo``, or has some of ``[lo, hi)`` already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MASK = (1 << 64) - 1


def mix64(z: int) -> int:
    """Apply the finalizer of splitmix64: a bijection of 64 bits."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def batch_fingerprint(shard: int, lo: int, hi: int) -> int:
    """Sum of ``mix64(mix64(epoch_key) + position)`` over ``[lo, hi)``, modulo 2**64."""
    epoch = mix64(shard >> 32)
    return sum(mix64((epoch + position) & _MASK) for position in range(lo, hi)) & _MASK


SpanTuple = tuple[int, int, int, int, bool]
"""Of a push: ``(shard, lo, hi, lease, learnt)``; ``learnt``: its samples are in the gradients."""

_SPANS_MAX = 1 << 16


def by_shard(spans: Sequence[SpanTuple]) -> list[tuple[int, int, int, int]]:
    """Return ``(shard, lo, hi, lease)`` of each shard, in the order of its first span.

    Raises ValueError if a span is malformed, or the spans of a shard do not follow each other under one lease."""
    if not 1 <= len(spans) <= _SPANS_MAX:
        raise ValueError(f"a push has 1 to {_SPANS_MAX} spans")
    wholes: dict[int, tuple[int, int, int, int]] = {}
    for shard, lo, hi, lease, _ in spans:
        if shard < 0 or lease < 0:
            raise ValueError("shard and lease must not be negative")
        if lo < 0 or hi <= lo or hi - lo > 1 << 24:
            raise ValueError(f"[{lo}, {hi}) is not a range of at most 2^24 samples")
        known = wholes.get(shard)
        if known is None:
            wholes[shard] = (shard, lo, hi, lease)
        elif lo != known[2] or lease != known[3]:
            raise ValueError("the spans of a shard do not follow each other under one lease")
        else:
            wholes[shard] = (shard, known[1], hi, lease)
    return list(wholes.values())


class PushResult(NamedTuple):
    """Counts over the addressed partitions.

    ``gap``: the lowest watermark of the partitions that answered "gap", -1 if none. ``nonfinite``: id of the table
    whose gradient has NaN or Inf, -1 if none (then nothing was applied). ``partitions``: bitmap (bit b = partition b)
    of those that applied; b"" when none or all owned ones did. ``moved``: a partition was handed over while the push
    ran: it goes to its new owner.
    """

    applied: int
    repeats: int
    gap: int = -1
    fenced: bool = False
    nonfinite: int = -1
    partitions: bytes = b""
    moved: bool = False


def bitmap(partitions: Iterable[int], n_partitions: int) -> bytes:
    """Bit b of the little-endian bitmap is set for every partition b."""
    value = 0
    for b in partitions:
        value |= 1 << b
    return value.to_bytes((n_partitions + 7) // 8, "little")


def bitmap_partitions(bits: bytes) -> list[int]:
    """Return the partitions of a bitmap, ascending."""
    value = int.from_bytes(bits, "little")
    return [b for b in range(len(bits) * 8) if value >> b & 1]


class PartitionLedger:
    """Is one partition's part: ``shard -> [watermark, fence]`` and the fingerprint of all samples applied."""

    __slots__ = ("fingerprint", "shards")

    def __init__(self) -> None:
        self.fingerprint = 0
        self.shards: dict[int, list[int]] = {}


class PushLedger:
    """Is the ledger of one ps. ``n_partitions``: of the whole job; ``partitions``: owned here, default all of them."""

    def __init__(self, n_partitions: int, partitions: Iterable[int] | None = None) -> None:
        self.n_partitions = n_partitions
        self.partitions: dict[int, PartitionLedger] = {}
        self.released: set[int] = set()
        self.own(range(n_partitions) if partitions is None else partitions)

    def __repr__(self) -> str:
        return f"<Ledger partitions={len(self.partitions)}/{self.n_partitions} open={len(self.shards())}>"

    def own(self, partitions: Iterable[int]) -> None:
        """Take these partitions, empty; those owned already keep what they have."""
        wanted = list(partitions)
        for b in wanted:
            if not 0 <= b < self.n_partitions:
                raise ValueError(f"partition {b} does not exist")
        for b in wanted:
            self.partitions.setdefault(b, PartitionLedger())
        self.partitions = dict(sorted(self.partitions.items()))

    def open(self, shard: int, start: int, lease: int) -> tuple[list[int], list[int]] | None:
        """Raise the shard's fences to ``lease``; the owned partitions and their watermarks. None: fenced or
        released."""
        if shard < 0 or start < 0 or lease < 0:
            raise ValueError("shard, start and lease must not be negative")
        if shard in self.released:
            return None
        known = [b.shards[shard] for b in self.partitions.values() if shard in b.shards]
        if any(fence > lease for _, fence in known):
            return None
        for partition in self.partitions.values():
            mark = partition.shards.setdefault(shard, [start, lease])
            mark[1] = lease
        return list(self.partitions), [b.shards[shard][0] for b in self.partitions.values()]

    def check_push(self, shard: int, lo: int, hi: int, lease: int, partitions: bytes) -> list[int]:
        """Return the addressed partitions, ascending. ValueError: malformed; KeyError: a partition is not owned
        here."""
        if shard < 0 or lease < 0:
            raise ValueError("shard and lease must not be negative")
        if lo < 0 or hi <= lo or hi - lo > 1 << 24:
            raise ValueError(f"[{lo}, {hi}) is not a range of at most 2^24 samples")
        if not partitions:
            return list(self.partitions)
        if len(partitions) != (self.n_partitions + 7) // 8:
            raise ValueError("the bitmap of partitions has the wrong length")
        addressed = bitmap_partitions(partitions)
        for b in addressed:
            if b >= self.n_partitions:
                raise ValueError(f"partition {b} does not exist")
            if b not in self.partitions:
                raise KeyError(f"partition {b} is not owned here")
        return addressed

    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        """Judge ``[lo, hi)`` in every addressed partition and move the watermarks of those that apply it.

        ``skipped``: the watermarks move, but the samples are not in the fingerprints (nothing was learnt from them).
        ``more``: further spans of the same step; a partition takes all of them or none.
        """
        addressed = self.check_push(shard, lo, hi, lease, partitions)
        spans = ((shard, lo, hi, lease, not skipped), *more)
        wholes = by_shard(spans)
        added = sum(batch_fingerprint(of, first, last) for of, first, last, _, learnt in spans if learnt)
        applied: list[int] = []
        repeats, gap, fenced = 0, -1, False
        for b in addressed:
            partition = self.partitions[b]
            marks = [partition.shards.get(whole[0]) for whole in wholes]
            if any(mark is None or mark[1] > whole[3] for mark, whole in zip(marks, wholes, strict=True)):
                fenced = True
                continue
            known = [(mark, whole) for mark, whole in zip(marks, wholes, strict=True) if mark is not None]
            for mark, whole in known:
                mark[1] = whole[3]
            if all(whole[2] <= mark[0] for mark, whole in known):
                repeats += 1
            elif any(whole[1] != mark[0] for mark, whole in known):
                lowest = min(mark[0] for mark, _ in known)
                gap = lowest if gap < 0 else min(gap, lowest)
            else:
                for mark, whole in known:
                    mark[0] = whole[2]
                partition.fingerprint = (partition.fingerprint + added) & _MASK
                applied.append(b)
        bits = b"" if not applied or len(applied) == len(self.partitions) else bitmap(applied, self.n_partitions)
        return PushResult(len(applied), repeats, gap, fenced, -1, bits)

    def release(self, shards: Sequence[int]) -> None:
        """Forget these shards and refuse them for ever."""
        if any(shard < 0 for shard in shards):
            raise ValueError("shard must not be negative")
        self.released.update(shards)
        for partition in self.partitions.values():
            for shard in shards:
                partition.shards.pop(shard, None)

    def watermarks(self, shard: int) -> tuple[list[int], list[int]] | None:
        """Return the partitions where the shard is open, ascending, and their watermarks; None if it is open
        nowhere."""
        found = [(b, ledger.shards[shard][0]) for b, ledger in self.partitions.items() if shard in ledger.shards]
        return ([b for b, _ in found], [w for _, w in found]) if found else None

    def shards(self) -> list[int]:
        """Open shards, ascending."""
        return sorted({shard for partition in self.partitions.values() for shard in partition.shards})

    def fingerprints(self) -> list[int]:
        """Return the fingerprint of each partition of the job, 0 for those not owned."""
        return [self.partitions[b].fingerprint if b in self.partitions else 0 for b in range(self.n_partitions)]
