"""Says when a job has to be suspended, so that it does not spend more than its budget. Pure."""

from __future__ import annotations

from typing import Final

LEAST_S: Final = 20.0
"""Workers finish their batch, and processes end: no suspension is taken to be quicker."""
SPARE: Final = 2.0
"""A checkpoint may take so many times as long as the last one did."""


def suspend_takes_s(checkpoint_s: float) -> float:
    """Return how long a suspension may take. ``checkpoint_s``: the last checkpoint took; 0.0: there was none."""
    return LEAST_S + SPARE * max(0.0, checkpoint_s)


def seconds_left(usd: float, usd_per_hour: float, budget_usd: float, takes_s: float) -> float:
    """Return in how many seconds the job has to be suspended; 0.0: now. Infinity: nothing is paid."""
    if usd >= budget_usd:
        return 0.0
    if usd_per_hour <= 0:
        return float("inf")
    return max(0.0, (budget_usd - usd) / usd_per_hour * 3600.0 - takes_s)
