"""Tools shared by the benchmarks: interleaved rounds, their noise, medians and spreads, CPU time, child processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by ranks."""
    ranked, n = sorted(values), len(values)
    away = math.ceil(1.96 * math.sqrt(n) / 2)
    return ranked[max(0, n // 2 - away)], ranked[min(n - 1, n // 2 + away)]


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    ranked = sorted(values)
    return float(ranked[max(0, -(-95 * len(ranked) // 100) - 1)])


QUIET_LOAD = 0.5
"""A machine is quiet if its load of the last minute (``os.getloadavg``) is below this."""
QUIET_WAIT_S = 600.0
QUICK_S = 110.0


class Conditions:
    """What a run says about its machine: the load when the run began and before each round, and the rounds.

    ``wait``: wait before each round until the machine is quiet, at most ``QUIET_WAIT_S``; the load of a minute also
    holds the round before. ``limit_s``: a second measurement of one side (A/A) is left out if the run would take longer
    with it.
    """

    def __init__(self, wait: bool = False, limit_s: float = float("inf")) -> None:
        self.began = time.monotonic()
        self.load_began = os.getloadavg()[0]
        self.loads: list[float] = []
        self.raw: list[dict[str, list[Any]]] = []
        self._wait = wait
        self._limit_s = limit_s
        self._series: list[int] = []

    def series(self) -> None:
        """Several rounds of the same sides begin."""
        self._series.append(0)

    def add_rounds(self, count: int) -> None:
        """``count`` rounds of the newest series were in one job, so no load was noted between them."""
        self._series[-1] += count

    def round(self) -> None:
        """A round begins."""
        end = time.monotonic() + QUIET_WAIT_S
        while self._wait and os.getloadavg()[0] >= QUIET_LOAD and time.monotonic() < end:
            time.sleep(2.0)
        self.loads.append(os.getloadavg()[0])
        if self._series:
            self._series[-1] += 1

    def has_time(self, seconds: float) -> bool:
        """Whether the run may take ``seconds`` more."""
        return time.monotonic() - self.began + seconds <= self._limit_s

    @property
    def rounds(self) -> int:
        """Rounds of the shortest series; 1 if the benchmark has none."""
        return min(self._series, default=1)

    @property
    def quiet(self) -> bool:
        """Whether the machine was quiet when the run began and before each round."""
        return max([self.load_began, *self.loads]) < QUIET_LOAD

    def facts(self) -> dict[str, Any]:
        """What enters the result."""
        loads = [round(load, 2) for load in self.loads]
        return {"rounds": self.rounds, "quiet": self.quiet, "load_began": round(self.load_began, 2), "loads": loads}


_now = Conditions()


def begin(wait: bool = False, limit_s: float = float("inf")) -> Conditions:
    """Start to note the conditions of a run."""
    global _now
    _now = Conditions(wait, limit_s)
    return _now


def each_round(rounds: int) -> Iterator[int]:
    """Numbers of rounds from 0; the load before each is noted."""
    _now.series()
    for number in range(rounds):
        _now.round()
        yield number


def rounds_of_one_job(rounds: int) -> Iterable[int]:
    """Numbers of rounds from 0, in jobs that are there for all of them: the load is noted once, before the first."""
    _now.series()
    _now.round()
    _now.add_rounds(rounds - 1)
    return range(rounds)


def note_rounds(count: int) -> None:
    """``count`` rounds were inside of one job; the shortest series counts."""
    _now.series()
    _now.add_rounds(count)


class Rounds(dict[str, list[Any]]):
    """Results by side, in order of rounds. ``again``: pairs (first, second) of the side that was measured twice."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__((name, []) for name in names)
        self.again: list[tuple[Any, Any]] = []

    def noise(self, pick: str | Callable[[Any], float] = float) -> list[float]:
        """The second measurement over the first, by rounds (A/A). ``pick``: the number of a result, or its key."""
        number = pick if callable(pick) else lambda result: float(result[pick])
        return [number(second) / number(first) for first, second in self.again if number(first)]


def interleaved(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    say: Callable[[str], None],
    twice: str = "",
    follow: int = 0,
    numbers: Iterable[int] = (),
) -> Rounds:
    """Run every side once a round, starting with another one each round, so that a slow spell of the machine hits
    all of them. Returns the results by side, in order of rounds.

    ``twice`` names the side that is measured a second time in each round (the first side if it names none): only noise
    makes the two differ. The second time is left out where the run would take too long with it (``begin``).
    ``follow``: series of about this length that follow in this run. ``numbers``: of the rounds, from
    ``rounds_of_one_job``; then, with three sides or more, other sides are between the two measurements: a job that goes
    on after itself is faster than one that goes on after another.
    """
    names = list(sides)
    twice = twice or names[0]
    if twice not in sides:
        raise KeyError(f"no side '{twice}': there are {', '.join(names)}")
    out = Rounds(names)
    took_s: dict[str, float] = {}
    turns: list[str | None] = [*names]
    turns.insert(names.index(twice) + 2 if numbers else len(names), None)
    for number in numbers or each_round(rounds):
        second: list[Any] = []
        at = number % len(turns)
        for place, name in enumerate(turns[at:] + turns[:at]):
            side = name or twice
            if name is None and took_s:
                more = len(names) - place + len(names) * (rounds - number - 1 + rounds * follow)
                if not _now.has_time((1 + more) * sum(took_s.values()) / len(took_s)):
                    continue
            began = time.monotonic()
            result = sides[side]()
            took_s[side] = time.monotonic() - began
            (second if name is None else out[side]).append(result)
            say(f"round {number + 1}/{rounds} {side}{' again' if name is None else ''}: {result}")
        out.again += [(out[twice][-1], value) for value in second]
    _now.raw.append({**out, f"{twice} again": [value for _, value in out.again]})
    return out


def beside(
    figures: dict[str, Any], spreads: dict[str, Any], ratios: Sequence[float], claims: Sequence[str] | str
) -> None:
    """Put an A/A ratio beside each claim, as figure ``CLAIM.aa`` with its spread. Nothing without ratios."""
    for claim in [claims] if isinstance(claims, str) else claims:
        if ratios:
            figures[f"{claim}.aa"], spreads[f"{claim}.aa"] = median(ratios), spread(ratios)


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
