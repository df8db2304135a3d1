"""How it ends with a slow ps: it is well again and gets its partitions back, or another process takes its place.

``back`` (case ``half``): ps:0 is s times slower for 0.35 of the samples, then well. ``restart`` (case ``full``, where
workers wait for rows): it is s times slower for good, and nothing but another process is faster; the policy is
``nondedicated`` that takes a restart for 3 s (``twins/restart_soon.py``), since the job is short; without protection
(``off``) and with ``--parity 1+1``.

Times in seconds, windows of the policy being 2 s. ``to_moved_s``: from the slowdown until the partitions of the first
plan had changed hands, ``to_back_s``: the same from its end; ``to_restart_s``: until the plan, ``restart_s``: from
there until the new process had its share. Throughput as a part of the same run's while nobody was slow: ``.before``
anything was done, ``.moved``: with its partitions divided, ``.after`` it was well, or replaced. ``.gap_s``: the longest
time between two batches of a worker, from the plan until 2 s after its last partition; ``.gap_healthy_s``: while nobody
was slow.
``.plans``: plans after it was well, or replaced (more than one: to and fro). Each run audited.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from math import nan
from pathlib import Path

import msgspec
import numpy as np

from benchmarks._measure import Result, beside, interleaved, median, say, spread
from benchmarks._ps_job import BATCH, FULL, HALF, WINDOW_S, WORKERS, Case, History, Marks, PsJob, ceiling, history, rate


class Part(msgspec.Struct):
    """Of a run of so many seconds of healthy work: ``slow``, ``well``: at which part of its samples. ``well`` 1: never;
    it ends at the latest then."""

    healthy_s: float
    slow: float
    well: float = 1.0


def run_back(result: Result, s: float, rounds: int, quick: bool) -> None:
    part = Part(45.0 if quick else 80.0, 0.2, 0.55)
    rounds_of = interleaved({"back": partial(_back, s, part)}, rounds, say)
    name = f"back.s{s:g}"
    _median(result, name, rounds_of["back"])
    for what in ("moved", "after"):
        beside(result["figures"], result["spread"], rounds_of.noise(what), f"{name}.{what}")
    best = ceiling(s, result["figures"][f"{name}.load"])
    _aim(result, f"{name}.moved", 0.9 * best)
    _aim(result, f"{name}.after", 0.9)
    _at_most(result, f"{name}.plans", 1)


def run_restart(result: Result, s: float, rounds: int, quick: bool) -> None:
    part = Part(36.0 if quick else 70.0, 0.2)
    parities = ("1+1",) if quick else ("off", "1+1")
    found = interleaved({p: partial(_restart, s, p, part) for p in parities}, rounds, say)
    for parity in parities:
        name = f"restart.{parity}.s{s:g}"
        _median(result, name, found[parity])
        beside(result["figures"], result["spread"], found.noise("after"), f"{name}.after")
        _aim(result, f"{name}.after", 0.9)
        _at_most(result, f"{name}.plans", 0)


Figures = dict[str, float]


def _back(s: float, part: Part) -> Figures:
    run, done, said, began, slow_at, well_at = _run(HALF, "nondedicated", s, part, [])
    moves, backs = said.when("relieve the ps", slow_at), said.when("give partitions back", well_at)
    moved, back = (said.moved(at[0]) if at else nan for at in (moves, backs))
    slow, well, end = slow_at - began, well_at - began, float(done[-1, 0])
    healthy = rate(done, 0.3 * slow, slow)
    committed_everywhere = moves[-1] - began if moves else slow
    return run | {
        "healthy_samples_per_s": healthy,
        "to_moved_s": moved - slow_at,
        "to_back_s": back - well_at,
        "before": rate(done, slow, moves[0] - began if moves else well) / healthy,
        "moved": rate(done, committed_everywhere + WINDOW_S, well) / healthy,
        "after": rate(done, back - began + WINDOW_S if backs else well, end) / healthy,
        "buckets_healthy": said.partitions(slow_at),
        "buckets_moved": said.partitions(well_at),
        "buckets_after": said.partitions(began + end),
        "gap_s": max(_gap(done, at - began, said.moved(at) - began + WINDOW_S) for at in moves + backs),
        "gap_healthy_s": _gap(done, 0.3 * slow, slow),
        "plans": len(said.when("relieve the ps", well_at)) + len(backs),
    }


def _restart(s: float, parity: str, part: Part) -> Figures:
    run, done, said, began, slow_at, _ = _run(
        FULL, "restart_soon:choose", s, part, ["--parity", "0" if parity == "off" else parity]
    )
    moves, plans = said.when("relieve the ps", slow_at), said.when("restart", slow_at)
    slow, end = slow_at - began, float(done[-1, 0])
    healthy = rate(done, 0.3 * slow, slow)
    plan = plans[0] if plans else nan
    joined = min(said.when("joined", plan, "ps:0"), default=nan)
    later = [at for at in said.plans if at > joined]
    has_all = said.moved(joined)
    return run | {
        "healthy_samples_per_s": healthy,
        "to_moved_s": said.moved(moves[0]) - slow_at if moves else nan,
        "to_restart_s": plan - slow_at,
        "restart_s": has_all - plan,
        "before": rate(done, slow, moves[0] - began if moves else end) / healthy,
        "moved": rate(done, said.moved(moves[0]) - began, plan - began) / healthy if moves and plans else nan,
        "after": rate(done, has_all - began + WINDOW_S, end) / healthy if plans else nan,
        "buckets_moved": said.partitions(plan - 0.001) if plans else -1,
        "buckets_after": said.partitions(began + end),
        "gap_s": _gap(done, plan - began, has_all - began + WINDOW_S) if plans else nan,
        "gap_healthy_s": _gap(done, 0.3 * slow, slow),
        "plans": len(later),
    }


def _run(
    case: Case, policy: str, s: float, part: Part, flags: list[str]
) -> tuple[Figures, Marks, History, float, float, float]:
    """One job. Returns its load, its batches, its journal, and when it began, a ps was slow, and well (since 1970)."""
    samples = WORKERS * BATCH * max(1, round(part.healthy_s / case.healthy_step_s))
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        job = PsJob(Path(folder), case, policy, samples, flags)
        load, slow_at, well_at = 0.0, 0.0, 0.0
        try:
            job.begin()
            while not job.over:
                job.drag()
                done = job.samples_done()
                if not slow_at and done > samples * part.slow:
                    load = job.load()
                    slow_at = time.time() if job.slow(s) else 0.0
                elif slow_at and not well_at and done > samples * part.well:
                    well_at = time.time() if job.slow(1.0) else 0.0
                time.sleep(0.3)
            job.finish()
        finally:
            job.close()
        job.check()
        return {"load": load}, job.done(), history(job.run_dir), job.began(), slow_at, well_at


def _gap(done: Marks, begin: float, end: float) -> float:
    """Longest time between two batches of one worker that touches ``begin`` to ``end``."""
    longest = nan
    for worker in np.unique(done[:, 2]):
        at = done[done[:, 2] == worker, 0]
        first, last = np.searchsorted(at, begin) - 1, np.searchsorted(at, end)
        inside = at[max(0, first) : last + 1]
        longest = np.fmax(longest, np.diff(inside).max()) if len(inside) > 1 else longest
    return float(longest)


def _median(result: Result, name: str, found: list[Figures]) -> None:
    for key in found[0]:
        of = [figures[key] for figures in found]
        result["figures"][f"{name}.{key}"], result["spread"][f"{name}.{key}"] = median(of), spread(of)


def _aim(result: Result, key: str, aim: float) -> None:
    result["aims"][key], result["holds"][key] = f">= {aim:.3g}", bool(result["figures"][key] >= aim)


def _at_most(result: Result, key: str, most: int) -> None:
    result["aims"][key], result["holds"][key] = f"<= {most}", bool(result["figures"][key] <= most)
