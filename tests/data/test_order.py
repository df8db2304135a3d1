"""The order of samples: a permutation, the same for everybody, different each epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.order import WINDOW_CHUNKS, make_key, permute, sample_seeds, shuffled, window_shuffled

FROZEN_FULL = [530, 329, 246, 50, 377]
FROZEN_WINDOW = [401, 243, 408, 400, 954]


def test_every_small_n_is_permuted() -> None:
    for n in [*range(1, 300), *range(300, 4200, 97), 4095, 4096, 4097]:
        out = shuffled(np.arange(n), n, seed=3, epoch=n % 5)
        assert np.array_equal(np.sort(out), np.arange(n)), n


def test_every_small_n_is_permuted_in_windows() -> None:
    for n in [*range(1, 200), *range(200, 3000, 83)]:
        for chunk in (1, 7, 50):
            out = window_shuffled(np.arange(n), n, chunk, seed=1, epoch=2)
            assert np.array_equal(np.sort(out), np.arange(n)), (n, chunk)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**63), st.integers(0, 2**31))
def test_big_n_sampled(n: int, seed: int, start: int) -> None:
    """Distinct positions stay distinct and inside, and the inverse brings them back."""
    key = make_key(seed, 1)
    x = (np.arange(500, dtype=np.int64) * 1_000_003 + start) % n
    out = permute(x, n, key)
    assert out.min() >= 0 and out.max() < n
    assert len(np.unique(out)) == len(np.unique(x))
    assert np.array_equal(permute(out, n, key, inverse=True), x)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40), st.data())
def test_any_cut_gives_the_same_samples(n: int, seed: int, data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, 600))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=6))})
    for order in (
        lambda p: shuffled(p, n, seed, 4),
        lambda p: window_shuffled(p, n, chunk, seed, 4),
    ):
        whole = order(np.arange(n))
        parts = [order(np.arange(lo, hi)) for lo, hi in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_seed_and_epoch_change_the_order() -> None:
    n, x = 1000, np.arange(1000)
    orders = [shuffled(x, n, s, e) for s, e in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.02


def test_the_shuffle_looks_random() -> None:
    """Neighbours are far apart, and each tenth of an epoch has its share of each tenth of the data (chi square)."""
    n = 100_000
    out = shuffled(np.arange(n), n, 7, 0)
    table = np.histogram2d(np.arange(n), out, bins=10)[0]
    chi = ((table - n / 100) ** 2 / (n / 100)).sum()
    assert 40 < chi < 140  # 81 degrees of freedom
    assert abs(np.corrcoef(out[1:], out[:-1])[0, 1]) < 0.02


def test_a_window_touches_few_chunks() -> None:
    n, chunk = 100_000, 1000
    out = window_shuffled(np.arange(n), n, chunk, 5, 0)
    for lo in range(0, n, 2048):
        assert len(np.unique(out[lo : lo + 2048] // chunk)) <= 2 * (WINDOW_CHUNKS + 1)
    first = np.unique(out[: chunk * WINDOW_CHUNKS] // chunk)
    assert np.ptp(first) > WINDOW_CHUNKS  # from everywhere, not the beginning of the file


def test_the_order_never_changes() -> None:
    """Frozen: an upgrade of everstep in the middle of a job must not read other samples."""
    assert shuffled(np.arange(5), 1000, 0, 0).tolist() == FROZEN_FULL
    assert window_shuffled(np.arange(5), 1000, 10, 0, 0).tolist() == FROZEN_WINDOW
    assert shuffled(np.arange(3), 10**9, 0, 0).tolist() == [137806220, 189014926, 808392216]


def test_seeds_are_of_the_sample_not_the_position() -> None:
    rows = np.array([5, 9, 5], np.int64)
    seeds = sample_seeds(rows, 1, 2)
    assert seeds[0] == seeds[2] != seeds[1] and (seeds >= 0).all()
    assert not np.array_equal(seeds, sample_seeds(rows, 1, 3))


@pytest.mark.parametrize("n", [0, -1])
def test_no_samples(n: int) -> None:
    from everstep.errors import InternalError

    with pytest.raises(InternalError):
        permute(np.arange(1), n, 1)
