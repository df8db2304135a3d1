"""Keeps what a job has spent while it runs: each event costs the same, however long the job has run. Pure.

The sum grows by the prices of the machines that are held. It is worked out anew only where a machine comes or goes, or
a price changes. It starts from what the journal says was spent (``SpendingNoted``), never from the job's begin.
"""

from __future__ import annotations

import math

from everstep.brain.events import CapacityChanged, Event, MasterStarted, NodeJoined, NodeLost
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep, Market
from everstep.model.spent import PaidMachine, Spent
from everstep.monitor.node_costs import HOUR_S
from everstep.monitor.prices import PriceBook
from everstep.policies.node_selection import HOME_NODE


class LiveCosts:
    """Is the ledger of a running job, by the master's clock."""

    def __init__(self, book: PriceBook, spent: Spent, lost_after_s: float) -> None:
        """Go on from ``spent``. ``lost_after_s``: a node that fell silent was gone so long before that is known."""
        self._book, self._lost_after_s = book, lost_after_s
        self._at, self._usd, self._node_s, self._unknown_s = spent.at, spent.usd, spent.node_s, spent.unknown_s
        self._machines = {machine.node: machine for machine in spent.machines}
        self._prices: dict[NodeId, float | None] = {}
        self._usd_per_hour, self._unpriced, self._prices_until = 0.0, 0, math.inf
        self._term_began = 0.0
        self.changed = False
        """Whether a machine has come or gone since somebody looked."""
        self._look_up()

    def __repr__(self) -> str:
        return f"<costs {self._usd:.4f} USD, {len(self._machines)} machines>"

    @property
    def usd_per_hour(self) -> float:
        """Return what the machines that are held cost in an hour, those without a price left out."""
        return self._usd_per_hour

    def spent(self) -> Spent:
        """Return the state, as of the last event or ``advance``."""
        return Spent(self._at, self._usd, self._node_s, self._unknown_s, tuple(self._machines.values()))

    def unknown(self) -> list[PaidMachine]:
        """Return machines that are held and have no price."""
        return [self._machines[node] for node, usd in self._prices.items() if usd is None]

    def take(self, event: Event) -> None:
        """Add one event."""
        fact = event.fact
        match fact:
            case MasterStarted():
                self._term_began = event.at
            case NodeJoined():
                self.advance(event.at)
                if fact.node not in self._machines:
                    self._opens(
                        PaidMachine(fact.node, fact.hardware, fact.zone, fact.market or Market.ON_DEMAND), event.at
                    )
            case NodeLost():
                machine = self._machines.get(fact.node)
                if machine is not None and not machine.granted:
                    self.advance(event.at)
                    self._add(self._prices[fact.node], -self._lost_after_s)
                    self._closes(fact.node)
            case CapacityChanged():
                self.advance(event.at)
                if fact.step is CapacityStep.GRANTED:
                    self._closes(fact.node)
                    of = (fact.hardware, fact.zone, fact.market, fact.price)
                    self._opens(PaidMachine(fact.node, *of, granted=True), event.at)
                elif fact.step is not CapacityStep.WARNED:
                    self._closes(fact.node)

    def over(self, at: float) -> None:
        """The job is over, or suspended: nothing is paid from now on."""
        self.advance(at)
        for node in list(self._machines):
            self._closes(node)

    def advance(self, at: float) -> None:
        """Count what is paid up to ``at``. A clock that goes back costs nothing."""
        while self._at < at:
            until = min(at, max(self._prices_until, self._at))
            seconds = until - self._at
            self._usd += self._usd_per_hour * seconds / HOUR_S
            self._node_s += len(self._machines) * seconds
            self._unknown_s += self._unpriced * seconds
            self._at = until
            if until >= self._prices_until:
                self._look_up()

    def _opens(self, machine: PaidMachine, at: float) -> None:
        self._machines[machine.node] = machine
        self.changed = True
        self._count(machine)
        if machine.node == HOME_NODE and 0 < self._term_began < at:
            self._add(self._prices[HOME_NODE], at - self._term_began)  # (its master was there before its agent)

    def _closes(self, node: NodeId) -> None:
        if self._machines.pop(node, None) is not None:
            self.changed = True
            usd = self._prices.pop(node)
            self._usd_per_hour = self._usd_per_hour - (usd or 0.0) if self._machines else 0.0
            self._unpriced -= usd is None

    def _add(self, usd: float | None, seconds: float) -> None:
        self._node_s += seconds
        if usd is None:
            self._unknown_s += seconds
        else:
            self._usd += usd * seconds / HOUR_S

    def _count(self, machine: PaidMachine) -> None:
        """Note what a machine costs from now on."""
        usd, until = machine.usd, math.inf
        if usd is None:
            usd, until = self._book.price(machine.hardware, machine.zone, machine.market, self._at)
        self._prices[machine.node] = usd
        self._prices_until = min(self._prices_until, until)
        self._usd_per_hour += usd or 0.0
        self._unpriced += usd is None

    def _look_up(self) -> None:
        """A price has changed, or nothing is known yet."""
        self._prices, self._usd_per_hour, self._unpriced, self._prices_until = {}, 0.0, 0, math.inf
        for machine in self._machines.values():
            self._count(machine)
