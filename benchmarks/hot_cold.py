"""Hot partitions that move, beside the best placement that never changes, computed with hindsight.

Four ps, one worker, a table in 64 partitions. A partition is wanted by Zipf's law with exponent 1.2, its keys alike; in
the middle of the job other partitions become the hot ones. (Keys by Zipf's law would make no hot partition: a batch
asks for a key once, and hashing scatters the keys.) Each ps has an emulated service time: it waits so many times the
processor time that a request really took it (``everstep chaos --slow``), so that two cores carry four ps, and the ps
with most rows sets the pace. Sides in turns: ``moving``: what the master does by itself; ``static``: a policy that
moves all partitions once, at the begin, to where both halves together take least time.

``hot.throughput``: samples/s of ``moving`` over ``static``, from the moment when the placement of ``static`` is there
to the end, so with the time that it takes to notice, and the moves. ``hot.moves``: partitions that were moved.

The cold tier: one worker, one ps, a table of which one lookup in a hundred asks for any row, and the others for 4 % of
the rows. ``memory``: all rows in memory; ``cold``: a third of their bytes (``--ps-limit-bytes``, ``--cold-dir``).
``cold.speed``: steps/s of ``cold`` over ``memory``, once the table is filled, without the first quarter of the steps.
``cold.hits``: of the rows pulled from the begin on, that were in memory. ``cold.table``: bytes of rows, in memory and
on disk, over the limit.
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
AIM, COLD_AIM = 0.95, 0.7
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


class ColdRun(NamedTuple):
    """Says how fast a job was. ``hits``: share; ``table``: bytes of its rows over the limit."""

    steps_per_s: float
    hits: float
    table: float


def measure_cold(limit: int, rows: int, steps: int) -> ColdRun:
    """Run one job. ``limit``: bytes in memory, the rest goes to disk; 0: all in memory."""
    with tempfile.TemporaryDirectory(prefix="everstep-cold-") as folder:
        marks, disk = Path(folder) / "marks", Path(folder) / "disk"
        marks.mkdir()
        disk.mkdir()
        cold = ["--ps-limit-bytes", str(limit), "--cold-dir", str(disk)] if limit else []
        flags = ["--workers", "1", "--ps", "1", "--model-to", "none", *cold]
        script = ["--", str(ROOT / "benchmarks" / "_cold_script.py"), str(marks), str(rows), str(steps)]
        env = {"EVERSTEP_HISTORY": "off", "PYTHONPATH": str(ROOT)}
        job = Job(Path(folder), ["run", *flags], script, 900.0, env=env)
        hits, held = -1.0, 0
        try:
            while not job.over:
                status = job.status()
                for m in status.members if status is not None else ():
                    if m.role == Role.PS and m.cold_hit_share >= 0 and m.cold_bytes:
                        hits, held = m.cold_hit_share, m.cold_bytes + limit
                time.sleep(0.5)
            job.finish()
        finally:
            job.close()
        job.check()
        lines = [line.split() for path in marks.iterdir() for line in path.read_text().splitlines()]
        at = np.array([float(when) for number, when in lines if int(number) >= steps // 4])
        return ColdRun(float((len(at) - 1) / (at.max() - at.min())), hits, held / limit if limit else 0.0)


def row_bytes(rows: int) -> int:
    """Return what the rows of the cold tier's table take, with their pages and their index."""
    return rows * (8 + 2 * 4 * 64 + 32)


def run(quick: bool) -> Result:
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    rows, steps = (60_000, 150) if quick else (600_000, 2000)
    cold_sides = {
        "memory": partial(measure_cold, 0, rows, steps),
        "cold": partial(measure_cold, row_bytes(rows) // 3, rows, steps),
    }
    cold = interleaved(cold_sides, 1 if quick else 5, say)
    speeds = [c.steps_per_s / m.steps_per_s for c, m in zip(cold["cold"], cold["memory"], strict=True)]
    result["figures"] |= {
        "cold.speed": median(speeds),
        "cold.hits": median([c.hits for c in cold["cold"]]),
        "cold.table": median([c.table for c in cold["cold"]]),
        "cold.memory_steps_per_s": median([m.steps_per_s for m in cold["memory"]]),
    }
    result["aims"] |= {"cold.speed": f">= {COLD_AIM}"}
    result["holds"]["cold.speed"] = result["figures"]["cold.speed"] >= COLD_AIM
    result["spread"]["cold.speed"] = spread(speeds)
    beside(result["figures"], result["spread"], cold.noise(lambda r: float(r.steps_per_s)), "cold.speed")
    _run_hot(quick, result)
    return result


def _run_hot(quick: bool, result: Result) -> None:
    samples, look_s, settle_s = (4_000, 1.0, 3.0) if quick else (60_000, 5.0, 10.0)
    sides = {
        "static": partial(measure_hot, True, samples, look_s, settle_s),
        "moving": partial(measure_hot, False, samples, look_s, settle_s),
    }
    found = interleaved(sides, 1 if quick else 5, say)
    ratios = [m.samples_per_s / s.samples_per_s for m, s in zip(found["moving"], found["static"], strict=True)]
    result["figures"] |= {
        "hot.throughput": median(ratios),
        "hot.static_samples_per_s": median([s.samples_per_s for s in found["static"]]),
        "hot.moves": median([float(m.moved) for m in found["moving"]]),
    }
    result["aims"]["hot.throughput"] = f">= {AIM}"
    result["holds"]["hot.throughput"] = result["figures"]["hot.throughput"] >= AIM
    result["spread"]["hot.throughput"] = spread(ratios)
    beside(result["figures"], result["spread"], found.noise(lambda r: float(r.samples_per_s)), "hot.throughput")
