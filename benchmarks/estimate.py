"""`everstep estimate` against the truth: rows of tables, peak memory of each role and samples/s of the examples.

Each round estimates each example at one size from its probe, and then runs the whole job at that size, on the first
40,000 rows of its data, twice. The truth of rows is what the job's model holds. That of peaks and samples/s is what the
history says. An error is ``|estimate / truth - 1|``; the rows of an example are those of its worst table. ``--quick``:
one example, one round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from benchmarks._measure import each_round, median, say, spread

REPO: Final = Path(__file__).resolve().parent.parent
JOBS: Final[dict[str, tuple[list[str], int, int]]] = {
    "flights": (["examples/01_flights_dlrm.py", "--rows", "40000", "--epochs", "2"], 1, 1),
    "deepfm": (["examples/02_flights_deepfm.py", "--rows", "40000", "--epochs", "2"], 2, 1),
    "bandit": (["examples/03_open_bandit.py", "--rows", "40000", "--epochs", "2"], 1, 2),
}
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

    def errors(self, command: list[str], workers: int, ps: int) -> dict[str, float]:
        """Return the error of each figure of a job of this size."""
        size = ["--workers", str(workers), "--ps", str(ps)]
        self.runs += 1
        run_dir = self.folder / f"run{self.runs}"
        told = json.loads(self._everstep("estimate", "--json", *size, *command))
        self._everstep("run", *size, "--run-dir", str(run_dir), "--no-display", *command)
        (record,) = json.loads(self._everstep("history", "show", "--json", "--limit", "1"))
        figures = told["estimate"]["figures"]
        found = {
            "worker_memory": _error(figures["worker_memory"]["value"], record["worker_peak_bytes"]),
            "ps_memory": _error(figures["ps_memory"]["value"], record["ps_peak_bytes"]),
            "samples_per_s": _error(figures["samples_per_s"]["value"], record["samples_per_s"]),
        }
        rows = {t["name"]: t["fixed"] or t["keys"]["likely"] for t in told["probes"][0]["script"]["tables"]}
        truth = _rows(run_dir / "model")
        if shared := rows.keys() & truth.keys():
            found["rows"] = max(_error(rows[name], truth[name]) for name in shared)
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
    jobs = dict(list(JOBS.items())[:1]) if quick else JOBS
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-estimates-") as folder:
        estimates = Estimates(Path(folder))
        for number in each_round(1 if quick else 5):
            for name, (command, workers, ps) in jobs.items():
                errors = estimates.errors(command, workers, ps)
                say(f"round {number}: {name}: " + ", ".join(f"{k} {100 * v:.1f} %" for k, v in errors.items()))
                for figure, error in errors.items():
                    seen.setdefault(f"{name}.{figure}", []).append(error)
    figures = {name: median(values) for name, values in seen.items()}
    limits = {name: AIMS[name.partition(".")[2]] for name in figures}
    return {
        "figures": figures,
        "aims": {name: f"<= {limit:g}" for name, limit in limits.items()},
        "holds": {name: figures[name] <= limit for name, limit in limits.items()},
        "spread": {name: spread(values) for name, values in seen.items()},
    }
