"""Shards that come back after they were done, and shards as the snapshots of a checkpoint have them: random
histories."""

from __future__ import annotations

import random

import pytest

from everstep.brain.shards import Shards
from everstep.ids import Incarnation, LeaseNo, PartitionId, ShardKey, Slot
from everstep.model.shard import ShardSchedule, ShardState, split_key
from everstep.model.snapshot import PartitionSnapshot
from seeds import seeds

PARTITIONS = 3
EPOCHS = 3


class World:
    """Shards, and for every partition the watermarks that its ps would have: what is not released is open there."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shards = Shards()
        self.leases = 0
        self.marks: list[dict[ShardKey, int]] = [{} for _ in range(PARTITIONS)]
        self.forgotten: dict[ShardKey, int] = {}  # released: all partitions have all of it
        for name in ("a", "b"):
            self.shards.register(ShardSchedule(name=name, samples=47, shard_samples=10, seed=0))

    def grant(self) -> None:
        dataset = self.rng.choice(self.shards.datasets)
        for epoch in dataset.open_epochs(EPOCHS):
            index = self.shards.next_index(epoch)
            if index is not None:
                self.leases += 1
                held = self.shards.grant(
                    dataset, epoch, index, LeaseNo(self.leases), Slot(0), Incarnation(1), self.leases
                )
                for marks in self.marks:
                    marks.setdefault(held.shard, held.start)
                return

    def work(self) -> None:
        if self.shards.leases:
            held = self.rng.choice(list(self.shards.leases.values()))
            marks = self.rng.choice(self.marks)
            marks[held.shard] = self.rng.randint(marks[held.shard], held.stop)

    def finish(self) -> None:
        if self.shards.leases:
            held = self.rng.choice(list(self.shards.leases.values()))
            for marks in self.marks:
                marks[held.shard] = held.stop
            self.shards.done(held.shard, 0)

    def take_back(self) -> None:
        if self.shards.leases:
            self.shards.take_back(self.rng.choice(list(self.shards.leases)), 0)

    def release(self) -> None:
        keys = [key for key in self.shards.releasing if self.rng.random() < 0.5]
        for key in self.shards.release(keys):
            ends = {marks.pop(key) for marks in self.marks}
            assert len(ends) == 1, "released, and the partitions differ"
            self.forgotten[key] = ends.pop()

    def fall_back(self) -> None:
        """One partition loses the end of some done shards; they must all be done again."""
        partition = self.rng.randrange(PARTITIONS)
        for key in list(self.shards.releasing):
            if self.rng.random() < 0.3:
                self.marks[partition][key] -= self.rng.randint(1, 5)
        lacking = self.shards.lacking([self.snapshot(partition)])
        before = self.shards.samples_done
        lost = self.shards.reopen_done(lacking)
        assert self.shards.samples_done == before - lost
        assert all(self.shards.state(key) is ShardState.TODO for key in lacking)

    def snapshot(self, partition: int) -> PartitionSnapshot:
        marks = tuple(sorted(self.marks[partition].items()))
        return PartitionSnapshot(partition=PartitionId(partition), seq=1, fingerprint=0, watermarks=marks, files=())

    def step(self) -> None:
        actions = [self.grant, self.grant, self.work, self.work, self.finish, self.take_back, self.release]
        self.rng.choice([*actions, self.finish, self.fall_back])()
        self.shards.validate()

    def drain(self) -> None:
        """Train what is left, and see that every shard of every epoch comes exactly as often as needed."""
        for _ in range(10_000):
            self.grant()
            self.finish()
            if all(d.current >= EPOCHS for d in self.shards.datasets):
                break
        self.shards.validate()
        assert self.shards.samples_done == 2 * 47 * EPOCHS
        self.shards.release(list(self.shards.releasing))
        self.shards.validate()
        assert all(not epoch.state for d in self.shards.datasets for epoch in d.epochs)


@pytest.mark.parametrize("seed", seeds(60, 150))
def test_shards_come_back_and_nothing_is_lost(seed: int) -> None:
    world = World(seed)
    for _ in range(world.rng.randint(1, 250)):
        world.step()
    world.drain()


@pytest.mark.parametrize("seed", seeds(60, 150))
def test_a_job_goes_on_from_snapshots(seed: int) -> None:
    """The snapshots are taken at different moments, each after the last release, as a checkpoint's are.

    What is done in the resumed job is in every snapshot completely; of all else each snapshot knows how far it is."""
    world = World(seed)
    for _ in range(world.rng.randint(1, 200)):
        world.step()
    world.release = lambda: None  # type: ignore[method-assign]
    snapshots = []
    applied: dict[int, dict[ShardKey, int]] = {}
    for partition in world.rng.sample(range(PARTITIONS), PARTITIONS):
        snapshots.append(world.snapshot(partition))
        applied[partition] = dict(world.marks[partition]) | world.forgotten
        for _ in range(world.rng.randint(0, 15)):
            world.step()
    old = world.shards
    lacking = old.lacking(snapshots)
    positions = old.positions(snapshots)

    world.shards = new = Shards()
    new.resume(positions, snapshots)
    new.validate()
    assert new.positions(snapshots) == positions
    assert new.samples_done == old.samples_done - sum(old.releasing[key].samples for key in lacking)
    for dataset in old.datasets:
        for epoch in dataset.epochs:
            for index in range(epoch.shards):
                key = ShardKey((dataset.number << 20 | epoch.number) << 32 | index)
                assert split_key(key) == (dataset.number, epoch.number, index)
                was = old.state(key)
                covered = was is ShardState.RELEASED or (was is ShardState.DONE and key not in lacking)
                assert (new.state(key) in (ShardState.DONE, ShardState.RELEASED)) == covered
                start, stop = dataset.plan.bounds(index)
                for snapshot in snapshots:
                    has = applied[snapshot.partition].get(key, start)
                    assert has == (stop if covered else dict(snapshot.watermarks).get(key, start))
    world.marks = [dict(next(i.watermarks for i in snapshots if i.partition == b)) for b in range(PARTITIONS)]
    for _ in range(world.rng.randint(0, 40)):
        world.step()
    world.drain()
