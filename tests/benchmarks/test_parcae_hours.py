"""The hours of a recording that ``spot_goodput`` shares with Parcae."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_a_job_that_restarts_loses_more_the_more_a_restart_costs_and_everstep_less_than_all() -> None:
    from benchmarks.spot_goodput import PARCAE, RESTARTS_S, _parcae

    found = _parcae(PARCAE["lh"])
    for who in ("restart", "varuna_like", "bamboo_like"):
        goodputs = [found[f"restart_{restart_s:.0f}s.{who}"] for restart_s in RESTARTS_S]
        assert goodputs == sorted(goodputs, reverse=True), who
        assert 0.0 < goodputs[-1] < goodputs[0] < found["everstep"] < 1.0, who
