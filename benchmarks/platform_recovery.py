"""A node is lost: how long until training goes on, and until its replacement trains, on each platform.

Sides, in turns: ``here`` (agents of this machine; the benchmark starts another one the moment it kills one),
``kubernetes`` (the API server in memory with its nodes and the operator), ``ray`` (a real local cluster), ``slurm`` (a
real one of this machine). A side whose packages are missing is skipped in one line. ``--quick``: the first two.

``--only ray slurm``: these beside ``here``.

Each job has two nodes with a worker and a ps each, parity 1+1, and a master that stays. A spare machine is there. One
node is lost without a word, with all its processes. ``NAME.gap_s``: the longest time without a step of any worker from
then until the replacement trains. ``NAME.replaced_s``: from the loss to the first step of the replacement.
``NAME.over_here``: ``replaced_s`` there over ``replaced_s`` here, median over the rounds: the platform's own part.

The master counts a silent node as lost after ``lost_after_s`` (8 s): ``gap_s`` is mostly that, unless the platform says
so earlier, as Ray and Slurm do.

What is not in it: images to be pulled, machines to be booted, and the time in which a platform finds out. The cluster
in memory marks the pods of a lost node at once (a real one takes 15 s and more), Slurm is told that the node is down,
Ray sees the connection of its daemon end. Each agent imports torch itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._jobs import longest_gap
from benchmarks._measure import Result, beside, interleaved, median, say, spread
from benchmarks._platform_jobs import Platform, platforms

ROUNDS = 5
SETTLED_S = 1.0
NAMES = ["here", "kubernetes", "ray", "slurm"]
NAMES_QUICK = NAMES[:2]


def lose_one(platform: Platform, home: Path) -> dict[str, float]:
    """One job and the loss of one of its nodes."""
    import numpy as np

    home.mkdir(parents=True)
    job = platform.begin(home)
    try:
        job.wait_for(job.trains, "training does not begin")
        time.sleep(SETTLED_S)
        before = set(job.steps())
        died_at = platform.lose_node(job)

        def fresh() -> list[float]:
            return [times[0] for name, times in job.steps().items() if name not in before and times]

        job.wait_for(fresh, "no replacement trains")
        replaced_at = min(fresh())
        at = np.sort(np.array([each for times in job.steps().values() for each in times]))
        return {"gap_s": longest_gap(at, died_at, replaced_at), "replaced_s": replaced_at - died_at}
    finally:
        platform.end()


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """All platforms that there are, or those that were chosen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks platform_recovery")
    parser.add_argument("--only", choices=NAMES[1:], nargs="+", default=(NAMES_QUICK if quick else NAMES)[1:])
    names = [NAMES[0], *parser.parse_args(arguments).only]
    with tempfile.TemporaryDirectory(prefix="everstep-platforms-") as text:
        folder = Path(text)
        with platforms(names, folder) as found:
            number = iter(range(1_000_000))

            def side(platform: Platform) -> Any:
                return lambda: lose_one(platform, folder / f"job{next(number)}")

            sides = {name: side(platform) for name, platform in found.items()}
            results = interleaved(sides, 1 if quick else ROUNDS, say, "here")
    figures, spreads = {}, {}
    for name, rounds in results.items():
        for key in ("gap_s", "replaced_s"):
            values = [one[key] for one in rounds]
            figures[f"{name}.{key}"], spreads[f"{name}.{key}"] = median(values), spread(values)
        if name != "here":
            pairs = zip(rounds, results["here"], strict=True)
            ratios = [there["replaced_s"] / here["replaced_s"] for there, here in pairs]
            figures[f"{name}.over_here"], spreads[f"{name}.over_here"] = median(ratios), spread(ratios)
            beside(figures, spreads, results.noise("replaced_s"), f"{name}.over_here")
    return {"figures": figures, "aims": {}, "holds": {}, "spread": spreads}
