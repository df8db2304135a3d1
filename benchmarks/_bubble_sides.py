"""Says which way to copy each step of ``bubble_overhead`` takes, and what the steps say of each: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks._measure import median

FEW: Final = ("none", "spans", "same")
"""A round, of one step each: without copies, with copies in waits, without copies again."""
SETTLE, DRAIN = "settle", "drain"
"""Steps behind a block, not counted: without copies; with them, until the last checkpoint is written."""
BLOCKS: Final = {"synchronous": 3, "thread": 3, "async_save": 3, "flash": 3, "durable": 8}
"""Steps of a block of each other side. The first one is not counted: what the side leaves behind in the step after it
is there from the second one on."""
OTHERS: Final = ("synchronous", "thread", "async_save", "durable")
ROUNDS: Final = 10  # between blocks of the others


class Turn(NamedTuple):
    """Is what one step is for; ``cycle`` and ``round`` count from 0. ``round``: -1 behind the rounds of a cycle."""

    side: str
    counts: bool
    cycle: int
    round: int


class Step(NamedTuple):
    """Is what a step took, in seconds; ``cpu_s``: of all stages; ``writing``: a checkpoint was written meanwhile."""

    turn: Turn
    wall_s: float
    cpu_s: float
    writing: bool = False


class Cycle:
    """Is the order of sides: rounds of ``FEW``, then a block of each of ``others``, and again."""

    def __init__(self, others: Sequence[str] = OTHERS, rounds: int = ROUNDS) -> None:
        self._turns = [(side, True, number) for number in range(rounds) for side in FEW]
        for side in others:
            self._turns += [(side, number > 0, -1) for number in range(BLOCKS[side])]
            self._turns += [(DRAIN, False, -1)] * (8 if side == "durable" else 0)
            self._turns += [(SETTLE, False, -1)] * 2

    def turn(self, step: int) -> Turn:
        cycle, at = divmod(step, len(self._turns))
        side, counts, number = self._turns[at]
        return Turn(side, counts, cycle, number)


class Ratios(NamedTuple):
    """Is what each side took beside none: by name, of time and of CPU. ``none_s``: of the steps without copies."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    none_s: list[float]
    none_cpu_s: list[float]


def ratios(steps: Sequence[Step], warm_up: int = 1) -> Ratios:
    """Return them by rounds, and by blocks of the others. ``spans``: beside the mean of the steps before and behind it,
    so that a drift of the machine is in both; ``aa``: the one behind beside the one before. The first ``warm_up``
    rounds are left out."""
    rounds: dict[tuple[int, int], dict[str, Step]] = {}
    blocks: dict[tuple[int, str], list[Step]] = {}
    for step in steps:
        turn = step.turn
        if step.writing and turn.side != "durable":
            continue
        if turn.round >= 0:
            rounds.setdefault((turn.cycle, turn.round), {})[turn.side] = step
        elif turn.counts:
            blocks.setdefault((turn.cycle, turn.side), []).append(step)
    out = Ratios({"spans": [], "aa": []}, {"spans": [], "aa": []}, [], [])
    usual: dict[int, list[Step]] = {}
    for (cycle, _), found in sorted(rounds.items())[warm_up:]:
        if len(found) < len(FEW):
            continue
        none, spans, same = (found[side] for side in FEW)
        out.wall["spans"].append(spans.wall_s / ((none.wall_s + same.wall_s) / 2))
        out.wall["aa"].append(same.wall_s / none.wall_s)
        out.cpu["spans"].append(spans.cpu_s / ((none.cpu_s + same.cpu_s) / 2))
        out.cpu["aa"].append(same.cpu_s / none.cpu_s)
        out.none_s.append((none.wall_s + same.wall_s) / 2)
        out.none_cpu_s.append((none.cpu_s + same.cpu_s) / 2)
        usual.setdefault(cycle, []).extend((none, same))
    for (cycle, side), block in blocks.items():
        if cycle not in usual or len(block) < BLOCKS[side] - 1:
            continue
        none_s, none_cpu_s = median([s.wall_s for s in usual[cycle]]), median([s.cpu_s for s in usual[cycle]])
        out.wall.setdefault(side, []).append(sum(s.wall_s for s in block) / len(block) / none_s)
        out.cpu.setdefault(side, []).append(sum(s.cpu_s for s in block) / len(block) / none_cpu_s)
    return out


def verdict(between: tuple[float, float], most: float) -> str:
    """Say what a 95 % interval shows of "less than ``most``": shown, refuted, or undecided: the noise is larger than
    the effect."""
    if not all(map(math.isfinite, between)):
        return "undecided"
    return "shown" if between[1] < most else "refuted" if between[0] >= most else "undecided"
