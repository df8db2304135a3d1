"""Reads the batch that will probably be asked for next, while the present one is trained.

What is read slowly is read on another thread. What is read quickly (from memory) is read by the thread that asks, since
handing it over would cost more: while it has nothing else to do (``fill``), or else when it asks.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from everstep.data.random_streams import STREAMS

Place = tuple[int, int, int]
_READ_S = 600.0  # of one batch, at most
_QUICK_S = 0.0004  # a change of thread and back, on a machine that is busy
_RECENT = 4  # batches, of which the quickest counts: a thread that others interrupt is slow now and then


class PrefetchReader:
    """Reads ahead with ``read(epoch, lo, hi)``, one batch at most. A wrong guess costs one read."""

    def __init__(self, read: Callable[[int, int, int], Any], prefetch: bool) -> None:
        self._read = read
        self._took_s: deque[float] = deque(maxlen=_RECENT)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="everstep-reader") if prefetch else None
        self._guess: tuple[Place, Future[Any]] | None = None
        self._next: Place | None = None  # a guess that nobody reads yet
        self._held: tuple[Place, Any] | None = None  # one that was read by ``fill``

    def __repr__(self) -> str:
        return f"<AheadReader next {self._next or (self._guess and self._guess[0]) or (self._held and self._held[0])}>"

    def get(self, place: Place) -> Any:
        """Return the batch at ``(epoch, lo, hi)``. Raises what ``read`` raises."""
        guess, self._guess = self._guess, None
        held, self._held = self._held, None
        self._next = None
        if held is not None and held[0] == place:
            return held[1]
        if guess is not None:
            with STREAMS.lent():
                if guess[0] == place:
                    return guess[1].result(_READ_S)
                if not guess[1].cancel():
                    guess[1].exception(_READ_S)  # readers are used by one thread at a time
        return self._timed(*place)

    def begin(self, place: Place) -> None:
        """``place`` will probably be asked for next."""
        if self._pool is None:
            return
        if min(self._took_s, default=0.0) > _QUICK_S:
            self._guess = (place, self._pool.submit(self._timed, *place))
        else:
            self._next = place

    def fill(self) -> None:
        """The asking thread has time now: read what will be asked for, if that is quick."""
        place, self._next = self._next, None
        if place is None or not self._took_s:
            return
        with contextlib.suppress(Exception):  # whoever asks for it hears of it
            self._held = (place, self._timed(*place))

    def _timed(self, epoch: int, lo: int, hi: int) -> Any:
        begun = time.perf_counter()
        batch = self._read(epoch, lo, hi)
        self._took_s.append(time.perf_counter() - begun)
        return batch

    def close(self) -> None:
        self._held = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
