"""Reckons what two jobs would save on recorded machines at recorded prices, in virtual time: price and goodput apart.

Machines: ``traces/spot/us-east-1f`` (4 spot machines of AWS, 2023) beside one on demand, which stays; prices:
``traces/spot_prices`` (g2.2xlarge of one zone, June 2015, 0.65 USD on demand). The two recordings are of different
years and machines: the savings say how a price and a goodput combine, not what a cloud costs today.

``resnet``: 205 MB of parameters and state (25.6 million, SGD with momentum), 400 samples/s a worker. ``bert``: 4.1 GB
(340 million, Adam), 50 samples/s. ACK reports savings of 92 % and 81 % for such jobs against pay-as-you-go.
saved = 1 - price_part / goodput_part; ``spot_saved``: of the spot machines alone. ``restart``: from a checkpoint, with
the best interval, 60 s.
"""

from __future__ import annotations

from benchmarks._measure import ROOT, Result, median, say, spread
from everstep.cli.cost import parse_at
from everstep.config.spec import JobSpec
from everstep.model.capacity import Market, Offer
from everstep.monitor.node_costs import reckon
from everstep.monitor.price_files import read_prices
from everstep.platforms.trace_capacity import read_trace
from everstep.sim.elastic.forecast import others, stories, virtual, work_of
from everstep.sim.elastic.job_model import Figure, MeasuredJob

TRACES = ROOT / "benchmarks" / "traces"
CLASS, ZONE = "g2.2xlarge", "us-east-1e"
BEGAN = "2015-06-02T00:00:00Z"
JOBS = {"resnet": (205e6, 400.0), "bert": (4.1e9, 50.0)}
HOURS = 24.0
LIMIT_S = 40 * 86_400.0


def run(quick: bool) -> Result:
    """Play both jobs from several moments of the recording on."""
    trace = read_trace(TRACES / "spot" / "us-east-1f_v100_1.json.gz")
    book = read_prices(TRACES / "spot_prices" / "g2.2xlarge_us-east-1e_2015-06.csv.gz")
    began = parse_at(BEGAN) or 0.0
    spec = JobSpec(mode="allreduce", ps=0, checkpoint_every="30m", hardware=CLASS, zone=ZONE)
    figures: dict[str, float] = {}
    spreads: dict[str, tuple[float, float]] = {}
    least = 1.0
    for job, (state, rate) in JOBS.items():
        model = MeasuredJob({"state_bytes": Figure(state, "told"), "samples_per_s": Figure(rate, "told")})
        work = work_of(int((12.0 if quick else HOURS) * 3600 * rate * 4), 1, model.batch_samples)
        values: dict[str, list[float]] = {}
        for story in stories(trace, Offer(CLASS, ZONE, Market.SPOT), 0, 4 if quick else 6):
            ours = virtual(spec, work, model, story, 0.0, LIMIT_S)
            theirs = others(spec, work, model, story, LIMIT_S, 60.0)["restart"].outcome
            for who, outcome in (("everstep", ours), ("restart", theirs)):
                costs = reckon(outcome.machines, (), book, began)
                spot = reckon([m for m in outcome.machines if m.market is Market.SPOT], (), book, began)
                found = {
                    "price_part": costs.price_part,
                    "spot_price_part": spot.price_part,
                    "goodput_part": outcome.goodput,
                    "saved": costs.saved(outcome.goodput),
                    "spot_saved": spot.saved(outcome.goodput),
                    "usd": costs.spent.usd,
                }
                for name, value in found.items():
                    if value is not None:  # (in some stories there is no spot machine)
                        values.setdefault(f"{job}.{who}.{name}", []).append(value)
        for name, all_ in values.items():
            figures[name], spreads[name] = median(all_), spread(all_)
        least = min(least, *values[f"{job}.everstep.goodput_part"])
        say(f"{job}: saved {figures[f'{job}.everstep.saved']:.3f}, restart {figures[f'{job}.restart.saved']:.3f}")
    figures["goodput_part_least"] = least
    return {
        "figures": figures,
        "aims": {"goodput_part_least": ">= 0.95"},
        "holds": {"goodput_part_least": least >= 0.95},
        "spread": spreads,
    }
