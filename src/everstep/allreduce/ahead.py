"""Reads the batch that will probably be asked for next, while the present one is trained.

What is read quickly (from memory) is read when it is asked for: handing it to another thread would cost more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Place = tuple[int, int, int]
_READ_S = 600.0  # of one batch, at most
_QUICK_S = 0.0004  # a change of thread and back, on a machine that is busy
_RECENT = 4  # batches, of which the quickest counts: a thread that others interrupt is slow now and then


class AheadReader:
    """``read(epoch, lo, hi)`` on one other thread; one batch ahead at most. A wrong guess costs one read."""

    def __init__(self, read: Callable[[int, int, int], Any], ahead: bool) -> None:
        self._read = read
        self._took_s: deque[float] = deque(maxlen=_RECENT)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="everstep-reader") if ahead else None
        self._guess: tuple[Place, Future[Any]] | None = None

    def __repr__(self) -> str:
        return f"<AheadReader next {self._guess[0] if self._guess else None}>"

    def get(self, place: Place) -> Any:
        """The batch at ``(epoch, lo, hi)``. Raises what ``read`` raises."""
        guess, self._guess = self._guess, None
        if guess is not None:
            if guess[0] == place:
                return guess[1].result(_READ_S)
            if not guess[1].cancel():
                guess[1].exception(_READ_S)  # readers are used by one thread at a time
        return self._timed(*place)

    def begin(self, place: Place) -> None:
        if self._pool is not None and min(self._took_s, default=0.0) > _QUICK_S:
            self._guess = (place, self._pool.submit(self._timed, *place))

    def _timed(self, epoch: int, lo: int, hi: int) -> Any:
        begun = time.perf_counter()
        batch = self._read(epoch, lo, hi)
        self._took_s.append(time.perf_counter() - begun)
        return batch

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
