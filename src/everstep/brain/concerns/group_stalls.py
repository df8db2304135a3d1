"""Judges members that wait for others, and losses in a row: when a group gets nowhere."""

from __future__ import annotations

from everstep.brain.concerns.group_facts import GroupPart
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
        books = self.books
        gone = [x for x in books.leavers if self.facts.living(x.slot, x.incarnation) is None]
        self.facts.set_leavers([x for x in books.leavers if self.facts.living(x.slot, x.incarnation) is not None])
        self.facts.lose((x.slot, x.incarnation) for x in gone)
        if any(self.facts.living(m.slot, m.incarnation) is None for m in (books.group.members if books.group else ())):
            self.books.force = "a member waits for one that has ended"
        elif gone:
            self.books.force = "a member waits for one that has left"

    def stuck(self, slot: Slot, generation: int, waited_s: float, at: float) -> tuple[SlotRecord | None, str]:
        """A member has waited in a group of ``generation``. Where all of that group wait, each for the others, and all
        are heard, a connection between two of them is dead (or they wait in different groups, which is a bug): they
        leave these at once, for one with new connections. Where that does not help, the youngest of them is to end.
        Returns that one, and why."""
        books = self.books
        if books.group is None or waited_s < STUCK_S:
            return None, ""
        books.waits.stuck[slot] = (generation, at)
        everybody = (*books.group.members, *(x.member for x in books.leavers))
        where = {generation}  # of them; who is in two of these may wait in another one than the others
        while True:
            waits = [m for m in everybody if any(self._in(m, g) for g in where)]
            said = [books.waits.stuck.get(m.slot, (0, 0.0)) for m in waits]
            if any(at - when > STUCK_TOGETHER_S for _, when in said):
                return None, ""
            if where.issuperset(g for g, _ in said):
                break
            where.update(g for g, _ in said)
        if len(waits) < 2:
            return None, ""
        books.waits.stuck = {}
        books.waits.apart += len(where) > 1
        apart = ", in different groups" if len(where) > 1 else ""
        words = (
            f"{_workers(len(waits))} wait for each other in step {books.step} for {waited_s:.1f} s{apart}, and all are "
            "heard"
        )
        if books.waits.broken_step != books.step:
            books.waits.broken_step, books.waits.broken, books.waits.ended = books.step, books.generations, []
            books.force = f"{words}: a connection is dead, all are made anew"
            return None, ""
        if {m.slot for m in waits} <= set(books.waits.ended):
            books.waits.ended = []
        # (who came in its place need not be tried again: it is the pair of two others)
        m = max((m for m in waits if m.slot not in books.waits.ended), key=lambda m: (books.entered[m.slot][1], m.slot))
        books.waits.ended.append(m.slot)
        return self.facts.living(m.slot, m.incarnation), f"{words}, also with new connections; it came last"

    def _in(self, m: GroupMember, generation: int) -> bool:
        """Whether this process, of the newest group or on its way out of one, is in the group of ``generation``."""
        life, entered = self.books.entered.get(m.slot, (Incarnation(0), 0))
        leaver = self.facts.leaving_now().get((m.slot, m.incarnation))
        left = leaver.generation if leaver is not None and leaver.member == m else generation + 1
        return life == m.incarnation and entered <= generation < left

    def blame(self, record: SlotRecord, at: float, reason: str) -> str:
        """A member was lost: the error if the group gets nowhere, else ""."""
        books, limit = self.books, self.job.spec.quarantine_after
        if books.step > books.streak.furthest:
            books.streak.furthest, books.streak.blamed, books.streak.blamed_at = books.step, 0, 0.0
        if books.streak.blamed and at - books.streak.blamed_at < BLAME_APART_S:
            return ""
        books.streak.blamed, books.streak.blamed_at = books.streak.blamed + 1, at
        if not 0 < limit <= books.streak.blamed:
            return ""
        member, streak = record.member, books.streak
        return (
            f"workers were lost {streak.blamed} times in a row without getting beyond step {streak.furthest} (last: "
            f"{member.key}, {reason}); quarantine_after={limit}: see logs/worker-{member.slot}.log"
        )


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
