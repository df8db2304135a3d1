"""Jobs whose workers share a real GPU: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from replica_jobs import logical_run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.cold
def test_workers_of_one_gpu_are_killed_and_the_weights_have_the_same_bits(tmp_path: Path) -> None:
    sides = {"one": (1, ()), "two": (2, ()), "killed": (2, ((300, 0), (900, 1), (1500, 0)))}
    digests = {}
    for name, (workers, kills) in sides.items():
        digests[name], said = logical_run(tmp_path / name, workers, kills, rows=640, gpu=True)
        assert ("gradients on cuda:0 go by way of the host's memory and gloo" in said) == (workers > 1), said
    assert len(set(digests.values())) == 1, digests
