"""Ps on several machines: where they are started, what is kept apart, what a lost machine and a new one mean."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.brain import events as said
from everstep.brain.brain import Brain
from everstep.brain.events import Event, MemberJoined, NodeJoined, NodeLost, NodesDue, Note, PublishPlacement, by_ps
from everstep.config.parity import parse_code
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.placement import Placement
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Holdings
from everstep.policies.node_selection import HOME_NODE

B, C = NodeId("b"), NodeId("c")


class Job:
    """A brain, and ps that have at once what they are to have."""

    def __init__(
        self,
        ranks: bool = True,
        refills: bool = True,
        saves: bool = True,
        flows: bool = True,
        awaits: bool = True,
        **fields: Any,
    ) -> None:
        self.brain, self.at = Brain(), 100.0
        self.notes: list[str] = []
        self.maps = 0
        self.starting: list[said.StartProcess] = []
        self.stopping: list[said.StopProcess] = []
        self.spec = JobSpec(**{"workers": 0, "partitions": 24, "max_restarts": 1000} | fields)
        rules = {"ranks": ranks, "refills": refills, "saves": saves, "flows": flows, "awaits": awaits}
        self.tell(said.MasterStarted(Incarnation(1), self.spec, **said.RULES | rules))

    def tell(self, fact: said.FactType, by: said.Sender = said.MASTER) -> None:
        self.at += 0.1
        for instruction in self.brain.handle(Event(self.at, fact, by)):
            match instruction:
                case Note():
                    self.notes.append(f"{instruction.member} {instruction.decision}".strip())
                case said.StartProcess(role=Role.PS):
                    self.starting.append(instruction)
                case said.StopProcess(role=Role.PS):
                    self.stopping.append(instruction)
                case PublishPlacement():
                    self.maps += 1
                    assert self.maps < 200, f"the maps do not come to rest: {self.notes[-3:]} {instruction.decision}"
        self.brain.validate()

    def join(self, node: NodeId, machine: str = "", ps: int = 8, zone: str = "") -> None:
        self.tell(NodeJoined(node, "", 1, ps, zone=zone, machine=machine))
        self.settle()

    def settle(self) -> None:
        """Ps that were ordered say hello, those that are stopped end, and all that the map asks for is there."""
        while True:
            placement = self.brain.placement
            if self.starting:
                self.say_hello()
            elif self.stopping:
                stop = self.stopping.pop(0)
                self.tell(said.ProcessExited(stop.role, stop.slot, stop.incarnation, 0))
            elif placement is None or not self.work(placement):
                return

    def say_hello(self) -> None:
        order = self.starting.pop(0)
        of = order.role, order.slot, order.incarnation, order.node
        self.tell(MemberJoined(*of, 1, Address(order.node, f"{order.slot}.{order.incarnation}"), (), Holdings()))

    def work(self, placement: Placement) -> bool:
        """Every ps gets and makes what the map wants of it; whether that was news."""
        for place in placement.servers:
            by = by_ps(place.slot, place.incarnation)
            mirrors = tuple(m.id for m in placement.mirrors_at(place.slot))
            self.tell(said.MirrorsReady(mirrors), by)
            self.tell(
                said.PartitionsReady(placement.version, tuple(placement.owned_by(place.slot)), Arrival.REBUILT), by
            )
        return self.brain.placement != placement

    def lose(self, node: NodeId) -> None:
        self.tell(NodeLost(node, "it is gone"))
        self.settle()

    def later(self, seconds: float) -> None:
        self.at += seconds
        self.tell(said.RemarkMade("time has passed"))
        self.settle()

    @property
    def nodes(self) -> dict[int, str]:
        servers = self.brain.members.servers
        return {slot: servers[slot].member.node for slot in sorted(servers) if servers[slot].running}

    def together(self, machine: str) -> int:
        """The most units of a stripe, as the map has them now, on this machine."""
        placement, code = self.brain.placement, self.brain.partitions.code
        assert placement is not None
        of = {slot: self.brain.members.machine_of(NodeId(node)) for slot, node in self.nodes.items()}
        most = 0
        for stripe in range(code.stripes(placement.partitions)):
            owners = placement.owner[stripe * code.k : (stripe + 1) * code.k]
            mirrors = [m.at for m in placement.mirrors if m.members[0] // code.k == stripe]
            most = max(most, [of[slot] for slot in (*owners, *mirrors)].count(machine))
        return most


def three(**fields: Any) -> Job:
    job = Job(**({"ps": 6, "parity": "2+1", "nodes": 3} | fields))
    for node, machine in ((HOME_NODE, "ma"), (B, "mb"), (C, "mc")):
        job.join(node, machine)
    return job


def test_nothing_is_started_before_the_nodes_are_there() -> None:
    job = Job(ps=3, parity="2+1", nodes=3, nodes_wait_s=60.0)
    job.join(HOME_NODE, "ma", ps=0)
    job.join(B, "mb")
    assert not job.nodes and "wait: for 3 nodes, 60 s at most; 1 is there" in job.notes[-2]
    job.join(C, "mc")
    assert sorted(job.nodes.values()) == ["b", "c", "node0"]
    assert any("any one of them but the master's may be lost" in note for note in job.notes)


def test_after_the_wait_the_job_begins_with_what_there_is_and_says_so() -> None:
    job = Job(ps=3, parity="2+1", nodes=3)
    job.join(HOME_NODE, "ma", ps=0)
    assert job.brain.job.nodes_due_at > job.at
    job.tell(NodesDue())
    job.settle()
    assert set(job.nodes.values()) == {"node0"}
    assert any("1 of 3 nodes have joined within 300 s" in note for note in job.notes)
    assert "no other machine has anything that could be lost" in job.notes[-1]
    before = len(job.notes)
    job.tell(NodesDue())  # said twice
    assert len(job.notes) == before


def test_units_of_a_stripe_are_on_different_machines() -> None:
    job = three()
    assert sorted(job.nodes.values()) == ["b", "b", "c", "c", "node0", "node0"]
    assert [job.together(m) for m in ("ma", "mb", "mc")] == [1, 1, 1]
    assert job.brain.partitions.lost_with_one_machine()[1] == 0


def test_two_agents_of_one_machine_are_one_place() -> None:
    job = Job(ps=6, parity="2+1", nodes=4)
    for node, machine in ((HOME_NODE, "ma"), (B, "mb"), (NodeId("b2"), "mb"), (C, "mc")):
        job.join(node, machine)
    assert sorted(job.nodes.values()) == ["b", "b2", "c", "c", "node0", "node0"]
    assert [job.together(m) for m in ("ma", "mb", "mc")] == [1, 1, 1]


def test_a_lost_machine_loses_nothing_and_the_layout_follows() -> None:
    job = three()
    job.lose(B)
    assert job.brain.job.exit_code is None and sorted(job.nodes.values()) == ["c", "c", "c", "node0", "node0", "node0"]
    assert job.together("mc") == 1, "another machine may be lost again"
    job.lose(C)
    assert job.brain.job.exit_code is None and set(job.nodes.values()) == {"node0"}


def test_a_machine_that_comes_gets_ps_of_others_one_at_a_time() -> None:
    job = three()
    job.lose(B)
    job.join(B, "mb")
    job.later(1.0)
    assert "b" not in job.nodes.values(), "it may go again at once"
    job.later(20.0)
    assert sorted(job.nodes.values()) == ["b", "b", "c", "c", "node0", "node0"], job.notes[-9:]
    assert [job.together(m) for m in ("ma", "mb", "mc")] == [1, 1, 1]
    version = job.brain.placement.version if job.brain.placement is not None else 0
    job.later(20.0)
    assert job.brain.placement is not None and job.brain.placement.version == version, "it is at rest"


def test_ps_that_cannot_be_spared_stay_and_it_is_said() -> None:
    job = Job(ps=3, parity="2+1")
    job.join(HOME_NODE, "ma", ps=0)
    job.join(B, "mb")
    job.join(C, "mc")
    job.later(20.0)
    assert set(job.nodes.values()) == {"node0"}
    assert any("none goes there, since 3 ps are what 2+1 needs; everstep scale --ps 4" in note for note in job.notes)
    job.tell(said.ScaleAsked(Role.PS, 6), said.Sender("command"))
    job.settle()
    job.later(20.0)
    assert sorted(job.nodes.values()) == ["b", "b", "c", "c", "node0", "node0"]
    assert [job.together(m) for m in ("ma", "mb", "mc")] == [1, 1, 1]


def test_without_places_or_parity_all_is_as_on_one_machine() -> None:
    job = Job(ps=4, parity="2+1")
    job.join(HOME_NODE, "ma", ps=0)
    job.join(B, "mb", ps=0)
    job.later(20.0)
    assert set(job.nodes.values()) == {"node0"} and not any("spread" in note for note in job.notes)
    bare = Job(ps=2, parity="0")
    bare.join(HOME_NODE, "ma", ps=0)
    bare.join(B, "mb")
    bare.later(20.0)
    assert set(bare.nodes.values()) == {"node0"}


def test_too_few_machines_is_said() -> None:
    job = Job(ps=6, parity="4+2", nodes=2)
    job.join(HOME_NODE, "ma", ps=0)
    job.join(B, "mb")
    assert sorted(job.nodes.values()) == ["b", "b", "node0", "node0", "node0", "node0"], "so that b may be lost"
    assert job.together("mb") == 2 and job.brain.partitions.lost_with_one_machine()[1] == 0
    wide = Job(ps=4, parity="2+1", nodes=2)
    wide.join(HOME_NODE, "ma", ps=0)
    wide.tell(NodeJoined(B, "", 1, 8, machine="mb"))
    assert Slot(0) in wide.brain.members.servers


@pytest.mark.parametrize("parity", ["0", "1+1", "1+2", "2+1", "4+2"])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_drained_node_is_emptied_also_where_too_few_ps_are_left_for_the_parity(
    parity: str, extra: int, nodes: int
) -> None:
    """With one ps left, a mirror at it was made beside its partition and dropped again, for ever."""
    code = parse_code(parity)
    job = Job(ps=max(2, code.width) + extra, parity=parity, nodes=nodes)
    job.join(HOME_NODE, "ma", ps=0)
    for node, machine in ((B, "mb"), (C, "mc"))[: nodes - 1]:
        job.join(node, machine)
    emptied = {slot for slot, node in job.nodes.items() if node == B}
    assert emptied
    job.tell(said.DrainAsked(B, 30.0), said.Sender("command"))
    job.settle()
    assert job.brain.job.exit_code is None and B not in job.nodes.values(), job.notes[-5:]
    job.later(20.0)
    version = job.brain.placement.version if job.brain.placement is not None else 0
    job.later(20.0)
    assert job.brain.placement is not None and job.brain.placement.version == version, "it is at rest"
    assert len(job.nodes) == job.spec.ps, "each ps that was emptied is started elsewhere"


def test_the_last_ps_makes_no_mirrors_of_its_own_partitions() -> None:
    job = Job(ps=2, parity="1+1", max_restarts=0)
    job.join(HOME_NODE, "ma", ps=0)
    job.tell(said.ProcessExited(Role.PS, Slot(1), job.brain.members.servers[Slot(1)].member.incarnation, -9))
    job.settle()
    placement = job.brain.placement
    assert placement is not None and set(placement.owner) == {0} and not placement.mirrors


def warned(ranks: bool, flows: bool) -> tuple[Job, set[Slot]]:
    """Two of three nodes are to be emptied at once; their ps."""
    job = three(ranks=ranks, flows=flows, awaits=ranks, partitions=96)
    for node in (B, C):
        job.tell(said.DrainAsked(node, 15.0))
    return job, {Slot(slot) for slot, node in job.nodes.items() if node != HOME_NODE}


def moves_until_safe(job: Job, going: set[Slot]) -> int:
    """How many partitions have changed their owner when nothing is left that only these ps have."""
    assert job.brain.placement is not None
    begun = job.brain.placement.owner
    for _ in range(100):
        for place in job.brain.placement.servers:
            if not job.brain.partitions.exposed(going):
                return sum(old != new for old, new in zip(begun, job.brain.placement.owner, strict=True))
            by, now = by_ps(place.slot, place.incarnation), job.brain.placement
            job.tell(said.MirrorsReady(tuple(m.id for m in now.mirrors_at(place.slot))), by)
            job.tell(said.PartitionsReady(now.version, tuple(now.owned_by(place.slot)), Arrival.REBUILT), by)
    raise AssertionError("they are never safe")


@pytest.mark.parametrize("flows", [True, False])
def test_of_two_nodes_that_go_at_once_what_only_they_have_moves_first(flows: bool) -> None:
    """Both are gone before they are empty. What only they had had moved by then, and the rest comes back."""
    job, going = warned(True, flows)
    assert any("of its partitions have no complete copy elsewhere, and move first" in note for note in job.notes)
    moved = moves_until_safe(job, going)
    assert moved < moves_until_safe(*warned(False, flows)), "earlier brains moved more before that"
    placement = job.brain.placement
    assert placement is not None and any(placement.owned_by(slot) for slot in going), "they are not empty yet"
    for node in (B, C):
        job.tell(NodeLost(node, "it is gone"))
    late = [n for n in job.notes if "not emptied in time: " in n]
    assert all("; 0 of them have no complete" in n for n in late)
    assert late or flows, "(in a flow, the last ones were complete and switched when the first node was gone)"
    job.settle()
    assert not job.brain.job.over and set(job.nodes.values()) == {HOME_NODE}


def test_what_was_not_safe_in_time_is_said() -> None:
    job = three()
    for node in (B, C):
        job.tell(said.DrainAsked(node, 1.0))
    job.tell(NodeLost(B, "it is gone"))
    (note,) = [n for n in job.notes if "not emptied in time" in n][:1]
    assert "partitions had not moved in time" in note and "; 0 of them" not in note, note
