"""Handles what the group of workers says that train one replicated model: they ask, follow, leave, stall and commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.brain.brain_state import State
from everstep.brain.concerns.committed_steps import CommittedSteps
from everstep.brain.concerns.concern import END, OK, Concern, Handlers, Inputs, Out
from everstep.brain.concerns.generations import Generations
from everstep.brain.concerns.group_askers import GroupAskers
from everstep.brain.concerns.group_splits import StepSplits
from everstep.brain.concerns.group_stalls import GroupStalls
from everstep.brain.concerns.processes import STOP_GRACE_S
from everstep.brain.events import (
    Event,
    GroupAsked,
    GroupDue,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    Refused,
    ReplicaWritten,
    Reply,
    StepsCommitted,
    StopProcess,
    Wait,
)
from everstep.brain.members import SlotRecord
from everstep.brain.replicas import save_in_time, take_replica, why_save
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.reasons import CheckpointReason, LeaveReason

if TYPE_CHECKING:
    from everstep.brain.concerns.composition import Concerns

UNTOLD_WAIT_S = 0.2  # for a script that has ended with steps that the journal lacks


class GroupConcern(Concern):
    """Handles what workers say of their group. Only in jobs that train in one; ``brain.group`` has its rules."""

    __slots__ = ("_askers", "_left", "_stalls", "generations", "groups", "splits", "steps")

    def __init__(self, state: State, concerns: Concerns) -> None:
        super().__init__(state, concerns)
        self.groups = reader = concerns.groups
        self.splits = StepSplits(reader)
        self.generations = Generations(reader, self.splits)
        self.steps = CommittedSteps(reader, self.generations)
        self._askers = GroupAskers(reader, self.generations, self.steps)
        self._stalls = GroupStalls(reader)
        self._left = False  # whether, before this event, everybody who has the state was to go

    def handlers(self) -> Handlers:
        return {
            GroupAsked: self._group_asked,
            GroupSynced: self._group_synced,
            GroupLeft: self._group_left,
            GroupStalled: self._group_stalled,
            StepsCommitted: self._steps_committed,
            ReplicaWritten: self._replica_written,
            GroupDue: self._group_due,
        }

    def before(self, event: Event) -> None:
        self._left = type(event.fact) is not StepsCommitted and self.groups.last_ones_leave()

    def settle(self, event: Event, out: Out) -> Out:
        """Return the next generation, if anything calls for one; a checkpoint, while somebody is there who can write
        it."""
        if type(event.fact) is StepsCommitted:  # (many, and what follows from them is in their handler)
            return []
        more = self._save_for_leavers(self._left, event.at)
        more += self.generations.settle(event.at)
        if (why := why_save(event.fact, [*out, *more], self.job)) is not None:
            more += save_in_time(self.checkpoints, self.job, self.state.groups, why, event.at)
        return more

    def validate(self) -> None:
        groups = self.state.groups
        group = groups.group
        if group is not None:
            assert group.generation == groups.generations, f"{groups!r} published g{group.generation}"
            assert len({m.slot for m in group.members}) == group.size, f"a slot twice in {group}"
            assert groups.lineage <= group.generation
            assert not {(m.slot, m.incarnation) for m in group.members} & set(group.lost), f"{group} has a lost member"
        for number, (epoch, position) in groups.positions.items():
            plan = self.shards.datasets[number].plan
            assert 0 <= position < plan.samples, f"position in dataset {number} at {position} of {plan.samples}"
            begun = self.shards.datasets[number].epochs
            assert len(begun) >= epoch and all(e.finished for e in begun[:epoch]), f"epochs below {epoch} not finished"
        for slot, ask in groups.asked.items():
            assert self.groups.living(slot, ask.incarnation) is not None, (
                f"worker:{slot} #{ask.incarnation} asked and is gone"
            )

    def ended(self, record: SlotRecord, clean: bool) -> None:
        """A process is no more. ``clean``: it left by itself, as it was told to."""
        self._askers.ended(record, clean)

    def blame(self, record: SlotRecord, at: float, reason: str) -> str:
        """A member was lost: the error if the group gets nowhere, else ""."""
        return self._stalls.blame(record, at, reason)

    def _group_due(self, e: GroupDue, event: Event) -> Out:
        return []  # (the group is settled after every event)

    def _replica_written(self, e: ReplicaWritten, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        if self.job.over:
            return [OK]
        out, again = take_replica(
            self.checkpoints,
            self.job,
            self.shards,
            self.state.groups,
            e.checkpoint,
            event.slot,
            e.replica,
            e.error,
            event.at,
        )
        return [Reply(Refused(again)) if again else OK, *out]

    def _group_asked(self, e: GroupAsked, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        if self.job.over:
            return [END]
        if self._askers.over_for(record, e):
            self._askers.loop_over(record)
            return [END]
        refused = self._askers.asks(record, e)
        if refused is not None:
            return [Reply(refused)]
        out, home = self.generations.settle(event.at), self._askers.too_late(e)
        out += home
        if not home and record.stopping and (not self.groups.trains(record) or self.groups.left_to_wait(record)):
            m, why = record.member, Decision("stop", "it was asked to leave; its agent may not have heard")
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, STOP_GRACE_S, why))
        return [self.groups.grouped(e.dataset), *out]

    def _group_synced(self, e: GroupSynced, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        before = self.state.groups.confirmed
        out: Out = [OK, *self._askers.synced(record, e.generation)]
        if self.state.groups.confirmed != before:
            out += self.generations.settle(event.at)
        return out

    def _group_left(self, e: GroupLeft, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        groups = self.state.groups
        if e.reason is LeaveReason.DONE and 0 < e.lineage < groups.lineage:
            return [
                Reply(Refused(f"the states that began with group {e.lineage} are lost: their steps are done again"))
            ]
        if e.reason is LeaveReason.DONE and e.lineage == groups.lineage and e.copied > groups.step:
            return [Reply(Wait(UNTOLD_WAIT_S))]  # (those who can tell the steps may be lost yet)
        before = self.groups.last_ones_leave()
        self._askers.asks_to_leave(record, e)
        if e.reason is LeaveReason.DONE and not record.stopping:
            self.duty.ended_well(self.members, record)
        out = self._save_for_leavers(before, event.at)
        out += self.generations.settle(event.at)
        return [self.groups.grouped(0), *out]

    def _save_for_leavers(self, before: bool, at: float) -> Out:
        """Order a checkpoint if the last ones that have the state were asked to go just now (``before``: they had
        been)."""
        out: Out = []
        if not before and self.groups.last_ones_leave():
            more = self.groups.steps_on()
            why = CheckpointReason.RECLAIM
            out = save_in_time(self.checkpoints, self.job, self.state.groups, why, at, more)
        return out

    def _group_stalled(self, e: GroupStalled, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        if self.job.over:
            return [OK]
        out: Out = []
        for slot in e.silent:
            silent = self.members.workers.get(slot)
            if silent is None or silent is record or not silent.running or not self.groups.trains(silent):
                continue
            m = silent.member
            reason = f"worker:{event.slot} waits for it in step {e.step} for {e.waited_s:.1f} s, and it is not heard"
            why = Decision("stop", f"it was declared lost ({reason}); it must not come back to life")
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, 0.0, why))
            inputs: Inputs = {"waited_s": round(e.waited_s, 3), "step": e.step}
            self.concerns.nodes.await_word(m.node, event.at)
            out += self.concerns.losses.gone(silent, event.at, reason, inputs)
            if self.job.over:
                return [OK, *out]
        last, reason = self._stalls.stuck(event.slot, e.generation, e.waited_s, event.at)
        if last is not None:
            m = last.member
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, 0.0, Decision("stop", reason)))
            reader: Inputs = {"waited_s": round(e.waited_s, 3), "step": e.step}
            out += self.concerns.losses.gone(last, event.at, reason, reader, node_lost=True)  # (not the script's fault)
            if self.job.over:
                return [OK, *out]
        self._stalls.stalled(e.generation)
        out += self.generations.settle(event.at, record)
        group = self.state.groups.group
        stale = group is not None and group.generation != e.generation
        return [self.groups.grouped(0) if stale else OK, *out]

    def _steps_committed(self, e: StepsCommitted, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        if self.job.over:
            return [OK]
        out, error = self.steps.committed(e, event)
        if error:
            return [OK, *out, self.fail(3, error)]
        return [OK, *out]
