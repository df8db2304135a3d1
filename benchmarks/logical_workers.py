"""Logical workers: the same bits on 1, 2 and 4 processes, and through kills and changes of size.

Trains ``examples/05_gpt.py`` (dropout on, a small piece of the text) with ``logical_workers: 4`` on 1, 2 and 4
processes, and once on 3 that are killed and scaled meanwhile. Figures: ``equal`` whether all final states are bitwise
equal, and ``tests_equal`` whether so are the printed test losses; ``kills``, ``scalings`` of the last run. What the
fixed order costs is ``1mb.logical_ratio`` and ``50mb.logical_ratio`` of ``allreduce_step``.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from pathlib import Path

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, say
from benchmarks._replica import living_workers
from everstep.cli.scale import scale

SCRIPT = ROOT / "examples" / "05_gpt.py"
PARTS = 4


class Gpt(Job):
    def __init__(self, home: Path, workers: int, rows: int, name: str) -> None:
        verb = ["run", "--mode", "allreduce", "--workers", str(workers), "--logical-workers", str(PARTS)]
        script = ["--", str(SCRIPT), "--rows", str(rows), "--dropout", "0.1", "--batch-size", "4", "--digest"]
        super().__init__(home, verb, script, 900.0, name)

    def result(self) -> tuple[set[str], set[str]]:
        """Digests of the final state of all workers, and the test losses that were printed. RuntimeError: none."""
        logs = sorted((self.run_dir / "logs").glob("worker-*.log"))
        text = "".join(log.read_text(errors="replace") for log in logs)
        if not re.search(r"state [0-9a-f]{32}", text) or "test loss" not in text:
            raise RuntimeError(f"no state or no test loss was printed:\n{self.words()}")
        return set(re.findall(r"state ([0-9a-f]{32})", text)), set(re.findall(r"test loss ([\d.]+)", text))


def run(quick: bool) -> Result:
    rng = random.Random(int(os.environ.get("EVERSTEP_KILL_SEED", "1")))
    rows, kills, scalings = (320, 2, 2) if quick else (4000, 10, 6)
    states: set[str] = set()
    losses: set[str] = set()
    done = {"kill": 0, "scale": 0}
    with tempfile.TemporaryDirectory(prefix="everstep-logical-") as folder:
        for workers in (1, 2, 4):
            job = Gpt(Path(folder), workers, rows, f"n{workers}")
            try:
                job.finish()
                job.check()
                found = job.result()
                say(f"{workers} processes: state {found[0]}, test loss {found[1]}")
                states |= found[0]
                losses |= found[1]
            finally:
                job.close()
        job = Gpt(Path(folder), 3, rows, "hurt")
        plan = ["kill"] * kills + ["scale"] * scalings
        rng.shuffle(plan)
        total, size = rows, 3
        try:
            for i, what in enumerate(plan):
                job.wait_for(lambda i=i: job.samples_done() >= total * 0.9 * i / len(plan) and living_workers(job))
                if what == "scale":
                    size = rng.choice([n for n in (1, 2, 3, 4) if n != size])
                    scale(job.run_dir, workers=size, ps=None)
                else:
                    os.kill(rng.choice(list(living_workers(job).values())), 9)
                done[what] += 1
                say(f"{what} {size if what == 'scale' else ''} at {job.samples_done()} samples")
                time.sleep(0.5 + rng.random())
            job.finish()
            job.check()
            found = job.result()
            say(f"hurt: state {found[0]}, test loss {found[1]}")
            states |= found[0]
            losses |= found[1]
        finally:
            job.close()
    figures = {"equal": float(len(states) == 1), "tests_equal": float(len(losses) == 1)}
    figures |= {"kills": float(done["kill"]), "scalings": float(done["scale"])}
    aims = {"equal": "= 1", "tests_equal": "= 1"}
    return {"figures": figures, "aims": aims, "holds": {k: figures[k] == 1 for k in aims}, "spread": {}}
