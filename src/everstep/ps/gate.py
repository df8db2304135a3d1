"""A lock that many may hold together, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many holders, or one alone. A waiting exclusive holder keeps new ones out, so it never starves. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
