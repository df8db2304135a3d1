"""Decides when the next piece of partitions' contents may go out, so that pulls and pushes have the rest of the time.

Contents are what a rebuild, a new mirror and a move need. They go out in *turns*. A turn puts pieces into the streams
for ``TURN_S`` seconds, or until ``TURN_BYTES`` wait there. It ends when the peers have taken all of them. So the length
of a turn has the work of both sides in it, and the turns' bytes over their time are the measured bandwidth.

Contents may take ``share`` of the time: after a turn of t seconds, a pause of ``t * (1 / share - 1)`` seconds is due.
Differences of pushes never wait behind more than one turn. The first ``BURST_S`` seconds of turns need no pause: what
is that small is over before workers would feel less of it. A ps that sends no contents gains them back, as slowly.

A ps that was asked for nothing for ``IDLE_S`` seconds needs no pauses, nor does one that is being emptied: its
machine may go soon. There up to ``AHEAD_BYTES`` wait in the streams. What a request waits for is not paced at all (see
``Machine.demand``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

AHEAD_BYTES = 8 << 20
"""Without pauses: contents are put into the streams only while less than this waits there: differences go first."""

TURN_BYTES = 1 << 20
TURN_S = 0.004
BURST_S = 0.1
IDLE_S = 0.25
_LOOK_S = 0.001  # between two looks whether the peers have taken a turn


class RebuildPacer:
    """See the module's docstring. One thread asks. ``share``: above 0, at most 1. ``requests()``: how many pulls and
    pushes were answered so far; without it, nobody asks. ``emptied``: this ps is to give away all that it has.
    """

    def __init__(
        self, share: float, requests: Callable[[], int] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.share = share
        self.emptied = False
        self.busy_s = 0.0
        """Seconds of all turns."""
        self._requests, self._now = requests, now
        self._asked, self._asked_at = 0, now() - IDLE_S
        self._began: float | None = None  # the turn under way
        self._yields = self._turn_yields = False  # pauses are needed: now; after the turn under way
        self._due_at = now()  # until then the pauses last that are due

    def __repr__(self) -> str:
        return f"<contents for {self.share:g} of the time, {self.busy_s:.2f} s so far>"

    @property
    def turning(self) -> bool:
        """Return whether a turn is under way."""
        return self._began is not None

    def wait_s(self, ahead_bytes: int) -> float:
        """Return in how many seconds to ask again; 0.0: the next piece may go out. ``ahead_bytes``: of contents that
        the peers have not taken."""
        now = self._now()
        paced = self._yields = self._paced(now)
        if self._began is not None:
            if paced and ahead_bytes < TURN_BYTES and now - self._began < TURN_S:
                return 0.0
            if ahead_bytes >= AHEAD_BYTES or (ahead_bytes and paced):
                return _LOOK_S
            if ahead_bytes:
                return 0.0
            self._end(now)
        ahead_s = self._due_at - now - BURST_S * (1.0 / self.share - 1.0)
        if paced and ahead_s > 0:
            return min(ahead_s, IDLE_S / 4)
        return 0.0

    def begin(self) -> None:
        """A piece is about to be read."""
        if self._began is None:
            self._began, self._turn_yields = self._now(), self._yields

    def rest(self, ahead_bytes: int) -> None:
        """There is nothing to send now. A turn ends when the peers have taken it."""
        if self._began is not None and not ahead_bytes:
            self._end(self._now())

    def _paced(self, now: float) -> bool:
        """Return whether turns need pauses."""
        asked = self._requests() if self._requests is not None else 0
        if asked != self._asked:
            self._asked, self._asked_at = asked, now
        return self.share < 1.0 and not self.emptied and now - self._asked_at < IDLE_S

    def _end(self, now: float) -> None:
        assert self._began is not None
        took_s = now - self._began
        self.busy_s += took_s
        pause_s = took_s * (1.0 / self.share - 1.0) if self._turn_yields else 0.0
        self._due_at = max(self._due_at + took_s, now) + pause_s
        self._began = None
