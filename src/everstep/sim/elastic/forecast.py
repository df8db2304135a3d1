"""Says what a job would cost, and when it would end: one setting over several stories, beside what others would do.

Story 0 is the recording from its begin. Each further one begins at another moment of it, drawn by its number; what
comes before that moment follows at the end. More machines than the recording has are copies of it, each from a moment
of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from everstep.config.spec import JobSpec
from everstep.data.shard_schedule import make_plan
from everstep.model.capacity import Gone, Grant, Market, Offer
from everstep.monitor.node_costs import MachineSpan
from everstep.platforms.trace_variants import from_moment, repeated
from everstep.platforms.traces import Trace, TraceMarket, timeline_of
from everstep.policies.node_selection import HOME_NODE
from everstep.sim.elastic.baselines import BAMBOO_MEET_S, Rule, best, run_rule, young
from everstep.sim.elastic.job_model import JobModel
from everstep.sim.elastic.outcome import Outcome
from everstep.sim.elastic.virtual_job import VirtualJob, Work

LEASES_MAX = 400_000
"""Leases of one virtual job, about: with more, its shards are cut coarser than the job itself would."""


class Story(NamedTuple):
    """Tells what happens to the machines of one job. ``begins_s``: the moment of the recording at which it begins."""

    trace: Trace
    offer: Offer
    machines: int
    begins_s: float = 0.0
    speed: float = 1.0
    quiet_s: float = 0.0

    def market(self, lead_s: float) -> TraceMarket:
        """Return the machines, from the begin of the story."""
        return TraceMarket(self.trace, timeline_of(self.trace, self.speed, self.quiet_s), self.offer, lead_s)


def stories(
    trace: Trace, offer: Offer, machines: int, seeds: int, speed: float = 1.0, quiet_s: float = 0.0
) -> Iterator[Story]:
    """Yield so many stories. ``machines`` 0: as many as the recording has. Raise TraceError."""
    most = machines or trace.most
    for seed in range(seeds):
        begins_s = 0.0 if seed == 0 else random.Random(seed).random() * trace.length_s
        if most > trace.most:
            yield Story(repeated(trace, most, seed), offer, most, begins_s, speed, quiet_s)
        else:
            yield Story(from_moment(trace, begins_s), offer, most, begins_s, speed, quiet_s)


def work_of(samples: int, epochs: int, batch_samples: int, shard_samples: int = 0) -> Work:
    """Return what there is to train, cut as a job would cut it (``shard_samples`` 0)."""
    if not shard_samples:
        shard_samples = make_plan("data", samples, min(batch_samples, samples), 0).shard_samples
        coarse = -(-samples * epochs // LEASES_MAX)
        shard_samples *= max(1, -(-coarse // shard_samples))
    return Work(samples, epochs, shard_samples)


def virtual(
    spec: JobSpec, work: Work, model: JobModel, story: Story, lead_s: float, limit_s: float, seed: int = 0
) -> Outcome:
    """Return what comes of the job in this story."""
    return VirtualJob(spec, work, model, story.market(lead_s), story.machines, seed).run(limit_s)


# ------------------------------------------------------------ others


def machines_of(story: Story, places: int, limit_s: float) -> list[MachineSpan]:
    """Return all machines that the story gives to a job that always takes what there is; ``end`` -1: never taken."""
    market = story.market(0.0)
    market.request(story.machines)
    out: list[MachineSpan] = []
    here: dict[str, int] = {}
    now = 0.0
    while True:
        for news in market.until(now + 1e-9):
            match news:
                case Grant(node, offer):
                    here[node] = len(out)
                    out.append(
                        MachineSpan(node, offer.hardware, offer.zone, offer.market, now, -1.0, offer.price, places)
                    )
                case Gone(node):
                    n = here.pop(node)
                    out[n] = out[n]._replace(end=now)
                case _:
                    pass
        if market.due_at is None or market.due_at > limit_s:
            return out
        now = max(now, market.due_at)


class Ruled(NamedTuple):
    """Is what comes of a job under one rule of others, with its best interval between checkpoints."""

    rule: Rule
    outcome: Outcome


def others(
    spec: JobSpec, work: Work, model: JobModel, story: Story, limit_s: float, restart_s: float
) -> dict[str, Ruled]:
    """Return what others would do with the same machines, each with its best settings (``baselines``)."""
    machines = machines_of(story, spec.capacity_workers, limit_s)
    home = MachineSpan(HOME_NODE, spec.hardware, spec.zone, Market(spec.market), 0.0, -1.0, None, spec.workers)

    def run(rule: Rule) -> Ruled:
        return Ruled(rule, run_rule(rule, machines, home, model, work.samples, limit_s))

    def swept(name: str, joins: str, redundant: bool = False, meet_s: float = 0.0) -> Ruled:
        rule = Rule(name, 0.0, restart_s, joins, redundant, meet_s)
        interval_s, outcome = best(lambda interval_s: run(rule._replace(interval_s=interval_s)).outcome)
        return Ruled(rule._replace(interval_s=interval_s), outcome)

    restart = max(
        (swept("restart", joins) for joins in ("at restart", "at checkpoint")),
        key=lambda r: (r.outcome.ended, r.outcome.samples / r.outcome.length_s),
    )
    interval_s = young(model, restart.outcome.reclaims, restart.outcome.length_s)
    return {
        "restart": restart,
        "restart_young": run(Rule("restart_young", interval_s, restart_s, restart.rule.joins)),
        "varuna_like": swept("varuna_like", "at once"),
        "bamboo_like": swept("bamboo_like", "at once", redundant=True, meet_s=BAMBOO_MEET_S),
        "bamboo_free": swept("bamboo_free", "at once", redundant=True),
    }
