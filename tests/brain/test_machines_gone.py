"""A machine that its source took back is lost at once, and late word of it does not end the next one of that name."""

from __future__ import annotations

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import CapacityChanged, Event, LossNote, MasterStarted, MemberJoined, NodeJoined, NodeLost
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.capacity import RETURNS_A_LIFE, CapacityStep
from everstep.model.member import Role

SPOT = NodeId("spot-1")


def begun() -> Brain:
    """A job whose worker:1 runs on the second machine of the name spot-1."""
    brain = Brain()
    for at, fact in enumerate(
        (
            MasterStarted(Incarnation(1), JobSpec(workers=1, ps=1)),
            NodeJoined(NodeId("node0"), "", 0, 0),
            NodeJoined(SPOT, "h", 1, 0, returns=RETURNS_A_LIFE),
            MemberJoined(Role.WORKER, Slot(1), Incarnation(1), SPOT, 7),
        )
    ):
        brain.handle(Event(float(at), fact))
    assert brain.members.workers[Slot(1)].running
    return brain


@pytest.mark.parametrize("step", list(CapacityStep))
@pytest.mark.parametrize("life", [0, 1, 2])
def test_word_of_a_machine_counts_for_its_life(step: CapacityStep, life: int) -> None:
    brain = begun()
    out = brain.handle(Event(10.0, CapacityChanged(SPOT, step, life=life)))
    gone = step in (CapacityStep.TAKEN_BACK, CapacityStep.GIVEN_BACK) and life >= 1
    assert brain.members.nodes[SPOT].alive is not gone
    assert any(isinstance(i, LossNote) for i in out) is gone
    assert brain.members.workers[Slot(1)].running is not gone
    # its silence, which the watch notices later, changes nothing any more
    again = brain.handle(Event(18.0, NodeLost(SPOT, "silent")))
    assert (again == []) is gone
    brain.validate()


def test_a_machine_that_never_said_hello_is_only_noted() -> None:
    brain = begun()
    before = brain.job.failures.node
    brain.handle(Event(10.0, CapacityChanged(NodeId("spot-2"), CapacityStep.TAKEN_BACK)))
    assert brain.job.failures.node == before and NodeId("spot-2") not in brain.members.nodes
