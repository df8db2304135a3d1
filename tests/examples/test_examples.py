"""The examples run as they are, alone, and reach what their text says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from everstep.data.loader import Loader

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_auc_is_exact(module: Any) -> None:
    from sklearn.metrics import roc_auc_score

    auc = module("scoring").auc
    rng = np.random.default_rng(0)
    for ties in (3, 50, 10**9):
        scores = (rng.integers(0, ties, 2000) / ties).astype(np.float32)
        labels = (rng.random(2000) < scores * 0.8).astype(np.float32)
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert np.isnan(auc(np.ones(3, np.float32), np.ones(3, np.float32)))


def test_the_data_is_what_its_readme_says(module: Any) -> None:
    flights = pq.read_table(EXAMPLES / "data" / "flights.parquet")
    assert flights.num_rows == 327_346
    assert not {"dep_time", "dep_delay", "arr_time", "air_time"} & set(flights.column_names)
    assert np.mean(flights["arr_delay"].to_numpy() > 15) == pytest.approx(0.237, abs=0.001)
    bandit = pq.read_table(EXAMPLES / "data" / "open_bandit.parquet")
    assert bandit.num_rows == 60_000 and bandit["click"].to_numpy().sum() == 287
    assert sum(p.stat().st_size for p in (EXAMPLES / "data").iterdir()) < 6e6


def test_flights_have_16_fields_and_about_62_000_keys(module: Any) -> None:
    flights = module("flights")
    loader = Loader(flights.source(), 4096, columns=flights.COLUMNS, transform=flights.features, shuffle=False)
    batch = loader.read(0, 0, loader.samples)
    assert batch["cat"].shape == (327_346, flights.N_FIELDS) and flights.N_FIELDS == 16
    assert batch["dense"].shape[1] == flights.N_DENSE and bool(batch["dense"].isfinite().all())
    assert 60_000 < len(batch["cat"].unique()) < 65_000
    assert not (set(batch["cat"][:, 0].tolist()) & set(batch["cat"][:, 1].tolist()))


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests share the cores; more threads would spin for each other


def run(script: str, folder: Path, *args: str) -> tuple[float, float]:
    """Run one example alone; its test AUC and its baseline's."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *args],
        cwd=folder, env=ENV, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"test AUC ([\d.]+) .*?([\d.]+) \(logistic", done.stdout)
    assert found, done.stdout
    return float(found[1]), float(found[2])


@pytest.mark.processes
def test_flights_dlrm_reaches_its_bar(tmp_path: Path) -> None:
    auc, baseline = run("01_flights_dlrm.py", tmp_path)
    assert auc >= 0.79 and auc > baseline > 0.75


@pytest.mark.processes
@pytest.mark.slow
def test_flights_deepfm_reaches_its_bar(tmp_path: Path) -> None:
    auc, baseline = run("02_flights_deepfm.py", tmp_path)
    assert auc >= 0.79 and auc > baseline > 0.75


@pytest.mark.processes
@pytest.mark.parametrize("script", ["02_flights_deepfm.py", "03_open_bandit.py"])
def test_a_few_rows_of_the_others(script: str, tmp_path: Path) -> None:
    auc, baseline = run(script, tmp_path, "--rows", "12000", "--epochs", "2", "--batch-size", "500")
    assert 0.3 < auc < 1 and 0.3 < baseline < 1


@pytest.mark.processes
def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    for args, words in [
        (("--batch-size", "0"), "batch_size=0"),
        (("--rows", "50"), "larger than its 45 training rows"),
    ]:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "01_flights_dlrm.py"), *args],
            cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode != 0 and words in done.stderr.splitlines()[-1], done.stderr
