"""What a ps tells of how much its partitions are touched, on keys of which few are most."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.ids import PartitionId, TableId
from everstep.model.partition_load import ANNOUNCED
from everstep.native import unique_route
from everstep.ps.ps_load import EVERY, PartitionLoad


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


TABLE = TableId(7)


def grouped(keys: np.ndarray, partitions: int) -> np.ndarray:
    """Return the different keys, as a request has them: by partition."""
    everywhere = np.arange(partitions, dtype=np.int32)
    return np.asarray(unique_route(np.unique(keys), partitions, TABLE, everywhere, partitions)[0])


def test_the_hottest_partitions_of_skewed_keys_are_told() -> None:
    rng = np.random.default_rng(1)
    partitions, clock = 64, Clock()
    load = PartitionLoad(partitions, clock)
    keys = rng.zipf(1.3, size=(EVERY * 20, 500)).astype(np.int64)
    everywhere = np.arange(partitions, dtype=np.int32)
    exact, seconds = np.zeros(partitions), 0.0
    for batch in keys:
        unique = grouped(batch, partitions)
        exact += np.asarray(unique_route(unique, partitions, TABLE, everywhere, partitions)[2])
        if load.request():
            load.count([(TABLE, unique, 72)])
        load.served(0.002)
        seconds += 0.002
    clock.now = 10.0
    all_of_them = [PartitionId(b) for b in range(partitions)]
    told = load.readings(all_of_them, held=lambda b: 1000 + b)
    assert len(told) == ANNOUNCED and [r.rows_per_s for r in told] == sorted((r.rows_per_s for r in told), reverse=True)
    assert set(np.argsort(-exact)[:3].tolist()) <= {r.partition for r in told}
    total = load.total(all_of_them)
    assert (
        0.75 * exact.sum() / 10 * 0.9 < total < 0.75 * exact.sum() / 10 * 1.1
    )  # three quarters of it after two half-lives
    for r in told:
        assert r.bytes_per_s == pytest.approx(72 * r.rows_per_s, rel=1e-6) and r.held_bytes == 1000 + r.partition
        assert 0 < r.requests_per_s <= 0.75 * len(keys) / 10 * 1.05
        # a request's time is divided by rows
        assert r.service_share == pytest.approx(0.75 * seconds / 10 * r.rows_per_s / total, rel=0.2)


def test_a_load_that_ended_fades() -> None:
    clock = Clock()
    load = PartitionLoad(4, clock)
    load.count([(TABLE, grouped(np.arange(100), 4), 8)])
    clock.now = 1.0
    everywhere = [PartitionId(b) for b in range(4)]
    first = load.total(everywhere)
    clock.now = 101.0
    assert load.total(everywhere) < first / 100
    assert load.total([]) == 0.0 and load.readings([]) == ()


def test_the_keys_of_the_hottest_partition_are_named_with_their_share() -> None:
    """Each request asks for one key of it; every second one for another one, too."""
    partitions, clock = 16, Clock()
    load = PartitionLoad(partitions, clock)
    everywhere = [PartitionId(b) for b in range(partitions)]
    by_partition: dict[int, list[int]] = {}
    for key in range(2000):
        by_partition.setdefault(partition_of(key, partitions), []).append(key)
    often, second, *rest = by_partition[5]
    for n in range(400):
        keys = [often, *rest[n % 50 : n % 50 + 5], *([second] if n % 2 else [])]
        load.count([(TABLE, grouped(np.array(keys), partitions), 8)])
        if n == 10:  # the first look says which one is the hottest
            clock.now += 1.0
            assert load.readings(everywhere)[0].partition == 5
    clock.now += 1.0
    found = load.readings(everywhere, names={TABLE: "ads"})[0].keys
    assert [(hot.table, hot.key) for hot in found[:2]] == [("ads", often), ("ads", second)]
    assert found[0].share == pytest.approx(1.0, abs=0.02) and found[1].share == pytest.approx(0.5, abs=0.02)


def partition_of(key: int, partitions: int) -> int:
    everywhere = np.arange(partitions, dtype=np.int32)
    counts = unique_route(np.array([key], np.int64), partitions, TABLE, everywhere, partitions)[2]
    return int(np.argmax(np.asarray(counts)))
