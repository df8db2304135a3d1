"""Is the group of mode allreduce: who is in it, how far it is, and what a loss or a newcomer makes of it.

Theory. The wanted group is a function of three things: the group published last, which processes live, and what they
asked for (enter, synced, leave). :class:`Generations` compares it with the group published last after every
event, and publishes the next generation where they differ; so any order of losses, joins and leaves, also during a
rebuild, comes to the same end. A generation's members never change.

What the members committed is told in ranges of steps, repeated at will; they must continue each other without a gap.
The *position* is behind the last one. A *lineage* of states begins with a formation from a checkpoint or
from nothing; it ends when the last process that has its state is gone. Steps that the next lineage does not begin with
are void, and done again.

A member *holds* the state if it began the lineage, or if a step was told of a generation that it is in: then the
journal reaches to where it came in. The same is so when a member that holds the state says that it has met the others
of that generation, and that the journal has all that it had committed before. One that only copied the state may be
behind or ahead of the journal; where it alone is left, nobody can say what was committed, so the lineage ends. One on
its way out is behind the journal once a step is told that only the group without it was known to have. So may be one
that was on its way out and came back (:class:`Returned`): if all are lost that could tell what it has missed, it holds
nothing until a generation since its return is confirmed.
"""

from __future__ import annotations

import msgspec

from everstep.ids import Incarnation, Slot
from everstep.model.group import Group, GroupMember, HeldCopy, Position
from everstep.model.member import Address
from everstep.model.plan import AdjustAccum, AdjustBatch, AdjustRate
from everstep.model.reasons import LeaveReason

STOP_AFTER_S = 10.0  # for a worker that has left the group to end its script

Inputs = dict[str, str | int | float | bool]
Adjust = AdjustBatch | AdjustAccum | AdjustRate


class Asker(msgspec.Struct, rename={"position": "mark"}):
    """Is a worker in its loop. ``synced``: the generation that it follows, 0: none; ``leaving``: why, if it does.
    ``over``: it was told that its loop is over, and enters nothing until it asks for another one. ``reached``: of one
    whose script has ended: its state has all steps before this one; the last of them it did in ``reached_in``, 0: it
    does not say."""

    incarnation: Incarnation
    dataset: int
    until_epoch: int
    batch_samples: int
    address: Address | None = None
    position: Position | None = None
    synced: int = 0
    leaving: LeaveReason = LeaveReason.STAYS
    over: bool = False
    copy: HeldCopy | None = None
    reached: int = 0
    reached_in: int = 0


class Leaver(msgspec.Struct, array_like=True):
    """Left out of ``generation`` on purpose; until the members have changed over to that, it trains on with them.
    ``behind``: they told a step that all were known to have only there: this one may lack it."""

    slot: Slot
    incarnation: Incarnation
    generation: int
    member: GroupMember
    behind: bool = False


class Returned(msgspec.Struct, array_like=True):
    """Came back from its way out, into ``generation``, since it had the only state that the journal tells of. Lives
    ``ahead`` trained on without it. Once it has met them it has their state, and nothing of the steps between: neither
    their report to the journal nor their gradients of tables."""

    slot: Slot
    incarnation: Incarnation
    generation: int
    ahead: list[tuple[Slot, Incarnation]]


class LostMember(msgspec.Struct, array_like=True):
    """Lost while in the group; ``generation``: the first one without it."""

    slot: Slot
    incarnation: Incarnation
    generation: int


class Stint(msgspec.Struct, array_like=True):
    """Are consecutive steps on one dataset: from step ``first`` on, ``start`` to ``end`` (epoch, position)."""

    first: int
    dataset: int
    start: tuple[int, int]
    end: tuple[int, int]


class Skip(msgspec.Struct, array_like=True):
    """Holds positions ``[lo, hi)`` that were committed without being applied."""

    dataset: int
    epoch: int
    lo: int
    hi: int


class Void(msgspec.Struct, array_like=True, rename={"lineage": "origin"}):
    """Steps ``[first, last]`` count no more since generation ``lineage`` began, from checkpoint ``restore``."""

    lineage: int
    first: int
    last: int
    restore: int


class StepHistory(msgspec.Struct):
    """What was committed, as far as it is needed: the rest is in positions. ``boundaries``: of the last committed
    ranges: step -> where it begins."""

    stints: list[Stint] = []
    boundaries: dict[int, tuple[int, int, int]] = {}
    skips: list[Skip] = []
    voids: list[Void] = []


class GroupTiming(msgspec.Struct):
    """Holds the times of a group. ``due_at``: when those who wait for a first group begin without the others, or a
    change that waits is published with others (not before ``quiet_until``), or when it is said for whom ``too_few``
    workers wait; 0: nothing waits."""

    due_at: float = 0.0
    too_few: bool = False
    quiet_until: float = 0.0


class LossStreak(msgspec.Struct):
    """Counts losses in a row. ``blamed``: losses in a row without getting further than step ``furthest``;
    ``blamed_at``: when one counted last."""

    blamed: int = 0
    blamed_at: float = 0.0
    furthest: int = 0


class MutualWaits(msgspec.Struct):
    """Holds who waits for others. ``stuck``: members that said they wait for others, for long: in which generation, and
    when they said so last. ``broken``: the last generation that was left because all of its members did;
    ``broken_step``: the step of then; ``ended``: who had to end since, as that had not helped. ``apart``: how often
    members of different groups waited for each other, which must never be."""

    stuck: dict[Slot, tuple[int, float]] = {}
    broken: int = 0
    broken_step: int = -1
    ended: list[Slot] = []
    apart: int = 0


class Groups(msgspec.Struct, kw_only=True, rename={"positions": "cursors", "lineage": "origin"}):
    """Holds what is known of groups. ``group``: published last. ``lineage``: the generation that began this lineage of
    states. ``step``: committed so far. ``positions``: (epoch, position) by dataset. ``confirmed``: the newest
    generation that has met, or of which a step was told. ``force``: why to publish even if the members stay the same.
    ``dismissed``: who was told to end since the group that it was to leave is no more.
    ``entered``: by slot, in which life and with which generation it came into this lineage.
    ``passed``: who copied the state of the end, and came out of its loop with it without having been in the group.
    ``final_for``: the lineage of which a last checkpoint was begun. ``splits``: counts versions of splits."""

    group: Group | None = None
    generations: int = 0
    lineage: int = 0
    asked: dict[Slot, Asker] = {}
    gone: list[LostMember] = []
    leavers: list[Leaver] = []
    returned: list[Returned] = []
    dismissed: list[list[int]] = []
    entered: dict[Slot, tuple[Incarnation, int]] = {}
    step: int = 0
    positions: dict[int, tuple[int, int]] = {}
    confirmed: int = 0
    force: str = ""
    splits: int = 0
    passed: dict[Slot, Incarnation] = {}
    final_for: int = 0
    history: StepHistory = msgspec.field(default_factory=StepHistory)
    timing: GroupTiming = msgspec.field(default_factory=GroupTiming)
    streak: LossStreak = msgspec.field(default_factory=LossStreak)
    waits: MutualWaits = msgspec.field(default_factory=MutualWaits)

    def __repr__(self) -> str:
        size = self.group.size if self.group is not None else 0
        return f"<groups g{self.generations} of {size}, step {self.step}, {len(self.asked)} asked>"

    def position(self, dataset: int) -> Position:
        """Return the place of a state that has all committed steps, in this dataset."""
        epoch, position = self.positions.get(dataset, (0, 0))
        return Position(self.step, dataset, epoch, position)
