"""A call of a user's code beside the master's loop: its end, its limit, and clocks that jump."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from everstep.master.user_call import CallState, UserCall


def late_call(limit_s: float = 5.0) -> tuple[UserCall[int], list[Callable[[], None]]]:
    """Return a call that is at work since 100.0, and what makes it return."""
    runs: list[Callable[[], None]] = []
    call: UserCall[int] = UserCall("a call", limit_s, thread=runs.append)
    assert call.poll(100.0) is CallState.NONE
    call.begin(lambda: 7)
    return call, runs


def test_a_call_ends_once() -> None:
    call, runs = late_call()
    assert call.poll(101.0) is CallState.AT_WORK
    runs[0]()
    assert call.poll(102.0) is CallState.ENDED and call.result == 7
    assert call.poll(103.0) is CallState.NONE


def test_a_call_that_is_late_is_given_up_and_what_it_returns_is_thrown_away() -> None:
    call, runs = late_call()
    states = [call.poll(100.0 + n) for n in range(1, 7)]
    assert states == [CallState.AT_WORK] * 5 + [CallState.LATE] and call.late_words == "it takes longer than 5 s"
    runs[0]()
    assert call.poll(107.0) is CallState.NONE
    call.begin(lambda: 8)
    runs[1]()
    assert call.poll(108.0) is CallState.ENDED and call.result == 8


@pytest.mark.parametrize("jump_s", [5.1, 3600.0, -0.5, -3600.0])
def test_a_jump_of_the_clock_is_nobodys_time(jump_s: float) -> None:
    call, _ = late_call()
    assert call.poll(104.0) is CallState.AT_WORK
    assert call.poll(104.0 + jump_s) is CallState.AT_WORK
    assert call.poll(104.9 + jump_s) is CallState.AT_WORK
    assert call.poll(105.2 + jump_s) is CallState.LATE, "the time on both sides of the jump counts"


def test_its_thread_says_that_it_ended() -> None:
    ended = threading.Event()
    call: UserCall[str] = UserCall("a call", ended=ended.set)
    call.begin(lambda: threading.current_thread().name)
    assert ended.wait(30.0)
    assert call.poll(1.0) is CallState.ENDED and call.result == "a call"
    with pytest.raises(AssertionError, match="at work"):
        call.begin(lambda: "")
        call.begin(lambda: "")
