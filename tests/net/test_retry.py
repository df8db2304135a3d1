"""Deadlines and waits between attempts."""

from __future__ import annotations

import itertools

import pytest

from everstep.errors import DeadlineError
from everstep.net.retry import Deadline, backoff, retry


def test_backoff_begins_at_once_grows_and_is_bounded() -> None:
    waits = list(itertools.islice(backoff(0.02, 0.5, seed=1), 20))
    assert waits[0] == 0.0
    assert 0.015 <= waits[1] <= 0.025
    assert all(w <= 0.5 for w in waits)
    assert sum(waits) > 5
    assert waits == list(itertools.islice(backoff(0.02, 0.5, seed=1), 20))


def test_retry_goes_on_until_it_works() -> None:
    left = [ValueError("a"), ValueError("b")]

    def attempt() -> str:
        if left:
            raise left.pop()
        return "done"

    waited: list[float] = []
    assert retry(attempt, Deadline(100), (ValueError,), sleep=waited.append) == "done"
    assert len(waited) == 2 and waited[0] < waited[1]  # none before the first attempt


def test_retry_ends_with_the_last_error() -> None:
    def attempt() -> str:
        raise ValueError("no route")

    with pytest.raises(DeadlineError, match=r"reaching it did not happen within 0 s: no route"):
        retry(attempt, Deadline(0, "reaching it"), (ValueError,))


def test_other_errors_pass() -> None:
    def attempt() -> str:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        retry(attempt, Deadline(100), (ValueError,))


def test_deadline() -> None:
    assert Deadline(100).left_s > 99
    assert not Deadline(100).expired
    late = Deadline(0, "it")
    assert late.expired and late.left_s == 0
    with pytest.raises(DeadlineError, match="it did not happen within 0 s: why"):
        late.check("why")
