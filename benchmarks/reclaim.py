"""Recorded reclaims on real processes: agents are killed as a cloud took its machines; with notice and without.

Each job has one machine that stays (master, ps, a worker) and up to three that come and go as in a recording of AWS
(``traces/spot/us-west-2c_v100_1.json.gz``), played 60 times as fast, with pauses cut to 15 s (quick: 12 s). Notices,
starts and recovery take real seconds. A job trains until so many machines were taken back, then to its end.

``exact``: share of jobs whose audit says that every sample counted exactly once. ``empty_s``: from a notice until no
process runs on the node. ``goodput``: as ``everstep cost`` has it. It counts starts against machines that live for
seconds, so it says how the two sides compare, not what a real job would have.

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

from benchmarks._jobs import SPARSE_HEAD, Job
from benchmarks._measure import ROOT, Result, each_round, median, p95, say, spread
from benchmarks._notice import notice_to_safe
from everstep.brain.events import CapacityChanged, Event, ProcessExited
from everstep.cli.replay import JOURNAL_FILE
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep
from everstep.monitor.audit import audit
from everstep.monitor.spending import read_spending
from everstep.storage.journal import read_journal

TRACE = ROOT / "benchmarks" / "traces" / "spot" / "us-west-2c_v100_1.json.gz"
LEAD_S = 5.0
NOTICE_S = 15.0
NOTICES = {500: 5, 2000: 3}  # MB of a ps: rounds
NOTICES_QUICK = {20: 2}
LIMIT_S = 900.0
LOOK_S = 0.5
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


def _events(run_dir: Path) -> list[Event]:
    return [event for _, event, _ in read_journal(run_dir / JOURNAL_FILE)]


def _taken_back(run_dir: Path) -> int:
    facts = (event.fact for event in _events(run_dir))
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
    events = _events(run_dir)
    goodput = read_spending(until_reclaim(events, reclaims)).goodput() or 0.0
    return _taken_back(run_dir), report.ok and bool(report.finished), goodput, _empty_s(events)


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Both parts, or one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reclaim")
    parser.add_argument("--only", choices=("traces", "notice"))
    only = parser.parse_args(arguments).only
    parts = [part(quick) for name, part in (("notice", _notices), ("traces", _traces)) if only in (None, name)]
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
    """Both modes, with notice and without."""
    reclaims, quiet_s = (6, 12.0) if quick else (50, 15.0)
    modes = ["ps"] if quick else list(MODES)
    seen, exact, empty = 0, [], []
    goodput: dict[str, list[float]] = {"notice": [], "none": []}
    with tempfile.TemporaryDirectory(prefix="everstep-reclaim-") as folder:
        for mode in modes:
            for side, lead_s in (("notice", LEAD_S), ("none", 0.0)):
                home = Path(folder) / f"{mode}-{side}"
                found, ok, share, waits = _job(home, mode, lead_s, quiet_s, reclaims)
                say(f"{mode}, {side}: {found} reclaims, exact {ok}, goodput {share:.3f}, empty after {waits}")
                seen, empty = seen + found, [*empty, *waits]
                exact.append(float(ok))
                goodput[side].append(share)
    figures = {
        "reclaims": float(seen),
        "exact": sum(exact) / len(exact),
        "empty_s": p95(empty) if empty else 0.0,
        "goodput_notice": median(goodput["notice"]),
        "goodput_none": median(goodput["none"]),
    }
    return {
        "figures": figures,
        "aims": {"exact": "1.0", "empty_s": f"p95 < {LEAD_S:g}"},
        "holds": {"exact": figures["exact"] == 1.0, "empty_s": figures["empty_s"] < LEAD_S},
        "spread": {
            "empty_s": spread(empty) if empty else (0.0, 0.0),
            "goodput_notice": spread(goodput["notice"]),
            "goodput_none": spread(goodput["none"]),
        },
    }
