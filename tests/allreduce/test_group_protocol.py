"""The machine of one member's place in its group: transcripts, and many of them under random losses."""

from __future__ import annotations

import random

import msgspec
import pytest

from everstep.allreduce.group_machine import BALLOT, AbortGroup, Action, Connect, Counted, Follow, GroupMachine
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Group, GroupMember, StepSplit


def member(slot: int, incarnation: int = 1) -> GroupMember:
    return GroupMember(Slot(slot), Incarnation(incarnation), NodeId("node0"))


def group(
    generation: int, *slots: int, lost: tuple[int, ...] = (), joining: tuple[int, ...] = (), hold: str = ""
) -> Group:
    return Group(
        generation=generation,
        members=tuple(member(s) for s in slots),
        lost=tuple((Slot(s), Incarnation(1)) for s in lost),
        joining=tuple(member(s) for s in joining),
        hold=hold,
    )


def machine(slot: int = 0) -> GroupMachine:
    return GroupMachine(Slot(slot), Incarnation(1))


def inside(first: Group, slot: int = 0) -> GroupMachine:
    """A member of ``first``."""
    m = machine(slot)
    m.published(first)
    m.connected(first.generation, 0)
    assert m.entry is first
    m.enter(first)
    return m


def maximum(ballots: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*ballots, strict=True)]


def test_a_member_connects_to_a_new_group_and_enters_it() -> None:
    m, first = machine(), group(1, 0, 1)
    assert m.published(first) == [Connect(first, 0)]
    assert m.published(first) == []
    assert m.entry is None
    m.connected(1, 0)
    assert m.entry is first


def test_a_failed_connection_is_tried_again_under_another_number() -> None:
    m, first = machine(), group(1, 0, 1)
    m.published(first)
    assert m.failed(1, 0) == [Connect(first, 1)]
    assert m.failed(1, 0) == []  # said twice
    m.connected(1, 1)
    assert m.entry is first


def test_a_connection_that_was_superseded_is_cut_when_it_comes_after_all() -> None:
    m, second = machine(), group(2, 0, 2)
    m.published(group(1, 0, 1))
    assert m.published(second) == [AbortGroup(1), Connect(second, 0)]
    assert m.connected(1, 0) == [AbortGroup(1)]
    assert m.entry is None
    assert m.failed(1, 0) == []


def test_a_loss_cuts_the_present_group_and_leads_to_the_next() -> None:
    m, second = inside(group(1, 0, 1, 2)), group(2, 0, 2, lost=(1,))
    assert m.published(second) == [AbortGroup(1), Connect(second, 0)]
    assert not m.whole
    m.connected(2, 0)
    assert m.entry is second


def test_a_planned_change_waits_for_a_vote_in_which_everybody_says_it_is_connected() -> None:
    first, second = group(1, 0, 1), group(2, 0, 1, 2)
    a, b = inside(first, 0), inside(first, 1)
    for m in (a, b):
        assert m.published(second) == [Connect(second, 0)]
    a.connected(2, 0)
    assert a.entry is None
    votes = maximum([m.ballot(7, 99, False, -1) for m in (a, b)])
    assert [m.count(votes)[0].counted for m in (a, b)] == [Counted.AGREED] * 2
    assert a.entry is None and b.entry is None  # b was not connected yet
    b.connected(2, 0)
    votes = maximum([m.ballot(8, 98, False, -1) for m in (a, b)])
    for m in (a, b):
        m.count(votes)
        assert m.entry is second


def test_who_missed_the_news_of_a_newer_group_learns_in_the_vote_that_there_is_one() -> None:
    first, without = group(1, 0, 1), group(2, 0)
    a, b = inside(first, 0), inside(first, 1)
    b.published(without)  # it is let go; a did not hear
    votes = maximum([m.ballot(7, 99, False, -1) for m in (a, b)])
    assert [m.count(votes)[0].behind for m in (a, b)] == [True, False]


def test_a_group_that_everybody_said_in_a_vote_is_entered_though_a_newer_one_is_known() -> None:
    first, second, third = group(1, 0, 1), group(2, 0, 1, 2), group(3, 0, 1, 2, 3)
    a, b = inside(first, 0), inside(first, 1)
    for m in (a, b):
        m.published(second)
        m.connected(2, 0)
    ballots = [m.ballot(7, 99, False, -1) for m in (a, b)]
    assert AbortGroup(2) not in a.published(third)
    a.connected(3, 0)
    for m in (a, b):
        m.count(maximum(ballots))
        assert m.entry is second


def test_a_change_that_breaks_before_all_are_there_breaks_what_is_left_too() -> None:
    """a, which hears of the loss in mid-vote, does not go over; b, which heard nothing, does; c hears it in between."""
    first, second, third = group(1, 0, 1, 2), group(2, 0, 1, 2, 3), group(3, 0, 1, 2, lost=(3,))
    a, b, c = members = [inside(first, slot) for slot in range(3)]
    for m in members:
        m.published(second)
        m.connected(2, 0)
    votes = maximum([m.ballot(7, 99, False, -1) for m in members])
    assert a.published(third) == [Connect(third, 0)]
    assert AbortGroup(1) in a.count(votes)[1]
    assert not a.whole and a.entry is None
    assert b.count(votes)[1] == [] and b.entry is second
    b.enter(second)
    assert c.count(votes)[1] == []
    assert AbortGroup(1) in c.published(third)
    assert not c.whole and c.entry is None
    assert AbortGroup(2) in b.published(third)
    for m in members:
        m.connected(3, 0)
        assert m.entry is third


def test_a_superseded_group_is_cut_so_that_who_waits_in_it_goes_on() -> None:
    m, second, third = inside(group(1, 0, 1)), group(2, 0, 1, 2), group(3, 0, 1)
    m.published(second)
    m.connected(2, 0)
    assert m.published(third) == [AbortGroup(2), Connect(third, 0)]


def test_on_hold_or_alone_nobody_votes_so_the_newest_group_is_entered_at_once() -> None:
    for first in (group(1, 0, 1, hold="2 of at least 3 workers"), group(1, 0)):
        m, second = inside(first), group(2, 0, 1, 2)
        m.published(second)
        assert m.entry is None
        m.connected(2, 0)
        assert m.entry is second


def test_who_leaves_says_that_it_may_be_left_and_is_let_go_by_the_vote() -> None:
    first, second = group(1, 0, 1), group(2, 0)
    stays, leaves = inside(first, 0), inside(first, 1)
    for m in (stays, leaves):
        m.published(second)
    assert leaves.excluded and not leaves.let_go
    stays.connected(2, 0)
    votes = maximum([m.ballot(3, 1, False, -1) for m in (stays, leaves)])
    for m in (stays, leaves):
        m.count(votes)
    assert leaves.let_go
    assert stays.entry is second
    assert stays.parting and leaves.parting
    leaves.published(group(3, 0, 2))  # what comes later does not keep it
    assert leaves.let_go


def test_different_gradients_or_steps_are_told_from_agreement() -> None:
    first = group(1, 0, 1)
    for ballots, counted in (
        ([(5, 10), (5, 11)], Counted.DIFFERENT_GRADIENTS),
        ([(5, 10), (6, 10)], Counted.DIFFERENT_STEPS),
        ([(5, -(1 << 63)), (5, -(1 << 63))], Counted.AGREED),
    ):
        members = [inside(first, slot) for slot in (0, 1)]
        votes = maximum([m.ballot(s, d, False, -1) for m, (s, d) in zip(members, ballots, strict=True)])
        assert len(votes) == BALLOT
        assert {m.count(votes)[0].counted for m in members} == {counted}


def test_one_that_is_not_finite_and_the_newest_confirmation_reach_everybody() -> None:
    members = [inside(group(1, 0, 1), slot) for slot in (0, 1)]
    votes = maximum([m.ballot(5, 1, slot == 1, 3 * slot) for slot, m in enumerate(members)])
    for m in members:
        tally, _ = m.count(votes)
        assert tally.nonfinite and tally.confirmed == 3


@pytest.mark.parametrize(("others", "committed"), [([6, 5], True), ([5, 5], False), ([-1, -1], False)])
def test_a_vote_that_broke_is_decided_by_who_committed(others: list[int], committed: bool) -> None:
    m, second = inside(group(1, 0, 1, 2, 3)), group(2, 0, 2, 3, lost=(1,))
    m.ballot(5, 77, False, -1)
    m.broke()
    m.published(second)
    m.connected(2, 0)
    m.enter(second)
    words = [m.word(5, 1), *([o, -1, 1, 0] for o in others)]
    assert m.resolve(words) is committed
    assert m.pending is None


def test_a_group_that_broke_without_a_loss_is_connected_again() -> None:
    first = group(1, 0, 1)
    m = inside(first)
    assert m.reconnect() == []
    assert m.broke() == [AbortGroup(1)]
    assert m.broke() == []
    assert m.reconnect() == [Connect(first, 1)]
    assert m.reconnect() == []
    m.connected(1, 1)
    assert m.entry is first
    m.enter(first)
    assert m.whole
    m.broke()
    assert m.reconnect() == [Connect(first, 2)]


def test_who_joins_follows_and_is_told_again_without_a_new_generation() -> None:
    m = machine(2)
    assert m.published(group(4, 0, 1)) == []
    assert m.excluded
    again = group(4, 0, 1, joining=(2,))
    assert m.published(again) == [Follow(again)]
    assert not m.excluded


# ---------------------------------------------------------------- many machines, a lossy world


class World:
    """Members with real machines; a master that publishes groups; connections and votes that break for some.

    What a vote does to each member is drawn at random once one of its members is dead: the result may have come or
    not, as with a real all-reduce. ``history``: at each member, which (step, generation) it committed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generation = 0
        self.machines: dict[int, GroupMachine] = {}
        self.step: dict[int, int] = {}
        self.history: dict[int, list[int]] = {}
        self.lost: list[int] = []
        self.cut: set[int] = set()  # generations that somebody cut
        self.wanted: list[int] = []
        self.leaving: set[int] = set()
        self.newest: Group | None = None
        self.inbox: list[tuple[int, Group]] = []
        self.connecting: dict[tuple[int, int], set[int]] = {}
        self.next_slot = 0
        self.splits = 0
        self.committed: dict[int, int] = {}  # step -> generation of whoever survived it

    def start(self, slot: int, step: int) -> None:
        self.machines[slot] = machine(slot)
        self.step[slot] = step
        self.wanted.append(slot)

    def publish(self) -> None:
        self.generation += 1
        self.newest = group(self.generation, *self.wanted, lost=tuple(self.lost))
        self.divide()

    def divide(self) -> None:
        assert self.newest is not None
        self.splits += 1
        shares = tuple(self.rng.randint(1, 9) for _ in self.newest.members)
        self.newest = msgspec.structs.replace(self.newest, split=StepSplit(self.splits, shares))
        self.inbox += [(slot, self.newest) for slot in self.machines]

    def act(self, slot: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AbortGroup):
                self.cut.add(action.generation)
            elif isinstance(action, Connect):
                self.connecting.setdefault((action.group.generation, action.attempt), set()).add(slot)

    def kill(self, slot: int) -> None:
        m = self.machines.pop(slot)
        if m.present is not None:
            self.cut.add(m.present.generation)
        self.lost.append(slot)
        self.wanted.remove(slot)
        self.leaving.discard(slot)
        self.publish()

    def deliver(self) -> None:
        """Orders come late, and each member's in order; then who can connect does."""
        self.rng.shuffle(self.inbox)
        self.inbox.sort(key=lambda item: (item[1].generation, item[1].split.version))
        keep = []
        for slot, told in self.inbox:
            if slot not in self.machines:
                continue
            if self.rng.random() < 0.4 or any(s == slot for s, _ in keep):
                keep.append((slot, told))
            else:
                self.act(slot, self.machines[slot].published(told))
        self.inbox = keep
        for (generation, attempt), there in list(self.connecting.items()):
            assert self.newest is not None
            if generation == self.newest.generation and there >= set(self.wanted):
                del self.connecting[generation, attempt]
                self.cut.discard(generation)
                for slot in there & set(self.machines):
                    self.act(slot, self.machines[slot].connected(generation, attempt))

    def turn(self) -> None:
        """Every group whose members are all in it does one thing: meets, or votes on a step."""
        for slot in [s for s, m in self.machines.items() if s not in self.wanted and m.outside]:
            del self.machines[slot]  # asked to go, and gone
        for slot, m in self.machines.items():
            self.act(slot, m.reconnect())
            entry = m.entry
            if entry is not None:
                m.enter(entry)
                self.agreed.discard(slot)
        by_generation: dict[int, list[int]] = {}
        for slot, m in self.machines.items():
            if m.present is not None and m.whole and not m.let_go:
                if m.present.generation in self.cut:
                    self.act(slot, m.broke())
                else:
                    by_generation.setdefault(m.present.generation, []).append(slot)
        for generation, there in by_generation.items():
            slots = [s for s in there if s in self.machines and self.machines[s].whole]  # (killed or cut just now)
            present = self.machines[slots[0]].present if slots else None
            if present is None:
                continue
            if {m.slot for m in present.members} != set(slots):
                continue  # somebody is not there yet
            if all(s in self.agreed for s in slots):
                self.vote(generation, slots)
            else:
                self.meet(slots)

    agreed: set[int]

    def meet(self, slots: list[int]) -> None:
        words = [self.machines[s].word(self.step[s], 1) for s in slots]
        top = max(w[0] for w in words)
        for s in slots:
            pending = self.machines[s].pending
            if self.machines[s].resolve(words):
                assert pending == self.step[s] and top == pending + 1
                self.commit(s, pending)
        for s in slots:
            assert self.step[s] in (top, -1), f"{s} is at {self.step[s]}, others at {top}"
            self.step[s] = top  # a newcomer copies
            self.agreed.add(s)

    def vote(self, generation: int, slots: list[int]) -> None:
        step = self.step[slots[0]]
        assert {self.step[s] for s in slots} == {step}
        assert len({self.machines[s].split for s in slots}) == 1, "they would divide the step differently"
        ballots = [self.machines[s].ballot(step, 1000 + step, False, -1) for s in slots]
        newcomers = [s for s in self.wanted if s not in slots]
        if newcomers and self.rng.random() < 0.3:  # news in mid-vote
            self.kill(self.rng.choice(newcomers))
        if self.rng.random() < 0.3:
            self.deliver()
        slots = [s for s in slots if self.machines[s].pending is not None and self.machines[s].whole]
        victim = self.rng.choice(slots) if self.rng.random() < 0.15 and len(self.wanted) > 1 else None
        if victim in self.wanted:
            knows = {s for s in slots if self.rng.random() < 0.5}  # who got the result before it broke
        else:
            victim, knows = None, set(slots)
        for s in slots:
            m = self.machines[s]
            if s in knows:
                tally, actions = m.count(maximum(ballots))
                assert tally.counted is Counted.AGREED
                self.act(s, actions)
                if s != victim:
                    self.commit(s, step)
            else:
                self.act(s, m.broke())
        if victim is not None:
            self.kill(victim)
        for s in [s for s in slots if s in self.machines and self.machines[s].let_go]:
            self.machines.pop(s)

    def commit(self, slot: int, step: int) -> None:
        assert self.step[slot] == step
        self.step[slot] = step + 1
        self.history.setdefault(slot, []).append(step)


@pytest.mark.parametrize("block", range(8))
def test_no_step_is_lost_or_done_twice_whatever_is_killed_in_mid_vote(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        world = World(seed)
        world.agreed = set()
        for slot in range(3):
            world.start(slot, 0)
        world.next_slot = 3
        world.publish()
        for _ in range(200):
            chance = world.rng.random()
            if chance < 0.03 and len(world.wanted) > 1:
                world.kill(world.rng.choice(world.wanted))
            elif chance < 0.06 and len(world.wanted) < 6:
                world.start(world.next_slot, -1)
                world.next_slot += 1
                world.publish()
            elif chance < 0.08 and len(world.wanted) > 1:
                goes = world.rng.choice(world.wanted)
                world.wanted.remove(goes)
                world.publish()
            elif chance < 0.2:
                world.divide()
            world.deliver()
            world.turn()
        for slot, steps in world.history.items():
            assert steps == list(range(steps[0], steps[0] + len(steps))), f"seed {seed}: worker:{slot} did {steps}"
        for _ in range(300):  # left alone, they get on
            world.deliver()
            world.turn()
        assert {world.machines[s].split.version for s in world.wanted} == {world.splits}, f"seed {seed}"
        steps = [world.step[s] for s in world.wanted]
        assert len(set(steps)) == 1 and steps[0] > 50, f"seed {seed}: {steps}, {list(world.machines.values())}"


def test_a_new_split_holds_once_everybody_has_it() -> None:
    first = group(1, 0, 1)
    members = a, b = [inside(first, slot) for slot in range(2)]

    def vote(step: int) -> None:
        votes = maximum([m.ballot(step, 1, False, -1) for m in members])
        assert [m.count(votes)[0].counted for m in members] == [Counted.AGREED] * 2

    split = StepSplit(4, (30, 10), (3, 1), 0.5)
    assert a.published(msgspec.structs.replace(first, split=split)) == []
    vote(0)
    assert [m.split for m in members] == [StepSplit(), StepSplit()], "b has not heard of it"
    assert b.published(msgspec.structs.replace(first, split=split)) == []
    vote(1)
    assert [m.split for m in members] == [split, split]
    assert a.published(first) == [], "old news"
    vote(2)
    assert a.split == split
    wrong = StepSplit(5, (1, 2, 3))
    for m in members:
        m.published(msgspec.structs.replace(first, split=wrong))
    vote(3)
    assert a.split == split, "shares for three, and we are two"


def test_a_broken_group_begins_with_equal_shares_unless_all_know_the_split() -> None:
    split = StepSplit(2, (3, 1))
    for known, holds in ((2, split), (1, StepSplit())):
        first = group(1, 0, 1)
        members = [inside(first, slot) for slot in range(2)]
        for m in members[:known]:
            m.published(msgspec.structs.replace(first, split=split))
        words = [m.word(0, 1) for m in members]
        for m in members:
            m.resolve(words)
        assert [m.split for m in members] == [holds] * 2
