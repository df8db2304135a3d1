"""The shell's part of checkpoints, with the real brain and a real directory; the ps are lines of this file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CheckpointAsked,
    CommitManifest,
    DropCheckpoints,
    Event,
    FactType,
    JobResumed,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    OrderSnapshots,
    PlanRegistered,
    ShardAsked,
    SnapshotsWritten,
    SpotChosen,
    by_ps,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.master.checkpoints import REASK_S, CheckpointController
from everstep.master.readings import Readings
from everstep.model.member import Address, Role
from everstep.model.reasons import CheckpointReason
from everstep.model.shard import ShardSchedule
from everstep.model.snapshot import CheckpointFile, PartitionSnapshot
from everstep.model.spot_choice import SpotChoice
from everstep.net.messages import OrderType, TakeSnapshots
from everstep.protect.manifest import latest_intact, list_checkpoints, read_manifest
from everstep.protect.sources import Origin, SnapshotSources, write_origin
from everstep.storage.places import open_place

ONE = Incarnation(1)
KEY = bytes(range(32))


class Shell:
    """A master without sockets: events go to the brain at once, its instructions to the controller."""

    def __init__(self, run_dir: Path, spec: JobSpec, brain: Brain | None = None) -> None:
        self.run_dir, self.at = run_dir, 1000.0
        self.brain = brain or Brain()
        self.told: list[FactType] = []
        self.sent: list[tuple[int, OrderType]] = []
        self.controller = CheckpointController(
            self.brain, spec, run_dir, Readings(run_dir), lambda: self.at, self.tell, self.send, key=KEY
        )

    def tell(self, said: Event | FactType) -> None:
        event = said if isinstance(said, Event) else Event(self.at, said)
        self.told.append(event.fact)
        for instruction in self.brain.handle(event):
            match instruction:
                case OrderSnapshots():
                    self.controller.order_snapshots()
                case CommitManifest(manifest):
                    self.controller.commit(manifest)
                case DropCheckpoints(checkpoints):
                    self.controller.drop(checkpoints)
        self.brain.validate()

    def send(self, slot: Slot, order: OrderType) -> None:
        self.sent.append((slot, order))

    def begin(self, spec: JobSpec) -> None:
        self.tell(Event(self.at, MasterStarted(ONE, spec)))
        self.controller.start()
        self.tell(Event(self.at, NodeJoined(NodeId("node0"), "", 0, 0)))
        for slot in map(Slot, range(spec.ps)):
            where = Address(NodeId("node0"), f"sock/ps-{slot}.sock")
            self.tell(Event(self.at, MemberJoined(Role.PS, slot, ONE, NodeId("node0"), 1, where)))

    def write(self, slot: int, checkpoint: int, *partitions: int, error: str = "") -> None:
        """What that ps answers, with a real file for each partition."""
        snapshots = []
        for partition in partitions:
            path = f"images/{checkpoint:06d}/bucket-{partition}.img"
            open_place(self.place).put(path, b"x" * 10)
            snapshots.append(
                PartitionSnapshot(
                    partition=PartitionId(partition),
                    seq=checkpoint,
                    fingerprint=0,
                    watermarks=(),
                    files=(CheckpointFile(path, 10, ""),),
                    bytes_written=10,
                )
            )
        self.tell(Event(self.at, SnapshotsWritten(checkpoint, tuple(snapshots), (), error), by_ps(Slot(slot), ONE)))

    @property
    def place(self) -> str:
        return str(self.run_dir / "checkpoints")

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(30.0):
            while not what():
                await asyncio.sleep(0.005)


def test_what_the_spot_policy_chose_is_the_interval(tmp_path: Path) -> None:
    spec = JobSpec(ps=1, partitions=2, checkpoint_every="10m", spot_policy="hazard")
    shell = Shell(tmp_path, spec)
    shell.begin(spec)
    shell.tell(Event(shell.at, MemberJoined(Role.WORKER, Slot(0), ONE, NodeId("node0"), 2)))
    by = by_worker(Slot(0), ONE)
    shell.tell(Event(shell.at, PlanRegistered(ShardSchedule(name="d", samples=9, shard_samples=3, seed=0)), by))
    shell.tell(Event(shell.at, ShardAsked(0, 1, 1), by))
    shell.controller.tick(shell.at + 300.0)
    assert not shell.sent, "as job.yaml says, until the policy has chosen"
    shell.tell(SpotChosen(SpotChoice(50.0)))
    shell.controller.tick(shell.at + 49.0)
    assert not shell.sent
    shell.controller.tick(shell.at + 50.0)
    assert shell.sent == [(0, TakeSnapshots(1, 0, shell.place))]


def test_a_checkpoint_when_it_is_due(tmp_path: Path) -> None:
    async def story() -> None:
        spec = JobSpec(ps=2, partitions=4, checkpoint_every="30s", checkpoint_keep=1)
        shell = Shell(tmp_path, spec)
        shell.begin(spec)
        shell.controller.tick(2000.0)
        assert not shell.sent, "nobody has trained yet"
        shell.tell(Event(shell.at, MemberJoined(Role.WORKER, Slot(0), ONE, NodeId("node0"), 2)))
        shell.tell(
            Event(
                shell.at,
                PlanRegistered(ShardSchedule(name="d", samples=9, shard_samples=3, seed=0)),
                by_worker(Slot(0), ONE),
            )
        )
        shell.tell(Event(shell.at, ShardAsked(0, 1, 1), by_worker(Slot(0), ONE)))
        shell.controller.tick(1029.0)
        assert not shell.sent
        shell.at = 1031.0
        shell.controller.tick(shell.at)
        order = TakeSnapshots(1, 0, shell.place)
        assert shell.sent == [(0, order), (1, order)]
        shell.write(0, 1, 0, 2)

        # Said again only to the one that owes something, and to whoever says hello.
        shell.sent.clear()
        shell.at += REASK_S
        shell.controller.tick(shell.at)
        assert shell.sent == [(1, order)]
        shell.controller.hello(Slot(0))
        assert shell.sent[1:] == [(0, order)]

        shell.controller._readings.values["loss"] = 0.25
        shell.write(1, 1, 1, 3)
        await shell.until(lambda: shell.brain.checkpoints.committed)
        manifest = latest_intact(open_place(shell.place), deep=False)
        assert manifest.checkpoint == 1 and manifest.values == {"loss": 0.25} and manifest.everstep
        assert manifest.spec == spec and [snapshot.partition for snapshot in manifest.snapshots] == [0, 1, 2, 3]
        place, found = SnapshotSources(spec, tmp_path, KEY).snapshot(PartitionId(2), 1)
        assert (place.url, found) == (shell.place, manifest.snapshots[2])

        # The next one replaces it: retention deletes what nobody needs.
        shell.at += 31.0
        shell.controller.tick(shell.at)
        shell.write(0, 2, 0, 1, 2, 3)
        await shell.until(lambda: list_checkpoints(open_place(shell.place)) == [2])
        await shell.until(lambda: all("000002" in path for path in open_place(shell.place).sizes()))
        await shell.controller.close()

    asyncio.run(story())


def test_the_next_master_writes_the_manifest_that_was_ordered(tmp_path: Path) -> None:
    async def story() -> None:
        spec = JobSpec(ps=1, partitions=1)
        shell = Shell(tmp_path, spec)
        shell.begin(spec)
        shell.controller.commit = lambda manifest: None  # type: ignore[method-assign]  # it dies before that
        shell.tell(Event(shell.at, CheckpointAsked(CheckpointReason.ASKED)))
        shell.write(0, 1, 0)
        second = Shell(tmp_path, spec, Brain.restore(shell.brain.snapshot()))
        second.controller.tick(second.at)
        await second.until(lambda: second.brain.checkpoints.committed)
        assert read_manifest(open_place(shell.place), 1).checkpoint == 1
        await second.controller.close()

    asyncio.run(story())


def test_a_place_that_takes_nothing_costs_the_checkpoint_only(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "file").touch()
        spec = JobSpec(ps=1, partitions=1, checkpoint_to=str(tmp_path / "file" / "no"))
        shell = Shell(tmp_path, spec)
        shell.begin(spec)
        shell.tell(Event(shell.at, CheckpointAsked(CheckpointReason.ASKED)))
        shell.write(0, 1, 0)
        while not shell.brain.checkpoints.given_up:
            shell.at += 10.0  # (the controller tries for a minute of this clock)
            await asyncio.sleep(0.01)
        assert shell.brain.checkpoints.newest is None and not shell.brain.job.over
        await shell.controller.close()

    asyncio.run(story())


def test_what_was_given_up_leaves_no_files(tmp_path: Path) -> None:
    async def story() -> None:
        spec = JobSpec(ps=2, partitions=2)
        shell = Shell(tmp_path, spec)
        shell.begin(spec)
        shell.tell(Event(shell.at, CheckpointAsked(CheckpointReason.ASKED)))
        shell.write(0, 1, 0)
        for _ in range(3):
            shell.write(1, 1, error="no space left")
        assert shell.brain.checkpoints.given_up == 1
        await shell.until(lambda: not open_place(shell.place).sizes())
        await shell.controller.close()

    asyncio.run(story())


def test_a_resumed_job_begins_with_its_origin(tmp_path: Path) -> None:
    async def story() -> None:
        old = JobSpec(ps=1, partitions=2)
        shell = Shell(tmp_path / "old", old)
        shell.begin(old)
        shell.tell(Event(shell.at, CheckpointAsked(CheckpointReason.ASKED)))
        shell.write(0, 1, 0, 1)
        await shell.until(lambda: shell.brain.checkpoints.committed)
        manifest = latest_intact(open_place(shell.place), deep=False)

        run_dir = tmp_path / "new"
        run_dir.mkdir()
        write_origin(run_dir, Origin(url=shell.place, numbers=7, manifest=manifest))
        new = JobSpec(ps=2, partitions=2, resume_from=shell.place)
        resumed = Shell(run_dir, new)
        resumed.begin(new)
        assert any(isinstance(event, JobResumed) for event in resumed.told)
        placement = resumed.brain.placement
        assert placement is not None and placement.snapshots == ((0, 1), (1, 1)) and placement.owner == (0, 1)
        place, found = SnapshotSources(new, run_dir, KEY).snapshot(PartitionId(1), 1)
        assert (place.url, found) == (shell.place, manifest.snapshots[1])
        resumed.tell(Event(resumed.at, CheckpointAsked(CheckpointReason.ASKED)))
        assert resumed.sent[-1] == (1, TakeSnapshots(8, 0, resumed.place))

        # The next master of the new job does not begin again.
        third = Shell(run_dir, new, Brain.restore(resumed.brain.snapshot()))
        third.controller.start()
        assert not third.told
        await shell.controller.close()
        await resumed.controller.close()

    (tmp_path / "old").mkdir()
    asyncio.run(story())
