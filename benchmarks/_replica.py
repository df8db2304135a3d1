"""Jobs in mode allreduce as benchmarks drive them, and how a kill is read from records of steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks._jobs import Job
from benchmarks._measure import ROOT
from everstep.model.member import Role
from everstep.net.rendezvous import read_master

TWIN = ROOT / "benchmarks" / "twins" / "replica_everstep.py"
BASELINES = ROOT / "benchmarks" / "baselines"
AROUND_S = 0.75


class Steps:
    """The committed steps of one process, as it wrote them down. ``at``: seconds since 1970, ascending. ``again``: when
    an iteration came to nothing, and after which step (``again_after``)."""

    def __init__(self, path: Path) -> None:
        self.name, pid, _ = path.name.rsplit(".", 2)
        self.pid = int(pid)
        lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
        self.at: NDArray[np.float64] = np.array([float(t) for t, _, note in lines if note != "again"])
        self.again: NDArray[np.float64] = np.array([float(t) for t, _, note in lines if note == "again"])
        self.again_after = np.array([int(step) for _, step, note in lines if note == "again"], np.int64)

    def after(self, when: float, nth: int = 1) -> float | None:
        """When the nth step after ``when`` was committed here."""
        found = self.at[self.at > when]
        return float(found[nth - 1]) if len(found) >= nth else None


def read_steps(folder: Path) -> list[Steps]:
    return [steps for path in sorted(folder.glob("w*.log")) if len((steps := Steps(path)).at)]


class Kill:
    """What one death cost, read from the records of all processes. ``dead``: it and those that were killed before.

    ``recovered_s``: from the death until every survivor has committed two steps: the first may have been reduced
    already when it happened, so the second is the first that surely was not. ``rejoined_s``: until the replacement's
    first committed step (nan: not seen). ``redone``: steps that a survivor did again, ``tries``: how many times, all
    together (one step may be tried again more than once). ``pause_s``: longest gap between
    steps of a survivor from ``around_s`` before the replacement's first step to as long after it. ``usual_s``: the same
    over as long a time before the death, when nothing happened: what the machine does to a step anyway."""

    def __init__(
        self,
        records: list[Steps],
        at: float,
        dead: set[int],
        until: float,
        restarted: bool = False,
        around_s: float = AROUND_S,
    ) -> None:
        alive = [s for s in records if s.pid not in dead and s.at[0] < at]
        fresh = [s for s in records if at < s.at[0] < until]
        who = fresh if restarted else alive  # restarted: everybody's process is new
        seconds = [s.after(at, 2) for s in who]
        known = [t for t in seconds if t is not None and t < until]
        self.recovered_s = max(known) - at if known and len(known) == len(seconds) else float("nan")
        self.rejoined_s = min(s.at[0] for s in fresh) - at if fresh else float("nan")
        again = [s.again_after[(s.again > at) & (s.again < until)] for s in alive]
        self.redone = max((len(set(steps.tolist())) for steps in again), default=0)
        self.tries = max((len(steps) for steps in again), default=0)
        self.pause_s = float("nan")
        if fresh and not restarted and self.recovered_s == self.recovered_s:
            joined = at + self.rejoined_s
            self.pause_s = longest_gap_s(alive, max(at + self.recovered_s, joined - around_s), joined + around_s)
        self.usual_s = longest_gap_s(alive, at - 2 * around_s, at)

    def __repr__(self) -> str:
        return (
            f"recovered {self.recovered_s:.3f} s, {self.redone} redone ({self.tries} times), "
            f"full strength {self.rejoined_s:.3f} s, pause there {self.pause_s:.3f} s (usual {self.usual_s:.3f} s)"
        )


def longest_gap_s(records: list[Steps], begin: float, end: float) -> float:
    """Longest time between two committed steps of one process; nan: none has two in that time."""
    gaps = [np.diff(s.at[(s.at >= begin) & (s.at <= end)]) for s in records]
    return max((float(g.max()) for g in gaps if len(g)), default=float("nan"))


def step_s(records: list[Steps]) -> float:
    """Median time between two committed steps of one process."""
    return float(np.median(np.concatenate([np.diff(s.at) for s in records if len(s.at) > 1])))


class ReplicaJob(Job):
    """``everstep run --mode allreduce`` of the twin script, with a record of steps in ``steps/``."""

    def __init__(
        self,
        home: Path,
        workers: int,
        epochs: int,
        limit_s: float,
        flags: list[str] | None = None,
        script: list[str] | None = None,
        name: str = "run",
    ) -> None:
        self.steps = home / f"{name}-steps"
        verb = ["run", "--mode", "allreduce", "--workers", str(workers), *(flags or [])]
        args = script or [str(TWIN), "--epochs", str(epochs)]
        super().__init__(home, verb, ["--", *args, "--record", str(self.steps)], limit_s, name)

    def pids(self) -> dict[int, int]:
        return living_workers(self)

    def stepping(self) -> set[int]:
        """The living processes that have committed a step."""
        return {s.pid for s in read_steps(self.steps)} & set(self.pids().values())

    def at_work(self, workers: int) -> bool:
        return len(self.stepping()) >= workers

    def hurt(self, slot: int, signo: int = signal.SIGKILL) -> tuple[float, int]:
        """Signal a worker: when (seconds since 1970) and its pid."""
        pid = self.pids()[slot]
        at = time.time()
        os.kill(pid, signo)
        return at, pid

    def master_cpu_s(self) -> float:
        info = read_master(self.run_dir)
        with contextlib.suppress(psutil.NoSuchProcess):
            if info is not None:
                times = psutil.Process(info.pid).cpu_times()
                return float(times.user + times.system)
        return float("nan")

    def states(self) -> dict[int, list[str]]:
        """The digests of the final state that workers printed, by slot."""
        found = {}
        for path in sorted((self.run_dir / "logs").glob("worker-*.log")):
            digests = re.findall(r"state ([0-9a-f]{32})", path.read_text(errors="replace"))
            if digests:
                found[int(path.stem.removeprefix("worker-"))] = digests
        return found


def living_workers(job: Job) -> dict[int, int]:
    """slot -> pid of the workers that are alive now."""
    status = job.status()
    members = status.members if status is not None else ()
    return {int(m.slot): m.pid for m in members if m.role == Role.WORKER and m.state == "alive" and m.pid}


def interpreter(variable: str, module: str) -> str:
    """The Python that a baseline asks for in an environment variable; "" when it is not there or lacks its package."""
    python = os.environ.get(variable, "")
    if not python:
        return ""
    try:
        done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return python if done.returncode == 0 else ""


def wait_until(what: Callable[[], object], limit_s: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
