"""A job whose first node has the master only: other nodes are places, and bring nobody along."""

from __future__ import annotations

import pytest

from everstep.brain.members import Members, Node, Rooms
from everstep.config.load import load_spec
from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.model.member import Role
from everstep.policies.node_selection import HOME_NODE


def members(*nodes: tuple[str, int, int], counted: bool = True) -> Members:
    found = Members()
    for name, workers, ps in nodes:
        found.joined(Node(NodeId(name), "", workers, ps, counted=counted))
    return found


def test_a_node_takes_what_it_has_places_for_and_nothing_else() -> None:
    alone = members((HOME_NODE, 0, 0))
    assert Rooms(alone, Role.WORKER).choose(None, None) is None
    assert Rooms(alone, Role.PS).choose(None, None) is None
    pods = members((HOME_NODE, 0, 0), ("w", 1, 0), ("p", 0, 1))
    assert Rooms(pods, Role.WORKER).choose(None, None) == "w"
    assert Rooms(pods, Role.PS).choose(None, None) == "p"
    assert Rooms(pods, Role.WORKER).choose(None, NodeId("w")) in ("w", None)


def test_other_jobs_have_a_first_node_that_takes_any_number() -> None:
    usual = members((HOME_NODE, 0, 0), counted=False)
    assert Rooms(usual, Role.WORKER).choose(None, None) == HOME_NODE
    assert Rooms(usual, Role.PS).choose(None, None) == HOME_NODE


def test_it_needs_an_address_for_others() -> None:
    with pytest.raises(ConfigError, match=r"master_alone.*give bind HOST:PORT"):
        load_spec(None, {"master_alone": True}, {})
    assert load_spec(None, {"master_alone": True, "bind": "127.0.0.1:7071"}, {})[0].master_alone
