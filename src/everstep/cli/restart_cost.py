"""Reckons what a restart from the checkpoint after each loss would have cost, on the machines that a run had."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

import msgspec

from everstep.brain.events import CheckpointCommitted, Event
from everstep.errors import ConfigError
from everstep.monitor.node_costs import Costs
from everstep.monitor.spending import Spending
from everstep.policies.node_selection import HOME_NODE
from everstep.sim.elastic.baselines import SWEEP_S, Rule, best, run_rule
from everstep.sim.elastic.job_model import MeasuredJob
from everstep.sim.elastic.outcome import Outcome
from everstep.sim.elastic.recorded_job import RecordedJob

_NO_END = 1 << 50  # samples: as many as there is time for


class RestartCost(msgspec.Struct, frozen=True):
    """Is what the same work would have cost where each loss ends every process. ``usd``: None: a price is not known.
    ``interval``: where the interval between checkpoints comes from. ``restart_s``: measured in this run."""

    goodput: float
    usd: float | None
    saved: float | None
    interval_s: float
    interval: str
    restart_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return what programs read."""
        return msgspec.structs.asdict(self)

    def line(self) -> str:
        """Return the line for people."""
        usd = "unknown" if self.usd is None else f"{self.usd:.4f} USD"
        saved = "unknown" if self.saved is None else f"{100 * self.saved:.1f} %"
        return (
            f"restart from checkpoint, the same work: {usd}; it would have saved {saved}, with goodput part "
            f"{self.goodput:.3f} (a checkpoint every {self.interval_s:.0f} s, {self.interval}; a restart in "
            f"{self.restart_s:.1f} s, and the time to read it)"
        )


def restart_cost(events: Iterable[Event], found: Spending, costs: Costs) -> RestartCost | None:
    """Return it for a run's journal; None: the run trained too little to tell. ``found``: the fold of the same journal.

    The machines come and go as they did. Losses are known at once, and newcomers enter at a checkpoint. The interval is
    the run's own one, if it took several checkpoints, else the best one."""
    recorded, committed = RecordedJob(), []
    for event in events:
        recorded.take(event)
        if isinstance(event.fact, CheckpointCommitted) and not event.fact.error:
            committed.append(event.at)
    goodput = found.goodput()
    machines = found.machines()
    home = next((m for m in machines if m.node == HOME_NODE), None)
    length_s = found.ended - found.began
    try:
        # (without speeds by size: the goodput part of a run is a share of time, too)
        model = MeasuredJob(recorded.model("this run").figures)
    except ConfigError:
        return None
    if home is None or not goodput or length_s <= 0:
        return None
    others = [m._replace(end=-1.0 if m.end >= length_s else m.end) for m in machines if m is not home]

    def run(interval_s: float) -> Outcome:
        rule = Rule("restart", interval_s, model.fork_s, "at checkpoint")
        return run_rule(rule, others, home, model, _NO_END, length_s)

    gaps = [b - a for a, b in itertools.pairwise(committed)]
    if len(gaps) >= 2:
        interval_s, how = statistics.median(gaps), "as in this run"
        outcome = run(interval_s)
    else:
        (interval_s, outcome), how = best(run), f"the best of {len(SWEEP_S)}"
    if outcome.goodput <= 0:
        return None
    usd = costs.spent.usd * goodput / outcome.goodput if costs.spent.complete else None
    return RestartCost(outcome.goodput, usd, costs.saved(outcome.goodput), interval_s, how, model.fork_s)
