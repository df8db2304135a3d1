"""Who goes where."""

from __future__ import annotations

from everstep.ids import NodeId
from everstep.policies.node_selection import HOME_NODE, NodeRoom, choose_ps_node, choose_worker_node
from everstep.policies.restarts import is_poison, may_restart

HOME = NodeRoom(HOME_NODE, 0, 5)
ONE = NodeRoom(NodeId("node1"), 2, 1)
TWO = NodeRoom(NodeId("node2"), 4, 0)
FULL = NodeRoom(NodeId("node3"), 1, 1)


def test_the_jobs_own_workers_go_to_the_home_node() -> None:
    assert choose_worker_node([ONE, HOME, TWO], None) == HOME_NODE


def test_without_a_home_node_the_emptiest_node_with_places() -> None:
    assert choose_worker_node([ONE, FULL, TWO], None) == "node2"
    assert choose_worker_node([FULL], None) is None
    assert choose_worker_node([], None) is None


def test_a_slot_that_a_node_brought_goes_back_there() -> None:
    assert choose_worker_node([HOME, TWO, ONE], ONE.node) == "node1"


def test_such_a_slot_never_crowds_the_home_node() -> None:
    assert choose_worker_node([HOME], NodeId("node9")) is None
    assert choose_worker_node([HOME, TWO], NodeId("node9")) == "node2"
    assert choose_worker_node([HOME, FULL], FULL.node) is None


def test_ps_stay_at_home_unless_others_offer_places() -> None:
    assert choose_ps_node([ONE, NodeRoom(HOME_NODE, 0, 0)]) == HOME_NODE
    assert choose_ps_node([NodeRoom(NodeId("node1"), 0, 0)]) is None
    assert choose_ps_node([ONE, TWO, FULL]) == "node2"


def test_budgets() -> None:
    assert may_restart(10, 10) and not may_restart(11, 10)
    assert is_poison(4, 4) and not is_poison(3, 4) and not is_poison(100, 0)
