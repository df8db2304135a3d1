"""Are two families of loss curves the same? Paired by seed: same first weights, same batches; pure.

For each seed there are three curves: plain PyTorch's ``p``, everstep's ``e``, and ``w``: plain PyTorch with all
gradients 1 % too large. ``w - p`` is how a wrong gradient of 1 % shows in the curve of that seed. The difference
``e - p`` is measured by it, in two ways:

- ``percent``: the part of ``e - p`` that goes along ``w - p`` (least squares): 0 if the gradients are right, 1 if they
  are 1 % too large. One number for each seed; their mean has a standard error.
- ``distance``: the length of ``e - p`` over that of ``w - p``: whatever else is wrong.

The spread between seeds does not enter: it is a hundred times larger than what is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Curves = NDArray[np.float64]

_SURE = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50}  # Student's t, 99 % two-sided, by seeds
_FLOOR = 0.1  # percent: sums in another order


@dataclass(frozen=True)
class Verdict:
    """``percent`` +- ``error``: how wrong the gradients seem. ``least``: the smallest that would be called wrong."""

    percent: float
    error: float
    least: float
    distance: float

    @property
    def wrong(self) -> bool:
        return abs(self.percent) > self.least

    @property
    def sees_one_percent(self) -> bool:
        """Whether an error of 1 % is called wrong in nearly all cases."""
        return self.least + 2 * self.error < 1.0


def compare(plain: Curves, wrong: Curves, got: Curves) -> Verdict:
    """All float64 [seeds, points]. Raises ValueError for fewer than two seeds."""
    seeds = len(plain)
    if seeds < 2:
        raise ValueError(f"{seeds} seeds: two or more are needed")
    ways, found = wrong - plain, got - plain
    lengths = (ways * ways).sum(1)
    parts = (found * ways).sum(1) / lengths
    error = float(parts.std(ddof=1) / np.sqrt(seeds))
    far = float(np.sqrt((found * found).sum() / lengths.sum()))
    return Verdict(float(parts.mean()), error, max(_FLOOR, _SURE.get(seeds, 3.3) * error), far)


def windows(losses: Sequence[float], weights: Sequence[float], points: int) -> Curves:
    """The mean loss of each of ``points`` equal parts of the samples, in their order."""
    w = np.asarray(weights, np.float64)
    middle = (np.cumsum(w) - w / 2) / w.sum()
    at = np.minimum((middle * points).astype(int), points - 1)
    sums = np.bincount(at, np.asarray(losses, np.float64) * w, points)
    return np.asarray(sums / np.maximum(np.bincount(at, w, points), 1e-12))


def within_spread(plain: NDArray[np.float64], got: NDArray[np.float64]) -> float:
    """How far the means over the seeds are from each other, in standard deviations of plain PyTorch over the seeds:
    the root of the mean square over all points. Both [seeds, points]."""
    spread = np.sqrt((plain.std(0, ddof=1) ** 2).mean())
    return float(np.sqrt(((got.mean(0) - plain.mean(0)) ** 2).mean()) / max(spread, 1e-12))
