"""Compares the simulator with real runs: goodput on recorded reclaims, real processes beside virtual ones.

Each run is the job of ``reclaim`` under the same recording with the same cuts: machines come and go, agents are killed.
It counts until its last reclaim that is asked for. Then the same machines are played in virtual time, for as long, with
the times that a run had (``everstep simulate --like``): those of the same run (``own``), and those of the other run
(``other``), which is what a forecast has. ``NAME.own``, ``NAME.other``: its goodput, samples over what the machines
could have trained without any cost, median of five seeds; ``NAME.real``: that of the real run, by the speed that was
measured in it. ``NAME.own_off`` and ``NAME.other_off``: how far the samples of a forecast are from those of the run.

What has to be measured with a quiet machine is the time of a fork and of an agent: where they vary from run to run,
``other`` does. ``ps``: mode ps with parity 1+1, no notice; ``hybrid``: its dense part in mode allreduce, a notice of
5 s. Quick: one run of mode ps with ten reclaims, compared with itself.

``--kept DIR``: no new runs. Each job of ``reclaim --plan NAME --keep DIR/NAME`` that is there is compared with itself.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._measure import Result, each_round, median, say, spread
from benchmarks._supervised import RECORDED
from benchmarks.reclaim import LEAD_S, PLANS, RECLAIMS, TRACE, events_of, played_job, until_reclaim
from everstep.brain.events import Event
from everstep.cli.replay import JOURNAL_FILE
from everstep.config.spec import JobSpec
from everstep.model.capacity import Market, Offer
from everstep.platforms.trace_capacity import read_trace
from everstep.sim.elastic.forecast import Story, virtual
from everstep.sim.elastic.job_model import MeasuredJob
from everstep.sim.elastic.outcome import Outcome
from everstep.sim.elastic.recorded_job import RecordedJob
from everstep.sim.elastic.virtual_job import Work

SPEED = 60.0
MACHINES = 3
SEEDS = 5
OFF_MOST = 0.05
SIDES = {"ps": 0.0, "hybrid": LEAD_S}  # seconds of notice
EPOCHS = 100_000  # more than it trains


class Run(NamedTuple):
    """Is one real run until its last reclaim: how long it took, what it trained, and the times that it had."""

    length_s: float
    samples: int
    model: MeasuredJob
    work: Work
    spec: JobSpec


def run_of(events: list[Event], name: str) -> Run:
    """Return what a journal says of a run. Raise ConfigError if it trained too little to tell a speed."""
    recorded = RecordedJob()
    for event in events:
        recorded.take(event)
    work = recorded.work()._replace(epochs=EPOCHS)  # (what waits at the end of an epoch is in it)
    brain, length_s = recorded.brain, events[-1].at - events[0].at
    return Run(length_s, brain.shards.samples_done, recorded.model(name), work, brain.job.spec)


def forecast(
    run: Run, model: MeasuredJob, quiet_s: float, lead_s: float, trace: Path = TRACE, machines: int = MACHINES
) -> list[Outcome]:
    """Return virtual jobs with the machines of a run, and with the times of a model."""
    story = Story(read_trace(trace), Offer("recorded", "", Market.SPOT), machines, 0.0, SPEED, quiet_s)
    return [virtual(run.spec, run.work, model, story, lead_s, run.length_s, seed) for seed in range(SEEDS)]


def compared(
    run: Run, model: MeasuredJob, quiet_s: float, lead_s: float, trace: Path = TRACE, machines: int = MACHINES
) -> tuple[float, float, float]:
    """Return the goodput of a real run and of its forecast, and how far the forecast's samples are off."""
    outcomes = forecast(run, model, quiet_s, lead_s, trace, machines)
    samples = median([float(outcome.samples) for outcome in outcomes])
    real = run.samples / median([outcome.could for outcome in outcomes])
    return real, median([outcome.goodput for outcome in outcomes]), abs(samples / run.samples - 1)


def kept(folder: Path) -> Result:
    """Compare the jobs that ``reclaim`` has kept."""
    found: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for plan in PLANS:
        run_dir = folder / plan.name / plan.name / "run"
        if not (run_dir / JOURNAL_FILE).exists():
            continue
        seen = run_of(until_reclaim(events_of(run_dir), RECLAIMS), plan.name)
        real, own, off = compared(seen, seen.model, plan.quiet_s, plan.lead_s, RECORDED / plan.recording, plan.nodes)
        say(f"{plan.name}: {seen.samples} samples in {seen.length_s:.0f} s; goodput {real:.3f}, forecast {own:.3f}")
        found["figures"] |= {f"{plan.name}.real": real, f"{plan.name}.own": own, f"{plan.name}.own_off": off}
    if not found["figures"]:
        raise SystemExit(f"--kept {folder}: has no job of reclaim --plan NAME --keep {folder}/NAME")
    offs = [value for name, value in found["figures"].items() if name.endswith(".own_off")]
    found["figures"]["own_off"], found["spread"]["own_off"] = median(offs), spread(offs)
    found["aims"]["own_off"], found["holds"]["own_off"] = f"<= {OFF_MOST:g}", found["figures"]["own_off"] <= OFF_MOST
    return found


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Run each side twice for real (quick: once), then forecast each run by both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks calibration")
    parser.add_argument("--kept", type=Path)
    args = parser.parse_args(arguments)
    if args.kept:
        return kept(args.kept)
    reclaims, quiet_s, rounds = (10, 12.0, 1) if quick else (28, 15.0, 2)
    found: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for mode, lead_s in list(SIDES.items())[: 1 if quick else 2]:
        runs: list[Run] = []
        for number in each_round(rounds):
            with tempfile.TemporaryDirectory(prefix="everstep-calibration-") as folder:
                home = Path(folder) / mode
                run_dir = played_job(home, mode, lead_s, quiet_s, reclaims)
                events = events_of(run_dir)
            seen = run_of(until_reclaim(events, reclaims), f"run {number + 1}")
            runs.append(seen)
            say(f"{mode}, run {number + 1}: {seen.samples} samples in {seen.length_s:.0f} s, {seen.model}")
        sides = {"own": runs} if quick else {"own": runs, "other": runs[::-1]}
        for name, models in sides.items():
            each = [compared(one, like.model, quiet_s, lead_s) for one, like in zip(runs, models, strict=True)]
            say(f"{mode}, {name}: goodput really, goodput forecast, share that samples are off: {each}")
            keys = {f"{mode}.real": 0, f"{mode}.{name}": 1, f"{mode}.{name}_off": 2}
            for key, at in keys.items():
                if key not in found["figures"]:
                    found["figures"][key] = median([one[at] for one in each])
                    found["spread"][key] = spread([one[at] for one in each])
            off = f"{mode}.{name}_off"
            found["aims"][off], found["holds"][off] = f"<= {OFF_MOST:g}", found["figures"][off] <= OFF_MOST
    return found
