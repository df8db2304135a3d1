"""The evaluation split: disjoint, complete, exact counts."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.data.split import BLOCK, DataSplit, parse_split
from everstep.errors import DataError

SIZES = [1, 2, 3, 9, 10, 11, 99, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5, 200_003]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.999, 1.0, 0.000001])
def test_disjoint_and_complete(n: int, share: float) -> None:
    split = DataSplit(n, share, seed=4)
    train = split.train_samples(np.arange(split.train))
    test = split.test_samples(np.arange(split.test))
    assert split.train + split.test == n
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(n))
    assert abs(split.train - n * share) <= 1 + n // BLOCK


def test_any_cut_gives_the_same() -> None:
    split = DataSplit(3 * BLOCK + 5, 0.7, 1)
    whole = split.train_samples(np.arange(split.train))
    parts = [split.train_samples(np.arange(lo, min(lo + 777, split.train))) for lo in range(0, split.train, 777)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_seeded_and_spread() -> None:
    a, b = (DataSplit(50_000, 0.9, seed).test_samples(np.arange(5000)) for seed in (0, 1))
    assert len(np.intersect1d(a, b)) < 700  # about 500 by chance
    assert (np.histogram(a, bins=10, range=(0, 50_000))[0] > 400).all()


@pytest.mark.parametrize(("text", "share"), [("90/10", 0.9), (" 1 / 1 ", 0.5), (None, 1.0), (0.8, 0.8), ("100/0", 1.0)])
def test_parse(text: str | float | None, share: float) -> None:
    assert parse_split(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["90", "a/b", "0/10", "0/0", 0.0, 1.5, -0.1, "90-10", float("nan")])
def test_bad_splits(text: str | float) -> None:
    with pytest.raises(DataError) as error:
        parse_split(text)
    assert "split=" in str(error.value) and "\n" not in str(error.value)
