"""Step time of mode allreduce with 2 workers, vote and journal included, beside plain DDP (gloo) and torchft.

All sides train the same network on the same pictures, one thread a process, 1 MB and 50 MB of gradients; rounds
alternate. Figures, MB in {1, 50}: ``MBmb.everstep_ratio`` step time / DDP's, median of the rounds (``_p10``: of the
least disturbed tenth of the steps); ``.ddp_ms``, ``.everstep_ms``; ``.torchft_ratio`` (DDP wrapper) and
``.torchft_flat_ratio`` where torchft is installed (see benchmarks/baselines); ``.logical_ratio``: 4 logical workers,
the same global batch; ``master_cpu_us_per_step``.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._measure import (
    Child,
    Result,
    Rounds,
    beside,
    everstep,
    interleaved,
    last_json,
    median,
    python,
    say,
    spread,
)
from benchmarks._replica import BASELINES, TWIN, interpreter, wait_until
from everstep.net.rendezvous import read_master

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ROWS, BATCH = 2000, 32
LIMIT_S = 240.0


Side = dict[str, float]
"""``median_s``, ``p10_s``: seconds of a step; ``cpu_s``: the master's CPU time a step, where there is one."""


def ddp_s(mb: int, steps: int) -> Side:
    command = python("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    command += [str(BASELINES / "ddp_step.py"), "--mb", str(mb), "--steps", str(steps)]
    with Child(command, ONE_THREAD) as child:
        return last_json(child.finish(LIMIT_S))


def everstep_s(mb: int, steps: int, flags: list[str], batch: int = BATCH) -> Side:
    import psutil

    epochs = -(-steps * 2 * BATCH // ROWS)
    with tempfile.TemporaryDirectory(prefix="everstep-step-") as folder:
        run_dir = Path(folder) / "run"
        verb = ["run", "--mode", "allreduce", "--workers", "2", *flags, "--run-dir", str(run_dir), "--"]
        script = [str(TWIN), "--mb", str(mb), "--epochs", str(epochs), "--batch-size", str(batch)]
        with Child(everstep(*verb, *script), ONE_THREAD) as child:
            wait_until(lambda: read_master(run_dir) is not None or child.process.poll() is not None, 60.0)
            info, cpu_s = read_master(run_dir), 0.0
            while child.process.poll() is None and child.began + LIMIT_S > time.monotonic():
                try:
                    times = psutil.Process(info.pid).cpu_times() if info is not None else None
                except psutil.NoSuchProcess:
                    times = None
                cpu_s = max(cpu_s, times.user + times.system if times is not None else 0.0)
                time.sleep(0.1)
            child.finish(5.0)
        text = "\n".join(p.read_text(errors="replace") for p in (run_dir / "logs").glob("worker-*.log"))
    found = last_json(text)
    return {**found, "cpu_s": cpu_s / (epochs * ROWS / (2 * BATCH))}


def torchft_s(interpreter: str, mb: int, steps: int, flat: bool) -> Side:
    script, at = str(BASELINES / "torchft_replica.py"), f"127.0.0.1:{free_port()}"
    env = {**ONE_THREAD, "RUST_LOG": "error"}  # its log of every step would cost it more than the step
    with tempfile.TemporaryDirectory(prefix="torchft-step-") as folder:
        home = Path(folder)
        common = [interpreter, script, "--join", at, "--mb", str(mb), "--steps", str(steps), *(["--flat"] * flat)]
        with (
            Child([interpreter, script, "--lighthouse", at], env, home / "lighthouse.log"),
            Child([*common, "--name", "r0", "--rank", "0"], env, home / "r0.log") as first,
            Child([*common, "--name", "r1", "--rank", "1"], env, home / "r1.log"),
        ):
            if not wait_until(lambda: first.process.poll() is not None, LIMIT_S):
                raise RuntimeError(f"torchft took more than {LIMIT_S:.0f} s")
            return last_json((home / "r0.log").read_text())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run(quick: bool) -> Result:
    torchft = interpreter("EVERSTEP_TORCHFT_PYTHON", "torchft")
    say(f"torchft: {torchft or 'absent (EVERSTEP_TORCHFT_PYTHON is not set, or does not import torchft)'}")
    rounds = 2 if quick else 5
    plan = {1: 150 if quick else 600, 50: 30 if quick else 120}
    times: dict[str, Rounds] = {}
    for follow, (mb, steps) in zip((1, 0), plan.items(), strict=True):
        sides: dict[str, Callable[[], Side]] = {
            "ddp": lambda mb=mb, steps=steps: ddp_s(mb, steps),
            "everstep": lambda mb=mb, steps=steps: everstep_s(mb, steps, []),
        }
        if mb == 1 or not quick:
            flags = ["--logical-workers", "4"]
            sides["logical"] = lambda mb=mb, steps=steps, f=flags: everstep_s(mb, steps, f, BATCH // 2)
        if torchft and not quick:
            sides["torchft"] = lambda mb=mb, steps=steps: torchft_s(torchft, mb, steps, False)
            sides["torchft_flat"] = lambda mb=mb, steps=steps: torchft_s(torchft, mb, steps, True)
        times[f"{mb}mb"] = interleaved(sides, rounds, lambda line, mb=mb: say(f"{mb} MB {line}"), "ddp", follow)
    return _result(times)


def _result(times: dict[str, Rounds]) -> Result:
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}

    def put(name: str, values: list[float], most: float | None = None) -> None:
        result["figures"][name], result["spread"][name] = median(values), spread(values)
        if most is not None:
            result["aims"][name], result["holds"][name] = f"<= {most}", median(values) <= most

    for mb, most in ((1, 1.05), (50, 1.03)):
        found = times[f"{mb}mb"]
        for side in ("ddp", "everstep"):
            put(f"{mb}mb.{side}_ms", [t["median_s"] * 1e3 for t in found[side]])
        for side in ("everstep", "logical", "torchft", "torchft_flat"):
            for kind, name in (("median_s", ""), ("p10_s", "_p10")):
                ratios = [a[kind] / b[kind] for a, b in zip(found.get(side, []), found["ddp"], strict=False)]
                if ratios:
                    put(f"{mb}mb.{side}_ratio{name}", ratios, most if (side, name) == ("everstep", "") else None)
                    beside(result["figures"], result["spread"], found.noise(kind), f"{mb}mb.{side}_ratio{name}")
    put("master_cpu_us_per_step", [t["cpu_s"] * 1e6 for t in times["1mb"]["everstep"]])
    return result
