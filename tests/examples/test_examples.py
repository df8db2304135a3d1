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
    fashion, shakespeare = module("fashion"), module("shakespeare")
    for which, rows in (("train", 2000), ("t10k", 500)):
        pictures = fashion.read(fashion.SAMPLE, which)
        assert pictures["image"].shape == (rows, 1, 28, 28) and set(pictures["label"]) == set(range(10))
    text, alphabet = shakespeare.letters()
    assert len(text) == 1_115_394 and len(alphabet) == 65
    assert sum(p.stat().st_size for p in (EXAMPLES / "data").rglob("*")) < 6e6


def test_flights_have_16_fields_and_about_62_000_keys(module: Any) -> None:
    flights = module("flights")
    loader = Loader(flights.source(), 4096, columns=flights.COLUMNS, transform=flights.features, shuffle=False)
    batch = loader.read(0, 0, loader.samples)
    assert batch["cat"].shape == (327_346, flights.N_FIELDS) and flights.N_FIELDS == 16
    assert batch["dense"].shape[1] == flights.N_DENSE and bool(batch["dense"].isfinite().all())
    assert 60_000 < len(batch["cat"].unique()) < 65_000
    assert not (set(batch["cat"][:, 0].tolist()) & set(batch["cat"][:, 1].tolist()))


def environment() -> dict[str, str]:
    """Tests share the cores; more threads would spin for each other."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def output(script: str, folder: Path, *args: str) -> str:
    """Run one example alone; what it says."""
    done = subprocess.run(
        [sys.executable, "-X", "fork", str(EXAMPLES / script), *args],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run(script: str, folder: Path, *args: str) -> tuple[float, float]:
    """Its test AUC and its baseline's."""
    found = re.search(r"test AUC ([\d.]+) .*?([\d.]+) \(logistic", said := output(script, folder, *args))
    assert found, said
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


def test_a_picture_file_that_is_not_there_says_how_to_get_it(module: Any, tmp_path: Path) -> None:
    fashion = module("fashion")
    with pytest.raises(SystemExit, match=r"No such file.*apt-get install dataset-fashion-mnist"):
        fashion.read(tmp_path, "train")
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (tmp_path / name).write_bytes((fashion.SAMPLE / name).read_bytes()[:-1000])
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        fashion.read(tmp_path, "train")
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (tmp_path / name).write_bytes((fashion.SAMPLE / "t10k-labels-idx1-ubyte.gz").read_bytes())
    with pytest.raises(SystemExit, match="not the IDX file"):
        fashion.read(tmp_path, "train")


@pytest.mark.processes
def test_pictures_are_told_apart_alone(tmp_path: Path) -> None:
    found = re.search(r"test accuracy ([\d.]+) .*?([\d.]+) \(nearest", output("04_fashion_mnist.py", tmp_path))
    assert found and float(found[1]) > 0.78 > 0.7 > float(found[2]) > 0.65


@pytest.mark.processes
def test_a_piece_of_shakespeare_alone(tmp_path: Path) -> None:
    args = ("--rows", "640", "--length", "32", "--width", "32", "--layers", "1", "--lr", "0.01")
    found = re.search(r"test loss ([\d.]+) .*?([\d.]+) \(last", output("05_gpt.py", tmp_path, *args))
    assert found and float(found[1]) < 3.3 and 2.4 < float(found[2]) < 2.5


@pytest.mark.slow
@pytest.mark.processes
def test_a_piece_of_shakespeare_in_stages_alone(tmp_path: Path) -> None:
    args = ("--rows", "640", "--length", "32", "--width", "32", "--layers", "1", "--lr", "0.01")
    found = re.search(r"test loss ([\d.]+) .*?([\d.]+) \(last", output("06_gpt_pipeline.py", tmp_path, *args))
    assert found and float(found[1]) < 3.3 and 2.4 < float(found[2]) < 2.5


@pytest.mark.processes
def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    for args, words in [
        (("--batch-size", "0"), "batch_size=0"),
        (("--rows", "50"), "larger than its 45 training rows"),
    ]:
        done = subprocess.run(
            [sys.executable, "-X", "fork", str(EXAMPLES / "01_flights_dlrm.py"), *args],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode != 0 and words in done.stderr.splitlines()[-1], done.stderr
