"""A slow ps: what is left of the throughput, and what ``nondedicated`` gets back of it.

Workers with an emulated accelerator (``twins/slow_device.py``) and four ps with an emulated service time: each waits
``BASE`` times what a pull or push really took it (``everstep chaos --slow``), so more rows take longer. One of them is
``s`` times slower than the others: from the beginning to the end, until it is replaced by another process. Sides, in
turns: ``healthy`` (nobody is slow), ``none`` (no policy), ``nondedicated`` (moves buckets away from it; replaces it
where that pays). The same samples for all, each run audited. Figures, all of the healthy one's samples/s:
``SIDE`` in the last quarter of the run, ``SIDE.whole`` in all of it.
    --s 2,4,8 --rounds 5 --healthy-s 60
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, interleaved, median, say, spread
from everstep.cli.chaos import drill
from everstep.errors import EverstepError
from everstep.model.member import MemberState, Role
from everstep.monitor.schedules import Planned

SCRIPT = ROOT / "benchmarks" / "twins" / "slow_device.py"
WORKERS, PS, BASE = 2, 4, 25.0
BATCH, FIELDS, KEYS, STEP_S = 64, 512, 100_000, 0.04
WINDOW_S = 1.5
HOUR_S = 3600.0


class Found(msgspec.Struct):
    """Samples/s, in the last quarter and in all; buckets moved and ps restarted by the policy."""

    late: float
    whole: float
    moved: int
    restarts: int


def measure(s: float, policy: str, samples: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        (marks := home / "marks").mkdir()
        flags = ["--workers", str(WORKERS), "--ps", str(PS), "--policy", policy]
        script = [str(SCRIPT), "--mode", "ps", "--home", str(marks), "--members", str(WORKERS), "--rows", str(samples)]
        script += ["--batch", str(BATCH), "--sample-s", str(STEP_S / BATCH), "--fields", str(FIELDS)]
        script += ["--keys", str(KEYS), "--pattern", json.dumps({"kind": "constant", "s": 1.0})]
        job = Job(home, ["run", *flags], ["--", *script], 900.0, env={"EVERSTEP_WINDOW_S": str(WINDOW_S)})
        dragged: dict[int, int] = {}

        def drag() -> bool:
            """Every ps that is up has its service time; only the first process of ps:0 is slow."""
            status = job.status()
            for m in status.members if status is not None else ():
                if m.role == Role.PS and m.state == MemberState.ALIVE and dragged.get(m.slot) != m.incarnation:
                    factor = BASE * (s if m.slot == 0 and m.slot not in dragged else 1.0)
                    try:
                        drill(job.run_dir, Planned(0.0, "slow", f"ps:{m.slot}", factor, HOUR_S), False)
                    except EverstepError as error:  # it is just coming or going
                        say(f"ps:{m.slot}: {error}")
                        continue
                    dragged[m.slot] = m.incarnation
            return len(dragged) == PS

        try:
            job.wait_for(drag)
            while not job.over:
                drag()
                time.sleep(0.3)
            job.finish()
        finally:
            job.close()
        job.check()
        lines = [line.split() for path in marks.glob("[0-9]*") for line in path.read_text().splitlines()]
        done = [(float(at), int(n)) for n, at in lines]
        end = max(at for at, _ in done)
        events = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
        moved = sum(e["action"] == "relieve the ps" for e in events)
        restarts = sum(e["action"] == "restart" for e in events)
        late = sum(n for at, n in done if at > 0.75 * end) / (0.25 * end)
        return Found(late, sum(n for _, n in done) / end, moved, restarts)


def run(quick: bool, arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks slow_server", description=__doc__)
    parser.add_argument("--s", default="4" if quick else "2,4,8")
    parser.add_argument("--rounds", type=int, default=1 if quick else 5)
    parser.add_argument("--healthy-s", type=float, default=25.0 if quick else 60.0)
    args = parser.parse_args(arguments or [])
    samples = WORKERS * BATCH * max(1, round(args.healthy_s / STEP_S))
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures = result["figures"]
    for s in map(float, args.s.split(",")):
        sides = {
            "healthy": partial(measure, 1.0, "none", samples),
            "none": partial(measure, s, "none", samples),
            "nondedicated": partial(measure, s, "nondedicated", samples),
        }
        found = interleaved(sides, args.rounds, say)
        figures[f"s{s:g}.healthy_samples_per_s"] = median([f.whole for f in found["healthy"]])
        for side in ("none", "nondedicated"):
            for what in ("late", "whole"):
                name = f"s{s:g}.{side}" + (".whole" if what == "whole" else "")
                of = [getattr(f, what) / getattr(h, what) for f, h in zip(found[side], found["healthy"], strict=True)]
                figures[name], result["spread"][name] = median(of), spread(of)
        figures[f"s{s:g}.moves"] = median([f.moved for f in found["nondedicated"]])
        figures[f"s{s:g}.restarts"] = median([f.restarts for f in found["nondedicated"]])
        name = f"s{s:g}.nondedicated"
        result["aims"][name], result["holds"][name] = ">= 0.9", figures[name] >= 0.9
    return result
