"""Deadlines and waits between attempts."""

from __future__ import annotations

import itertools

import pytest

from everstep.errors import DeadlineError
from everstep.net.retry import Deadline, StoppedError, backoff, retry


def test_backoff_begins_at_once_grows_and_is_bounded() -> None:
    waits = list(itertools.islice(backoff(0.02, 0.5, seed=1), 20))
    assert waits[0] == 0.0
    assert 0.015 <= waits[1] <= 0.025
    assert all(w <= 0.5 for w in waits)
    assert sum(waits) > 5
    assert waits == list(itertools.islice(backoff(0.02, 0.5, seed=1), 20))


def test_waits_can_begin_after_a_failure() -> None:
    with_it = list(itertools.islice(backoff(0.02, 0.5, seed=1), 5))
    assert list(itertools.islice(backoff(0.02, 0.5, seed=1, at_once=False), 4)) == with_it[1:]


def test_retry_goes_on_until_it_works() -> None:
    left = [ValueError("a"), ValueError("b")]
    asked: list[str] = []

    def attempt() -> str:
        if left:
            raise left.pop()
        return "done"

    def again(error: ValueError) -> bool:
        asked.append(str(error))
        return True

    waited: list[float] = []
    assert retry(attempt, ValueError, again=again, wait=waited.append) == "done"
    assert asked == ["b", "a"]
    assert len(waited) == 3 and 0 == waited[0] < waited[1] < waited[2]  # none before the first attempt


def test_retry_ends_with_the_last_error() -> None:
    errors = iter([ValueError("no route"), ValueError("refused"), ValueError("never")])

    def attempt() -> str:
        raise next(errors)

    with pytest.raises(ValueError, match="refused"):
        retry(attempt, ValueError, again=lambda error: str(error) == "no route", wait=lambda _: None)


def test_retry_ends_when_its_caller_ends() -> None:
    attempts: list[int] = []
    ends = iter([False, False, True])

    def attempt() -> None:
        attempts.append(1)
        raise ValueError("away")

    with pytest.raises(StoppedError):
        retry(attempt, ValueError, again=lambda _: True, wait=lambda _: next(ends))
    assert len(attempts) == 2


def test_other_errors_pass() -> None:
    def attempt() -> str:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        retry(attempt, ValueError, again=lambda _: True)


def test_deadline() -> None:
    assert Deadline(100).left_s > 99
    assert not Deadline(100).expired
    late = Deadline(0, "it")
    assert late.expired and late.left_s == 0
    with pytest.raises(DeadlineError, match="it did not happen within 0 s: why"):
        late.check("why")
