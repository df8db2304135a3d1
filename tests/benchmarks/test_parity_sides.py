"""Sides and sizes of ``parity_overhead``: each is compared with what runs without protection in its own group."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    return importlib.import_module("benchmarks.parity_overhead")


def test_each_side_brings_along_what_it_is_compared_with(bench: Any) -> None:
    assert list(bench.chosen("two_parity_acked")) == ["two_none", "two_parity_acked"]
    assert list(bench.chosen("spare_parity_lag_2s,replica")) == [
        "none",
        "replica",
        "spare_none",
        "spare_parity_lag_2s",
    ]
    assert bench.chosen("").keys() == bench.SIDES.keys()
    with pytest.raises(SystemExit, match="no side is called"):
        bench.chosen("parity_lag_3s")


def test_sizes_are_read_or_refused(bench: Any) -> None:
    assert bench.sizes("16x2048,64x8192") == [(16, 2048), (64, 8192)]
    for wrong in ("16", "x2048", "16x", "0x5", "16x2048,", "16x-1", "16 x 2048"):
        with pytest.raises(SystemExit, match="is no size; give dim x batch, such as 16x2048"):
            bench.sizes(wrong)


def test_a_size_is_compared_with_its_own(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run, with measurements that are made up from the side's name."""

    asked: list[tuple[int, int, str]] = []

    def side(config: object, flags: list[str], settings: str) -> dict[str, float]:
        size = (config.dim, config.batch)  # type: ignore[attr-defined]
        lag = float(flags[-1].removesuffix("s")) if "--protect-lag" in flags else 0.0
        asked.append((*size, flags[-1] if flags else ""))
        speed = 1000.0 * size[0] * (0.9 + lag / 100 if lag else 1.0)
        return {"samples_per_s": speed, "cpu_s_per_million": 50.0 + lag, "ps_cpu_ms_per_batch": 5.0 + lag}

    monkeypatch.setattr(bench, "side", side)
    monkeypatch.setattr(bench, "_make_data", lambda config: None)
    found = bench.run(True, ["--curve"])
    figures = found["figures"]
    assert {size[:2] for size in asked} == {(16, 2048), (16, 8192), (64, 2048), (64, 8192)}
    assert figures["parity_lag_2s_of_none"] == pytest.approx(0.92)
    assert figures["dim64_b8192.parity_lag_8s_of_none"] == pytest.approx(0.98)
    assert figures["dim64_b2048.none.samples_per_s"] == pytest.approx(64_000.0)
    assert "parity_lag_2s_of_none" in found["aims"] and not found["holds"]["parity_lag_2s_of_none"]
    assert not any("acked" in name or "bytes" in name for name in figures)


def test_what_another_group_measured_does_not_count(bench: Any) -> None:
    of = {"samples_per_s": 100.0, "cpu_s_per_million": 1.0, "ps_cpu_ms_per_batch": 1.0}
    rounds = bench.Rounds(["none", "two_none", "two_parity_lag_2s"])
    rounds["none"].append(of | {"samples_per_s": 1000.0})
    rounds["two_none"].append(of)
    rounds["two_parity_lag_2s"].append(of | {"samples_per_s": 97.5})
    figures: dict[str, float] = {}
    bench.compare(rounds, "", list(rounds), figures, {})
    assert figures["two_parity_lag_2s_of_none"] == pytest.approx(0.975)
    assert figures["none.samples_per_s"] == 1000.0


def test_steady_windows_are_at_least_two_lags_and_have_their_own_names(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: dict[float, float] = {}

    def steady(config: object, flags: list[str], settings: str, window_s: float) -> dict[str, float]:
        lag = bench.lag_s(flags)
        windows[lag] = window_s
        return {"samples_per_s": 100.0 - lag, "cpu_s_per_million": 50.0 + lag, "ps_cpu_ms_per_batch": 5.0}

    monkeypatch.setattr(bench, "steady", steady)
    monkeypatch.setattr(bench, "_make_data", lambda config: None)
    monkeypatch.setenv("EVERSTEP_OVERHEAD_ROUNDS", "1")
    monkeypatch.delenv("EVERSTEP_OVERHEAD_SIDES", raising=False)
    found = bench.run(False, ["--steady"])
    assert windows == {0.0: 14.0, 2.0: 14.0, 4.0: 14.0, 8.0: 16.0}
    assert found["figures"]["steady_parity_lag_2s_of_none"] == pytest.approx(0.98)
    assert found["figures"]["steady_parity_lag_4s.cpu_of_none"] == pytest.approx(54.0 / 50.0)
    assert found["holds"] == {f"steady_parity_lag_{lag}s_of_none": lag == 2 for lag in (2, 4, 8)}
    assert all(name.startswith("steady_") for name in found["figures"] if name != "load_before")


@pytest.mark.parametrize("names", ["parity", "parity,restore,partial", ""])
def test_recovery_has_the_figures_of_the_sides_that_ran(
    names: str, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery = importlib.import_module("benchmarks.recovery")
    parity = {"served_s": 0.04, "speed_until_protected": 0.5, "parity_lost_s": 0.5, "speed_10s": 0.95}
    for name, values in {
        "parity": parity | {"protected_over_bound": 1.0},
        "unpaced": {"unpaced_served_s": 0.05},
        "restore": {"restore_lost_s": 20.0, "restart_s": 5.0},
        "partial": {"partial_lost_s": 15.0},
    }.items():
        monkeypatch.setattr(recovery, name, lambda home, interval_s, values=values: values)
    if names:
        monkeypatch.setenv("EVERSTEP_RECOVERY_SIDES", names)
    found = recovery.run(True)
    assert found["holds"]["served_s"] and not found["holds"]["speed_until_protected"]
    assert ("restore_over_parity" in found["holds"]) == (names != "parity")
    assert found["figures"].get("restore_over_parity", 40.0) == 40.0
    monkeypatch.setenv("EVERSTEP_RECOVERY_SIDES", "parity,nothing")
    with pytest.raises(SystemExit, match="no side is called"):
        recovery.run(True)
