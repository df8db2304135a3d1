"""Throughput of a DLRM on 2 workers + ps against its dense network alone, PyTorch, and TorchRec.

All sides train the model of ``throughput_model.py`` (13 dense, 26 categorical features, Zipf keys, 26 tables of 1M rows
at dim 16, 100k at dim 64) and report samples/s of their steady state. They take turns in every round, and a ratio is
the median of the rounds' ratios. Sides:

- ``bound``: the dense network alone, random rows in the place of embeddings, one single-threaded process a core (2);
- ``shm_1ps``, ``shm_2ps``: ``everstep run`` with 2 workers on this node, dense part on the ps too;
- ``tcp_1ps``, ``tcp_2ps``: both workers on a second node (an agent that joined over the loopback), ``tls: control``;
- ``torch``: one process with two threads, EmbeddingBag(sparse=True) and sparse Adagrad;
- ``torchrec``: TorchRec 1.8 with fbgemm on two gloo ranks, if EVERSTEP_TORCHREC_PYTHON names the Python of an
  environment that has it (see ``twins/dlrm_torchrec.py``).

CPU is that of all processes of the job (agent and master too) over the same window. The figures of a machine that does
other work at the same time are worth little: the load when a configuration began is among them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from benchmarks._measure import (
    ROOT,
    Child,
    Result,
    beside,
    everstep,
    interleaved,
    last_json,
    median,
    python,
    say,
    spread,
)

MODEL = ROOT / "benchmarks" / "throughput_model.py"
TWINS = ROOT / "benchmarks" / "twins"
SAMPLES = 200_000  # generated; the loader goes round
TIMEOUT_S = 240.0
POLL_S = 0.25

Measured = dict[str, float]


class Config:
    """One size of the model. ``budget``: samples that one process trains in a round, after warm-up."""

    def __init__(self, dim: int, batch: int, budget: int, data: Path) -> None:
        self.dim, self.batch, self.data = dim, batch, data
        self.rows = 100_000 if dim >= 64 else 1_000_000
        self.warm = max(4, 20_480 // batch)
        self.batches = self.warm + max(4, budget // batch)
        self.name = f"dim{dim}_b{batch}"

    @property
    def arguments(self) -> list[str]:
        return [
            *("--dim", str(self.dim), "--batch-size", str(self.batch), "--rows", str(self.rows)),
            *("--samples", str(SAMPLES), "--warm", str(self.warm), "--batches", str(self.batches)),
            *("--data", str(self.data)),
        ]


def run_bound(config: Config) -> Measured:
    commands = python(MODEL, "--bound", *config.arguments)
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with Child(commands, one_thread) as a, Child(commands, one_thread) as b:
        lines = [last_json(child.finish(TIMEOUT_S)) for child in (a, b)]
    return {
        "samples_per_s": sum(line["samples_per_s"] for line in lines),
        "cpu_s_per_million": sum(line["cpu_s_per_million"] for line in lines) / 2,
    }


def run_twin(interpreter: str, script: Path, config: Config) -> Measured:
    with Child([interpreter, "-W", "ignore", str(script), *config.arguments]) as child:
        line = last_json(child.finish(TIMEOUT_S))
    return {name: line[name] for name in ("samples_per_s", "cpu_s_per_million")}


class CpuLog:
    """CPU seconds over time of some process trees, all and the ps among them."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children
        self.rows: list[tuple[float, float, float]] = []
        self._seen: dict[int, tuple[float, bool]] = {}

    def poll(self) -> None:
        for child in self.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(child.pid)
                for p in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                        times = p.cpu_times()
                        # Asked until it says so: a process seen between fork and exec has its parent's words.
                        is_ps = self._seen.get(p.pid, (0.0, False))[1] or "everstep.ps" in p.cmdline()
                        self._seen[p.pid] = (times.user + times.system, is_ps)
        total = sum(cpu for cpu, _ in self._seen.values())
        of_ps = sum(cpu for cpu, is_ps in self._seen.values() if is_ps)
        self.rows.append((time.monotonic(), total, of_ps))

    def between(self, start: float, stop: float) -> tuple[float, float, float]:
        """Seconds, CPU seconds of all, and of the ps, of the polls within ``[start, stop]``."""
        inside = [row for row in self.rows if start <= row[0] <= stop]
        if len(inside) < 2:
            raise RuntimeError("the measured window is too short; raise the budget")
        (t0, all0, ps0), (t1, all1, ps1) = inside[0], inside[-1]
        return t1 - t0, all1 - all0, ps1 - ps0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_everstep(config: Config, ps: int, tcp: bool) -> Measured:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        out, run_dir, log = home / "out.jsonl", home / "run", home / "log"
        arguments = [*config.arguments, "--epochs", "1000", "--out", str(out)]
        script = TWINS / "remote_workers.py" if tcp else MODEL
        flags = ["--workers", "1" if tcp else "2", "--ps", str(ps), "--run-dir", str(run_dir)]
        port = free_port()
        if tcp:
            (home / "job.yaml").write_text("tls: control\nthreads_per_worker: 1\n")
            flags += ["--bind", f"127.0.0.1:{port}", "-c", str(home / "job.yaml")]
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(Child(everstep("run", *flags, "--", script, *arguments), log=log))]
            until = time.monotonic() + TIMEOUT_S
            if tcp:
                _wait_for(run_dir / "master.json", until, log)
                join: list[str | Path] = [
                    "--join",
                    f"127.0.0.1:{port}",
                    "--secret-file",
                    run_dir / "secret",
                    "--workers",
                    "2",
                ]
                join += ["--node", "node1", "--run-dir", home / "node1"]
                children.append(stack.enter_context(Child(everstep("agent", *join), log=log)))
            cpu = CpuLog(children)
            first_at = 0.0
            lines: list[dict[str, float]] = []
            while len(lines) < 2:
                cpu.poll()
                if out.exists():
                    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
                if lines and not first_at:
                    first_at = time.monotonic()
                if time.monotonic() > until or (children[0].process.poll() not in (None, 0)):
                    raise RuntimeError(f"everstep run did not finish:\n{log.read_text()[-3000:]}")
                time.sleep(POLL_S)
            children[0].process.wait(60)
            if children[0].process.returncode:
                raise RuntimeError(f"everstep run failed:\n{log.read_text()[-3000:]}")
        steady_s = min(line["wall_s"] for line in lines)
        seconds, cpu_all, cpu_ps = cpu.between(first_at - steady_s, first_at - POLL_S)
        rate = sum(line["samples_per_s"] for line in lines)
        return {
            "samples_per_s": rate,
            "cpu_s_per_million": 1e6 * cpu_all / (rate * seconds),
            "ps_share": cpu_ps / cpu_all,
            "wait": max(line["wait_fraction"] for line in lines),
        }


def _wait_for(path: Path, until: float, log: Path) -> None:
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{path} did not appear:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


AIMS = {
    "shm_1ps_of_bound": (">=", 0.80),
    "shm_2ps_of_bound": (">=", 0.80),
    "tcp_1ps_of_bound": (">=", 0.70),
    "tcp_2ps_of_bound": (">=", 0.70),
    "shm_1ps_of_torch": (">=", 1.8),
    "shm_1ps_of_torchrec": (">=", 1.7),
    "shm_1ps_cpu_of_bound": ("<=", 1.25),
    "shm_1ps_ps_share_of_cpu": ("<=", 0.08),
    "shm_1ps_wait_of_step": ("<=", 0.05),
}


def run(quick: bool) -> Result:
    figures: dict[str, float] = {}
    spreads: dict[str, tuple[float, float]] = {}
    aims: dict[str, str] = {}
    holds: dict[str, bool] = {}
    only = os.environ.get("EVERSTEP_THROUGHPUT", "")  # e.g. "16x2048,64x2048": some of the sizes
    sizes = [(16, 2048)] if quick else [(16, 2048), (16, 8192), (64, 2048), (64, 8192)]
    if only:
        sizes = [(int(d), int(b)) for d, b in (size.split("x") for size in only.split(","))]
    rounds = 1 if quick else int(os.environ.get("EVERSTEP_THROUGHPUT_ROUNDS", "3"))
    torchrec = os.environ.get("EVERSTEP_TORCHREC_PYTHON", "")
    if not torchrec:
        say("TorchRec is left out: EVERSTEP_TORCHREC_PYTHON names no Python that has it")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-data-") as folder:
        for dim, batch in sizes:
            config = Config(dim, batch, 40_000 if quick else 160_000, Path(folder))
            say(f"{config.name}: making the data")
            _make_data(config)
            figures[f"{config.name}.load_before"] = psutil.getloadavg()[0]
            sides: dict[str, Callable[[], Measured]] = {
                "bound": partial(run_bound, config),
                "shm_1ps": partial(run_everstep, config, 1, False),
                "shm_2ps": partial(run_everstep, config, 2, False),
                "tcp_1ps": partial(run_everstep, config, 1, True),
                "torch": partial(run_twin, sys.executable, TWINS / "dlrm_torch.py", config),
            }
            if not quick:
                sides["tcp_2ps"] = partial(run_everstep, config, 2, True)
            if torchrec:
                sides["torchrec"] = partial(run_twin, torchrec, TWINS / "dlrm_torchrec.py", config)
            measured = interleaved(sides, rounds, say)
            of = ("_of_bound", "_of_torch", "_of_torchrec")
            for name, values in _figures(measured).items():
                full = f"{config.name}.{name}"
                figures[full], spreads[full] = median(values), spread(values)
                key = "cpu_s_per_million" if name.endswith("_cpu_of_bound") else "samples_per_s"
                beside(figures, spreads, measured.noise(key), [full] if name.endswith(of) else [])
                if name in AIMS:
                    relation, aim = AIMS[name]
                    aims[full] = f"{relation} {aim}"
                    holds[full] = figures[full] >= aim if relation == ">=" else figures[full] <= aim
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}


def _make_data(config: Config) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(MODEL.parent)!r}); from throughput_model import cached_data;"
        f"cached_data({SAMPLES}, {config.rows}, {str(config.data)!r})"
    )
    with Child(python("-c", code)) as child:
        child.finish(TIMEOUT_S)


def _figures(measured: dict[str, list[Measured]]) -> dict[str, list[float]]:
    """Values by round: samples/s of each side, and the ratios."""
    out: dict[str, list[float]] = {}
    for side, values in measured.items():
        out[f"{side}_samples_per_s"] = [v["samples_per_s"] for v in values]
    bounds = measured["bound"]
    for side in [s for s in measured if s.startswith(("shm", "tcp"))]:
        mine = measured[side]
        out[f"{side}_of_bound"] = [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(mine, bounds, strict=True)]
        out[f"{side}_cpu_of_bound"] = [
            a["cpu_s_per_million"] / b["cpu_s_per_million"] for a, b in zip(mine, bounds, strict=True)
        ]
        out[f"{side}_ps_share_of_cpu"] = [a["ps_share"] for a in mine]
        out[f"{side}_wait_of_step"] = [a["wait"] for a in mine]
        for twin in [t for t in ("torch", "torchrec") if t in measured]:
            theirs = measured[twin]
            out[f"{side}_of_{twin}"] = [
                a["samples_per_s"] / b["samples_per_s"] for a, b in zip(mine, theirs, strict=True)
            ]
    return out
