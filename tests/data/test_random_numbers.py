"""Random streams of ranges and samples."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from everstep.data.random_streams import range_seed, seed_range


def _draws() -> tuple[float, ...]:
    dropped = torch.nn.functional.dropout(torch.ones(64))
    return (*dropped.tolist(), *np.random.rand(3).tolist(), random.random(), torch.rand(1).item())


def test_a_range_draws_the_same_whatever_was_drawn_before() -> None:
    seed_range(3, 1, 4096)
    first = _draws()
    _draws()
    seed_range(3, 1, 8192)
    other = _draws()
    seed_range(3, 1, 4096)
    assert _draws() == first
    assert other != first


@pytest.mark.parametrize(
    "changed", [(4, 1, 4096), (3, 2, 4096), (3, 1, 4097), (1, 3, 4096), (3, 4096, 1), (3, 1, 4096, 1)]
)
def test_each_part_of_a_range_s_name_changes_every_stream(changed: tuple[int, ...]) -> None:
    seen = []
    for name in ((3, 1, 4096), changed):
        seed_range(*name)
        seen.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert all(a != b for a, b in zip(*seen, strict=True))


def test_seeds_are_what_every_generator_takes() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        seed = range_seed(rng.randrange(2**63), rng.randrange(2**31), rng.randrange(2**62))
        assert 0 <= seed < 2**63
    seed_range(2**63 - 1, 2**31, 2**62)
    seed_range(0, 0, 0)


def test_neighbouring_ranges_are_not_alike() -> None:
    """The first numbers of 4,000 neighbouring ranges are spread as random ones are."""
    firsts = []
    for lo in range(4000):
        seed_range(0, 0, lo * 64)
        firsts.append((torch.rand(1).item(), np.random.rand(), random.random()))
    values = np.array(firsts)
    assert np.abs(values.mean(0) - 0.5).max() < 0.03
    # of one range's three streams, and of a range and the next one
    related = np.corrcoef(np.concatenate([values[:-1], values[1:]], axis=1).T)
    assert np.abs(related - np.eye(6)).max() < 0.08
