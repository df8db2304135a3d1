"""How many nodes of a cluster a job needs, and which it gives back."""

from __future__ import annotations

import msgspec

from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.job_view import JobView, MemberView, NodeView, ShownState
from everstep.model.member import Role
from everstep.policies.cluster_size import EMPTY_S, NodesWanted, nodes_for, nodes_wanted, places

SPEC = JobSpec(workers=3, ps=3, capacity_workers=1, capacity_ps=1, master_alone=True)


def view(nodes: list[NodeView], workers: int, ps: int, up: bool = True) -> JobView:
    state = ShownState.ALIVE if up else ShownState.WAITING
    members = [
        MemberView(role, Slot(slot), Incarnation(1), NodeId(""), 1, state)
        for role, count in ((Role.WORKER, workers), (Role.PS, ps))
        for slot in range(count)
    ]
    return JobView(
        job="j",
        phase="training",
        at=0.0,
        started_at=0.0,
        master_incarnation=Incarnation(1),
        members=tuple(members),
        members_wanted={"worker": workers, "ps": ps},
        nodes=(NodeView(NodeId("node0")), *nodes),
        epochs=(),
        samples_done=0,
        samples_per_s=0.0,
        batches_retried=0,
        failures={},
        reported={},
    )


def node(name: str, members: int, draining: bool = False, alive: bool = True) -> NodeView:
    return NodeView(NodeId(name), "", alive, draining, min(1, members), max(0, members - 1))


def test_places() -> None:
    assert places(5, 2) == 3 and places(0, 3) == 0
    assert nodes_for(SPEC, 3, 3) == 3 and nodes_for(SPEC, 1, 3) == 3
    alone = msgspec.structs.replace(SPEC, ps=0, capacity_ps=0, capacity_workers=2)
    assert nodes_for(alone, 5, 0) == 3 and nodes_for(alone, 0, 0) == 1


def test_more_members_want_more_nodes() -> None:
    three = [node(f"n{i}", 2) for i in range(3)]
    assert nodes_wanted(SPEC, view(three, 3, 3)) == NodesWanted(3, (), ())
    assert nodes_wanted(SPEC, view(three, 5, 3, up=False)) == NodesWanted(5, (), ())


def test_a_node_too_many_is_emptied_and_then_given_back() -> None:
    nodes = [node("n1", 2), node("n2", 1), node("n3", 1), node("gone", 2, alive=False)]
    assert nodes_wanted(SPEC, view(nodes, 2, 2)) == NodesWanted(2, ((NodeId("n3"), EMPTY_S),), ()), (
        "the newest of the emptiest"
    )
    nodes[2] = node("n3", 1, draining=True)
    assert nodes_wanted(SPEC, view(nodes, 2, 2)) == NodesWanted(2, (), ()), "it takes its time"
    nodes[2] = node("n3", 0, draining=True)
    assert nodes_wanted(SPEC, view(nodes, 2, 2)) == NodesWanted(2, (), (NodeId("n3"),))


def test_an_empty_node_whose_agent_has_left_is_given_back() -> None:
    """Its agent leaves within milliseconds, and waits for its end; the cluster still counts it, so a job that wants one
    more node again would get none."""
    nodes = [node("n1", 2), node("n2", 2), node("n3", 0, draining=True, alive=False)]
    assert nodes_wanted(SPEC, view(nodes, 3, 2, up=False)) == NodesWanted(3, (), (NodeId("n3"),))


def test_nothing_is_emptied_while_somebody_is_missing() -> None:
    nodes = [node("n1", 2), node("n2", 1), node("n3", 0)]
    assert nodes_wanted(SPEC, view(nodes, 2, 2, up=False)) == NodesWanted(2, (), ())


def test_nothing_is_emptied_while_somebody_still_leaves() -> None:
    nodes = [node("n1", 2), node("n2", 1), node("n3", 1)]
    late = MemberView(Role.PS, Slot(2), Incarnation(1), NodeId("n1"), 1, ShownState.LEAVING)
    seen = view(nodes, 2, 2)
    seen = msgspec.structs.replace(seen, members=(*seen.members, late))
    assert nodes_wanted(SPEC, seen) == NodesWanted(2, (), ()), "the place that it has will be needed"


def test_all_empty_nodes_too_many_go_together_and_full_ones_one_by_one() -> None:
    nodes = [node("n1", 2), node("n2", 0), node("n3", 0), node("n4", 2)]
    assert nodes_wanted(SPEC, view(nodes, 1, 1)).empty == (("n3", EMPTY_S), ("n2", EMPTY_S))
    assert nodes_wanted(SPEC, view([nodes[0], nodes[3]], 1, 1)).empty == (("n4", EMPTY_S),)


def test_a_node_that_goes_is_emptied_and_its_replacement_is_not_one_too_many() -> None:
    nodes = [node("n1", 2), node("n2", 0)]
    one = msgspec.structs.replace(SPEC, workers=1, ps=1)
    going = {NodeId("n1"): 40.0}
    assert nodes_wanted(one, view(nodes, 1, 1), going) == NodesWanted(1, ((NodeId("n1"), 40.0),), ())
    nodes[0] = node("n1", 2, draining=True)
    assert nodes_wanted(one, view(nodes, 1, 1), going) == NodesWanted(1, (), ()), "it was told"
