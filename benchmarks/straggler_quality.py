"""Stragglers and what is learnt: test AUC on the flights with every policy, of that of undisturbed runs of other seeds.

Every run trains ``examples/01_flights_dlrm.py`` (real data). Disturbed ones have worker:0 four times slower for the
first 60 % of the samples and worker:1 after that, and the ps:0 (mode ps) eight times (``everstep chaos``). Mode
``ps``: dense part and tables on two ps, nobody waits; ``sync``: the same, step by step (``--consistency sync``);
``allreduce``: tables on one ps, the dense part on every worker, steps in common. Windows of half a second. Figures:

- ``MODE.undisturbed.auc``: mean over seeds, with its spread; ``MODE.POLICY.auc``: the same of disturbed runs;
- ``MODE.POLICY.within``: share of those within three standard deviations of the undisturbed ones' mean;
- ``MODE.POLICY.exact``: share whose audit says that each sample was trained exactly once;
- ``MODE.POLICY.plans``: plans that the policy made, mean: where there are none, nothing was tested.
    --modes ps,sync,allreduce --policies none,nondedicated,dedicated,backup --seeds 5 --rows 150000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks._jobs import SCRIPT, Job
from benchmarks._measure import Result, say, spread
from everstep.cli.chaos import inject
from everstep.errors import EverstepError
from everstep.model.member import MemberState
from everstep.monitor.audit import audit
from everstep.monitor.schedules import Planned

WINDOW_S = 0.5
BATCH = 256
LIMIT_S = 600.0
HOUR_S = 3600.0
SLOW, SLOW_PS = 4.0, 8.0
MODES = {
    "ps": ["--workers", "2", "--ps", "2"],
    "sync": ["--workers", "3", "--ps", "2", "--consistency", "sync"],
    "allreduce": ["--mode", "allreduce", "--workers", "3", "--ps", "1"],
}
REFUSED = {"ps": ("dedicated", "backup"), "sync": (), "allreduce": ("backup",)}
"""Policies that make no sense there."""


class Outcome(msgspec.Struct):
    auc: float
    exact: bool
    plans: int


def train(mode: str, policy: str, seed: int, rows: int, disturbed: bool) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        flags = [*MODES[mode], "--policy", policy, "--seed", str(seed)]
        script = ["--", str(SCRIPT), "--rows", str(rows), "--batch-size", str(BATCH)]
        job = Job(Path(folder), ["run", *flags], script, LIMIT_S, env={"EVERSTEP_WINDOW_S": str(WINDOW_S)})
        ordered: set[str] = set()
        try:
            while not job.over and time.monotonic() < job.until:
                if disturbed:
                    disturb(job, mode, rows, ordered)
                time.sleep(0.2)
            job.finish()
            if disturbed and "worker:0" not in ordered:
                raise RuntimeError("it was over before anybody was slow")
            summary = json.loads((job.run_dir / "summary.json").read_text())
            plans = (job.run_dir / "events.jsonl").read_text().count(f'"policy":"{policy}"')
            outcome = Outcome(float(summary["values"]["auc"]), audit(job.run_dir).ok, plans)
        finally:
            job.close()
    return outcome


def disturb(job: Job, mode: str, rows: int, ordered: set[str]) -> None:
    """Order what is due and not ordered yet."""
    status = job.status()
    if status is None:
        return
    there = {f"{m.role}:{m.slot}" for m in status.members if m.state == MemberState.ALIVE}
    due = {"worker:0": SLOW} | ({"ps:0": SLOW_PS} if mode != "allreduce" else {})
    if status.samples_done > 0.6 * 0.9 * rows:
        due["worker:1"] = SLOW
    for member, factor in due.items():
        if member in there and member not in ordered:
            with contextlib.suppress(EverstepError):  # it is just coming or going
                if member == "worker:1":
                    inject(job.run_dir, Planned(0.0, "slow", "worker:0", 1.001, 0.001), False)
                inject(job.run_dir, Planned(0.0, "slow", member, factor, HOUR_S), False)
                ordered.add(member)


def run(quick: bool, arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks straggler_quality", description=__doc__)
    parser.add_argument("--modes", default="allreduce" if quick else ",".join(MODES))
    parser.add_argument("--policies", default="nondedicated" if quick else "none,nondedicated,dedicated,backup")
    parser.add_argument("--seeds", type=int, default=2 if quick else 5)
    parser.add_argument("--rows", type=int, default=30_000 if quick else 150_000)
    args = parser.parse_args(arguments or [])
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures, aims, holds = result["figures"], result["aims"], result["holds"]
    for mode in args.modes.split(","):
        policies = [p for p in args.policies.split(",") if p not in REFUSED[mode]]
        found: dict[str, list[Outcome]] = {side: [] for side in ("undisturbed", *policies)}
        for seed in range(args.seeds):
            for side in found:
                disturbed = side != "undisturbed"
                found[side].append(train(mode, side if disturbed else "none", seed, args.rows, disturbed))
                say(f"{mode} seed {seed} {side}: {found[side][-1]}")
        plain = [o.auc for o in found["undisturbed"]]
        middle, width = statistics.mean(plain), 3 * statistics.stdev(plain)
        for side, outcomes in found.items():
            aucs = [o.auc for o in outcomes]
            figures[f"{mode}.{side}.auc"] = statistics.mean(aucs)
            result["spread"][f"{mode}.{side}.auc"] = spread(aucs)
            figures[f"{mode}.{side}.exact"] = statistics.mean(o.exact for o in outcomes)
            aims[f"{mode}.{side}.exact"], holds[f"{mode}.{side}.exact"] = "= 1", all(o.exact for o in outcomes)
            if side == "undisturbed":
                continue
            figures[f"{mode}.{side}.plans"] = statistics.mean(o.plans for o in outcomes)
            figures[f"{mode}.{side}.within"] = statistics.mean(abs(auc - middle) <= width for auc in aucs)
            aims[f"{mode}.{side}.within"] = "= 1"
            holds[f"{mode}.{side}.within"] = figures[f"{mode}.{side}.within"] == 1
    return result
