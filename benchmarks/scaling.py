"""Two ps become four and two again while the job trains: the longest time without a batch, against stopping and
resuming.

*live*: ``everstep scale --ps 4``, and ``--ps 2`` once the four have settled. *restart*: a checkpoint is taken, the job
is stopped, and resumed with the other number of ps, twice. ``examples/01_flights_dlrm.py`` with 2 workers and replicas
(``--parity 1+1``); times come from the ps' audit logs. Figures:

- ``out_gap_s``, ``in_gap_s``: longest time between two applied batches from the command until all partitions are where
  they belong; ``out_s``, ``in_s``: how long that took;
- ``restart_out_gap_s``, ``restart_in_gap_s``: last batch before the stop to the first one after it;
- ``out_ratio``, ``in_ratio``: restart over live.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks._jobs import Job, longest_gap, pushes
from benchmarks._measure import Result, beside, everstep, interleaved, median, say, spread
from everstep.model.member import MemberState, Role

BATCH = 512
LIMIT_S = 240.0
FLAGS = ["--workers", "2", "--parity", "1+1"]
SETTLE_S = 2.0


def tell(*words: str | Path) -> None:
    """Another command of everstep. RuntimeError if it fails."""
    done = subprocess.run(everstep(*words), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"everstep {' '.join(map(str, words))}: {done.stdout}{done.stderr}")


def committed_everywhere(job: Job, ps: int) -> bool:
    status = job.status()
    if status is None:
        return False
    alive = [m for m in status.members if m.role == Role.PS and m.state == MemberState.ALIVE]
    return len(alive) == ps and job.safe()


def live(home: Path, epochs: int) -> dict[str, float]:
    job = Job.start(home, [*FLAGS, "--ps", "2"], epochs, BATCH, LIMIT_S)
    try:
        job.wait_for(lambda: job.samples_done() > 0 and committed_everywhere(job, 2))
        time.sleep(SETTLE_S)
        spans = {}
        for name, ps in (("out", 4), ("in", 2)):
            begin = time.time()
            tell("scale", job.run_dir, "--ps", str(ps))
            job.wait_for(lambda ps=ps: committed_everywhere(job, ps))  # type: ignore[misc]
            spans[name] = (begin, time.time())
            time.sleep(SETTLE_S)
        tell("stop", job.run_dir)
        job.finish()
        job.check()
        at, _ = pushes(job.logs())
        gaps = {f"{name}_gap_s": longest_gap(at, *span) for name, span in spans.items()}
        return gaps | {f"{name}_s": end - begin for name, (begin, end) in spans.items()}
    finally:
        job.close()


def restart(home: Path, epochs: int) -> dict[str, float]:
    jobs = [Job.start(home, [*FLAGS, "--ps", "2"], epochs, BATCH, LIMIT_S)]
    out: dict[str, float] = {}
    try:
        for name, ps in (("out", 4), ("in", 2)):
            job = jobs[-1]
            job.wait_for(lambda job=job: len(job.logs()) > 0 and sum(log.n for log in job.logs()) > 100)  # type: ignore[misc]
            time.sleep(SETTLE_S)
            tell("checkpoint", "take", job.run_dir)
            tell("stop", job.run_dir)
            job.finish()
            last, _ = pushes(job.logs())
            jobs.append(Job(home, ["resume", str(job.run_dir), "--ps", str(ps)], [], LIMIT_S, f"again{ps}"))
            again = jobs[-1]
            again.wait_for(lambda again=again: sum(log.n for log in again.logs()) > 0)  # type: ignore[misc]
            first, _ = pushes(again.logs())
            out[f"restart_{name}_gap_s"] = float(first[0] - last[-1])
        return out
    finally:
        for job in jobs:
            job.close()


def run(quick: bool) -> Result:
    rounds = 1 if quick else 5
    ways = {"live": live, "restart": restart}

    def one(way: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="everstep-scaling-") as folder:
            return ways[way](Path(folder), 50)

    sides = {name: (lambda name=name: one(name)) for name in ways}  # type: ignore[misc]
    found = interleaved(sides, rounds, say, "restart")
    values: dict[str, list[float]] = {n: [r[n] for r in found["live"]] for n in found["live"][0]}
    values |= {n: [r[n] for r in found["restart"]] for n in found["restart"][0]}
    for name in ("out", "in"):
        pairs = zip(values[f"restart_{name}_gap_s"], values[f"{name}_gap_s"], strict=True)
        values[f"{name}_ratio"] = [a / b for a, b in pairs]
    figures = {name: median(v) for name, v in values.items()}
    aims = {"out_ratio": ">= 5", "in_ratio": ">= 5"}
    holds = {name: figures[name] >= 5 for name in aims}
    spreads = {n: spread(v) for n, v in values.items()}
    for name in ("out", "in"):
        beside(figures, spreads, found.noise(f"restart_{name}_gap_s"), f"{name}_ratio")
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
