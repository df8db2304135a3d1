"""Third-party models in jobs that are killed at work train what plain PyTorch trains: as recorded, and anew."""

from __future__ import annotations

import pytest

from meaning.third_party import MODELS
from meaning.third_party_jobs import MODES, PAGE, SAME, look, page, recorded


@pytest.mark.parametrize(("mode", "models", "packages"), [("allreduce", 12, 6), ("ps", 12, 6)])
def test_most_models_are_within_the_spread_of_seeds(mode: str, models: int, packages: int) -> None:
    found = [one for one in recorded().values() if one["mode"] == mode and not one["refused"]]
    same = [one for one in found if max(one["curve_spread"], one["metric_spread"]) <= SAME]
    assert len(same) >= models
    assert len({MODELS[one["model"]].package for one in same}) >= packages
    for one in same:
        assert one["seeds"] >= 3 and all(one["kills"]) and one["learns"], one["model"]


def test_the_page_is_what_is_recorded() -> None:
    assert PAGE.read_text() == page(recorded()), "python tests/meaning/third_party_jobs.py --page"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_jobs_with_kills_is_within_the_spread_of_three_seeds(name: str, mode: str) -> None:
    missing = MODELS[name].missing()
    if missing:
        pytest.skip(missing)
    found = look(name, mode, range(1, 4))
    known = recorded().get(f"{name} {mode}", {})
    if known.get("refused"):
        assert found.refused == known["refused"]
        return
    assert not found.refused and all(found.kills)
    if known and max(known["curve_spread"], known["metric_spread"]) > SAME:
        return  # recorded as beyond the spread
    assert max(found.curve_spread, found.metric_spread) <= 1.5 * SAME


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_a_wrong_gradient_of_one_percent_in_one_model_with_kills_is_caught() -> None:
    """Worker 1's gradients are 2 % too large: 1 % of the whole."""
    import numpy as np

    from meaning.curves import compare
    from meaning.third_party_jobs import job, plain

    name = "deepctr_autoint"
    if MODELS[name].missing():
        pytest.skip(MODELS[name].missing())
    seeds = range(1, 6)
    right, wrong = ([plain(name, "allreduce", s, by) for s in seeds] for by in (0.0, 0.01))
    got = [job(name, "allreduce", s, int(p.killed), too_large=0.02) for s, p in zip(seeds, right, strict=True)]
    p, w, g = (np.array([c.losses for c in curves]) for curves in (right, wrong, got))
    assert compare(p, w, g).wrong
