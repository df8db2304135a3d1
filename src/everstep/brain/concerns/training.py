"""Says what differs between the ways of training: chosen once, when the concerns of a job are composed.

The other concerns ask here and know no mode. A new way of training is one more subclass of :class:`Training`, with a
concern for what its workers say, and a line in ``composition``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from everstep.brain.brain_state import State
from everstep.brain.checkpoints import replica_start
from everstep.brain.concerns.concern import Concern, Handlers, Out
from everstep.brain.concerns.group import GroupConcern
from everstep.brain.concerns.leases import LeaseConcern
from everstep.brain.concerns.processes import STOP_GRACE_S
from everstep.brain.events import (
    Event,
    GroupAsked,
    JobResumed,
    PlanRegistered,
    ProcessExited,
    Refused,
    Reply,
)
from everstep.brain.group import Adjust
from everstep.brain.members import SlotRecord
from everstep.brain.policy_control import divide
from everstep.brain.replicas import replica_words, resume_replica
from everstep.brain.shards import Dataset
from everstep.config.consistency import parse_consistency
from everstep.ids import Incarnation, LeaseNo, Slot
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.model.plan import Action, AdjustAccum, AdjustBatch, AdjustRate, Plan, Scale
from everstep.model.reasons import CheckpointReason
from everstep.model.shard import Lease

if TYPE_CHECKING:
    from everstep.brain.concerns.composition import Concerns

_CLEAN_EXITS = (0, 128 + 15)  # of a worker that left the group by itself, also upon SIGTERM
_JOINED = (MemberState.ALIVE, MemberState.SUSPECT)


class Training(Concern):
    """Says how workers train. ``unit``: what a worker that gets on finishes; ``saves_all``: each checkpoint has
    everything; ``ahead``: workers have a state of their own, which must not be newer than tables on the ps; ``rests``:
    a job that stops ends its workers before its last checkpoint is made."""

    __slots__ = ()

    unit: ClassVar[str]
    rests: ClassVar[bool] = False
    saves_all: ClassVar[bool] = False
    ahead: ClassVar[bool] = False

    def begun_words(self) -> str:
        """Return what the job consists of, for people."""
        raise NotImplementedError

    def progress(self) -> int:
        """Return what the job has trained so far: a number that grows."""
        raise NotImplementedError

    def all_trained(self) -> bool:
        """Return whether all data that was asked for is trained."""
        raise NotImplementedError

    def nothing_left(self) -> bool:
        """Return whether a new worker could only come too late."""
        return False

    def with_the_end(self) -> frozenset[Slot]:
        """Return workers that have the state that all end with."""
        raise NotImplementedError

    # ------------------------------------------------------------ processes

    def in_step(self, record: SlotRecord) -> bool:
        """Return whether this process may be in the midst of a step that others need it for."""
        return False

    def leaves_first(self, record: SlotRecord) -> bool:
        """Return whether this process has to leave those it trains with before it can be ended."""
        return False

    def grace_s(self, deadline_s: float) -> float:
        """Return how long a worker may take to leave a node that goes within ``deadline_s``."""
        return deadline_s

    def exited(self, record: SlotRecord, e: ProcessExited) -> bool:
        """A process has ended: whether its script came to its end."""
        return e.status == 0 and not record.stopping

    def reported_done(self, record: SlotRecord) -> bool:
        """Return whether this process told that its script came to its end, with all data trained."""
        return False

    def ended(self, record: SlotRecord, clean: bool) -> None:
        """A process is no more, or is declared lost. ``clean``: it left by itself, as it was told to."""

    def may_end(self, record: SlotRecord) -> bool:
        """Whether a worker whose script has ended may go: nobody will need its state any more."""
        return True

    def held_by(self, record: SlotRecord) -> str:
        """Return what this worker works on, for people."""
        return ""

    def lost(
        self, record: SlotRecord, at: float, reason: str, node_lost: bool, progress: tuple[tuple[LeaseNo, int], ...]
    ) -> Out:
        """A worker was lost: take its work back, and count the loss against what it worked on."""
        return []

    def take_back(self, record: SlotRecord, reason: str) -> Out:
        """Take back what this worker has: others train it. ``reason`` "": say nothing."""
        return []

    def confirm(self, record: SlotRecord, lease: Lease) -> bool:
        """Whether this lease, which the worker says it holds, is its own (from now on)."""
        return False

    def loop_begins(self, record: SlotRecord, dataset: Dataset, e: PlanRegistered) -> None:
        """A worker is at a loop over this dataset."""

    # ------------------------------------------------------------ checkpoints and tables

    def nothing_to_save(self) -> str:
        """Return why there is nothing yet that a checkpoint could have; "": there is."""
        raise NotImplementedError

    def unsaved(self) -> bool:
        """Whether something is trained that no checkpoint has, and somebody can write it."""
        raise NotImplementedError

    def save_for_notice(self, at: float) -> Out:
        """Order a checkpoint, as a ps may go before others have all that it has. (A group has rules of its own.)"""
        return []

    def can_save(self) -> bool:
        """Return whether somebody is there who can write a checkpoint."""
        return True

    def can_be_saved(self) -> bool:
        """Whether there is something that no checkpoint has, and all are there who have to write it."""
        raise NotImplementedError

    def lost_if_ended(self) -> bool:
        """Return whether something was trained that no checkpoint has."""
        raise NotImplementedError

    def lost_the_end(self) -> bool:
        """Whether what the job ends with went with its last process, before it was written."""
        return False

    def saved_words(self) -> str:
        """Return what a checkpoint has, for people; "": snapshots of the partitions, and nothing else."""
        return ""

    def resume(self, e: JobResumed) -> Out:
        """Begin with what a checkpoint has."""
        raise NotImplementedError

    def why_ends(self, partitions: int) -> str:
        """Return why a worker must end, for people, where so many partitions are lost beyond their protection."""
        raise NotImplementedError

    # ------------------------------------------------------------ plans of policies

    def step(self) -> int:
        """Return the common step that comes next; 0: there is none."""
        return 0

    def cannot_follow(self, action: Action) -> str:
        """Return why an action of a plan cannot be followed in this job; "": it may."""
        return ""

    def cannot_replace(self, slot: Slot, incarnation: Incarnation) -> str:
        """Return why this worker should not be asked to leave now, for another one; "": it may."""
        return ""

    def cannot_divide(self, batch: dict[Slot, int]) -> str:
        """Return why steps cannot be divided so; "": they can."""
        return ""

    def divide(self, plan: Plan, adjusts: list[Adjust], here: Mapping[Slot, Incarnation]) -> Out:
        """Divide steps among the workers (``here``: all that run) as ``plan`` says."""
        raise NotImplementedError


class LeaseTraining(Training):
    """Mode ps: parameters are on the ps, and workers take leases on shards of the data."""

    __slots__ = ("_leases",)

    unit = "a shard"
    rests = True  # snapshots are of different moments, and what only some of them have would be done again

    def __init__(self, state: State, concerns: Concerns, leases: LeaseConcern) -> None:
        super().__init__(state, concerns)
        self._leases = leases

    def handlers(self) -> Handlers:
        return {GroupAsked: self._group_asked}

    def _group_asked(self, e: GroupAsked, event: Event) -> Out:
        if self.members.current(Role.WORKER, event.slot, event.incarnation) is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        return [Reply(Refused("this job trains in mode ps: start it with --mode allreduce, or use job.sparse"))]

    def begun_words(self) -> str:
        spec = self.job.spec
        return f"{spec.workers} workers, {spec.ps} ps, {spec.partitions} partitions"

    def progress(self) -> int:
        return self.shards.samples_done

    def all_trained(self) -> bool:
        asked = [d for d in self.shards.datasets if d.epochs_known]
        return bool(asked) and all(d.current >= d.epochs_known for d in asked)

    def with_the_end(self) -> frozenset[Slot]:
        if not self.all_trained():
            return frozenset()
        return frozenset(s.member.slot for s in self.members.workers.values() if s.member.state in _JOINED)

    def grace_s(self, deadline_s: float) -> float:
        return min(STOP_GRACE_S, deadline_s)

    def held_by(self, record: SlotRecord) -> str:
        return ", ".join(self.shards.name(key) for key in record.held)

    def lost(
        self, record: SlotRecord, at: float, reason: str, node_lost: bool, progress: tuple[tuple[LeaseNo, int], ...]
    ) -> Out:
        first = self.shards.leases[record.held[0]] if record.held and not node_lost else None
        return self._leases.lost(record, first, progress)

    def take_back(self, record: SlotRecord, reason: str) -> Out:
        return self._leases.drop_leases(record, reason)

    def confirm(self, record: SlotRecord, lease: Lease) -> bool:
        return self._leases.confirm(record, lease)

    def loop_begins(self, record: SlotRecord, dataset: Dataset, e: PlanRegistered) -> None:
        if e.loop:
            dataset.record_loop(e.loop, e.begin, e.until)
            record.loop = max(record.loop, e.loop)

    def nothing_to_save(self) -> str:
        return "" if self.state.placement is not None else "the job has no parameters yet: not every ps has joined"

    def unsaved(self) -> bool:
        return any(dataset.epochs for dataset in self.shards.datasets)

    def save_for_notice(self, at: float) -> Out:
        if self.checkpoints.stopping or not self.unsaved():
            return []
        return self.checkpoints.begin(self.job, at, CheckpointReason.RECLAIM, False)

    def can_be_saved(self) -> bool:
        placement = self.state.placement
        if placement is None:
            return False
        servers = self.members.servers
        return not any((record := servers.get(slot)) is None or record.waiting for slot in set(placement.owner))

    def lost_if_ended(self) -> bool:
        return self.unsaved()

    def resume(self, e: JobResumed) -> Out:
        return self.checkpoints.resume(self.job, self.shards, e.manifest, e.url, e.numbers)

    def why_ends(self, partitions: int) -> str:
        return f"{partitions} partitions begin empty: the first rows of its tables are due again"

    def cannot_follow(self, action: Action) -> str:
        consistency = self.job.spec.consistency
        if isinstance(action, AdjustBatch | AdjustAccum | AdjustRate) and parse_consistency(consistency).kind != "sync":
            return f"mode ps ({consistency}) has no common step"
        return ""

    def divide(self, plan: Plan, adjusts: list[Adjust], here: Mapping[Slot, Incarnation]) -> Out:
        divide(self.state.control, plan.actions, here)
        return []


class GroupTraining(Training):
    """Mode allreduce: every worker has the whole model, and they train it together, step by step. Tables may be on the
    ps."""

    __slots__ = ("_group", "_groups")

    unit = "a step"
    saves_all = True
    ahead = True

    def __init__(self, state: State, concerns: Concerns, group: GroupConcern) -> None:
        super().__init__(state, concerns)
        self._group, self._groups = group, group.groups

    def begun_words(self) -> str:
        spec = self.job.spec
        why = f"{spec.workers} workers, each with the whole model"
        return f"{why} but its tables, {spec.ps} ps, {spec.partitions} partitions" if spec.ps else why

    def progress(self) -> int:
        return self.state.groups.step

    def all_trained(self) -> bool:
        return self._groups.data_done()

    def nothing_left(self) -> bool:
        """The steps are done, and the chief's script has ended well."""
        return self._groups.data_done() and self.duty.done

    def with_the_end(self) -> frozenset[Slot]:
        records = [s for s in self.members.workers.values() if s.member.state in _JOINED]
        return frozenset(s.member.slot for s in records if self._groups.has_state(s))

    def in_step(self, record: SlotRecord) -> bool:
        return self._groups.trains(record)

    def leaves_first(self, record: SlotRecord) -> bool:
        return self._groups.member(record)

    def exited(self, record: SlotRecord, e: ProcessExited) -> bool:
        finished = super().exited(record, e)
        well = self._groups.reported_done(record) and not e.error  # (however it went then)
        if well or (e.status == 0 and self._groups.ended_well(record)):
            finished, record.stopping = True, False
        self._group.ended(record, e.status in _CLEAN_EXITS or (record.stopping and e.status >= 0))
        return finished

    def reported_done(self, record: SlotRecord) -> bool:
        return self._groups.reported_done(record)

    def ended(self, record: SlotRecord, clean: bool) -> None:
        self._group.ended(record, clean)

    def may_end(self, record: SlotRecord) -> bool:
        return self.concerns.group_ending.may_end(record)

    def lost(
        self, record: SlotRecord, at: float, reason: str, node_lost: bool, progress: tuple[tuple[LeaseNo, int], ...]
    ) -> Out:
        if self._groups.member(record) and not node_lost and (error := self._group.blame(record, at, reason)):
            return [self.fail(4, error)]
        return []

    def nothing_to_save(self) -> str:
        there = self.state.groups.group is not None
        return "" if there else "the job has no state yet: no group of workers has begun"

    def unsaved(self) -> bool:
        begun, writing = replica_start(self.checkpoints)[0].step, self.checkpoints.writing
        if self._groups.view() is not None and (self.state.groups.step > begun or self._groups.steps_on()):
            return True
        # or what the job ends with: its workers may have gone
        return writing is not None and writing.reason is CheckpointReason.FINAL

    def can_be_saved(self) -> bool:
        return self.can_save() and self.unsaved()

    def lost_if_ended(self) -> bool:
        return self.state.groups.step > replica_start(self.checkpoints)[0].step

    def can_save(self) -> bool:
        return any(s.running for s in self.members.workers.values())  # (a state goes with its last process)

    def lost_the_end(self) -> bool:
        writing = self.checkpoints.writing
        final = writing is not None and writing.reason is CheckpointReason.FINAL
        return final and writing is not None and (writing.manifest or writing.partial) is None

    def saved_words(self) -> str:
        return replica_words(self.job.spec)

    def resume(self, e: JobResumed) -> Out:
        return resume_replica(
            self.checkpoints, self.job, self.shards, self._group.generations, e.manifest, e.url, e.numbers
        )

    def why_ends(self, partitions: int) -> str:
        return f"{partitions} partitions go back to what is older than its state"

    def step(self) -> int:
        return self.state.groups.step

    def cannot_follow(self, action: Action) -> str:
        least = self.job.spec.min_workers
        if isinstance(action, Scale) and action.workers < least:
            return f"{action.workers} workers: fewer than min_workers={least}, so nobody would train"
        return ""

    def cannot_replace(self, slot: Slot, incarnation: Incarnation) -> str:
        return self._group.splits.cannot_replace(slot, incarnation)

    def cannot_divide(self, batch: dict[Slot, int]) -> str:
        return self._group.splits.cannot_divide(batch)

    def divide(self, plan: Plan, adjusts: list[Adjust], here: Mapping[Slot, Incarnation]) -> Out:
        why = Decision("divide steps", plan.decision.reason, {"plan": plan.version})
        return list(self._group.splits.adjust(adjusts, why))
