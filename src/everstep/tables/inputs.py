"""Takes inputs that many threads bring to a pure machine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

A = TypeVar("A")


class Inputs(Generic[A]):
    """Takes one input at a time, and what the machine wants is done before the next one: under the lock of ``changed``,
    which is notified whenever there is nothing left to do. ``do`` may bring inputs itself: they wait their turn. If
    ``do`` raises, inputs that waited are taken with the next one that comes."""

    def __init__(self, changed: threading.Condition, do: Callable[[A], None]) -> None:
        """Take ``changed``, a condition of an RLock."""
        self._changed, self._do = changed, do
        self._waiting: deque[Callable[[], list[A]]] = deque()
        self._busy = False

    def __repr__(self) -> str:
        return f"<Inputs {len(self._waiting)} waiting>"

    def feed(self, event: Callable[[], list[A]]) -> None:
        """``event`` gives the machine an input and returns what it wants done."""
        with self._changed:
            self._waiting.append(event)
            if self._busy:
                return
            self._busy = True
            try:
                while self._waiting:
                    for action in self._waiting.popleft()():
                        self._do(action)
            finally:
                self._busy = False
                self._changed.notify_all()
