"""The group of mode allreduce: who is in it, how far it is, and what a loss or a newcomer makes of it.

Theory. The wanted group is a function of three things: the group published last, which processes live, and what they
asked for (enter, synced, leave). :meth:`GroupKeeper.settle` compares it with the group published last after every
event, and publishes the next generation where they differ; so any order of losses, joins and leaves, also during a
rebuild, comes to the same end. A generation's members never change.

What the members committed is told in ranges of steps, repeated at will; they must continue each other without a gap.
The *cursor* is behind the last one. A *line* of states begins with a formation (``origin``) from a checkpoint or from
nothing; it ends when the last process that has its state is gone. Steps that the next line does not begin with are
void, and done again.

A member *holds* the state if it began the line, or if a step was told of a generation that it is in: then the journal
reaches to where it came in. The same is so when a member that holds the state says that it has met the others of that
generation, and that the journal has all that it had committed before. One that only copied the state may be behind or
ahead of the journal; where it alone is left, nobody can say what was committed, so the line ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.brain.checkpoints import Checkpoints, replica_start
from everstep.brain.duty import Duty
from everstep.brain.events import (
    Event,
    GroupAsked,
    Grouped,
    InstructionType,
    Note,
    PublishGroup,
    Refused,
    Reply,
    StepsCommitted,
    StopProcess,
)
from everstep.brain.job import JobState, Phase
from everstep.brain.members import Members, SlotRecord
from everstep.brain.protection import Protection
from everstep.brain.shards import Shards
from everstep.ids import Incarnation, Slot
from everstep.model.decision import Decision
from everstep.model.group import Committed, Group, GroupMember, Mark, StepSplit
from everstep.model.member import Address, Role
from everstep.model.plan import AdjustAccum, AdjustBatch, AdjustRate
from everstep.model.reasons import LeaveReason
from everstep.model.shard import lease_no
from everstep.policies.groups import (
    BLAME_APART_S,
    FORM_GRACE_S,
    absent_words,
    admitted,
    hold_words,
    quiet_s,
    ready_to_form,
)
from everstep.policies.stragglers.shares import even

STEPS_REMEMBERED = 1024  # ends of committed ranges, against which repeats are checked
LOST_REMEMBERED = 256
STUCK_S = (
    10.0  # who has waited for others for so long is stuck (a bucket of gradients takes less, on slow networks too),
)
STUCK_TOGETHER_S = 2.0  # and so is the group, where all have said it within this time
STOP_AFTER_S = 10.0  # for a worker that has left the group to end its script

Inputs = dict[str, str | int | float | bool]
Adjust = AdjustBatch | AdjustAccum | AdjustRate


class Asker(msgspec.Struct):
    """A worker in its loop. ``synced``: the generation that it follows, 0: none; ``leaving``: why, if it does.
    ``over``: it was told that its loop is over, and enters nothing until it asks for another one."""

    incarnation: Incarnation
    dataset: int
    until_epoch: int
    batch_samples: int
    address: Address | None = None
    mark: Mark | None = None
    synced: int = 0
    leaving: LeaveReason = LeaveReason.STAYS
    over: bool = False


class Leaver(msgspec.Struct, array_like=True):
    """Left out of ``generation`` on purpose; until the members have changed over to that, it trains on with them."""

    slot: Slot
    incarnation: Incarnation
    generation: int
    member: GroupMember


class LostMember(msgspec.Struct, array_like=True):
    """Lost while in the group; ``generation``: the first one without it."""

    slot: Slot
    incarnation: Incarnation
    generation: int


class Stint(msgspec.Struct, array_like=True):
    """Consecutive steps on one dataset: from step ``first`` on, ``start`` to ``end`` (epoch, position)."""

    first: int
    dataset: int
    start: tuple[int, int]
    end: tuple[int, int]


class Skip(msgspec.Struct, array_like=True):
    """Positions ``[lo, hi)`` that were committed without being applied."""

    dataset: int
    epoch: int
    lo: int
    hi: int


class Void(msgspec.Struct, array_like=True):
    """Steps ``[first, last]`` count no more since generation ``origin`` began, from checkpoint ``restore``."""

    origin: int
    first: int
    last: int
    restore: int


class Groups(msgspec.Struct, kw_only=True):
    """``group``: published last. ``origin``: the generation that began this line of states. ``step``: committed so far.
    ``cursors``: (epoch, position) by dataset. ``boundaries``: of the last committed ranges: step -> where it begins.
    ``confirmed``: the newest generation that has met, or of which a step was told.
    ``due_at``: when those who wait for a first group begin without the others, or a change waits to be published with
    others (not before ``quiet_until``), or when it is said for whom ``too_few`` workers wait; 0: nothing waits.
    ``force``: why to publish even if the members stay the same.
    ``dismissed``: who was told to end since the group that it was to leave is no more.
    ``entered``: by slot, in which life and with which generation it came into this line.
    ``stuck``: members that said they wait for others, for long: in which generation, and when they said so last.
    ``broken``: the last generation that was left because all of its members did; ``broken_step``: the step of then;
    ``ended``: who had to end since, as that had not helped.
    ``passed``: who copied the state of the end, and came out of its loop with it without having been in the group.
    ``apart``: how often members of different groups waited for each other, which must never be.
    ``final_for``: the line of which a last checkpoint was begun.
    ``blamed``: losses in a row without getting further than ``furthest``. ``splits``: counts versions of splits."""

    group: Group | None = None
    generations: int = 0
    origin: int = 0
    asked: dict[Slot, Asker] = {}
    gone: list[LostMember] = []
    leavers: list[Leaver] = []
    dismissed: list[list[int]] = []
    entered: dict[Slot, tuple[Incarnation, int]] = {}
    step: int = 0
    cursors: dict[int, tuple[int, int]] = {}
    stints: list[Stint] = []
    boundaries: dict[int, tuple[int, int, int]] = {}
    skips: list[Skip] = []
    voids: list[Void] = []
    confirmed: int = 0
    due_at: float = 0.0
    too_few: bool = False
    quiet_until: float = 0.0
    force: str = ""
    blamed: int = 0
    blamed_at: float = 0.0
    furthest: int = 0
    splits: int = 0
    stuck: dict[Slot, tuple[int, float]] = {}
    broken: int = 0
    broken_step: int = -1
    ended: list[Slot] = []
    passed: dict[Slot, Incarnation] = {}
    final_for: int = 0
    apart: int = 0

    def __repr__(self) -> str:
        size = self.group.size if self.group is not None else 0
        return f"<groups g{self.generations} of {size}, step {self.step}, {len(self.asked)} asked>"

    def cursor(self, dataset: int) -> Mark:
        """The place of a state that has all committed steps, in this dataset."""
        epoch, position = self.cursors.get(dataset, (0, 0))
        return Mark(self.step, dataset, epoch, position)


class GroupKeeper:
    """Changes :class:`Groups`; a thin hand of the brain."""

    __slots__ = ("_leaving", "_protection", "books", "checkpoints", "duty", "job", "members", "shards")

    def __init__(
        self,
        job: JobState,
        members: Members,
        shards: Shards,
        books: Groups,
        duty: Duty,
        checkpoints: Checkpoints,
        protection: Protection,
    ) -> None:
        self.job, self.members, self.shards, self.books, self.duty = job, members, shards, books, duty
        self.checkpoints, self._protection = checkpoints, protection
        self._leaving: dict[tuple[Slot, Incarnation], Leaver] | None = None  # of the books, by process; None: changed

    # ------------------------------------------------------------ of checkpoints and tables

    @property
    def start(self) -> tuple[Mark, int]:
        """Where a new line begins: the mark, and the checkpoint that has it."""
        return replica_start(self.checkpoints)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written: who has the only state stays for it."""
        return self.checkpoints.writing is not None

    @property
    def committing(self) -> bool:
        """Whether a manifest is being written, and so is about to be the newest: no line begins from an older one."""
        return self.checkpoints.writing is not None and self.checkpoints.writing.manifest is not None

    @property
    def void(self) -> bool:
        """Whether buckets of its tables go back to what is older than the group's state, as soon as all who have that
        have ended: nobody may copy it."""
        return bool(self._protection.ending)

    # ------------------------------------------------------------ views

    def living(self, slot: Slot, incarnation: Incarnation) -> SlotRecord | None:
        return self.members.current(Role.WORKER, slot, incarnation)

    def _ask_of(self, seat: SlotRecord) -> Asker | None:
        """What this process asked; None: nothing, or a process before it in its slot did."""
        ask = self.books.asked.get(seat.member.slot)
        return ask if ask is not None and ask.incarnation == seat.member.incarnation else None

    def member(self, seat: SlotRecord) -> bool:
        """Whether this process is in the group published last."""
        group, m = self.books.group, seat.member
        return m.role is Role.WORKER and group is not None and group.rank(m.slot, m.incarnation) >= 0

    def trains(self, seat: SlotRecord) -> bool:
        """Whether this process may be in the midst of a step: in the group, or on its way out of it."""
        m = seat.member
        if m.role is not Role.WORKER or (self._leaver(seat) is None and not self.member(seat)):
            return False
        return [m.slot, m.incarnation] not in self.books.dismissed

    def _leaver(self, seat: SlotRecord) -> Leaver | None:
        """What is noted of this process while it is on its way out of the group."""
        return self._leaving_now().get((seat.member.slot, seat.member.incarnation))

    def _leaving_now(self) -> dict[tuple[Slot, Incarnation], Leaver]:
        """Asked for every member after most events: a search each time would cost the square of their number."""
        if self._leaving is None:
            self._leaving = {(x.slot, x.incarnation): x for x in self.books.leavers}
        return self._leaving

    def _set_leavers(self, leavers: list[Leaver]) -> None:
        self.books.leavers, self._leaving = leavers, None

    def left_to_wait(self, seat: SlotRecord) -> bool:
        """Whether this process is on its way out of the group into one that is on hold: no step will say that all the
        others have changed over. (Who asks is in no group that works, or has a new master.)"""
        group = self.books.group
        return self._leaver(seat) is not None and group is not None and bool(group.hold)

    def holds(self, m: GroupMember) -> bool:
        """Whether this member lives, and has the state that the journal tells of (see the top of this file)."""
        books = self.books
        life, generation = books.entered.get(m.slot, (Incarnation(0), 0))
        if life != m.incarnation or self.living(m.slot, m.incarnation) is None:
            return False
        return generation == books.origin or generation <= books.confirmed

    def _goes_on(self, members: tuple[GroupMember, ...]) -> bool:
        """Whether the line does: somebody has the state that the journal tells of, and somebody each step behind it."""
        return any(map(self.holds, members)) or self._leads_on(members)

    def _leads_on(self, members: tuple[GroupMember, ...]) -> bool:
        """Whether nobody is beyond the state of one on its way out by steps that nobody left can tell of: those who
        only copied theirs may be, where all of them came after it had left."""
        entered = self.books.entered
        staying = [m.slot for m in members if self.living(m.slot, m.incarnation) is not None]
        first = min((entered[slot][1] for slot in staying if slot in entered), default=0)
        return any(self.holds(x.member) and first <= x.generation for x in self.books.leavers)

    def joining(self) -> tuple[GroupMember, ...]:
        """Living workers that asked and are not in the group, by slot."""
        return tuple(self._newcomers(False))

    def last_ones_leave(self) -> bool:
        """Whether everybody who has the state was asked to go, before the data is done."""
        group = self.books.group
        holders = [m for m in group.members if self.holds(m)] if group is not None else []
        return bool(holders) and all(map(self._leaves, holders)) and not self.data_done()

    def view(self) -> Group | None:
        """The group published last, with who is joining now; None: nobody of it is left."""
        group = self.books.group
        if group is None or self.void or not self._goes_on(group.members):
            return None
        over = self.data_done() and any(map(self._has_the_end, group.members))
        return msgspec.structs.replace(group, joining=self.joining(), over=over)

    def words(self, seat: SlotRecord) -> str:
        """What a worker is in the group, for displays: ``rank 2``, ``joining``, ``leaving``; "" if nothing."""
        group, m = self.books.group, seat.member
        rank = group.rank(m.slot, m.incarnation) if group is not None else -1
        if not seat.running or m.role is not Role.WORKER:
            return ""
        if rank >= 0:
            return f"rank {rank}"
        if self.trains(seat):
            return "leaving"
        if self._ask_of(seat) is None:
            return ""
        return "joining" if group is not None else "waits for the group"

    def data_done(self) -> bool:
        """Whether every epoch that was asked for is committed."""
        datasets = [d for d in self.shards.datasets if d.epochs_known]
        return bool(datasets) and all(self.books.cursors.get(d.number, (0, 0))[0] >= d.epochs_known for d in datasets)

    def _newcomers(self, synced: bool, members: bool = False) -> list[GroupMember]:
        """Living workers that asked and do not want to leave. ``synced``: only those that have followed the group;
        ``members``: also those in the group."""
        out: list[GroupMember] = []
        group = self.books.group
        inside = {(m.slot, m.incarnation) for m in group.members} if group is not None and not members else set()
        for slot, ask in sorted(self.books.asked.items()):
            seat = self.living(slot, ask.incarnation)
            if seat is None or seat.stopping or ask.leaving or ask.over or (slot, ask.incarnation) in inside:
                continue
            if not synced or (ask.synced and ask.synced >= self.books.origin):
                out.append(self._as_member(seat, ask))
        return out

    def _as_member(self, seat: SlotRecord, ask: Asker) -> GroupMember:
        m = seat.member
        return GroupMember(m.slot, m.incarnation, m.node, ask.address)

    # ------------------------------------------------------------ what workers say

    def asks(self, seat: SlotRecord, e: GroupAsked) -> Refused | None:
        """A worker is in its loop. Returns why not."""
        books, shards, m = self.books, self.shards, seat.member
        if not 0 <= e.dataset < len(shards.datasets):
            return Refused(f"dataset {e.dataset} is not registered")
        if e.batch_samples < 1:
            return Refused(f"batch size {e.batch_samples}: must be at least 1")
        for there, other in sorted(books.asked.items()):
            if there == m.slot or self.living(there, other.incarnation) is None or other.dataset != e.dataset:
                continue
            if other.batch_samples != e.batch_samples:
                return Refused(
                    f"batch size {e.batch_samples} in worker:{m.slot}, but {other.batch_samples} in worker:{there}; "
                    "every worker must use the same"
                )
        dataset = shards.datasets[e.dataset]
        dataset.epochs_known = max(dataset.epochs_known, e.until_epoch)
        known = books.asked.get(m.slot)
        ask = Asker(m.incarnation, e.dataset, e.until_epoch, e.batch_samples, e.address, e.mark)
        if known is not None and known.incarnation == m.incarnation:
            ask.synced = known.synced
            ask.leaving = known.leaving if self.member(seat) or seat.stopping else LeaveReason.STAYS
        books.asked[m.slot] = ask
        return None

    def grouped(self, dataset: int) -> Reply:
        return Reply(Grouped(self.view(), self.books.cursor(dataset)))

    def steps_on(self) -> bool:
        """Whether members have surely committed more than was told, which is so while they train: they tell it every
        50 ms, and take less for most steps."""
        books = self.books
        group = books.group
        trains = group is not None and bool(group.members) and not group.hold and not self.data_done()
        return trains and books.confirmed >= books.origin

    def over_for(self, seat: SlotRecord, e: GroupAsked) -> bool:
        """Whether the loop of an asker that has the newest state, and is in no group, is over."""
        newest = self.books.cursor(e.dataset)
        has_it = e.mark is not None and e.mark.step >= newest.step
        return has_it and not self.void and not self.member(seat) and newest.epoch >= e.until_epoch

    def told_over(self, seat: SlotRecord) -> None:
        """This asker hears that its loop is over. What it had said of following the group comes to nothing: in a group
        it would wait for members that end."""
        self.books.passed[seat.member.slot] = seat.member.incarnation
        ask = self._ask_of(seat)
        if ask is not None:
            ask.over = True

    def too_late(self, e: GroupAsked) -> list[InstructionType]:
        """An asker lacks steps, all is trained, and whoever had those has ended well: it came into a group that the
        others never changed over to."""
        behind = e.mark is None or e.mark.step < self.books.step
        members = self.books.group.members if self.books.group is not None else ()
        left = [*members, *(x.member for x in self.books.leavers)]
        if not self.duty.done or not behind or self.void or any(map(self.holds, left)) or not self._all_over(members):
            return []
        return self._send_home()

    def synced(self, seat: SlotRecord, generation: int) -> list[InstructionType]:
        """A newcomer follows the group of ``generation``; or a member of that has met the others, and the journal has
        all that it had committed before."""
        books, m = self.books, seat.member
        group = books.group
        me = [x for x in group.members if (x.slot, x.incarnation) == (m.slot, m.incarnation)] if group else []
        if group is not None and me:
            met = generation == group.generation > books.confirmed and not self.void and self.holds(me[0])
            return self._confirm(generation) if met else []
        ask = self._ask_of(seat)
        if ask is not None and generation >= self.books.origin:
            ask.synced = max(ask.synced, generation)
        return []

    def said_done(self, seat: SlotRecord) -> bool:
        """Whether this process told that its script came to its end, with all data trained."""
        m = seat.member
        return self.has_ended(seat) and self.data_done() and self.living(m.slot, m.incarnation) is not None

    def end_is_lost(self) -> bool:
        """Whether all data was trained, and nobody is left who has, or copied, the state of then."""
        group, living = self.books.group, self.living
        if group is None or self.void or not self.data_done() or self._goes_on(group.members):
            return False
        return not any(living(slot, life) is not None for slot, life in self.books.passed.items())

    def has_ended(self, seat: SlotRecord) -> bool:
        """Whether this process told that its script came to its end."""
        ask = self._ask_of(seat)
        return ask is not None and ask.leaving is LeaveReason.DONE

    def has_state(self, seat: SlotRecord) -> bool:
        """Whether this process has the state of all committed steps for certain."""
        group, m = self.books.group, seat.member
        life = (m.slot, m.incarnation)
        known = [group.members[rank]] if group is not None and (rank := group.rank(*life)) >= 0 else []
        if (leaver := self._leaving_now().get(life)) is not None:
            known.append(leaver.member)
        return not self.void and any(map(self.holds, known))

    def ended_well(self, seat: SlotRecord) -> bool:
        """Of one that ended with status 0 though it was to leave: whether its script had come to its end before."""
        return self.said_done(seat) or (self.data_done() and self.member(seat) and self.trains(seat))

    def leaves(self, seat: SlotRecord, reason: LeaveReason) -> None:
        ask = self._ask_of(seat)
        if ask is not None:
            ask.leaving = reason if reason is LeaveReason.DONE else ask.leaving or reason or LeaveReason.ASKED

    def stalled(self, generation: int) -> None:
        """Somebody waits in a collective of ``generation``: whoever left it early is a loss to it."""
        books = self.books
        gone = [x for x in books.leavers if self.living(x.slot, x.incarnation) is None]
        self._set_leavers([x for x in books.leavers if self.living(x.slot, x.incarnation) is not None])
        self._lose((x.slot, x.incarnation) for x in gone)
        if any(self.living(m.slot, m.incarnation) is None for m in (books.group.members if books.group else ())):
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
        books.stuck[slot] = (generation, at)
        everybody = (*books.group.members, *(x.member for x in books.leavers))
        where = {generation}  # of them; who is in two of these may wait in another one than the others
        while True:
            waits = [m for m in everybody if any(self._in(m, g) for g in where)]
            said = [books.stuck.get(m.slot, (0, 0.0)) for m in waits]
            if any(at - when > STUCK_TOGETHER_S for _, when in said):
                return None, ""
            if where.issuperset(g for g, _ in said):
                break
            where.update(g for g, _ in said)
        if len(waits) < 2:
            return None, ""
        books.stuck = {}
        books.apart += len(where) > 1
        apart = ", in different groups" if len(where) > 1 else ""
        words = (
            f"{_workers(len(waits))} wait for each other in step {books.step} for {waited_s:.1f} s{apart}, and all are "
            "heard"
        )
        if books.broken_step != books.step:
            books.broken_step, books.broken, books.ended = books.step, books.generations, []
            books.force = f"{words}: a connection is dead, all are made anew"
            return None, ""
        if {m.slot for m in waits} <= set(books.ended):
            books.ended = []
        # (who came in its place need not be tried again: it is the pair of two others)
        m = max((m for m in waits if m.slot not in books.ended), key=lambda m: (books.entered[m.slot][1], m.slot))
        books.ended.append(m.slot)
        return self.living(m.slot, m.incarnation), f"{words}, also with new connections; it came last"

    def _in(self, m: GroupMember, generation: int) -> bool:
        """Whether this process, of the newest group or on its way out of one, is in the group of ``generation``."""
        life, entered = self.books.entered.get(m.slot, (Incarnation(0), 0))
        leaver = self._leaving_now().get((m.slot, m.incarnation))
        left = leaver.generation if leaver is not None and leaver.member == m else generation + 1
        return life == m.incarnation and entered <= generation < left

    def ended(self, seat: SlotRecord, clean: bool) -> None:
        """A process is no more, or is declared lost. ``clean``: it left by itself, as it was told to."""
        books, m = self.books, seat.member
        if m.role is not Role.WORKER:
            return
        ask = books.asked.get(m.slot)
        if ask is not None and ask.incarnation == m.incarnation:
            del books.asked[m.slot]
        if self._leaver(seat) is None:
            return
        self._set_leavers([x for x in books.leavers if (x.slot, x.incarnation) != (m.slot, m.incarnation)])
        if not clean:
            self._lose([(m.slot, m.incarnation)])
            books.force = f"{m.key} was lost before it had left"

    def _lose(self, lives: Iterable[tuple[Slot, Incarnation]]) -> None:
        books = self.books
        known = {(g.slot, g.incarnation) for g in books.gone}
        for slot, incarnation in lives:
            if (slot, incarnation) not in known:
                known.add((slot, incarnation))
                books.gone.append(LostMember(slot, incarnation, books.generations + 1))

    def blame(self, seat: SlotRecord, at: float, reason: str) -> str:
        """A member was lost: the error if the group gets nowhere, else ""."""
        books, limit = self.books, self.job.spec.quarantine_after
        if books.step > books.furthest:
            books.furthest, books.blamed, books.blamed_at = books.step, 0, 0.0
        if books.blamed and at - books.blamed_at < BLAME_APART_S:
            return ""
        books.blamed, books.blamed_at = books.blamed + 1, at
        if not 0 < limit <= books.blamed:
            return ""
        return (
            f"workers were lost {books.blamed} times in a row without getting beyond step {books.furthest} (last: "
            f"{seat.member.key}, {reason}); quarantine_after={limit}: see logs/worker-{seat.member.slot}.log"
        )

    # ------------------------------------------------------------ the next generation

    def settle(self, at: float) -> list[InstructionType]:
        """Publish the next generation if there has to be one."""
        books, job = self.books, self.job
        if job.over:
            return []
        group, force = books.group, books.force
        members = group.members if group is not None else ()
        staying = [m for m in members if self.living(m.slot, m.incarnation) is not None]
        lost = [m for m in members if self.living(m.slot, m.incarnation) is None]
        synced = [] if self.void else self._newcomers(True)
        held = group is not None and bool(group.hold)
        copies: list[GroupMember] = []
        if self.data_done() and any(map(self._has_the_end, members)):
            # Members are behind their last loop: who is not in it with them for certain copies what they end with.
            synced, copies = [], [m for m in staying if not self.holds(m)]
            staying = [m for m in staying if self.holds(m)]
            if copies:
                books.broken = books.generations
                force = force or "the others have come to the end of their scripts"
        if not force and not synced and not held and self._all_over(members):
            if staying:
                return []
            if self.duty.done:
                return [*self._dismiss(), *self._send_home()]
        self._lose((m.slot, m.incarnation) for m in lost)
        leavers = [x.member for x in books.leavers]
        self._keep_the_last([m for m in (*staying, *leavers) if self.holds(m)])
        if not self._goes_on(members):
            return [] if self.void else self._form(at)
        if not any(map(self.holds, staying)) and not synced:
            staying += [m for m in leavers if self.holds(m)]  # they have the only state
        here = set(staying)
        synced = [m for m in synced if m not in here]
        wanted = [m for m in staying if not self._leaves(m)]
        handed_on = bool(wanted or synced or self._awaited() or self.saving) and not self.void
        if handed_on and not any(map(self.holds, wanted)):
            # One who has the state stays until somebody else has it for certain, or a checkpoint.
            keeper = next((m for m in staying if self.holds(m)), None)
            wanted = [m for m in staying if m is keeper or not self._leaves(m)]
        wanted = admitted(wanted, synced, job.spec.logical_workers)
        hold = hold_words(len(wanted), job.spec.min_workers) if wanted else "every worker left"
        if wanted and self.data_done():
            hold = ""  # nothing is left to wait for
        assert group is not None
        if tuple(wanted) == members and hold == group.hold and not force:
            books.due_at = 0.0
            return []
        if at < books.quiet_until:
            books.due_at = books.quiet_until
            return []
        return self._publish(at, group, wanted, lost, hold, force, copies)

    def _keep_the_last(self, holders: list[GroupMember]) -> None:
        """Who was to be replaced (by a policy) stays if it has the only state now: its replacement comes only when it
        has gone, and could get the state from nobody."""
        seats = [self.members.workers[m.slot] for m in holders]
        if seats and all(seat.stopping and seat.avoid is not None for seat in seats):
            seats[0].stopping, seats[0].avoid = False, None

    def _all_over(self, members: tuple[GroupMember, ...]) -> bool:
        """Whether the last step is committed, and nobody can miss those of the group that are not there any more."""
        return bool(members) and self.data_done() and all(self._well(m) for m in members)

    def _well(self, m: GroupMember) -> bool:
        """Whether it lives, or its script ended well."""
        seat = self.members.workers.get(m.slot)
        return seat is not None and seat.member.incarnation == m.incarnation and (seat.running or seat.finished)

    def _leaves(self, m: GroupMember) -> bool:
        seat, ask = self.living(m.slot, m.incarnation), self.books.asked.get(m.slot)
        leaving = ask is not None and ask.incarnation == m.incarnation and bool(ask.leaving)
        return seat is None or seat.stopping or (leaving and not self._has_the_end(m))

    def _has_the_end(self, m: GroupMember) -> bool:
        """Whether this member's script has come to its end with the final state, which it keeps for a new chief."""
        seat = self.living(m.slot, m.incarnation)
        kept = seat is not None and not seat.stopping and self.has_ended(seat) and self.holds(m)
        return kept and not self.duty.done and self.data_done()

    def _awaited(self) -> bool:
        """Whether a process is on its way that could take over the state of those who leave."""
        return any(
            seat.running and not seat.stopping and not self._has_left(seat) and not self.trains(seat)
            for seat in self.members.workers.values()
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
        books = self.books
        new, before = set(wanted), set(old.members)
        came = [m for m in wanted if m not in before]
        for m in copies:
            books.entered.pop(m.slot, None)
            if (ask := books.asked.get(m.slot)) is not None:
                ask.synced = 0
        gone = {*lost, *copies}
        left = [m for m in old.members if m not in new and m not in gone]
        generation = books.generations + 1
        returned = {x.member for x in books.leavers if x.member in new}
        leavers = [x for x in books.leavers if x.member not in new]
        for m in came:
            if m not in returned:
                books.entered[m.slot] = (m.incarnation, generation)
        for m in left:
            leavers.append(Leaver(m.slot, m.incarnation, generation, m))
            if (ask := books.asked.get(m.slot)) is not None:
                ask.synced = 0  # should it want to come back
        self._set_leavers(leavers)
        group = self._next(tuple(wanted), hold, old.begin, old.restore, books.origin)
        books.quiet_until = at + quiet_s(len(wanted))
        words = [f"lost {_names(lost)}"] if lost else []
        words += [f"{_names(came)} entered"] if came else []
        words += [f"{_names(left)} left"] if left else []
        words += [force] if force and not words else []
        words += [f"on hold: {hold}"] if hold else (["goes on"] if old.hold else [])
        why = f"{'; '.join(words) or 'again'}: {_workers(len(wanted))} from step {books.step} on"
        rejected = ("wait for the lost one: nobody could train meanwhile",) if lost else ()
        return [PublishGroup(group, self._why(f"group {generation}", why, rejected))]

    def _why(self, action: str, reason: str, rejected: tuple[str, ...] = ()) -> Decision:
        books = self.books
        size = books.group.size if books.group is not None else 0
        inputs: Inputs = {"generation": books.generations, "members": size, "step": books.step}
        return Decision(action, reason, inputs, rejected)

    def _next(self, members: tuple[GroupMember, ...], hold: str, begin: Mark, restore: int, origin: int) -> Group:
        books, job = self.books, self.job
        split = self._carried(members)
        books.generations += 1
        books.due_at, books.force = 0.0, ""
        books.gone = [g for g in books.gone if g.generation > books.confirmed][-LOST_REMEMBERED:]
        books.group = Group(
            generation=books.generations,
            members=members,
            lost=tuple((g.slot, g.incarnation) for g in books.gone),
            hold=hold,
            begin=begin,
            restore=restore,
            origin=origin,
            split=split,
            lease=lease_no(job.master_incarnation, books.generations),
            broken=books.broken,
        )
        books.group = msgspec.structs.replace(books.group, joining=self.joining())
        return books.group

    # ------------------------------------------------------------ how a step is divided

    def samples(self) -> int:
        """Of one whole step of the group published last; 0: there is none."""
        group, spec = self.books.group, self.job.spec
        if group is None:
            return 0
        ask = self.books.asked
        batch = max((a.batch_samples for a in ask.values()), default=1)
        return batch * (spec.logical_workers or (group.size if spec.strategy == "elastic" else spec.workers))

    def cannot_divide(self, batch: dict[Slot, int]) -> str:
        """Why the group's steps cannot be divided so; "": they can."""
        group = self.view()
        if group is None or group.hold:
            return "there is no group that trains"
        inside = {m.slot for m in group.members}
        missing = [slot for slot in batch if slot not in inside]
        if missing:
            return f"worker:{missing[0]} is not in the group"
        if len(batch) == group.size and sum(batch.values()) != self.samples():
            return f"a step has {self.samples()} samples now, not {sum(batch.values())}"
        return ""

    def cannot_replace(self, slot: Slot, incarnation: Incarnation) -> str:
        """Why this member should not be asked to leave now, for another one; "": it may. Only from a group at rest of
        which enough others have the state for certain: nobody needs the replacement to come."""
        books, group = self.books, self.view()
        if group is None or group.hold or group.rank(slot, incarnation) < 0:
            return f"worker:{slot} is in no group that trains"
        if books.leavers or group.joining or books.confirmed < group.generation:
            return "the group is changing"
        if self.data_done():
            return "all data is trained"
        rest = [m for m in group.members if m.slot != slot and self.holds(m) and not self._leaves(m)]
        if len(rest) < max(1, self.job.spec.min_workers):
            return f"{len(rest)} would be left of at least {max(1, self.job.spec.min_workers)} workers"
        return ""

    def adjust(self, actions: list[Adjust], why: Decision) -> list[InstructionType]:
        """Divide steps as these actions say."""
        group = self.books.group
        assert group is not None
        shares: dict[Slot, int] = {}
        passes: dict[Slot, int] = {}
        rate = group.split.rate
        for action in actions:
            match action:
                case AdjustBatch(batch=batch):
                    shares = batch
                case AdjustAccum(accum=accum):
                    passes = accum
                case AdjustRate(factor=factor):
                    rate = factor
        published = self.divide(shares, passes, rate, why)
        return [] if published is None else [published]

    def divide(
        self, shares: dict[Slot, int], passes: dict[Slot, int], rate: float, why: Decision
    ) -> PublishGroup | None:
        """The members of the group are to divide its steps so. Whoever is not named takes what it takes now; None:
        that is how it is already."""
        books, group = self.books, self.books.group
        assert group is not None
        old, slots = group.split, [m.slot for m in group.members]
        before = old.shares or tuple(even(self.samples(), group.size))
        told = (0,) * group.size if shares or not old.passes else old.passes
        split = StepSplit(
            old.version,
            tuple(shares.get(slot, share) for slot, share in zip(slots, before, strict=True)),
            tuple(passes.get(slot, n) for slot, n in zip(slots, told, strict=True)),
            rate,
        )
        now = StepSplit(old.version, before, old.passes or (0,) * group.size, old.rate)
        if split == now:
            return None
        books.splits += 1
        books.group = msgspec.structs.replace(group, split=msgspec.structs.replace(split, version=books.splits))
        return PublishGroup(msgspec.structs.replace(books.group, joining=self.joining()), why)

    def _carried(self, members: tuple[GroupMember, ...]) -> StepSplit:
        """The split of the group published last, for ``members``: who stays keeps its share, who comes takes a middle
        one. Passes are forgotten: they were asked for another number of samples, and may not fit into memory now."""
        books = self.books
        old = books.group
        if old is None or old.split == StepSplit():
            return StepSplit()
        rank = {m: r for r, m in enumerate(old.members)}
        shares = old.split.shares
        books.splits += 1
        middle = max(1, sum(shares) // max(1, len(shares)))
        return StepSplit(
            books.splits,
            tuple(shares[rank[m]] if m in rank else middle for m in members) if shares else (),
            (),
            old.split.rate,
        )

    # ------------------------------------------------------------ a new line of states

    def _form(self, at: float) -> list[InstructionType]:
        """Nobody has a state: begin a group with those who are there, once they are enough."""
        books, job = self.books, self.job
        there = self._newcomers(False, members=True)
        out = self._dismiss()
        if not there or self.committing:
            books.due_at = 0.0
            return out
        if self.data_done() and self.duty.done:
            return out + self._send_home()
        if self.data_done() and any(self.living(slot, life) is not None for slot, life in books.passed.items()):
            return out  # (their scripts are behind the loop with what all had: perhaps the chief's)
        seats = self.members.workers.values()
        expected = {s.member.slot for s in seats if s.running and not s.stopping and not self._has_left(s)}
        least = job.spec.min_workers
        if books.too_few != (too_few := len(there) < max(1, least)):
            books.too_few, books.due_at = too_few, 0.0
        due_at = books.due_at
        now, books.due_at = ready_to_form(len(there), len(expected), least, at, due_at)
        absent = absent_words(expected - {m.slot for m in there})
        if not now:
            if too_few and 0 < due_at <= at:
                words = f"{len(there)} of at least {least} workers are there"
                words += f"; they wait for {absent}" if absent else "; nobody else has been started yet"
                out.append(Note("job", Decision("group waits", words, {"there": len(there), "least": least})))
            return out
        first = books.group is None
        self.duty.undone()  # (what a chief's script ended with was of a line that is no more)
        books.passed = {}
        begin, restore = self.start
        out += self._void(begin, restore)
        if job.phase is Phase.STARTING:
            job.phase = Phase.TRAINING
        for ask in books.asked.values():
            ask.synced = 0
        members = admitted(there, [], job.spec.logical_workers)[: job.spec.logical_workers or None]
        books.origin = books.generations + 1
        books.entered = {m.slot: (m.incarnation, books.origin) for m in members}
        hold = hold_words(len(members), job.spec.min_workers)
        group = self._next(tuple(members), hold, begin, restore, books.origin)
        place = f"step {begin.step}" + (f", from checkpoint {restore}" if restore else "")
        words = f"{len(members)} of {job.workers_wanted} workers begin at {place}"
        if absent:
            words += f", without {absent}: not there within {FORM_GRACE_S:g} s"
        if not first:
            words = f"nobody of the last group is left: {words}"
        return [*out, PublishGroup(group, self._why(f"group {group.generation}", words))]

    def _dismiss(self) -> list[InstructionType]:
        """Whoever was to leave the last group has nothing to leave any more."""
        books = self.books
        self._set_leavers([])
        told = {(slot, incarnation) for slot, incarnation in books.dismissed}
        going = [s.member for s in self.members.workers.values() if s.running and s.stopping]
        out: list[InstructionType] = []
        for m in going:
            if (m.slot, m.incarnation) not in told:
                why = Decision("stop", "the group that it was to leave is no more")
                out.append(StopProcess(m.node, Role.WORKER, m.slot, m.incarnation, STOP_AFTER_S, why))
        books.dismissed = [[m.slot, m.incarnation] for m in going]
        return out

    def _has_left(self, seat: SlotRecord) -> bool:
        ask = self._ask_of(seat)
        return ask is not None and bool(ask.leaving)

    def _void(self, begin: Mark, restore: int) -> list[InstructionType]:
        """Steps from ``begin`` on do not count any more."""
        books = self.books
        last = books.step - 1
        self.fall_back(begin)
        if last < begin.step:
            return []
        books.voids.append(Void(books.generations + 1, begin.step, last, restore))
        source = f"checkpoint {restore}" if restore else "the beginning: there is no checkpoint"
        words = f"every state was lost; steps {begin.step}..{last} are done again, from {source}"
        inputs: Inputs = {"first": begin.step, "last": last, "checkpoint": restore}
        return [Note("", Decision("steps void", words, inputs))]

    def fall_back(self, begin: Mark) -> None:
        """Be at ``begin``, as if what came after it had never been."""
        books = self.books
        books.step = begin.step
        books.stints = [s for s in books.stints if s.first < begin.step]
        cursors: dict[int, tuple[int, int]] = {}
        for stint in books.stints:
            cursors[stint.dataset] = stint.end
        if begin != Mark():
            cursors[begin.dataset] = (begin.epoch, begin.position)
            if books.stints and books.stints[-1].dataset == begin.dataset:
                books.stints[-1].end = (begin.epoch, begin.position)
            else:
                books.stints.append(Stint(begin.step, begin.dataset, *[(begin.epoch, begin.position)] * 2))
        books.cursors = cursors
        books.boundaries = {}
        kept = [s for s in books.skips if (s.epoch, s.lo) < cursors.get(s.dataset, (0, 0))]
        books.skips = kept
        for dataset in self.shards.datasets:
            epoch, position = cursors.get(dataset.number, (0, 0))
            mine = [(s.epoch, s.hi - s.lo) for s in kept if s.dataset == dataset.number]
            skipped: dict[int, int] = {}
            for number, samples in mine:
                skipped[number] = skipped.get(number, 0) + samples
            self.shards.fall_back(dataset.number, epoch, position, skipped)

    def _send_home(self) -> list[InstructionType]:
        """The data is done and somebody's script ended well: a newcomer could only end without the trained state."""
        out: list[InstructionType] = []
        for slot in sorted(self.books.asked):
            ask = self.books.asked[slot]
            seat = self.living(slot, ask.incarnation)
            behind = ask.leaving is LeaveReason.DONE or self.books.passed.get(slot) == ask.incarnation
            if seat is None or seat.stopping or behind:
                continue
            seat.stopping = True
            m = seat.member
            self.books.dismissed.append([m.slot, m.incarnation])
            why = Decision("stop", "all steps are committed and nobody is left to give it the state")
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, STOP_AFTER_S, why))
        return out

    # ------------------------------------------------------------ committed steps

    def committed(self, e: StepsCommitted, told: Event) -> tuple[list[InstructionType], str]:
        """Take committed steps in. Returns what follows, and the error if they cannot be."""
        out: list[InstructionType] = []
        books = self.books
        before, confirmed = books.step, books.confirmed
        for steps in e.steps:
            if steps.generation < books.origin:
                continue  # of a line that has ended
            error = self._commit(steps, out)
            if error:
                return out, f"bug in everstep: {error}, said by {told.sender}"
            if steps.generation > books.confirmed:
                out += self._confirm(steps.generation)
        if books.step > before:
            group = books.group
            if group is not None and group.generation == books.confirmed and books.step > books.furthest:
                books.blamed = 0
        held = books.step > before and books.group is not None and bool(books.group.hold)
        if books.confirmed != confirmed or (held and self.data_done()):
            # newcomers have the state for certain now; a group on hold waits for nothing any more
            out += self.settle(told.at)
        return out, ""

    def _commit(self, c: Committed, out: list[InstructionType]) -> str:
        books = self.books
        what = f"steps {c.first}..{c.last} of generation {c.generation}"
        if not 0 <= c.dataset < len(self.shards.datasets):
            return f"{what}: dataset {c.dataset} is not registered"
        plan = self.shards.datasets[c.dataset].plan
        if not (0 <= c.first <= c.last and 0 <= c.lo < c.hi <= plan.samples):
            return f"{what}: positions [{c.lo}, {c.hi}) of {plan.samples}"
        if c.generation > books.generations:
            return f"{what}: there are only {books.generations} generations"
        after = _turned(c.epoch, c.hi, plan.samples)
        ends = {c.first: (c.dataset, c.epoch, c.lo), c.last + 1: (c.dataset, *after)}
        for step, place in ends.items():
            known = books.boundaries.get(step)
            if known is not None and known[1:] != place[1:] and known[0] == place[0]:
                return f"{what}: step {step} is at {_place(place)} there, but was at {_place(known)}"
        if c.last < books.step:
            return ""  # known
        if c.first > books.step:
            return f"{what}: step {books.step} is missing before them"
        at = books.cursors.get(c.dataset, (0, 0))
        if c.first == books.step:
            if at != (c.epoch, c.lo):
                return f"{what} begin at {_place(ends[c.first])}, but step {books.step} is at e{at[0]} {at[1]}"
        elif not (at[0] == c.epoch and c.lo < at[1] < c.hi and books.stints[-1].dataset == c.dataset):
            return f"{what} are e{c.epoch} [{c.lo}, {c.hi}), but step {books.step} is at e{at[0]} {at[1]}"
        self._advance(c, at[1], after, out)
        return ""

    def _advance(self, c: Committed, lo: int, after: tuple[int, int], out: list[InstructionType]) -> None:
        books = self.books
        if books.stints and books.stints[-1].dataset == c.dataset:
            books.stints[-1].end = after
        else:
            books.stints.append(Stint(c.first, c.dataset, (c.epoch, lo), after))
        books.step = c.last + 1
        books.cursors[c.dataset] = after
        books.boundaries[c.first] = (c.dataset, c.epoch, c.lo)
        books.boundaries[books.step] = (c.dataset, *after)
        while len(books.boundaries) > STEPS_REMEMBERED:
            del books.boundaries[next(iter(books.boundaries))]
        skipped = 0
        for a, b in c.skipped:
            a, b = max(a, lo), min(b, c.hi)
            if a < b:
                skipped += b - a
                books.skips.append(Skip(c.dataset, c.epoch, a, b))
        if skipped:
            name = self.shards.datasets[c.dataset].plan.name
            words = f"'{name}' epoch {c.epoch}: steps in [{c.lo}, {c.hi}) gave gradients that are not finite"
            policy = self.job.spec.nonfinite
            out.append(Note("", Decision("samples skipped", words, {"samples": skipped, "policy": policy})))
        if self.shards.reach(c.dataset, c.epoch, c.hi, c.hi - lo - skipped):
            dataset = self.shards.datasets[c.dataset]
            done = dataset.epochs[c.epoch].samples_done
            words = f"'{dataset.plan.name}' epoch {c.epoch}: all {dataset.plan.samples} samples, up to step {c.last}"
            out.append(Note("", Decision("epoch finished", words, {"samples": done, "steps": books.step})))

    def _confirm(self, generation: int) -> list[InstructionType]:
        """The members have changed over to ``generation``: who was left out of it trains no more."""
        books = self.books
        books.confirmed = generation
        out: list[InstructionType] = []
        changed = [x for x in books.leavers if x.generation <= generation]
        self._set_leavers([x for x in books.leavers if x.generation > generation])
        for x in changed:
            seat = self.living(x.slot, x.incarnation)
            if seat is not None and seat.stopping:
                why = Decision("stop", f"group {generation} goes on without it")
                m = seat.member
                out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, STOP_AFTER_S, why))
        if books.group is not None:
            for member in books.group.members:
                if (seat := self.living(member.slot, member.incarnation)) is not None:
                    seat.streak = 0
        return out

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        books = self.books
        group = books.group
        if group is not None:
            assert group.generation == books.generations, f"{books!r} published g{group.generation}"
            assert len({m.slot for m in group.members}) == group.size, f"a slot twice in {group}"
            assert books.origin <= group.generation
            assert not {(m.slot, m.incarnation) for m in group.members} & set(group.lost), f"{group} has a lost member"
        for number, (epoch, position) in books.cursors.items():
            plan = self.shards.datasets[number].plan
            assert 0 <= position < plan.samples, f"cursor of dataset {number} at {position} of {plan.samples}"
            begun = self.shards.datasets[number].epochs
            assert len(begun) >= epoch and all(e.finished for e in begun[:epoch]), f"epochs below {epoch} not finished"
        for slot, ask in books.asked.items():
            assert self.living(slot, ask.incarnation) is not None, f"worker:{slot} #{ask.incarnation} asked and is gone"


def _turned(epoch: int, position: int, samples: int) -> tuple[int, int]:
    """The end of an epoch is the begin of the next."""
    return (epoch + 1, 0) if position == samples else (epoch, position)


def _place(place: tuple[int, int, int]) -> str:
    return f"dataset {place[0]} e{place[1]} {place[2]}"


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _names(members: list[GroupMember]) -> str:
    names = [f"worker:{m.slot}" for m in members]
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
