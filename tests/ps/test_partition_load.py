"""What a ps tells of how much its partitions are touched, on keys of which few are most."""

from __future__ import annotations

import numpy as np

from everstep.ids import PartitionId
from everstep.native import unique_route
from everstep.ps.ps_load import ANNOUNCED, EVERY, PartitionLoad


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_hottest_partitions_of_skewed_keys_are_told() -> None:
    rng = np.random.default_rng(1)
    partitions, clock = 64, Clock()
    load = PartitionLoad(partitions, clock)
    keys = rng.zipf(1.3, size=(EVERY * 20, 500)).astype(np.int64)
    exact = np.zeros(partitions)
    for batch in keys:
        unique = np.unique(batch)
        everywhere = np.arange(partitions, dtype=np.int32)
        exact += np.asarray(unique_route(unique, partitions, 7, everywhere, partitions)[2])
        if load.request():
            load.count(7, unique)
    clock.now = 10.0
    told = load.readings([PartitionId(b) for b in range(partitions)])
    named = {int(k.removeprefix("load.")): v for k, v in told.items() if k != "load"}
    assert len(named) == ANNOUNCED
    assert set(np.argsort(-exact)[:3].tolist()) <= set(named)
    assert 0.5 * exact.sum() / 10 * 0.9 < told["load"] < 0.5 * exact.sum() / 10 * 1.1  # half of it after one half-life


def test_a_load_that_ended_fades() -> None:
    clock = Clock()
    load = PartitionLoad(4, clock)
    load.count(1, np.arange(100, dtype=np.int64))
    clock.now = 1.0
    first = load.readings([PartitionId(b) for b in range(4)])["load"]
    clock.now = 101.0
    assert load.readings([PartitionId(b) for b in range(4)])["load"] < first / 100
    assert load.readings([]) == {"load": 0.0}
