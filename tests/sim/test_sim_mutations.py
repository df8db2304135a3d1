"""Each planted bug must be found within 3,000 seeds."""

from __future__ import annotations

import pytest

from everstep.brain.brain import Brain
from everstep.sim.mutations import MUTATIONS, Mutation, planted
from everstep.sim.simulation import simulate
from planted import must_be_caught, planted_bugs, recorded_for_all


@pytest.mark.timeout(300)
@planted_bugs(MUTATIONS)
def test_planted_bug_is_caught(mutation: Mutation, searched: bool) -> None:
    must_be_caught("jobs", mutation, searched, simulate)


def test_there_are_enough_and_all_have_names() -> None:
    assert len(MUTATIONS) >= 15
    recorded_for_all("jobs", MUTATIONS)


def test_a_planted_bug_is_gone_afterwards() -> None:
    before = Brain.validate
    mutation = next(m for m in MUTATIONS if m.name == "early-epoch")
    with planted(mutation):
        assert Brain.validate is not before
    assert Brain.validate is before
    simulate(0)
