"""Workers whose scripts hold the interpreter: nobody is lost for that, in any mode."""

from __future__ import annotations

import msgspec
import pytest

from everstep.sim.group import GroupSimulation, group_scenario
from everstep.sim.scenario import random_scenario
from everstep.sim.simulation import Simulation
from seeds import amounts


def holds(n: int) -> tuple[tuple[float, str], ...]:
    return tuple((0.4 + 0.9 * i, "hold worker") for i in range(n))


@pytest.mark.parametrize("seeds", amounts(20, 400))
def test_mode_ps_waits_for_who_holds_its_interpreter(seeds: int) -> None:
    for seed in range(seeds):
        calm = random_scenario(seed)
        calm = msgspec.structs.replace(
            calm, vouch=True, loss=0.0, straggle=0.0, ps_restarts=False, faults=holds(6), chaos_s=8.0
        )
        sim = Simulation(seed, calm)
        sim.run()
        assert sim.master.brain.job.failures.worker == 0, f"seed {seed}"


@pytest.mark.parametrize("seeds", amounts(20, 400))
def test_mode_allreduce_waits_for_who_holds_its_interpreter(seeds: int) -> None:
    for seed in range(seeds):
        calm = msgspec.structs.replace(
            group_scenario(seed), vouch=True, loss=0.0, straggle=0.0, checkpoint_s=0.0, faults=holds(6), chaos_s=8.0
        )
        sim = GroupSimulation(seed, calm)
        sim.run()
        assert sim.master.brain.job.failures.worker == 0, f"seed {seed}"
