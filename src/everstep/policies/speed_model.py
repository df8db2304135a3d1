"""Fits one model of a job's speed to what was measured at a few sizes, and says how sure it is.

With w workers and p ps a sample takes the job ``T`` seconds::

    T(w, p) = k * ((1/w)^n + b^n + (c/p)^n)^(1/n)

The first term is what each worker does by itself: it shrinks with more workers. ``b`` is what all workers share: the
source of the data, the cores of one machine. ``c/p`` is the ps' work: it shrinks with more ps. ``n`` says how much the
three overlap: 1 not at all, 8 wholly, so that the largest alone counts.

Nobody knows ``b``, ``c`` and ``n`` at first. So the model keeps a grid of them, and weighs each point by the readings:
by the rate at each size (``k`` is fitted), and by how long workers wait at each size for data and for ps. Where the
readings leave several points alike, their predictions differ, and the spread says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

NOISE: Final = 0.05
"""Relative error of the rate of one window."""

LEAST_NOISE: Final = 0.03
"""... and of the mean of many: machines change."""

MISFIT: Final = 0.25
"""If the best point misses the measured rates by this much, the model does not fit this job."""

_RATIOS: Final = (0.0, *(2.0 ** (k / 2) for k in range(-14, 11)))
_OVERLAPS: Final = (1.0, 2.0, 8.0)
_ABOVE: Final = 0.08  # error of a share of waiting where workers wait less than the point says
_DATA_BELOW: Final = 0.5  # ... and where they wait more for data: each may read what is its own
_PS_BELOW: Final = 0.2  # ... and for ps: a request takes a while also where the ps have nothing else to do


class SizeSeen(NamedTuple):
    """Is what was measured at one size. ``rates``: samples/s of the job, one for each window. ``data``, ``ps``: the
    shares of their time that workers waited for data and for ps; None: no reading. ``own_s``: seconds that a worker
    computed for a sample; 0: no reading."""

    rates: tuple[float, ...]
    data: float | None = None
    ps: float | None = None
    own_s: float = 0.0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


class Speed(NamedTuple):
    """Is a prediction (samples/s, or a factor): mean, standard deviation, and the bounds of 80 % of the weight."""

    mean: float
    deviation: float
    low: float
    high: float


class _Point(NamedTuple):
    """Is one point of the grid that the readings leave: ``k`` in seconds, ``weight``: all together 1."""

    k: float
    shared: float
    ps: float
    overlap: float
    weight: float

    def rate(self, workers: int, ps: int) -> float:
        return 1.0 / (self.k * _seconds(workers, ps, self.shared, self.ps, self.overlap))


class SpeedModel:
    """Is the model at the top of this file, fitted to ``seen``: readings by (workers, ps). ``ps`` 0: the job has none.
    Raises ValueError where there are no rates."""

    def __init__(self, seen: Mapping[tuple[int, int], SizeSeen]) -> None:
        self.seen = {size: one for size, one in seen.items() if one.rates and min(one.rates) > 0}
        if not self.seen:
            raise ValueError("no size has a rate above 0")
        self._points, self.misfit = _weigh(self.seen)

    def __repr__(self) -> str:
        return f"<SpeedModel of {len(self.seen)} sizes, misses them by {100 * self.misfit:.0f} %>"

    @property
    def fits(self) -> bool:
        """Return whether some point explains the measured rates."""
        return self.misfit <= MISFIT

    def speed(self, workers: int, ps: int) -> Speed:
        """Return what the job would do at this size."""
        return _spread([(point.rate(workers, ps), point.weight) for point in self._points])

    def gain(self, size: tuple[int, int], over: tuple[int, int]) -> Speed:
        """Return by which factor ``size`` is faster than ``over``."""
        return _spread([(point.rate(*size) / point.rate(*over), point.weight) for point in self._points])

    def chance(self, size: tuple[int, int], over: tuple[int, int], factor: float) -> float:
        """Return the probability that ``size`` is at least ``factor`` times as fast as ``over``."""
        return sum(p.weight for p in self._points if p.rate(*size) >= factor * p.rate(*over))

    def binding(self, workers: int, ps: int) -> dict[str, float]:
        """Return what keeps the job from being faster at this size: the shares of its time that would be saved if
        workers computed at once, if data came at once, and if ps answered at once."""
        saved = {"workers": 0.0, "shared": 0.0, "ps": 0.0}
        for point in self._points:
            for name, share in _shares(workers, ps, point.shared, point.ps, point.overlap).items():
                saved[name] += point.weight * share
        return saved


def _seconds(workers: int, ps: int, shared: float, served: float, overlap: float) -> float:
    own, last = 1.0 / workers, served / ps if ps else 0.0
    if overlap == 1.0:
        return own + shared + last
    return float((own**overlap + shared**overlap + last**overlap) ** (1.0 / overlap))


def _shares(workers: int, ps: int, shared: float, served: float, overlap: float) -> dict[str, float]:
    """Return the share of the time that each term costs: what is saved where the term is 0."""
    own, last = (1.0 / workers) ** overlap, (served / ps) ** overlap if ps else 0.0
    both = shared**overlap
    whole = own + both + last
    power = 1.0 / overlap
    return {
        "workers": 1.0 - ((both + last) / whole) ** power,
        "shared": 1.0 - ((own + last) / whole) ** power,
        "ps": 1.0 - ((own + both) / whole) ** power,
    }


def _weigh(seen: Mapping[tuple[int, int], SizeSeen]) -> tuple[list[_Point], float]:
    """Return the points that count, and by how much the best of them misses the rates (relative, root mean square)."""
    measured = [(w, p, -math.log(one.rate), 1.0 / _noise(one) ** 2) for (w, p), one in seen.items()]
    total = sum(precision for *_, precision in measured)
    has_ps = any(p for _, p in seen)
    waits = _waits(seen)
    found: list[tuple[float, float, float, float, float]] = []
    misfit = math.inf
    for overlap in _OVERLAPS:
        for shared in _RATIOS:
            for served in _RATIOS if has_ps else (0.0,):
                logs = [math.log(_seconds(w, p, shared, served, overlap)) for w, p, *_ in measured]
                k = sum(m[3] * (m[2] - log) for m, log in zip(measured, logs, strict=True)) / total
                errors = [m[2] - log - k for m, log in zip(measured, logs, strict=True)]
                misfit = min(misfit, math.sqrt(sum(e * e for e in errors) / len(errors)))
                cost = 0.5 * sum(m[3] * e * e for m, e in zip(measured, errors, strict=True))
                cost += _wait_cost(waits, shared, served, overlap)
                found.append((cost, math.exp(k), shared, served, overlap))
    least = min(found)[0]
    weights = [math.exp(least - cost) for cost, *_ in found]
    whole = sum(weights)
    points = [
        _Point(k, shared, served, overlap, weight / whole)
        for weight, (_, k, shared, served, overlap) in zip(weights, found, strict=True)
        if weight > 1e-6
    ]
    return points, misfit


def _noise(one: SizeSeen) -> float:
    return max(LEAST_NOISE, NOISE / math.sqrt(len(one.rates)))


def _waits(seen: Mapping[tuple[int, int], SizeSeen]) -> list[tuple[int, int, float | None, float | None]]:
    """Return (workers, ps, share of what all share, share of ps) of each size. Workers that compute longer than those
    of the size where they computed shortest hold each other up: that counts as waiting for what they share."""
    alone_s = min((one.own_s for one in seen.values() if one.own_s > 0), default=0.0)
    found = []
    for (w, p), one in seen.items():
        shared = one.data
        if shared is not None and one.own_s > alone_s > 0:
            shared = min(1.0, shared + (1.0 - shared) * (1.0 - alone_s / one.own_s))
        found.append((w, p, shared, one.ps))
    return found


def _wait_cost(
    waits: Sequence[tuple[int, int, float | None, float | None]], shared: float, served: float, overlap: float
) -> float:
    cost = 0.0
    for w, p, for_shared, for_ps in waits:
        if for_shared is None and for_ps is None:
            continue
        shares = _shares(w, p, shared, served, overlap)
        for reported, share, below in ((for_shared, shares["shared"], _DATA_BELOW), (for_ps, shares["ps"], _PS_BELOW)):
            if reported is not None:
                error = share - reported
                cost += 0.5 * (error / (_ABOVE if error > 0 else below)) ** 2
    return cost / len(waits)


def _spread(weighed: list[tuple[float, float]]) -> Speed:
    """Return mean, deviation and bounds of (value, weight)."""
    found = sorted(weighed)
    mean = sum(value * weight for value, weight in found)
    variance = sum(weight * (value - mean) ** 2 for value, weight in found)
    return Speed(mean, math.sqrt(variance), _quantile(found, 0.1), _quantile(found, 0.9))


def _quantile(found: Sequence[tuple[float, float]], share: float) -> float:
    """Return the rate below which this share of the weight is. ``found``: (rate, weight), sorted."""
    sum_of = 0.0
    for rate, weight in found:
        sum_of += weight
        if sum_of >= share:
            return rate
    return found[-1][0]
