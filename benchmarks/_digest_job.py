"""The job of ``digest_cost``: each step's time and CPU, the rolling digest on and off by blocks of steps.

The network and the data are those of benchmarks/baselines. All workers go by the step's number, so that votes agree.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import everstep as es
from everstep.allreduce.rolling import RollingDigest

sys.path.insert(0, str(Path(__file__).resolve().parent / "baselines"))
from replica import network, optimizer, pictures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--block", type=int, default=20, help="steps")
    parser.add_argument("--same", action="store_true", help="never off: what differs between blocks is noise")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    real = RollingDigest.of

    def sometimes(self: RollingDigest, step: int) -> int:
        return real(self, step) if args.same or step // args.block % 2 == 0 else 0

    RollingDigest.of = sometimes  # type: ignore[method-assign]
    job = es.join(mode="allreduce")
    model = job.replicate(network(args.mb))
    opt = job.optimizer(optimizer(model))
    ends: list[tuple[int, float, float]] = []
    for batch in job.steps(job.loader(pictures(), 32, epochs=args.epochs)):
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        ends.append((job.step, time.perf_counter(), time.process_time()))
    if job.chief:
        Path(args.out).write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
