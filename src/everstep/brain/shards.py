"""Holds shards of all datasets and epochs: TODO -> DOING -> DONE -> RELEASED, and back to the head of TODO.

DONE: every partition has it in memory. RELEASED: the durable tier of the job has it too (see brain/checkpoints.py), so
it never comes back. A done shard may come back: when a partition had to fall back to an older snapshot,
:meth:`Shards.reopen` puts those that the snapshot lacks at the head of TODO, also of an epoch behind the current one.

Lazy: an epoch of 10^9 samples costs nothing until its shards are handed out, then one byte a shard, and nothing
again once it is finished. A shard that was never handed out has no entry anywhere: the next fresh one of an epoch is
number ``len(epoch.state)``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import LEASE_COUNTER_BITS, Lease, ShardSchedule, ShardState, shard_key, split_key
from everstep.model.snapshot import DatasetPosition, EpochPosition, PartitionSnapshot

_TODO, _DOING, _DONE, _RELEASED = ShardState  # (to find a member of an enum takes longer than to write it)
RELEASE_BATCH = 16
RELEASED_REMEMBERED = 256  # said again to a ps that re-joins; a release lost for good only costs it some memory


def lease_words(no: int) -> str:
    """Return ``2.7``: the 7th lease of master 2."""
    return f"{no >> LEASE_COUNTER_BITS}.{no & ((1 << LEASE_COUNTER_BITS) - 1)}"


class HeldLease(msgspec.Struct, array_like=True):
    """Is a current lease: shard, number, whose."""

    no: LeaseNo
    shard: ShardKey
    worker: Slot
    incarnation: Incarnation
    start: int
    stop: int
    dataset: int
    ask: int  # -1: adopted
    pending: bool = False  # the worker is through with its samples, and waits for others to step with
    counted: bool = False  # pending, and somebody was told that the data is at its end

    @property
    def lease(self) -> Lease:
        return Lease(self.no, self.shard, self.start, self.stop)


class FinishedShard(msgspec.Struct, array_like=True):
    """Is a shard that is done and not released: samples that count, when, under which lease."""

    samples: int
    at: float = 0.0
    lease: LeaseNo = LeaseNo(0)


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


class Loop(msgspec.Struct, array_like=True):
    """Is a loop of the script (its number, from 1), which is over epochs ``[begin, until)`` of a dataset."""

    number: int
    begin: int
    until: int


class Dataset(msgspec.Struct, rename={"announced": "told"}):
    """Holds the epochs of a dataset. ``epochs_known``: the largest number asked for. ``reopened``: epochs behind the
    newest one that have work again, ascending. ``loops``: that workers said are over it, ascending, no epoch in two of
    them. ``announced``: epochs below were told to be at their end; ``sent_back``: how often workers began anew for
    what came back of them, in a row without that any of it was done."""

    number: int
    plan: ShardSchedule
    epochs: list[Epoch] = []
    epochs_known: int = 0
    reopened: list[int] = []
    loops: list[Loop] = []
    announced: int = 0
    sent_back: int = 0

    @property
    def newest(self) -> int:
        """Return the last epoch if it has work left, else the one behind it, which has not begun."""
        return len(self.epochs) - 1 if self.epochs and not self.epochs[-1].finished else len(self.epochs)

    @property
    def current(self) -> int:
        """Return the first epoch that is not finished."""
        return self.reopened[0] if self.reopened else self.newest

    def has_work(self, number: int) -> bool:
        return number == self.newest or number in self.reopened

    def record_loop(self, loop: int, begin: int, until: int) -> None:
        """A worker begins this loop. (All say the same, unless the script depends on the worker: the first counts.)"""
        last = self.loops[-1] if self.loops else Loop(0, 0, 0)
        if loop > last.number and last.until <= begin < until:
            self.loops.append(Loop(loop, begin, until))

    def loop_of(self, epoch: int) -> int:
        """Return the loop that asked for this epoch and trained all of it; 0: it is not known, or the script has left
        it."""
        if epoch >= self.announced:
            return 0
        at = bisect_right(self.loops, epoch, key=lambda loop: loop.begin) - 1
        return self.loops[at].number if at >= 0 and epoch < self.loops[at].until else 0

    def epoch(self, number: int) -> Epoch:
        """Return an epoch that has work, begun if need be."""
        if number == len(self.epochs):
            self.epochs.append(Epoch(number, self.plan.shards, bytearray()))
        return self.epochs[number]

    def open_epoch(self) -> Epoch:
        """Return the current epoch, begun if need be."""
        return self.epoch(self.current)

    def open_epochs(self, until_epoch: int) -> Iterator[Epoch]:
        """Yield epochs below ``until_epoch`` that have work. One that has not begun waits for all before it."""
        if not self.reopened:  # nearly always
            if (newest := self.newest) < until_epoch:
                yield self.epoch(newest)
            return
        for number in (*self.reopened, self.newest):
            if number >= until_epoch or number == len(self.epochs):
                return
            yield self.epoch(number)

    def settle(self, epoch: Epoch) -> bool:
        """Return whether the epoch is finished; if so, it is no longer one of the reopened."""
        if epoch.finished and epoch.number in self.reopened:
            self.reopened.remove(epoch.number)
        return epoch.finished


class ShardRecords(msgspec.Struct):
    """Holds what is known of shards, and what follows from it.

    ``taken_back``: the last lease of each shard that waits at the head of TODO. ``carried``: of those, given back by
    a worker that had taken their samples into a later loop, for a step of that one. ``kills``: workers lost in a row
    while working on a shard without getting further than the one before (``kills_at``: how far). ``releasing``: done,
    release not ordered yet. ``came_back``: reopened after they were done, or taken back after they were counted as the
    end of the data, and not done since."""

    datasets: list[Dataset] = []
    leases: dict[ShardKey, HeldLease] = {}
    taken_back: dict[ShardKey, LeaseNo] = {}
    carried: set[ShardKey] = set()
    kills: dict[ShardKey, int] = {}
    kills_at: dict[ShardKey, int] = {}
    releasing: dict[ShardKey, FinishedShard] = {}
    released: list[ShardKey] = []
    came_back: set[ShardKey] = set()
    samples_done: int = 0
    returns: int = 0

    def find(self, name: str) -> Dataset | None:
        return next((d for d in self.datasets if d.plan.name == name), None)

    @property
    def all_out(self) -> bool:
        """Return whether no shard is left to hand out, in any epoch that somebody has asked for."""
        return all(len(d.epochs) >= d.epochs_known and not any(epoch.todo for epoch in d.epochs) for d in self.datasets)

    def epoch_of(self, key: ShardKey) -> Epoch | None:
        number, epoch, index = split_key(key)
        if not 0 <= number < len(self.datasets) or epoch >= len(self.datasets[number].epochs):
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
        """Return ``train e0 #12``."""
        number, epoch, index = split_key(key)
        name = self.datasets[number].plan.name if number < len(self.datasets) else f"dataset {number}"
        return f"{name} e{epoch} #{index}"

    def computed(self, dataset: Dataset, epoch: Epoch) -> bool:
        """Whether nothing of the epoch is left to compute: it is finished, or every worker that holds a shard of it has
        only to step with it."""
        if epoch.finished:
            return True
        if epoch.todo:
            return False
        return all(
            held.pending
            for key, held in self.leases.items()
            if held.dataset == dataset.number and split_key(key)[1] == epoch.number
        )

    def over(self, dataset: Dataset, until_epoch: int) -> bool:
        """Return whether nothing is left to compute in the epochs below ``until_epoch``."""
        if dataset.current >= until_epoch:
            return True
        if len(dataset.epochs) < until_epoch:
            return False
        return all(self.computed(dataset, e) for e in dataset.epochs[:until_epoch] if not e.finished)

    def can_adopt(self, lease: Lease) -> bool:
        """Whether a lease that a worker tells of may be taken as granted though it is not in the state: its shard
        is to do, nobody else's, and the lease is later than the last one known."""
        number, epoch_number, index = split_key(lease.shard)
        if number >= len(self.datasets) or lease.shard in self.leases:
            return False
        dataset = self.datasets[number]
        if not dataset.has_work(epoch_number) or index >= dataset.plan.shards:
            return False
        epoch = dataset.epochs[epoch_number] if epoch_number < len(dataset.epochs) else None
        if epoch is not None and index in epoch.quarantined:
            return False
        if epoch is not None and index < len(epoch.state) and epoch.state[index] != ShardState.TODO:
            return False
        return lease.no > self.taken_back.get(lease.shard, 0)

    def lacking(self, snapshots: Sequence[PartitionSnapshot]) -> dict[ShardKey, int]:
        """Return done shards that some of these snapshots do not cover: how many of their positions the worst one
        lacks."""
        lacking: dict[ShardKey, int] = {}
        marks = [dict(snapshot.watermarks) for snapshot in snapshots]
        for key in self.releasing:
            number, _, index = split_key(key)
            start, stop = self.datasets[number].plan.bounds(index)
            lack = max((stop - mark.get(key, start) for mark in marks), default=0)
            if lack > 0:
                lacking[key] = lack
        return lacking

    def validate(self) -> None:
        """Assert what must always hold. Costs one pass over the open epochs."""
        for dataset in self.datasets:
            for epoch in dataset.epochs:
                behind = epoch.number in dataset.reopened
                assert epoch.finished or behind or epoch is dataset.epochs[-1], f"{epoch!r} is open behind a later one"
                assert not (behind and epoch.finished), f"{epoch!r} is finished, yet among the reopened"
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
        assert all(self.state(k) is ShardState.DONE for k in self.releasing), "to be released but not DONE"
        done = sum(e.state.count(ShardState.DONE) for d in self.datasets for e in d.epochs)
        assert done == len(self.releasing), f"{done} shards DONE, {len(self.releasing)} to be released"
        for key, held in self.leases.items():
            assert held.shard == key
            assert self.state(key) is ShardState.DOING, f"lease {held.no} on {self.name(key)} that is not DOING"
        numbers = [held.no for held in self.leases.values()]
        assert len(numbers) == len(set(numbers)), "one lease number on two shards"
        doing = sum(e.doing for d in self.datasets for e in d.epochs)
        assert doing == len(self.leases), f"{doing} shards DOING, {len(self.leases)} leases"
        assert all(self.state(k) is ShardState.TODO for k in self.taken_back), "taken back but not TODO"


class Shards(ShardRecords):
    """What happens to shards: each method is one transition."""

    # ------------------------------------------------------------ plans

    def register(self, plan: ShardSchedule) -> Dataset:
        dataset = Dataset(len(self.datasets), plan)
        self.datasets.append(dataset)
        return dataset

    # ------------------------------------------------------------ what is left

    def tell_end(self, dataset: Dataset, until_epoch: int) -> None:
        """A worker is told that the data is at its end, and may go: what is pending must not be lost unnoticed."""
        dataset.announced = max(dataset.announced, until_epoch)
        for key, held in self.leases.items():
            if held.dataset == dataset.number and split_key(key)[1] < until_epoch:
                held.counted = True

    def begin_next(self, dataset: Dataset, until_epoch: int) -> Epoch | None:
        """Begin the next epoch where all that is left of those before is pending; None: it has to wait."""
        if not dataset.epochs or len(dataset.epochs) >= until_epoch:
            return None
        if not all(self.computed(dataset, e) for e in dataset.epochs if not e.finished):
            return None
        last = dataset.epochs[-1]
        if not last.finished:
            dataset.reopened.append(last.number)
        return dataset.epoch(len(dataset.epochs))

    # ------------------------------------------------------------ transitions

    def next_index(self, epoch: Epoch) -> int | None:
        """Take the next shard of TODO, returned ones first; None if there is none now."""
        if epoch.returned:
            return epoch.returned.pop(0)
        index = len(epoch.state)
        if index >= epoch.shards:
            return None
        epoch.state.append(_TODO)
        return index

    def next_carried(self, dataset: Dataset, epoch: Epoch) -> int | None:
        """Do as ``next_index``, of those that a later loop may have, too."""
        for index in epoch.returned if self.carried else ():
            if shard_key(dataset.number, epoch.number, index) in self.carried:
                epoch.returned.remove(index)
                return index
        return None

    def grant(
        self, dataset: Dataset, epoch: Epoch, index: int, no: LeaseNo, worker: Slot, incarnation: Incarnation, ask: int
    ) -> HeldLease:
        """Move a shard from TODO to DOING."""
        key = shard_key(dataset.number, epoch.number, index)
        start, stop = dataset.plan.bounds(index)
        held = HeldLease(no, key, worker, incarnation, start, stop, dataset.number, ask)
        epoch.state[index] = _DOING
        epoch.doing += 1
        self.leases[key] = held
        self.taken_back.pop(key, None)
        self.carried.discard(key)
        return held

    def take_back(self, key: ShardKey, position: int = -1) -> HeldLease:
        """Move a shard from DOING to the head of TODO, at ``position`` of those waiting there (-1: behind them)."""
        held = self.leases.pop(key)
        epoch = self.epoch_of(key)
        assert epoch is not None
        index = split_key(key)[2]
        epoch.state[index] = _TODO
        epoch.doing -= 1
        if position < 0:
            epoch.returned.append(index)
        else:
            epoch.returned.insert(position, index)
        self.taken_back[key] = held.no
        if held.counted:
            self.came_back.add(key)
        self.returns += 1
        return held

    def adopt(self, lease: Lease, worker: Slot, incarnation: Incarnation) -> HeldLease:
        """Grant what :meth:`can_adopt` allows. Shards skipped over join the head of TODO."""
        number, epoch_number, index = split_key(lease.shard)
        dataset = self.datasets[number]
        epoch = dataset.epoch(epoch_number)
        while len(epoch.state) <= index:
            epoch.returned.append(len(epoch.state))
            epoch.state.append(_TODO)
        epoch.returned.remove(index)
        return self.grant(dataset, epoch, index, lease.no, worker, incarnation, -1)

    def done(self, key: ShardKey, skipped: int, at: float = 0.0) -> bool:
        """Move a shard from DOING to DONE; it is queued for release. Returns whether the epoch is finished with it."""
        held = self.leases.pop(key)
        epoch = self.epoch_of(key)
        assert epoch is not None
        index = split_key(key)[2]
        epoch.state[index] = _DONE
        epoch.doing -= 1
        epoch.done += 1
        counted = held.stop - held.start - skipped
        if epoch.number < self.datasets[held.dataset].announced:
            self.datasets[held.dataset].sent_back = 0
        epoch.samples_done += counted
        self.samples_done += counted
        self.kills.pop(key, None)
        self.kills_at.pop(key, None)
        self.came_back.discard(key)
        self.releasing[key] = FinishedShard(counted, at, held.no)
        return self.datasets[held.dataset].settle(epoch)

    def quarantine(self, key: ShardKey, reason: str) -> bool:
        """Set a shard in TODO aside for good. Returns whether the epoch is finished with it."""
        epoch = self.epoch_of(key)
        assert epoch is not None
        index = split_key(key)[2]
        epoch.returned.remove(index)
        epoch.quarantined[index] = reason
        self.taken_back.pop(key, None)
        self.carried.discard(key)
        self.came_back.discard(key)
        self.kills.pop(key, None)
        self.kills_at.pop(key, None)
        return self.datasets[split_key(key)[0]].settle(epoch)

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
        """Move shards from DONE to RELEASED, all that wait if they are ``at_least`` so many: for a job whose durable
        tier is the memory of its ps, where a shard is releasable as soon as it is done."""
        if len(self.releasing) < max(1, at_least):
            return ()
        return self.release(tuple(self.releasing))

    def release(self, keys: Iterable[ShardKey]) -> tuple[ShardKey, ...]:
        """Move shards from DONE to RELEASED. A finished epoch's records are dropped with its last release."""
        released = tuple(key for key in keys if self.releasing.pop(key, None) is not None)
        touched: dict[tuple[int, int], Epoch] = {}
        for key in released:
            epoch = self.epoch_of(key)
            assert epoch is not None
            number, _, index = split_key(key)
            epoch.state[index] = _RELEASED
            touched[number, epoch.number] = epoch
        for epoch in touched.values():
            if epoch.finished and not epoch.state.count(ShardState.DONE):
                epoch.state = bytearray()
        self.released.extend(released)
        if len(self.released) > 2 * max(RELEASED_REMEMBERED, len(released)):
            del self.released[: -max(RELEASED_REMEMBERED, len(released))]
        return released

    def reopen_done(self, keys: Iterable[ShardKey]) -> int:
        """DONE -> head of TODO: some partition no longer has all of them. Released ones never come back. Returns how
        many samples were taken for done and are not."""
        lost = 0
        for key in keys:
            record = self.releasing.pop(key, None)
            epoch = self.epoch_of(key)
            if record is None or epoch is None:
                continue
            number, _, index = split_key(key)
            dataset = self.datasets[number]
            epoch.state[index] = _TODO
            epoch.done -= 1
            epoch.returned.append(index)
            epoch.samples_done -= record.samples
            self.samples_done -= record.samples
            self.taken_back[key] = record.lease  # so that nobody's hello adopts the old lease again
            self.came_back.add(key)
            self.returns += 1
            lost += record.samples
            if epoch.number < len(dataset.epochs) - 1 and epoch.number not in dataset.reopened:
                dataset.reopened = sorted([*dataset.reopened, epoch.number])
        return lost

    # ------------------------------------------------------------ epochs worked through in order (mode allreduce)

    def reach(self, number: int, epoch_number: int, position: int, samples: int) -> bool:
        """Everything of an epoch below ``position`` is done for good; ``samples`` more of it count. Returns whether the
        epoch is finished with it."""
        dataset = self.datasets[number]
        epoch = dataset.epoch(epoch_number)
        plan = dataset.plan
        done = plan.shards if position >= plan.samples else position // plan.shard_samples
        epoch.state.extend(bytes([ShardState.RELEASED]) * (done - epoch.done))
        epoch.done = done
        epoch.samples_done += samples
        self.samples_done += samples
        if epoch.finished:
            epoch.state = bytearray()
        return epoch.finished

    def fall_back(self, number: int, epoch_number: int, position: int, skipped: Mapping[int, int]) -> None:
        """Forget of this dataset what is done from ``position`` of an epoch on; the opposite of :meth:`reach`.
        ``skipped``: samples below it that do not count, by epoch."""
        dataset = self.datasets[number]
        epochs = dataset.epochs[: epoch_number + 1]
        while len(epochs) < epoch_number:
            epochs.append(Epoch(len(epochs), dataset.plan.shards, bytearray()))
        if len(epochs) == epoch_number and position:
            epochs.append(Epoch(epoch_number, dataset.plan.shards, bytearray()))
        plan = dataset.plan
        for epoch in epochs:
            whole = epoch.number < epoch_number
            epoch.done = plan.shards if whole else position // plan.shard_samples
            epoch.state = bytearray() if whole else bytearray([ShardState.RELEASED]) * epoch.done
            epoch.samples_done = (plan.samples if whole else position) - skipped.get(epoch.number, 0)
        dataset.epochs = epochs
        self.samples_done = sum(e.samples_done for d in self.datasets for e in d.epochs)

    # ------------------------------------------------------------ snapshots

    def positions(self, snapshots: Sequence[PartitionSnapshot]) -> tuple[DatasetPosition, ...]:
        """Return which shards all of ``snapshots`` have: the released ones, and the done ones up to whose end every
        watermark is. ``snapshots``: of every partition, each taken after the last release."""
        lacking = self.lacking(snapshots)
        return tuple(self._position(dataset, lacking) for dataset in self.datasets)

    def _position(self, dataset: Dataset, lacking: Mapping[ShardKey, int]) -> DatasetPosition:
        epochs: list[EpochPosition] = []
        finished_epochs = 0
        uncovered: dict[int, set[int]] = {}
        uncounted: dict[int, int] = {}
        for key in lacking:
            number, epoch_number, index = split_key(key)
            if number == dataset.number:
                uncovered.setdefault(epoch_number, set()).add(index)
                uncounted[epoch_number] = uncounted.get(epoch_number, 0) + self.releasing[key].samples
        for epoch in dataset.epochs:
            gone = uncovered.get(epoch.number, set())
            samples = epoch.samples_done - uncounted.get(epoch.number, 0)
            if epoch.finished and not gone and finished_epochs == epoch.number:
                finished_epochs += 1
                if samples == dataset.plan.samples and not epoch.quarantined:
                    continue
            done = _ranges(epoch, gone)
            if done or epoch.quarantined:
                epochs.append(EpochPosition(epoch.number, done, tuple(sorted(epoch.quarantined)), samples))
        return DatasetPosition(dataset.plan, tuple(epochs), finished_epochs)

    def resume(self, positions: Sequence[DatasetPosition], snapshots: Sequence[PartitionSnapshot]) -> None:
        """Begin with what the snapshots have. Shards that they have and still keep watermarks of are done; the others
        that they have are released; all else is to do."""
        kept: dict[tuple[int, int], set[int]] = {}
        for key in {key for snapshot in snapshots for key, _ in snapshot.watermarks}:
            dataset_number, epoch_number, index = split_key(key)
            kept.setdefault((dataset_number, epoch_number), set()).add(index)
        for number, position in enumerate(positions):
            known = {e.epoch: e for e in position.epochs}
            dataset = self.register(position.plan)
            for epoch_number in range(max([position.finished_epochs, *(n + 1 for n in known)])):
                saved = known.get(epoch_number)
                if saved is None and epoch_number < position.finished_epochs:
                    saved = EpochPosition(epoch_number, ((0, position.plan.shards),), (), position.plan.samples)
                marked = kept.get((number, epoch_number), set())
                dataset.epochs.append(self._resumed(dataset, saved, epoch_number, marked))
            dataset.reopened = [e.number for e in dataset.epochs[:-1] if not e.finished]

    def _resumed(self, dataset: Dataset, saved: EpochPosition | None, epoch_number: int, marked: set[int]) -> Epoch:
        plan = dataset.plan
        epoch = Epoch(epoch_number, plan.shards, bytearray())
        if saved is None:
            return epoch
        top = max([hi for _, hi in saved.done] + [index + 1 for index in saved.quarantined])
        epoch.state = bytearray(top)  # TODO
        for lo, hi in saved.done:
            epoch.state[lo:hi] = bytes([ShardState.RELEASED]) * (hi - lo)
            epoch.done += hi - lo
        for index in sorted(marked):
            if index < top and epoch.state[index] == ShardState.RELEASED:
                start, stop = plan.bounds(index)
                epoch.state[index] = _DONE
                self.releasing[shard_key(dataset.number, epoch_number, index)] = FinishedShard(stop - start)
        epoch.quarantined = dict.fromkeys(saved.quarantined, "set aside before the job was resumed")
        epoch.returned = [i for i in range(top) if epoch.state[i] == ShardState.TODO and i not in epoch.quarantined]
        epoch.samples_done = saved.samples_done
        self.samples_done += saved.samples_done
        if epoch.finished and not epoch.state.count(ShardState.DONE):
            epoch.state = bytearray()
        return epoch

    # ------------------------------------------------------------ invariants


def _ranges(epoch: Epoch, without: set[int]) -> tuple[tuple[int, int], ...]:
    """Return done and released shards of an epoch but those in ``without``, as ranges [lo, hi)."""
    if epoch.finished and not epoch.state:
        done = [i not in epoch.quarantined for i in range(epoch.shards)]
    else:
        done = [s in (ShardState.DONE, ShardState.RELEASED) and i not in without for i, s in enumerate(epoch.state)]
    found: list[tuple[int, int]] = []
    for index, there in enumerate(done):
        if not there:
            continue
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)
