"""Slowdowns on purpose end by themselves, at once when told to, and are never made of nonsense."""

from __future__ import annotations

import math
import threading

import pytest

from everstep.monitor.slowdown import Slowdown


@pytest.mark.parametrize(("factor", "for_s"), [(1.0, 10), (0.5, 10), (math.nan, 10), (math.inf, 10), (4, 0), (4, -1)])
def test_nonsense_is_off(factor: float, for_s: float) -> None:
    slowdown = Slowdown()
    slowdown.order(4.0, 60.0)
    slowdown.order(factor, for_s)
    assert not slowdown.on


def test_it_waits_in_proportion_and_not_beyond_its_end() -> None:
    slowdown = Slowdown()
    slowdown.order(3.0, 60.0)
    assert slowdown.pause(0.005) >= 0.01
    slowdown.order(1000.0, 0.02)
    assert slowdown.pause(10.0) < 5.0
    assert slowdown.pause(10.0) == 0.0 and not slowdown.on


def test_healing_ends_a_wait_that_has_begun() -> None:
    slowdown = Slowdown()
    slowdown.order(100.0, 600.0)
    waiting = threading.Thread(target=slowdown.pause, args=(1.0,))
    waiting.start()
    slowdown.order(1.0, 0.0)
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_it_can_burn() -> None:
    slowdown = Slowdown()
    slowdown.order(2.0, 60.0, burn=True)
    assert slowdown.pause(0.002) >= 0.002
