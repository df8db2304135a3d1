"""A slow ps: what is left of the throughput, and what ``nondedicated`` gets back of it.

Workers with an emulated accelerator (``twins/slow_device.py``) and four ps with an emulated service time: each waits
so many times the processor time that a pull or push really took it (``everstep chaos --slow``): more rows take longer,
and a busy machine changes little. Two cases, by how much of the time a ps is at work for a worker while nobody is slow
(``.load``, measured):
``half``: the accelerator takes most of a step, and the ps have as much to spare as they are busy.
``full``: the ps are what everybody waits for.
n ps of which one is s times slower can do ``(n - 1 + 1/s) / n`` of what they could, so at best this over the load, and
at most 1, is left of the throughput: ``.ceiling``; no policy can do better without another machine. The aim is 0.9 of
it, so 0.9 of the healthy throughput where the ps have something to spare. Of each part of a request something is fixed
(here about a tenth), which no moving takes away: the ceiling does not say so.

Each run is its own reference: nobody is slow for the first third of its samples, then ps:0 is s times slower until the
end, or until it is replaced by another process. Figures, of the samples/s while nobody was slow, medians over windows
of 2 s: ``SIDE`` in the last third of the time with a slow ps; ``SIDE.whole``: in all of that time (a mean), so with the
time that reacting takes. Sides in turns (``none`` with half the samples), each run audited.

``--only back``, ``--only restart``: what becomes of it, see ``_slow_server_ends.py``.
    --s 2,4,8 --rounds 3 --healthy-s 45 --only half --realtime (what else runs on the machine is not measured; root)
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks._measure import Result, beside, interleaved, median, say, spread
from benchmarks._ps_job import BATCH, FULL, HALF, WORKERS, Case, PsJob, ceiling, history, rate
from benchmarks._slow_server_ends import run_back, run_restart

CASES = (HALF, FULL)


class Found(msgspec.Struct):
    """Samples/s, by part of a run. ``load``: while nobody was slow, of its time that a ps was at work for a worker.
    ``moved``, ``restarts``: how often the policy asked for that."""

    healthy: float
    late: float
    whole: float
    load: float
    moved: int
    restarts: int


def measure(case: Case, s: float, policy: str, samples: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        job = PsJob(Path(folder), case, policy, samples)
        slow_at, load = 0.0, 0.0
        try:
            job.begin()
            while not job.over:
                job.drag()
                if not slow_at and job.samples_done() > samples / 3:
                    load = job.load()
                    if job.slow(s):
                        slow_at = time.time()
                time.sleep(0.3)
            job.finish()
        finally:
            job.close()
        job.check()
        done, said = job.done(), history(job.run_dir)
        end, slow = float(done[-1, 0]), slow_at - job.began()
        return Found(
            rate(done, 0.2 * slow, slow),
            rate(done, (slow + 2 * end) / 3, end),
            float(done[done[:, 0] > slow, 1].sum() / (end - slow)),
            load,
            len(said.when("relieve the ps")),
            len(said.when("restart")),
        )


def run(quick: bool, arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks slow_server", description=__doc__)
    parser.add_argument("--s", default="4" if quick else "2,4,8")
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--healthy-s", type=float, default=22.0 if quick else 45.0)
    parser.add_argument("--only", choices=[*(case.name for case in CASES), "back", "restart"])
    parser.add_argument("--realtime", action="store_true", help="real-time priority for the jobs that are timed (root)")
    args = parser.parse_args(list(arguments or []))
    PsJob.realtime = args.realtime
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures = result["figures"]
    factors = [float(s) for s in args.s.split(",")]
    for name, ends in (("back", run_back), ("restart", run_restart)):
        if args.only == name or (args.only is None and not quick):
            for s in factors:
                ends(result, s, args.rounds, quick)
    for case in CASES:
        if args.only not in (None, case.name):
            continue
        samples = WORKERS * BATCH * max(1, round(args.healthy_s / case.healthy_step_s))
        for s in factors:
            name = f"{case.name}.s{s:g}"
            policies = ("none", "nondedicated") if not quick or case is CASES[0] else ("nondedicated",)
            # (without a policy nothing changes any more that would have to be waited for)
            sides = {p: partial(measure, case, s, p, samples // (2 if p == "none" else 1)) for p in policies}
            found = interleaved(sides, args.rounds, say)
            every = [f for side in found.values() for f in side]
            figures[f"{name}.load"] = median([f.load for f in every])
            figures[f"{name}.ceiling"] = best = ceiling(s, figures[f"{name}.load"])
            figures[f"{name}.healthy_samples_per_s"] = median([f.healthy for f in every])
            for side in found:
                for what in ("late", "whole"):
                    key = f"{name}.{side}" + (".whole" if what == "whole" else "")
                    of = [getattr(f, what) / f.healthy for f in found[side]]
                    figures[key], result["spread"][key] = median(of), spread(of)
            for side in found:
                beside(figures, result["spread"], found.noise(lambda f: f.late / f.healthy), f"{name}.{side}")
            figures[f"{name}.moves"] = median([f.moved for f in found["nondedicated"]])
            figures[f"{name}.restarts"] = median([f.restarts for f in found["nondedicated"]])
            key, aim = f"{name}.nondedicated", 0.9 * best
            result["aims"][key], result["holds"][key] = f">= {aim:.3g}", figures[key] >= aim
    return result
