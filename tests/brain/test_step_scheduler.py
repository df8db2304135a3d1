"""Sync and bounded: the master's machine and the workers' ones, joined by a link that loses, repeats and delays."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import Event, MasterStarted, PlanMade
from everstep.brain.policy_control import PolicyControl, batch_shares, divide, refuse
from everstep.brain.step_scheduler import StepScheduler
from everstep.config.consistency import parse_consistency
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.observation import Observations, WorkerSeen
from everstep.model.plan import AdjustAccum, AdjustBatch, AdjustRate, BackupWorkers, Plan
from everstep.model.shard import Lease
from everstep.model.step_schedule import BatchShare, ComputedShare, StepSchedule, WorkerClock
from everstep.tables.staleness_gate import Late, Pushing, StalenessGate, Verdict
from everstep.tables.worker_protocol import RangeWork
from seeds import bunches

ONE = Incarnation(1)
A, B, C = Slot(0), Slot(1), Slot(2)


def work(slot: int, number: int, samples: int = 4) -> RangeWork:
    lo = number * 100
    return RangeWork(Lease(LeaseNo(1 + slot), ShardKey(slot), 0, 10**9), lo, lo + samples, {}, 0)


def scheduler(text: str, workers: int, master: int = 1) -> StepScheduler:
    made = StepScheduler(parse_consistency(text), Incarnation(master))
    made.look({Slot(s): ONE for s in range(workers)}, {Slot(s) for s in range(workers)}, workers)
    return made


# ---------------------------------------------------------------- one transition at a time


def test_a_step_closes_when_all_are_ready_and_the_next_begins_when_all_have_pushed() -> None:
    p = scheduler("sync", 2)
    p.report(A, ONE, WorkerClock("busy", 0, number=1))
    p.report(B, ONE, WorkerClock("busy", 0, number=2))
    assert not p.report(A, ONE, WorkerClock("ready", 0, 30, number=3)) and not p.schedule.parts
    assert p.report(B, ONE, WorkerClock("ready", 0, 10, number=4))
    assert p.schedule.parts == (ComputedShare(A, ONE, 30), ComputedShare(B, ONE, 10)) and p.schedule.step == 0
    assert not p.report(A, ONE, WorkerClock("pushed", 0, 30, p.schedule.parts, number=5))
    assert p.report(B, ONE, WorkerClock("pushed", 0, 10, p.schedule.parts, number=6))
    assert (p.schedule.step, p.schedule.parts) == (1, ())


def test_who_is_lost_is_waited_for_neither_before_nor_after_the_step_is_closed() -> None:
    p = scheduler("sync", 3)
    for slot in (A, B, C):
        p.report(slot, ONE, WorkerClock("busy", 0, number=7))
    p.report(A, ONE, WorkerClock("ready", 0, 4, number=8))
    p.report(B, ONE, WorkerClock("ready", 0, 4, number=9))
    assert p.look({A: ONE, B: ONE}, {A, B}, 3) and len(p.schedule.parts) == 2
    p.report(A, ONE, WorkerClock("pushed", 0, 4, number=10))
    assert p.look({A: ONE, B: Incarnation(2)}, {A}, 3) and p.schedule.step == 1


def test_who_has_no_work_or_does_not_get_on_is_not_waited_for() -> None:
    p = scheduler("sync", 3)
    for slot in (A, B, C):
        p.report(slot, ONE, WorkerClock("busy", 0, number=11))
    p.report(A, ONE, WorkerClock("ready", 0, 4, number=12))
    assert not p.report(B, ONE, WorkerClock("idle", number=13))
    assert p.waits(A) and p.waits(B) and not p.waits(C)
    assert p.expired(C) and p.schedule.parts == (ComputedShare(A, ONE, 4),)
    assert not p.report(C, ONE, WorkerClock("busy", 0, number=11))  # said again: nothing has become of it


def test_backups_are_late_and_the_weights_are_those_of_who_counts() -> None:
    p, gates = scheduler("sync:1", 3), [StalenessGate(parse_consistency("sync:1"), Slot(s), ONE) for s in range(3)]
    for slot, gate in enumerate(gates):
        gate.work()
        p.report(Slot(slot), ONE, gate.due() or WorkerClock("new", number=15))
        gate.schedule(p.schedule)
        assert gate.may_begin()
        gate.begin(work(slot, 0))
    for slot in (2, 0):
        assert gates[slot].ready((work(slot, 0, 4 * (slot + 1)),)) is None
        p.report(Slot(slot), ONE, gates[slot].due() or WorkerClock("new", number=16))
    verdicts = [gate.schedule(p.schedule) for gate in gates]
    assert verdicts[0] == Pushing((work(0, 0),), 0.25, 0) and verdicts[2] == Pushing((work(2, 0, 12),), 0.75, 0)
    assert gates[1].ready((work(1, 0),)) == Late((work(1, 0),)) and gates[1].late == 1
    assert not gates[1].may_begin()  # what it would pull is half applied


def test_other_backups_count_from_the_next_step_on() -> None:
    p = scheduler("sync", 2)
    p.report(A, ONE, WorkerClock("busy", 0, number=1))
    p.report(B, ONE, WorkerClock("busy", 0, number=1))
    p.report(A, ONE, WorkerClock("ready", 0, 4, number=2))
    here = {A: ONE, B: ONE}
    assert not p.look(here, {A, B}, 2, 1), "the step under way has its quorum"
    p.report(B, ONE, WorkerClock("ready", 0, 4, number=2))
    p.report(A, ONE, WorkerClock("pushed", 0, 4, number=3))
    p.report(B, ONE, WorkerClock("pushed", 0, 4, number=3))
    assert p.schedule.step == 1 and p.quorum == 1
    assert p.report(B, ONE, WorkerClock("ready", 1, 4, number=4)) and len(p.schedule.parts) == 1


def test_a_plan_s_shares_count_from_the_next_step_on_and_not_without_those_it_was_made_for() -> None:
    seen = Observations(
        at=1.0,
        consistency="sync",
        global_batch=8,
        workers=tuple(WorkerSeen(slot=s, incarnation=ONE, node=NodeId("n"), share=4) for s in (A, B)),
    )
    plan = Plan(actions=(AdjustBatch(batch={A: 7, B: 1}), AdjustAccum(accum={A: 2})), decision=Decision("a", "b"))
    assert refuse(plan, seen) == ""
    assert "sum up to 9" in refuse(Plan(actions=(AdjustBatch(batch={A: 5}),), decision=plan.decision), seen)
    assert "stay what they are" in refuse(Plan(actions=(AdjustRate(factor=2.0),), decision=plan.decision), seen)
    control, here = PolicyControl(), {A: ONE, B: ONE}
    divide(control, plan.actions, here)
    wanted = (BatchShare(A, 7, 2), BatchShare(B, 1))
    assert batch_shares(control, here) == wanted
    divide(control, (AdjustBatch(batch={B: 1}),), here)
    assert batch_shares(control, here) == wanted, "who is not named keeps its own"
    assert batch_shares(control, {A: ONE, B: Incarnation(2)}) == batch_shares(control, {A: ONE}) == ()
    p = scheduler("sync", 2)
    for slot in (A, B):
        p.report(slot, ONE, WorkerClock("busy", 0, number=1))
    assert not p.look(here, set(here), 2, -1, wanted), "the step under way is divided already"
    for slot in (A, B):
        p.report(slot, ONE, WorkerClock("ready", 0, 4, number=2))
    for slot in (A, B):
        p.report(slot, ONE, WorkerClock("pushed", 0, 4, number=3))
    assert (p.schedule.step, p.schedule.batch_shares) == (1, wanted)
    gates = [StalenessGate(parse_consistency("sync"), slot, ONE) for slot in (A, B, C)]
    for gate in gates:
        gate.schedule(p.schedule)
    assert [gate.batch_share() for gate in gates] == [*wanted, None]


def test_a_part_of_several_shards_is_pushed_when_all_of_it_is() -> None:
    gate = StalenessGate(parse_consistency("sync"), A, ONE)
    gate.schedule(StepSchedule(ONE, 1, 0))
    works = work(0, 0), work(1, 0, 8)
    for one in works:
        gate.begin(one)
    assert gate.ready(works, [works[0]]) is None and gate.clock().samples == 8, "a gradient that is not finite"
    assert gate.schedule(StepSchedule(ONE, 2, 0, (ComputedShare(A, ONE, 8), ComputedShare(B, ONE, 8)))) == Pushing(
        works, 0.5, 0
    )
    gate.finished(works[1])
    assert gate.clock().state == "ready"
    gate.finished(works[0])
    assert gate.clock().state == "pushed"


def test_a_new_master_keeps_to_what_the_last_one_has_decided() -> None:
    parts = (ComputedShare(A, ONE, 4), ComputedShare(B, ONE, 4))
    p = scheduler("sync:1", 3, master=2)
    assert p.schedule.step == -1
    p.report(C, ONE, WorkerClock("ready", 7, 4, number=17))
    p.report(B, ONE, WorkerClock("ready", 7, 4, number=18))
    assert p.schedule.step == -1 and not p.schedule.parts  # two would do, but the third may know more
    p.report(A, ONE, WorkerClock("pushed", 7, 4, parts, number=19))
    assert (p.schedule.step, p.schedule.parts) == (7, parts)


def test_a_gate_takes_each_word_once_and_no_older_one() -> None:
    gate = StalenessGate(parse_consistency("sync"), A, ONE)
    gate.schedule(StepSchedule(ONE, 3, 5))
    gate.begin(work(0, 0))
    assert gate.ready((work(0, 0),)) is None
    closed = StepSchedule(ONE, 4, 5, (ComputedShare(A, ONE, 4),))
    assert gate.schedule(closed) == Pushing((work(0, 0),), 1.0)
    assert gate.schedule(closed) is None and gate.schedule(StepSchedule(ONE, 3, 5)) is None
    gate.finished(work(0, 0))
    assert gate.clock().state == "pushed" and not gate.may_begin()
    gate.schedule(StepSchedule(Incarnation(2), 1, 6))
    assert gate.may_begin()


def test_bounded_nobody_begins_more_than_s_ahead_of_the_slowest_and_newcomers_begin_at_the_floor() -> None:
    rule = parse_consistency("bounded:2")
    p, a = scheduler("bounded:2", 2), StalenessGate(rule, A, ONE)
    p.report(B, ONE, WorkerClock("busy", 0, number=20))
    for number in range(3):
        a.work()
        p.report(A, ONE, a.due() or WorkerClock("new", number=21))
        a.schedule(p.schedule)
        assert a.may_begin(), number
        a.begin(work(0, number))
        a.finished(work(0, number))
    assert not a.may_begin() and a.clock().step == 3
    p.report(A, ONE, a.due(again=True) or WorkerClock("new"))
    assert p.waits(A) and not p.waits(B)
    assert p.report(B, ONE, WorkerClock("busy", 1, number=22))
    a.schedule(p.schedule)
    assert a.may_begin()
    c = StalenessGate(rule, C, ONE)
    c.work()
    assert c.clock().state == "new"
    p.report(C, ONE, c.clock())
    p.report(B, ONE, WorkerClock("idle", number=23))
    c.schedule(p.schedule)
    assert c.clock() == WorkerClock("busy", 1) and p.schedule.step == 1
    p.report(C, ONE, WorkerClock("busy", 2, number=24))
    p.report(C, ONE, WorkerClock("idle", number=25))
    assert p.schedule.step == 3


def test_backup_workers_are_refused_where_there_is_no_quorum_and_kept_where_there_is_one() -> None:
    why = Decision("backup workers", "slow: worker:1 4.0x")
    plan = Plan(actions=(BackupWorkers(backup=1),), decision=why)
    assert "has no quorum" in refuse(plan, Observations(at=1.0, consistency="bounded", wanted_workers=4))
    assert "wait for nobody" in refuse(plan, Observations(at=1.0, consistency="sync", wanted_workers=1))
    assert refuse(plan, Observations(at=1.0, consistency="sync", wanted_workers=4)) == ""
    brain = Brain()
    brain.handle(Event(0.0, MasterStarted(ONE, JobSpec(workers=4, consistency="sync"))))
    brain.handle(Event(1.0, PlanMade("backup", plan)))
    assert Brain.restore(brain.snapshot()).state.control.backup == 1


# ---------------------------------------------------------------- everything at once


class World:
    """Workers that compute and push, a master that dies, and words that are lost, repeated and late."""

    def __init__(self, text: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rule = parse_consistency(text)
        self.workers = self.rng.randint(2, 5)
        self.master = 1
        self.scheduler = scheduler(text, self.workers)
        self.gates = {Slot(s): StalenessGate(self.rule, Slot(s), ONE) for s in range(self.workers)}
        self.left = dict.fromkeys(self.gates, 12)  # parts that each has to bring in
        self.now: dict[Slot, tuple[str, RangeWork]] = {}  # computing, waiting or pushing
        self.number = 0
        self.wire: list[tuple[Slot, WorkerClock | StepSchedule]] = []
        self.pushing: dict[Slot, int] = {}  # step of the push under way
        self.step_of: dict[Slot, int] = {}
        self.weights: dict[int, list[float]] = defaultdict(list)
        self.inconsistent: set[tuple[object, ...]] = set()
        self.verdicts: dict[tuple[object, ...], Verdict] = {}
        self.loss = self.rng.choice([0.0, 0.1, 0.4])
        self.masters = 0

    def send(self, slot: Slot, what: WorkerClock | StepSchedule | None) -> None:
        if what is not None and self.rng.random() >= self.loss:
            self.wire += [(slot, what)] * self.rng.choice([1, 1, 2])

    def publish(self) -> None:
        for slot in self.gates:
            self.send(slot, self.scheduler.schedule)

    def judge(self, slot: Slot, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        (work,) = verdict.works
        assert work.key not in self.verdicts, "decided twice"
        self.verdicts[work.key] = verdict
        if isinstance(verdict, Late):
            del self.now[slot]
            return
        self.now[slot] = ("pushing", work)
        assert work.key not in self.inconsistent, "it pulled what was half applied"
        self.weights[self.step_of[slot]].append(verdict.weight)
        self.pushing[slot] = self.step_of[slot]

    def go(self) -> None:
        rng = self.rng
        slot = rng.choice(list(self.gates))
        gate = self.gates[slot]
        doing = self.now.get(slot)
        if rng.random() < 0.02 and self.masters < 5:
            self.masters += 1
            self.master += 1
            self.scheduler = StepScheduler(self.rule, Incarnation(self.master))
            here = dict.fromkeys(self.gates, ONE)
            self.scheduler.look(here, {s for s in self.gates if self.left[s]}, self.workers)
            self.wire = [(s, w) for s, w in self.wire if isinstance(w, StepSchedule)]
        elif self.wire and rng.random() < 0.6:
            to, what = self.wire.pop(0 if rng.random() < 0.8 else rng.randrange(len(self.wire)))
            if isinstance(what, StepSchedule):
                self.judge(to, self.gates[to].schedule(what))
                self.send(to, self.gates[to].due())
            elif self.scheduler.report(to, ONE, what):
                self.publish()
            else:
                self.send(to, self.scheduler.schedule)
        elif doing is None and self.left[slot]:
            gate.work()
            if gate.may_begin():
                self.number += 1
                made = work(slot, self.number, rng.randint(1, 9))
                gate.begin(made)
                if self.rule.kind == "sync":
                    self.step_of[slot] = gate.clock().step
                    assert all(step >= self.step_of[slot] for step in self.pushing.values()), (
                        "the step before is not over"
                    )
                    if self.step_of[slot] in self.weights:  # it has not heard that the step was closed without it
                        self.inconsistent.add(made.key)
                else:
                    finished = [self.gates[s].clock().step for s in self.scheduler.working() if self.left[s]]
                    known = [n for n in finished if n >= 0] or [gate.clock().step]
                    assert gate.clock().step - min(known) <= self.rule.ahead, "it runs too far ahead"
                self.now[slot] = ("computing", made)
            self.send(slot, gate.due(again=rng.random() < 0.3))
        elif doing is not None and doing[0] == "computing":
            if self.rule.kind == "sync":
                self.now[slot] = ("waiting", doing[1])
                self.judge(slot, gate.ready((doing[1],)))
            else:
                self.now[slot] = ("pushing", doing[1])
            self.send(slot, gate.due())
        elif doing is not None and doing[0] == "pushing":
            self.pushing.pop(slot, None)
            del self.now[slot]
            gate.finished(doing[1])
            self.left[slot] -= 1
            if not self.left[slot]:
                gate.rest()
            self.send(slot, gate.due())
        else:
            self.send(slot, gate.due(again=True))


@pytest.mark.parametrize("bunch", bunches(60, 3000), ids=str)
@pytest.mark.parametrize("text", ["sync", "sync:1", "bounded:1", "bounded:3"])
def test_everybody_gets_through_and_no_rule_is_broken(text: str, bunch: range) -> None:
    """One run again: ``EVERSTEP_SEED=17 pytest tests/brain/test_step_scheduler.py``."""
    for seed in bunch:
        try:
            go_through(text, seed)
        except AssertionError as error:
            error.add_note(f"EVERSTEP_SEED={seed}")
            raise


def go_through(text: str, seed: int) -> None:
    world = World(text, seed)
    for _ in range(60_000):
        if not any(world.left.values()):
            break
        world.go()
    assert not any(world.left.values()), f"stuck: {world.scheduler!r} {list(world.gates.values())} {world.now}"
    if text == "sync" and not world.masters:
        assert all(abs(sum(parts) - 1.0) < 1e-9 for parts in world.weights.values())


# ---------------------------------------------------------------- iterations of the script


def test_iterations_of_the_job_are_the_most_that_a_part_of_a_closed_step_has() -> None:
    p = scheduler("sync", 2)
    p.report(A, ONE, WorkerClock("busy", 0, number=1))
    p.report(B, ONE, WorkerClock("busy", 0, number=1))
    p.report(A, ONE, WorkerClock("ready", 0, 30, number=2, iterations=4))
    assert p.schedule.iterations == 0
    p.report(B, ONE, WorkerClock("ready", 0, 10, number=2, iterations=3))
    assert p.schedule.iterations == 4
    gate = StalenessGate(parse_consistency("sync"), C, ONE)  # one that comes later
    for slot in (A, B):
        p.report(slot, ONE, WorkerClock("pushed", 0, 10, p.schedule.parts, 3, 4))
    gate.schedule(p.schedule)
    gate.begin(work(2, 0))
    gate.iterate()
    assert gate.iteration == 4


def test_who_waits_with_batches_that_are_kept_goes_on_to_count_where_the_others_are() -> None:
    gate = StalenessGate(parse_consistency("sync"), A, ONE)
    gate.schedule(StepSchedule(ONE, 1, 0))
    for number in (0, 1):
        gate.begin(work(0, number))
        gate.iterate()
    gate.leave(keeps=True)
    gate.schedule(StepSchedule(ONE, 2, 2, iterations=8))  # the others have made steps of four iterations
    gate.begin(work(0, 2))
    gate.iterate()
    assert gate.iteration == 8 + 2


def test_nobody_begins_in_the_middle_of_an_iteration_that_has_stepped() -> None:
    p = scheduler("sync", 2)
    p.report(A, ONE, WorkerClock("busy", 0, number=1))
    p.report(A, ONE, WorkerClock("ready", 0, 1, number=2, more=True))
    p.report(A, ONE, WorkerClock("pushed", 0, 1, p.schedule.parts, 3, more=True))
    assert (p.schedule.step, p.schedule.inside) == (1, True)
    newcomer = StalenessGate(parse_consistency("sync"), B, ONE)
    newcomer.schedule(p.schedule)
    newcomer.work()
    assert not newcomer.may_begin() and newcomer.may_begin(goes_on=True)
    p.report(B, ONE, newcomer.clock())
    p.report(A, ONE, WorkerClock("ready", 1, 7, number=4))
    assert [s.slot for s in p.schedule.parts] == [A], "the newcomer is not waited for"
    p.report(A, ONE, WorkerClock("pushed", 1, 7, p.schedule.parts, 5))
    newcomer.schedule(p.schedule)
    assert not p.schedule.inside and newcomer.may_begin()


def test_an_iteration_that_is_lost_in_its_middle_holds_up_nobody() -> None:
    p = scheduler("sync", 2)
    p.report(A, ONE, WorkerClock("busy", 0, number=1))
    p.report(A, ONE, WorkerClock("ready", 0, 1, number=2, more=True))
    p.report(A, ONE, WorkerClock("pushed", 0, 1, p.schedule.parts, 3, more=True))
    assert p.schedule.inside
    p.report(B, ONE, WorkerClock("new", 0, number=1))
    p.look({B: ONE}, {B}, 2)
    assert not p.schedule.inside


def test_a_part_counts_for_the_samples_that_it_has_learnt_from() -> None:
    gate = StalenessGate(parse_consistency("sync"), A, ONE)
    gate.schedule(StepSchedule(ONE, 1, 0))
    parts = work(0, 0), work(0, 1)
    for part in parts:
        gate.begin(part)
    gate.ready(parts, (), 4)  # the other four were left out by the script
    assert gate.clock().samples == 4


def test_batches_that_a_later_step_will_push_do_not_use_up_how_far_a_worker_may_be_ahead() -> None:
    gate = StalenessGate(parse_consistency("bounded:2"), A, ONE)
    gate.schedule(StepSchedule(ONE, 1, 0))
    for number in range(8):  # accumulated over eight batches
        assert gate.may_begin(), number
        gate.begin(work(0, number))
        gate.finished(work(0, number))
        gate.schedule(StepSchedule(ONE, 2 + number, number + 1))
    gate.finished(work(0, 0, 800))
    assert gate.clock().step == 8
