"""Whole jobs with a policy under virtual time (``policy_job``): when plans come, and what they cost or save."""

from __future__ import annotations

from pathlib import Path

import pytest
from policy_job import BATCH, EPOCHS, SAMPLES, SYNC_S, Ran, run

from everstep.sim.stragglers import ConstantSlowness, Pattern, Spells, finish

SAMPLE_S, WINDOW_S = 0.004, 0.5


def job(folder: Path, policy: str, pattern: Pattern, steps: int, seed: int, late_s: tuple[float, ...] = ()) -> Ran:
    return run(folder, policy, pattern, 8, steps, SAMPLE_S, WINDOW_S, seed, late_s)


def nothing_done_s(pattern: Pattern, steps: int) -> float:
    t = 0.0
    for _ in range(steps):
        t = max(finish(pattern, k, t, BATCH * SAMPLE_S) for k in range(8)) + SYNC_S
    return t


@pytest.mark.parametrize("policy", ["shared", "exclusive"])
@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.3])
def test_one_slow_from_the_beginning_on_costs_one_step_at_its_pace(tmp_path: Path, policy: str, late_s: float) -> None:
    # whatever the first step has in it besides: then nobody seems to be much slower than others while it begins
    late = tuple(late_s * k for k in (1.0, 0.95, 0.97, 0.0, 0.98, 0.96, 0.99, 0.97))
    for seed in range(6):
        ran = job(tmp_path, policy, ConstantSlowness(8.0), 16, seed, late)
        shares = [of[0] for _, of in ran.steps]
        assert shares[0] == BATCH and max(shares[1:]) <= 0.4 * BATCH and max(shares[4:]) <= BATCH / 6, (seed, ran.steps)
        assert ran.wall_s <= 1.13 * (8 + 15 * 8 / 7) * BATCH * SAMPLE_S, (seed, ran.steps)
        assert len(ran.plans) <= 5 and ran.left == EPOCHS * SAMPLES


@pytest.mark.parametrize("policy", ["shared", "exclusive"])
def test_spells_never_make_it_slower_than_doing_nothing(tmp_path: Path, policy: str) -> None:
    unit = BATCH * SAMPLE_S
    for pattern in (lambda: Spells(8.0, 30 * unit, 230 * unit, 1), lambda: Spells(20.0, 2 * unit, 200 * unit, 2)):
        ran = job(tmp_path, policy, pattern(), 80, 1)
        assert nothing_done_s(pattern(), 80) >= 0.98 * ran.wall_s, (pattern(), ran.steps)
