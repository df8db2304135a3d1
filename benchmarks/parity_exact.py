"""Members are killed at random moments and at named steps under 4+1 and 4+2: the rows must be those of a calm run.

6 ps, 2 workers, the flights data (``twins/exact_flights.py``: whole-number gradients, so the right bytes are known).
Every kind of victim in turn, ``kill -9`` at random moments: a ps (each keeps parity of others too); a worker; the
master; a ps with a worker; a ps with the master; the agent of a second node, with the worker that it started; a second
ps in the middle of the first recovery (4+2). Each run has a named step besides at which one ps dies in its first life:
before and after it applies a push, sends a difference, takes one, acknowledges; in the middle of a snapshot of a
checkpoint; the master before and after a manifest. Three steps come only while partitions are rebuilt or moved, which
the run brings about (``CAUSED``): under 4+2 another ps is lost first, and it is the ps that rebuilds that dies, the one
that hands partitions back, or the replacement that takes them: second losses, within the level. Under 4+1 the moves are
those of a seventh ps that is asked for; who dies in mid-rebuild there is beyond the level, so that run has checkpoints
to fall back to. ``4+1:lag``, ``4+2:lag``: with ``--protect lag``, mirrors up to ``LAG`` behind. What they lack is
computed again; a ps also dies between making a difference and sending it. Between losses of ps the run is left alone
until every partition is protected again: what else lies beyond the level is the business of checkpoints. Each run's
rows are compared with those of a twin in which nobody was killed, all bytes, and its audit must say exactly once.
EVERSTEP_EXACT_MOMENTS: how many moments for each code (50; --quick 3); EVERSTEP_EXACT_CODES
("4+1,4+2,4+1:lag,4+2:lag"); EVERSTEP_EXACT_STEPS: these steps alone, one run and one moment each
("mid_rebuild,before_hand_over"); EVERSTEP_EXACT_SEED; EVERSTEP_EXACT_KEEP: a folder for the run directories of runs
that went wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Child, Result, everstep, say
from benchmarks.scaling import tell
from benchmarks.throughput import free_port
from everstep.config.parity import parse_code
from everstep.ids import Slot
from everstep.model.member import Role
from everstep.monitor.audit import audit
from everstep.policies.stripes import arrange

SCRIPT = ROOT / "benchmarks" / "twins" / "exact_flights.py"
LIMIT_S = 900.0  # a loaded machine; a run takes half a minute
KILLS_A_RUN = 4
PS = 6
PARTITIONS = 64
FAULTED = Slot(1)  # the ps that dies at a step that comes by itself
STEPS = (
    "before_apply",
    "after_apply",
    "before_send",
    "after_send",
    "before_append",
    "after_append",
    "before_ack",
    "after_ack",
    "mid_image",
    "before_manifest",
    "after_manifest",
)
LAG = "1s"
LAG_STEPS = (*(step for step in STEPS if step != "before_ack"), "after_flush")
"""With lag no push waits for its mirrors."""
RARE = ("before_send", "after_send", "before_append", "after_append", "after_flush")
"""With lag these steps come a few times a second."""
CAUSED = ("mid_rebuild", "before_hand_over", "mid_move")
"""Steps that come only while partitions are rebuilt or moved."""


class Fault(NamedTuple):
    """A member that dies at a named step. ``victim``: the ps that is killed before, so that the step comes; ``grow``: a
    seventh ps is asked for instead."""

    step: str
    role: Role = Role.PS
    slot: Slot = FAULTED
    life: int = 1
    victim: Slot | None = None
    grow: bool = False

    def words(self, times: int) -> str:
        """For EVERSTEP_FAULT."""
        return f"{self.role.value}:{self.slot}.{self.life}:{self.step}:{times}"


def fault_of(code: str, step: str) -> Fault:
    """Who dies at ``step``, and what brings it about."""
    if step.endswith("_manifest"):
        return Fault(step, Role.MASTER, Slot(0))
    if step not in CAUSED:
        return Fault(step)
    parity = code.partition(":")[0]
    layout = arrange(parse_code(parity), PARTITIONS, [Slot(s) for s in range(PS)])
    # A lost partition is rebuilt by the ps of its stripe's first row.
    victim, rebuilder = layout.owner[0], layout.sites[0][0]
    if step == "mid_rebuild":
        return Fault(step, slot=rebuilder, victim=victim)
    if parity == "4+1":  # without another loss: this one is all that is within the level
        return Fault(step, grow=True) if step == "before_hand_over" else Fault(step, slot=Slot(PS), grow=True)
    if step == "before_hand_over":
        return Fault(step, slot=rebuilder, victim=victim)
    return Fault(step, slot=victim, life=2, victim=victim)


def protection(code: str) -> list[str]:
    """Return the flags for ``code``, which may say ``:lag``."""
    parity, _, lag = code.partition(":")
    return [*(["--parity", parity] if parity else []), *(["--protect", "lag", "--protect-lag", LAG] if lag else [])]


def steps_of(code: str) -> list[str]:
    """Return the named steps that come under ``code``."""
    return [*(LAG_STEPS if code.endswith(":lag") else STEPS), *CAUSED]


class Cluster:
    """A job of 6 ps and 2 workers; ``node1``: one of them is at a second node. ``fault``: who dies at a step, when it
    comes there for the ``times``-th time."""

    def __init__(
        self, home: Path, code: str, quick: bool, fault: Fault | None = None, times: int = 1, node1: bool = False
    ) -> None:
        self.home, self.out, self.fault = home, home / "out.json", fault
        flags = protection(code)
        epochs = ["--epochs", "3" if quick else "4"]
        script = ["--", str(SCRIPT), *epochs, "--batch-size", "256", "--out", str(self.out)]
        step = fault.step if fault is not None else ""
        self.falls_back = step == "mid_rebuild" and code.startswith("4+1")
        if self.falls_back or step == "mid_image" or step.endswith("_manifest"):
            flags = [*flags, "--checkpoint-every", "2s"]
        self.port = free_port() if node1 else 0
        if node1:
            (home / "job.yaml").write_text("tls: control\n")
            flags = [*flags, "-c", str(home / "job.yaml"), "--bind", f"127.0.0.1:{self.port}"]
        flags = ["--workers", "1" if node1 else "2", "--ps", str(PS), *flags]
        env = {"EVERSTEP_FAULT": fault.words(times) if fault is not None else ""}
        self.job = Job(home, ["run", *flags], script, LIMIT_S, env=env)
        self.agents: list[Child] = []
        if node1:
            self.join()

    def join(self) -> None:
        self.job.wait_for((self.job.run_dir / "master.json").exists)
        name = f"node1-{len(self.agents)}"
        secret: list[str | Path] = [
            "--secret-file",
            self.job.run_dir / "secret",
            "--run-dir",
            self.home / name,
            "--node",
            name,
        ]
        command = everstep("agent", "--join", f"127.0.0.1:{self.port}", "--workers", "1", *secret)
        self.agents.append(Child(command, log=self.home / f"{name}.log"))

    def died(self) -> bool:
        """Whether the member that is to die at a step did."""
        status, fault = self.job.status(), self.fault
        assert fault is not None
        if status is None:
            return False
        if fault.role is Role.MASTER:
            return status.master_incarnation > 1
        return any((m.role, m.slot) == (fault.role, fault.slot) and m.incarnation > fault.life for m in status.members)

    def cause(self) -> Slot | None:
        """Bring about what has the step in it. Returns the ps that was killed for it."""
        fault = self.fault
        if fault is None:
            return None
        if self.falls_back:
            self.job.wait_for(self._has_checkpoint)
        if fault.grow:
            tell("scale", self.job.run_dir, "--ps", str(PS + 1))
        if fault.victim is not None:
            self.job.kill_ps(fault.victim)
        return fault.victim

    def _has_checkpoint(self) -> bool:
        status = self.job.status()
        return status is not None and status.checkpoint is not None and status.checkpoint.newest > 0

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
        self.job.close()


def twin(quick: bool) -> tuple[str, float]:
    """Digest of the rows of a run in which nothing happens, and the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="everstep-exact-") as folder:
        began = time.monotonic()
        cluster = Cluster(Path(folder), "", quick)
        try:
            cluster.job.finish()
            cluster.job.check()
            return str(json.loads(cluster.out.read_text())["digest"]), time.monotonic() - began
        finally:
            cluster.close()


def victims(code: str) -> list[tuple[str, ...]]:
    kinds: list[tuple[str, ...]] = [("ps",), ("ps", "worker"), ("worker",), ("ps", "master"), ("master",)]
    return [("ps", "ps"), *kinds] if code.startswith("4+2") else kinds


def pids_of(job: Job, role: Role) -> dict[int, int]:
    status = job.status()
    return {m.slot: m.pid for m in status.members if m.role is role and m.pid} if status is not None else {}


def kill(cluster: Cluster, kinds: tuple[str, ...], rng: random.Random) -> bool:
    """kill -9 now; of two ps the second a moment later, in the middle of the first one's recovery. False: the job is
    over, or they are not there."""
    job = cluster.job
    ps, workers = pids_of(job, Role.PS), list(pids_of(job, Role.WORKER).values())
    if len(ps) < PS or not workers or job.over:
        return False
    left = list(ps.values())
    rng.shuffle(left)
    pids: list[int] = []
    for kind in kinds:
        if kind == "ps":
            pids.append(left.pop())
        elif kind == "worker":
            pids.append(rng.choice(workers))
        elif kind == "agent":
            pids.append(cluster.agents[-1].pid)
        else:
            pids.append(int(json.loads((job.run_dir / "master.json").read_text())["pid"]))
    for i, pid in enumerate(pids):
        if i and kinds[i] == "ps":
            time.sleep(rng.uniform(0.0, 0.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if "agent" in kinds:
        cluster.agents[-1].kill()
        cluster.join()
    return True


class Outcome:
    """One run under one code."""

    def __init__(self) -> None:
        self.kills: list[tuple[str, ...]] = []
        self.same = self.exact = self.finished = False
        self.stepped = ""  # the step at which a member died
        self.why = ""
        self.computed_again = 0  # applies that a loss undid, and that were made again


def one_run(
    code: str, kinds: list[tuple[str, ...]], step: str, want: str, quick: bool, rng: random.Random, keep: Path | None
) -> Outcome:
    """``keep``: where the run directory goes if something is wrong with it."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="everstep-exact-") as folder:
        often = not (step in CAUSED or step == "mid_image" or step.endswith("_manifest"))
        times = rng.randrange(1, 20 if code.endswith(":lag") and step in RARE else 200) if often else 1
        fault = fault_of(code, step) if step else None
        cluster = Cluster(Path(folder), code, quick, fault, times, ("agent",) in kinds)
        job = cluster.job
        try:
            if fault is not None:
                if step in CAUSED:
                    job.wait_for(lambda: job.samples_done() > 0 and job.safe())
                    victim = cluster.cause()
                    outcome.kills += [("ps",)] if victim is not None else []
                job.wait_for(cluster.died)
                outcome.stepped = step
            for kind in kinds:
                while not job.over and not (job.samples_done() > 0 and job.safe()):
                    if time.monotonic() > job.until:
                        raise RuntimeError(f"not protected again in time:\n{job.words()}")
                    time.sleep(0.05)
                time.sleep(rng.uniform(0.0, 1.0))
                if kill(cluster, kind, rng):
                    outcome.kills.append(kind)
            job.finish()
            outcome.finished = True
            outcome.same = json.loads(cluster.out.read_text())["digest"] == want
            report = audit(job.run_dir)
            outcome.exact = report.ok
            outcome.computed_again = int(report.counts.get("void", 0))
            outcome.why = "" if report.ok else report.text()
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            outcome.why = str(error)
        finally:
            cluster.close()
        if keep is not None and not (outcome.same and outcome.exact):
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("sock"))
    return outcome


def run(quick: bool) -> Result:
    seed = int(os.environ.get("EVERSTEP_EXACT_SEED", "1"))
    rng = random.Random(seed)
    moments = int(os.environ.get("EVERSTEP_EXACT_MOMENTS", "3" if quick else "50"))
    kept = os.environ.get("EVERSTEP_EXACT_KEEP", "")  # a folder for runs that went wrong
    want, took_s = twin(quick)
    say(f"twin: rows {want}, {took_s:.1f} s")
    figures: dict[str, float] = {}
    aims: dict[str, str] = {}
    holds: dict[str, bool] = {}
    chosen = [step for step in os.environ.get("EVERSTEP_EXACT_STEPS", "").split(",") if step]
    there = list(dict.fromkeys([*steps_of("4+1"), *steps_of("4+1:lag")]))
    if unknown := set(chosen) - set(there):
        raise ValueError(f"EVERSTEP_EXACT_STEPS: no step {', '.join(sorted(unknown))}; there are {there}")
    for code in os.environ.get("EVERSTEP_EXACT_CODES", "4+1,4+2,4+1:lag,4+2:lag").split(","):
        kinds = victims(code)
        steps = [step for step in chosen or steps_of(code) if step in steps_of(code)]
        if not steps:
            continue
        wanted = len(steps) if chosen else moments
        outcomes: list[Outcome] = []
        misses = 0
        while (
            sum(len(o.kills) for o in outcomes) < wanted or ((chosen or not quick) and len(outcomes) < len(steps))
        ) and misses < 3:
            n = len(outcomes)
            some = [
                kinds[(n * KILLS_A_RUN + i + rng.randrange(2)) % len(kinds)]
                for i in range(1 if chosen else KILLS_A_RUN)
            ]
            if n % 4 == 3 and not chosen:
                some[1:3] = [("agent",), ("ps", "agent")]
            keep = Path(kept) / f"{code}-{seed}-{n}" if kept else None
            outcome = one_run(
                code, some, "" if quick and n and not chosen else steps[n % len(steps)], want, quick, rng, keep
            )
            outcomes.append(outcome)
            misses = 0 if outcome.kills else misses + 1
            killed = ", ".join("+".join(kind) for kind in outcome.kills)
            say(
                f"{code} run {n + 1}: died at {outcome.stepped or 'no step'}, killed {killed or 'nobody'};"
                f" rows equal {outcome.same}, audit exact {outcome.exact}, computed again {outcome.computed_again}"
                f" {outcome.why}"
            )
        stepped = {o.stepped for o in outcomes} - {""}
        figures[f"{code}.kills"] = float(sum(len(o.kills) for o in outcomes))
        figures[f"{code}.steps"] = float(len(stepped))
        figures[f"{code}.runs"] = float(len(outcomes))
        figures[f"{code}.computed_again"] = float(sum(o.computed_again for o in outcomes))
        for name, good in (
            ("finished", [o.finished for o in outcomes]),
            ("rows_equal", [o.same for o in outcomes]),
            ("audit_exact", [o.exact for o in outcomes]),
        ):
            figures[f"{code}.{name}"] = sum(good) / len(good)
            aims[f"{code}.{name}"], holds[f"{code}.{name}"] = "= 1", all(good)
        aims[f"{code}.kills"], holds[f"{code}.kills"] = f">= {wanted}", figures[f"{code}.kills"] >= wanted
        if chosen or not quick:
            aims[f"{code}.steps"], holds[f"{code}.steps"] = f"= {len(steps)}", len(stepped) == len(steps)
            say(f"{code}: steps not met: {', '.join(sorted(set(steps) - stepped)) or 'none'}")
    return {"figures": figures, "aims": aims, "holds": holds, "spread": {}}
