"""Deadlines and the one retry helper. Every wait of everstep has a ``Deadline``; every retry comes from here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from everstep.errors import DeadlineError

T = TypeVar("T")


class Deadline:
    """A moment after which waiting ends. ``what`` completes the sentence "... did not happen within N s"."""

    __slots__ = ("_end", "seconds", "what")

    def __init__(self, seconds: float, what: str = "") -> None:
        self.seconds = seconds
        self.what = what
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._end

    def error(self, detail: str = "") -> DeadlineError:
        text = f"{self.what or 'it'} did not happen within {self.seconds:g} s"
        return DeadlineError(f"{text}: {detail}" if detail else text)

    def check(self, detail: str = "") -> None:
        """Raise DeadlineError once the moment has passed."""
        if self.expired:
            raise self.error(detail)

    def __repr__(self) -> str:
        return f"<Deadline {self.what!r} {self.left_s:.3f} s of {self.seconds:g} s left>"


def backoff(
    first_s: float = 0.02, limit_s: float = 0.5, factor: float = 2.0, spread: float = 0.25, seed: int | None = None
) -> Iterator[float]:
    """Waits between attempts: 0 first (try again at once), then ``first_s`` growing by ``factor`` up to ``limit_s``.

    Each is moved by up to ``spread`` of itself at random, so that a thousand workers of a restarted master do not
    come back in one instant. ``seed`` makes them repeatable (tests).
    """
    rng = random.Random(seed)
    yield 0.0
    wait_s = first_s
    while True:
        yield min(limit_s, wait_s * (1 + spread * (2 * rng.random() - 1)))
        wait_s = min(limit_s, wait_s * factor)


def retry(
    attempt: Callable[[], T],
    deadline: Deadline,
    errors: tuple[type[Exception], ...],
    *,
    first_s: float = 0.02,
    limit_s: float = 0.5,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """``attempt()`` until it returns, again after any of ``errors``, until the deadline.

    The attempt must be harmless when repeated. Raises DeadlineError from the last error.
    """
    for wait_s in backoff(first_s, limit_s):
        if wait_s:
            sleep(min(wait_s, deadline.left_s))
        try:
            return attempt()
        except errors as error:
            if deadline.expired:
                raise deadline.error(str(error)) from error
    raise AssertionError("backoff never ends")
