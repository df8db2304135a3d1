"""Keys are counted exactly while they fit, closely when they do not, and honestly from a part of the data."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.sizing.distinct import DistinctCounter, expected_keys


def counted(keys: np.ndarray, capacity: int = 1 << 19, batch: int = 1000) -> DistinctCounter:
    counter = DistinctCounter(capacity)
    for lo in range(0, len(keys), batch):
        counter.add(keys[lo : lo + batch], len(keys[lo : lo + batch]))
    return counter


def zipf(n: int, rows: int, seed: int) -> np.ndarray:
    weights = np.cumsum(1.0 / np.arange(1, rows + 1) ** 1.1)
    rng = np.random.default_rng(seed)
    return np.searchsorted(weights, rng.random(n) * weights[-1]).astype(np.int64) - rows // 2


def test_few_keys_are_counted_one_by_one() -> None:
    keys = np.array([3, -7, 3, 2**62, -(2**63), 3], np.int64)
    counter = counted(keys, batch=2)
    assert (counter.count(), counter.once(), counter.sketched) == (4.0, 3.0, False)
    assert expected_keys(counter, 6).likely == 4.0


@pytest.mark.parametrize("seed", range(4))
def test_many_keys_are_counted_within_the_stated_error(seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 1 << 62, 300_000)
    counter = counted(keys, capacity=1 << 13, batch=50_000)
    assert counter.sketched
    assert abs(counter.count() / len(np.unique(keys)) - 1) < 4 * counter.error < 0.1
    found = expected_keys(counter, len(keys))
    assert found.whole and found.sketched and found.low < found.likely < found.high


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_part_of_the_data_gives_an_interval_that_holds_the_truth(share: float) -> None:
    keys = zipf(400_000, 100_000, 1)
    truth = len(np.unique(keys))
    found = expected_keys(counted(keys[: int(share * len(keys))]), len(keys))
    assert not found.whole
    assert found.low <= truth <= found.high
    assert abs(found.likely / truth - 1) < 0.25
    assert found.high < truth / share, "and says more than that all samples are alike"


def test_a_vocabulary_bounds_what_is_expected() -> None:
    keys = np.random.default_rng(0).integers(0, 1000, 900)
    assert expected_keys(counted(keys), 10**6, vocabulary=1000).high == 1000.0


def test_nothing_was_read() -> None:
    assert expected_keys(DistinctCounter(), 10).high == 0.0
    assert expected_keys(DistinctCounter(), 10, vocabulary=5).high == 5.0


def test_a_counter_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        DistinctCounter(1)
