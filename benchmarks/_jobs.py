"""A whole job as a benchmark drives it: started, watched, hurt, and read from its records."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks._measure import ROOT, Child, everstep
from everstep.cli.link import ask_master
from everstep.errors import EverstepError
from everstep.model.job_view import JobView, ShownState
from everstep.model.member import Role
from everstep.monitor.audit import PsLog, audit, read_log
from everstep.net.messages import GetStatus

SCRIPT = ROOT / "examples" / "01_flights_dlrm.py"
SPARSE_HEAD = """
import os, time
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
rng = np.random.default_rng(0)
ids = rng.integers(0, 5000, (4000, 4))
data = {{"ids": ids, "label": (ids.sum(1) % 2).astype(np.float32)}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5000, 16, mode="sum")
        self.top = nn.Linear(16, 1)
    def forward(self, b):
        return self.top(self.bag(b["ids"])).squeeze(1)

model = job.replicate(job.sparse(Net()))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
"""
"""What small scripts of benchmarks begin with (to be formatted): data, a model with a sparse table, an optimizer."""


class Job:
    """One everstep process in ``home``; ``close`` kills whatever is left of it."""

    def __init__(
        self,
        home: Path,
        verb: list[str],
        script: list[str],
        limit_s: float,
        name: str = "run",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = home / name
        self.log = home / f"{name}.log"
        self.main = Child(everstep(*verb, "--run-dir", self.run_dir, *script), env, self.log)
        self.until = time.monotonic() + limit_s

    @classmethod
    def start(cls, home: Path, flags: list[str], epochs: int, batch: int, limit_s: float) -> Job:
        script = ["--", str(SCRIPT), "--epochs", str(epochs), "--batch-size", str(batch)]
        return cls(home, ["run", *flags], script, limit_s)

    @property
    def over(self) -> bool:
        return self.main.process.poll() is not None

    def wait_for(self, what: Callable[[], object]) -> None:
        """RuntimeError when the job ends, or its time is up, before that."""
        while not what():
            if self.over or time.monotonic() > self.until:
                raise RuntimeError(f"it did not happen; the job's last words:\n{self.words()}")
            time.sleep(0.02)

    def finish(self) -> None:
        """Wait for its end. RuntimeError unless it ended well."""
        while not self.over and time.monotonic() < self.until:
            time.sleep(0.05)
        if self.main.process.poll() != 0:
            raise RuntimeError(f"the job ended with {self.main.process.poll()}:\n{self.words()}")

    def words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def status(self) -> JobView | None:
        with contextlib.suppress(EverstepError, OSError):
            answer = ask_master(self.run_dir, GetStatus(), timeout_s=2.0)
            return answer if isinstance(answer, JobView) else None
        return None

    def samples_done(self) -> int:
        status = self.status()
        return status.samples_done if status is not None else 0

    def safe(self) -> bool:
        """Whether every partition survives as many lost ps as the parity promises, and nothing is on its way."""
        status = self.status()
        return status is not None and is_safe(status)

    def kill_ps(self, slot: int) -> float:
        """SIGKILL; when (seconds since 1970)."""
        status = self.status()
        pids = [m.pid for m in status.members if (m.role, m.slot) == (Role.PS, slot)] if status is not None else []
        if not pids or not pids[0]:
            raise RuntimeError(f"ps:{slot} is not there to be killed")
        at = time.time()
        os.kill(pids[0], signal.SIGKILL)
        return at

    def logs(self) -> list[PsLog]:
        return [read_log(p) for p in sorted((self.run_dir / "audit").glob("ps-*.log"))]

    def check(self) -> None:
        """RuntimeError unless the audit says exactly once."""
        report = audit(self.run_dir)
        if not report.ok:
            raise RuntimeError(report.text())

    def undisturbed(self) -> None:
        """Real-time priority for every process of it, so that what others do on this machine is not measured: for jobs
        that mostly sleep. RuntimeError where it is not permitted."""
        main = psutil.Process(self.main.pid)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in process.threads():
                    try:
                        os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))
                    except PermissionError:
                        raise RuntimeError("--realtime is for root (or `ulimit -r 1`): run without it") from None

    def close(self) -> None:
        self.main.kill()


def is_safe(view: JobView) -> bool:
    """Whether every partition has all its mirrors and nobody is lost."""
    p = view.protection
    alive = all(m.state in (ShownState.ALIVE, ShownState.LEFT) for m in view.members)
    return alive and p is not None and p.full > 0 and not (p.less or p.none or p.moving or p.rebuilding or p.building)


def pushes(logs: list[PsLog]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each push was applied at the first ps that had it, ascending (seconds since 1970), and its samples.

    A push reaches every ps; it is known by its shard and range."""
    at = np.concatenate([log.at for log in logs])
    key = np.stack([np.concatenate([getattr(log, c) for log in logs]) for c in ("shard", "lo", "hi")])
    order = np.argsort(at, kind="stable")
    _, first = np.unique(key[:, order], axis=1, return_index=True)
    rows = order[np.sort(first)]
    return at[rows], (key[2] - key[1])[rows].astype(float)


@dataclass(frozen=True)
class Window:
    """Some seconds of a job: when they began and ended (seconds since 1970), CPU seconds of all of it and of its ps."""

    began_at: float
    ended_at: float
    cpu_s: float
    ps_cpu_s: float

    def figures(self, at: NDArray[np.float64], samples: NDArray[np.float64], batch: int) -> dict[str, float]:
        """Return samples/s, CPU seconds a million samples, and CPU of the ps a batch (ms). ``at``, ``samples``: its
        ``pushes``."""
        trained = float(samples[(at >= self.began_at) & (at < self.ended_at)].sum())
        return {
            "samples_per_s": trained / (self.ended_at - self.began_at),
            "cpu_s_per_million": 1e6 * self.cpu_s / trained,
            "ps_cpu_ms_per_batch": 1e3 * self.ps_cpu_s * batch / trained,
        }


def rate(at: NDArray[np.float64], samples: NDArray[np.float64], begin: float, end: float) -> float:
    """Samples/s applied in ``[begin, end)``."""
    inside = (at >= begin) & (at < end)
    return float(samples[inside].sum() / (end - begin)) if end > begin else 0.0


def longest_gap(at: NDArray[np.float64], begin: float, end: float) -> float:
    """Longest time without a push between ``begin`` and ``end``, seconds."""
    inside = at[(at >= begin) & (at <= end)]
    return float(np.diff(np.r_[begin, inside, end]).max())
