"""torchrun's elastic training as its tutorial has it: a snapshot every few steps, all processes restart on a loss.

torchrun --nproc-per-node 3 --max-restarts 20 benchmarks/baselines/torchrun_elastic.py --record FOLDER --steps 100000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from replica import StepLog, batches, network, optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--record", required=True, help="folder of the records of steps, and of the snapshot")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    snapshot = Path(args.record) / "snapshot.pt"
    torch.manual_seed(0)
    model = DistributedDataParallel(network(args.mb))
    opt = optimizer(model)
    step = 0
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        step = state["step"]
    log = StepLog(args.record, f"w{rank}")
    data = batches(rank, size, args.batch_size, step)
    while step < args.steps:
        image, label = next(data)
        loss = nn.functional.cross_entropy(model(image), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        log.step(step, str(size))
        if rank == 0 and step % args.every == 0:
            part = snapshot.with_suffix(".part")
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}, part)
            part.replace(snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
