"""Checks each of many copies of a pipeline's stages, bit for bit, against the step that the copy claims.

``job``: a real job of two stages that copies before each step. Behind each step, each stage compares its copy with all
that it had before that step. ``whole``: copies that were the same; ``torn``: that were not; ``none``: steps that left
no copy (another stage was behind). ``--copies N``: how many, of both stages together.

``killed``: a process with two stages is killed (SIGKILL) at a random moment, again and again, most often in the midst
of a copy. It writes what each stage has before each step into memory of its own. From the slots, another process takes
the newest copy, as a new life does. ``killed.torn``: it was not what the stages had; ``killed.late``: it was older than
the step before the one in hand. ``--kills N``: how many.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from benchmarks._jobs import Job
from benchmarks._measure import ROOT, Result, say
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.state import ReplicaState
from everstep.model.group import Position
from everstep.model.stage_spans import COPY_SLOTS
from everstep.pipeline.copy_slots import CopyMemory, CopyMeta
from everstep.pipeline.stage_copies import StageCopies

STAGES: Final = 2
COPIES, QUICK_COPIES = 10_000, 400
KILLS, QUICK_KILLS = 2_000, 50
WIDTH: Final = 192  # 0.44 MB of state for each stage: two blocks of a copy
KEPT: Final = 4  # steps of which the truth is kept
WAIT_S: Final = 0.0004
LEAST_S, MOST_S = 0.002, 0.03  # until a kill, from the first whole copy on
_HEAD: Final = struct.Struct("<qqq")  # step, bytes of header and body


class TruthMemory:
    """Is what each stage had before each of the newest steps, in memory that outlives the process."""

    def __init__(self, size_bytes: int) -> None:
        self._size = _HEAD.size + size_bytes
        self._memory = mmap.mmap(-1, KEPT * STAGES * self._size)
        self.clear()

    def _at(self, stage: int, step: int) -> int:
        return (stage * KEPT + step % KEPT) * self._size

    def clear(self) -> None:
        for stage in range(STAGES):
            for step in range(KEPT):
                _HEAD.pack_into(self._memory, self._at(stage, step), -1, 0, 0)

    def put(self, stage: int, step: int, state: SerializedState) -> None:
        at, header, body = self._at(stage, step), state.header, state.body.numpy().tobytes()
        _HEAD.pack_into(self._memory, at, -1, len(header), len(body))
        self._memory[at + _HEAD.size : at + _HEAD.size + len(header) + len(body)] = header + body
        _HEAD.pack_into(self._memory, at, step, len(header), len(body))

    def newest(self, stage: int) -> int:
        """Return the newest step that this stage has written; -1: none."""
        return max(int(_HEAD.unpack_from(self._memory, self._at(stage, step))[0]) for step in range(KEPT))

    def same(self, stage: int, step: int, state: SerializedState) -> bool:
        """Whether ``state`` is, bit for bit, what the stage had before ``step``."""
        at = self._at(stage, step)
        there, header, body = _HEAD.unpack_from(self._memory, at)
        text = self._memory[at + _HEAD.size : at + _HEAD.size + header + body]
        return bool(there == step and text == state.header + state.body.numpy().tobytes())


class SnapshotStage:
    """Is one stage: two layers with AdamW, and its copies."""

    def __init__(self, memory: CopyMemory, number: int) -> None:
        torch.manual_seed(number)
        self.number = number
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH + number))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = ReplicaState([self.model], [self.opt], {})
        self.copies = StageCopies(memory, number, 1, self.state, 1)
        self.backward()
        self.opt.step()  # so that the optimizer has all of its state

    def backward(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)

    def serialized(self) -> SerializedState:
        return self.state._serialized(Position(), 0, None)


def train(stages: Sequence[SnapshotStage], truth: TruthMemory, seed: int) -> None:
    """Train without an end; somebody kills this process."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    for step in range(1 << 40):
        stages[0].copies.choose(step)
        for stage in stages:
            truth.put(stage.number, step, stage.serialized())
            stage.copies.begin(step, CopyMeta(Position(step=step), 1) if stage.number == 0 else None)
        for _ in range(draws.randrange(3)):
            for stage in stages:
                stage.copies.wait_begins()
            time.sleep(draws.random() * WAIT_S)
            for stage in stages:
                stage.copies.wait_ends()
        for stage in draws.sample(stages, len(stages)):
            stage.backward()
            stage.copies.finish()
            stage.opt.step()


class KillCounts:
    """Counts what was found after kills."""

    def __init__(self) -> None:
        self.whole = self.torn = self.late = self.before = 0

    def look(self, memory: CopyMemory, truth: TruthMemory) -> None:
        """Take the newest copy, as a new life does, and compare it."""
        begun = truth.newest(0)
        newest = memory.newest()
        if newest is None:
            if begun > 0:
                self.torn += 1
            else:
                self.before += 1  # killed before the first copy was whole
            return
        meta, parts = newest
        if not all(truth.same(stage, meta.position.step, part) for stage, part in enumerate(parts)):
            self.torn += 1
        elif meta.position.step < begun - 1:
            self.late += 1
        else:
            self.whole += 1


def after_kills(kills: int, seed: int = 0, limit_s: float = 3600.0) -> KillCounts:
    """Kill so many processes, each at a random moment, and look at what is left. RuntimeError: a process ended by
    itself, or the time is up."""
    draws, counts = random.Random(seed), KillCounts()
    end = time.monotonic() + limit_s
    fds = [os.memfd_create("snapshots") for _ in range(1 + COPY_SLOTS * STAGES)]
    try:
        memory = CopyMemory(fds, STAGES)
        stages = [SnapshotStage(memory, number) for number in range(STAGES)]
        sizes = [stage.serialized() for stage in stages]
        truth = TruthMemory(max(len(one.header) + one.body.numel() for one in sizes) + 4096)
        for number in range(kills):
            stages[0].copies.adopt(-1)
            truth.clear()
            pid = os.fork()
            if not pid:
                try:
                    train(stages, truth, seed + number)
                finally:
                    os._exit(1)
            try:
                while truth.newest(STAGES - 1) < 1 and time.monotonic() < end:
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        raise RuntimeError("a process of two stages ended by itself")
                    time.sleep(0.0005)
                time.sleep(LEAST_S + draws.random() * (MOST_S - LEAST_S))
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if time.monotonic() > end:
                raise RuntimeError(f"{number} of {kills} kills in {limit_s:.0f} s")
            counts.look(memory, truth)
    finally:
        for fd in fds:
            os.close(fd)
    return counts


def in_a_job(copies: int, limit_s: float) -> list[dict[str, int]]:
    """Run a job of two stages and return what each stage found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["run", "--mode", "pipeline", "--stages", str(STAGES), "--copy-every", "1"]
        script = ["--", str(ROOT / "benchmarks" / "_snapshots_script.py")]
        script += ["--copies", str(-(-copies // STAGES)), "--out", name]
        job = Job(folder, flags, script, limit_s)
        try:
            job.finish()
        finally:
            job.main.kill()
        return [json.loads((folder / f"stage{number}.json").read_text()) for number in range(STAGES)]


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    """Check the copies of one job, and what many kills left."""
    parser = argparse.ArgumentParser(prog="bubble_snapshots")
    parser.add_argument("--copies", type=int, default=QUICK_COPIES if quick else COPIES)
    parser.add_argument("--kills", type=int, default=QUICK_KILLS if quick else KILLS)
    args = parser.parse_args(list(arguments))
    torch.set_num_threads(1)
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    figures = result["figures"]
    if args.copies:
        found = in_a_job(args.copies, 90.0 if quick else 3600.0)
        for name in ("whole", "none", "overruns", "discarded"):
            figures[f"job.{name}"] = float(sum(one[name] for one in found))
        figures["job.torn"] = float(sum(len(one["other"]) for one in found))  # type: ignore[arg-type]
        figures["job.inside"] = sum(one["inside"] for one in found) / max(1, sum(one["copied"] for one in found))
        say(f"job: {figures['job.whole']:.0f} copies bit for bit, {figures['job.torn']:.0f} torn")
    if args.kills:
        counts = after_kills(args.kills, limit_s=90.0 if quick else 3600.0)
        for name in ("whole", "torn", "late", "before"):
            figures[f"killed.{name}"] = float(getattr(counts, name))
        say(f"kills: {counts.whole} copies bit for bit, {counts.torn} torn, {counts.late} late")
    for key in ("job.torn", "killed.torn", "killed.late"):
        if key in figures:
            result["aims"][key], result["holds"][key] = "== 0", figures[key] == 0.0
    return result
