"""Jobs that are suspended and go on: seeds of the simulator."""

from __future__ import annotations

import pytest

from everstep.sim.suspend import simulate_suspend


@pytest.mark.parametrize("seed", [0, 2, 5, 14, 18, 230, 655, 2045])
def test_a_seed(seed: int) -> None:
    assert simulate_suspend(seed).applied > 0


@pytest.mark.slow
def test_many_seeds() -> None:
    for seed in range(1000, 1150):
        simulate_suspend(seed)
