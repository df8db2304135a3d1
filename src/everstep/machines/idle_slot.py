"""Is the idle slot of a training step: how much work on the side a step may bear. Pure: no clock, no thread.

Training offers a budget with each step (or with each bubble of a pipeline). Work that can be cut into pieces claims
bytes of it, does them, and says what they cost. So checkpoints and transfers slow each step a little, instead of one
step a lot. What a piece is, and which thread does it, is the caller's: a thread of its own waits for the next offer, a
thread that trains does what fits (``run_pieces``) and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

_NEWEST = 0.25  # weight of the newest piece in the seconds of a byte


class Budget(msgspec.Struct, frozen=True):
    """Is what one slot may cost: so many bytes and so many seconds, whichever end first; infinite: no limit."""

    bytes: float = math.inf
    seconds: float = math.inf


class DividedWork(Protocol):
    """Work that can be done in pieces."""

    @property
    def left_bytes(self) -> int:
        """Return what is still to do; 0: it is done."""

    def advance(self, limit_bytes: int) -> int:
        """Do the next piece, of at most so many bytes if it can be cut so. Return how many were done (at least 1)."""


class IdleSlot:
    """Is a budget that is offered anew with each step. What was not used of an offer lapses: an idle moment cannot be
    saved. What was used beyond it (a piece cannot be cut at will) is taken off the next offers."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0  # left of the offer; below 0: owed
        self._byte_s = 0.0  # seconds of a byte, as pieces were lately; 0.0: not known
        self.unlimited = False
        """Nobody trains, or the work must be done soon: all claims are granted."""

    def __repr__(self) -> str:
        return f"<IdleSlot {'unlimited' if self.unlimited else f'{self._bytes:.0f} bytes, {self._seconds:.4f} s left'}>"

    def offer(self, budget: Budget) -> None:
        """The next step's. Raises ValueError: it is not above 0."""
        if not (budget.bytes > 0 and budget.seconds > 0):
            raise ValueError(f"an idle slot of {budget.bytes} bytes and {budget.seconds} s: both must be above 0")
        self._bytes = min(self._bytes, 0.0) + budget.bytes
        self._seconds = min(self._seconds, 0.0) + budget.seconds

    def claim(self, wanted: int, least: int = 1) -> int:
        """Return how many bytes may be done now, of ``wanted``; 0: wait for the next offer. Never less than ``least``,
        where anything is left of the budget."""
        if self.unlimited:
            return wanted
        if self._bytes <= 0 or self._seconds <= 0:
            return 0
        fits = min(self._bytes, self._seconds / self._byte_s if self._byte_s else math.inf)
        return wanted if fits >= wanted else max(int(fits), min(least, wanted))

    def spent(self, done: int, seconds: float) -> None:
        """A piece is done: its bytes, and what it took."""
        self._bytes -= done
        self._seconds -= seconds
        if done > 0 and seconds > 0:
            byte_s = seconds / done
            self._byte_s = byte_s if not self._byte_s else (1 - _NEWEST) * self._byte_s + _NEWEST * byte_s


def run_pieces(slot: IdleSlot, work: DividedWork, now: Callable[[], float], least: int = 1) -> int:
    """Do what fits into the slot, on this thread. Return the bytes done. ``now``: a clock, in seconds."""
    total = 0
    while (left := work.left_bytes) > 0 and (limit := slot.claim(left, least)) > 0:
        began = now()
        done = work.advance(limit)
        slot.spent(done, now() - began)
        total += done
    return total
