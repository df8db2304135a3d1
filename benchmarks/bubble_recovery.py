"""Measures how long a pipeline of two stages is away when a stage is killed, and how many steps are done again.

``kill -9`` of a random stage at random moments, real processes, one replica. ``everstep``: the job goes on from the
copies of its stages, without any checkpoint. ``torchrun``: a plain script that saves every 10 steps and is restarted
from its newest checkpoint. ``away_s``: from the kill to the next step that is behind all earlier ones, less the time
of a step, as the first stage writes it; ``redone``: steps that were done again. ``audit``: 1 if it was exact.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Child, Result, everstep, median, say, spread

SCRIPT = ROOT / "benchmarks" / "_bubble_script.py"
MEDIAN_S, MOST_S, REDONE = 1.0, 3.0, 2
LIMIT_S = 120.0


def read(path: Path) -> list[tuple[float, int]]:
    """Return when each step was done; a line that is cut off is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(float(at), int(step)) for at, step in (line.split() for line in lines)]


def stages_of(root: int) -> list[int]:
    """Return the processes that train: those that run our script and are the youngest of their line."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            memory = [Path(m.path).name for m in process.memory_maps()]
            if any("everstep-copy" in name for name in memory) or "--by" in process.cmdline()[-5:]:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def kills(
    root: int, steps: Path, count: int, draws: random.Random, alive: Callable[[], bool]
) -> tuple[list[float], list[int]]:
    """Kill ``count`` stages; return how long each kept the job away, and how many steps were done again."""
    away: list[float] = []
    redone: list[int] = []

    def until(what: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > end or not alive():
                raise RuntimeError(f"no step for {LIMIT_S:.0f} s, behind {len(read(steps))} of them")
            time.sleep(0.01)

    for _ in range(count):
        before = len(read(steps))
        wanted = before + draws.randrange(15, 40)
        until(lambda wanted=wanted: len(read(steps)) >= wanted)  # type: ignore[misc]
        time.sleep(draws.uniform(0.0, 0.05))
        victims = stages_of(root)
        if not victims:
            raise RuntimeError("no stage was found to be killed")
        killed_at = time.time()
        os.kill(draws.choice(victims), signal.SIGKILL)
        time.sleep(0.3)
        furthest = max(step for at, step in read(steps) if at <= killed_at + 0.02)
        until(lambda furthest=furthest: read(steps)[-1][1] > furthest + 2)  # type: ignore[misc]
        found = read(steps)
        next_at, next_step = next((at, step) for at, step in found if at > killed_at + 0.02)
        usual = median([b[0] - a[0] for a, b in zip(found[wanted - 12 :], found[wanted - 11 : wanted], strict=False)])
        away.append(next_at - killed_at - usual)
        redone.append(furthest - next_step + 1)
        say(f"killed at step {furthest}: the next step is {next_step}, after {away[-1]:.2f} s")
    return away, redone


def run(quick: bool) -> Result:
    """Kill stages of a job of each kind."""
    count = 3 if quick else 20
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures = result["figures"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["run", "--mode", "pipeline", "--stages", "2", "--copy-every", "1"]
        job = Job(folder, flags, ["--", str(SCRIPT), "--by", "everstep", "--steps", str(folder / "ours")], 3600.0)
        try:
            ours = kills(job.main.pid, folder / "ours", count, random.Random(1), lambda: not job.over)
            Child(everstep("stop", job.run_dir)).finish(60.0)
            job.finish()
            command = everstep("audit", job.run_dir)
            audit = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False).stdout
        finally:
            job.main.kill()
        figures["everstep.audit"] = float("so far each sample once" in audit)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1000", str(SCRIPT), "--by", "torchrun", "--steps", str(folder / "theirs")]
        with Child(command, log=folder / "torchrun.log") as torchrun:
            try:
                theirs = kills(
                    torchrun.pid,
                    folder / "theirs",
                    1 if quick else count,
                    random.Random(1),
                    lambda: torchrun.process.poll() is None,
                )
            finally:
                left = stages_of(torchrun.pid)  # (in sessions of their own)
                torchrun.kill()
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], 10.0)
    for side, (away, redone) in {"everstep": ours, "torchrun": theirs}.items():
        figures[f"{side}.away_s"], result["spread"][f"{side}.away_s"] = median(away), spread(away)
        figures[f"{side}.away_most_s"] = max(away)
        figures[f"{side}.redone"], result["spread"][f"{side}.redone"] = median(redone), spread(redone)
        figures[f"{side}.redone_most"] = float(max(redone))
    aims = {
        "everstep.away_s": (f"<= {MEDIAN_S:g}", figures["everstep.away_s"] <= MEDIAN_S),
        "everstep.away_most_s": (f"<= {MOST_S:g}", figures["everstep.away_most_s"] <= MOST_S),
        "everstep.redone_most": (f"<= {REDONE}", figures["everstep.redone_most"] <= REDONE),
        "everstep.audit": ("== 1", figures["everstep.audit"] == 1.0),
    }
    for key, (aim, held) in aims.items():
        result["aims"][key], result["holds"][key] = aim, held
    return result
