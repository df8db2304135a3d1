"""Short jobs of all modes that are killed at random moments: does a counting model agree with the audit in each?

Each run is a job of real processes (two or three workers, one or two ps) over some hundred samples. Its script has one
to three loops, accumulates or leaves out steps in some runs, and trains ``es.testing.Witness`` beside its model.
Meanwhile workers, all but the newest one, all of them, ps (where parity protects them), the master or a second node's
agent are killed with SIGKILL, at moments that the seed says; sizes change; a job is stopped and resumed. Behind it the
audit must say "exactly once" and the witness the same.

``--runs N --seconds S --jobs J --modes a,b --seed K --keep DIR``: how many, for how long at most, how many at a time,
which modes, the first run's number, and where runs that found something are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks._measure import ROOT, Result, say
from everstep.brain.events import ScaleAsked, StopAsked
from everstep.cli.link import ask_master
from everstep.errors import EverstepError
from everstep.model.job_view import JobView, MemberView
from everstep.model.member import Role
from everstep.monitor.audit import audit
from everstep.monitor.report import Verdict
from everstep.monitor.witness import witnessed
from everstep.net.messages import GetStatus

SCRIPT = ROOT / "benchmarks" / "_witness_job.py"
FORKSERVER = ROOT / "tests" / "forkserver"
LIMIT_S = 400.0
"""So long a run may take on a machine that has much else to do."""

MODES: dict[str, list[str]] = {
    "async": ["--ps", "2", "--parity", "1+1"],
    "unprotected": ["--ps", "1"],
    "bounded": ["--ps", "2", "--parity", "1+1", "--consistency", "bounded:2"],
    "lag": ["--ps", "2", "--parity", "1+1", "--protect", "lag", "--protect-lag", "1s"],
    "lag_bounded": ["--ps", "2", "--parity", "1+1", "--protect", "lag", "--consistency", "bounded:2"],
    "sync": ["--ps", "2", "--parity", "1+1", "--consistency", "sync"],
    "elastic": ["--mode", "allreduce"],
    "fixed": ["--mode", "allreduce", "--strategy", "fixed"],
    "logical": ["--mode", "allreduce", "--logical-workers", "4"],
    "shard": ["--mode", "allreduce", "--processes-per-worker", "2"],
    "hybrid": ["--mode", "allreduce", "--ps", "2", "--parity", "1+1"],
}
BEYOND = ("which nothing protects", "more than parity", "was lost between", "one-iteration")
"""What a job says that lost more than it was told to survive."""


class Plan(NamedTuple):
    """One run. ``hurts``: at which share of the samples, and what."""

    number: int
    mode: str
    workers: int
    script: list[str]
    samples: int
    every: bool  # each sample is applied
    hurts: list[tuple[float, str]]
    resumed: int  # workers of a second run, which goes on from the first; 0: none

    @classmethod
    def of(cls, number: int, modes: list[str]) -> Plan:
        draw = random.Random(number)
        mode = modes[number % len(modes)]
        group = MODES[mode][:1] == ["--mode"]
        loops = draw.choice(["1", "1,1", "2,1", "1,1,1"])
        samples = draw.choice([192, 256, 320])
        accumulate = draw.choice([1, 1, 1, 2]) if mode not in ("logical", "shard") else 1
        leave_out = draw.choice([0, 0, 0, 5]) if accumulate == 1 else 0
        script = ["--samples", str(samples), "--loops", loops, "--accumulate", str(accumulate)]
        script += ["--leave-out", str(leave_out), "--pause", "0.02", "--batch", "8" if group else "16"]
        kinds = ["worker", "worker", "worker", "newest", "all", "master", "scale", "stop"]
        kinds += ["ps", "ps"] if "--parity" in MODES[mode] else []
        hurts = sorted((draw.uniform(0.02, 1.0), draw.choice(kinds)) for _ in range(draw.choice([1, 1, 2, 3])))
        stops = [i for i, (_, what) in enumerate(hurts) if what == "stop"]
        hurts = hurts[: stops[0] + 1] if stops else hurts
        workers = 2 if mode == "shard" else draw.choice([2, 2, 3])
        total = samples * sum(map(int, loops.split(",")))
        resumed = draw.choice([1, 2, 3]) if stops else 0
        rest = accumulate > 1 and draw.random() < 0.5
        if rest:
            script = [*script, "--accumulate", "3", "--rest"]
        every = leave_out == 0 and (accumulate == 1 or rest)
        return cls(number, mode, workers, script, total, every, hurts, resumed)


class Found(NamedTuple):
    """What came of a run. ``problem``: "" if all agree."""

    plan: Plan
    problem: str
    beyond: bool
    kills: int
    seconds: float


class Job:
    """One run, hurt as its plan says."""

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan, self.home = plan, home
        self.run_dir = home / "run"
        self.kills = 0
        self.until = time.monotonic() + LIMIT_S

    def go(self) -> tuple[str, bool]:
        """What is wrong, and whether the job lost more than it was told to survive."""
        plan = self.plan
        verb = ["run", "--workers", str(plan.workers), *MODES[plan.mode], "--run-dir", str(self.run_dir)]
        with self._started([*verb, "--no-display", str(SCRIPT), *plan.script]) as process:
            for share, what in plan.hurts:
                self._reach(process, share)
                if process.poll() is None:
                    getattr(self, f"_{what}")(process)
            status = self._end(process)
        problem, beyond = self._judge(self.run_dir, status, plan.resumed > 0)
        if problem or beyond or not plan.resumed or self._done():
            return problem, beyond
        if "model: not left at" in self._said() and not any((self.run_dir / "checkpoints").glob("manifest-*")):
            return "", True  # every copy of the state was lost just before the stop: the job says that nothing is left
        second = self.home / "second"
        verb = ["resume", str(self.run_dir), "--run-dir", str(second), "--workers", str(plan.resumed), "--no-display"]
        self.run_dir = second
        with self._started(verb) as process:
            self._reach(process, 0.9)
            if process.poll() is None and plan.number % 2:
                self._worker(process)
            status = self._end(process)
        return self._judge(second, status, False)

    def _said(self) -> str:
        return (self.home / "out.txt").read_text(errors="replace")

    @contextlib.contextmanager
    def _started(self, verb: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        with (self.home / "out.txt").open("ab") as out:
            argv = [sys.executable, "-m", "everstep.cli", *verb]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.home)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pid in of_run(self.home):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(1.0, self.until - time.monotonic()))
        return -1

    def _status(self) -> JobView | None:
        with contextlib.suppress(EverstepError, OSError):
            answer = ask_master(self.run_dir, GetStatus(), timeout_s=5.0)
            return answer if isinstance(answer, JobView) else None
        return None

    def _reach(self, process: subprocess.Popen[bytes], share: float) -> None:
        self._wait(process, lambda s: s.samples_done >= share * self.plan.samples and s.samples_done > 0)

    def _wait(self, process: subprocess.Popen[bytes], what: Callable[[JobView], bool]) -> None:
        while process.poll() is None and time.monotonic() < self.until:
            status = self._status()
            if status is not None and what(status):
                return
            time.sleep(0.1)

    def _alive(self, role: Role) -> list[MemberView]:
        status = self._status()
        return [m for m in (status.members if status else ()) if m.role is role and m.state == "alive" and m.pid]

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills += 1

    def _worker(self, process: subprocess.Popen[bytes]) -> None:
        if there := self._alive(Role.WORKER):
            self._kill(there[self.plan.number % len(there)].pid)

    def _newest(self, process: subprocess.Popen[bytes]) -> None:
        """One is killed; when its replacement is alive, all others."""
        there = self._alive(Role.WORKER)
        if not there:
            return
        victim = there[self.plan.number % len(there)]
        self._kill(victim.pid)

        def replaced(s: JobView) -> bool:
            return any(
                (m.role, m.slot) == (Role.WORKER, victim.slot)
                and m.incarnation > victim.incarnation
                and m.state == "alive"
                for m in s.members
            )

        self._wait(process, replaced)
        time.sleep(random.Random(self.plan.number).uniform(0.0, 1.5))
        for m in self._alive(Role.WORKER):
            if m.slot != victim.slot:
                self._kill(m.pid)

    def _all(self, process: subprocess.Popen[bytes]) -> None:
        for m in self._alive(Role.WORKER):
            self._kill(m.pid)

    def _ps(self, process: subprocess.Popen[bytes]) -> None:
        """Once everything is protected again."""
        self._wait(process, lambda s: s.protection is None or not (s.protection.less or s.protection.none))
        if there := self._alive(Role.PS):
            self._kill(there[self.plan.number % len(there)].pid)

    def _master(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            self._kill(int(json.loads((self.run_dir / "master.json").read_text())["pid"]))

    def _scale(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(EverstepError, OSError):
            ask_master(self.run_dir, ScaleAsked(Role.WORKER, 1 if self.plan.workers > 2 else 3), timeout_s=10.0)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(EverstepError, OSError):
            ask_master(self.run_dir, StopAsked("everstep stop", True), timeout_s=10.0)

    def _done(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads((self.run_dir / "summary.json").read_text())["phase"] == "done")
        return False

    def _judge(self, run_dir: Path, status: int, stopped: bool) -> tuple[str, bool]:
        text = (self.home / "out.txt").read_text(errors="replace")
        if status != 0:
            beyond = status == 4 and any(words in text for words in BEYOND)
            return ("" if beyond else f"exit code {status}: {text.strip()[-400:]}"), beyond
        try:
            report = witnessed(run_dir, audit(run_dir))
        except EverstepError as error:
            return ("" if stopped and "no model with a witness" in str(error) else str(error)), False
        fine = (Verdict.EXACT, Verdict.OPEN, Verdict.NOTHING) if stopped else (Verdict.EXACT,)
        if report.verdict not in fine or report.witness:
            return report.text(), False
        applied = report.counts.get("witnessed_samples", 0)
        if report.verdict is Verdict.EXACT and self.plan.every and applied != self.plan.samples:
            return f"{applied} samples were applied of {self.plan.samples}", False
        return "", False


def of_run(home: Path) -> list[int]:
    """Processes that were started for a run in here."""
    found = []
    needle = f"EVERSTEP_RUN_DIR={home}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def fork_server() -> Iterator[int]:
    """Processes of the jobs share one import of torch, as in the tests."""
    with tempfile.TemporaryDirectory(prefix="everstep-witness-") as folder:
        address = f"{folder}/sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(64)
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = subprocess.Popen(
            [sys.executable, str(FORKSERVER / "forkserver.py"), str(listener.fileno())],
            stdin=subprocess.PIPE,
            env={**os.environ, **single, "EVERSTEP_RUN_DIR": "-" * 1000},
            cwd=folder,
            pass_fds=[listener.fileno()],
        )
        listener.close()
        os.environ["EVERSTEP_TEST_FORKSERVER"] = address
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FORKSERVER), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()


def _cpu_s(server: int) -> float:
    """Of everything that ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = psutil.Process(server).cpu_times()
    return float(used.ru_utime + used.ru_stime + times.children_user + times.children_system)


def run(quick: bool, arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(prog="witness")
    parser.add_argument("--runs", type=int, default=len(MODES) if quick else 1000)
    parser.add_argument("--seconds", type=float, default=100.0 if quick else 3600.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args(arguments or [])
    modes = args.modes.split(",")
    end = time.monotonic() + args.seconds
    found: list[Found] = []
    lock = threading.Lock()
    home = Path(tempfile.mkdtemp(prefix="witness-", dir=args.keep))

    def one(number: int) -> None:
        if time.monotonic() > end:
            return
        plan = Plan.of(number, modes)
        folder = home / f"{number}"
        folder.mkdir()
        began = time.monotonic()
        job = Job(plan, folder)
        problem, beyond = job.go()
        result = Found(plan, problem, beyond, job.kills, time.monotonic() - began)
        with lock:
            found.append(result)
            word = "DIFFERS" if problem else "beyond its protection" if beyond else "agrees"
            hurts = ", ".join(f"{what} at {share:.0%}" for share, what in plan.hurts)
            say(f"{number} {plan.mode} {' '.join(plan.script)}: {hurts}: {word} ({result.seconds:.0f} s) {problem}")
        if not problem:
            shutil.rmtree(folder, ignore_errors=True)

    with fork_server() as server:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(one, range(args.seed, args.seed + args.runs)))
        cpu_s = _cpu_s(server)
    if not any(f.problem for f in found):
        shutil.rmtree(home, ignore_errors=True)
    figures: dict[str, Any] = {
        "runs": len(found),
        "kills": sum(f.kills for f in found),
        "agree": sum(not f.problem and not f.beyond for f in found),
        "beyond_protection": sum(f.beyond for f in found),
        "differ": sum(bool(f.problem) for f in found),
        "resumed": sum(f.plan.resumed > 0 for f in found),
        "cpu_s_per_run": round(cpu_s / max(1, len(found)), 2),
        **{f"runs {mode}": n for mode, n in sorted(Counter(f.plan.mode for f in found).items())},
    }
    aims = {"differ": "0"}
    return {"figures": figures, "aims": aims, "holds": {"differ": figures["differ"] == 0}, "spread": {}}
