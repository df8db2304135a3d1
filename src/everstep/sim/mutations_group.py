"""Plants bugs of groups (mode allreduce) on purpose, to see that the simulator finds them.

Each is what somebody could really get wrong: in the brain's state of groups, in a worker's machine, in its ledger of
committed steps, or in the master's shell. Not in the list, because nothing is lost by them: a newcomer that enters
without a copy (it gets the state when the group agrees), a step that is done again though others committed it (they
have the newer state, which all take), a leaver whose death is not told (who waits for it stalls, which is looked into).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.allreduce.commits import Commits
from everstep.allreduce.group_machine import Action, GroupMachine, Tally
from everstep.brain.brain import Brain
from everstep.brain.concerns import generations as generations_module
from everstep.brain.concerns.generations import Generations
from everstep.brain.concerns.group_askers import GroupAskers
from everstep.brain.concerns.group_reader import GroupReader
from everstep.brain.concerns.group_stalls import GroupStalls
from everstep.brain.members import Members, SlotRecord
from everstep.brain.shards import Shards
from everstep.ids import Incarnation, Slot
from everstep.model.group import Committed, Group, GroupMember, Position
from everstep.model.member import Role
from everstep.sim.cluster import SimMaster
from everstep.sim.group import GroupWorker
from everstep.sim.mutations import Mutation
from everstep.sim.simulation import Parts

_published, _count, _next = GroupMachine.published, GroupMachine.count, Generations._next
_to_tell, _reach = Commits.to_tell, Shards.reach
_fall_back = Generations.fall_back

# ---------------------------------------------------------------- the brain


def _loss_not_reported(self: GroupReader, lives: Iterable[tuple[Slot, Incarnation]]) -> None: ...


def _copies_count(self: GroupReader, m: GroupMember) -> bool:
    return self.living(m.slot, m.incarnation) is not None


def _nothing_void(self: Generations, begin: Position) -> None: ...


def _one_line(
    self: Generations, members: tuple[GroupMember, ...], hold: str, begin: Position, restore: int, lineage: int
) -> Group:
    return _next(self, members, hold, begin, restore, 1)


def _leavers_are_lost(
    self: Generations, members: tuple[GroupMember, ...], hold: str, begin: Position, restore: int, lineage: int
) -> Group:
    self.reader.lose((x.slot, x.incarnation) for x in self.group_state.leavers)
    return _next(self, members, hold, begin, restore, lineage)


def _any_mark_is_the_end(self: GroupAskers, record: SlotRecord, e: Any) -> bool:
    at_end = self.group_state.position(e.dataset).epoch >= e.until_epoch
    return e.position is not None and not self.reader.member(record) and at_end


def _never_stalled(self: GroupStalls, generation: int) -> None: ...


def _never_stuck(self: GroupStalls, slot: Slot, generation: int, waited_s: float, at: float) -> tuple[None, str]:
    return None, ""


def _begins_too_early(self: GroupReader) -> bool:
    return False


def _falls_back_too_far(self: Generations, begin: Position) -> None:
    _fall_back(self, Position())


def _hold_forgotten(members: int, least: int) -> str:
    return f"{members} of at least {least} workers" if least > 1 else ""


def _counts_repeats(self: Shards, number: int, epoch_number: int, position: int, samples: int) -> bool:
    return _reach(self, number, epoch_number, position, samples + (samples > 4))


def _forget_incarnation(self: Members, role: Role, slot: Slot, incarnation: Incarnation) -> SlotRecord | None:
    record = self.of(role).get(slot)
    return record if record is not None and record.running else None


def _never_validate(self: Brain) -> None:
    """Blind: the simulator must find it by itself."""


_BLIND = (Brain, "validate", _never_validate)

# ---------------------------------------------------------------- a worker


def _trusts_itself(self: GroupMachine, words: list[list[int]]) -> bool:
    pending, self.pending = self.pending, None
    return pending is not None


def _goes_over_alone(self: GroupMachine, votes: list[int]) -> tuple[Tally, list[Action]]:
    announced = self._announced
    out = _count(self, votes)
    if announced is not None and announced.generation in self._ready:
        self._change = announced
    return out


def _obeys_old_groups(self: GroupMachine, group: Group) -> list[Action]:
    if self.newest is not None and group.generation < self.newest.generation:
        self.newest = None
    return _published(self, group)


def _newcomers_break_in(self: GroupMachine, group: Group) -> list[Action]:
    actions = _published(self, group)
    present = self.present
    if present is not None and self.newest is group and not set(group.members) <= set(present.members):
        actions += self.broke()
    return actions


def _stays_behind(self: GroupMachine) -> list[Action]:
    self._change = None
    return []


def _tells_once(self: Commits) -> tuple[Committed, ...]:
    published = _to_tell(self)
    with self._lock:
        self._unconfirmed.clear()
    return published


def _tells_behind_a_gap(self: Commits) -> tuple[Committed, ...]:
    with self._lock:
        while self._unconfirmed and self._unconfirmed[0].last <= self.confirmed:
            self._unconfirmed.popleft()
        return tuple(self._unconfirmed)


# ---------------------------------------------------------------- the master's shell


def _never_outdated(self: SimMaster) -> bool:
    return False


def _patch(name: str, what: str, owner: object, attribute: str, value: object, *more: Any) -> Mutation:
    return Mutation(name, what, Parts(), ((owner, attribute, value), *more))


GROUP_MUTATIONS: tuple[Mutation, ...] = (
    _patch("loss-not-told", "a group does not name the lost", GroupReader, "lose", _loss_not_reported, _BLIND),
    _patch("copies-count", "a copy counts as the state before a step was told", GroupReader, "holds", _copies_count),
    _patch(
        "nothing-void",
        "the journal stays where it was when all states are lost",
        Generations,
        "fall_back",
        _nothing_void,
    ),
    _patch(
        "one-line",
        "a new lineage keeps the old one's number: void states count",
        Generations,
        "_next",
        _one_line,
        _BLIND,
    ),
    _patch("leavers-are-lost", "a planned leave breaks the step", Generations, "_next", _leavers_are_lost, _BLIND),
    _patch("newcomers-break-in", "a newcomer breaks the step", GroupMachine, "published", _newcomers_break_in),
    _patch(
        "any-mark-ends", "a stale state is told that the data is over", GroupAskers, "over_for", _any_mark_is_the_end
    ),
    _patch(
        "never-stalled", "members that wait for one that ended are not heard", GroupStalls, "stalled", _never_stalled
    ),
    _patch(
        "never-copies-the-end",
        "who cannot follow waits for a group to enter when all others have ended",
        GroupWorker,
        "copies_the_end",
        False,
    ),
    _patch("never-stuck", "members that wait for each other go on waiting", GroupStalls, "stuck", _never_stuck),
    _patch(
        "begins-too-early",
        "a lineage begins before the newest manifest",
        GroupReader,
        "committing",
        property(_begins_too_early),
    ),
    _patch("falls-back-too-far", "a restart forgets the checkpoint", Generations, "fall_back", _falls_back_too_far),
    _patch("hold-forgotten", "a group is on hold for ever", generations_module, "hold_words", _hold_forgotten),
    _patch("counts-too-much", "samples are counted beyond what was told", Shards, "reach", _counts_repeats),
    _patch("zombies-welcome", "what an older incarnation says counts", Members, "current", _forget_incarnation, _BLIND),
    _patch("trusts-itself", "an entered vote counts as committed", GroupMachine, "resolve", _trusts_itself),
    _patch("goes-over-alone", "a member goes over without the others", GroupMachine, "count", _goes_over_alone),
    _patch("obeys-old-groups", "an older group is taken for the newest", GroupMachine, "published", _obeys_old_groups),
    _patch(
        "stays-behind", "others may have gone over, one waits for them", GroupMachine, "_give_up_steps", _stays_behind
    ),
    _patch("tells-once", "a report that was lost is not said again", Commits, "to_tell", _tells_once),
    _patch(
        "tells-behind-a-gap", "a newcomer tells before those in front of it", Commits, "to_tell", _tells_behind_a_gap
    ),
    Mutation("early-replies", "the master answers before the event is durable", Parts(early_replies=True)),
    _patch("two-masters", "the journal takes an older master's events", SimMaster, "outdated", _never_outdated),
)
