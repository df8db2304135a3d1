"""Says how long a job waits for members, and when capacity that is back counts. Pure: the caller has the clock.

The brain asks these questions with what it knows (``brain.concerns.supervisor``); ``everstep run`` asks the last one
while the job is suspended and has no brain; ``everstep simulate`` asks them in virtual time.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import msgspec

from everstep.config.limit import parse_limit
from everstep.config.spec import JobSpec
from everstep.units import seconds

LONGEST_S: Final = 600.0  # that a wait becomes by itself


class AfterWait(StrEnum):
    """Says what a job does that has waited for ``max_wait`` (``on_wait_timeout``)."""

    SUSPEND = "suspend"
    FAIL = "fail"
    RUN = "run"


def max_wait_s(spec: JobSpec) -> float:
    """Return how long the job waits for enough members; 0.0: for ever."""
    return parse_limit(spec.max_wait, "max_wait")


def longer_wait_s(spec: JobSpec, in_vain: int) -> float:
    """Return how long the job waits that was suspended ``in_vain`` times before it trained: twice as long each time,
    up to ten minutes or ``max_wait``. Agents that need longer to start than ``max_wait`` would never be there else."""
    wait_s = max_wait_s(spec)
    return min(wait_s * 2.0 ** min(in_vain, 30), max(wait_s, LONGEST_S))


def stabilization_s(spec: JobSpec) -> float:
    """Return for how long capacity has to stay until it counts as back."""
    return seconds(spec.stabilization)


def machines_needed(spec: JobSpec) -> int:
    """Return how many machines, beside the first one, a suspended job needs to go on: as many as bring the workers that
    its first machine has not, and one at least."""
    least = max(spec.min_workers, spec.workers if spec.recovery == "wait_for_all" else 1)
    here = 0 if spec.master_alone else spec.workers
    return max(1, math.ceil((least - here) / max(1, spec.capacity_workers)))


def fallback_s(spec: JobSpec) -> float:
    """Return after how long a wait for spot machines on-demand ones are asked for; 0.0: never."""
    return parse_limit(spec.fallback, "fallback")


def stand_ins_needed(spec: JobSpec, workers: int) -> int:
    """Return how many on-demand machines bring so many ``workers``."""
    needed = max(0, math.ceil(workers / max(1, spec.capacity_workers)))
    return min(needed, spec.capacity_nodes) if spec.capacity_nodes else needed


def lack_words(workers: int, least_workers: int, ps: int, least_ps: int) -> str:
    """Return of whom there are too few, for people; "": there are enough."""
    parts = []
    if workers < least_workers:
        parts.append(f"{workers} of at least {least_workers} workers are there")
    if ps < least_ps:
        parts.append(f"{ps} of at least {least_ps} ps are there")
    return " and ".join(parts)


def refuse_count(spec: JobSpec, role: str, count: int) -> str:
    """Return why the job may not have ``count`` members of a role ("workers", "ps"); "": it may."""
    most = spec.max_workers if role == "workers" else spec.max_ps
    if most and count > most:
        return f"{count} {role}: more than max_{role}={most}"
    if role == "ps" and count < spec.min_ps:
        return f"{count} {role}: fewer than min_{role}={spec.min_ps}"
    return ""  # (with fewer than min_workers training waits)


class Steadiness(msgspec.Struct):
    """Return whether capacity for a suspended job is back. ``need``: machines. ``stable_s``: for so long there must
    have been so many, without a break. ``since``: since when there are, -1.0: there are not."""

    need: int
    stable_s: float
    since: float = -1.0

    def offered(self, at: float, machines: int) -> bool:
        """``machines`` could be had at ``at`` (seconds on any clock that does not go back): whether the job goes on."""
        if machines < self.need:
            self.since = -1.0
            return False
        if self.since < 0:
            self.since = at
        return at - self.since >= self.stable_s
