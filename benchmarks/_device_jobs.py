"""Real jobs whose time is the sleep of an emulated accelerator (``twins/slow_device.py``): started, timed, audited."""

from __future__ import annotations

import json
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, say

SCRIPT = ROOT / "benchmarks" / "twins" / "slow_device.py"
SAMPLE_S, BATCH = 0.002, 64
WINDOW_S = 0.5
START_S = 180.0

SIDES: dict[str, tuple[str, list[str], list[str]]] = {
    "sync": ("allreduce", [], []),
    "nondedicated": ("allreduce", ["--policy", "nondedicated"], []),
    "dedicated": ("allreduce", ["--policy", "dedicated"], []),
    "ps_sync": ("ps", ["--consistency", "sync"], []),
    "backup": ("ps", ["--consistency", "sync:1"], []),
    "static": ("ps", [], ["--static"]),
    "shared": ("ps", [], []),
}
"""By name: mode, flags of ``everstep run``, flags of the script."""


class Case(msgspec.Struct, frozen=True):
    """One run. ``healthy_s``: so long it takes where nobody is slow; ``sample_s``: so long a sample takes then."""

    pattern: str
    n: int
    s: float
    side: str
    seed: int
    healthy_s: float
    sample_s: float = SAMPLE_S

    @property
    def name(self) -> str:
        return f"n{self.n}.s{self.s:g}.{self.pattern}" if self.pattern != "trace" else f"n{self.n}.trace"

    @property
    def samples(self) -> int:
        """Whole steps of everybody."""
        return BATCH * self.n * max(1, round(self.healthy_s / (self.sample_s * BATCH)))

    def words(self) -> dict[str, Any]:
        """The pattern, the same for every side; seconds."""
        unit = self.sample_s * BATCH
        if self.pattern == "transient":
            return {"kind": "spells", "s": self.s, "spell": 30 * unit, "gap": 230 * unit, "seed": self.seed}
        if self.pattern == "trace":
            workers = list(range(self.n))
            return {"kind": "recorded", "job": 4, "width": 10 * unit, "begin": 150 * self.seed, "workers": workers}
        begins = 0.1 * self.healthy_s if self.pattern == "persistent" else 0.0
        return {"kind": "constant", "s": self.s, "begins": begins}


class Timed(msgspec.Struct):
    """Seconds from everybody up to the last sample; samples/s in the second half of these."""

    case: Case
    wall_s: float
    late_rate: float


def measure(case: Case, starting: threading.Lock, realtime: bool = False) -> Timed:
    """Run it. ``starting`` is held until everybody is up: a start burns processors, and others are being timed.
    ``realtime``: with real-time priority from then on."""
    mode, flags, more = SIDES[case.side]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        (marks := home / "marks").mkdir()
        flags = ["--mode", mode, "--workers", str(case.n), *flags]
        script = [str(SCRIPT), "--mode", mode, "--home", str(marks), "--pattern", json.dumps(case.words())]
        script += ["--members", str(case.n), "--rows", str(case.samples), "--batch", str(BATCH)]
        script += ["--sample-s", str(case.sample_s), *more]
        limit_s = START_S + 4 * case.healthy_s * max(2.0, case.s)
        with starting:
            job = Job(home, ["run", *flags], ["--", *script], limit_s, env={"EVERSTEP_WINDOW_S": str(WINDOW_S)})
            try:
                job.wait_for(lambda: sum(1 for _ in marks.glob("ready-*")) >= case.n)
                if realtime:
                    job.undisturbed()
            except BaseException:
                job.close()
                raise
        try:
            job.finish()
        finally:
            job.close()
        job.check()
        lines = [line.split() for path in marks.glob("[0-9]*") for line in path.read_text().splitlines()]
        done = [(float(at), int(samples)) for samples, at in lines]
        trained = sum(samples for _, samples in done)
        if trained < case.samples:  # (more: late parts were done again by others; the audit counts what was applied)
            raise RuntimeError(f"{trained} samples computed instead of {case.samples}")
        wall_s = max(at for at, _ in done)
        return Timed(case, wall_s, sum(n for at, n in done if at > wall_s / 2) / (wall_s / 2))


def measure_all(
    cases: Sequence[Case], together: int, found: Callable[[Timed], None], realtime: bool = False
) -> list[str]:
    """All of them in this order, so many at a time; what failed, in words. ``found`` is called as they come."""
    left: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        left.put(case)
    starting, telling, failed = threading.Lock(), threading.Lock(), list[str]()

    def work() -> None:
        while True:
            try:
                case = left.get_nowait()
            except queue.Empty:
                return
            try:
                timed = measure(case, starting, realtime)
            except Exception as error:  # whatever went wrong with one run, the others are measured
                with telling:
                    failed.append(f"{case}: {type(error).__name__}: {error}")
                    say(failed[-1])
                continue
            with telling:
                say(f"{case.name} seed {case.seed} {case.side}: {timed.wall_s:.2f} s, late {timed.late_rate:.0f}/s")
                found(timed)

    threads = [threading.Thread(target=work) for _ in range(together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed
