"""The DDP twin of ``examples/01_flights_dlrm.py``, for comparing start-up: plain PyTorch under torchrun.

    torchrun --nproc-per-node 2 benchmarks/twins/flights_ddp.py

Same data, features, batches and network; the embedding is an ``nn.Embedding`` over hashed keys, replicated on each rank
as DDP wants it. Every rank prints ``first batch TIME`` (seconds since 1970) after its first optimizer step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from everstep.data.loader import Loader, TensorBatch
from flights import COLUMNS, N_DENSE, N_FIELDS, PATH, features
from scoring import score

ROWS = 1 << 17


class DLRM(nn.Module):
    """As in the example; ``fields`` here is a local table."""

    def __init__(self, fields: int, dense: int, dim: int = 16) -> None:
        super().__init__()
        self.fields = nn.Embedding(ROWS, dim)
        nn.init.normal_(self.fields.weight, 0.0, 0.05)
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU())
        n = fields + 1
        self.register_buffer("pairs", torch.triu_indices(n, n, 1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(n * dim + n * (n - 1) // 2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        rows = torch.cat([self.fields(batch["cat"] % ROWS), self.bottom(batch["dense"]).unsqueeze(1)], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        out: torch.Tensor = self.top(torch.cat([rows.flatten(1), products], dim=1)).squeeze(1)
        return out


class Batches(Dataset[TensorBatch]):
    """Whole batches by number, so that both sides read in the same way."""

    def __init__(self, loader: Loader, epoch: int = 0) -> None:
        self.loader, self.epoch = loader, epoch

    def __len__(self) -> int:
        return -(-self.loader.samples // self.loader.batch_size)

    def __getitem__(self, number: int) -> TensorBatch:
        lo = number * self.loader.batch_size
        return self.loader.read(self.epoch, lo, min(lo + self.loader.batch_size, self.loader.samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, help="stop after STEPS steps, without a test")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    loader = Loader(str(PATH), args.batch_size, split="90/10", columns=COLUMNS, transform=features)
    model = DistributedDataParallel(DLRM(N_FIELDS, N_DENSE))
    table = [p for name, p in model.named_parameters() if "fields" in name]
    rest = [p for name, p in model.named_parameters() if "fields" not in name]
    optimizers = [torch.optim.Adagrad(table, lr=0.1), torch.optim.Adam(rest, lr=2e-3)]
    loss_fn = nn.BCEWithLogitsLoss()
    steps = 0
    for epoch in range(args.epochs):
        batches = Batches(loader, epoch)
        sampler: DistributedSampler[TensorBatch] = DistributedSampler(batches, shuffle=False)
        for batch in DataLoader(batches, batch_size=None, sampler=sampler):
            loss = loss_fn(model(batch), batch["label"])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            steps += 1
            if steps == 1:
                print(f"first batch {time.time():.3f}", flush=True)
            if args.steps is not None and steps >= args.steps:
                dist.destroy_process_group()
                return
    if rank == 0:
        print(f"test AUC {score(model.module, loader.eval_batches()):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
