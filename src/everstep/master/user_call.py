"""Runs a call of a user's code on a thread of its own, and gives it up when it takes too long.

Policies may be the user's: they may take long, or never return. So the master's loop waits for none of them. It looks
several times a second (``poll``), and the time of a call is the sum of the times between looks. If the clock goes back,
or moves by more than the limit between two looks, that time does not count: the clock jumped, or the master stood
still.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")

LIMIT_S = 10.0
"""So long one call of a policy may take."""


class CallState(StrEnum):
    """Says how far a call is."""

    NONE = "none"
    AT_WORK = "at work"
    ENDED = "ended"  # ``result`` has what it returned
    LATE = "late"  # it is given up: what it returns is thrown away


class UserCall(Generic[T]):
    """Is the place of one call at a time. The call must raise nothing.

    ``name``: of its thread. ``ended()``, on any thread: it has returned. ``thread(run)`` runs it aside.
    """

    def __init__(
        self,
        name: str,
        limit_s: float = LIMIT_S,
        ended: Callable[[], object] = lambda: None,
        thread: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.name, self.limit_s, self._say_ended = name, limit_s, ended
        self._thread = thread if thread is not None else self._start
        self._made: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._results: list[T] = []
        self._at_work = False
        self._polled_at = self._spent_s = 0.0

    def __repr__(self) -> str:
        return f"<{self.name} {'at work' if self._at_work else 'idle'}, {self._spent_s:.1f} of {self.limit_s:g} s>"

    @property
    def at_work(self) -> bool:
        """Return whether a call has not ended, as far as ``poll`` has said."""
        return self._at_work

    @property
    def late_words(self) -> str:
        """Return what is wrong with a call that is late."""
        return f"it takes longer than {self.limit_s:g} s"

    @property
    def result(self) -> T:
        """Return what the call returned that ended."""
        return self._results[-1]

    def begin(self, call: Callable[[], T]) -> None:
        """Run ``call`` aside. AssertionError: another one is at work."""
        assert not self._at_work, f"{self.name} is at work"
        self._at_work, self._spent_s = True, 0.0
        made = self._made

        def run() -> None:
            made.put(call())
            self._say_ended()

        self._thread(run)

    def poll(self, at: float) -> CallState:
        """Return how far the call is; ENDED and LATE once. ``at``: now, in seconds of a clock that may jump."""
        passed_s, self._polled_at = at - self._polled_at, at
        if 0.0 <= passed_s <= self.limit_s:
            self._spent_s += passed_s
        if not self._at_work:
            return CallState.NONE
        if not self._made.empty():
            self._at_work, self._results = False, [self._made.get()]
            return CallState.ENDED
        if self._spent_s <= self.limit_s:
            return CallState.AT_WORK
        # Its thread is a daemon, and nobody listens to it any more.
        self._at_work, self._made = False, queue.SimpleQueue()
        return CallState.LATE

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=self.name, daemon=True).start()
