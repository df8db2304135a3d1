"""Measures a real master with many connected members, which ``_members`` plays from a few processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from benchmarks._measure import ROOT
from benchmarks._members import Crowd, Told
from everstep.brain.events import DrainAsked
from everstep.config.load import save_spec
from everstep.config.spec import JobSpec
from everstep.net.auth import create_secret
from everstep.net.rendezvous import read_master
from everstep.storage.journal import read_journal

START_S = 20.0
JOIN_S = 180.0
LEAD_S = 0.5  # from the word to the processes until the notice: it comes to all nodes at one moment
LOST_S = 8.0


class Seen(msgspec.Struct, kw_only=True):
    """Is what one run showed; seconds, and cores of CPU of the master."""

    members: int  # workers and the ps, each with its own connection; beside them, agents
    agents: int
    joined_s: float  # until every worker was a member
    join_cpu_s: float
    beats: int
    beat_p50_s: float
    beat_p99_s: float  # while nothing happens but training
    cpu_cores: float
    shards_per_s: float
    noticed: int  # nodes
    notice_events: int  # journaled
    notice_answered_s: float  # from the notice until the master has answered every agent
    notice_ordered_s: float  # until the last worker there is told to end
    notice_empty_s: float  # until the last of them has given its shard back, and its end is reported
    notice_beat_p99_s: float  # of all beats from the notice until then
    notice_cpu_s: float
    vanished: int  # nodes, at once and without notice
    vanish_beat_p99_s: float  # of those that stay, until those are declared lost
    vanish_cpu_s: float
    unexpected: int  # refusals, and connections that broke


@contextmanager
def real_master(spec: JobSpec) -> Iterator[tuple[Path, psutil.Process]]:
    """Run a master process of its own in a directory of its own, without an agent."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        run_dir = Path(name)
        for part in ("logs", "sock"):
            (run_dir / part).mkdir()
        save_spec(run_dir, spec, {})
        create_secret(run_dir / "secret")
        with (run_dir / "logs" / "master.log").open("wb") as log:
            command = [sys.executable, "-m", "everstep.master", name]
            server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            end = time.monotonic() + START_S
            while (info := read_master(run_dir)) is None or info.pid != server.pid:
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the master did not start: {(run_dir / 'logs' / 'master.log').read_text()}")
                time.sleep(0.02)
            yield run_dir, psutil.Process(server.pid)
        finally:
            server.kill()
            server.wait(10)


def measure(nodes: int, places: int, processes: int, seconds: float, noticed: int, vanished: int) -> Seen:
    """Have ``nodes`` join with ``places`` workers each, train for ``seconds``, give ``noticed`` of them a reclaim
    notice at one moment, then cut ``vanished`` others off. RuntimeError where not all of them join."""
    workers = nodes * places
    spec = JobSpec(workers=workers, ps=1, master_alone=True, bind="127.0.0.1:0", lost_after_s=LOST_S)
    with real_master(spec) as (run_dir, master), Crowd(run_dir, nodes, places, processes) as crowd:
        began = time.monotonic()
        cpu_began = _cpu_s(master)
        crowd.answers()
        while (joined := sum(told.workers for told in crowd.say("look"))) < workers:
            if time.monotonic() - began > JOIN_S:
                raise RuntimeError(f"{joined} of {workers} workers joined in {JOIN_S:g} s")
            time.sleep(0.2)
        joined_s, join_cpu_s = time.monotonic() - began, _cpu_s(master) - cpu_began
        time.sleep(1.0)
        crowd.say("look")
        calm, calm_cpu_s, calm_s = _over(crowd, master, seconds)
        at = time.monotonic() + LEAD_S
        cpu_began = _cpu_s(master)
        left = crowd.say("notice", crowd.shares(noticed), at)
        notice_cpu_s = _cpu_s(master) - cpu_began
        cut, vanish_cpu_s = [], 0.0
        if vanished:
            crowd.say("vanish", crowd.shares(vanished), time.monotonic() + LEAD_S)
            cut, vanish_cpu_s, _ = _over(crowd, master, LOST_S + 4.0)
        asked = [e for e in read_journal(run_dir / "journal.sqlite") if isinstance(e.event.fact, DrainAsked)]
    everything = [*calm, *left, *cut]
    return Seen(
        members=workers + 1,
        agents=sum(told.agents for told in calm),
        joined_s=joined_s,
        join_cpu_s=join_cpu_s,
        beats=len(_beats(calm)),
        beat_p50_s=_quantile(_beats(calm), 0.5),
        beat_p99_s=_quantile(_beats(calm), 0.99),
        cpu_cores=calm_cpu_s / calm_s,
        shards_per_s=sum(told.shards for told in calm) / calm_s,
        noticed=noticed,
        notice_events=len(asked),
        notice_answered_s=max(told.answered_at for told in left) - at,
        notice_ordered_s=max(told.ordered_at for told in left) - at,
        notice_empty_s=max(told.empty_at for told in left) - at,
        notice_beat_p99_s=_quantile(_beats(left), 0.99),
        notice_cpu_s=notice_cpu_s,
        vanished=vanished,
        vanish_beat_p99_s=_quantile(_beats(cut), 0.99),
        vanish_cpu_s=vanish_cpu_s,
        unexpected=sum(told.refused + told.broken for told in everything),
    )


def _over(crowd: Crowd, master: psutil.Process, seconds: float) -> tuple[list[Told], float, float]:
    """Return what the members see within ``seconds``, the master's CPU meanwhile, and how long that really was."""
    began, cpu_began = time.monotonic(), _cpu_s(master)
    time.sleep(seconds)
    told = crowd.say("look")
    return told, _cpu_s(master) - cpu_began, time.monotonic() - began


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _beats(told: list[Told]) -> list[float]:
    return [s for each in told for s in each.beats_s]


def _quantile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
