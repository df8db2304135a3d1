"""The end of a job whose workers train in a group: its result is the state of one that has all steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.brain.brain_state import State
from everstep.brain.checkpoints import ends_with_checkpoint
from everstep.brain.concerns.concern import Concern, Out
from everstep.brain.events import Event, StepsCommitted
from everstep.brain.members import SlotRecord
from everstep.model.reasons import CheckpointReason

if TYPE_CHECKING:
    from everstep.brain.concerns.composition import Concerns


class GroupEndingConcern(Concern):
    """Sees to it that somebody who has the last state is there for the chief and for the last checkpoint."""

    __slots__ = ("groups",)

    def __init__(self, state: State, concerns: Concerns) -> None:
        super().__init__(state, concerns)
        self.groups = concerns.groups

    def settle(self, event: Event, out: Out) -> Out:
        more: Out = []
        if self.state.protection.went_back and not self.job.over:
            self.state.protection.went_back = False
            more += self.concerns.ending.not_the_end(event.at)
        if self.job.over or type(event.fact) is StepsCommitted:
            return more
        return more + self._nobody_saves(event.at) + self._final_replica(event.at)

    def may_end(self, record: SlotRecord) -> bool:
        """Whether a worker of a group whose script has ended may go: nobody will need its state any more."""
        if not self.groups.has_state(record):
            return True
        if not self.duty.done or self.groups.committed_everywhere() > self.state.groups.step:
            return False
        writing, groups = self.checkpoints.writing, self.state.groups
        if writing is None or writing.reason is not CheckpointReason.FINAL:
            return not ends_with_checkpoint(self.job.spec) or groups.final_for == groups.lineage
        return (writing.manifest or writing.partial) is not None  # (else the one that writes it may be lost yet)

    def _final_replica(self, at: float) -> Out:
        """Have the model written, in mode allreduce: the first worker whose script is over writes what the job ends
        with; another one, if it is lost before that is done. Before all data is trained, some may train on without
        those that left their loop: it is the state of who has ended last."""
        checkpoints, groups = self.checkpoints, self.state.groups
        if not groups.lineage or not ends_with_checkpoint(self.job.spec):
            return []
        writing = checkpoints.writing
        if checkpoints.stopping or (writing is not None and (writing.manifest or writing.partial) is not None):
            return []
        records = [s for s in self.members.workers.values() if s.running and not s.stopping]
        through = [s for s in records if self.groups.has_ended(s) and self.groups.has_state(s)]
        if not through or not (self.groups.data_done() or all(map(self.groups.has_ended, records))):
            return []
        if groups.final_for == groups.lineage:
            if writing is not None and writing.reason is CheckpointReason.FINAL:
                slots = [s.member.slot for s in through]
                writing.writer = writing.writer if writing.writer in slots else slots[0]
            return []
        groups.final_for, checkpoints.last = groups.lineage, 0
        out = checkpoints.give_up("scripts have ended, and what they end with is to be written")
        out += checkpoints.begin(self.job, at, CheckpointReason.FINAL, True, self.concerns.training.saved_words())
        if checkpoints.writing is not None:
            checkpoints.writing.writer = through[0].member.slot
        return out

    def _nobody_saves(self, at: float) -> Out:
        """Mode allreduce: every worker that runs has come to the end of its script, and none of them was the chief: one
        is started that will be, while they keep the state for it."""
        workers = self.members.workers
        if not self.duty.done and self.groups.end_is_lost() and any(s.finished for s in workers.values()):
            words = "every state was lost before the chief's script had ended"
            return self.concerns.ending.not_the_end(at, f"its script had ended, and {words}", words)
        running = [s for s in workers.values() if s.running]
        if self.duty.done or not running or not all(self.groups.has_ended(s) for s in running):
            return []
        if any(record.waiting for slot, record in workers.items() if slot < self.job.workers_wanted):
            return []
        return self.concerns.chief.run_again(at)
