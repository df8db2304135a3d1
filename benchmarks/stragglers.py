"""Slow workers: every policy against doing nothing, on the same patterns; `--quick`: under virtual time only.

Figures are times of the synchronous job that does nothing over times of the one with the policy, for the same samples:
how many times faster. ``n`` workers of which one is ``s`` times slower: from the beginning (deterministic), from 10 %
of the healthy job on (persistent), or every one now and then (transient: spells of 30 healthy batches, 230 apart).
``ceiling`` is what dividing without loss can gain at best, ``(s (n-1) + 1) / n``. ``splits``: ``nondedicated`` without
restarts; windows are of 3 healthy batches where nothing else is said. ``traces``: recorded slow-downs of real jobs.
``day``: a day of a healthy job on the recorded one that has lasting stragglers. Not ours, for comparison: ``backup``
drops the slowest worker's gradients (and is charged for them), ``static`` is asynchronous with a fixed part each,
``shared`` asynchronous with shards for whoever is free.

``real`` figures (not quick): `everstep run`, real processes, a sleep of 2 ms (``--sample-ms``) for each sample in the
place of an accelerator (``twins/slow_device.py``), the same patterns, windows of half a second; from the moment that
everybody is up to the last of exactly N samples, each run audited. ``trace``: the recorded job 4, ten healthy batches
an entry, from another place for each seed; ``ceiling`` there and for spells: divided anew at every moment.
``second_half``: samples/s in the second half of the run, so without what it takes to see and act. Sides: ``sync``
(mode allreduce, no policy; what all others are compared with), ``ps_sync``, ``backup`` (``--consistency sync``,
``sync:1``: a late part is trained by another worker), ``static``, ``shared`` (mode ps), ``nondedicated``,
``dedicated``. One machine, so a restart finds no better place, and none pays in jobs as short as these.
    --only virtual|real --patterns deterministic,persistent,transient,trace --n 4,8 --s 2,4,8 --seeds 5 --sides ...
    --healthy-s 40 --sample-ms 2 --together 6 (jobs side by side) --out cases.jsonl (goes on where it was ended)
    --realtime (the jobs that are timed have real-time priority: what else runs on the machine is not measured; root)
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks._device_jobs import BATCH as DEVICE_BATCH
from benchmarks._device_jobs import SAMPLE_S, SIDES, Case, Timed, measure_all
from benchmarks._measure import Result, say, spread
from benchmarks._patterns import from_words, recorded
from everstep.policies.stragglers.exclusive import exclusive
from everstep.policies.stragglers.policy import Policy
from everstep.policies.stragglers.shared import Settings, shared
from everstep.sim.stragglers import (
    BATCH,
    ConstantSlowness,
    Pattern,
    Spells,
    asynchronous,
    ceiling,
    finish,
    synchronous,
    with_backup,
)

STEPS = 1000  # healthy batches of each worker
SPELL, GAP = 30.0, 230.0
WINDOW = 3.0
SWEEP = (3.0, 10.0, 30.0)
RESTART = 30.0
DAY = 86_400.0

SPLITS: Policy = partial(shared, settings=Settings(budget=0))
WHOLE: Policy = partial(shared, settings=Settings(restart_s=RESTART, cooldown_s=200.0))


def run(quick: bool, arguments: list[str] | None = None) -> Result:
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    args = options(arguments or [], quick)
    if args.only != "real":
        virtual(result, range(2 if quick else 5))
        traces(result)
    if args.only == "real" or (not quick and args.only is None):
        real(result, args)
    return result


def claim(result: Result, name: str, values: list[float], least: float | None = None) -> None:
    result["figures"][name] = round(mean(values), 3)
    if len(values) > 1:
        result["spread"][name] = tuple(round(v, 3) for v in spread(values))
    if least is not None:
        result["aims"][name] = f">= {least:.3g}"
        result["holds"][name] = mean(values) >= least
    say(f"{name} {mean(values):.3f}")


# ---------------------------------------------------------------- virtual time


def virtual(result: Result, seeds: range) -> None:
    for n in (4, 8):
        for s in (2.0, 4.0, 8.0):
            patterns: dict[str, Callable[[int], Pattern]] = {
                "deterministic": lambda seed, s=s: ConstantSlowness(s),  # type: ignore[misc]
                "persistent": lambda seed, s=s: ConstantSlowness(s, begins=0.1 * STEPS),  # type: ignore[misc]
                "transient": lambda seed, s=s: Spells(s, SPELL, GAP, seed),  # type: ignore[misc]
            }
            for name, pattern in patterns.items():
                compare(result, f"n{n}.s{s:g}.{name}", n, s, pattern, seeds if name == "transient" else range(1))


def compare(result: Result, name: str, n: int, s: float, pattern: Callable[[int], Pattern], seeds: range) -> None:
    samples = STEPS * n * BATCH
    base = [synchronous(pattern(seed), n, samples).wall for seed in seeds]

    def faster(wall: Callable[[int], float]) -> list[float]:
        return [b / wall(seed) for b, seed in zip(base, seeds, strict=True)]

    lasting = "transient" not in name
    best = ceiling(n, s)
    if "persistent" in name:  # nothing is to be gained before it begins
        healthy = 0.1 * STEPS
        best = base[0] / (healthy + (base[0] - healthy) / best)
    if lasting:
        result["figures"][f"{name}.ceiling"] = round(best, 3)
    claim(result, f"{name}.backup", faster(lambda k: with_backup(pattern(k), n, samples).wall))
    claim(result, f"{name}.static", faster(lambda k: asynchronous(pattern(k), n, samples, False).wall))
    claim(result, f"{name}.shared", faster(lambda k: asynchronous(pattern(k), n, samples, True).wall))
    least = 0.95 * best if lasting else 0.98
    for window in SWEEP if n == 4 and s == 4 else (WINDOW,):
        what = f"{name}.splits" + (f".window{window:g}" if window != WINDOW else "")
        with_it = partial(synchronous, n=n, samples=samples, policy=SPLITS, window=window)
        claim(result, what, faster(lambda k, f=with_it: f(pattern(k)).wall), least if window == WINDOW else 0.98)  # type: ignore[misc]
    whole = partial(synchronous, n=n, samples=samples, policy=WHOLE, window=WINDOW, restart=RESTART)
    claim(result, f"{name}.nondedicated", faster(lambda k: whole(pattern(k)).wall), 0.98)
    exact = partial(synchronous, n=n, samples=samples, policy=exclusive, window=WINDOW)
    claim(result, f"{name}.dedicated", faster(lambda k: exact(pattern(k)).wall), least)


def traces(result: Result) -> None:
    """Three real jobs of ten workers; in two of them there is nothing to do."""
    for job in (1, 2, 4):
        pattern = recorded(job, width=10.0)
        samples = STEPS * 10 * BATCH
        base = synchronous(pattern, 10, samples).wall
        for name, policy in (("splits", SPLITS), ("nondedicated", WHOLE), ("dedicated", exclusive)):
            found = synchronous(pattern, 10, samples, policy, window=30.0, restart=RESTART)
            claim(result, f"traces.job{job}.{name}", [base / found.wall], 0.98)
            if job != 4 and name != "dedicated":
                result["figures"][f"traces.job{job}.{name}.plans"] = len(found.plans)
                result["aims"][f"traces.job{job}.{name}.plans"] = "= 0"
                result["holds"][f"traces.job{job}.{name}.plans"] = not found.plans
    # one unit of time is 10 s here: a day of 8,640 healthy batches, windows of a minute, restarts of five
    pattern, samples = recorded(4, width=1.0), int(DAY / 10.0) * 10 * BATCH
    base = synchronous(pattern, 10, samples).wall
    day = synchronous(pattern, 10, samples, WHOLE, window=6.0, restart=RESTART)
    result["figures"]["day.hours_static"] = round(base * 10.0 / 3600, 1)
    result["figures"]["day.hours_nondedicated"] = round(day.wall * 10.0 / 3600, 1)
    result["figures"]["day.restarts"] = day.restarts
    claim(result, "day.nondedicated", [base / day.wall])
    splits = synchronous(pattern, 10, samples, SPLITS, window=6.0)
    claim(result, "day.splits", [base / splits.wall])


# ---------------------------------------------------------------- real processes


def options(arguments: list[str], quick: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks stragglers", description=__doc__)
    parser.add_argument("--only", choices=("virtual", "real"))
    parser.add_argument("--patterns", default="deterministic,persistent,transient,trace")
    parser.add_argument("--n", default="4", help="how many workers: 4,8")
    parser.add_argument("--s", default="4", help="how many times slower: 2,4,8")
    parser.add_argument("--seeds", type=int, default=1 if quick else 5)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--healthy-s", type=float, default=40.0, help="seconds of the job where nobody is slow")
    parser.add_argument("--sample-ms", type=float, default=SAMPLE_S * 1e3, help="of the emulated accelerator, a sample")
    parser.add_argument("--together", type=int, default=6, help="jobs side by side")
    parser.add_argument("--realtime", action="store_true", help="real-time priority for the jobs that are timed (root)")
    parser.add_argument("--out", type=Path, help="file of cases: those in it are not run again")
    return parser.parse_args(arguments)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Round by round, the sides in turns; the long ones of a round first would be faster, and not in turns."""
    sides = args.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        raise SystemExit(f"--sides: no {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    if "sync" not in sides:
        raise SystemExit("--sides: sync is what all others are compared with")
    kinds = []
    for pattern in args.patterns.split(","):
        for n in map(int, args.n.split(",")):
            for s in map(float, args.s.split(",")) if pattern != "trace" else (1.0,):
                kinds.append((pattern, n, s))
    cases = []
    for pattern, n, s in kinds:
        for seed in range(args.seeds):
            turn = [sides[(i + seed) % len(sides)] for i in range(len(sides))]
            cases += [Case(pattern, n, s, side, seed, args.healthy_s, args.sample_ms / 1e3) for side in turn]
    return cases


def real(result: Result, args: argparse.Namespace) -> None:
    """Times of real jobs on the same patterns; ratios are of the same seed."""
    cases = cases_of(args)
    timed: dict[Case, Timed] = {}
    if args.out is not None and args.out.exists():
        for line in args.out.read_text().splitlines():
            with contextlib.suppress(msgspec.MsgspecError):  # (a line cut short: it was killed meanwhile)
                one = msgspec.json.decode(line, type=Timed)
                timed[one.case] = one

    def found(one: Timed) -> None:
        timed[one.case] = one
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(msgspec.json.encode(one).decode() + "\n")

    failed = measure_all([case for case in cases if case not in timed], args.together, found, args.realtime)
    result["figures"]["real.failed"] = len(failed)
    result["aims"]["real.failed"] = "= 0"
    result["holds"]["real.failed"] = not failed
    by_name: dict[str, list[Timed]] = {}
    for case in cases:
        if case in timed:
            by_name.setdefault(case.name, []).append(timed[case])
    for name, runs in by_name.items():
        real_figures(result, f"real.{name}", runs)


def real_figures(result: Result, name: str, runs: list[Timed]) -> None:
    base = {one.case.seed: one for one in runs if one.case.side == "sync"}
    if not base:
        return
    best = mean(best_ratio(one.case) for one in base.values())
    lasting = ".deterministic" in name or ".persistent" in name
    result["figures"][f"{name}.ceiling"] = round(best, 3)
    claim(result, f"{name}.sync_s", [one.wall_s for one in base.values()])
    for side in SIDES:
        mine = [one for one in runs if one.case.side == side and one.case.seed in base]
        if side == "sync" or not mine:
            continue
        aim = None
        if side in ("nondedicated", "dedicated"):
            aim = 0.95 * best if lasting else 0.98
        claim(result, f"{name}.{side}", [base[one.case.seed].wall_s / one.wall_s for one in mine], aim)
        if lasting and aim is not None:
            late = [one.late_rate / base[one.case.seed].late_rate for one in mine]
            claim(result, f"{name}.{side}.second_half", late, 0.95 * ceiling(mine[0].case.n, mine[0].case.s))


def best_ratio(case: Case) -> float:
    """What dividing without loss could gain at best, anew at every moment: where one is slow all the time, this is
    ``ceiling``."""
    pattern, unit = from_words(case.words()), case.sample_s * DEVICE_BATCH
    t = 0.0
    for _ in range(case.samples // (DEVICE_BATCH * case.n)):
        t = max(finish(pattern, k, t, unit) for k in range(case.n))
    ideal = apart = 0.0
    work = case.samples * case.sample_s
    while work > 0:
        looks = [pattern.at(k, ideal) for k in range(case.n)]
        speed = sum(1 / factor for factor, _ in looks)
        apart = min(min(until for _, until in looks) - ideal, work / speed)
        ideal, work = ideal + apart, work - max(apart, 1e-9) * speed
    return t / ideal
