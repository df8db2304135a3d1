"""A worker that waits in vain for a ps is told of once, and once more when it goes on."""

from __future__ import annotations

from everstep.ids import Incarnation, Slot
from everstep.master.stalls import REPORT_AFTER_S, Stalls
from everstep.model.member import MemberKey, Role

KEY, ONE = MemberKey(Role.WORKER, Slot(0)), Incarnation(1)


def waits(seconds: float, ps: int = 2) -> dict[str, float]:
    return {"stalled_ps": float(ps), "stalled_s": seconds}


def test_a_short_wait_is_nobodys_business() -> None:
    stalls = Stalls()
    assert stalls.beat(KEY, ONE, waits(REPORT_AFTER_S - 1)) is None
    assert stalls.beat(KEY, ONE, {}) is None


def test_a_long_wait_is_told_once_and_its_end() -> None:
    stalls = Stalls()
    told = stalls.beat(KEY, ONE, waits(REPORT_AFTER_S))
    assert told is not None and "ps:2" in told.reason
    assert stalls.beat(KEY, ONE, waits(REPORT_AFTER_S + 5)) is None
    over = stalls.beat(KEY, ONE, {})
    assert over is not None and over.inputs["waited_s"] == REPORT_AFTER_S + 5
    assert stalls.beat(KEY, ONE, {}) is None


def test_another_life_or_another_ps_is_another_wait() -> None:
    stalls = Stalls()
    assert stalls.beat(KEY, ONE, waits(20)) is not None
    assert stalls.beat(KEY, Incarnation(2), waits(1)) is None
    assert stalls.beat(KEY, Incarnation(2), waits(11, ps=1)) is not None
