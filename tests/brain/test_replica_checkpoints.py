"""Checkpoints of a group: a mark becomes a place in the data, and a job begins again there, exactly."""

from __future__ import annotations

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CheckpointAsked,
    CheckpointBegun,
    CheckpointCommitted,
    ChiefAsked,
    CommitManifest,
    DrainAsked,
    Event,
    Fenced,
    FinishJob,
    GroupAsked,
    GroupLeft,
    InstructionType,
    JobResumed,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    Note,
    Ok,
    OrderSnapshots,
    PlanRegistered,
    ProcessExited,
    PublishGroup,
    Refused,
    ReplicaWritten,
    Reply,
    StepsCommitted,
    StopAsked,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Committed, Group, HeldCopy, Position
from everstep.model.member import Role
from everstep.model.reasons import CheckpointReason, LeaveReason
from everstep.model.shard import ShardSchedule
from everstep.model.snapshot import CheckpointFile, Manifest, ReplicaCopy

SPEC = JobSpec(mode="allreduce", workers=2, ps=0, checkpoint_every="1h")
TRAIN = ShardSchedule(name="train", samples=100, shard_samples=10, seed=0)
MORE = ShardSchedule(name="more", samples=30, shard_samples=10, seed=0)
FILE = CheckpointFile("images/000001/replica-0.1-x.rep", 1000, "0" * 32)


class Script:
    def __init__(self, spec: JobSpec = SPEC, resumed: Manifest | None = None) -> None:
        self.brain, self.at = Brain(), 0.0
        self.say(Event(0.0, MasterStarted(Incarnation(1), spec, True)))
        if resumed is not None:
            self.say(Event(0.0, JobResumed(resumed, "old", resumed.checkpoint)))
        self.say(Event(0.0, NodeJoined(NodeId("node0"), "", 8, 8)))
        self.lives = dict.fromkeys(range(spec.workers), 0)
        for slot in self.lives:
            self.hire(slot)
        for slot in self.lives:
            self.ask(slot)

    def say(self, event: Event) -> list[InstructionType]:
        self.at += 0.01
        event = msgspec.structs.replace(event, at=self.at)
        restored = Brain.restore(self.brain.snapshot())
        out = self.brain.handle(event)
        assert restored.handle(event) == out
        self.brain.validate()
        return out

    def hire(self, slot: int) -> None:
        self.lives[slot] += 1
        self.say(
            Event(
                0.0, MemberJoined(Role.WORKER, Slot(slot), Incarnation(self.lives[slot]), NodeId("node0"), 100 + slot)
            )
        )
        for plan in (TRAIN, MORE):
            self.say(Event(0.0, PlanRegistered(plan), by_worker(Slot(slot), Incarnation(self.lives[slot]))))

    def ask(self, slot: int, position: Position | None = None, copy: HeldCopy | None = None) -> list[InstructionType]:
        return self.say(
            Event(0.0, GroupAsked(0, 2, 8, None, position, copy), by_worker(Slot(slot), Incarnation(self.lives[slot])))
        )

    def kill(self, slot: int) -> list[InstructionType]:
        return self.say(Event(0.0, ProcessExited(Role.WORKER, Slot(slot), Incarnation(self.lives[slot]), -9, "")))

    def commit(self, first: int, last: int, epoch: int, lo: int, hi: int, dataset: int = 0) -> list[InstructionType]:
        generation = self.brain.state.groups.generations
        steps = Committed(generation, first, last, dataset, epoch, lo, hi)
        return self.say(Event(0.0, StepsCommitted((steps,)), by_worker(Slot(0), Incarnation(self.lives[0]))))

    def written(self, position: Position, checkpoint: int = 1, error: str = "") -> list[InstructionType]:
        snapshot = ReplicaCopy(position=position, file=FILE, lineage=self.brain.state.groups.lineage, parameters=5)
        event = Event(
            0.0,
            ReplicaWritten(checkpoint, None if error else snapshot, error),
            by_worker(Slot(0), Incarnation(self.lives[0])),
        )
        return self.say(event)

    def save(self, position: Position, checkpoint: int = 1) -> Manifest:
        self.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
        out = self.written(position, checkpoint)
        (found,) = [i for i in out if isinstance(i, CommitManifest)]
        self.say(Event(0.0, CheckpointCommitted(checkpoint)))
        return found.manifest


def actions(out: list[InstructionType]) -> list[str]:
    return [i.decision.action for i in out if isinstance(i, Note)]


def test_a_manifest_says_where_the_state_is() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 7, 1, 0, 37)
    out = job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    assert out[0] == Reply(CheckpointBegun(1)) and OrderSnapshots(1, 0) in out
    out = job.written(Position(7, 0, 1, 20))  # a step before the newest
    manifest = next(i for i in out if isinstance(i, CommitManifest)).manifest
    assert manifest.replica is not None and manifest.replica.position == Position(7, 0, 1, 20)
    assert manifest.samples_done == 120
    assert [(d.plan.name, d.finished_epochs) for d in manifest.datasets] == [("train", 1), ("more", 0)]
    assert "checkpoint committed" in actions(job.say(Event(0.0, CheckpointCommitted(1))))


def test_a_state_of_steps_that_the_journal_does_not_have_is_to_be_said_again() -> None:
    job = Script()
    job.commit(0, 1, 0, 0, 40)
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    (reply,) = job.written(Position(3, 0, 0, 60))
    assert isinstance(reply, Reply) and isinstance(reply.answer, Refused)
    job.commit(2, 2, 0, 40, 60)
    assert [type(i) for i in job.written(Position(3, 0, 0, 60))] == [Reply, CommitManifest]
    assert job.written(Position(3, 0, 0, 60)) == [Reply(Ok())]  # a repeat


def test_all_workers_lost_begin_again_at_the_newest_checkpoint() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.save(Position(6, 0, 0, 100))
    job.commit(6, 9, 1, 0, 80)
    for slot in (0, 1):
        job.kill(slot)
    for slot in (0, 1):
        job.hire(slot)
    out = [*job.ask(0), *job.ask(1)]
    group = next(i for i in out if isinstance(i, PublishGroup)).group
    assert (group.begin, group.restore) == (Position(6, 0, 1, 0), 1)
    assert "steps void" in actions(out)
    assert job.brain.state.groups.step == 6 and job.brain.shards.samples_done == 100
    assert not isinstance(job.commit(6, 6, 1, 0, 20)[-1], FinishJob)


def test_all_workers_lost_wait_for_a_manifest_that_is_being_written() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    job.written(Position(6, 0, 0, 100))
    for slot in (0, 1):
        job.kill(slot)
    for slot in (0, 1):
        job.hire(slot)
    assert not any(isinstance(i, PublishGroup) for i in [*job.ask(0), *job.ask(1)])
    out = job.say(Event(0.0, CheckpointCommitted(1)))
    assert next(i for i in out if isinstance(i, PublishGroup)).group.restore == 1


def test_a_state_of_a_void_line_is_not_taken() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    snapshot = ReplicaCopy(position=Position(6, 0, 0, 100), file=FILE, lineage=77)
    out = job.say(Event(0.0, ReplicaWritten(1, snapshot), by_worker(Slot(0), Incarnation(1))))
    assert "checkpoint given up" in actions(out)
    old = Event(0.0, ReplicaWritten(1, snapshot), by_worker(Slot(0), Incarnation(0)))
    assert isinstance(job.say(old)[0].answer, Fenced)  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_resumed_job_goes_on_at_the_mark_with_any_number_of_workers(workers: int) -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 7, 1, 0, 37)
    manifest = job.save(Position(8, 0, 1, 37))
    spec = msgspec.structs.replace(SPEC, workers=workers, resume_from="old")
    again = Script(spec, manifest)
    group = again.brain.state.groups.group
    assert group is not None and (group.size, group.begin, group.restore) == (workers, Position(8, 0, 1, 37), 1)
    assert again.brain.shards.samples_done == 137
    again.commit(8, 9, 1, 37, 100)
    assert again.brain.shards.samples_done == 200 and not again.brain.job.over


def test_a_resumed_job_knows_the_datasets_that_are_over() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 7, 0, 0, 20, dataset=1)
    manifest = job.save(Position(8, 1, 0, 20))
    again = Script(msgspec.structs.replace(SPEC, resume_from="old"), manifest)
    groups = again.brain.groups.group_state
    assert groups.position(0) == Position(8, 0, 1, 0) and groups.position(1) == Position(8, 1, 0, 20)
    assert again.brain.shards.samples_done == 120


def test_the_last_healthy_replica_saves_itself() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    out = job.kill(1)
    assert any(isinstance(i, OrderSnapshots) for i in out)
    begun = next(i.decision for i in out if isinstance(i, Note) and i.decision.action == "checkpoint begun")
    assert "one healthy replica is left" in begun.reason
    without = Script(msgspec.structs.replace(SPEC, checkpoint_every=""))
    without.commit(0, 5, 0, 0, 100)
    assert not any(isinstance(i, OrderSnapshots) for i in without.kill(1))


def test_a_reclaim_notice_saves_the_state() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    out = job.say(Event(0.0, DrainAsked("worker:1", 30.0)))
    assert any(isinstance(i, OrderSnapshots) for i in out)


def test_the_last_ones_that_leave_save_what_they_have_not_told_yet() -> None:
    job = Script()
    job.commit(0, 2, 0, 0, 60)
    job.save(Position(3, 0, 0, 60))
    out = [job.say(Event(0.0, GroupLeft(LeaveReason.ASKED), by_worker(Slot(slot), Incarnation(1)))) for slot in (0, 1)][
        1
    ]
    assert any(isinstance(i, OrderSnapshots) for i in out)
    group = job.brain.state.groups.group
    assert group is not None and group.size == 1, "somebody stays until it is saved"


def test_a_job_that_is_stopped_takes_a_last_checkpoint_first() -> None:
    job = Script()
    stop = Event(0.0, StopAsked("everstep stop", True))
    job.commit(0, 2, 0, 0, 60)
    out = job.say(stop)
    assert any(isinstance(i, OrderSnapshots) for i in out) and not job.brain.job.over
    assert job.say(stop) == [Reply(Ok())]
    job.written(Position(3, 0, 0, 60))
    out = job.say(Event(0.0, CheckpointCommitted(1)))
    assert [i.exit_code for i in out if isinstance(i, FinishJob)] == [0]


def test_a_job_that_trains_takes_a_last_checkpoint_though_it_told_nothing_since_the_one_before() -> None:
    job = Script()
    job.commit(0, 2, 0, 0, 60)
    job.save(Position(3, 0, 0, 60))
    out = job.say(Event(0.0, StopAsked("everstep stop", True)))
    assert any(isinstance(i, OrderSnapshots) for i in out) and not job.brain.job.over
    assert isinstance(job.written(Position(5, 0, 0, 90), checkpoint=2)[0], Reply), "not before they are told"
    job.commit(3, 4, 0, 60, 90)
    job.written(Position(5, 0, 0, 90), checkpoint=2)
    out = job.say(Event(0.0, CheckpointCommitted(2)))
    assert [i.exit_code for i in out if isinstance(i, FinishJob)] == [0]


def test_a_job_that_is_stopped_with_nothing_new_to_save_ends_at_once() -> None:
    job = Script()
    assert any(isinstance(i, FinishJob) for i in job.say(Event(0.0, StopAsked("everstep stop", True))))
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 11, 1, 0, 100)
    job.save(Position(12, 1, 0, 100))
    assert any(isinstance(i, FinishJob) for i in job.say(Event(0.0, StopAsked("everstep stop", True))))


def test_a_last_checkpoint_is_waited_for_until_nobody_can_write_it() -> None:
    job = Script()
    job.commit(0, 2, 0, 0, 60)
    job.say(Event(0.0, StopAsked("everstep stop", True)))
    job.kill(0)
    job.kill(1)
    job.hire(0)  # there is no state any more, but a worker may come to it again: no checkpoint of nothing
    job.at += 61.0
    out = job.say(Event(0.0, CheckpointAsked(CheckpointReason.LATE)))
    assert [i.exit_code for i in out if isinstance(i, FinishJob)] == [0]


def test_scripts_that_end_while_a_last_checkpoint_is_written_end_the_job() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 11, 1, 0, 100)
    job.say(Event(0.0, StopAsked("everstep stop", True)))
    for slot in (0, 1):
        job.say(Event(0.0, GroupLeft(LeaveReason.DONE), by_worker(Slot(slot), Incarnation(1))))
        out = job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(slot), Incarnation(1), 0, "")))
    assert any(isinstance(i, FinishJob) for i in out)


def test_a_job_that_is_stopped_while_what_it_ends_with_is_written_ends_with_it() -> None:
    """All scripts have ended, and the last checkpoint is not committed yet: without it the result would be lost."""
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 11, 1, 0, 100)
    for slot in (0, 1):
        job.say(Event(0.0, ChiefAsked(), by_worker(Slot(slot), Incarnation(1))))
        job.say(Event(0.0, GroupLeft(LeaveReason.DONE), by_worker(Slot(slot), Incarnation(1))))
    assert [type(i) for i in job.written(Position(12, 1, 0, 100))] == [Reply, CommitManifest]
    for slot in (0, 1):
        out = job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(slot), Incarnation(1), 0, "")))
        assert not any(isinstance(i, FinishJob) for i in out)
    out = job.say(Event(0.0, StopAsked("everstep stop", True)))
    assert not any(isinstance(i, FinishJob) for i in out), "the result would be lost"
    out = job.say(Event(0.0, CheckpointCommitted(1)))
    assert [i.exit_code for i in out if isinstance(i, FinishJob)] == [0]


@pytest.mark.parametrize("saved", [True, False])
def test_the_last_ones_that_are_told_to_go_stay_for_a_checkpoint(saved: bool) -> None:
    job = Script()
    job.commit(0, 2, 0, 0, 60)
    out = job.say(Event(0.0, GroupLeft(LeaveReason.ASKED), by_worker(Slot(0), Incarnation(1))))
    assert not any(isinstance(i, OrderSnapshots) for i in out)  # worker:1 has it
    out = job.say(Event(0.0, GroupLeft(LeaveReason.ASKED), by_worker(Slot(1), Incarnation(1))))
    assert any(isinstance(i, OrderSnapshots) for i in out)
    group = job.brain.state.groups.group
    assert group is not None and [m.slot for m in group.members] == [1]
    job.commit(3, 3, 0, 60, 68)
    job.say(Event(0.0, GroupLeft(LeaveReason.ASKED), by_worker(Slot(1), Incarnation(1))))  # a repeat
    if saved:
        snapshot = ReplicaCopy(position=Position(4, 0, 0, 68), file=FILE, lineage=1)
        job.say(Event(0.0, ReplicaWritten(1, snapshot), by_worker(Slot(1), Incarnation(1))))
        job.say(Event(0.0, CheckpointCommitted(1)))
    else:
        for _ in range(3):
            job.say(Event(0.0, ReplicaWritten(1, None, "no space"), by_worker(Slot(1), Incarnation(1))))
    group = job.brain.state.groups.group
    assert group is not None and group.size == 0  # it is let go
    job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(1), Incarnation(1), 143, "")))
    assert job.brain.groups.start == ((Position(4, 0, 0, 68), 1) if saved else (Position(), 0))


def test_a_leader_that_cannot_write_costs_the_checkpoint_only() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    assert "checkpoint not written" in actions(job.written(Position(), error="no space"))
    job.written(Position(), error="no space")
    assert "checkpoint given up" in actions(job.written(Position(), error="no space"))
    assert job.brain.checkpoints.writing is None and not job.brain.job.over


def left_loop(job: Script, slot: int, reached: int, generation: int = 1) -> list[InstructionType]:
    """The script of this worker left its loop before the data's end, and has come to its end."""
    who = by_worker(Slot(slot), Incarnation(job.lives[slot]))
    job.say(Event(0.0, ChiefAsked(), who))
    return job.say(Event(0.0, GroupLeft(LeaveReason.DONE, 1, 0, reached, generation), who))


def test_the_last_step_of_scripts_that_leave_their_loops_is_told_when_all_have_ended() -> None:
    job = Script()
    job.commit(0, 5, 0, 0, 60)
    assert "checkpoint begun" not in actions(left_loop(job, 1, 7))  # the other one may train on
    assert job.brain.groups.committed_everywhere() == 0
    assert "checkpoint begun" in actions(left_loop(job, 0, 7))
    assert job.brain.groups.committed_everywhere() == 7
    assert not any(job.brain.may_end(Slot(slot), Incarnation(1)) for slot in (0, 1))
    steps = Committed(1, 6, 6, 0, 0, 60, 70)
    job.say(Event(0.0, StepsCommitted((steps,)), by_worker(Slot(0), Incarnation(1))))
    writing = job.brain.checkpoints.writing
    assert writing is not None and writing.reason is CheckpointReason.FINAL
    job.written(Position(7, 0, 0, 70), writing.number)
    assert all(job.brain.may_end(Slot(slot), Incarnation(1)) for slot in (0, 1))


def test_no_worker_goes_before_the_last_step_is_told_though_there_is_no_checkpoint() -> None:
    job = Script(msgspec.structs.replace(SPEC, checkpoint_every=""))
    job.commit(0, 5, 0, 0, 60)
    for slot in (0, 1):
        left_loop(job, slot, 7)
    assert not any(job.brain.may_end(Slot(slot), Incarnation(1)) for slot in (0, 1))
    steps = Committed(1, 6, 6, 0, 0, 60, 70)
    job.say(Event(0.0, StepsCommitted((steps,)), by_worker(Slot(0), Incarnation(1))))
    assert all(job.brain.may_end(Slot(slot), Incarnation(1)) for slot in (0, 1))


@pytest.mark.parametrize("other", [(6, 1), (7, 2), (7, 0), (0, 0)])
def test_states_that_differ_let_nobody_tell(other: tuple[int, int]) -> None:
    """One left its loop in the step that the other did again without it, or says nothing."""
    job = Script()
    job.commit(0, 5, 0, 0, 60)
    left_loop(job, 0, 7)
    left_loop(job, 1, *other)
    assert job.brain.groups.committed_everywhere() == 0


def test_a_newcomer_without_a_state_is_not_waited_for_to_tell_the_last_step() -> None:
    """The chief was lost behind the loop that all left: the one in its place copies the state once it is told."""
    job = Script()
    job.commit(0, 5, 0, 0, 60)
    left_loop(job, 1, 7)
    job.kill(0)
    job.hire(0)
    job.ask(0)
    assert job.brain.groups.committed_everywhere() == 7


def test_who_writes_what_the_job_ends_with_is_lost_and_another_one_writes_it() -> None:
    """Both scripts are over; nobody goes before the state is in the job's last checkpoint."""
    job = Script()
    job.commit(0, 5, 0, 0, 100)
    job.commit(6, 9, 1, 0, 100)
    for slot in (0, 1):
        job.say(Event(0.0, ChiefAsked(), by_worker(Slot(slot), Incarnation(1))))
        job.say(Event(0.0, GroupLeft(LeaveReason.DONE), by_worker(Slot(slot), Incarnation(1))))
    assert not any(job.brain.may_end(Slot(slot), Incarnation(1)) for slot in (0, 1))
    writing = job.brain.checkpoints.writing
    assert writing is not None and writing.writer == 0
    job.kill(0)
    assert job.brain.checkpoints.writing is writing and writing.writer == 1
    assert not job.brain.may_end(Slot(1), Incarnation(1))
    out = job.kill(1)  # nobody has the state any more: it is trained again
    assert not any(isinstance(i, FinishJob) for i in out) and "not the end" in actions(out)
    for slot in (0, 1):
        job.hire(slot)
    assert any(isinstance(i, PublishGroup) and not i.group.begin.step for i in [*job.ask(0), *job.ask(1)])


# ---------------------------------------------------------------- copies that outlive their worker (mode pipeline)

STAGES = JobSpec(mode="pipeline", stages=2, workers=1, ps=0, checkpoint_every="1h")


def begins(out: list[InstructionType]) -> Group:
    return next(i for i in out if isinstance(i, PublishGroup)).group


def staged() -> Script:
    """A job whose newest checkpoint is of step 2, and which the journal has up to step 7."""
    job = Script(STAGES)
    job.commit(0, 1, 0, 0, 20)
    job.save(Position(2, 0, 0, 20))
    job.commit(2, 7, 0, 20, 80)
    return job


def test_the_only_worker_goes_on_from_its_copy() -> None:
    job = staged()
    job.kill(0)
    job.hire(0)
    out = job.ask(0, copy=HeldCopy(Position(7, 0, 0, 70), 1))
    group = begins(out)
    assert (group.begin, group.restore, group.copied) == (Position(7, 0, 0, 70), 0, (0, 2)) and not group.from_nothing
    assert job.brain.state.groups.step == 7 and job.brain.shards.samples_done == 70
    void = next(i.decision for i in out if isinstance(i, Note) and i.decision.action == "steps void")
    assert "steps 7..7 are done again, from the copy of worker:0" in void.reason
    job.commit(7, 8, 0, 70, 100)
    assert job.brain.shards.samples_done == 100


def test_a_copy_at_the_end_of_an_epoch_is_at_the_begin_of_the_next() -> None:
    job = staged()
    job.commit(8, 9, 0, 80, 100)
    job.kill(0)
    job.hire(0)
    assert begins(job.ask(0, copy=HeldCopy(Position(10, 0, 0, 100), 1))).begin == Position(10, 0, 1, 0)


def test_killed_again_before_the_next_copy_it_begins_there_again() -> None:
    job = staged()
    for _ in range(3):
        job.kill(0)
        job.hire(0)
        group = begins(job.ask(0, copy=HeldCopy(Position(7, 0, 0, 70), 1)))
        assert (group.begin, group.copied) == (Position(7, 0, 0, 70), (0, job.lives[0]))


@pytest.mark.parametrize(
    "copy",
    [
        HeldCopy(Position(7, 0, 0, 70), 9),  # of another line
        HeldCopy(Position(9, 0, 0, 90), 1),  # the journal lacks its steps
        HeldCopy(Position(8, 0, 0, 77), 1),  # the journal has that step elsewhere
        HeldCopy(Position(2, 0, 0, 20), 1),  # older than the checkpoint, or as old
        None,
    ],
)
def test_a_copy_that_is_of_no_use_is_left(copy: HeldCopy | None) -> None:
    job = staged()
    job.kill(0)
    job.hire(0)
    group = begins(job.ask(0, copy=copy))
    assert (group.begin, group.restore, group.copied) == (Position(2, 0, 0, 20), 1, None)


def test_a_copy_of_a_line_that_is_over_is_left() -> None:
    job = staged()
    job.kill(0)
    job.hire(0)
    assert begins(job.ask(0)).restore == 1
    job.commit(2, 4, 0, 20, 50)
    job.kill(0)
    job.hire(0)
    assert begins(job.ask(0, copy=HeldCopy(Position(7, 0, 0, 70), 1))).restore == 1


def test_with_others_there_a_copy_is_not_needed() -> None:
    job = Script(msgspec.structs.replace(STAGES, workers=2))
    job.commit(0, 7, 0, 0, 80)
    job.kill(1)
    job.hire(1)
    job.ask(1, copy=HeldCopy(Position(7, 0, 0, 70), 1))
    group = job.brain.state.groups.group
    assert group is not None and group.copied is None and group.lineage == 1
    for slot in (0, 1):
        job.kill(slot)
    for slot in (0, 1):
        job.hire(slot)
    job.ask(0, copy=HeldCopy(Position(6, 0, 0, 60), 1))
    group = begins(job.ask(1, copy=HeldCopy(Position(7, 0, 0, 70), 1)))
    assert (group.begin, group.copied, group.size) == (Position(7, 0, 0, 70), (1, 3), 2)
