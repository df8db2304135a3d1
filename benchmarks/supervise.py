"""Shows each setting of the supervisor with real jobs on recorded reclaims, by what the journal says afterwards.

Each story is one job of real processes: a first machine that stays, and up to three that come and go as in a part of a
recording (``traces/spot``, 100 times as fast, pauses cut to 6 s; forks and rebuilds take real seconds; on a busy
machine, where agents start late, recording and waits are ``stretch`` times slower, by its load). Its model has a
witness, which counts samples. A story has a claim for each setting that it shows: with ``wait_for_all``, no group of
fewer is formed; with ``fallback`` an on-demand machine is granted after the wait and given back later; and so on.
Machines fall to none in most of them.

``exact``: share of stories in which audit and witness say that each sample counted exactly once, over all parts of a
run. ``shown``: share of the settings whose claims all hold; ``shown.SETTING``: whether those of one do.
``reclaims``, ``notices``, ``suspensions``: in all of them. ``zero``: stories in which no machine was left beside the
first. ``went_on_s``: from the moment when a job that suspended itself could have machines again until it ran.

``--only A,B``: stories by name. ``--jobs N``: at a time. ``--stretch X``: in place of what the load says.
``--keep DIR``: for run directories. Quick: five stories.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks._measure import Result, median, say, spread
from benchmarks._supervised import BATCH, Moment, Played, Seen
from benchmarks.witness import fork_server
from everstep.brain.supervision import JobStage
from everstep.cli.run import SUSPENDED
from everstep.errors import EverstepError
from everstep.model.member import Role
from everstep.policies.node_selection import HOME_NODE

EAST, WEST = "us-east-1f_v100_1.json.gz", "us-west-2c_v100_1.json.gz"
FALLS = (EAST, (11.9, 26.0))
"""2, 3, 4, 2, 1, 0, 3, 4, 2, 4, 3, 0, ... machines."""
WEST_FALLS = (WEST, (15.0, 41.0))
"""4, 1, 4, 3, 0, 4, 3, 1, 2, 4, 1, 2, 4, 0, ... machines."""
MAX_WAIT = "MAX_WAIT"  # as long as agents take to start, and not as long as a pause
MAX_WAIT_S, STABLE_S, FALLBACK_S = 4, 1.0, 1.0
SLACK_S = 0.05  # clocks of the journal and of the brain's timers
BUDGET_USD = 45.0
PRICES = "class,market,usd_per_hour\nv100,on_demand,3600\nv100,spot,1800\n"
PS = "--ps 2 --parity 1+1"
LAG = "--ps 2 --parity 1+1 --protect lag --protect-lag 1s"
WIDE = "--ps 3 --parity 2+1"
GROUP = "--mode allreduce"
HYBRID = "--mode allreduce --ps 2 --parity 1+1"
WAITS = f"--min-workers 2 --max-wait {MAX_WAIT} --stabilization {STABLE_S:g}s"
RUN = "--min-workers 3 --on-wait-timeout run"
PAIR = "--mode allreduce --workers 2 --bind 127.0.0.1:0 --capacity-nodes 2 --checkpoint-every 2s --stabilization 1s"
ALONE = {"EVERSTEP_MASTER_ALONE": "true"}

Claims = dict[str, bool]
"""``SETTING: claim`` -> whether it is true."""


class Story(NamedTuple):
    """One job. ``flags``: of ``everstep run``. ``play``: drives it to its end, and says what it showed."""

    name: str
    flags: str
    play: Callable[[Played], Claims]
    part: tuple[str, tuple[float, float]] = FALLS
    quick: bool = False
    env: dict[str, str] | None = None


class Told(NamedTuple):
    """What came of one story. ``problem``: why it did not come to its end, or is not exact; "": nothing."""

    story: Story
    claims: Claims
    problem: str
    seen: Seen | None
    seconds: float


# ---------------------------------------------------------------- what is true of a journal


def max_wait_s(job: Played) -> int:
    return round(MAX_WAIT_S * job.stretch)


def waiting(moment: Moment) -> bool:
    return bool(moment.lack) and not moment.over


def waited_before(seen: Seen, stage: JobStage) -> list[float]:
    """Return for how long members were lacking each time before the job came into this state."""
    out = []
    for before, after in zip(seen.moments, seen.moments[1:], strict=False):
        if after.stage is stage and before.stage is not stage:
            lacks = [begin for begin, end in seen.spans(lambda m: bool(m.lack)) if begin <= after.at <= end]
            out += [after.at - begin for begin in lacks[-1:]]
    return out


def none_left(seen: Seen) -> bool:
    """Return whether no machine was left beside the first one, after there had been some."""
    counts = [m.spot + m.on_demand for m in seen.moments]
    return any(counts) and 0 in counts[counts.index(next(filter(None, counts))) :]


def ends_well(job: Played) -> Seen:
    """Let the job train fast, and wait for its end; start it again whenever it is suspended meanwhile."""
    job.hurry.touch()
    while (code := job.ended()) == SUSPENDED:  # (a recording that is over brings nobody back)
        job.go_on("unsuspend", str(job.run_dir))
    if code != 0:
        raise RuntimeError(f"the job ended with {code}:\n{job.said()}")
    return job.seen()


# ---------------------------------------------------------------- the stories


def suspends(job: Played) -> Claims:
    """Too few machines for longer than the job waits: it is suspended, and goes on once they have been back."""
    job.until(lambda s: s.went_on and s.stage is JobStage.RUNNING, "suspended by itself, and on again")
    seen = ends_well(job)
    waits = waited_before(seen, JobStage.SUSPENDED)
    return {
        "on_wait_timeout suspend: it suspended itself": seen.suspended_by_itself >= 1,
        "on_wait_timeout suspend: it went on by itself": seen.went_on >= 1,
        "max_wait: not suspended before": bool(waits) and min(waits) >= max_wait_s(job) - SLACK_S,
        "suspended: nothing was given out": not seen.granted_in(seen.spans(lambda m: m.stage is JobStage.SUSPENDED)),
        "min_workers: nobody trained with fewer": not trained_with_fewer(seen, 2),
    }


def trained_with_fewer(seen: Seen, least: int) -> bool:
    """Return whether a shard was given out while fewer workers were there, or a step committed by a group of fewer. (A
    group that waits for others may have fewer.)"""
    lacking = seen.spans(lambda m: bool(m.lack) and not m.anyway)
    return bool(seen.granted_in(lacking)) or any(g.members < least and g.step_samples for g in seen.groups)


def fails(job: Played) -> Claims:
    """The same, and the job fails; then it is resumed from what it had left, elsewhere."""
    code = job.ended()
    seen, error = job.seen(), job.summary.error
    waits = waited_before(seen, JobStage.FAILED)
    job.resume("--workers", "2")
    return {
        "on_wait_timeout fail: exit code 4": code == 4,
        "on_wait_timeout fail: the error names it": "on_wait_timeout is fail" in error,
        "max_wait: not failed before": bool(waits) and min(waits) >= max_wait_s(job) - SLACK_S,
        "on_wait_timeout fail: it can be resumed": job.ended_well(),
    }


def runs_with_fewer(job: Played) -> Claims:
    """The same, and the job goes on with those who are there."""
    job.until(lambda s: with_fewer(s) and not s.moments[-1].anyway, "it ran with fewer, and all were back")
    seen = ends_well(job)
    begun = [begin for begin, _ in seen.spans(lambda m: m.anyway)]
    lacks = [begin for begin, _ in seen.spans(lambda m: bool(m.lack) and not m.anyway)]
    waits = [at - max(begin for begin in lacks if begin <= at) for at in begun if any(b <= at for b in lacks)]
    return {
        "on_wait_timeout run: it trained with fewer": with_fewer(seen),
        "on_wait_timeout run: never suspended": not seen.suspended_by_itself and job.summary.suspensions == 0,
        "max_wait: not before": bool(waits) and min(waits) >= max_wait_s(job) - SLACK_S,
        "min_workers: nobody trained with fewer before": not seen.granted_in(
            seen.spans(lambda m: bool(m.lack) and not m.anyway)
        ),
    }


def with_fewer(seen: Seen) -> bool:
    """Return whether shards were given out, or a group formed, by a job that had waited for long enough."""
    spans = seen.spans(lambda m: m.anyway and m.workers < 3)
    # (on a quiet machine the group of those who are there is formed by the very event that ends the wait)
    formed = any(begin <= group.at <= end and group.members < 3 for group in seen.groups for begin, end in spans)
    return bool(seen.granted_in(spans)) or formed


def shrinks(seen: Seen) -> bool:
    """Return whether a group of fewer followed a group of two, and one of two that one; and all told of steps."""
    sizes = [group.members for group in seen.groups if group.step_samples]
    text = "".join(map(str, sizes))
    return "21" in text and "2" in text[text.index("21") + 2 :]


def goes_on_with(job: Played, fixed: bool) -> Claims:
    """A group goes on with those who are left; its step stays as large as it was, or shrinks with it."""
    job.until(shrinks, "a group of two, of one and of two")
    seen = ends_well(job)
    most = {n: max((g.step_samples for g in seen.groups if g.members == n), default=0) for n in (1, 2)}
    expected = {1: 2 * BATCH if fixed else BATCH, 2: 2 * BATCH}
    word = "fixed" if fixed else "scale"
    return {
        "recovery run_with_available: it trained with one of two": shrinks(seen),
        f"global_batch {word}: samples of a step {expected}": most == expected,
    }


def waits_for_all(job: Played) -> Claims:
    """A group waits until all are back."""

    def back(seen: Seen) -> bool:
        steps = [group for group in seen.groups if group.step_samples]
        return len(steps) >= 2 and any(g.at > steps[0].at for g in steps[1:]) and len(seen.spans(waiting)) >= 2

    job.until(back, "a loss, and all of them back")
    seen = ends_well(job)
    return {
        "recovery wait_for_all: no step with fewer": all(g.members == 2 for g in seen.groups if g.step_samples),
        "recovery wait_for_all: it waited": seen.reclaims >= 1 and len(seen.spans(waiting)) >= 2,
    }


def tolerates(job: Played) -> Claims:
    """Machines that are taken back are not failures of the job; a worker that dies is."""
    before = job.until(lambda s: s.reclaims >= 3 and s.moments[-1].workers >= 1, "three reclaims")
    job.kill(Role.WORKER, HOME_NODE)
    code = job.ended()
    error = job.summary.error
    job.resume("--workers", "1")
    return {
        "fail_tolerance: lost nodes do not count": before.reclaims >= 3 and before.brain.job.exit_code is None,
        "fail_tolerance: a lost worker ends the job": code == 4 and "fail_tolerance=0" in error,
        "fail_tolerance: it can be resumed": job.ended_well(),
    }


def falls_back(job: Played) -> Claims:
    """While spot machines are lacking, on-demand ones stand in for them."""

    def gave_back(seen: Seen) -> bool:
        had = [n for n, m in enumerate(seen.moments) if m.on_demand]
        return bool(had) and not seen.moments[-1].on_demand and not seen.moments[-1].asked and had[-1] > 0

    job.until(gave_back, "on-demand machines, given back")
    seen = ends_well(job)
    asked = seen.spans(lambda m: m.asked > 0)
    lacks = [begin for begin, _ in seen.spans(lambda m: bool(m.lack))]
    waits = [at - max(begin for begin in lacks if begin <= at) for at, _ in asked]
    worked = seen.spans(lambda m: m.on_demand > 0 and m.workers >= 3)
    return {
        "fallback: asked for after the wait": bool(waits) and min(waits) >= FALLBACK_S - SLACK_S,
        "fallback: they trained": bool(seen.granted_in(worked)),
        "fallback: back to spot": gave_back(seen) or not seen.moments[-1].asked,
        "stabilization: spot machines stayed before": all(steady(seen, end) for _, end in asked[:1]),
    }


def steady(seen: Seen, at: float) -> bool:
    """Return whether enough spot machines were held for ``STABLE_S`` before ``at``."""
    spans = seen.spans(lambda m: m.spot >= 2)
    return any(begin <= at - STABLE_S + SLACK_S and at <= end + SLACK_S for begin, end in spans)


def stands_reliably(job: Played) -> Claims:
    """With ``reliable: ps`` no ps is started on a spot machine; ps and their rows stay while machines come and go."""
    job.until(lambda s: s.reclaims >= 4, "four reclaims")
    seen = ends_well(job)
    on = {start.node for start in seen.started if start.role is Role.PS}
    lives = len([start for start in seen.started if start.role is Role.PS])
    return {
        "reliable: no ps on a spot machine": on == {HOME_NODE},
        "reliable: no ps was lost": lives == 2 and seen.reclaims >= 4,
    }


def spreads(job: Played) -> Claims:
    """Without it ps stand on spot machines, too, which go with notice; parity brings back what went sooner."""
    job.until(lambda s: s.reclaims >= 4, "four reclaims")
    seen = ends_well(job)
    on = {start.node for start in seen.started if start.role is Role.PS}
    return {"reliable: without it ps stand on spot machines": any(node.startswith("spot-") for node in on)}


def by_hand(job: Played) -> Claims:
    """The job is suspended by hand, holds nothing, and goes on by hand; twice."""
    claims: Claims = {}
    for times in (1, 2):
        job.until(gone_on(times - 1, workers=2), "two workers")
        asked = job.ask("suspend", str(job.run_dir))
        code = job.ended()
        after = job.seen()
        claims[f"suspend: by hand, {times}"] = asked == 0 and code == SUSPENDED and not job.summary.by_itself
        claims[f"suspend: nothing is held, {times}"] = not job.leftovers() and not after.suspended_by_itself
        job.go_on("unsuspend", str(job.run_dir))
        job.until(gone_on(times), "it goes on")
    job.until(lambda s: s.stage is JobStage.RUNNING, "it runs")
    seen = ends_well(job)
    claims["unsuspend: it goes on, twice"] = seen.went_on >= 2
    return claims


def gone_on(times: int, workers: int = 0) -> Callable[[Seen], bool]:
    """Return whether a job went on so often, and has so many workers that train."""
    return lambda s: s.went_on == times and bool(s.granted) and s.moments[-1].workers >= workers


def within_budget(job: Played) -> Claims:
    """The job is suspended before it has spent more than its budget, and goes on with none."""
    code = job.ended()
    summary = job.summary
    spent = summary.spent_usd or 0.0
    refused = job.ask("unsuspend", str(job.run_dir))
    job.go_on("unsuspend", str(job.run_dir), "--budget", "0")
    seen = ends_well(job)
    return {
        "budget: suspended for it": code == SUSPENDED and summary.budget_asked and not summary.by_itself,
        "budget: no more was spent": 0 < spent <= BUDGET_USD,
        "budget: unsuspend without a larger one is refused": refused == 2,
        "budget: it goes on without one": seen.went_on >= 1 and (job.summary.spent_usd or 0.0) > spent,
    }


def stays_within(job: Played) -> Claims:
    """Nobody gets more workers or ps than the job may have, or fewer ps; while ps are lacking the job waits."""
    job.until(lambda s: s.reclaims >= 2 and s.moments[-1].workers >= 2 and s.moments[-1].ps >= 2, "all are there")
    where = str(job.run_dir)
    scaled = [job.ask("scale", where, *more) for more in (("--workers", "3"), ("--ps", "3"), ("--ps", "1"))]
    job.kill(Role.PS, HOME_NODE)
    job.until(lambda s: any("ps are there" in m.lack for m in s.moments) and s.moments[-1].ps >= 2, "a ps is back")
    seen = ends_well(job)
    return {
        "max_workers: never more": max(m.workers for m in seen.moments) == 2,
        "max_workers: scale above it is refused": scaled[0] == 2,
        "max_ps: scale above it is refused": scaled[1] == 2,
        "min_ps: scale below it is refused": scaled[2] == 2,
        "min_ps: with fewer the job waits": bool(seen.spans(lambda m: "ps are there" in m.lack)),
    }


STORIES = (
    Story("suspend_ps", f"{PS} {WAITS} --capacity-nodes 2", suspends, quick=True),
    Story("suspend_allreduce", f"{GROUP} {WAITS} --capacity-nodes 2 --lead 2s", suspends),
    Story("suspend_hybrid", f"{HYBRID} {WAITS} --capacity-nodes 3", suspends, WEST_FALLS),
    Story(
        "fail_allreduce",
        f"{GROUP} {WAITS} --capacity-nodes 2 --on-wait-timeout fail --checkpoint-every 2s",
        fails,
        quick=True,
    ),
    Story("run_ps", f"{WIDE} {WAITS} {RUN} --capacity-nodes 2", runs_with_fewer),
    Story(
        "run_hybrid", f"{HYBRID} {WAITS} {RUN} --capacity-nodes 2 --lead 2s", runs_with_fewer, WEST_FALLS, quick=True
    ),
    Story("available_fixed", f"{PAIR} --global-batch fixed", lambda job: goes_on_with(job, True), env=ALONE),
    Story("available_scale", f"{PAIR} --global-batch scale", lambda job: goes_on_with(job, False), env=ALONE),
    Story("wait_for_all", f"{PAIR} --recovery wait_for_all", waits_for_all, quick=True, env=ALONE),
    Story("tolerance", f"{PS} --fail-tolerance 0 --checkpoint-every 2s --capacity-nodes 3", tolerates),
    Story(
        "fallback",
        f"{PS} --min-workers 3 --fallback {FALLBACK_S:g}s --stabilization {STABLE_S:g}s --capacity-nodes 2",
        falls_back,
        quick=True,
    ),
    Story("reliable", f"{PS} --reliable master,ps --capacity-ps 1 --capacity-nodes 2 --lead 3s", stands_reliably),
    Story(
        "not_reliable",
        "--ps 3 --parity 1+1 --capacity-ps 1 --capacity-nodes 2 --lead 3s --checkpoint-every 2s",
        spreads,
    ),
    Story("by_hand", f"{LAG} --capacity-nodes 2", by_hand, WEST_FALLS),
    Story("budget", f"{LAG} --hardware v100 --budget {BUDGET_USD:g} --capacity-nodes 1", within_budget),
    Story("bounds", f"{PS} --max-workers 2 --max-ps 2 --min-ps 2 --capacity-nodes 3", stays_within),
)


def told(story: Story, folder: Path, stretch: float) -> Told:
    """Play one story to its end, and ask audit and witness."""
    began = time.monotonic()
    home = folder / story.name
    flags = story.flags.replace(MAX_WAIT, f"{round(MAX_WAIT_S * stretch)}s").split()
    if story.play is within_budget:
        prices = folder / "prices.csv"
        prices.write_text(PRICES)
        flags += ["--prices", str(prices)]
    if "--workers" not in flags:
        flags += ["--workers", "1"]
    job = Played(home, flags, *story.part, stretch, story.env)
    claims: Claims = {}
    problem, seen = "", None
    try:
        claims = story.play(job)
        problem = job.exact()
        seen = Seen(home / "run")
    except (RuntimeError, EverstepError, OSError) as error:
        problem = str(error)
    finally:
        job.close()
    return Told(story, claims, problem, seen, time.monotonic() - began)


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Play all stories, some at a time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks supervise")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=5 if quick else 4)
    parser.add_argument("--stretch", type=float, default=0.0)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args(list(arguments))
    only = args.only.split(",") if args.only else [s.name for s in STORIES if s.quick or not quick]
    if unknown := set(only) - {story.name for story in STORIES}:
        parser.error(f"no story {sorted(unknown)}: there are {', '.join(story.name for story in STORIES)}")
    folder = Path(tempfile.mkdtemp(prefix="everstep-supervise-", dir=args.keep))
    lock, stretch = threading.Lock(), args.stretch or busy_by()

    def one(story: Story) -> Told:
        found = told(story, folder, stretch)
        with lock:
            wrong = [claim for claim, true in found.claims.items() if not true]
            word = found.problem or ("NOT SHOWN: " + "; ".join(wrong) if wrong else "shown, exact")
            about = f"{found.seen.reclaims} reclaims, {found.seen.went_on} times on again, " if found.seen else ""
            say(f"{story.name} ({found.seconds:.0f} s): {about}{word}")
        return found

    with fork_server(), ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(one, [story for story in STORIES if story.name in only]))
    if args.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return summed(results, stretch)


def busy_by() -> float:
    """Return how many times slower recordings are played than on a machine that has nothing else to do."""
    return max(1.0, round(os.getloadavg()[0] / (2 * (os.cpu_count() or 1)), 1))


def summed(results: Sequence[Told], stretch: float) -> Result:
    """Return the figures of all stories."""
    shown: dict[str, bool] = {}
    for found in results:
        for claim, true in found.claims.items():
            setting = claim.partition(":")[0].replace(" ", "_")
            shown[setting] = shown.get(setting, True) and true
        if not found.claims:
            shown[f"story_{found.story.name}"] = False
    seen = [found.seen for found in results if found.seen is not None]
    back = [wait for one in seen for wait in went_on_s(one)]
    figures = {
        "stories": float(len(results)),
        "exact": sum(not found.problem for found in results) / max(1, len(results)),
        "shown": sum(shown.values()) / max(1, len(shown)),
        "stretch": stretch,
        "reclaims": float(sum(one.reclaims for one in seen)),
        "notices": float(sum(one.notices for one in seen)),
        "suspensions": float(sum(one.brain.state.supervision.suspensions for one in seen)),
        "zero": float(sum(map(none_left, seen))),
        **({"went_on_s": median(back)} if back else {}),
        **{f"shown.{setting}": float(true) for setting, true in sorted(shown.items())},
    }
    return {
        "figures": figures,
        "aims": {"exact": "1", "shown": "1"},
        "holds": {"exact": figures["exact"] == 1.0, "shown": figures["shown"] == 1.0},
        "spread": {"went_on_s": spread(back)} if back else {},
    }


def went_on_s(seen: Seen) -> list[float]:
    """Return how long it took each time from a suspension's end until the job ran."""
    out, ended = [], None
    for before, after in zip(seen.moments, seen.moments[1:], strict=False):
        if before.stage is JobStage.SUSPENDED and after.stage is not JobStage.SUSPENDED:
            ended = after.at
        if after.stage is JobStage.RUNNING and ended is not None:
            out.append(after.at - ended)
            ended = None
    return out
