"""Any events about a group in any order: generations grow and never change, committed steps tile every epoch, the
snapshot is the state, and healthy workers finish the job.

One run again: ``EVERSTEP_SEED=17 pytest tests/brain/test_group_chaos.py``.
"""

from __future__ import annotations

import os
import random

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    DrainAsked,
    Event,
    FinishJob,
    GroupAsked,
    GroupDue,
    Grouped,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    InstructionType,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    NodeJoined,
    NodeLost,
    PlanRegistered,
    ProcessExited,
    PublishGroup,
    Reply,
    ScaleAsked,
    StepsCommitted,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Committed, Group, Position
from everstep.model.member import Role
from everstep.model.reasons import LeaveReason
from everstep.model.shard import ShardSchedule

SPEC = JobSpec(mode="allreduce", workers=3, ps=0, max_restarts=10**6, quarantine_after=0)
PLAN = ShardSchedule(name="d", samples=95, shard_samples=10, seed=0)
NODES = (NodeId("node0"), NodeId("node1"))
EPOCHS = 2
SEEDS = [int(os.environ["EVERSTEP_SEED"])] if "EVERSTEP_SEED" in os.environ else range(80)


class Chaos:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.brain = Brain()
        self.at = 0.0
        self.master = 0
        self.spec = SPEC
        if seed % 4 == 1:
            self.spec = JobSpec(**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__} | {"min_workers": 2})
        elif seed % 4 == 2:
            self.spec = JobSpec(**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__} | {"logical_workers": 4})
        self.said: list[Event] = []
        self.groups: dict[int, Group] = {}
        self.voids = 0
        self.steps: dict[int, Committed] = {}  # committed and not void, by first step

    def say(self, event: Event) -> list[InstructionType]:
        self.said.append(event)
        restored = Brain.restore(self.brain.snapshot()) if self.rng.random() < 0.1 else None
        out = self.brain.handle(event)
        if restored is not None:
            assert restored.handle(event) == out, "the restored brain wants something else"
            self.brain = restored
        for instruction in out:
            if isinstance(instruction, PublishGroup):
                self.published(instruction.group)
        for instruction in out:
            if isinstance(instruction, Reply) and isinstance(instruction.answer, Grouped):
                shown = instruction.answer.group
                if shown is not None:
                    assert self.groups[shown.generation].members == shown.members, "two groups of one number"
            assert not isinstance(instruction, FinishJob) or instruction.exit_code == 0, instruction
        return out

    def published(self, group: Group) -> None:
        assert group.generation == max(self.groups, default=0) + 1, "generations grow by one"
        before = self.groups.get(group.generation - 1)
        self.groups[group.generation] = group
        assert len(group.members) <= (self.spec.logical_workers or 10**9)
        assert not {(m.slot, m.incarnation) for m in group.members} & set(group.lost)
        assert bool(group.hold) == (group.size < self.spec.min_workers or not group.size)
        living = self.brain.groups.living
        assert all(living(m.slot, m.incarnation) is not None for m in group.members), "a dead member"
        if before is not None and group.lineage == before.lineage:
            kept = [m for m in group.members if m in before.members]
            assert list(group.members[: len(kept)]) == kept, "who has a state comes first"
        if group.lineage == group.generation:
            self.steps = {first: c for first, c in self.steps.items() if first < group.begin.step}
        # Whoever is in an older generation together with one that is gone hears of it.
        for old in list(self.groups.values())[-4:-1]:
            if old.lineage != group.lineage or old.generation < self.brain.state.groups.confirmed:
                continue
            alive = [m for m in old.members if living(m.slot, m.incarnation) is not None and m in group.members]
            gone = [m for m in old.members if self.died(m.slot, m.incarnation)]
            if alive and gone:
                assert old.broken_by(group), f"{alive} would wait for {gone} of {old}"

    def died(self, slot: Slot, incarnation: Incarnation) -> bool:
        """Killed; who left by itself had changed over before."""
        record = self.brain.members.workers[slot]
        if record.member.incarnation == incarnation and record.running:
            return False
        ends = [e for e in self.said if isinstance(e, ProcessExited) and (e.slot, e.incarnation) == (slot, incarnation)]
        return bool(ends) and ends[0].status == -9

    def worker(self) -> tuple[Slot, Incarnation]:
        slot = Slot(self.rng.randrange(5))
        record = self.brain.members.workers.get(slot)
        newest = record.member.incarnation if record is not None else 1
        return slot, Incarnation(max(1, newest - self.rng.choice((0, 0, 0, 0, 1))))

    def running(self, node: NodeId) -> tuple[tuple[Role, Slot, Incarnation, int], ...]:
        records = [s.member for s in self.brain.members.on(node) if s.running]
        return tuple((m.role, m.slot, m.incarnation, 1) for m in records if self.rng.random() < 0.8)

    def enter(self, slot: Slot, incarnation: Incarnation) -> None:
        self.say(Event(self.at, MemberJoined(Role.WORKER, slot, incarnation, NODES[0], 1)))
        self.say(Event(self.at, PlanRegistered(PLAN), by_worker(slot, incarnation)))
        self.say(
            Event(
                self.at,
                GroupAsked(0, EPOCHS, 8, None, self.rng.choice((None, Position(1, 0, 0, 8)))),
                by_worker(slot, incarnation),
            )
        )

    def commit(self, slot: Slot, incarnation: Incarnation) -> None:
        """What a living member may say: the next steps, and some before them."""
        groups, rng = self.brain.state.groups, self.rng
        record = self.brain.members.current(Role.WORKER, slot, incarnation)
        group = groups.group
        if record is None or group is None or group.rank(slot, incarnation) < 0 or group.hold:
            return
        steps: list[Committed] = []
        if self.steps and rng.random() < 0.5:
            steps.append(rng.choice(list(self.steps.values())))
        position = groups.position(0)
        if position.epoch < EPOCHS and rng.random() < 0.8:
            hi = min(PLAN.samples, position.sample + rng.choice((8, 16, 24)))
            generation = rng.randrange(max(groups.confirmed, groups.lineage), group.generation + 1)
            new = Committed(generation, position.step, position.step, 0, position.epoch, position.sample, hi)
            steps.append(new)
            self.steps[position.step] = new
        self.say(Event(self.at, StepsCommitted(tuple(steps)), by_worker(slot, incarnation)))

    def step(self) -> None:
        rng = self.rng
        self.at += rng.choice((0.1, 0.1, 2.0))
        at = self.at
        if self.said and rng.random() < 0.1:  # something said before is said again, much later
            again = rng.choice(self.said[-40:])
            if not isinstance(again, StepsCommitted):
                self.say(again)
            return
        slot, incarnation = self.worker()
        kind = rng.randrange(16)
        if kind == 0:
            self.master += rng.choice((0, 1))
            self.say(Event(at, MasterStarted(Incarnation(self.master), self.spec, True)))
        elif kind == 1:
            node = rng.choice(NODES)
            self.say(Event(at, NodeJoined(node, "", 0 if node == "node0" else 2, 0, self.running(node))))
        elif kind == 2 and rng.random() < 0.3:
            self.say(Event(at, NodeLost(NODES[1], "chaos")))
        elif kind in (3, 4, 5):
            self.enter(slot, incarnation)
        elif kind == 6:
            self.say(Event(at, MemberSilent(Role.WORKER, slot, incarnation, 9.0, rng.random() < 0.3)))
            self.say(Event(at, MemberHeard(Role.WORKER, slot, incarnation)))
        elif kind == 7:
            self.say(Event(at, ProcessExited(Role.WORKER, slot, incarnation, rng.choice((-9, -9, 143)))))
        elif kind in (8, 9):
            self.say(
                Event(
                    at,
                    GroupSynced(rng.randrange(1, self.brain.state.groups.generations + 2)),
                    by_worker(slot, incarnation),
                )
            )
        elif kind in (10, 11, 12):
            self.commit(slot, incarnation)
        elif kind == 13 and rng.random() < 0.3:
            self.say(Event(at, GroupLeft(LeaveReason.ASKED), by_worker(slot, incarnation)))
        elif kind == 14 and rng.random() < 0.5:
            silent = (Slot(rng.randrange(5)),) if rng.random() < 0.5 else ()
            self.say(
                Event(
                    at, GroupStalled(self.brain.state.groups.generations, 1, 1.5, silent), by_worker(slot, incarnation)
                )
            )
        elif kind == 15:
            what = rng.random()
            if what < 0.15:
                limit = self.spec.logical_workers or 5
                self.say(Event(at, ScaleAsked(Role.WORKER, rng.randrange(1, limit))))
            elif what < 0.25:
                self.say(Event(at, DrainAsked(f"worker:{slot}", 30.0)))
            else:
                self.say(Event(at, GroupDue()))

    def heal(self) -> None:
        """Everybody who runs does what a healthy worker does; the job comes to its end."""
        self.master += 1
        self.say(Event(self.at, MasterStarted(Incarnation(self.master), self.spec, True)))
        self.say(Event(self.at, NodeJoined(NODES[0], "", 0, 0, self.running(NODES[0]))))
        self.say(Event(self.at, NodeJoined(NODES[1], "", 4, 0, self.running(NODES[1]))))  # some slots are at home there
        self.say(Event(self.at, ScaleAsked(Role.WORKER, 3)))
        for _ in range(80):
            if self.brain.job.over:
                return
            self.at += 1.0
            if self.brain.state.groups.timing.due_at:
                self.say(Event(self.at, GroupDue()))
            records = [s for s in self.brain.members.workers.values() if s.running]
            for record in records:
                self.healthy(record.member.slot, record.member.incarnation)
        raise AssertionError(f"nobody gets on: {self.brain!r} {self.brain.state.groups!r}")

    def healthy(self, slot: Slot, incarnation: Incarnation) -> None:
        brain, groups = self.brain, self.brain.state.groups
        record = brain.members.current(Role.WORKER, slot, incarnation)
        if record is None:
            return
        if slot not in groups.asked or groups.asked[slot].incarnation != incarnation:
            self.say(Event(self.at, MemberJoined(Role.WORKER, slot, incarnation, NODES[0], 1)))
            self.say(Event(self.at, PlanRegistered(PLAN), by_worker(slot, incarnation)))
            self.say(Event(self.at, GroupAsked(0, EPOCHS, 8), by_worker(slot, incarnation)))
            return
        group = groups.group
        rank = group.rank(slot, incarnation) if group is not None else -1
        if rank < 0 or group is None:
            if record.stopping or any(x.slot == slot for x in groups.leavers):
                self.say(Event(self.at, ProcessExited(Role.WORKER, slot, incarnation, 143)))
            elif self.brain.groups.data_done() and self.copies_the_end(slot):
                self.end(slot, incarnation)
            elif group is not None:
                self.say(Event(self.at, GroupSynced(group.generation), by_worker(slot, incarnation)))
            return
        position = groups.position(0)
        if position.epoch >= EPOCHS:
            self.end(slot, incarnation)
        elif rank == 0 and not group.hold:
            hi = min(PLAN.samples, position.sample + 8 * group.size)
            new = Committed(group.generation, position.step, position.step, 0, position.epoch, position.sample, hi)
            self.steps[position.step] = new
            self.say(Event(self.at, StepsCommitted((new,)), by_worker(slot, incarnation)))

    def copies_the_end(self, slot: Slot) -> bool:
        """Whether somebody else has the state that this one's script ends with."""
        records = self.brain.members.workers.values()
        return any(s.running and s.member.slot != slot and self.brain.groups.has_state(s) for s in records)

    def end(self, slot: Slot, incarnation: Incarnation) -> None:
        """Its script is over; it goes when nobody needs its state any more."""
        if not self.brain.groups.has_ended(self.brain.members.workers[slot]):
            self.say(Event(self.at, GroupLeft(LeaveReason.DONE), by_worker(slot, incarnation)))
        if self.brain.may_end(slot, incarnation):
            self.say(Event(self.at, ProcessExited(Role.WORKER, slot, incarnation, 0)))


@pytest.mark.parametrize("seed", SEEDS)
def test_chaos(seed: int) -> None:
    chaos = Chaos(seed)
    chaos.say(Event(0.0, MasterStarted(Incarnation(0), chaos.spec)))
    chaos.master = 1
    chaos.say(Event(0.0, MasterStarted(Incarnation(1), chaos.spec)))
    chaos.say(Event(0.0, NodeJoined(NODES[0], "", 0, 0, ())))
    for i in range(80):
        chaos.step()
        if i % 10 == 0:
            chaos.brain.validate()
        if chaos.brain.job.over:
            break
    chaos.heal()
    chaos.brain.validate()
    brain = chaos.brain
    assert brain.job.exit_code == 0
    assert brain.shards.samples_done == EPOCHS * PLAN.samples
    at = (0, 0)
    for first in sorted(chaos.steps):
        c = chaos.steps[first]
        assert (c.epoch, c.lo) == at, f"{c} after {at}"
        at = (c.epoch + 1, 0) if c.hi == PLAN.samples else (c.epoch, c.hi)
    assert at == (EPOCHS, 0)
