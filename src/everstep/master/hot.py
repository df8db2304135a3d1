"""The shell's part of hot partitions: looks at what the ps tell of their load, and has partitions moved when that
pays."""

from __future__ import annotations

import os
from collections.abc import Callable

from everstep.brain.brain import Brain
from everstep.brain.events import FactType, HotPartitions
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.master.readings import Readings
from everstep.model.member import MemberKey, Role
from everstep.policies.hot import BUSY, Patience, PsLoad, choose_moves, overloaded

LOOK_S = 5.0
BUSY_VARIABLE = "EVERSTEP_HOT_BUSY"
"""For tests: how many cores a ps must use before its partitions count as too much for it."""

_PREFIX = "load."


class HotPartitionController:
    """Sees to hot partitions; ``tell(event)`` goes to the brain, by the journal. Soft state: a new master looks
    anew."""

    def __init__(self, brain: Brain, readings: Readings, tell: Callable[[FactType], object]) -> None:
        self._brain, self._readings, self._tell = brain, readings, tell
        self._patience = Patience()
        self._look_at = 0.0
        self._busy = float(os.environ.get(BUSY_VARIABLE, BUSY))
        self._cpu: dict[Slot, tuple[Incarnation, float, float]] = {}  # life, cpu_s, when

    def __repr__(self) -> str:
        return f"<hot partitions: {self._patience!r}>"

    def tick(self, at: float) -> None:
        """Call several times a second; ``at`` in seconds."""
        brain = self._brain
        if at < self._look_at or brain.placement is None or brain.job.over:
            return
        self._look_at = at + LOOK_S
        loads = self._loads(at)
        if not self._patience.due(overloaded(loads, self._busy), at) or not brain.partitions.at_rest():
            return
        moves = choose_moves(loads, brain.partitions.may_move, self._busy)
        if moves:
            self._patience.moved(at)
            rows = {slot: round(load.rows_per_s) for slot, load in sorted(loads.items())}
            self._tell(HotPartitions(tuple(moves), tuple(rows.items())))

    def _loads(self, at: float) -> dict[Slot, PsLoad]:
        """Return the loads of all ps of the map; empty while one of them has not told."""
        placement = self._brain.placement
        assert placement is not None
        out: dict[Slot, PsLoad] = {}
        for place in placement.servers:
            readings = self._readings.of(MemberKey(Role.PS, place.slot), place.incarnation)
            if "load" not in readings:
                return {}
            before = self._cpu.get(place.slot)
            cpu_s = readings.get("cpu_s", 0.0)
            self._cpu[place.slot] = (place.incarnation, cpu_s, at)
            busy = 0.0
            if before is not None and before[0] == place.incarnation and at > before[2]:
                busy = (cpu_s - before[1]) / (at - before[2])
            partitions = {PartitionId(int(k[len(_PREFIX) :])): v for k, v in readings.items() if k.startswith(_PREFIX)}
            mine = {
                b: v
                for b, v in partitions.items()
                if 0 <= b < placement.partitions and placement.owner[b] == place.slot
            }
            out[place.slot] = PsLoad(readings["load"], busy, mine)
        return out
