"""Says which agents show a note to people: in a job of thousands of nodes, not all of them each note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from everstep.brain.members import Members
from everstep.ids import NodeId, Slot
from everstep.model.member import Role
from everstep.policies.node_selection import HOME_NODE

NOTED_AGENTS_MAX = 64  # up to so many joined nodes, each shows every note

_Agent = TypeVar("_Agent")


def agents_to_tell(member: str, agents: Mapping[NodeId, _Agent], members: Members) -> list[_Agent]:
    """Return the agents that show a note on ``member`` ("worker:1", a node, "": the job). The home node's does not: it
    reads the event log. If there are more than ``NOTED_AGENTS_MAX`` others, a note on one member is for the agent of
    its node only: 1,000 members that join would be a million lines."""
    joined = len(agents) - (HOME_NODE in agents)
    if not member or joined <= NOTED_AGENTS_MAX:
        return [agent for node, agent in agents.items() if node != HOME_NODE]
    node = NodeId(member)
    role, _, slot = member.partition(":")
    if role in (Role.WORKER, Role.PS) and slot.isdecimal():
        record = members.of(Role(role)).get(Slot(int(slot)))
        node = record.member.node if record is not None else node
    return [agents[node]] if node in agents and node != HOME_NODE else []
