"""Says how many bytes tables will have, from how they have grown: Heaps' law, with its uncertainty.

After n samples a table that gets a row for each new key has about ``a + c * n ** b`` bytes, with b from 0 (no new keys)
to 1 (each sample brings new keys). ``a`` is what does not grow. A grid of b is kept, each point weighed by how well it
meets the readings; the readings may leave several points alike, and then their predictions differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

EXPONENTS: Final = tuple(k / 20 for k in range(2, 21))
NOISE: Final = 0.01
"""Share of the growth seen by which readings may miss the law: pages and indexes grow in jumps."""

HIGH: Final = 0.95
LAST: Final = 4
"""Readings at the end whose slope may go on: a law with a falling rate is wrong where data changes."""


class Reading(NamedTuple):
    """Is how many bytes all tables had when so many samples were done."""

    samples: int
    bytes: float


class Growth(NamedTuple):
    """Is a prediction: bytes that come in addition, the likely number and one that is reached with 5 % only."""

    likely: float
    high: float


class GrowthCurve:
    """Fits the law to readings in the order of samples. Raises ValueError: fewer than two, or out of order."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        if len(readings) < 2 or any(b.samples <= a.samples for a, b in itertools.pairwise(readings)):
            raise ValueError(f"{len(readings)} readings: at least two, in the order of samples")
        self.readings = tuple(readings)
        self._points = self._fit()

    def __repr__(self) -> str:
        return f"<GrowthCurve of {len(self.readings)} readings, exponent about {self.exponent:.2f}>"

    def _fit(self) -> list[tuple[float, float, float]]:
        """Return (exponent, factor, weight); weights sum up to 1."""
        scale = float(self.readings[-1].samples)
        ys = [r.bytes for r in self.readings]
        noise = NOISE * max(1.0, max(ys) - min(ys))
        found = []
        for b in EXPONENTS:
            xs = [(r.samples / scale) ** b for r in self.readings]
            x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
            square = sum((x - x_mean) ** 2 for x in xs)
            c = max(0.0, sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / square)
            misses = sum((y - y_mean - c * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
            found.append((b, c, misses / (2 * noise**2)))
        least = min(miss for *_, miss in found)
        weighed = [(b, c, math.exp(least - miss)) for b, c, miss in found]
        total = sum(w for *_, w in weighed)
        return [(b, c, w / total) for b, c, w in weighed]

    @property
    def exponent(self) -> float:
        """Return the mean exponent."""
        return sum(b * w for b, _, w in self._points)

    @property
    def slope(self) -> float:
        """Return the bytes of a sample, over the last readings; not negative."""
        first, last = self.readings[-min(LAST, len(self.readings))], self.readings[-1]
        return max(0.0, (last.bytes - first.bytes) / (last.samples - first.samples))

    def after(self, samples: int) -> Growth:
        """Return what ``samples`` more samples add."""
        scale = float(self.readings[-1].samples)
        gains = sorted((c * ((1 + samples / scale) ** b - 1), w) for b, c, w in self._points)
        likely = sum(gain * w for gain, w in gains)
        sum_w, high = 0.0, gains[-1][0]
        for gain, w in gains:
            sum_w += w
            if sum_w >= HIGH:
                high = gain
                break
        return Growth(likely, max(likely, high, self.slope * samples))
