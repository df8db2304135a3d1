"""Hot partitions that move, beside the best placement that never changes, computed with hindsight.

Four ps, one worker, a table in 64 partitions. A partition is wanted by Zipf's law with exponent 1.2, its keys alike; in
the middle of the job other partitions become the hot ones. (Keys by Zipf's law would make no hot partition: a batch
asks for a key once, and hashing scatters the keys.) Each ps has an emulated service time: it waits so many times the
processor time that a request really took it (``everstep chaos --slow``), so that two cores carry four ps, and the ps
with most rows sets the pace. Sides in turns: ``moving``: what the master does by itself; ``static``: a policy that
moves all partitions once, at the begin, to where both halves together take least time.

``hot.throughput``: samples/s of ``moving`` over ``static``, from the moment when the placement of ``static`` is there
to the end, so with the time that it takes to notice, and the moves. ``hot.moves``: partitions that were moved.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks._hot_keys import PS
from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, beside, interleaved, median, say, spread
from everstep.cli.chaos import inject
from everstep.errors import EverstepError
from everstep.model.member import MemberState, Role
from everstep.monitor.schedules import Planned

SERVICE = 60.0  # times its processor time that a request takes a ps
AIM = 0.95
HOUR_S = 3600.0


class HotRun(NamedTuple):
    """Says how fast a job was, and what was moved."""

    samples_per_s: float
    moved: int


class HotJob(Job):
    """Has ps with an emulated service time."""

    def __init__(self, home: Path, static: bool, samples: int, look_s: float) -> None:
        self.marks = home / "marks"
        self.marks.mkdir()
        self._slowed: dict[int, int] = {}
        policy = ["--policy", "benchmarks._static_placement:choose"] if static else []
        flags = ["--workers", "1", "--ps", str(PS), "--model-to", "none", *policy]
        script = ["--", str(ROOT / "benchmarks" / "_hot_script.py"), str(self.marks), str(samples)]
        env = {"EVERSTEP_HOT_BUSY": "0.01", "EVERSTEP_HOT_LOOK_S": str(look_s), "EVERSTEP_WINDOW_S": "1"}
        env |= {"EVERSTEP_HISTORY": "off", "PYTHONPATH": str(ROOT)}
        super().__init__(home, ["run", *flags], script, 900.0, env=env)

    def slow(self) -> bool:
        """Give every ps that is up its service time; return whether all have it."""
        status = self.status()
        for m in status.members if status is not None else ():
            if m.role == Role.PS and m.state == MemberState.ALIVE and self._slowed.get(m.slot) != m.incarnation:
                with contextlib.suppress(EverstepError):
                    inject(self.run_dir, Planned(0.0, "slow", f"ps:{m.slot}", SERVICE, HOUR_S), False)
                    self._slowed[m.slot] = m.incarnation
        return len(self._slowed) == PS

    def done(self) -> tuple[np.ndarray, np.ndarray]:
        """Return when each batch was done (seconds since 1970), and its samples."""
        lines = [line.split() for path in self.marks.iterdir() for line in path.read_text().splitlines()]
        return np.array([float(at) for _, at in lines]), np.array([float(n) for n, _ in lines])


def measure_hot(static: bool, samples: int, look_s: float, settle_s: float) -> HotRun:
    """Run one job. ``settle_s``: seconds at the begin that do not count."""
    with tempfile.TemporaryDirectory(prefix="everstep-hot-") as folder:
        job = HotJob(Path(folder), static, samples, look_s)
        try:
            job.wait_for(job.slow)
            began = time.time()
            while not job.over:
                job.slow()
                time.sleep(0.3)
            job.finish()
        finally:
            job.close()
        job.check()
        at, n = job.done()
        inside = at >= began + settle_s
        moved = sum(
            sum(key.startswith("partition ") for key in event["inputs"])
            for event in map(json.loads, (job.run_dir / "events.jsonl").read_text().splitlines())
            if event.get("action") == "move hot partitions"
        )
        return HotRun(float(n[inside].sum() / (at.max() - began - settle_s)), moved)


def run(quick: bool) -> Result:
    samples, look_s, settle_s = (8_000, 1.0, 4.0) if quick else (60_000, 5.0, 10.0)
    sides = {
        "static": partial(measure_hot, True, samples, look_s, settle_s),
        "moving": partial(measure_hot, False, samples, look_s, settle_s),
    }
    found = interleaved(sides, 1 if quick else 5, say)
    ratios = [m.samples_per_s / s.samples_per_s for m, s in zip(found["moving"], found["static"], strict=True)]
    result: Result = {
        "figures": {
            "hot.throughput": median(ratios),
            "hot.static_samples_per_s": median([s.samples_per_s for s in found["static"]]),
            "hot.moves": median([float(m.moved) for m in found["moving"]]),
        },
        "aims": {"hot.throughput": f">= {AIM}"},
        "holds": {},
        "spread": {"hot.throughput": spread(ratios)},
    }
    beside(result["figures"], result["spread"], found.noise(lambda r: float(r.samples_per_s)), "hot.throughput")
    result["holds"]["hot.throughput"] = result["figures"]["hot.throughput"] >= AIM
    return result
