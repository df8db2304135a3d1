"""What a ps tells of how much its buckets are touched, on keys of which few are most."""

from __future__ import annotations

import numpy as np

from everstep.ids import BucketId
from everstep.native import unique_route
from everstep.ps.ps_load import EVERY, TOLD, BucketLoad


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_hottest_buckets_of_skewed_keys_are_told() -> None:
    rng = np.random.default_rng(1)
    buckets, clock = 64, Clock()
    load = BucketLoad(buckets, clock)
    keys = rng.zipf(1.3, size=(EVERY * 20, 500)).astype(np.int64)
    exact = np.zeros(buckets)
    for batch in keys:
        unique = np.unique(batch)
        everywhere = np.arange(buckets, dtype=np.int32)
        exact += np.asarray(unique_route(unique, buckets, 7, everywhere, buckets)[2])
        if load.request():
            load.count(7, unique)
    clock.now = 10.0
    told = load.readings([BucketId(b) for b in range(buckets)])
    named = {int(k.removeprefix("load.")): v for k, v in told.items() if k != "load"}
    assert len(named) == TOLD
    assert set(np.argsort(-exact)[:3].tolist()) <= set(named)
    assert 0.5 * exact.sum() / 10 * 0.9 < told["load"] < 0.5 * exact.sum() / 10 * 1.1  # half of it after one half-life


def test_a_load_that_ended_fades() -> None:
    clock = Clock()
    load = BucketLoad(4, clock)
    load.count(1, np.arange(100, dtype=np.int64))
    clock.now = 1.0
    first = load.readings([BucketId(b) for b in range(4)])["load"]
    clock.now = 101.0
    assert load.readings([BucketId(b) for b in range(4)])["load"] < first / 100
    assert load.readings([]) == {"load": 0.0}
