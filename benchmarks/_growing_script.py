"""Trains a table that gets new rows with each batch, at a steady pace: for ``memory_growth``."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from torch import nn

import everstep as es

SAMPLES, BATCH, PAUSE_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
KEYS, DIM = 8, 32


class Net(nn.Module):
    """Sums rows up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = es.nn.Embedding("ids", DIM), nn.Linear(KEYS * DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.out(self.rows(batch["ids"]).flatten(1)).squeeze(1)
        return found


ids = np.arange(SAMPLES * KEYS, dtype=np.int64).reshape(SAMPLES, KEYS)  # each key is new
job = es.join()
model = job.replicate(job.sparse(Net()))
opt = job.optimizer(torch.optim.Adam(model.parameters()))
loader = job.loader({"ids": ids, "label": (ids.sum(1) % 3 == 0).astype(np.float32)}, batch_size=BATCH, epochs=1)
for batch in job.steps(loader):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(PAUSE_S)
