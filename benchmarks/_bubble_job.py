"""The job of ``bubble_overhead``: a pipeline of two stages whose state is copied by another way in each block of steps.

Both stages go by the step's number. Each process writes what every step took: side, seconds, CPU seconds."""

from __future__ import annotations

import argparse
import csv
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining

import everstep as es

SIDES = ("none", "spans", "same", "synchronous", "thread", "async_save")
FEW = SIDES[:3]  # what the aim is about
LAYERS = {"small": (4, 128, 32), "gpt30m": (8, 512, 64)}  # layers, width, tokens of a sample
WORDS = {"small": 500, "gpt30m": 5000}
RECORDED = Path(__file__).parents[1] / "examples" / "recordings" / "bytedance-pipeline-st-excerpt.csv"
FLOATS = 250_000  # parameters of each stage of an emulated pipeline
RECORDED_STAGES = 4
FORWARD_S = 0.004  # mean of a microbatch's forward in its first stage; all else is in the recorded proportion


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


class _Backward(torch.autograd.Function):
    """Gives its input on, and sleeps on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Any) -> torch.Tensor:
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.part.next_s(1))
        return grads[0], None


class EmulatedPart(nn.Module):
    """Sleeps in place of computing, as long as one microbatch after the other took in a recorded stage. Its parameters
    are as large as is said, and hardly used."""

    def __init__(self, times: Sequence[tuple[float, float]], floats: int, first: int = 0) -> None:
        """``first``: the recorded microbatch that it begins with."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(floats))
        self._times, self._calls = times, [first, first]

    def next_s(self, way: int) -> float:
        """Return how long the next forward (0) or backward (1) takes."""
        self._calls[way] += 1
        return self._times[self._calls[way] % len(self._times)][way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.next_s(0))
        y: torch.Tensor = _Backward.apply(x, self)  # type: ignore[no-untyped-call]
        return y + self.weight[: x.shape[-1]]


def recorded_as(stage: int, stages: int) -> int:
    """Return the recorded stage that one of ``stages`` sleeps as. The first is the first, the last is the last, and
    the two in the middle stand for all others."""
    if stage in (0, stages - 1):
        return 0 if stage == 0 else RECORDED_STAGES - 1
    return 1 + (stage - 1) * (RECORDED_STAGES - 2) // (stages - 2)


def emulated(stages: int, parts: int, floats: int) -> list[nn.Module]:
    """Return parts of a recorded pipeline. Several parts of one stage share its recorded time alike. Stages that sleep
    as the same recorded one begin at different steps of the recording."""
    recorded: list[list[tuple[float, float]]] = [[] for _ in range(RECORDED_STAGES)]
    with RECORDED.open() as file:
        for row in csv.DictReader(file):
            recorded[int(row["stage"])].append((float(row["forward_s"]), float(row["backward_s"])))
    scale = FORWARD_S / (sum(f for f, _ in recorded[0]) / len(recorded[0])) * stages / parts
    made: list[nn.Module] = []
    for part in range(parts):
        times = recorded[recorded_as(part % stages, stages)]
        first = (part % stages) * len(times) // stages if stages > RECORDED_STAGES else 0
        made.append(EmulatedPart([(f * scale, b * scale) for f, b in times], floats, first))
    return made


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
    parser.add_argument("--few", action="store_true", help="without the other ways to copy")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="end with the round that is in hand then; 0: no limit"
    )
    parser.add_argument("--stages", type=int, default=4, help="of an emulated pipeline")
    parser.add_argument("--emulated", default="", help="a schedule: stages sleep as long as recorded ones computed")
    args = parser.parse_args()
    sides = FEW if args.few else SIDES
    torch.set_num_threads(1)
    job = es.join(mode="pipeline")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job.process_index % len(cores)]})
    tokens, batch = LAYERS[args.size][2], 2 * args.microbatches
    steps = args.rounds * len(sides) * args.block
    over = Path(args.out) / "over"  # the step that is the last one, by the first stage
    began_s = time.monotonic()
    text = torch.randint(0, WORDS[args.size], (batch * steps, tokens + 1), generator=torch.Generator().manual_seed(0))

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())

    if args.emulated:
        parts = 2 if "Interleaved" in args.emulated else 1
        schedule = getattr(pipelining, args.emulated)
        made: Any = emulated(args.stages, parts * args.stages, FLOATS // parts)
        model = job.pipeline(
            made, schedule=schedule, microbatches=args.microbatches, loss_fn=lambda out, y: (out - y).square().mean()
        )
    else:
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
        side = sides[job.step // args.block % len(sides)]
        if args.seconds and not job.process_index and not over.exists() and time.monotonic() - began_s > args.seconds:
            per_round = len(sides) * args.block  # (two rounds on: the others read it before they are there)
            (over.parent / "over.new").write_text(str((job.step // per_round + 2) * per_round))
            (over.parent / "over.new").replace(over)
        if args.seconds and over.exists() and job.step >= int(over.read_text()):
            break
        now_s, now_cpu_s = time.perf_counter(), time.process_time()
        if job.step and (job.step - 1) % args.block:
            found.append((sides[(job.step - 1) // args.block % len(sides)], now_s - last_s, now_cpu_s - last_cpu_s))
        last_s, last_cpu_s = now_s, now_cpu_s
        ways.begin(side)
        opt.zero_grad()
        given, target = samples["text"][:, :-1], samples["text"][:, 1:]
        if args.emulated:
            given, target = given.float(), target.float()
        model.step(given, target=target)
        ways.end()
        opt.step()
        engine.copies = copies if sides[(job.step + 1) // args.block % len(sides)] == "spans" else None
    facts = {"steps": found, "batch": batch}
    if copies is not None:
        totals = copies.totals
        facts["copied"], facts["inside"] = totals.copied_bytes, totals.inside_bytes + totals.late_bytes
        facts["copies"], facts["overruns"] = totals.copies, totals.overruns
    (Path(args.out) / f"stage{job.process_index}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
