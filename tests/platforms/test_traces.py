"""Recordings of clouds: read, timed and played, without a clock."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.model.capacity import Gone, Grant, Market, Offer, Warned
from everstep.platforms.trace_capacity import TraceCapacity, read_trace
from everstep.platforms.traces import (
    MachineLife,
    Timeline,
    Trace,
    TraceError,
    TraceMarket,
    parse_trace,
    price_class,
    timeline_of,
)

RECORDED = Path(__file__).parents[2] / "benchmarks" / "traces" / "spot"
OFFER = Offer("v100", "eu-1", Market.SPOT)


def counted(counts: list[int], gap_s: float = 10.0) -> str:
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": counts})


@pytest.mark.parametrize(
    ("file", "came", "reclaims", "most", "hours"),
    [
        ("us-west-2c_v100_1.json.gz", 334, 330, 4, 427.6),
        ("us-east-1f_v100_1.json.gz", 195, 195, 4, 305.3),
        ("us-west-2a_v100_1.json.gz", 1489, 1473, 16, 394.7),
        ("p3-trace.csv.gz", 177, 167, 32, 11.4),
        ("g4dn-trace.csv.gz", 79, 74, 24, 10.8),
        ("a100x1-east1b.txt.gz", 218, 154, 64, 27.0),
    ],
)
def test_recordings_of_clouds_are_read(file: str, came: int, reclaims: int, most: int, hours: float) -> None:
    trace = read_trace(RECORDED / file)
    assert (len(trace.lives), trace.reclaims, trace.most) == (came, reclaims, most)
    assert trace.length_s / 3600 == pytest.approx(hours, abs=0.06)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 2', "truncated"),
        ('{"metadata": {}, "data": [1]}', "gap_seconds = None"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds = 0"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "data: expected a list"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, -1]}', "data[1] = -1"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1.5]}', "data[0] = 1.5"),
        ("hello", "no recording of machines"),
        ("0,add,n1\n60000,remove,n2", "line 2: 'n2' is removed, and no such machine is there"),
        ("0,add,n1\n60000,add,n1", "line 2: 'n1' is added, and it is there already"),
        ("60000,add,n1\n0,remove,n1", "line 2: out of order: 0 ms comes after 60000 ms"),
        ("0,add,n1\n6000", "line 2: '6000': expected milliseconds,add|remove,name; is it truncated?"),
        ("0,add,n1\nsoon,remove,n1", "line 2: 'soon' is no time"),
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 11:13", "line 2"),
    ],
)
def test_a_wrong_recording_is_one_line(text: str, says: str) -> None:
    with pytest.raises(TraceError) as error:
        parse_trace(text)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    whole = gzip.compress(counted([1, 2, 1] * 100).encode())
    for name, data, says in (
        ("none", None, "No such file"),
        ("half.gz", whole[: len(whole) // 2], "truncated"),
        ("bits", b"\xff\xfe\x00", "no text"),
        ("order.csv", b"9,add,a\n1,add,b", "line 2: out of order"),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ConfigError, match=says) as error:
            read_trace(path)
        assert str(path) in str(error.value)


def test_lines_of_dated_counts_come_in_any_order() -> None:
    trace = parse_trace("2021-12-11, 11:11:50, 1\n2021-12-11, 11:11:30, 3\n2021-12-11, 11:11:40, 2")
    assert sorted(life.end_s or 99 for life in trace.lives) == [10, 20, 99]


@pytest.mark.parametrize(
    ("stem", "of"),
    [
        ("us-east-1f_v100_1", ("v100", "us-east-1f")),
        ("us-west-2a_k80_8", ("k80x8", "us-west-2a")),
        ("p3-trace", ("p3", "")),
    ],
)
def test_the_name_of_a_recording_says_class_and_zone(stem: str, of: tuple[str, str]) -> None:
    assert price_class(stem) == of


# ------------------------------------------------------------ time


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 1e6), max_size=8),
    st.floats(0.01, 1000),
    st.sampled_from([0.0, 0.5, 20.0]),
    st.floats(0, 1e6),
)
def test_a_timeline_goes_there_and_back(moments: list[float], speed: float, quiet_s: float, at: float) -> None:
    line = Timeline(moments, speed, quiet_s)
    played = line.played(at)
    assert 0 <= played <= at / speed * (1 + 1e-9)
    assert line.recorded(played) == pytest.approx(at, rel=1e-6, abs=1e-6)
    if quiet_s:
        ends = [0.0, *sorted(set(moments))]
        for a, b in itertools.pairwise(ends):
            assert line.played(b) - line.played(a) <= quiet_s * (1 + 1e-9) + 1e-6


def test_pauses_are_cut_and_the_rest_is_not() -> None:
    line = Timeline([10, 1000, 1010], 1.0, 20)
    assert [line.played(at) for at in (0, 5, 10, 1000, 1005, 1010, 1020)] == [0, 5, 10, 30, 35, 40, 50]


# ------------------------------------------------------------ the market

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(0, 6), st.sampled_from([0.0, 3.0, 25.0]), st.lists(st.floats(0, 400), max_size=10))
def test_a_job_holds_what_there_is_up_to_what_it_wants(
    counts: list[int], wanted: int, lead_s: float, looks: list[float]
) -> None:
    trace = parse_trace(counted(counts))
    market = TraceMarket(trace, timeline_of(trace, 1.0), OFFER, lead_s)
    market.request(wanted)
    held: dict[str, bool] = {}
    for now in [*sorted(looks), 1e9]:
        for news in market.until(now):
            if isinstance(news, Grant):
                assert news.node not in held and news.offer == OFFER
                held[news.node] = False
            elif isinstance(news, Warned):
                assert held[news.node] is False and lead_s > 0
                assert news.in_s is not None and 0 <= news.in_s <= lead_s + 1e-6
                held[news.node] = True
            else:
                assert isinstance(news, Gone)
                assert held.pop(news.node) is (lead_s > 0)
        tick = counts[min(int(now // 10), len(counts) - 1)]
        assert len(held) == min(wanted, tick)
        assert set(held) == market.held
        assert sum(o.count for o in market.offers()) == max(0, tick - wanted)
        assert all(node in {f"spot-{i}" for i in range(1, wanted + 1)} for node in held)


@settings(max_examples=60, deadline=None)
@given(COUNTS)
def test_machines_of_counts_add_up(counts: list[int]) -> None:
    trace = parse_trace(counted(counts))
    for i, count in enumerate(counts):
        at = i * 10.0
        assert sum(a <= at and (b is None or b > at) for a, b in trace.lives) == count
    assert trace == parse_trace(counted(counts))


def test_a_machine_that_was_given_back_is_not_given_again() -> None:
    trace = Trace((MachineLife(0, 50), MachineLife(0, None)), 100, 2)
    market = TraceMarket(trace, timeline_of(trace, 1.0), OFFER)
    market.request(1)
    (first,) = market.until(1)
    market.release(first.node)
    (second,) = market.until(2)
    assert isinstance(second, Grant) and second.node == "spot-1"
    assert market.until(1000) == []  # it is not the one that goes at 50


def test_a_machine_that_lives_shorter_than_the_notice_is_warned_at_once() -> None:
    trace = Trace((MachineLife(5, 8),), 10, 1)
    market = TraceMarket(trace, timeline_of(trace, 1.0), OFFER, lead_s=30)
    market.request(1)
    news = market.until(100)
    assert [type(n) for n in news] == [Grant, Warned, Gone]
    assert news[1] == Warned(news[0].node, 3.0, 5.0)


def test_a_recording_is_played_by_a_clock() -> None:
    now = [100.0]
    cloud = TraceCapacity(RECORDED / "p3-trace.csv.gz", speed=60, now=lambda: now[0])
    cloud.request(2)
    assert cloud.most == 32 and cloud.offers() == ()
    first = cloud.watch()
    assert [n.node for n in first] == ["spot-1", "spot-2"]
    assert isinstance(first[0], Grant) and first[0].offer.hardware == "p3" and first[0].offer.market is Market.SPOT
    now[0] += 41_000 / 60
    gone = [n for n in cloud.watch() if isinstance(n, Gone)]
    assert gone and all(0 <= (n.recorded_s or -1) <= 40_920 for n in gone)


def test_on_demand_machines_beside_a_recording_are_there_at_once_and_stay() -> None:
    now = [100.0]
    cloud = TraceCapacity(RECORDED / "p3-trace.csv.gz", speed=60, now=lambda: now[0])
    cloud.request(0)
    cloud.watch()
    cloud.request(2, Market.ON_DEMAND)
    news = cloud.watch()
    assert [n.node for n in news] == ["on-demand-1", "on-demand-2"]
    assert all(isinstance(n, Grant) and n.offer.market is Market.ON_DEMAND for n in news)
    cloud.request(2, Market.ON_DEMAND)
    now[0] += 41_000 / 60
    assert cloud.watch() == (), "nobody takes them back"
    cloud.request(1, Market.ON_DEMAND)
    cloud.release(NodeId("on-demand-1"))
    cloud.release(NodeId("on-demand-1"))
    assert cloud.watch() == ()
    cloud.request(2, Market.ON_DEMAND)
    assert [n.node for n in cloud.watch()] == ["on-demand-1"]
