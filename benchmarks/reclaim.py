"""Recorded reclaims on real processes: agents are killed as a cloud took its machines; with notice and without.

Each job has one machine that stays (master, a worker, a ps) and up to 4 or 16 that come and go as in a recording
(``traces/spot``), 60 times as fast, with pauses cut to 15 s, or longer than the notice. Notices, starts and recovery
take real seconds. A job trains until 50 machines were taken back, then to its end. The full form plays four recordings
in modes ps (a ps on a machine, parity 4+1 on 4 and 4+2 on 16), allreduce and hybrid, with notices of 30 s, of 2 min and
without: twelve jobs, one after another. ``--plan NAME [--reclaims N] [--stretch X]``: one of them. ``--keep DIR``: for
its run directory; ``--again``: say once more what was kept there. Quick: mode ps with
parity 1+1 on the first machine, up to three others, six reclaims, a notice of 5 s and none.

``exact``: share of jobs in which audit and (in the full form) the integer witness say that every sample counted exactly
once. ``zero``: times that no machine was left beside the first. ``empty_s``: from a notice until no process runs on the
node; ``empty_of_notice`` (p95): that time as a share of the notice. ``goodput``: as ``everstep cost`` has it. It
counts starts against machines that live for seconds, so it says how the two sides compare, not what a real job would
have. ``loss``: of the models that the full form's jobs left, over the mean of eight plain PyTorch runs of as many
epochs from other seeds (the worst of them; of mode ps with gradients as late as the machines make them); ``as_seeds``:
share of jobs where that is within three deviations of these.

``NMB.safe_s`` (p95 of the rounds): a ps with N MB of rows and optimizer state, which nobody else has, gets a notice of
15 s; until all its partitions are owned elsewhere, while training goes on. ``NMB.mb_per_s``: what moved in that time.
``NMB.over_wire``: that time over what the same bytes take through one plain connection of the loopback, from one
thread to another; it has no limit but the memory of this machine. ``NMB.over_tls``: that time over what they take
from the memory of one process to new memory of another one, through one connection with TLS as ps of two nodes have
it. ``NMB.cpu_s_per_gb``: CPU of both ps in that time, without what as many pushes took before, for a GB that
moved. 500 and 2,000 MB; quick: 20 MB.
``--only traces`` or ``--only notice``: one of the two parts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._jobs import SPARSE_HEAD, Job
from benchmarks._measure import ROOT, Result, each_round, median, p95, say, spread
from benchmarks._notice import notice_to_safe
from benchmarks._quality import Quality, quality
from benchmarks._supervised import BATCH, RECORDED, Played, Seen, against
from benchmarks.supervise import ends_well
from benchmarks.witness import fork_server
from everstep.brain.events import CapacityChanged, Event, ProcessExited
from everstep.cli.display import JobSummary, read_summary
from everstep.cli.replay import JOURNAL_FILE
from everstep.errors import EverstepError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep
from everstep.monitor.audit import audit
from everstep.monitor.spending import read_spending
from everstep.platforms.trace_capacity import read_trace
from everstep.storage.journal import read_journal

TRACE = ROOT / "benchmarks" / "traces" / "spot" / "us-west-2c_v100_1.json.gz"
LEAD_S = 5.0
NOTICE_S = 15.0
NOTICES = {500: 5, 2000: 3}  # MB of a ps: rounds
NOTICES_QUICK = {20: 2}
LIMIT_S = 900.0
LOOK_S = 0.5
RECLAIMS = 50
SAMPLES = 3200
EPOCHS = {4: 20, 16: 40}  # of a job of the full form with so many machines: its data lasts longer than its reclaims
SCRIPT = (
    SPARSE_HEAD
    + """for batch in job.steps(job.loader(data, batch_size=100, epochs={epochs})):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    if not os.path.exists({hurry!r}):
        time.sleep(0.3)
"""
)
MODES = {"ps": ["--ps", "2", "--parity", "1+1"], "hybrid": ["--mode", "allreduce", "--ps", "1"]}


def events_of(run_dir: Path) -> list[Event]:
    return [event for _, event, _ in read_journal(run_dir / JOURNAL_FILE)]


def _taken_back(run_dir: Path) -> int:
    facts = (event.fact for event in events_of(run_dir))
    return sum(isinstance(fact, CapacityChanged) and fact.step is CapacityStep.TAKEN_BACK for fact in facts)


def until_reclaim(events: list[Event], reclaims: int) -> list[Event]:
    """The events up to the reclaim of that number, from 1; all of them if there are fewer."""
    count = 0
    for number, event in enumerate(events):
        fact = event.fact
        count += isinstance(fact, CapacityChanged) and fact.step is CapacityStep.TAKEN_BACK
        if count == reclaims:
            return events[: number + 1]
    return events


def _empty_s(events: list[Event]) -> list[float]:
    """Seconds from each notice until the last process of its node had ended, if it did before the machine went."""
    warned: dict[NodeId, float] = {}
    last: dict[NodeId, float] = {}
    out = []
    for event in events:
        fact = event.fact
        if isinstance(fact, CapacityChanged) and fact.step is CapacityStep.WARNED:
            warned[fact.node] = event.at
        elif isinstance(fact, CapacityChanged) and fact.node in warned:
            since = warned.pop(fact.node)
            if fact.node in last:
                out.append(last.pop(fact.node) - since)
        elif isinstance(fact, ProcessExited) and event.sender.node in warned:
            last[event.sender.node] = event.at
    return out


def played_job(home: Path, mode: str, lead_s: float, quiet_s: float, reclaims: int) -> Path:
    """Run a job until so many machines were taken back, then to its end; return its run directory. RuntimeError if it
    does not end well."""
    home.mkdir()
    script, hurry = home / "train.py", home / "hurry"
    script.write_text(SCRIPT.format(hurry=str(hurry), epochs=8 * reclaims))
    played = ["--speed", "60", "--quiet", f"{quiet_s:g}s", "--lead", f"{lead_s:g}s", "--capacity-nodes", "3"]
    flags = ["run", "--workers", "1", *MODES[mode], "--capacity", f"trace:{TRACE}", *played, "--no-display"]
    job = Job(home, flags, [str(script)], LIMIT_S)
    try:
        job.wait_for(job.status)
        job.wait_for(lambda: time.sleep(LOOK_S) or _taken_back(job.run_dir) >= reclaims)
        hurry.touch()
        job.finish()
        return job.run_dir
    finally:
        job.close()


def _job(home: Path, mode: str, lead_s: float, quiet_s: float, reclaims: int) -> tuple[int, bool, float, list[float]]:
    """Reclaims, whether the audit says exactly once, goodput, and the times until nodes were empty."""
    run_dir = played_job(home, mode, lead_s, quiet_s, reclaims)
    report = audit(run_dir)
    events = events_of(run_dir)
    goodput = read_spending(until_reclaim(events, reclaims)).goodput() or 0.0
    return _taken_back(run_dir), report.ok and bool(report.finished), goodput, _empty_s(events)


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Both parts, or one; or the plan of one name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reclaim")
    parser.add_argument("--only", choices=("traces", "notice"))
    parser.add_argument("--plan", choices=[plan.name for plan in PLANS])
    parser.add_argument("--reclaims", type=int, default=RECLAIMS)
    parser.add_argument("--stretch", type=float, default=1.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args(arguments)
    if args.again and not (args.plan and args.keep):
        parser.error("--again needs --plan NAME and --keep DIR")
    if args.plan:
        plan = next(plan for plan in PLANS if plan.name == args.plan)
        if args.again:
            run_dir = args.keep / plan.name / "run"
            return _summed([_read(run_dir, plan, args.reclaims, Seen(run_dir), against(run_dir))])
        with fork_server(), tempfile.TemporaryDirectory(prefix="everstep-reclaim-") as folder:
            return _summed([reclaimed(args.keep or Path(folder), plan, args.reclaims, args.stretch)])
    parts = [part(quick) for name, part in (("notice", _notices), ("traces", _traces)) if args.only in (None, name)]
    return {key: {k: v for part in parts for k, v in part[key].items()} for key in parts[0]}


def _notices(quick: bool) -> Result:
    """From a notice until nothing depends on the machine that goes."""
    found: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    with tempfile.TemporaryDirectory(prefix="everstep-notice-") as folder:
        for state_mb, rounds in (NOTICES_QUICK if quick else NOTICES).items():
            seen = []
            for number in each_round(rounds):
                seen.append(notice_to_safe(Path(folder) / f"{state_mb}-{number}", state_mb, NOTICE_S))
                say(f"{state_mb} MB, round {number + 1}/{rounds}: {seen[-1]}")
            values = {
                "safe_s": [one.safe_s for one in seen],
                "mb_per_s": [one.moved_bytes / one.safe_s / 1e6 for one in seen],
                "over_wire": [one.over_wire for one in seen],
                "over_tls": [one.over_tls for one in seen],
                "cpu_s_per_gb": [one.cpu_s * 1e9 / one.moved_bytes for one in seen],
            }
            for name, some in values.items():
                found["figures"][f"{state_mb}MB.{name}"] = p95(some) if name == "safe_s" else median(some)
                found["spread"][f"{state_mb}MB.{name}"] = spread(some)
            for name, aim, limit in (("safe_s", f"p95 < {NOTICE_S:g}", NOTICE_S), ("over_tls", "<= 1.2", 1.2)):
                found["aims"][f"{state_mb}MB.{name}"] = aim
                found["holds"][f"{state_mb}MB.{name}"] = found["figures"][f"{state_mb}MB.{name}"] <= limit
    return found


def _traces(quick: bool) -> Result:
    """Quick: both modes of ``played_job``; else all plans, one after another."""
    with tempfile.TemporaryDirectory(prefix="everstep-reclaim-") as folder:
        if quick:
            return _summed(_short_jobs(Path(folder)))
        with fork_server():
            return _summed([reclaimed(Path(folder), plan) for plan in PLANS])


def _short_jobs(folder: Path) -> list[Reclaimed]:
    found = []
    for side, lead_s in (("notice", LEAD_S), ("none", 0.0)):
        seen, ok, share, waits = _job(folder / side, "ps", lead_s, 12.0, 6)
        say(f"ps, {side}: {seen} reclaims, exact {ok}, goodput {share:.3f}, empty after {waits}")
        found.append(Reclaimed("" if ok else "the audit found something", seen, lead_s, share, waits, 0))
    return found


class Plan(NamedTuple):
    """One job of the full form. ``nodes``: that it has beside the first one, at most. ``lead_s``: of notices."""

    recording: str
    nodes: int
    mode: str
    lead_s: float

    @property
    def name(self) -> str:
        return f"{self.recording.partition('.')[0].partition('_')[0]}-{self.nodes}-{self.mode}-{self.lead_s:g}s"

    @property
    def quiet_s(self) -> float:
        """Pauses are cut to this; a machine has to live longer than its notice."""
        return 15.0 if not self.lead_s else 1.25 * self.lead_s

    def epochs(self, reclaims: int) -> int:
        """Return how many make the data last longer than so many reclaims."""
        longer = self.quiet_s / 15.0
        if self.nodes > 4:  # (so many are taken back at once that pauses hardly count)
            longer = min(longer, 2.0)
        return round(EPOCHS[self.nodes] * longer * reclaims / RECLAIMS) + 4

    def flags(self, stretch: float) -> list[str]:
        """Parity is as wide as the machines allow: a ps on each of the first four, and on the first node."""
        wide = ["--ps", "5", "--parity", "4+1"] if self.nodes < 8 else ["--ps", "6", "--parity", "4+2"]
        there = ["--nodes", wide[1], "--nodes-wait", "60s"]  # (ps that begin on the first node stay there)
        on_nodes = [*wide, *there, "--capacity-ps", "1", "--checkpoint-every", "5s"]
        modes = {
            "ps": on_nodes,
            "allreduce": ["--mode", "allreduce", "--checkpoint-every", "5s"],
            "hybrid": ["--mode", "allreduce", *on_nodes],
        }
        quiet = ["--quiet", f"{self.quiet_s * stretch:g}s"]
        played = ["--speed", f"{60 / stretch:g}", *quiet, "--lead", f"{self.lead_s:g}s"]
        return ["--workers", "1", *modes[self.mode], *played, "--capacity-nodes", str(self.nodes)]


RECORDINGS = {
    "us-west-2c_v100_1.json.gz": 4,
    "us-east-1f_v100_1.json.gz": 4,
    "us-west-2a_v100_1.json.gz": 16,
    "p3-trace.csv.gz": 16,
}
"""Recordings, and how many machines a job has of them."""
NOTICES_S = (0.0, 30.0, 120.0)
PLANS = tuple(
    Plan(recording, nodes, mode, NOTICES_S[(row + column) % 3])
    for row, (recording, nodes) in enumerate(RECORDINGS.items())
    for column, mode in enumerate(("ps", "allreduce", "hybrid"))
)
"""Every recording in every mode; each mode with each notice, and without."""


class Reclaimed(NamedTuple):
    """What came of one job. ``problem``: what audit and witness say against it; "": nothing. ``zero``: times that no
    machine was left beside the first."""

    problem: str
    reclaims: int
    lead_s: float
    goodput: float
    empty_s: list[float]
    zero: int
    quality: Quality | None = None


def reclaimed(folder: Path, plan: Plan, reclaims: int = RECLAIMS, stretch: float = 1.0) -> Reclaimed:
    """Play one job until so many machines were taken back, then to its end."""
    script = ["--samples", str(SAMPLES), "--batch", str(BATCH), "--loops", str(plan.epochs(reclaims))]
    hours = read_trace(RECORDED / plan.recording).length_s / 3600
    limit_s = LIMIT_S * max(1.0, plan.quiet_s / 15.0)
    job = Played(folder / plan.name, plan.flags(stretch), plan.recording, (0.0, hours), stretch, None, script, limit_s)
    seen, problem = None, ""
    try:
        job.until(lambda s: s.reclaims >= reclaims, f"{reclaims} reclaims", LOOK_S * 4)
        seen = ends_well(job)
        problem = job.exact()
    except (RuntimeError, EverstepError, OSError) as error:
        problem = str(error)
    finally:
        job.close()
    return _read(job.run_dir, plan, reclaims, seen, problem)


def _read(run_dir: Path, plan: Plan, reclaims: int, seen: Seen | None, problem: str) -> Reclaimed:
    """Return what a run says in the end. ``problem``: that was found already."""
    events = events_of(run_dir)
    goodput = read_spending(until_reclaim(events, reclaims)).goodput() or 0.0
    count, zero = _taken_back(run_dir), len(seen.spans(lambda m: not m.spot)) - 1 if seen else 0
    found = None
    if seen and not problem:
        epochs = round((read_summary(run_dir) or JobSummary()).samples_done / SAMPLES)
        found = quality(run_dir, SAMPLES, BATCH, epochs, late=plan.nodes if plan.mode == "ps" else 0)
    loss = f"{found.of_seeds:.4f} of plain runs, at most {found.most_of_seeds:.4f}" if found else "not looked at"
    say(
        f"{plan.name}: {count} reclaims, to no machine {zero} times, {problem or 'exact'}, goodput {goodput:.3f}, "
        f"loss {loss}"
    )
    return Reclaimed(problem, count, plan.lead_s, goodput, _empty_s(events), zero, found)


def _summed(found: Sequence[Reclaimed]) -> Result:
    empty = [wait for one in found for wait in one.empty_s]
    within = [wait / one.lead_s for one in found for wait in one.empty_s if one.lead_s]
    judged = [one.quality for one in found if one.quality]
    sides = {"notice": [one.goodput for one in found if one.lead_s], "none": [o.goodput for o in found if not o.lead_s]}
    figures = {
        "jobs": float(len(found)),
        "reclaims": float(sum(one.reclaims for one in found)),
        "reclaims_least": float(min(one.reclaims for one in found)),
        "zero": float(sum(one.zero for one in found)),
        "exact": sum(not one.problem for one in found) / len(found),
        "empty_s": p95(empty) if empty else 0.0,
        "empty_of_notice": p95(within) if within else 0.0,
        **{f"goodput_{side}": median(values) for side, values in sides.items() if values},
    }
    aims, holds = {}, {}
    if judged:
        figures["loss"] = max(one.of_seeds for one in judged)
        figures["as_seeds"] = sum(one.of_seeds <= one.most_of_seeds for one in judged) / len(found)
        aims["as_seeds"], holds["as_seeds"] = "1.0", figures["as_seeds"] == 1.0
    return {
        "figures": figures,
        "aims": {"exact": "1.0", "empty_of_notice": "p95 < 1", **aims},
        "holds": {"exact": figures["exact"] == 1.0, "empty_of_notice": figures["empty_of_notice"] < 1.0, **holds},
        "spread": {
            "empty_s": spread(empty) if empty else (0.0, 0.0),
            **{f"goodput_{side}": spread(values) for side, values in sides.items() if values},
        },
    }
