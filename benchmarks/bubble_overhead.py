"""Measures what a copy of a stage's state in every iteration costs, in waits and by other ways, in blocks of one job.

A real pipeline: two stages, one core each, 1F1B, AdamW. Sides take turns in blocks of steps inside one job; the first
step of a block is left out. ``NAME``: the time of a step beside that of the same round without copies, median over the
rounds; ``NAME_cpu``: CPU seconds of both stages. Sides: spans (this project's copies), synchronous (before the
step), thread (a Python thread beside the step), async_save (torch.distributed.checkpoint, into a folder). ``none.aa``
is no copies beside no copies. ``inside``: share of copied bytes inside of waits. ``SIZE_mM``: small (0.9 M
parameters) or gpt30m (30 M), with M microbatches. ``--size NAME``, ``--microbatches M`` and ``--rounds N`` choose.
``--minutes N`` ends each job after so long, and leaves out all sides but none, spans and none again, in blocks of two
steps; ``rounds`` says how many there were.

``--emulated``: emulated device time instead: four stages sleep in place of computing, as long as the stages of a
recorded job computed (scaled to 4 ms for a forward of the first stage; ``examples/recordings``), in three schedules;
so four stages do without four cores. Parameters are 1 MB for each stage, with AdamW 3 MB of state. ``--stages 8``:
eight of them; no recorded job has as many, so the two recorded stages in the middle stand for six, each from another
recorded step on. As many microbatches as stages. ``--schedule NAME``: one of the three.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._bubble_job import FEW, SIDES
from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, interval, median, say

BLOCK = 4
OVERHEAD, INSIDE = 1.01, 0.99
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")


def measured(
    size: str, microbatches: int, rounds: int, limit_s: float, emulated: str = "", seconds: float = 0.0, count: int = 2
) -> Result:
    """Run one job of ``count`` stages and compare its blocks. ``emulated``: the schedule of stages that sleep; "": they
    compute.
    ``seconds``: for so long, and only with and without copies; 0: all rounds and all sides."""
    sides, block = (FEW, 2) if seconds else (SIDES, BLOCK)
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    with tempfile.TemporaryDirectory() as folder:
        script = ["--", str(ROOT / "benchmarks" / "_bubble_job.py"), "--size", size, "--out", folder]
        script += ["--microbatches", str(microbatches), "--rounds", str(rounds), "--block", str(block)]
        script += ["--emulated", emulated, "--stages", str(count)] if emulated else []
        script += ["--few", "--seconds", str(seconds)] if seconds else []
        flags = ["run", "--mode", "pipeline", "--stages", str(count), "--copy-every", "1"]
        job = Job(Path(folder), flags, script, limit_s)
        try:
            job.finish()
        finally:
            job.main.kill()
        stages = [json.loads((Path(folder) / f"stage{number}.json").read_text()) for number in range(count)]
    name = (
        f"emulated_{emulated}{'' if count == 4 else f'_p{count}'}_m{microbatches}"
        if emulated
        else f"{size}_m{microbatches}"
    )
    per_round = len(sides) * (block - 1)
    steps = stages[0]["steps"]
    found: dict[str, list[float]] = {}
    for begin in range(per_round, len(steps) - per_round + 1, per_round):  # (the first round is a warm-up)
        wall = {side: median([s for x, s, _ in steps[begin : begin + per_round] if x == side]) for side in sides}
        cpu = {
            side: sum(c for stage in stages for x, _, c in stage["steps"][begin : begin + per_round] if x == side)
            for side in sides
        }
        for side in sides[1:]:
            key = "none.aa" if side == "same" else side
            found.setdefault(f"{name}.{key}", []).append(wall[side] / wall["none"])
            found.setdefault(f"{name}.{key}_cpu", []).append(cpu[side] / cpu["none"])
        found.setdefault(f"{name}.step_s", []).append(wall["none"])
    for key, values in found.items():
        result["figures"][key], result["spread"][key] = median(values), interval(values)
        say(f"{key}: {median(values):.4f} {interval(values)} of {len(values)} rounds")
    copied = sum(stage["copied"] for stage in stages)
    result["figures"][f"{name}.inside"] = sum(stage["inside"] for stage in stages) / max(1, copied)
    result["figures"][f"{name}.overruns"] = float(sum(stage["overruns"] for stage in stages))
    result["figures"][f"{name}.copies"] = float(min(stage["copies"] for stage in stages))
    result["figures"][f"{name}.rounds"] = float(len(found[f"{name}.spans"]))
    holds = {
        f"{name}.spans": ("upper end < 1.01", result["spread"][f"{name}.spans"][1] < OVERHEAD),
        f"{name}.inside": (">= 0.99", result["figures"][f"{name}.inside"] >= INSIDE),
        f"{name}.overruns": ("== 0", not result["figures"][f"{name}.overruns"]),
    }
    for key, (aim, held) in holds.items():
        result["aims"][key], result["holds"][key] = aim, held
    say(f"{name}: {100 * result['figures'][f'{name}.inside']:.1f} % of the copied bytes inside of waits")
    return result


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Run one job for each size and number of microbatches."""
    parser = argparse.ArgumentParser(prog="bubble_overhead")
    parser.add_argument("--size", choices=("small", "gpt30m"))
    parser.add_argument("--rounds", type=int, default=3 if quick else 200)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--stages", type=int, choices=(4, 8), default=4, help="of emulated ones")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of emulated stages")
    parser.add_argument("--microbatches", type=int, choices=(4, 8), help="only so many")
    parser.add_argument("--minutes", type=float, default=0.0, help="of each job, with and without copies only")
    args = parser.parse_args(list(arguments))
    if args.emulated:
        emulated: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
        for schedule in (args.schedule,) if args.schedule else SCHEDULES:
            limit_s = 60.0 * (1.0 + args.minutes) + 20.0 * args.rounds * args.stages / 4
            some = measured("small", args.stages, args.rounds, limit_s, schedule, 60.0 * args.minutes, args.stages)
            for kind, values in some.items():
                emulated[kind].update(values)
        return emulated
    sizes = [args.size] if args.size else ["small"] if quick else ["small", "gpt30m"]
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for size in sizes:
        for microbatches in (args.microbatches,) if args.microbatches else (4,) if quick else (4, 8):
            limit_s = 100.0 if quick else 60.0 * args.rounds + 600.0
            some = measured(size, microbatches, args.rounds, limit_s, seconds=60.0 * args.minutes)
            for kind, values in some.items():
                result[kind].update(values)
    return result
