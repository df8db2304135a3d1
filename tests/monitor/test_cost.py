"""What a run costs: prices, the ledger, and the journal's facts, against numbers that were worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.brain.events import (
    CapacityChanged,
    Event,
    Fact,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    NodeLost,
    PlanRegistered,
    Sender,
    ShardAsked,
    ShardDone,
    StopAsked,
)
from everstep.cli.cost import cost_lines, cost_of, report_of, show_cost
from everstep.cli.cost_picture import picture
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.capacity import CapacityStep, Market, Offer
from everstep.model.member import Address, Role
from everstep.model.shard import ShardSchedule, lease_no, shard_key
from everstep.monitor.node_costs import MachineSpan, MemberSpan, PlayedClock, goodput, merged, reckon
from everstep.monitor.price_files import read_prices
from everstep.monitor.prices import PriceBook, PriceError, PriceRow, parse_prices
from everstep.monitor.spending import Spending, read_spending
from everstep.platforms.trace_variants import by_chance
from everstep.platforms.traces import TraceMarket, timeline_of
from everstep.sim.elastic.job_model import MeasuredJob
from everstep.sim.elastic.virtual_job import VirtualJob, Work
from everstep.storage.journal import Journal

RECORDED = Path(__file__).parents[2] / "benchmarks" / "traces" / "spot_prices"
H = 3600.0
SPOT, STAYS = Market.SPOT, Market.ON_DEMAND
BOOK = """class,zone,market,from,usd_per_hour
g5,,on_demand,,2.0
g5,a,spot,1970-01-01T00:00:00Z,0.5
g5,a,spot,1970-01-01T02:00:00Z,1.0
"""


# ------------------------------------------------------------ prices


def test_a_price_holds_until_the_next_one() -> None:
    book = parse_prices(BOOK)
    assert book.spans("g5", "a", SPOT, H, 3 * H) == [(H, 2 * H, 0.5), (2 * H, 3 * H, 1.0)]
    assert book.spans("g5", "a", SPOT, -H, H) == [(-H, 0, None), (0, H, 0.5)]
    assert book.spans("g5", "b", STAYS, 0, H) == [(0, H, 2.0)]  # a price of every zone
    assert book.spans("g5", "b", SPOT, 0, H) == [(0, H, None)]
    assert book.spans("p4", "a", SPOT, 0, H) == [(0, H, None)]
    assert book.classes == ("g5",)


def test_json_says_the_same() -> None:
    rows = '[{"class": "g5", "zone": "a", "market": "spot", "usd_per_hour": 0.25}]'
    for text in (rows, f'{{"prices": {rows}}}'):
        assert parse_prices(text).spans("g5", "a", SPOT, 0, 1) == [(0, 1, 0.25)]


def test_recorded_prices_are_read() -> None:
    book = read_prices(RECORDED / "g2.2xlarge_us-east-1e_2015-06.csv.gz")
    begin = 1433116800.0 + 86400  # 2015-06-02
    spans = book.spans("g2.2xlarge", "us-east-1e", SPOT, begin, begin + 86400)
    assert spans[0].begin == begin and spans[-1].end == begin + 86400 and len(spans) > 10
    assert all(s.usd is not None and 0 < s.usd < 10 for s in spans)
    assert {s.usd for s in book.spans("g2.2xlarge", "us-east-1e", STAYS, begin, begin + 1)} == {0.65}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("class,market,usd_per_hour", "it has no prices"),
        ("class,market,usd_per_hour\ng5,spot,-0.1", "line 2: usd_per_hour = '-0.1'"),
        ("class,market,usd_per_hour\ng5,spot,", "line 2: usd_per_hour is missing"),
        ("class,market,usd_per_hour\ng5,spot,nan", "line 2: usd_per_hour = 'nan'"),
        ("class,market,usd_per_hour\ng5,spot,cheap", "line 2: usd_per_hour = 'cheap'"),
        ("class,market,usd_per_hour\ng5,auction,1", "line 2: market = 'auction'"),
        ("class,market,usd_per_hour\n,spot,1", "line 2: class = ''"),
        ("class,market,usd_per_hour\ng5,spot,1\ng5,sp", "line 3: 2 cells, and the header has 3: is it truncated?"),
        ("class,market,from,usd_per_hour\ng5,spot,soon,1", "line 2: from = 'soon'"),
        (
            "class,market,from,usd_per_hour\ng5,spot,2026-01-02,1\ng5,spot,2026-01-01,1",
            "line 3: out of order: a price of g5",
        ),
        ('[{"class": "g5", "market": "spot", "usd_per', "truncated"),
        ('[{"class": "g5", "market": "spot"}]', "entry 1: usd_per_hour is missing"),
        ("[3]", "expected a list of objects"),
    ],
)
def test_wrong_prices_are_one_line(text: str, says: str) -> None:
    with pytest.raises(PriceError) as error:
        parse_prices(text)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_files_of_prices_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    for name, data, says in (
        ("none.csv", None, "No such file"),
        ("bits.csv", b"\xff\xfe\x00\x01", "no text"),
        ("half.csv.gz", b"\x1f\x8b\x08\x00\x00", "truncated or damaged"),
        ("no.parquet", b"PAR1 and nothing", "no Parquet, or damaged"),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ConfigError, match=says) as error:
            read_prices(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------ the ledger


def test_a_small_case_worked_out_by_hand() -> None:
    """Two machines. node0 stays for 4 h at 2 USD: 8 USD. A spot machine is held from 1 h to 3 h: one hour at 0.5 and
    one at 1: 1.5 USD. Together 6 node-hours and 9.5 USD; on demand 6 x 2 = 12 USD. Price part 9.5 / 12 = 0.791667.
    Workers had places for 4 + 2 = 6 hours, and worked 3 + 1.5 = 4.5: goodput part 0.75. On demand the same work would
    have cost 12 x 0.75 = 9 USD; saved 1 - 9.5 / 9 = -0.055556."""
    machines = [
        MachineSpan(NodeId("node0"), "g5", "z", STAYS, 0, 4 * H, places=1),
        MachineSpan(NodeId("spot-1"), "g5", "a", SPOT, H, 3 * H, places=1),
    ]
    members = [
        MemberSpan("master", NodeId("node0"), 0, 4 * H),
        MemberSpan("worker", NodeId("node0"), 0, 4 * H),
        MemberSpan("worker", NodeId("spot-1"), 1.5 * H, 3 * H),
    ]
    costs = reckon(machines, members, parse_prices(BOOK), at=0.0)
    good = goodput(machines, [(NodeId("node0"), 0, 3 * H), (NodeId("spot-1"), 1.5 * H, 3 * H)])
    assert costs.spent.usd == pytest.approx(9.5) and costs.spent.seconds == pytest.approx(6 * H)
    assert costs.on_demand.usd == pytest.approx(12.0) and costs.unknown == []
    assert costs.price_part == pytest.approx(9.5 / 12) and good == pytest.approx(0.75)
    assert costs.saved(good) == pytest.approx(1 - 9.5 / 9)
    # node0's 8 USD are half the master's and half the worker's; spot-1 has nobody for half an hour at 0.5 USD
    roles = {role: (found.seconds / H, found.usd) for role, found in costs.roles.items()}
    assert roles == {
        "master": pytest.approx((2.0, 4.0)),
        "worker": pytest.approx((3.5, 4.0 + 1.25)),
        "nobody": pytest.approx((0.5, 0.25)),
    }
    assert [h.usd for h in costs.hours] == pytest.approx([2.0, 2.5, 3.0, 2.0])
    # in the second hour spot-1 has nobody for half an hour at 0.5 USD, then a worker; in the third it costs 1 USD
    assert {role: [h.usd for h in some] for role, some in costs.role_hours.items()} == {
        "master": pytest.approx([1.0, 1.0, 1.0, 1.0]),
        "worker": pytest.approx([1.0, 1.25, 2.0, 1.0]),
        "nobody": pytest.approx([0.0, 0.25, 0.0, 0.0]),
    }
    assert {node: found.usd for node, found in costs.nodes.items()} == pytest.approx({"node0": 8.0, "spot-1": 1.5})


def test_a_price_that_is_not_known_is_not_zero() -> None:
    machines = [
        MachineSpan(NodeId("node0"), "g5", "z", STAYS, 0, H, places=1),
        MachineSpan(NodeId("n1"), "p4", "a", SPOT, 0, H, places=1),
        MachineSpan(NodeId("n2"), "g5", "a", SPOT, -H, H, usd=0.1, places=1),
    ]
    costs = reckon(machines, [], parse_prices(BOOK), at=0.0)
    assert costs.spent.usd == pytest.approx(2.2) and costs.spent.unknown_s == pytest.approx(H)
    assert not costs.spent.complete and costs.price_part is None and costs.saved(1.0) is None
    assert costs.unknown == ["p4 in a: no spot price", "p4 in a: no on-demand price"]


MACHINES = st.lists(
    st.builds(
        lambda n, h, m, a, b: MachineSpan(NodeId(n), h, "a", m, a, a + b, places=1),
        st.sampled_from(["n1", "n2"]),
        st.sampled_from(["g5", "p4"]),
        st.sampled_from([SPOT, STAYS]),
        st.floats(0, 5 * H),
        st.floats(0, 5 * H),
    ),
    max_size=5,
)
MEMBERS = st.lists(
    st.builds(
        lambda r, n, a, b: MemberSpan(r, NodeId(n), a, a + b),
        st.sampled_from(["worker", "ps"]),
        st.sampled_from(["n1", "n2"]),
        st.floats(0, 5 * H),
        st.floats(0, 5 * H),
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(MACHINES, MEMBERS)
def test_roles_hours_and_nodes_add_up(machines: list[MachineSpan], members: list[MemberSpan]) -> None:
    costs = reckon(machines, members, parse_prices(BOOK), at=0.0)
    held_s = math.fsum(m.end - m.begin for m in machines)
    for parts in ([costs.spent], costs.roles.values(), costs.hours, costs.nodes.values()):
        assert math.fsum(p.seconds for p in parts) == pytest.approx(held_s, abs=1e-3)
        assert math.fsum(p.usd for p in parts) == pytest.approx(costs.spent.usd, abs=1e-6)
        assert math.fsum(p.unknown_s for p in parts) == pytest.approx(costs.spent.unknown_s, abs=1e-3)
    assert all(p.seconds <= 2 * H * len(machines) for p in costs.hours)
    for number, hour in enumerate(costs.hours):
        parts = [some[number] for some in costs.role_hours.values()]
        assert math.fsum(p.usd for p in parts) == pytest.approx(hour.usd, abs=1e-6)
        assert math.fsum(p.seconds for p in parts) == pytest.approx(hour.seconds, abs=1e-3)
    for role, some in costs.role_hours.items():
        assert math.fsum(p.usd for p in some) == pytest.approx(costs.roles[role].usd, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=8))
def test_spans_of_one_worker_do_not_overlap(spans: list[tuple[float, float]]) -> None:
    out = merged((a, a + b) for a, b in spans)
    assert all(a < b for a, b in out) and all(x[1] < y[0] for x, y in itertools.pairwise(out))
    assert sum(b - a for a, b in out) <= sum(b for _, b in spans) + 1e-6


def test_a_played_clock() -> None:
    clock = PlayedClock(100.0, [(110.0, 0.0), (120.0, 600.0), (120.0, 600.0), (130.0, 900.0)], speed=60.0)
    assert [clock.at(t) for t in (100, 110, 115, 120, 125, 130, 131)] == [0, 600, 900, 1200, 1350, 1500, 1560]
    assert clock.at_recorded(600.0) == 1200
    assert PlayedClock(100.0, [], speed=60.0).at(107.0) == 7.0  # nothing was played


# ------------------------------------------------------------ the journal


def story() -> Spending:
    """Ten minutes of a job, in mode ps: node0 with a ps and a worker; spot-1 from 100 s to 400 s, in the recording from
    6,000 to 24,000 s; b joins by hand at 200 s, is heard last at 300 s. worker:0 works from 10 to 110 s and from 110 to
    510 s; a shard that it began then does not count."""
    spec = JobSpec(workers=1, ps=1, partitions=2, hardware="g5", capacity_speed=60.0, lost_after_s=8.0)
    agent, command = Sender("agent", node=NodeId("node0")), Sender("command")
    worker, ps = Sender("worker", Slot(0), Incarnation(1)), Sender("ps", Slot(0), Incarnation(1))
    first, at_home = lease_no(1, 1), NodeId("node0")
    address = Address(at_home, "sock/ps-0.sock")
    spot = (NodeId("spot-1"), "g5", "a", SPOT, None)

    def done(index: int, lease: int) -> ShardDone:
        servers = ((Slot(0), Incarnation(1)),)
        return ShardDone(ShardKey(shard_key(0, 0, index)), LeaseNo(lease), servers)

    def changed(step: CapacityStep, recorded_s: float) -> CapacityChanged:
        node, hardware, zone, market, price = spot
        return CapacityChanged(node, step, hardware, zone, market, price, recorded_s)

    told: list[tuple[float, Fact, Sender]] = [
        (0, MasterStarted(Incarnation(1), spec), Sender()),
        (1, NodeJoined(at_home, "", 0, 0, (), "g5"), agent),
        (2, MemberJoined(Role.PS, Slot(0), Incarnation(1), at_home, 7, address), ps),
        (3, MemberJoined(Role.WORKER, Slot(0), Incarnation(1), at_home, 8, None), worker),
        (4, PlanRegistered(ShardSchedule(name="d", samples=30, shard_samples=10, seed=0)), worker),
        (10, ShardAsked(0, 1, 1), worker),
        (100, changed(CapacityStep.GRANTED, 6000.0), command),
        (105, NodeJoined(NodeId("spot-1"), "h", 1, 0, (), "g5", 0, "a", SPOT), Sender("agent", node=NodeId("spot-1"))),
        (110, done(0, first), worker),
        (110, ShardAsked(0, 1, 2), worker),
        (200, NodeJoined(NodeId("b"), "h", 2, 0, (), "p4"), Sender("agent", node=NodeId("b"))),
        (308, NodeLost(NodeId("b"), "silent"), Sender()),
        (400, changed(CapacityStep.TAKEN_BACK, 24000.0), command),
        (510, done(1, first + 1), worker),
        (511, ShardAsked(0, 1, 3), worker),
        (600, StopAsked("enough"), command),
    ]
    return read_spending(Event(1_000_000.0 + at, fact, sender) for at, fact, sender in told)  # type: ignore[arg-type]


def test_machines_of_a_journal() -> None:
    found = story()
    here = {m.node: (m.begin, m.end, m.places, m.market) for m in found.machines()}
    assert here == {
        "node0": (0, 600, 1, STAYS),
        "spot-1": (100, 400, 1, SPOT),
        "b": (200, 300, 2, STAYS),  # nobody said what market
    }
    played = {m.node: (m.begin, m.end) for m in found.machines(found.clock())}
    # 60 times as fast: one second here is a minute of the recording
    assert played == {"node0": (0, 36000), "spot-1": (6000, 24000), "b": (12000, 18000)}


def test_a_machine_that_is_granted_twice_is_paid_once() -> None:
    """A grant is told at least once: the word of an ``everstep run`` that was killed may come again."""
    node, command = NodeId("c-1"), Sender("command")
    grant = CapacityChanged(node, CapacityStep.GRANTED, "g5", "a", SPOT, 0.5)
    dearer = CapacityChanged(node, CapacityStep.GRANTED, "g5", "a", SPOT, 0.75)
    told: list[tuple[float, Fact, Sender]] = [
        (0, MasterStarted(Incarnation(1), JobSpec()), Sender()),
        (10, grant, command),
        (12, NodeJoined(node, "h", 2, 0, (), "g5", 0, "a", SPOT), Sender("agent", node=node)),
        (50, grant, command),
        (60, dearer, command),
        (110, CapacityChanged(node, CapacityStep.TAKEN_BACK, "g5", "a", SPOT, 0.75), command),
        (120, StopAsked("enough"), command),
    ]
    found = read_spending(Event(1000.0 + at, fact, sender) for at, fact, sender in told)  # type: ignore[arg-type]
    spans = [(m.begin, m.end, m.usd, m.places) for m in found.machines() if m.node == node]
    assert spans == [(10, 60, 0.5, 2), (60, 110, 0.75, 2)]


def test_the_cost_of_a_journal_worked_out_by_hand() -> None:
    """10 h at 2 USD are 20 USD for node0. spot-1 is held for 5 h (1:40 to 6:40): 20 min at 0.5 USD and 4:40 h at 1 USD
    are 4.8333 USD. b is held for 1:40 h, of a class without a price. Places: 600 + 300 + 2 x 100 = 1,100 s, of which
    worker:0 used 100 + 400 s: goodput part 0.4545."""
    report = report_of(story(), Path("x"), parse_prices(BOOK), at=0.0)
    assert report.clock == "recorded" and report.length_s == 36000 and report.passed_s == 600
    assert report.costs.spent.usd == pytest.approx(20 + 4 + 40 / 60 + 0.5 / 3)
    assert report.costs.spent.unknown_s == pytest.approx(6000)
    assert report.costs.unknown == ["p4 in no zone: no on-demand price"]
    assert report.goodput == pytest.approx(500 / 1100)
    assert report.saved is None and report.per_sample is None and report.samples == 20
    # with a price of b's class all is known: 16.67 h on demand at 2 USD
    known = report_of(story(), Path("x"), parse_prices(BOOK + "p4,,on_demand,,2.0\n"), at=0.0)
    spent, full = 20 + 29 / 6 + 10 / 3, 2 * (10 + 5 + 5 / 3)
    assert known.costs.spent.usd == pytest.approx(spent) and known.costs.on_demand.usd == pytest.approx(full)
    assert known.saved == pytest.approx(1 - (spent / full) / (5 / 11))
    assert known.per_sample == pytest.approx(spent / 20) and known.same_work == pytest.approx(full * 5 / 11)
    roles = known.costs.roles
    assert sum(r.usd for r in roles.values()) == pytest.approx(spent)
    # spot-1 starts for 5 s, which are 300 of the recording, at 0.5 USD; then it has a worker, as b has at once
    assert (roles["nobody"].seconds, roles["nobody"].usd) == pytest.approx((300, 0.5 * 300 / H))
    # all reckoned as machines of another kind: b's price is known then
    other = report_of(story(), Path("x"), parse_prices(BOOK), at=0.0, kind=("g5", "a"))
    assert other.costs.spent.usd == pytest.approx(spent) and other.costs.unknown == []


def test_what_people_and_programs_see() -> None:
    report = report_of(story(), Path("x"), parse_prices(BOOK), at=0.0)
    text = "\n".join(cost_lines(report))
    assert "spent: 24.8333 USD and 1.67 node-hours of unknown price for 16.67 node-hours" in text
    assert "saved: unknown = 1 - price part unknown / goodput part 0.455" in text
    assert "unknown: p4 in no zone: no on-demand price" in text
    data = report.as_dict()
    assert data["spent"]["usd"] is None and data["spent"]["usd_known"] == pytest.approx(24.8333, abs=1e-3)
    assert data["saved"] is None and len(data["hours"]) == 10 and data["clock"] == "recorded"
    assert data["role_hours"].keys() == data["roles"].keys() and all(len(h) == 10 for h in data["role_hours"].values())
    assert any(words.startswith("       0 ") and ", worker 0." in words for words in text.splitlines()), text
    drawn = picture(report)
    assert drawn.startswith("<svg") and drawn.count("<polyline") == 2 and "what has no known price" in drawn
    import xml.etree.ElementTree as tree

    assert tree.fromstring(drawn).tag.endswith("svg")


def test_a_job_without_prices_or_recording() -> None:
    spec = JobSpec(workers=1, ps=1)
    fold = [Event(50.0, MasterStarted(Incarnation(1), spec)), Event(60.0, StopAsked("x"), Sender("command"))]
    report = report_of(read_spending(fold), Path("x"), PriceBook([PriceRow("g5", "", STAYS, 0.0, 1.0)]))
    assert report.machines == () and report.goodput is None and report.clock == "passed" and report.length_s == 10
    assert "saved: unknown" in "\n".join(cost_lines(report))


@pytest.mark.parametrize(
    ("at", "out", "says"),
    [("soon", None, "--at 'soon': expected a time"), ("", Path("x.png"), "--out 'x.png': pictures are SVG")],
)
def test_wrong_flags_are_one_line(tmp_path: Path, at: str, out: Path | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        show_cost(tmp_path, False, None, at, out)
    with pytest.raises(ConfigError, match="--as '@a': expected CLASS or CLASS@ZONE"):
        show_cost(tmp_path, False, None, "", None, "@a")


# ------------------------------------------------------------ beside a restart from the checkpoint


def test_what_a_restart_would_have_cost(tmp_path: Path) -> None:
    """Of a virtual job's journal: machines go every ten minutes, and a restart takes what a start took."""
    trace = by_chance(3, 30_000.0, between_s=600.0, back_s=60.0, seed=4)
    market = TraceMarket(trace, timeline_of(trace, 1.0), Offer("g5", "a", SPOT))
    spec = JobSpec(ps=1, checkpoint_every="5m", hardware="g5")
    job = VirtualJob(spec, Work(10_000_000, 2, 20_000), MeasuredJob(), market, 3, keep_events=True)
    assert job.run(1e6).ended and job.events
    journal = Journal(tmp_path / "journal.sqlite", Incarnation(1))
    for event in job.events:
        journal.append(event)
    journal.close()
    report = cost_of(tmp_path, parse_prices("class,zone,market,usd_per_hour\ng5,,spot,0.5\ng5,,on_demand,2.0\n"))
    found = report.restart
    assert found is not None and report.goodput is not None and found.usd is not None
    assert found.interval == "as in this run" and found.interval_s == pytest.approx(300.0, rel=0.1)
    assert 0.2 < found.goodput < report.goodput
    assert found.usd == pytest.approx(report.costs.spent.usd * report.goodput / found.goodput)
    assert found.saved is not None and report.saved is not None and found.saved < report.saved
    assert any("restart from checkpoint" in line and "as in this run" in line for line in cost_lines(report))
    assert json.loads(show_cost(tmp_path, True, None, "", None))["restart"]["usd"] is None
    nothing = cost_lines(report_of(Spending(), tmp_path, PriceBook()))
    assert any("trained too little" in line for line in nothing)
