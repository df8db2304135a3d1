"""Generations of a group: the next one is published where the members have to be others."""

from __future__ import annotations

import msgspec

from everstep.brain.concerns.dismissals import Dismissals
from everstep.brain.concerns.group_reader import GroupPart, GroupReader
from everstep.brain.concerns.group_splits import StepSplits
from everstep.brain.events import InstructionType, Note, PublishGroup
from everstep.brain.group import Inputs, Leaver, Returned, Stint, Void
from everstep.brain.job import Phase
from everstep.brain.members import SlotRecord
from everstep.brain.supervision import least_workers
from everstep.model.decision import Decision
from everstep.model.group import Group, GroupMember, Position
from everstep.model.shard import lease_no
from everstep.policies.groups import FORM_GRACE_S, absent_words, admitted, hold_words, quiet_s, ready_to_form

LOST_REMEMBERED = 256


class Generations(GroupPart):
    """Publishes generations, and begins new lineages."""

    __slots__ = ("_splits", "dismissals")

    def __init__(self, reader: GroupReader, splits: StepSplits) -> None:
        super().__init__(reader)
        self._splits = splits
        self.dismissals = Dismissals(reader)

    def settle(self, at: float, waits: SlotRecord | None = None) -> list[InstructionType]:
        """Publish the next generation if there has to be one. ``waits``: a member says that it waits for others."""
        groups, job = self.group_state, self.job
        if job.over:
            return []
        group, force = groups.group, groups.force
        members = group.members if group is not None else ()
        staying = [m for m in members if self.reader.living(m.slot, m.incarnation) is not None]
        lost = [m for m in members if self.reader.living(m.slot, m.incarnation) is None]
        synced = [] if self.reader.void or self.reader.rests else self.reader.newcomers(True)
        held = group is not None and bool(group.hold)
        copies: list[GroupMember] = []
        if self.reader.data_done() and any(map(self.reader.has_the_end, members)):
            # Members are behind their last loop: who is not in it with them for certain copies what they end with.
            synced, copies = [], [m for m in staying if not self.reader.holds(m) or self._in_vain(m, waits)]
            staying = [m for m in staying if m not in copies]
            if copies:
                groups.waits.broken = groups.generations
                force = force or "the others have come to the end of their scripts"
        if not force and not synced and not held and self.reader.all_over(members):
            if staying:
                return []
            if self.duty.done:
                return [*self.dismissals.dismiss(), *self.dismissals.send_home()]
        self.reader.lose((m.slot, m.incarnation) for m in lost)
        leavers = [x.member for x in groups.leavers]
        self._keep_the_last([m for m in (*staying, *leavers) if self.reader.holds(m)])
        if not self.reader.goes_on(members):
            return [] if self.reader.void else self._form(at)
        if not any(map(self.reader.holds, staying)) and not synced:
            staying += [m for m in leavers if self.reader.holds(m)]  # they have the only state
        here = set(staying)
        synced = [m for m in synced if m not in here]
        wanted = [m for m in staying if not self.reader.leaves(m)]
        handed_on = bool(wanted or synced or self._awaited() or self.reader.saving) and not self.reader.void
        if handed_on and not any(map(self.reader.holds, wanted)):
            # One who has the state stays until somebody else has it for certain, or a checkpoint.
            stayer = next((m for m in staying if self.reader.holds(m)), None)
            wanted = [m for m in staying if m is stayer or not self.reader.leaves(m)]
        wanted = admitted(wanted, synced, job.spec.logical_workers)
        hold = hold_words(len(wanted), least_workers(job, self.members)) if wanted else "every worker left"
        if self.reader.rests:
            hold = hold or "the job stops, and its last checkpoint is of one step"
        if wanted and self.reader.data_done():
            hold = ""  # nothing is left to wait for
        assert group is not None
        if tuple(wanted) == members and hold == group.hold and not force:
            groups.timing.due_at = 0.0
            return []
        if at < groups.timing.quiet_until:
            groups.timing.due_at = groups.timing.quiet_until
            return []
        return self._publish(at, group, wanted, lost, hold, force, copies)

    def _in_vain(self, m: GroupMember, waits: SlotRecord | None) -> bool:
        """Return whether this is the one that ``waits``, in its loop, for others that are behind theirs."""
        me = waits is not None and (waits.member.slot, waits.member.incarnation) == (m.slot, m.incarnation)
        return me and self.job.rules.frees and not self.reader.has_the_end(m)

    def _keep_the_last(self, holders: list[GroupMember]) -> None:
        """Who was to be replaced (by a policy) stays if it has the only state now: its replacement comes only when it
        has gone, and could get the state from nobody."""
        records = [self.members.workers[m.slot] for m in holders]
        if records and all(record.stopping and record.avoid is not None for record in records):
            records[0].stopping, records[0].avoid = False, None

    def _awaited(self) -> bool:
        """Return whether a process is on its way that could take over the state of those who leave."""
        return any(
            record.running
            and not record.stopping
            and not self.reader.has_left(record)
            and not self.reader.trains(record)
            for record in self.members.workers.values()
        )

    def _publish(
        self,
        at: float,
        old: Group,
        wanted: list[GroupMember],
        lost: list[GroupMember],
        hold: str,
        force: str,
        copies: list[GroupMember],
    ) -> list[InstructionType]:
        groups = self.group_state
        new, before = set(wanted), set(old.members)
        came = [m for m in wanted if m not in before]
        for m in copies:
            groups.entered.pop(m.slot, None)
            if (ask := groups.asked.get(m.slot)) is not None:
                ask.synced = 0
        gone = {*lost, *copies}
        left = [m for m in old.members if m not in new and m not in gone]
        generation = groups.generations + 1
        back = [x for x in groups.leavers if x.member in new and not x.behind]  # (one behind copied the state anew)
        returned = {x.member for x in back}
        leavers = [x for x in groups.leavers if x.member not in new]
        for m in came:
            if m not in returned:
                groups.entered[m.slot] = (m.incarnation, generation)
        self._note_returned(back, wanted, generation)
        for m in left:
            leavers.append(Leaver(m.slot, m.incarnation, generation, m))
            if (ask := groups.asked.get(m.slot)) is not None:
                ask.synced = 0  # should it want to come back
        self.reader.set_leavers(leavers)
        group = self._next(tuple(wanted), hold, old.begin, old.restore, groups.lineage)
        if old.copied is not None:  # (who was it is not asked any more: others may come in by its state)
            group = groups.group = msgspec.structs.replace(group, copied=old.copied)
        groups.timing.quiet_until = at + quiet_s(len(wanted))
        words = [f"lost {_names(lost)}"] if lost else []
        words += [f"{_names(came)} entered"] if came else []
        words += [f"{_names(left)} left"] if left else []
        words += [force] if force and not words else []
        words += [f"on hold: {hold}"] if hold else (["goes on"] if old.hold else [])
        why = f"{'; '.join(words) or 'again'}: {_workers(len(wanted))} from step {groups.step} on"
        rejected = ("wait for the lost one: nobody could train meanwhile",) if lost else ()
        return [PublishGroup(group, self._why(f"group {generation}", why, rejected))]

    def _note_returned(self, back: list[Leaver], members: list[GroupMember], generation: int) -> None:
        """Note who trained on without those who come back into ``generation``, and was there before they left."""
        groups = self.group_state
        left = {x.member: x.generation for x in back}
        again = {(x.slot, x.incarnation) for x in back}
        notes = [r for r in groups.returned if r.generation > groups.confirmed and (r.slot, r.incarnation) not in again]
        for x in back:
            ahead = [
                (m.slot, m.incarnation)
                for m in members
                if self._since(m) <= x.generation < left.get(m, generation + 1) and m != x.member
            ]
            if ahead:
                notes.append(Returned(x.slot, x.incarnation, generation, ahead))
        groups.returned = notes

    def _since(self, m: GroupMember) -> int:
        """Return the generation since which this member has each step."""
        back = self.reader.returned(m)
        return back.generation if back is not None else self.group_state.entered[m.slot][1]

    def _why(self, action: str, reason: str, rejected: tuple[str, ...] = ()) -> Decision:
        groups = self.group_state
        size = groups.group.size if groups.group is not None else 0
        inputs: Inputs = {"generation": groups.generations, "members": size, "step": groups.step}
        return Decision(action, reason, inputs, rejected)

    def _next(self, members: tuple[GroupMember, ...], hold: str, begin: Position, restore: int, lineage: int) -> Group:
        groups, job = self.group_state, self.job
        split = self._splits.carried(members)
        groups.generations += 1
        groups.timing.due_at, groups.force = 0.0, ""
        groups.gone = [g for g in groups.gone if g.generation > groups.confirmed][-LOST_REMEMBERED:]
        groups.group = Group(
            generation=groups.generations,
            members=members,
            lost=tuple((g.slot, g.incarnation) for g in groups.gone),
            hold=hold,
            begin=begin,
            restore=restore,
            lineage=lineage,
            split=split,
            lease=lease_no(job.master_incarnation, groups.generations),
            broken=groups.waits.broken,
        )
        groups.group = msgspec.structs.replace(groups.group, joining=self.reader.joining())
        return groups.group

    def _form(self, at: float) -> list[InstructionType]:
        """Nobody has a state: begin a group with those who are there, once they are enough."""
        groups, job = self.group_state, self.job
        there = self.reader.newcomers(False, members=True)
        out = self.dismissals.dismiss()
        if not there or self.reader.committing:
            groups.timing.due_at = 0.0
            return out
        if self.reader.data_done() and self.duty.done:
            return out + self.dismissals.send_home()
        if self.reader.data_done() and any(
            self.reader.living(slot, life) is not None for slot, life in groups.passed.items()
        ):
            return out  # (their scripts are behind the loop with what all had: perhaps the chief's)
        records = self.members.workers.values()
        expected = {s.member.slot for s in records if s.running and not s.stopping and not self.reader.has_left(s)}
        least = least_workers(job, self.members)
        if groups.timing.too_few != (too_few := len(there) < max(1, least)):
            groups.timing.too_few, groups.timing.due_at = too_few, 0.0
        due_at = groups.timing.due_at
        now, groups.timing.due_at = ready_to_form(len(there), len(expected), least, at, due_at)
        absent = absent_words(expected - {m.slot for m in there})
        if not now:
            if too_few and 0 < due_at <= at:
                words = f"{len(there)} of at least {least} workers are there"
                words += f"; they wait for {absent}" if absent else "; nobody else has been started yet"
                out.append(Note("job", Decision("group waits", words, {"there": len(there), "least": least})))
            return out
        first = groups.group is None
        self.duty.undone()  # (what a chief's script ended with was of a lineage that is no more)
        groups.passed = {}
        members = admitted(there, [], job.spec.logical_workers)[: job.spec.logical_workers or None]
        begin, restore, copied = self._start(members)
        out += self._void(begin, restore, copied)
        if job.phase is Phase.STARTING:
            job.phase = Phase.TRAINING
        for ask in groups.asked.values():
            ask.synced = 0
        groups.lineage, groups.returned = groups.generations + 1, []
        groups.entered = {m.slot: (m.incarnation, groups.lineage) for m in members}
        hold = hold_words(len(members), least_workers(job, self.members))
        group = self._next(tuple(members), hold, begin, restore, groups.lineage)
        source = f", from checkpoint {restore}" if restore else ""
        if copied is not None:
            group = groups.group = msgspec.structs.replace(group, copied=(copied.slot, copied.incarnation))
            source = f", from the copy of worker:{copied.slot}"
        place = f"step {begin.step}{source}"
        words = f"{len(members)} of {job.workers_wanted} workers begin at {place}"
        if absent:
            words += f", without {absent}: not there within {FORM_GRACE_S:g} s"
        if not first:
            words = f"nobody of the last group is left: {words}"
        return [*out, PublishGroup(group, self._why(f"group {group.generation}", words))]

    def _start(self, members: list[GroupMember]) -> tuple[Position, int, GroupMember | None]:
        """Return where a new lineage begins: the position, the checkpoint that has it, or the member whose copy has it:
        the newest of what there is. A copy counts if it is of the lineage that was lost, and the journal has its steps;
        or if the lineage began with it."""
        groups = self.group_state
        begin, restore = self.reader.start
        from_copy = None
        last = groups.group
        for m in members:
            ask = groups.asked.get(m.slot)
            held = ask.copy if ask is not None and ask.incarnation == m.incarnation else None
            if held is None or last is None or not 0 <= held.position.dataset < len(self.shards.datasets):
                continue
            position = held.position
            if position.sample >= self.shards.datasets[position.dataset].plan.samples:
                position = Position(position.step, position.dataset, position.epoch + 1, 0)
            place = position.dataset, position.epoch, position.sample
            if (
                groups.history.boundaries.get(position.step, place) != place
                or not begin.step < position.step <= groups.step
            ):
                continue
            again = last.copied is not None and position == last.begin and held.lineage < groups.lineage
            if held.lineage == groups.lineage or again:
                begin, restore, from_copy = position, 0, m
        return begin, restore, from_copy

    def _void(self, begin: Position, restore: int, copied: GroupMember | None) -> list[InstructionType]:
        """Steps from ``begin`` on do not count any more."""
        groups = self.group_state
        last = groups.step - 1
        self.fall_back(begin)
        if last < begin.step:
            return []
        groups.history.voids.append(Void(groups.generations + 1, begin.step, last, restore))
        source = f"checkpoint {restore}" if restore else "the beginning: there is no checkpoint"
        source = f"the copy of worker:{copied.slot}" if copied is not None else source
        words = f"every state was lost; steps {begin.step}..{last} are done again, from {source}"
        inputs: Inputs = {"first": begin.step, "last": last, "checkpoint": restore}
        return [Note("", Decision("steps void", words, inputs))]

    def fall_back(self, begin: Position) -> None:
        """Be at ``begin``, as if what came after it had never been."""
        groups = self.group_state
        groups.step = begin.step
        groups.history.stints = [s for s in groups.history.stints if s.first < begin.step]
        positions: dict[int, tuple[int, int]] = {}
        for stint in groups.history.stints:
            positions[stint.dataset] = stint.end
        if begin != Position():
            positions[begin.dataset] = (begin.epoch, begin.sample)
            if groups.history.stints and groups.history.stints[-1].dataset == begin.dataset:
                groups.history.stints[-1].end = (begin.epoch, begin.sample)
            else:
                groups.history.stints.append(Stint(begin.step, begin.dataset, *[(begin.epoch, begin.sample)] * 2))
        groups.positions = positions
        groups.history.boundaries = {}
        kept = [s for s in groups.history.skips if (s.epoch, s.lo) < positions.get(s.dataset, (0, 0))]
        groups.history.skips = kept
        for dataset in self.shards.datasets:
            epoch, sample = positions.get(dataset.number, (0, 0))
            mine = [(s.epoch, s.hi - s.lo) for s in kept if s.dataset == dataset.number]
            skipped: dict[int, int] = {}
            for number, samples in mine:
                skipped[number] = skipped.get(number, 0) + samples
            self.shards.fall_back(dataset.number, epoch, sample, skipped)


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _names(members: list[GroupMember]) -> str:
    names = [f"worker:{m.slot}" for m in members]
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
