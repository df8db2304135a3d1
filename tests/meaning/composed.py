"""Which samples made up each step of a job of consistency sync: the order of shards among workers is not fixed there.

Each worker notes which batches its script took, and what it computed for which step. Plain PyTorch then takes batches
of just these samples: the last iteration of each worker for a step is one, so are those before, and so on. Batches that
no step has consumed are not taken. The workers begin together: a script's own counters would differ otherwise.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from everstep.api.ps_loop import PsLoop
from everstep.api.schedule_waits import ScheduleWaits
from everstep.model.shard import split_key
from everstep.net.messages import ClockReported
from everstep.tables.staleness_gate import StalenessGate
from everstep.tables.worker_protocol import RangeWork

_TOGETHER_S = 20.0

Part = tuple[int, int, int, int]  # dataset, epoch, lo, hi
Steps = tuple[tuple[Part, ...], ...]


def note_parts(path: str) -> None:
    """From now on this worker writes a line for each batch that its script takes, and for each range of a step."""
    following, ready = PsLoop._next, StalenessGate.ready

    def note(step: int, work: RangeWork) -> None:
        dataset, epoch, _ = split_key(work.lease.shard)
        with Path(path).open("a") as file:
            file.write(f"{step} {dataset} {epoch} {work.lo} {work.hi}\n")

    def noted_next(self: PsLoop, *args: Any) -> Any:
        item = following(self, *args)
        if item is not None and item.work is not None:
            note(-1, item.work)
        return item

    def noted_ready(self: StalenessGate, works: tuple[RangeWork, ...], *args: Any) -> Any:
        for work in works:
            note(self._step, work)
        return ready(self, works, *args)

    PsLoop._next = noted_next  # type: ignore[method-assign]
    StalenessGate.ready = noted_ready  # type: ignore[method-assign]


def begin_together(folder: Path, slot: int, workers: int) -> None:
    """This worker's first batch is begun once all have one in hand and the master knows it, or after a while."""
    turn = ScheduleWaits.turn

    def together(self: ScheduleWaits, *args: Any) -> bool:
        begun = turn(self, *args)
        driver = self._driver
        if begun and driver.admission.gate is not None:
            ScheduleWaits.turn = turn  # type: ignore[method-assign]
            with driver.lock:
                place = driver.admission.due(again=True)
            if place is not None:
                driver.runtime.call(ClockReported(place), _TOGETHER_S)
            (folder / f"begins-{slot}").touch()
            limit = time.monotonic() + _TOGETHER_S
            while len(list(folder.glob("begins-*"))) < workers and time.monotonic() < limit:
                time.sleep(0.01)
        return begun

    ScheduleWaits.turn = together  # type: ignore[method-assign]


def steps_of(folder: Path) -> Steps:
    """All iterations of the job, and of the one that went on from it, from what their workers noted."""
    return _steps_of(folder, "0") + _steps_of(folder, "1")


def _steps_of(folder: Path, life: str) -> Steps:
    found: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for path in folder.glob(f"*.parts-{life}-*"):
        lines = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        by_step: dict[int, list[Part]] = defaultdict(list)
        for _, *part in (line for line in lines if line[0] < 0):
            step = _step_of(part, lines)
            if step >= 0:
                by_step[step].append((part[0], part[1], part[2], part[3]))
        for step, parts in by_step.items():
            for back, part in enumerate(reversed(parts)):
                found[step, -back].append(part)
    return tuple(tuple(sorted(found[key])) for key in sorted(found))


def _step_of(part: list[int], lines: list[tuple[int, ...]]) -> int:
    """The step that consumed the first sample of ``part``; -1: none."""
    dataset, epoch, lo, _ = part
    steps = (s for s, *of in lines if s >= 0 and of[:2] == [dataset, epoch] and of[2] <= lo < of[3])
    return next(steps, -1)
