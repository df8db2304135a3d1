from __future__ import annotations

import math

import pytest

from everstep.cli.advise import lines, span
from everstep.policies.advise import (
    Case,
    checkpoint_loss,
    checkpoints,
    coded,
    lag_costs,
    options,
    partial_rollback,
    paying_bytes,
    paying_mtbf_s,
    paying_range,
    updates_lost,
    young_interval,
)

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(
    ("pause_s", "mtbf_s", "interval_min", "loss"),
    [
        (2.7 * MINUTE, 1 * HOUR, 18, 0.300),
        (2.7 * MINUTE, 8 * HOUR, 51, 0.106),
        (2.7 * MINUTE, 17 * HOUR, 74, 0.073),
        (19.5 * MINUTE, 8 * HOUR, 137, 0.285),
        (19.5 * MINUTE, 17 * HOUR, 199, 0.196),
    ],
)
def test_young_with_the_numbers_of_ecrec(pause_s: float, mtbf_s: float, interval_min: float, loss: float) -> None:
    """220 and 1,760 GB, checkpoints that stop training, restart not counted."""
    interval_s, parts = checkpoint_loss(pause_s, 0.0, 0.0, mtbf_s)
    assert interval_s / MINUTE == pytest.approx(interval_min, rel=0.01)
    assert sum(parts.values()) == pytest.approx(loss, abs=0.001)
    assert parts["writing"] == pytest.approx(parts["trained again"]), "at the best interval both cost the same"


def test_no_interval_is_better_than_youngs() -> None:
    case = Case(table_bytes=1e12, bandwidth=1e9, mtbf_s=4 * HOUR, stall=1.0)
    best = checkpoints(case, incremental=False)
    for factor in (0.5, 0.9, 1.1, 2.0):
        interval_s = best.interval_s * factor
        loss = 1000.0 / interval_s + interval_s / 2 / case.mtbf_s + best.parts["restoring"]
        assert loss > best.loss


def test_the_interval_is_never_below_the_writing_time() -> None:
    case = Case(table_bytes=1e12, bandwidth=1e8, mtbf_s=600.0, stall=0.001)
    assert young_interval(10.0, 600.0) < 10_000.0 == checkpoints(case, incremental=False).interval_s


def test_parity_pays_for_large_tables_and_frequent_losses() -> None:
    large = Case(table_bytes=1.76e12, bandwidth=1.5e9, mtbf_s=HOUR, ps=8, stall=1.0, together=0.0)
    assert options(large)[0].name in ("parity 4+1", "replica 1+1")
    small = large._replace(table_bytes=1e9, mtbf_s=100 * HOUR)
    assert options(small)[0].name == "incremental checkpoints"
    assert paying_bytes(large, 4, 1)[0] < large.table_bytes
    assert paying_bytes(small, 4, 1)[0] > small.table_bytes
    often_s, seldom_s = paying_mtbf_s(large, 4, 1)
    assert often_s < HOUR < seldom_s < math.inf
    near = [large._replace(mtbf_s=at * factor) for at in (often_s, seldom_s) for factor in (0.99, 1.01)]
    assert [coded(c, 4, 1).loss < checkpoints(c, incremental=True).loss for c in near] == [False, True, True, False]


@pytest.mark.parametrize(("begin", "end"), [(0.5, 2e3), (30.0, 700.0), (30.0, 2e3), (0.5, 700.0), (123.0, 123.5)])
def test_where_something_pays_has_two_ends(begin: float, end: float) -> None:
    low, high = paying_range(lambda at: begin < at < end, 1.0, 1e3)
    if end - begin < 1.0:
        assert (low, high) == (0.0, 0.0), "narrower than the grid"
        return
    assert low == pytest.approx(begin) if begin > 1.0 else low == 0.0
    assert high == pytest.approx(end) if end < 1e3 else high == math.inf


def test_a_second_loss_before_all_is_protected_again_goes_beyond_one_parity() -> None:
    """220 GB on 8 ps, 1 GB/s each, a tenth of their time: 27.5 GB x 5 over 7 ps, at 0.1 GB/s."""
    case = Case(table_bytes=220e9, bandwidth=1.4e9, mtbf_s=2 * HOUR, ps=8, together=0.0)
    assert case.protected_s == pytest.approx(27.5 * 5 / 7 / 0.1)
    found = coded(case, 4, 1)
    assert found.parts["rebuilding"] == pytest.approx(0.08 * case.protected_s / case.mtbf_s)
    beyond = case.protected_s / case.mtbf_s
    assert found.interval_s == pytest.approx(checkpoints(case, incremental=True).interval_s / math.sqrt(beyond))
    faster = coded(case._replace(rebuild_share=1.0), 4, 1)
    assert faster.parts["checkpoints beyond it"] < found.parts["checkpoints beyond it"]


def test_hybrid_jobs_train_nothing_again_with_a_lag() -> None:
    case = Case(table_bytes=220e9, bandwidth=1.4e9, mtbf_s=HOUR, ps=8, lag_s=60.0)
    ps, hybrid = coded(case, 4, 1, lag=True), coded(case._replace(hybrid=True), 4, 1, lag=True)
    assert (ps.redo_s, hybrid.redo_s) == (60.0, 0.0)
    assert ps.loss - hybrid.loss == pytest.approx(60.0 / HOUR) == ps.parts["trained again"]
    text = "\n".join(lines(case._replace(hybrid=True), options(case._replace(hybrid=True))))
    assert "at most 60 s of redo: incremental checkpoints alone cannot" in text and "parity 4+1 lag 60s loses" in text


def test_the_cost_of_a_lag_lies_between_measured_ones() -> None:
    assert [lag_costs(s) for s in (0.1, 0.5, 4.0, 60.0, 3600.0)] == [0.06, 0.06, 0.02, 0.007, 0.007]
    for spare in (False, True):
        at = [lag_costs(0.25 * 1.2**i, spare) for i in range(40)]
        assert at == sorted(at, reverse=True), "a longer lag costs no more"
    assert 0.016 < lag_costs(5.0) < 0.02
    assert all(lag_costs(s, True) <= lag_costs(s) for s in (0.5, 1.0, 2.0, 4.0, 8.0, 60.0))


def test_losses_of_several_ps_at_once_count_against_one_parity() -> None:
    case = Case(table_bytes=1e12, bandwidth=1e9, mtbf_s=HOUR, ps=8, stall=1.0, together=0.5)
    assert coded(case, 4, 1).parts["checkpoints beyond it"] > coded(case, 4, 2).parts["checkpoints beyond it"]
    alone = coded(case._replace(together=0.0), 4, 1)
    assert alone.interval_s > coded(case, 4, 1).interval_s, "only for a second loss before all is protected again"


def test_only_codes_that_the_ps_allow() -> None:
    case = Case(table_bytes=1e12, bandwidth=1e9, mtbf_s=HOUR, ps=4)
    assert {o.name for o in options(case)} == {"full checkpoints", "incremental checkpoints", "replica 1+1"}


def test_what_a_person_reads() -> None:
    case = Case(table_bytes=220e9, bandwidth=1.36e9, mtbf_s=HOUR, ps=8, step_s=0.1)
    text = "\n".join(lines(case, options(case)))
    assert f"use {options(case)[0].name}: " in text and "Young" in text
    hopeless = case._replace(bandwidth=1e3, parity=0.9, replica=0.9, together=0.5)
    assert "nothing works" in "\n".join(lines(hopeless, options(hopeless)))
    assert [span(s) for s in (90, 1080, 9720, 3e6)] == ["90 s", "18 min", "2.7 h", "34.7 d"]


def test_a_lossy_rollback_trains_nothing_again_and_says_what_it_loses() -> None:
    case = Case(table_bytes=1e11, bandwidth=1e9, mtbf_s=HOUR, ps=8, stall=1.0, may_lose=0.02)
    lossy = partial_rollback(case)
    assert "trained again" not in lossy.parts
    assert updates_lost(case, lossy.interval_s) == pytest.approx(0.02)
    assert lossy not in options(case), "it is not exact: not one of the ways to choose from"
    slow = case._replace(bandwidth=1e7)
    assert partial_rollback(slow).interval_s == 1e4, "no checkpoint is faster than its bytes"
    assert updates_lost(slow, 1e4) > 0.02
    assert any("not exact" in line for line in lines(case, options(case)))
