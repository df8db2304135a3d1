"""The job of ``bubble_overhead``: a pipeline of two stages whose state is copied by another way in each block of steps.

Both stages go by the step's number. Each process writes what every step took: number, seconds, CPU seconds."""

from __future__ import annotations

import argparse
import csv
import json
import math
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
from benchmarks._bubble_sides import DRAIN, OTHERS, SETTLE, Cycle
from everstep.brain.events import CheckpointAsked, CheckpointBegun
from everstep.cli.link import ask_master, ask_view
from everstep.errors import EverstepError
from everstep.model.reasons import CheckpointReason

LAYERS = {"small": (4, 128, 32), "gpt30m": (8, 512, 64)}  # layers, width, tokens of a sample
WORDS = {"small": 500, "gpt30m": 5000}
RECORDED = Path(__file__).parents[1] / "examples" / "recordings" / "bytedance-pipeline-st-excerpt.csv"
COLD = 4  # first copies, into memory that is new: what they stall is told apart
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

    def __init__(self, model: nn.Module, opt: Any, folder: Path, stage: int, stages: int) -> None:
        self._model, self._opt, self._folder = model, opt, folder
        self._stage, self._stages, self._steps = stage, stages, 0
        self._flash: Any = None
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
        elif side == "flash":
            self._flash_save()

    def _flash_save(self) -> None:
        """Have DLRover's flash checkpoint copy the state into its shared memory, by its own code."""
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        if self._flash is None:
            os.environ |= {"LOCAL_RANK": str(self._stage), "LOCAL_WORLD_SIZE": str(self._stages)}
            os.environ |= {"RANK": str(self._stage), "ELASTIC_JOB_NAME": f"bubble{os.getppid()}"}
            shards = {"local_shard_num": self._stages, "global_shard_num": self._stages}
            self._flash = DdpCheckpointer(str(self._folder.parent / "flash"), **shards)
        self._steps += 1
        state = {"model": self._model.state_dict(), "opt": self._opt.state_dict()}
        path = str(self._folder.parent / "flash" / str(self._steps))
        self._flash.save_checkpoint(self._steps, state, path, storage_type=StorageType.MEMORY)

    def end(self) -> None:
        """The optimizer is about to step."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """End DLRover's own process: it holds what tells everstep that this one has ended."""
        saver = None if self._flash is None else getattr(self._flash._engine, "saver_proc", None)
        if saver is not None:
            saver.kill()
            saver.join()

    def settle(self) -> None:
        """Wait for what the last side left behind."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None


class Durable:
    """Has one checkpoint written after the other, by the job's own master, while it is ``wanted``; in the first
    stage. ``writing``: one is on its way."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.wanted = threading.Event()
        self.writing = False
        self.took_s: list[float] = []
        self.error = ""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.wanted.wait()
            try:
                self.writing = True
                self._take()
            except EverstepError as error:
                self.error = str(error)
                time.sleep(0.5)
            finally:
                self.writing = False

    def _take(self) -> None:
        begun = ask_master(self._run_dir, CheckpointAsked(CheckpointReason.ASKED, True))
        if not isinstance(begun, CheckpointBegun):
            time.sleep(0.1)  # (refused: the last one is just being ended)
            return
        while True:
            time.sleep(0.05)
            found = ask_view(self._run_dir).checkpoint
            if found is not None and found.newest >= begun.checkpoint:
                self.took_s.append(found.took_s)
                return
            if found is not None and found.writing != begun.checkpoint:
                return  # (given up)


def busy_s() -> float:
    """Return the seconds that this machine's processors were busy, or taken by its host."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, soft, stolen = map(int, fields[:8])
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=LAYERS, default="small")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1 << 30, help="at most")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since 1970: end then")
    parser.add_argument("--others", default=",".join(OTHERS), help="other ways to copy, by commas")
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", type=int, default=4, help="of an emulated pipeline")
    parser.add_argument("--emulated", default="", help="a schedule: stages sleep as long as recorded ones computed")
    args = parser.parse_args()
    cycle = Cycle([side for side in args.others.split(",") if side])
    torch.set_num_threads(1)
    job = es.join(mode="pipeline")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job.process_index % len(cores)]})
    tokens, batch = LAYERS[args.size][2], 2 * args.microbatches
    over = Path(args.out) / "over"  # the step that is the last one, by the first stage
    text = torch.randint(0, WORDS[args.size], (batch * 64, tokens + 1), generator=torch.Generator().manual_seed(0))

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
    copies, ways = (
        engine.copies,
        OtherWays(model, opt, Path(args.out) / f"saved{job.process_index}", job.process_index, engine.unit.size),
    )
    durable = Durable(job._runtime.run_dir) if not job.process_index and "durable" in args.others else None

    def copy(side: str) -> None:
        """Have the next step copied in waits, or be as in a job without copies."""
        now = copies if side in ("spans", "durable", DRAIN) else None
        engine.copies = model.runner.recorder.copies = engine.unit.waits = now

    copy("none")
    found: list[tuple[int, float, float, bool]] = []
    cold = None if copies is None else copies.totals
    last_s = last_cpu_s = 0.0
    first = 0.0, 0.0, 0.0
    for samples in job.steps(job.loader({"text": text.numpy()}, batch_size=batch, epochs=1_000_000)):
        now_s, now_cpu_s = time.perf_counter(), time.process_time()
        if found or last_s:
            writing = durable is not None and durable.writing
            found.append((job.step - 1, now_s - last_s, now_cpu_s - last_cpu_s, writing))
        else:
            first = now_s, now_cpu_s, busy_s()
        if not job.process_index and not over.exists() and (job.step >= args.steps or time.time() > args.until):
            (over.parent / "over.new").write_text(str(job.step + 3))  # (the others read it before they are there)
            (over.parent / "over.new").replace(over)
        if over.exists() and job.step >= int(over.read_text()):
            break
        if cold is not None and cold.copies < COLD:
            cold = copies.totals
        turn = cycle.turn(job.step)
        if turn.side == SETTLE:
            ways.settle()
        if durable is not None:
            (durable.wanted.set if turn.side == "durable" else durable.wanted.clear)()
        last_s, last_cpu_s = time.perf_counter(), time.process_time()
        ways.begin(turn.side)
        opt.zero_grad()
        given, target = samples["text"][:, :-1], samples["text"][:, 1:]
        if args.emulated:
            given, target = given.float(), target.float()
        model.step(given, target=target)
        ways.end()
        opt.step()
        copy(cycle.turn(job.step + 1).side)
    took = [now - then for now, then in zip((now_s, now_cpu_s, busy_s()), first, strict=True)]
    if durable is not None:
        durable.wanted.clear()
    ways.close()
    copy("spans")  # (as the engine ends it)
    facts = {"steps": found, "batch": batch, "wall_s": took[0], "cpu_s": took[1], "busy_s": took[2]}
    facts["durable_s"] = durable.took_s if durable is not None else []
    facts["error"] = durable.error if durable is not None else ""
    if copies is not None and cold is not None:
        totals = copies.totals
        facts["copied"] = totals.copied_bytes - cold.copied_bytes
        facts["inside"] = totals.inside_bytes + totals.late_bytes - cold.inside_bytes - cold.late_bytes
        facts["copies"], facts["overruns"] = totals.copies - cold.copies, totals.overruns
        facts["begin_s"], facts["stall_s"] = totals.begin_s - cold.begin_s, totals.stall_s - cold.stall_s
        facts["cold_stall_s"] = cold.stall_s
    (Path(args.out) / f"stage{job.process_index}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
