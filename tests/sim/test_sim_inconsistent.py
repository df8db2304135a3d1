"""Storms in which mirrors turn out to lack something: they are made again, and nothing that was promised is lost."""

from __future__ import annotations

import random

import msgspec
import pytest

from everstep.protect.machine import Machine
from everstep.sim.scenario import Scenario, storm_scenario
from everstep.sim.simulation import Parts, simulate
from seeds import amounts


def torn_scenario(seed: int) -> Scenario:
    """The storm of ``seed``, and mirrors are torn besides."""
    rng, storm = random.Random(f"torn {seed}"), storm_scenario(seed)
    tears = [(round(rng.uniform(0.3, storm.chaos_s), 3), "tear mirror") for _ in range(rng.randint(1, 6))]
    return msgspec.structs.replace(storm, faults=tuple(sorted((*storm.faults, *tears))))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", amounts(15, 300))
def test_storms_with_torn_mirrors(seeds: int) -> None:
    """Repeat one with ``simulate(SEED, torn_scenario(SEED))``."""
    tears = 0
    for seed in range(seeds):
        trace: list[str] = []
        simulate(seed, torn_scenario(seed), trace=trace)
        tears += sum("is inconsistent" in line for line in trace)
    assert tears > seeds // 2


class Silent(Machine):
    """It says that a mirror is inconsistent to nobody: the next loss is recovered from nothing, or never."""

    def mark_inconsistent(self, mirror: int, why: str) -> None:
        super().mark_inconsistent(mirror, why)
        self._discard_inconsistent()
        self.inconsistent.clear()


def test_a_ps_that_keeps_it_to_itself_is_caught() -> None:
    for seed in range(200):
        try:
            simulate(seed, torn_scenario(seed), Parts(machine=Silent))
        except Exception:
            return
    raise AssertionError("not caught in 200 seeds")
