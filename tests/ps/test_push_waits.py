"""How pushes that wait for mirrors are counted."""

from __future__ import annotations

from everstep.cli.view_text import protection_text
from everstep.model.job_view import ProtectionView
from everstep.ps.push_waits import PushWaits


def test_an_overload_lasts_until_a_push_passes() -> None:
    at = [10.0]
    waits = PushWaits(lambda: at[0])
    assert waits.passed() == 0.0
    for _ in range(2):  # held, asked again, held
        with waits.wait():
            at[0] += 1.0
            with waits.wait():
                at[0] += 2.0
                assert waits.waiting == 2
    assert (waits.waiting, waits.total_s) == (0, 10.0)
    assert (waits.passed(), waits.passed()) == (10.0, 0.0)
    with waits.wait():
        at[0] += 0.5
        assert waits.total_s == 10.5
    assert waits.passed() == 0.5


def test_status_says_that_pushes_wait() -> None:
    waiting = ProtectionView("4+1", "lag", full=8, lag_s=2.0, behind_s=10.5, pushes_waiting=3)
    assert "now 10.5 s" in protection_text(waiting)
    assert "3 pushes wait until mirrors have caught up" in protection_text(waiting)
    assert "wait" not in protection_text(ProtectionView("4+1", "lag", full=8, lag_s=2.0))
