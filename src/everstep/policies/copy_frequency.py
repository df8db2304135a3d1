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
    """Return how often to copy. In each iteration where the bound allows it: a loss costs one iteration then. Else as
    often as the bound allows, or, where it is known how often stages are lost, as often as costs least in all (Young).
    At once as rarely as that; twice as often again at a time at most, so that a few cheap copies do not undo it.
    ``interval``: as it is now."""
    latest = costs[-_LATEST:]
    if not latest:
        return CopyChoice(interval, "no copy is measured yet")
    cost_s = median(one.cost_s for one in latest)
    iteration_s = median(one.iteration_s - one.cost_s for one in latest)
    allowed = snapshot_interval(cost_s, iteration_s, bound)
    pays = allowed
    if allowed > 1 and math.isfinite(mean_time_to_failure_s):
        pays = max(1, round(young_interval(cost_s, mean_time_to_failure_s) / iteration_s))
    why = f"at most {100 * bound:g} %"
    if pays < allowed:
        why = f"above {100 * bound:g} %, as a loss every {mean_time_to_failure_s:.0f} s costs more"
    elif pays > allowed:
        why = f"as a loss every {mean_time_to_failure_s:.0f} s costs no more than that"
    wanted = max(pays, interval // 2)
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
