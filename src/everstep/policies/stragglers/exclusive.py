"""Has ``exclusive``: machines of several kinds, and nobody else on them. The split is exact once paces are known.

A pass of B samples takes ``overhead + per_sample * B``, which is fitted from what was measured at two sizes of B.
Until there are two, the overhead counts as next to nothing. If a member does not say what fits into its memory,
the loader's batch does. What is seen first is acted on. If a pace changes all at once, a new fit begins, provided
that the change is believed (``change_detector``). Members that read alike are of one kind, and with every reading
*alike* becomes narrower, so noise is not followed. The split is worked out anew only if a pace has changed, and
asked for only if it is clearly better than the one in force. Where splits do not pay, because paces change from
window to window, others use the machines too, and shares are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from everstep.model.decision import Decision
from everstep.model.observation import Observations
from everstep.model.plan import AdjustAccum, AdjustBatch, Plan
from everstep.policies.stragglers.change_detector import ALIKE, Changes, Key, PolicyTrust, Span, review, scored
from everstep.policies.stragglers.exact import MAX_TOTAL, Device, ExactShare, solve, time_s, whole
from everstep.policies.stragglers.shares import even

BETTER = 1.03
FINE = 1.01  # is better enough where READINGS of everybody are known
SIZES = 4  # of micro-batches that are remembered, by process
READINGS = 5  # of each
OFTEN = 3  # so many there must be of two sizes to tell overhead from a pace that has changed meanwhile
TRUST = PolicyTrust()
LEAST = 0.01  # of a pass is overhead, whatever the readings say: else many small passes would cost nothing
WINDOW_S = 10.0  # where nobody says


class Fit(msgspec.Struct, frozen=True):
    """Newest readings: seconds of one pass, by its samples."""

    passes_s: dict[int, tuple[float, ...]] = {}

    def with_reading(self, batch: int, seconds: float) -> Fit:
        known = dict(self.passes_s)
        known[batch] = (*known.pop(batch, ()), seconds)[-READINGS:]
        while len(known) > SIZES:
            del known[next(iter(known))]
        return Fit(known)

    @property
    def _near(self) -> list[float]:
        """Return the newest seconds per sample of passes about as large as the newest."""
        newest = next(reversed(self.passes_s))
        near = [t / b for b, times in self.passes_s.items() if newest / ALIKE < b < newest * ALIKE for t in times]
        return near[-2 * READINGS :]

    @property
    def known(self) -> int:
        """Return how many readings say what a pass takes now."""
        return len(self._near)

    def per_sample_s(self, batch: int) -> Span:
        """Return what is expected of a pass of so many samples, by sample; > 0. Where no two sizes are known, between a
        pass that takes the same for every size, and one in proportion to it."""
        if batch in self.passes_s:
            low = high = median(self.passes_s[batch])
        elif len(self.passes_s) == 1:
            [(other, times)] = self.passes_s.items()
            low, high = sorted((median(times), median(times) * batch / other))
        else:
            device = self.device(1)
            low = high = device.overhead_s + device.per_sample_s * batch
        return low / batch, high / batch

    def device(self, memory_batch: int) -> Device:
        """Return a straight line through the smallest and the largest size that were read often enough; nearly through
        0 where these are about one size, or where it would not rise: then by all readings of about the newest size."""
        often = {batch: median(times) for batch, times in self.passes_s.items() if len(times) >= OFTEN}
        b1 = next(reversed(self.passes_s))  # newest
        if often and max(often) > ALIKE * min(often):
            low, high = min(often), max(often)
            per_sample_s = (often[high] - often[low]) / (high - low)
            overhead_s = often[low] - per_sample_s * low
            if per_sample_s > 0 and overhead_s >= LEAST * often[high]:
                return Device(per_sample_s, overhead_s, memory_batch)
        pass_s = median(self._near) * b1
        return Device((1 - LEAST) * pass_s / b1, LEAST * pass_s, memory_batch)


class ExclusiveState(msgspec.Struct, frozen=True):
    """Is what the policy remembers. ``devices``, ``best``: when the best split was worked out last. ``score``: whether
    splits paid so far; None: nothing was seen yet. ``proposed``: samples of the last look's best split."""

    fits: dict[Key, Fit] = {}
    devices: tuple[Device, ...] = ()
    best: tuple[ExactShare, ...] = ()
    score: float | None = None
    proposed: dict[Key, int] = {}
    changes: Changes = Changes()


def exclusive(seen: Observations, state: ExclusiveState | None) -> tuple[Plan | None, ExclusiveState]:
    """See the top of this file."""
    state = state or ExclusiveState()
    total, workers = seen.global_batch, seen.workers
    keys: list[Key] = [(w.slot, w.incarnation) for w in workers]
    before = {key: fit for key, fit in state.fits.items() if key in keys}
    readings = {k: w.short.per_sample_s or w.long.per_sample_s for k, w in zip(keys, workers, strict=True)}
    ready = all(s > 0 for s in readings.values()) and all(w.share > 0 and w.batch > 0 for w in workers)
    if not ready or not 2 <= len(workers) <= total or total > MAX_TOTAL:
        return None, msgspec.structs.replace(state, fits=before, proposed={}, devices=())
    left = seen.remaining_s / (seen.window_s or WINDOW_S)
    under_way = {key for key, w in zip(keys, workers, strict=True) if w.short.under_way}
    score = scored(state.score, {} if under_way else state.proposed, readings, left, TRUST)
    batches = {key: w.batch for key, w in zip(keys, workers, strict=True)}
    fits = {k: before.get(k) or Fit({batches[k]: (readings[k] * batches[k],)}) for k in keys}
    changes, believed, doubted = review(
        state.changes,
        {key: fit.per_sample_s(batches[key]) for key, fit in fits.items()},
        {k: readings[k] for k, w in zip(keys, workers, strict=True) if k in before and w.short.per_sample_s > 0},
        {key: w.share for key, w in zip(keys, workers, strict=True)},
        under_way,
    )
    for key, w in zip(keys, workers, strict=True):
        if key in before and w.short.per_sample_s > 0 and key not in doubted:
            fits[key] = (Fit() if key in believed else fits[key]).with_reading(w.batch, readings[key] * w.batch)
    limits = [w.memory_batch or seen.loader_batch or w.batch for w in workers]
    known = min(fit.known for fit in fits.values())
    devices = by_kind([fits[key].device(limit) for key, limit in zip(keys, limits, strict=True)], known)
    level = tuple(even(total, len(keys)))
    level_s = max(map(time_s, devices, map(whole, level, limits)))
    clearly = BETTER if known < READINGS else FINE
    best, same = state.best, _alike(devices, state.devices, clearly)
    if not same:
        best = solve(total, devices)
    best_s = max(map(time_s, devices, best))
    worth = level_s >= BETTER * best_s
    proposed = tuple(batch_share.samples for batch_share in best) if worth else level
    state = ExclusiveState(
        fits, state.devices if same else devices, best, score, dict(zip(keys, proposed, strict=True)), changes
    )
    now = [ExactShare(w.share, max(1, w.accum)) for w in workers]
    now_s = max(map(time_s, devices, now))
    shares, passes = level, [-(-n // limit) for n, limit in zip(level, limits, strict=True)]
    if worth and score > 0:
        if now_s < clearly * best_s:
            return None, state
        shares, passes = proposed, [batch_share.passes for batch_share in best]
        words = f"the exact split takes {best_s * 1e3:.3g} ms a step, the one in force {now_s * 1e3:.3g} ms"
        rejected: tuple[str, ...] = ("in proportion to speed: whole passes and memory make it slower",)
    elif max(w.share for w in workers) > max(level):
        words, rejected = ("paces change from window to window" if worth else "all are about equally fast"), ()
    else:
        return None, state
    inputs: dict[str, str | int | float | bool] = {
        f"worker:{w.slot}": f"{n} in {p}, {d.overhead_s * 1e3:.3g} + {d.per_sample_s * 1e3:.3g} ms a sample"
        for w, d, n, p in zip(workers, devices, shares, passes, strict=True)
    }
    inputs |= {"global_batch": total, "step_s": round(best_s, 6), "before_s": round(now_s, 6), "score": round(score, 3)}
    actions = (
        AdjustBatch(batch={w.slot: n for w, n in zip(workers, shares, strict=True)}),
        AdjustAccum(accum={w.slot: p for w, p in zip(workers, passes, strict=True)}),
    )
    return Plan(actions=actions, decision=Decision("adjust batches", words, inputs, rejected)), state


def by_kind(devices: Sequence[Device], readings: int) -> tuple[Device, ...]:
    """Return those that take about the same (the less, the more ``readings`` there are of each) and have the same
    memory, all like the one in their middle. So fine differences of what are machines of one kind are not followed."""
    like = 1.0 + (ALIKE - 1.0) / readings**2
    kinds: list[list[int]] = []
    for i in sorted(range(len(devices)), key=lambda i: (devices[i].memory_batch, _full_s(devices[i]))):
        first = devices[kinds[-1][0]] if kinds else None
        if (
            first is None
            or first.memory_batch != devices[i].memory_batch
            or _full_s(devices[i]) > like * _full_s(first)
        ):
            kinds.append([])
        kinds[-1].append(i)
    out = list(devices)
    for kind in kinds:
        for i in kind:
            out[i] = devices[kind[len(kind) // 2]]
    return tuple(out)


def _full_s(device: Device) -> float:
    """The longest pass that fits."""
    return device.overhead_s + device.per_sample_s * device.memory_batch


def _alike(a: tuple[Device, ...], b: tuple[Device, ...], like: float) -> bool:
    """Return whether no pass takes clearly longer or shorter."""
    return len(a) == len(b) and all(
        x.memory_batch == y.memory_batch and max(_full_s(x) / _full_s(y), _full_s(y) / _full_s(x)) < like
        for x, y in zip(a, b, strict=True)
    )
