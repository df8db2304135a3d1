"""Two losses in a row: a newcomer holds the state as soon as its group has met, and not only when it has trained."""

from __future__ import annotations

import pytest
from test_replica_checkpoints import Script, actions

from everstep.brain.events import Event, GroupSynced, StepsCommitted, by_worker
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot
from everstep.model.group import Committed, Position


def with_newcomer() -> Script:
    """Worker:1 was lost, and its next life has come into the group of worker:0."""
    job = Script(JobSpec(mode="allreduce", workers=2, ps=0))
    job.commit(0, 5, 0, 0, 60)
    job.kill(1)
    job.hire(1)
    job.ask(1)
    agreed(job, 1, job.brain.state.groups.generations)
    group = job.brain.state.groups.group
    assert group is not None
    assert [(m.slot, m.incarnation) for m in group.members] == [(0, 1), (1, 2)]
    return job


def agreed(job: Script, slot: int, generation: int) -> None:
    job.say(Event(0.0, GroupSynced(generation), by_worker(Slot(slot), Incarnation(job.lives[slot]))))


@pytest.mark.parametrize("says", [0, 1, None])
def test_the_other_one_is_lost_before_the_group_has_trained(says: int | None) -> None:
    job = with_newcomer()
    groups = job.brain.state.groups
    lineage = groups.lineage
    if says is not None:
        agreed(job, says, groups.generations)
    job.kill(0)
    job.ask(1, Position(6, 0, 0, 60))
    if says == 0:
        assert groups.lineage == lineage and groups.group is not None
        assert [m.slot for m in groups.group.members] == [1]
        steps = Committed(groups.generations, 6, 6, 0, 0, 60, 68)
        job.say(Event(0.0, StepsCommitted((steps,)), by_worker(Slot(1), Incarnation(2))))
        assert groups.step == 7
    else:  # the newcomer cannot say for the others what the journal has
        assert groups.lineage != lineage or groups.group is None or not job.brain.groups.holds(groups.group.members[0])


def test_said_twice_and_late_it_changes_nothing() -> None:
    job = with_newcomer()
    groups = job.brain.state.groups
    generation = groups.generations
    agreed(job, 0, generation)
    before = job.brain.snapshot()
    agreed(job, 0, generation)
    agreed(job, 0, generation - 1)
    agreed(job, 0, generation + 5)
    after = job.brain.snapshot()
    assert before == after or groups.confirmed == generation
    assert not actions(job.say(Event(0.0, GroupSynced(generation), by_worker(Slot(1), Incarnation(1)))))
