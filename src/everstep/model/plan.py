"""Plans: what a policy wants done about the job, as versioned sets of actions.

(How a *dataset* is cut is ``model.shard.ShardSchedule``; where partitions lie is ``model.placement``.) A policy returns
a :class:`Plan` whose version is 0; the brain checks it, numbers it and turns its actions into instructions. The same
plan twice changes nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import msgspec

from everstep.config.renamed import renamed_line
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.decision import Decision
from everstep.model.member import Role


class AdjustBatch(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="ADJUST_BS"):
    """Says how many samples each worker takes of one step; those not named keep theirs. The sum is the global batch."""

    batch: dict[Slot, int]


class AdjustAccum(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="ADJUST_ACCUM"):
    """Says in how many passes each worker computes its samples of one step: more passes, less memory, same gradient."""

    accum: dict[Slot, int]


class AdjustRate(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="ADJUST_LR"):
    """Multiply the learning rate that the script asked for; only where the global batch has changed."""

    factor: float  # > 0, of the script's own rate: not of what an earlier plan made of it


class BackupWorkers(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="BACKUP_WORKERS"):
    """Has a step wait for all but the slowest ``backup`` workers; what those computed is done again by whoever is
    free."""

    backup: int


class KillRestart(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="KILL_RESTART"):
    """End one process and fill its slot anew, elsewhere where there is an elsewhere."""

    role: Role
    slot: Slot
    incarnation: Incarnation  # a later one is left alone: the order was meant for this one


class MovePartitions(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="MOVE_BUCKETS"):
    """Says who shall own these partitions."""

    owners: dict[PartitionId, Slot]


class Scale(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="SCALE"):
    """Says how many workers the job shall have, and how many ps. Both change together, or neither does."""

    workers: int
    ps: int = 0  # 0: as many as there are


class Resize(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="RESIZE"):
    """Says how many threads and how much memory processes of a role get that start from now on. Those that run keep
    what they have, except for ``running``. 0: as before. A plan may have one for each role."""

    role: Role
    threads: int = 0
    memory_bytes: int = 0  # private writable memory of each process
    running: bool = False  # ps only: those that run get the memory, too, where it is more than they have


Action = AdjustBatch | AdjustAccum | AdjustRate | BackupWorkers | KillRestart | MovePartitions | Scale | Resize


def __getattr__(name: str) -> Any:
    """Return what a policy means by an old name, and say so in one line."""
    if name != "MoveBuckets":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(renamed_line("MoveBuckets", "MovePartitions"), FutureWarning, stacklevel=2)
    return MovePartitions


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Says what to do, all of it or none. A larger ``version`` replaces a smaller one."""

    actions: tuple[Action, ...]
    decision: Decision
    version: int = 0  # 0: not the brain's yet
    effective_step: int = 0  # the step that is the first to be done by it; 0: at once
