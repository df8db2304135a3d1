"""Tools shared by the benchmarks: interleaved rounds, medians and spreads, CPU time, child processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, dict[str, Any]]
"""``{"figures", "aims", "holds", "spread"}``."""


def machine() -> str:
    """The machine in words: processor, cores, memory, kernel."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gb = psutil.virtual_memory().total / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GB, Linux {platform.release().partition('-')[0]}"


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest."""
    return float(min(values)), float(max(values))


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    ranked = sorted(values)
    return float(ranked[max(0, -(-95 * len(ranked) // 100) - 1)])


def interleaved(
    sides: Mapping[str, Callable[[], Any]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[Any]]:
    """Run every side once a round, starting with another one each round, so that a slow spell of the machine hits
    all of them. Returns the results by side, in order of rounds."""
    names = list(sides)
    out: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(rounds):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            out[name].append(sides[name]())
            say(f"round {number + 1}/{rounds} {name}: {out[name][-1]}")
    return out


def say(line: str) -> None:
    """Progress, at once."""
    print(line, flush=True)


def cpu_of_tree_s(pid: int) -> float:
    """CPU seconds (user + system) of a living process, its living descendants, and those they have waited for."""
    try:
        root = psutil.Process(pid)
        times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0.0
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


class Child:
    """A process of a benchmark in a session of its own; whatever it leaves is killed with it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, log: Path | None = None) -> None:
        self.command = list(command)
        self._log = log.open("ab") if log is not None else None
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log or subprocess.PIPE,
            stderr=subprocess.STDOUT if self._log else subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def finish(self, timeout_s: float) -> str:
        """Wait for its end; its standard output. RuntimeError with its last words when it fails or takes too long."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"{' '.join(self.command)} took more than {timeout_s:.0f} s") from None
        if self.process.returncode:
            words = "\n".join(((out or "") + (err or "")).splitlines()[-15:])
            raise RuntimeError(f"{' '.join(self.command)} ended with {self.process.returncode}:\n{words}")
        return out or ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        if self._log is not None:
            self._log.close()


def last_json(text: str) -> dict[str, Any]:
    """The last line of ``text`` that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"no JSON line in:\n{text[-2000:]}")


def python(*arguments: str | Path) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def everstep(*arguments: str | Path) -> list[str]:
    """The everstep command of this interpreter."""
    return python("-m", "everstep.cli.main", *arguments)
