"""The idle slot: work on the side never costs a step more than its budget and one piece."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.machines.idle_slot import Budget, IdleSlot, run_pieces


class Copying:
    """Bytes that are copied; every piece takes its time on a clock of its own. ``unit``: it cannot be cut finer."""

    def __init__(self, size: int, unit: int, byte_s: float) -> None:
        self.left_bytes, self._unit, self._byte_s = size, unit, byte_s
        self.now = 0.0

    def advance(self, limit_bytes: int) -> int:
        done = min(self.left_bytes, max(self._unit, limit_bytes // self._unit * self._unit))
        self.left_bytes -= done
        self.now += done * self._byte_s
        return done


@settings(deadline=None, derandomize=True)
@given(
    size=st.integers(1, 10_000),
    unit=st.integers(1, 500),
    bytes_=st.integers(1, 2_000),
    seconds=st.floats(0.01, 10.0),
    byte_s=st.floats(1e-4, 1e-2),
)
def test_no_slot_costs_more_than_its_budget_and_a_piece_and_all_is_done(
    size: int, unit: int, bytes_: int, seconds: float, byte_s: float
) -> None:
    work, slot = Copying(size, unit, byte_s), IdleSlot()
    total = 0
    for step in itertools.count(1):
        slot.offer(Budget(bytes_, seconds))
        began = work.now
        done = run_pieces(slot, work, lambda: work.now, unit)
        total += done
        assert done <= bytes_ + unit
        # (the first piece of all is cut before anything is known of its speed)
        assert work.now - began <= seconds + unit * byte_s + 1e-9 or step == 1
        assert total <= step * bytes_ + unit
        if not work.left_bytes:
            break
        assert step < 10 * (size + unit) * (1 / bytes_ + byte_s / seconds + 1), "it does not get on"
    assert total == size


def test_what_is_not_used_lapses_and_what_was_used_beyond_is_owed() -> None:
    slot = IdleSlot()
    assert slot.claim(10) == 0
    for _ in range(5):
        slot.offer(Budget(bytes=100))
    assert slot.claim(1000) == 100
    slot.spent(250, 0.0)
    slot.offer(Budget(bytes=100))
    assert slot.claim(1000) == 0
    slot.offer(Budget(bytes=100))
    assert slot.claim(1000) == 50 and slot.claim(1000, least=80) == 80
    slot.unlimited = True
    assert slot.claim(1000) == 1000


def test_seconds_become_bytes_at_the_speed_of_the_pieces_before() -> None:
    slot = IdleSlot()
    slot.offer(Budget(seconds=1.0))
    slot.spent(100, 0.5)
    assert slot.claim(1000) == 100
    slot.offer(Budget(seconds=2.0))
    assert slot.claim(1000) == 400


@pytest.mark.parametrize("budget", [Budget(bytes=0), Budget(seconds=0.0), Budget(seconds=float("nan"))])
def test_an_empty_offer_is_refused(budget: Budget) -> None:
    with pytest.raises(ValueError, match=r"^an idle slot of .*: both must be above 0$"):
        IdleSlot().offer(budget)
