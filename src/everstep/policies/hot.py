"""Moves partitions that are touched much more than others from the ps that has too much to do to one that has little.

Keys are hashed into partitions, so what makes a partition hot is a few keys that everybody wants; no layout made in
advance knows them. A move costs contents once over the wire, a mirror for a moment, and each worker a round of opening
its shards. So nothing moves unless it pays: one ps does far more than the mean, is really busy with it, for several
looks in a row; then a few partitions at once, and then nothing for a while. One hot partition that is most of its ps's
load stays: wherever it is, there is the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from everstep.ids import PartitionId, Slot

RATIO = 1.5  # a ps with so many times the mean load has too much
BUSY = 0.3  # and only if it spends at least this share of its time at work, in cores
LOOKS = 3  # in a row that must agree
COOLDOWN_S = 60.0  # after moves, nothing is moved
BUDGET = 4  # partitions at once
GAIN = 0.1  # of the hottest ps's load that a move must at least take away for good


class PsLoad(msgspec.Struct, frozen=True):
    """Measures one ps: rows pulled and pushed a second, of its hottest partitions and of all together; cores that it
    uses."""

    rows_per_s: float
    busy: float
    partitions: Mapping[PartitionId, float]


class HotMove(msgspec.Struct, frozen=True, array_like=True):
    partition: PartitionId
    source: Slot
    target: Slot


def overloaded(loads: Mapping[Slot, PsLoad], busy: float = BUSY) -> Slot | None:
    """Return the ps that has too much to do, if any. ``busy``: cores that it must use at least."""
    if len(loads) < 2:
        return None
    mean = sum(load.rows_per_s for load in loads.values()) / len(loads)
    slot = max(loads, key=lambda s: (loads[s].rows_per_s, -s))
    hottest = loads[slot]
    return slot if mean > 0 and hottest.rows_per_s >= RATIO * mean and hottest.busy >= busy else None


def choose_moves(
    loads: Mapping[Slot, PsLoad], may_move: Callable[[PartitionId, Slot], bool], busy: float = BUSY
) -> list[HotMove]:
    """Up to ``BUDGET`` moves away from the ps that has too much, hottest partitions first, each to the ps with the
    least to do that may have it (``may_move``), and only where the larger of the two is clearly less loaded
    afterwards."""
    source = overloaded(loads, busy)
    if source is None:
        return []
    now = {slot: load.rows_per_s for slot, load in loads.items()}
    enough = GAIN * now[source]
    mean = sum(now.values()) / len(now)
    moves: list[HotMove] = []
    for partition, rows in sorted(loads[source].partitions.items(), key=lambda item: (-item[1], item[0])):
        if len(moves) == BUDGET or now[source] <= mean:
            break
        for target in sorted((s for s in now if s != source), key=lambda s: (now[s], s)):
            better = now[source] - max(now[source] - rows, now[target] + rows)
            if better < enough / BUDGET or not may_move(partition, target):
                continue
            moves.append(HotMove(partition, source, target))
            now[source] -= rows
            now[target] += rows
            break
    gained = loads[source].rows_per_s - max(now[source], max(now[m.target] for m in moves)) if moves else 0.0
    return moves if gained >= enough else []


class Patience:
    """Whether it is time to move: ``LOOKS`` in a row agree on the ps, and the last moves are long over."""

    def __init__(self) -> None:
        self._slot: Slot | None = None
        self._looks = 0
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"<patience: ps:{self._slot} for {self._looks} looks>"

    def due(self, hottest: Slot | None, at: float) -> bool:
        """Take one look at ``at`` seconds. True: call ``moved`` after having moved something."""
        self._looks = self._looks + 1 if hottest is not None and hottest == self._slot else 1
        self._slot = hottest
        return hottest is not None and self._looks >= LOOKS and at >= self._quiet_until

    def moved(self, at: float) -> None:
        self._looks, self._slot, self._quiet_until = 0, None, at + COOLDOWN_S
