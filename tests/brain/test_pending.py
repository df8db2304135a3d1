"""Shards whose rest a worker's script has not stepped with: the data ends with them, and they are not lost."""

from __future__ import annotations

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Answer,
    EndOfData,
    Event,
    FinishJob,
    Granted,
    InstructionType,
    LeaseExpired,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    NodeLost,
    Ok,
    PlanRegistered,
    ProcessExited,
    Reply,
    ShardAsked,
    ShardDone,
    StartProcess,
    Wait,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.shard import Lease, ShardSchedule, split_key

HOME, FAR, ONE, TWO = NodeId("node0"), NodeId("far"), Incarnation(1), Incarnation(2)


class Job:
    """Two workers, one on a node of its own, and a dataset of two shards an epoch. After each event the brain is
    replaced by what its snapshot restores."""

    def __init__(self) -> None:
        self.brain, self.at = Brain(), 0.0
        self.done: list[InstructionType] = []
        self.say(Event(1.0, MasterStarted(ONE, JobSpec(workers=1, ps=1, partitions=2))))
        self.say(Event(2.0, NodeJoined(HOME, "", 0, 1)))
        self.say(Event(3.0, MemberJoined(Role.PS, Slot(0), ONE, HOME, 1, Address(HOME, "ps-0"))))
        self.say(Event(3.0, MemberJoined(Role.WORKER, Slot(0), ONE, HOME, 1)))
        self.say(Event(3.0, NodeJoined(FAR, "", 1, 0)))
        self.say(Event(4.0, MemberJoined(Role.WORKER, Slot(1), ONE, FAR, 1)))
        self.say(
            Event(
                5.0,
                PlanRegistered(ShardSchedule(name="t", samples=20, shard_samples=10, seed=0)),
                by_worker(Slot(0), ONE),
            )
        )

    def say(self, event: Event) -> list[InstructionType]:
        self.at = event.at
        made = self.brain.handle(event)
        self.brain.validate()
        self.brain = Brain.restore(self.brain.snapshot())
        self.done += made
        return made

    def ask(self, slot: int, ask: int, *pending: Lease, until: int = 1, life: int = 1) -> Answer:
        numbers = tuple(lease.no for lease in pending)
        event = Event(self.at + 1, ShardAsked(0, until, ask, numbers), by_worker(Slot(slot), Incarnation(life)))
        (answer,) = [i.answer for i in self.say(event) if isinstance(i, Reply)]
        return answer

    def granted(self, slot: int, ask: int, *pending: Lease, until: int = 1, life: int = 1) -> Lease:
        answer = self.ask(slot, ask, *pending, until=until, life=life)
        assert isinstance(answer, Granted), answer
        return answer.lease

    def finish(self, slot: int, lease: Lease, life: int = 1) -> Answer:
        event = Event(
            self.at + 1, ShardDone(lease.shard, lease.no, ((Slot(0), ONE),)), by_worker(Slot(slot), Incarnation(life))
        )
        (answer,) = [i.answer for i in self.say(event) if isinstance(i, Reply)]
        return answer

    def ended(self) -> bool:
        return any(isinstance(i, FinishJob) for i in self.done)


def test_shards_that_are_pending_are_the_end_of_the_data() -> None:
    job = Job()
    a, b = job.granted(0, 1), job.granted(1, 1)
    assert isinstance(job.ask(0, 2, a), Wait), "the other worker is still at it"
    assert isinstance(job.ask(1, 2), Wait)
    assert isinstance(job.ask(1, 2, b), EndOfData)
    assert isinstance(job.ask(0, 2, a), EndOfData)
    assert job.finish(0, a) == Ok() and job.finish(1, b) == Ok()


def test_a_worker_that_computes_again_is_not_pending_any_more() -> None:
    job = Job()
    a, b = job.granted(0, 1), job.granted(1, 1)
    job.ask(0, 2, a)
    assert isinstance(job.ask(0, 2), Wait)  # a ps fell back: its batches did not fit
    assert isinstance(job.ask(1, 2, b), Wait)
    assert isinstance(job.ask(0, 2, a), EndOfData)


def test_a_lease_that_the_worker_has_not_heard_of_is_not_pending() -> None:
    job = Job()
    a = job.granted(0, 1)
    job.granted(0, 2)  # the answer is on its way
    assert isinstance(job.ask(0, 3, a), Wait)
    assert isinstance(job.ask(1, 1), Wait)


def test_the_next_epoch_begins_where_the_rest_of_this_one_is_pending() -> None:
    job = Job()
    a, b = job.granted(0, 1, until=2), job.granted(1, 1, until=2)
    assert isinstance(job.ask(0, 2, a, until=2), Wait)
    assert job.finish(1, b) == Ok()
    c = job.granted(0, 2, a, until=2)
    assert split_key(c.shard)[1:] == (1, 0)
    d = job.granted(1, 2, until=2)
    assert split_key(d.shard)[1:] == (1, 1)
    assert job.finish(1, d) == Ok()
    assert isinstance(job.ask(1, 3, until=2), Wait), "one lease is pending, the other one is not"
    assert isinstance(job.ask(0, 3, a, c, until=2), EndOfData)
    assert job.finish(0, a) == Ok() and job.finish(0, c) == Ok()
    assert isinstance(job.ask(1, 3, until=2), EndOfData)


def test_a_holder_that_is_lost_gives_its_pending_shard_back_and_another_does_it() -> None:
    job = Job()
    a, b = job.granted(0, 1), job.granted(1, 1)
    job.ask(1, 2, b)
    job.say(Event(job.at + 1, NodeLost(FAR, "gone")))
    again = job.granted(0, 2)
    assert again.shard == b.shard and again.no > b.no
    assert isinstance(job.ask(0, 3, a), Wait), "its own lease of that shard is not pending"
    assert job.finish(0, again) == Ok() and job.finish(0, a) == Ok()
    assert isinstance(job.ask(0, 3), EndOfData)
    job.say(Event(job.at + 1, ProcessExited(Role.WORKER, Slot(0), ONE, 0)))
    assert job.ended()


def test_a_pending_shard_that_is_lost_after_the_end_was_told_is_trained_again() -> None:
    """Seed 407 of the simulator: the other worker had ended, and the job with it, ten samples short."""
    job = Job()
    a, b = job.granted(0, 1), job.granted(1, 1)
    assert job.finish(0, a) == Ok()
    assert isinstance(job.ask(1, 2, b), EndOfData)
    assert isinstance(job.ask(0, 2), EndOfData)
    job.say(Event(job.at + 1, ProcessExited(Role.WORKER, Slot(0), ONE, 0)))
    made = job.say(Event(job.at + 1, NodeLost(FAR, "gone")))
    assert not job.ended()
    assert [(i.role, i.slot) for i in made if isinstance(i, StartProcess)] == [(Role.WORKER, 0)]
    job.say(Event(job.at + 1, MemberJoined(Role.WORKER, Slot(0), TWO, HOME, 1)))
    again = job.granted(0, 1, life=2)
    assert again.shard == b.shard
    assert job.finish(0, again, life=2) == Ok()
    assert isinstance(job.ask(0, 2, life=2), EndOfData)
    job.say(Event(job.at + 1, ProcessExited(Role.WORKER, Slot(0), TWO, 0)))
    assert job.ended()


def test_a_pending_lease_that_runs_out_after_the_end_was_told_is_trained_again() -> None:
    job = Job()
    a, b = job.granted(0, 1), job.granted(1, 1)
    assert job.finish(0, a) == Ok()
    assert isinstance(job.ask(1, 2, b), EndOfData) and isinstance(job.ask(0, 2), EndOfData)
    job.say(Event(job.at + 1, LeaseExpired(b.shard, LeaseNo(b.no), 9.0)))
    assert job.brain.shards.came_back == {b.shard}
    assert job.granted(0, 3).shard == b.shard
    for slot in (0, 1):
        job.say(Event(job.at + 1, ProcessExited(Role.WORKER, Slot(slot), ONE, 0)))
    assert not job.ended()
