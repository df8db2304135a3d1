"""``dedicated``: machines of several kinds, and nobody else on them. The exact split, once it is known what they take.

What a pass of B samples takes, ``overhead + per_sample * B``, is fitted from what was measured at two sizes of B; until
there are two, the overhead counts as nothing. Where nobody knows what fits into memory, the loader's batch does. A new
split is asked for only when it is clearly better than the one in force, and worked out only when something has changed,
and while everybody's pace is steady: where it is not, the machines are not dedicated, and equal shares are safer than
ones that were right a moment ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from everstep.ids import Incarnation, Slot
from everstep.model.decision import Decision
from everstep.model.observation import Observations, WorkerSeen
from everstep.model.plan import AdjustAccum, AdjustBatch, Plan
from everstep.policies.stragglers.exact import MAX_TOTAL, Device, Portion, solve, time_s
from everstep.policies.stragglers.shares import even

Key = tuple[Slot, Incarnation]
BETTER = 1.03
SIZES = 4  # of micro-batches that are remembered, by process
READINGS = 5  # of each
STEADY = 5  # readings in a row that must be alike
UNSTEADY = 1.15


class Fit(msgspec.Struct, frozen=True):
    """Newest readings: seconds of one pass, by its samples."""

    passes_s: dict[int, tuple[float, ...]] = {}

    def with_reading(self, batch: int, seconds: float) -> Fit:
        known = dict(self.passes_s)
        known[batch] = (*known.pop(batch, ()), seconds)[-READINGS:]
        while len(known) > SIZES:
            del known[next(iter(known))]
        return Fit(known)

    def device(self, memory_batch: int) -> Device:
        """Straight line through the smallest and the largest size; through 0 where there is one size only, or where it
        would not rise."""
        sizes = sorted((batch, median(times)) for batch, times in self.passes_s.items())
        (b0, t0), (b1, t1) = sizes[0], sizes[-1]
        if b1 > b0 and t1 > t0:
            per_sample_s = (t1 - t0) / (b1 - b0)
            overhead_s = t0 - per_sample_s * b0
            if overhead_s >= 0:
                return Device(per_sample_s, overhead_s, memory_batch)
        return Device(t1 / b1, 0.0, memory_batch)


class State(msgspec.Struct, frozen=True):
    """``fits``: of each process that is up. ``devices``, ``shares``: when a split was worked out last."""

    fits: dict[Key, Fit] = {}
    devices: tuple[Device, ...] = ()
    shares: tuple[int, ...] = ()


def dedicated(seen: Observations, state: State | None) -> tuple[Plan | None, State]:
    """See the top of this file."""
    state = state or State()
    old, fits = state.fits, dict[Key, Fit]()
    for w in seen.workers:
        key = (w.slot, w.incarnation)
        fits[key] = old.get(key, Fit())
        if w.batch > 0 and w.short.per_sample_s > 0:
            fits[key] = fits[key].with_reading(w.batch, w.short.per_sample_s * w.batch)
    total, workers = seen.global_batch, seen.workers
    ready = all(fit.passes_s for fit in fits.values()) and all(w.share > 0 and w.batch > 0 for w in workers)
    if not ready or not 2 <= len(workers) <= total or total > MAX_TOTAL:
        return None, State(fits)
    devices = tuple(fits[w.slot, w.incarnation].device(w.memory_batch or seen.loader_batch or w.batch) for w in workers)
    shares = tuple(w.share for w in workers)
    if not all(map(_steady, workers)):
        return _back(total, workers), State(fits)
    if shares == state.shares and _alike(devices, state.devices):
        return None, msgspec.structs.replace(state, fits=fits)
    state = State(fits, devices, shares)
    best = solve(total, devices)
    now = [Portion(-(-w.share // max(1, w.accum)), max(1, w.accum)) for w in workers]
    now_s = max(map(time_s, devices, now))
    best_s = max(map(time_s, devices, best))
    if now_s < BETTER * best_s:
        return None, state
    inputs: dict[str, str | int | float | bool] = {
        f"worker:{w.slot}": f"{p.passes} x {p.batch}, {d.overhead_s * 1e3:.3g} + {d.per_sample_s * 1e3:.3g} ms a sample"
        for w, d, p in zip(workers, devices, best, strict=True)
    }
    inputs |= {"global_batch": total, "step_s": round(best_s, 6), "before_s": round(now_s, 6)}
    words = f"the exact split takes {best_s * 1e3:.3g} ms a step, the one in force {now_s * 1e3:.3g} ms"
    rejected = ("in proportion to speed: whole passes and memory make it slower",)
    batch = {w.slot: p.samples for w, p in zip(workers, best, strict=True)}
    accum = {w.slot: p.passes for w, p in zip(workers, best, strict=True)}
    actions = (AdjustBatch(batch=batch), AdjustAccum(accum=accum))
    return Plan(actions=actions, decision=Decision("adjust batches", words, inputs, rejected)), state


def _steady(worker: WorkerSeen) -> bool:
    looks = [h for h in worker.history if h > 0][-STEADY:]  # (a step may be longer than a sub-window)
    return len(looks) == STEADY and max(looks) < UNSTEADY * min(looks)


def _back(total: int, workers: Sequence[WorkerSeen]) -> Plan | None:
    """To equal shares, where those in force are slower by what was read last."""
    level = even(total, len(workers))
    pace = [w.short.per_sample_s or w.long.per_sample_s for w in workers]
    now_s = max(w.share * p for w, p in zip(workers, pace, strict=True))
    level_s = max(n * p for n, p in zip(level, pace, strict=True))
    if now_s < BETTER * level_s:
        return None
    inputs: dict[str, str | int | float | bool] = {
        str(w): f"{p * 1e3:.3g} ms" for w, p in zip(workers, pace, strict=True)
    }
    why = Decision("adjust batches", "paces are not steady: equal shares", inputs)
    return Plan(actions=(AdjustBatch(batch={w.slot: n for w, n in zip(workers, level, strict=True)}),), decision=why)


def _alike(a: tuple[Device, ...], b: tuple[Device, ...]) -> bool:
    """Whether no pass takes clearly longer or shorter."""
    return len(a) == len(b) and all(
        x.memory_batch == y.memory_batch and max(s / t, t / s) < BETTER
        for x, y in zip(a, b, strict=True)
        for s, t in [(x.overhead_s + x.per_sample_s * x.memory_batch, y.overhead_s + y.per_sample_s * y.memory_batch)]
    )
