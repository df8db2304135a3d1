"""The ledger of a running job: the same sums as ``everstep cost`` finds in the journal, and the job's budget."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CapacityChanged,
    Event,
    FactType,
    JobUnsuspended,
    MasterStarted,
    NodeJoined,
    NodeLost,
    Note,
    SpendingNoted,
    SuspendAsked,
)
from everstep.brain.job import Phase
from everstep.cli.display import JobSummary
from everstep.cli.run import priced
from everstep.cli.suspend import with_budget
from everstep.config.load import check_spec, save_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import Incarnation, NodeId
from everstep.master.costs import CostController
from everstep.model.capacity import CapacityStep, Market
from everstep.model.decision import Decision
from everstep.model.spent import Spent
from everstep.monitor.live_costs import LiveCosts
from everstep.monitor.node_costs import reckon
from everstep.monitor.prices import parse_prices
from everstep.monitor.spending import read_spending
from everstep.policies.job_budget import LEAST_S, seconds_left, suspend_takes_s
from everstep.policies.node_selection import HOME_NODE

BEGAN, HOUR_S = 1000.0, 3600.0
BOOK = """class,zone,market,from,usd_per_hour
cpu,,on_demand,,1.0
g5,a,spot,1970-01-01T00:00:00Z,0.5
g5,a,spot,1970-01-01T01:00:00Z,2.0
g5,,on_demand,,4.0
"""
SPEC = JobSpec(workers=1, ps=1, partitions=4, hardware="cpu")
ONE = Incarnation(1)


def node(name: str, market: Market = Market.SPOT) -> NodeJoined:
    return NodeJoined(NodeId(name), "", 1, 0, hardware="g5", zone="a", market=market)


def home() -> NodeJoined:
    return NodeJoined(HOME_NODE, "", 0, 0, hardware="cpu", market=Market.ON_DEMAND)


def machine(name: str, step: CapacityStep, usd: float | None = None, life: int = 0) -> CapacityChanged:
    return CapacityChanged(NodeId(name), step, "g5", "a", Market.SPOT, usd, life=life)


def live(events: list[tuple[float, FactType]], end: float, again: int = -1) -> Spent:
    """Spent at ``end``. ``again``: after so many events a new master goes on with what was noted."""
    costs = LiveCosts(parse_prices(BOOK), Spent(), SPEC.lost_after_s)
    for n, (at, fact) in enumerate(events):
        if n == again:
            costs = LiveCosts(parse_prices(BOOK), costs.spent(), SPEC.lost_after_s)
        costs.take(Event(at, fact))
    costs.over(end)
    return costs.spent()


def test_one_case_by_hand() -> None:
    """One machine at 1 USD/h for 2 h, and one of spot from 0:30 to 1:30, whose price rises at 1:00 (1970)."""
    facts: list[tuple[float, FactType]] = [
        (0.1, MasterStarted(ONE, SPEC)),
        (0.1, home()),
        (1800.0, node("n1")),
        (5400.0, machine("n1", CapacityStep.TAKEN_BACK)),
    ]
    spent = live(facts, 7200.1)
    assert spent.usd == pytest.approx(2.0 + 0.5 * 0.5 + 0.5 * 2.0)
    assert spent.node_s == pytest.approx(3 * HOUR_S) and not spent.unknown_s and not spent.machines


@pytest.mark.parametrize("seed", range(8))
def test_the_sums_are_those_of_the_journal(seed: int) -> None:
    rng = random.Random(seed)
    facts: list[tuple[float, FactType]] = [(BEGAN, MasterStarted(ONE, SPEC)), (BEGAN, home())]
    at, lives = BEGAN, dict.fromkeys(("n1", "n2", "n3"), 0)
    for _ in range(40):
        at += rng.choice([20.0, 200.0, 1000.0])
        name = rng.choice(sorted(lives))
        step = rng.choice([CapacityStep.GRANTED, CapacityStep.TAKEN_BACK, CapacityStep.WARNED, None])
        if step is None:
            facts.append((at, node(name)))
        else:
            facts.append((at, machine(name, step, rng.choice([None, 0.7]), lives[name])))
            lives[name] += step is CapacityStep.GRANTED
    facts.append((at + 50.0, NodeLost(NodeId("n2"), "it is silent")))
    end = at + 60.0
    found = read_spending(Event(t, fact) for t, fact in [*facts, (end, SpendingNoted(Spent()))])
    by_journal = reckon(found.machines(), found.members(found.clock()), parse_prices(BOOK), found.began).spent
    for again in (-1, 5, 20):
        spent = live(facts, end, again)
        assert spent.usd == pytest.approx(by_journal.usd) and spent.node_s == pytest.approx(by_journal.seconds)


def test_a_machine_without_a_price_is_marked_and_a_clock_that_jumps_back_costs_nothing() -> None:
    costs = LiveCosts(parse_prices(BOOK), Spent(), 8.0)
    costs.take(Event(100.0, MasterStarted(ONE, SPEC)))
    costs.take(Event(100.0, NodeJoined(NodeId("x"), "", 1, 0, hardware="h100")))
    costs.advance(200.0)
    costs.advance(50.0)
    costs.advance(200.0)
    assert costs.spent().unknown_s == pytest.approx(100.0) and costs.spent().usd == 0.0
    assert [m.hardware for m in costs.unknown()] == ["h100"]


class Job:
    """A brain, and what the master tells it of costs."""

    def __init__(self, folder: Path, budget: float) -> None:
        prices = folder / "prices.csv"
        prices.write_text(BOOK)
        self.spec = JobSpec(workers=1, ps=1, partitions=4, prices=str(prices), budget=budget)
        self.brain, self.at, self.told = Brain(), BEGAN, list[FactType]()
        self.notes: list[Decision] = []
        self.costs = self.controller()
        self.tell(MasterStarted(ONE, self.spec, settles=True))

    def controller(self) -> CostController:
        return CostController(self.brain, self.spec, self.tell, lambda at, member, why: self.notes.append(why))

    def tell(self, fact: FactType) -> None:
        event = Event(self.at, fact)
        self.told.append(fact)
        for i in self.brain.handle(event):
            if isinstance(i, Note):
                self.notes.append(i.decision)
        self.costs.take(event)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.at += 1.0
            self.costs.tick(self.at)

    @property
    def asked(self) -> int:
        return sum(isinstance(fact, SuspendAsked) for fact in self.told)


def test_the_job_is_suspended_before_its_budget_is_exceeded(tmp_path: Path) -> None:
    job = Job(tmp_path, budget=0.02)  # 72 s of the first machine
    job.tell(home())
    job.run(72 - LEAST_S - 3)
    assert not job.asked
    job.run(6)
    assert job.asked == 1 and job.costs.view(job.at).usd < 0.02
    assert job.brain.job.phase is Phase.SUSPENDED, "nobody has trained: there is nothing to make safe"
    assert "of budget=0.02 are spent, at 1 USD/h" in job.brain.state.supervision.suspending


def test_time_suspended_costs_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, budget=0.0)
    job.tell(home())
    job.run(100)
    job.tell(SuspendAsked("by hand"))
    assert job.brain.job.phase is Phase.SUSPENDED
    job.costs.end(job.at)
    before = job.costs.view(job.at).usd
    assert before == pytest.approx(100 / HOUR_S, rel=1e-3)
    job.at += 5 * HOUR_S
    job.costs = job.controller()  # a new master, which unsuspend began
    assert job.costs.view(job.at).usd == pytest.approx(before, rel=1e-3)
    job.tell(JobUnsuspended(1, "capacity is back"))
    job.tell(MasterStarted(Incarnation(2), job.spec, settles=True))
    job.tell(home())
    job.run(100)
    assert job.costs.view(job.at).usd == pytest.approx(2 * before, rel=1e-2)


def test_the_ledger_is_noted_when_machines_change_and_once_a_minute(tmp_path: Path) -> None:
    job = Job(tmp_path, budget=0.0)
    job.tell(home())
    job.tell(NodeJoined(NodeId("x"), "", 1, 0, hardware="h100", market=Market.SPOT))
    job.run(300)
    assert 5 <= sum(isinstance(fact, SpendingNoted) for fact in job.told) <= 7
    assert job.brain.state.spent.usd > 0 and len(job.brain.state.spent.machines) == 2
    assert [d.reason for d in job.notes if d.action == "price unknown"] == [
        "h100, spot has no price: what it costs is not counted; name it in --prices"
    ]


def test_prices_that_are_gone_when_a_master_restarts_end_no_job(tmp_path: Path) -> None:
    job = Job(tmp_path, budget=0.02)
    job.tell(home())
    job.run(10)
    (tmp_path / "prices.csv").unlink()
    job.costs = job.controller()
    job.run(300)
    assert job.brain.job.exit_code is None and not job.asked
    assert [d.action for d in job.notes].count("price unknown") == 1


def test_when_a_budget_ends() -> None:
    assert seconds_left(1.0, 2.0, 3.0, 20.0) == 3600.0 - 20.0
    assert seconds_left(3.0, 0.0, 3.0, 20.0) == 0.0 and seconds_left(1.0, 0.0, 3.0, 20.0) == float("inf")
    assert suspend_takes_s(0.0) == LEAST_S and suspend_takes_s(30.0) > 30.0


def test_a_larger_budget_is_asked_for(tmp_path: Path) -> None:
    spec = JobSpec(name="j", script="x.py", prices="p.csv", budget=5.0)
    save_spec(tmp_path, spec, {})
    over = JobSummary(phase="suspended", spent_usd=4.9, budget_asked=True)
    with pytest.raises(ConfigError, match=r"4.9000 USD of budget=5 are spent: give a larger one"):
        with_budget(spec, tmp_path, over, None)
    with pytest.raises(ConfigError, match="larger"):
        with_budget(spec, tmp_path, over, 4.0)
    assert with_budget(spec, tmp_path, over, 9.0).budget == 9.0 and with_budget(spec, tmp_path, over, 0.0).budget == 0
    assert with_budget(spec, tmp_path, JobSummary(phase="suspended", spent_usd=1.0), None) == spec
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="budget"):
            with_budget(spec, tmp_path, over, bad)


def test_a_budget_needs_prices() -> None:
    with pytest.raises(ConfigError, match="budget = 5: nobody knows what machines cost; give prices"):
        check_spec(JobSpec(name="j", script="x.py", budget=5.0), {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("", "it is empty"),
        ("class,market,usd_per_hour\ng5,spot,-1\n", "line 2: usd_per_hour = '-1': expected USD for an hour, 0 to"),
        ("class,market,usd_per_hour\ng5,spot\n", "line 2: 2 cells, and the header has 3: is it truncated?"),
    ],
)
def test_prices_that_are_none_are_refused_before_the_job_starts(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "prices.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        priced(JobSpec(name="j", script="x.py", prices=str(path)))
    assert says in str(error.value) and "prices.csv" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hardware": "h100"}, "has none for the first machine (h100, on-demand): what it costs is not counted"),
        (
            {"hardware": "g5", "budget": 1.0},
            "less than one hour of the first machine (g5, on-demand, 4 USD/h): the job",
        ),
        ({"hardware": "g5", "budget": 100.0}, ""),
        ({}, ""),
    ],
)
def test_a_small_budget_and_a_class_without_a_price_are_said(
    tmp_path: Path, fields: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(BOOK)
    priced(JobSpec(**{"name": "j", "script": "x.py", "prices": str(path)} | fields))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert says in said if says else not said
