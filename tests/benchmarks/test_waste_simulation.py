"""The simulation of waste: what is assumed holds in it, and strategies differ as they must."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def waste(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import waste

    return waste


def jobs(waste: ModuleType) -> list[object]:
    sizes = (((8, 6), (8.0, 32.0)), ((6, 12), (8.0, 16.0)), ((12, 4), (4.0, 64.0)))
    return [waste.Request(size, cores) for size, cores in sizes]


def test_requests_are_the_recorded_ones(waste: ModuleType) -> None:
    found = waste.requests()
    assert len(found) == 94 and found[0] == waste.Request((6, 7), (8.0, 96.0))


def test_more_than_the_useful_size_brings_little(waste: ModuleType) -> None:
    for factor in (1.0, 2.0, 4.0):
        truth = waste.truth_of(waste.Request((20, 20), (8.0, 8.0)), factor, random.Random(3))
        knee = round(truth.own_s * 1e3), round(truth.ps_s * 1e3)
        assert 0.75 * 20 / factor <= knee[0] <= 1.3 * 20 / factor
        twice = 2 * knee[0], 2 * knee[1]
        assert truth.rate(twice) / truth.rate(knee) < 1.35 < truth.rate(knee) / truth.rate((-(-knee[0] // 3), knee[1]))


def test_what_is_used_is_never_more_than_what_is_there(waste: ModuleType) -> None:
    truth, request = waste.Truth(4e-3, 1e-3, 3e-3), waste.Request((8, 6), (8.0, 32.0))
    for size in ((1, 1), (4, 3), (12, 12), (1, 9)):
        assert 0 < truth.rate(size) * truth.cores_s(request) < request.cores_of(size)


def test_static_requests_waste_more_the_more_is_asked_for(waste: ModuleType) -> None:
    found = [waste.simulate(waste.static, factor, jobs(waste), 1).waste for factor in (1.0, 2.0, 4.0)]
    assert found == sorted(found) and found[2] > 0.6 and found[0] < 0.3


@pytest.mark.parametrize("name", ["each_role", "elastic"])
def test_elastic_jobs_waste_less_where_users_ask_for_too_much(waste: ModuleType, name: str) -> None:
    strategy = getattr(waste, name)
    asked, fewer = (waste.simulate(each, 3.0, jobs(waste), 1) for each in (waste.static, strategy))
    assert fewer.waste < 0.7 * asked.waste
    assert fewer == waste.simulate(strategy, 3.0, jobs(waste), 1)
