"""Calls what the owner of a control client wants to be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.brain.events import Fenced
from everstep.net.log import logger
from everstep.net.messages import Answered, Beat, OrderType


class ClientCallbacks:
    """Calls back on the client's thread, one at a time. An error of a callback is logged and goes no further: the
    thread must live, because without its heartbeats the master would declare us lost."""

    __slots__ = ("_beat", "_fenced", "_on_fenced", "_on_order", "_on_welcome")

    def __init__(
        self,
        on_welcome: Callable[[Answered], None] | None,
        on_order: Callable[[OrderType], None] | None,
        on_fenced: Callable[[Fenced], None] | None,
        beat: Callable[[], Beat | None] | None,
    ) -> None:
        self._on_welcome, self._on_order, self._on_fenced, self._beat = on_welcome, on_order, on_fenced, beat
        self._fenced = False

    @property
    def beats(self) -> bool:
        """Return whether the owner sends heartbeats."""
        return self._beat is not None

    def welcome(self, answer: Answered) -> None:
        """Hand on the answer to hello."""
        _give(self._on_welcome, answer)

    def order(self, order: OrderType) -> None:
        """Hand on an order of the master's."""
        _give(self._on_order, order)

    def answered(self, answer: Answered) -> None:
        """Look at any answer: the first that says that we were replaced is handed on."""
        if isinstance(answer, Fenced) and not self._fenced:
            self._fenced = True
            _give(self._on_fenced, answer)

    def beat(self) -> Beat | None:
        """Return the next heartbeat; None: none this time. One whose readings fail is empty."""
        try:
            return self._beat() if self._beat is not None else None
        except Exception:
            logger.exception("the heartbeat's readings failed; sending an empty one")
            return Beat()


def _give(callback: Callable[[Any], None] | None, message: object) -> None:
    if callback is None:
        return
    try:
        callback(message)
    except Exception:
        logger.exception("callback of the control client failed on %s", message)
