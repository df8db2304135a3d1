"""Checkpoints, losses of ps that nothing else protects, and a resumed job, in random order: every sample counts once.

The world here knows for each partition how far each shard was really applied to it, and what each snapshot has of that.
A ps that dies takes its partitions along; whoever is given them loads the snapshot that the placement names, and
nothing else.
"""

from __future__ import annotations

import random

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CheckpointAsked,
    CheckpointCommitted,
    CommitManifest,
    DropCheckpoints,
    EndOfData,
    Event,
    Granted,
    JobResumed,
    MasterStarted,
    MemberJoined,
    MirrorsReady,
    NodeJoined,
    Ok,
    PartitionsReady,
    PlanRegistered,
    ProcessExited,
    Reply,
    ShardAsked,
    ShardDone,
    SnapshotsWritten,
    StartProcess,
    by_ps,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, PartitionId, ShardKey, Slot
from everstep.model.member import Address, Role
from everstep.model.reasons import Arrival, CheckpointReason
from everstep.model.shard import Lease, ShardSchedule, shard_key
from everstep.model.snapshot import Manifest, PartitionSnapshot
from seeds import seeds

NODE = NodeId("node0")
PARTITIONS, EPOCHS, SAMPLES, SHARD = 4, 2, 35, 10

Applied = dict[ShardKey, int]


class World:
    def __init__(self, seed: int, ps: int, snapshots: dict[int, dict[int, Applied]] | None = None) -> None:
        self.rng = random.Random(seed)
        self.at = 1000.0
        self.brain = Brain()
        self.ps = ps
        self.to_join: list[tuple[Role, Slot, Incarnation]] = []
        self.alive: dict[tuple[Role, Slot], Incarnation] = {}
        self.asks: dict[Slot, int] = {}
        self.leases: dict[Slot, dict[ShardKey, Lease]] = {}
        self.ended: set[Slot] = set()
        self.live: list[Applied | None] = [{} for _ in range(PARTITIONS)]  # None: whoever had it is dead
        self.home: list[tuple[Slot, Incarnation] | None] = [None] * PARTITIONS
        self.snapshots: dict[int, dict[int, Applied]] = snapshots or {}  # of manifests
        self.written: dict[tuple[int, int, int], Applied] = {}  # by checkpoint, partition, seq
        self.manifests: dict[int, Manifest] = {}
        self.to_commit: list[int] = []

    def tell(self, event: Event) -> Reply | None:
        out = self.brain.handle(event)
        self.brain.validate()
        if self.rng.random() < 0.05:
            self.brain = Brain.restore(self.brain.snapshot())
        answer = None
        for instruction in out:
            match instruction:
                case Reply():
                    answer = instruction
                case StartProcess(_, role, slot, incarnation, _):
                    self.to_join.append((role, slot, incarnation))
                case CommitManifest(manifest):
                    self.manifests[manifest.checkpoint] = manifest
                    self.to_commit.append(manifest.checkpoint)
                case DropCheckpoints(checkpoints):
                    for number in checkpoints:
                        self.snapshots.pop(number, None)
        return answer

    def begin(self, spec: JobSpec, manifest: Manifest | None = None) -> None:
        master = Incarnation(1 if manifest is None else manifest.master_incarnation + 1)
        self.tell(Event(self.at, MasterStarted(master, spec, True)))
        if manifest is not None:
            self.tell(Event(self.at, JobResumed(manifest, "old", manifest.checkpoint + 3)))
            self.live = [None] * PARTITIONS
        self.tell(Event(self.at, NodeJoined(NODE, "", 0, 0)))

    # ------------------------------------------------------------ what may happen

    def join(self) -> None:
        if not self.to_join:
            return
        role, slot, incarnation = self.to_join.pop(self.rng.randrange(len(self.to_join)))
        self.alive[role, slot] = incarnation
        address = Address(NODE, f"sock/ps-{slot}.sock") if role is Role.PS else None
        self.tell(Event(self.at, MemberJoined(role, slot, incarnation, NODE, 1, address)))
        if role is Role.WORKER:
            self.asks[slot], self.leases[slot] = 0, {}
            self.ended.discard(slot)
            plan = ShardSchedule(name="d", samples=SAMPLES, shard_samples=SHARD, seed=0)
            self.tell(Event(self.at, PlanRegistered(plan), by_worker(slot, incarnation)))

    def settle(self) -> None:
        """The ps do what the placement says, one ps and one thing at a time."""
        placement = self.brain.placement
        if placement is None:
            return
        lives = {place.slot: place.incarnation for place in placement.servers}
        partition = PartitionId(self.rng.randrange(PARTITIONS))
        owner = placement.owner[partition]
        incarnation = self.alive.get((Role.PS, owner))
        if incarnation is None or lives.get(owner) != incarnation:
            return
        if self.home[partition] != (owner, incarnation):
            if number := dict(placement.snapshots).get(partition):
                self.live[partition] = dict(self.snapshots[number][partition])
                how = Arrival.LOADED
            elif self.live[partition] is None:
                return
            elif self.home[partition] is None:
                assert dict(placement.snapshots).get(partition) == 0, (
                    "a bucket begins empty, but the map does not say so"
                )
                how = Arrival.PROMOTED
            else:
                mine = [m for m in placement.mirrors_of(partition) if m.at == owner]
                if not mine:
                    return
                how = Arrival.PROMOTED
            self.home[partition] = (owner, incarnation)
        else:
            how = Arrival.LOADED
        self.tell(Event(self.at, PartitionsReady(placement.version, (partition,), how), by_ps(owner, incarnation)))
        for (role, slot), life in list(self.alive.items()):
            mirrors = tuple(m.id for m in placement.mirrors_at(slot))
            if role is Role.PS and mirrors and all(self.live[b] is not None for b in range(PARTITIONS)):
                self.tell(Event(self.at, MirrorsReady(mirrors), by_ps(slot, life)))

    def whole(self) -> bool:
        placement = self.brain.placement
        if placement is None:
            return False
        lives = {place.slot: place.incarnation for place in placement.servers}
        return all(
            self.live[b] is not None and self.home[b] == (slot, lives.get(slot)) and (Role.PS, slot) in self.alive
            for b, slot in enumerate(placement.owner)
        )

    def ask(self) -> None:
        workers = [s for (role, s) in self.alive if role is Role.WORKER and s not in self.ended]
        if not workers or self.brain.placement is None:
            return
        slot = self.rng.choice(workers)
        if len(self.leases[slot]) >= 3:
            return
        self.asks[slot] += 1
        life = self.alive[Role.WORKER, slot]
        answer = self.tell(Event(self.at, ShardAsked(0, EPOCHS, self.asks[slot]), by_worker(slot, life)))
        assert answer is not None
        if isinstance(answer.answer, Granted):
            self.leases[slot][answer.answer.lease.shard] = answer.answer.lease
        elif isinstance(answer.answer, EndOfData) and not self.leases[slot]:
            self.ended.add(slot)
            del self.alive[Role.WORKER, slot]
            self.tell(Event(self.at, ProcessExited(Role.WORKER, slot, life, 0)))

    def train(self, wholly: bool) -> None:
        held = [(s, lease) for s, leases in self.leases.items() for lease in leases.values()]
        held = [(s, lease) for s, lease in held if (Role.WORKER, s) in self.alive]
        if not held or not self.whole():
            return
        slot, lease = self.rng.choice(held)
        current = self.brain.leases.get(lease.shard)
        if current is None or current.no != lease.no:
            del self.leases[slot][lease.shard]  # fenced
            return
        for partition in range(PARTITIONS):
            applied = self.live[partition]
            assert applied is not None
            mark = applied.get(lease.shard, lease.start)
            applied[lease.shard] = lease.stop if wholly else self.rng.randint(mark, lease.stop)
        if not wholly:
            return
        placement = self.brain.placement
        assert placement is not None
        acks = tuple((place.slot, place.incarnation) for place in placement.servers)
        life = self.alive[Role.WORKER, slot]
        answer = self.tell(Event(self.at, ShardDone(lease.shard, LeaseNo(lease.no), acks), by_worker(slot, life)))
        if answer is not None and isinstance(answer.answer, Ok):
            del self.leases[slot][lease.shard]
        else:
            self.leases[slot].pop(lease.shard, None)

    def kill(self) -> None:
        if not self.alive or self.brain.checkpoints.newest is None or self.brain.placement is None:
            return
        role, slot = self.rng.choice(sorted(self.alive))
        life = self.alive.pop((role, slot))
        if role is Role.PS:
            for partition in range(PARTITIONS):
                if self.home[partition] == (slot, life) and not self.mirrored(PartitionId(partition)):
                    self.live[partition] = None
        else:
            self.leases[slot] = {}
        self.tell(Event(self.at, ProcessExited(role, slot, life, -9)))

    def mirrored(self, partition: PartitionId) -> bool:
        """Whether a ps that lives has a complete mirror of it, on which it was to move there."""
        placement, ready = self.brain.placement, self.brain.state.protection.ready
        assert placement is not None
        return any(m.id in ready and (Role.PS, m.at) in self.alive for m in placement.mirrors_of(partition))

    def checkpoint(self) -> None:
        self.tell(Event(self.at, CheckpointAsked(CheckpointReason.DUE, self.rng.random() < 0.2)))

    def write(self) -> None:
        """A ps snapshots some of what it has; at once, or a part of it."""
        writing = self.brain.checkpoints.writing
        servers = [(slot, life) for (role, slot), life in self.alive.items() if role is Role.PS]
        if writing is None or not servers:
            return
        slot, life = self.rng.choice(servers)
        error = "no space" if self.rng.random() < 0.03 else ""
        snapshots = []
        for partition in range(PARTITIONS):
            applied = self.live[partition]
            if self.home[partition] == (slot, life) and applied is not None and self.rng.random() < 0.8 and not error:
                released = set(self.brain.shards.released)
                marks = tuple(sorted((k, w) for k, w in applied.items() if k not in released))
                self.written[writing.number, partition, int(self.at)] = dict(applied)
                snapshots.append(
                    PartitionSnapshot(
                        partition=PartitionId(partition), seq=int(self.at), fingerprint=0, watermarks=marks, files=()
                    )
                )
        self.tell(Event(self.at, SnapshotsWritten(writing.number, tuple(snapshots), (), error), by_ps(slot, life)))

    def commit(self) -> None:
        if not self.to_commit:
            return
        number = self.to_commit.pop()
        error = "unreachable" if self.rng.random() < 0.1 else ""
        if not error:
            snapshots = self.manifests[number].snapshots
            self.snapshots[number] = {i.partition: self.written[number, i.partition, i.seq] for i in snapshots}
        self.tell(Event(self.at, CheckpointCommitted(number, error)))

    def step(self, trouble: bool) -> None:
        self.at += 1.0
        actions = [self.join, self.settle, self.settle, self.ask, self.ask, self.write, self.write, self.commit]
        actions += [lambda: self.train(False), lambda: self.train(True), lambda: self.train(True), self.checkpoint]
        if trouble and self.rng.random() < 0.06:
            actions = [self.kill]
        self.rng.choice(actions)()

    def heal(self) -> None:
        """No more trouble: the job must come to its end, and have everything once."""
        for _ in range(6000):
            if self.brain.job.over:
                break
            self.step(trouble=False)
        job = self.brain.job
        assert job.exit_code == 0, f"{job!r} {job.error} {self.brain.shards.datasets} {self.brain.checkpoints!r}"
        newest = self.brain.checkpoints.newest
        for partition in range(PARTITIONS):
            applied = self.live[partition]
            if applied is None:  # lost at the very end, when the last checkpoint had it
                assert newest is not None
                applied = self.snapshots[newest.checkpoint][partition]
            for epoch in range(EPOCHS):
                for index in range(-(-SAMPLES // SHARD)):
                    key = shard_key(0, epoch, index)
                    stop = min((index + 1) * SHARD, SAMPLES)
                    assert applied.get(key) == stop, f"bucket {partition} lacks {epoch} #{index}"


def spec(ps: int) -> JobSpec:
    return JobSpec(
        workers=2,
        ps=ps,
        partitions=PARTITIONS,
        checkpoint_every="30s",
        checkpoint_keep=1,
        max_restarts=10_000,
        quarantine_after=1_000_000,
    )


@pytest.mark.parametrize("seed", seeds(30, 60))
def test_losses_and_checkpoints(seed: int) -> None:
    world = World(seed, 1 + seed % 3)
    world.begin(spec(world.ps))
    for _ in range(world.rng.randint(50, 800)):
        if world.brain.job.over:
            break
        world.step(trouble=True)
    world.heal()


@pytest.mark.parametrize("seed", seeds(30, 60))
def test_a_resumed_job(seed: int) -> None:
    """The old job ends at any moment; the new one has other numbers of ps, and losses too."""
    old = World(seed, 1 + seed % 3)
    old.begin(spec(old.ps))
    while old.brain.checkpoints.newest is None or old.rng.random() > 0.01:
        old.step(trouble=True)
        if old.brain.job.over:
            break
    manifest = old.brain.checkpoints.newest
    if manifest is None:
        pytest.skip("the old job ended without a checkpoint")
    new = World(seed + 1000, 1 + (seed + 1) % 3, {manifest.checkpoint: old.snapshots[manifest.checkpoint]})
    new.begin(spec(new.ps), manifest)
    for _ in range(new.rng.randint(50, 500)):
        if new.brain.job.over:
            break
        new.step(trouble=True)
    new.heal()
