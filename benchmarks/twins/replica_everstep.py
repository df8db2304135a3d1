"""everstep's side of the AllReduce benchmarks: the network and the data of benchmarks/baselines, in mode allreduce.

everstep run --mode allreduce --workers 2 benchmarks/twins/replica_everstep.py --mb 1 --steps 300

With ``--record FOLDER`` every worker writes a line a committed step, and in the end the digest of its state. With
``everstep run --processes-per-worker N`` FSDP2 shards the network over a worker's processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep as es

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "baselines"))
from replica import StepLog, digest, network, optimizer, pictures, say_times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="stop timing after STEPS steps (default: all)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device-ms", type=float, default=0.0, help="wait so long in every forward pass, as for a GPU")
    parser.add_argument("--cold-ms", type=float, default=0.0, help="so much longer is a process's first forward pass")
    parser.add_argument("--record", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = es.join(mode="allreduce")
    net = network(args.mb)
    if job.processes_per_worker > 1:
        for part in (*(layer for layer in net if isinstance(layer, nn.Linear)), net):
            fully_shard(part, mesh=job.device_mesh)
    model = job.replicate(net)
    inner = optimizer(model)
    stepped = [0]  # times: once in every committed step, never in another iteration. (A weight is no witness: once the
    # network has learned the pictures, a step in a thousand leaves it as it was, in float32)
    inner.register_step_post_hook(lambda *_: stepped.__setitem__(0, stepped[0] + 1))
    opt = job.optimizer(inner)
    cold_s = args.cold_ms * 1e-3
    log = StepLog(args.record, f"w{job.slot}") if args.record and job.process_index == 0 else None
    before, ends = 0, []
    for batch in job.steps(job.loader(pictures(), args.batch_size, epochs=args.epochs)):
        if args.device_ms or cold_s:
            time.sleep(args.device_ms * 1e-3 + cold_s)
            cold_s = 0.0
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if log is None and stepped[0] != before:  # with logical workers an iteration is not always a step
            ends.append(time.perf_counter())
        elif log is not None:
            log.step(stepped[0], "-" if stepped[0] != before else "again")
        before = stepped[0]
    if job.chief and ends:
        say_times(ends[: args.steps or None])
    if args.record:
        state = job.state_dict()
        if log is not None:
            print("state", digest([state["models"], state["optimizers"]]), flush=True)


if __name__ == "__main__":
    main()
