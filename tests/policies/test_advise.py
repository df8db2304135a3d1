from __future__ import annotations

import math

import pytest

from everstep.cli.advise import lines, span
from everstep.policies.advise import (
    Case,
    break_even_bytes,
    break_even_mtbf_s,
    checkpoint_loss,
    checkpoints,
    coded,
    options,
    partial_rollback,
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
    assert break_even_bytes(large, 4, 1) < large.table_bytes
    assert break_even_bytes(small, 4, 1) > small.table_bytes
    turn = break_even_mtbf_s(large, 4, 1)
    assert HOUR < turn < math.inf
    near = [large._replace(mtbf_s=turn * factor) for factor in (0.99, 1.01)]
    assert [coded(c, 4, 1).loss < checkpoints(c, incremental=True).loss for c in near] == [True, False]


def test_losses_of_several_ps_at_once_count_against_one_parity() -> None:
    case = Case(table_bytes=1e12, bandwidth=1e9, mtbf_s=HOUR, ps=8, stall=1.0, together=0.5)
    assert coded(case, 4, 1).parts["checkpoints beyond it"] > coded(case, 4, 2).parts["checkpoints beyond it"]
    assert "checkpoints beyond it" not in coded(case._replace(together=0.0), 4, 1).parts


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
