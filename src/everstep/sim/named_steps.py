"""What must be true of steps (consistency sync), kept apart from the code under test."""

from __future__ import annotations

from everstep.ids import Incarnation, LeaseNo, Slot
from everstep.model.step_schedule import StepSchedule
from everstep.sim.kernel import Violation
from everstep.tables.worker_protocol import RangeWork

Who = tuple[Slot, Incarnation]


class NamedSteps:
    """Keeps which parts a master has ever named, and at which step each batch was begun."""

    def __init__(self) -> None:
        self.named: set[tuple[int, Who]] = set()
        self.begun: dict[tuple[Who, LeaseNo, int, int], int] = {}
        self.parts: dict[tuple[Who, LeaseNo, int, int], int] = {}
        self.pushed: dict[tuple[int, Who], int] = {}
        self._number = 0

    def says(self, schedule: StepSchedule) -> None:
        self.named |= {(schedule.step, (part.slot, part.incarnation)) for part in schedule.parts}

    def begins(self, slot: Slot, incarnation: Incarnation, work: RangeWork, step: int) -> None:
        """A worker pulls rows to compute ``work`` for ``step``."""
        self.begun[(slot, incarnation), work.lease.no, work.lo, work.hi] = step

    def joins(self, slot: Slot, incarnation: Incarnation, works: tuple[RangeWork, ...]) -> None:
        """Note that a worker calls these one part of a step."""
        self._number += 1
        for work in works:
            self.parts[(slot, incarnation), work.lease.no, work.lo, work.hi] = self._number

    def pushes(self, slot: Slot, incarnation: Incarnation, work: RangeWork) -> None:
        who = (slot, incarnation)
        key = (who, work.lease.no, work.lo, work.hi)
        step = self.begun.get(key, -1)
        if (step, who) not in self.named:
            raise Violation(f"worker:{slot} pushes [{work.lo}, {work.hi}), which step {step} was closed without")
        part = self.parts[key]
        if self.pushed.setdefault((step, who), part) != part:
            raise Violation(f"worker:{slot} pushes two parts of step {step}: [{work.lo}, {work.hi}) is of the second")
