"""`everstep estimate` against the truth: rows of tables, peak memory of each role and samples/s.

Each round estimates each job at one size from its probe, and then runs the whole job at that size. The jobs are the
five examples, and seven models of 10 MB to 2 GB (``_sized_script.py``): tables of random keys with the state of Adam,
and dense layers, on the ps or on each worker. Each trains for 15 to 40 s: a probe does not count the first batches, so
a job of seconds would say little of its estimate. Together they have each size of one or two workers and one to three
ps. The truth of rows is what the job's model holds. That of peaks and samples/s is what the history says; of a worker
of an example it is the peak before its last batch: what a script does behind its loop (a test, a baseline) is not part
of an estimate. The seven models do nothing there: of theirs the writing of the model counts. An error is
``|estimate / truth - 1|``; the rows of an example are those of its worst table, and ``scan_s`` says how many seconds
the scan of its keys took. ``a_a`` has no aim: in the first of several rounds each job runs twice, and it says how far
the two rates are apart. ``--quick``: one example, one round. ``EVERSTEP_ESTIMATE_JOBS=flights,sparse_2gb``: these only;
``EVERSTEP_ESTIMATE_ROUNDS=1``: one round of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from benchmarks._measure import each_round, median, say, spread
from everstep.cli.link import ask_view
from everstep.errors import EverstepError
from everstep.model.member import Role

REPO: Final = Path(__file__).resolve().parent.parent
SIZED: Final = "benchmarks/_sized_script.py"
JOBS: Final[dict[str, tuple[list[str], int, int]]] = {
    "flights": (["examples/01_flights_dlrm.py", "--epochs", "5"], 1, 1),
    "deepfm": (["examples/02_flights_deepfm.py", "--epochs", "7"], 2, 1),
    "bandit": (["examples/03_open_bandit.py", "--epochs", "50"], 1, 2),
    "fashion": (["examples/04_fashion_mnist.py", "--epochs", "20"], 2, 0),
    "gpt": (["examples/05_gpt.py"], 1, 0),
    "sparse_10mb": ([SIZED, "sparse", "45000", "400000", "10"], 2, 2),
    "sparse_100mb": ([SIZED, "sparse", "450000", "600000", "5"], 1, 3),
    "sparse_500mb": ([SIZED, "sparse", "2200000", "800000", "4"], 2, 3),
    "sparse_2gb": ([SIZED, "sparse", "9000000", "2500000", "2"], 2, 2),
    "dense_10mb": ([SIZED, "dense", "450", "40000", "5"], 1, 1),
    "dense_100mb": ([SIZED, "dense", "1450", "20000", "3", "allreduce"], 2, 0),
    "dense_400mb": ([SIZED, "dense", "2900", "6000", "3", "allreduce"], 1, 0),
}
"""Script and arguments, workers, ps; 0: mode allreduce. The size in a name is that of parameters and optimizer."""

CHOICE: Final = "EVERSTEP_ESTIMATE_JOBS"
ROUNDS: Final = "EVERSTEP_ESTIMATE_ROUNDS"
AIMS: Final = {"rows": 0.05, "worker_memory": 0.10, "ps_memory": 0.10, "samples_per_s": 0.15}
LIMIT_S: Final = 600.0
LOOK_S: Final = 0.5


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
        size = ["--workers", str(workers), *(["--ps", str(ps)] if ps else ["--mode", "allreduce"])]
        self.runs += 1
        run_dir = self.folder / f"run{self.runs}"
        told = json.loads(self._everstep("estimate", "--json", *size, *command))
        record, worker_peak = self._run(run_dir, size, command)
        figures = told["estimate"]["figures"]
        found = {
            "worker_memory": _error(
                figures["worker_memory"]["value"], record["worker_peak_bytes"] if command[0] == SIZED else worker_peak
            ),
            "samples_per_s": _error(figures["samples_per_s"]["value"], record["samples_per_s"]),
        }
        if ps:
            found["ps_memory"] = _error(figures["ps_memory"]["value"], record["ps_peak_bytes"])
        rows = {t["name"]: t["fixed"] or t["keys"]["likely"] for t in told["probes"][0]["script"]["tables"]}
        truth = _rows(run_dir / "model")
        if shared := rows.keys() & truth.keys():
            found["rows"] = max(_error(rows[name], truth[name]) for name in shared)
            found["scan_s"] = told["probes"][0]["script"]["scan_s"]
        shutil.rmtree(run_dir)
        if twice:
            again, _ = self._run(run_dir, [*size, "--model-to", "none"], command)
            found["a_a"] = _error(again["samples_per_s"], record["samples_per_s"])
            shutil.rmtree(run_dir)
        return found

    def _run(self, run_dir: Path, size: list[str], command: list[str]) -> tuple[dict[str, Any], int]:
        """Run a job; return its record in the history, and the peak of a worker before its last batch."""
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(self._everstep, "run", *size, "--run-dir", str(run_dir), "--no-display", *command)
            peaks: dict[int, int] = {0: 0}  # by the samples that were done
            while not wait([job], LOOK_S).done:
                with contextlib.suppress(EverstepError, OSError):  # (it is not up yet, or over)
                    view = ask_view(run_dir, timeout_s=1.0)
                    peaks[view.samples_done] = max([0, *(m.peak_bytes for m in view.members if m.role is Role.WORKER)])
            job.result()
            done = max(peaks)  # (these looks may be behind the loop)
            peak = max(bytes_ for samples, bytes_ in peaks.items() if samples < done or not done)
        (record,) = json.loads(self._everstep("history", "show", "--json", "--limit", "1"))
        found: dict[str, Any] = record
        return found, peak


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
    rounds = 1 if quick else int(os.environ.get(ROUNDS, "5"))
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-estimates-") as folder:
        estimates = Estimates(Path(folder))
        for number in each_round(rounds):
            for name, (command, workers, ps) in jobs.items():
                errors = estimates.errors(command, workers, ps, number == 0 and rounds > 1)
                say(f"round {number}: {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in errors.items()))
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
