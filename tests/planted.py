"""Planted bugs of the simulator: by default the seeds in ``sim/caught.json`` are tried, with ``-m ''`` up to 3,000.

The seeds are those that caught a bug when they were recorded. What they show may go elsewhere when the brain acts a
little sooner or later, so each bug has several; one that still catches is enough. Where none does, the first FEW seeds
are searched, and the failure says how to record others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from everstep.sim.mutations import Mutation, catch

FILE = Path(__file__).parent / "sim" / "caught.json"
CAUGHT: dict[str, dict[str, list[int]]] = json.loads(FILE.read_text())
FEW, MANY = 300, 3000


def planted_bugs(mutations: tuple[Mutation, ...]) -> pytest.MarkDecorator:
    """Parameters ``mutation, searched``: each bug by its recorded seeds, and (slow) in a search from seed 0 on."""
    quick = [pytest.param(m, False, id=m.name) for m in mutations]
    long = [pytest.param(m, True, id=f"{m.name}-searched", marks=pytest.mark.slow) for m in mutations]
    return pytest.mark.parametrize(("mutation", "searched"), quick + long)


def must_be_caught(mix: str, mutation: Mutation, searched: bool, run: Callable[..., object]) -> None:
    if searched:
        assert catch(mutation, range(MANY), run), f"{mutation.what}: not caught in {MANY:,} seeds"
        return
    recorded = CAUGHT[mix].get(mutation.name, [])
    if any(catch(mutation, range(seed, seed + 1), run) for seed in recorded):
        return
    if catch(mutation, range(FEW), run):
        return
    pytest.fail(
        f"{mutation.what}: the seeds recorded for {mutation.name!r} ({recorded}) do not catch it any more, nor do the "
        f"first {FEW}. If the timing of the brain or the scenarios was changed on purpose, record others: "
        f"python -m everstep.sim --mix {mix} --mutation {mutation.name} --record tests/sim/caught.json"
    )


def storms_are_clean(mix: str, seeds: int, storm: Callable[[int], object]) -> None:
    """Run the first ``seeds`` storms of a mix in two processes: none may fail."""
    chunks = [range(i, min(i + 25, seeds)) for i in range(0, seeds, 25)]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        found = [f for some in pool.map(partial(_failures, storm), chunks) for f in some]
    assert not found, (
        f"{len(found)} failed; repeat with: python -m everstep.sim --mix {mix} --seed {found[0][0]} --trace"
    )


def _failures(storm: Callable[[int], object], seeds: range) -> list[tuple[int, str]]:
    found = []
    for seed in seeds:
        try:
            storm(seed)
        except Exception as error:  # whatever it is, the seed that shows it must be told
            found.append((seed, f"{type(error).__name__}: {error}"))
    return found


def recorded_for_all(mix: str, mutations: tuple[Mutation, ...]) -> None:
    assert len({m.name for m in mutations}) == len(mutations)
    assert set(CAUGHT[mix]) == {m.name for m in mutations}
    assert all(seeds and max(seeds) < MANY for seeds in CAUGHT[mix].values())
