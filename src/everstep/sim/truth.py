"""What must be true, kept apart from the code under test: it sees what is applied, not why.

A counting model: one byte per (partition, position of an epoch) that says how often it was applied. Everything that is
wrong is told at the moment it happens, so that the trace ends at the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from everstep.ids import Incarnation, LeaseNo, PartitionId, ShardKey, Slot
from everstep.model.shard import Lease, ShardSchedule, shard_key, split_key
from everstep.native.ledger import SpanTuple, batch_fingerprint, by_shard
from everstep.sim.kernel import Violation

if TYPE_CHECKING:
    from everstep.tables.worker_protocol import RangeWork

_MASK = (1 << 64) - 1


@lru_cache(maxsize=4096)
def epoch_fingerprint(epoch_key: int, samples: int) -> int:
    """Return the order-free fingerprint that every partition must show after one whole epoch."""
    return batch_fingerprint(epoch_key << 32, 0, samples)


class Truth:
    """Holds the counts of one job: ``plan`` (dataset 0), ``epochs``, ``partitions``."""

    def __init__(self, plan: ShardSchedule, epochs: int, partitions: int) -> None:
        self.plan, self.epochs, self.partitions = plan, epochs, partitions
        self.counts = [[bytearray(plan.samples) for _ in range(partitions)] for _ in range(epochs)]
        self.missing = [plan.samples * partitions for _ in range(epochs)]
        self.fence: dict[tuple[Slot, ShardKey], LeaseNo] = {}
        self.done: dict[ShardKey, LeaseNo] = {}
        self.granted: dict[tuple[Slot, Incarnation, int], Lease] = {}
        self.applied = 0
        self.skipped = [0] * partitions  # fingerprints of what moved the watermark without gradients
        self.held_back: dict[
            tuple[Slot, Incarnation], set[tuple[ShardKey, int]]
        ] = {}  # positions that scripts held back
        self.pending: set[ShardKey] = set()  # all that a partition lacked of it was held back, at some time
        self.came_back = False  # a partition came back without something that was acknowledged
        self.shared = 0  # pushes with spans of several shards that were applied

    # ------------------------------------------------------------ at the ps

    def opens(self, ps: Slot, shard: ShardKey, lease: LeaseNo) -> None:
        """``ps`` let ``lease`` open ``shard``: it must be the latest, and epochs must come one after the other."""
        known = self.fence.get((ps, shard), 0)
        if lease < known:
            raise Violation(f"ps:{ps} let lease {lease:x} open shard {shard:x} after the later {known:x}")
        self.fence[ps, shard] = lease
        self.follows(shard)

    def follows(self, shard: ShardKey) -> None:
        """``shard`` was opened: what its epoch's predecessors miss must have been held back by a worker's script."""
        dataset, epoch, _ = split_key(shard)
        for before in range(epoch):
            if not self.missing[before]:
                continue
            for index in range(self.plan.shards):
                start, stop = self.plan.bounds(index)
                key = shard_key(dataset, before, index)
                if key not in self.pending and not all(all(c[start:stop]) for c in self.counts[before]):
                    raise Violation(f"shard {shard:x} of epoch {epoch} opened, shard {key:x} misses something")

    def takes_whole(
        self,
        ps: Slot,
        spans: Sequence[SpanTuple],
        before: Mapping[int, Mapping[int, int]],
        after: Mapping[int, Mapping[int, int]],
    ) -> None:
        """``ps`` was pushed one step of ``spans``: each of its partitions took all of it, or nothing."""
        wholes = by_shard(spans)
        for partition, marks in after.items():
            if marks == before[partition]:
                continue
            for shard, lo, hi, _ in wholes:
                was, now = before[partition].get(ShardKey(shard)), marks.get(ShardKey(shard))
                if (was, now) != (lo, hi):
                    raise Violation(
                        f"ps:{ps}, partition {partition}: a step of {len(wholes)} shards was taken in part: [{lo}, "
                        f"{hi}) of shard {shard:x} moved the watermark from {was} to {now}"
                    )
            self.shared += len(wholes) > 1

    def applies(
        self, ps: Slot, partition: PartitionId, shard: ShardKey, lo: int, hi: int, lease: LeaseNo, skipped: bool = False
    ) -> None:
        """Note that ``ps`` applied positions ``[lo, hi)`` to ``partition`` (``skipped``: moved its watermark over
        them)."""
        if lease != self.fence.get((ps, shard)):
            raise Violation(f"ps:{ps} applied [{lo}, {hi}) of shard {shard:x} by the fenced lease {lease:x}")
        _, epoch, index = split_key(shard)
        start, stop = self.plan.bounds(index)
        if not start <= lo < hi <= stop:
            raise Violation(f"ps:{ps} applied [{lo}, {hi}), shard {shard:x} is [{start}, {stop})")
        counts = self.counts[epoch][partition]
        if any(counts[lo:hi]):
            raise Violation(
                f"partition {partition} counts [{lo}, {hi}) of epoch {epoch} twice (ps:{ps}, shard {shard:x})"
            )
        counts[lo:hi] = b"\1" * (hi - lo)
        self.missing[epoch] -= hi - lo
        self.applied += hi - lo
        if skipped:
            self.skipped[partition] += batch_fingerprint(shard, lo, hi)

    def undoes(self, partition: int, shard: ShardKey, lo: int, hi: int) -> None:
        """``partition`` came back from a snapshot that lacks ``[lo, hi)``."""
        self.came_back = True
        epoch = split_key(shard)[1]
        self.counts[epoch][partition][lo:hi] = bytes(hi - lo)
        self.missing[epoch] += hi - lo

    def acknowledges(self, ps: Slot, partitions: tuple[int, ...], shard: ShardKey, lo: int, hi: int) -> None:
        """``ps`` answered "applied or repeat" for ``[lo, hi)`` in ``partitions``: it must be so."""
        counts = self.counts[split_key(shard)[1]]
        for partition in partitions:
            if not all(counts[partition][lo:hi]):
                raise Violation(
                    f"ps:{ps} acknowledged [{lo}, {hi}) of shard {shard:x}, partition {partition} lacks some of it"
                )

    def releases(self, ps: Slot, shards: tuple[ShardKey, ...]) -> None:
        """Note that the master let ``ps`` forget ``shards``."""
        for shard in shards:
            if shard not in self.done:
                raise Violation(f"shard {shard:x} released before it was done")

    # ------------------------------------------------------------ at a worker

    def holds_back(self, worker: Slot, incarnation: Incarnation, work: RangeWork) -> None:
        """The worker's script is through with ``work``, and has not stepped."""
        kept = self.held_back.setdefault((worker, incarnation), set())
        kept |= {(work.lease.shard, position) for position in range(work.lo, work.hi)}

    def pends(self, worker: Slot, incarnation: Incarnation, leases: Iterable[Lease]) -> None:
        """The worker says that what is left of these leases is held back: what partitions lack of them must be."""
        kept = self.held_back.get((worker, incarnation), set())
        for lease in leases:
            if lease.shard in self.done:
                continue
            self.pending.add(lease.shard)
            if self.came_back:
                continue
            for partition, counts in enumerate(self.counts[split_key(lease.shard)[1]]):
                for position in range(lease.start, lease.stop):
                    if not counts[position] and (lease.shard, position) not in kept:
                        raise Violation(
                            f"worker:{worker} says that the rest of shard {lease.shard:x} is held back, partition "
                            f"{partition} lacks position {position}, which was not computed"
                        )

    # ------------------------------------------------------------ at the master

    def grants(self, worker: Slot, incarnation: Incarnation, ask: int, lease: Lease, current: bool) -> None:
        """Note the answer to an ask. ``current``: the lease of the answer before this one still stands."""
        key = (worker, incarnation, ask)
        before = self.granted.get(key)
        if before is not None and before.no != lease.no and current:
            raise Violation(f"ask {ask} of worker:{worker} answered with {before} and with {lease}")
        self.granted[key] = lease
        if lease.shard in self.done:
            raise Violation(f"shard {lease.shard:x} granted to worker:{worker} again after it was done")

    def confirms(self, lease: Lease, current: bool) -> None:
        """After a worker told that it holds ``lease``: whether it is the shard's lease now."""
        if current and any(self.fence.get(key, 0) > lease.no for key in self.fence if key[1] == lease.shard):
            raise Violation(f"lease {lease.no:x} of shard {lease.shard:x} is current, though a later one fenced it")

    def is_done(self, shard: ShardKey, lease: LeaseNo) -> None:
        """The master counts ``shard`` as done: every partition must have all of it."""
        _, epoch, index = split_key(shard)
        start, stop = self.plan.bounds(index)
        for partition, counts in enumerate(self.counts[epoch]):
            if not all(counts[start:stop]):
                lacks = counts.index(0, start, stop)
                raise Violation(f"shard {shard:x} counts as done, partition {partition} lacks position {lacks}")
        self.done[shard] = lease

    # ------------------------------------------------------------ at the end

    def finished(self, fingerprints: dict[int, int]) -> None:
        """Check every position of every epoch in every partition once, and the ps's own fingerprints say the same."""
        for epoch, counts in enumerate(self.counts):
            for partition, row in enumerate(counts):
                if not all(row):
                    raise Violation(
                        f"finished, but epoch {epoch} lacks position {row.index(0)} in partition {partition}"
                    )
        want = sum(epoch_fingerprint(epoch, self.plan.samples) for epoch in range(self.epochs)) & _MASK
        for partition in range(self.partitions):
            have = (fingerprints.get(partition, 0) + self.skipped[partition]) & _MASK
            if have != want:
                raise Violation(f"fingerprint of partition {partition} is {have:x}, not {want:x}")
