"""Scale 2 -> 3 -> 2 workers under way in mode allreduce: the longest gap between steps, beside torchrun's restart.

The workers write down when each step was committed. Figures, for growing (``up``) and shrinking (``down``):
``.gap_steps`` longest gap between committed steps of the workers that stay / their median step, from the command to
two seconds after the change; ``.gap_ms``; ``.done_s`` from the command to the first step of the new group (down: to
the end of the process that leaves); ``redone``: steps that were repeated. ``torchrun.up_gap_s``, ``.down_gap_s``: two
agents (``--nnodes 2:3``), a third comes and goes: until all have committed two steps again;
``torchrun_tuned``: the same where agents wait 1 s for more of them instead of 30 s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks._measure import Child, Result, median, python, say, spread
from benchmarks._replica import BASELINES, ReplicaJob, Steps, read_steps, step_s, wait_until
from benchmarks.allreduce_step import ONE_THREAD, free_port
from everstep.cli.scale import scale

EPOCHS = 100_000
SETTLE_S = 2.0


def one_job(rounds: int) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-scale-") as folder:
        job = ReplicaJob(Path(folder), 2, EPOCHS, 120.0 + 60.0 * rounds)
        try:
            job.wait_for(lambda: job.at_work(2))
            for number in range(rounds):
                time.sleep(SETTLE_S)
                before = job.stepping()
                begin = time.time()
                scale(job.run_dir, workers=3, ps=None)
                job.wait_for(lambda before=before: job.stepping() - before)
                (pid,) = job.stepping() - before
                time.sleep(SETTLE_S)
                middle = time.time()
                first = next(float(s.at[0]) for s in read_steps(job.steps) if s.pid == pid)
                _measure(out, "up", _of(job.steps, before), begin, middle, first - begin)
                begin = time.time()
                scale(job.run_dir, workers=2, ps=None)
                job.wait_for(lambda pid=pid: not psutil.pid_exists(pid))
                gone = time.time()
                time.sleep(SETTLE_S)
                _measure(out, "down", _of(job.steps, before), begin, time.time(), gone - begin)
                line = ", ".join(f"{k} {v[-1]:.4g}" for k, v in out.items())
                say(f"round {number + 1}/{rounds}: {line}")
        finally:
            job.close()
    return out


def _of(folder: Path, pids: set[int]) -> list[Steps]:
    return [s for s in read_steps(folder) if s.pid in pids]


def _measure(out: dict[str, list[float]], name: str, stay: list[Steps], begin: float, end: float, done: float) -> None:
    gaps = [np.diff(s.at[(s.at >= begin - 0.5) & (s.at <= end)]) for s in stay]
    gap = max(float(g.max()) for g in gaps if len(g))
    out.setdefault(f"{name}.gap_steps", []).append(gap / step_s(stay))
    out.setdefault(f"{name}.gap_ms", []).append(gap * 1e3)
    out.setdefault(f"{name}.done_s", []).append(done)
    again = max(int(((s.again > begin) & (s.again < end)).sum()) for s in stay)
    out.setdefault("redone", []).append(float(again))


def torchrun(tuned: bool) -> dict[str, float]:
    """The same with torchrun: one agent a worker, a third one comes and goes. Seconds without a step. ``tuned``: below
    the largest number of agents it waits 1 s for more, not 30 s."""
    name = "torchrun_tuned" if tuned else "torchrun"
    with tempfile.TemporaryDirectory(prefix="torchrun-scale-") as folder:
        home, port = Path(folder), free_port()
        steps = home / "steps"
        # With the store that agents share by default, a newcomer waits for an address that nobody writes (torch 2.13).
        env = {**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        base = python("-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "9")
        base += ["--rdzv-conf", "last_call_timeout=1"] if tuned else []
        base += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "scale"]
        script = [str(BASELINES / "torchrun_elastic.py"), "--record", str(steps)]

        def agent(name: str) -> Child:
            return Child([*base, "--local-addr", "127.0.0.1", *script], env, home / f"{name}.out")

        def fresh(old: set[int], least: int) -> bool:
            return sum(s.pid not in old and len(s.at) >= 2 for s in read_steps(steps)) >= least

        agents = [agent("a"), agent("b")]
        found: dict[str, float] = {}
        try:
            if not wait_until(lambda: fresh(set(), 2), 180.0):
                return {}
            time.sleep(SETTLE_S)
            old = {s.pid for s in read_steps(steps)}
            agents.append(agent("c"))
            if wait_until(lambda: fresh(old, 3), 180.0):
                found[f"{name}.up_gap_s"] = _gap(read_steps(steps), old)
            time.sleep(SETTLE_S)
            old = {s.pid for s in read_steps(steps)}
            os.kill(agents[2].pid, signal.SIGTERM)
            if wait_until(lambda: fresh(old, 2), 180.0):
                found[f"{name}.down_gap_s"] = _gap(read_steps(steps), old)
        finally:
            for child in agents:
                alive = child.process.poll() is None
                below = psutil.Process(child.pid).children(recursive=True) if alive else []
                child.kill()
                for process in below:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
    return found


def _gap(records: list[Steps], old: set[int]) -> float:
    """From the last step of the old processes to the second step of all new ones."""
    return max(float(s.at[1]) for s in records if s.pid not in old and len(s.at) > 1) - max(
        float(s.at[-1]) for s in records if s.pid in old
    )


def run(quick: bool) -> Result:
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for name, values in one_job(2 if quick else 10).items():
        result["figures"][name], result["spread"][name] = median(values), spread(values)
    result["aims"]["redone"], result["holds"]["redone"] = "= 0", result["spread"]["redone"][1] == 0
    if not quick:
        for tuned in (False, True):
            for name, value in torchrun(tuned).items():
                result["figures"][name] = value
                say(f"{name} {value:.2f}")
    return result
