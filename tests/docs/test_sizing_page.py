"""Every command of docs/sizing.md is run, in the order of the page: real jobs leave records, and estimates use them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
LINES = [line for block in PAGE.split("```")[1::2] if block.startswith("sh\n") for line in block.splitlines()[1:]]
RUNS = [
    line for line in LINES if line.startswith("everstep run --workers") and "auto" not in line and "memory" not in line
]
SIZED = LINES[next(i for i, line in enumerate(LINES) if "--workers auto" in line) :]
ESTIMATES = [line for line in LINES if line.startswith("everstep estimate") and "--no-run" not in line]
SAMPLES = 12_000
SCRIPT = f"""
import time
import numpy as np, torch
import everstep as es
from torch import nn

rng = np.random.default_rng(0)
ids = rng.integers(0, 500, ({SAMPLES}, 2))
data = {{"ids": ids, "label": (ids.sum(1) % 2).astype(np.float32)}}
job = es.join()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = es.nn.Embedding("ids", 4), nn.Linear(8, 1)
    def forward(self, b):
        return self.out(self.rows(b["ids"]).flatten(1)).squeeze(1)

model = job.replicate(job.sparse(Net()))
opt = job.optimizer(torch.optim.Adam(model.parameters()))
for batch in job.steps(job.loader(data, batch_size=100, epochs=1)):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.03)
"""


class Reader:
    """Types the commands of the page in a folder with a script and a history of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = folder / "history.sqlite"
        (folder / "train.py").write_text(SCRIPT)

    def type(self, line: str) -> str:
        words = shlex.split(line)
        assert words[0] == "everstep", line
        done = subprocess.run(
            [sys.executable, "-m", "everstep.cli", *words[1:]],
            cwd=self.folder,
            env={**os.environ, "EVERSTEP_HISTORY": str(self.history), "TMPDIR": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    def records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.type("everstep history show --json"))
        return found


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def test_every_verb_and_flag_exists() -> None:
    assert len(LINES) >= 8
    for line in LINES:
        _, verb, *words = shlex.split(line)
        known = {flag for option in cli.commands[verb].params for flag in option.opts} | {"--all"}
        assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_leave_records_that_estimates_use(reader: Reader) -> None:
    said = {line: reader.type(line) for line in RUNS}
    assert len(said) == 2 and all("done: 12,000 samples" in text for text in said.values()), said
    first, second = reader.records()
    for record, workers in ((first, 1), (second, 2)):
        assert (record["script"], record["mode"], record["workers"], record["ps"]) == ("train.py", "ps", workers, 1)
        assert (record["phase"], record["exit_code"], record["samples"], record["epochs"]) == ("done", 0, SAMPLES, 1)
        assert record["came"]["workers"] == workers and record["planned"]["workers"] == workers
        assert record["worker_peak_bytes"] > record["ps_peak_bytes"] > 1 << 20, "seen while it trained"
        assert 0 < record["training_s"] <= record["wall_s"]
        assert record["model_bytes"] > 0
        most = workers * 100 / 0.03  # samples/s: the script sleeps so long with each batch of 100
        assert 0 < record["samples_per_s"] <= 1.25 * most
    assert first["script_id"] == second["script_id"] and first["args_id"] == second["args_id"]
    assert "nn.Linear" not in str(reader.history.read_bytes()), "nothing of the code"

    for line in [one for one in LINES if one not in (*RUNS, *ESTIMATES, *SIZED)] + LINES[-1:]:
        text = reader.type(line)
        if line == "everstep history":
            assert [words.split()[0] for words in text.splitlines()[1:]] == ["1", "2"], text
        elif line.endswith("show 1"):
            assert "12,000" in text and "peak of a worker" in text
        elif "compare" in line:
            assert "job 1" in text and "job 2" in text and "samples/s" in text
        elif "--no-run" in line:
            assert "history: from job 1 (the same script, arguments and machine; 1 workers, 1 ps)" in text
            assert "history: from job 2" in text and "no tables" not in text
        elif "--policy memory" in line:
            assert "done: 12,000 samples" in text
        elif line.endswith("forget 1"):
            assert [record["number"] for record in reader.records()] == [2]
    assert reader.records() == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_estimates_of_the_page(reader: Reader) -> None:
    for line in ESTIMATES:
        text = reader.type(line)
        if "--json" in line:
            size = json.loads(text)["estimate"]["size"]
            assert (size["ps"], size["workers"] <= 4) == (2, True), "parity 1+1 needs two"
        else:
            assert "estimate for mode ps" in text and "what binds" in text, text
    assert reader.records() == [], "probes leave no record"
    assert not list(reader.folder.glob("everstep-estimate-*"))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sizes_of_the_page(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_WINDOW_S", "1")
    said = [reader.type(line) for line in SIZED]
    assert "auto: begins with 1 workers and 1 ps (no earlier job says more); --max-workers 3, --max-ps 2" in said[0]
    assert "done: 12,000 samples" in said[0] and "1 jobs forgotten" in said[-1]


def test_the_job_file_of_the_page_asks_for_sizes() -> None:
    text = next(block.removeprefix("yaml\n") for block in PAGE.split("```") if block.startswith("yaml\n"))
    settings = dict(line.split(": ") for line in text.splitlines())
    flags = {word.removeprefix("--").replace("-", "_") for line in SIZED for word in line.split() if word[:2] == "--"}
    known = {option.name for option in cli.commands["run"].params}
    assert settings["workers"] == settings["ps"] == "auto"
    assert settings.keys() <= known and {"max_workers", "max_ps", "optimize"} <= settings.keys() & flags
