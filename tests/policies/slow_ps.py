"""A job's ps under virtual time, as a policy sees them: one of them is slow now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from everstep.brain.policy_control import refuse
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.observation import Observations, ServerSeen
from everstep.model.plan import MovePartitions, Plan
from everstep.policies.stragglers.shared import SharedState, shared

WINDOW_S = 10.0
ROW_S = 0.001  # a partition's part of a request
MOVING = 2  # windows from a plan to its last partition


class Pss:
    """``factor(window)``: how slow ps:0 is then. ``fixed``: of a part's time, in partitions' worth. ``noise``: by ps
    and window, around 1."""

    def __init__(
        self,
        factor: Callable[[int], float],
        ps: int = 4,
        partitions: int = 64,
        fixed: float = 0.0,
        noise: Callable[[int, int], float] = lambda slot, window: 1.0,
        **facts: Any,
    ) -> None:
        self.factor, self.fixed, self.noise = factor, fixed, noise
        self.facts = facts  # of the observations
        self.owner = [Slot(b % ps) for b in range(partitions)]
        self.ps = ps
        self.window = 0
        self.state: SharedState | None = None
        self.plans: list[tuple[int, Plan]] = []
        self._moving: tuple[int, dict[PartitionId, Slot]] = (-1, {})

    def count(self, slot: int) -> int:
        return self.owner.count(Slot(slot))

    def part_s(self, slot: int) -> float:
        factor = self.factor(self.window) if slot == 0 else 1.0
        return factor * (self.fixed + self.count(slot)) * ROW_S

    def slowest_s(self) -> float:
        """What a worker waits for."""
        return max(self.part_s(slot) for slot in range(self.ps))

    def seen(self) -> Observations:
        servers = tuple(
            ServerSeen(
                slot=Slot(slot),
                incarnation=Incarnation(1),
                node=NodeId("node0"),
                service_s=self.part_s(slot) * self.noise(slot, self.window),
                bytes_per_s=100.0 * self.count(slot),
                partitions=self.count(slot),
                owned=tuple(PartitionId(b) for b, owner in enumerate(self.owner) if owner == slot),
            )
            for slot in range(self.ps)
        )
        return Observations(at=WINDOW_S * self.window, window_s=WINDOW_S, servers=servers, **self.facts)

    def run(self, until: int) -> None:
        """Up to this window."""
        while self.window < until:
            at, owners = self._moving
            if self.window == at:
                for partition, slot in owners.items():
                    self.owner[partition] = slot
            seen = self.seen()
            plan, self.state = shared(
                seen, msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=SharedState | None)
            )
            if plan is not None:
                assert not refuse(plan, seen)
                (move,) = plan.actions
                assert isinstance(move, MovePartitions) and self._moving[0] < self.window, "one after the other"
                self._moving = self.window + MOVING, dict(move.owners)
                self.plans.append((self.window, plan))
            self.window += 1
