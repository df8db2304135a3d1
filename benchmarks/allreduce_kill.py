"""kill -9 of one of 3 workers in mode allreduce until the survivors step again, beside torchft, torchrun and DLRover.

Random workers of one running job are killed one after the other, each when the group is whole again; then some are
stopped (SIGSTOP) instead. All times come from what the workers themselves wrote down after each committed step:

- ``recovered_s`` (median, ``_max``): a death to the second step that all survivors committed after it (the first may
  have been reduced already); ``redone_max``: steps that survivors repeated; ``stopped_s``: the same for SIGSTOP;
- ``rejoined_s``: to the replacement's first committed step; ``pause_steps``: longest gap of the others around that
  moment / their median step;
- ``torchft_s``, ``torchft_tuned_s``, ``torchrun_s``, ``dlrover_s``: the same kill there, where they are installed
  (benchmarks/baselines); torchrun and DLRover restart every process: until all of them have committed two steps.

The random moments are drawn from ``EVERSTEP_KILL_SEED`` (default 1).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks._measure import Child, Result, median, python, say, spread
from benchmarks._replica import BASELINES, Kill, ReplicaJob, interpreter, read_steps, step_s, wait_until
from benchmarks.allreduce_step import ONE_THREAD, free_port

WORKERS = 3
EPOCHS = 100_000  # the job is stopped, not finished
SETTLE_S = 1.5


def everstep_kills(home: Path, kills: int, stops: int, rng: random.Random) -> tuple[list[Kill], list[Kill], float]:
    """What kills and stops cost one long run, and its median step in seconds."""
    job = ReplicaJob(home, WORKERS, EPOCHS, 120.0 + 60.0 * (kills + stops))
    done: list[tuple[float, int, float]] = []
    try:
        for number in range(kills + stops):
            job.wait_for(lambda: job.at_work(WORKERS))
            time.sleep(SETTLE_S + rng.random())
            at, pid = job.hurt(rng.randrange(WORKERS), signal.SIGKILL if number < kills else signal.SIGSTOP)
            job.wait_for(lambda at=at: sum(s.after(at, 2) is not None for s in read_steps(job.steps)) >= WORKERS)
            done.append((at, pid, time.time()))
        time.sleep(SETTLE_S)
    finally:
        job.close()
    records = read_steps(job.steps)
    ends = [at for at, _, _ in done[1:]] + [time.time()]
    dead = [{pid for _, pid, _ in done[: i + 1]} for i in range(len(done))]
    found = [Kill(records, at, gone, end) for (at, _, _), gone, end in zip(done, dead, ends, strict=True)]
    for kill in found:
        say(f"everstep: {kill}")
    return found[:kills], found[kills:], step_s(records)


class Replicas:
    """Processes of a baseline that somebody restarts when they die: here we do, as its documentation has it."""

    def __init__(self, commands: dict[str, list[str]], home: Path, env: dict[str, str]) -> None:
        self.commands, self.home, self.env = commands, home, env
        self.running: dict[str, Child] = {}
        self.lives = 0
        for name in commands:
            self.start(name)

    def start(self, name: str) -> None:
        self.lives += 1
        self.running[name] = Child(self.commands[name], self.env, self.home / f"{name}.{self.lives}.out")

    def close(self) -> None:
        for child in self.running.values():
            with contextlib.suppress(Exception):
                child.kill()


def torchft_kills(python_of: str, home: Path, kills: int, tuned: bool, rng: random.Random) -> list[Kill]:
    script, at = str(BASELINES / "torchft_replica.py"), f"127.0.0.1:{free_port()}"
    flags = ["--flat", *["--tuned"] * tuned]  # its DDP wrapper ends survivors with an AssertionError (torch 2.13)
    steps = home / "steps"
    commands = {"lighthouse": [python_of, script, "--lighthouse", at, *flags]}
    names = [f"w{i}" for i in range(WORKERS)]
    for i, name in enumerate(names):
        joining = ["--join", at, "--name", name, "--rank", str(i), "--size", str(WORKERS), "--record", str(steps)]
        commands[name] = [python_of, script, *joining, *flags]
    replicas = Replicas(commands, home, {**ONE_THREAD, "RUST_LOG": "error"})
    found: list[Kill] = []
    dead: set[int] = set()
    try:
        for _ in range(kills):
            alive = {replicas.running[n].pid for n in names}
            if not wait_until(lambda alive=alive: len(_pids(steps) & alive) == WORKERS, 180.0):
                say("torchft: the group was not whole again within 180 s")
                break
            time.sleep(SETTLE_S + rng.random())
            name = rng.choice(names)
            pid, moment = replicas.running[name].pid, time.time()
            replicas.running[name].kill()
            survivors = alive - {pid}
            back = wait_until(
                lambda survivors=survivors, moment=moment: all(
                    s.after(moment, 2) for s in read_steps(steps) if s.pid in survivors
                ),
                180.0,
            )
            replicas.start(name)
            if back:
                wait_until(lambda name=name: replicas.running[name].pid in _pids(steps), 180.0)
            time.sleep(SETTLE_S)
            dead.add(pid)
            found.append(Kill(read_steps(steps), moment, dead, time.time()))
            say(f"torchft{' tuned' if tuned else ''}: {found[-1]}")
    finally:
        replicas.close()
    return found


def restarting_kills(name: str, command: list[str], home: Path, kills: int, rng: random.Random) -> list[Kill]:
    """torchrun and DLRover: a launcher that restarts all processes when one dies."""
    steps = home / "steps"
    script = [str(BASELINES / "torchrun_elastic.py"), "--record", str(steps)]
    launcher = Child([*command, *script], ONE_THREAD, home / f"{name}.out")
    found: list[Kill] = []
    before: set[int] = set()
    try:
        for _ in range(kills):
            whole = lambda before=before: len(_pids(steps) - before) >= WORKERS  # noqa: E731
            if not wait_until(lambda whole=whole: whole() or launcher.process.poll() is not None, 180.0) or not whole():
                say(f"{name}: no step: {(home / f'{name}.out').read_text()[-800:]}")
                break
            time.sleep(SETTLE_S + rng.random())
            fresh = sorted(_pids(steps) - before)
            before |= set(fresh)
            victim, moment = rng.choice(fresh), time.time()
            os.kill(victim, signal.SIGKILL)
            again = lambda before=before, moment=moment: [  # noqa: E731
                s for s in read_steps(steps) if s.pid not in before and s.after(moment, 2) is not None
            ]
            wait_until(lambda again=again: len(again()) >= WORKERS, 180.0)
            found.append(Kill(read_steps(steps), moment, before, time.time(), restarted=True))
            say(f"{name}: {found[-1]}")
    finally:
        launcher.kill()
        for pid in _pids(steps):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if str(steps).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
    return found


def _pids(folder: Path) -> set[int]:
    return {s.pid for s in (read_steps(folder) if folder.exists() else []) if len(s.at)}


def _most(values: list[float]) -> list[float]:
    """The largest that was measured, as a list; [] if none was."""
    return [v for v in [max((v for v in values if v == v), default=float("nan"))] if v == v]


def run(quick: bool) -> Result:
    rng = random.Random(int(os.environ.get("EVERSTEP_KILL_SEED", "1")))
    torchft = interpreter("EVERSTEP_TORCHFT_PYTHON", "torchft")
    dlrover = interpreter("EVERSTEP_DLROVER_PYTHON", "dlrover.trainer.torch.elastic_run")
    for name, found in (("torchft", torchft), ("dlrover", dlrover)):
        say(f"{name}: {found or 'absent (see benchmarks/baselines/README.md)'}")
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}

    def put(name: str, values: list[float], most: float | None = None) -> None:
        values = [v for v in values if v == v]
        if not values:
            return
        result["figures"][name], result["spread"][name] = median(values), spread(values)
        if most is not None:
            result["aims"][name], result["holds"][name] = f"<= {most}", median(values) <= most

    with tempfile.TemporaryDirectory(prefix="everstep-kill-") as folder:
        kills, stops, step = everstep_kills(Path(folder), 5 if quick else 20, 1 if quick else 5, rng)
        recovered = [k.recovered_s for k in kills]
        result["figures"]["kills"] = float(len(recovered))
        survived = sum(seconds == seconds for seconds in recovered) / len(recovered)
        result["figures"]["survived"], result["aims"]["survived"] = survived, "= 1"
        result["holds"]["survived"] = survived == 1
        result["figures"]["step_ms"] = step * 1e3
        put("recovered_s", recovered, 0.3)
        put("recovered_s_max", _most(recovered), 1.0)
        put("redone_max", [float(max(k.redone for k in kills))], 1.0)
        put("rejoined_s", [k.rejoined_s for k in kills], 1.5)
        put("pause_steps", [k.pause_s / step for k in kills])
        put("stopped_s_max", _most([k.recovered_s for k in stops]), 3.0)
    if torchft:
        for tuned in (False, True):
            if quick and not tuned:
                continue
            with tempfile.TemporaryDirectory(prefix="torchft-kill-") as folder:
                found = torchft_kills(torchft, Path(folder), 1 if quick else 5, tuned, rng)
                put(f"torchft{'_tuned' if tuned else ''}_s", [k.recovered_s for k in found])
    if not quick:
        torchrun = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
        launchers = {"torchrun": [*torchrun, "--max-restarts", "20"]}
        if dlrover:
            entry = [dlrover, "-m", "dlrover.trainer.torch.elastic_run", "--standalone"]
            launchers["dlrover"] = [*entry, "--nproc_per_node", str(WORKERS), "--max_restarts", "20"]
        for name, command in launchers.items():
            with tempfile.TemporaryDirectory(prefix=f"{name}-kill-") as folder:
                found = restarting_kills(name, command, Path(folder), 3, rng)
                put(f"{name}_s", [k.recovered_s for k in found])
    return result
