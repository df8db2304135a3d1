"""Start-up: `everstep run` to the first trained batch, beside torchrun and the same script's DDP twin; the ps alone.

Both sides train the model of ``examples/01_flights_dlrm.py`` with two workers; the clock starts before the command is
started. everstep's first trained batch is the first push that a ps has applied and logged (its audit log grows by a
push record), torchrun's is the end of the first optimizer step, as its script prints it. Rounds alternate.

The ps: from its start until its socket takes a connection, and the memory it holds then, before any rows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._measure import beside, interleaved, median, say, spread
from everstep.config.load import load_spec, save_spec
from everstep.net.auth import create_secret
from everstep.storage.chain import read_chain

REPO = Path(__file__).resolve().parent.parent
EXAMPLE = REPO / "examples" / "01_flights_dlrm.py"
TWIN = REPO / "benchmarks" / "twins" / "flights_ddp.py"
LOOK_S = 0.004
LIMIT_S = 120.0


def _wait(what: Callable[[], float | None], alive: Callable[[], bool], log: Path) -> float:
    """The time that ``what`` gives, as soon as it gives one."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found = what()
        if found is not None:
            return found
        if not alive():
            break
        time.sleep(LOOK_S)
    raise RuntimeError(f"no first batch:\n{log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes], signo: int = signal.SIGINT) -> None:
    """Ask, then kill the whole session."""
    process.send_signal(signo)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent, start_new_session=True
        )


def _pushed(run_dir: Path) -> float | None:
    """Now, if any ps has logged a push."""
    for path in run_dir.glob("audit/ps-*.log"):
        for record in read_chain(path)[1]:
            if msgspec.msgpack.decode(record)[0] == "push":
                return time.time()
    return None


def everstep_first_batch_s() -> float:
    """Seconds from the command to the first applied push."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-startup-"))
    run_dir, log = folder / "run", folder / "out.txt"
    command = [sys.executable, "-m", "everstep.cli", "run", "--workers", "2", "--ps", "1", "--run-dir", str(run_dir)]
    began = time.time()
    process = _start([*command, str(EXAMPLE)], log)
    try:
        return _wait(lambda: _pushed(run_dir), lambda: process.poll() is None, log) - began
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def torchrun_first_batch_s() -> float:
    """Seconds from the command to the end of the first step."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-startup-"))
    log = folder / "out.txt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def printed() -> float | None:
        times = [
            float(line.split()[-1])
            for line in log.read_text(errors="replace").splitlines()
            if "first batch" in line and line[-1].isdigit()
        ]
        return min(times, default=None)

    began = time.time()
    process = _start([*command, str(TWIN), "--steps", "3"], log)
    try:
        return _wait(printed, lambda: process.poll() is None, log) - began
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def ps_ready() -> dict[str, float]:
    """Start of one ps until it takes connections, and its memory then."""
    import socket

    folder = Path(tempfile.mkdtemp(prefix="everstep-ps-"))
    for name in ("logs", "sock", "audit"):
        (folder / name).mkdir()
    spec, origins = load_spec(None, {"script": str(EXAMPLE)}, {})
    save_spec(folder, spec, origins)
    create_secret(folder / "secret")
    log = folder / "logs" / "ps.log"
    path = str(folder / "sock" / "ps-0.sock")

    def listening() -> float | None:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                return None
        return time.time()

    began = time.time()
    process = _start([sys.executable, "-P", "-m", "everstep.ps", str(folder), "0", "1", "node0"], log)
    try:
        ready = _wait(listening, lambda: process.poll() is None, log) - began
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
        return {"ready_s": ready, "rss_mb": kib * 1024 / 1e6}
    finally:
        _end(process, signal.SIGTERM)  # a ps leaves Ctrl-C to the agent
        shutil.rmtree(folder, ignore_errors=True)


def run(quick: bool) -> dict[str, Any]:
    """Figures: seconds, MB and the ratio of medians everstep / torchrun."""
    rounds = 2 if quick else 7
    sides: dict[str, Callable[[], Any]] = {"everstep": everstep_first_batch_s, "torchrun": torchrun_first_batch_s}
    ps_ready()  # the first start reads everything from the disk
    started = interleaved(sides, rounds, say, "torchrun")
    alone = [ps_ready() for _ in range(5 if quick else 15)]
    ready, rss = [one["ready_s"] for one in alone], [one["rss_mb"] for one in alone]
    pairs = [ours / theirs for ours, theirs in zip(started["everstep"], started["torchrun"], strict=True)]
    figures = {
        "ratio": median(started["everstep"]) / median(started["torchrun"]),
        "everstep_first_batch_s": median(started["everstep"]),
        "torchrun_first_batch_s": median(started["torchrun"]),
        "ps_ready_s": median(ready),
        "ps_rss_mb": median(rss),
    }
    aims = {"ratio": "<= 1.0", "ps_ready_s": "<= 0.5", "ps_rss_mb": "<= 80"}
    spreads = {
        "ratio": spread(pairs),
        "everstep_first_batch_s": spread(started["everstep"]),
        "torchrun_first_batch_s": spread(started["torchrun"]),
        "ps_ready_s": spread(ready),
        "ps_rss_mb": spread(rss),
    }
    beside(figures, spreads, started.noise(), "ratio")
    return {
        "figures": figures,
        "aims": aims,
        "holds": {
            "ratio": figures["ratio"] <= 1.0,
            "ps_ready_s": figures["ps_ready_s"] <= 0.5,
            "ps_rss_mb": figures["ps_rss_mb"] <= 80,
        },
        "spread": spreads,
    }
