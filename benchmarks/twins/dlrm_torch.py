"""The throughput model in plain PyTorch, one process: EmbeddingBag(sparse=True) with sparse Adagrad, all cores.

Fingerprints the same JSON line as ``throughput_model.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from throughput_model import DLRM, N_CAT, Meter, cached_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    source = {name: torch.from_numpy(a) for name, a in cached_data(args.samples, args.rows, args.data).items()}
    model = DLRM(args.dim, args.rows)
    for i in range(N_CAT):
        weight = torch.empty(args.rows, args.dim).uniform_(-0.05, 0.05)
        model.tables[i] = nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)
    sparse_opt = torch.optim.Adagrad(model.tables.parameters(), lr=0.02)
    dense_opt = torch.optim.Adam(model.dense.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    meter = Meter(args.warm)
    per_epoch = args.samples // args.batch_size
    order = torch.randperm(args.samples)
    for i in range(args.batches):
        at = (i % per_epoch) * args.batch_size
        rows = order[at : at + args.batch_size]
        batch = {name: a[rows] for name, a in source.items()}
        loss = loss_fn(model(batch), batch["label"])
        sparse_opt.zero_grad()
        dense_opt.zero_grad()
        loss.backward()
        sparse_opt.step()
        dense_opt.step()
        meter.batch(args.batch_size)
    print(json.dumps(meter.result()), flush=True)


if __name__ == "__main__":
    main()
