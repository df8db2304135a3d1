"""A job on a part of a recorded cloud, driven by a story of ``supervise``, and what its journal says afterwards.

Facts come from the journal, played through the brain once more: how the job was supervised between any two events,
what was given out meanwhile, who trained together, and where processes were started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Child, everstep
from benchmarks.witness import of_run
from everstep.brain.brain import Brain
from everstep.brain.events import (
    CapacityChanged,
    Event,
    Granted,
    InstructionType,
    JobUnsuspended,
    PublishGroup,
    Reply,
    StartProcess,
    StepsCommitted,
)
from everstep.brain.job import Phase
from everstep.brain.supervision import JobStage
from everstep.cli.display import JobSummary, read_summary
from everstep.cli.replay import JOURNAL_FILE
from everstep.errors import EverstepError
from everstep.ids import NodeId, Slot
from everstep.model.capacity import CapacityStep, Market
from everstep.model.job_view import ShownState
from everstep.model.member import MemberState, Role
from everstep.monitor.audit import audit
from everstep.monitor.report import Verdict
from everstep.monitor.witness import witnessed
from everstep.platforms.trace_capacity import read_trace
from everstep.platforms.trace_variants import between
from everstep.storage.journal import read_journal

SCRIPT = ROOT / "benchmarks" / "_witness_job.py"
RECORDED = ROOT / "benchmarks" / "traces" / "spot"
LIMIT_S = 300.0
LOOK_S = 0.3
BATCH = 16
EPOCHS = 16
SHORT = ("--samples", "320", "--batch", str(BATCH), "--loops", str(EPOCHS))
PAUSE_S = 0.8  # of a step: the data lasts longer than a story
SPEED, QUIET_S = 100.0, 6.0
HOUR_S = 3600.0
_HERE = (MemberState.ALIVE, MemberState.SUSPECT)


class Moment(NamedTuple):
    """How the job was supervised from ``at`` on (seconds since 1970). ``machines``: held beside the first one, spot and
    on demand; ``asked``: on-demand machines that the brain asks for. ``over``: the job is."""

    at: float
    stage: JobStage
    lack: str
    anyway: bool
    asked: int
    workers: int
    ps: int
    spot: int
    on_demand: int
    over: bool


class Formed(NamedTuple):
    """A group, and how many samples a step of it has at most; 0: it was not heard to commit any."""

    at: float
    members: int
    step_samples: int


class Started(NamedTuple):
    at: float
    role: Role
    slot: Slot
    node: NodeId


class Seen:
    """What the journal of a run says."""

    def __init__(self, run_dir: Path) -> None:
        """Raises EverstepError where there is none that can be read."""
        self.run_dir = run_dir
        self.moments: list[Moment] = []
        self.granted: list[float] = []
        self.started: list[Started] = []
        self.reclaims = self.notices = self.went_on = self.suspended_by_itself = 0
        self.brain = Brain()
        self._held: dict[NodeId, Market] = {}
        self._groups: dict[int, Formed] = {}
        for _, event, _ in read_journal(run_dir / JOURNAL_FILE):
            self._take(event, self.brain.handle(event))

    def _take(self, event: Event, out: Sequence[InstructionType]) -> None:
        fact = event.fact
        if isinstance(fact, CapacityChanged):
            self.reclaims += fact.step is CapacityStep.TAKEN_BACK
            self.notices += fact.step is CapacityStep.WARNED
            if fact.step is CapacityStep.GRANTED:
                self._held[fact.node] = fact.market
            elif fact.step is not CapacityStep.WARNED:
                self._held.pop(fact.node, None)
        elif isinstance(fact, JobUnsuspended):
            self.went_on += 1
        elif isinstance(fact, StepsCommitted):
            for steps in fact.steps:
                group = self._groups.get(steps.generation)
                if group is not None:  # (the last step of an epoch has what is left)
                    most = -(-(steps.hi - steps.lo) // (steps.last + 1 - steps.first))
                    self._groups[steps.generation] = group._replace(step_samples=max(most, group.step_samples))
        for instruction in out:
            if isinstance(instruction, Reply) and isinstance(instruction.answer, Granted):
                self.granted.append(event.at)
            elif isinstance(instruction, PublishGroup) and instruction.group.generation not in self._groups:
                members = len(instruction.group.members)
                self._groups[instruction.group.generation] = Formed(event.at, members, 0)
            elif isinstance(instruction, StartProcess):
                self.started.append(Started(event.at, instruction.role, instruction.slot, instruction.node))
        self._look(event.at)

    def _look(self, at: float) -> None:
        brain = self.brain
        supervision, job = brain.state.supervision, brain.job
        here = [r.member.role for r in brain.members.all() if r.member.state in _HERE and not r.stopping]
        markets = list(self._held.values())
        now = Moment(
            at,
            supervision.stage,
            supervision.lack,
            job.anyway,
            supervision.on_demand,
            here.count(Role.WORKER),
            here.count(Role.PS),
            markets.count(Market.SPOT),
            markets.count(Market.ON_DEMAND),
            job.over,
        )
        if not self.moments or self.moments[-1][1:] != now[1:]:
            if self.moments and supervision.suspending and supervision.by_itself and job.phase is Phase.SUSPENDED:
                self.suspended_by_itself += self.moments[-1].stage is not JobStage.SUSPENDED
            self.moments.append(now)

    @property
    def groups(self) -> list[Formed]:
        return list(self._groups.values())

    @property
    def stage(self) -> JobStage:
        return self.moments[-1].stage if self.moments else JobStage.PENDING

    def spans(self, what: Callable[[Moment], bool]) -> list[tuple[float, float]]:
        """Return from when to when the job was so; one that lasts still ends with the last event."""
        return spans_of(self.moments, what)

    def granted_in(self, spans: Sequence[tuple[float, float]]) -> int:
        """Return how many shards were given out within these times."""
        return sum(any(begin < at <= end for begin, end in spans) for at in self.granted)


def spans_of(moments: Sequence[Moment], what: Callable[[Moment], bool]) -> list[tuple[float, float]]:
    """Return from when to when a job was so: moments that follow each other are one span."""
    out: list[tuple[float, float]] = []
    for moment, after in zip(moments, [*moments[1:], *moments[-1:]], strict=True):
        if what(moment):
            goes_on = bool(out) and out[-1][1] == moment.at
            begin = out.pop()[0] if goes_on else moment.at
            out.append((begin, after.at))
    return out


class Played:
    """One run of a story, in ``home``; ``close`` kills whatever is left of it."""

    def __init__(
        self,
        home: Path,
        words: Sequence[str],
        recording: str,
        hours: tuple[float, float],
        stretch: float = 1.0,
        env: Mapping[str, str] | None = None,
        script: Sequence[str] = SHORT,
        limit_s: float = LIMIT_S,
    ) -> None:
        """``words``: flags of ``everstep run``. ``hours``: the part of the recording that is played. ``stretch``: so
        many times slower, on a busy machine. ``script``: flags of the job's script. ``limit_s``: for all of it."""
        home.mkdir()
        self.stretch = stretch
        self.home, self.run_dir, self.hurry = home, home / "run", home / "hurry"
        limit_s *= max(1.0, stretch / 2)
        self._until = time.monotonic() + limit_s
        self._script = [str(SCRIPT), *script, "--pause", f"{PAUSE_S * stretch:g}", "--hurry", str(self.hurry)]
        trace = home / f"{recording.partition('.')[0]}.csv"
        trace.write_text(part_of(RECORDED / recording, *hours))
        played = ["--speed", f"{SPEED / stretch:g}", "--quiet", f"{QUIET_S * stretch:g}s"]
        self.words = ["run", "--no-display", "--capacity", f"trace:{trace}", *played, *words]
        self.job = Job(home, self.words, self._script, limit_s, env=env)
        self.code: int | None = None
        self._more: list[Child] = []

    def seen(self) -> Seen:
        return Seen(self.run_dir)

    def until(self, what: Callable[[Seen], object], missing: str, look_s: float = LOOK_S) -> Seen:
        """Wait until the journal says so. RuntimeError when the run ends, or its time is up, before that."""
        while True:
            over = self.over
            with contextlib.suppress(EverstepError, OSError):
                seen = self.seen()
                if what(seen):
                    return seen
            if over or time.monotonic() > self._until:
                raise RuntimeError(f"{missing}: it did not happen; last words:\n{self.said()}")
            time.sleep(look_s)

    @property
    def over(self) -> bool:
        return self._running.process.poll() is not None

    @property
    def _running(self) -> Child:
        return self._more[-1] if self._more else self.job.main

    def ended(self) -> int:
        """Wait for the end of what runs; its exit code. RuntimeError if it takes too long."""
        try:
            self.code = self._running.process.wait(max(1.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it does not end; last words:\n{self.said()}") from None
        return self.code

    def go_on(self, *words: str) -> None:
        """A further command that runs the job: ``unsuspend RUN_DIR``, ``resume RUN_DIR``."""
        self._more.append(Child(everstep(*words), log=self.job.log))

    def resume(self, *words: str) -> None:
        """Go on in a new run, from what this one had left."""
        before, self.run_dir = self.run_dir, self.home / "resumed"
        self.hurry.touch()
        self.go_on("resume", str(before), "--run-dir", str(self.run_dir), "--no-display", *words)

    def ended_well(self) -> bool:
        return self.ended() == 0

    def leftovers(self) -> list[int]:
        """Return the processes of the run that are still there a moment after its end."""
        until = time.monotonic() + 20.0
        while (left := of_run(self.home)) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def ask(self, *words: str) -> int:
        """A command that ends soon; its exit code."""
        return subprocess.run(
            everstep(*words), stdin=subprocess.DEVNULL, capture_output=True, timeout=120.0, check=False
        ).returncode

    def kill(self, role: Role, node: str) -> None:
        """SIGKILL the newest process of a role on a node. RuntimeError if there is none."""
        status = self.job.status()
        there = [m for m in (status.members if status else ()) if m.role is role and m.node == node and m.pid]
        alive = [m.pid for m in there if m.state is ShownState.ALIVE]
        if not alive:
            raise RuntimeError(f"no {role.value} runs on {node}")
        os.kill(alive[-1], signal.SIGKILL)

    def said(self) -> str:
        return self.job.words()

    @property
    def summary(self) -> JobSummary:
        return read_summary(self.run_dir) or JobSummary()

    def exact(self) -> str:
        """As ``against``, of this run."""
        return against(self.run_dir)

    def close(self) -> None:
        for child in self._more:
            child.kill()
        self.job.close()


def against(run_dir: Path) -> str:
    """Return what the audit and the witness have to say against a run; "": each sample counted exactly once."""
    report = witnessed(run_dir, audit(run_dir))
    return "" if report.verdict is Verdict.EXACT and not report.witness and report.finished else report.text()


def part_of(recording: Path, from_h: float, to_h: float) -> str:
    """Return a part of a recording as lines ``milliseconds,add|remove,name``."""
    lives = between(read_trace(recording), from_h * HOUR_S, to_h * HOUR_S).lives
    events = [(life.begin_s, 1, n) for n, life in enumerate(lives)]
    events += [(life.end_s, 0, n) for n, life in enumerate(lives) if life.end_s is not None]
    rows = [f"{round(at * 1000)},{'add' if comes else 'remove'},m{n}" for at, comes, n in sorted(events)]
    return "\n".join(rows) + "\n"
