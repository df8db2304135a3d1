"""Hot partitions: they move only when one ps has far too much to do, and only where that helps."""

from __future__ import annotations

import math
import random
from operator import attrgetter

import msgspec
import pytest

from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model import plan
from everstep.model.observation import ServerSeen
from everstep.policies.hot import (
    BUDGET,
    BUSY,
    COOLDOWN_S,
    LOOKS,
    HotMove,
    MoveCosts,
    Patience,
    PsLoad,
    beyond_a_ps,
    choose_moves,
    overloaded,
)


def loads(*ps: dict[int, float], busy: float = 1.0) -> dict[Slot, PsLoad]:
    """By ps the rows a second of its partitions."""
    return {
        Slot(i): PsLoad(sum(partitions.values()), busy, {PartitionId(b): rows for b, rows in partitions.items()})
        for i, partitions in enumerate(ps)
    }


def anywhere(partition: PartitionId, slot: Slot) -> bool:
    return True


def test_an_even_load_moves_nothing() -> None:
    even = loads({0: 100.0, 1: 110.0}, {2: 105.0, 3: 90.0}, {4: 100.0, 5: 120.0})
    assert overloaded(even) is None and choose_moves(even, anywhere) == []


def test_two_hot_partitions_of_one_ps_part() -> None:
    hot = loads({0: 900.0, 1: 800.0, 2: 10.0}, {3: 100.0}, {4: 50.0})
    moves = choose_moves(hot, anywhere)
    assert len({0, 1} & {m.partition for m in moves}) == 1
    assert moves[0] == HotMove(moves[0].partition, Slot(0), Slot(2))  # (the one with the least to do)
    assert len(moves) <= BUDGET


def test_one_partition_that_is_all_of_the_load_stays() -> None:
    """Wherever it is, there is the load."""
    assert choose_moves(loads({0: 1000.0}, {1: 10.0}), anywhere) == []


def test_a_ps_that_is_not_busy_has_time() -> None:
    idle = loads({0: 900.0, 1: 800.0}, {2: 10.0}, {3: 10.0}, busy=BUSY / 2)
    assert overloaded(idle) is None


def test_moves_go_only_where_they_may() -> None:
    hot = loads({0: 900.0, 1: 800.0}, {2: 100.0}, {3: 50.0})
    moves = choose_moves(hot, lambda partition, slot: slot == 1)
    assert {m.target for m in moves} == {Slot(1)}
    assert choose_moves(hot, lambda partition, slot: False) == []


def test_random_loads_get_better_by_every_plan() -> None:
    rng = random.Random(5)
    for _ in range(500):
        n = rng.randint(2, 6)
        ps = [{10 * i + b: rng.paretovariate(0.6) for b in range(rng.randint(1, 8))} for i in range(n)]
        before = loads(*ps)
        moves = choose_moves(before, anywhere)
        after = [dict(partitions) for partitions in ps]
        for move in moves:
            after[move.target][move.partition] = after[move.source].pop(move.partition)
        if moves:
            top = max(load.rows_per_s for load in before.values())
            touched = {moves[0].source, *(m.target for m in moves)}
            assert max(sum(after[slot].values()) for slot in touched) < 0.95 * top
            assert len({m.partition for m in moves}) == len(moves) <= BUDGET


def packed(hot: float, cold: int, each: float, n_bytes: int = 0, room: float = math.inf) -> dict[Slot, PsLoad]:
    """One ps with a partition that has most of its load, and cold ones; one ps with little to do."""
    beside = tuple(PartitionId(b) for b in range(1, cold + 1))
    busy = PsLoad(hot + cold * each, 1.0, {PartitionId(0): hot}, beside, {PartitionId(0): n_bytes}, n_bytes)
    return {Slot(0): busy, Slot(1): PsLoad(100.0, 0.2, {PartitionId(99): 100.0}, room_bytes=room)}


def test_cold_partitions_are_packed_elsewhere_where_the_hot_one_cannot_move() -> None:
    moves = choose_moves(packed(hot=1000.0, cold=20, each=10.0), anywhere)
    assert moves and all(m.target == 1 and m.partition != 0 for m in moves)
    assert len(moves) == 20  # all of them: the hot one has its ps for itself


def test_a_partition_moves_only_if_it_saves_more_time_than_it_takes() -> None:
    """It has a third of the load of its ps; its contents take ten seconds of a ps' time."""
    hot = loads({0: 400.0, 1: 400.0, 2: 400.0}, {3: 10.0})
    hot[Slot(0)] = msgspec.structs.replace(hot[Slot(0)], held_bytes={PartitionId(b): 800_000_000 for b in range(3)})
    costs = MoveCosts(bytes_per_s=80e6)
    assert choose_moves(hot, anywhere, costs=costs, lasts_s=20.0) == []
    assert choose_moves(hot, anywhere, costs=costs, lasts_s=120.0)
    twice = MoveCosts(bytes_per_s=80e6, copies=5.0)  # its mirrors get it, too
    assert choose_moves(hot, anywhere, costs=twice, lasts_s=120.0) == []


def test_what_moves_fits_into_the_memory_of_the_ps_that_gets_it() -> None:
    found = choose_moves(packed(hot=1000.0, cold=20, each=10.0, n_bytes=1000, room=12_500.0), anywhere)
    assert len(found) == 12


def test_a_partition_with_more_to_do_than_a_ps_should_have_is_named() -> None:
    assert beyond_a_ps(packed(hot=1000.0, cold=20, each=10.0)) == [
        (PartitionId(0), Slot(0), 1000.0, pytest.approx(1000 / 650))
    ]
    assert beyond_a_ps(loads({0: 1000.0})) == []  # one ps has everything anyway
    assert beyond_a_ps(loads({0: 1000.0}, {1: 10.0}, busy=BUSY / 2)) == []  # it has time


def test_patience_knows_how_long_a_load_has_lasted() -> None:
    patience = Patience()
    assert patience.lasted_s(3.0) == 0.0
    for at in (0.0, 5.0, 10.0):
        patience.due(Slot(1), at)
    assert patience.lasted_s(12.0) == 12.0
    patience.due(Slot(2), 15.0)
    assert patience.lasted_s(17.0) == 2.0


def test_patience_needs_several_looks_that_agree_and_rests_after_moves() -> None:
    patience = Patience()
    assert [patience.due(Slot(1), at) for at in range(LOOKS)] == [False] * (LOOKS - 1) + [True]
    patience.moved(10.0)
    assert not any(patience.due(Slot(1), 10.0 + s) for s in range(LOOKS + 2))
    assert patience.due(Slot(1), 10.0 + COOLDOWN_S)
    assert not patience.due(Slot(2), 11.0 + COOLDOWN_S)  # another one: anew
    assert not patience.due(None, 12.0 + COOLDOWN_S)


def test_old_names_that_policies_use_work_and_say_so() -> None:
    with pytest.warns(FutureWarning, match="MoveBuckets is now MovePartitions; the old name works until everstep"):
        assert attrgetter("MoveBuckets")(plan) is plan.MovePartitions
    seen = ServerSeen(slot=Slot(0), incarnation=Incarnation(1), node=NodeId("node0"), partitions=7)
    with pytest.warns(FutureWarning, match=r"ServerSeen.buckets is now ServerSeen.partitions"):
        assert attrgetter("buckets")(seen) == 7
