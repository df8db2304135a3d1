"""Ps that keep mirrors, in thousands of storms: lost, moved, scaled, cut off, replaced while they go on."""

from __future__ import annotations

import pytest

from everstep.sim.__main__ import main
from everstep.sim.mutations import Mutation
from everstep.sim.mutations_ps import PS_MUTATIONS, storm
from everstep.sim.scenario import CODES, PS_FAULTS, storm_scenario
from everstep.sim.sim_store import plus, times
from planted import must_be_caught, planted_bugs, recorded_for_all, storms_are_clean
from seeds import amounts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", amounts(100, 450))
def test_storms_lose_nothing_that_was_promised_and_none_is_stuck(seeds: int) -> None:
    storms_are_clean("ps", seeds, storm)


@pytest.mark.timeout(600)
@planted_bugs(PS_MUTATIONS)
def test_planted_bug_is_caught(mutation: Mutation, searched: bool) -> None:
    must_be_caught("ps", mutation, searched, storm)


def test_every_bug_has_a_name_and_seeds() -> None:
    recorded_for_all("ps", PS_MUTATIONS)


def test_every_kind_of_fault_and_protection_is_met() -> None:
    scenarios = [storm_scenario(seed) for seed in range(300)]
    assert {fault for s in scenarios for _, fault in s.faults} == set(PS_FAULTS)
    assert {s.parity for s in scenarios} == set(CODES)
    assert any(s.checkpoint_s for s in scenarios) and any(s.protect == "eager" for s in scenarios)


def test_the_same_seed_gives_the_same_storm() -> None:
    first = [storm(seed).crc for seed in range(8)]
    assert [storm(seed).crc for seed in range(8)] == first
    assert len(set(first)) == 8


def test_a_new_mirror_waits_for_the_ones_that_lag() -> None:
    """Seed 288: an older mirror was cut off and behind; the new one could not level it when the owner was lost."""
    assert storm(288).faults > 0


def test_watermarks_are_told_when_the_mirrors_have_what_is_before_them() -> None:
    """Seed 122: a reopened shard counted as done by watermarks that a ps had told and then took with it."""
    assert storm(122).faults > 0


def test_a_fold_that_lost_its_second_row_goes_back_to_an_snapshot() -> None:
    """Seed 982: two members were being folded when the ps of the other row died; nobody noticed that they were lost."""
    assert storm(982).faults > 0


def test_a_ps_that_ends_a_rebuild_by_an_old_map_changes_nothing() -> None:
    """Seed 1439: its partition had begun empty elsewhere meanwhile."""
    assert storm(1439).faults > 0


def test_elements_of_the_simulated_parity_are_a_field() -> None:
    page = (0b1010, 0b0110)
    assert times(page, 3) == page == times(times(page, 1), 2)
    assert plus(times(page, 1), times(page, 2)) == page  # g + g**2 = 1


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mix", "ps", "--seeds", "0..6", "--jobs", "1"]) == 0
    assert "every count right, none stuck" in capsys.readouterr().out
    assert main(["--mix", "ps", "--seed", "1", "--trace", "--mutation", "fences-forgotten"]) in (0, 1)
    assert "placement 1" in capsys.readouterr().out
