"""Says what follows from what is known of a group: who is in it, who has its state, who may enter or leave it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.brain.checkpoints import Checkpoints, replica_start
from everstep.brain.duty import Duty
from everstep.brain.events import Grouped, Reply
from everstep.brain.group import Asker, Groups, Leaver, LostMember, Returned
from everstep.brain.job import JobState
from everstep.brain.members import Members, SlotRecord
from everstep.brain.protection import Protection
from everstep.brain.shards import Shards
from everstep.ids import Incarnation, Slot
from everstep.model.group import Group, GroupMember, Position
from everstep.model.member import Role
from everstep.model.reasons import LeaveReason


class GroupReader:
    """Reads :class:`Groups`, for all that change it and for displays."""

    __slots__ = ("_leaving", "_protection", "checkpoints", "duty", "group_state", "job", "members", "shards")

    def __init__(
        self,
        job: JobState,
        members: Members,
        shards: Shards,
        groups: Groups,
        duty: Duty,
        checkpoints: Checkpoints,
        protection: Protection,
    ) -> None:
        self.job, self.members, self.shards, self.group_state, self.duty = job, members, shards, groups, duty
        self.checkpoints, self._protection = checkpoints, protection
        self._leaving: dict[tuple[Slot, Incarnation], Leaver] | None = None  # by process; None: changed

    @property
    def start(self) -> tuple[Position, int]:
        """Return where a new lineage begins: the position, and the checkpoint that has it."""
        return replica_start(self.checkpoints)

    @property
    def saving(self) -> bool:
        """Return whether a checkpoint is being written: who has the only state stays for it."""
        return self.checkpoints.writing is not None

    @property
    def committing(self) -> bool:
        """Whether a manifest is being written, and so is about to be the newest: no lineage begins from an older
        one."""
        return self.checkpoints.writing is not None and self.checkpoints.writing.manifest is not None

    @property
    def rests(self) -> bool:
        """The job stops, and has tables on the ps: nobody trains on, so that these and the state of the group are of
        one step in its last checkpoint."""
        job = self.job
        return bool(self.checkpoints.stopping) and job.spec.ps > 0 and job.rules.settles and not self.data_done()

    @property
    def at_rest(self) -> bool:
        """Whether nobody trains that was to rest: every member is in a group on hold. (Or nobody is left who could.)"""
        group = self.group_state.group
        return not self.rests or group is None or (bool(group.hold) and self.group_state.confirmed >= group.generation)

    @property
    def void(self) -> bool:
        """Whether partitions of its tables go back to what is older than the group's state, as soon as all who have
        that have ended: nobody may copy it."""
        return bool(self._protection.ending)

    def living(self, slot: Slot, incarnation: Incarnation) -> SlotRecord | None:
        return self.members.current(Role.WORKER, slot, incarnation)

    def ask_of(self, record: SlotRecord) -> Asker | None:
        """Return what this process asked; None: nothing, or a process before it in its slot did."""
        ask = self.group_state.asked.get(record.member.slot)
        return ask if ask is not None and ask.incarnation == record.member.incarnation else None

    def member(self, record: SlotRecord) -> bool:
        """Return whether this process is in the group published last."""
        group, m = self.group_state.group, record.member
        return m.role is Role.WORKER and group is not None and group.rank(m.slot, m.incarnation) >= 0

    def trains(self, record: SlotRecord) -> bool:
        """Return whether this process may be in the midst of a step: in the group, or on its way out of it."""
        m = record.member
        if m.role is not Role.WORKER or (self.leaver(record) is None and not self.member(record)):
            return False
        return [m.slot, m.incarnation] not in self.group_state.dismissed

    def leaver(self, record: SlotRecord) -> Leaver | None:
        """Return what is noted of this process while it is on its way out of the group."""
        return self.leaving_now().get((record.member.slot, record.member.incarnation))

    def leaving_now(self) -> dict[tuple[Slot, Incarnation], Leaver]:
        """Asked for every member after most events: a search each time would cost the square of their number."""
        if self._leaving is None:
            self._leaving = {(x.slot, x.incarnation): x for x in self.group_state.leavers}
        return self._leaving

    def set_leavers(self, leavers: list[Leaver]) -> None:
        self.group_state.leavers, self._leaving = leavers, None

    def left_to_wait(self, record: SlotRecord) -> bool:
        """Whether this process is on its way out of the group into one that is on hold: no step will say that all the
        others have changed over. (Who asks is in no group that works, or has a new master.)"""
        group = self.group_state.group
        return self.leaver(record) is not None and group is not None and bool(group.hold)

    def holds(self, m: GroupMember) -> bool:
        """Whether this member lives, and has the state that the journal tells of (see the top of this file)."""
        groups = self.group_state
        life, generation = groups.entered.get(m.slot, (Incarnation(0), 0))
        if (leaver := self.leaving_now().get((m.slot, m.incarnation))) is not None and leaver.behind:
            return False
        if life != m.incarnation or self.living(m.slot, m.incarnation) is None or self._is_cut_off(m):
            return False
        return generation == groups.lineage or generation <= groups.confirmed

    def _is_cut_off(self, m: GroupMember) -> bool:
        """Whether it came back from its way out, and all are lost that could tell what it has missed."""
        back = self.returned(m)
        return back is not None and not any(self.living(slot, life) is not None for slot, life in back.ahead)

    def returned(self, m: GroupMember) -> Returned | None:
        """Return what is noted of a member that came back from its way out, until a generation since then is
        confirmed."""
        for back in self.group_state.returned:
            if (back.slot, back.incarnation) == (
                m.slot,
                m.incarnation,
            ) and back.generation > self.group_state.confirmed:
                return back
        return None

    def goes_on(self, members: tuple[GroupMember, ...]) -> bool:
        """Whether the lineage does: somebody has the state that the journal tells of, and somebody each step behind
        it."""
        return any(map(self.holds, members)) or self._leads_on(members)

    def _leads_on(self, members: tuple[GroupMember, ...]) -> bool:
        """Return whether nobody is beyond the state of one on its way out by steps that nobody left can tell of: those
        who only copied theirs may be, where all of them came after it had left."""
        entered = self.group_state.entered
        staying = [m.slot for m in members if self.living(m.slot, m.incarnation) is not None]
        first = min((entered[slot][1] for slot in staying if slot in entered), default=0)
        return any(self.holds(x.member) and first <= x.generation for x in self.group_state.leavers)

    def joining(self) -> tuple[GroupMember, ...]:
        """Return living workers that asked and are not in the group, by slot."""
        return tuple(self.newcomers(False))

    def last_ones_leave(self) -> bool:
        """Whether everybody who has the state was asked to go, before the data is done."""
        group = self.group_state.group
        holders = [m for m in group.members if self.holds(m)] if group is not None else []
        return bool(holders) and all(map(self.leaves, holders)) and not self.data_done()

    def view(self) -> Group | None:
        """Return the group published last, with who is joining now; None: nobody of it is left."""
        group = self.group_state.group
        if group is None or self.void or not self.goes_on(group.members):
            return None
        over = self.data_done() and any(map(self.has_the_end, group.members))
        return msgspec.structs.replace(group, joining=self.joining(), over=over)

    def words(self, record: SlotRecord) -> str:
        """Return what a worker is in the group, for displays: ``rank 2``, ``joining``, ``leaving``; "" if nothing."""
        group, m = self.group_state.group, record.member
        rank = group.rank(m.slot, m.incarnation) if group is not None else -1
        if not record.running or m.role is not Role.WORKER:
            return ""
        if rank >= 0:
            return f"rank {rank}"
        if self.trains(record):
            return "leaving"
        if self.ask_of(record) is None:
            return ""
        return "joining" if group is not None else "waits for the group"

    def data_done(self) -> bool:
        """Return whether every epoch that was asked for is committed."""
        datasets = [d for d in self.shards.datasets if d.epochs_known]
        return bool(datasets) and all(
            self.group_state.positions.get(d.number, (0, 0))[0] >= d.epochs_known for d in datasets
        )

    def newcomers(self, synced: bool, members: bool = False) -> list[GroupMember]:
        """Return living workers that asked and do not want to leave. ``synced``: only those that have followed the
        group; ``members``: also those in the group."""
        out: list[GroupMember] = []
        group = self.group_state.group
        inside = {(m.slot, m.incarnation) for m in group.members} if group is not None and not members else set()
        for slot, ask in sorted(self.group_state.asked.items()):
            record = self.living(slot, ask.incarnation)
            if record is None or record.stopping or ask.leaving or ask.over or (slot, ask.incarnation) in inside:
                continue
            if not synced or (ask.synced and ask.synced >= self.group_state.lineage):
                out.append(self._as_member(record, ask))
        return out

    def _as_member(self, record: SlotRecord, ask: Asker) -> GroupMember:
        m = record.member
        return GroupMember(m.slot, m.incarnation, m.node, ask.address)

    def grouped(self, dataset: int) -> Reply:
        return Reply(Grouped(self.view(), self.group_state.position(dataset)))

    def steps_on(self) -> bool:
        """Return whether members have surely committed more than was told, which is so while they train: they tell it
        every 50 ms, and take less for most steps."""
        groups = self.group_state
        group = groups.group
        trains = group is not None and bool(group.members) and not group.hold and not self.data_done()
        return trains and groups.confirmed >= groups.lineage

    def reported_done(self, record: SlotRecord) -> bool:
        """Return whether this process told that its script came to its end, with all data trained."""
        m = record.member
        return self.has_ended(record) and self.data_done() and self.living(m.slot, m.incarnation) is not None

    def end_is_lost(self) -> bool:
        """Whether all data was trained, and nobody is left who has, or copied, the state of then."""
        group, living = self.group_state.group, self.living
        if group is None or self.void or not self.data_done() or self.goes_on(group.members):
            return False
        return not any(living(slot, life) is not None for slot, life in self.group_state.passed.items())

    def has_ended(self, record: SlotRecord) -> bool:
        """Return whether this process told that its script came to its end."""
        ask = self.ask_of(record)
        return ask is not None and ask.leaving is LeaveReason.DONE

    def committed_everywhere(self) -> int:
        """Return, where the scripts of all workers that trained in a group have ended, the step before which the states
        of all have the same steps, so that these may be told; 0: some may lack some. (Who left its loop in the midst of
        an iteration cannot know that by a vote.) Newcomers have, or will copy, a state of one of these."""
        ends: set[tuple[int, int]] = set()
        for slot, ask in self.group_state.asked.items():
            done, life = ask.leaving is LeaveReason.DONE, self.group_state.entered.get(slot, (0, 0))[0]
            if self.living(slot, ask.incarnation) is not None and (done or life == ask.incarnation):
                ends.add((ask.reached, ask.reached_in))
        return ends.pop()[0] if len(ends) == 1 and all(generation for _, generation in ends) else 0

    def has_state(self, record: SlotRecord) -> bool:
        """Return whether this process has the state of all committed steps for certain."""
        group, m = self.group_state.group, record.member
        life = (m.slot, m.incarnation)
        known = [group.members[rank]] if group is not None and (rank := group.rank(*life)) >= 0 else []
        if (leaver := self.leaving_now().get(life)) is not None:
            known.append(leaver.member)
        return not self.void and any(map(self.holds, known))

    def ended_well(self, record: SlotRecord) -> bool:
        """Return, of one that ended with status 0 though it was to leave, whether its script had come to its end
        before."""
        return self.reported_done(record) or (self.data_done() and self.member(record) and self.trains(record))

    def lose(self, lives: Iterable[tuple[Slot, Incarnation]]) -> None:
        groups = self.group_state
        known = {(g.slot, g.incarnation) for g in groups.gone}
        for slot, incarnation in lives:
            if (slot, incarnation) not in known:
                known.add((slot, incarnation))
                groups.gone.append(LostMember(slot, incarnation, groups.generations + 1))

    def all_over(self, members: tuple[GroupMember, ...]) -> bool:
        """Whether the last step is committed, and nobody can miss those of the group that are not there any more."""
        return bool(members) and self.data_done() and all(self._well(m) for m in members)

    def _well(self, m: GroupMember) -> bool:
        """Return whether it lives, or its script ended well."""
        record = self.members.workers.get(m.slot)
        return record is not None and record.member.incarnation == m.incarnation and (record.running or record.finished)

    def leaves(self, m: GroupMember) -> bool:
        record, ask = self.living(m.slot, m.incarnation), self.group_state.asked.get(m.slot)
        leaving = ask is not None and ask.incarnation == m.incarnation and bool(ask.leaving)
        return record is None or record.stopping or (leaving and not self.has_the_end(m))

    def has_the_end(self, m: GroupMember) -> bool:
        """Return whether this member's script has come to its end with the final state, which it keeps for a new
        chief."""
        record = self.living(m.slot, m.incarnation)
        kept = record is not None and not record.stopping and self.has_ended(record) and self.holds(m)
        return kept and not self.duty.done and self.data_done()

    def samples(self) -> int:
        """Return the samples of one whole step of the group published last; 0: there is none."""
        group, spec = self.group_state.group, self.job.spec
        if group is None:
            return 0
        ask = self.group_state.asked
        batch = max((a.batch_samples for a in ask.values()), default=1)
        return batch * (spec.logical_workers or (group.size if spec.strategy == "elastic" else spec.workers))

    def has_left(self, record: SlotRecord) -> bool:
        ask = self.ask_of(record)
        return ask is not None and bool(ask.leaving)


class GroupPart:
    """Is the base of what changes :class:`Groups`."""

    __slots__ = ("duty", "group_state", "job", "members", "reader", "shards")

    def __init__(self, reader: GroupReader) -> None:
        self.reader, self.group_state, self.job = reader, reader.group_state, reader.job
        self.members, self.shards, self.duty = reader.members, reader.shards, reader.duty
