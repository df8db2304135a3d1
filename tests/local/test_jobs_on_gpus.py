"""Jobs whose workers share a real GPU: `pytest -m gpu`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from replica_jobs import ReplicaRun

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.cold
def test_workers_of_one_gpu_are_killed_and_the_weights_have_the_same_bits(tmp_path: Path) -> None:
    digests = {}
    for name, workers, kills in (("one", 1, 0), ("two", 2, 0), ("killed", 2, 3)):
        folder = tmp_path / name
        folder.mkdir()
        run = ReplicaRun(folder)
        try:
            run.write(rows=640, epochs=4, pause_s=0.05 if kills else 0.0, batch=8, gpu=True)
            run.train(workers, "--logical-workers", "4")
            for kill in range(kills):
                run.trained(300 + 600 * kill)
                os.kill(run.pid(kill % 2), signal.SIGKILL)
            digests[name] = run.finished(kills)
            said = run.workers_said()
        finally:
            run.close()
        assert ("gradients on cuda:0 go by way of the host's memory and gloo" in said) == (workers > 1), said
    assert len(set(digests.values())) == 1, digests
