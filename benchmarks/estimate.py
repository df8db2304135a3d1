"""`everstep estimate` against the truth: rows of tables, peak memory of each role and samples/s.

Each round estimates each job at one size from its probe, and then runs the whole job at that size. The jobs are the
five examples, on a part of their data, and seven models of 10 MB to 2 GB (``_sized_script.py``): tables of random keys
with the state of Adam, and dense layers, on the ps or on each worker. Together they have each size of one or two
workers and one to three ps. The truth of rows is what the job's model holds. That of peaks and samples/s is what the
history says. An error is ``|estimate / truth - 1|``; the rows of an example are those of its worst table. ``a_a`` has
no aim: in the first round each job runs twice, and it says how far the two rates are apart. ``--quick``: one example,
one round. ``EVERSTEP_ESTIMATE_JOBS=flights,sparse_2gb``: these only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from benchmarks._measure import each_round, median, say, spread

REPO: Final = Path(__file__).resolve().parent.parent
SIZED: Final = "benchmarks/_sized_script.py"
ROWS: Final = ["--rows", "40000", "--epochs", "4"]
JOBS: Final[dict[str, tuple[list[str], int, int]]] = {
    "flights": (["examples/01_flights_dlrm.py", *ROWS], 1, 1),
    "deepfm": (["examples/02_flights_deepfm.py", *ROWS], 2, 1),
    "bandit": (["examples/03_open_bandit.py", *ROWS], 1, 2),
    "fashion": (["examples/04_fashion_mnist.py", "--epochs", "20"], 2, 0),
    "gpt": (["examples/05_gpt.py"], 1, 0),
    "sparse_10mb": ([SIZED, "sparse", "45000", "400000"], 2, 2),
    "sparse_100mb": ([SIZED, "sparse", "450000", "600000"], 1, 3),
    "sparse_500mb": ([SIZED, "sparse", "2200000", "800000"], 2, 3),
    "sparse_2gb": ([SIZED, "sparse", "9000000", "2500000"], 2, 2),
    "dense_10mb": ([SIZED, "dense", "450", "40000"], 1, 1),
    "dense_100mb": ([SIZED, "dense", "1450", "20000", "allreduce"], 2, 0),
    "dense_400mb": ([SIZED, "dense", "2900", "6000", "allreduce"], 1, 0),
}
"""Script and arguments, workers, ps; 0: mode allreduce. The size in a name is that of parameters and optimizer."""

CHOICE: Final = "EVERSTEP_ESTIMATE_JOBS"
AIMS: Final = {"rows": 0.05, "worker_memory": 0.10, "ps_memory": 0.10, "samples_per_s": 0.15}
LIMIT_S: Final = 600.0


class Estimates:
    """Estimates examples and runs them, with a history of its own in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = folder / "history.sqlite"
        self.runs = 0

    def _everstep(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "everstep.cli", *words],
            cwd=REPO,
            env={**os.environ, "EVERSTEP_HISTORY": str(self.history)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"everstep {' '.join(words)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout

    def errors(self, command: list[str], workers: int, ps: int, twice: bool) -> dict[str, float]:
        """Return the error of each figure of a job of this size. ``twice``: run it twice, for ``a_a``."""
        size = ["--workers", str(workers), *(["--ps", str(ps)] if ps else [])]
        self.runs += 1
        run_dir = self.folder / f"run{self.runs}"
        told = json.loads(self._everstep("estimate", "--json", *size, *command))
        record = self._run(run_dir, size, command)
        figures = told["estimate"]["figures"]
        found = {
            "worker_memory": _error(figures["worker_memory"]["value"], record["worker_peak_bytes"]),
            "samples_per_s": _error(figures["samples_per_s"]["value"], record["samples_per_s"]),
        }
        if ps:
            found["ps_memory"] = _error(figures["ps_memory"]["value"], record["ps_peak_bytes"])
        rows = {t["name"]: t["fixed"] or t["keys"]["likely"] for t in told["probes"][0]["script"]["tables"]}
        truth = _rows(run_dir / "model")
        if shared := rows.keys() & truth.keys():
            found["rows"] = max(_error(rows[name], truth[name]) for name in shared)
        shutil.rmtree(run_dir)
        if twice:
            again = self._run(run_dir, [*size, "--model-to", "none"], command)
            found["a_a"] = _error(again["samples_per_s"], record["samples_per_s"])
            shutil.rmtree(run_dir)
        return found

    def _run(self, run_dir: Path, size: list[str], command: list[str]) -> dict[str, Any]:
        """Run a job; return its record in the history."""
        self._everstep("run", *size, "--run-dir", str(run_dir), "--no-display", *command)
        (record,) = json.loads(self._everstep("history", "show", "--json", "--limit", "1"))
        found: dict[str, Any] = record
        return found


def _error(told: float, truth: float) -> float:
    return abs(told / truth - 1)


def _rows(model: Path) -> dict[str, int]:
    """Return the rows of each table that a job left."""
    found = {}
    for path in (model / "tables").glob("*.safetensors"):
        with safe_open(path, "np") as file:
            if "keys" in file.keys():  # noqa: SIM118 (it is no dict)
                (found[path.stem],) = file.get_slice("keys").get_shape()
    return found


def run(quick: bool) -> dict[str, Any]:
    names = [name for name in os.environ.get(CHOICE, "").split(",") if name] or list(JOBS)[: 1 if quick else None]
    if unknown := [name for name in names if name not in JOBS]:
        raise SystemExit(f"{CHOICE}: no job {unknown[0]!r}; there are {', '.join(JOBS)}")
    jobs = {name: JOBS[name] for name in names}
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-estimates-") as folder:
        estimates = Estimates(Path(folder))
        for number in each_round(1 if quick else 5):
            for name, (command, workers, ps) in jobs.items():
                errors = estimates.errors(command, workers, ps, number == 0 and not quick)
                say(f"round {number}: {name}: " + ", ".join(f"{k} {100 * v:.1f} %" for k, v in errors.items()))
                for figure, error in errors.items():
                    seen.setdefault(f"{name}.{figure}", []).append(error)
    figures = {name: median(values) for name, values in seen.items()}
    limits = {name: AIMS[kind] for name in figures if (kind := name.partition(".")[2]) in AIMS}
    return {
        "figures": figures,
        "aims": {name: f"<= {limit:g}" for name, limit in limits.items()},
        "holds": {name: figures[name] <= limit for name, limit in limits.items()},
        "spread": {name: spread(values) for name, values in seen.items()},
    }
