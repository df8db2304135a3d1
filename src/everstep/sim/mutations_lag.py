"""Plants bugs of mirrors that may lag on purpose, to see that the simulator finds them in its storms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.brain.concerns.partition_maps import PartitionMaps
from everstep.brain.events import InstructionType
from everstep.brain.shards import Shards
from everstep.ids import PartitionId, ShardKey
from everstep.protect.machine import Machine
from everstep.protect.replication import StreamKind
from everstep.sim.mutations import Mutation
from everstep.sim.scenario import lag_scenario
from everstep.sim.sim_store import SimStore
from everstep.sim.simulation import Parts, SimOutcome, simulate


def lag_storm(seed: int, parts: Parts = Parts()) -> SimOutcome:
    """Return the run of ``seed`` in the mix with losses of ps whose mirrors lag."""
    return simulate(seed, lag_scenario(seed), parts)


class NewestBatchOnly(SimStore):
    """Sends, of several batches, what the newest one changed: the version before it is kept, not the one before all."""

    def _change(self, key: PartitionId, marks: Any, flipped: int = 0) -> None:
        super()._change(key, marks, flipped)
        if key in self.unsent and flipped:
            self.unsent[key].bits = flipped


class OldMarks(SimStore):
    """Sends the watermark of the first batch with what all of them changed."""

    def _change(self, key: PartitionId, marks: Any, flipped: int = 0) -> None:
        known = set(self.unsent[key].shards) if key in self.unsent else set()
        super()._change(key, marks, flipped)
        if key in self.unsent and known:
            self.unsent[key].shards = known


class ContentsBeforeWhatIsOpen(SimStore):
    """Sends contents that have what is open, and the difference of that later."""

    def emit(self, partition: PartitionId, kind: StreamKind, table: int, lo: int) -> int:
        kept = self.unsent.pop(partition, None)
        out = super().emit(partition, kind, table, lo)
        if kept is not None:
            self.unsent[partition] = kept
        return out


class HandsOverWithoutTheRest(SimStore):
    """Ends the service of a partition, and forgets what its mirrors lack."""

    def hand_over(self, partition: PartitionId) -> int:
        self.unsent.pop(partition, None)
        return super().hand_over(partition)


class SeqBySeq(SimStore):
    """Counts every batch, though one difference has many."""

    def _change(self, key: PartitionId, marks: Any, flipped: int = 0) -> None:
        open_before = key in self.unsent
        super()._change(key, marks, flipped)
        if open_before and key in self.unsent:
            self.partitions[key].seq += 1


class SentTwice(SimStore):
    """Goes on with what was open after it was sent."""

    def flush(self, partition: PartitionId) -> None:
        found = self.unsent.get(partition)
        super().flush(partition)
        if found is not None and self.lag and partition not in self.fenced:
            self.partitions[partition].seq += 1
            self.unsent[partition] = found


class DropsWhatWasEarly(Machine):
    """Ends serving a partition that is being rebuilt, without what its mirrors lack."""

    def _end_serving_while_rebuilding(self, partition: PartitionId) -> None:
        flush = self.port.flush
        self.port.flush = lambda partition: None  # type: ignore[method-assign]
        super()._end_serving_while_rebuilding(partition)
        self.port.flush = flush  # type: ignore[method-assign]


def _loss_costs_nothing(self: PartitionMaps, recovered: Any) -> list[InstructionType]:
    return []


def _reopens_newest(self: Shards, keys: Sequence[ShardKey]) -> int:
    return _reopen(self, list(keys)[-1:])


_reopen = Shards.reopen_done

LAG_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("newest-batch-only", "a difference has the newest batch alone", Parts(store=NewestBatchOnly)),
    Mutation("old-marks", "a difference has the marks of its first change alone", Parts(store=OldMarks)),
    Mutation("contents-first", "contents go out before what is open", Parts(store=ContentsBeforeWhatIsOpen)),
    Mutation(
        "hands-over-too-early", "what is open is lost when a partition moves", Parts(store=HandsOverWithoutTheRest)
    ),
    Mutation("counts-batches", "an open change has as many numbers as batches", Parts(store=SeqBySeq)),
    Mutation("sent-twice", "what was sent stays open", Parts(store=SentTwice)),
    Mutation("drops-what-was-early", "a rebuild begins anew without what is open", Parts(machine=DropsWhatWasEarly)),
    Mutation(
        "loss-costs-nothing",
        "after a loss no done shard is looked at again",
        Parts(),
        ((PartitionMaps, "_losses", _loss_costs_nothing),),
    ),
    Mutation(
        "reopens-the-newest",
        "after a loss only the shard that was done last is opened again",
        Parts(),
        ((Shards, "reopen_done", _reopens_newest),),
    ),
)
