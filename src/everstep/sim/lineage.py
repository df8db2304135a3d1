"""Checks what must be true when partitions go from ps to ps: the counts of truth.py, and which ps has each partition by
right.

A partition's *holder* is the ps that took it last. Only what the holder applies counts; what a replaced one still
applies counts for nothing and must not be acknowledged. When another takes the partition, the changes that it has not
(seq beyond its own) are undone here too: then they must not have been acknowledged, if pushes wait for mirrors. Its
bytes and marks must be exactly those of the changes that remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from everstep.ids import Incarnation, LeaseNo, PartitionId, ShardKey, Slot
from everstep.model.reasons import Arrival
from everstep.model.shard import Lease, ShardSchedule, shard_key, split_key
from everstep.model.snapshot import DatasetPosition
from everstep.native.ledger import batch_fingerprint
from everstep.protect.replication import PeerKey
from everstep.sim.kernel import Violation
from everstep.sim.sim_store import Partition
from everstep.sim.truth import Truth

_MASK = (1 << 64) - 1


class _Change(NamedTuple):
    """``lo`` < 0: the shard was opened; ``before``: its fence until then."""

    seq: int
    shard: ShardKey
    lease: LeaseNo
    lo: int
    hi: int
    before: int = -1


class Lineage(Truth):
    """Holds the truth about partitions. ``acked``: whether a push waits for its mirrors. ``lenient``: whether losses
    may cost something that must then be trained again (eager, or beyond the protection level)."""

    def __init__(self, plan: ShardSchedule, epochs: int, partitions: int, acked: bool, lenient: bool) -> None:
        super().__init__(plan, epochs, partitions)
        self.acked, self.lenient = acked, lenient
        self.holder: dict[PartitionId, PeerKey | None] = {}
        self.log: dict[PartitionId, list[_Change]] = {PartitionId(b): [] for b in range(partitions)}
        self.content: dict[PartitionId, int] = {PartitionId(b): 0 for b in range(partitions)}
        self.fences: dict[tuple[PartitionId, ShardKey], int] = {}
        self.promised = [[bytearray(plan.samples) for _ in range(partitions)] for _ in range(epochs)]
        self.bases: dict[PartitionId, int] = {}  # fingerprint of the snapshot under the log
        self.undone = self.loaded = self.moved = self.begun = 0
        self.restarted: set[PartitionId] = set()  # went on from a snapshot, or began again
        self.kept: set[ShardKey] = set()  # of a resumed job: done by its manifest, and not to be trained again

    def _bits(self, shard: ShardKey, lo: int, hi: int) -> int:
        return ((1 << (hi - lo)) - 1) << (split_key(shard)[1] * self.plan.samples + lo)

    # ------------------------------------------------------------ at the ps

    def opened(self, ps: PeerKey, shard: ShardKey, lease: LeaseNo, seqs: dict[PartitionId, int]) -> None:
        """Note that ``ps`` let ``lease`` open ``shard`` in the partitions ``seqs``, which are at these seqs now."""
        for partition, seq in seqs.items():
            if self.holder.get(partition) != ps:
                continue
            known = self.fences.get((partition, shard), -1)
            if lease < known:
                raise Violation(f"ps:{ps[0]} let lease {lease:x} open shard {shard:x} after the later {known:x}")
            self.fences[partition, shard] = lease
            self.log[partition].append(_Change(seq, shard, lease, -1, -1, known))
        if not self.lenient:
            self.follows(shard)

    def applied_by(
        self, ps: PeerKey, partition: PartitionId, seq: int, shard: ShardKey, lo: int, hi: int, lease: LeaseNo
    ) -> None:
        """Note that ``ps`` applied ``[lo, hi)`` to ``partition``, which is at ``seq`` now."""
        if self.holder.get(partition) != ps:
            return
        if lease != self.fences.get((partition, shard), -1):
            raise Violation(f"ps:{ps[0]} applied [{lo}, {hi}) of shard {shard:x} by the fenced lease {lease:x}")
        _, epoch, index = split_key(shard)
        start, stop = self.plan.bounds(index)
        if not start <= lo < hi <= stop:
            raise Violation(f"ps:{ps[0]} applied [{lo}, {hi}), shard {shard:x} is [{start}, {stop})")
        counts = self.counts[epoch][partition]
        if any(counts[lo:hi]):
            raise Violation(
                f"partition {partition} counts [{lo}, {hi}) of epoch {epoch} twice (ps:{ps[0]}, shard {shard:x})"
            )
        counts[lo:hi] = b"\1" * (hi - lo)
        self.missing[epoch] -= hi - lo
        self.applied += hi - lo
        self.content[partition] ^= self._bits(shard, lo, hi)
        self.log[partition].append(_Change(seq, shard, lease, lo, hi))

    def acknowledged(self, ps: PeerKey, partitions: tuple[PartitionId, ...], shard: ShardKey, lo: int, hi: int) -> None:
        """Note that ``ps`` answered that these partitions have ``[lo, hi)``."""
        epoch = split_key(shard)[1]
        for partition in partitions:
            mine = self.holder.get(partition) == ps
            if not all(self.counts[epoch][partition][lo:hi]) and (mine or (self.acked and not self.lenient)):
                raise Violation(
                    f"ps:{ps[0]} acknowledged [{lo}, {hi}) of shard {shard:x}, partition {partition} lacks it"
                )
            if mine:
                self.promised[epoch][partition][lo:hi] = b"\1" * (hi - lo)

    def released(self, ps: PeerKey, partition: PartitionId) -> None:
        """``ps`` serves it no longer; it stays the holder of what is in it."""

    def acquired(self, ps: PeerKey, partition: PartitionId, how: Arrival, what: Partition) -> None:
        """``ps`` serves ``partition`` from now on, and this is in it."""
        log = self.log[partition]
        if how is Arrival.NEW:
            if partition in self.holder:
                had = self.holder[partition]
                where = f"ps:{had[0]} had it" if had is not None else "there is an image of it"
                raise Violation(f"ps:{ps[0]} began partition {partition} empty, {where}")
        elif how is Arrival.BEGUN:
            self.begun += 1
            if what.seq or what.content:
                raise Violation(f"ps:{ps[0]} began partition {partition} again, and it is not empty")
            self._loaded(partition, what)
        elif how is Arrival.LOADED:
            self.loaded += 1
            self._loaded(partition, what)
        else:
            self.moved += 1
            lost = [c for c in log if c.seq > what.seq]
            del log[len(log) - len(lost) :]
            for c in reversed(lost):
                self._undo(partition, c, ps)
            self._check(ps, partition, how, what)
        self.holder[partition] = ps

    def whole(self, ps: PeerKey, partition: PartitionId, what: Partition) -> None:
        """``ps`` had taken it early; all of it is there now."""
        if self.holder.get(partition) == ps:
            self._check(ps, partition, "rebuilt row by row", what)

    def _undo(self, partition: PartitionId, c: _Change, ps: PeerKey) -> None:
        epoch = split_key(c.shard)[1]
        if c.lo < 0:
            self.fences[partition, c.shard] = c.before
            return
        promised = self.promised[epoch][partition]
        if self.acked and any(promised[c.lo : c.hi]):
            raise Violation(
                f"partition {partition} came to ps:{ps[0]} without [{c.lo}, {c.hi}) of shard {c.shard:x}, "
                f"seq {c.seq}, which was acknowledged"
            )
        promised[c.lo : c.hi] = bytes(c.hi - c.lo)
        self.undoes(partition, c.shard, c.lo, c.hi)
        self.content[partition] ^= self._bits(c.shard, c.lo, c.hi)
        self._reopened(c.shard)

    def _reopened(self, shard: ShardKey) -> None:
        self.undone += 1
        if self.lenient:
            self.done.pop(shard, None)

    def _check(self, ps: PeerKey, partition: PartitionId, how: str, what: Partition) -> None:
        """Check bit for bit what was applied, and the marks that go with it."""
        log = self.log[partition]
        name = f"partition {partition}, which ps:{ps[0]} has {how}, at seq {what.seq}"
        if log and what.seq < log[-1].seq:
            raise Violation(f"{name}, ends before {log[-1].seq}")
        if not what.absent and what.content != self.content[partition]:
            raise Violation(f"{name}, holds other samples than were applied to it")
        total = sum(batch_fingerprint(c.shard, c.lo, c.hi) for c in log if c.lo >= 0) + self.bases.get(partition, 0)
        if what.ledger.fingerprint != total & _MASK:
            raise Violation(f"{name}, has another fingerprint than what was applied to it")
        for shard, (mark, fence) in what.ledger.shards.items():
            key = ShardKey(shard)
            known = self.fences.get((partition, key), -1)
            if fence != known:
                raise Violation(f"{name}, has fence {fence:x} of shard {shard:x}, not {known:x}")
            _, epoch, index = split_key(key)
            start, stop = self.plan.bounds(index)
            counts = self.counts[epoch][partition]
            if not all(counts[start:mark]) or any(counts[mark:stop]):
                raise Violation(f"{name}, has watermark {mark} of shard {shard:x}, which is not what was applied")

    def _loaded(self, partition: PartitionId, what: Partition) -> None:
        """Take what the snapshot has for the truth; the rest is undone, and must be trained again."""
        self.restarted.add(partition)
        self.came_back = True
        n = self.plan.samples
        total = 0
        for epoch in range(self.epochs):
            counts, promised = self.counts[epoch][partition], self.promised[epoch][partition]
            bits = what.content >> (epoch * n) & ((1 << n) - 1)
            for position in range(n):
                has = bits >> position & 1
                if counts[position] and not has:
                    shard = ShardKey(epoch << 32 | position // self.plan.shard_samples)
                    self._reopened(shard)
                    promised[position] = 0
                self.missing[epoch] += counts[position] - has
                counts[position] = has
            for lo in range(n):
                if bits >> lo & 1:
                    total += batch_fingerprint(epoch << 32, lo, lo + 1)
        if what.ledger.fingerprint != total & _MASK:
            raise Violation(f"the image of partition {partition} has another fingerprint than its samples")
        self.content[partition] = what.content
        self.log[partition] = []
        self.bases[partition] = total
        for key in [k for k in self.fences if k[0] == partition]:
            del self.fences[key]
        for number, (_, fence) in what.ledger.shards.items():
            self.fences[partition, ShardKey(number)] = fence

    # ------------------------------------------------------------ a whole job that goes on from a checkpoint

    def resumed(self, snapshots: dict[PartitionId, Partition], positions: Sequence[DatasetPosition]) -> None:
        """Another job begins with these snapshots of all partitions, and its manifest tells these positions."""
        for partition, snapshot in snapshots.items():
            self._loaded(partition, snapshot)
            self.holder[partition] = None
        self.restarted.clear()
        self.granted.clear()
        complete: set[ShardKey] = set()
        for epoch in range(self.epochs):
            for index in range(self.plan.shards):
                start, stop = self.plan.bounds(index)
                if all(all(counts[start:stop]) for counts in self.counts[epoch]):
                    complete.add(shard_key(0, epoch, index))
        self.done = dict.fromkeys(complete, LeaseNo(0))
        announced: set[ShardKey] = set()
        for number, position in enumerate(positions):
            known = {e.epoch: e for e in position.epochs}
            for epoch in {*range(position.finished_epochs), *known}:
                ranges = known[epoch].done if epoch in known else ((0, self.plan.shards),)
                announced |= {shard_key(number, epoch, index) for lo, hi in ranges for index in range(lo, hi)}
        for shard in sorted(announced - complete):
            raise Violation(f"the manifest says that shard {shard:x} is done, and an image lacks some of it")
        self.kept = announced

    # ------------------------------------------------------------ at the master

    def grants(self, worker: Slot, incarnation: Incarnation, ask: int, lease: Lease, current: bool) -> None:
        if lease.shard in self.kept:
            raise Violation(f"shard {lease.shard:x}, which every image has, was granted again by the resumed job")
        self.done.pop(lease.shard, None)  # the brain may have it opened again to see whether something is missing
        super().grants(worker, incarnation, ask, lease, current)

    # ------------------------------------------------------------ at the end

    def at_rest(self, partition: PartitionId, what: Partition) -> None:
        """Check each partition of its owner at the end of the run."""
        if what.content != self.content[partition]:
            raise Violation(f"partition {partition} holds other samples at the end than were applied to it")
