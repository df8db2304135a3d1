"""Whole jobs that are lost or stopped, and others that go on from their checkpoints on other numbers of members."""

from __future__ import annotations

import pytest

from everstep.sim.mutations import Mutation
from everstep.sim.mutations_resume import RESUME_MUTATIONS, resumed
from everstep.sim.resume import ResumeScenario, ResumeSimulation, Resumption, resume_scenario, simulate_resume
from planted import must_be_caught, planted_bugs, recorded_for_all
from seeds import amounts

# 2539 a partition that was lost, and was to begin empty, came back as it had been before it was handed over.
FOUND = (2539,)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", amounts(25, 1000))
def test_what_the_checkpoint_lacks_is_trained_again_and_nothing_else(seeds: int) -> None:
    for seed in (*FOUND, *range(seeds)):
        try:
            resumed(seed)
        except Exception as error:
            error.add_note(f"repeat with: python -m everstep.sim --mix resume --seed {seed} --trace")
            raise


def test_jobs_are_resumed_on_other_numbers_of_ps_and_workers() -> None:
    scenarios = [resume_scenario(seed) for seed in range(100)]
    every = [(s, r) for s in scenarios for r in s.resumptions]
    assert {r.stopped for _, r in every} == {False, True}
    assert any(r.ps < s.ps for s, r in every) and any(r.ps > s.ps for s, r in every)
    assert any(r.workers != s.workers for s, r in every) and any(r.parity != s.parity for s, r in every)
    simulations = [ResumeSimulation(seed, scenarios[seed]) for seed in range(8)]
    for simulation in simulations:
        simulation.run()
    assert sum(simulation.jobs - 1 for simulation in simulations) >= 8


def test_a_job_that_is_lost_between_two_checkpoints_trains_what_came_after_the_first_again() -> None:
    scenario = ResumeScenario(
        workers=2, ps=2, samples=100, mirrors=True, checkpoint_s=0.6, chaos_s=2.0, partitions=4,
        resumptions=(Resumption(at=1.8, stopped=False, ps=3, workers=1, parity="0"),),
    )  # fmt: skip
    outcome = simulate_resume(1, scenario)
    assert 100 * 2 * 4 < outcome.applied < 2 * 100 * 2 * 4  # positions, epochs, partitions: some of them twice


def test_a_job_that_is_stopped_trains_almost_nothing_again() -> None:
    """Its last checkpoint has all but what was pushed while that was written."""
    scenario = ResumeScenario(
        workers=2, ps=2, samples=100, mirrors=True, checkpoint_s=60.0, chaos_s=2.0, partitions=4,
        resumptions=(Resumption(at=1.5, stopped=True, ps=1, workers=3, parity="0"),),
    )  # fmt: skip
    sim = ResumeSimulation(1, scenario)
    assert sim.run().applied < 1.3 * 100 * 2 * 4 and sim.jobs == 2


def test_the_same_seed_gives_the_same_run() -> None:
    assert resumed(4) == resumed(4)


@pytest.mark.timeout(300)
@planted_bugs(RESUME_MUTATIONS)
def test_planted_bug_is_caught(mutation: Mutation, searched: bool) -> None:
    must_be_caught("resume", mutation, searched, resumed)


def test_every_bug_has_a_name_and_seeds() -> None:
    recorded_for_all("resume", RESUME_MUTATIONS)
