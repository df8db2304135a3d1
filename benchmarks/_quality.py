"""How good the model is that a job of ``_witness_job.py`` left, beside what plain PyTorch makes of the same data."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

KEYS, DIM, RATE = 50, 4, 0.01


class Quality(NamedTuple):
    """``loss``: of the left model over all samples; ``seeds``: of plain runs, each from a seed of its own."""

    loss: float
    seeds: tuple[float, ...]

    @property
    def of_seeds(self) -> float:
        """Return the loss over the mean of the seeds' losses."""
        return self.loss / float(np.mean(self.seeds))

    @property
    def most_of_seeds(self) -> float:
        """Return the largest ``of_seeds`` that seeds explain: three standard deviations above their mean."""
        return 1.0 + 3.0 * float(np.std(self.seeds, ddof=1)) / float(np.mean(self.seeds))


def samples_of(samples: int) -> tuple[Tensor, Tensor]:
    """Return the job's samples: ids int64 [samples], labels float32 [samples]."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, KEYS, samples)
    return torch.from_numpy(ids), torch.from_numpy(rng.normal(size=samples).astype(np.float32))


def left_loss(run_dir: Path, samples: int) -> float:
    """Return the loss of the model in ``RUN_DIR/model``, whichever mode left it."""
    model = run_dir / "model"
    whole = model / "model.safetensors"
    state = load_file(whole if whole.exists() else model / "dense.safetensors")
    fields = state.get("fields.weight")
    if fields is None:
        rows = load_file(model / "tables" / "fields.safetensors")
        fields = torch.zeros(KEYS, DIM)
        fields[rows["keys"]] = rows["values"]
    ids, label = samples_of(samples)
    said = fields[ids] @ state["top.weight"].T + state["top.bias"]
    return float((said.squeeze(1) - label).square().mean())


def plain_loss(seed: int, samples: int, batch: int, epochs: int, late: int = 0) -> float:
    """Train the job's model in plain PyTorch; return its loss over all samples. ``late``: each gradient is applied so
    many steps after it was computed, as where so many more workers train at once (mode ps, async)."""
    torch.manual_seed(seed)
    fields, top = nn.Embedding(KEYS, DIM), nn.Linear(DIM, 1)
    trained = [*fields.parameters(), *top.parameters()]
    opt = torch.optim.SGD(trained, lr=RATE)
    ids, label = samples_of(samples)
    waiting: deque[tuple[Tensor, ...]] = deque()
    for _ in range(epochs):
        for some in torch.randperm(samples).split(batch):
            loss = (top(fields(ids[some])).squeeze(1) - label[some]).square().mean()
            waiting.append(torch.autograd.grad(loss, trained))
            if len(waiting) > late:
                for p, gradient in zip(trained, waiting.popleft(), strict=True):
                    p.grad = gradient
                opt.step()
    with torch.no_grad():
        return float((top(fields(ids)).squeeze(1) - label).square().mean())


def quality(run_dir: Path, samples: int, batch: int, epochs: int, late: int = 0, seeds: int = 8) -> Quality:
    """Compare the model that a run left with plain runs of as many epochs, with gradients as late."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain = tuple(plain_loss(seed, samples, batch, epochs, late) for seed in range(seeds))
        return Quality(left_loss(run_dir, samples), plain)
    finally:
        torch.set_num_threads(threads)
