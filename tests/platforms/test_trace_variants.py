"""Recordings made out of recordings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.platforms.trace_capacity import read_trace
from everstep.platforms.trace_variants import at_most, between, by_chance, from_moment, most_of, repeated
from everstep.platforms.traces import MachineLife, Trace, TraceError, parse_trace

COUNTS = '{"metadata": {"gap_seconds": 10}, "data": [2, 3, 1, 0, 2, 4]}'


def alive(trace: Trace, at: float) -> int:
    return sum(life.begin_s <= at and (life.end_s is None or at < life.end_s) for life in trace.lives)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.floats(0, 130))
def test_a_job_that_begins_later_meets_what_came_then(counts: list[int], moment_s: float) -> None:
    gap = '{"metadata": {"gap_seconds": 10}, "data": ' + str(counts) + "}"
    trace = parse_trace(gap)
    moved = from_moment(trace, moment_s)
    assert moved.length_s == trace.length_s
    for tick in range(4 * len(counts)):
        at = tick * 2.5 + 0.6
        if abs((at + moment_s) % 10.0) < 1e-3 or abs((at + moment_s) % 10.0 - 10.0) < 1e-3:
            continue  # (on a boundary)
        assert alive(moved, at) == alive(trace, (at + moment_s) % trace.length_s)


def test_machines_that_last_go_on_behind_the_end() -> None:
    trace = Trace((MachineLife(0.0, None), MachineLife(0.0, 50.0)), 100.0, 2)
    moved = from_moment(trace, 80.0)
    assert moved.reclaims == 1  # the second one, 50 s after the recording began anew
    assert moved.lives[0] == MachineLife(0.0, 70.0) or MachineLife(0.0, None) in moved.lives


def test_more_machines_than_were_recorded() -> None:
    trace = parse_trace(COUNTS)
    many = repeated(trace, 50, seed=1)
    assert many.length_s == trace.length_s
    assert 10 < many.most <= 50
    assert repeated(trace, 50, seed=1) == many
    assert repeated(trace, 50, seed=2) != many


@pytest.mark.parametrize(("machines", "words"), [(0, "0 machines: expected 1"), (10**6, "expected 1 to 10,000")])
def test_a_wrong_number_is_said(machines: int, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        repeated(parse_trace(COUNTS), machines)


def test_a_recording_without_machines_cannot_be_repeated() -> None:
    with pytest.raises(TraceError, match="never has a machine"):
        repeated(Trace((), 100.0, 0), 5)


def test_at_most_so_many() -> None:
    trace = parse_trace(COUNTS)
    assert at_most(trace, 2).most == 2
    assert most_of(list(at_most(trace, 1).lives)) == 1


def test_by_chance_as_often_as_told() -> None:
    trace = by_chance(40, 36000.0, between_s=3600.0, back_s=60.0, seed=3)
    assert trace.most == 40
    assert 300 < trace.reclaims < 480  # 40 machines, 10 hours, one an hour


def test_a_part_of_a_recording_has_the_machines_of_that_time() -> None:
    lives = (MachineLife(0.0, 10.0), MachineLife(5.0, None), MachineLife(12.0, 30.0), MachineLife(40.0, None))
    part = between(Trace(lives, 50.0, 3), 10.0, 30.0)
    assert part.lives == (MachineLife(0.0, None), MachineLife(2.0, None))
    assert (part.length_s, part.most, part.reclaims) == (20.0, 2, 0)
    assert between(Trace(lives, 50.0, 3), 0.0, 20.0).reclaims == 1


def test_a_part_beyond_the_recording_is_refused() -> None:
    with pytest.raises(TraceError, match="the recording has 0 to 50 s"):
        between(Trace((), 50.0, 0), 40.0, 60.0)


def test_an_hour_of_the_p3_recording_is_the_one_that_parcae_trains_in() -> None:
    """Its repository lists that hour event by event: 32 machines, three go after 480 s, three after 600, one after
    720; two come after 1260."""
    spot = Path(__file__).parents[2] / "benchmarks" / "traces" / "spot"
    hour = between(read_trace(spot / "p3-trace.csv.gz"), 5.5 * 3600, 6.5 * 3600)
    assert sum(life.begin_s == 0 for life in hour.lives) == 32
    gone = [life.end_s for life in hour.lives if life.end_s is not None]
    assert sorted(gone)[:7] == [480.0] * 3 + [600.0] * 3 + [720.0]
    assert [life.begin_s for life in hour.lives if life.begin_s > 0][:3] == [1260.0, 1260.0, 1320.0]
