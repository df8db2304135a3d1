"""Measures the goodput of a pipeline against how often a stage is killed, beside a restart from the newest checkpoint.

Goodput: steps that count, times the usual length of a step, over the time that passed. ``real``: a job of two stages on
this machine, whose stages get ``kill -9`` at a fixed distance, for at least five kills. Before that each side is killed
a few times, and every time waited for: ``away_s``, so that a side has a time to come back in also where kills are too
frequent for it (its goodput is about 0 then). ``everstep``: copies of the stages in their waits, one
replica. ``restart``: torchrun starts all stages again from their newest checkpoint, with the interval between
checkpoints that Young's rule gives for that distance and for what a checkpoint was measured to cost.

``simulated``: losses at random moments (exponential), from 5 s to 10 days apart. Both sides have what the real jobs
showed: a step's length, how long a loss kept the job away, and what a copy or a checkpoint cost. For everstep the
production functions choose how often to copy, again after each loss, from the losses so far. The restart has Young's
interval, or the best of a sweep, whatever is better, and knows the rate from the begin. ``--out FILE.svg`` draws it.

``--minutes N`` (12): distances are measured from the shortest on, as far as they fit; the simulation has all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks._bubble_script import SAVE_EVERY
from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Child, Result, everstep, median, note_rounds, say, spread
from benchmarks.bubble_recovery import LIMIT_S, NotBackError, kill_torchrun, kills, read, stages_of
from everstep.monitor.span_log import read_spans
from everstep.policies.advise import young_interval
from everstep.policies.copy_frequency import CopyCost, choose_interval, mean_time_to_failure

SCRIPT: Final = ROOT / "benchmarks" / "_bubble_script.py"
BETWEEN: Final = {
    "5s": 5.0,
    "10s": 10.0,
    "30s": 30.0,
    "1m": 60.0,
    "3m": 180.0,
    "10m": 600.0,
    "1h": 3600.0,
    "6h": 21_600.0,
    "1d": 86_400.0,
    "10d": 864_000.0,
}
REAL: Final = ("5s", "10s", "30s", "1m", "3m", "10m")
FIRST_KILLS = 4  # of each side, waited for
KILLS, LEAST_S = 5.5, 45.0  # of a real job at one distance
START_S = 15.0  # of a real job, about
CLEAN_STEPS = 60  # before the first kill: the usual length of a step
FAILURES, SEEDS = 200, 5  # of a simulated job; jobs
SWEEP: Final = tuple(2.0**n for n in range(-3, 18))  # seconds between checkpoints


class Measured(NamedTuple):
    """Is what a real job showed. ``away_s``: each loss, from the kill to the next step, beyond a usual step."""

    goodput: float
    step_s: float
    away_s: list[float]
    redone: list[int]
    cost_s: float


class Side(NamedTuple):
    """Is what the simulated jobs have. ``cost_s``: of one copy, or of one checkpoint; ``away_s``: draws of it."""

    step_s: float
    cost_s: float
    away_s: Sequence[float]
    redone: Sequence[int] = (1,)


# ---------------------------------------------------------------- real


def hurt(root: int, steps: Path, between_s: float, seconds: float, limit_s: float = 180.0) -> Measured:
    """Kill a stage every so many seconds, for so long; RuntimeError: no step for ``limit_s`` before the first kill."""
    end = time.monotonic() + limit_s
    while len(read(steps)) < CLEAN_STEPS:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(read(steps))} steps in {limit_s:.0f} s")
        time.sleep(0.05)
    clean = read(steps)[10:CLEAN_STEPS]
    step_s = median([b[0] - a[0] for a, b in itertools.pairwise(clean)])
    draws = random.Random(0)
    begin, first = time.time(), read(steps)[-1][1]
    killed: list[float] = []
    while (now := time.time()) < begin + seconds:
        if now >= begin + between_s * (len(killed) + 1):
            victims = stages_of(root)
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draws.choice(victims), signal.SIGKILL)
            killed.append(time.time())  # (a job without a stage to kill is being started: that counts as a kill)
        time.sleep(0.02)
    over, found = time.time(), read(steps)
    last = max((step for at, step in found if at <= over), default=first)
    away, redone = [], []
    for at in killed:
        before = max((step for t, step in found if t <= at + 0.02), default=first)
        after = next(((t, step) for t, step in found if t > at + 0.02), None)
        if after is not None and not any(at < other < after[0] for other in killed):
            away.append(max(0.0, after[0] - at - step_s))
            redone.append(max(0, before - after[1] + 1))
    # Steps that a later kill takes back do not count; the newest step is what a run that ends now would keep.
    kept = found[-1][1] if found else first
    return Measured(max(0, min(last, kept) - first) * step_s / (over - begin), step_s, away, redone, 0.0)


@contextlib.contextmanager
def our_job(folder: Path) -> Iterator[tuple[Job, Path]]:
    """Run a job that goes on from copies of its stages; its file of steps is beside it."""
    steps = folder / "ours"
    flags = ["run", "--mode", "pipeline", "--stages", "2", "--copy-every", "auto"]
    job = Job(folder, flags, ["--", str(SCRIPT), "--by", "everstep", "--steps", str(steps)], 3600.0)
    try:
        yield job, steps
    finally:
        job.main.kill()


@contextlib.contextmanager
def their_job(folder: Path, save_every: int) -> Iterator[tuple[Child, Path, Path]]:
    """Run a job that torchrun starts again from its newest checkpoint; beside it its steps, and what checkpoints
    cost."""
    steps, costs = folder / "theirs", folder / "costs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "100000", str(SCRIPT), "--save-every", str(save_every), "--costs", str(costs)]
    command += ["--by", "torchrun", "--steps", str(steps)]  # (last: ``stages_of`` looks for it there)
    with Child(command, log=folder / "torchrun.log") as torchrun:
        try:
            yield torchrun, steps, costs
        finally:
            kill_torchrun(torchrun)


def ours(between_s: float, seconds: float) -> Measured:
    with tempfile.TemporaryDirectory() as name, our_job(Path(name)) as (job, steps):
        found = hurt(job.main.pid, steps, between_s, seconds)
        Child(everstep("stop", job.run_dir)).finish(60.0)
        job.finish()
        totals = [one.copies for one in read_spans(job.run_dir) if one.copies is not None and one.copies.copies]
    cost_s = max(((one.begin_s + one.stall_s) / one.copies for one in totals), default=0.0)
    return found._replace(cost_s=cost_s)


def theirs(between_s: float, seconds: float, save_every: int) -> Measured:
    with tempfile.TemporaryDirectory() as name, their_job(Path(name), save_every) as (torchrun, steps, costs):
        found = hurt(torchrun.pid, steps, between_s, seconds)
        spent = [float(line) for line in costs.read_text().split()] if costs.exists() else []
    return found._replace(cost_s=median(spent) if spent else 0.0)


def first_kills(count: int) -> dict[str, tuple[list[float], list[int]]]:
    """Kill each side so many times, and wait for it each time: how long it was away, and the steps done again."""
    out = {}
    with tempfile.TemporaryDirectory() as name, our_job(Path(name)) as (job, steps):
        out["everstep"] = kills(job.main.pid, steps, count, random.Random(2), lambda: not job.over)
    with tempfile.TemporaryDirectory() as name, their_job(Path(name), SAVE_EVERY) as (torchrun, steps, _):
        try:
            out["restart"] = kills(
                torchrun.pid, steps, count, random.Random(2), lambda: torchrun.process.poll() is None
            )
        except NotBackError as error:
            say(f"torchrun: {error}; it is not killed again")
            out["restart"] = error.found[0] + [LIMIT_S], error.found[1] + [SAVE_EVERY]
    return out


# ---------------------------------------------------------------- simulated


def with_copies(side: Side, between_s: float, seed: int, failures: int = FAILURES) -> float:
    """Return the goodput of a job that goes on from copies; how often it copies, production code chooses."""
    draws = random.Random(seed)
    done = passed = 0.0
    interval = 1
    for failure in range(1, failures + 1):
        alive_s = draws.expovariate(1.0 / between_s)
        iteration_s = side.step_s + side.cost_s / interval
        steps = int(alive_s / iteration_s)
        lost = min(steps, draws.randrange(interval) + draws.choice(side.redone) - 1)
        done += (steps - lost) * side.step_s
        passed += alive_s + draws.choice(side.away_s)
        cost = CopyCost(side.cost_s, 0.0, iteration_s + side.cost_s)
        for _ in range(max(1, min(steps // interval // 5, 1000))):  # (as often as a job chooses)
            chosen = choose_interval([cost], interval, mean_time_to_failure_s=mean_time_to_failure(failure, passed))
            if chosen.interval == interval:
                break
            interval = chosen.interval
    return done / passed


def with_restarts(side: Side, between_s: float, interval_s: float, seed: int, failures: int = FAILURES) -> float:
    """Return the goodput of a job that begins again from its newest checkpoint."""
    draws = random.Random(seed)
    done = passed = 0.0
    every = max(1, round(interval_s / side.step_s))
    round_s = every * side.step_s + side.cost_s
    for _ in range(failures):
        alive_s = draws.expovariate(1.0 / between_s)
        done += int(alive_s / round_s) * every * side.step_s
        away_s = draws.choice(side.away_s)
        passed += alive_s + away_s
    return done / passed


def best_restart(side: Side, between_s: float) -> float:
    """Return the median goodput with Young's interval, or with the best of a sweep if that is better."""
    young = young_interval(side.cost_s, between_s)
    return max(
        median([with_restarts(side, between_s, interval_s, seed) for seed in range(SEEDS)])
        for interval_s in (young, *SWEEP)
    )


# ---------------------------------------------------------------- the picture


def picture(curves: dict[str, dict[float, float]]) -> str:
    """Return goodput over the time between losses, as SVG. ``curves``: by name, goodput by seconds; "real" ones are
    points."""
    width, height, left, base = 760, 380, 60, 320
    most = math.log10(max(BETWEEN.values()) / min(BETWEEN.values()))

    def at(seconds: float, goodput: float) -> tuple[float, float]:
        x = left + (width - left - 30) * math.log10(seconds / min(BETWEEN.values())) / most
        return x, base - 270 * goodput

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12" fill="#333333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="60" y="24" font-size="15">Goodput of a pipeline of two stages, by the time between losses</text>',
    ]
    for name, seconds in BETWEEN.items():
        x, _ = at(seconds, 0.0)
        out.append(f'<text x="{x - 8:.1f}" y="{base + 18}">{name}</text>')
        out.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 4}" stroke="#333333"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(min(BETWEEN.values()), share)
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 30}" y2="{y:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 36}" y="{y + 4:.1f}">{share:g}</text>')
    for n, (name, points) in enumerate(curves.items()):
        colour = "#2a7ab9" if "everstep" in name else "#b03a2e"
        found = [at(seconds, goodput) for seconds, goodput in sorted(points.items())]
        if name.startswith("real"):
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in found]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in found)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{left + 175 * (n % 4)}" y="{base + 44}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Hurt real jobs at each distance, then simulate with what they showed."""
    parser = argparse.ArgumentParser(prog="bubble_goodput")
    parser.add_argument("--minutes", type=float, default=1.8 if quick else 12.0)
    parser.add_argument("--real", default="5s" if quick else ",".join(REAL), help="distances of real kills, at most")
    parser.add_argument("--kills", type=int, default=1 if quick else FIRST_KILLS, help="of each side, at first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(list(arguments))
    until = time.monotonic() + 60.0 * args.minutes
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures, spreads = result["figures"], result["spread"]
    curves: dict[str, dict[float, float]] = {
        name: {} for name in ("real everstep", "real restart", "simulated everstep", "simulated restart")
    }
    away = first_kills(args.kills)
    found: dict[str, list[Measured]] = {"everstep": [], "restart": []}
    cost_s, step_s = 0.02, 0.03  # of a checkpoint, before one was measured
    real: list[str] = []
    least_kills = math.inf
    for name in args.real.split(","):
        between_s = BETWEEN[name]
        seconds = max(20.0 if quick else LEAST_S, KILLS * between_s)
        if real and time.monotonic() + 2 * (seconds + START_S) > until:
            say(f"a kill every {name} and less: not in the time that there is; simulated only")
            break
        real.append(name)
        least_kills = min(least_kills, seconds // between_s)
        mine = ours(between_s, seconds)
        every = max(1, round(young_interval(cost_s, between_s) / step_s))
        other = theirs(between_s, seconds, every)
        cost_s, step_s = other.cost_s or cost_s, other.step_s
        for side, one in (("everstep", mine), ("restart", other)):
            found[side].append(one)
            figures[f"real_{name}.{side}"] = curves[f"real {side}"][between_s] = one.goodput
            figures[f"real_{name}.{side}_back"] = float(len(one.away_s))
            say(f"a kill every {name}: {side} {one.goodput:.3f}, away {one.away_s}, steps done again {one.redone}")
        figures[f"real_{name}.save_every"] = float(every)
    note_rounds(int(least_kills))  # (a round is a kill of each side)
    sides = {}
    for side, all_ in found.items():
        away_s = away[side][0] + [s for one in all_ for s in one.away_s]
        redone = [max(1, n) for n in away[side][1] + [n for one in all_ for n in one.redone]]
        sides[side] = Side(median([o.step_s for o in all_]), median([o.cost_s for o in all_]), away_s, redone)
        figures[f"{side}.away_s"], spreads[f"{side}.away_s"] = median(away_s), spread(away_s)
        figures[f"{side}.cost_s"], figures[f"{side}.step_s"] = sides[side].cost_s, sides[side].step_s
    for name, between_s in BETWEEN.items():
        values = [with_copies(sides["everstep"], between_s, seed) for seed in range(SEEDS)]
        figures[f"simulated_{name}.everstep"], spreads[f"simulated_{name}.everstep"] = median(values), spread(values)
        figures[f"simulated_{name}.restart"] = best_restart(sides["restart"], between_s)
        for side in ("everstep", "restart"):
            curves[f"simulated {side}"][between_s] = figures[f"simulated_{name}.{side}"]
        both = [figures[f"simulated_{name}.{side}"] for side in ("everstep", "restart")]
        say(f"a loss every {name}: everstep {both[0]:.4f}, restart {both[1]:.4f}")
    pairs = [(figures[f"real_{n}.everstep"], figures[f"real_{n}.restart"]) for n in real]
    pairs += [(figures[f"simulated_{n}.everstep"], figures[f"simulated_{n}.restart"]) for n in BETWEEN]
    figures["least_of_restart"] = min(a / max(b, 1e-9) for a, b in pairs)
    result["aims"]["least_of_restart"] = ">= 1"
    result["holds"]["least_of_restart"] = figures["least_of_restart"] >= 1.0
    if args.out is not None:
        args.out.write_text(picture(curves))
    return result
