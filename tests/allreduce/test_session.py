"""Sessions of several members in one process, over real gloo groups; the test says the master's words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from group_hub import Hub

from everstep.allreduce import session as session_module
from everstep.allreduce.collective import CollectiveError, GlooCollective
from everstep.allreduce.session import Session
from everstep.allreduce.step import LeaveJob, VoteOutcome
from everstep.brain.events import (
    Answer,
    GroupAsked,
    Grouped,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    Ok,
    Refused,
    StepsCommitted,
    Wait,
)
from everstep.config.spec import JobSpec
from everstep.errors import (
    EverstepError,
    InternalError,
    NonFiniteGradientError,
    PlatformError,
    ReplicasDifferError,
)
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Committed, Group, GroupMember, Position
from everstep.model.reasons import LeaveReason
from everstep.model.shard import ShardSchedule
from everstep.net.messages import MayEnd, RequestType, StillNeeded
from everstep.storage.chain import read_chain

BATCH = 4
WAIT_S = 60.0


class State:
    def __init__(self) -> None:
        self.position = Position()
        self.loop = 0
        self.sum = 0  # the "model": how many samples it has seen
        self.rate = 0  # the "scheduler": the script steps it after each loop

    def snapshot(self) -> Any:
        return self.position, self.loop, self.sum, self.rate

    def load(self, serialized: Any, what: str) -> None:
        self.position, self.loop, self.sum, self.rate = serialized

    def devices(self) -> set[torch.device]:
        return set()


class Keeper:
    """Agrees as the real one does: who is new or behind takes the newest state of another member."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.address = None
        self.has_state = False
        self.lineage = -1
        self.on_synced: Callable[[], None] | None = None
        self.copy: Any = None
        self.on_error: Callable[[EverstepError], None] | None = None

    def follow(self, group: Group) -> None: ...

    def agree(self, group: Group, rank: int, gather: Callable[[list[int]], list[list[int]]]) -> Position:
        position = self.state.position
        step = position.step if self.has_state else -1
        loop, total, rate = self.state.loop, self.state.sum, self.state.rate
        step, loop, dataset, epoch, sample, total, rate = max(
            gather([step, loop, position.dataset, position.epoch, position.sample, total, rate])
        )
        self.has_state = True
        if step < 0:
            return group.begin
        self.state.loop, self.state.sum, self.state.rate = loop, total, rate
        return Position(step, dataset, epoch, sample)

    def boundary(self, saves: bool = True) -> None: ...

    def idle(self) -> None: ...

    def committed_everywhere(self, step: int) -> None: ...

    def journaled(self) -> None: ...

    def compare(self, group: Group, rank: int, gather: Callable[[list[int]], list[list[int]]]) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Runtime:
    embedded = False

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot, self.incarnation = world, Slot(slot), Incarnation(1)
        self.spec, self.run_dir = world.spec, world.folder
        self.asked: list[RequestType] = []

    def ask(self, request: RequestType, then: Callable[[Any], None]) -> None:
        self.asked.append(request)
        if isinstance(request, GroupAsked):
            step = max((c.last + 1 for c in self.world.steps), default=0)
            then(Grouped(self.world.newest, Position(step, 0, 0, 0)))
        else:
            if isinstance(request, StepsCommitted):
                self.world.told(request.steps)
            self.world.hub.ask(request, then)

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        self.asked.append(request)
        if isinstance(request, GroupAsked):
            done = [c for c in self.world.steps if c.dataset == request.dataset]
            epoch, position = (done[-1].epoch, done[-1].hi) if done else (0, 0)
            return Grouped(self.world.newest, Position(0, request.dataset, epoch, position))
        return Ok()

    def home_link(self) -> None:
        """Files are here."""

    def said(self, kind: type) -> list[Any]:
        return [r for r in self.asked if isinstance(r, kind)]


class Member:
    """A process: its session, and a thread that trains."""

    def __init__(self, world: World, slot: int) -> None:
        self.runtime = Runtime(world, slot)
        self.state = State()
        self.session = Session(self.runtime, self.state, Keeper(self.state))
        self.world = world
        self.outcomes: list[tuple[int, VoteOutcome | None]] = []  # None: its reduction failed
        self.ended = ""
        self.error: BaseException | None = None
        self.digest: Callable[[int], int] = lambda step: 1000 + step
        self.nonfinite: Callable[[int], bool] = lambda step: False
        self.hold_at = -1  # do not vote on this step until ``go``
        self.go = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._loop()
            self.ended = "end"
        except LeaveJob as left:
            self.ended = f"left {left.status}"
        except BaseException as error:
            self.error, self.ended = error, "error"

    def _loop(self) -> None:
        session = self.session
        for dataset, until in self.world.loops:
            session.enter(dataset, until, self.world.plan, BATCH)
            left = False
            while not left and (step := session.begin()) is not None:
                if step.number == self.hold_at:
                    assert self.go.wait(WAIT_S)
                try:
                    samples = torch.tensor([float(sum(m.hi - m.lo for m in step.micros))])
                    step.collective.allreduce(samples).wait()
                except CollectiveError:
                    self.outcomes.append((step.number, None))
                    session.broken(step)
                    continue
                assert int(samples) == step.total
                outcome = session.vote(step, self.digest(step.number), self.nonfinite(step.number))
                self.outcomes.append((step.number, outcome))
                if outcome is not VoteOutcome.REDO:
                    self.state.sum += step.total
                    left = self.world.leave_at in (step.number, -2)
                    session.done(step, left=left)
            self.state.rate += 1

    def die(self) -> None:
        """As a SIGKILL: no word to anybody, the sockets are gone."""
        self.session.fail(InternalError("killed"))
        self.go.set()
        self.thread.join(WAIT_S)

    @property
    def committed(self) -> list[int]:
        return [step for step, outcome in self.outcomes if outcome in (VoteOutcome.COMMITTED, VoteOutcome.SKIPPED)]


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.hub = folder, Hub()
        self.spec = JobSpec(mode="allreduce", workers=3, ps=0)
        self.plan = ShardSchedule(name="data", samples=1600, shard_samples=400, seed=0)
        self.loops = [(0, 1)]
        self.members: dict[int, Member] = {}
        self.generation = 0
        self.lost: list[tuple[Slot, Incarnation]] = []
        self.steps: list[Committed] = []
        self.newest: Group | None = None
        self.leave_at = -1  # step in which scripts leave their loop; -2: in each
        self._lock = threading.Lock()

    def start(self, *slots: int) -> list[Member]:
        for slot in slots:
            self.members[slot] = Member(self, slot)
        return [self.members[s] for s in slots]

    def publish(self, *slots: int, lost: int | None = None, hold: str = "", lineage: int = 1) -> Group:
        self.generation += 1
        if lost is not None:
            self.lost.append((Slot(lost), Incarnation(1)))
        members = tuple(GroupMember(Slot(s), Incarnation(1), NodeId("node0")) for s in slots)
        group = Group(generation=self.generation, members=members, lost=tuple(self.lost), hold=hold, lineage=lineage)
        self.newest = group
        for member in self.members.values():
            member.session.grouped(group)
        return group

    def told(self, steps: tuple[Committed, ...]) -> None:
        with self._lock:
            self.steps += steps

    def wait(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not what():
            for member in self.members.values():
                expected = InternalError | NonFiniteGradientError | ReplicasDifferError
                if member.error is not None and not isinstance(member.error, expected):
                    raise member.error
            assert time.monotonic() < end, {s: (m.session, m.outcomes[-3:], m.ended) for s, m in self.members.items()}
            time.sleep(0.005)

    def connected(self, group: Group, *members: Member) -> None:
        """These are about to go over to ``group``. (On a slow machine they could be through with all steps before.)"""
        self.wait(lambda: all(group.generation in m.session.machine._ready for m in members))

    def reached(self, step: int, *slots: int) -> None:
        self.wait(lambda: all(self.members[s].state.position.step >= step for s in slots))

    def end(self, *slots: int, samples: int | None = None) -> None:
        """These end well, with the same state; what was told tiles the data exactly once."""
        self.wait(lambda: all(self.members[s].ended for s in slots))
        # Not sooner: in one process, who closes cuts also the others' ends of its connections, with what is in them.
        for member in self.members.values():
            member.session.close("error" if member.error else "")
        for slot in slots:
            member = self.members[slot]
            assert member.ended == "end", (slot, member.error)
            assert member.state.sum == (self.plan.samples * len(self.loops) if samples is None else samples)
            assert member.state.rate == len(self.loops)
        at: dict[int, int] = {}
        place, step = {}, 0
        for c in self.steps:
            at[c.first], at[c.last + 1] = place[c.first], place[c.last + 1] = c.lo, c.hi
            assert c.first <= step, f"a gap before {c}"
            step = max(step, c.last + 1)
        assert self.steps[0].lo == 0 and step == self.members[slots[0]].state.position.step
        assert max(c.hi for c in self.steps) == self.plan.samples


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for member in world.members.values():
        member.go.set()
        member.session.fail(InternalError("the test is over"))
        member.thread.join(10.0)
        member.session.close("the test is over")


def test_members_train_every_sample_once_and_end_together(world: World) -> None:
    world.loops = [(0, 1), (0, 2)]
    world.start(0, 1, 2)
    world.publish(0, 1, 2)
    world.end(0, 1, 2)
    steps = world.members[0].committed
    assert steps == list(range(len(steps)))
    assert [m.committed for m in world.members.values()] == [steps] * 3
    for slot in range(3):
        header, records, problem = read_chain(world.folder / "audit" / f"worker-{slot}.1.log")
        assert problem is None and header["kind"] == "steps"
        mine = [msgspec.msgpack.decode(r, type=Committed) for r in records]
        assert mine[0].first == 0 and mine[-1].last == steps[-1]
    assert [r.reason for r in world.members[1].runtime.said(GroupLeft)] == ["done"]


def test_two_datasets_in_turn_each_where_it_was_left(world: World) -> None:
    world.loops = [(0, 1), (1, 1), (0, 2), (1, 2)]
    world.start(0, 1)
    world.publish(0, 1)
    world.end(0, 1)
    places = sorted({(c.dataset, c.epoch) for c in world.steps})
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_survivors_of_a_loss_do_the_step_again_among_themselves(world: World) -> None:
    a, b, c = world.start(0, 1, 2)
    c.hold_at = 5
    world.publish(0, 1, 2)
    world.reached(5, 0, 1)
    c.die()
    world.publish(0, 1, lost=2)
    world.end(0, 1)
    assert (5, None) in a.outcomes or (5, VoteOutcome.REDO) in a.outcomes
    assert a.committed == b.committed == list(range(len(a.committed)))
    assert {s.generation for s in world.steps} == {1, 2}


def test_a_vote_that_only_one_saw_through_is_committed_everywhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker:0 has the result, worker:1 does not: the sockets broke in between (worker:2 died)."""
    a, b, c = world.start(0, 1, 2)
    whole = GlooCollective.vote
    broke = threading.Event()

    def vote(self: GlooCollective, values: Sequence[int]) -> list[int]:
        result = whole(self, values)
        if values[0] == 6 and threading.current_thread() is b.thread and not broke.is_set():
            world.wait(lambda: 6 in a.committed)  # in one process our end would break the others' too
            broke.set()
            raise CollectiveError("the result did not come")
        return result

    monkeypatch.setattr(GlooCollective, "vote", vote)
    world.publish(0, 1, 2)
    world.wait(broke.is_set)
    c.die()
    world.publish(0, 1, lost=2)
    world.end(0, 1)
    assert [o for s, o in b.outcomes if s == 6] == [VoteOutcome.COMMITTED]
    assert a.committed == b.committed == list(range(len(a.committed)))


def test_a_newcomer_enters_at_a_vote_and_nothing_is_done_again(world: World) -> None:
    a, b = world.start(0, 1)
    for m in (a, b):
        m.hold_at = 8
    world.publish(0, 1)
    world.reached(8, 0, 1)
    (c,) = world.start(2)
    world.connected(world.publish(0, 1, 2), a, b)
    for m in (a, b):
        m.go.set()
    world.end(0, 1, 2)
    assert a.committed == list(range(len(a.committed))) and len(a.outcomes) == len(a.committed)
    assert c.committed[0] > 8 and c.committed == a.committed[c.committed[0] :]
    assert {s.generation for s in world.steps} == {1, 2}


def test_what_a_script_does_between_loops_is_not_done_again_by_who_copied_it(world: World) -> None:
    """worker:2 comes in its first loop into a group that is in its last one."""
    world.loops = [(0, 1), (0, 2), (0, 3)]
    a, b = world.start(0, 1)
    for m in (a, b):
        m.hold_at = 2 * world.plan.samples // (2 * BATCH) + 3
    world.publish(0, 1)
    world.reached(a.hold_at, 0, 1)
    (c,) = world.start(2)
    world.connected(world.publish(0, 1, 2), a, b)
    for m in (a, b):
        m.go.set()
    world.end(0, 1, 2)
    assert c.committed and c.committed == a.committed[c.committed[0] :]


@pytest.mark.parametrize("loops", [2, 3])
def test_a_newcomer_that_enters_at_the_end_of_the_last_loop_ends_it_with_the_others(world: World, loops: int) -> None:
    """Its state cannot be followed (``--processes-per-worker``), so it enters in its first loop, copies the
    end's state there, and passes loops: in the last one it is with the others, which wait for its vote."""
    world.plan = msgspec.structs.replace(world.plan, samples=80, shard_samples=20)
    world.loops = [(0, n + 1) for n in range(loops)]
    (a,) = world.start(0)
    a.hold_at = loops * 80 // BATCH - 1  # the last step
    world.publish(0)
    world.reached(a.hold_at, 0)
    (b,) = world.start(1)
    world.publish(0, 1)
    world.wait(lambda: 2 in a.session._ready)
    a.go.set()
    world.end(0, 1)
    assert b.outcomes == [] and a.committed == list(range(loops * 80 // BATCH))
    assert [r.reason for r in b.runtime.said(GroupLeft)] == ["done"]


def test_a_newcomer_warms_up_where_others_train_and_its_state_is_left_alone_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[int] = []
    monkeypatch.setattr(Keeper, "follow", lambda self, group: followed.append(group.generation))

    def newcomer() -> Session:
        state = State()
        return Session(Runtime(world, 2), state, Keeper(state))

    assert newcomer().warm_up_step(0, 1, world.plan, BATCH) is None  # nobody trains
    group = world.publish(0, 1)
    one = newcomer()
    step = one.warm_up_step(0, 1, world.plan, BATCH)
    assert step is not None and (step.size, len(step.micros), step.generation) == (1, 1, group.generation)
    assert one.warm_up_step(0, 0, world.plan, BATCH) is None  # no epoch of it is left
    assert one.warm_up_step(0, 1, world.plan, BATCH) is not None
    me = GroupMember(Slot(2), Incarnation(1), NodeId("node0"))
    one.grouped(msgspec.structs.replace(group, joining=(me,)))
    assert not followed
    one.warmed_up()
    assert followed == [group.generation]
    for waiting in (world.publish(0, 1, hold="not enough"), world.publish(0, 1, 2)):
        assert newcomer().warm_up_step(0, 1, world.plan, BATCH) is None, waiting  # somebody waits for it


def test_a_newcomer_that_is_the_last_one_left_tells_its_steps(world: World) -> None:
    world.plan = msgspec.structs.replace(world.plan, samples=4000)
    a, b = world.start(0, 1)
    a.hold_at = b.hold_at = 20
    world.publish(0, 1)
    world.reached(20, 0, 1)
    (c,) = world.start(2)
    world.publish(0, 1, 2)
    world.wait(lambda: all(2 in m.session._ready for m in (a, b)))
    for m in (a, b):
        m.go.set()
    world.wait(lambda: any(s.generation == 2 for s in world.steps))
    a.die()
    b.die()
    world.lost.append((Slot(0), Incarnation(1)))
    world.publish(2, lost=1)
    c.go.set()
    world.end(2)


def test_who_copied_a_state_of_the_end_waits_until_the_journal_has_it(world: World) -> None:
    """Else its source may be lost untold: the steps are done again, and there was one that had gone already."""
    world.publish(0)  # which has trained all, and cannot reach the master
    (newcomer,) = world.start(1)
    world.wait(lambda: bool(newcomer.runtime.said(GroupAsked)))
    newcomer.state.loop, newcomer.state.position = 2, Position(5, 0, 1, 0)
    newcomer.session.replica.lineage, newcomer.session.replica.has_state = 1, True
    newcomer.session._on_synced()
    asked = len(newcomer.runtime.said(GroupAsked))
    world.wait(lambda: len(newcomer.runtime.said(GroupAsked)) > asked + 2)
    assert not newcomer.ended
    world.told((Committed(1, 4, 4, 0, 0, 1500, 1600),))
    world.wait(lambda: newcomer.ended == "end")
    assert not newcomer.outcomes and not newcomer.runtime.said(GroupSynced)


def test_a_script_that_is_beyond_the_loop_of_the_restored_state_begins_anew(world: World) -> None:
    """worker:1 has followed worker:0 into the second loop; worker:0 is lost before it came into the group."""
    world.loops = [(0, 1), (0, 2)]
    world.publish(0)  # which trains
    (newcomer,) = world.start(1)
    world.wait(lambda: bool(newcomer.runtime.said(GroupAsked)))
    newcomer.state.loop, newcomer.state.position = 2, Position(5, 0, 1, 0)
    newcomer.session.replica.lineage, newcomer.session.replica.has_state = 1, True
    world.told((Committed(1, 4, 4, 0, 0, 1500, 1600),))
    newcomer.session._on_synced()
    world.wait(lambda: newcomer.session._loop == 2)
    world.generation = 4
    world.publish(1, lineage=5)
    newcomer.thread.join(WAIT_S)
    assert isinstance(newcomer.error, PlatformError) and "begins anew" in str(newcomer.error), newcomer.outcomes
    assert not newcomer.outcomes and newcomer.error.exit_code == 4  # (as the machine's: it is started again)


def test_the_end_of_a_line_that_is_void_is_no_end(world: World) -> None:
    """Those who could tell of the steps before ours are lost, so the master begins another line of states."""
    (member,) = world.start(0)
    world.publish(0)
    world.wait(lambda: member.ended == "end")
    member.session.commits.done(Committed(1, 90, 90, 0, 0, 0, 1))
    member.session.commits.settle(91)
    member.session.grouped(Group(generation=2, members=(), lineage=2))
    with pytest.raises(PlatformError, match="are void"):
        member.session.close()
    assert not member.runtime.said(GroupLeft)


def test_a_script_that_ended_with_a_copied_state_waits_until_the_journal_has_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulator, mix group, seed 5236: it was in the group for the last vote alone, and had no step of its own to tell.
    All others were lost untold, and it said that its script had come to the end."""
    (member,) = world.start(0)
    world.publish(0)
    world.wait(lambda: member.ended == "end")
    answers: list[Answer] = [Wait(0.001), Wait(0.001), Refused("its states are lost")]
    said: list[RequestType] = []

    def call(request: RequestType, timeout_s: float) -> Answer:
        said.append(request)
        return answers.pop(0)

    monkeypatch.setattr(member.runtime, "call", call)
    monkeypatch.setattr(member.session, "_agreed_at", 7)
    with pytest.raises(PlatformError, match="are void"):
        member.session.close()
    reached = member.state.position.step
    assert said == [GroupLeft(LeaveReason.DONE, 1, 7, reached, 1)] * 3


def left_early(world: World, slots: tuple[int, ...], at: int) -> list[Member]:
    """Return members whose scripts left their loop in step ``at``, and stand behind it."""
    world.leave_at = at
    members = world.start(*slots)
    world.publish(*slots)
    world.wait(lambda: all(m.ended for m in members))
    world.wait(lambda: {c.last for c in world.steps} >= {at - 1})
    time.sleep(0.2)  # (more than between two reports)
    assert max(c.last for c in world.steps) == at - 1
    return members


def test_a_step_in_which_the_only_script_left_its_loop_is_told_when_the_script_has_gone_on(world: World) -> None:
    (member,) = left_early(world, (0,), 7)
    member.session.close("it raised")
    assert max(c.last for c in world.steps) == 6
    world.members.clear()
    world.steps.clear()
    (member,) = left_early(world, (1,), 7)
    member.session.close()
    assert max(c.last for c in world.steps) == 7


def test_a_next_loop_shows_that_the_script_went_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to checkpoints, of which there would be none in a script that leaves each of its loops."""
    saved: list[tuple[str, int]] = []
    monkeypatch.setattr(
        Keeper, "boundary", lambda self, saves=True: saved.append((f"boundary {saves}", self.state.position.step))
    )
    monkeypatch.setattr(Keeper, "idle", lambda self: saved.append(("between", self.state.position.step)))
    world.loops, world.leave_at = [(0, 1)] * 3, -2  # each
    (member,) = world.start(0)
    world.publish(0)
    world.wait(lambda: bool(member.ended))
    boundaries = [("boundary False", step) for step in (1, 2, 3)]
    assert member.committed == [0, 1, 2] and [one for one in saved if one[0] != "between"] == boundaries
    for step in (1, 2):
        assert saved.index(("between", step)) > saved.index(("boundary False", step))
    world.wait(lambda: max((c.last for c in world.steps), default=-1) == 1)


def test_a_step_in_which_all_scripts_left_their_loop_is_told_when_all_have_come_to_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is last may be minutes behind: the others keep the state, and hear from the master that all have it."""
    a, b = left_early(world, (0, 1), 7)
    answers: dict[int, Answer] = {0: StillNeeded(0.01, 0), 1: StillNeeded(0.01, 0)}
    ended: list[GroupLeft] = []

    def call(member: Member) -> Callable[[RequestType, float], Any]:
        def answer(request: RequestType, timeout_s: float) -> Answer:
            if isinstance(request, GroupLeft):
                ended.append(request)
            return answers[int(member.runtime.slot)] if isinstance(request, MayEnd) else Ok()

        return answer

    for member in (a, b):
        monkeypatch.setattr(member.runtime, "call", call(member))
    threads = [threading.Thread(target=m.session.close, daemon=True) for m in (a, b)]
    threads[0].start()
    world.wait(lambda: len(ended) == 1)
    time.sleep(0.2)
    assert max(c.last for c in world.steps) == 6 and threads[0].is_alive()
    threads[1].start()
    world.wait(lambda: len(ended) == 2)
    assert [(e.reached, e.generation) for e in ended] == [(8, 1)] * 2
    answers[0] = answers[1] = StillNeeded(0.01, 8)
    world.wait(lambda: max(c.last for c in world.steps) == 7)
    answers[0] = answers[1] = Ok()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_step_of_an_older_group_is_told_with_the_generation_in_which_everybody_has_it(world: World) -> None:
    """Simulator, mix hybrid, seed 16311: one that was leaving lacked a step that only the group without it had."""
    (member,) = world.start(0)
    world.publish(0)
    world.wait(lambda: member.ended == "end")
    session = member.session
    session.commits.done(Committed(0, 90, 90, 0, 0, 0, 1))
    session._settle(91)
    assert [(c.first, c.agreed) for c in session.commits.to_log()][-1] == (90, 1)


def test_a_group_has_met_only_when_the_ps_have_what_its_state_has(world: World) -> None:
    """Simulator, mix hybrid: a newcomer counted as having the state, all others were lost, and nobody could push what
    the ps lacked of it."""
    a, b = world.start(0, 1)
    a.hold_at = 3
    world.publish(0, 1)
    world.reached(3, 0, 1)
    session = b.session  # (held by the other one, between two steps)
    world.wait(lambda: session._reported_agreed == 1)
    with session._changed:
        session._agreed_at, session._reported_agreed = 3, 0
        told, session.commits.confirmed = session.commits.confirmed, 2
        session.tables = tables = SimpleNamespace(pushed=2, survey=lambda *args: 0)  # type: ignore[assignment]
    said = len(b.runtime.said(GroupSynced))
    session._report_agreed()
    assert len(b.runtime.said(GroupSynced)) == said
    tables.pushed = 3
    session._report_agreed()
    assert len(b.runtime.said(GroupSynced)) == said + 1
    session.tables = None
    session.commits.confirmed = told  # (what its ballot says of them, the other one does not tell any more)
    a.go.set()
    world.end(0, 1)


def test_who_is_asked_to_leave_goes_at_a_vote(world: World) -> None:
    a, b, c = world.start(0, 1, 2)
    for m in (a, b, c):
        m.hold_at = 4
    world.publish(0, 1, 2)
    world.reached(4, 0, 1, 2)
    assert c.session.leave_soon(143)
    world.wait(lambda: bool(c.runtime.said(GroupLeft)))
    world.publish(0, 1)
    for m in (a, b, c):
        m.go.set()
    world.end(0, 1)
    assert c.ended == "left 143"
    assert len(a.outcomes) == len(a.committed)
    assert c.committed == a.committed[: len(c.committed)]
    assert (
        max(s.last for r in c.runtime.said(StepsCommitted) for s in r.steps) == c.committed[-1]
    )  # told before it went


def test_a_connection_that_failed_without_a_loss_is_made_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "AGAIN_S", 0.05)
    a, b = world.start(0, 1)
    a.hold_at = 3
    world.publish(0, 1)
    world.reached(3, 0, 1)
    assert isinstance(b.session._present, GlooCollective)
    b.session._present.abort("a cable was pulled")
    a.go.set()
    world.end(0, 1)
    assert a.committed == b.committed
    assert {s.generation for s in world.steps} == {1}


def test_a_group_on_hold_waits_and_alone_one_goes_on(world: World) -> None:
    a, b = world.start(0, 1)
    b.hold_at = 3
    world.publish(0, 1)
    world.reached(3, 0)
    b.die()
    world.publish(0, lost=1, hold="1 of at least 2 workers")
    world.wait(lambda: a.session.machine.present is not None and a.session.machine.present.generation == 2)
    assert a.state.position.step == 3
    world.publish(0)
    world.end(0)
    assert a.committed == list(range(len(a.committed)))


def test_different_gradients_are_an_error_at_all_and_nothing_is_committed(world: World) -> None:
    a, b = world.start(0, 1)
    b.digest = lambda step: 1000 + step + (step == 7)
    world.publish(0, 1)
    world.wait(lambda: bool(a.ended and b.ended))
    for member in (a, b):
        assert isinstance(member.error, ReplicasDifferError)
        assert "silent corruption" in str(member.error) and "step 7" in str(member.error)
        assert member.committed == list(range(7))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_gradients_that_are_not_finite(world: World, policy: str) -> None:
    world.spec = msgspec.structs.replace(world.spec, nonfinite=policy)
    a, b = world.start(0, 1)
    b.nonfinite = lambda step: step == 5
    world.publish(0, 1)
    if policy == "skip":
        world.end(0, 1)
        assert (5, VoteOutcome.SKIPPED) in a.outcomes
        assert {r for s in world.steps for r in s.skipped} == {(5 * 2 * BATCH, 6 * 2 * BATCH)}
    else:
        world.wait(lambda: bool(a.ended and b.ended))
        for member in (a, b):
            assert isinstance(member.error, NonFiniteGradientError) and "step 5" in str(member.error)


def test_who_waits_for_long_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "STALL_S", 0.05)
    a, b = world.start(0, 1)
    b.hold_at = 3
    world.publish(0, 1)
    world.wait(lambda: any(r.step == 3 and r.generation == 1 for r in a.runtime.said(GroupStalled)))
    assert a.runtime.said(GroupStalled)[-1].waited_s >= 0.05
    b.go.set()
    world.end(0, 1)


def test_a_step_is_told_only_when_everybody_has_it(world: World) -> None:
    a, b = world.start(0, 1)
    for m in (a, b):
        m.hold_at = 9
    world.publish(0, 1)
    world.reached(9, 0, 1)
    world.wait(lambda: any(s.last == 7 for s in world.steps))
    assert max(s.last for s in world.steps) == 7  # of 8 it is not known before the vote on 9
    for m in (a, b):
        m.go.set()
    world.end(0, 1)
