"""Describes groups: the workers that train one replicated model together, step by step (mode allreduce).

A *generation* numbers the group: every change of who is in it makes a new one.
A *step* trains the positions ``[lo, hi)`` of one epoch (positions as in ``model.shard``), divided among the members; it
is committed at all survivors or at none, and only then does the next one begin. So the committed steps of an epoch
tile its positions, and where the group is, is one :class:`Position`.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from everstep.bounds import Bits64, Whole
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.model.member import Address


class Position(msgspec.Struct, frozen=True, array_like=True, order=True, rename={"sample": "position"}):
    """Says where training is: what is trained next. ``step``: committed steps so far. ``sample``: the next one's
    number in the order of its epoch."""

    step: Whole = 0
    dataset: Whole = 0
    epoch: Whole = 0
    sample: Whole = 0


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """Is one process of a group. ``address``: where its peers fetch state from it (see ``allreduce.handover``)."""

    slot: Slot
    incarnation: Incarnation
    node: NodeId
    address: Address | None = None

    def __str__(self) -> str:
        return f"worker:{self.slot} #{self.incarnation}"


class HeldCopy(msgspec.Struct, frozen=True, array_like=True, rename={"position": "mark", "lineage": "origin"}):
    """Says of which state a worker's memory has a copy that outlived the worker (mode pipeline). ``lineage``: the
    generation that began its line."""

    position: Position
    lineage: Whole


class StepSplit(msgspec.Struct, frozen=True, array_like=True):
    """Says how the members of one generation divide a step. A larger ``version`` replaces a smaller one: at the first
    vote in which everybody says that it has it, so all divide the step behind that vote by it, and nobody waits.

    ``shares``: samples that each takes of every sum(shares), by rank; () is all alike. ``passes``: micro-batches in
    which each computes them, by rank; 0, or (): as few as the loader's batch size allows. ``rate``: what the learning
    rate is multiplied by, besides what ``lr_rule`` says."""

    version: int = 0
    shares: tuple[int, ...] = ()
    passes: tuple[int, ...] = ()
    rate: float = 1.0

    def fits(self, members: int) -> bool:
        return all(len(by_rank) in (0, members) for by_rank in (self.shares, self.passes))


class Group(msgspec.Struct, frozen=True, kw_only=True, dict=True, rename={"lineage": "origin"}):
    """Says who trains together, by the brain's word; a larger ``generation`` replaces a smaller one.

    A member whose present group has one of ``lost`` (or is ``broken``) leaves it at once, in mid-collective, and meets
    the others in this one; there they agree on the last committed step. Otherwise the change is planned: the members
    connect to each other in the background and change over between two steps, all after the same one; nothing is done
    twice.
    """

    generation: int
    members: tuple[GroupMember, ...]  # in order of rank; ranks are 0..n-1
    split: StepSplit = StepSplit()  # the only thing that a generation is told anew of, besides who is joining
    lost: tuple[tuple[Slot, Incarnation], ...] = ()  # of the last generations
    joining: tuple[GroupMember, ...] = ()  # they copy the state of a member meanwhile, and are not in the group yet
    hold: str = ""  # why no step may begin, e.g. "1 of at least 2 workers"; "": go on
    begin: Position = Position()  # where a group begins of which nobody has a state
    restore: int = 0  # the checkpoint from which it begins there; 0: from nothing, as the script made it
    copied: tuple[Slot, Incarnation] | None = None  # or the member that begins it with the copy of its stages
    lineage: int = 0  # the generation that began so; a state of an older origin is void, and counts as none
    lease: LeaseNo = LeaseNo(0)  # by which its members push to the ps, where there are any
    over: bool = False  # scripts of members have come to their end: nobody enters, who is joining copies their state
    broken: int = 0  # nobody gets on in groups up to this generation, though nobody is lost: left at once, too

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def from_nothing(self) -> bool:
        """Return whether its line began as the script made the model."""
        return not self.restore and self.copied is None

    def rank(self, slot: Slot, incarnation: Incarnation) -> int:
        """Return the rank of a process; -1 if it is not in the group."""
        return self._ranks.get((slot, incarnation), -1)

    @cached_property
    def _ranks(self) -> dict[tuple[Slot, Incarnation], int]:
        """Asked for every member after most events: a search each time would cost the square of their number."""
        return {(member.slot, member.incarnation): rank for rank, member in enumerate(self.members)}

    def broken_by(self, later: Group) -> bool:
        """Return whether ``later`` says that a member of this group is lost, or that nobody gets on in it."""
        if self.generation <= later.broken:
            return True
        return any(life in self._ranks for life in later.lost)


class Committed(msgspec.Struct, frozen=True, array_like=True):
    """Is a range of consecutive committed steps of one generation: steps ``[first, last]`` trained positions ``[lo,
    hi)``.

    ``skipped``: ranges of them whose gradients were not finite (policy skip). ``digest``: of the reduced gradients of
    the last one, as voted. ``loop``: of the script, from 1, that trained them; 0: not said. ``unstepped``: ranges
    of steps in which the script did not call ``opt.step()``: it went on accumulating, or left them out. ``agreed``: the
    later generation in which everybody was known to have them; 0: that of the steps."""

    generation: Whole
    first: Whole
    last: Whole
    dataset: Whole
    epoch: Whole
    lo: Whole
    hi: Whole
    skipped: tuple[tuple[Whole, Whole], ...] = ()
    digest: Bits64 = 0
    loop: Whole = 0
    unstepped: tuple[tuple[Whole, Whole], ...] = ()
    agreed: Whole = 0

    @property
    def after(self) -> Position:
        """Return the position of the state that these steps left (before an epoch's end is turned over)."""
        return Position(self.last + 1, self.dataset, self.epoch, self.hi)


class Micro(msgspec.Struct, frozen=True, array_like=True):
    """One pass of one member: positions ``[lo, hi)``; ``part``: the logical worker that they belong to, -1: none."""

    lo: int
    hi: int
    part: int = -1
