"""Runs short jobs that measure a script: real processes of this machine, a run directory that is removed."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from everstep.bounds import MALFORMED
from everstep.cli.link import ask_view
from everstep.errors import EverstepError, PlatformError, ScriptError
from everstep.model.member import Role
from everstep.monitor.vitals import children, peak_bytes, read_vitals
from everstep.sizing.probe_readings import ProbeRun, ScriptReading

_VARIABLE: Final = "EVERSTEP_PROBE"  # api/probe.py says what it holds; that needs torch
_LOOK_S: Final = 0.05
_decoder = msgspec.json.Decoder(ScriptReading)
_ENDED: Final = "the script ended before its loop was measured"


class ProbeAsk(NamedTuple):
    """Says what to run. ``limit_s``: from the command to the end of the window; ``scan_s``: for keys, beside it;
    ``first``: the window sees the first so many samples, for the second time; 0: any, for the first time."""

    script: Path
    args: tuple[str, ...]
    flags: tuple[str, ...]  # of everstep run
    workers: int
    ps: int
    cores: int
    window_s: float
    scan_s: float
    limit_s: float
    stages: int = 1
    first: int = 0


class _ProcessLook(NamedTuple):
    """Is one look at a process: processor seconds and peak resident bytes so far."""

    at: float
    cpu_s: float
    peak_bytes: int


class _Moment(NamedTuple):
    """Is a reading that only grows, and when it was taken."""

    at: float
    value: float


class _Watch:
    """Reads what the processes of a job take, from outside, again and again."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._roles: dict[int, Role] = {}
        self._seen: dict[int, list[_ProcessLook]] = {}
        self._asked_at = -math.inf
        self._machine: list[_Moment] = []
        self.rows: list[_Moment] = []

    def look(self) -> None:
        now = time.monotonic()
        if now - self._asked_at > 0.5:
            self._asked_at = now
            with contextlib.suppress(EverstepError, OSError):
                view = ask_view(self._run_dir, speed=True, timeout_s=1.0)
                self._roles.update({m.pid: m.role for m in view.members if m.pid})
                if view.speed is not None:
                    self.rows.append(_Moment(now, sum(c.rows or 0.0 for c in view.speed.counters)))
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # (counted as user, too)
        self._machine.append(_Moment(now, sum(times) - idle_s - guest_s))
        for pid in self._roles:
            vitals, peak = read_vitals(pid), peak_bytes(pid)
            if vitals is not None:
                for child in children(pid) if self._roles[pid] is Role.WORKER else ():
                    peak = max(peak, peak_bytes(child))
                self._seen.setdefault(pid, []).append(_ProcessLook(time.monotonic(), vitals.cpu_s, peak))

    def cpu_s(self, role: Role, begin_at: float, end_at: float) -> float:
        """Return the processor seconds of all processes of a role between two moments."""
        return sum(
            _grown([_Moment(s.at, s.cpu_s) for s in seen], begin_at, end_at)
            for pid, seen in self._seen.items()
            if self._roles[pid] is role
        )

    def new_rows(self, begin_at: float, end_at: float) -> float:
        """Return how many rows the ps made between two moments, by their beats."""
        return _grown(self.rows, begin_at, end_at)

    def others_cores(self, begin_at: float, end_at: float) -> float:
        """Return how many cores processes that are not the job's kept busy between two moments."""
        whole = _grown(self._machine, begin_at, end_at)
        own = sum(self.cpu_s(role, begin_at, end_at) for role in Role)
        return max(0.0, whole - own) / max(1e-9, end_at - begin_at)

    def peak(self, role: Role, end_at: float) -> int:
        """Return the peak of the largest process of a role up to a moment."""
        found = [
            s.peak_bytes for p, seen in self._seen.items() if self._roles[p] is role for s in seen if s.at <= end_at
        ]
        return max(found, default=0)


def _grown(seen: Sequence[_Moment], begin_at: float, end_at: float) -> float:
    """Return by how much a reading grew between two moments."""
    return _between(seen, end_at) - _between(seen, begin_at)


def _between(seen: Sequence[_Moment], at: float) -> float:
    """Return the reading at a moment, from those on both sides of it."""
    for a, b in pairwise(seen):
        if a.at <= at <= b.at:
            return a.value + (b.value - a.value) * (at - a.at) / max(1e-9, b.at - a.at)
    return seen[0].value if seen and at < seen[0].at else seen[-1].value if seen else 0.0


def run_probe(ask: ProbeAsk) -> ProbeRun:
    """Run the script with so many workers and ps until its loop was measured. Raises ScriptError: the script failed,
    or ended before; PlatformError: it took too long."""
    home = Path(tempfile.mkdtemp(prefix="everstep-estimate-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        order = {"folder": str(home), "window_s": ask.window_s, "scan_s": ask.scan_s, "first": ask.first}
        env = {**os.environ, _VARIABLE: msgspec.json.encode(order).decode(), "EVERSTEP_HISTORY": "off"}
        run_dir = home / "run"
        sizes = ["--workers", str(ask.workers), "--ps", str(ask.ps)]
        own = ["--no-display", "--model-to", "none", "--run-dir", str(run_dir), "--name", "estimate"]
        command = [sys.executable, "-m", "everstep.cli", "run", *sizes, *own, *ask.flags]
        began = time.monotonic()
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--", str(ask.script), *ask.args],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        watch = _Watch(run_dir)
        readings = _wait(process, home, watch, ask, began)
        begin_at = max(r.begin_at for r in readings)
        end_at = min(r.end_at for r in readings)
        if ask.scan_s:
            readings[0] = _scanned(process, home, ask)
        return _probe_run(ask, readings, watch, began, begin_at, end_at)
    finally:
        if process is not None:
            _end(process)
        shutil.rmtree(home, ignore_errors=True)


def _wait(
    process: subprocess.Popen[bytes], home: Path, watch: _Watch, ask: ProbeAsk, began: float
) -> list[ScriptReading]:
    """Return what each worker measured."""
    until = began + ask.limit_s
    while True:
        found = [_read(home / f"worker-{slot}.window.json") for slot in range(ask.workers)]
        readings = [r for r in found if r is not None]
        if len(readings) == ask.workers:
            watch.look()
            return readings
        if process.poll() is not None:
            raise ScriptError(f"{ask.script}: {_ENDED}: {_last_words(home / 'log')}")
        if time.monotonic() > until:
            raise PlatformError(
                f"{ask.script}: no loop was measured within {ask.limit_s:g} s: give it longer with --limit, or use "
                f"--no-run; last words: {_last_words(home / 'log')}"
            )
        watch.look()
        time.sleep(_LOOK_S)


def _scanned(process: subprocess.Popen[bytes], home: Path, ask: ProbeAsk) -> ScriptReading:
    until = time.monotonic() + ask.scan_s + ask.limit_s
    while time.monotonic() < until:
        if (reading := _read(home / "worker-0.scanned.json")) is not None:
            return reading
        if process.poll() is not None:
            raise ScriptError(f"{ask.script}: the data could not be read: {_last_words(home / 'log')}")
        time.sleep(_LOOK_S)
    raise PlatformError(f"{ask.script}: keys were not counted within {ask.scan_s + ask.limit_s:g} s; see --limit")


def _read(path: Path) -> ScriptReading | None:
    try:
        return _decoder.decode(path.read_bytes())
    except (OSError, *MALFORMED):
        return None


def _probe_run(
    ask: ProbeAsk, readings: list[ScriptReading], watch: _Watch, began: float, begin_at: float, end_at: float
) -> ProbeRun:
    samples = max(1.0, sum(r.samples_per_s for r in readings) * (end_at - begin_at))

    rate = sum(r.samples_per_s for r in readings)
    steps = readings[0].step_s
    spread = statistics.stdev(steps) / statistics.fmean(steps) / math.sqrt(len(steps)) if len(steps) > 1 else 1.0

    return ProbeRun(
        workers=ask.workers,
        ps=ask.ps,
        cores=ask.cores,
        samples_per_s=rate,
        spread=spread,
        worker_cpu_s=watch.cpu_s(Role.WORKER, begin_at, end_at) / samples,
        ps_cpu_s=watch.cpu_s(Role.PS, begin_at, end_at) / samples,
        worker_peak_bytes=watch.peak(Role.WORKER, end_at),
        ps_peak_bytes=watch.peak(Role.PS, end_at),
        master_peak_bytes=watch.peak(Role.MASTER, end_at),
        start_s=readings[0].begin_at - began,
        script=readings[0],
        stages=ask.stages,
        others_cores=watch.others_cores(begin_at, end_at),
        rows=_between(watch.rows, end_at),
        rows_per_sample=max(0.0, watch.new_rows(begin_at, end_at)) / samples,
    )


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        messages = [line for line in lines if line.startswith("everstep: ") and "run directory" not in line[:60]]
        if messages or lines:
            return (messages or lines)[-1].removeprefix("everstep: ").partition("; log:")[0]
    return "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job with all of its processes: none of them outlives the command that started it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def declared_mode(script: Path) -> str:
    """Return the mode that a script names in ``join(mode="...")``; "": none. The script is read, not run."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.Call) and _called(node.func) == "join":
                for word in node.keywords:
                    if (
                        word.arg == "mode"
                        and isinstance(word.value, ast.Constant)
                        and isinstance(word.value.value, str)
                    ):
                        return word.value.value
    return ""


def _called(function: Any) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))
