"""States of slots and of the group: the tables, their diagrams in the docs, and the check of a change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import Event, MasterStarted, MemberJoined, NodeJoined
from everstep.brain.job import FailureCounts, JobRules
from everstep.brain.states import (
    DIAGRAMS,
    GROUP_TRANSITIONS,
    SLOT_TRANSITIONS,
    GroupState,
    SlotState,
    StateCheck,
    slot_state,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import MemberState, Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"
ONE, NODE = Incarnation(1), NodeId("node0")


def test_the_page_shows_the_tables() -> None:
    for diagram in DIAGRAMS.values():
        assert f"```mermaid\n{diagram}```" in PAGE.read_text(), f"docs/states.md is to have this diagram:\n{diagram}"


@pytest.mark.parametrize("states", [SlotState, GroupState])
def test_every_state_is_in_its_table(states: type[SlotState] | type[GroupState]) -> None:
    table = SLOT_TRANSITIONS if states is SlotState else GROUP_TRANSITIONS
    assert set(table) == set(states)
    assert all(state not in moves and set(moves) <= set(states) for state, moves in table.items())


def test_a_change_that_is_no_transition_is_found() -> None:
    brain, check = Brain(), StateCheck()
    brain.handle(Event(0.0, MasterStarted(ONE, JobSpec(workers=1, ps=0, mode="allreduce"), True)))
    check.look(brain)
    brain.handle(Event(1.0, NodeJoined(NODE, "", 0, 0)))
    check.look(brain)
    brain.handle(Event(2.0, MemberJoined(Role.WORKER, Slot(0), ONE, NODE, 7)))
    check.look(brain)
    record = brain.members.workers[Slot(0)]
    assert slot_state(record) is SlotState.ALIVE
    record.member.state = MemberState.LEFT
    check.look(brain)
    record.member.state = MemberState.ALIVE  # a process that has ended is back
    with pytest.raises(AssertionError, match="worker:0 #1 went from left to alive, by nothing"):
        check.look(brain, "nothing")


def test_a_snapshot_of_a_version_before_is_read_or_refused_in_one_line() -> None:
    state = msgspec.msgpack.decode(Brain().snapshot())
    state["version"] = 4
    with pytest.raises(msgspec.ValidationError, match="snapshot version 4, this everstep reads 5 to 8"):
        Brain.restore(msgspec.msgpack.encode(state))
    state["version"] = 7
    del state["job"]["failures"], state["job"]["rules"]
    state["job"] |= {"worker_failures": 3, "ps_failures": 2, "master_failures": 1, "node_failures": 4}
    state["job"]["settles"] = True
    job = Brain.restore(msgspec.msgpack.encode(state)).job
    assert job.failures == FailureCounts(3, 2, 1, 4) and job.rules == JobRules(settles=True)
    state["version"] = 6
    for part, (first, second) in (("start", ("resumed", "resumed_from")), ("failed_loads", ("refused", "aside"))):
        state["checkpoints"][first], state["checkpoints"][second] = state["checkpoints"].pop(part)
    state["checkpoints"] |= {
        "resumed": 4,
        "resumed_from": "/there",
        "refused": {7: ["ps:1: it was killed"]},
        "aside": 7,
    }
    restored = Brain.restore(msgspec.msgpack.encode(state)).checkpoints
    assert (restored.resumed, restored.start.url, restored.aside) == (4, "/there", 7)
    assert restored.failed_loads.by_checkpoint == {7: ["ps:1: it was killed"]}
    for damaged in (
        b"\x93\x01",
        msgspec.msgpack.encode({"version": 5}),
        msgspec.msgpack.encode({"version": 5, "groups": 1}),
    ):
        with pytest.raises(msgspec.ValidationError, match="no snapshot"):
            Brain.restore(damaged)
