"""Slow workers: every policy against doing nothing, on the same patterns; `--quick`: under virtual time only.

Figures are times of the synchronous job that does nothing over times of the one with the policy, for the same samples:
how many times faster. ``n`` workers of which one is ``s`` times slower: from the beginning (deterministic), from 10 %
of the healthy job on (persistent), or every one now and then (transient: spells of 30 healthy batches, 230 apart).
``ceiling`` is what dividing without loss can gain at best, ``(s (n-1) + 1) / n``. ``splits``: ``nondedicated`` without
restarts; windows are of 3 healthy batches where nothing else is said. ``traces``: recorded slow-downs of real jobs.
``day``: a day of a healthy job on the recorded one that has lasting stragglers. Not ours, for comparison: ``backup``
drops the slowest worker's gradients (and is charged for them), ``static`` is asynchronous with a fixed part each,
``shared`` asynchronous with shards for whoever is free. ``real`` figures (not quick): `everstep run`, real processes,
with a sleep of 4 ms for each sample in the place of an accelerator.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

from benchmarks._measure import Result, interleaved, say, spread
from everstep.policies.stragglers.dedicated import dedicated
from everstep.policies.stragglers.nondedicated import Settings, nondedicated
from everstep.policies.stragglers.policy import Policy
from everstep.sim.stragglers import (
    BATCH,
    Constant,
    Pattern,
    Recorded,
    Spells,
    asynchronous,
    ceiling,
    synchronous,
    with_backup,
)

TRACES = Path(__file__).parent / "traces" / "alibaba-pai-minibatch"
STEPS = 1000  # healthy batches of each worker
SPELL, GAP = 30.0, 230.0
WINDOW = 3.0
SWEEP = (3.0, 10.0, 30.0)
RESTART = 30.0
DAY = 86_400.0

SPLITS: Policy = partial(nondedicated, settings=Settings(budget=0))
WHOLE: Policy = partial(nondedicated, settings=Settings(restart_s=RESTART, cooldown_s=200.0))


def recorded(job: int, width: float = 1.0) -> Recorded:
    """Factors of the ten workers of a real job: each worker's times over the median of the fastest half of workers."""
    by_worker: dict[int, list[float]] = {}
    with gzip.open(TRACES / f"job_{job}_norm.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            by_worker.setdefault(int(row["worker"]), []).append(float(row["batch_time_norm"]))
    columns = [by_worker[worker] for worker in sorted(by_worker)]
    healthy = median(sorted(map(median, columns))[: len(columns) // 2])
    return Recorded([[max(0.05, value / healthy) for value in row] for row in zip(*columns, strict=False)], width)


def run(quick: bool) -> Result:
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    virtual(result, range(2 if quick else 5))
    traces(result)
    if not quick:
        real(result)
    return result


def claim(result: Result, name: str, values: list[float], least: float | None = None) -> None:
    result["figures"][name] = round(mean(values), 3)
    if len(values) > 1:
        result["spread"][name] = tuple(round(v, 3) for v in spread(values))
    if least is not None:
        result["aims"][name] = f">= {least:.3g}"
        result["holds"][name] = mean(values) >= least
    say(f"{name} {mean(values):.3f}")


# ---------------------------------------------------------------- virtual time


def virtual(result: Result, seeds: range) -> None:
    for n in (4, 8):
        for s in (2.0, 4.0, 8.0):
            patterns: dict[str, Callable[[int], Pattern]] = {
                "deterministic": lambda seed, s=s: Constant(s),  # type: ignore[misc]
                "persistent": lambda seed, s=s: Constant(s, begins=0.1 * STEPS),  # type: ignore[misc]
                "transient": lambda seed, s=s: Spells(s, SPELL, GAP, seed),  # type: ignore[misc]
            }
            for name, pattern in patterns.items():
                compare(result, f"n{n}.s{s:g}.{name}", n, s, pattern, seeds if name == "transient" else range(1))


def compare(result: Result, name: str, n: int, s: float, pattern: Callable[[int], Pattern], seeds: range) -> None:
    samples = STEPS * n * BATCH
    base = [synchronous(pattern(seed), n, samples).wall for seed in seeds]

    def faster(wall: Callable[[int], float]) -> list[float]:
        return [b / wall(seed) for b, seed in zip(base, seeds, strict=True)]

    lasting = "transient" not in name
    best = ceiling(n, s)
    if "persistent" in name:  # nothing is to be gained before it begins
        healthy = 0.1 * STEPS
        best = base[0] / (healthy + (base[0] - healthy) / best)
    if lasting:
        result["figures"][f"{name}.ceiling"] = round(best, 3)
    claim(result, f"{name}.backup", faster(lambda k: with_backup(pattern(k), n, samples).wall))
    claim(result, f"{name}.static", faster(lambda k: asynchronous(pattern(k), n, samples, False).wall))
    claim(result, f"{name}.shared", faster(lambda k: asynchronous(pattern(k), n, samples, True).wall))
    least = 0.95 * best if lasting else 0.98
    for window in SWEEP if n == 4 and s == 4 else (WINDOW,):
        what = f"{name}.splits" + (f".window{window:g}" if window != WINDOW else "")
        with_it = partial(synchronous, n=n, samples=samples, policy=SPLITS, window=window)
        claim(result, what, faster(lambda k, f=with_it: f(pattern(k)).wall), least if window == WINDOW else 0.98)  # type: ignore[misc]
    whole = partial(synchronous, n=n, samples=samples, policy=WHOLE, window=WINDOW, restart=RESTART)
    claim(result, f"{name}.nondedicated", faster(lambda k: whole(pattern(k)).wall), 0.98)
    exact = partial(synchronous, n=n, samples=samples, policy=dedicated, window=WINDOW)
    claim(result, f"{name}.dedicated", faster(lambda k: exact(pattern(k)).wall), least)


def traces(result: Result) -> None:
    """Three real jobs of ten workers; in two of them there is nothing to do."""
    for job in (1, 2, 4):
        pattern = recorded(job, width=10.0)
        samples = STEPS * 10 * BATCH
        base = synchronous(pattern, 10, samples).wall
        for name, policy in (("splits", SPLITS), ("nondedicated", WHOLE), ("dedicated", dedicated)):
            found = synchronous(pattern, 10, samples, policy, window=30.0, restart=RESTART)
            claim(result, f"traces.job{job}.{name}", [base / found.wall], 0.98)
            if job != 4 and name != "dedicated":
                result["figures"][f"traces.job{job}.{name}.plans"] = len(found.plans)
                result["aims"][f"traces.job{job}.{name}.plans"] = "= 0"
                result["holds"][f"traces.job{job}.{name}.plans"] = not found.plans
    # one unit of time is 10 s here: a day of 8,640 healthy batches, windows of a minute, restarts of five
    pattern, samples = recorded(4, width=1.0), int(DAY / 10.0) * 10 * BATCH
    base = synchronous(pattern, 10, samples).wall
    day = synchronous(pattern, 10, samples, WHOLE, window=6.0, restart=RESTART)
    result["figures"]["day.hours_static"] = round(base * 10.0 / 3600, 1)
    result["figures"]["day.hours_nondedicated"] = round(day.wall * 10.0 / 3600, 1)
    result["figures"]["day.restarts"] = day.restarts
    claim(result, "day.nondedicated", [base / day.wall])
    splits = synchronous(pattern, 10, samples, SPLITS, window=6.0)
    claim(result, "day.splits", [base / splits.wall])


# ---------------------------------------------------------------- real processes

SCRIPT = """
import sys, time
import numpy as np, torch
from torch import nn
import everstep as es

torch.set_num_threads(1)
slow, rows, sample_s = {slow}, {rows}, {sample_s}
job = es.join(mode="allreduce")

class Device(nn.Module):  # in the place of an accelerator: so long it takes for a sample
    def forward(self, x):
        time.sleep(sample_s * x.shape[0] * (slow if job.slot == 0 else 1.0))
        return x

rng = np.random.default_rng(0)
x = rng.standard_normal((rows, 16), dtype=np.float32)
data = {{"x": x, "y": x.sum(axis=1, keepdims=True)}}
device, model = Device(), job.replicate(nn.Linear(16, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
began = time.monotonic()
for batch in job.steps(job.loader(data, batch_size=32, epochs=1)):
    loss = nn.functional.mse_loss(model(device(batch["x"])), batch["y"])
    opt.zero_grad(); loss.backward(); opt.step()
print("took", time.monotonic() - began, "loss", float(loss.detach()), flush=True)
"""


def real(result: Result, n: int = 4, s: float = 4.0, rounds: int = 5) -> None:
    """A deterministic straggler, in turns with and without the policy."""
    sample_s, rows = 0.004, 4 * 32 * 120

    def job(policy: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(SCRIPT.format(slow=s, rows=rows, sample_s=sample_s))
            command = [sys.executable, "-m", "everstep.cli", "run", "--mode", "allreduce", "--workers", str(n)]
            command += ["--policy", policy, "--run-dir", f"{folder}/run", "--no-display", str(script)]
            env = {**os.environ, "EVERSTEP_WINDOW_S": "1"}
            subprocess.run(command, env=env, check=True, capture_output=True, timeout=600)
            said = "".join(log.read_text() for log in Path(folder).glob("run/logs/worker-*.log"))
            return max(float(took) for took in re.findall(r"^took ([\d.]+)", said, re.M))

    walls = interleaved({"none": lambda: job("none"), "nondedicated": lambda: job("nondedicated")}, rounds, say)
    ratios = [a / b for a, b in zip(walls["none"], walls["nondedicated"], strict=True)]
    result["figures"][f"real.n{n}.s{s:g}.deterministic.ceiling"] = ceiling(n, s)
    claim(result, f"real.n{n}.s{s:g}.deterministic.nondedicated", ratios, 0.95 * ceiling(n, s))
