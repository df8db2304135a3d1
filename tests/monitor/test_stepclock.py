"""The phases of a step tile its time, and own compute is judged without what was waited for others."""

from __future__ import annotations

from time import process_time

import pytest

from everstep.monitor import stepclock
from everstep.monitor.slowdown import Slowdown
from everstep.monitor.stepclock import StepClock


class Time:
    """Nanoseconds that pass when told."""

    def __init__(self) -> None:
        self.ns = 10**9

    def __call__(self) -> int:
        return self.ns

    def go(self, ms: float) -> None:
        self.ns += round(ms * 1e6)


def step(clock: StepClock, time: Time, barrier_ms: float, samples: int = 10) -> None:
    for phase, ms in ((stepclock.DATA, 1), (stepclock.FORWARD, 4)):
        clock.switch(phase)
        time.go(ms)
    clock.first_gradient()
    time.go(6)
    clock.first_gradient()  # every parameter tells
    clock.computed(samples)
    clock.switch(stepclock.BARRIER)
    time.go(barrier_ms)
    clock.switch(stepclock.UPDATE)
    time.go(2)


def test_phases_tile_the_time_of_the_loop() -> None:
    time = Time()
    clock = StepClock(time)
    began = time.ns
    for _ in range(5):
        step(clock, time, barrier_ms=50)
    clock.switch(stepclock.OUTSIDE)
    readings = clock.readings()
    assert readings["phase.forward"] == pytest.approx(0.020)
    assert readings["phase.backward"] == pytest.approx(0.030)
    assert readings["phase.barrier"] == pytest.approx(0.250)
    phases = sum(v for k, v in readings.items() if k.startswith("phase."))
    assert phases == pytest.approx((time.ns - began) * 1e-9)
    assert (readings["computed"], readings["steps"]) == (50, 5)


def test_own_compute_does_not_depend_on_the_others() -> None:
    fast, slow = Time(), Time()
    waits, waits_not = StepClock(fast), StepClock(slow)
    for _ in range(6):
        step(waits, fast, barrier_ms=500)
        step(waits_not, slow, barrier_ms=0)
    assert waits.readings()["per_sample_s"] == waits_not.readings()["per_sample_s"] == pytest.approx(0.0012)


def test_the_median_is_of_the_steps_since_the_last_beat() -> None:
    time = Time()
    clock = StepClock(time)
    for _ in range(1000):
        step(clock, time, 1)
    first = clock.readings()
    assert "per_sample_s" in first and "per_sample_s" not in clock.readings()
    assert clock.readings()["computed"] == 10_000


def test_no_samples_are_no_pace() -> None:
    """E.g. a share of a step that is empty."""
    time = Time()
    clock = StepClock(time)
    step(clock, time, 1, samples=0)
    assert "per_sample_s" not in clock.readings()


def test_a_fault_makes_own_compute_longer_by_its_factor() -> None:
    time = Time()
    clock = StepClock(time)
    clock.slowdown = slowdown = Slowdown(lambda: time.ns * 1e-9)
    waited: list[float] = []

    def wait(timeout: float) -> bool:
        waited.append(timeout)
        time.go(timeout * 1e3)
        return False

    slowdown._over.wait = wait  # type: ignore[method-assign, assignment]
    slowdown.order(4.0, 60.0)
    for _ in range(3):
        step(clock, time, 1)
    assert waited == pytest.approx([0.030, 0.036, 0.036])  # (the update belongs to the next step)
    assert clock.readings()["per_sample_s"] == pytest.approx(4 * 0.0012, rel=0.2)
    time.go(60_000)
    step(clock, time, 1)
    assert not slowdown.on and len(waited) == 3  # it ended by itself


def test_measuring_costs_the_training_thread_next_to_nothing() -> None:
    """Processor time of the clock's calls in a step, as a share of a step of 5 ms; the benchmark ``readings`` has
    the figure, this only that nobody makes it ten times as much."""
    clock = StepClock()
    began = process_time()
    for _ in range(2000):
        for phase in (stepclock.BARRIER, stepclock.DATA, stepclock.FORWARD):
            clock.switch(phase)
        clock.first_gradient()
        clock.computed(32)
        clock.switch(stepclock.BARRIER)
        clock.switch(stepclock.UPDATE)
    assert (process_time() - began) / 2000 / 0.005 < 0.05


def test_a_pace_that_is_new_is_news_until_it_is_told() -> None:
    time = Time()
    clock = StepClock(time)

    def news_after(ms: float, samples: int = 10) -> bool:
        clock.switch(stepclock.FORWARD)
        time.go(ms)
        clock.computed(samples)
        clock.switch(stepclock.BARRIER)
        return clock.news

    assert news_after(200)  # the first
    assert clock.readings()["per_sample_s"] == pytest.approx(0.02)
    assert not clock.news and not news_after(240) and not news_after(170)
    assert not news_after(480, samples=20)  # more samples, no other pace
    assert news_after(800) and news_after(200)  # (not told yet)
    clock.readings()
    assert not news_after(220) and not news_after(20)  # (so fast that the next beat is soon enough)


def test_a_step_under_way_says_how_slow_it_is_at_least() -> None:
    time = Time()
    clock = StepClock(time)
    assert "at_least_s" not in clock.readings()
    clock.begin(10)
    time.go(100)
    assert clock.readings()["at_least_s"] == pytest.approx(0.01)
    assert not clock.news, "nothing is known to compare it with"
    clock.switch(stepclock.BACKWARD)
    time.go(100)
    clock.switch(stepclock.PULL)  # not its own time
    assert clock.at_least_s == 0.0
    time.go(500)
    clock.switch(stepclock.UPDATE)
    assert clock.at_least_s == pytest.approx(0.02)
    clock.computed(10)
    assert clock.at_least_s == 0.0 and clock.readings()["per_sample_s"] == pytest.approx(0.02)
    clock.begin(10)
    time.go(250)
    assert not clock.news
    time.go(20)
    assert clock.news, "its end is still to come"
    clock.computed(0)
    clock.begin(2)
    time.go(90)
    assert not clock.news, "a short one"
