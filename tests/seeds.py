"""How many random runs a test does: few by default, many with ``-m ''``, one alone where EVERSTEP_SEED names it."""

from __future__ import annotations

import os
from typing import Any

import pytest


def seeds(few: int, many: int) -> list[Any]:
    """Values for ``parametrize``: the first ``few`` of ``many`` seeds are in the default run, the others are slow."""
    one = os.environ.get("EVERSTEP_SEED")
    if one is not None:
        return [int(one)]
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, many))]


def amounts(few: int, many: int) -> list[Any]:
    """Values for ``parametrize`` of a test that goes through that number of seeds itself."""
    return [few, pytest.param(many, marks=pytest.mark.slow)]


def bunches(few: int, many: int) -> list[Any]:
    """The same as :func:`seeds`, as ranges that a test goes through: thousands of items are a second of collecting."""
    one = os.environ.get("EVERSTEP_SEED")
    if one is not None:
        return [range(int(one), int(one) + 1)]
    return [range(few), pytest.param(range(few, many), marks=pytest.mark.slow)]
