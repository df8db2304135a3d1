"""Machines that stay: which roles stand on them, and when they are asked for in place of spot machines."""

from __future__ import annotations

from test_machines_of_ps import B, C, Job

from everstep.brain import events as said
from everstep.brain.events import CapacityChanged, NodeJoined, SupervisionDue
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep, Market
from everstep.model.member import Role
from everstep.policies.node_selection import HOME_NODE

D = NodeId("on-demand-1")


class Cloud(Job):
    """A job whose workers say hello at once, and whose clock rings when it is due."""

    def tell(self, fact: said.FactType, by: said.Sender = said.MASTER) -> None:
        self.at += 0.1
        out = self.brain.handle(said.Event(self.at, fact, by))
        self.brain.validate()
        for i in out:
            if isinstance(i, said.Note):
                self.notes.append(f"{i.member} {i.decision}".strip())
            elif isinstance(i, said.StartProcess):
                address = said.Address(i.node, f"{i.role}{i.slot}.{i.incarnation}") if i.role is Role.PS else None
                self.tell(said.MemberJoined(i.role, i.slot, i.incarnation, i.node, 7, address))
            elif isinstance(i, said.StopProcess):
                self.tell(said.ProcessExited(i.role, i.slot, i.incarnation, 143))

    def grant(self, node: NodeId, market: Market) -> None:
        self.tell(CapacityChanged(node, CapacityStep.GRANTED, "g5", "z", market, 1.0))
        self.tell(NodeJoined(node, "", 1, 0, market=market))

    def gone(self, node: NodeId, step: CapacityStep = CapacityStep.TAKEN_BACK) -> None:
        self.tell(CapacityChanged(node, step, "g5", "z", Market.SPOT, 1.0))

    def run(self, seconds: float) -> None:
        end = self.at + seconds
        while self.at < end and not self.brain.job.over:
            due = self.brain.state.supervision.due_at
            self.at = min(end, max(self.at, due)) if due else end
            if due and self.at >= due:
                self.tell(SupervisionDue())

    @property
    def asked(self) -> int:
        return self.brain.state.supervision.on_demand

    def said(self, word: str) -> int:
        return sum(word in note for note in self.notes)


def waiting(**fields: object) -> Cloud:
    given = {"workers": 1, "ps": 1, "min_workers": 3, "fallback": "60s", "capacity": "trace:x", "stabilization": "10s"}
    job = Cloud(**(given | fields))
    job.tell(NodeJoined(HOME_NODE, "", 0, 0, market=Market.ON_DEMAND))
    return job


def test_on_demand_machines_are_asked_for_after_the_wait_and_given_back_when_spot_is_enough() -> None:
    job = waiting()
    job.run(50.0)
    assert not job.asked
    job.run(20.0)
    assert job.asked == 2 and job.said("ask for on-demand: 1 of at least 3 workers are there, for 60 s") == 1
    job.grant(D, Market.ON_DEMAND)
    job.grant(NodeId("on-demand-2"), Market.ON_DEMAND)
    assert not job.brain.state.supervision.lack and job.asked == 2
    job.run(600.0)
    assert job.asked == 2, "no spot machine is there: nothing is given back"
    job.grant(B, Market.SPOT)
    job.run(60.0)
    assert job.asked == 2, "one is too few"
    job.grant(C, Market.SPOT)
    job.run(5.0)
    assert job.asked == 2, "they may go again at once"
    job.run(10.0)
    assert job.asked == 0 and job.said("back to spot") == 1
    assert job.brain.members.nodes[D].draining and not job.brain.members.nodes[B].draining
    job.gone(D, CapacityStep.GIVEN_BACK)
    job.gone(NodeId("on-demand-2"), CapacityStep.GIVEN_BACK)
    assert not job.brain.state.supervision.stand_ins and not job.brain.state.supervision.lack


def test_spot_machines_that_flap_do_not_bring_the_job_back() -> None:
    job = waiting(min_workers=2)
    job.run(70.0)
    job.grant(D, Market.ON_DEMAND)
    before = len(job.notes)
    for _ in range(40):  # each second it comes, or goes
        job.grant(B, Market.SPOT)
        job.run(1.0)
        job.gone(B)
        job.run(1.0)
    assert job.asked == 1 and job.said("back to spot") == 0
    assert sum("ask for on-demand" in note for note in job.notes[before:]) == 0


def test_a_machine_that_joins_before_word_of_it_is_a_stand_in() -> None:
    job = waiting(min_workers=2)
    job.run(70.0)
    job.tell(NodeJoined(D, "", 1, 0, market=Market.ON_DEMAND))
    job.run(60.0)
    assert job.asked == 1, "no spot machine is there"
    job.grant(B, Market.SPOT)
    job.run(15.0)
    assert job.asked == 0 and not job.brain.members.nodes[D].draining
    job.tell(CapacityChanged(D, CapacityStep.GRANTED, "g5", "z", Market.ON_DEMAND, 1.0))
    assert job.brain.members.nodes[D].draining


def test_stand_ins_that_are_not_enough_are_more() -> None:
    job = waiting()
    job.grant(B, Market.SPOT)
    job.run(70.0)
    assert job.asked == 1, "one spot machine is there"
    job.grant(D, Market.ON_DEMAND)
    job.gone(B)
    job.tell(SupervisionDue())
    assert job.asked == 2


def test_without_the_setting_or_without_a_wait_nothing_is_asked_for() -> None:
    never = waiting(fallback="off")
    never.run(3600.0)
    assert not never.asked and not never.said("on-demand:")
    enough = waiting(min_workers=1)
    enough.run(3600.0)
    assert not enough.asked


def test_a_new_master_goes_on_with_what_was_asked_for() -> None:
    job = waiting()
    job.run(70.0)
    job.tell(said.MasterStarted(said.Incarnation(2), job.spec, settles=True))
    assert job.asked == 2


# ------------------------------------------------------------ roles on machines that stay


def on_spot(**fields: object) -> Job:
    """Three nodes, of which only the first one stays."""
    job = Job(**({"ps": 3, "parity": "1+1", "nodes": 3, "reliable": ("ps",)} | fields))
    job.tell(NodeJoined(HOME_NODE, "", 1, 0, machine="ma", market=Market.ON_DEMAND))
    for node, machine in ((B, "mb"), (C, "mc")):
        job.tell(NodeJoined(node, "", 1, 8, machine=machine, market=Market.SPOT))
    job.settle()
    return job


def test_ps_stand_on_machines_that_stay() -> None:
    assert set(on_spot().nodes.values()) == {"node0"}
    assert sorted(on_spot(reliable=()).nodes.values()) == ["b", "c", "node0"]


def test_ps_go_to_spot_machines_where_nothing_else_is_there_and_leave_them_later() -> None:
    job = Job(ps=3, parity="1+1", nodes=2, reliable=("ps",))
    job.tell(NodeJoined(HOME_NODE, "", 1, 0, machine="ma", market=Market.SPOT))
    job.tell(NodeJoined(B, "", 1, 8, machine="mb", market=Market.SPOT))
    job.settle()
    assert sorted(job.nodes.values()) == ["b", "b", "node0"] or sorted(job.nodes.values()) == ["b", "node0", "node0"]
    job.tell(NodeJoined(C, "", 1, 8, machine="mc", market=Market.ON_DEMAND))
    job.settle()
    for _ in range(6):
        job.later(20.0)
    assert set(job.nodes.values()) == {"c"}, job.notes[-6:]
    assert any("may be taken back, and mc stays (reliable: ps)" in note for note in job.notes)
    maps = job.maps
    job.later(60.0)
    assert job.maps == maps, "it is at rest"


def test_a_machine_that_stays_and_goes_leaves_ps_to_the_others() -> None:
    job = on_spot()
    job.tell(NodeJoined(NodeId("d"), "", 1, 8, machine="md", market=Market.ON_DEMAND))
    job.settle()
    for _ in range(4):
        job.later(20.0)
    assert set(job.nodes.values()) == {"node0", "d"}
    job.lose(NodeId("d"))
    job.later(20.0)
    assert set(job.nodes.values()) == {"node0"} and job.brain.job.exit_code is None
