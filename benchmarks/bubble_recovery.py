"""Measures how long a pipeline of two stages is away when a stage is killed, and how many steps are done again.

``kill -9`` of a random stage at random moments, real processes, one replica. ``everstep``: the job goes on from the
copies of its stages, without any checkpoint. ``torchrun``: a plain script that saves every 10 steps and is restarted
from its newest checkpoint. ``away_s``: from the kill to the next step that is behind all earlier ones, less the time
of a step, as the first stage writes it; ``redone``: steps that were done again. ``audit``: 1 if it was exact.

``machine``: the agent of the worker's node is killed, and all that runs there with it; the next node goes on from the
copies that an agent of another node keeps. All nodes are on this machine. ``away_s`` has the silence after which a node
counts as lost (``silence_s``). ``--machines`` measures that alone, ``--stages`` killed stages alone. ``--minutes N``
begins no further kill of torchrun's stages behind that (``torchrun.kills``).

``--replicas``: two replicas of two stages instead, whose steps take half a second longer (they sleep). In turn a random
stage and all stages of a replica are killed. ``pause_steps``: the longest distance between two steps of the other
replica from then until the lost one trains again, less the time of a step, in steps; ``pause_s`` in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Child, Result, everstep, median, note_rounds, say, spread
from everstep.model.member import Role

SCRIPT = ROOT / "benchmarks" / "_bubble_script.py"
MEDIAN_S, MOST_S, REDONE = 1.0, 3.0, 2
SILENCE_S = 5.0  # before a node counts as lost
SETTLE_S = 2.0  # for a node to join, and for the worker to see who its neighbour is
LIMIT_S = 120.0
STEP_S = 0.5  # of a job of two replicas, besides what it computes


def read(path: Path) -> list[tuple[float, int]]:
    """Return when each step was done; a line that is cut off is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(float(at), int(step)) for at, step in (line.split() for line in lines)]


def kill_torchrun(torchrun: Child) -> None:
    """Kill torchrun and its stages, which are in sessions of their own."""
    left = stages_of(torchrun.pid)
    torchrun.kill()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], 10.0)


def stages_of(root: int) -> list[int]:
    """Return the processes that train: those that run our script and are the youngest of their line."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            memory = [Path(m.path).name for m in process.memory_maps()]
            if any("everstep-copy" in name for name in memory) or "--by" in process.cmdline()[-5:]:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


class NotBackError(RuntimeError):
    """Says that a job took no step for ``LIMIT_S`` after a kill. ``found``: what the kills before it gave."""

    def __init__(self, steps: int, found: tuple[list[float], list[int]]) -> None:
        super().__init__(f"no step for {LIMIT_S:.0f} s, behind {steps} of them")
        self.found = found


def kills(
    root: int,
    steps: Path,
    count: int,
    draws: random.Random,
    alive: Callable[[], bool],
    victims_of: Callable[[int], list[int]] = stages_of,
    end_s: float = float("inf"),
) -> tuple[list[float], list[int]]:
    """Kill ``count`` stages; return how long each kept the job away, and how many steps were done again. ``end_s``: of
    the monotonic clock: no further kill behind it, but for the first one."""
    away: list[float] = []
    redone: list[int] = []

    def until(what: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > end or not alive():
                raise NotBackError(len(read(steps)), (away, redone))
            time.sleep(0.01)

    for _ in range(count):
        if away and time.monotonic() > end_s:
            break
        before = len(read(steps))
        wanted = before + draws.randrange(15, 40)
        until(lambda wanted=wanted: len(read(steps)) >= wanted)  # type: ignore[misc]
        time.sleep(draws.uniform(0.0, 0.05))
        victims = victims_of(root)
        if not victims:
            raise RuntimeError("no stage was found to be killed")
        killed_at = time.time()
        os.kill(draws.choice(victims), signal.SIGKILL)
        time.sleep(0.3)
        furthest = max(step for at, step in read(steps) if at <= killed_at + 0.02)
        until(lambda furthest=furthest: read(steps)[-1][1] > furthest + 2)  # type: ignore[misc]
        found = read(steps)
        next_at, next_step = next((at, step) for at, step in found if at > killed_at + 0.02)
        usual = median([b[0] - a[0] for a, b in zip(found[wanted - 12 :], found[wanted - 11 : wanted], strict=False)])
        away.append(next_at - killed_at - usual)
        redone.append(furthest - next_step + 1)
        say(f"killed at step {furthest}: the next step is {next_step}, after {away[-1]:.2f} s")
    return away, redone


class Pauses(NamedTuple):
    """Is what lost stages cost the other replica: ``seconds`` and ``steps`` of its longest pause behind each kill, and
    the steps that were done again."""

    seconds: list[float]
    steps: list[float]
    redone: list[int]


def lost_replicas(folder: Path, count: int, whole: bool, job: Job) -> Pauses:
    """Kill a stage (``whole``: all stages) of one of two replicas, so many times; the other one is watched."""
    draws, found = random.Random(3), Pauses([], [], [])
    files = [folder / f"replicas.{slot}" for slot in range(2)]

    def until(what: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > end or job.over:
                raise RuntimeError(f"no step of a replica for {LIMIT_S:.0f} s:\n{job.words()}")
            time.sleep(0.01)

    for _ in range(count):
        lost = draws.randrange(2)
        before = [len(read(file)) for file in files]
        until(lambda before=before: all(len(read(f)) >= n + 6 for f, n in zip(files, before, strict=True)))  # type: ignore[misc]
        time.sleep(draws.uniform(0.0, STEP_S))
        pids = [int((folder / f"replicas.{lost}.pid{stage}").read_text()) for stage in range(2)]
        killed_at = time.time()
        for pid in pids if whole else [draws.choice(pids)]:
            os.kill(pid, signal.SIGKILL)
        until(lambda lost=lost, at=killed_at: sum(t > at + STEP_S for t, _ in read(files[lost])) >= 3)  # type: ignore[misc]
        done = read(files[1 - lost])
        gaps = [(b[0], b[0] - a[0]) for a, b in itertools.pairwise(done)]
        usual_s = median([gap for at, gap in gaps if at <= killed_at][-5:])
        longest_s = max(gap for at, gap in gaps if at > killed_at) - usual_s
        last = max(step for at, step in done if at <= killed_at)
        found.seconds.append(longest_s)
        found.steps.append(longest_s / usual_s)
        found.redone.append(last + 1 - next(step for at, step in done if at > killed_at))
        words = "replica" if whole else "stage"
        say(
            f"a {words} of two replicas is killed: the other one pauses {longest_s:.2f} s, of a step of {usual_s:.2f} s"
        )
    return found


def replicas(result: Result, count: int) -> None:
    """Measure what the loss of a stage, and of a replica, costs the other replica."""
    figures = result["figures"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["run", "--mode", "pipeline", "--stages", "2", "--workers", "2", "--min-workers", "1"]
        script = ["--", str(SCRIPT), "--by", "everstep", "--each", "--pause", str(STEP_S)]
        job = Job(folder, flags, [*script, "--steps", str(folder / "replicas")], 3600.0)
        try:
            for side, whole in (("stage", False), ("replica", True)):
                found = lost_replicas(folder, count, whole, job)
                for fact, values in (("pause_s", found.seconds), ("pause_steps", found.steps)):
                    key = f"{side}_of_two.{fact}"
                    figures[key], result["spread"][key] = median(values), spread(values)
                figures[f"{side}_of_two.redone_most"] = float(max(found.redone))
                key = f"{side}_of_two.pause_steps"
                result["aims"][key], result["holds"][key] = "< 1", max(found.steps) < 1.0
            Child(everstep("stop", job.run_dir)).finish(60.0)
            job.finish()
            command = everstep("audit", job.run_dir)
            audit = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False).stdout
        finally:
            job.main.kill()
    figures["two.audit"] = float("so far each sample once" in audit)
    result["aims"]["two.audit"], result["holds"]["two.audit"] = "== 1", figures["two.audit"] == 1.0
    note_rounds(count)


def lost_machines(folder: Path, count: int) -> tuple[list[float], list[int]]:
    """Kill agents with all that they started; return how long each kept the job away, and the steps done again."""
    settings = folder / "job.yaml"
    settings.write_text(f"master_alone: true\nnodes: 2\nlost_after_s: {SILENCE_S:g}\n")
    flags = ["run", "-c", str(settings), "--mode", "pipeline", "--stages", "2", "--copy-every", "1"]
    script = ["--", str(SCRIPT), "--by", "everstep", "--steps", str(folder / "machine")]
    with contextlib.ExitStack() as nodes:
        job = Job(folder, [*flags, "--bind", "127.0.0.1:0"], script, 3600.0, "machines")
        nodes.callback(job.main.kill)
        job.wait_for(lambda: "--join " in job.log.read_text())
        at = job.log.read_text().partition("--join ")[2].split()[0]
        agents: dict[str, Child] = {}

        def join() -> None:
            name = f"n{len(agents):03d}"
            flags = ["--join", at, "--node", name, "--machine", name, "--workers", "1", "--ps", "0"]
            flags += ["--secret-file", str(job.run_dir / "secret"), "--run-dir", str(folder / name)]
            agents[name] = nodes.enter_context(Child(everstep("agent", *flags), log=folder / f"{name}.log"))

        def agent_of_the_worker(_: int) -> list[int]:
            view = job.status()
            on = [str(m.node) for m in view.members if m.role is Role.WORKER] if view is not None else []
            join()  # (takes the place that is about to go)
            time.sleep(SETTLE_S)
            return [agents[node].pid for node in on if node in agents]

        join()
        found = kills(
            job.main.pid, folder / "machine", count, random.Random(1), lambda: not job.over, agent_of_the_worker
        )
        Child(everstep("stop", job.run_dir)).finish(60.0)
        job.finish()
        if len(re.findall(r"begin at step \d+, from the copy", job.log.read_text())) != count:
            raise RuntimeError(f"not each machine that was lost was followed by its copy:\n{job.words()}")
    return found


def add(result: Result, side: str, found: tuple[list[float], list[int]]) -> None:
    """Put what the kills of one side gave into the result."""
    figures, (away, redone) = result["figures"], found
    figures[f"{side}.away_s"], result["spread"][f"{side}.away_s"] = median(away), spread(away)
    figures[f"{side}.away_most_s"] = max(away)
    figures[f"{side}.redone"], result["spread"][f"{side}.redone"] = median(redone), spread(redone)
    figures[f"{side}.redone_most"] = float(max(redone))


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Kill stages of a job of each kind, and machines."""
    parser = argparse.ArgumentParser(prog="bubble_recovery")
    parser.add_argument("--machines", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf)
    args = parser.parse_args(list(arguments))
    end_s = time.monotonic() + 60.0 * args.minutes
    count = 3 if quick else 20
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures = result["figures"]
    if args.replicas:
        replicas(result, 2 if quick else count)
        return result
    if not args.stages:
        with tempfile.TemporaryDirectory() as name:
            add(result, "machine", lost_machines(Path(name), 2 if quick else count))
        figures["machine.silence_s"] = SILENCE_S
    if args.machines:
        return result
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["run", "--mode", "pipeline", "--stages", "2", "--copy-every", "1"]
        job = Job(folder, flags, ["--", str(SCRIPT), "--by", "everstep", "--steps", str(folder / "ours")], 3600.0)
        try:
            ours = kills(job.main.pid, folder / "ours", count, random.Random(1), lambda: not job.over)
            Child(everstep("stop", job.run_dir)).finish(60.0)
            job.finish()
            command = everstep("audit", job.run_dir)
            audit = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False).stdout
        finally:
            job.main.kill()
        figures["everstep.audit"] = float("so far each sample once" in audit)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1000", str(SCRIPT), "--by", "torchrun", "--steps", str(folder / "theirs")]
        with Child(command, log=folder / "torchrun.log") as torchrun:
            try:
                theirs = kills(
                    torchrun.pid,
                    folder / "theirs",
                    1 if quick else count,
                    random.Random(1),
                    lambda: torchrun.process.poll() is None,
                    end_s=end_s,
                )
            except NotBackError as error:
                say(f"torchrun: {error}; it is not killed again")
                theirs = error.found
                figures["torchrun.not_back_after_s"] = LIMIT_S
            finally:
                kill_torchrun(torchrun)
    add(result, "everstep", ours)
    if theirs[0]:
        add(result, "torchrun", theirs)
    note_rounds(len(ours[0]))
    figures["everstep.kills"], figures["torchrun.kills"] = float(len(ours[0])), float(len(theirs[0]))
    aims = {
        "everstep.away_s": (f"<= {MEDIAN_S:g}", figures["everstep.away_s"] <= MEDIAN_S),
        "everstep.away_most_s": (f"<= {MOST_S:g}", figures["everstep.away_most_s"] <= MOST_S),
        "everstep.redone_most": (f"<= {REDONE}", figures["everstep.redone_most"] <= REDONE),
        "everstep.audit": ("== 1", figures["everstep.audit"] == 1.0),
    }
    for key, (aim, held) in aims.items():
        result["aims"][key], result["holds"][key] = aim, held
    return result
