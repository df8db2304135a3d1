"""Trains a table whose partitions are wanted by Zipf's law, others from the middle of the job on: for ``hot_cold``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import everstep as es
from benchmarks._hot_keys import BATCH, DIM, FIELDS, PARTITIONS, keys_of_partitions, weights_of

MARKS, SAMPLES = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
keys = keys_of_partitions()
chances = [np.cumsum(weights_of(phase)) for phase in (0, 1)]


def with_keys(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draw ``FIELDS`` keys for each sample, of partitions that its half of the job wants."""
    ids = batch["id"].numpy()
    rng = np.random.default_rng(int(ids[0]))
    draws = rng.random((len(ids), FIELDS))
    late = ids >= SAMPLES // 2
    chosen = np.where(late[:, None], np.searchsorted(chances[1], draws), np.searchsorted(chances[0], draws))
    chosen = np.minimum(chosen, PARTITIONS - 1)
    return {"keys": torch.from_numpy(keys[chosen, rng.integers(0, keys.shape[1], chosen.shape)])}


job = es.join()
table = job.sparse(es.nn.EmbeddingBag("hot", DIM), optimizer=es.SGD(lr=0.01))
loader = job.loader({"id": np.arange(SAMPLES)}, batch_size=BATCH, epochs=1, transform=with_keys, shuffle=False)
with (MARKS / f"{job.slot}.{os.getpid()}").open("w", buffering=1) as log:
    for batch in job.steps(loader):
        table(batch["keys"]).square().mean().backward()
        log.write(f"{len(batch['keys'])} {time.time():.4f}\n")
