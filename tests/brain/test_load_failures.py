"""A checkpoint that kills or fails who loads it is not tried for ever: it is set aside by name, and the job says so."""

from __future__ import annotations

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    Instruction,
    JobResumed,
    LoadFailed,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    Note,
    PartitionsReady,
    ProcessExited,
    StartProcess,
    by_ps,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.member import Address, Role
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Manifest, PartitionSnapshot

NODE = NodeId("node0")
SPEC = JobSpec(ps=2, workers=1, partitions=4, resume_from="old", max_restarts=3)
SNAPSHOTS = tuple(
    PartitionSnapshot(partition=PartitionId(b), seq=1, fingerprint=0, watermarks=(), files=()) for b in range(4)
)
SEGV, KILL = -11, -9


class Story:
    """A job that goes on from checkpoint 7, with both of its ps."""

    def __init__(self) -> None:
        self.brain, self.at = Brain(), 0.0
        self.lives = {0: 0, 1: 0}
        manifest = Manifest(job="toy", checkpoint=7, at=0.0, seed=0, partitions=4, snapshots=SNAPSHOTS)
        self.say(Event(0.0, MasterStarted(Incarnation(1), SPEC)))
        self.say(Event(0.0, JobResumed(manifest, "old", 9)))
        self.say(Event(0.0, NodeJoined(NODE, "", 0, 0)))

    def say(self, event: Event) -> list[Instruction]:
        out = list(self.brain.handle(event))
        self.brain.validate()
        self.brain = Brain.restore(self.brain.snapshot())
        for one in out:
            if isinstance(one, StartProcess) and one.role is Role.PS:
                self.lives[one.slot] = one.incarnation
                where = Address(NODE, f"sock/ps-{one.slot}.sock")
                out += self.say(Event(self.at, MemberJoined(Role.PS, one.slot, one.incarnation, NODE, 1, where)))
        return out

    def fails(self, partition: int, error: str = "it is not whole", checkpoint: int = 7, version: int = 0) -> None:
        placement = self.brain.placement
        assert placement is not None
        slot = placement.owner[partition]
        life = Incarnation(self.lives[slot])
        version = version or placement.version
        self.say(Event(self.at, LoadFailed(version, PartitionId(partition), checkpoint, error), by_ps(slot, life)))

    def ends(self, slot: int, status: int) -> list[Instruction]:
        return self.say(Event(self.at, ProcessExited(Role.PS, Slot(slot), Incarnation(self.lives[slot]), status)))

    def loads_all(self) -> None:
        placement = self.brain.placement
        assert placement is not None
        for slot in (Slot(0), Slot(1)):
            life, mine = Incarnation(self.lives[slot]), tuple(placement.owned_by(slot))
            self.say(Event(self.at, PartitionsReady(placement.version, mine, Arrival.LOADED), by_ps(slot, life)))

    @property
    def error(self) -> str:
        return self.brain.job.error if self.brain.job.over else ""


def test_the_first_time_another_one_tries() -> None:
    story = Story()
    before = story.brain.placement
    assert before is not None and dict(before.snapshots) == dict.fromkeys(range(4), 7)
    story.fails(1)
    after = story.brain.placement
    assert not story.error
    assert after is not None and after.version > before.version and dict(after.snapshots)[PartitionId(1)] == 7
    story.loads_all()
    assert not story.brain.partitions.protection.missing, "and it could"


def test_the_second_time_it_is_set_aside() -> None:
    story = Story()
    story.fails(1, "partition 1: its marks are of another kind")
    story.fails(1, "partition 1: its marks are still of another kind")
    assert story.brain.checkpoints.aside == 7
    assert story.error.startswith("checkpoint 7 is set aside, it could not be loaded 2 times: ps:")
    assert "still of another kind" in story.error and "everstep resume --checkpoint N" in story.error
    assert "\n" not in story.error


def test_what_is_said_of_an_order_that_is_over_does_not_count() -> None:
    story = Story()
    story.fails(1)
    assert story.brain.placement is not None
    for _ in range(3):
        story.fails(1, version=1)  # the order was given anew since
        story.fails(2, checkpoint=6)  # nobody ordered that one
    assert not story.error and story.brain.checkpoints.failed_loads.by_checkpoint == {
        7: story.brain.checkpoints.failed_loads.by_checkpoint[7][:1]
    }
    story.loads_all()
    story.fails(1)
    assert not story.error, "it is there"


@pytest.mark.parametrize("status", [-4, -6, -7, -8, SEGV])
def test_who_crashes_while_it_loads_counts(status: int) -> None:
    story = Story()
    story.ends(0, status)
    assert not story.error
    story.ends(0 if story.brain.partitions.loading(Slot(0)) else 1, status)
    assert story.brain.checkpoints.aside == 7
    assert "while it loaded it" in story.error


def test_who_is_killed_by_others_does_not_count() -> None:
    """As by a drill, or by the kernel where memory is short."""
    story = Story()
    for _ in range(2):
        for slot in (0, 1):
            story.ends(slot, KILL)
    assert not story.error and not story.brain.checkpoints.failed_loads.by_checkpoint


def test_who_crashes_with_everything_loaded_does_not_count() -> None:
    story = Story()
    story.loads_all()
    story.ends(0, SEGV)
    assert not story.brain.checkpoints.failed_loads.by_checkpoint


def test_no_ps_that_could_serve_is_the_end() -> None:
    story = Story()
    said: list[Instruction] = []
    for _ in range(20):
        for slot in (0, 1):
            said += story.ends(slot, KILL)
        if story.error:
            break
    assert story.error.startswith("no ps is left that could serve: ps:1 was lost")
    assert "max_restarts=3" in story.error
    assert any(isinstance(one, Note) and one.decision.action == "not started again" for one in said)
