"""A ps is killed in the middle: how long until its rows are served, and what it costs in all, against going back to a
checkpoint.

Every round trains ``examples/01_flights_dlrm.py`` three times (2 workers, 6 ps): *calm*; *parity* 4+1 with one ps
killed (SIGKILL) when a third of the samples are done; and *restore*: no parity, a checkpoint every few seconds, the
whole job killed at the same place and taken up from its newest checkpoint. Times come from the ps' audit logs. Figures:

- ``served_s``: the ps's death to the first batch applied to a bucket that it had, at another ps; ``all_served_s``: to
  the last of its buckets being whole elsewhere;
- ``protected_s``: its death to every bucket being fully protected again, its replacement included;
- ``speed_meanwhile``: samples/s applied from its death to that moment, of samples/s in the two seconds before;
- ``gap_s``: longest time without any batch applied, from the death on;
- ``lost_s``, ``restore_lost_s``: first to last batch, more than in the calm run of the round; ``restore_over_parity``:
  their ratio (a loss of less than 0.1 s counts as 0.1 s).
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks._jobs import Job, longest_gap, pushes, rate
from benchmarks._measure import Result, interleaved, median, say, spread

BATCH = 512
SAMPLES = 294_610  # an epoch of the training split
LIMIT_S = 240.0
BEFORE_S = 2.0
PS = ["--workers", "2", "--ps", "6"]
VICTIM = 1
CHECKPOINT_S = 5


def calm(home: Path, epochs: int) -> dict[str, float]:
    job = Job.start(home, [*PS, "--parity", "4+1"], epochs, BATCH, LIMIT_S)
    try:
        job.finish()
        job.check()
        at, _ = pushes(job.logs())
        return {"train_s": float(at[-1] - at[0])}
    finally:
        job.close()


def parity(home: Path, epochs: int) -> dict[str, float]:
    job = Job.start(home, [*PS, "--parity", "4+1"], epochs, BATCH, LIMIT_S)
    try:
        job.wait_for(lambda: job.samples_done() > epochs * SAMPLES // 3 and job.safe())
        died_at = job.kill_ps(VICTIM)
        job.wait_for(lambda: not job.safe())
        job.wait_for(job.safe)
        safe_at = time.time()
        job.finish()
        job.check()
        logs = job.logs()
        at, samples = pushes(logs)
        dead = next(log for log in logs if (log.slot, log.life) == (VICTIM, 1))
        took, served = [], []
        for bucket in dead.stints:
            later = [s for log in logs for s in log.stints.get(bucket, []) if s.took is not None and s.at > died_at]
            if later:
                stint = min(later, key=lambda s: s.at)
                rows = stint.log.rows_of(bucket, stint.first, stint.last)
                took.append(stint.at - died_at)
                served += [float(stint.log.at[rows[0]]) - died_at] if len(rows) else []
        before = rate(at, samples, died_at - BEFORE_S, died_at)
        return {
            "train_s": float(at[-1] - at[0]),
            "served_s": min(served),
            "all_served_s": max(took),
            "protected_s": safe_at - died_at,
            "speed_meanwhile": rate(at, samples, died_at, safe_at) / before if before else float("nan"),
            "gap_s": longest_gap(at, died_at, min(safe_at, float(at[-1]))),
        }
    finally:
        job.close()


def restore(home: Path, epochs: int) -> dict[str, float]:
    job = Job.start(home, [*PS, "--checkpoint-every", f"{CHECKPOINT_S}s"], epochs, BATCH, LIMIT_S)
    again: Job | None = None
    try:
        job.wait_for(lambda: job.samples_done() > epochs * SAMPLES // 3 and _has_checkpoint(job))
        os.killpg(job.main.pid, signal.SIGKILL)
        job.main.process.wait(30)
        begin = float(np.concatenate([log.at for log in job.logs()]).min())
        again = Job(home, ["resume", str(job.run_dir)], [], LIMIT_S, "again")
        again.finish()
        again.check()
        at, _ = pushes(again.logs())
        return {"train_s": float(at[-1]) - begin}
    finally:
        job.close()
        if again is not None:
            again.close()


def _has_checkpoint(job: Job) -> bool:
    status = job.status()
    return status is not None and status.checkpoint is not None and status.checkpoint.newest > 0


def run(quick: bool) -> Result:
    epochs, rounds = (1, 1) if quick else (4, 5)
    ways = {"calm": calm, "parity": parity, "restore": restore}

    def one(way: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="everstep-recovery-") as folder:
            return ways[way](Path(folder), epochs)

    found = interleaved({name: (lambda name=name: one(name)) for name in ways}, rounds, say)  # type: ignore[misc]
    values: dict[str, list[float]] = {
        name: [r[name] for r in found["parity"]]
        for name in ("served_s", "all_served_s", "protected_s", "speed_meanwhile", "gap_s")
    }
    base = [r["train_s"] for r in found["calm"]]
    values["calm_s"] = base
    values["lost_s"] = [r["train_s"] - b for r, b in zip(found["parity"], base, strict=True)]
    values["restore_lost_s"] = [r["train_s"] - b for r, b in zip(found["restore"], base, strict=True)]
    values["restore_over_parity"] = [
        a / max(b, 0.1) for a, b in zip(values["restore_lost_s"], values["lost_s"], strict=True)
    ]
    figures = {name: median(v) for name, v in values.items()}
    aims = {"served_s": "<= 2", "restore_over_parity": ">= 5"}
    holds = {"served_s": figures["served_s"] <= 2, "restore_over_parity": figures["restore_over_parity"] >= 5}
    return {"figures": figures, "aims": aims, "holds": holds, "spread": {n: spread(v) for n, v in values.items()}}
