"""Keeps the calls of a client that wait for the master's answer."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError

from everstep.errors import EverstepError
from everstep.net.messages import Answered
from everstep.net.retry import Deadline


class PendingCall:
    """Is one call: its frame as it is sent, and the future of its answer. ``once``: stale on the next connection."""

    __slots__ = ("deadline", "frame", "future", "once")

    def __init__(self, frame: bytes, deadline: Deadline, once: bool) -> None:
        self.frame, self.deadline, self.once = frame, deadline, once
        self.future: Future[Answered] = Future()

    def answer(self, answer: Answered) -> None:
        """Set the answer, unless the caller has given up."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(answer)

    def fail(self, error: EverstepError) -> None:
        """Set the error, unless the caller has given up."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class PendingCalls:
    """Keeps calls by id, oldest first. It has no lock: whoever shares it guards it. Futures are never set here, since
    their callbacks run at once and could wait for that lock."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call_id: int, call: PendingCall) -> None:
        """Keep a call. ``call_id`` grows from call to call."""
        self._calls[call_id] = call

    def take(self, call_id: int) -> PendingCall | None:
        """Remove a call and return it; None: it was answered before, or given up."""
        return self._calls.pop(call_id, None)

    def take_late(self) -> list[PendingCall]:
        """Remove the calls that are beyond their deadlines, and return them."""
        return [self._calls.pop(i) for i in [i for i, call in self._calls.items() if call.deadline.expired]]

    def take_all(self) -> list[PendingCall]:
        """Remove all calls and return them."""
        taken = list(self._calls.values())
        self._calls.clear()
        return taken

    def drop_stale(self) -> None:
        """Forget the calls that must not go out on the next connection."""
        for call_id in [i for i, call in self._calls.items() if call.once]:
            del self._calls[call_id]

    def frames(self) -> bytes:
        """Return the frames of all calls that still matter, in the order in which they were made."""
        return b"".join(c.frame for c in self._calls.values() if not (c.deadline.expired or c.future.cancelled()))
