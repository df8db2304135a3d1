"""Ps on several machines under virtual time: machines are lost whole, cut off, and come back."""

from __future__ import annotations

import pytest

from everstep.sim.mutations import Mutation
from everstep.sim.mutations_machines import MACHINE_MUTATIONS, lost_machines
from everstep.sim.scenario import MACHINE_FAULTS, machines_scenario
from planted import must_be_caught, planted_bugs, recorded_for_all
from seeds import amounts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", amounts(6, 300))
def test_lost_machines_lose_nothing_and_none_is_stuck(seeds: int) -> None:
    for seed in range(seeds):
        try:
            lost_machines(seed)
        except Exception as error:  # whatever it is, the seed that shows it must be told
            pytest.fail(f"{error}; repeat with: python -m everstep.sim --mix machines --seed {seed} --trace")


@pytest.mark.timeout(600)
@planted_bugs(MACHINE_MUTATIONS)
def test_planted_bug_is_caught(mutation: Mutation, searched: bool) -> None:
    must_be_caught("machines", mutation, searched, lost_machines)


def test_every_bug_has_a_name_and_seeds() -> None:
    recorded_for_all("machines", MACHINE_MUTATIONS)


def test_every_kind_of_fault_is_met() -> None:
    scenarios = [machines_scenario(seed) for seed in range(200)]
    assert {fault for s in scenarios for _, fault in s.faults} == set(MACHINE_FAULTS)
    assert any(len({m for m, _ in s.nodes}) < len(s.nodes) for s in scenarios)


def test_the_same_seed_gives_the_same_run() -> None:
    assert lost_machines(3).crc == lost_machines(3).crc
