"""Whole jobs in virtual time on machines that come and go; and what others would do with the same machines."""

from __future__ import annotations

import math
from typing import Any

import pytest

from everstep.brain.events import Event, StepsCommitted
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.model.capacity import Market, Offer
from everstep.monitor.node_costs import MachineSpan
from everstep.monitor.spending import read_spending
from everstep.platforms.trace_variants import by_chance
from everstep.platforms.traces import MachineLife, Trace, TraceMarket, timeline_of
from everstep.sim.elastic.baselines import Rule, best, run_rule, young
from everstep.sim.elastic.forecast import Story, machines_of, others, stories, virtual, work_of
from everstep.sim.elastic.job_model import Figure, MeasuredJob, figure_lines, parse_figure
from everstep.sim.elastic.outcome import WorkMeter
from everstep.sim.elastic.recorded_job import RecordedJob
from everstep.sim.elastic.virtual_job import VirtualJob, Work

OFFER = Offer("g5", "a", Market.SPOT)
MODES: dict[str, dict[str, Any]] = {
    "ps": {"ps": 2, "parity": "1+1"},
    "plain": {"ps": 1, "checkpoint_every": "10m"},
    "allreduce": {"mode": "allreduce", "ps": 0, "checkpoint_every": "10m"},
    "fixed": {"mode": "allreduce", "ps": 0, "strategy": "fixed"},
    "spread": {"ps": 4, "parity": "2+1", "capacity_ps": 1, "checkpoint_every": "10m"},
    "hybrid": {"mode": "allreduce", "ps": 1, "checkpoint_every": "10m"},
}
RELIABLE = MeasuredJob({"protecting": Figure(0.0, "here")})


def spec_of(mode: str, **more: Any) -> JobSpec:
    return JobSpec(**{"workers": 1, **MODES[mode], **more})


def job_on(trace: Trace, spec: JobSpec, work: Work, lead_s: float = 0.0, **more: Any) -> VirtualJob:
    market = TraceMarket(trace, timeline_of(trace, 1.0), OFFER, lead_s)
    return VirtualJob(spec, work, more.pop("model", RELIABLE), market, trace.most, **more)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lead_s", [0.0, 30.0])
def test_every_mode_trains_all_through_many_reclaims(mode: str, lead_s: float) -> None:
    trace = by_chance(6, 50_000.0, between_s=1800.0, back_s=120.0, seed=5)
    work = Work(10_000_000, 3, 20_000)
    job = job_on(trace, spec_of(mode), work, lead_s)
    found = job.run(10 * 86400.0)
    assert found.ended and not found.why
    assert found.samples == work.samples
    assert found.reclaims > 5
    assert 0.9 < found.goodput <= 1.0
    job.brain.validate()
    assert sum(b.trains for b in found.bins) > 0


def test_one_machine_alone_by_hand() -> None:
    found = job_on(Trace((), 0.0, 0), spec_of("allreduce"), Work(100_000, 1, 1000)).run(1000.0)
    # 1000 samples a second: 100 s, and a fork, a formation
    assert found.ended and 100.0 < found.length_s < 102.0
    assert found.could == pytest.approx(1000.0 * found.length_s)
    assert [m.node for m in found.machines] == ["node0"]


def test_a_fall_to_nothing_and_back() -> None:
    lives = (MachineLife(0.0, 500.0), MachineLife(0.0, 500.0), MachineLife(2000.0, None))
    for mode in ("ps", "allreduce"):
        found = job_on(Trace(lives, 5000.0, 2), spec_of(mode), Work(4_000_000, 1, 10_000)).run(10_000.0)
        assert found.ended and found.samples == 4_000_000
        assert found.reclaims == found.losses == 2


def test_a_loss_that_nobody_told_of_costs_more() -> None:
    trace = by_chance(4, 20_000.0, between_s=900.0, back_s=60.0, seed=2)
    told = job_on(trace, spec_of("allreduce"), Work(30_000_000, 1, 10_000)).run(1e6)
    late = RELIABLE.with_figures({"detect_s": Figure(30.0, "here")})
    silent = job_on(trace, spec_of("allreduce"), Work(30_000_000, 1, 10_000), model=late).run(1e6)
    assert silent.ended and silent.goodput < told.goodput - 0.02


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_machine_that_is_told_to_go_before_it_has_joined_trains_nothing(mode: str) -> None:
    """Its whole life is shorter than the notice: its agent finds the notice when it is up."""
    brief = tuple(MachineLife(at, at + 50.0) for at in (100.0, 300.0, 500.0))
    told, silent = (
        job_on(Trace(brief, 1000.0, 1), spec_of(mode), Work(10**9, 1, 1000), s).run(900.0) for s in (60.0, 0.0)
    )
    assert told.reclaims == silent.reclaims == 3
    assert told.samples == pytest.approx(900_000, rel=0.02)  # of the machine that stays
    assert silent.samples > 1_020_000


def test_a_job_waits_for_members_as_its_settings_say() -> None:
    lives = (MachineLife(0.0, 500.0), MachineLife(0.0, 500.0))
    spec = spec_of("allreduce", min_workers=2, max_wait="10m", on_wait_timeout="suspend", model_to="none")
    found = job_on(Trace(lives, 5000.0, 2), spec, Work(40_000_000, 1, 10_000)).run(50_000.0)
    assert not found.ended and "suspended" in found.why
    assert 1000.0 < found.length_s < 1500.0  # 500 s, and ten minutes of a wait
    ran = spec_of("allreduce", min_workers=2, max_wait="10m", on_wait_timeout="run")
    assert job_on(Trace(lives, 5000.0, 2), ran, Work(4_000_000, 1, 10_000)).run(50_000.0).ended


def test_not_over_in_time_is_said() -> None:
    found = job_on(Trace((), 0.0, 0), spec_of("ps"), Work(10_000_000, 1, 100_000)).run(100.0)
    assert not found.ended and "not over after" in found.why
    assert found.samples == pytest.approx(100_000, rel=0.05)  # also of shards that are not done
    assert found.length_s == 100.0


def test_the_same_seed_gives_the_same_story() -> None:
    trace = by_chance(5, 20_000.0, between_s=900.0, back_s=60.0, seed=2)
    work = Work(20_000_000, 1, 20_000)
    one, two = (job_on(trace, spec_of("ps"), work, seed=4).run(1e6) for _ in range(2))
    assert (one.length_s, one.could, one.events) == (two.length_s, two.could, two.events)


@pytest.mark.parametrize("mode", ["plain", "allreduce"])
def test_the_ledger_and_the_model_read_the_same_events(mode: str) -> None:
    """What ``everstep cost`` says of the journal of a virtual job, and the model that its journal gives."""
    trace = by_chance(4, 20_000.0, between_s=1200.0, back_s=100.0, seed=8)
    job = job_on(trace, spec_of(mode), Work(5_000_000, 4, 20_000), keep_events=True)
    found = job.run(1e6)
    assert job.events is not None
    ledger = read_spending(job.events)
    goodput = ledger.goodput()
    assert goodput == pytest.approx(found.goodput, abs=0.03)
    assert len(ledger.machines()) >= found.reclaims
    recorded = RecordedJob()
    for event in job.events:
        recorded.take(event)
    model = recorded.model("here")
    assert model.rate(1) == pytest.approx(1000.0, rel=0.05)
    assert model.fork_s == pytest.approx(RELIABLE.fork_s, rel=0.3)
    assert model.agent_s == pytest.approx(RELIABLE.agent_s, rel=0.3)
    assert "measured in here" in "\n".join(figure_lines(model))
    assert recorded.work() == job.work
    if mode == "allreduce":
        assert model.rate(3) == pytest.approx(3000.0, rel=0.1)
        assert 0.0 <= model.meet_s < 1.0


def test_a_speed_that_was_measured_beside_parity_is_not_made_slower_for_it_once_more() -> None:
    """A virtual job with the times of a recorded run trains as fast as that run did."""
    trace = by_chance(2, 20_000.0, between_s=50_000.0, back_s=100.0, seed=3)
    spec, work = JobSpec(workers=1, ps=2, parity="1+1"), Work(2_000_000, 1, 20_000)
    job = job_on(trace, spec, work, model=MeasuredJob(), keep_events=True)
    found = job.run(1e6)
    recorded = RecordedJob()
    for event in job.events or ():
        recorded.take(event)
    model = recorded.model("here")
    assert model.rate(1) == pytest.approx(1000.0, rel=0.02)
    assert "without the cost of parity 1+1" in model.figures["samples_per_s"].source
    assert job_on(trace, spec, work, model=model).run(1e6).length_s == pytest.approx(found.length_s, rel=0.02)


def test_a_run_that_trained_nothing_tells_no_speed() -> None:
    with pytest.raises(ConfigError, match="trained too little"):
        RecordedJob().model("there")
    with pytest.raises(ConfigError, match="nobody asked for data"):
        RecordedJob().work()


def test_stories_begin_at_other_moments() -> None:
    trace = by_chance(5, 20_000.0, between_s=900.0, back_s=60.0, seed=2)
    found = list(stories(trace, OFFER, 0, 3))
    assert [s.begins_s == 0 for s in found] == [True, False, False]
    assert len({s.trace.lives for s in found}) == 3
    assert next(stories(trace, OFFER, 20, 1)).trace.most > 5


# ------------------------------------------------------------ others


HOME = MachineSpan(NodeId("node0"), "g5", "a", Market.ON_DEMAND, 0.0, -1.0, None, 1)
QUICK = MeasuredJob(
    {
        "agent_s": Figure(0.0, ""),
        "fork_s": Figure(0.0, ""),
        "stall": Figure(0.0, ""),
        "state_bytes": Figure(0.0, ""),
        "meet_s": Figure(1.0, ""),
    }
)


def spot(begin: float, end: float) -> MachineSpan:
    return MachineSpan(NodeId(f"s{begin}"), "g5", "a", Market.SPOT, begin, end, None, 1)


def test_a_restart_by_hand() -> None:
    """Two machines from 0 on; one goes at 250, where the newest checkpoint is of 200: 50 s of both are lost, and 20 s
    of a restart; then one alone trains the rest of 600,000 samples."""
    found = run_rule(Rule("restart", 100.0, 20.0), [spot(0.0, 250.0)], HOME, QUICK, 600_000, 1e5)
    assert found.ended and found.samples == 600_000
    assert found.length_s == pytest.approx(250 + 20 + 200)  # 200 s x 2,000 are kept, 200,000 are left
    assert found.could == pytest.approx(250 * 2000 + 220 * 1000)
    assert sum(b.trains for b in found.bins) * 60 == pytest.approx(600_000 + 50 * 2000)  # (50 s of both are done again)
    assert (found.reclaims, found.losses) == (1, 1)


def test_rounding_keeps_no_rule_from_its_end() -> None:
    machines = [spot(n * 700.1, n * 700.1 + 633.3) for n in range(50)]
    for interval_s in (12.618821936279792, 33.3, 77.7):
        found = run_rule(Rule("r", interval_s, 17.3, "at checkpoint"), machines, HOME, MeasuredJob(), 11_374_054, 1e6)
        assert found.ended and found.samples == 11_374_054


def test_newcomers_enter_by_the_rule() -> None:
    late = [spot(150.0, -1.0)]
    alone = run_rule(Rule("r", 100.0, 20.0), late, HOME, QUICK, 500_000, 1e5)
    saved = run_rule(Rule("r", 100.0, 20.0, "at checkpoint"), late, HOME, QUICK, 500_000, 1e5)
    once = run_rule(Rule("r", 100.0, 20.0, "at once"), late, HOME, QUICK, 500_000, 1e5)
    assert alone.length_s == pytest.approx(500)
    assert saved.length_s == pytest.approx(200 + 20 + 150)
    assert once.length_s == pytest.approx(150 + 20 + 175)


def test_redundant_neighbours_outlive_one_and_not_two() -> None:
    rule = Rule("bamboo_like", 1000.0, 50.0, "at once", True)
    one = run_rule(rule, [spot(0.0, 100.0), spot(0.0, -1.0), spot(0.0, -1.0)], HOME, QUICK, 1_000_000, 1e5)
    two = run_rule(rule, [spot(0.0, 100.0), spot(0.0, 100.0), spot(0.0, -1.0)], HOME, QUICK, 1_000_000, 1e5)
    assert one.length_s == pytest.approx(100 + 1 + 200)  # 400,000 done, 600,000 by three
    assert two.length_s == pytest.approx(100 + 50 + 500)  # all again, by two
    longer = rule._replace(meet_s=5.0)
    one = run_rule(longer, [spot(0.0, 100.0), spot(0.0, -1.0), spot(0.0, -1.0)], HOME, QUICK, 1_000_000, 1e5)
    assert one.length_s == pytest.approx(100 + 5 + 200)


@pytest.mark.parametrize("between_s", [600.0, 14_400.0])
def test_never_below_what_others_do(between_s: float) -> None:
    trace = by_chance(8, 40_000.0, between_s=between_s, back_s=60.0, seed=3)
    story = Story(trace, OFFER, trace.most)
    spec = spec_of("allreduce")
    work = work_of(40_000_000, 1, 500)
    ours = virtual(spec, work, RELIABLE, story, 0.0, 1e6)
    theirs = others(spec, work, RELIABLE, story, 1e6, 17.0)
    assert set(theirs) == {"restart", "restart_young", "varuna_like", "bamboo_like", "bamboo_free"}
    free = theirs.pop("bamboo_free").outcome
    assert ours.goodput > 0.99 * free.goodput >= 0.99 * theirs["bamboo_like"].outcome.goodput
    for name, ruled in theirs.items():
        assert ours.goodput > ruled.outcome.goodput, name
        assert ours.length_s < ruled.outcome.length_s, name
    assert len(machines_of(story, 1, 1e6)) == len(trace.lives)


def test_the_best_interval_is_found() -> None:
    machines = [spot(n * 300.0, n * 300.0 + 250.0) for n in range(40)]
    costly = QUICK.with_figures({"state_bytes": Figure(3e9, ""), "stall": Figure(1.0, "")})  # 10 s each
    interval_s, found = best(
        lambda s: run_rule(Rule("r", s, 5.0, "at checkpoint"), machines, HOME, costly, 6_000_000, 1e6)
    )
    worst = run_rule(Rule("r", 10.0, 5.0, "at checkpoint"), machines, HOME, costly, 6_000_000, 1e6)
    assert interval_s > 10.0 and found.length_s < worst.length_s
    assert young(costly, 40, 12_000.0) == pytest.approx(math.sqrt(2 * 10 * 300))


# ------------------------------------------------------------ numbers


def test_numbers_of_a_job() -> None:
    assert parse_figure("state_bytes=2GB")[1].value == 2e9
    assert parse_figure("checkpoint_bytes_per_s=100MB/s")[1].value == 1e8
    assert parse_figure("meet_s=200ms")[1].value == pytest.approx(0.2)
    measured = MeasuredJob(rates=[(2, 1800.0), (4, 3000.0)])
    assert [measured.rate(n) for n in (0, 1, 2, 3, 4, 8)] == [0.0, 900.0, 1800.0, 2400.0, 3000.0, 6000.0]


@pytest.mark.parametrize(
    "text",
    ["nothing=1", "meet_s", "meet_s=-1", "stall=2", "samples_per_s=0", "samples_per_s=nan", "meet_s=soon", "fork_s=1x"],
)
def test_a_wrong_number_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_figure(text)
    assert str(caught.value).startswith(f"--assume '{text}'") and "\n" not in str(caught.value)


def test_a_meter_keeps_few_spans() -> None:
    meter = WorkMeter(MeasuredJob())
    meter.places(0.0, 2)
    meter.trains(0.0, 1000.0)
    meter.close(1e6)
    assert meter.could == pytest.approx(2e9)
    bins = meter.bins()
    assert 50 < len(bins) <= 200
    assert all(b.could == pytest.approx(2000.0) for b in bins[:-1])


def test_workers_that_start_at_a_time_need_as_long_as_those_of_the_run() -> None:
    measured = MeasuredJob(forks=[(3, 6.0), (1, 4.0)])
    assert [measured.start_s(n) for n in (0, 1, 2, 3, 9)] == [4.0, 4.0, 4.0, 6.0, 6.0]
    told = measured.with_figures({"fork_s": Figure(1.0, "told")})
    assert MeasuredJob().start_s(7) == MeasuredJob().fork_s and told.start_s(3) == 1.0
    lives = tuple(MachineLife(begin, None) for begin in (20.0, 20.0, 20.0, 100.0))
    work = Work(2_000_000, 1, 20_000)
    job = job_on(Trace(lives, 5000.0, 4), spec_of("plain"), work, model=measured, keep_events=True)
    assert job.run(1e6).ended
    recorded = RecordedJob()
    for event in job.events or ():
        recorded.take(event)
    ((together, took_s),) = recorded.model("here").forks
    assert together == 3 and took_s == pytest.approx(6.0, rel=0.2)


def test_steps_that_several_members_tell_of_count_once() -> None:
    """Each member that leaves a group tells of its last steps once more, and the brain takes that."""
    trace = by_chance(4, 20_000.0, between_s=1200.0, back_s=100.0, seed=8)
    job = job_on(trace, spec_of("allreduce"), Work(5_000_000, 4, 20_000), keep_events=True)
    job.run(1e6)
    once, again = RecordedJob(), RecordedJob()
    for event in job.events or ():
        once.take(event)
        again.take(event)
        if isinstance(event.fact, StepsCommitted):
            again.take(Event(event.at + 0.2, event.fact, event.sender))
    assert again.model("here").rates == once.model("here").rates
