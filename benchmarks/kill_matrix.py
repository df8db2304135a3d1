"""kill -9 of worker, master, both, and a second node's agent at random moments: finish, audit, AUC, recovery times.

Every run trains ``examples/01_flights_dlrm.py`` (one epoch of real data in small
batches, 2 workers, 2 ps) and kills its victim twice in
a row; undisturbed runs of other seeds in between give the spread of the test AUC. All times come from records, not from
watching: the ps audit logs say when each range was applied, the journal when each lease was granted. The random moments
are drawn from ``EVERSTEP_KILL_SEED`` (default 1). Figures:

- ``VICTIM.finished``, ``.exact``: share of runs that ended with exit code 0, and whose ``audit`` is exact with all
  epochs finished;
- ``VICTIM.auc_within``: share of runs whose test AUC is within three standard deviations of the undisturbed ones' mean;
- ``worker.first_push_s_p95``: a worker's death to its replacement's first applied push; ``.shard_s_p95``: to the next
  applied range of the shard it was in;
- ``master.first_lease_s_p95``: the master's death to the first lease that its successor granted;
  ``.speed_meanwhile``: samples/s applied between the two, of samples/s in the two seconds before, over
  all kills together.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from benchmarks._measure import ROOT, Child, Result, everstep, median, p95, say, spread
from everstep.brain.events import Granted, MasterStarted, Reply, ShardAsked
from everstep.errors import EverstepError
from everstep.monitor.audit import PsLog, audit, read_log
from everstep.monitor.journal_fold import JournalFold, JournalReader
from everstep.storage.journal import read_journal

SCRIPT = ROOT / "examples" / "01_flights_dlrm.py"
EPOCHS = 1
BATCH = 256  # four times as many batches as by default, so that a run is long enough for two recoveries
VICTIMS = ("worker", "master", "worker+master", "node")
RUN_TIMEOUT_S = 180.0
BEFORE_S = 2.0


class Kill(msgspec.Struct):
    """One kill: when (seconds since 1970), and whom: worker slot and incarnation (-1: none)."""

    at: float
    slot: int = -1
    incarnation: int = 0
    master: bool = False


class Outcome(msgspec.Struct):
    """What one run gave. Times in seconds, one a kill where there is one."""

    victim: str
    exit_code: int
    exact: bool
    auc: float
    kills: list[Kill]
    why: str = ""
    first_push_s: list[float] = []
    shard_s: list[float] = []
    first_lease_s: list[float] = []
    speed: list[tuple[float, float, float]] = []  # seconds without a master, samples/s meanwhile, and before
    wall_s: float = 0.0
    train_s: float = 0.0  # first to last push


# ---------------------------------------------------------------- one run


class Job:
    """A running ``everstep run``, and a second node if asked for."""

    def __init__(self, home: Path, seed: int, second_node: bool) -> None:
        self.home, self.run_dir = home, home / "run"
        self.log = home / "log"
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        flags = ["--workers", "2", "--ps", "2", "--seed", str(seed), "--run-dir", str(self.run_dir)]
        if second_node:
            flags += ["--bind", f"127.0.0.1:{self.port}"]
        self.main = Child(
            everstep("run", *flags, "--", SCRIPT, "--epochs", str(EPOCHS), "--batch-size", str(BATCH)), log=self.log
        )
        self.node: Child | None = None
        self.nodes = 0
        self.until = time.monotonic() + RUN_TIMEOUT_S

    def close(self) -> None:
        for child in (self.node, self.main):
            if child is not None:
                child.kill()

    @property
    def over(self) -> bool:
        return self.main.process.poll() is not None or time.monotonic() > self.until

    def join_node(self) -> None:
        """Give the job a second node with one worker (again)."""
        self.nodes += 1
        join = ["--join", f"127.0.0.1:{self.port}", "--secret-file", self.run_dir / "secret", "--workers", "1"]
        join += ["--node", "node2", "--run-dir", self.home / f"node2-{self.nodes}"]
        self.node = Child(everstep("agent", *join), log=self.home / f"node2-{self.nodes}.log")

    def fold(self) -> JournalFold:
        with JournalReader(self.run_dir / "journal.sqlite") as journal:
            journal.advance()
            return journal.fold

    def first_push_at(self) -> float:
        """When training began; 0.0 if it has not yet."""
        with contextlib.suppress(EverstepError):
            log = read_log(self.run_dir / "audit" / "ps-0.1.log")
            return float(log.at[0]) if log.n else 0.0
        return 0.0

    def kill(self, victim: str, rng: random.Random) -> Kill | None:
        """kill -9 now; None when the victim is not there (it is being replaced, or the job is over)."""
        pids: list[int] = []
        kill = Kill(0.0)
        try:
            if victim in ("worker", "worker+master"):
                runtimes = [s for s in self.fold().brain.members.workers.values() if s.running and s.member.pid]
                if not runtimes:
                    return None
                member = rng.choice(runtimes).member
                kill.slot, kill.incarnation = int(member.slot), int(member.incarnation)
                pids.append(member.pid)
            if victim in ("master", "worker+master"):
                master = msgspec.json.decode((self.run_dir / "master.json").read_bytes())
                kill.master = True
                pids.append(int(master["pid"]))
            if victim == "node":
                if self.node is None or self.node.process.poll() is not None:
                    return None
                runtimes = [s for s in self.fold().brain.members.workers.values() if s.member.node == "node2"]
                if not any(s.running and s.member.pid for s in runtimes):
                    return None
                kill.slot, kill.incarnation = int(runtimes[0].member.slot), int(runtimes[0].member.incarnation)
                pids.append(self.node.pid)
        except (EverstepError, OSError, msgspec.DecodeError):
            return None
        if not all(psutil.pid_exists(pid) for pid in pids):
            return None
        kill.at = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim == "node":
            assert self.node is not None
            self.node.kill()
            self.join_node()
        return kill


def one_run(victim: str, seed: int, rng: random.Random, train_s: float) -> Outcome:
    """One run with two kills (victim "": none), at random moments of its expected ``train_s``."""
    with tempfile.TemporaryDirectory(prefix="everstep-kill-") as folder:
        job = Job(Path(folder), seed, victim == "node")
        began = time.monotonic()
        try:
            moments = sorted(rng.uniform(0.0, 0.85) * train_s for _ in range(2)) if victim else []
            kills: list[Kill] = []
            first_at = 0.0
            if victim == "node":
                while not (job.run_dir / "master.json").exists() and not job.over:
                    time.sleep(0.05)
                job.join_node()
            while not job.over and len(kills) < len(moments):
                first_at = first_at or job.first_push_at()
                if first_at and time.time() - first_at >= moments[len(kills)]:
                    kill = job.kill(victim, rng)
                    if kill is not None:
                        kills.append(kill)
                time.sleep(0.02)
            while not job.over:
                time.sleep(0.1)
            code = job.main.process.poll()
            return _outcome(job, victim, -1 if code is None else code, kills, time.monotonic() - began)
        finally:
            job.close()


def _outcome(job: Job, victim: str, code: int, kills: list[Kill], wall_s: float) -> Outcome:
    report = audit(job.run_dir)
    exact = report.ok and len(report.finished) == EPOCHS
    auc, why = float("nan"), ""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        summary = msgspec.json.decode((job.run_dir / "summary.json").read_bytes())
        auc = float(summary["values"].get("auc", float("nan")))
        why = summary["error"]
    if code or not exact:
        tail = "\n".join(job.log.read_text().splitlines()[-25:])
        why = f"exit code {code} {why}\n{report.text()}\n{tail}"
    outcome = Outcome(victim, code, exact, auc, kills, why, wall_s=wall_s)
    logs = [read_log(p) for p in sorted((job.run_dir / "audit").glob("ps-*.log"))]
    leases = _granted_at(job.run_dir)
    times = np.concatenate([log.at for log in logs])
    outcome.train_s = float(times.max() - times.min()) if len(times) else 0.0
    for kill in kills:
        if kill.slot >= 0:
            push = _first_push(logs, kill)
            if push is not None:
                outcome.first_push_s.append(push)
            shard = _shard_again(logs, kill)
            if shard is not None:
                outcome.shard_s.append(shard)
        if kill.master:
            later = [at for at, life in leases if at > kill.at and life > _life_at(leases, kill.at)]
            if later:
                outcome.first_lease_s.append(min(later) - kill.at)
                log = logs[0]
                before = _rate(log, kill.at - BEFORE_S, kill.at)
                if before > 0:
                    outcome.speed.append((min(later) - kill.at, _rate(log, kill.at, min(later)), before))
    return outcome


def _first_push(logs: list[PsLog], kill: Kill) -> float | None:
    """Seconds from the kill to the first push of a later life of the same worker slot."""
    times = [
        log.at[(log.worker == kill.slot) & (log.incarnation > kill.incarnation) & (log.at > kill.at)] for log in logs
    ]
    found = np.concatenate(times)
    return float(found.min() - kill.at) if len(found) else None


def _shard_again(logs: list[PsLog], kill: Kill) -> float | None:
    """Seconds from the kill to the next applied range of the shard that the worker was in; None if it was between."""
    log = logs[0]
    mine = np.flatnonzero((log.worker == kill.slot) & (log.incarnation == kill.incarnation))
    if not len(mine):
        return None
    last = mine[-1]
    shard, lease = int(log.shard[last]), int(log.lease[last])
    again = [other.at[(other.shard == shard) & (other.lease > lease)] for other in logs]
    found = np.concatenate(again)
    return float(found.min() - kill.at) if len(found) else None


def _granted_at(run_dir: Path) -> list[tuple[float, int]]:
    """When each lease was granted, and by which life of the master."""
    fold, life = JournalFold(), 0
    out: list[tuple[float, int]] = []
    for entry in read_journal(run_dir / "journal.sqlite"):
        if isinstance(entry.event, MasterStarted):
            life = int(entry.event.incarnation)
        instructions = fold.brain.handle(entry.event)
        if isinstance(entry.event, ShardAsked) and any(
            isinstance(i, Reply) and isinstance(i.answer, Granted) for i in instructions
        ):
            out.append((entry.event.at, life))
    return out


def _life_at(leases: list[tuple[float, int]], at: float) -> int:
    return max((life for when, life in leases if when <= at), default=1)


def _rate(log: PsLog, start: float, stop: float) -> float:
    """Samples/s that one ps applied in ``(start, stop]``."""
    inside = (log.at > start) & (log.at <= stop)
    return float((log.hi - log.lo)[inside].sum()) / max(stop - start, 1e-9)


# ---------------------------------------------------------------- the matrix


def run(quick: bool) -> Result:
    seed = int(os.environ.get("EVERSTEP_KILL_SEED", "1"))
    victims = os.environ.get("EVERSTEP_KILL_VICTIMS", ",".join(VICTIMS)).split(",")
    rng = random.Random(seed)
    per_victim = 1 if quick else 10
    references = [one_run("", 100 + i, rng, 0.0) for i in range(2 if quick else 12)]
    for outcome in references:
        say(
            f"undisturbed: AUC {outcome.auc:.4f}, {outcome.wall_s:.1f} s of which {outcome.train_s:.1f} s training"
            f" {outcome.why}"
        )
    aucs = [o.auc for o in references]
    deviation = statistics.stdev(aucs)
    train_s = median([o.train_s for o in references])
    outcomes: list[Outcome] = []
    for i in range(per_victim):
        for victim in victims:  # taking turns
            outcome = one_run(victim, 200 + i, rng, train_s)
            outcomes.append(outcome)
            say(
                f"{victim} {i + 1}/{per_victim}: {len(outcome.kills)} kills, exit {outcome.exit_code}, exact"
                f" {outcome.exact}, AUC {outcome.auc:.4f}, first push {_list(outcome.first_push_s)}, shard"
                f" {_list(outcome.shard_s)}, first lease {_list(outcome.first_lease_s)} {outcome.why}"
            )
    return _result(victims, outcomes, aucs, deviation)


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.2f}" for v in values) or "-"


def _result(victims: list[str], outcomes: list[Outcome], aucs: list[float], deviation: float) -> Result:
    figures: dict[str, float] = {"undisturbed.auc": median(aucs)}
    spreads: dict[str, tuple[float, float]] = {"undisturbed.auc": spread(aucs)}
    aims: dict[str, str] = {}
    holds: dict[str, bool] = {}
    center, width = statistics.mean(aucs), max(3 * deviation, 0.001)

    def share(name: str, good: list[bool]) -> None:
        figures[name] = sum(good) / len(good)
        aims[name], holds[name] = "= 1", all(good)

    def tail(name: str, values: list[float], aim: float) -> None:
        if values:
            figures[f"{name}_p95"], spreads[f"{name}_p95"] = p95(values), spread(values)
            figures[f"{name}_median"] = median(values)
            aims[f"{name}_p95"], holds[f"{name}_p95"] = f"<= {aim}", p95(values) <= aim

    for victim in victims:
        mine = [o for o in outcomes if o.victim == victim]
        figures[f"{victim}.kills"] = float(sum(len(o.kills) for o in mine))
        share(f"{victim}.finished", [o.exit_code == 0 for o in mine])
        share(f"{victim}.exact", [o.exact for o in mine])
        share(f"{victim}.auc_within", [abs(o.auc - center) <= width for o in mine])
        spreads[f"{victim}.auc_within"] = spread([o.auc for o in mine])
        pushes = [s for o in mine for s in o.first_push_s]
        shards = [s for o in mine for s in o.shard_s]
        leases = [s for o in mine for s in o.first_lease_s]
        if victim == "worker":
            tail("worker.first_push_s", pushes, 1.0)
            tail("worker.shard_s", shards, 1.0)
        elif victim in ("worker+master", "node") and pushes:
            figures[f"{victim}.first_push_s_p95"], spreads[f"{victim}.first_push_s_p95"] = p95(pushes), spread(pushes)
        if victim == "node" and shards:
            figures["node.shard_s_p95"], spreads["node.shard_s_p95"] = p95(shards), spread(shards)
        if victim == "master":
            tail("master.first_lease_s", leases, 2.0)
            speeds = [speed for o in mine for speed in o.speed]
            if speeds:
                # One absence is a few batches long: only all of them together are a rate.
                name, away_s = "master.speed_meanwhile", sum(s for s, _, _ in speeds)
                figures[name] = sum(s * now for s, now, _ in speeds) / sum(s * before for s, _, before in speeds)
                spreads[name] = spread([now / before for _, now, before in speeds])
                aims[name], holds[name] = ">= 0.9", figures[name] >= 0.9
                figures["master.away_s_mean"] = away_s / len(speeds)
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
