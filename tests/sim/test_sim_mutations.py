"""Each planted bug must be found within 3,000 seeds; CAUGHT says by which seed, so that the test stays fast."""

from __future__ import annotations

import pytest

from everstep.brain.brain import Brain
from everstep.sim.mutations import MUTATIONS, Mutation, catch, planted
from everstep.sim.run import simulate

# Seeds needed from 0 on, as ``python -m everstep.sim --mutations`` prints them. If brain, protocol or scenarios
# change, other seeds may be the first: then the whole range is searched.
CAUGHT: dict[str, int] = {
    "no-fence-on-open": 21,
    "fence-one-bucket": 306,
    "push-ignores-fence": 184,
    "open-ignores-fence": 8,
    "open-starts-over": 1,
    "gap-moves-watermark": 5,
    "ack-before-apply": 5,
    "repeat-applied": 6,
    "overlap-applied": 696,
    "forgets-released": 90,
    "done-of-dead-ps": 316,
    "returned-to-no-place": 1,
    "duplicate-grant": 9,
    "releases-too-much": 3,
    "releases-at-return": 1,
    "zombies-welcome": 127,
    "lease-numbers-reused": 30,
    "early-epoch": 1,
    "adopts-fenced-lease": 626,
    "early-replies": 6,
    "snapshot-ahead": 11,
    "two-masters": 7,
    "no-reconcile": 8,
    "ragged-to-one-ps": 9,
    "done-before-last-ack": 1,
    "works-before-opened": 1,
    "gap-taken-for-ack": 5,
    "never-pushes-again": 9,
    "never-asks-again": 10,
    "old-life-counts": 50,
    "never-lost": 15,
    "no-grace": 118,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_planted_bug_is_caught(mutation: Mutation) -> None:
    known = CAUGHT.get(mutation.name, 1) - 1
    found = catch(mutation, range(known, known + 1)) or catch(mutation, range(0, 3000))
    assert found is not None, f"{mutation.what}: not caught in 3,000 seeds"


def test_there_are_enough_and_all_have_names() -> None:
    assert len(MUTATIONS) >= 15
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    assert set(CAUGHT) == {m.name for m in MUTATIONS}
    assert all(n <= 3000 for n in CAUGHT.values())


def test_a_planted_bug_is_gone_afterwards() -> None:
    before = Brain.validate
    mutation = next(m for m in MUTATIONS if m.name == "early-epoch")
    with planted(mutation):
        assert Brain.validate is not before
    assert Brain.validate is before
    simulate(0)
