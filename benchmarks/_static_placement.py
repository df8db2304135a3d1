"""Is a policy that gives each partition to the ps of the best placement that never changes: for ``hot_cold``."""

from __future__ import annotations

from benchmarks._hot_keys import best_static
from everstep.ids import PartitionId, Slot
from everstep.model.decision import Decision
from everstep.model.observation import Observations
from everstep.model.plan import MovePartitions, Plan


def choose(seen: Observations, state: bool | None) -> tuple[Plan | None, bool]:
    """Ask for it once; from then on the master leaves partitions where they are."""
    if state:
        return None, True
    owners = {PartitionId(b): Slot(p) for b, p in enumerate(best_static())}
    return Plan(actions=(MovePartitions(owners=owners),), decision=Decision("move", "known beforehand", {})), True
