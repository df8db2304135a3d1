"""Trains a table most of whose rows are hardly ever used: for ``hot_cold``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

import everstep as es

MARKS, ROWS, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
DIM, FILL, IDS, HOT, COLD = 64, 2000, 2048, 0.04, 0.01
torch.set_num_threads(1)


def with_keys(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fill the table first; then draw hot rows, which are neighbours of when they were made, and one in 100 of all."""
    step = int(batch["step"][0])
    if step < ROWS // FILL:
        return {"keys": torch.arange(step * FILL, (step + 1) * FILL)}
    rng = np.random.default_rng(step)
    keys = rng.integers(0, int(HOT * ROWS), IDS)
    rare = rng.random(IDS) < COLD
    keys[rare] = rng.integers(0, ROWS, int(rare.sum()))
    return {"keys": torch.from_numpy(keys)}


job = es.join()
table = job.sparse(es.nn.Embedding("rows", DIM), optimizer=es.Adagrad(lr=0.01))
steps = np.arange(ROWS // FILL + STEPS)
with (MARKS / f"{job.slot}.{os.getpid()}").open("w", buffering=1) as log:
    loader = job.loader({"step": steps}, batch_size=1, epochs=1, transform=with_keys, shuffle=False)
    for number, batch in enumerate(job.steps(loader)):
        table(batch["keys"]).square().mean().backward()
        log.write(f"{number - ROWS // FILL} {time.time():.4f}\n")
