"""Whether a worker whose script raised is tried again."""

from __future__ import annotations

import pytest

from everstep.brain.failures import judge
from everstep.brain.members import Members, Node, SlotRecord
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.failure import Cause, Failure, pause_s
from everstep.model.member import Member, MemberState, Role

HERE, THERE = NodeId("node0"), NodeId("b")


def members(*nodes: NodeId) -> Members:
    found = Members()
    for node in nodes:
        found.nodes[node] = Node(node, "", 0 if node == HERE else 2, 0)
    for slot in (Slot(0), Slot(1)):
        member = Member(role=Role.WORKER, slot=slot, incarnation=Incarnation(1), node=HERE, since=0.0)
        member.state = MemberState.ALIVE
        found.workers[slot] = SlotRecord(member)
    return found


def said(
    found: Members,
    slot: int,
    cause: Cause,
    *,
    where: str = "E (a.py line 1)",
    steps: int = 0,
    at: int = 0,
    reached: int = 0,
) -> str:
    return judge(Failure(cause, where, steps, reached=reached), found.workers[Slot(slot)], found, 3, at)


def test_a_mistake_is_not_tried_again() -> None:
    found = members(HERE, THERE)
    assert said(found, 0, "script") and judge(None, found.workers[Slot(0)], found, 3, 0)


def test_data_are_tried_again_until_the_tries_are_used_up_and_anew_after_a_step() -> None:
    found = members(HERE)
    assert [bool(said(found, 0, "data")) for _ in range(4)] == [False, False, False, True]
    assert said(found, 0, "data", steps=1), "the job got no further than before"
    assert not said(found, 0, "data", steps=1, at=5)
    assert [bool(said(found, 0, "data", at=9)) for _ in range(3)] == [False, False, True]


def test_who_trains_the_same_again_and_fails_behind_the_loop_gets_nowhere() -> None:
    """The only worker of mode allreduce: its state goes with each try."""
    found = members(HERE)
    assert [bool(said(found, 0, "data", steps=40, at=40)) for _ in range(4)] == [False, False, False, True]


def test_steps_that_the_master_did_not_hear_of_before_a_try_raised_are_no_progress_of_the_next_one() -> None:
    """Each try trains the same 24 steps; how many of them the master knows by then is a matter of timing."""
    found = members(HERE)
    known = (20, 21, 22, 23)
    assert [bool(said(found, 0, "data", steps=24, at=at, reached=24)) for at in known] == [False, False, False, True]


def test_an_outage_that_hits_all_workers_is_nobodys_mistake() -> None:
    found = members(HERE)
    assert not said(found, 0, "data") and not said(found, 1, "data")


@pytest.mark.parametrize("cause", ["memory", "device"])
def test_the_same_at_the_same_place_again_is_the_scripts(cause: Cause) -> None:
    found = members(HERE)
    assert not said(found, 0, cause)
    assert "again" in said(found, 0, cause)
    found = members(HERE)
    assert not said(found, 0, cause)
    assert not said(found, 0, cause, where="E (a.py line 2)")


@pytest.mark.parametrize("cause", ["memory", "device"])
def test_the_same_at_a_second_worker_is_the_scripts_unless_the_job_got_on_between(cause: Cause) -> None:
    found = members(HERE)
    assert not said(found, 0, cause, at=7)
    assert "worker:0" in said(found, 1, cause, at=7)
    found = members(HERE)
    assert not said(found, 0, cause, at=7)
    assert not said(found, 1, cause, at=8)


def test_what_is_missing_on_a_node_is_looked_for_on_another_one() -> None:
    assert said(members(HERE), 0, "node")
    found = members(HERE, THERE)
    assert not said(found, 0, "node")
    assert found.workers[Slot(0)].avoid == HERE


def test_the_next_try_waits_longer_each_time_but_not_for_ever() -> None:
    waits = [pause_s(n) for n in range(12)]
    assert waits[0] == 0.0 and waits[1] == 0.5 and waits == sorted(waits) and waits[-1] == 30.0
