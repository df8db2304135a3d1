"""Plants bugs of resuming a whole job from a checkpoint on purpose, to see that the simulator finds them.

In the position that a manifest tells, in what a resumed job makes of it, in the leases and numbers that must go on from
the old job's, and in the rule when shards may be forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from everstep.brain.brain import Brain
from everstep.brain.checkpoints import Checkpoints
from everstep.brain.events import InstructionType
from everstep.brain.job import JobState
from everstep.brain.shards import Dataset, Epoch, Shards
from everstep.ids import Incarnation, PartitionId
from everstep.model.shard import ShardState
from everstep.model.snapshot import DatasetPosition, EpochPosition, Manifest, PartitionSnapshot
from everstep.sim.mutations import Mutation
from everstep.sim.mutations_ps import _oldest_snapshot
from everstep.sim.resume import ResumeSimulation, resume_scenario, simulate_resume
from everstep.sim.sim_store import Partition, SimStore
from everstep.sim.simulation import Parts, SimOutcome, Simulation

_positions, _resumed, _resume = Shards.positions, Shards._resumed, Checkpoints.resume
_shards_resume = Shards.resume


def resumed(seed: int, parts: Parts = Parts()) -> SimOutcome:
    """Return the run of ``seed`` in the mix in which whole jobs end and are resumed."""
    return simulate_resume(seed, resume_scenario(seed), parts)


# ---------------------------------------------------------------- what the manifest tells


def _position_of_now(self: Shards, snapshots: Sequence[PartitionSnapshot]) -> tuple[DatasetPosition, ...]:
    """Return the position as of the manifest's writing: also shards that became done after the snapshots were taken."""
    return tuple(self._position(dataset, {}) for dataset in self.datasets)


def _position_of_the_first_snapshot(
    self: Shards, snapshots: Sequence[PartitionSnapshot]
) -> tuple[DatasetPosition, ...]:
    """Return the positions as if all snapshots were taken at the moment of the first one's."""
    return _positions(self, snapshots[:1])


# ---------------------------------------------------------------- what the next job makes of it


def _forgets_a_shard(
    self: Shards, dataset: Dataset, saved: EpochPosition | None, epoch_number: int, marked: set[int]
) -> Epoch:
    """Of the shards between done ones that are to do, the last is forgotten."""
    epoch = _resumed(self, dataset, saved, epoch_number, marked)
    if epoch.returned:
        epoch.state[epoch.returned.pop()] = ShardState.RELEASED
        epoch.done += 1
    return epoch


def _trains_the_last_epoch_again(
    self: Shards, positions: Sequence[DatasetPosition], snapshots: Sequence[PartitionSnapshot]
) -> None:
    """Count one finished epoch too few."""
    fewer = [DatasetPosition(p.plan, p.epochs, max(0, p.finished_epochs - 1)) for p in positions]
    _shards_resume(self, fewer, snapshots)


def _trains_a_done_shard_again(
    self: Shards, dataset: Dataset, saved: EpochPosition | None, epoch_number: int, marked: set[int]
) -> Epoch:
    """The end of a range of done shards is taken as if it were in the range."""
    if saved is not None:
        saved = EpochPosition(saved.epoch, tuple((lo, hi - 1) for lo, hi in saved.done), saved.quarantined)
    return _resumed(self, dataset, saved, epoch_number, marked)


def _begins_empty(self: Checkpoints, partitions: int) -> tuple[tuple[PartitionId, int], ...]:
    return ()


def _begins_without_the_last(self: Checkpoints, partitions: int) -> tuple[tuple[PartitionId, int], ...]:
    return tuple((PartitionId(b), self.resumed) for b in range(partitions - 1)) if self.resumed else ()


def _first_master(self: ResumeSimulation, manifest: Manifest) -> Incarnation:
    return Incarnation(0)


def _numbers_again(
    self: Checkpoints, job: JobState, shards: Shards, manifest: Manifest, url: str, numbers: int
) -> list[InstructionType]:
    return _resume(self, job, shards, manifest, url, manifest.checkpoint)


def _announced_once(self: ResumeSimulation) -> bool:
    """Only the first master of a resumed job says from where; its event may die with it."""
    announced_by = getattr(self, "said_by", 0)
    vars(self)["said_by"] = self.jobs
    return bool(announced_by != self.jobs)


class WatermarksForgotten(SimStore):
    """Snapshots are loaded without the watermarks in them."""

    def load_end(self, partition: PartitionId, what: Partition | None) -> None:
        if what is not None:
            what.ledger.shards = {}
        super().load_end(partition, what)


# ---------------------------------------------------------------- what may be forgotten


def _releases_at_once(self: Checkpoints, job: JobState, shards: Shards) -> list[InstructionType]:
    """Done shards are released without a checkpoint that has them."""
    if self.writing is not None:
        return []
    return self._forget(job, shards.release(list(shards.releasing)))


def _releases_while_written(self: Checkpoints, job: JobState, shards: Shards, finished: bool) -> list[InstructionType]:
    """Release the shards that the newest checkpoint has while another one is being written."""
    if self.newest is None:
        return []
    lacking = shards.lacking(self.newest.snapshots)
    return self._forget(job, shards.release([key for key in shards.releasing if key not in lacking]))


def _never_validate(self: Brain) -> None:
    """Blind: the simulator must find it by itself."""


_BLIND = (Brain, "validate", _never_validate)
_patched = partial(Mutation, parts=Parts())

RESUME_MUTATIONS: tuple[Mutation, ...] = (
    _patched(
        "position-of-now",
        "the position in a manifest is taken later than the rows",
        patches=((Shards, "positions", _position_of_now),),
    ),
    _patched(
        "position-of-one-image",
        "the position in a manifest is that of one image",
        patches=((Shards, "positions", _position_of_the_first_snapshot),),
    ),
    _patched(
        "shard-forgotten",
        "a shard between done ones is not trained after a resume",
        patches=((Shards, "_resumed", _forgets_a_shard),),
    ),
    _patched(
        "epoch-again",
        "a finished epoch is trained again after a resume",
        patches=((Shards, "resume", _trains_the_last_epoch_again),),
    ),
    _patched(
        "done-shard-again",
        "a done shard is trained again after a resume",
        patches=((Shards, "_resumed", _trains_a_done_shard_again),),
    ),
    _patched(
        "begins-empty",
        "a resumed job begins with empty partitions",
        patches=((Checkpoints, "first_snapshots", _begins_empty),),
    ),
    _patched(
        "begins-without-last",
        "a resumed job begins with one partition empty",
        patches=((Checkpoints, "first_snapshots", _begins_without_the_last),),
    ),
    _patched(
        "leases-begin-again",
        "leases of a resumed job are older than fences in the images",
        patches=((ResumeSimulation, "first_incarnation", _first_master),),
    ),
    _patched(
        "numbers-again",
        "a resumed job uses numbers of later checkpoints again",
        patches=((Checkpoints, "resume", _numbers_again),),
    ),
    _patched(
        "origin-said-once",
        "a master that dies at once takes with it where the job goes on from",
        patches=((ResumeSimulation, "announces_resume", _announced_once),),
    ),
    _patched(
        "old-images",
        "the images of an older checkpoint are loaded",
        patches=((Simulation, "snapshot_of", _oldest_snapshot),),
    ),
    Mutation("watermarks-forgotten", "images are loaded without watermarks", Parts(store=WatermarksForgotten)),
    _patched(
        "releases-at-once",
        "shards are released before a checkpoint has them",
        patches=((Checkpoints, "_release", _releases_at_once),),
    ),
    _patched(
        "releases-while-written",
        "shards are released while a checkpoint is written",
        patches=((Checkpoints, "release_due", _releases_while_written),),
    ),
)
