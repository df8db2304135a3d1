"""Says when a client's heartbeat is due."""

from __future__ import annotations

from collections.abc import Callable


class BeatTimes:
    """Says when to beat: every ``every_s`` seconds, and once more in between where ``news()`` says so."""

    def __init__(self, every_s: float, news: Callable[[], bool] | None) -> None:
        self._every_s, self._news = every_s, news
        self._next_at = 0.0
        self._between = False  # there was a beat between the last one in time and the next

    def due(self, now: float) -> bool:
        """Return whether to beat at ``now`` (seconds of any steady clock); a beat is then taken as sent."""
        if now >= self._next_at:
            self._next_at, self._between = now + self._every_s, False
            return True
        if not self._between and self._news is not None and self._news():
            self._between = True
            return True
        return False
