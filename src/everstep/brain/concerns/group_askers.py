"""Handles what workers ask of their group: to enter, to follow, to leave."""

from __future__ import annotations

from everstep.brain.concerns.committed_steps import CommittedSteps
from everstep.brain.concerns.generations import Generations
from everstep.brain.concerns.group_reader import GroupPart, GroupReader
from everstep.brain.events import GroupAsked, GroupLeft, InstructionType, Refused
from everstep.brain.group import Asker
from everstep.brain.members import SlotRecord
from everstep.model.member import Role
from everstep.model.reasons import LeaveReason


class GroupAskers(GroupPart):
    """Keeps who asked for what."""

    __slots__ = ("_generations", "_steps")

    def __init__(self, reader: GroupReader, generations: Generations, steps: CommittedSteps) -> None:
        super().__init__(reader)
        self._generations, self._steps = generations, steps

    def asks(self, record: SlotRecord, e: GroupAsked) -> Refused | None:
        """A worker is in its loop. Returns why not."""
        groups, shards, m = self.group_state, self.shards, record.member
        if not 0 <= e.dataset < len(shards.datasets):
            return Refused(f"dataset {e.dataset} is not registered")
        if e.batch_samples < 1:
            return Refused(f"batch size {e.batch_samples}: must be at least 1")
        for there, other in sorted(groups.asked.items()):
            if there == m.slot or self.reader.living(there, other.incarnation) is None or other.dataset != e.dataset:
                continue
            if other.batch_samples != e.batch_samples:
                return Refused(
                    f"batch size {e.batch_samples} in worker:{m.slot}, but {other.batch_samples} in worker:{there}; "
                    "every worker must use the same"
                )
        dataset = shards.datasets[e.dataset]
        dataset.epochs_known = max(dataset.epochs_known, e.until_epoch)
        known = groups.asked.get(m.slot)
        ask = Asker(m.incarnation, e.dataset, e.until_epoch, e.batch_samples, e.address, e.position, copy=e.copy)
        if known is not None and known.incarnation == m.incarnation:
            ask.synced = known.synced
            ask.leaving = known.leaving if self.reader.member(record) or record.stopping else LeaveReason.STAYS
        groups.asked[m.slot] = ask
        groups.passed.pop(m.slot, None)  # (the loop whose end it had was not the last one)
        return None

    def over_for(self, record: SlotRecord, e: GroupAsked) -> bool:
        """Whether the loop of an asker that has the newest state, and is in no group, is over."""
        newest = self.group_state.position(e.dataset)
        has_it = e.position is not None and e.position.step >= newest.step
        return has_it and not self.reader.void and not self.reader.member(record) and newest.epoch >= e.until_epoch

    def loop_over(self, record: SlotRecord) -> None:
        """This asker hears that its loop is over. What it had said of following the group comes to nothing: in a group
        it would wait for members that end."""
        self.group_state.passed[record.member.slot] = record.member.incarnation
        ask = self.reader.ask_of(record)
        if ask is not None:
            ask.over = True

    def too_late(self, e: GroupAsked) -> list[InstructionType]:
        """An asker lacks steps, all is trained, and whoever had those has ended well: it came into a group that the
        others never changed over to."""
        behind = e.position is None or e.position.step < self.group_state.step
        members = self.group_state.group.members if self.group_state.group is not None else ()
        left = [*members, *(x.member for x in self.group_state.leavers)]
        if (
            not self.duty.done
            or not behind
            or self.reader.void
            or any(map(self.reader.holds, left))
            or not self.reader.all_over(members)
        ):
            return []
        return self._generations.dismissals.send_home()

    def synced(self, record: SlotRecord, generation: int) -> list[InstructionType]:
        """A newcomer follows the group of ``generation``; or a member of that has met the others, and the journal has
        all that it had committed before."""
        groups, m = self.group_state, record.member
        group = groups.group
        me = [x for x in group.members if (x.slot, x.incarnation) == (m.slot, m.incarnation)] if group else []
        if group is not None and me:
            agreed = (
                generation == group.generation > groups.confirmed and not self.reader.void and self.reader.holds(me[0])
            )
            return self._steps.confirm(generation) if agreed else []
        ask = self.reader.ask_of(record)
        if ask is not None and generation >= self.group_state.lineage:
            ask.synced = max(ask.synced, generation)
        return []

    def asks_to_leave(self, record: SlotRecord, left: GroupLeft) -> None:
        ask = self.reader.ask_of(record)
        if ask is None:
            return
        if left.reason is LeaveReason.DONE:
            ask.leaving, ask.reached, ask.reached_in = left.reason, left.reached, left.generation
        else:
            ask.leaving = ask.leaving or left.reason or LeaveReason.ASKED

    def ended(self, record: SlotRecord, clean: bool) -> None:
        """A process is no more, or is declared lost. ``clean``: it left by itself, as it was told to."""
        groups, m = self.group_state, record.member
        if m.role is not Role.WORKER:
            return
        ask = groups.asked.get(m.slot)
        if ask is not None and ask.incarnation == m.incarnation:
            del groups.asked[m.slot]
        if self.reader.leaver(record) is None:
            return
        self.reader.set_leavers([x for x in groups.leavers if (x.slot, x.incarnation) != (m.slot, m.incarnation)])
        if not clean:
            self.reader.lose([(m.slot, m.incarnation)])
            groups.force = f"{m.key} was lost before it had left"
