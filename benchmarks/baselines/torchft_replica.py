"""One replica of torchft (0.2): a Manager, its DDP wrapper and optimizer; or, with --lighthouse, the lighthouse.

Its environment: pip install torchft==0.2.0 (beside torch). One process a replica, as its README has it:

python torchft_replica.py --lighthouse 127.0.0.1:PORT --min-replicas 2 [--tuned]
python torchft_replica.py --join 127.0.0.1:PORT --name r0 --record FOLDER [--tuned] [--flat]

--tuned: shorter heartbeat and collective time-outs, the best that was found; --flat: one flat allreduce instead of DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from replica import StepLog, batches, network, optimizer, say_times

HEARTBEAT_MS = {
    False: 5000,
    True: 1000,
}  # 5000: the default; below 1000 replicas are lost for being late on a busy machine


def lighthouse(address: str, min_replicas: int, tuned: bool) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=address,
        min_replicas=min_replicas,
        join_timeout_ms=100 if tuned else 60_000,
        quorum_tick_ms=20 if tuned else 100,
        heartbeat_timeout_ms=HEARTBEAT_MS[tuned],
    )
    print("lighthouse", server.address(), flush=True)
    while os.getppid() != 1:
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse")
    parser.add_argument("--join")
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--name", default="r0")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--record", default="")
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--flat", action="store_true")
    args = parser.parse_args()
    if args.lighthouse:
        lighthouse(args.lighthouse, args.min_replicas, args.tuned)
        return

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    inner = network(args.mb)
    base = optimizer(inner)

    def load(state: dict) -> None:
        inner.load_state_dict(state["model"])
        base.load_state_dict(state["opt"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=2 if args.tuned else 60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "opt": base.state_dict()},
        min_replica_size=args.min_replicas,
        timeout=timeout,
        replica_id=args.name,
        lighthouse_addr=f"http://{args.join}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model = inner if args.flat else DistributedDataParallel(manager, inner)
    opt = Optimizer(manager, base)
    log = StepLog(args.record, args.name) if args.record else None
    data = batches(args.rank, args.size, args.batch_size)
    ends: list[float] = []
    committed = 0
    while committed < args.steps:
        image, label = next(data)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(image), label)
        loss.backward()
        if args.flat:
            flat = torch.cat([p.grad.view(-1) for p in inner.parameters() if p.grad is not None])
            manager.allreduce(flat).wait()
            at = 0
            for p in inner.parameters():
                if p.grad is not None:
                    p.grad.copy_(flat[at : at + p.numel()].view_as(p))
                    at += p.numel()
        before = manager.current_step()
        opt.step()
        if manager.current_step() > before:
            committed += 1
            ends.append(time.perf_counter())
            if log is not None:
                log.step(manager.current_step(), str(manager.num_participants()))
    if args.record == "" and args.rank == 0:
        say_times(ends)
    print(json.dumps({"ended": True}) if args.rank else "", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
