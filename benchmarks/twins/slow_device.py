"""A training loop on an emulated accelerator: a stated time for each sample, longer where a pattern says so.

Everybody waits at its first batch until all are up; the pattern's time, and the measured time, begin there. A worker
that is started later goes on at once. Twice the batch fits into its memory. Each process writes ``SLOT.PID`` into
``--home``: a line ``samples now`` (time since that moment, seconds) for each batch. ``--static``: mode ps, each worker
has its own fixed part of the data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from benchmarks._patterns import from_words
from torch import nn

import everstep as es
from everstep.sim.stragglers import finish

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=("ps", "allreduce"), required=True)
parser.add_argument("--home", type=Path, required=True)
parser.add_argument("--pattern", type=json.loads, required=True)
parser.add_argument("--members", type=int, required=True)
parser.add_argument("--rows", type=int, required=True)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--sample-s", type=float, default=0.002)
parser.add_argument("--static", action="store_true")
parser.add_argument("--fields", type=int, default=1, help="mode ps: rows of a sample")
parser.add_argument("--keys", type=int, default=512, help="mode ps: different rows")
parser.add_argument("--dim", type=int, default=4, help="mode ps: numbers of a row")
args = parser.parse_args()

FEATURES, DIM = 16, args.dim
WAIT_S = 120.0

torch.set_num_threads(1)
pattern = from_words(args.pattern)
job = es.join(mode=args.mode)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = es.nn.Embedding("keys", DIM) if args.mode == "ps" else None
        self.dense = nn.Linear(FEATURES + (DIM if args.mode == "ps" else 0), 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"] if self.rows is None else torch.cat([batch["x"], self.rows(batch["key"]).mean(dim=1)], dim=1)
        device(len(x))
        return self.dense(x)


def everybody_up() -> float:
    """When the last of the first ``--members`` workers was ready, seconds since 1970."""
    (args.home / f"ready-{job.slot}").touch()
    until = time.monotonic() + WAIT_S
    while True:
        ready = sorted(p.stat().st_mtime for p in args.home.glob("ready-*"))
        if len(ready) >= args.members:
            return ready[args.members - 1]
        if time.monotonic() > until:
            raise SystemExit(f"{len(ready)} of {args.members} workers came within {WAIT_S:.0f} s")
        time.sleep(0.005)


def device(samples: int) -> None:
    """So long the emulated accelerator takes for them now."""
    now = time.time() - began
    until = began + finish(pattern, job.slot, now, samples * args.sample_s)
    while (left := until - time.time()) > 0:
        time.sleep(left)


def with_keys(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``--fields`` rows of ``--keys`` for each sample, scattered."""
    fields = torch.arange(args.fields) * 104_729
    return {**batch, "key": (batch["id"].unsqueeze(1) * 7_919 + fields) % args.keys}


rng = np.random.default_rng(0)
x = rng.standard_normal((args.rows, FEATURES), dtype=np.float32)
data = {"x": x, "y": x.sum(axis=1, keepdims=True), "id": np.arange(args.rows, dtype=np.int64)}
name = "train"
if args.static:
    name = f"part{job.slot}"
    data = {k: v[job.slot :: args.members] for k, v in data.items()}

net: nn.Module = Net()
if args.mode == "ps":
    net = job.sparse(net, optimizer=es.SGD(lr=0.02))
net = job.replicate(net)
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.02))
began = 0.0
with (args.home / f"{job.slot}.{os.getpid()}").open("w", buffering=1) as log:
    loader = job.loader(
        data, batch_size=args.batch, epochs=1, name=name, transform=with_keys, largest_batch=2 * args.batch
    )
    for batch in job.steps(loader):
        if not began:
            began = everybody_up()
        loss = nn.functional.mse_loss(net(batch), batch["y"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.write(f"{len(batch['x'])} {time.time() - began:.4f}\n")
