"""Processes that are no more: their work is taken back, and their slots are filled again."""

from __future__ import annotations

from everstep.brain.concerns.concern import Concern, Inputs, Out
from everstep.brain.concerns.ending import RESULT_LOST
from everstep.brain.events import LossNote, Note
from everstep.brain.members import Rooms, SlotRecord
from everstep.ids import LeaseNo
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.policies.restarts import may_restart


class LossConcern(Concern):
    """Decides what the loss of a worker costs, and whether another process takes its place."""

    __slots__ = ()

    def gone(
        self,
        record: SlotRecord,
        at: float,
        reason: str,
        inputs: Inputs,
        node_lost: bool = False,
        progress: tuple[tuple[LeaseNo, int], ...] = (),
        counted: Rooms | None = None,
        error: str = "",
    ) -> Out:
        """A process is no more, or counts as such. Take its leases back and fill the slot again. ``error``: that it
        told of itself."""
        if not (node_lost or record.stopping or self.concerns.training.reported_done(record)):
            self.state.supervision.losses += 1
        if record.member.role is Role.PS:
            return self.concerns.ps_slots.gone(record, at, reason, inputs, error)
        member = record.member
        training = self.concerns.training
        if training.reported_done(record):  # its exit status was lost with its agent
            training.ended(record, clean=True)
            self.members.set_state(record, MemberState.LEFT, at)
            record.finished, record.stopping = True, False
            self.duty.ended_well(self.members, record)
            why = Decision("left", f"it had said that its script ran to the end; then {reason}", inputs)
            return [Note(str(member.key), why), *self.concerns.ending.finish_if_all_left(at)]
        training.ended(record, clean=False)
        if record.stopping:
            return self._stopped(record, at)
        self.job.failures.worker += 1
        record.losses += 1
        if not node_lost:
            record.streak += 1
        inputs = {**inputs, "incarnation": member.incarnation}
        if held := training.held_by(record):
            inputs["shards"] = held
        self.members.set_state(record, MemberState.LOST, at)
        out: Out = [LossNote(str(member.key), Decision("lost", reason, inputs))]
        out += training.lost(record, at, reason, node_lost, progress)
        if self.job.over:
            return out
        if not may_restart(record.streak, self.job.spec.max_restarts):
            if training.all_trained():
                error = (
                    f"the result is lost: all data is trained, and {member.key} was lost {record.streak} times "
                    f"in a row (last: {reason}) before its script came to its end; see logs/worker-{member.slot}.log"
                )
                return [*out, self.fail(RESULT_LOST, error)]
            error = (
                f"{member.key} was lost {record.streak} times in a row without finishing {training.unit} "
                f"(last: {reason}); gave up after max_restarts={self.job.spec.max_restarts}: "
                f"see logs/worker-{member.slot}.log"
            )
            return [*out, self.fail(4, error)]
        why = Decision(
            "restart",
            f"it was lost: {reason}",
            {**inputs, "in_a_row": record.streak, "max_restarts": self.job.spec.max_restarts},
            ("go on without it: its share of the machine would idle", "wait for it: it is fenced and cannot count"),
        )
        if training.nothing_left():
            words = "every step is committed, and scripts have ended with the result"
            out.append(Note(str(member.key), Decision("not started again", words, inputs)))
        elif member.slot < self.job.workers_wanted:
            out += self.concerns.processes.start(Role.WORKER, member.slot, at, why, counted, replaces=True)
        return out + self.concerns.ending.finish_if_all_left(at)

    def _stopped(self, record: SlotRecord, at: float) -> Out:
        """Handle that a worker which was asked to leave has left; how it ended does not matter."""
        out = self.concerns.training.take_back(record, "its worker was scaled in")
        self.members.set_state(record, MemberState.LEFT, at)
        record.stopping = False
        out.append(Note(str(record.member.key), Decision("left", "as it was asked to")))
        if (
            record.member.slot < self.job.workers_wanted
            and not record.drained
            and not self.concerns.training.nothing_left()
        ):
            why = Decision("start", "the job wants this worker, here or elsewhere")
            out += self.concerns.processes.start(
                Role.WORKER, record.member.slot, at, why
            )  # (it may find no place and wait)
        return out + self.concerns.ending.finish_if_all_left(at)
