"""Has a lock that many may hold together, or one alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everstep.native import _native


class RwLock:
    """Has many holders, or one alone: it is the receiver's (native/gate.h), so that what comes from other ps needs no
    interpreter. A waiting exclusive holder keeps new ones out, so it never starves. Not reentrant."""

    def __init__(self, receiver: _native.ReplicationReceiver) -> None:
        self._receiver = receiver

    @contextmanager
    def shared(self) -> Iterator[None]:
        self._receiver.enter()
        try:
            yield
        finally:
            self._receiver.leave()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self._receiver.enter_alone()
        try:
            yield
        finally:
            self._receiver.leave_alone()
