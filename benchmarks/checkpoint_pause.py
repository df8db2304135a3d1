"""How much longer a step lasts while a replica's checkpoint is written: at full speed and in idle slots, in turns.

One process with the state of a replica (Adam, 100 MB) trains. Each round has a checkpoint at full speed, one in idle
slots and another one at full speed, in an order that changes. ``KIND.longest``: the longest step behind the copy while
the file is written, over the median step without a checkpoint; ``KIND.mean``: the mean of those steps. ``copy``: the
copy at the boundary, which is the same in both, over the median step. ``longest`` and ``mean``: idle over full speed,
by round; ``longest.aa``: full speed over full speed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._measure import Result, each_round, median, say

LAYERS, WIDTH, BATCH = 8, 1024, 32
STEPS = 15  # without a checkpoint, in front of each


class _Station:
    """A worker's link to the job, of which the master takes everything."""

    slot, incarnation = 0, 1

    def __init__(self, run_dir: Path) -> None:
        from everstep.config.spec import JobSpec

        self.run_dir, self.spec = run_dir, JobSpec(name="pause", mode="allreduce")

    def call(self, request: Any, timeout_s: float) -> Any:
        from everstep.brain.events import Ok

        return Ok()


class _Training:
    """A model that is trained, and its checkpoints."""

    def __init__(self, folder: Path) -> None:
        import torch
        from torch import nn

        from everstep.allreduce.replica_checkpoint import ReplicaWriter
        from everstep.allreduce.state import ReplicaState

        self._folder, self._number = folder, 0
        self._model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(BATCH, WIDTH)
        self._state = ReplicaState([self._model], [self._optimizer], {})
        self._writer = ReplicaWriter(self._state, _Station(folder))  # type: ignore[arg-type]

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and of those at its boundary."""
        from everstep.model.group import Position

        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        trained = time.perf_counter()
        step = self._state.position.step + 1
        self._state.position = Position(step)
        self._writer.committed_everywhere(step)
        self._writer.boundary()
        end = time.perf_counter()
        return end - began, end - trained

    def checkpoint(self, idle: bool) -> tuple[float, float, float]:
        """The copy, the longest and the mean step while it is written, over the median step before."""
        from everstep.net.messages import TakeReplica

        usual = median([self.step()[0] for _ in range(STEPS)])
        self._number += 1
        self._writer.order(TakeReplica(self._number, str(self._folder), idle=idle))
        copy = self.step()[1]
        took = []
        while not self._writer.idle:
            took.append(self.step()[0])
        for file in self._folder.glob("images/*/*"):
            file.unlink()
        took = took or [usual]
        return copy / usual, max(took) / usual, sum(took) / len(took) / usual


def run(quick: bool) -> Result:
    import torch

    torch.set_num_threads(2)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-pause-") as folder:
        training = _Training(Path(folder))
        training.checkpoint(False)  # (memory is had for the first time)
        for number in each_round(3 if quick else 15):
            order = ["full", "idle", "again"]
            sides = order[number % 3 :] + order[: number % 3]
            got = {side: training.checkpoint(side == "idle") for side in sides}
            say(f"round {number}: " + ", ".join(f"{s} longest {got[s][1]:.2f} mean {got[s][2]:.2f}" for s in order))
            for side in ("full", "idle"):
                found.setdefault(f"{side}.longest", []).append(got[side][1])
                found.setdefault(f"{side}.mean", []).append(got[side][2])
                found.setdefault("copy", []).append(got[side][0])
            found.setdefault("longest", []).append(got["idle"][1] / got["full"][1])
            found.setdefault("mean", []).append(got["idle"][2] / got["full"][2])
            found.setdefault("longest.aa", []).append(got["again"][1] / got["full"][1])
    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    for name, values in found.items():
        result["figures"][name], result["spread"][name] = median(values), (min(values), max(values))
    result["aims"]["longest"], result["holds"]["longest"] = "< 1.0", result["figures"]["longest"] < 1.0
    return result
