"""The shell's part of hot and cold partitions: takes what the ps tell of their load, has partitions moved where that
pays, and says which partition is more than a ps should have."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from everstep.brain.brain import Brain
from everstep.brain.events import FactType, HotPartitions
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.master.readings import Readings
from everstep.model.member import MemberKey, Role
from everstep.model.partition_load import SHOWN, PartitionReading, PartitionView
from everstep.policies.hot import (
    BUSY,
    LOOKS,
    AlonePartition,
    HotMove,
    MoveCosts,
    Patience,
    PsLoad,
    beyond_a_ps,
    choose_moves,
    overloaded,
)

LOOK_S = 5.0
LOOK_VARIABLE = "EVERSTEP_HOT_LOOK_S"
"""For tests: the seconds between two looks."""
BUSY_VARIABLE = "EVERSTEP_HOT_BUSY"
"""For tests: how many cores a ps must use before its partitions count as too much for it."""


class HotPartitionController:
    """Sees to hot partitions; ``tell(event)`` goes to the brain, by the journal. Soft state: a new master looks
    anew."""

    def __init__(self, brain: Brain, readings: Readings, tell: Callable[[FactType], object]) -> None:
        self._brain, self._readings, self._tell = brain, readings, tell
        self._patience = Patience()
        self._look_at = 0.0
        self._every_s = float(os.environ.get(LOOK_VARIABLE, LOOK_S))
        self._busy = float(os.environ.get(BUSY_VARIABLE, BUSY))
        self._cpu: dict[Slot, tuple[Incarnation, float, float]] = {}  # life, cpu_s, when
        self._reported: dict[Slot, tuple[Incarnation, tuple[PartitionReading, ...]]] = {}
        self._alone: dict[PartitionId, int] = {}  # looks in a row
        self._named: set[PartitionId] = set()

    def __repr__(self) -> str:
        return f"<hot partitions: {self._patience!r}>"

    def take(self, slot: Slot, incarnation: Incarnation, partitions: tuple[PartitionReading, ...]) -> None:
        """Take what a beat of a ps says of its hottest partitions."""
        self._reported[slot] = incarnation, partitions

    def tick(self, at: float) -> None:
        """Call several times a second; ``at`` in seconds."""
        brain = self._brain
        if at < self._look_at or brain.placement is None or brain.job.over:
            return
        self._look_at = at + self._every_s
        loads = self._loads(at)
        alone = self._find_alone(loads)
        moves: list[HotMove] = []
        if self._patience.due(overloaded(loads, self._busy), at) and brain.partitions.at_rest():
            costs = MoveCosts(copies=1.0 + brain.partitions.code.m)
            lasts_s = self._patience.lasted_s(at)
            moves = choose_moves(loads, brain.partitions.may_move, self._busy, costs, lasts_s)
        if moves:
            self._patience.moved(at)
        if moves or alone:
            rows = {slot: round(load.rows_per_s) for slot, load in sorted(loads.items())}
            sent = sum(loads[m.source].bytes_of(m.partition) for m in moves)
            self._tell(HotPartitions(tuple(moves), tuple(rows.items()), alone, round(sent)))

    def hottest(self) -> tuple[PartitionView, ...]:
        """Return the hottest partitions of all ps, hottest first."""
        placement, out = self._brain.placement, []
        if placement is None:
            return ()
        for place in placement.servers:
            incarnation, reported = self._reported.get(place.slot, (place.incarnation, ()))
            if incarnation != place.incarnation:
                continue
            total = self._readings.of(MemberKey(Role.PS, place.slot), place.incarnation).get("load", 0.0)
            for r in reported:
                partition = PartitionId(r.partition)
                if partition < placement.partitions and placement.owner[partition] == place.slot:
                    out.append(
                        PartitionView(
                            partition,
                            place.slot,
                            r.requests_per_s,
                            r.rows_per_s,
                            r.bytes_per_s,
                            r.service_share,
                            r.held_bytes,
                            min(1.0, r.rows_per_s / total) if total > 0 else 0.0,
                            partition in self._named,
                            r.keys,
                        )
                    )
        return tuple(sorted(out, key=lambda p: (-p.rows_per_s, p.partition))[:SHOWN])

    def _find_alone(self, loads: dict[Slot, PsLoad]) -> tuple[AlonePartition, ...]:
        """Return partitions that have been more than a ps should have for some looks, and were not said so before."""
        found = beyond_a_ps(loads, self._busy)
        self._alone = {partition: self._alone.get(partition, 0) + 1 for partition, *_ in found}
        if loads:
            self._named &= self._alone.keys()
        new = tuple(
            AlonePartition(partition, slot, round(rows, 1), round(times, 2), self._keys_of(slot, partition))
            for partition, slot, rows, times in found
            if self._alone[partition] >= LOOKS and partition not in self._named
        )
        self._named |= {one.partition for one in new}
        return new

    def _keys_of(self, slot: Slot, partition: PartitionId) -> tuple[tuple[str, int, float], ...]:
        for reading in self._reported[slot][1]:
            if reading.partition == partition:
                return tuple((hot.table, hot.key, hot.share) for hot in reading.keys)
        return ()

    def _loads(self, at: float) -> dict[Slot, PsLoad]:
        """Return the loads of all ps of the map; empty while one of them has not reported."""
        placement = self._brain.placement
        assert placement is not None
        out: dict[Slot, PsLoad] = {}
        for place in placement.servers:
            readings = self._readings.of(MemberKey(Role.PS, place.slot), place.incarnation)
            incarnation, reported = self._reported.get(place.slot, (place.incarnation, ()))
            if "load" not in readings or incarnation != place.incarnation:
                return {}
            before = self._cpu.get(place.slot)
            cpu_s = readings.get("cpu_s", 0.0)
            self._cpu[place.slot] = (place.incarnation, cpu_s, at)
            busy = 0.0
            if before is not None and before[0] == place.incarnation and at > before[2]:
                busy = max((cpu_s - before[1]) / (at - before[2]), sum(r.service_share for r in reported))
            owned = placement.owned_by(place.slot)
            mine = {PartitionId(r.partition): r for r in reported if r.partition in owned}
            held = {partition: r.held_bytes for partition, r in mine.items()}
            others = tuple(b for b in owned if b not in mine)
            rest = max(0.0, readings.get("row_bytes", 0.0) - sum(held.values()))
            limit = readings.get("limit_bytes", 0.0)
            out[place.slot] = PsLoad(
                readings["load"],
                busy,
                {partition: r.rows_per_s for partition, r in mine.items()},
                others,
                held,
                rest / max(1, len(others)),
                max(0.0, limit - readings.get("limit_used_bytes", 0.0)) if limit else math.inf,
            )
        return out
