"""Readings of members over two windows; what is wrong in them is dropped and counted, and never shown."""

from __future__ import annotations

import math

import pytest

from everstep.monitor.windows import Windows

LOW, HIGH = "worker:0", "worker:1"


def beats(
    windows: Windows, per_sample_s: float, begin: float = 0.0, n: int = 30, base: float = 0.0, **more: float
) -> None:
    """A worker that does 100 samples a second, one beat a second."""
    for i in range(n):
        done = base + 100.0 * i
        readings = {"computed": done, "compute_s": done * per_sample_s, "per_sample_s": per_sample_s, **more}
        assert windows.take(LOW, 1, readings, begin + i) == ""


def test_a_steady_worker_is_seen_alike_in_both_windows() -> None:
    windows = Windows(short_s=5, subwindows=4)
    beats(windows, 0.002, **{"phase.forward": 1.0})
    seen = windows.of(LOW, 1)
    assert seen is not None
    short, long = seen.pace(29.0), seen.pace(29.0, long=True)
    assert short.per_sample_s == long.per_sample_s == 0.002
    assert (short.samples, long.samples) == (500, 2000)
    assert short.compute_s == pytest.approx(1.0)
    assert seen.history == (0.002,) * 5


def test_phases_that_a_worker_tells_of_from_its_second_beat_on_are_of_both_windows() -> None:
    windows = Windows(short_s=5, subwindows=4)
    windows.take(LOW, 1, {"computed": 0.0}, 0.0)
    for at in (1.0, 2.0, 8.0, 9.0):
        windows.take(LOW, 1, {"computed": 10.0 * at, "phase.forward": at / 2}, at)
    seen = windows.of(LOW, 1)
    assert seen is not None
    assert (seen.pace(9.0).phases, seen.pace(9.0, long=True).phases) == ({"forward": 3.5}, {"forward": 4.5})


def test_a_worker_that_turns_slow_shows_in_the_short_window_first() -> None:
    windows = Windows(short_s=5, subwindows=6)
    beats(windows, 0.001, n=25)
    beats(windows, 0.004, begin=25.0, n=6, base=1e4)
    seen = windows.of(LOW, 1)
    assert seen is not None
    assert seen.pace(30.0).per_sample_s == 0.004
    assert seen.pace(30.0, long=True).per_sample_s == 0.001


def test_a_window_without_a_step_is_no_reading() -> None:
    windows = Windows(short_s=5, subwindows=4)
    for at in (0.0, 1.0, 12.0):
        readings = {"computed": 10.0, "per_sample_s": 0.5} if at < 12 else {"computed": 10.0}
        assert windows.take(LOW, 1, readings, at) == ""
    seen = windows.of(LOW, 1)
    assert seen is not None and seen.history == (0.5, 0.0)
    assert seen.pace(12.0).per_sample_s == 0.0


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("per_sample_s", math.nan, "not a number"),
        ("compute_s", math.inf, "not a number"),
        ("per_sample_s", -0.1, "negative"),
        ("phase.forward", -1e-9, "negative"),
        ("per_sample_s", 0.0, "zero"),
        ("service_s", 0.0, "zero"),
        ("bytes_in", 1e300, "too large"),
    ],
)
def test_a_wrong_reading_is_dropped_and_told_once(name: str, value: float, why: str) -> None:
    windows = Windows(short_s=5, subwindows=4)
    beats(windows, 0.002)
    bad = {"computed": 3e3, "compute_s": 6.0, "per_sample_s": 0.002, name: value}
    assert windows.take(LOW, 1, bad, 30.0) == why
    assert windows.take(LOW, 1, bad, 31.0) == ""  # told before
    assert windows.dropped == {why: 2}
    seen = windows.of(LOW, 1)
    assert seen is not None and seen.pace(31.0).per_sample_s == 0.002


def test_what_nobody_looks_at_may_be_anything() -> None:
    windows = Windows()
    assert windows.take(LOW, 1, {"loss": math.nan, "samples_per_s": -1.0}, 1.0) == ""
    assert not windows.dropped


@pytest.mark.parametrize(("then", "why"), [(10.0, "the clock went back"), (29.0 + 7200, "the clock jumped ahead")])
def test_when_the_clock_jumps_the_windows_begin_anew(then: float, why: str) -> None:
    windows = Windows(short_s=5, subwindows=4)
    beats(windows, 0.002)
    assert windows.take(LOW, 1, {"computed": 3e3, "compute_s": 6.0, "per_sample_s": 0.002}, then) == why
    seen = windows.of(LOW, 1)
    assert seen is not None
    assert seen.pace(then).samples == 0  # nothing is counted across the jump
    beats(windows, 0.003, begin=then + 1, n=10, base=1e4)
    assert seen.pace(then + 10).per_sample_s == 0.003
    assert all(v in (0.002, 0.003) for v in seen.history)
    assert windows.dropped == {why: 1}


def test_a_counter_that_went_back_begins_anew() -> None:
    windows = Windows(short_s=5, subwindows=4)
    beats(windows, 0.002)
    assert windows.take(LOW, 1, {"computed": 5.0, "compute_s": 0.01}, 30.0) == "a counter went back"
    assert windows.take(LOW, 1, {"computed": 105.0, "compute_s": 0.21}, 31.0) == ""
    seen = windows.of(LOW, 1)
    assert seen is not None and seen.pace(31.0).samples == 100


def test_a_new_process_has_no_past_and_an_old_one_no_say() -> None:
    windows = Windows()
    beats(windows, 0.002)
    assert windows.take(LOW, 2, {"computed": 1.0}, 31.0) == ""
    assert windows.take(LOW, 1, {"computed": math.nan}, 32.0) == ""
    assert windows.of(LOW, 1) is None
    fresh = windows.of(LOW, 2)
    assert fresh is not None and fresh.history == () and not windows.dropped


def test_rates_of_a_ps() -> None:
    windows = Windows(short_s=10, subwindows=4)
    for i in range(11):
        t = float(i)
        readings = {"requests": 50 * t, "held_s": 3 * t, "bytes_in": 1e6 * t, "bytes_out": 1e6 * t, "service_s": 0.004}
        assert windows.take("ps:0", 1, {**readings, "cpu_s": 0.5 * t, "throttled_s": 0.25 * t}, t) == ""
    ps = windows.of("ps:0", 1)
    assert ps is not None
    seen = ps.load(10.0)
    assert (seen.service_s, seen.queue, seen.requests_per_s) == (0.004, 3.0, 50.0)
    assert (seen.bytes_per_s, seen.cpu_share, seen.throttled_share) == (2e6, 0.5, 0.25)
    for i in range(11, 21):  # it turns idle: the short window forgets, the long one remembers
        windows.take("ps:0", 1, {**readings, "cpu_s": 5.0, "throttled_s": 2.5, "service_s": 0.001}, float(i))
    assert ps.load(20.0).requests_per_s == 0.0 and ps.load(20.0).service_s == 0.001
    long = ps.load(20.0, long=True)
    assert (long.requests_per_s, long.queue, long.cpu_share, long.throttled_share) == (25.0, 1.5, 0.25, 0.125)
    assert long.service_s in (0.001, 0.004)


def test_memory_is_bounded() -> None:
    windows = Windows(short_s=1, subwindows=6)
    for i in range(10_000):
        windows.take(LOW, 1, {"computed": float(i), "per_sample_s": 0.1}, 0.5 * i)
    seen = windows.of(LOW, 1)
    assert seen is not None and len(seen._beats) <= 16 and len(seen.history) == 30
    windows.keep({HIGH})
    assert windows.of(LOW, 1) is None
