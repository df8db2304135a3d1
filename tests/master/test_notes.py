"""Which agents show a note: all in a small job, those concerned in a large one."""

from __future__ import annotations

from everstep.brain.members import Members
from everstep.ids import NodeId, Slot
from everstep.master.notes import NOTED_AGENTS_MAX, agents_to_tell
from everstep.model.member import Role


def _agents(joined: int) -> dict[NodeId, str]:
    return {NodeId(f"node{n}"): f"agent {n}" for n in range(joined + 1)}


def _members() -> Members:
    members = Members()
    members.fill(Role.WORKER, Slot(7), NodeId("node3"), 0.0)
    return members


def test_every_joined_node_of_a_small_job_shows_every_note() -> None:
    agents = _agents(NOTED_AGENTS_MAX)
    for member in ("", "worker:7", "worker:8", "node5"):
        told = agents_to_tell(member, agents, _members())
        assert told == [f"agent {n}" for n in range(1, NOTED_AGENTS_MAX + 1)], member


def test_in_a_large_job_a_note_on_a_member_is_for_its_own_node() -> None:
    agents = _agents(NOTED_AGENTS_MAX + 1)
    assert len(agents_to_tell("", agents, _members())) == NOTED_AGENTS_MAX + 1
    assert agents_to_tell("worker:7", agents, _members()) == ["agent 3"]
    assert agents_to_tell("node5", agents, _members()) == ["agent 5"]


def test_a_note_on_nobody_that_is_known_or_on_the_home_node_is_for_the_event_log_alone() -> None:
    agents = _agents(NOTED_AGENTS_MAX + 1)
    for member in ("worker:8", "worker:x", "node999", "node0", "ps:"):
        assert agents_to_tell(member, agents, _members()) == [], member
