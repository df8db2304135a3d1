"""A group whose tables are on ps: both have their losses, one does not disturb the other, and a checkpoint has both."""

from __future__ import annotations

import msgspec
from test_replica_checkpoints import TRAIN, Script, actions

from everstep.brain.events import (
    CheckpointAsked,
    CheckpointCommitted,
    CommitManifest,
    Event,
    Fenced,
    FinishJob,
    Grouped,
    GroupLeft,
    GroupSynced,
    InstructionType,
    MemberJoined,
    MirrorsReady,
    OrderSnapshots,
    PartitionsReady,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    Reply,
    SnapshotsWritten,
    StartProcess,
    StepsCommitted,
    StopAsked,
    StopProcess,
    Welcome,
    by_ps,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.group import Committed, Group, Position
from everstep.model.member import Address, Role
from everstep.model.reasons import Arrival, CheckpointReason, LeaveReason
from everstep.model.shard import LEASE_COUNTER_BITS, shard_key
from everstep.model.snapshot import CheckpointFile, Holdings, Manifest, PartitionSnapshot

SPEC = JobSpec(mode="allreduce", workers=2, ps=2, partitions=4, checkpoint_every="1h")


class Tables(Script):
    """As ``Script``, with ps."""

    def __init__(self, spec: JobSpec = SPEC) -> None:
        self.placed: list[InstructionType] = []
        super().__init__(spec)
        for slot in range(spec.ps):
            self.placed += self.serve(slot)

    def serve(self, slot: int, life: int = 1) -> list[InstructionType]:
        address = Address(NodeId("node0"), f"sock/ps-{slot}.{life}")
        node, holds = NodeId("node0"), Holdings()
        return self.say(Event(0.0, MemberJoined(Role.PS, Slot(slot), Incarnation(life), node, 7, address, (), holds)))

    def lose(self, slot: int, life: int = 1) -> list[InstructionType]:
        return self.say(Event(0.0, ProcessExited(Role.PS, Slot(slot), Incarnation(life), -9, "")))

    def snapshots(self, slot: int, at: int, checkpoint: int = 1) -> list[InstructionType]:
        placement = self.brain.placement
        assert placement is not None
        mine = tuple(
            PartitionSnapshot(
                partition=b,
                seq=at,
                fingerprint=0,
                watermarks=((shard_key(0, 0, 0), at),),
                files=(CheckpointFile(f"images/000001/bucket-{b}.img", 10, "0" * 32),),
            )
            for b in placement.owned_by(Slot(slot))
        )
        return self.say(Event(0.0, SnapshotsWritten(checkpoint, mine), by_ps(Slot(slot), Incarnation(1))))


def test_members_get_the_map_and_a_lease_that_grows_with_generation_and_master() -> None:
    job = Tables()
    assert any(isinstance(i, PublishPlacement) for i in job.placed)
    (welcome, *_) = job.say(Event(0.0, MemberJoined(Role.WORKER, Slot(0), Incarnation(1), NodeId("node0"), 100)))
    assert isinstance(welcome, Reply) and isinstance(welcome.answer, Welcome)
    assert welcome.answer.placement == job.brain.placement
    first = job.brain.state.groups.group
    assert first is not None and first.lease == 1 << LEASE_COUNTER_BITS | 1
    out = job.kill(1)
    group = next(i for i in out if isinstance(i, PublishGroup)).group
    assert group.lease > first.lease


def test_a_ps_is_no_member_of_the_group_though_a_worker_has_its_number() -> None:
    job = Tables(msgspec.structs.replace(SPEC, parity="1+1", checkpoint_every=""))
    job.commit(0, 2, 0, 0, 40)
    placement = job.brain.placement
    assert placement is not None
    for slot in (0, 1):
        mirrors = tuple(m.id for m in placement.mirrors_at(Slot(slot)))
        job.say(Event(0.0, MirrorsReady(mirrors), by_ps(Slot(slot), Incarnation(1))))
    group = job.brain.state.groups.group
    assert not any(isinstance(i, PublishGroup) for i in job.lose(1))
    assert job.brain.state.groups.group == group
    fenced = job.serve(1)[0]
    assert isinstance(fenced, Reply) and isinstance(fenced.answer, Fenced)
    assert not isinstance(job.commit(3, 3, 0, 40, 50)[0], Fenced)


def test_a_checkpoint_is_the_replica_and_then_snapshots_that_have_what_it_has() -> None:
    job = Tables()
    job.commit(0, 3, 0, 0, 60)
    assert OrderSnapshots(1, 0) in job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    assert not any(isinstance(i, CommitManifest) for i in job.snapshots(0, 100)), "from before the replica"
    out = job.written(Position(3, 0, 0, 50))
    assert OrderSnapshots(1, 0) in out and not any(isinstance(i, CommitManifest) for i in out)
    job.snapshots(0, 50)
    out = job.snapshots(1, 60)
    manifest: Manifest = next(i for i in out if isinstance(i, CommitManifest)).manifest
    assert manifest.replica is not None and manifest.replica.position == Position(3, 0, 0, 50)
    assert [snapshot.partition for snapshot in manifest.snapshots] == [PartitionId(b) for b in range(4)]
    assert manifest.samples_done == 50 and manifest.datasets[0].plan == TRAIN


def test_snapshots_behind_the_replica_or_a_replica_that_is_void_make_no_checkpoint() -> None:
    job = Tables()
    job.commit(0, 3, 0, 0, 60)
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    job.written(Position(3, 0, 0, 50))
    assert "checkpoint given up" in actions(job.snapshots(0, 49))
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    job.written(Position(3, 0, 0, 50), checkpoint=2)
    for slot in (0, 1):
        job.kill(slot)
    for slot in (0, 1):
        job.hire(slot)
        job.ask(slot)
    assert "checkpoint given up" in actions(job.snapshots(0, 60, checkpoint=2))


def saved_tables() -> Tables:
    """Three steps, and a checkpoint that has them."""
    job = Tables()
    job.commit(0, 3, 0, 0, 60)
    job.say(Event(0.0, CheckpointAsked(CheckpointReason.ASKED)))
    job.written(Position(3, 0, 0, 50))
    job.snapshots(0, 60)
    job.snapshots(1, 60)
    job.say(Event(0.0, CheckpointCommitted(1)))
    return job


def test_a_partition_that_goes_back_takes_everybody_back() -> None:
    job = saved_tables()
    job.commit(4, 5, 0, 60, 80)
    out = job.lose(1)
    assert {i.slot for i in out if isinstance(i, StopProcess)} == {0, 1}
    assert not any(isinstance(i, PublishPlacement) for i in out), (
        "first they end: nobody pushes to a partition that went back"
    )
    later: list[InstructionType] = []
    for slot in (0, 1):
        later += job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(slot), Incarnation(1), 143, "")))
    later += job.serve(1, life=2)  # (its next life had been ordered meanwhile, and is waited for)
    placement = next(i for i in later if isinstance(i, PublishPlacement)).placement
    assert dict(placement.snapshots)[PartitionId(1)] == dict(placement.snapshots)[PartitionId(3)] == 1
    assert {i.slot for i in later if isinstance(i, StartProcess) and i.role is Role.WORKER} == {0, 1}
    job.lives = dict.fromkeys(job.lives, 1)
    for slot in (0, 1):
        job.hire(slot)
    out = [*job.ask(0), *job.ask(1)]
    group = next(i for i in out if isinstance(i, PublishGroup)).group
    assert (group.begin, group.restore) == (Position(3, 0, 0, 50), 1)
    job.say(
        Event(
            0.0,
            PartitionsReady(placement.version, tuple(placement.owned_by(Slot(0))), Arrival.LOADED),
            by_ps(Slot(0), Incarnation(1)),
        )
    )


def test_a_newcomer_gets_no_state_of_those_who_end_since_partitions_go_back() -> None:
    job = saved_tables()
    job.commit(4, 5, 0, 60, 80)
    job.kill(1)  # its next life is on its way, and is not among those who end
    out = job.lose(1)
    assert {i.slot for i in out if isinstance(i, StopProcess)} == {0}
    group = next(i for i in out if isinstance(i, PublishGroup)).group
    assert not group.members, "who ends goes at once: it need not hand its state on"
    job.hire(1)
    assert Reply(Grouped(None, Position(6, 0, 0, 80))) in job.ask(1), "nobody to copy from"
    generation = job.brain.state.groups.generations
    out = job.say(Event(0.0, GroupSynced(generation), by_worker(Slot(1), Incarnation(2))))  # it had begun before
    assert not any(isinstance(i, PublishGroup) for i in out)
    job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(0), Incarnation(1), 143, "")))
    job.serve(1, life=2)
    job.hire(0)
    out = [*job.ask(0), *job.ask(1)]
    begun = next(i for i in out if isinstance(i, PublishGroup)).group
    assert (begun.begin, begun.restore, begun.size) == (Position(3, 0, 0, 50), 1, 2)


def test_partitions_that_go_back_while_scripts_end_take_back_also_who_had_ended() -> None:
    job = saved_tables()
    job.commit(4, 6, 0, 60, 100)
    job.commit(7, 12, 1, 0, 100)
    job.say(Event(0.0, GroupLeft(LeaveReason.DONE), by_worker(Slot(0), Incarnation(1))))
    job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(0), Incarnation(1), 0, "")))
    out = job.lose(1)
    assert {i.slot for i in out if isinstance(i, StopProcess)} == {1}
    assert {i.role for i in out if isinstance(i, StartProcess)} == {Role.PS}, "nobody copies a state that is void"
    later = job.say(Event(0.0, ProcessExited(Role.WORKER, Slot(1), Incarnation(1), 143, "")))
    later += job.serve(1, life=2)
    assert not any(isinstance(i, FinishJob) for i in later)
    assert {i.slot for i in later if isinstance(i, StartProcess) and i.role is Role.WORKER} == {0, 1}
    job.lives = dict.fromkeys(job.lives, 1)
    for slot in (0, 1):
        job.hire(slot)
    out = [*job.ask(0), *job.ask(1)]
    group = next(i for i in out if isinstance(i, PublishGroup)).group
    assert (group.begin, group.restore, group.size) == (Position(3, 0, 0, 50), 1, 2)


def stopping(job: Tables) -> Group:
    """The group of a job that trained, and is asked to stop."""
    job.commit(0, 2, 0, 0, 40)
    out = job.say(Event(0.0, StopAsked("everstep stop", True)))
    group = next(i for i in out if isinstance(i, PublishGroup)).group
    assert group.hold and group.size == 2 and not job.brain.job.over
    return group


def test_a_job_that_stops_holds_its_group_so_that_its_last_checkpoint_is_of_one_step() -> None:
    job = Tables()
    group = stopping(job)
    assert not job.brain.groups.at_rest, "members train on until they have changed over"
    before = Committed(group.generation - 1, 3, 3, 0, 0, 40, 50)
    job.say(Event(0.0, StepsCommitted((before,)), by_worker(Slot(0), Incarnation(1))))
    assert not job.brain.groups.at_rest
    job.say(Event(0.0, GroupSynced(group.generation), by_worker(Slot(1), Incarnation(1))))
    assert job.brain.groups.at_rest
    job.written(Position(4, 0, 0, 50))
    job.snapshots(0, 50)
    assert any(isinstance(i, CommitManifest) for i in job.snapshots(1, 50))
    out = job.say(Event(0.0, CheckpointCommitted(1)))
    assert [i.exit_code for i in out if isinstance(i, FinishJob)] == [0]


def test_a_loss_while_a_job_comes_to_rest_is_waited_for_in_the_next_group() -> None:
    job = Tables(msgspec.structs.replace(SPEC, workers=2))
    stopping(job)
    group = next(i for i in job.kill(0) if isinstance(i, PublishGroup)).group
    assert group.hold and group.size == 1 and not job.brain.groups.at_rest
    job.hire(0)
    job.ask(0)
    out = job.say(Event(0.0, GroupSynced(group.generation), by_worker(Slot(0), Incarnation(2))))
    assert not any(isinstance(i, PublishGroup) for i in out), "a newcomer is of no use any more"
    job.say(Event(0.0, GroupSynced(group.generation), by_worker(Slot(1), Incarnation(1))))
    assert job.brain.groups.at_rest


def test_a_job_whose_data_ends_while_it_comes_to_rest_is_not_held() -> None:
    job = Tables()
    stopping(job)
    job.commit(3, 5, 0, 40, 100)
    out = job.commit(6, 11, 1, 0, 100)
    assert next(i for i in out if isinstance(i, PublishGroup)).group.hold == ""
    assert job.brain.groups.at_rest, "the last step is one moment for both"


def test_without_tables_on_the_ps_a_job_trains_while_its_last_checkpoint_is_written() -> None:
    job = Script()
    job.commit(0, 2, 0, 0, 40)
    out = job.say(Event(0.0, StopAsked("everstep stop", True)))
    assert not any(isinstance(i, PublishGroup) for i in out) and job.brain.groups.at_rest
