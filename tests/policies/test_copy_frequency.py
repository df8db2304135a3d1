"""Copies of a stage are as frequent as their measured cost allows, and are put where a chunk fits."""

from __future__ import annotations

import math

import pytest

from everstep.policies.copy_frequency import CopyCost, choose_interval, mean_time_to_failure, span_limits
from everstep.policies.idle_spans import IdleSpan


def costs(stall_s: float, count: int = 10, iteration_s: float = 1.0) -> list[CopyCost]:
    return [CopyCost(0.001, stall_s, iteration_s + stall_s + 0.001)] * count


def test_nothing_is_chosen_before_something_is_measured() -> None:
    assert choose_interval([], 3) == (3, "no copy is measured yet")


@pytest.mark.parametrize(("stall_s", "interval"), [(0.0, 1), (0.009, 1), (0.019, 2), (0.3, 31)])
def test_a_copy_costs_one_percent_at_most(stall_s: float, interval: int) -> None:
    chosen = choose_interval(costs(stall_s))
    assert chosen.interval == interval
    assert (0.001 + stall_s) / chosen.interval <= 0.01 + 1e-9
    assert chosen.reason.startswith(f"a copy costs {1e3 * (0.001 + stall_s):.2f} ms of an iteration of 1000.0 ms")
    assert chosen.reason.endswith("at most 1 %")


def test_frequent_losses_are_worth_more_than_the_bound() -> None:
    often = choose_interval(costs(0.299), mean_time_to_failure_s=60.0)  # sqrt(2 * 0.3 s * 60 s) = 6 s
    assert often.interval == 6 and often.reason.endswith("above 1 %, as a loss every 60 s costs more")


def test_seldom_losses_are_worth_less_than_the_bound() -> None:
    seldom = choose_interval(costs(0.299), mean_time_to_failure_s=1e6)  # sqrt(2 * 0.3 s * 1e6 s) = 775 s
    assert seldom.interval == 775 and seldom.reason.endswith("as a loss every 1000000 s costs no more than that")
    assert choose_interval(costs(0.299), mean_time_to_failure_s=math.inf).interval == 30  # nobody knows


def test_a_copy_that_is_all_but_free_is_taken_each_time() -> None:
    assert choose_interval(costs(0.0), mean_time_to_failure_s=1e9).interval == 1


def test_one_loss_says_nothing_of_a_rate() -> None:
    assert mean_time_to_failure(0, 100.0) == mean_time_to_failure(1, 100.0) == math.inf
    assert mean_time_to_failure(4, 100.0) == 25.0


def test_copies_become_rarer_at_once_and_twice_as_frequent_at_most() -> None:
    assert choose_interval(costs(0.3), 1).interval == 31
    assert choose_interval(costs(0.0), 31).interval == 15
    assert choose_interval(costs(0.0), 1).interval == 1


def test_the_latest_copies_count_and_not_a_single_slow_one() -> None:
    assert choose_interval([*costs(5.0, 20), *costs(0.0, 10)]).interval == 1
    assert choose_interval([*costs(0.0, 9), *costs(5.0, 1)]).interval == 1


def test_a_wait_in_which_no_chunk_fits_gets_none() -> None:
    spans = [IdleSpan(0.0, 0.010, 0.0), IdleSpan(0.0, 0.001, 0.0), IdleSpan(0.0, 0.0012, 0.0), IdleSpan(0.0, 0.0, 0.0)]
    assert span_limits(spans, 1e9, 1_000_000) == (10_000_000, 0, 0, 0)
    assert span_limits(spans, 1e9, 900_000) == (9_900_000, 0, 900_000, 0)
