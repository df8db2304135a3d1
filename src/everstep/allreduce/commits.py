"""Brings a member's committed steps to the journal, and into its own log.

A step goes through four states: done here; *committed everywhere*: every member is known to have it, so nobody does it
again; told to the master; confirmed by it. Only steps that are committed everywhere are told. The lowest rank tells
them; the others keep them until they hear, with a vote, that the master has them, and tell them themselves when that
takes too long.
"""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from everstep.model.group import Committed

TELL_MAX = 400
"""Ranges in one message."""


class Commits:
    """Thread-safe: the script's thread adds, another one tells."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: deque[Committed] = deque()
        self._everywhere: deque[Committed] = deque()  # not yet in the log
        self._unconfirmed: deque[Committed] = deque()  # in the log, not confirmed; merged
        self.confirmed = -1  # last step that the master has, as far as known

    def __repr__(self) -> str:
        return (
            f"<Commits {len(self._done)} done {len(self._everywhere)} everywhere {len(self._unconfirmed)} to confirm>"
        )

    def begin(self, step: int) -> None:
        """The group begins at ``step``: nothing before it is ours to tell, or counts any more."""
        with self._lock:
            self._done.clear()
            self._everywhere.clear()
            self._unconfirmed.clear()
            self.confirmed = step - 1

    def done(self, committed: Committed) -> None:
        with self._lock:
            self._done.append(committed)

    def settle(self, before: int, generation: int = 0) -> bool:
        """Note that everybody in the group of ``generation`` has every step below ``before``. Return whether there are
        new ones."""
        with self._lock:
            new = False
            while self._done and self._done[0].last < before:
                committed = self._done.popleft()
                if committed.generation < generation:  # (who left the group in between may lack it)
                    committed = msgspec.structs.replace(committed, agreed=generation)
                self._everywhere.append(committed)
                new = True
            return new

    def to_log(self) -> list[Committed]:
        """Return the steps that are newly committed everywhere, consecutive ones as one range. From now on they are to
        be told."""
        with self._lock:
            ranges: list[Committed] = []
            while self._everywhere:
                merge(ranges, self._everywhere.popleft())
            for committed in ranges:
                self._unconfirmed.append(committed)
            return ranges

    def to_tell(self) -> tuple[Committed, ...]:
        """Return what the master has not confirmed, oldest first, up to the first gap: before us, or where others went
        on without us for a while. Then somebody who has those steps tells."""
        with self._lock:
            while self._unconfirmed and self._unconfirmed[0].last <= self.confirmed:
                self._unconfirmed.popleft()
            if not self._unconfirmed or self._unconfirmed[0].first > self.confirmed + 1:
                return ()
            ranges: list[Committed] = []
            for committed in self._unconfirmed:
                if ranges and committed.first != ranges[-1].last + 1:
                    break
                merge(ranges, committed)
                if len(ranges) == TELL_MAX:
                    break
            return tuple(ranges)

    def confirm(self, last: int) -> None:
        """The master has every step up to ``last``."""
        with self._lock:
            self.confirmed = max(self.confirmed, last)

    def open(self) -> tuple[Committed, ...]:
        """Return all steps that the master is not known to have, oldest first."""
        with self._lock:
            ranges: list[Committed] = []
            for committed in (*self._unconfirmed, *self._everywhere, *self._done):
                if committed.last > self.confirmed:
                    merge(ranges, committed)
            return tuple(ranges)

    @property
    def waiting(self) -> int:
        """Return how many ranges are committed everywhere and not confirmed."""
        with self._lock:
            return len(self._everywhere) + sum(c.last > self.confirmed for c in self._unconfirmed)


def joined(ranges: tuple[tuple[int, int], ...], more: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the ranges, and those behind them; adjacent ones as one."""
    if ranges and more and ranges[-1][1] == more[0][0]:
        return (*ranges[:-1], (ranges[-1][0], more[0][1]), *more[1:])
    return ranges + more


def merge(ranges: list[Committed], more: Committed) -> None:
    """Append ``more``, as part of the last range where it continues that."""
    if ranges:
        last = ranges[-1]
        follows = (last.generation, last.dataset, last.epoch, last.last + 1, last.hi, last.loop, last.agreed)
        if follows == (more.generation, more.dataset, more.epoch, more.first, more.lo, more.loop, more.agreed):
            ranges[-1] = Committed(
                last.generation,
                last.first,
                more.last,
                last.dataset,
                last.epoch,
                last.lo,
                more.hi,
                last.skipped + more.skipped,
                more.digest,
                more.loop,
                joined(last.unstepped, more.unstepped),
                last.agreed,
            )
            return
    ranges.append(more)
