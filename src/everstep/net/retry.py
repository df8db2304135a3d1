"""Has deadlines and the one retry helper. Every wait of everstep has a ``Deadline``.

An attempt that is made again in its own thread uses ``retry``. A loop of a connection, or a timer, that goes on
after a failure takes its waits from ``backoff``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from everstep.errors import DeadlineError

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Deadline:
    """Is a moment after which waiting ends. ``what`` completes the sentence "... did not happen within N s"."""

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


class StoppedError(Exception):
    """Says that the caller of ``retry`` ended between two attempts."""


def backoff(
    first_s: float = 0.02,
    limit_s: float = 0.5,
    factor: float = 2.0,
    spread: float = 0.25,
    seed: int | None = None,
    at_once: bool = True,
) -> Iterator[float]:
    """Waits before attempts: 0 before the first (with ``at_once``), then ``first_s`` growing by ``factor`` up to
    ``limit_s``.

    Each is moved by up to ``spread`` of itself at random, so that a thousand workers of a restarted master do not
    come back in one instant. ``seed`` makes them repeatable (tests).
    """
    rng = random.Random(seed)
    if at_once:
        yield 0.0
    wait_s = first_s
    while True:
        yield min(limit_s, wait_s * (1 + spread * (2 * rng.random() - 1)))
        wait_s = min(limit_s, wait_s * factor)


def retry(
    attempt: Callable[[], T],
    error: type[E],
    *,
    again: Callable[[E], bool],
    first_s: float = 0.02,
    limit_s: float = 0.5,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what ``attempt()`` returns; make it again after an ``error`` while ``again(error)`` is true.

    The attempt must be harmless when repeated. ``wait`` gets the seconds before each attempt (``backoff``); if it
    returns true, as ``Event.wait`` does when the caller ends, StoppedError is raised. Raises the last error.
    """
    for wait_s in backoff(first_s, limit_s):
        if wait(wait_s):
            raise StoppedError
        try:
            return attempt()
        except error as found:
            if not again(found):
                raise
    raise AssertionError("backoff never ends")
