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
    --s 2,4,8 --rounds 3 --healthy-s 45 --only half
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, interleaved, median, say, spread
from everstep.cli.chaos import drill
from everstep.cli.link import ask_master
from everstep.errors import EverstepError
from everstep.model.member import MemberState, Role
from everstep.monitor.schedules import Planned
from everstep.net.messages import GetSeen, SeenReport

SCRIPT = ROOT / "benchmarks" / "twins" / "slow_device.py"
WORKERS, PS = 2, 4
BATCH, FIELDS, KEYS = 128, 1024, 1_000_000
WINDOW_S = 2.0  # of the policy, and of these figures
HOUR_S = 3600.0


class Case(msgspec.Struct, frozen=True):
    """``step_s``: of the accelerator, a batch. ``base``: so many times its processor time every request takes a ps.
    ``healthy_step_s``: what a step takes then, about: only for the number of samples."""

    name: str
    step_s: float
    base: float
    healthy_step_s: float


CASES = (Case("half", 0.08, 17.0, 0.085), Case("full", 0.005, 60.0, 0.15))


def ceiling(s: float, load: float) -> float:
    """Of the healthy throughput, with one of the ps s times slower and its work divided at best."""
    return min(1.0, (PS - 1 + 1 / s) / PS / load) if load else 1.0


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
        home = Path(folder)
        (marks := home / "marks").mkdir()
        flags = ["--workers", str(WORKERS), "--ps", str(PS), "--policy", policy]
        script = [str(SCRIPT), "--mode", "ps", "--home", str(marks), "--members", str(WORKERS), "--rows", str(samples)]
        script += ["--batch", str(BATCH), "--sample-s", str(case.step_s / BATCH), "--fields", str(FIELDS)]
        script += ["--keys", str(KEYS), "--pattern", json.dumps({"kind": "constant", "s": 1.0})]
        job = Job(home, ["run", *flags], ["--", *script], 900.0, env={"EVERSTEP_WINDOW_S": str(WINDOW_S)})
        dragged: dict[int, int] = {}
        slow_at, load = 0.0, 0.0

        def drag() -> bool:
            """Every ps that is up has its service time, whichever process it is."""
            status = job.status()
            for m in status.members if status is not None else ():
                here = m.role == Role.PS and m.state == MemberState.ALIVE
                if here and dragged.get(m.slot) != m.incarnation and order(job, m.slot, case.base):
                    dragged[m.slot] = m.incarnation
            return len(dragged) == PS

        try:
            job.wait_for(drag)
            while not job.over:
                drag()
                if not slow_at and job.samples_done() > samples / 3:
                    load = load_of(job)
                    if order(job, 0, case.base * s):
                        slow_at = time.time()
                time.sleep(0.3)
            job.finish()
        finally:
            job.close()
        job.check()
        began = sorted(p.stat().st_mtime for p in marks.glob("ready-*"))[WORKERS - 1]
        done = read_marks(marks)
        end = float(done[:, 0].max())
        slow = slow_at - began
        events = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
        return Found(
            rate(done, 0.2 * slow, slow),
            rate(done, (slow + 2 * end) / 3, end),
            float(done[done[:, 0] > slow, 1].sum() / (end - slow)),
            load,
            sum(e["action"] == "relieve the ps" for e in events),
            sum(e["action"] == "restart" for e in events),
        )


def order(job: Job, slot: int, factor: float) -> bool:
    try:
        drill(job.run_dir, Planned(0.0, "slow", f"ps:{slot}", factor, HOUR_S), False)
    except EverstepError as error:  # it is just coming or going
        say(f"ps:{slot}: {error}")
        return False
    return True


def load_of(job: Job) -> float:
    """Of the last window: for how much of it a ps was at work for a worker, mean over both."""
    answer = ask_master(job.run_dir, GetSeen(), timeout_s=5.0)
    if not isinstance(answer, SeenReport) or not answer.seen.servers:
        return 0.0
    return sum(server.queue for server in answer.seen.servers) / len(answer.seen.servers) / WORKERS


def read_marks(folder: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """float64 [n, 2]: seconds since all workers were ready, samples of the batch that was done then."""
    lines = [line.split() for path in folder.glob("[0-9]*") for line in path.read_text().splitlines()]
    return np.array([(float(at), float(n)) for n, at in lines])


def rate(done: np.ndarray[tuple[int, int], np.dtype[np.float64]], begin: float, end: float) -> float:
    """Samples/s, the median over windows of about ``WINDOW_S`` between ``begin`` and ``end``."""
    edges = np.linspace(begin, end, max(1, round((end - begin) / WINDOW_S)) + 1)
    counts, _ = np.histogram(done[:, 0], edges, weights=done[:, 1])
    return median(list(counts / np.diff(edges)))


def run(quick: bool, arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks slow_server", description=__doc__)
    parser.add_argument("--s", default="4" if quick else "2,4,8")
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--healthy-s", type=float, default=22.0 if quick else 45.0)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    args = parser.parse_args(list(arguments or []))
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures = result["figures"]
    for case in CASES:
        if args.only not in (None, case.name):
            continue
        samples = WORKERS * BATCH * max(1, round(args.healthy_s / case.healthy_step_s))
        for s in map(float, args.s.split(",")):
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
            figures[f"{name}.moves"] = median([f.moved for f in found["nondedicated"]])
            figures[f"{name}.restarts"] = median([f.restarts for f in found["nondedicated"]])
            key, aim = f"{name}.nondedicated", 0.9 * best
            result["aims"][key], result["holds"][key] = f">= {aim:.3g}", figures[key] >= aim
    return result
