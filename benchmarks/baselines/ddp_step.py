"""Plain DistributedDataParallel over gloo: the step that AllReduce mode is compared with.

torchrun --nproc-per-node 2 benchmarks/baselines/ddp_step.py --mb 1 --steps 300
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
from replica import batches, network, optimizer, say_times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network(args.mb), gradient_as_bucket_view=True)
    opt = optimizer(model)
    data = batches(dist.get_rank(), dist.get_world_size(), args.batch_size)
    ends = []
    for _ in range(args.steps):
        image, label = next(data)
        loss = nn.functional.cross_entropy(model(image), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ends.append(time.perf_counter())
    if dist.get_rank() == 0:
        say_times(ends)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
