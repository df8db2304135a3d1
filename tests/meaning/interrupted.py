"""Jobs that do not run to their end at once: stopped or killed in the middle, and resumed.

The script says where it is to happen (``here``), and waits there until it was asked for. In the life after that it does
not wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from everstep.brain.events import StopAsked
from everstep.cli.display import read_summary
from everstep.cli.link import ask_master

HERE, ASKED, SECOND = Path("here"), Path("asked"), Path("second")
WAIT_S = 120.0
PACE_S = 0.12  # an iteration of the first life: the master hears of batches once a second


class NotInterruptedError(Exception):
    """The job was not where it should be when it was to end."""


def here(job: Any, step: int) -> None:
    """Call it in each iteration of the script."""
    if not os.environ.get("EVERSTEP_RUN_DIR") or SECOND.exists():
        return  # plain PyTorch, or alone; or resumed
    time.sleep(PACE_S)
    if job.step < step or ASKED.exists():
        return
    HERE.touch()
    end = time.monotonic() + WAIT_S
    while not ASKED.exists() and time.monotonic() < end:
        time.sleep(0.01)


def run(
    command: list[str], how: str, folder: Path, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a job twice: until it is stopped (``how``: "stop") or all of it is killed ("crash"), and from there to its
    end. The result of the second. Raises NotInterruptedError."""
    run_dir, out = folder / "run", (folder / "first.txt").open("w+")
    if how == "crash":
        command = [*command[:6], "--checkpoint-every", "3batches", *command[6:]]
    with out, subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out) as first:
        end = time.monotonic() + timeout_s
        while not _there(folder, how):
            if first.poll() is not None or time.monotonic() > end:
                first.kill()
                out.seek(0)
                raise NotInterruptedError(f"it was not to be interrupted: {out.read()[-300:]}")
            time.sleep(0.02)
        if how == "stop":
            ask_master(run_dir, StopAsked("everstep stop", True), timeout_s=20.0)
        else:
            _kill_all(run_dir)
        (folder / ASKED).touch()
        first.wait(timeout_s)
    summary = read_summary(run_dir)
    if how == "stop" and (summary is None or summary.phase != "stopped"):
        raise NotInterruptedError(f"it was not stopped: {summary}")
    for path in folder.glob("begins-*"):
        path.unlink()
    (folder / SECOND).touch()
    again = [*command[: command.index("run")], "resume", str(run_dir), "--run-dir", str(folder / "on"), "--no-display"]
    return subprocess.run(
        again, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _there(folder: Path, how: str) -> bool:
    saved = how == "stop" or any((folder / "run" / "checkpoints").glob("manifest-*.json"))
    return saved and (folder / HERE).exists()


def _kill_all(run_dir: Path) -> None:
    """kill -9 of all processes of a run, again until there is none: some may just have been started."""
    needle = f"EVERSTEP_RUN_DIR={run_dir}".encode()
    for _ in range(100):
        found = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                mine = (
                    needle in (entry / "environ").read_bytes()
                    or str(run_dir).encode() in (entry / "cmdline").read_bytes()
                )
                if mine and int(entry.name) not in (os.getpid(), os.getppid()) and _lives(entry):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found += 1
        if not found:
            return
        time.sleep(0.05)


def _lives(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
