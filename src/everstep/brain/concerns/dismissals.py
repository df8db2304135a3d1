"""Ends workers that no group needs any more."""

from __future__ import annotations

from everstep.brain.concerns.group_reader import GroupPart
from everstep.brain.events import InstructionType, StopProcess
from everstep.brain.group import STOP_AFTER_S
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.reasons import LeaveReason


class Dismissals(GroupPart):
    """Ends workers that were to leave a group that is no more, and newcomers that come behind the end."""

    __slots__ = ()

    def dismiss(self) -> list[InstructionType]:
        """Dismiss whoever was to leave the last group: there is nothing to leave any more."""
        groups = self.group_state
        self.reader.set_leavers([])
        dismissed = {(slot, incarnation) for slot, incarnation in groups.dismissed}
        going = [s.member for s in self.members.workers.values() if s.running and s.stopping]
        out: list[InstructionType] = []
        for m in going:
            if (m.slot, m.incarnation) not in dismissed:
                why = Decision("stop", "the group that it was to leave is no more")
                out.append(StopProcess(m.node, Role.WORKER, m.slot, m.incarnation, STOP_AFTER_S, why))
        groups.dismissed = [[m.slot, m.incarnation] for m in going]
        return out

    def send_home(self) -> list[InstructionType]:
        """The data is done and somebody's script ended well: a newcomer could only end without the trained state."""
        out: list[InstructionType] = []
        for slot in sorted(self.group_state.asked):
            ask = self.group_state.asked[slot]
            record = self.reader.living(slot, ask.incarnation)
            behind = ask.leaving is LeaveReason.DONE or self.group_state.passed.get(slot) == ask.incarnation
            if record is None or record.stopping or behind:
                continue
            record.stopping = True
            m = record.member
            self.group_state.dismissed.append([m.slot, m.incarnation])
            why = Decision("stop", "all steps are committed and nobody is left to give it the state")
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, STOP_AFTER_S, why))
        return out
