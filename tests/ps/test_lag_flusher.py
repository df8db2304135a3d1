"""When mirrors that may lag are sent what they lack, and what is known of how far they are."""

from __future__ import annotations

import pytest

from everstep.ids import PartitionId
from everstep.model.shard import shard_key
from everstep.model.table import InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store
from everstep.ps.lag_flusher import LagFlusher, open_bytes

SHARD = shard_key(0, 0, 0)
LONG_S, SHORT_S = 1e5, 1e-7


class Ps:
    """A store with four protected partitions; how far its mirrors are, the clock and the requests are played."""

    def __init__(self, lag_s: float, *groups: tuple[int, ...]) -> None:
        self.store = Store(4, 1)
        self.store.declare(TableSpec("t", 2, OptimizerSpec(OptimizerKind.SGD, 0.1), InitSpec()))
        self.store.own([0, 1, 2, 3])
        self.store.protect([0, 1, 2, 3], True)
        self.done = self.sent = self.requests = self.lease = 0
        self.now = 100.0
        self.groups = groups or ((0,), (1,), (2,), (3,))
        self.lag = LagFlusher(
            self.store, lag_s, lambda: self.done, self.send, lambda: self.requests, self.by_holder, lambda: self.now
        )

    def by_holder(self) -> dict[tuple[int, int], list[PartitionId]]:
        return {(slot, 1): [PartitionId(b) for b in group] for slot, group in enumerate(self.groups)}

    def open(self) -> list[int]:
        """Return the partitions with an open change, which is flushed by that."""
        return [b for b in range(4) if self.store.flush(b)]

    def send(self) -> None:
        self.sent += 1

    def change(self) -> None:
        """Change the marks of all partitions."""
        self.lease += 1
        assert self.store.open(SHARD, 0, self.lease) is not None


def test_what_is_not_due_stays_open() -> None:
    ps = Ps(LONG_S)
    ps.change()
    assert ps.lag.look() > 0
    assert (ps.sent, ps.store.lag().partitions) == (0, 4)


def test_partitions_with_mirrors_at_the_same_ps_are_sent_together() -> None:
    ps = Ps(SHORT_S, (0, 2), (1, 3))
    ps.change()
    ps.requests += 1
    ps.lag.look()
    assert (ps.sent, ps.open()) == (1, [1, 3])
    ps.change()
    ps.lag.look()  # the other group has waited for longer
    assert (ps.sent, ps.open()) == (2, [0, 2])


def test_a_group_without_changes_lets_the_next_one_go() -> None:
    ps = Ps(SHORT_S, (0, 2), (1, 3))
    ps.change()
    assert ps.store.flush(0) and ps.store.flush(2)
    ps.lag.look()
    assert (ps.sent, ps.open()) == (1, [])


def test_what_has_no_mirror_yet_is_flushed_when_it_is_due() -> None:
    ps = Ps(SHORT_S, (0, 2))
    ps.change()
    for left in (2, 1, 0):
        ps.requests += 1
        ps.lag.look()
        assert ps.store.lag().partitions == left
    assert ps.sent == 3
    ps = Ps(LONG_S, (0, 2))
    ps.change()
    ps.lag.look()
    assert ps.open() == [0, 1, 2, 3]


def test_what_is_due_is_sent_one_group_at_a_time() -> None:
    ps = Ps(SHORT_S)
    ps.change()
    for left in (3, 2, 1, 0):
        ps.requests += 1  # somebody is always asking
        ps.lag.look()
        assert (ps.sent, ps.store.lag().partitions) == (4 - left, left)
    ps.lag.look()
    assert ps.sent == 4


def test_it_looks_again_when_something_can_be_due() -> None:
    ps = Ps(1000.0)
    rest = ps.lag.look()
    assert rest == 0.25  # nothing is open
    for lag_s, least_s, most_s in ((1000.0, 0.25, 0.25), (1.0, 0.09, 0.1), (0.02, 0.004, 0.005)):
        ps = Ps(lag_s)
        ps.change()
        assert least_s <= ps.lag.look() <= most_s, lag_s  # young changes: not before a share of the lag
    ps = Ps(SHORT_S)
    ps.change()
    assert ps.lag.look() == 0.001  # three others are due


def test_confirmed_is_what_all_mirrors_have() -> None:
    ps = Ps(LONG_S)
    assert ps.lag.advance() == (0, 0)
    ps.change()
    assert ps.lag.advance() == (0, 4)
    for partition in (0, 1, 3):
        ps.store.flush(partition)
    ps.done = 3
    assert ps.lag.advance() == (2, 4)  # number 3, of partition 2, is open
    ps.change()
    assert ps.lag.advance() == (2, 7)
    ps.store.flush(2)
    assert ps.lag.advance() == (2, 7)  # it is in the outbox, and nobody has it yet
    ps.done = 4
    assert ps.lag.advance() == (4, 7)
    for partition in range(4):
        ps.store.flush(partition)
    ps.done = 6
    assert ps.lag.advance() == (4, 7)
    ps.done = 7
    assert ps.lag.advance() == (7, 7)


def test_pushes_wait_for_mirrors_that_are_too_far_behind() -> None:
    ps = Ps(3.0)
    assert ps.lag.bound_s == 15.0 and Ps(1.0).lag.bound_s == 10.0
    ps.change()
    ps.lag.advance()
    ps.now += 8.0
    ps.store.flush(0)
    ps.change()  # a younger one
    ps.lag.advance()
    assert ps.lag.behind_s == 8.0 and not ps.lag.late
    ps.now += 8.0
    ps.lag.advance()
    assert ps.lag.behind_s == 16.0 and ps.lag.late
    ps.done = 1
    ps.lag.advance()
    assert ps.lag.late  # the oldest of the first four is not the only one
    for partition in range(4):
        ps.store.flush(partition)
    ps.done = 5
    ps.lag.advance()
    assert ps.lag.behind_s == 0.0 and not ps.lag.late


def overload(times: float, seconds: float) -> tuple[Ps, float]:
    """Play pushes that come so many times as fast as mirrors can take them, and wait where they are told to. Return
    the ps, and the age of the oldest change that a mirror got."""
    ps, step_s, made, credit, oldest = Ps(1.0), 0.1, list[float](), 0.0, 0.0
    for _ in range(round(seconds / step_s)):
        if not ps.lag.late:
            credit += times
            while credit >= 1.0:
                credit -= 1.0
                ps.change()
                assert all(ps.store.flush(b) for b in range(4))
                made += [ps.now] * 4
        ps.now += step_s
        arrived = min(len(made), ps.done + 4)
        if arrived > ps.done:
            oldest = max(oldest, ps.now - made[ps.done])
        ps.done = arrived
        ps.lag.advance()
    return ps, oldest


def test_under_overload_the_lag_grows_to_its_bound_and_not_beyond() -> None:
    """At three times the speed of mirrors, changes of the bound's seconds would take three times as long."""
    for times in (1.3, 2.0, 3.0, 6.0):
        ps, oldest = overload(times, 120.0)
        assert 0.8 * ps.lag.bound_s < oldest < 1.3 * ps.lag.bound_s, (times, oldest)
    ps, oldest = overload(0.9, 120.0)
    assert oldest < 1.0 and not ps.lag.late


@pytest.mark.parametrize(("lag_s", "mib"), [(0.05, 3), (2.0, 3), (4.0, 6), (8.0, 12), (60.0, 16)])
def test_a_longer_lag_lets_more_batches_become_one_difference(lag_s: float, mib: int) -> None:
    assert open_bytes(lag_s) == mib << 20
