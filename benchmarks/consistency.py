"""What it costs that workers of mode ps wait for each other: samples/s of async, bounded:2 and sync, the same job.

``examples/01_flights_dlrm.py`` (real data, batches of 512), 2 workers of one node, 1 and 2 ps; the sides take turns,
ratios are by round. A run is timed for some seconds once it trains (samples by the ps' audit logs, CPU of the whole
tree), then stopped and audited. Nobody is slow here: this is the price of the words between workers and master, of rows
that cannot be pulled ahead, and of waiting for whoever takes a little longer. Figures, for N ps:

- ``SIDE_Nps_of_async``: samples/s, and ``SIDE_Nps_cpu_of_async``: CPU seconds a sample, over those of async;
- ``SIDE_Nps_ms_more``: a step of both workers takes so much longer.

EVERSTEP_CONSISTENCY_ROUNDS (5).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks._jobs import Job, pushes, rate
from benchmarks._measure import Result, beside, cpu_of_tree_s, everstep, interleaved, median, say, spread

BATCH, WORKERS = 512, 2
SIDES = {"async": "async", "bounded2": "bounded:2", "sync": "sync"}
LIMIT_S = 240.0
WARM_SAMPLES = 40 * BATCH


def side(consistency: str, ps: int, span_s: float) -> dict[str, float]:
    """One run: samples/s, and CPU seconds a million samples. RuntimeError if it fails, or samples count wrong."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        flags = ["--workers", str(WORKERS), "--ps", str(ps), "--consistency", consistency]
        job = Job.start(Path(folder), flags, 1000, BATCH, LIMIT_S)
        try:
            job.wait_for(lambda: job.samples_done() > WARM_SAMPLES)
            begin, cpu_s = time.time(), cpu_of_tree_s(job.main.pid)
            time.sleep(span_s)
            end, cpu_s = time.time(), cpu_of_tree_s(job.main.pid) - cpu_s
            done = subprocess.run(everstep("stop", job.run_dir), capture_output=True, text=True, timeout=60)
            if done.returncode:
                raise RuntimeError(f"everstep stop: {done.stdout}{done.stderr}")
            job.finish()
            job.check()
            per_s = rate(*pushes(job.logs()), begin, end)
            return {"samples_per_s": per_s, "cpu_s_per_million": 1e6 * cpu_s / (per_s * (end - begin))}
        finally:
            job.close()


def run(quick: bool) -> Result:
    rounds = 1 if quick else int(os.environ.get("EVERSTEP_CONSISTENCY_ROUNDS", "5"))
    span_s = 5.0 if quick else 10.0
    figures: dict[str, float] = {"load_before": psutil.getloadavg()[0]}
    spreads: dict[str, tuple[float, float]] = {}

    def add(name: str, values: list[float]) -> None:
        figures[name], spreads[name] = median(values), spread(values)

    ps_counts = (1,) if quick else (1, 2)
    sides = {
        f"{name}_{ps}ps": partial(side, consistency, ps, span_s)
        for ps in ps_counts
        for name, consistency in SIDES.items()
    }
    found = interleaved(sides, rounds, say)
    for ps in ps_counts:
        for of, key in (("of_async", "samples_per_s"), ("cpu_of_async", "cpu_s_per_million")):
            beside(figures, spreads, found.noise(key), [f"{name}_{ps}ps_{of}" for name in SIDES if name != "async"])
        plain = found[f"async_{ps}ps"]
        for name in SIDES:
            runs = found[f"{name}_{ps}ps"]
            add(f"{name}_{ps}ps_samples_per_s", [r["samples_per_s"] for r in runs])
            if name == "async":
                continue
            pairs = list(zip(runs, plain, strict=True))
            add(f"{name}_{ps}ps_of_async", [a["samples_per_s"] / b["samples_per_s"] for a, b in pairs])
            add(f"{name}_{ps}ps_cpu_of_async", [a["cpu_s_per_million"] / b["cpu_s_per_million"] for a, b in pairs])
            step = 1e3 * BATCH * WORKERS
            add(f"{name}_{ps}ps_ms_more", [step / a["samples_per_s"] - step / b["samples_per_s"] for a, b in pairs])
    return {"figures": figures, "aims": {}, "holds": {}, "spread": spreads}
