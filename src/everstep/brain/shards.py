"""Shards of all datasets and epochs: TODO -> DOING -> DONE -> RELEASED, and back to the head of TODO.

Lazy: an epoch of 10^9 samples costs nothing until its shards are handed out, then one byte a shard, and nothing
again once it is finished. A shard that was never handed out has no entry anywhere: the next fresh one of an epoch is
number ``len(epoch.state)``.
"""

from __future__ import annotations

import msgspec

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import LEASE_COUNTER_BITS, Lease, Plan, ShardState, shard_key, split_key

RELEASE_BATCH = 16
RELEASED_REMEMBERED = 256  # said again to a ps that re-joins; a release lost for good only costs it some memory


def lease_words(no: int) -> str:
    """``2.7``: the 7th lease of master 2."""
    return f"{no >> LEASE_COUNTER_BITS}.{no & ((1 << LEASE_COUNTER_BITS) - 1)}"


class Held(msgspec.Struct, array_like=True):
    """A current lease: shard, number, whose."""

    no: LeaseNo
    shard: ShardKey
    worker: Slot
    incarnation: Incarnation
    start: int
    stop: int
    dataset: int
    ask: int  # -1: adopted

    @property
    def lease(self) -> Lease:
        return Lease(self.no, self.shard, self.start, self.stop)


class Epoch(msgspec.Struct):
    """One pass over a dataset. ``state``: one byte a shard handed out so far. ``returned``: head of TODO, in order."""

    number: int
    shards: int
    state: bytearray
    returned: list[int] = []
    doing: int = 0
    done: int = 0
    samples_done: int = 0
    quarantined: dict[int, str] = {}

    @property
    def todo(self) -> int:
        return self.shards - self.doing - self.done - len(self.quarantined)

    @property
    def finished(self) -> bool:
        return self.done + len(self.quarantined) == self.shards

    def __repr__(self) -> str:
        return f"<e{self.number} {self.todo} todo {self.doing} doing {self.done} done of {self.shards}>"


class Dataset(msgspec.Struct):
    """``current``: the first epoch that is not finished; ``epochs_known``: the largest number asked for."""

    number: int
    plan: Plan
    epochs: list[Epoch] = []
    epochs_known: int = 0

    @property
    def current(self) -> int:
        return len(self.epochs) - 1 if self.epochs and not self.epochs[-1].finished else len(self.epochs)

    def open_epoch(self) -> Epoch:
        """The current epoch, begun if need be."""
        if not self.epochs or self.epochs[-1].finished:
            self.epochs.append(Epoch(len(self.epochs), self.plan.shards, bytearray()))
        return self.epochs[-1]


class Shards(msgspec.Struct):
    """``taken_back``: the last lease of each shard that waits at the head of TODO. ``kills``: workers lost in a row
    while working on a shard without getting further than the one before (``kills_at``: how far). ``releasing``: done,
    release not ordered yet."""

    datasets: list[Dataset] = []
    leases: dict[ShardKey, Held] = {}
    taken_back: dict[ShardKey, LeaseNo] = {}
    kills: dict[ShardKey, int] = {}
    kills_at: dict[ShardKey, int] = {}
    releasing: list[ShardKey] = []
    released: list[ShardKey] = []
    samples_done: int = 0
    returns: int = 0

    # ------------------------------------------------------------ plans

    def find(self, name: str) -> Dataset | None:
        return next((d for d in self.datasets if d.plan.name == name), None)

    def register(self, plan: Plan) -> Dataset:
        dataset = Dataset(len(self.datasets), plan)
        self.datasets.append(dataset)
        return dataset

    def epoch_of(self, key: ShardKey) -> Epoch | None:
        number, epoch, index = split_key(key)
        if number >= len(self.datasets) or epoch >= len(self.datasets[number].epochs):
            return None
        found = self.datasets[number].epochs[epoch]
        return found if index < found.shards else None

    def state(self, key: ShardKey) -> ShardState:
        epoch = self.epoch_of(key)
        if epoch is None:
            return ShardState.TODO
        index = split_key(key)[2]
        if index >= len(epoch.state):
            return ShardState.RELEASED if epoch.finished and index not in epoch.quarantined else ShardState.TODO
        return ShardState(epoch.state[index])

    def name(self, key: ShardKey) -> str:
        """``train e0 #12``."""
        number, epoch, index = split_key(key)
        name = self.datasets[number].plan.name if number < len(self.datasets) else f"dataset {number}"
        return f"{name} e{epoch} #{index}"

    # ------------------------------------------------------------ transitions

    def next_index(self, epoch: Epoch) -> int | None:
        """Take the next shard of TODO, returned ones first; None if there is none now."""
        if epoch.returned:
            return epoch.returned.pop(0)
        index = len(epoch.state)
        if index >= epoch.shards:
            return None
        epoch.state.append(ShardState.TODO)
        return index

    def grant(
        self, dataset: Dataset, epoch: Epoch, index: int, no: LeaseNo, worker: Slot, incarnation: Incarnation, ask: int
    ) -> Held:
        """TODO -> DOING."""
        key = shard_key(dataset.number, epoch.number, index)
        start, stop = dataset.plan.bounds(index)
        held = Held(no, key, worker, incarnation, start, stop, dataset.number, ask)
        epoch.state[index] = ShardState.DOING
        epoch.doing += 1
        self.leases[key] = held
        self.taken_back.pop(key, None)
        return held

    def take_back(self, key: ShardKey, position: int = -1) -> Held:
        """DOING -> head of TODO, at ``position`` of those waiting there (-1: behind them)."""
        held = self.leases.pop(key)
        epoch = self.epoch_of(key)
        assert epoch is not None
        index = split_key(key)[2]
        epoch.state[index] = ShardState.TODO
        epoch.doing -= 1
        if position < 0:
            epoch.returned.append(index)
        else:
            epoch.returned.insert(position, index)
        self.taken_back[key] = held.no
        self.returns += 1
        return held

    def can_adopt(self, lease: Lease) -> bool:
        """Whether a lease that a worker tells of may be taken as granted though it is not in the books: its shard
        is to do, nobody else's, and the lease is later than the last one known."""
        number, epoch_number, index = split_key(lease.shard)
        if number >= len(self.datasets) or lease.shard in self.leases:
            return False
        dataset = self.datasets[number]
        if epoch_number != dataset.current or index >= dataset.plan.shards:
            return False
        epoch = dataset.epochs[epoch_number] if epoch_number < len(dataset.epochs) else None
        if epoch is not None and index in epoch.quarantined:
            return False
        if epoch is not None and index < len(epoch.state) and epoch.state[index] != ShardState.TODO:
            return False
        return lease.no > self.taken_back.get(lease.shard, 0)

    def adopt(self, lease: Lease, worker: Slot, incarnation: Incarnation) -> Held:
        """Grant what :meth:`can_adopt` allows. Shards skipped over join the head of TODO."""
        number, _, index = split_key(lease.shard)
        dataset = self.datasets[number]
        epoch = dataset.open_epoch()
        while len(epoch.state) <= index:
            epoch.returned.append(len(epoch.state))
            epoch.state.append(ShardState.TODO)
        epoch.returned.remove(index)
        return self.grant(dataset, epoch, index, lease.no, worker, incarnation, -1)

    def done(self, key: ShardKey, skipped: int) -> bool:
        """DOING -> DONE; queued for release. Returns whether the epoch is finished with it."""
        held = self.leases.pop(key)
        epoch = self.epoch_of(key)
        assert epoch is not None
        index = split_key(key)[2]
        epoch.state[index] = ShardState.DONE
        epoch.doing -= 1
        epoch.done += 1
        counted = held.stop - held.start - skipped
        epoch.samples_done += counted
        self.samples_done += counted
        self.kills.pop(key, None)
        self.kills_at.pop(key, None)
        self.releasing.append(key)
        return epoch.finished

    def quarantine(self, key: ShardKey, reason: str) -> bool:
        """TODO -> set aside for good. Returns whether the epoch is finished with it."""
        epoch = self.epoch_of(key)
        assert epoch is not None
        index = split_key(key)[2]
        epoch.returned.remove(index)
        epoch.quarantined[index] = reason
        self.taken_back.pop(key, None)
        self.kills.pop(key, None)
        self.kills_at.pop(key, None)
        return epoch.finished

    def blame(self, key: ShardKey, position: int) -> int:
        """A worker was lost while it worked on this shard, having told of ``position``. Returns how many in a row
        got no further: batch by batch through a shard, kills from outside are nothing of its doing."""
        count = self.kills.get(key, 0) + 1
        furthest = self.kills_at.get(key)
        if furthest is not None and position > furthest:
            count = 1
        self.kills[key] = count
        self.kills_at[key] = max(position, furthest or 0)
        return count

    def release_due(self, at_least: int) -> tuple[ShardKey, ...]:
        """DONE -> RELEASED, of all that wait if they are ``at_least`` so many. Memory is the durable tier: a shard
        is releasable as soon as it is done. A finished epoch's books are dropped with its last release."""
        if len(self.releasing) < max(1, at_least):
            return ()
        keys = tuple(self.releasing)
        self.releasing.clear()
        for key in keys:
            epoch = self.epoch_of(key)
            assert epoch is not None
            index = split_key(key)[2]
            epoch.state[index] = ShardState.RELEASED
        for key in keys:
            epoch = self.epoch_of(key)
            if epoch is not None and epoch.finished and not epoch.doing:
                epoch.state = bytearray()
        self.released.extend(keys)
        if len(self.released) > 2 * RELEASED_REMEMBERED:
            del self.released[:-RELEASED_REMEMBERED]
        return keys

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Assert what must always hold. Costs one pass over the open epochs."""
        for dataset in self.datasets:
            for epoch in dataset.epochs:
                assert epoch.finished or epoch is dataset.epochs[-1], f"{epoch!r} is open behind a later one"
                state = epoch.state
                if epoch.finished and not state:
                    assert not epoch.returned and not epoch.doing, f"{epoch!r} finished with work left"
                    continue
                assert len(state) <= epoch.shards
                assert epoch.doing == state.count(ShardState.DOING), f"{epoch!r}: doing is wrong"
                done = state.count(ShardState.DONE) + state.count(ShardState.RELEASED)
                assert epoch.done == done, f"{epoch!r}: done is wrong"
                todo = state.count(ShardState.TODO) - len(epoch.quarantined)
                assert todo == len(epoch.returned) == len(set(epoch.returned)), f"{epoch!r}: head of TODO is wrong"
                assert all(state[i] == ShardState.TODO for i in epoch.returned), f"{epoch!r}: returned but not TODO"
                assert not set(epoch.returned) & set(epoch.quarantined), f"{epoch!r}: quarantined shard is in TODO"
        for key, held in self.leases.items():
            assert held.shard == key
            assert self.state(key) is ShardState.DOING, f"lease {held.no} on {self.name(key)} that is not DOING"
        numbers = [held.no for held in self.leases.values()]
        assert len(numbers) == len(set(numbers)), "one lease number on two shards"
        doing = sum(e.doing for d in self.datasets for e in d.epochs)
        assert doing == len(self.leases), f"{doing} shards DOING, {len(self.leases)} leases"
        assert all(self.state(k) is ShardState.TODO for k in self.taken_back), "taken back but not TODO"
