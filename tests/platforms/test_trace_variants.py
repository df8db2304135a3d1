"""Recordings made out of recordings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.platforms.trace_variants import at_most, by_chance, from_moment, most_of, repeated
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
