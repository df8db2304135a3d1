"""Runs jobs with slow workers, under virtual time: the real policies and the real check of plans, for hours in a
second.

A worker computes a sample in ``SAMPLE_S`` times the factor that its pattern gives it at that moment; a step of a
synchronous job lasts as long as its slowest worker, plus ``SYNC_SHARE`` of a healthy batch. Only relations count: the
unit of time is one healthy batch of ``BATCH`` samples. A restarted worker comes back after ``restart`` such units on a
healthy machine; the others go on without it meanwhile, as the group of mode allreduce does.

What is not modelled: the network, memory, and the time of a pass that does not depend on its samples.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from everstep.brain.policy_control import as_plan, refuse
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.observation import Observations, Pace, WorkerSeen
from everstep.model.plan import AdjustBatch, KillRestart, Plan
from everstep.policies.stragglers.policy import Policy
from everstep.policies.stragglers.shares import even

BATCH = 64
SAMPLE_S = 1.0 / BATCH
SYNC_SHARE = 0.02
HISTORY = 60  # windows that are remembered
LONG = 6  # windows of the long one
HOME, SPARE = NodeId("node0"), NodeId("spare")


class Pattern(Protocol):
    """Says how slow each worker is: ``factor`` at time ``t``, and until when that holds (later than ``t``)."""

    def at(self, worker: int, t: float) -> tuple[float, float]: ...


@dataclass(frozen=True)
class ConstantSlowness:
    """``slow`` is ``s`` times slower from ``begins`` on."""

    s: float
    begins: float = 0.0
    slow: int = 0

    def at(self, worker: int, t: float) -> tuple[float, float]:
        if worker != self.slow:
            return 1.0, math.inf
        return (self.s, math.inf) if t >= self.begins else (1.0, self.begins)


class Spells:
    """Every worker is slow for ``spell`` now and then; between two spells there are ``gap`` on average."""

    def __init__(self, s: float, spell: float, gap: float, seed: int) -> None:
        self.s, self.spell, self.gap, self.seed = s, spell, gap, seed
        self._spans: dict[int, tuple[random.Random, list[tuple[float, float]]]] = {}

    def at(self, worker: int, t: float) -> tuple[float, float]:
        if worker not in self._spans:
            self._spans[worker] = random.Random(f"{self.seed} {worker}"), []
        rng, spans = self._spans[worker]
        while not spans or spans[-1][1] <= t:
            begin = (spans[-1][1] if spans else 0.0) + rng.expovariate(1 / self.gap)
            spans.append((begin, begin + self.spell))
            del spans[:-2]
        begin, end = next(span for span in spans if t < span[1])
        return (self.s, end) if t >= begin else (1.0, begin)


class Recorded:
    """Plays recorded slowness. ``rows[k][worker]``: factor in the k-th span of ``width``; it begins again at its
    end."""

    def __init__(self, rows: Sequence[Sequence[float]], width: float) -> None:
        self.rows, self.width = rows, width

    def at(self, worker: int, t: float) -> tuple[float, float]:
        k = int(t / self.width)
        until = (k + 1) * self.width
        if until <= t:  # rounding: t is the boundary
            k, until = k + 1, until + self.width
        row = self.rows[k % len(self.rows)]
        return row[worker % len(row)], until


def finish(pattern: Pattern, worker: int, t: float, work: float) -> float:
    """When ``work`` (seconds of a healthy worker), begun at ``t``, is done."""
    while True:
        factor, until = pattern.at(worker, t)
        end = t + work * factor
        if end <= until:
            return end
        work -= (until - t) / factor
        t = until


@dataclass
class Result:
    wall: float
    plans: list[Plan] = field(default_factory=list)
    restarts: int = 0
    refused: str = ""


@dataclass
class _Worker:
    incarnation: int = 1
    healthy: bool = False  # on a machine of its own since its restart
    back_at: float = 0.0
    share: int = BATCH
    readings: list[float] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)


def synchronous(
    pattern: Pattern,
    n: int,
    samples: int,
    policy: Policy | None = None,
    window: float = 10.0,
    restart: float = 30.0,
    observe: Callable[[Observations], None] | None = None,
) -> Result:
    """A group of ``n`` trains ``samples``; ``policy`` looks once a ``window``."""
    workers = [_Worker() for _ in range(n)]
    result, state = Result(0.0), None
    t, done, step, look_at, restarted_at = 0.0, 0, 0, window, 0.0
    looked_at, looked = 0.0, 0
    while done < samples:
        here = [i for i, w in enumerate(workers) if w.back_at <= t]
        total = BATCH * len(here)
        if (
            sum(workers[i].share for i in here) != total
        ):  # somebody came or went: in proportion, as the brain carries it
            for i, share in zip(here, _carried([workers[i].share for i in here], total), strict=True):
                workers[i].share = share
        ends = []
        for i in here:
            w = workers[i]
            work = w.share * SAMPLE_S
            end = t + work if w.healthy else finish(pattern, i, t, work)
            w.readings.append((end - t) / w.share)
            ends.append(end)
        t = max(ends) + SYNC_SHARE
        done, step = done + total, step + 1
        if policy is None or t < look_at:
            continue
        look_at = t + window
        for i in here:
            workers[i].windows.append(median(workers[i].readings))
            workers[i].readings.clear()
        if len(here) == n or len(here) > 1:
            left = (samples - done) * (t - looked_at) / max(1, done - looked)
            looked_at, looked = t, done
            seen = _seen(workers, here, t, window, step, n, result.restarts, restarted_at, left, samples - done)
            if observe is not None:
                observe(seen)
            made, state = policy(seen, state)
            if made is None:
                continue
            plan = as_plan(made)
            result.refused = result.refused or refuse(plan, seen)
            if result.refused:
                break
            result.plans.append(plan)
            for action in plan.actions:
                if isinstance(action, AdjustBatch):
                    for slot, share in action.batch.items():
                        workers[slot].share = share
                elif isinstance(action, KillRestart):
                    gone = workers[action.slot]
                    workers[action.slot] = _Worker(gone.incarnation + 1, True, t + restart)
                    result.restarts, restarted_at = result.restarts + 1, t
    result.wall = t
    return result


def _carried(shares: list[int], total: int) -> list[int]:
    weight = sum(shares)
    counts = [total * s // weight for s in shares]
    for i in range(total - sum(counts)):
        counts[i] += 1
    return counts


def _seen(
    workers: list[_Worker],
    here: list[int],
    t: float,
    window: float,
    step: int,
    n: int,
    restarts: int,
    restarted_at: float,
    left: float,
    left_samples: int,
) -> Observations:
    out = []
    for i in here:
        w = workers[i]
        out.append(
            WorkerSeen(
                slot=Slot(i),
                incarnation=Incarnation(w.incarnation),
                node=SPARE if w.healthy else NodeId(f"node{i}"),
                batch=w.share,
                share=w.share,
                short=Pace(per_sample_s=w.windows[-1]),
                long=Pace(per_sample_s=median(w.windows[-LONG:])),
                history=tuple(w.windows[-HISTORY:]),
            )
        )
    return Observations(
        at=t,
        window_s=window,
        mode="allreduce",
        consistency="sync",
        step=step,
        global_batch=sum(w.share for w in out),
        loader_batch=BATCH,
        wanted_workers=n,
        pending=n - len(here),
        remaining_s=left,
        remaining_samples=max(0, left_samples),
        places=(HOME, SPARE),
        restarts=restarts,
        restarted_at=restarted_at,
        workers=tuple(out),
    )


# ---------------------------------------------------------------- what others do


def with_backup(pattern: Pattern, n: int, samples: int, backup: int = 1) -> Result:
    """Return the result where a step ends with the fastest ``n - backup``; what the others computed is dropped, and
    counts as not trained."""
    t, done = 0.0, 0
    while done < samples:
        ends = sorted(finish(pattern, i, t, 1.0) for i in range(n))
        t = ends[n - backup - 1] + SYNC_SHARE
        done += BATCH * (n - backup)
    return Result(t)


def asynchronous(pattern: Pattern, n: int, samples: int, shared: bool) -> Result:
    """Return the result where nobody waits for anybody. ``shared``: who is done takes the next batch; else everybody
    has its part from the beginning."""
    if not shared:
        parts = even(samples // BATCH, n)
        return Result(max(finish(pattern, i, 0.0, parts[i] * (1.0 + SYNC_SHARE)) for i in range(n)))
    free = [(0.0, i) for i in range(n)]
    heapq.heapify(free)
    last = 0.0
    for _ in range(samples // BATCH):
        t, i = heapq.heappop(free)
        end = finish(pattern, i, t, 1.0 + SYNC_SHARE)
        last = max(last, end)
        heapq.heappush(free, (end, i))
    return Result(last)


def ceiling(n: int, s: float) -> float:
    """Return what dividing without loss can gain at best, where one of ``n`` is ``s`` times slower all the time."""
    return (s * (n - 1) + 1) / n
