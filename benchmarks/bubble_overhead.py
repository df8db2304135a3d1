"""Measures what a copy of a stage's state in every iteration costs, in waits and by other ways, step by step.

A real pipeline: two stages, one core each, 1F1B, AdamW. Sides take turns inside one job (``_bubble_sides``): a step
without copies, one with this project's copies in its waits, one without again. ``spans``: the time of the step with a
copy beside the mean of its two neighbours, median over the rounds with its 95 % interval by ranks; ``spans.aa``: the
second neighbour beside the first. Without copies is without anything of them: no clock is read in waits for them.
``NAME_cpu``: CPU seconds of both stages; ``cpu_s_per_sample`` in seconds. After every ten rounds, the other sides in
blocks: synchronous (before the step), thread (a Python thread beside the step), async_save
(torch.distributed.checkpoint, into a folder, each step), durable (this project's checkpoints, one after the other into
the run directory, from a copy in each step; ``durable_every_s``: how long one takes, the best interval that the storage
allows), and, where dlrover can be imported, flash (DLRover's flash checkpoint into shared memory, in each step).
``inside``: share of copied bytes inside of waits. ``begin_ms``, ``stall_ms``: what one copy cost the thread that
trains, in its costlier stage. These three are without the first four copies, whose memory is new; ``cold_stall_ms``:
what all of those stalled. ``others_cores``: processors that were busy with anything but the stages, meanwhile.

``SIZE_mM``: small (0.9 M parameters) or gpt30m (30 M, 360 MB of state), with M microbatches. All of it takes
``--minutes`` (11), with the starts of its jobs; a job of gpt30m gets four times as long as a small one. ``--size NAME``
and ``--microbatches M`` choose; ``--few`` leaves out the other sides; ``--steps N`` ends a job earlier.
If the noise is larger than the effect, the interval holds both what the aim allows and what it does not: the last line
of a job says "undecided" then, and the aim does not hold, since it is about the upper end.

``--emulated``: emulated device time instead: four stages sleep in place of computing, as long as the stages of a
recorded job computed (scaled to 4 ms for a forward of the first stage; ``examples/recordings``), in three schedules;
so four stages do without four cores. Parameters are 1 MB for each stage, with AdamW 3 MB of state. ``--stages 8``:
eight of them; no recorded job has as many, so the two recorded stages in the middle stand for six, each from another
recorded step on. As many microbatches as stages. ``--schedule NAME``: one of the three.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks._bubble_sides import OTHERS, Cycle, Step, ratios, verdict
from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, interval, median, note_rounds, say

OVERHEAD, INSIDE = 1.01, 0.99
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
SHARES: Final = {"small": 1.0, "gpt30m": 4.0}  # of the time
SPARE_S: Final = 120.0  # for a job to end


class Pipeline(NamedTuple):
    """Is one job. ``emulated``: the schedule of stages that sleep; "": they compute."""

    size: str
    microbatches: int
    emulated: str = ""
    stages: int = 2

    @property
    def name(self) -> str:
        if not self.emulated:
            return f"{self.size}_m{self.microbatches}"
        more = "" if self.stages == 4 else f"_p{self.stages}"
        return f"emulated_{self.emulated}{more}_m{self.microbatches}"


def trained(what: Pipeline, seconds: float, steps: int, others: Sequence[str]) -> list[dict[str, Any]]:
    """Run one job, for so long with its start; return what its stages wrote."""
    with tempfile.TemporaryDirectory() as folder:
        script = ["--", str(ROOT / "benchmarks" / "_bubble_job.py"), "--size", what.size, "--out", folder]
        script += ["--microbatches", str(what.microbatches), "--until", str(time.time() + seconds)]
        script += ["--others", ",".join(others)]
        script += ["--steps", str(steps)] if steps else []
        script += ["--emulated", what.emulated, "--stages", str(what.stages)] if what.emulated else []
        flags = ["run", "--mode", "pipeline", "--stages", str(what.stages), "--copy-every", "1"]
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        job = Job(Path(folder), flags, script, seconds + SPARE_S, env=paths)
        try:
            job.finish()
        finally:
            job.main.kill()
        return [json.loads((Path(folder) / f"stage{number}.json").read_text()) for number in range(what.stages)]


def add(result: Result, what: Pipeline, stages: list[dict[str, Any]], others: Sequence[str]) -> None:
    """Put what one job showed into the result."""
    figures, name, cycle = result["figures"], what.name, Cycle(others)
    columns = zip(*(stage["steps"] for stage in stages), strict=False)
    steps = [Step(cycle.turn(of[0][0]), of[0][1], sum(one[2] for one in of), of[0][3]) for of in columns]
    found = ratios(steps)
    rounds = len(found.none_s)
    if not rounds:
        raise RuntimeError(f"{name}: not one round in the time that there was; give it more --minutes")
    note_rounds(rounds)
    for kind, sides in (("", found.wall), ("_cpu", found.cpu)):
        for side, values in sides.items():
            key = f"{name}.spans{kind}.aa" if side == "aa" else f"{name}.{side}{kind}"
            figures[key], result["spread"][key] = median(values), interval(values)
            say(f"{key}: {median(values):.4f} {interval(values)} of {len(values)}")
    batch = stages[0]["batch"]
    figures[f"{name}.step_s"], result["spread"][f"{name}.step_s"] = median(found.none_s), interval(found.none_s)
    none_cpu_s = [value / batch for value in found.none_cpu_s]
    figures[f"{name}.cpu_s_per_sample"] = median(none_cpu_s)
    figures[f"{name}.cpu_s_per_sample_spans"] = median(
        [cpu * ratio for cpu, ratio in zip(none_cpu_s, found.cpu["spans"], strict=True)]
    )
    copied, copies = sum(stage["copied"] for stage in stages), min(stage["copies"] for stage in stages)
    figures[f"{name}.inside"] = sum(stage["inside"] for stage in stages) / max(1, copied)
    figures[f"{name}.overruns"] = float(sum(stage["overruns"] for stage in stages))
    figures[f"{name}.copies"], figures[f"{name}.rounds"] = float(copies), float(rounds)
    for fact in ("begin", "stall"):
        figures[f"{name}.{fact}_ms"] = max(1e3 * one[f"{fact}_s"] / max(1, one["copies"]) for one in stages)
    figures[f"{name}.cold_stall_ms"] = max(1e3 * one["cold_stall_s"] for one in stages)
    own_s = sum(stage["cpu_s"] for stage in stages)
    figures[f"{name}.others_cores"] = max(0.0, stages[0]["busy_s"] - own_s) / stages[0]["wall_s"]
    if stages[0]["durable_s"]:
        figures[f"{name}.durable_every_s"] = median(stages[0]["durable_s"])
    if stages[0]["error"]:
        say(f"{name}: a checkpoint failed: {stages[0]['error']}")
    ends = result["spread"][f"{name}.spans"]
    holds = {
        f"{name}.spans": ("upper end < 1.01", ends[1] < OVERHEAD),
        f"{name}.inside": (">= 0.99", figures[f"{name}.inside"] >= INSIDE),
        f"{name}.overruns": ("== 0", not figures[f"{name}.overruns"]),
    }
    for key, (aim, held) in holds.items():
        result["aims"][key], result["holds"][key] = aim, held
    noise = result["spread"][f"{name}.spans.aa"]
    say(
        f"{name}: less than {100 * (OVERHEAD - 1):g} % is {verdict(ends, OVERHEAD)} ({100 * (ends[0] - 1):.2f} to "
        f"{100 * (ends[1] - 1):.2f} %); nothing beside nothing: {100 * (noise[0] - 1):.2f} to "
        f"{100 * (noise[1] - 1):.2f} %; {figures[f'{name}.others_cores']:.2f} cores did something else"
    )


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Run one job for each size and number of microbatches."""
    parser = argparse.ArgumentParser(prog="bubble_overhead")
    parser.add_argument("--minutes", type=float, default=1.4 if quick else 11.0, help="of all jobs, with their starts")
    parser.add_argument("--size", choices=tuple(SHARES))
    parser.add_argument("--microbatches", type=int, choices=(4, 8), help="only so many")
    parser.add_argument("--few", action="store_true", help="without the other ways to copy")
    parser.add_argument("--steps", type=int, default=0, help="of each job, at most; 0: no limit")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--stages", type=int, choices=(4, 8), default=4, help="of emulated ones")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of emulated stages")
    args = parser.parse_args(list(arguments))
    if args.emulated:
        schedules = (args.schedule,) if args.schedule else SCHEDULES
        jobs = [Pipeline("small", args.stages, schedule, args.stages) for schedule in schedules]
    else:
        sizes = [args.size] if args.size else ["small"] if quick else list(SHARES)
        counts = (args.microbatches,) if args.microbatches else (4,) if quick else (4, 8)
        jobs = [Pipeline(size, count) for size in sizes for count in counts]
    others: tuple[str, ...] = () if args.few else OTHERS
    if others and importlib.util.find_spec("dlrover") is not None:
        others += ("flash",)
    elif others:
        say("no side flash: DLRover is not installed here (pip install dlrover grpcio protobuf)")
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    total = sum(SHARES[job.size] for job in jobs)
    for job in jobs:
        add(result, job, trained(job, 60.0 * args.minutes * SHARES[job.size] / total, args.steps, others), others)
    return result
