"""Decides what one worker does about its group, by what it knows of it; pure: no threads, no clock, no sockets.

The shell (``session``) tells the machine what happened, and does the ``Action`` values that come back. The rules:

- The newest group that the master published is the one to be in; a member connects to it in the background.
- A group of which a member is lost, or of which a collective failed, is *broken*: its member cuts it, so that it is
  broken for everybody, and enters the newest group as soon as that is connected.
- A group that is not broken is left at a vote only, when everybody says that the same newer generation is connected;
  or where no votes are (on hold, alone) at once.
- News that this newer generation is broken too come to some members before they are in it, to others after. Who has
  them before does not go there and cannot stay either, since the others may be gone: the group that is to be left is
  broken then. (Else one waits in it for another that waits in the newest, for ever.)
- How a step is divided (``StepSplit``) changes within a generation, without connecting anew: each vote says the newest
  split that one has of it, and if all say the same, it holds from the next step on. In a group just entered it holds at
  once where the first words agree on it; else all begin with equal shares.
- Whoever entered a vote and did not get its result asks the others of the next group: has anybody committed that
  step, it is committed; has nobody, it is done again. A dead one may have committed it: nobody hears of that, since a
  step is told to the journal only when everybody is known to have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from everstep.ids import Incarnation, Slot
from everstep.model.group import Group, StepSplit

BALLOT = 12
"""int64 of one vote, reduced with MAX: step, digest, newest connected generation and newest split of the present one,
each with its negative (equal everywhere iff the largest is minus the largest negative), whether gradients are not
finite, the last step that the master confirmed to anybody, and the digest of a slice of the state with its negative."""

_DIGEST_MASK = (1 << 62) - 1
"""A digest's negative must be an int64 too."""


@dataclass(frozen=True)
class Connect:
    """Connect to ``group`` in the background, then say ``connected`` or ``failed``."""

    group: Group
    attempt: int


@dataclass(frozen=True)
class AbortGroup:
    """Abort this generation's group: nobody is to wait in it any more. Harmless when repeated or unknown."""

    generation: int


@dataclass(frozen=True)
class Follow:
    """Copy the state of a member of ``group``, and follow it."""

    group: Group


Action = Connect | AbortGroup | Follow


class Counted(Enum):
    """Is what a vote said."""

    AGREED = "agreed"
    DIFFERENT_STEPS = "different steps"
    DIFFERENT_GRADIENTS = "different gradients"


@dataclass(frozen=True)
class Tally:
    counted: Counted
    nonfinite: bool
    confirmed: int  # last step that the master has in its journal, as far as any member knows; -1: none
    drifted: bool = False  # members had different states before the step
    behind: bool = False  # others know a newer group than we do: its news did not get here


class GroupMachine:
    """See the top of this file. One per process."""

    def __init__(self, slot: Slot, incarnation: Incarnation) -> None:
        self.slot, self.incarnation = slot, incarnation
        self.newest: Group | None = None  # by the master's word
        self.present: Group | None = None  # that this process is in
        self.whole = False  # the present group is connected, and not known to be broken
        self.pending: int | None = None  # step whose vote was entered, result unknown
        self._ready: dict[int, Group] = {}  # connected, not entered
        self._building: tuple[int, int] | None = None  # (generation, attempt)
        self._attempt = 0  # of the present group
        self._announced: Group | None = None  # in the vote in flight
        self._change: Group | None = None  # everybody goes over to this group now
        self.split = StepSplit()  # by which the present group divides its next step
        self._newest_split = StepSplit()  # of the present generation, by the master's word
        self._announced_split = StepSplit()  # in the vote, or the first words, in flight

    def __repr__(self) -> str:
        present = "no group" if self.present is None else f"generation {self.present.generation}"
        return (
            f"<GroupMachine {present}{'' if self.whole else ' (broken)'} ready {sorted(self._ready)} {self._building}>"
        )

    # ------------------------------------------------------------ what the master says

    def published(self, group: Group) -> list[Action]:
        """Take in that the master published ``group``. Old news and repeats change nothing."""
        if self.newest is not None and group.generation <= self.newest.generation:
            # who is joining may change without a new generation
            old = self.newest
            if group.generation < old.generation:
                return []
            if group.split.version < old.split.version:
                group = msgspec.structs.replace(group, split=old.split)
            self.newest = group
            if self.present is not None and self.present.generation == group.generation:
                self._newest_split = group.split
            divided = group.split != old.split and msgspec.structs.replace(group, split=old.split) == old
            return [Follow(group)] if self._joining(group) and not divided else []
        self.newest = group
        actions: list[Action] = []
        if self._building is not None:
            actions.append(AbortGroup(self._building[0]))
            self._building = None
        if self._change is not None and self._change.broken_by(group):
            actions += self._give_up_steps()
        # An entered vote may still choose what it was told; everything else is superseded. Cutting it also frees
        # whoever entered it already and waits there for us.
        for generation in [g for g, ready in self._ready.items() if ready not in (self._announced, self._change)]:
            del self._ready[generation]
            actions.append(AbortGroup(generation))
        if self.present is not None and self.whole and self.present.broken_by(group):
            actions += self.broke()
        if self.member_of(group):
            actions += self._connect(group, 0)
        elif self._joining(group):
            actions.append(Follow(group))
        return actions

    def _joining(self, group: Group) -> bool:
        return any((m.slot, m.incarnation) == (self.slot, self.incarnation) for m in group.joining)

    def member_of(self, group: Group | None) -> bool:
        return group is not None and group.rank(self.slot, self.incarnation) >= 0

    @property
    def excluded(self) -> bool:
        """The newest group is without us, and we are not joining it."""
        return self.newest is not None and not self.member_of(self.newest) and not self._joining(self.newest)

    # ------------------------------------------------------------ connecting

    def connected(self, generation: int, attempt: int) -> list[Action]:
        """A group is connected with everybody in it."""
        if self._building != (generation, attempt) or self.newest is None:
            return [AbortGroup(generation)] if self._building is None or self._building[0] != generation else []
        self._building = None
        self._attempt = attempt
        self._ready[generation] = self.newest
        return []

    def failed(self, generation: int, attempt: int) -> list[Action]:
        """It could not be connected: once more, unless there is a newer one."""
        if self._building != (generation, attempt) or self.newest is None:
            return []
        return self._connect(self.newest, attempt + 1)

    def reconnect(self) -> list[Action]:
        """The present group is broken and there is no newer one: nobody is lost, so the same is connected again."""
        group = self.present
        if group is None or self.newest is None or self.newest.generation != group.generation:
            return []
        if self.whole or self._building is not None or self._ready:
            return []
        return self._connect(group, self._attempt + 1)

    def _connect(self, group: Group, attempt: int) -> list[Action]:
        self._building = (group.generation, attempt)
        return [Connect(group, attempt)]

    # ------------------------------------------------------------ being in a group

    @property
    def entry(self) -> Group | None:
        """Return the group to enter now, between two steps; None: stay, or wait."""
        if self._change is not None and self._change.generation in self._ready:
            return self._change
        newest = self.newest
        if newest is None or newest.generation not in self._ready:
            return None
        alone = self.present is not None and self.present.size == 1
        return newest if self.idle or alone else None

    @property
    def let_go(self) -> bool:
        """Everybody else goes over to a group that is without us."""
        return self._change is not None and not self.member_of(self._change)

    @property
    def parting(self) -> bool:
        """Everybody goes over to a group that is without some of us: one more word in the present one, so that who goes
        knows that the last step is everybody's, and can tell it."""
        if self._change is None or self.present is None or not self.whole:
            return False
        return not set(self.present.members) <= set(self._change.members)

    @property
    def idle(self) -> bool:
        """Whether this member trains in no group: it can only wait for the next one to be connected."""
        return self.present is None or not self.whole or bool(self.present.hold)

    @property
    def outside(self) -> bool:
        """Return whether this process is in no group that works, and not wanted in the newest."""
        present = self.present
        return self.excluded and (present is None or not self.whole or bool(present.hold) or present.size == 1)

    def enter(self, group: Group) -> None:
        """This process is in ``group`` now; the one that is left is cut once the new one has met."""
        del self._ready[group.generation]
        self.present, self.whole = group, True
        newest = self.newest
        same = newest is not None and newest.generation == group.generation
        self._newest_split = newest.split if newest is not None and same else group.split
        self.split = StepSplit()
        self._change = self._announced = None

    def broke(self) -> list[Action]:
        """A collective of the present group failed, or a member of it is lost."""
        if self.present is None or not self.whole:
            return []
        self.whole = False
        # What everybody agreed to go over to stands: some are there already, and wait for us. Unless it is broken too.
        if self._change is not None and self.newest is not None and self._change.broken_by(self.newest):
            self._change = None
        return [AbortGroup(self.present.generation)]

    def _give_up_steps(self) -> list[Action]:
        """Cut the group: what everybody agreed to go over to is broken before this member is there; others may be."""
        self._change = None
        return self.broke()

    # ------------------------------------------------------------ votes

    def ballot(self, step: int, digest: int, nonfinite: bool, confirmed: int, state: int = 0) -> list[int]:
        """Enter the vote on ``step``: what to reduce with MAX. From now on only its result, or the next group, tells
        whether the step is committed. ``state``: the digest of a slice of the state before the step."""
        assert self.present is not None and self.whole and self.pending is None
        digest &= _DIGEST_MASK
        self.pending = step
        newer = [g for g in self._ready if g > self.present.generation]
        self._announced = self._ready[max(newer)] if newer else None
        if self.excluded:
            self._announced = self.newest  # nothing to connect: we are let go
        announced = self._announced.generation if self._announced is not None else 0
        self._announced_split = self._newest_split
        version = self._announced_split.version
        kept = state & _DIGEST_MASK
        return [
            step,
            -step,
            digest,
            -digest,
            int(nonfinite),
            announced,
            -announced,
            version,
            -version,
            confirmed,
            kept,
            -kept,
        ]

    def count(self, votes: list[int]) -> tuple[Tally, list[Action]]:
        """The vote's result came: the step is committed (or all know why not), and perhaps everybody goes over."""
        step, minus_step, digest, minus_digest, nonfinite, announced, minus_announced, split, minus_split, confirmed = (
            votes[:10]
        )
        kept, minus_kept = votes[10:]
        self.pending = None
        actions: list[Action] = []
        mine, self._announced = self._announced, None
        if mine is not None and announced == -minus_announced == mine.generation:
            self._change = mine
            if self.newest is not None and mine.broken_by(self.newest):
                actions += self._give_up_steps()
        if split == -minus_split:
            self._divide()
        # what was said and not taken, and is not the newest any more, is over
        stay = {group.generation for group in (self._change, self.newest) if group is not None}
        for generation in [g for g in self._ready if g not in stay]:
            del self._ready[generation]
            actions.append(AbortGroup(generation))
        counted = Counted.AGREED
        if step != -minus_step:
            counted = Counted.DIFFERENT_STEPS
        elif digest != -minus_digest:
            counted = Counted.DIFFERENT_GRADIENTS
        behind = self.newest is not None and announced > self.newest.generation
        return Tally(counted, bool(nonfinite), confirmed, kept != -minus_kept, behind), actions

    # ------------------------------------------------------------ after a vote that broke

    def word(self, mark_step: int, loop: int) -> list[int]:
        """Return what to gather first in a group that was entered: our state's step (-1: no state), the step of which
        we have the reduced gradients without knowing whether it is committed (-1: none), the loop that our script is
        in, and the version of the newest split that we have."""
        self._announced_split = self._newest_split
        pending = -1 if self.pending is None else self.pending
        return [mark_step, pending, loop, self._announced_split.version]

    def resolve(self, words: list[list[int]]) -> bool:
        """Take in everybody's words: return whether the pending step is committed. Clears it."""
        if len({word[3] for word in words}) == 1:
            self._divide()
        if self.pending is None:
            return False
        step, self.pending = self.pending, None
        return any(word[0] > step for word in words)

    def _divide(self) -> None:
        """Everybody has the split that we said."""
        if self.present is not None and self._announced_split.fits(self.present.size):
            self.split = self._announced_split
