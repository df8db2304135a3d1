"""Members are killed at random moments under parity 4+1 and 4+2: the rows must be those of a run without a loss.

6 ps, 2 workers, the flights data (``twins/exact_flights.py``: whole-number gradients, so the right bytes are known).
Every kind of victim in turn, ``kill -9`` at random moments: a ps; a worker; the master; a ps with a worker; a ps with
the master; a second ps in the middle of the first recovery (4+2). Between losses of ps the run is left alone until
every bucket is protected again: what lies beyond the level is the business of checkpoints. Each run's rows are compared
with those of a twin in which nobody was killed, all bytes, and its audit must say exactly once. EVERSTEP_EXACT_MOMENTS:
how many moments for each code (50; --quick 3); EVERSTEP_EXACT_SEED.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, say
from everstep.model.member import Role
from everstep.monitor.audit import audit

SCRIPT = ROOT / "benchmarks" / "twins" / "exact_flights.py"
CODES = ("4+1", "4+2")
LIMIT_S = 240.0
KILLS_A_RUN = 3


def begin(home: Path, flags: list[str], quick: bool) -> tuple[Job, Path]:
    out = home / "out.json"
    script = ["--", str(SCRIPT), "--epochs", "4", "--batch-size", "256", "--out", str(out)]
    return Job(home, ["run", "--workers", "2", "--ps", "6", *flags], script, LIMIT_S), out


def twin(quick: bool) -> tuple[str, float]:
    """Digest of the rows of a run in which nothing happens, and the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="everstep-exact-") as folder:
        began = time.monotonic()
        job, out = begin(Path(folder), [], quick)
        try:
            job.finish()
            job.check()
            return str(json.loads(out.read_text())["digest"]), time.monotonic() - began
        finally:
            job.close()


def victims(code: str) -> list[tuple[str, ...]]:
    kinds: list[tuple[str, ...]] = [("ps",), ("ps", "worker"), ("worker",), ("ps", "master"), ("master",)]
    return [("ps", "ps"), *kinds] if code == "4+2" else kinds


def pids_of(job: Job, role: Role) -> dict[int, int]:
    status = job.status()
    return {m.slot: m.pid for m in status.members if m.role is role and m.pid} if status is not None else {}


def kill(job: Job, kinds: tuple[str, ...], rng: random.Random) -> bool:
    """kill -9 now; of two ps the second a moment later, in the middle of the first one's recovery. False: the job is
    over, or they are not there."""
    ps, workers = list(pids_of(job, Role.PS).values()), list(pids_of(job, Role.WORKER).values())
    if len(ps) < 6 or not workers or job.over:
        return False
    rng.shuffle(ps)
    pids: list[int] = []
    for kind in kinds:
        if kind == "ps":
            pids.append(ps.pop())
        elif kind == "worker":
            pids.append(rng.choice(workers))
        else:
            pids.append(int(json.loads((job.run_dir / "master.json").read_text())["pid"]))
    for i, pid in enumerate(pids):
        if i and kinds[i] == "ps":
            time.sleep(rng.uniform(0.0, 0.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


class Outcome:
    """One run under one code."""

    def __init__(self) -> None:
        self.kills: list[tuple[str, ...]] = []
        self.same = self.exact = self.finished = False
        self.why = ""


def one_run(code: str, kinds: list[tuple[str, ...]], want: str, quick: bool, rng: random.Random) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="everstep-exact-") as folder:
        job, out = begin(Path(folder), ["--parity", code], quick)
        try:
            for kind in kinds:
                while not job.over and not (job.samples_done() > 0 and job.safe()):
                    if time.monotonic() > job.until:
                        raise RuntimeError(f"not protected again in time:\n{job.words()}")
                    time.sleep(0.05)
                time.sleep(rng.uniform(0.0, 1.0))
                if kill(job, kind, rng):
                    outcome.kills.append(kind)
            job.finish()
            outcome.finished = True
            outcome.same = json.loads(out.read_text())["digest"] == want
            report = audit(job.run_dir)
            outcome.exact = report.ok
            outcome.why = "" if report.ok else report.text()
        except (RuntimeError, OSError, ValueError) as error:
            outcome.why = str(error)
        finally:
            job.close()
    return outcome


def run(quick: bool) -> Result:
    rng = random.Random(int(os.environ.get("EVERSTEP_EXACT_SEED", "1")))
    moments = int(os.environ.get("EVERSTEP_EXACT_MOMENTS", "3" if quick else "50"))
    want, took_s = twin(quick)
    say(f"twin: rows {want}, {took_s:.1f} s")
    figures: dict[str, float] = {}
    aims: dict[str, str] = {}
    holds: dict[str, bool] = {}
    spreads: dict[str, tuple[float, float]] = {}
    for code in CODES:
        kinds = victims(code)
        outcomes: list[Outcome] = []
        turn = misses = 0
        while sum(len(o.kills) for o in outcomes) < moments and misses < 3:
            some = [kinds[(turn + i) % len(kinds)] for i in range(KILLS_A_RUN)]
            outcome = one_run(code, some, want, quick, rng)
            outcomes.append(outcome)
            turn += len(outcome.kills)
            misses = 0 if outcome.kills else misses + 1
            killed = ", ".join("+".join(kind) for kind in outcome.kills)
            say(
                f"{code}: killed {killed or 'nobody'}; rows equal {outcome.same}, audit exact {outcome.exact}"
                f" {outcome.why}"
            )
        figures[f"{code}.kills"] = float(sum(len(o.kills) for o in outcomes))
        figures[f"{code}.runs"] = float(len(outcomes))
        for name, good in (
            ("finished", [o.finished for o in outcomes]),
            ("rows_equal", [o.same for o in outcomes]),
            ("audit_exact", [o.exact for o in outcomes]),
        ):
            figures[f"{code}.{name}"] = sum(good) / len(good)
            aims[f"{code}.{name}"], holds[f"{code}.{name}"] = "= 1", all(good)
        aims[f"{code}.kills"], holds[f"{code}.kills"] = f">= {moments}", figures[f"{code}.kills"] >= moments
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
