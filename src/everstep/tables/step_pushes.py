"""Knows what one member of a group owes the ps for committed steps (mode allreduce with tables on the ps); pure.

Before a step's vote every member has the gradients of all members. A step ``[lo, hi)`` that is committed, and known to
be by everybody in the group, is pushed to each ps as one interval, under the lease of the group's generation. Each ps
is served by one member; the others *hold* the step until it is consumed: until every member said that nothing of it is
owed any more. So whoever is lost, somebody has what it did not push, and nothing is computed twice:

- A new generation (a loss, a join, a leave) has a later lease, which fences what the old one may still send. Everybody
  in it pushes all that it holds to every ps; who has it already answers "repeat".
- So after a newer map: where a partition went, what it has is for its watermark to say.
- Where a step's rows are waited for too long, whoever waits takes over what others should have pushed.

Where mirrors may lag (``protect: lag``), a ps that is lost may come back without steps that it has acknowledged. So a
step is *kept* until all mirrors have it, too, and whoever pushed it owes it until then. Each answer of a ps says up to
which push its mirrors have everything (``Pushed.mirrored``); a ps that a member does not go on pushing to is asked
(``Open.mirrored``). Nothing is computed again: what a partition lacks is what the members still hold.

A ps applies an interval only at its watermark, so a step is there once, whoever sends it, and steps are in order. The
interval lies in one shard per epoch: all of its positions (``table_shard``).

If the script steps a table several times in one iteration, the step is several intervals, one behind the other: all but
the last have one position each.

If the script accumulates gradients over several steps, the ranges of those in which it does not step any table are
*held back* (``HeldBack``): they go to the ps with the step that consumes their gradients, as one push, which a
partition takes whole or not at all. So a partition's watermark never passes a gradient that only the members have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import Span, Token, shard_key
from everstep.net.messages import Pushed

HELD_MAX = 4
"""Committed steps that are not consumed; two are usual. More: somebody does not get rid of what it owes. (Not where
steps are kept until mirrors have them.)"""


def table_shard(dataset: int, epoch: int) -> ShardKey:
    """Return the one shard of an epoch."""
    return shard_key(dataset, epoch, 0)


@dataclass(frozen=True)
class Range:
    """Is the positions ``[lo, hi)`` of ``shard``. ``learnt``: their gradients are in what a step applies."""

    shard: ShardKey
    lo: int
    hi: int
    learnt: bool = True


class HeldBack:
    """Holds ranges of committed steps, in order, whose gradients no step of a table has consumed yet."""

    def __init__(self, ranges: Sequence[Range] = ()) -> None:
        self.ranges = list(ranges)

    def __repr__(self) -> str:
        return f"<HeldBack {self.ranges}>"

    def add(self, new: Range) -> None:
        last = self.ranges[-1] if self.ranges else None
        if last is not None and (last.shard, last.hi, last.learnt) == (new.shard, new.lo, new.learnt):
            self.ranges[-1] = Range(last.shard, last.lo, new.hi, last.learnt)
        else:
            self.ranges.append(new)

    def zeroed(self) -> None:
        """The script has dropped the gradients of all of them."""
        ranges, self.ranges = self.ranges, []
        for r in ranges:
            self.add(Range(r.shard, r.lo, r.hi, False))

    def take(self) -> tuple[Range, ...]:
        """A step consumes them."""
        taken, self.ranges = tuple(self.ranges), []
        return taken

    @property
    def shards(self) -> list[ShardKey]:
        return list(dict.fromkeys(r.shard for r in self.ranges))

    def begin(self, shard: ShardKey, position: int) -> int:
        """Return the lowest position of ``shard`` that is held back; ``position`` if there is none."""
        return next((r.lo for r in self.ranges if r.shard == shard), position)

    def crossed(self, marks: Mapping[ShardKey, Sequence[int]]) -> bool:
        """Return whether a partition has some of them already. ``marks``: all partitions' watermarks, by shard.

        A line of states that is over has consumed them in steps of its own. No step of this line can consume them
        together with what comes: one partition would have a gradient twice, or another one not at all."""
        return any(mark > self.begin(shard, mark) for shard in self.shards for mark in marks[shard])


@dataclass(frozen=True)
class Owed:
    """Is one committed step. ``skipped``: its gradients were not finite, or (``left_out``) the script has not stepped;
    the watermarks move, nothing else does. ``before``: what was held back and is consumed by the same step."""

    step: int
    shard: ShardKey
    lo: int
    hi: int
    skipped: bool = False
    left_out: bool = False
    before: tuple[Range, ...] = ()

    @property
    def ranges(self) -> list[Range]:
        """Return all that it consumes, in order."""
        whole = HeldBack(self.before)
        whole.add(Range(self.shard, self.lo, self.hi, not self.skipped))
        return whole.ranges

    @property
    def shards(self) -> list[ShardKey]:
        return HeldBack(self.ranges).shards

    @property
    def learns(self) -> bool:
        """Return whether it has gradients."""
        return any(r.learnt for r in self.ranges)


@dataclass(frozen=True)
class Open:
    """Open ``shard`` at ``ps``, then say ``opened``, with its lowest watermark there. ``life`` goes into the answer.
    ``mirrored``: it is to be answered when all mirrors have what the ps has."""

    ps: Slot
    shard: ShardKey
    lease: LeaseNo
    life: int
    mirrored: bool = False


@dataclass(frozen=True)
class Send:
    """Push ``owed`` to all partitions of ``ps``, then say ``pushed``. ``token``: of its first range; ``more``: the
    others; ``skipped``: the first is not learnt."""

    ps: Slot
    owed: Owed
    token: Token
    life: int
    more: tuple[Span, ...] = ()
    skipped: bool = False


@dataclass(frozen=True)
class Again:
    """Say ``again(ps, life)`` a little later: others have to push there first."""

    ps: Slot
    life: int


Action = Open | Send | Again


@dataclass
class _HeldSteps:
    owed: Owed
    waiting: set[Slot] = field(default_factory=set)
    lagging: set[Slot] = field(default_factory=set)  # they have it, and mirrors may lack it
    confirmed: bool = False  # everybody in the group knows that it is committed


class StepPushes:
    """See the top of this file. One per process; one request at a time to each ps. ``keeps``: mirrors may lag."""

    def __init__(self, worker: Slot, incarnation: Incarnation, keeps: bool = False) -> None:
        self.worker, self.incarnation, self.keeps = worker, incarnation, keeps
        self.lease = LeaseNo(0)  # of the generation that this process is in; 0: none
        self.stale = False  # a later lease is out: somebody is in a newer generation
        self.gaps = 0  # answers in a row that a ps lacks what is before
        self.route = 0  # of the map
        self._life = 0  # of map and lease: answers to what was asked before it do not count
        self._servers: dict[Slot, Incarnation] = {}
        self._held: list[_HeldSteps] = []  # in order of steps
        self._open: dict[Slot, dict[ShardKey, int]] = {}  # and the lowest watermark of each shard there
        self._busy: set[Slot] = set()
        self._mine: set[Slot] = set()  # it goes on pushing to these, so that their answers tell of their mirrors
        self._asked: dict[Slot, list[_HeldSteps]] = {}  # what mirrors have when the ps says that they have everything

    def __repr__(self) -> str:
        steps = ", ".join(f"{h.owed.step}: {sorted(h.waiting)}" for h in self._held if h.waiting or not h.confirmed)
        kept = f", keeps {len(self._held)}" if self.keeps else ""
        return f"<StepPushes lease {self.lease}{' stale' if self.stale else ''} owes {{{steps}}}{kept}>"

    # ------------------------------------------------------------ views

    @property
    def held(self) -> list[Owed]:
        return [h.owed for h in self._held]

    @property
    def owes_from(self) -> int | None:
        """Return the first step of which this member has not done its part."""
        return next((h.owed.step for h in self._held if h.waiting or h.lagging or not h.confirmed), None)

    @property
    def owes(self) -> bool:
        """Return whether a ps has not acknowledged something. (Mirrors may lack more.)"""
        return any(h.waiting for h in self._held)

    @property
    def lags(self) -> bool:
        """Return whether mirrors may lack something that this member pushed."""
        return any(h.lagging for h in self._held)

    def waits(self, owed: Owed) -> bool:
        """Return whether a ps has still to acknowledge it to this member."""
        return any(h.waiting for h in self._held if h.owed == owed)

    # ------------------------------------------------------------ what happens

    def placed(self, route: int, servers: Mapping[Slot, Incarnation]) -> list[Action]:
        """Take in a newer routing: who holds which partitions, and in which life."""
        if route <= self.route:
            return []
        self.route, self._servers = route, dict(servers)
        return self._anew()

    def entered(self, lease: LeaseNo) -> list[Action]:
        """Enter a group, where all know which steps are committed. ``lease``: of its generation."""
        if lease == self.lease and all(h.confirmed for h in self._held):
            return []
        self.lease, self.stale = lease, False
        for h in self._held:
            h.confirmed = True
        return self._anew()

    def hold(self, owed: Owed) -> None:
        """A step, or an interval of it, is committed; whether everybody knows is not known."""
        if not self._held or (self._held[-1].owed.step, self._held[-1].owed.lo) < (owed.step, owed.lo):
            self._held.append(_HeldSteps(owed))

    def committed(self, step: int, route: int, mine: Collection[Slot]) -> list[Action]:
        """Everybody in the group knows that ``step``, which is held, is committed. ``mine``: the ps that this member is
        to push it to by the map ``route``, which everybody had; with another one by now it is all of them."""
        self._mine = set(mine) & self._servers.keys() if route == self.route else set()
        for h in self._held:
            if h.owed.step == step:
                h.confirmed = True
                h.waiting |= self._mine if route == self.route else self._servers.keys()
        return self._next_all()

    def take_over(self) -> list[Action]:
        """Push for another member that should have pushed and seems to be lost."""
        self._open.clear()  # (what is there already, the watermarks say)
        for h in self._held:
            if h.confirmed:
                h.waiting |= self._servers.keys()
        return self._next_all()

    def consumed(self, before: int) -> list[Owed]:
        """Forget steps below ``before``: no member owes anything of them. Returns those that were held."""
        gone = [h.owed for h in self._held if h.owed.step < before]
        self._held = [h for h in self._held if h.owed.step >= before]
        return gone

    def settle(self) -> list[Action]:
        """Ask all ps until mirrors have what this member pushed: it has too much, or is through."""
        self._mine = set()
        return self._next_all()

    def void(self) -> list[Owed]:
        """Drop what is held: the state that these steps led to is lost everywhere; what the ps have of them stays.
        Returns what was held."""
        gone = self.held
        self._held = []
        return gone

    # ------------------------------------------------------------ answers

    def opened(self, ps: Slot, shard: ShardKey, life: int, ok: bool, mark: int = 0) -> list[Action]:
        """``ok``: the shard is open under our lease; else a later one was there. ``mark``: its lowest watermark."""
        if life != self._life:
            return []
        self._busy.discard(ps)
        if not ok:
            self.stale = True
            return []
        self._open.setdefault(ps, {})[shard] = mark
        for h in self._asked.pop(ps, ()):
            h.lagging.discard(ps)
        return self._next(ps)

    def pushed(self, ps: Slot, owed: Owed, life: int, answer: Pushed) -> list[Action]:
        if life != self._life:
            return []
        self._busy.discard(ps)
        if answer.fenced:  # not open there, or a later lease is: opening it tells
            for shard in owed.shards:
                self._open.get(ps, {}).pop(shard, None)
            return self._next(ps)
        if answer.gap >= 0:  # another member has what is missing, and pushes it now
            self.gaps += 1
            self._busy.add(ps)
            return [Again(ps, life)]
        self.gaps = 0
        for h in self._held:
            if h.owed == owed:
                self._acknowledged(h, ps)
        self._learn(ps, *answer.mirrored)
        return self._next(ps)

    def again(self, ps: Slot, life: int) -> list[Action]:
        if life != self._life:
            return []
        self._busy.discard(ps)
        return self._next(ps)

    # ------------------------------------------------------------ inside

    def _acknowledged(self, h: _HeldSteps, ps: Slot) -> None:
        h.waiting.discard(ps)
        if self.keeps:
            h.lagging.add(ps)

    def _learn(self, ps: Slot, shard: ShardKey, position: int) -> None:
        """All mirrors have what was pushed to ``ps`` up to a position: pushes to one ps are in order."""
        older = dropwhile(lambda h: h.owed.shard != shard or h.owed.hi > position, reversed(self._held))
        for h in older:
            h.lagging.discard(ps)

    def _anew(self) -> list[Action]:
        self._life += 1
        self._busy.clear()
        self._open.clear()
        self._asked.clear()
        self._mine = set()
        for h in self._held:
            h.lagging.clear()
            if h.confirmed:
                h.waiting = set(self._servers)
        return self._next_all()

    def _next_all(self) -> list[Action]:
        return [action for ps in sorted(self._servers) for action in self._next(ps)]

    def _next(self, ps: Slot) -> list[Action]:
        if ps in self._busy or self.stale or not self.lease or ps not in self._servers:
            return []
        marks = self._open.setdefault(ps, {})
        for h in self._held:
            if ps not in h.waiting:
                continue
            if all(marks.get(r.shard, -1) >= r.hi for r in h.owed.ranges):
                self._acknowledged(h, ps)  # all of its partitions have it
                continue
            self._busy.add(ps)
            for shard in h.owed.shards:
                if shard not in marks:
                    return [Open(ps, shard, self.lease, self._life)]
            return [self._send(ps, h.owed)]
        return self._ask_mirrors(ps)

    def _ask_mirrors(self, ps: Slot) -> list[Action]:
        """Ask a ps that has everything whether its mirrors have, too, if no answer to a push will say so."""
        lagging = [h for h in self._held if ps in h.lagging] if ps not in self._mine else []
        if not lagging:
            return []
        self._busy.add(ps)
        self._asked[ps] = lagging
        return [Open(ps, lagging[-1].owed.shard, self.lease, self._life, True)]

    def _send(self, ps: Slot, owed: Owed) -> Send:
        first, *others = owed.ranges
        token = Token(first.shard, first.lo, first.hi, self.lease, self._servers[ps], self.worker, self.incarnation)
        more = tuple(Span(r.shard, r.lo, r.hi, self.lease, r.learnt) for r in others)
        return Send(ps, owed, token, self._life, more, not first.learnt)


def pusher_of(position: int, size: int) -> int:
    """Return the rank that pushes to the ps at ``position`` of the map."""
    return position % size
