"""Measures goodput on recorded clouds, in virtual time: everstep beside what others would do with the same machines.

Production brain and policies (``everstep simulate``), mode allreduce, one worker that stays and one on each machine,
1 GB of state, an agent in 3 s, a fork in 0.5 s, a group rebuilt in 0.2 s. Others train as fast, write checkpoints as
cheaply, and have the best of twelve intervals between them; ``restart_s`` is how long they take from a loss until all
train again, reading 1 GB not counted. Parcae's repository sweeps 17 to 300 s for that.

``of_restart_least``, ``of_varuna_like_least``, ``of_bamboo_like_least``: everstep's goodput over theirs; the least of
all stories. Bamboo's redundant work is taken as free, so its row is more than it would reach. ``bamboo_free``: its
pause after a loss, too, is as short as everstep's, which no system reaches; there is no aim for it.
``bamboo_break_even``: the share of a step that its redundancy may cost then until everstep is as good in all stories.
``curve``: 16 machines, each of which goes after so long on average, at any moment, and is replaced after two minutes.

``parcae_HOURS``: the four hours of the Bamboo recording that Parcae (NSDI '24) trains in: ``hh`` 5.5 to 6.5, ``hl`` 1.5
to 2.5, ``lh`` 8 to 9, ``ll`` 10 to 11. The first letter says whether many machines are there, the second whether many
go (both high or low). ``restart_Ns``: with that of its costs of a restart. State goes from machine to machine as fast
as it measured there, 1 GiB in 1.2 s. Parcae's planner itself is not rebuilt: it predicts losses, and picks pipelines.
Its figures are for models that are cut into stages, ours for a whole copy of 1 GB on each machine.
"""

from __future__ import annotations

from benchmarks._measure import ROOT, Result, each_round, median, say, spread
from everstep.config.spec import JobSpec
from everstep.model.capacity import Market, Offer
from everstep.platforms.trace_capacity import read_trace
from everstep.platforms.trace_variants import between, by_chance
from everstep.sim.elastic.forecast import Story, others, stories, virtual, work_of
from everstep.sim.elastic.job_model import Figure, MeasuredJob

SPOT = ROOT / "benchmarks" / "traces" / "spot"
TRACES = {  # the recording, and hours of a job there
    "aws_west_2c": ("us-west-2c_v100_1.json.gz", 40.0),
    "aws_east_1f": ("us-east-1f_v100_1.json.gz", 40.0),
    "aws_west_2a": ("us-west-2a_v100_1.json.gz", 40.0),
    "bamboo_p3": ("p3-trace.csv.gz", 8.0),
    "bamboo_g4dn": ("g4dn-trace.csv.gz", 8.0),
    "gcp_a100": ("a100x1-east1b.txt.gz", 12.0),
}
PARCAE = {"hh": (5.5, 6.5), "hl": (1.5, 2.5), "lh": (8.0, 9.0), "ll": (10.0, 11.0)}  # hours of its recording
PARCAE_MODEL = MeasuredJob({"copy_bytes_per_s": Figure((1 << 30) / 1.198256, "measured by Parcae on p3.2xlarge")})
BETWEEN_S = {"1m": 60.0, "10m": 600.0, "1h": 3600.0, "6h": 21_600.0, "1d": 86_400.0}
RESTARTS_S = (17.0, 60.0, 300.0)
SPEC = JobSpec(mode="allreduce", ps=0, checkpoint_every="30m")
OFFER = Offer("recorded", "", Market.SPOT)
LIMIT_S = 90 * 86_400.0


def _one(story: Story, hours: float, restart_s: float) -> dict[str, float]:
    """Return goodput by name."""
    model = MeasuredJob()
    lives = ((life.begin_s, story.trace.length_s if life.end_s is None else life.end_s) for life in story.trace.lives)
    alive = 1 + sum(end - begin for begin, end in lives) / max(1.0, story.trace.length_s)
    work = work_of(int(hours * 3600 * model.rate(1) * alive), 1, model.batch_samples)
    ours = virtual(SPEC, work, model, story, 0.0, LIMIT_S)
    theirs = others(SPEC, work, model, story, LIMIT_S, restart_s)
    return {"everstep": ours.goodput, **{name: ruled.outcome.goodput for name, ruled in theirs.items()}}


def _parcae(hours: tuple[float, float]) -> dict[str, float]:
    """Return goodput by name within one hour of the recording, whatever is left to train at its end."""
    begin_s, end_s = (hour * 3600 for hour in hours)
    trace = between(read_trace(SPOT / TRACES["bamboo_p3"][0]), begin_s, end_s)
    story, length_s = Story(trace, OFFER, trace.most), end_s - begin_s
    work = work_of(int(2 * length_s * PARCAE_MODEL.rate(1 + trace.most)), 1, PARCAE_MODEL.batch_samples)
    found = {"everstep": virtual(SPEC, work, PARCAE_MODEL, story, 0.0, length_s).goodput}
    for restart_s in RESTARTS_S:
        for who, ruled in others(SPEC, work, PARCAE_MODEL, story, length_s, restart_s).items():
            if who != "restart_young":
                found[f"restart_{restart_s:.0f}s.{who}"] = ruled.outcome.goodput
    return found


def run(quick: bool) -> Result:
    """Play all recordings from several moments on, the hours of Parcae, and the curve."""
    seeds = 1 if quick else 3
    traces = dict(list(TRACES.items())[2:4]) if quick else TRACES
    between = {name: s for name, s in BETWEEN_S.items() if not quick or name in ("10m", "1h")}
    figures: dict[str, float] = {}
    spreads: dict[str, tuple[float, float]] = {}
    ratios: dict[str, list[float]] = {"restart": [], "varuna_like": [], "bamboo_like": [], "bamboo_free": []}
    for name, (file, hours) in traces.items():
        trace = read_trace(SPOT / file)
        found = [_one(story, hours / (6 if quick else 1), 60.0) for story in stories(trace, OFFER, 0, seeds)]
        for who in found[0]:
            values = [one[who] for one in found]
            figures[f"{name}.{who}"], spreads[f"{name}.{who}"] = median(values), spread(values)
        for who, all_ in ratios.items():
            all_ += [one["everstep"] / one[who] for one in found]
        say(f"{name}: {found[0]}")
    for name, hours in PARCAE.items():
        parcae = _parcae(hours)
        figures |= {f"parcae_{name}.{who}": value for who, value in parcae.items()}
        for key, value in parcae.items():
            if key != "everstep":
                ratios[key.partition(".")[2]].append(parcae["everstep"] / value)
        say(f"parcae {name}: {parcae}")
    for restart_s in () if quick else RESTARTS_S:
        found = [_one(s, 8.0, restart_s) for s in stories(read_trace(SPOT / TRACES["bamboo_p3"][0]), OFFER, 0, seeds)]
        for who in ("everstep", "restart", "varuna_like"):
            name = f"bamboo_p3.restart_{restart_s:.0f}s.{who}"
            figures[name], spreads[name] = median([o[who] for o in found]), spread([o[who] for o in found])
    for name, between_s in between.items():
        values: dict[str, list[float]] = {}
        for seed in each_round(seeds):
            trace = by_chance(15, 86_400.0, between_s, 120.0, seed)
            for who, goodput in _one(Story(trace, OFFER, 15), 1.0 if quick else 4.0, 60.0).items():
                values.setdefault(who, []).append(goodput)
        for who, all_ in values.items():
            figures[f"curve_{name}.{who}"], spreads[f"curve_{name}.{who}"] = median(all_), spread(all_)
        for who, all_ in ratios.items():
            all_ += [a / b for a, b in zip(values["everstep"], values[who], strict=True)]
        say(f"one goes after {name}: {figures[f'curve_{name}.everstep']:.3f}")
    free = ratios.pop("bamboo_free")
    figures["bamboo_break_even"] = max(0.0, 1.0 - min(free))
    figures["of_bamboo_free_least"], spreads["of_bamboo_free_least"] = min(free), spread(free)
    aims = {"curve_1h.everstep": ">= 0.95"}
    holds = {"curve_1h.everstep": figures["curve_1h.everstep"] >= 0.95}
    for who, all_ in ratios.items():
        figures[f"of_{who}_least"], aims[f"of_{who}_least"] = min(all_), ">= 1.0"
        spreads[f"of_{who}_least"], holds[f"of_{who}_least"] = spread(all_), min(all_) >= 1.0
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
