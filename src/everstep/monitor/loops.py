"""Compares what each loop of the script asked for with what it trained.

A worker says, as it begins a loop (``job.steps``), which one of its script it is and which epochs of which dataset it
is over. A step, or a lease, is of the loop that its worker was in. Where its epoch is not among those that the loop
asked for, samples were trained, each of them once perhaps, in a loop that they do not belong to: with another learning
rate, say, or with what the script does between two loops done too soon.
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.brain.events import PlanRegistered, Sender
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import split_key


class Asked(NamedTuple):
    """Is a loop over epochs ``[begin, until)`` of a dataset."""

    dataset: int
    begin: int
    until: int

    def has(self, dataset: int, epoch: int) -> bool:
        return dataset == self.dataset and self.begin <= epoch < self.until

    def __str__(self) -> str:
        return f"epoch {self.begin}" if self.until == self.begin + 1 else f"epochs {self.begin} to {self.until - 1}"


class LoopFold:
    """Knows what loops asked for. ``leases``: the loop that a lease was granted in. ``carried``: (dataset, epoch) of
    which a worker had samples in hand, at the end of the data, for a step in its next loop: so they are that loop's."""

    def __init__(self) -> None:
        self.asked: dict[int, set[Asked]] = {}
        self.leases: dict[tuple[LeaseNo, ShardKey], tuple[int, Asked]] = {}
        self.carried: set[tuple[int, int]] = set()
        self._now: dict[tuple[Slot, Incarnation], tuple[int, Asked]] = {}

    def __repr__(self) -> str:
        return f"<loops {sorted(self.asked)}, {len(self.leases)} leases>"

    def registered(self, e: PlanRegistered, by: Sender, dataset: int) -> None:
        """A worker began a loop."""
        if e.loop:
            asked = Asked(dataset, e.begin, e.until)
            self.asked.setdefault(e.loop, set()).add(asked)
            self._now[by.slot, by.incarnation] = e.loop, asked

    def granted(self, lease: LeaseNo, shard: ShardKey, worker: Slot, incarnation: Incarnation) -> None:
        now = self._now.get((worker, incarnation))
        if now is not None:
            self.leases[lease, shard] = now

    def of_steps(self, loop: int, dataset: int, epoch: int) -> str:
        """Return what is wrong with steps of this loop over this epoch; "": nothing, as far as is known."""
        asked = self.asked.get(loop, set())
        if not asked or any(one.has(dataset, epoch) for one in asked):
            return ""
        return f"in loop {loop} of the script, which is over {', '.join(map(str, sorted(asked)))}"

    def of_lease(self, lease: LeaseNo, shard: ShardKey) -> str:
        """Return the same of what was applied under a lease."""
        dataset, epoch, _ = split_key(shard)
        loop, asked = self.leases.get((lease, shard), (0, None))
        if asked is None or asked.has(dataset, epoch) or (dataset, epoch) in self.carried:
            return ""
        return f"in loop {loop} of the script, which is over {asked}"
