"""Counts what the pods of a job cost, at the prices that it names, in its status. Pure.

A pod costs from when a node took it until its container has ended. It is on a spot machine if its node has all labels
of ``cost.spotNodeSelector``. What is counted is written once a minute, and whenever anything else is: a pod that goes
unseen in between (its object is deleted by force) costs up to that much more than is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from everstep.platforms.kubernetes.job import role_spec, wanted_by
from everstep.platforms.kubernetes.kinds import Object, Place
from everstep.platforms.kubernetes.pods import PodFacts, seconds_of, stamp_of

WRITE_S: Final = 60.0
"""So often costs are written, if nothing else is to be."""
LEAVE_S: Final = 180
"""So many seconds of cost are kept back of a budget: for the state to be made safe, and the pods to go."""
_HOUR_S: Final = 3600


class PodCosts(NamedTuple):
    """Is what a job has cost. ``unpriced_s``: seconds of pods on machines that have no price. ``rate``: what it costs
    now, an hour."""

    spot_s: int
    on_demand_s: int
    unpriced_s: int
    spent: Decimal
    on_demand_equivalent: Decimal
    rate: Decimal
    at: int

    @property
    def saved_percent(self) -> Decimal:
        """Return by how much less that is than the same pods on on-demand machines would have cost."""
        whole = self.on_demand_equivalent
        return 100 * (whole - self.spent) / whole if whole else Decimal(0)


def has_prices(job: Object) -> bool:
    """Return whether a job names any price."""
    return any(role_spec(job, place).get("price") for place in Place)


def wanted_rate(job: Object) -> Decimal:
    """Return what all pods that the job wants cost an hour, on machines on demand."""
    wanted = wanted_by(job)
    prices = {place: (role_spec(job, place).get("price") or {}) for place in Place}
    hourly = {place: Decimal(p.get("onDemandHourly", p.get("spotHourly", "0"))) for place, p in prices.items()}
    return sum((hourly[place] * wanted.of(place) for place in Place), Decimal(0))


def count(job: Object, pods: Iterable[PodFacts], nodes: Mapping[str, Object] | None, now_s: float) -> PodCosts:
    """Return what the job has cost up to now. ``nodes`` None: none may be read, so every pod counts as on demand."""
    written = (job.get("status") or {}).get("cost") or {}
    labels = (job["spec"].get("cost") or {}).get("spotNodeSelector") or {}
    since, now = seconds_of(written.get("time")), int(now_s)
    spot_s, on_demand_s = int(written.get("spotPodSeconds", 0)), int(written.get("onDemandPodSeconds", 0))
    unpriced_s = int(written.get("unpricedPodSeconds", 0))
    spent, equivalent = Decimal(written.get("spent", "0")), Decimal(written.get("onDemandEquivalent", "0"))
    rate = Decimal(0)
    for pod in pods:
        if not pod.node or not pod.began_at:
            continue
        price = role_spec(job, pod.place).get("price") or {}
        on_spot = bool(labels) and _has(labels, (nodes or {}).get(pod.node))
        hourly = price.get("spotHourly" if on_spot else "onDemandHourly")
        seconds = int(max(0.0, (pod.ended_at or now) - max(since, pod.began_at)))
        if on_spot:
            spot_s += seconds
        else:
            on_demand_s += seconds
        if hourly is None:
            unpriced_s += seconds
            continue
        spent += Decimal(hourly) * seconds / _HOUR_S
        equivalent += Decimal(price.get("onDemandHourly", hourly)) * seconds / _HOUR_S
        if not pod.ended_at:
            rate += Decimal(hourly)
    return PodCosts(spot_s, on_demand_s, unpriced_s, spent, equivalent, rate, now)


def written(costs: PodCosts) -> Object:
    """Return costs as they stand in a job's status."""
    cost: Object = {
        "spotPodSeconds": costs.spot_s,
        "onDemandPodSeconds": costs.on_demand_s,
        "spent": f"{costs.spent:.6f}",
        "onDemandEquivalent": f"{costs.on_demand_equivalent:.6f}",
        "savedPercent": f"{costs.saved_percent:.1f}",
        "time": stamp_of(costs.at),
    }
    if costs.unpriced_s:
        cost["unpricedPodSeconds"] = costs.unpriced_s
    return cost


def is_due(job: Object, costs: PodCosts) -> bool:
    """Return whether costs are to be written though nothing else is."""
    before = (job.get("status") or {}).get("cost") or {}
    late = costs.at - seconds_of(before.get("time")) >= WRITE_S
    counted = int(before.get("spotPodSeconds", 0)) + int(before.get("onDemandPodSeconds", 0))
    return late and costs.spot_s + costs.on_demand_s > counted


def left_s(job: Object, budget: Decimal, costs: PodCosts) -> float:
    """Return in how many seconds the job has to begin to suspend, to stay within its budget; 0.0: now."""
    rate = costs.rate or wanted_rate(job)
    if not rate:
        return 0.0 if costs.spent >= budget else float("inf")
    return max(0.0, float((budget - costs.spent) * _HOUR_S / rate) - LEAVE_S)


def _has(labels: Mapping[str, str], node: Object | None) -> bool:
    own = ((node or {}).get("metadata") or {}).get("labels") or {}
    return all(own.get(key) == value for key, value in labels.items())
