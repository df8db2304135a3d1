"""Ps whose mirrors may be behind (``protect: lag``), in storms: what mirrors lack is computed again, once."""

from __future__ import annotations

import pytest

from everstep.sim.mutations import Mutation
from everstep.sim.mutations_lag import LAG_MUTATIONS, lag_storm
from everstep.sim.scenario import lag_scenario
from planted import must_be_caught, planted_bugs, recorded_for_all, storms_are_clean
from seeds import amounts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", amounts(100, 450))
def test_storms_lose_nothing_and_none_is_stuck(seeds: int) -> None:
    storms_are_clean("lag", seeds, lag_storm)


@pytest.mark.timeout(600)
@planted_bugs(LAG_MUTATIONS)
def test_planted_bug_is_caught(mutation: Mutation, searched: bool) -> None:
    must_be_caught("lag", mutation, searched, lag_storm)


def test_there_are_enough_and_all_have_seeds() -> None:
    assert len(LAG_MUTATIONS) >= 8
    recorded_for_all("lag", LAG_MUTATIONS)


def test_storms_are_of_all_kinds() -> None:
    scenarios = [lag_scenario(seed) for seed in range(200)]
    assert {s.protect for s in scenarios} == {"lag"}
    assert {s.consistency for s in scenarios} == {"async", "bounded:2"}
    assert {s.lag_s for s in scenarios} == {0.1, 0.4, 1.0, 2.5}
    assert any(what == "kill ps and worker" for s in scenarios for _, what in s.faults)
    assert all(s.parity != "0" for s in scenarios) and any(s.checkpoint_s for s in scenarios)


def test_losses_after_every_script_had_ended_are_trained_again_each_time() -> None:
    """Seeds 467, 1304: a ps was lost more often than a script may run again in vain."""
    assert lag_storm(467).faults > 0 and lag_storm(1304).faults > 0


def test_an_end_while_a_partition_moves_and_a_third_ps_dies_is_no_loss() -> None:
    """Seed 3021: the job is over before the master hears of a death; the new owner waits for the dead ps for ever, and
    the old owner keeps what the partition has."""
    assert lag_storm(3021).faults > 0


def test_the_same_seed_gives_the_same_storm() -> None:
    first = [lag_storm(seed).crc for seed in range(6)]
    assert [lag_storm(seed).crc for seed in range(6)] == first
