"""A small model with a witness beside it; ``benchmarks.witness`` runs it and kills what belongs to it.

``--loops 1,2``: two loops, over one epoch and two. ``--accumulate K``: ``opt.step()`` in every K-th step.
``--rest``: ``opt.step()`` behind each loop too, for what it has left. ``--leave-out N``: every N-th step is left out.
``--hurry FILE``: no pauses once that file is there. ``--plant``: a fault on purpose, that the witness must find.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import everstep as es

arguments = argparse.ArgumentParser()
arguments.add_argument("--samples", type=int, default=256)
arguments.add_argument("--batch", type=int, default=16)
arguments.add_argument("--loops", default="1")
arguments.add_argument("--accumulate", type=int, default=1)
arguments.add_argument("--rest", action="store_true")
arguments.add_argument("--leave-out", type=int, default=0)
arguments.add_argument("--pause", type=float, default=0.0)
arguments.add_argument("--hurry", default="")
arguments.add_argument("--plant", default="", choices=("", "twice", "lost", "step"))
args = arguments.parse_args()
loops = [int(n) for n in args.loops.split(",")]

torch.set_num_threads(1)
job = es.join()
on_ps = job.spec.ps > 0
rng = np.random.default_rng(0)
data = {
    "row": np.arange(args.samples),
    "ids": rng.integers(0, 50, args.samples),
    "label": rng.normal(size=args.samples).astype(np.float32),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.witness = es.testing.Witness(job, args.samples, sum(loops), len(loops))
        self.fields = nn.Embedding(50, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, batch):
        loss = (self.top(self.fields(batch["ids"])).squeeze(1) - batch["label"]).square().mean()
        return loss, self.witness(batch["row"])


net = Net()
if job.spec.mode == "allreduce" and job.processes_per_worker > 1:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=job.device_mesh)
model = job.replicate(job.sparse(net) if on_ps else net)
own = {id(p) for p in model.witness.parameters()}
rest = [p for p in model.parameters() if id(p) not in own]
groups = [{"params": rest}, {"params": list(model.witness.parameters()), "lr": 1.0}]
opt = job.optimizer(torch.optim.SGD(groups, lr=0.01))


def plant() -> None:
    """One step counts otherwise than it says. Nobody but the witness can know."""
    step = 5
    if args.plant == "step":
        for group in opt.param_groups:
            group["lr"] *= 2.0 if job.step == step else 0.5 if job.step == step + 1 else 1.0
    elif args.plant and job.step == step:
        for p in model.witness.parameters():
            if p.grad is not None:
                p.grad.mul_(2.0 if args.plant == "twice" else 0.0)


for epochs in loops:
    for batch in job.steps(job.loader(data, batch_size=args.batch, epochs=epochs)):
        loss, counted = model(batch)
        (loss + counted).backward()
        if args.leave_out and job.step % args.leave_out == args.leave_out - 1:
            opt.zero_grad()
            continue
        if job.step % args.accumulate == args.accumulate - 1:
            plant()
            opt.step()
            opt.zero_grad()
        job.report(loss=loss)
        if not (args.hurry and Path(args.hurry).exists()):
            time.sleep(args.pause)
    if args.rest:
        opt.step()
        opt.zero_grad()
    print(f"worker {job.slot} is through a loop of {epochs}", flush=True)
