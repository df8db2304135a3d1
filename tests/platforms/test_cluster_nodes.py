"""What a job asks a cluster for, gives back, and makes of what it shows: without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.brain.events import CapacityChanged, Event
from everstep.cli.capacity import remember_once
from everstep.cli.cluster_platform import held_by_journal
from everstep.cli.replay import JOURNAL_FILE
from everstep.errors import PlatformError
from everstep.ids import Incarnation, NodeId
from everstep.model.capacity import CapacityNews, CapacityStep, Gone, Grant, Market, Offer, Warned
from everstep.platforms.cluster_capacity import (
    STATE_FILE,
    ClusterAgents,
    ClusterCapacity,
    ClusterMemory,
    ClusterState,
    new_state,
    read_state,
)
from everstep.platforms.cluster_nodes import (
    APPEAR_S,
    STEADY_S,
    TRIES,
    AddNodes,
    CancelNode,
    ClusterNodes,
    NodeState,
    SayLine,
    SeenNode,
)
from everstep.platforms.fleet import Remember
from everstep.storage.journal import Journal

OFFER = Offer("", "p")
ONE, TWO = NodeId("c-1"), NodeId("c-2")


def seen(node: str, state: NodeState = NodeState.RUNNING, **more: object) -> SeenNode:
    return SeenNode(NodeId(node), state, OFFER, **more)  # type: ignore[arg-type]


def with_nodes(count: int, now: float = 0.0) -> ClusterNodes:
    """Return the nodes of a job that has ``count``, all of them running."""
    nodes = ClusterNodes("c", 60.0)
    nodes.request(count)
    nodes.look(now, [])
    nodes.look(now, [seen(f"c-{n}") for n in range(1, count + 1)])
    return nodes


def test_nodes_are_asked_for_once_and_granted_when_they_run() -> None:
    nodes = ClusterNodes("c", 60.0)
    nodes.request(2)
    assert nodes.look(0.0, []) == ([], [AddNodes((ONE, TWO))])
    assert nodes.look(1.0, []) == ([], [])
    asked = [seen("c-1", NodeState.ASKED), seen("c-2")]
    assert nodes.look(2.0, asked) == ([Grant(TWO, OFFER)], [])
    assert nodes.look(3.0, [seen("c-1"), seen("c-2")]) == ([Grant(ONE, OFFER)], [])
    assert nodes.look(4.0, [seen("c-1"), seen("c-2")]) == ([], [])


def test_a_node_that_never_appears_is_asked_for_under_another_name() -> None:
    nodes = ClusterNodes("c", 60.0)
    nodes.request(1)
    nodes.look(0.0, [])
    assert nodes.look(APPEAR_S - 1, []).actions == []
    assert nodes.look(APPEAR_S, []) == ([], [AddNodes((TWO,))])


def test_a_node_that_goes_is_told_of_once_and_replaced_before_its_end() -> None:
    nodes = with_nodes(1)
    assert nodes.look(1.0, [seen("c-1", left_s=61.0)]) == ([], [])
    assert nodes.look(2.0, [seen("c-1", left_s=60.0)]) == ([Warned(ONE, 60.0)], [AddNodes((TWO,))])
    assert nodes.look(3.0, [seen("c-1", NodeState.LEAVING, left_s=59.0), seen("c-2", NodeState.ASKED)]) == ([], [])
    assert nodes.going(12.0) == {ONE: 50.0}
    assert nodes.look(4.0, [seen("c-2")]) == ([Grant(TWO, OFFER), Gone(ONE)], [])


def test_a_lost_node_is_replaced_at_once_and_what_it_left_is_cancelled() -> None:
    nodes = with_nodes(2)
    look = nodes.look(1.0, [seen("c-1", NodeState.ENDED), seen("c-2")])
    assert look == ([Gone(ONE)], [CancelNode(ONE), AddNodes((NodeId("c-3"),))])
    again = nodes.look(2.0, [seen("c-1", NodeState.ENDED), seen("c-2")])
    assert again == ([], [CancelNode(ONE)]), "harmless, and no news"


def test_agents_that_cannot_start_are_tried_again_later_and_not_for_ever() -> None:
    nodes = ClusterNodes("c", 60.0)
    nodes.request(1)
    now, asked, said = 0.0, 0, []
    newest = nodes.look(now, []).actions
    while now < 10_000.0:
        added = [a for a in newest if isinstance(a, AddNodes)]
        said += [a.text for a in newest if isinstance(a, SayLine)]
        asked += len(added)
        now += 1.0
        found = [seen(added[0].nodes[0], NodeState.ENDED, failed=True, why="no script")] if added else []
        newest = nodes.look(now, found).actions
    assert asked == TRIES == len(said) and "no script" in said[0] and "no more nodes" in said[-1]
    nodes.request(2)
    assert any(isinstance(a, AddNodes) for a in nodes.look(now + 1, []).actions), "another number asks anew"


def test_a_failure_after_a_while_counts_as_no_start() -> None:
    nodes = with_nodes(1)
    look = nodes.look(STEADY_S, [seen("c-1", NodeState.ENDED, failed=True)])
    assert look.actions == [CancelNode(ONE), AddNodes((TWO,))]


def test_the_end_of_the_job_asks_for_nothing_more() -> None:
    nodes = with_nodes(2)
    look = nodes.look(1.0, [seen("c-1", NodeState.ENDED, done=True), seen("c-2")])
    assert look == ([Gone(ONE)], [CancelNode(ONE)])
    nodes.request(0)
    assert nodes.look(2.0, [seen("c-2")]).actions == [CancelNode(TWO)]
    nodes.request(1)  # (it was suspended, and goes on)
    assert nodes.look(3.0, [seen("c-2", NodeState.ENDED)]).actions == [CancelNode(TWO), AddNodes((NodeId("c-3"),))]


def test_fewer_wanted_takes_back_what_waits_and_leaves_what_runs() -> None:
    nodes = ClusterNodes("c", 60.0)
    nodes.request(3)
    nodes.look(0.0, [])
    found = [seen("c-1"), seen("c-2", NodeState.ASKED), seen("c-3", NodeState.ASKED)]
    nodes.look(1.0, found)
    nodes.request(2)
    assert nodes.look(2.0, found).actions == [CancelNode(NodeId("c-3"))]
    nodes.request(1)
    assert CancelNode(TWO) in nodes.look(3.0, found[:2]).actions
    assert nodes.release(ONE) == [CancelNode(ONE)]


def test_a_run_that_was_started_again_takes_over_what_is_there() -> None:
    nodes = ClusterNodes("c", 60.0, number=7)
    nodes.request(2)
    look = nodes.look(0.0, [seen("c-3"), seen("c-5", NodeState.ENDED)])
    assert look.news == [Grant(NodeId("c-3"), OFFER)]
    assert look.actions == [CancelNode(NodeId("c-5")), AddNodes((NodeId("c-8"),))]


def test_what_the_run_before_had_and_is_no_more_is_granted_and_gone() -> None:
    """So the journal, which has the grant, hears of the end too, and nobody pays for a node that is no more."""
    gone, ended, here, late = (NodeId(f"c-{n}") for n in (1, 2, 3, 4))
    nodes = ClusterNodes("c", 60.0, number=7, before=dict.fromkeys((gone, ended, here, late), OFFER))
    nodes.request(2)
    found = [seen("c-2", NodeState.ENDED), seen("c-3"), seen("c-4", NodeState.ASKED)]
    look = nodes.look(0.0, found)
    assert look.news == [Grant(ended, OFFER), Gone(ended), Grant(here, OFFER), Grant(gone, OFFER), Gone(gone)]
    assert look.actions == [CancelNode(ended)]
    nodes.request(1)
    assert nodes.look(1.0, found[1:]) == ([], []), "an actor that has not answered yet is not one that waits"
    assert nodes.look(2.0, [seen("c-3")]).news == [Grant(late, OFFER), Gone(late)]


def test_each_grant_is_told_to_the_journal_once_over_all_runs(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    def tell(fact: Remember) -> None:
        if fact.grant.node == "c-9":
            raise PlatformError("the master does not answer")
        told.append((fact.grant.node, fact.step.value))

    first = ClusterMemory(tmp_path, new_state("job", "a:1"))
    for node in (ONE, TWO):
        remember_once(Remember(Grant(node, OFFER), CapacityStep.GRANTED), first, tell)
    remember_once(Remember(Grant(ONE, OFFER), CapacityStep.WARNED), first, tell)
    with pytest.raises(PlatformError):
        remember_once(Remember(Grant(NodeId("c-9"), OFFER), CapacityStep.GRANTED), first, tell)
    first.keep(9)
    state = read_state(tmp_path)  # (here everstep run was killed)
    assert state is not None and state.number == 9 and state.held == {ONE: OFFER, TWO: OFFER}
    told.clear()
    second = ClusterMemory(tmp_path, state)
    steps = CapacityStep.GRANTED, CapacityStep.TAKEN_BACK, CapacityStep.GRANTED
    for step in steps:
        remember_once(Remember(Grant(ONE, OFFER), step), second, tell)
    assert told == [("c-1", "taken back"), ("c-1", "granted")]
    elsewhere = new_state("job", "b:1", read_state(tmp_path))
    assert elsewhere.group != state.group and elsewhere.held == {ONE: OFFER, TWO: OFFER} and elsewhere.number == 9
    second.forget()
    last = read_state(tmp_path)
    assert last is not None and last.held == {} and last.number == 9


def test_what_the_journal_says_counts_where_everstep_run_was_killed_before_it_noted_it(tmp_path: Path) -> None:
    told = CapacityStep.GRANTED, CapacityStep.GIVEN_BACK
    facts: list[CapacityChanged] = [CapacityChanged(NodeId(f"c-{n}"), told[0], zone="p") for n in (1, 2, 3)]
    facts += [CapacityChanged(ONE, told[1]), CapacityChanged(TWO, CapacityStep.WARNED)]
    noted = ClusterState("g", "a:1", 3, {ONE: OFFER})
    assert held_by_journal(tmp_path, noted) == {ONE: OFFER}, "it had not begun"
    journal = Journal(tmp_path / JOURNAL_FILE, Incarnation(1))
    for fact in facts:
        journal.append(Event(1.0, fact))
    journal.flush()
    assert held_by_journal(tmp_path, noted) == {TWO: OFFER, NodeId("c-3"): OFFER}
    memory = ClusterMemory(tmp_path, noted)
    memory.forget()  # (the job is suspended)
    memory.keep(4)
    journal.append(Event(2.0, CapacityChanged(NodeId("c-4"), told[0], zone="p")))
    journal.close()
    state = read_state(tmp_path)
    assert state is not None and state.forgot == 3
    assert held_by_journal(tmp_path, state) == {NodeId("c-4"): OFFER}, "a suspended job holds nothing"


def test_a_state_of_before_has_nothing_held(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b'{"group": "everstep-j-1", "at": "a:1", "number": 3}')
    assert read_state(tmp_path) == ClusterState("everstep-j-1", "a:1", 3, {})


class World:
    """Is a cluster that does as it likes: the truth that looks show, perhaps late."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.names: list[str] = []
        self.fails = False

    name, every_s = "world", 1.0

    def offers(self) -> tuple[Offer, ...]:
        return ()

    def look(self) -> list[SeenNode]:
        return [seen(n, s) for n, s in self.nodes.items()]

    def add(self, nodes: Sequence[NodeId]) -> None:
        if self.fails:
            raise PlatformError("world: no")
        for node in nodes:
            assert node not in self.names, "a name is used once"
            self.names.append(node)
            self.nodes[node] = NodeState.ASKED

    def cancel(self, node: NodeId) -> None:
        self.nodes.pop(node, None)

    def close(self) -> None:
        self.nodes.clear()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["run", "leave", "end", "vanish", "want", "restart", "refuse", "look"]), st.integers(0, 5)
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_a_cluster_does_the_job_gets_its_nodes_and_leaves_none(steps: list[tuple[str, int]]) -> None:
    world, now, number, wanted = World(), [0.0], [0], 2
    kept = number
    held: set[str] = set()
    journal: dict[NodeId, Offer] = {}  # (what the journal says that the job has)

    def made() -> ClusterCapacity:
        nodes = ClusterNodes("c", 60.0, kept[0], dict(journal))
        capacity = ClusterCapacity(world, nodes, lambda n: kept.__setitem__(0, n), lambda _: None, lambda: now[0])
        capacity.request(wanted)
        return capacity

    capacity = made()

    def watch() -> None:
        now[0] += 2.0
        try:
            told: tuple[CapacityNews, ...] = capacity.watch()
        except PlatformError:
            return
        for one in told:
            if isinstance(one, Grant):
                assert one.node not in held, "granted once"
                held.add(one.node)
                journal[one.node] = OFFER
            elif isinstance(one, Gone):
                held.remove(one.node)
                del journal[one.node]

    for what, which in steps:
        names = sorted(world.nodes)
        node = names[which % len(names)] if names else ""
        match what:
            case "run" | "leave" | "end" if node and world.nodes[node] is not NodeState.ENDED:
                world.nodes[node] = {"run": NodeState.RUNNING, "leave": NodeState.LEAVING, "end": NodeState.ENDED}[what]
            case "vanish" if node:
                del world.nodes[node]
            case "want":
                wanted = 1 + which % 3
                capacity.request(wanted)
            case "restart":
                held.clear()
                capacity = made()
            case "refuse":
                world.fails = not world.fails
            case _:
                pass
        watch()
    world.fails = False
    for _ in range(120):
        watch()
        for name, state in world.nodes.items():
            if state is not NodeState.ENDED:
                world.nodes[name] = NodeState.RUNNING
    assert len(held) >= wanted and held == set(world.nodes) == set(journal)
    capacity.request(0)
    assert world.nodes == {}


def test_what_the_cluster_refuses_loses_no_news_and_is_asked_for_again() -> None:
    world, now = World(), [0.0]
    capacity = ClusterCapacity(world, ClusterNodes("c", 60.0), lambda _: None, lambda _: None, lambda: now[0])
    capacity.request(1)
    capacity.watch()
    world.nodes["c-1"] = NodeState.RUNNING
    capacity.request(2)
    world.fails = True
    with pytest.raises(PlatformError):
        capacity.watch()
    world.fails, now[0] = False, 100.0
    assert capacity.watch() == (Grant(ONE, OFFER),) and len(world.nodes) == 2
    capacity.request(5, Market.ON_DEMAND)
    assert capacity.watch() == () and len(world.nodes) == 2, "there is one kind of node"


def test_agents_are_waited_for_at_the_end_and_none_is_asked_for_meanwhile() -> None:
    world = World()
    capacity = ClusterCapacity(world, ClusterNodes("c", 60.0), lambda _: None, lambda _: None, lambda: 0.0)
    drained: list[tuple[NodeId, float | None]] = []
    agents = ClusterAgents(capacity, lambda node, in_s: drained.append((node, in_s)))
    capacity.request(2)
    agents.close(5.0)
    assert world.nodes == {}
    agents.warn(ONE, 3.0)
    assert drained == [(ONE, 3.0)] and agents.ended() == ()
