"""What the rolling digest of replicas costs a step: on and off by blocks of steps inside one job, 1 and 50 MB.

2 workers, mode allreduce. Blocks of 20 steps (1 MB) or 8 (50 MB) alternate with and without the digest, at least 200 of
them; a block is compared with the mean of its two neighbours. ``MBmb.step`` and ``MBmb.cpu``: the median of these
ratios of the steps' time and of the worker's CPU time, with the 95 % interval of the median as spread. ``.aa``: the
same of a job whose digest is never off, so that only noise differs.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._measure import ROOT, Child, Result, everstep, interval, median, say

JOB = ROOT / "benchmarks" / "_digest_job.py"
ROWS, BATCH, LIMIT_S = 2000, 64, 900.0
STEP, AT, CPU = range(3)


def blocks(mb: int, block: int, n: int, same: bool) -> tuple[list[float], list[float]]:
    """Ratios on / off of the steps' seconds and CPU seconds, one for each inner block of a job of ``n`` blocks."""
    epochs = -(-block * (n + 3) * BATCH // ROWS)
    with tempfile.TemporaryDirectory(prefix="everstep-digest-") as folder:
        home = Path(folder)
        verb = ["run", "--mode", "allreduce", "--workers", "2", "--run-dir", str(home / "run"), "--", str(JOB)]
        flags = ["--mb", str(mb), "--epochs", str(epochs), "--block", str(block), "--out", str(home / "ends")]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with Child(everstep(*verb, *flags, *(["--same"] if same else [])), threads) as child:
            child.finish(LIMIT_S)
        ends = np.array(json.loads((home / "ends").read_text()))
    took = np.diff(ends[:, [AT, CPU]], axis=0)
    of = ends[:-1, STEP] // block  # a step is about the state before it
    first = int(of[0]) + 2  # the first two warm up
    means = []
    for number in range(first, int(of[-1])):
        mine = took[of == number]
        if len(mine) < block // 2:
            continue
        means.append((number, float(np.median(mine[:, 0])), float(mine[:, 1].mean())))
    out: tuple[list[float], list[float]] = ([], [])
    for before, here, after in zip(means, means[1:], means[2:], strict=False):
        for which in (1, 2):
            ratio = here[which] / ((before[which] + after[which]) / 2)
            out[which - 1].append(ratio if here[0] % 2 == 0 else 1 / ratio)
    return out


def run(quick: bool) -> Result:
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for mb, block, n in ((1, 20, 40 if quick else 240), *(() if quick else ((50, 8, 220),))):
        for same in (True, False):
            found = blocks(mb, block, n, same)
            for kind, values in zip(("step", "cpu"), found, strict=True):
                name = f"{mb}mb.{kind}{'.aa' if same else ''}"
                result["figures"][name], result["spread"][name] = median(values), interval(values)
                say(f"{name}: {median(values):.4f} {interval(values)} of {len(values)} blocks")
            result["figures"][f"{mb}mb.blocks"] = float(len(found[0]))
        for kind in ("step", "cpu"):
            name = f"{mb}mb.{kind}"
            result["aims"][name], result["holds"][name] = "< 1.01", result["figures"][name] < 1.01
    return result
