"""Chooses in which iterations a stage's state is copied, and which of its waits are worth a copy: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from everstep.policies.advise import young_interval
from everstep.policies.bubble_schedule import SpanUse, snapshot_interval
from everstep.policies.idle_spans import IdleSpan

BOUND: Final = 0.01
"""The share of training time that copies may cost."""

LEAST_FAILURES: Final = 2
_LATEST: Final = 10  # copies that are looked at


class CopyCost(NamedTuple):
    """Is what one copy cost the thread that trains: to begin it, and the rest that no span had room for.
    ``iteration_s``: of its iteration, with that."""

    begin_s: float
    stall_s: float
    iteration_s: float

    @property
    def cost_s(self) -> float:
        return self.begin_s + self.stall_s


class CopyChoice(NamedTuple):
    """Says to copy in one of ``interval`` iterations, and why."""

    interval: int
    reason: str


def choose_interval(
    costs: Sequence[CopyCost], interval: int = 1, bound: float = BOUND, mean_time_to_failure_s: float = math.inf
) -> CopyChoice:
    """Return how often to copy. As often as the bound allows. If losses are so frequent that the steps done again
    behind such copies would cost more, as often as costs least in all (Young). At once as rarely as that; more often
    again by one iteration at a time, so that a single cheap copy does not undo it. ``interval``: as it is now."""
    latest = costs[-_LATEST:]
    if not latest:
        return CopyChoice(interval, "no copy is measured yet")
    cost_s = median(one.cost_s for one in latest)
    iteration_s = median(one.iteration_s - one.cost_s for one in latest)
    allowed = snapshot_interval(cost_s, iteration_s, bound)
    pays = allowed
    if iteration_s > 0 and math.isfinite(mean_time_to_failure_s):
        pays = max(1, round(young_interval(cost_s, mean_time_to_failure_s) / iteration_s))
    wanted = min(allowed, pays)
    why = f"at most {100 * bound:g} %"
    if pays < allowed:
        why = f"above {100 * bound:g} %, as a loss every {mean_time_to_failure_s:.0f} s costs more"
    if wanted < interval:
        wanted = interval - 1
    share = cost_s / iteration_s / wanted if iteration_s > 0 else math.inf
    words = (
        f"a copy costs {1e3 * cost_s:.2f} ms of an iteration of {1e3 * iteration_s:.1f} ms: {100 * share:.2f} % in "
        f"{'each' if wanted == 1 else f'one of {wanted}'}, {why}"
    )
    return CopyChoice(wanted, words)


def mean_time_to_failure(failures: int, age_s: float) -> float:
    """Return the mean time between losses, in seconds; infinite below two of them: one says nothing of a rate."""
    return age_s / failures if failures >= LEAST_FAILURES else math.inf


def span_limits(
    spans: Sequence[IdleSpan], bytes_per_s: float, chunk_bytes: int, use: SpanUse = SpanUse()
) -> tuple[int, ...]:
    """Return how many bytes may be copied in each wait. A wait in whose usable part not one chunk fits takes none: it
    would end behind the wait. Of the others all that fits into their mean length: the copy ends with the wait."""
    out = []
    for span in spans:
        usable = use.share * span.length_s * bytes_per_s
        out.append(int(span.length_s * bytes_per_s) // chunk_bytes * chunk_bytes if usable >= chunk_bytes else 0)
    return tuple(out)
