"""Steps of a group at its ps, over a network that reorders between links, with members and ps that die at any moment:
every partition has every committed step once, with its right gradients, in order."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.native.ledger import PushLedger
from everstep.net.messages import Pushed
from everstep.ps.mirrored_pushes import MirroredPushes
from everstep.sim.mutations_hybrid import HYBRID_LAG_MUTATIONS
from everstep.tables.step_pushes import (
    Action,
    Again,
    HeldBack,
    Open,
    Owed,
    Range,
    Send,
    StepPushes,
    pusher_of,
    table_shard,
)

PARTITIONS, STEPS, MANY_STEPS, SHARD = 6, 14, 50, table_shard(0, 0)


@dataclass
class Ps:
    """What is applied, and what its mirrors have too (``safe``): the only thing that outlives it."""

    ledger: PushLedger
    applied: dict[int, list[tuple[int, int, int]]]  # by partition: (lo, hi, attempt)
    waiting: list[tuple[Member, Action, Pushed]] = field(default_factory=list)
    pushes: MirroredPushes = field(default_factory=MirroredPushes)  # (where mirrors lag)
    changes: int = 0  # opened so far
    opened: dict[int, int] = field(default_factory=dict)  # by partition: number of its open change


@dataclass(eq=False)
class Member:
    pushes: StepPushes
    step: int = 0  # committed, as far as it knows
    attempt: dict[int, int] = field(default_factory=dict)  # of each step that it holds or voted on
    voted: int = -1
    barrier: int = -1
    since: int = 0  # the step before which it came
    counts: bool = True  # it has all that the ps may lack of the state
    links: dict[int, deque[Action]] = field(default_factory=dict)


class World:
    """``lag``: a push is answered at once, and mirrors hear of it later."""

    def __init__(self, seed: int, members: int = 3, ps: int = 3, lag: bool = False) -> None:
        self.rng, self.lag = random.Random(seed), lag
        self.most_held = self.replayed = 0
        self.steps = MANY_STEPS if lag else STEPS
        self.flushes = [self.rng.choice((0.003, 0.02, 0.1)) for _ in range(ps)] if lag else []
        self.route, self.lease, self.lives, self.attempts = 1, 1, 0, 0
        self.owner = [b % ps for b in range(PARTITIONS)]
        self.lives_of = dict.fromkeys(range(ps), 1)
        self.ps = {p: Ps(PushLedger(PARTITIONS, [b for b in range(PARTITIONS) if b % ps == p]), {}) for p in range(ps)}
        self.safe: dict[int, tuple[int, list[tuple[int, int, int]]]] = {b: (0, []) for b in range(PARTITIONS)}
        self.group = [self.newcomer() for _ in range(members)]
        self.agreed: tuple[int, list[Slot]] = (0, [])  # map at the last vote
        self.committed: dict[int, tuple[int, int, int]] = {}  # step -> (lo, hi, attempt)
        self.left = 0  # positions are given out up to here
        self.regroup()

    def newcomer(self) -> Member:
        self.lives += 1
        member = Member(StepPushes(Slot(self.lives), Incarnation(1), self.lag))
        member.pushes.placed(self.route, self.servers())
        return member

    def servers(self) -> dict[Slot, Incarnation]:
        return {Slot(p): Incarnation(self.lives_of[p]) for p in sorted(set(self.owner))}

    # ------------------------------------------------------------ the group

    def regroup(self) -> None:
        """A new generation: what anybody has committed is; what nobody has is done again, under another attempt."""
        step = max(m.step for m in self.group)
        source = next((m for m in self.group if m.step == step), None)
        assert source is not None
        for m in self.group:
            if m.voted == step - 1 and m.step < step:  # it was in the vote, and has the gradients
                self.commit(m, step - 1)
            m.voted = m.barrier = -1
            m.step = step
        self.lease += 1
        for m in self.group:
            self.do(m, m.pushes.entered(LeaseNo(self.lease)))

    def commit(self, m: Member, step: int) -> None:
        lo, hi, attempt = self.committed[step]
        assert m.attempt[step] == attempt, "it voted on something else"
        m.step = step + 1
        m.pushes.hold(Owed(step, SHARD, lo, hi))

    def train(self, m: Member) -> None:
        """One move of one member: vote, hear the result, pass the barrier."""
        step = m.step
        if m.barrier < 0 and m.voted < step:
            if m.pushes.owes or step >= self.steps:
                return
            m.voted = step
            if all(other.voted == step for other in self.group):  # the last one: its result goes to everybody
                self.attempts += 1
                size = self.rng.randint(1, 5)
                self.committed[step] = (self.left, self.left + size, self.attempts)
                least = min(o.pushes.owes_from if o.pushes.owes_from is not None else step for o in self.group)
                for other in self.group:
                    other.attempt[step] = self.attempts
                    other.pushes.consumed(least)
                    other.counts = other.counts or least >= other.since
                    self.most_held = max(self.most_held, len(other.pushes.held))
                self.agreed = self.route, sorted(self.servers())
            return
        if m.barrier < 0 and m.voted == step and all(o.voted >= step or o.step > step for o in self.group):
            if m.attempt.get(step) == self.committed.get(step, (0, 0, 0))[2]:
                self.commit(m, step)
                self.left = self.committed[step][1]
                m.barrier = step
            return
        if m.barrier >= 0 and all(o.barrier == m.barrier or o.step > m.barrier for o in self.group):
            done, m.barrier = m.barrier, -1
            route, servers = self.agreed
            mine = [s for i, s in enumerate(servers) if pusher_of(i, len(self.group)) == self.group.index(m)]
            self.do(m, m.pushes.committed(done, route, mine))

    def kill(self, dead: Member | None = None) -> None:
        if len(self.group) < 2:
            return
        dead = dead or self.rng.choice(self.group)
        if not any(m.attempt and m.counts for m in self.group if m is not dead):
            return  # all others have only copied the state: the line ends there (see brain.group)
        self.group.remove(dead)
        # What it sent may still arrive; what it had seen alone is known to nobody. A vote that nobody left has the
        # result of did not happen.
        step = max(m.step for m in self.group)
        if step in self.committed:
            self.left = self.committed.pop(step)[0]
        self.regroup()

    def join(self) -> None:
        one = self.newcomer()
        one.since = one.step = max(m.step for m in self.group)
        one.counts = False
        if all(m.step == one.step and m.voted < one.step and m.barrier < 0 for m in self.group):
            self.group.append(one)
            self.regroup()

    # ------------------------------------------------------------ the ps

    def lose_ps(self) -> None:
        """Its partitions go to the others, with what the mirrors have; it comes back empty, and gets some back."""
        lost = self.rng.choice(sorted(self.ps))
        heirs = [p for p in self.ps if p != lost]
        self.lives_of[lost] += 1
        self.ps[lost] = Ps(PushLedger(PARTITIONS, []), {})
        for b in range(PARTITIONS):
            if self.owner[b] == lost:
                heir = self.ps[self.rng.choice(heirs)]
                self.owner[b] = next(p for p, it in self.ps.items() if it is heir)
                heir.ledger.own([b])
                mark, log = self.safe[b]
                if mark or log:
                    heir.ledger.partitions[b].shards[SHARD] = [mark, 0]
                heir.applied[b] = list(log)
                heir.pushes.came()
        self.new_map()

    def move(self) -> None:
        b, to = self.rng.randrange(PARTITIONS), self.rng.choice(sorted(self.ps))
        source, target = self.ps[self.owner[b]], self.ps[to]
        if target is source:
            return
        self.confirm(source)
        target.ledger.own([b])
        target.ledger.partitions[b] = source.ledger.partitions.pop(b)
        target.applied[b] = source.applied.pop(b, [])
        target.pushes.came()
        self.owner[b] = to
        self.new_map()

    def new_map(self) -> None:
        self.route += 1
        for m in self.group:
            m.links.clear()  # whatever is on its way is answered Moved
            self.do(m, m.pushes.placed(self.route, self.servers()))

    def do(self, m: Member, actions: list[Action]) -> None:
        for action in actions:
            m.links.setdefault(int(action.ps), deque()).append(action)

    def deliver(self, m: Member, ps: int) -> None:
        action = m.links[ps].popleft()
        it = self.ps[ps]
        if isinstance(action, Again):
            self.do(m, m.pushes.again(action.ps, action.life))
        elif isinstance(action, Open):
            opened = it.ledger.open(action.shard, 0, action.lease)
            if action.mirrored or not self.lag:
                self.confirm(it)
            mark = min(opened[1], default=0) if opened is not None else 0
            self.do(m, m.pushes.opened(action.ps, action.shard, action.life, opened is not None, mark))
        else:
            self.push(m, it, action)

    def push(self, m: Member, it: Ps, action: Send) -> None:
        token, before = action.token, {b: s.shards.get(SHARD, [0])[0] for b, s in it.ledger.partitions.items()}
        if token.ps_incarnation != self.lives_of[int(action.ps)]:
            return
        done = it.ledger.push(token.shard, token.lo, token.hi, token.lease)
        for b, partition in it.ledger.partitions.items():
            if partition.shards.get(SHARD, [0])[0] != before[b]:
                it.applied.setdefault(b, []).append((token.lo, token.hi, m.attempt[action.owed.step]))
                if b not in it.opened:
                    it.changes += 1
                    it.opened[b] = it.changes
        answer = Pushed(done.applied, done.repeats, done.gap, done.fenced)
        if self.lag:
            self.replayed += bool(done.repeats and done.applied)
            if done.gap < 0 and not done.fenced:
                it.pushes.pushed((token.shard, token.hi))
            answer = msgspec.structs.replace(answer, mirrored=it.pushes.mirrored)
            self.do(m, m.pushes.pushed(action.ps, action.owed, action.life, answer))
            return
        it.waiting.append((m, action, answer))
        if self.rng.random() < 0.7:
            self.confirm(it)

    def flush(self, it: Ps) -> None:
        """The mirrors hear of some partitions, and the ps looks what they have now, while pushes go on."""
        seen = it.pushes.newest()
        self.deliver_some()
        share = self.rng.choice((0.5, 1.0))
        for b, partition in it.ledger.partitions.items():
            if self.rng.random() < share:
                self.safe[b] = partition.shards.get(SHARD, [0])[0], list(it.applied.get(b, []))
                it.opened.pop(b, None)
        changes, closed = it.changes, min(it.opened.values(), default=it.changes + 1) - 1
        self.deliver_some()
        if self.rng.random() < 0.1:
            self.move()
        it.pushes.made(seen, changes, 0)
        it.pushes.confirmed(closed, 0)

    def deliver_some(self) -> None:
        for _ in range(self.rng.choice((0, 3, 12))):
            self.deliver_any()

    def deliver_any(self) -> None:
        links = [(m, ps) for m in self.group for ps, link in m.links.items() if link]
        if links:
            self.deliver(*self.rng.choice(links))

    def confirm(self, it: Ps) -> None:
        """The mirrors have everything: whoever waits for that is answered."""
        it.opened.clear()
        for b, partition in it.ledger.partitions.items():
            self.safe[b] = partition.shards.get(SHARD, [0])[0], list(it.applied.get(b, []))
        waiting, it.waiting = it.waiting, []
        for m, action, answer in waiting:
            assert isinstance(action, Send)
            if m in self.group and action.life == m.pushes._life:
                self.do(m, m.pushes.pushed(action.ps, action.owed, action.life, answer))

    # ------------------------------------------------------------ a run

    def run(self) -> None:
        for moves in range(30_000):
            if all(m.step >= self.steps and not m.pushes.owes and m.barrier < 0 for m in self.group):
                if not any(m.pushes.lags for m in self.group):
                    break
                for m in self.group:
                    self.do(m, m.pushes.settle())
            draw = self.rng.random()
            if draw < (0.01 if self.lag else 0.004) and moves < 6_000:
                self.rng.choice((self.kill, self.join, self.lose_ps, self.move))()
            elif draw < 0.02:
                self.do(m := self.rng.choice(self.group), m.pushes.take_over())
            elif draw < 0.5:
                self.train(self.rng.choice(self.group))
            else:
                self.deliver_any()
                for ps, it in self.ps.items():
                    if self.lag and self.rng.random() < self.flushes[ps]:
                        self.flush(it)
                    if it.waiting and self.rng.random() < 0.3:
                        self.confirm(it)
        else:
            raise AssertionError(f"stuck: {self.group}")
        steps = [self.committed[s] for s in range(self.steps)]
        for b in range(PARTITIONS):
            assert self.ps[self.owner[b]].applied.get(b, []) == steps, f"partition {b}"


@pytest.mark.parametrize("seed", range(150))
def test_every_partition_has_every_committed_step_once(seed: int) -> None:
    World(seed).run()


@pytest.mark.parametrize("seed", range(120))
def test_the_same_where_mirrors_lag(seed: int) -> None:
    World(seed, members=1 + seed % 3, lag=True).run()


def test_where_mirrors_lag_steps_are_kept_and_pushed_again() -> None:
    worlds = [World(seed, lag=True) for seed in range(30)]
    for world in worlds:
        world.run()
    assert max(world.most_held for world in worlds) > 6, "steps are kept"
    assert sum(world.replayed for world in worlds) > 40, "and pushed to partitions that came back without them"


def _learns_too_much(self: StepPushes, ps: Slot, shard: ShardKey, position: int) -> None:
    """One word counts for all ps."""
    for h in self._held:
        if h.owed.shard == shard and h.owed.hi <= position:
            h.lagging.clear()


def _trusts_what_was(self: MirroredPushes) -> None:
    """A partition that comes changes nothing of what is known."""


OF_THE_SIMULATOR = ("keeps-nothing", "believes-watermarks", "asks-no-mirrors", "tells-at-once")
PLANTED = [patch for m in HYBRID_LAG_MUTATIONS if m.name in OF_THE_SIMULATOR for patch in m.patches]
PLANTED += [(StepPushes, "_learn", _learns_too_much), (MirroredPushes, "came", _trusts_what_was)]


@pytest.mark.parametrize(("owner", "name", "planted"), PLANTED)
def test_planted_faults_of_what_mirrors_lack_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: Any
) -> None:
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError):
        for seed in range(200):
            World(seed, members=1 + seed % 3, lag=True).run()


def test_all_planted_faults_are_there() -> None:
    assert len(PLANTED) == 6


def killed_after_the_result(eager: bool) -> World:
    """One member of three hears that a step is committed, does what it does, and dies before anybody else hears it.
    ``eager``: it pushes at once."""
    world = World(1)
    world.rng.seed(5)
    first, *others = world.group
    for step in range(2):
        while not all(m.step == step + 1 and m.barrier < 0 for m in world.group):
            for m in world.group:
                world.train(m)
        flush(world)
    for m in world.group:
        world.train(m)  # the vote
    world.train(first)  # its result
    assert first.step == 3 and all(m.step == 2 for m in others)
    if eager:
        world.do(first, first.pushes.committed(2, world.route, list(world.servers())))
    else:
        world.train(first)  # the barrier holds it
    flush(world)
    world.kill(first)
    return world


def flush(world: World) -> None:
    while links := [(m, ps) for m in world.group for ps, link in m.links.items() if link]:
        world.deliver(*links[0])
        for it in world.ps.values():
            world.confirm(it)


def test_a_result_that_only_a_dead_member_heard_is_nobodys() -> None:
    killed_after_the_result(eager=False).run()


def test_without_the_barrier_others_do_otherwise_what_is_pushed() -> None:
    """The simulation can fail: the survivors divide the step anew, and a ps has the dead one's already."""
    with pytest.raises(AssertionError):
        killed_after_the_result(eager=True).run()


NEXT = table_shard(0, 1)


def test_what_is_held_back_goes_with_the_step_that_consumes_it() -> None:
    """Across the end of an epoch: both shards are opened, and one push has all ranges in order."""
    back = HeldBack()
    for r in (Range(SHARD, 8, 12), Range(SHARD, 12, 16), Range(NEXT, 0, 4, False)):
        back.add(r)
    assert back.shards == [SHARD, NEXT] and back.begin(SHARD, 16) == 8 and back.begin(NEXT, 4) == 0
    owed = Owed(5, NEXT, 4, 8, before=back.take())
    assert not back.ranges
    assert owed.ranges == [Range(SHARD, 8, 16), Range(NEXT, 0, 4, False), Range(NEXT, 4, 8)] and owed.learns
    pushes = StepPushes(Slot(0), Incarnation(1))
    pushes.placed(1, {Slot(0): Incarnation(1)})
    pushes.hold(owed)
    (first,) = pushes.entered(LeaseNo(3))
    assert isinstance(first, Open) and first.shard == SHARD
    (second,) = pushes.opened(Slot(0), SHARD, first.life, True)
    assert isinstance(second, Open) and second.shard == NEXT
    (send,) = pushes.opened(Slot(0), NEXT, first.life, True)
    assert isinstance(send, Send) and (send.token.shard, send.token.lo, send.token.hi) == (SHARD, 8, 16)
    assert [(s.shard, s.lo, s.hi, s.learnt) for s in send.more] == [(NEXT, 0, 4, False), (NEXT, 4, 8, True)]
    ledger = PushLedger(2)
    for shard in (SHARD, NEXT):
        ledger.open(shard, 0, 3)
    ledger.push(SHARD, 0, 8, 3)
    more = [(s.shard, s.lo, s.hi, s.lease, s.learnt) for s in send.more]
    assert ledger.push(SHARD, 8, 16, 3, b"", send.skipped, more).applied == 2
    assert ledger.watermarks(SHARD) == ([0, 1], [16, 16]) and ledger.watermarks(NEXT) == ([0, 1], [8, 8])
    again = pushes.pushed(Slot(0), owed, first.life, Pushed(0, 0, fenced=True))
    assert [type(a) for a in again] == [Open], "both are opened anew"


def test_a_partition_that_has_what_is_held_back_is_noticed() -> None:
    back = HeldBack([Range(SHARD, 8, 16), Range(NEXT, 0, 4)])
    assert not back.crossed({SHARD: [8, 8], NEXT: [0, 0]})
    assert back.crossed({SHARD: [8, 12], NEXT: [0, 0]})
    assert back.crossed({SHARD: [8, 8], NEXT: [0, 4]})
    back.zeroed()
    assert back.ranges == [Range(SHARD, 8, 16, False), Range(NEXT, 0, 4, False)]
    assert not HeldBack().crossed({})
