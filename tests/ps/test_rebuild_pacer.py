"""How contents for rebuilds share a ps' time with pulls and pushes, in virtual time."""

from __future__ import annotations

import pytest

from everstep.ps.rebuild_pacer import AHEAD_BYTES, BURST_S, IDLE_S, TURN_BYTES, TURN_S, RebuildPacer

STEP_S = 0.0005


class Ps:
    """Has contents without end. The peers take ``bandwidth`` bytes/s of them; ``every_s``: between two requests."""

    def __init__(self, share: float, bandwidth: float = 200e6, every_s: float = 0.01) -> None:
        self.now, self.ahead, self.sent, self.most_ahead = 50.0, 0.0, 0.0, 0.0
        self.bandwidth, self.every_s = bandwidth, every_s
        self.pacer = RebuildPacer(share, lambda: int(self.now / every_s), lambda: self.now)

    def run(self, span_s: float, piece: int = 1 << 18) -> float:
        """Return the bytes/s that were sent in ``span_s`` seconds."""
        sent, end = self.sent, self.now + span_s
        while self.now < end:
            wait_s = self.pacer.wait_s(int(self.ahead))
            if not wait_s:
                self.pacer.begin()
                self.ahead += piece
                self.sent += piece
                self.most_ahead = max(self.most_ahead, self.ahead)
            step_s = max(STEP_S, min(wait_s, end - self.now))
            self.now += step_s
            self.ahead = max(0.0, self.ahead - step_s * self.bandwidth)
        return (self.sent - sent) / span_s


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_contents_take_their_share_of_the_bandwidth(share: float) -> None:
    ps = Ps(share)
    ps.run(3 * BURST_S)  # what needs no pause is over
    assert ps.run(20.0) == pytest.approx(share * ps.bandwidth, rel=0.15)
    assert ps.pacer.busy_s == pytest.approx(ps.sent / ps.bandwidth, rel=0.15)  # so this is the measured bandwidth
    assert ps.most_ahead <= 2 * TURN_BYTES


def test_what_is_small_needs_no_pause() -> None:
    ps = Ps(0.05)
    assert ps.run(0.9 * BURST_S) > 0.8 * ps.bandwidth
    ps.run(10.0)
    ps.now += 10 * BURST_S / 0.05  # nothing is sent for long
    assert ps.run(0.9 * BURST_S) > 0.8 * ps.bandwidth


@pytest.mark.parametrize("why", ["idle", "emptied", "all"])
def test_who_need_not_yield_sends_all_that_fits(why: str) -> None:
    ps = Ps(1.0 if why == "all" else 0.05, every_s=1e9 if why == "idle" else 0.01)
    ps.pacer.emptied = why == "emptied"
    assert ps.run(5.0) > 0.9 * ps.bandwidth
    assert TURN_BYTES < ps.most_ahead <= AHEAD_BYTES + TURN_BYTES


def test_requests_that_come_again_are_yielded_to() -> None:
    ps = Ps(0.05, every_s=4 * IDLE_S)
    ps.run(3.0)
    fast = ps.run(8.0) / ps.bandwidth
    assert 0.5 < fast < 0.95  # a request, then pauses, until none came for IDLE_S
    ps.every_s = 0.01
    ps.pacer._requests = lambda: int(ps.now / ps.every_s)
    ps.run(1.0)
    assert ps.run(5.0) / ps.bandwidth == pytest.approx(0.05, rel=0.2)


def test_the_end_of_contents_ends_the_turn() -> None:
    ps = Ps(0.2)
    assert ps.pacer.wait_s(0) == 0.0
    ps.pacer.begin()
    ps.now += TURN_S
    ps.pacer.rest(1000)
    assert ps.pacer.turning
    ps.now += TURN_S
    ps.pacer.rest(0)
    assert not ps.pacer.turning and ps.pacer.busy_s == pytest.approx(2 * TURN_S)
    ps.now += 100.0
    ps.pacer.rest(0)
    assert ps.pacer.busy_s == pytest.approx(2 * TURN_S)
