"""The comparison of loss curves sees a gradient that is wrong by 1 %, and does not see what is not there."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meaning.cells import Everstep, _alone, _as_it_was
from meaning.curves import Curves, compare, windows, within_spread
from meaning.kit import data
from meaning.plain import Plain
from meaning.table import MODES

SEEDS = range(1, 6)


def losses(es: Any, seed: int, too_large: float) -> list[float]:
    job = es.join(seed=seed)
    model = job.replicate(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    found = []
    for batch in job.steps(job.loader(data(), 8, epochs=2)):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        ((1 + too_large) * loss).backward()
        opt.step()
        found.append(float(loss.detach()))
    return found


def plain(too_large: float = 0.0) -> Curves:
    with _alone(), _as_it_was():
        return curves([losses(Plain(seed=seed), seed, too_large) for seed in SEEDS])


def curves(found: list[list[float]]) -> Curves:
    return np.array([windows(each, [8.0] * len(each), 12) for each in found])


def of_everstep(too_large: float) -> Curves:
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(prefix="curves-", ignore_cleanup_errors=True) as folder, _as_it_was():
            found.append(losses(Everstep(MODES["allreduce"], f"{folder}/run"), seed, too_large))
    return curves(found)


@pytest.mark.parametrize("too_large", [0.0, 0.01, -0.01])
def test_a_gradient_wrong_by_one_percent_is_caught_by_the_curves_of_five_seeds(too_large: float) -> None:
    right, wrong = plain(), plain(0.01)
    got = of_everstep(too_large)
    verdict = compare(right, wrong, got)
    assert verdict.sees_one_percent
    assert verdict.wrong == (too_large != 0.0)
    assert abs(verdict.percent - 100 * too_large) < 0.1
    assert within_spread(right, got) < 0.1, "the spread between seeds would not have seen it"


@pytest.mark.parametrize("noise", [0.2, 50.0])
def test_the_verdict_says_what_it_cannot_see(noise: float) -> None:
    """Noise as that of other random numbers in dropout, in units of what 1 % changes."""
    rng = np.random.default_rng(0)
    right = rng.normal(size=(5, 12))
    ways = rng.normal(size=(5, 12)) + 1
    still = compare(right, right + ways, right + noise * rng.normal(size=(5, 12)))
    assert not still.wrong
    assert still.sees_one_percent == (noise < 1)
    moved = compare(right, right + ways, right + ways + noise * rng.normal(size=(5, 12)))
    assert moved.wrong == (noise < 1)


def test_curves_need_two_seeds() -> None:
    with pytest.raises(ValueError, match="1 seeds"):
        compare(np.zeros((1, 2)), np.ones((1, 2)), np.zeros((1, 2)))
