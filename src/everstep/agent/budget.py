"""Decides how often something that keeps dying is started again. Pure: time is passed in."""

from __future__ import annotations

import msgspec


class RestartBudget(msgspec.Struct):
    """Allows the first restart at once, then with growing pauses; no more after ``limit`` deaths without ``calm_s`` of
    life."""

    limit: int = 10
    calm_s: float = 10.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    deaths: int = 0  # in a row, without a calm life between them

    def died(self, lived_s: float) -> float | None:
        """Return seconds to wait before the next start; None: give up."""
        self.deaths = 1 if lived_s >= self.calm_s else self.deaths + 1
        if self.deaths >= self.limit:
            return None
        if self.deaths == 1:
            return 0.0
        return float(min(self.first_pause_s * 2 ** (self.deaths - 2), self.longest_pause_s))
