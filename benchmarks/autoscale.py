"""Policy ``auto`` in real jobs: how near it comes to the best size, how soon, in how many changes, and alone by roles.

All processes are real: master, ps, workers, data, pushes. **The time of the devices is emulated**, so that two cores
carry eight workers: workers, ps and the source of the data sleep (``_autoscale_script.py``, ``twins/emulated_ps``). A
worker's device takes so long for a sample, one ps serves one request at a time and takes so long for a row, and one
source of data serves all workers, one batch at a time.

Regimes: ``workers`` (what each worker computes binds), ``ps`` (both are short by turns), ``data`` (the source serves
four workers), ``shift`` (``workers`` at first, ``ps`` after half of the time). Sizes go to ``--workers`` and ``--ps``.

The sweep goes through all sizes in one job without a policy, by ``everstep scale``; ``best`` is the highest samples/s
of them, and the best size is measured twice (A/A). Then each job begins with one worker and one ps, and ``auto`` has it
for ``--for-s`` seconds: with both roles (``joint``), or one role alone (``workers_alone``, ``ps_alone``).

    REGIME.share: samples/s of the last quarter of the time, over the best (of ``shift``: of its second half's regime)
    REGIME.reached_s: seconds from the first batch until a window of 5 s had 95 % of the best; of ``shift`` the longer
        one of both halves, each from its beginning
    REGIME.changes: of size
    REGIME.step_back: samples/s of a settled time at one size over that of the one before, the lowest (1: none was)
    REGIME.over_alone: joint's share over that of the better role alone

    --only ps --workers 8 --ps 4 --rounds 1 --for-s 80 --window-s 10 (of the policy; 10 is what jobs have)
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks._demands import VARIABLE, Costs
from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Child, Result, beside, everstep, interleaved, median, say, spread
from everstep.brain.events import Refused, ScaleAsked
from everstep.cli.link import ask_master
from everstep.model.job_view import ShownState
from everstep.model.member import Role

SCRIPT = ROOT / "benchmarks" / "_autoscale_script.py"
HOOK = ROOT / "benchmarks" / "twins" / "emulated_ps"
BATCH, KEYS = 50, 16
ROW_S = 1e-3 / (2 * KEYS)  # 1 ms of a ps for a sample: each of its rows is pulled and pushed
COSTS = {
    "workers": Costs(6e-3, 0.0, 0.05 * ROW_S),
    "ps": Costs(3e-3, 0.0, 2.5 * ROW_S),
    "data": Costs(6e-3, 1.5e-3, 0.05 * ROW_S),
}
REGIMES = {"workers": ("workers",), "ps": ("ps",), "data": ("data",), "shift": ("workers", "ps")}
SPAN_S = 5.0  # of a window in which a rate is looked at
NEAR = 0.95
Size = tuple[int, int]


class EmulatedJob(Job):
    """Is a job on emulated machines, whose costs may change. ``close`` ends it at once."""

    def __init__(self, home: Path, costs: Costs, flags: Sequence[str], window_s: float, limit_s: float) -> None:
        self.marks, self.demands = home / "marks", home / "demands.json"
        self.marks.mkdir()
        self.pay(costs)
        env = {
            VARIABLE: str(self.demands), "PYTHONPATH": f"{HOOK}:{ROOT}", "EVERSTEP_WINDOW_S": str(window_s),
            "EVERSTEP_HISTORY": "off",
        }  # fmt: skip
        verb = ["run", *flags, "--no-display", "--model-to", "none"]
        super().__init__(home, verb, ["--", str(SCRIPT), str(self.marks), str(BATCH), str(KEYS)], limit_s, env=env)

    def pay(self, costs: Costs) -> None:
        """Have a sample cost this much from now on."""
        costs.write(self.demands)

    def size(self) -> Size:
        """Return how many workers and ps are up now, if nobody comes or goes, and no partition moves; else (0, 0)."""
        status = self.status()
        if status is None or not status.members_wanted:
            return 0, 0
        up = {
            role: sum((m.role, m.state) == (role, ShownState.ALIVE) for m in status.members)
            for role in (Role.WORKER, Role.PS)
        }
        moves = status.protection is not None and status.protection.moving
        going = any(m.state is ShownState.STARTING for m in status.members)
        wanted = status.members_wanted.get("worker", 0), status.members_wanted.get("ps", 0)
        size = up[Role.WORKER], up[Role.PS]
        return size if not moves and not going and size == wanted else (0, 0)

    def scale(self, size: Size) -> None:
        """Have this size, and wait for it."""
        answer = ask_master(self.run_dir, ScaleAsked(Role.WORKER, size[0], ((Role.PS, size[1]),)), timeout_s=10.0)
        if isinstance(answer, Refused):
            raise RuntimeError(f"{size}: {answer.error}")
        self.wait_for(lambda: self.size() == size)

    def trained_since(self, at: float) -> int:
        """Return how many workers have trained a batch since this moment (seconds since 1970)."""
        return sum(path.stat().st_mtime > at for path in self.marks.glob("[0-9]*"))

    def done(self) -> NDArray[np.float64]:
        """Return float64 [n, 2]: when each batch was done (seconds of the monotonic clock), and its samples."""
        found = []
        for path in self.marks.glob("[0-9]*"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    samples, at = line.split()
                    found.append((float(at), float(samples)))
        return np.array(sorted(found) or np.zeros((0, 2)))

    def rate(self, begin: float, end: float) -> float:
        """Return samples/s between two moments."""
        return rate(self.done(), begin, end)

    def check_whole(self) -> None:
        """Stop the job. Raise RuntimeError unless its audit says that each sample counted exactly once."""
        self.pay(Costs())
        with Child(everstep("stop", self.run_dir)) as stop:
            stop.finish(120.0)
        while not self.over and time.monotonic() < self.until:
            time.sleep(0.1)
        self.check()


def rate(done: NDArray[np.float64], begin: float, end: float) -> float:
    inside = (done[:, 0] >= begin) & (done[:, 0] < end)
    return float(done[inside, 1].sum() / (end - begin)) if end > begin else 0.0


# ---------------------------------------------------------------- the sweep


class Swept(NamedTuple):
    """Is what a sweep found: samples/s by size, and the best size measured a second time over the first."""

    rates: dict[Size, float]
    again: float

    @property
    def best(self) -> float:
        return max(self.rates.values())

    @property
    def best_size(self) -> Size:
        """Return the smallest size within 1 % of the best."""
        return min((s for s, r in self.rates.items() if r >= 0.99 * self.best), key=sum)


def sweep(costs: Costs, bounds: Size, settle_s: float, span_s: float) -> Swept:
    """Measure all sizes in one job."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        job = EmulatedJob(Path(folder), costs, ["--workers", "1", "--ps", "1"], 10.0, 3600.0)
        try:
            job.wait_for(lambda: job.size() == (1, 1) and len(job.done()) > 3)
            rates = {}
            for ps in range(1, bounds[1] + 1):
                for workers in range(1, bounds[0] + 1):
                    rates[workers, ps] = _settled(job, (workers, ps), settle_s, span_s)
            best = max(rates, key=lambda size: rates[size])
            job.scale((1, 1))
            again = _settled(job, best, settle_s, span_s)
            job.check_whole()
            return Swept(rates, again / rates[best])
        finally:
            job.close()


def _settled(job: EmulatedJob, size: Size, settle_s: float, span_s: float) -> float:
    job.scale(size)
    up_at = time.time()
    job.wait_for(lambda: job.trained_since(up_at) >= size[0])
    time.sleep(settle_s)
    at = time.monotonic()
    time.sleep(span_s)
    return job.rate(at, at + span_s)


# ---------------------------------------------------------------- a job that scales itself


class Ran(NamedTuple):
    """Is what became of a job under ``auto``: see the figures at the top."""

    rate: float
    reached_s: float
    changes: int
    step_back: float
    sizes: tuple[Size, ...]


def run_auto(parts: Sequence[tuple[Costs, float]], bounds: Size, roles: str, for_s: float, window_s: float) -> Ran:
    """Run a job under ``auto``. ``parts``: costs, and the best samples/s with them, one after the other."""
    workers = "1" if roles == "ps" else "auto"
    ps = "1" if roles == "workers" else "auto"
    flags = ["--workers", workers, "--ps", ps]
    flags += ["--max-workers", str(bounds[0])] if workers == "auto" else []
    flags += ["--max-ps", str(bounds[1])] if ps == "auto" else []
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        job = EmulatedJob(Path(folder), parts[0][0], flags, window_s, 600.0 + for_s)
        try:
            job.wait_for(lambda: len(job.done()) > 0)
            began = time.monotonic()
            seen: list[tuple[float, Size]] = []
            turns = [began + for_s * i / len(parts) for i in range(len(parts) + 1)]
            for (costs, _), end in zip(parts, turns[1:], strict=True):
                job.pay(costs)
                while time.monotonic() < end:
                    size = job.size()
                    if not seen or seen[-1][1] != size:
                        seen.append((time.monotonic(), size))
                    if job.over:
                        raise RuntimeError(f"the job has ended:\n{job.words()}")
                    time.sleep(0.2)
            done = job.done()
            job.check_whole()
        finally:
            job.close()
    settled = _settled_times(seen, turns)
    path = [size for _, size in seen if size != (0, 0)]
    path = [size for i, size in enumerate(path) if i == 0 or size != path[i - 1]]
    reached = [
        _reached(done, begin, end, NEAR * best) for (_, best), begin, end in zip(parts, turns, turns[1:], strict=False)
    ]
    return Ran(
        rate(done, turns[-1] - for_s / len(parts) / 4, turns[-1]),
        max(reached),
        len(path) - 1,
        _step_back(done, settled),
        tuple(path),
    )


def _settled_times(seen: Sequence[tuple[float, Size]], turns: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Return the times of at least ``SPAN_S`` at one size, without the first second, for each part."""
    ends = [at for at, _ in seen[1:]] + [turns[-1]]
    out: list[list[tuple[float, float]]] = []
    for begin, end in pairwise(turns):
        spans = [
            (max(at + 1.0, begin + 1.0), min(until, end))
            for (at, size), until in zip(seen, ends, strict=True)
            if size != (0, 0)
        ]
        out.append([(a, b) for a, b in spans if b - a >= SPAN_S])
    return out


def _step_back(done: NDArray[np.float64], settled: list[list[tuple[float, float]]]) -> float:
    lowest = 1.0
    for spans in settled:
        rates = [rate(done, a, b) for a, b in spans]
        lowest = min([lowest, *(b / a for a, b in pairwise(rates) if a)])
    return lowest


def _reached(done: NDArray[np.float64], begin: float, end: float, aim: float) -> float:
    """Return the seconds until a window of ``SPAN_S`` had this rate; inf: none had."""
    for at in np.arange(begin + SPAN_S, end, 0.25):
        if rate(done, at - SPAN_S, at) >= aim:
            return float(at - begin)
    return float("inf")


# ---------------------------------------------------------------- all of it


def run(quick: bool, arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks autoscale", description=__doc__)
    parser.add_argument("--only", choices=REGIMES, default="ps" if quick else None)
    parser.add_argument("--workers", type=int, default=2 if quick else 8)
    parser.add_argument("--ps", type=int, default=2 if quick else 4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--for-s", type=float, default=16.0 if quick else 80.0)
    parser.add_argument("--window-s", type=float, default=2.0 if quick else 10.0)
    parser.add_argument("--settle-s", type=float, default=1.0 if quick else 2.0)
    parser.add_argument("--span-s", type=float, default=2.5 if quick else 6.0)
    args = parser.parse_args(list(arguments or []))
    bounds = args.workers, args.ps
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures, spreads = result["figures"], result["spread"]
    chosen = [args.only] if args.only else list(REGIMES)
    swept: dict[str, Swept] = {}
    for name in dict.fromkeys(part for regime in chosen for part in REGIMES[regime]):
        swept[name] = found = sweep(COSTS[name], bounds, args.settle_s, args.span_s)
        say(f"{name}: best {found.best:,.0f} samples/s with {found.best_size}, again {found.again:.3f}: {found.rates}")
        figures[f"{name}.best_samples_per_s"] = found.best
        figures[f"{name}.best_workers"], figures[f"{name}.best_ps"] = found.best_size
        beside(figures, spreads, [found.again], f"{name}.best_samples_per_s")
    for regime in chosen:
        parts = [(COSTS[name], swept[name].best) for name in REGIMES[regime]]
        for_s = args.for_s * len(parts)
        roles = ("joint", "workers", "ps")
        sides = {role: partial(run_auto, parts, bounds, role, for_s, args.window_s) for role in roles}
        ran = interleaved(sides, args.rounds, say)
        best = parts[-1][1]
        shares = {role: [one.rate / best for one in ran[role]] for role in roles}
        joint: list[Ran] = ran["joint"]
        values = {
            "share": shares["joint"],
            "reached_s": [one.reached_s for one in joint],
            "changes": [float(one.changes) for one in joint],
            "step_back": [one.step_back for one in joint],
            "over_alone": [a / max(b, c) for a, b, c in zip(*(shares[role] for role in roles), strict=True)],
            "workers_alone": shares["workers"],
            "ps_alone": shares["ps"],
        }
        for what, each in values.items():
            figures[f"{regime}.{what}"], spreads[f"{regime}.{what}"] = median(each), spread(each)
        beside(figures, spreads, ran.noise(lambda one: one.rate), f"{regime}.share")
        aims = {
            "share": (">= 0.95", min(values["share"]) >= NEAR),
            "reached_s": ("<= 60", max(values["reached_s"]) <= 60.0),
            "changes": ("<= 6", max(values["changes"]) <= 6),
            "step_back": (">= 0.95", min(values["step_back"]) >= NEAR),
            "over_alone": (">= 0.97 (1, less its noise)", median(values["over_alone"]) >= 0.97),
        }
        for what, (aim, holds) in aims.items():
            result["aims"][f"{regime}.{what}"], result["holds"][f"{regime}.{what}"] = aim, holds
    return result
