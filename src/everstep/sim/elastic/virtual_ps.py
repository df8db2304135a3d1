"""The parameter servers of a virtual job: they have what the map says after the seconds that the bytes take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.brain.events import MirrorsReady, PartitionsReady, SnapshotsWritten, by_ps
from everstep.ids import Incarnation, PartitionId, ShardKey, Slot
from everstep.model.placement import MirrorKind, Placement
from everstep.model.reasons import Arrival
from everstep.model.shard import shard_key, split_key
from everstep.model.snapshot import PartitionSnapshot
from everstep.policies.placement_builder import How

if TYPE_CHECKING:
    from everstep.sim.elastic.virtual_job import VirtualJob, VirtualProcess

_ARRIVALS = {
    How.PROMOTE: Arrival.PROMOTED,
    How.RECONSTRUCT: Arrival.REBUILT,
    How.LOAD: Arrival.LOADED,
    How.HAND_OVER: Arrival.PROMOTED,
    How.TAKE_BACK: Arrival.RESUMED,
    How.BEGIN: Arrival.BEGUN,
}


class VirtualPs:
    """Has all ps of one job. A ps gets one thing after another: ``_free_at`` says when it has got the last one."""

    def __init__(self, job: VirtualJob) -> None:
        self._job = job
        self._asked: set[tuple[int, int]] = set()  # (mirror, 0), or (partition, version that gave it)
        self._free_at: dict[tuple[Slot, Incarnation], float] = {}
        self._slow = 1.0

    def published(self, placement: Placement) -> None:
        """There is a new map: each ps gets what it lacks."""
        job = self._job
        now, model, spec = job.kernel.now, job.model, job.spec
        one = 1.0 / spec.partitions
        missing = job.brain.state.protection.missing
        width = job.brain.partitions.code.k
        for place in placement.servers:
            life = (place.slot, place.incarnation)
            for partition, pending in missing.items():
                if placement.owner[partition] != place.slot or (-1 - partition, pending.version) in self._asked:
                    continue
                self._asked.add((-1 - partition, pending.version))
                took_s = 0.0
                if pending.how is How.RECONSTRUCT:
                    took_s = model.build_s(one * width)
                elif pending.how is How.LOAD:
                    took_s = model.restore_s * one
                at = self._free_at[life] = max(now + 0.01, self._free_at.get(life, 0.0)) + took_s
                job.kernel.at(at, self._whole, life, placement.version, partition, _ARRIVALS[pending.how])
            built = 0.0
            ids = []
            for mirror in placement.mirrors_at(place.slot):
                if (mirror.id, 0) not in self._asked:
                    self._asked.add((mirror.id, 0))
                    ids.append(mirror.id)
                    built += one * (len(mirror.members) if mirror.kind is MirrorKind.PARITY else 1)
            if ids:
                at = self._free_at[life] = max(now + 0.01, self._free_at.get(life, 0.0)) + model.build_s(built)
                job.kernel.at(at, self._mirrored, life, tuple(ids))
        self._see_speed()

    def _whole(self, life: tuple[Slot, Incarnation], version: int, partition: PartitionId, how: Arrival) -> None:
        self._job.tell(PartitionsReady(version, (partition,), how), by_ps(*life))
        self._see_speed()

    def _mirrored(self, life: tuple[Slot, Incarnation], ids: tuple[int, ...]) -> None:
        self._job.tell(MirrorsReady(ids), by_ps(*life))

    def _see_speed(self) -> None:
        missing = self._job.brain.state.protection.missing.values()
        begins = not self._job.brain.shards.datasets
        rebuilt = any(p.how in (How.RECONSTRUCT, How.LOAD) for p in missing)
        share = self._job.model.rebuilding if not begins and rebuilt else 1.0
        if share != self._slow:
            self._slow = share
            self._job.workers.speed(share)

    def gone(self, ps: VirtualProcess) -> None:
        """A ps is no more."""
        self._free_at.pop((ps.slot, ps.incarnation), None)

    # ------------------------------------------------------------ checkpoints

    def order(self, checkpoint: int, since: int) -> None:
        """Each ps writes what it has, and says so when it is durable."""
        job = self._job
        if job.placement is None:
            return
        marks = self._marks()
        took_s = job.model.write_s(full=not since)
        if job.model.stall > 0 and self._slow == 1.0:
            job.workers.speed(max(0.01, 1.0 - job.model.stall))
            job.kernel.after(took_s, self._full_speed)
        for place in job.placement.servers:
            job.after(took_s, self._written, (place.slot, place.incarnation), checkpoint, marks)

    def _full_speed(self) -> None:
        if self._slow == 1.0:
            self._job.workers.speed(1.0)

    def _marks(self) -> tuple[tuple[ShardKey, int], ...]:
        """Return what each partition has of shards that are done or open."""
        shards, groups = self._job.brain.shards, self._job.brain.state.groups
        marks: list[tuple[ShardKey, int]] = []
        for key in shards.releasing:
            epoch = shards.epoch_of(key)
            if epoch is not None:
                number, _, index = split_key(key)
                marks.append((key, shards.datasets[number].plan.bounds(index)[1]))
        for number, (epoch_number, sample) in groups.positions.items():
            marks.append((shard_key(number, epoch_number, 0), sample))
            if epoch_number:
                samples = shards.datasets[number].plan.samples
                marks.append((shard_key(number, epoch_number - 1, 0), samples))
        return tuple(marks)

    def _written(
        self, life: tuple[Slot, Incarnation], checkpoint: int, marks: tuple[tuple[ShardKey, int], ...]
    ) -> None:
        job = self._job
        writing, placement = job.brain.checkpoints.writing, job.placement
        if writing is None or writing.number != checkpoint or placement is None:
            return
        snapshots = tuple(
            PartitionSnapshot(partition=partition, seq=checkpoint, fingerprint=0, watermarks=marks, files=())
            for partition in placement.owned_by(life[0])
        )
        job.tell(SnapshotsWritten(checkpoint, snapshots), by_ps(*life))
