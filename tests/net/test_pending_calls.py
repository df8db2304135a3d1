"""Calls of a client that wait for an answer, and times of its heartbeats: both without a socket."""

from __future__ import annotations

import pytest

from everstep.brain.events import Ok
from everstep.errors import WireError
from everstep.net.beat_times import BeatTimes
from everstep.net.pending_calls import PendingCall, PendingCalls
from everstep.net.retry import Deadline


def call(frame: bytes, *, left_s: float = 60.0, once: bool = False) -> PendingCall:
    return PendingCall(frame, Deadline(left_s, "an answer"), once)


def test_calls_go_out_again_in_order_but_for_those_that_nobody_waits_for() -> None:
    calls = PendingCalls()
    late, given_up, stale = call(b"late", left_s=0.0), call(b"given up"), call(b"beat", once=True)
    for i, each in enumerate((call(b"a"), late, given_up, stale, call(b"b"))):
        calls.add(i, each)
    given_up.future.cancel()
    calls.drop_stale()
    assert calls.frames() == b"ab"
    assert calls.take_late() == [late]
    assert len(calls) == 3


def test_an_answer_that_comes_twice_or_too_late_does_no_harm() -> None:
    calls, one = PendingCalls(), call(b"a")
    calls.add(1, one)
    assert calls.take(1) is one
    assert calls.take(1) is None
    one.answer(Ok())
    one.answer(Ok())
    one.fail(WireError("the connection was closed"))
    assert one.future.result(0) == Ok()


def test_all_are_taken_at_the_end() -> None:
    calls, one = PendingCalls(), call(b"a")
    calls.add(1, one)
    for each in calls.take_all():
        each.fail(WireError("the connection was closed"))
    assert len(calls) == 0
    with pytest.raises(WireError, match="was closed"):
        one.future.result(0)


def test_heartbeats_come_in_time_and_once_in_between() -> None:
    news = [False]
    times = BeatTimes(1.0, lambda: news[0])
    assert [times.due(t) for t in (0.0, 0.5)] == [True, False]
    news[0] = True
    assert [times.due(t) for t in (0.6, 0.7, 1.0, 1.1, 1.2)] == [True, False, True, True, False]
