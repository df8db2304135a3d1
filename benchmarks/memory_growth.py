"""Tables that outgrow a ps: with policy memory ps are added before one is full, with static sizes the job dies of it.

A job begins with one worker and one ps; each batch brings new rows. ``process``: each ps may have ``LIMIT`` bytes of
private writable memory. That is a limit of the kernel (RLIMIT_DATA), set by this benchmark as soon as a ps is there; no
cgroup is made. The tables grow to more than twice that limit, and to four times what it leaves for rows beside the
process itself and what moving takes (``MOVING`` of ``policies.memory_growth``). ``tight``: the same with less than
twice what a ps takes before it has a row. ``setting``:
``ps_limit_bytes``, and tables of four times as much. ``finished`` is the share of jobs with policy memory that finish
without a death, ``died`` the share of jobs of static size that end with the reason out of memory. ``tables`` is the
bytes of all tables at the end over what one ps may have of them, the lowest of all rounds. ``--quick``: one round of
``setting``. ``EVERSTEP_GROWTH_KINDS=process,setting``: these only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from benchmarks._measure import each_round, say, spread
from everstep.policies.memory_growth import MOVING

SCRIPT: Final = Path(__file__).with_name("_growing_script.py")
LIMIT: Final = {"process": 320 << 20, "tight": 144 << 20}
SETTING: Final = 12 << 20
SAMPLES: Final = {"process": 250_000, "tight": 40_000, "setting": 16_000}
BATCH: Final = {"process": 300, "tight": 300, "setting": 50}
PAUSE_S: Final = 0.1
STACK: Final = 1 << 20
MAX_PS: Final = 16
LIMIT_S: Final = 400.0
CHOICE: Final = "EVERSTEP_GROWTH_KINDS"


class Ended(NamedTuple):
    """Says how a job ended. ``ratio``: bytes of its tables over what one ps may have of them."""

    exit_code: int
    words: str
    deaths: int
    ps: int
    ratio: float


def run_job(folder: Path, kind: str, policy: bool) -> Ended:
    """Run a job, of static size or with policy memory."""
    settings = {"EVERSTEP_PS_LIMIT_BYTES": str(SETTING)} if kind == "setting" else {}
    more = ["--policy", "memory", "--max-ps", str(MAX_PS)] if policy else []
    command = [
        sys.executable, "-m", "everstep.cli", "run", "--workers", "1", "--ps", "1", *more, "--run-dir", str(folder),
        "--no-display", "--model-to", "none", "--", str(SCRIPT), str(SAMPLES[kind]), str(BATCH[kind]), str(PAUSE_S),
    ]  # fmt: skip
    quiet = {"EVERSTEP_HISTORY": "off", "EVERSTEP_WINDOW_S": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, **quiet, **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=small_stacks if kind in LIMIT else None,
        )
        try:
            bound: set[int] = set()
            until = time.monotonic() + LIMIT_S
            while child.poll() is None and time.monotonic() < until:
                if kind in LIMIT:
                    bound_new_ps(child.pid, bound, LIMIT[kind])
                time.sleep(0.05)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        log.seek(0)
        text = log.read()
    with contextlib.suppress(OSError, ValueError):
        deaths = json.loads((folder / "summary.json").read_bytes())["failures"]["ps"]
        return Ended(child.returncode, text, deaths, *sizes(folder, kind))
    return Ended(child.returncode, text, -1, 0, 0.0)


def small_stacks() -> None:
    """Have threads with stacks of ``STACK`` bytes: RLIMIT_DATA counts whole stacks, of which little is used."""
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def bound_new_ps(pid: int, bound: set[int], limit: int) -> None:
    """Set the limit of each ps that has none yet."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process(pid).children(recursive=True):
            if process.pid not in bound and "everstep.ps" in process.cmdline():
                resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
                bound.add(process.pid)


def sizes(folder: Path, kind: str) -> tuple[int, float]:
    """Return how many ps told of rows at the end, and the bytes of all tables over what one ps may have of them."""
    lines = [json.loads(line) for line in (folder / "members.jsonl").read_text().splitlines()]
    last = {line["member"]: line for line in lines if line["member"].startswith("ps:") and line.get("row_bytes")}
    room = min(line["limit_bytes"] - line["limit_used_bytes"] + line["row_bytes"] for line in last.values()) - MOVING
    return len(last), sum(line["row_bytes"] for line in last.values()) / (SETTING if kind == "setting" else room)


def run(quick: bool) -> dict[str, Any]:
    kinds = [kind for kind in os.environ.get(CHOICE, "").split(",") if kind] or (
        ["setting"] if quick else list(SAMPLES)
    )
    if unknown := [kind for kind in kinds if kind not in SAMPLES]:
        raise SystemExit(f"{CHOICE}: no kind {unknown[0]!r}; there are {', '.join(SAMPLES)}")
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-growth-") as folder:
        for number in each_round(1 if quick else 5):
            for kind in kinds:
                static = run_job(Path(folder) / f"{kind}-{number}-static", kind, False)
                died = static.exit_code != 0 and "out of memory" in static.words
                grown = run_job(Path(folder) / f"{kind}-{number}-memory", kind, True)
                finished = grown.exit_code == 0 and grown.deaths == 0
                ends = f"static {'died' if died else f'ended with {static.exit_code}'}; policy memory"
                deaths = f"ended with {grown.exit_code}, {grown.deaths} ps died, {grown.ps} ps"
                say(f"round {number}: {kind}: {ends} {deaths}, tables {grown.ratio:.1f} times")
                if not died:
                    say(static.words[-1500:])
                if not finished:
                    say(grown.words[-3000:])
                for name, value in (("died", float(died)), ("finished", float(finished)), ("tables", grown.ratio)):
                    seen.setdefault(f"{kind}.{name}", []).append(value)
    figures = {
        name: min(values) if name.endswith("tables") else sum(values) / len(values) for name, values in seen.items()
    }
    limits = {name: 4.0 if name.endswith("tables") else 1.0 for name in figures}
    return {
        "figures": figures,
        "aims": {name: f">= {limit:g}" for name, limit in limits.items()},
        "holds": {name: figures[name] >= limit for name, limit in limits.items()},
        "spread": {name: spread(values) for name, values in seen.items()},
    }
