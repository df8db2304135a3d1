"""Many kills at random moments of long runs in mode allreduce: they finish, exactly once, with equal states.

Real pictures. One, at times two, of the workers or the master are killed at random moments, also while the group is
being built anew (no waiting for it to be whole). Kinds of runs: ``plain`` (3 workers), ``logical`` (3 workers, four
logical parts) and ``sharded`` (2 workers of two processes each, FSDP2; any of the processes is killed). After the last
kill all come back, and train to the end together. Figures of each: ``kills``; ``finished``; ``exact``: what the audit
says; ``equal``: whether every one of the workers ended, all with the same bits (``states``: how many said theirs);
``redone_per_kill`` (of ``plain``: steps done again, of all survivors); ``lost_share``: share of the run's time that the
median survivor spent in gaps longer than ten median steps; ``took_s``. Full: 200 kills of ``plain``, 60 of the others;
quick: 10 and 6. ``--kinds plain,sharded`` and ``--kills 60`` say otherwise; the moments are drawn from
``EVERSTEP_KILL_SEED`` (default 1).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks._measure import Result, say
from benchmarks._replica import ReplicaJob, living_workers, read_steps, step_s
from everstep.errors import EverstepError
from everstep.monitor.audit import audit
from everstep.net.rendezvous import read_master

SAMPLES = 2000  # of an epoch
TAIL = 0.8  # the last kill comes when so much of the data is trained, at the soonest


@dataclass(frozen=True)
class Kind:
    workers: int
    flags: tuple[str, ...]
    kills: tuple[int, int]  # quick, full
    epochs: float  # for each kill: about two seconds of training


KINDS = {
    "plain": Kind(3, (), (10, 200), 10.0),
    "logical": Kind(3, ("--logical-workers", "4"), (6, 60), 10.0),
    "sharded": Kind(2, ("--processes-per-worker", "2"), (6, 60), 4.0),
}


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks allreduce_soak")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--kills", type=int, default=0, help="of each kind")
    args = parser.parse_args(arguments)
    figures: dict[str, float] = {}
    aims: dict[str, str] = {}
    for name in args.kinds.split(","):
        kills = args.kills or KINDS[name].kills[0 if quick else 1]
        found = soak(name, KINDS[name], kills)
        say(f"{name}: {found}")
        figures |= {f"{name}.{figure}": value for figure, value in found.items()}
        aims |= {f"{name}.{figure}": "= 1" for figure in ("finished", "exact", "equal")}
    return {"figures": figures, "aims": aims, "holds": {k: figures[k] == 1 for k in aims}, "spread": {}}


def soak(name: str, kind: Kind, kills: int) -> dict[str, float]:
    rng = random.Random(int(os.environ.get("EVERSTEP_KILL_SEED", "1")))
    epochs = round(kills * kind.epochs)
    samples = SAMPLES * epochs
    done = masters = 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="everstep-soak-") as folder:
        job = ReplicaJob(Path(folder), kind.workers, epochs, 120.0 + 15.0 * kills, list(kind.flags))
        try:
            job.wait_for(lambda: job.at_work(kind.workers))
            while done < kills:
                goal = samples * TAIL * done / kills
                job.wait_for(lambda goal=goal: job.samples_done() >= goal and living_workers(job))
                time.sleep(rng.random())
                victims = processes(job)
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
                if done // 10 > (done - len(chosen)) // 10:
                    say(f"{name}: {done}/{kills} kills, {job.samples_done():,}/{samples:,} samples")
            job.wait_for(lambda: job.at_work(kind.workers))
            job.finish()
            finished = True
        except (RuntimeError, EverstepError) as error:
            finished = False
            say(str(error))
        finally:
            job.close()
        report = audit(job.run_dir)
        if not report.ok:
            say(report.text())
        said = job.states()
        states = [digest for digests in said.values() for digest in digests]
        if len(set(states)) > 1:
            say(f"states: {said}")
        records = read_steps(job.steps)
        step = step_s(records)
        gaps = [np.diff(s.at) for s in records if len(s.at) > 100]
        lost = [float(g[g > 10 * step].sum() / g.sum()) for g in gaps]
        again = sum(int((s.again > s.at[0]).sum()) for s in records)  # (before that: a newcomer's warm-up step)
    return {
        "kills": float(done),
        "master_kills": float(masters),
        "finished": float(finished),
        "exact": float(report.ok and finished),
        "equal": float(set(said) == set(range(kind.workers)) and len(set(states)) == 1),
        "states": float(len(states)),
        "redone_per_kill": again / max(done, 1) if name == "plain" else float("nan"),
        "lost_share": float(np.median(lost)) if lost else float("nan"),
        "took_s": time.monotonic() - begin,
    }


def processes(job: ReplicaJob) -> list[int]:
    """Pids of the workers that are alive now, and of the processes that share a worker with one (its children)."""
    found = list(living_workers(job).values())
    for pid in tuple(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid for child in psutil.Process(pid).children()]
    return found
