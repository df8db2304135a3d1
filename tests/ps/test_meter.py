"""A request's own time is without what it waited for others."""

from __future__ import annotations

import time

import pytest

from everstep.ps.meter import Meter


def test_waiting_does_not_count_as_own() -> None:
    meter = Meter()
    with meter.waiting():
        time.sleep(0.01)
    assert meter.own(0.011) <= 0.001
    assert meter.own(0.011) == 0.011  # of the next request


def test_counters_and_the_median_since_the_last_beat() -> None:
    meter = Meter()
    for own_s in (0.001, 0.002, 0.9):
        meter.served(own_s, 2 * own_s, 10, 1)
    readings = meter.readings()
    assert readings["service_s"] == 0.002
    assert (readings["requests"], readings["bytes_in"], readings["bytes_out"]) == (3, 30, 3)
    assert "service_s" not in meter.readings()


def test_pulls_and_pushes_have_a_median_each() -> None:
    meter = Meter()
    for _ in range(3):
        meter.served(0.001, 0.001, 0, 10)
    meter.served(0.005, 0.005, 10, 0)
    assert meter.readings()["service_s"] == pytest.approx(0.002), "three of 1 ms, one of 5 ms"
