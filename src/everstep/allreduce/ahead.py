"""Reads the batch that will probably be asked for next, while the present one is trained."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Place = tuple[int, int, int]
_READ_S = 600.0  # of one batch, at most


class AheadReader:
    """``read(epoch, lo, hi)`` on one other thread; one batch ahead at most. A wrong guess costs one read."""

    def __init__(self, read: Callable[[int, int, int], Any], ahead: bool) -> None:
        self._read = read
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
        return self._read(*place)

    def begin(self, place: Place) -> None:
        if self._pool is not None:
            self._guess = (place, self._pool.submit(self._read, *place))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
