"""Trains a model of a given size: for ``estimate``. ``sparse KEYS SAMPLES EPOCHS``: a table, 8 random keys a sample.
``dense WIDTH SAMPLES EPOCHS [MODE]``: four square layers."""

from __future__ import annotations

import sys
from typing import Literal, cast

import numpy as np
import torch
from torch import nn

import everstep as es

KIND, (SIZE, SAMPLES, EPOCHS) = sys.argv[1], map(int, sys.argv[2:5])
MODE = cast(Literal["ps", "allreduce"], sys.argv[5] if len(sys.argv) > 5 else "ps")
FIELDS, DIM = 8, 16
BATCH = 512 if KIND == "sparse" else 64


class Sparse(nn.Module):
    """Sums rows up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = es.nn.Embedding("ids", DIM), nn.Linear(FIELDS * DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.out(self.rows(batch["ids"]).flatten(1)).squeeze(1)
        return found


class Dense(nn.Module):
    """Has four square layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(SIZE, SIZE), nn.Tanh()]  # (dead ReLUs: denormal numbers, and slower and slower steps)
        self.layers, self.out = nn.Sequential(nn.Linear(FIELDS, SIZE), *layers), nn.Linear(SIZE, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layers(batch["ids"].float() / 1000)).squeeze(1)
        return found


random = np.random.default_rng(1)
ids = random.integers(0, SIZE if KIND == "sparse" else 1000, (SAMPLES, FIELDS), dtype=np.int64)
label = (ids.sum(1) % 3 == 0).astype(np.float32)
job = es.join(mode=MODE)
model = job.replicate(job.sparse(Sparse()) if KIND == "sparse" else Dense())
opt = job.optimizer(torch.optim.Adam(model.parameters()))
loader = job.loader({"ids": ids, "label": label}, batch_size=BATCH, epochs=EPOCHS)
for batch in job.steps(loader):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad()
    loss.backward()
    opt.step()
