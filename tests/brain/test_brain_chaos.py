"""Any events in any order: the invariants hold, the snapshot is the state, and healthy workers finish the job.

One run again: ``EVERSTEP_SEED=17 pytest tests/brain/test_brain_chaos.py``.
"""

from __future__ import annotations

import os
import random

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    EndOfData,
    Event,
    FinishJob,
    Granted,
    LeaseExpired,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    NodeJoined,
    NodeLost,
    PlanRegistered,
    ProcessExited,
    Reply,
    ScaleAsked,
    ShardAsked,
    ShardDone,
    ShardReturned,
    StartProcess,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.shard import Lease, ShardSchedule

SPEC = JobSpec(workers=3, ps=2, partitions=4, max_restarts=10**6, quarantine_after=0)
PLAN = ShardSchedule(name="d", samples=95, shard_samples=10, seed=0)
NODES = (NodeId("node0"), NodeId("node1"))
EPOCHS = 2
SEEDS = [int(os.environ["EVERSTEP_SEED"])] if "EVERSTEP_SEED" in os.environ else range(60)


class Chaos:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.brain = Brain()
        self.at = 0.0
        self.master = 0
        self.leases: list[Lease] = []  # ever granted, also to those who are dead by now
        self.done: dict[int, int] = {}  # shard -> how often its done was taken
        self.said: list[Event] = []

    def say(self, event: Event) -> list[object]:
        self.said.append(event)
        out = self.brain.handle(event)
        for instruction in out:
            if isinstance(instruction, Reply) and isinstance(instruction.answer, Granted):
                self.leases.append(instruction.answer.lease)
        return list(out)

    def worker(self) -> tuple[Slot, Incarnation]:
        slot = Slot(self.rng.randrange(5))
        record = self.brain.members.workers.get(slot)
        newest = record.member.incarnation if record is not None else 1
        return slot, Incarnation(max(1, newest - self.rng.choice((0, 0, 0, 1))))

    def servers(self) -> tuple[tuple[Slot, Incarnation], ...]:
        placement = self.brain.placement
        if placement is None:
            return ()
        stale = self.rng.random() < 0.1
        return tuple((p.slot, Incarnation(p.incarnation - stale)) for p in placement.servers)

    def running(self, node: NodeId) -> tuple[tuple[Role, Slot, Incarnation, int], ...]:
        records = [s.member for s in self.brain.members.on(node) if s.running]
        return tuple(
            (m.role, m.slot, m.incarnation, 1) for m in records if m.role is Role.PS or self.rng.random() < 0.8
        )

    def step(self) -> None:
        rng = self.rng
        self.at += 0.1
        at = self.at
        if self.said and rng.random() < 0.15:  # something said before is said again, much later
            self.say(rng.choice(self.said[-40:]))
            return
        slot, incarnation = self.worker()
        kind = rng.randrange(14)
        if kind == 0:
            self.master += rng.choice((0, 1))
            self.say(Event(at, MasterStarted(Incarnation(self.master), SPEC)))
        elif kind == 1:
            node = rng.choice(NODES)
            self.say(Event(at, NodeJoined(node, "", 0 if node == "node0" else 2, 0, self.running(node))))
        elif kind == 2 and rng.random() < 0.3:
            self.say(Event(at, NodeLost(NODES[1], "chaos")))
        elif kind in (3, 4):
            leases = tuple(rng.sample(self.leases, min(len(self.leases), rng.randrange(3))))
            self.say(Event(at, MemberJoined(Role.WORKER, slot, incarnation, rng.choice(NODES), 1, None, leases)))
        elif kind == 5:
            self.say(Event(at, MemberSilent(Role.WORKER, slot, incarnation, 9.0, rng.random() < 0.5)))
            self.say(Event(at, MemberHeard(Role.WORKER, slot, incarnation)))
        elif kind == 6:
            self.say(Event(at, ProcessExited(Role.WORKER, slot, incarnation, -9)))
        elif kind == 7:
            self.say(Event(at, PlanRegistered(PLAN), by_worker(slot, incarnation)))
        elif kind in (8, 9):
            self.say(Event(at, ShardAsked(0, EPOCHS, rng.randrange(50)), by_worker(slot, incarnation)))
        elif kind in (10, 11) and self.leases:
            self.finish_shard(slot, incarnation, rng.choice(self.leases), self.servers())
        elif kind == 12 and self.leases:
            lease = rng.choice(self.leases)
            self.say(
                rng.choice(
                    (
                        Event(at, ShardReturned(lease.shard, lease.no, "chaos"), by_worker(slot, incarnation)),
                        Event(at, LeaseExpired(lease.shard, lease.no, 120.0)),
                    )
                )
            )
        elif kind == 13 and rng.random() < 0.3:
            self.say(Event(at, ScaleAsked(Role.WORKER, rng.randrange(1, 5))))

    def finish_shard(
        self, slot: Slot, incarnation: Incarnation, lease: Lease, acks: tuple[tuple[Slot, Incarnation], ...]
    ) -> None:
        current = self.brain.leases.get(lease.shard)
        self.say(Event(self.at, ShardDone(lease.shard, lease.no, acks), by_worker(slot, incarnation)))
        if (
            current is not None
            and lease.shard not in self.brain.leases
            and not self.brain.shards.taken_back.get(lease.shard)
        ):
            assert (current.no, current.worker, current.incarnation) == (lease.no, slot, incarnation)
            self.done[lease.shard] = self.done.get(lease.shard, 0) + 1

    def heal(self) -> bool:
        """One fresh worker after the other does all that is left. Whether the job ended well."""
        self.master += 1
        self.say(Event(self.at, MasterStarted(Incarnation(self.master), SPEC)))
        self.say(Event(self.at, NodeJoined(NODES[0], "", 0, 0, ())))
        for slot, record in list(self.brain.members.servers.items()):
            address = Address(NODES[0], f"ps{slot}")
            self.say(Event(self.at, MemberJoined(Role.PS, slot, record.member.incarnation, NODES[0], 1, address)))
        while alive := [s for s in self.brain.members.workers.values() if s.running]:
            record = alive[0]
            slot, incarnation = record.member.slot, record.member.incarnation
            self.say(Event(self.at, MemberJoined(Role.WORKER, slot, incarnation, record.member.node, 1)))
            self.say(Event(self.at, PlanRegistered(PLAN), by_worker(slot, incarnation)))
            for key in list(record.held):
                held = self.brain.leases[key]
                self.say(Event(self.at, LeaseExpired(held.shard, held.no, 120.0)))
            ask = 10_000
            while True:
                ask += 1
                answer = self.say(Event(self.at, ShardAsked(0, EPOCHS, ask), by_worker(slot, incarnation)))[0].answer  # type: ignore[attr-defined]
                if isinstance(answer, EndOfData):
                    break
                if not isinstance(answer, Granted):  # another one holds the rest: it is not there any more
                    others = [s for s in alive[1:] if s.held] or [record]
                    for other in others:
                        member = other.member
                        self.say(Event(self.at, MemberSilent(Role.WORKER, member.slot, member.incarnation, 9.0, True)))
                    if others == [record]:
                        break  # it is on its way out
                    continue
                placement = self.brain.placement
                assert placement is not None
                acks = tuple((p.slot, p.incarnation) for p in placement.servers)
                self.finish_shard(slot, incarnation, answer.lease, acks)
            out = self.say(Event(self.at, ProcessExited(Role.WORKER, slot, incarnation, 0)))
            if any(isinstance(i, FinishJob) and i.exit_code == 0 for i in out):
                return True
        return False


@pytest.mark.parametrize("seed", SEEDS)
def test_chaos(seed: int) -> None:
    chaos = Chaos(seed)
    chaos.say(Event(0.0, MasterStarted(Incarnation(1), SPEC)))
    chaos.master = 1
    started = chaos.say(Event(0.0, NodeJoined(NODES[0], "", 0, 0)))
    assert sum(isinstance(i, StartProcess) for i in started) == 5
    for slot in (Slot(0), Slot(1)):
        chaos.say(Event(0.0, MemberJoined(Role.PS, slot, Incarnation(1), NODES[0], 1, Address(NODES[0], f"ps{slot}"))))
    chaos.say(Event(0.0, MemberJoined(Role.WORKER, Slot(0), Incarnation(1), NODES[0], 1)))
    chaos.say(Event(0.0, PlanRegistered(PLAN), by_worker(Slot(0), Incarnation(1))))
    for n in range(300):
        chaos.step()
        chaos.brain.validate()
        if n % 10 == 0:
            snapshot = chaos.brain.snapshot()
            chaos.brain = Brain.restore(snapshot)
            assert chaos.brain.snapshot() == snapshot
        for record in chaos.brain.members.servers.values():
            assert record.member.incarnation == 1
    assert chaos.heal(), chaos.brain
    chaos.brain.validate()
    dataset = chaos.brain.shards.datasets[0]
    assert [epoch.done for epoch in dataset.epochs] == [PLAN.shards] * EPOCHS
    assert chaos.brain.shards.samples_done == EPOCHS * PLAN.samples
    assert sorted(chaos.done.values()) == [1] * (EPOCHS * PLAN.shards)
