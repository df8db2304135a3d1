"""What a change costs: throughput, allreduce_step and control_plane of another version beside this one.

``python -m benchmarks before_after [--quick] [--old FOLDER] [--old-python PYTHON] [--only NAME,...]``. ``FOLDER`` is a
checkout of the other version with its native part built, ``PYTHON`` the interpreter that imports it; without them this
version is compared with itself, which shows the noise. Each round runs old, new, old. A figure is new divided by the
mean of both olds, the median of the rounds; beside it stands the second old divided by the first (``.aa``), which
nothing but the machine makes differ from 1. CPU seconds per sample differ least between quiet and busy machines.
``--blocks N`` compares by N turns of blocks of a second instead (``_blocks.py``): one job of the new version and two of
the old one stand side by side, and only one of them runs at a time. Its figures are ``PART.rate`` and ``PART.cpu`` (CPU
seconds for a sample, a step; of control_plane the master's for a request), with the 95 % interval of the median.

Figures: ``throughput.samples_per_s``, ``throughput.cpu_s_per_million`` (2 workers, 1 ps, dim 16, batch 2048, all
processes of the job), ``allreduce_step.median_s``, ``.p10_s`` and ``.cpu_s`` (2 workers, 1 MB of gradients; CPU seconds
of the whole job a step), ``control_plane.per_s`` (durable leases and reports).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._blocks import compare
from benchmarks._measure import ROOT, Result, each_round, interval, median, say, spread
from benchmarks.throughput import Config, _make_data

LIMIT_S = 400.0
MOST = 1.02

_THROUGHPUT = """
from benchmarks.throughput import Config, run_everstep, _make_data
config = Config(16, 2048, {n}, Path({data!r}))
_make_data(config)
out = {{k: v for k, v in run_everstep(config, 1, False).items() if k in ("samples_per_s", "cpu_s_per_million")}}
"""
_STEP = """
import resource
from benchmarks.allreduce_step import everstep_s
found = everstep_s(1, {n}, [])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
out = {{"median_s": found["median_s"], "p10_s": found["p10_s"], "cpu_s": (used.ru_utime + used.ru_stime) / {n}}}
"""
_CONTROL = """
from benchmarks.control_plane import _round
out = {{"per_s": _round("master", {n}, 2)}}
"""
PARTS: dict[str, tuple[str, float, float]] = {  # what runs, and how much of it: quick, and else
    "throughput": (_THROUGHPUT, 60_000, 60_000),
    "allreduce_step": (_STEP, 600, 3000),
    "control_plane": (_CONTROL, 2.0, 4.0),
}
FASTER = ("per_s", ".rate")  # more is better
ENOUGH = {"throughput": 100_000, "allreduce_step": 300, "control_plane": 5000}  # done before a job's first block
BLOCK_S = {"throughput": 1.0, "allreduce_step": 0.3, "control_plane": 1.0}
"""A group takes a member that was stopped for two seconds for lost (at a77967c)."""


def by_blocks(parts: Sequence[str], sides: dict[str, tuple[Path, str]], turns: int, data: Path) -> Result:
    """The parts compared by blocks; also what the result's rows need."""
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for part in parts:
        if part == "throughput":
            _make_data(Config(16, 2048, 60_000, data))
        for name, values in compare(part, sides, data, turns + 3, BLOCK_S[part], ENOUGH[part]).items():
            _put(result, f"{part}.{name}", median(values), interval(values))
        say(f"{part}: {result['figures']}")
    return result


def _put(result: Result, figure: str, value: float, around: tuple[float, float]) -> None:
    result["figures"][figure], result["spread"][figure] = value, around
    if not figure.endswith(".aa"):
        more = figure.endswith(FASTER)
        result["aims"][figure] = f">= {1 / MOST:.3f}" if more else f"<= {MOST}"
        result["holds"][figure] = value >= 1 / MOST if more else value <= MOST


def measure(tree: Path, python: str, part: str, n: float, data: Path) -> dict[str, float]:
    """One run of a part in a version's own tree, by its own benchmark. Raises RuntimeError with its last words."""
    code = PARTS[part][0].format(n=int(n) if n == int(n) else n, data=str(data))
    program = f"import json, sys\nfrom pathlib import Path\n{code}\nprint(json.dumps(out))"
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(tree), "PATH": path}
    done = subprocess.run(
        [python, "-c", program], cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{part} in {tree} ended with {done.returncode}:\n{done.stderr[-1500:]}")
    out: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return out


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks before_after")
    parser.add_argument("--old", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("--old-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--only", default=",".join(PARTS), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0, metavar="N")
    args = parser.parse_args(list(arguments))
    parts = [p for p in args.only.split(",") if p]
    if unknown := [p for p in parts if p not in PARTS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(PARTS)}")
    rounds = args.rounds or (1 if quick else 7)
    sides = {"old": (args.old.resolve(), args.old_python), "new": (ROOT, sys.executable)}
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        if args.blocks:
            return by_blocks(parts, sides, args.blocks, Path(folder))
        for number in each_round(rounds):
            for part in parts:
                n = PARTS[part][1 if quick else 2]
                first, new, second = (measure(*sides[s], part, n, Path(folder)) for s in ("old", "new", "old"))
                for name, value in new.items():
                    figure = f"{part}.{name}"
                    ratios.setdefault(figure, []).append(value / ((first[name] + second[name]) / 2))
                    ratios.setdefault(f"{figure}.aa", []).append(second[name] / first[name])
                    now, noise = ratios[figure][-1], ratios[f"{figure}.aa"][-1]
                    load = os.getloadavg()[0]
                    say(
                        f"round {number + 1}/{rounds} {figure}: new/old {now:.3f}, old/old {noise:.3f}, load {load:.1f}"
                    )
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for figure, values in ratios.items():
        _put(result, figure, median(values), spread(values))
    return result
