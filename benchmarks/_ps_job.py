"""A job on emulated accelerators whose ps have an emulated service time, one of them made slower for a while."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, median, say
from everstep.brain.brain import Brain
from everstep.brain.events import Note, PublishPlacement
from everstep.cli.chaos import inject
from everstep.cli.link import ask_view
from everstep.cli.replay import JOURNAL_FILE
from everstep.errors import EverstepError
from everstep.ids import Slot
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.monitor.schedules import Planned
from everstep.storage.journal import read_journal

SCRIPT = ROOT / "benchmarks" / "twins" / "slow_device.py"
WORKERS, PS = 2, 4
BATCH, FIELDS, KEYS = 128, 1024, 1_000_000
WINDOW_S = 2.0  # of the policy, and of the benchmarks' figures
HOUR_S = 3600.0

Marks = NDArray[np.float64]
"""float64 [n, 3]: seconds since all workers were ready, samples of the batch done then, by whom; in order of time."""


class Case(msgspec.Struct, frozen=True):
    """``step_s``: of the accelerator, a batch. ``base``: so many times its processor time every request takes a ps.
    ``healthy_step_s``: what a step takes then, about: only for the number of samples."""

    name: str
    step_s: float
    base: float
    healthy_step_s: float


HALF, FULL = Case("half", 0.08, 17.0, 0.085), Case("full", 0.005, 60.0, 0.15)


class PsJob(Job):
    """``begin``, then ``drag`` now and then. ``slow(s)``: ps:0 is s times slower from now on, 1: no more. ``realtime``:
    for all of them; see :meth:`Job.undisturbed`."""

    realtime = False

    def __init__(self, home: Path, case: Case, policy: str, samples: int, flags: Sequence[str] = ()) -> None:
        self.case, self.marks, self.samples = case, home / "marks", samples
        self.marks.mkdir()
        self._dragged: dict[int, int] = {}
        flags = ["--workers", str(WORKERS), "--ps", str(PS), "--policy", policy, *flags]
        script = [str(SCRIPT), "--mode", "ps", "--home", str(self.marks), "--members", str(WORKERS)]
        script += ["--rows", str(samples), "--batch", str(BATCH), "--sample-s", str(case.step_s / BATCH)]
        script += ["--fields", str(FIELDS), "--keys", str(KEYS)]
        script += ["--pattern", json.dumps({"kind": "constant", "s": 1.0})]
        super().__init__(home, ["run", *flags], ["--", *script], 900.0, env={"EVERSTEP_WINDOW_S": str(WINDOW_S)})

    def begin(self) -> None:
        """Until every ps is up and has its service time."""
        self.wait_for(self.drag)
        if self.realtime:
            self.undisturbed()

    def drag(self) -> bool:
        """Every ps that is up has its service time, whichever process it is. Whether all have it."""
        status = self.status()
        for m in status.members if status is not None else ():
            here = m.role == Role.PS and m.state == MemberState.ALIVE
            if here and self._dragged.get(m.slot) != m.incarnation and self._order(m.slot, self.case.base):
                self._dragged[m.slot] = m.incarnation
        return len(self._dragged) == PS

    def slow(self, s: float) -> bool:
        return self._order(0, self.case.base * s)

    def _order(self, slot: int, factor: float) -> bool:
        try:
            inject(self.run_dir, Planned(0.0, "slow", f"ps:{slot}", factor, HOUR_S), False)
        except EverstepError as error:  # it is just coming or going
            say(f"ps:{slot}: {error}")
            return False
        return True

    def load(self) -> float:
        """Of the last window: for how much of it a ps was at work for a worker, mean over both."""
        speed = ask_view(self.run_dir, speed=True, timeout_s=5.0).speed
        if speed is None or not speed.seen.servers:
            return 0.0
        return sum(server.queue for server in speed.seen.servers) / len(speed.seen.servers) / WORKERS

    def began(self) -> float:
        """When all workers were ready, seconds since 1970."""
        return sorted(p.stat().st_mtime for p in self.marks.glob("ready-*"))[WORKERS - 1]

    def done(self) -> Marks:
        """See :data:`Marks`."""
        found = []
        for path in self.marks.glob("[0-9]*"):
            lines = [line.split() for line in path.read_text().splitlines()]
            found += [(float(at), float(n), float(path.name.partition(".")[0])) for n, at in lines]
        return np.array(sorted(found))


class History(msgspec.Struct):
    """By the journal, times in seconds since 1970. ``decisions``: all that were said, with the member's name;
    ``owned``: by how many partitions ps:0 has, from when on; ``plans``: when the brain took a policy's plan."""

    decisions: list[tuple[float, str, Decision]] = []
    plans: list[float] = []
    owned: list[tuple[float, int]] = []

    def when(self, action: str, begin: float = 0.0, member: str = "") -> list[float]:
        """When this was decided about this member ("": the job), from ``begin`` on."""
        return [at for at, who, why in self.decisions if (who, why.action) == (member, action) and at >= begin]

    def moved(self, plan_at: float) -> float:
        """When the last partition of this plan had changed hands (of ps:0's): before the next plan, nan: none did."""
        until = min((at for at in self.plans if at > plan_at), default=float("inf"))
        return max((at for at, _ in self.owned if plan_at <= at < until), default=float("nan"))

    def partitions(self, at: float) -> int:
        """Of ps:0, then."""
        return next((n for since, n in reversed(self.owned) if since <= at), 0)


def history(run_dir: Path) -> History:
    out, brain = History(), Brain()
    for _, event, _ in read_journal(run_dir / JOURNAL_FILE):
        taken, made = brain.state.control.version, brain.handle(event)
        if brain.state.control.version > taken:
            out.plans.append(event.at)
        for said in made:
            if isinstance(said, Note):
                out.decisions.append((event.at, said.member, said.decision))
            elif isinstance(said, PublishPlacement):
                owned = len(said.placement.owned_by(Slot(0)))
                if not out.owned or out.owned[-1][1] != owned:
                    out.owned.append((event.at, owned))
    return out


def rate(done: Marks, begin: float, end: float) -> float:
    """Samples/s, the median over windows of about ``WINDOW_S`` between ``begin`` and ``end``."""
    edges = np.linspace(begin, end, max(1, round((end - begin) / WINDOW_S)) + 1)
    counts, _ = np.histogram(done[:, 0], edges, weights=done[:, 1])
    return median(list(counts / np.diff(edges)))


def ceiling(s: float, load: float) -> float:
    """Of the healthy throughput, with one of the ps s times slower and its work divided at best."""
    return min(1.0, (PS - 1 + 1 / s) / PS / load) if load else 1.0
