"""Faults reach who they are for, refuse nonsense in one line, and are remembered while they run."""

from __future__ import annotations

import math

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import Ok, Refused
from everstep.ids import Incarnation, NodeId, Slot
from everstep.master.fault_injection import FaultInjector
from everstep.model.decision import Decision
from everstep.model.member import Member, MemberKey, MemberState, Role
from everstep.net.messages import FaultAsked, OrderType, SignalProcess, SlowDown

FIRST = Incarnation(1)


class Job:
    """A brain with worker:0 and ps:1, and whoever gets orders."""

    def __init__(self) -> None:
        self.brain = brain = Brain()
        for role, slot in ((Role.WORKER, Slot(0)), (Role.PS, Slot(1))):
            record = brain.members.fill(role, slot, NodeId("node0"), 0.0)
            assert isinstance(record.member, Member)
            record.member.state = MemberState.ALIVE
        self.orders: list[tuple[str, OrderType]] = []
        self.notes: list[str] = []
        self.connected = True
        self.faults = FaultInjector(brain, self.order, self.order_agent, self.note)

    def order(self, key: MemberKey, order: OrderType) -> bool:
        self.orders.append((str(key), order))
        return self.connected

    def order_agent(self, node: NodeId, order: OrderType) -> bool:
        self.orders.append((node, order))
        return self.connected

    def note(self, at: float, member: str, decision: Decision) -> None:
        self.notes.append(f"{member}: {decision}")


def test_orders_go_to_the_member_or_its_agent() -> None:
    job = Job()
    one = (Role.PS, Slot(1), FIRST)
    assert job.faults.ask(FaultAsked("slow", "worker:0", 4.0, 60.0), 10.0) == Ok()
    assert job.faults.ask(FaultAsked("stop", "ps:1", for_s=5.0), 10.0) == Ok()
    assert job.orders == [("worker:0", SlowDown(4.0, 60.0)), ("node0", SignalProcess(*one, "stop", 5.0))]
    assert [(d.target, d.until) for d in job.faults.running(11.0)] == [("worker:0", 70.0), ("ps:1", 15.0)]
    assert [d.target for d in job.faults.running(20.0)] == ["worker:0"]
    assert job.notes[0] == "worker:0: fault: 4 times slower for 60 s"


def test_heal_ends_all_of_them_those_of_an_earlier_master_too() -> None:
    job = Job()
    job.faults.ask(FaultAsked("slow", "worker:0", 4.0, 60.0), 10.0)
    job.orders.clear()
    assert job.faults.ask(FaultAsked("heal"), 11.0) == Ok()
    goes_on = SignalProcess(Role.PS, Slot(1), FIRST, "go")
    healed = [("worker:0", SlowDown(1.0, 0.0)), ("ps:1", SlowDown(1.0, 0.0)), ("node0", goes_on)]
    assert all(order in job.orders for order in healed) and not job.faults.running(11.0)


def test_a_fault_ends_with_its_process() -> None:
    job = Job()
    job.faults.ask(FaultAsked("slow", "worker:0", 4.0, 60.0), 10.0)
    job.faults.ask(FaultAsked("slow", "ps:1", 4.0, 60.0), 10.0)
    record = job.brain.members.workers[Slot(0)]
    record.member.incarnation = Incarnation(2)
    assert [d.target for d in job.faults.running(11.0)] == ["ps:1"]


@pytest.mark.parametrize(
    "fault",
    [
        FaultAsked("slow", "worker:0", 0.5, 60.0),
        FaultAsked("slow", "worker:0", math.nan, 60.0),
        FaultAsked("slow", "worker:0", math.inf, 60.0),
        FaultAsked("slow", "worker:0", 4.0, -1.0),
        FaultAsked("stop", "ps:1", for_s=1e9),
        FaultAsked("kill", "worker:9"),
        FaultAsked("kill", "master:0"),
        FaultAsked("kill", "worker:-1"),
        FaultAsked("kill", "\u0661"),
        FaultAsked("slow", "", 4.0, 60.0),
    ],
)
def test_nonsense_is_refused_and_nobody_hears_of_it(fault: FaultAsked) -> None:
    job = Job()
    answer = job.faults.ask(fault, 10.0)
    assert isinstance(answer, Refused) and "\n" not in answer.error
    assert not job.orders and not job.faults.running(10.0)


def test_who_cannot_be_reached_is_told() -> None:
    job = Job()
    job.connected = False
    answer = job.faults.ask(FaultAsked("slow", "worker:0", 4.0, 60.0), 10.0)
    assert isinstance(answer, Refused) and "connection" in answer.error
    assert not job.faults.running(10.0)
