"""Policies under virtual time: what the benchmark ``stragglers`` claims, on shorter jobs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from everstep.policies.stragglers.exclusive import exclusive
from everstep.policies.stragglers.policy import Policy, none
from everstep.policies.stragglers.shared import Settings, shared
from everstep.sim.stragglers import BATCH, ConstantSlowness, Spells, asynchronous, ceiling, synchronous, with_backup

SPLITS: Policy = partial(shared, settings=Settings(budget=0))
SAMPLES = 300 * 4 * BATCH


@pytest.mark.parametrize("policy", [SPLITS, exclusive])
def test_a_lasting_straggler_costs_little_more_than_it_must(policy: Policy) -> None:
    base = synchronous(ConstantSlowness(4), 4, SAMPLES).wall
    found = synchronous(ConstantSlowness(4), 4, SAMPLES, policy, window=3.0)
    assert base / found.wall > 0.92 * ceiling(4, 4)
    assert 1 <= len(found.plans) <= 3 and not found.restarts


def test_replacing_it_is_faster_still_where_that_pays() -> None:
    whole: Policy = partial(shared, settings=Settings(restart_s=30.0))
    found = synchronous(ConstantSlowness(4), 4, SAMPLES, whole, window=3.0)
    assert found.restarts == 1
    assert found.wall < synchronous(ConstantSlowness(4), 4, SAMPLES, SPLITS, window=3.0).wall
    short = synchronous(ConstantSlowness(4), 4, SAMPLES // 20, whole, window=3.0)
    assert short.restarts == 0, "the job is over before it would have paid"


@pytest.mark.parametrize("policy", [SPLITS, exclusive])
@pytest.mark.parametrize("window", [3.0, 10.0, 30.0, 60.0])
def test_spells_never_make_it_slower_than_doing_nothing(policy: Policy, window: float) -> None:
    for s, spell in ((4.0, 30.0), (8.0, 10.0)):
        base = synchronous(Spells(s, spell, 8 * spell, 1), 4, SAMPLES).wall
        found = synchronous(Spells(s, spell, 8 * spell, 1), 4, SAMPLES, policy, window=window)
        assert base / found.wall >= 0.98, (s, spell, window)


@pytest.mark.parametrize("job", [1, 2])
def test_nothing_is_done_in_calm_jobs_of_a_real_cluster(job: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks.stragglers import recorded

    found = synchronous(recorded(job, width=10.0), 10, 3000 * 10 * BATCH // 10, shared, window=30.0)
    assert found.plans == [] and found.refused == ""


def test_plain_jobs_take_what_arithmetic_says() -> None:
    healthy = synchronous(ConstantSlowness(1), 4, SAMPLES).wall
    assert healthy == pytest.approx(300 * 1.02)
    assert synchronous(ConstantSlowness(1), 4, SAMPLES, none).wall == healthy
    assert synchronous(ConstantSlowness(4), 4, SAMPLES).wall == pytest.approx(300 * 4.02)
    assert with_backup(ConstantSlowness(4), 4, SAMPLES).wall == pytest.approx(400 * 1.02)
    assert asynchronous(ConstantSlowness(4), 4, SAMPLES, shared=False).wall == pytest.approx(300 * 4 * 1.02)
    assert asynchronous(ConstantSlowness(4), 4, SAMPLES, shared=True).wall == pytest.approx(
        1200 * 1.02 / 3.25, rel=0.02
    )
