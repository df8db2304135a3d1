"""kill -9 of one of 3 workers in mode allreduce until the survivors step again, beside torchft, torchrun and DLRover.

Random workers of one running job are killed one after the other, each when the group is whole again; then some are
stopped (SIGSTOP) instead. All times come from what the workers themselves wrote down after each committed step:

- ``recovered_s`` (median, ``_max``): a death to the second step that all survivors committed after it (the first may
  have been reduced already); ``redone_max``: steps that survivors did again (``redone_times_max``: how
  many times, all together); ``stopped_s``: the same for SIGSTOP;
- ``rejoined_s``: to the replacement's first committed step; ``pause_steps``: how much longer than the median step the
  longest gap of the others around that moment is, in median steps; ``usual_steps``: the same over as long a time when
  nothing happens. ``device.``: where every step waits 40 ms as for a GPU; ``cold.``: where besides the first forward
  pass of a process takes 1 s longer, as where a model is compiled; ``50mb.``: with 50 MB of gradients;
- ``torchft_s``, ``torchft_tuned_s``, ``torchrun_s``, ``dlrover_s``: the same kill there, where they are installed
  (benchmarks/baselines); torchrun and DLRover restart every process: until all of them have committed two steps.
  ``*_kills``: how many of them recovered within the time that a baseline gets (``LIMIT_S``).

The random moments are drawn from ``EVERSTEP_KILL_SEED`` (default 1).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks._measure import Child, Result, median, python, say, spread
from benchmarks._replica import AROUND_S, BASELINES, TWIN, Kill, ReplicaJob, interpreter, read_steps, step_s, wait_until
from benchmarks.allreduce_step import ONE_THREAD, free_port

WORKERS = 3
EPOCHS = 100_000  # the job is stopped, not finished
SETTLE_S = 1.5
BASELINE_SETTLE_S = 0.5
LIMIT_S = 330.0  # of a baseline: it begins no further kill then
LONG_STEPS = {
    "device.": ["--device-ms", "40"],
    "cold.": ["--device-ms", "40", "--cold-ms", "1000"],
    "50mb.": ["--mb", "50"],
}


def everstep_kills(
    home: Path, kills: int, stops: int, rng: random.Random, args: Sequence[str] = ()
) -> tuple[list[Kill], list[Kill], float]:
    """What kills and stops cost one long run, and its median step in seconds. ``args``: of the script."""
    script = [str(TWIN), "--epochs", str(EPOCHS), *args]
    job = ReplicaJob(home, WORKERS, EPOCHS, 120.0 + 60.0 * (kills + stops), script=script)
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
    step = step_s(records)
    around = max(AROUND_S, 4 * step)  # more than a few long steps
    found = [
        Kill(records, at, gone, end, around_s=around) for (at, _, _), gone, end in zip(done, dead, ends, strict=True)
    ]
    for kill in found:
        say(f"everstep: {kill}")
    return found[:kills], found[kills:], step


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
    end = time.monotonic() + LIMIT_S
    try:
        for _ in range(kills):
            if time.monotonic() > end:
                break
            alive = {replicas.running[n].pid for n in names}
            if not wait_until(lambda alive=alive: len(_pids(steps) & alive) == WORKERS, 180.0):
                say("torchft: the group was not whole again within 180 s")
                break
            time.sleep(BASELINE_SETTLE_S + rng.random() / 2)
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
            dead.add(pid)
            found.append(Kill(read_steps(steps), moment, dead, time.time()))
            say(f"torchft{' tuned' if tuned else ''}: {found[-1]}")
    finally:
        replicas.close()
    return found


def restarting_kills(
    name: str, command: list[str], home: Path, kills: int, rng: random.Random, env: Mapping[str, str] | None = None
) -> list[Kill]:
    """torchrun and DLRover: a launcher that restarts all processes when one dies."""
    steps = home / "steps"
    script = [str(BASELINES / "torchrun_elastic.py"), "--record", str(steps)]
    launcher = Child([*command, *script], {**ONE_THREAD, **(env or {})}, home / f"{name}.out")
    found: list[Kill] = []
    before: set[int] = set()
    end = time.monotonic() + LIMIT_S
    try:
        for _ in range(kills):
            if time.monotonic() > end:
                break
            whole = lambda before=before: len(_pids(steps) - before) >= WORKERS  # noqa: E731
            if not wait_until(lambda whole=whole: whole() or launcher.process.poll() is not None, 180.0) or not whole():
                say(f"{name}: no step: {(home / f'{name}.out').read_text()[-800:]}")
                break
            time.sleep(BASELINE_SETTLE_S + rng.random() / 2)
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


def dlrover_kills(python_of: str, home: Path, kills: int, rng: random.Random) -> list[Kill]:
    """Its launcher cannot start its own master with torch 2.13 (``SubprocessHandler`` takes one argument more than
    0.6.1 gives it), so that is started here as it would start it."""
    at = free_port()
    master = [python_of, "-u", "-m", "dlrover.python.master.main", "--port", str(at), "--node_num", "1"]
    with Child([*master, "--job_name", "kill", "--platform", "local"], None, home / "master.out"):
        command = [python_of, "-m", "dlrover.trainer.torch.elastic_run", "--standalone"]
        command += ["--nproc_per_node", str(WORKERS), "--max_restarts", str(2 * kills)]
        return restarting_kills("dlrover", command, home, kills, rng, {"DLROVER_MASTER_ADDR": f"127.0.0.1:{at}"})


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

    def put_pause(prefix: str, kills: list[Kill], step: float, most: float | None = None) -> None:
        put(f"{prefix}pause_steps", [k.pause_s / step - 1 for k in kills], most)
        put(f"{prefix}usual_steps", [k.usual_s / step - 1 for k in kills])

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
        put("redone_times_max", [float(max(k.tries for k in kills))])
        put("rejoined_s", [k.rejoined_s for k in kills], 1.5)
        put_pause("", kills, step)
        put("stopped_s_max", _most([k.recovered_s for k in stops]), 3.0)
    for prefix, args in LONG_STEPS.items():
        with tempfile.TemporaryDirectory(prefix="everstep-kill-") as folder:
            kills, _, step = everstep_kills(Path(folder), 2 if quick else 10, 0, rng, args)
            result["figures"][f"{prefix}step_ms"] = step * 1e3
            put(f"{prefix}recovered_s", [k.recovered_s for k in kills])
            put(f"{prefix}rejoined_s", [k.rejoined_s for k in kills])
            put_pause(prefix, kills, step, 1.0)

    baselines: dict[str, Callable[[Path, int], list[Kill]]] = {}
    if torchft:
        baselines["torchft_tuned"] = lambda home, n: torchft_kills(torchft, home, n, True, rng)
    if torchft and not quick:
        baselines["torchft"] = lambda home, n: torchft_kills(torchft, home, n, False, rng)
    if not quick:
        torchrun = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
        torchrun += ["--max-restarts", "40"]
        # With the store that agents share by default, restarted processes wait for each other for ever (torch 2.13).
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        baselines["torchrun"] = lambda home, n: restarting_kills("torchrun", torchrun, home, n, rng, own_store)
    if dlrover and not quick:
        baselines["dlrover"] = lambda home, n: dlrover_kills(dlrover, home, n, rng)
    for name, kill in baselines.items():
        with tempfile.TemporaryDirectory(prefix=f"{name}-kill-") as folder:
            seconds = [k.recovered_s for k in kill(Path(folder), 1 if quick else 20)]
            put(f"{name}_s", seconds)
            put(f"{name}_s_max", _most(seconds))
            result["figures"][f"{name}_kills"] = float(sum(s == s for s in seconds))
    return result
