"""Two versions by turns, in blocks of a second: three jobs stand side by side, two of them always stopped (SIGSTOP).

Two jobs are of the old version and one of the new one; each runs for one block in each turn, in a changing order. So
a slow spell of the machine hits all three. What a job does in a block, and the CPU seconds of all its processes, are
read while it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from benchmarks._measure import ROOT, say

SCRIPT = ROOT / "benchmarks" / "_block_job.py"
SLOTS = 64
START_S = 180.0
SIDES = ("old", "new", "again")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CONTROL = """
import subprocess, sys, tempfile, time
from pathlib import Path
from benchmarks import control_plane as plane
run_dir, script, counts = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
plane._prepare(run_dir, workers=plane.CLIENTS, ps=1, lost_after_s=3600.0, suspect_after_s=1800.0)
server = subprocess.Popen([sys.executable, "-m", "everstep.master", str(run_dir)])
plane._wait_for(run_dir, server)
kept = plane._agent(run_dir)
plane._register(run_dir)
clients = [
    subprocess.Popen([sys.executable, script, "client", counts, str(slot), str(run_dir)],
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for slot in range(plane.CLIENTS)]
for one in clients:
    assert one.stdout.readline() == "ready\\n"
for one in clients:
    one.stdin.write("go\\n")
    one.stdin.flush()
server.wait()
"""


class StoppedJob:
    """A job that runs only between ``go`` and ``stop``. ``tree``: the checkout whose version it is."""

    def __init__(self, part: str, tree: Path, python: str, home: Path, data: Path) -> None:
        self.counts = home / "counts"
        self.counts.write_bytes(bytes(8 * SLOTS))
        (home / "job.yaml").write_text("lost_after_s: 3600\nsuspect_after_s: 1800\n")
        path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env = {**os.environ, **threads, "PYTHONPATH": str(tree), "PATH": path}
        run_dir = str(home / "run")
        if part == "control_plane":
            command = [python, "-c", _CONTROL, run_dir, str(SCRIPT), str(self.counts)]
        else:
            size = ["--ps", "1"] if part == "throughput" else ["--mode", "allreduce"]
            command = [python, "-m", "everstep.cli", "run", "--workers", "2", *size, "--run-dir", run_dir]
            command += ["-c", str(home / "job.yaml"), "--", str(SCRIPT), part, str(self.counts), str(data)]
        self.log = home / "log"
        with self.log.open("wb") as out:
            self.root = subprocess.Popen(command, cwd=tree, env=env, stdout=out, stderr=out, start_new_session=True)
        self.only = part == "control_plane"
        self.pids: list[int] = []
        self.master: list[int] = []

    def count(self) -> int:
        return sum(struct.unpack(f"<{SLOTS}q", self.counts.read_bytes()))

    def begin(self, enough: int) -> None:
        """Wait until the job has done ``enough``, note its processes, stop them. Raises RuntimeError."""
        end = time.monotonic() + START_S
        while self.count() < enough:
            if self.root.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the job did not begin:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)
        root = psutil.Process(self.root.pid)
        found = [root, *root.children(recursive=True)]
        self.pids = [p.pid for p in found]
        self.master = [p.pid for p in found if "everstep.master" in p.cmdline()]
        self.stop()

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def go(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def check(self) -> None:
        """Raises RuntimeError where a process was replaced: the new one was never stopped, nor its CPU counted."""
        root = psutil.Process(self.root.pid)
        new = {p.pid for p in root.children(recursive=True)} - set(self.pids)
        if new:
            raise RuntimeError(f"processes {sorted(new)} of {self.log.parent.name} came later: take shorter blocks")

    def cpu_s(self) -> float:
        """CPU seconds of all processes, of control_plane of the master."""
        ticks = 0
        for pid in self.master if self.only else self.pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks * _TICK_S

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.root.pid)
            self.pids = list({*self.pids, self.root.pid, *(p.pid for p in root.children(recursive=True))})
        self._signal(signal.SIGKILL)
        self.root.wait(30)


@contextlib.contextmanager
def _three(part: str, trees: dict[str, tuple[Path, str]], data: Path, enough: int) -> Iterator[list[StoppedJob]]:
    with tempfile.TemporaryDirectory(prefix="everstep-blocks-", ignore_cleanup_errors=True) as folder:
        jobs: list[StoppedJob] = []
        try:
            for side in SIDES:
                home = Path(folder) / side
                home.mkdir()
                jobs.append(StoppedJob(part, *trees["new" if side == "new" else "old"], home, data))
                jobs[-1].begin(enough)
            yield jobs
        finally:
            for job in jobs:
                job.end()


def compare(
    part: str, trees: dict[str, tuple[Path, str]], data: Path, turns: int, block_s: float, enough: int
) -> dict[str, list[float]]:
    """Ratios new / old of ``turns`` turns: ``rate`` and ``cpu`` (a unit of work), and ``.aa`` of the two old jobs."""
    out: dict[str, list[float]] = {"rate": [], "cpu": [], "rate.aa": [], "cpu.aa": []}
    with _three(part, trees, data, enough) as jobs:
        for turn in range(turns):
            done, cpu, took = np.zeros(3), np.zeros(3), np.zeros(3)
            for place in range(3):
                at = (turn + place) % 3
                job = jobs[at]
                done[at], cpu[at], began = -job.count(), -job.cpu_s(), time.perf_counter()
                job.go()
                time.sleep(block_s)
                job.stop()
                took[at] = time.perf_counter() - began
                time.sleep(0.02)
                done[at] += job.count()
                cpu[at] += job.cpu_s()
            if turn < 3 or done.min() <= 0:
                continue
            for name, values in (("rate", done / took), ("cpu", cpu / done)):
                out[name].append(float(values[1] / ((values[0] + values[2]) / 2)))
                out[f"{name}.aa"].append(float(values[2] / values[0]))
            if turn % 20 == 0:
                for job in jobs:
                    job.check()
                load = os.getloadavg()[0]
                middle = {name: round(float(np.median(values)), 4) for name, values in out.items()}
                say(f"{part} turn {turn}/{turns}: {middle}, load {load:.1f}")
    return out
