"""The job of ``bubble_overhead``: a pipeline of two stages whose state is copied by another way in each block of steps.

Both stages go by the step's number. Each process writes what every step took: side, seconds, CPU seconds."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining

import everstep as es

SIDES = ("none", "spans", "same", "synchronous", "thread", "async_save")
LAYERS = {"small": (4, 128, 32), "gpt30m": (8, 512, 64)}  # layers, width, tokens of a sample
WORDS = {"small": 500, "gpt30m": 5000}


class First(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(tokens)
        return found


def network(size: str) -> nn.Sequential:
    """Blocks of a transformer between an embedding and the words."""
    layers, width, _ = LAYERS[size]
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(layers)
    ]
    return nn.Sequential(First(WORDS[size], width), *blocks, nn.Linear(width, WORDS[size]))


class OtherWays:
    """Copies of the state that do not go by waits."""

    def __init__(self, model: nn.Module, opt: Any, folder: Path) -> None:
        self._model, self._opt, self._folder = model, opt, folder
        self._buffers: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._saving: Any = None

    def _tensors(self) -> list[torch.Tensor]:
        kept = [value for state in self._opt.state.values() for value in state.values()]
        return [*self._model.parameters(), *(value for value in kept if isinstance(value, torch.Tensor))]

    def _copy(self) -> None:
        found = [tensor.detach() for tensor in self._tensors()]
        if len(self._buffers) != len(found):
            self._buffers = [torch.empty_like(tensor) for tensor in found]
        for buffer, tensor in zip(self._buffers, found, strict=True):
            buffer.copy_(tensor)

    def begin(self, side: str) -> None:
        if side == "synchronous":
            self._copy()
        elif side == "thread":
            self._thread = threading.Thread(target=self._copy)
            self._thread.start()
        elif side == "async_save":
            if self._saving is not None:
                self._saving.result()
            state = {str(number): tensor for number, tensor in enumerate(self._tensors())}
            self._saving = dcp.async_save(state, checkpoint_id=str(self._folder), no_dist=True)

    def end(self) -> None:
        """The optimizer is about to step."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=LAYERS, default="small")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=4, help="steps, of which the first is left out")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = es.join(mode="pipeline")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job.process_index % len(cores)]})
    tokens, batch = LAYERS[args.size][2], 2 * args.microbatches
    steps = args.rounds * len(SIDES) * args.block
    text = torch.randint(0, WORDS[args.size], (batch * steps, tokens + 1), generator=torch.Generator().manual_seed(0))

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())

    model = job.pipeline(
        network(args.size), schedule=pipelining.Schedule1F1B, microbatches=args.microbatches, loss_fn=loss
    )
    opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    engine: Any = job._engine
    copies, ways = engine.copies, OtherWays(model, opt, Path(args.out) / f"saved{job.process_index}")
    engine.copies = None
    found: list[tuple[str, float, float]] = []
    last_s, last_cpu_s = 0.0, 0.0
    for samples in job.steps(job.loader({"text": text.numpy()}, batch_size=batch, epochs=1)):
        side = SIDES[job.step // args.block % len(SIDES)]
        now_s, now_cpu_s = time.perf_counter(), time.process_time()
        if job.step and (job.step - 1) % args.block:
            found.append((SIDES[(job.step - 1) // args.block % len(SIDES)], now_s - last_s, now_cpu_s - last_cpu_s))
        last_s, last_cpu_s = now_s, now_cpu_s
        ways.begin(side)
        opt.zero_grad()
        model.step(samples["text"][:, :-1], target=samples["text"][:, 1:])
        ways.end()
        opt.step()
        engine.copies = copies if SIDES[(job.step + 1) // args.block % len(SIDES)] == "spans" else None
    facts = {"steps": found, "batch": batch}
    if copies is not None:
        totals = copies.totals
        facts["copied"], facts["inside"] = totals.copied_bytes, totals.inside_bytes + totals.late_bytes
        facts["copies"], facts["overruns"] = totals.copies, totals.overruns
    (Path(args.out) / f"stage{job.process_index}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
