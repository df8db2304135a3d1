"""One event costs the brain little, however many members there are: counted by the lines of Python that it runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from everstep.brain import brain as brain_module
from everstep.brain import events as said
from everstep.brain.brain import Brain
from everstep.brain.members import Members, Node, Rooms
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.model.group import Committed
from everstep.model.member import Address, MemberState, Role
from everstep.model.shard import ShardSchedule
from everstep.policies.node_selection import HOME_NODE, choose_ps_node, choose_worker_node

SOURCE = str(Path(brain_module.__file__).parents[1])  # the package
PLAN = ShardSchedule(name="d", samples=10_000_000, shard_samples=100, seed=0)


@pytest.mark.parametrize("role", [Role.WORKER, Role.PS])
def test_many_starts_at_once_go_where_each_alone_would_go(role: Role) -> None:
    rng = random.Random(5)
    for _ in range(300):
        members = Members()
        names = [NodeId(f"n{n}") for n in range(rng.randint(0, 6))]
        for name in rng.sample([HOME_NODE, *names], len(names) + 1)[rng.randint(0, 1) :]:
            places = rng.choice([0, 0, 1, 2, 5])
            members.nodes[name] = Node(name, "", places, places, alive=rng.random() < 0.9)
        rooms, alone = Rooms(members, role), members.rooms(role)
        for slot in range(12):
            home = rng.choice([None, None, *names, NodeId("gone")])
            avoid = rng.choice([None, None, None, *names])
            others = [room for room in alone if room.node != avoid]
            if role is Role.WORKER:
                node = choose_worker_node(others, None) if avoid is not None else None
                node = node or choose_worker_node(alone, home)
            else:
                node = (choose_ps_node(others) if avoid is not None else None) or choose_ps_node(alone)
            assert rooms.choose(home, avoid) == node
            if node is not None:
                members.fill(role, Slot(slot), node, 0.0)
                rooms.taken(node)
                alone = members.rooms(role)


class Job:
    """A brain, and the most lines that one event of each kind made it run."""

    def __init__(self, nodes: int, per_node: int, ps: int = 0, **fields: Any) -> None:
        self.brain, self.at = Brain(), 1000.0
        self.lines: dict[str, int] = {}
        self.tell(said.Event(self.at, said.MasterStarted(Incarnation(1), JobSpec(workers=0, ps=ps, **fields))))
        self.tell(said.Event(self.at, said.NodeJoined(HOME_NODE, "", 0, 0, ())))
        for n in range(nodes):
            self.tell(said.Event(self.at, said.NodeJoined(NodeId(f"n{n}"), "h", per_node, 0, ())))
        self.hello()
        for slot, life in self.workers():
            self.tell(said.Event(self.at, said.PlanRegistered(PLAN), said.by_worker(slot, life)))

    def tell(self, event: said.Event, name: str = "") -> None:
        self.at += 0.001
        count = 0

        def line(frame: FrameType, what: str, _: object) -> Any:
            nonlocal count
            if SOURCE not in frame.f_code.co_filename:
                return None  # (a finalizer of what other tests have left may run here: the collector chooses when)
            count += what == "line"
            return line

        before = sys.gettrace()
        sys.settrace(line if name else before)
        try:
            self.brain.handle(event)
        finally:
            sys.settrace(before)
        if name:
            self.lines[name] = max(count, self.lines.get(name, 0))

    def workers(self) -> list[tuple[Slot, Incarnation]]:
        records = self.brain.members.workers.items()
        return [(slot, record.member.incarnation) for slot, record in records if record.running]

    def hello(self) -> None:
        for record in list(self.brain.members.all()):
            m = record.member
            if m.state is MemberState.STARTING:
                address = Address(m.node, f"sock/{m.role}-{m.slot}.sock")
                self.tell(said.Event(self.at, said.MemberJoined(m.role, m.slot, m.incarnation, m.node, 1, address)))

    def losses(self) -> None:
        """What ends members, and what brings them back."""
        tell, (slot, life) = self.tell, self.workers()[0]
        tell(said.Event(self.at, said.MemberSilent(Role.WORKER, slot, life, 9.0, lost=True)), "a worker is silent")
        slot, life = self.workers()[1]
        tell(said.Event(self.at, said.ProcessExited(Role.WORKER, slot, life, -9)), "a worker ends")
        tell(said.Event(self.at, said.ChiefAsked(), said.by_worker(slot, life)), "who is the chief")
        for n in range(2):
            tell(said.Event(self.at, said.NodeLost(NodeId(f"n{n}"), "silent")), "a node is lost")
        per_node = self.brain.members.nodes[NodeId("n0")].worker_places
        tell(said.Event(self.at, said.NodeJoined(NodeId("n0"), "h", per_node, 0, ())), "a node is back")
        self.hello()
        tell(said.Event(self.at, said.DrainAsked("n2", 10.0, False)), "a node is emptied")
        n = self.brain.job.workers_wanted
        tell(said.Event(self.at, said.ScaleAsked(Role.WORKER, 2 * n)), "twice the workers")
        self.hello()
        tell(said.Event(self.at, said.ScaleAsked(Role.WORKER, n // 2)), "a quarter of the workers")


def tables(n: int) -> Job:
    job = Job(4, n // 4, ps=4, parity="2+1")
    for number in (1, 2):
        for slot, life in job.workers():
            job.tell(
                said.Event(job.at, said.ShardAsked(0, 3, number), said.by_worker(slot, life)),
                "a shard is asked for" if slot < 2 else "",
            )
    acks = tuple((slot, record.member.incarnation) for slot, record in job.brain.members.servers.items())
    for held in list(job.brain.leases.values())[:3]:
        job.tell(
            said.Event(
                job.at, said.ShardDone(held.shard, held.no, acks), said.by_worker(held.worker, held.incarnation)
            ),
            "a shard is done",
        )
    job.losses()
    return job


def nodes_of_one(n: int) -> Job:
    job = Job(n, 1)
    job.losses()
    return job


def group(n: int) -> Job:
    job = Job(4, n // 4, mode="allreduce")

    def ask() -> None:
        for slot, life in job.workers():
            last = slot == job.workers()[-1][0]
            job.tell(
                said.Event(job.at, said.GroupAsked(0, 3, 10), said.by_worker(slot, life)),
                "a group is asked for" if last else "",
            )

    def step() -> None:
        book = job.brain.state.groups
        assert book.group is not None
        at, (_, lo) = book.step, book.positions.get(0, (0, 0))
        done = Committed(book.group.generation, at, at, 0, 0, lo, lo + 10 * book.group.size)
        (slot, life), *_ = job.workers()
        job.tell(said.Event(job.at, said.StepsCommitted((done,)), said.by_worker(slot, life)), "a step is committed")

    def due() -> None:
        job.at += 10.0
        job.tell(said.Event(job.at, said.GroupDue()), "a group is due")

    ask()
    due()
    step()
    job.losses()
    due()
    step()
    ask()
    for slot, life in job.workers():
        job.tell(said.Event(job.at, said.GroupSynced(job.brain.state.groups.generations), said.by_worker(slot, life)))
    due()
    (slot, life), *_ = job.workers()
    generation, at = job.brain.state.groups.generations, job.brain.state.groups.step
    job.tell(
        said.Event(job.at, said.GroupStalled(generation, at, 5.0, ()), said.by_worker(slot, life)), "a member waits"
    )
    for slot, life in job.workers():
        job.tell(
            said.Event(job.at, said.GroupStalled(generation, at, 15.0, ()), said.by_worker(slot, life)),
            "all wait" if not slot else "",
        )
    return job


@pytest.mark.parametrize("kind", [tables, nodes_of_one, group])
def test_work_grows_no_faster_than_members(kind: Callable[[int], Job]) -> None:
    small, large = kind(24), kind(96)
    assert set(small.lines) == set(large.lines)
    worse = {
        name: (small.lines[name], lines) for name, lines in large.lines.items() if lines > 5.5 * small.lines[name] + 500
    }
    assert not worse, f"(lines at 24 and at 96 members) {worse}"
    assert small.brain.members.workers and not small.brain.job.over


def test_leases_are_not_looked_through() -> None:
    """(The counts above are of lines: that they are taken at all.)"""
    job = tables(24)
    assert job.lines["a shard is done"] > 20 and LeaseNo(0) not in job.brain.leases
