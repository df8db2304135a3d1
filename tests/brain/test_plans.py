"""What a policy's plan does in mode ps: each action once, however often the same plan comes; what cannot be, costs
nothing."""

from __future__ import annotations

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    DrainAsked,
    Event,
    InstructionType,
    MasterStarted,
    MemberJoined,
    MemberSilent,
    MirrorsReady,
    NodeJoined,
    Note,
    PartitionsReady,
    PlanMade,
    ProcessExited,
    PublishPlacement,
    StartProcess,
    by_ps,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.decision import Decision
from everstep.model.member import Address, Role
from everstep.model.plan import (
    Action,
    AdjustAccum,
    AdjustBatch,
    BackupWorkers,
    KillRestart,
    MovePartitions,
    Plan,
    Scale,
)
from everstep.model.reasons import Arrival

NODE, ONE = NodeId("node0"), Incarnation(1)


def job(ps: int) -> Brain:
    brain = Brain()
    brain.handle(Event(1.0, MasterStarted(ONE, JobSpec(workers=2, ps=ps, partitions=4, consistency="sync"))))
    brain.handle(Event(2.0, NodeJoined(NODE, "", 0, 0)))
    for slot in map(Slot, range(ps)):
        brain.handle(Event(3.0, MemberJoined(Role.PS, slot, ONE, NODE, 1, Address(NODE, f"ps{slot}"))))
    for slot in map(Slot, range(2)):
        brain.handle(Event(4.0, MemberJoined(Role.WORKER, slot, ONE, NODE, 1)))
    return brain


def follow(brain: Brain, at: float, *actions: Action) -> list[InstructionType]:
    """What else than notes comes of a plan."""
    made = brain.handle(Event(at, PlanMade("mine:own", Plan(actions=actions, decision=Decision("try", "a test")))))
    brain.validate()
    return [i for i in made if not isinstance(i, Note)]


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (Scale(workers=3), StartProcess),
        (MovePartitions(owners={PartitionId(0): Slot(1)}), PublishPlacement),
        (BackupWorkers(backup=1), None),
    ],
)
def test_the_same_plan_twice_changes_nothing(action: Action, kind: type[object] | None) -> None:
    brain = job(ps=2)
    first = follow(brain, 10.0, action)
    assert any(isinstance(i, kind) for i in first) if kind is not None else not first
    control = brain.state.control
    before = (brain.job.workers_wanted, control.backup, brain.placement)
    assert not follow(brain, 11.0, action)
    assert (brain.job.workers_wanted, control.backup, brain.placement) == before


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (KillRestart(role=Role.WORKER, slot=Slot(1), incarnation=ONE), "worker:1 #1 is gone"),
        (
            KillRestart(role=Role.WORKER, slot=Slot(0), incarnation=ONE),
            "without worker:0 there would be fewer than min_workers=1",
        ),
        (MovePartitions(owners={PartitionId(0): Slot(7)}), "ps:7 is gone"),
        (AdjustBatch(batch={Slot(1): 4}), "worker:1 is gone"),
        (AdjustAccum(accum={Slot(9): 4}), "worker:9 is gone"),
        (Scale(workers=9), "9 workers: more than 4 times the 2 it was begun with"),
    ],
)
def test_a_plan_for_somebody_who_has_left_is_dropped_and_said(action: Action, why: str) -> None:
    brain = job(ps=2)
    brain.handle(Event(9.0, MemberSilent(Role.WORKER, Slot(1), ONE, 99.0, True)))
    notes = brain.handle(Event(10.0, PlanMade("mine:own", Plan(actions=(action,), decision=Decision("try", "a test")))))
    assert [str(n.decision) for n in notes if isinstance(n, Note)] == [f"drop a plan: try: a test: {why}"]
    assert len(notes) == 1 and brain.state.control.plan is None and not brain.state.control.disabled


def test_workers_and_ps_are_scaled_by_one_plan() -> None:
    brain = job(ps=2)
    started = follow(brain, 10.0, Scale(workers=3, ps=4))
    roles = sorted(str(i.role) for i in started if isinstance(i, StartProcess))
    assert roles == ["ps", "ps", "worker"] and (brain.job.workers_wanted, brain.job.ps_wanted) == (3, 4)
    assert not follow(brain, 11.0, Scale(workers=3, ps=4)), "the same plan twice changes nothing"


@pytest.mark.parametrize(
    ("bounds", "action", "why"),
    [
        ({}, Scale(workers=2, ps=9), "9 ps: more than 4 times the 2 it was begun with"),
        ({"max_workers": 12}, Scale(workers=13), "13 workers: more than max_workers=12"),
        ({"max_ps": 3}, Scale(workers=2, ps=4), "4 ps: more than max_ps=3"),
        ({"min_ps": 2}, Scale(workers=2, ps=1), "1 ps: fewer than min_ps=2"),
        (
            {"max_ps": 100},
            Scale(workers=2, ps=65),
            "65 ps: more than the job's 4 partitions, so some would own nothing",
        ),
    ],
)
def test_a_plan_beyond_the_bounds_of_the_job_is_dropped_whole(bounds: dict[str, int], action: Scale, why: str) -> None:
    brain = job(ps=2)
    brain.job.spec = msgspec.structs.replace(brain.job.spec, **bounds)
    notes = brain.handle(Event(10.0, PlanMade("mine:own", Plan(actions=(action,), decision=Decision("try", "a test")))))
    assert [str(n.decision) for n in notes if isinstance(n, Note)] == [f"drop a plan: try: a test: {why}"]
    assert (brain.job.workers_wanted, brain.job.ps_wanted) == (2, 2)


def test_more_workers_than_four_times_the_first_where_the_job_names_a_bound() -> None:
    brain = job(ps=2)
    brain.job.spec = msgspec.structs.replace(brain.job.spec, max_workers=12)
    assert len(follow(brain, 10.0, Scale(workers=12))) == 10


def test_partitions_move_also_when_a_ps_was_drained_and_its_slot_stays_empty() -> None:
    brain = job(ps=3)
    brain.handle(Event(10.0, DrainAsked("ps:2", 30.0)))
    kill = KillRestart(role=Role.PS, slot=Slot(2), incarnation=ONE)
    assert not follow(brain, 10.5, kill), "it would come back, and was to go for good"
    move = MovePartitions(owners={PartitionId(0): Slot(1)})
    assert not follow(brain, 11.0, move), "partitions are under way"
    assert brain.placement is not None
    for mirror in brain.placement.mirrors:
        brain.handle(Event(12.0, MirrorsReady((mirror.id,)), by_ps(mirror.at, ONE)))
    owned = brain.placement.owned_by(Slot(1))
    brain.handle(
        Event(13.0, PartitionsReady(brain.placement.version, tuple(owned), Arrival.PROMOTED), by_ps(Slot(1), ONE))
    )
    brain.handle(Event(14.0, ProcessExited(Role.PS, Slot(2), ONE, 0)))
    assert not brain.members.servers[Slot(2)].running
    assert follow(brain, 15.0, move)


def test_a_restart_for_which_there_is_no_place_costs_no_budget() -> None:
    brain = job(ps=1)
    kill = KillRestart(role=Role.PS, slot=Slot(0), incarnation=ONE)
    assert not follow(brain, 10.0, kill), "nobody could take its partitions"
    assert (brain.state.control.restarts, brain.state.control.restarted_at) == (0, 0.0)
    assert follow(brain, 11.0, KillRestart(role=Role.WORKER, slot=Slot(1), incarnation=ONE))
    assert brain.state.control.restarts == 1
    assert not follow(brain, 12.0, KillRestart(role=Role.WORKER, slot=Slot(1), incarnation=ONE)), "it is on its way"
    assert brain.state.control.restarts == 1
