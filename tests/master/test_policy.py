"""The shell round a policy: what it is shown, what becomes of its plans, and of policies that fail."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    FactType,
    GroupAsked,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    Note,
    PlanMade,
    PlanRegistered,
    PolicyDisabled,
    ProcessExited,
    StartProcess,
    by_worker,
)
from everstep.brain.policy_control import MAX_WORDS, as_plan, refuse
from everstep.config.load import load_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.master import server
from everstep.master.policy import PolicyController, complete, load
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.observation import Observations, Pace, ServerSeen, WorkerSeen
from everstep.model.plan import (
    Action,
    AdjustAccum,
    AdjustBatch,
    AdjustRate,
    BackupWorkers,
    KillRestart,
    MovePartitions,
    Plan,
    Scale,
)
from everstep.model.shard import ShardSchedule as DataPlan
from everstep.policies.stragglers import policy as policies

NODE, ONE = NodeId("node0"), Incarnation(1)


def group_of(workers: int) -> Brain:
    """Mode allreduce: a group that trains, eight samples a worker and step."""
    brain = Brain()
    spec = JobSpec(mode="allreduce", workers=workers, ps=0)
    events: list[Event] = [Event(0.0, MasterStarted(ONE, spec)), Event(0.0, NodeJoined(NODE, "", 0, 0))]
    for slot in map(Slot, range(workers)):
        events.append(Event(1.0, MemberJoined(Role.WORKER, slot, ONE, NODE, 100 + slot)))
        events.append(
            Event(1.0, PlanRegistered(DataPlan(name="d", samples=1000, shard_samples=25, seed=0)), by_worker(slot, ONE))
        )
        events.append(Event(1.0, GroupAsked(0, 2, 8), by_worker(slot, ONE)))
    for event in events:
        brain.handle(event)
    return brain


def seen_workers(*paces_s: float) -> Observations:
    workers = tuple(
        WorkerSeen(slot=Slot(i), incarnation=ONE, node=NODE, short=Pace(per_sample_s=p), long=Pace(per_sample_s=p))
        for i, p in enumerate(paces_s)
    )
    return Observations(at=10.0, mode="allreduce", consistency="sync", places=(NODE,), workers=workers)


class Shell:
    """A controller with its brain; ``events``: what it told."""

    def __init__(self, policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, limit_s: float = 60.0) -> None:
        monkeypatch.setitem(policies.SHIPPED, "exclusive", policy)
        self.brain = group_of(2)
        self.events: list[FactType] = []
        spec = msgspec.structs.replace(self.brain.job.spec, policy="exclusive")
        self.controller = PolicyController(
            self.brain, spec, lambda at, span_s: seen_workers(0.01, 0.03), 10.0, self._tell, limit_s
        )
        self.at = 10.0

    def _tell(self, fact: FactType) -> None:
        self.events.append(fact)
        self.brain.handle(Event(self.at, fact))

    def look(self) -> None:
        """One whole look: the call, and what comes of it."""
        end = time.monotonic() + 60
        self.at += 10.0
        self.controller.tick(self.at)
        while self.controller._call.at_work and time.monotonic() < end:
            self.controller.tick(self.at)
            time.sleep(0.001)


def plan_of(*actions: Action) -> Plan:
    return Plan(actions=actions, decision=Decision("change", "why"))


def test_a_plan_gets_to_the_brain_numbered_and_the_state_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []

    def policy(seen: Observations, state: Any) -> tuple[Plan | None, Any]:
        states.append(state)
        assert [(w.share, w.batch, w.accum) for w in seen.workers] == (
            [(8, 8, 1)] * 2 if not state else [(13, 7, 2), (3, 3, 1)]
        )
        assert (seen.global_batch, seen.loader_batch, seen.window_s) == (16, 8, 10.0)
        return (plan_of(AdjustBatch(batch={Slot(0): 13, Slot(1): 3})) if not state else None), (state or 0) + 1

    shell = Shell(policy, monkeypatch)
    shell.look()
    assert len(shell.events) == 1 and isinstance(shell.events[0], PlanMade)
    control = shell.brain.state.control
    assert control.version == 1 and control.plan is not None and control.plan.version == 1
    shell.look()
    assert states == [None, 1] and len(shell.events) == 1


def test_it_is_looked_as_soon_as_all_have_readings_and_then_once_a_window_at_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []

    def policy(seen: Observations, state: Any) -> Any:
        looks.append(seen.at)
        return None, state

    shell = Shell(policy, monkeypatch)
    paces, least = [0.0, 0.0], [0.0, 0.0]
    long = Pace(per_sample_s=0.01)

    def observe(at: float, span_s: float) -> Observations:
        workers = tuple(
            msgspec.structs.replace(w, short=msgspec.structs.replace(w.short, at_least_s=s), long=long)
            for w, s in zip(seen_workers(*paces).workers, least, strict=True)
        )
        return msgspec.structs.replace(seen_workers(*paces), at=at, workers=workers if any(paces) else ())

    monkeypatch.setattr(shell.controller, "_observe", observe)

    def until(end: float) -> list[float]:
        looks.clear()
        while shell.at < end:
            shell.at += 0.5
            wait = time.monotonic() + 60
            shell.controller.tick(shell.at)
            while shell.controller._call.at_work and time.monotonic() < wait:
                shell.controller.tick(shell.at)
                time.sleep(0.001)
        return list(looks)

    assert until(24.0) == [], "nobody is there to be seen"
    paces[:] = [0.01, 0.03]
    assert until(34.0) == [24.5], "everybody's first"
    assert until(54.5) == [34.5, 44.5, 54.5]
    paces[0] = 0.0  # a step that takes longer than a window
    assert until(66.0) == []
    paces[0] = 0.01
    assert until(67.0) == [66.5]
    paces[0] = 0.0
    assert until(97.0) == [96.5], "it waits so long and no longer"
    paces[:], least[1] = [0.0, 0.05], 0.05
    assert until(107.0) == [106.5], "one makes the others wait, by a step that is not over"
    paces[1] = least[1] = 0.06
    assert until(117.0) == [], "that is no news"
    paces[1] = least[1] = 0.08
    assert until(118.0) == [117.5]


def test_auto_looks_as_soon_as_a_whole_window_lies_behind_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def policy(seen: Observations, state: Any) -> Any:
        looks.append(seen.at)
        return None, state

    shell = Shell(policy, monkeypatch)
    since, rest, pending = [0.0], [0.0], [0]

    def observe(at: float, span_s: float) -> Observations:
        seen = seen_workers(0.01, 0.03)
        workers = (msgspec.structs.replace(seen.workers[0], since=since[0]), *seen.workers[1:])
        return msgspec.structs.replace(seen, at=at, workers=workers, rest_since=rest[0], pending=pending[0])

    monkeypatch.setattr(shell.controller, "_observe", observe)

    def until(end: float) -> list[float]:
        looks.clear()
        while shell.at < end:
            shell.at += 0.5
            wait = time.monotonic() + 60
            shell.controller.tick(shell.at)
            while shell.controller._call.at_work and time.monotonic() < wait:
                shell.controller.tick(shell.at)
                time.sleep(0.001)
        return list(looks)

    assert until(30.0) == [10.5, 20.5]
    since[0] = 23.0
    assert until(42.0) == [30.5, 40.5], "policies that must not see a reading twice"
    monkeypatch.setattr(shell.controller, "_eager", True)
    since[0] = 43.0
    assert until(64.0) == [50.5, 53.5, 63.5], "the window from 43 is whole"
    since[0], rest[0] = 65.0, 67.0
    assert until(80.0) == [73.5, 77.5], "partitions were on their way until 67"
    since[0], pending[0] = 78.0, 1
    assert until(88.0) == [87.5], "somebody is on the way"


def raises(seen: Observations, state: Any) -> Any:
    raise RuntimeError("no idea\nat all")


def exits(seen: Observations, state: Any) -> Any:
    raise SystemExit(3)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def unspeakable(seen: Observations, state: Any) -> Any:
    raise Unspeakable


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (raises, "it raised RuntimeError: no idea at all (test_policy.py, line "),
        (exits, "it raised SystemExit: 3"),
        (lambda seen, state: None, "it returned None instead of two things"),
        (lambda seen, state: (yield), "it returned <generator"),
        (lambda seen, state: (Unspeakable(), state), "it returned a Unspeakable instead of a plan"),
        (unspeakable, "it raised Unspeakable (test_policy.py, line "),
        (lambda seen, state: ("faster", state), "it returned 'faster' instead of a plan"),
        (lambda seen, state: (plan_of("faster"), state), "unknown action 'faster'"),  # type: ignore[arg-type]
        (lambda seen, state: (plan_of(AdjustBatch(batch={Slot(0): -4, Slot(1): 20})), state), "-4 for worker:0"),
        (lambda seen, state: (plan_of(AdjustBatch(batch={Slot(0): "8"})), state), "Expected `int`, got `str`"),  # type: ignore[dict-item]
        (lambda seen, state: (plan_of(AdjustBatch(batch={Slot(0): 9})), state), "sum up to 17, the global batch is 16"),
        (
            lambda seen, state: (plan_of(KillRestart(role=Role.WORKER, slot=Slot(5), incarnation=ONE)), state),
            "worker:5 #1 is not",
        ),
        (
            lambda seen, state: (plan_of(AdjustBatch(batch={Slot(0): 10**30})), state),
            "its plan is none: can't serialize",
        ),
        (lambda seen, state: (plan_of(*[Scale(workers=2)] * 1_000_000), state), "1000000 actions, more than 16"),
        (lambda seen, state: (Plan(actions=(), decision=Decision("x" * 2**20, "")), state), "more than 1048576"),
    ],
)
def test_a_policy_that_fails_is_asked_no_more_and_the_job_goes_on(
    policy: Callable[..., Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(policy, monkeypatch)
    before = shell.brain.state.groups.group
    shell.look()
    shell.look()
    assert len(shell.events) == 1 and isinstance(shell.events[0], PolicyDisabled)
    assert error in shell.events[0].error and "\n" not in shell.events[0].error
    assert shell.brain.state.control.disabled and shell.brain.state.groups.group == before


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_policy_that_takes_too_long_is_asked_no_more(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    def policy(seen: Observations, state: Any) -> Any:
        gate.wait(60)
        return plan_of(AdjustBatch(batch={Slot(0): 8, Slot(1): 8})), state

    shell = Shell(policy, monkeypatch, limit_s=5.0)
    shell.controller.tick(20.0)
    shell.controller.tick(24.0)
    assert not shell.events
    shell.controller.tick(25.5)
    gate.set()
    shell.controller.tick(26.0)
    assert [type(e) for e in shell.events] == [PolicyDisabled]
    assert "longer than 5 s" in shell.brain.state.control.disabled


def test_a_clock_that_jumps_ends_no_policy_and_keeps_none_from_looking(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    looks: list[float] = []

    def policy(seen: Observations, state: Any) -> Any:
        looks.append(seen.at)
        gate.wait(60)
        return None, state

    shell = Shell(policy, monkeypatch, limit_s=5.0)
    shell.controller.tick(20.0)
    for at in (7220.0, 20.0, 21.0):  # two hours ahead, and back
        shell.controller.tick(at)
    gate.set()
    shell.at = 11.0
    shell.look()
    assert not shell.events and not shell.brain.state.control.disabled
    before, shell.at = len(looks), -1000.0  # back for good
    shell.look()
    shell.look()
    assert len(looks) > before, "it waits for its old clock"
    assert not shell.events


SEEN = msgspec.structs.replace(
    seen_workers(0.01, 0.01),
    global_batch=16,
    loader_batch=8,
    workers=tuple(
        msgspec.structs.replace(w, share=8, memory_batch=m)
        for w, m in zip(seen_workers(0.01, 0.01).workers, (0, 12), strict=True)
    ),
    servers=(ServerSeen(slot=Slot(0), incarnation=ONE, node=NODE, owned=(PartitionId(0),)),),
)
A, B = Slot(0), Slot(1)


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        ([AdjustBatch(batch={A: 4, B: 12})], ""),
        ([AdjustBatch(batch={A: 4, B: 12}), AdjustAccum(accum={B: 1})], ""),
        (
            [AdjustBatch(batch={A: 3, B: 13}), AdjustAccum(accum={B: 1})],
            "compute 13 samples at once, its memory holds 12",
        ),
        ([AdjustBatch(batch={A: 9, B: 7}), AdjustAccum(accum={A: 1})], "its memory holds 8"),
        ([AdjustAccum(accum={A: 0})], "0 for worker:0"),
        ([AdjustAccum(accum={A: 2**40})], "1099511627776 passes of 8 samples for worker:0"),
        ([AdjustBatch(batch={Slot(7): 8})], "worker:7 is not there"),
        ([AdjustRate(factor=math.nan)], "factor nan"),
        ([AdjustRate(factor=0.0)], "above 0"),
        ([BackupWorkers(backup=1)], "BACKUP_WORKERS: mode allreduce (sync) has no quorum"),
        ([MovePartitions(owners={PartitionId(0): Slot(3)})], "ps:3 is not there"),
        ([MovePartitions(owners={PartitionId(9): A})], "no partition 9"),
        ([Scale(workers=0)], "0 workers"),
        ([Scale(workers=3), Scale(workers=4)], "SCALE twice"),
        ([KillRestart(role=Role.WORKER, slot=slot, incarnation=ONE) for slot in (A, B)], "KILL_RESTART twice"),
        ([KillRestart(role=Role.WORKER, slot=A, incarnation=Incarnation(2))], "worker:0 #2 is not there"),
        ([KillRestart(role=Role.MASTER, slot=A, incarnation=ONE)], "master:0"),
        ([KillRestart(role=Role.WORKER, slot=A, incarnation=ONE)], ""),
    ],
)
def test_plans_are_checked_against_what_the_policy_saw(actions: list[Action], error: str) -> None:
    found = refuse(plan_of(*actions), SEEN)
    assert (error in found) if error else not found, found


def test_nobody_is_ended_while_somebody_starts_or_without_a_place() -> None:
    kill = plan_of(KillRestart(role=Role.WORKER, slot=A, incarnation=ONE))
    assert "still starting" in refuse(kill, msgspec.structs.replace(SEEN, pending=1))
    assert "no node" in refuse(kill, msgspec.structs.replace(SEEN, places=()))
    even = plan_of(AdjustBatch(batch={A: 8, B: 8}))
    assert "no common step" in refuse(even, msgspec.structs.replace(SEEN, global_batch=0))


def test_there_is_nothing_to_divide_while_one_of_the_group_has_no_reading() -> None:
    brain = group_of(3)
    assert complete(seen_workers(0.01, 0.01), brain, 10.0).workers == ()
    assert [w.share for w in complete(seen_workers(0.01, 0.01, 0.01), brain, 10.0).workers] == [8, 8, 8]


def test_a_worker_whose_memory_was_too_small_is_started_again_and_gets_smaller_passes() -> None:
    brain = group_of(2)
    told = tuple(
        msgspec.structs.replace(w, memory_batch=m)
        for w, m in zip(seen_workers(0.01, 0.01).workers, (30, 4), strict=True)
    )
    observed = msgspec.structs.replace(seen_workers(0.01, 0.01), workers=told)
    seen = complete(observed, brain, 10.0)
    assert [(w.memory_batch, w.batch, w.accum) for w in seen.workers] == [(30, 8, 1), (4, 4, 2)], "8 of a step each"
    large = plan_of(AdjustBatch(batch={A: 14, B: 2}), AdjustAccum(accum={A: 1}))
    assert refuse(large, seen) == ""
    brain.handle(Event(11.0, PlanMade("mine:own", large)))
    done = brain.handle(
        Event(12.0, ProcessExited(Role.WORKER, A, ONE, 1, "OutOfMemoryError: ... (train.py:7)", too_large=14))
    )
    words = [str(i.decision) for i in done if isinstance(i, Note)]
    assert any("too small for 14 samples at once: no plan gives it more than 7 now" in w for w in words), words
    assert any(isinstance(i, StartProcess) for i in done) and not brain.job.over
    held = group_of(2)  # (trains again; and a batch of the loader, 8, always fits)
    held.state.control = Brain.restore(brain.snapshot()).state.control
    seen = complete(observed, held, 10.0)
    assert [w.memory_batch for w in seen.workers] == [8, 4]
    assert "its memory holds 8" in refuse(large, seen)
    failed = held.handle(Event(13.0, ProcessExited(Role.WORKER, B, ONE, 1, "OutOfMemoryError: ... (train.py:7)")))
    assert held.job.over and failed, "a batch of the loader that does not fit is the script's own fault"


def test_what_a_policy_says_of_its_plan_is_a_line_that_a_terminal_shows() -> None:
    loud = Plan(actions=(), decision=Decision("\x1b[2Jone\ntwo", "x" * 1000, {"a\nb": "\x07", "c": math.nan}))
    why = as_plan(loud).decision
    assert (why.action, len(why.reason), list(why.inputs)) == ("[2Jone two", MAX_WORDS, ["a b", "c"])


def test_a_master_of_which_the_clock_stopped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(server.os, "_exit", ends.append)

    async def ticking() -> None:
        raise OverflowError("of the policy")

    async def run() -> None:
        task = asyncio.create_task(ticking())
        task.add_done_callback(server._ticked)
        await asyncio.wait([task])

    asyncio.run(run())
    assert ends == [3]


def test_ones_own_policy_lies_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("def choose(seen, state):\n    return None, 7\nx = 3\n")
    assert load("beside_the_script:choose", tmp_path)(SEEN, None) == (None, 7)
    with pytest.raises(TypeError, match="x is int"):
        load("beside_the_script:x", tmp_path)
    with pytest.raises(ModuleNotFoundError):
        load("not_beside_the_script:choose", tmp_path)


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("nondedicatd", "did you mean 'shared'"),
        ("x y:z", "expected module:callable"),
        ("a:", "expected module:callable"),
        ("backup", "quorum"),
        ("exclusive", "common steps"),
    ],
)
def test_names_of_policies_are_checked_before_the_job_starts(policy: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_spec(None, {"policy": policy}, {})
    for good in ("none", "shared", "my.own:choose"):
        assert load_spec(None, {"policy": good}, {})[0].policy == good
