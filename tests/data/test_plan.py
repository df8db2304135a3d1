"""How an epoch is cut into shards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.data.shard_schedule import BATCHES_MAX, make_plan
from everstep.errors import DataError


@given(st.integers(1, 10**9), st.integers(1, 10**5), st.booleans())
def test_shards_tile_the_epoch_in_whole_batches(samples: int, batch: int, drop_last: bool) -> None:
    if batch > samples:
        batch = samples
    plan = make_plan("train", samples, batch, 0, drop_last)
    assert plan.samples == (samples - samples % batch if drop_last else samples)
    assert plan.shard_samples % batch == 0 and 1 <= plan.shard_samples // batch <= BATCHES_MAX
    assert plan.bounds(0)[0] == 0 and plan.bounds(plan.shards - 1)[1] == plan.samples
    if plan.shards > 1:
        assert plan.bounds(0)[1] == plan.bounds(1)[0]


@pytest.mark.parametrize(
    ("samples", "batch", "words"),
    [
        (10, 0, "batch_size=0"),
        (10, -3, "batch_size=-3"),
        (10, 11, "larger than its 10 training rows"),
        (10, 2.5, "whole number"),
        (10, True, "whole number"),
        (10, "8", "whole number"),
        (0, 1, "no rows"),
    ],
)
def test_bad_batch_sizes(samples: int, batch: Any, words: str) -> None:
    with pytest.raises(DataError) as error:
        make_plan("train", samples, batch, 0)
    assert words in str(error.value) and "'train'" in str(error.value) and "\n" not in str(error.value)


def test_a_billion_samples_take_no_memory() -> None:
    plan = make_plan("train", 10**9, 2048, 0)
    assert plan.shards == -(-(10**9) // (64 * 2048))
