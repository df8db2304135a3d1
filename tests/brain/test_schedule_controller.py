"""What the controller of step schedules takes from the brain: whose batch shares a step has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.brain.policy_control import PolicyControl, divide
from everstep.brain.schedule_controller import ScheduleController
from everstep.brain.shards import Shards
from everstep.brain.watch import HeartbeatWatch
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot
from everstep.model.plan import AdjustBatch
from everstep.model.shard import ShardSchedule
from everstep.model.step_schedule import StepSchedule, WorkerClock

ONE = Incarnation(1)


@pytest.mark.parametrize(
    ("holding", "left", "divided"), [((0, 1), False, True), ((0,), True, True), ((0,), False, False)]
)
def test_what_is_left_when_no_shard_is_to_be_had_is_not_trained_in_a_slow_ones_batch_share(
    holding: tuple[int, ...], left: bool, divided: bool
) -> None:
    control, spec = PolicyControl(), JobSpec(workers=2, consistency="sync")
    divide(control, (AdjustBatch(batch={Slot(0): 3, Slot(1): 29}),), {Slot(0): ONE, Slot(1): ONE})
    record = SimpleNamespace(running=True, member=SimpleNamespace(incarnation=ONE))
    brain: Any = SimpleNamespace(
        members=SimpleNamespace(workers={Slot(0): record, Slot(1): record}),
        leases={s: SimpleNamespace(worker=Slot(s)) for s in holding},
        state=SimpleNamespace(control=control),
        shards=SimpleNamespace(all_out=not left),
        job=SimpleNamespace(workers_wanted=2),
    )
    told: list[StepSchedule] = []
    controller = ScheduleController(
        brain, HeartbeatWatch(spec), spec, ONE, lambda slot, schedule: told.append(schedule)
    )
    controller.report(Slot(0), ONE, WorkerClock("new", number=1))
    assert {p.slot for p in told[-1].batch_shares} == ({0, 1} if divided else set())


def test_all_shards_are_out_when_none_of_an_epoch_asked_for_is_to_do() -> None:
    shards = Shards()
    assert shards.all_out
    dataset = shards.register(ShardSchedule(name="train", samples=64, shard_samples=16, seed=1))
    dataset.epochs_known = 1
    assert not shards.all_out, "its first epoch has not begun"
    epoch = dataset.epoch(0)
    assert not shards.all_out
    epoch.doing = epoch.shards
    assert shards.all_out
    dataset.epochs_known = 2
    assert not shards.all_out
