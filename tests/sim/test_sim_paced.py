"""Consistency sync and bounded under the faults of the other mixes, and bugs planted in them."""

from __future__ import annotations

import pytest

from everstep.sim.mutations import Mutation, catch
from everstep.sim.mutations_paced import PACED_MUTATIONS
from everstep.sim.scenario import paced_scenario
from everstep.sim.simulation import Parts, SimOutcome, simulate
from seeds import amounts

# Seeds needed from 0 on, as ``python -m everstep.sim --mix paced --mutations`` prints them.
CAUGHT = {
    "pushes-late": 2,
    "keeps-late": 2,
    "pushes-and-returns": 2,
    "waits-for-the-lost": 95,
    "puts-back-as-it-was": 426,
}


def paced(seed: int, parts: Parts = Parts()) -> SimOutcome:
    return simulate(seed, paced_scenario(seed), parts)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("amount", amounts(90, 600))
def test_everything_counts_once_whoever_waits_for_whom(amount: int) -> None:
    late = 0
    for seed in range(amount):
        try:
            late += paced(seed).late
        except Exception as error:
            raise AssertionError(f"{error}\nrepeat with: python -m everstep.sim --mix paced --seed {seed}") from error
    assert late > amount, "steps that nobody is late for say nothing of late parts"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", PACED_MUTATIONS, ids=lambda m: m.name)
def test_planted_bug_is_caught(mutation: Mutation) -> None:
    known = CAUGHT.get(mutation.name, 1) - 1
    found = catch(mutation, range(known, known + 1), paced) or catch(mutation, range(0, 600), paced)
    assert found is not None, f"{mutation.what}: not caught in 600 seeds"
