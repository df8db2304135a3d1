"""Measures large jobs: a simulated day with the production brain, and a real master with 2,000 connected members.

``one``: one job of mode ps on 10,000 machines (quick: 1,000), each of which goes once a day on average and is replaced
after two minutes; a shard is an hour of one worker. ``many``: 1,000 jobs on 10 machines each (quick: 20), each of which
goes once an hour; their time is that of all of them. ``group``: one group of mode allreduce, which the brain looks at
as a whole after each event: 500 members (quick: 150). CPU of this process, whatever else runs on the machine.

``real``: a master process with 1,000 nodes of two workers (quick: 150 nodes), which at most eight processes play over
TCP with TLS: agents and workers beat every second, workers train shards of 20 s. Then half of the nodes get a reclaim
notice at one moment (``real.notice``), and a tenth of them vanish at one moment (``real.vanish``). ``beat_p99_s``: from
a beat until its answer. The processes that play share the machine with the master.
"""

from __future__ import annotations

import msgspec

from benchmarks._measure import Result, say
from benchmarks._real_master import measure
from everstep.config.spec import JobSpec
from everstep.model.capacity import Market, Offer
from everstep.platforms.trace_variants import by_chance
from everstep.sim.elastic.forecast import Story, virtual
from everstep.sim.elastic.job_model import MeasuredJob
from everstep.sim.elastic.outcome import Outcome
from everstep.sim.elastic.virtual_job import Work

DAY_S = 86_400.0
REAL_AIMS = {
    "beat_p99_s": 1.0,
    "cpu_cores": 1.0,
    "notice_ordered_s": 2.0,
    "notice_answered_s": 2.0,
    "notice_beat_p99_s": 1.0,
    "vanish_beat_p99_s": 1.0,
}
OFFER = Offer("virtual", "", Market.SPOT)


def _day(machines: int, between_s: float, spec: JobSpec, shard_samples: int, seed: int = 0) -> Outcome:
    trace = by_chance(machines, DAY_S, between_s, 120.0, seed)
    work = Work(10**12, 1, shard_samples)
    return virtual(spec, work, MeasuredJob(), Story(trace, OFFER, machines), 0.0, DAY_S, seed)


def run(quick: bool) -> Result:
    """Play three sizes, each once, then a real master."""
    machines, jobs, members = (999, 20, 150) if quick else (9_999, 1_000, 500)
    one = _day(machines, DAY_S, JobSpec(ps=2, parity="1+1"), 3_600_000)
    say(f"one job on {machines + 1} machines: {one.cpu_s:.1f} s, {one.events} events, {one.reclaims} reclaims")
    many_s, reclaims, goodputs = 0.0, 0, []
    for seed in range(jobs):
        found = _day(9, 3600.0, JobSpec(ps=1), 1_000_000, seed)
        many_s, reclaims = many_s + found.cpu_s, reclaims + found.reclaims
        goodputs.append(found.goodput)
    say(f"{jobs} jobs: {many_s:.1f} s, {reclaims} reclaims")
    group = _day(members - 1, DAY_S, JobSpec(mode="allreduce", ps=0), 3_600_000)
    say(f"a group of {members}: {group.cpu_s:.1f} s")
    figures = {
        "one.machines": machines + 1,
        "one.reclaims": one.reclaims,
        "one.events": one.events,
        "one.cpu_s": one.cpu_s,
        "one.goodput": one.goodput,
        "many.jobs": jobs,
        "many.reclaims": reclaims,
        "many.cpu_s": many_s,
        "many.goodput_least": min(goodputs),
        "group.members": members,
        "group.cpu_s": group.cpu_s,
        "group.goodput": group.goodput,
    }
    aims = {"one.cpu_s": "<= 120", "many.cpu_s": "<= 120"}
    holds = {"one.cpu_s": one.cpu_s <= 120, "many.cpu_s": many_s <= 120}
    nodes = 150 if quick else 1_000
    real = measure(nodes, 2, 2 if quick else 8, 10.0 if quick else 60.0, nodes // 2, nodes // 10)
    say(f"a real master: {real}")
    figures |= {f"real.{name}": value for name, value in msgspec.structs.asdict(real).items()}
    for name, most in REAL_AIMS.items():
        aims[f"real.{name}"], holds[f"real.{name}"] = f"< {most:g}", figures[f"real.{name}"] < most
    aims["real.unexpected"], holds["real.unexpected"] = "0", real.unexpected == 0
    return {"figures": figures, "aims": aims, "holds": holds, "spread": {}}
