"""What must be true of steps (consistency sync), kept apart from the code under test."""

from __future__ import annotations

from everstep.ids import Incarnation, LeaseNo, Slot
from everstep.model.turn import Turn
from everstep.sim.kernel import Violation
from everstep.tables.protocol import Work

Who = tuple[Slot, Incarnation]


class Steps:
    """Which parts a master has ever named, and at which step each batch was begun."""

    def __init__(self) -> None:
        self.named: dict[tuple[int, Who], int] = {}
        self.begun: dict[tuple[Who, LeaseNo, int, int], int] = {}
        self.pushed: dict[int, set[tuple[Who, LeaseNo, int, int]]] = {}

    def says(self, turn: Turn) -> None:
        for part in turn.parts:
            self.named[turn.step, (part.slot, part.incarnation)] = part.samples

    def begins(self, slot: Slot, incarnation: Incarnation, work: Work, step: int) -> None:
        """A worker pulls rows to compute ``work`` for ``step``."""
        self.begun[(slot, incarnation), work.lease.no, work.lo, work.hi] = step

    def pushes(self, slot: Slot, incarnation: Incarnation, work: Work) -> None:
        who = (slot, incarnation)
        key = (who, work.lease.no, work.lo, work.hi)
        step = self.begun.get(key, -1)
        if (step, who) not in self.named:
            raise Violation(f"worker:{slot} pushes [{work.lo}, {work.hi}), which step {step} was closed without")
        mine = {k for k in self.pushed.setdefault(step, set()) if k[0] == who}
        if mine - {key}:
            raise Violation(f"worker:{slot} pushes two parts of step {step}: {sorted(mine | {key})}")
        self.pushed[step].add(key)
