"""The script of ``autoscale``: a model with a table on an emulated device, data from one emulated source.

What a sample costs is in the file of demands (``_demands.py``). The device sleeps in the forward pass. The source
serves one batch at a time, to all workers of the machine: a file holds when it is free again. Each worker writes a line
``samples now`` for each batch into ``SLOT.PID`` of the folder.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import nn

import everstep as es
from benchmarks._demands import Demands

HOME, BATCH, KEYS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ROWS, TABLE, DIM = 100_000, 20_000, 4

torch.set_num_threads(1)
demands = Demands()


class Net(nn.Module):
    """Sums rows up, and takes the device's time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = es.nn.Embedding("ids", DIM), nn.Linear(DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        until = time.monotonic() + demands.now().own_s * len(batch["ids"])
        found: torch.Tensor = self.out(self.rows(batch["ids"]).sum(1)).squeeze(1)
        sleep_until(until)
        return found


def sleep_until(until: float) -> None:
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(left_s)


def from_the_source(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Wait until the source has read this batch: behind all that was asked of it before."""
    cost_s = demands.now().shared_s * len(batch["ids"])
    if cost_s:
        with (HOME / "source").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            free_at = float(file.read() or 0.0)  # (the machine's monotonic clock: all processes have the same)
            until = max(time.monotonic(), free_at) + cost_s
            file.truncate(0)
            file.write(str(until))
        sleep_until(until)
    return batch


rng = np.random.default_rng(0)
ids = (np.arange(ROWS)[:, None] * 7_919 + np.arange(KEYS) * 104_729) % TABLE
data = {"ids": ids.astype(np.int64), "label": rng.standard_normal(ROWS).astype(np.float32)}
job = es.join(mode="ps")
model = job.replicate(job.sparse(Net(), optimizer=es.SGD(lr=0.001)))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
with (HOME / f"{job.slot}.{os.getpid()}").open("w", buffering=1) as log:
    for batch in job.steps(job.loader(data, batch_size=BATCH, epochs=1000, transform=from_the_source)):
        loss = nn.functional.mse_loss(model(batch), batch["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.write(f"{len(batch['ids'])} {time.monotonic():.4f}\n")
