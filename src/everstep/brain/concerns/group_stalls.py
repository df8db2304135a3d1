"""Judges members that wait for others, and losses in a row: when a group gets nowhere."""

from __future__ import annotations

from everstep.brain.concerns.group_reader import GroupPart
from everstep.brain.members import SlotRecord
from everstep.ids import Incarnation, Slot
from everstep.model.group import GroupMember
from everstep.policies.groups import BLAME_APART_S

STUCK_S = (
    10.0  # who has waited for others for so long is stuck (a partition of gradients takes less, on slow networks too),
)
STUCK_TOGETHER_S = 2.0  # and so is the group, where all have said it within this time


class GroupStalls(GroupPart):
    """Finds out why members wait."""

    __slots__ = ()

    def stalled(self, generation: int) -> None:
        """Note that a member waits in a collective of ``generation``: whoever left it early is a loss to it."""
        groups = self.group_state
        gone = [x for x in groups.leavers if self.reader.living(x.slot, x.incarnation) is None]
        self.reader.set_leavers([x for x in groups.leavers if self.reader.living(x.slot, x.incarnation) is not None])
        self.reader.lose((x.slot, x.incarnation) for x in gone)
        if any(
            self.reader.living(m.slot, m.incarnation) is None for m in (groups.group.members if groups.group else ())
        ):
            self.group_state.force = "a member waits for one that has ended"
        elif gone:
            self.group_state.force = "a member waits for one that has left"

    def stuck(self, slot: Slot, generation: int, waited_s: float, at: float) -> tuple[SlotRecord | None, str]:
        """A member has waited in a group of ``generation``. Where all of that group wait, each for the others, and all
        are heard, a connection between two of them is dead (or they wait in different groups, which is a bug): they
        leave these at once, for one with new connections. Where that does not help, the youngest of them is to end.
        Returns that one, and why."""
        groups = self.group_state
        if groups.group is None or waited_s < STUCK_S:
            return None, ""
        groups.waits.stuck[slot] = (generation, at)
        everybody = (*groups.group.members, *(x.member for x in groups.leavers))
        where = {generation}  # of them; who is in two of these may wait in another one than the others
        while True:
            waits = [m for m in everybody if any(self._in(m, g) for g in where)]
            reports = [groups.waits.stuck.get(m.slot, (0, 0.0)) for m in waits]
            if any(at - when > STUCK_TOGETHER_S for _, when in reports):
                return None, ""
            if where.issuperset(g for g, _ in reports):
                break
            where.update(g for g, _ in reports)
        if len(waits) < 2:
            return None, ""
        groups.waits.stuck = {}
        groups.waits.apart += len(where) > 1
        apart = ", in different groups" if len(where) > 1 else ""
        words = (
            f"{_workers(len(waits))} wait for each other in step {groups.step} for {waited_s:.1f} s{apart}, and all "
            "are heard"
        )
        if groups.waits.broken_step != groups.step:
            groups.waits.broken_step, groups.waits.broken, groups.waits.ended = groups.step, groups.generations, []
            groups.force = f"{words}: a connection is dead, all are made anew"
            return None, ""
        if {m.slot for m in waits} <= set(groups.waits.ended):
            groups.waits.ended = []
        # (who came in its place need not be tried again: it is the pair of two others)
        m = max(
            (m for m in waits if m.slot not in groups.waits.ended), key=lambda m: (groups.entered[m.slot][1], m.slot)
        )
        groups.waits.ended.append(m.slot)
        return self.reader.living(m.slot, m.incarnation), f"{words}, also with new connections; it came last"

    def _in(self, m: GroupMember, generation: int) -> bool:
        """Whether this process, of the newest group or on its way out of one, is in the group of ``generation``."""
        life, entered = self.group_state.entered.get(m.slot, (Incarnation(0), 0))
        leaver = self.reader.leaving_now().get((m.slot, m.incarnation))
        left = leaver.generation if leaver is not None and leaver.member == m else generation + 1
        return life == m.incarnation and entered <= generation < left

    def blame(self, record: SlotRecord, at: float, reason: str) -> str:
        """A member was lost: the error if the group gets nowhere, else ""."""
        groups, limit = self.group_state, self.job.spec.quarantine_after
        if groups.step > groups.streak.furthest:
            groups.streak.furthest, groups.streak.blamed, groups.streak.blamed_at = groups.step, 0, 0.0
        if groups.streak.blamed and at - groups.streak.blamed_at < BLAME_APART_S:
            return ""
        groups.streak.blamed, groups.streak.blamed_at = groups.streak.blamed + 1, at
        if not 0 < limit <= groups.streak.blamed:
            return ""
        member, streak = record.member, groups.streak
        return (
            f"workers were lost {streak.blamed} times in a row without getting beyond step {streak.furthest} (last: "
            f"{member.key}, {reason}); quarantine_after={limit}: see logs/worker-{member.slot}.log"
        )


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
