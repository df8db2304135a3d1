"""The script of ``bubble_recovery``: a pipeline of two stages, by everstep or by plain torch with checkpoints.

The first process writes a line for each step that the optimizer has taken: when, and which."""

from __future__ import annotations

import argparse
import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

WIDTH, ROWS, BATCH, MICROBATCHES, SAVE_EVERY = 256, 4096, 16, 4, 10
TIMEOUT_S = 10.0  # of torchrun's group


def network() -> list[nn.Sequential]:
    torch.manual_seed(0)
    halves = [nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)], [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)]
    return [nn.Sequential(a, nn.Tanh(), b) for a, b in halves]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].sin()


class Steps:
    """Writes the line of each step."""

    def __init__(self, path: str, first: bool, pause_s: float) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if first else -1
        self._pause_s = pause_s

    def add(self, step: int) -> None:
        if self._fd >= 0:
            os.write(self._fd, f"{time.time()} {step}\n".encode())
        time.sleep(self._pause_s)


def by_everstep(args: argparse.Namespace) -> None:
    import everstep as es

    job = es.join(mode="pipeline")
    x, y = data()
    model = job.pipeline(
        network(), schedule=pipelining.Schedule1F1B, microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    if args.each:
        Path(f"{args.steps}.{job.slot}.pid{job.process_index}").write_text(str(os.getpid()))
        args.steps = f"{args.steps}.{job.slot}"
    steps = Steps(args.steps, job.process_index == 0, args.pause)
    for batch in job.steps(job.loader({"x": x.numpy(), "y": y.numpy()}, batch_size=BATCH, epochs=1000)):
        opt.zero_grad()
        model.step(batch["x"], target=batch["y"])
        opt.step()
        steps.add(job.step)


def by_torchrun(args: argparse.Namespace) -> None:
    # With gloo's usual half an hour, a start that hangs after a kill would end the comparison.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, x, y = dist.get_rank(), *data()
    part = network()[rank]
    opt = torch.optim.AdamW(part.parameters(), lr=1e-3)
    begin, saved = 0, Path(f"{args.steps}.checkpoint{rank}")
    newest = torch.tensor([torch.load(saved)["step"] if saved.exists() else 0])
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    if int(newest):
        found = torch.load(saved if torch.load(saved)["step"] == int(newest) else f"{saved}.before")
        part.load_state_dict(found["model"])
        opt.load_state_dict(found["opt"])
        begin = int(newest)
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    steps = Steps(args.steps, rank == 0, args.pause)
    for step in range(begin, 1_000_000):
        at = step * BATCH % ROWS
        opt.zero_grad()
        if rank:
            schedule.step(target=y[at : at + BATCH])
        else:
            schedule.step(x[at : at + BATCH])
        opt.step()
        steps.add(step)
        if (step + 1) % args.save_every == 0:
            began_s = time.perf_counter()
            torch.save({"step": step + 1, "model": part.state_dict(), "opt": opt.state_dict()}, f"{saved}.new")
            if saved.exists():
                saved.replace(f"{saved}.before")
            Path(f"{saved}.new").replace(saved)
            if args.costs and not rank:
                with Path(args.costs).open("a") as file:
                    file.write(f"{time.perf_counter() - began_s}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=("everstep", "torchrun"), required=True)
    parser.add_argument("--steps", required=True)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument(
        "--each", action="store_true", help="everstep: a file of steps for each replica, and one of pids"
    )
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY)
    parser.add_argument("--costs", default="", help="a file that gets what each checkpoint cost, in seconds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    (by_everstep if given.by == "everstep" else by_torchrun)(given)
