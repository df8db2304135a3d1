"""Policies for spot machines: by hand, and on what clouds recorded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from everstep.ids import NodeId
from everstep.model.capacity import Market, Offer
from everstep.monitor.node_costs import MachineSpan
from everstep.platforms.trace_capacity import read_trace
from everstep.platforms.traces import Trace
from everstep.policies.spot import (
    PRIOR_S,
    STAYS_S,
    Hazard,
    KnownOffer,
    SpotSeen,
    ask_for,
    by_hazard,
    checkpoint_interval_s,
    on_demand_now,
    parity_level,
    safe_ps,
    seen_hazard,
    usd_per_sample,
)
from everstep.sim.elastic.baselines import Rule, best, run_rule
from everstep.sim.elastic.job_model import Figure, MeasuredJob
from everstep.sim.elastic.outcome import Outcome

SPOT = Path(__file__).parents[2] / "benchmarks" / "traces" / "spot"
RECORDED = ["us-west-2c_v100_1.json.gz", "us-east-1f_v100_1.json.gz", "p3-trace.csv.gz", "g4dn-trace.csv.gz"]


def hazard_of(trace: Trace, until_s: float) -> Hazard:
    return seen_hazard([(life.begin_s, life.end_s) for life in trace.lives], until_s)


def test_a_hazard_by_hand() -> None:
    spans = [(0.0, 100.0), (0.0, 100.0), (50.0, 250.0), (0.0, None), (500.0, 600.0)]
    found = seen_hazard(spans, 300.0)
    assert found == Hazard(100 + 100 + 200 + 300, 3, 0.5, 2)
    assert found.between_s == pytest.approx((700 + PRIOR_S) / 4)
    assert Hazard().between_s == PRIOR_S  # nothing was seen yet


def test_an_interval_by_hand() -> None:
    assert checkpoint_interval_s(50.0, 0.1, 1000.0) == pytest.approx(math.sqrt(2 * 5 * 1000))
    assert checkpoint_interval_s(50.0, 0.1, 10.0) == 50.0  # not shorter than it takes
    assert checkpoint_interval_s(50.0, 1.0, 1e12) == 6 * 3600.0


@pytest.mark.parametrize("file", RECORDED)
def test_the_interval_of_the_first_half_serves_in_the_second(file: str) -> None:
    """A job that begins again after each loss, with the interval that the hazard of the first half calls for, comes
    close to the best one of the second half."""
    trace = read_trace(SPOT / file)
    half_s = trace.length_s / 2
    seen = hazard_of(trace, half_s)
    figures = {"state_bytes": 3e9, "checkpoint_bytes_per_s": 1e8, "stall": 0.5}  # 30 s a checkpoint, 15 s of them lost
    model = MeasuredJob({name: Figure(value, "here") for name, value in figures.items()})
    alive = 1.0 + seen.held_s / half_s
    interval_s = checkpoint_interval_s(model.write_s(full=True), model.stall, seen.between_s / alive)
    later = [
        MachineSpan(
            NodeId(f"m{n}"),
            "",
            "",
            Market.SPOT,
            max(0.0, life.begin_s - half_s),
            -1.0 if life.end_s is None else life.end_s - half_s,
            None,
            1,
        )
        for n, life in enumerate(trace.lives)
        if life.end_s is None or life.end_s > half_s
    ]
    home = MachineSpan(NodeId("node0"), "", "", Market.ON_DEMAND, 0.0, -1.0, None, 1)

    def goodput(every_s: float) -> Outcome:
        return run_rule(Rule("restart", every_s, 60.0, "at checkpoint"), later, home, model, 1 << 50, half_s)

    _, at_best = best(goodput, (160.0, 640.0, 2560.0, 10240.0))
    assert goodput(interval_s).goodput > 0.9 * at_best.goodput


def test_the_parity_that_the_hazard_calls_for() -> None:
    calm = SpotSeen(Hazard(1e9, 10), 8.0, ps=6, write_s=10.0)
    rough = SpotSeen(Hazard(1e6, 600, together=0.4, most=3), 8.0, ps=6, state_bytes=2e10, write_s=200.0, stall=0.5)
    assert parity_level(calm) == "0"
    assert parity_level(rough) not in ("", "0")
    assert by_hazard(calm).interval_s > by_hazard(calm._replace(hazard=rough.hazard)).interval_s
    assert by_hazard(rough._replace(ps=1)).parity == ""
    assert by_hazard(rough).safe_ps == 6 - int(by_hazard(rough).parity.partition("+")[2])
    alone = rough._replace(ps=0, saves_itself=True)
    assert by_hazard(alone).interval_s > by_hazard(rough._replace(ps=0)).interval_s


def test_reclaims_take_nothing_that_a_machine_that_stays_has() -> None:
    """A checkpoint is written for the day on which that machine fails, however often the others go."""
    rough = SpotSeen(Hazard(1e5, 600, together=0.9, most=3), 8.0, write_s=3.0, saves_itself=True)
    safe = rough._replace(stays=True)
    assert by_hazard(safe).interval_s > 5 * by_hazard(rough).interval_s
    assert by_hazard(safe).interval_s == by_hazard(safe._replace(hazard=Hazard(1e9, 10))).interval_s
    assert by_hazard(safe).interval_s == pytest.approx(math.sqrt(2 * 3.0 * safe.stall * STAYS_S), rel=0.01)
    assert "a machine that stays has all state" in by_hazard(safe).why


def test_ps_that_belong_on_machines_that_stay() -> None:
    assert safe_ps(6, "0", together=1) == 6
    assert safe_ps(6, "4+1", together=1) == 0  # what goes at one moment, parity rebuilds
    assert safe_ps(6, "4+1", together=3) == 5
    assert safe_ps(6, "4+2", together=2) == 0


def known(zone: str, price: float | None, between_s: float, count: int = 8, **more: float) -> KnownOffer:
    held_s = 100 * between_s - PRIOR_S
    return KnownOffer(Offer("g5", zone, Market.SPOT, price, count), Hazard(held_s, 99), **more)


def test_the_cheapest_useful_samples_first() -> None:
    calm, rough = known("a", 1.1, 36_000.0), known("b", 1.0, 600.0)
    stays = KnownOffer(Offer("g5", "c", Market.ON_DEMAND, 3.0, 99), Hazard())
    assert [(o.zone, n) for o, n in ask_for([rough, calm, stays], 10, lost_s=120.0)] == [("a", 8), ("b", 2)]
    assert [o.zone for o, _ in ask_for([rough, calm, stays], 10, lost_s=0.0)] == ["b", "a"]  # a loss costs nothing
    spread = ask_for([rough, calm, stays], 10, lost_s=120.0, share=0.4)
    assert [(o.zone, n) for o, n in spread] == [("a", 4), ("b", 4), ("c", 2)]
    assert usd_per_sample(known("d", None, 600.0), 1.0) == math.inf
    fast = known("e", 2.0, 36_000.0, samples_per_s=3.0)
    assert ask_for([calm, fast], 1, lost_s=120.0)[0][0].zone == "e"
    assert ask_for([], 3, 1.0) == []


def test_the_calmer_zone_stays_calmer() -> None:
    """Of two recorded zones, the one with the longer lives in the first third has them afterwards, too."""
    zones = {zone: read_trace(SPOT / f"{zone}_v100_1.json.gz") for zone in ("us-west-2c", "us-east-1f")}
    before = {zone: hazard_of(trace, trace.length_s / 3) for zone, trace in zones.items()}
    offers = [KnownOffer(Offer("v100", zone, Market.SPOT, 1.0, 4), hazard) for zone, hazard in before.items()]
    chosen = ask_for(offers, 1, lost_s=600.0)[0][0].zone
    all_ = {zone: hazard_of(trace, trace.length_s).between_s for zone, trace in zones.items()}
    assert all_[chosen] == max(all_.values())


def test_when_machines_that_stay_are_due() -> None:
    assert not on_demand_now(work_s=3600.0, left_s=7200.0, start_s=60.0)
    assert on_demand_now(work_s=3600.0, left_s=4000.0, start_s=60.0)
    assert on_demand_now(1.0, 1e9, 60.0, waited_s=600.0, wait_s=600.0)
    assert not on_demand_now(1.0, 1e9, 60.0, waited_s=599.0, wait_s=600.0)
