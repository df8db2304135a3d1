"""A group that trains under virtual time, seen and steered as in a real job: real step clocks, observer, brain,
controller and policy. Workers beat as the control connection lets them; a plan holds from the next step on."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    FactType,
    GroupAsked,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    PlanMade,
    PlanRegistered,
    by_worker,
)
from everstep.brain.watch import HeartbeatWatch
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.master.observe import Observer
from everstep.master.policy import PolicyController
from everstep.master.readings import Readings
from everstep.model.member import MemberKey, Role
from everstep.model.plan import Plan
from everstep.model.shard import ShardSchedule as DataPlan
from everstep.monitor.stepclock import BARRIER, StepClock
from everstep.policies.step_split import apportion
from everstep.sim.stragglers import Pattern, finish

NODE, ONE = NodeId("node0"), Incarnation(1)
BATCH = 64
SAMPLES, EPOCHS = 10**6, 2
BEAT_S, TICK_S = 0.5, 0.1  # of a control connection
MASTER_S = 0.25  # the master looks without a beat
SYNC_S = 0.004  # a step takes longer than its slowest member
CLOCK_S = 0.01  # of this simulation


@dataclass
class Ran:
    """``steps``: when each ended, and its shares; seconds since the first one began. ``left``: samples, as policies see
    it: nothing of this reaches the journal, so all of them."""

    steps: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    plans: list[tuple[float, Plan]] = field(default_factory=list)
    left: int = 0

    @property
    def wall_s(self) -> float:
        return self.steps[-1][0]


class _Worker:
    def __init__(self, slot: int, rng: random.Random, began_s: float) -> None:
        self.slot, self.now_s = Slot(slot), began_s
        self.clock = StepClock(lambda: round(self.now_s * 1e9))
        self.share = 0
        self.ends_s = 0.0
        self.computes = False
        self.beat_at, self.tick_at, self.between = (
            began_s + BEAT_S * rng.random(),
            began_s + TICK_S * rng.random(),
            False,
        )

    def readings_now(self, at: float) -> dict[str, float] | None:
        """Those of a beat, where one is due."""
        self.now_s = max(self.now_s, at)
        if at < self.tick_at:
            return None
        self.tick_at += TICK_S
        if at >= self.beat_at:
            self.beat_at, self.between = at + BEAT_S, False
        elif not self.between and self.clock.news:
            self.between = True
        else:
            return None
        return {**self.clock.readings(), "global_batch": 0.0}


def run(
    folder: Path,
    policy: str,
    pattern: Pattern,
    workers: int,
    steps: int,
    sample_s: float,
    window_s: float,
    seed: int,
    late_s: Sequence[float] = (),
) -> Ran:
    """``late_s``: by worker, so much longer its own part of the first step takes before it begins."""
    rng = random.Random(seed)
    brain = _brain(workers, policy)
    ran = Ran()

    def tell(fact: FactType) -> None:
        if isinstance(fact, PlanMade):
            ran.plans.append((at - began_s, fact.plan))
        else:
            raise AssertionError(fact)
        brain.handle(Event(at, fact))

    began_s = 10.0
    folder.mkdir(exist_ok=True)
    observer = Observer(brain, Readings(folder), HeartbeatWatch(brain.job.spec), folder)
    observer.windows = type(observer.windows)(window_s)
    controller = PolicyController(brain, brain.job.spec, observer.observe, window_s, tell)
    members = [_Worker(slot, rng, began_s - max(late_s, default=0.0)) for slot in range(workers)]
    at, look_at, step_at = began_s, began_s + MASTER_S * rng.random(), began_s

    def begin() -> None:
        group = brain.state.groups.group
        assert group is not None
        shares = apportion(BATCH * workers, group.split.shares or (1,) * workers)
        for w, share in zip(members, shares, strict=True):
            w.share, w.computes = share, True
            w.now_s = step_at if ran.steps else began_s - (late_s[w.slot] if late_s else 0.0)
            w.clock.begin(share)
            w.ends_s = began_s + finish(pattern, w.slot, step_at - began_s, share * sample_s)

    begin()
    while len(ran.steps) < steps:
        at += CLOCK_S
        for w in members:
            if w.computes and w.ends_s <= at:
                w.now_s, w.computes = max(w.now_s, w.ends_s), False
                w.clock.computed(w.share)
                w.clock.switch(BARRIER)
        step_s = max(w.ends_s for w in members) + SYNC_S
        if step_s <= at:
            ran.steps.append((step_s - began_s, tuple(w.share for w in members)))
            step_at = step_s
            begin()
        for w in members:
            readings = w.readings_now(at)
            if readings is not None:
                assert observer.take(MemberKey(Role.WORKER, w.slot), ONE, readings, at) is None
                _look(controller, at)
        if at >= look_at:
            look_at += MASTER_S
            _look(controller, at)
    ran.left = observer.observe(at).remaining_samples
    observer.close()
    return ran


def _look(controller: PolicyController, at: float) -> None:
    """With what comes of it: a policy takes no virtual time."""
    controller.tick(at)
    limit_s = time.monotonic() + 60.0
    while controller._call.at_work:
        assert time.monotonic() < limit_s, "a policy does not return"
        time.sleep(0.0)
        controller.tick(at)


def _brain(workers: int, policy: str) -> Brain:
    brain = Brain()
    spec = JobSpec(mode="allreduce", workers=workers, ps=0, policy=policy)
    events: list[Event] = [Event(0.0, MasterStarted(ONE, spec)), Event(0.0, NodeJoined(NODE, "", 0, 0))]
    for slot in map(Slot, range(workers)):
        events.append(Event(1.0, MemberJoined(Role.WORKER, slot, ONE, NODE, 100 + slot)))
        events.append(
            Event(
                1.0,
                PlanRegistered(DataPlan(name="d", samples=SAMPLES, shard_samples=BATCH, seed=0)),
                by_worker(slot, ONE),
            )
        )
        events.append(Event(1.0, GroupAsked(0, EPOCHS, BATCH), by_worker(slot, ONE)))
    for event in events:
        brain.handle(event)
    return brain
