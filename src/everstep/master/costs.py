"""The shell's part of costs: keeps the ledger, has the journal remember it, and suspends the job before its budget is
exceeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everstep.brain.brain import Brain
from everstep.brain.events import Event, FactType, SpendingNoted, SuspendAsked
from everstep.brain.job import Phase
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.model.capacity import Offer, offer_words
from everstep.model.decision import Decision
from everstep.model.job_view import CostView
from everstep.monitor.live_costs import LiveCosts
from everstep.monitor.node_costs import HOUR_S
from everstep.monitor.price_files import read_prices
from everstep.monitor.prices import PriceBook
from everstep.policies.job_budget import seconds_left, suspend_takes_s

LOOK_S = 1.0
NOTE_S = 60.0
AGAIN_S = 30.0  # a job that could not be suspended is asked again


class CostController:
    """Is there for a job with prices. ``tell(event)`` goes to the brain, by the journal; ``note(at, member, decision)``
    tells people."""

    def __init__(
        self,
        brain: Brain,
        spec: JobSpec,
        tell: Callable[[FactType], object],
        note: Callable[[float, str, Decision], object],
    ) -> None:
        """A file of prices that cannot be read any more leaves all machines without a price: training goes on."""
        self._brain, self._budget, self._tell, self._note = brain, spec.budget, tell, note
        self._unread, book = "", PriceBook()
        try:
            book = read_prices(Path(spec.prices))
        except ConfigError as error:
            self._unread = str(error)
        self._costs = LiveCosts(book, brain.state.spent, spec.lost_after_s)
        self._look_at = self._noted_at = self._ask_at = 0.0
        self._warned: set[tuple[str, str, str]] = set()
        self.asked = False
        """Whether the job was asked to be suspended, for its budget."""
        if brain.job.phase is Phase.SUSPENDED:
            self._costs.over(brain.state.supervision.since)  # (what was noted last is from before)

    def __repr__(self) -> str:
        return f"<{self._costs!r}>"

    def take(self, event: Event) -> None:
        """Look at an event that was handled."""
        if not self._brain.job.over:
            self._costs.take(event)

    def tick(self, at: float) -> None:
        """Call several times a second; ``at`` in seconds."""
        if at < self._look_at:
            return
        self._look_at = at + LOOK_S
        if self._brain.job.over:
            return
        self._costs.advance(at)
        if self._costs.changed or at >= self._noted_at + NOTE_S:
            self._costs.changed, self._noted_at = False, at
            self._say_unknown(at)
            self._tell(SpendingNoted(self._costs.spent()))
        self._look_at_budget(at)

    def _say_unknown(self, at: float) -> None:
        if self._unread:
            if not self._warned:
                words = f"{self._unread}: from now on machines have no price, and no budget is kept"
                self._note(at, "", Decision("price unknown", words))
                self._warned.add(("", "", ""))
            return
        for machine in self._costs.unknown():
            key = (machine.hardware, machine.zone, machine.market.value)
            if key not in self._warned:
                self._warned.add(key)
                words = f"{offer_words(Offer(*key[:2], machine.market))} has no price: what it costs is not counted"
                self._note(at, machine.node, Decision("price unknown", f"{words}; name it in --prices"))

    def _look_at_budget(self, at: float) -> None:
        if not self._budget or at < self._ask_at or self._brain.checkpoints.stopping:
            return
        spent, rate = self._costs.spent(), self._costs.usd_per_hour
        takes_s = self._takes_s()
        if seconds_left(spent.usd, rate, self._budget, takes_s) > 0:
            return
        self._ask_at, self.asked = at + AGAIN_S, True
        words = (
            f"{spent.usd:.4f} USD of budget={self._budget:g} are spent, at {rate:.4g} USD/h, and to suspend may take "
            f"{takes_s:.0f} s"
        )
        self._tell(SuspendAsked(words))

    def _takes_s(self) -> float:
        """Return how long a suspension may take."""
        last = self._brain.checkpoints.shown
        return suspend_takes_s(last.took_s if last is not None else 0.0)

    def end(self, at: float) -> None:
        """The job is over: pay up to ``at``."""
        self._costs.over(at)

    def view(self, at: float) -> CostView:
        """Return what is shown of it."""
        if not self._brain.job.over:
            self._costs.advance(at)
        spent, rate = self._costs.spent(), self._costs.usd_per_hour
        left_s = -1.0
        if self._budget and rate > 0:
            left_s = seconds_left(spent.usd, rate, self._budget, self._takes_s())
        hours, unknown = spent.node_s / HOUR_S, spent.unknown_s / HOUR_S
        return CostView(round(spent.usd, 6), round(rate, 6), hours, unknown, self._budget, left_s)
