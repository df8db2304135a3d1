"""Many kills at random moments of one long run in mode allreduce: it finishes, exactly once, with equal states.

Three workers train on real pictures; one, at times two, of them or the master are killed at random moments, also while
the group is being built anew (no waiting for it to be whole). Figures: ``kills``; ``finished``; ``exact``: what the
audit says; ``equal``: whether all workers ended with the same bits; ``redone_per_kill``; ``lost_share``: share of the
run's time that the median survivor spent in gaps longer than ten median steps. Full: 200 kills; the random moments are
drawn from ``EVERSTEP_KILL_SEED`` (default 1).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks._measure import Result, say
from benchmarks._replica import ReplicaJob, living_workers, read_steps, step_s
from everstep.errors import EverstepError
from everstep.monitor.audit import audit
from everstep.net.rendezvous import read_master


def run(quick: bool) -> Result:
    rng = random.Random(int(os.environ.get("EVERSTEP_KILL_SEED", "1")))
    kills, epochs = (10, 60) if quick else (200, 1500)
    samples = 2000 * epochs
    done = masters = 0
    with tempfile.TemporaryDirectory(prefix="everstep-soak-") as folder:
        job = ReplicaJob(Path(folder), 3, epochs, 180.0 if quick else 3000.0)
        try:
            job.wait_for(lambda: job.at_work(3))
            while done < kills:
                goal = samples * 0.95 * done / kills
                job.wait_for(lambda goal=goal: job.samples_done() >= goal and living_workers(job))
                time.sleep(rng.random() * (0.5 if quick else 1.0))
                victims = list(living_workers(job).values())
                chosen = rng.sample(victims, min(len(victims), 2 if rng.random() < 0.1 else 1))
                if rng.random() < 0.05 and (info := read_master(job.run_dir)) is not None:
                    chosen.append(info.pid)
                    masters += 1
                for pid in chosen:
                    try:
                        os.kill(pid, 9)
                        done += 1
                    except ProcessLookupError:
                        continue
                say(f"{done}/{kills} kills, {job.samples_done():,}/{samples:,} samples")
            job.finish()
            finished, why = True, ""
        except (RuntimeError, EverstepError) as error:
            finished, why = False, str(error)
            say(why)
        finally:
            job.close()
        report = audit(job.run_dir)
        if not report.ok:
            say(report.text())
        states = job.states()
        records = read_steps(job.steps)
        step = step_s(records)
        gaps = [np.diff(s.at) for s in records if len(s.at) > 100]
        lost = [float(g[g > 10 * step].sum() / g.sum()) for g in gaps]
        again = sum(len(s.again) for s in records)
    figures = {
        "kills": float(done),
        "master_kills": float(masters),
        "finished": float(finished),
        "exact": float(report.ok and finished),
        "equal": float(bool(states) and len(set(states)) == 1),
        "states": float(len(states)),
        "redone_per_kill": again / max(done, 1),
        "lost_share": float(np.median(lost)) if lost else float("nan"),
    }
    aims = {"finished": "= 1", "exact": "= 1", "equal": "= 1"}
    return {"figures": figures, "aims": aims, "holds": {k: figures[k] == 1 for k in aims}, "spread": {}}
