"""Spreads hot partitions and packs cold ones: from the ps that has too much to do to those that have little.

Keys are hashed into partitions, so what makes a partition hot is a few keys that everybody wants; no layout made in
advance knows them. The slowest ps sets everybody's pace. A move costs: contents go over the wire, and all workers open
their shards again. So a partition moves only if it saves more time than its move takes, for as long as the load is
expected to stay: as long as it has lasted. Hot ones go first. Where one has so much to do that it cannot move, the cold
ones beside it go, and are packed elsewhere. If one partition alone is more than a ps should have, no placement helps: a
partition is never divided. That is said, with its keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from everstep.ids import PartitionId, Slot

RATIO = 1.2  # a ps with so many times the mean load has too much
BEYOND = 1.5  # a partition with so many times the mean load of a ps is more than one should have
BUSY = 0.3  # and only if it spends at least this share of its time at work, in cores
LOOKS = 3  # in a row that must agree
COOLDOWN_S = 20.0  # after moves, nothing is moved: what is measured lags behind by 10 s
BUDGET = 32  # partitions at once
GAIN = 0.05  # of the hottest ps's load that moves must at least take away for good
LONGEST_S = 600.0  # no load is expected to stay longer
_STAY: Final = 8  # of the hottest partitions it is looked at whether they stay


class PsLoad(msgspec.Struct, frozen=True):
    """Measures one ps: rows pulled and pushed a second, of its hottest partitions and of all together; cores that it
    uses. ``others``: the partitions that it has beside these, which have the rest of its load alike. ``held_bytes``: of
    partitions that told theirs; the others have ``other_bytes`` each. ``room_bytes``: that it has for more rows."""

    rows_per_s: float
    busy: float
    partitions: Mapping[PartitionId, float]
    others: tuple[PartitionId, ...] = ()
    held_bytes: Mapping[PartitionId, int] = {}
    other_bytes: float = 0.0
    room_bytes: float = math.inf

    def loads(self) -> list[tuple[PartitionId, float]]:
        """Return all its partitions with their rows a second, hottest first."""
        rest = max(0.0, self.rows_per_s - sum(self.partitions.values())) / max(1, len(self.others))
        named = sorted(self.partitions.items(), key=lambda item: (-item[1], item[0]))
        return sorted([*named, *((b, rest) for b in sorted(self.others))], key=lambda item: -item[1])

    def bytes_of(self, partition: PartitionId) -> float:
        return float(self.held_bytes.get(partition, self.other_bytes))


class MoveCosts(msgspec.Struct, frozen=True):
    """Says what moves cost. ``bytes_per_s``: that a ps sends while it serves. ``copies``: how often contents go over
    the wire: to the next owner, and to its mirrors. ``reopen_s``: that all workers stand still for one change of the
    map."""

    bytes_per_s: float = 80e6
    copies: float = 1.0
    reopen_s: float = 0.5

    def seconds(self, n_bytes: float) -> float:
        """Return the time that sending takes a ps."""
        return self.copies * n_bytes / self.bytes_per_s


class HotMove(msgspec.Struct, frozen=True, array_like=True):
    partition: PartitionId
    source: Slot
    target: Slot


class AlonePartition(msgspec.Struct, frozen=True, array_like=True):
    """Is a partition that has more to do than a ps should have. ``times``: its load over the mean load of a ps.
    ``keys``: table, key, share of the partition's requests that ask for it."""

    partition: PartitionId
    ps: Slot
    rows_per_s: float
    times: float
    keys: tuple[tuple[str, int, float], ...] = ()


def overloaded(loads: Mapping[Slot, PsLoad], busy: float = BUSY) -> Slot | None:
    """Return the ps that has too much to do, if any. ``busy``: cores that it must use at least."""
    if len(loads) < 2:
        return None
    mean = sum(load.rows_per_s for load in loads.values()) / len(loads)
    slot = max(loads, key=lambda s: (loads[s].rows_per_s, -s))
    hottest = loads[slot]
    return slot if mean > 0 and hottest.rows_per_s >= RATIO * mean and hottest.busy >= busy else None


def choose_moves(
    loads: Mapping[Slot, PsLoad],
    may_move: Callable[[PartitionId, Slot], bool],
    busy: float = BUSY,
    costs: MoveCosts = MoveCosts(),
    lasts_s: float = LONGEST_S,
) -> list[HotMove]:
    """Up to ``BUDGET`` moves away from the ps that has too much, hotter partitions first, each to the ps with the
    least to do that may have it (``may_move``) and has room for it. Each saves more time in ``lasts_s`` seconds than it
    takes, and so do all together; else there are none. The hottest ones stay where it saves more to move others."""
    source = overloaded(loads, busy)
    if source is None:
        return []
    worth_s = min(1.0, max(loads[source].busy, BUSY)) * min(lasts_s, LONGEST_S)  # of all the time of the source
    stay = range(min(len(loads[source].partitions), _STAY) + 1)
    plans = [_moves_but(n, source, loads, may_move, costs, worth_s) for n in stay]
    best, saved_s = max(plans, key=lambda plan: plan[1])
    return best if saved_s > 0 else []


def _moves_but(
    skipped: int,
    source: Slot,
    loads: Mapping[Slot, PsLoad],
    may_move: Callable[[PartitionId, Slot], bool],
    costs: MoveCosts,
    worth_s: float,
) -> tuple[list[HotMove], float]:
    """Return moves from ``source``, whose hottest ``skipped`` partitions stay, and the seconds that they save beyond
    what they take; 0.0: too little to begin with."""
    now = {slot: load.rows_per_s for slot, load in loads.items()}
    room = {slot: load.room_bytes for slot, load in loads.items()}
    before, mean = now[source], sum(now.values()) / len(now)
    moves: list[HotMove] = []
    sent = 0.0
    for partition, rows in loads[source].loads()[skipped:]:
        if len(moves) == BUDGET or now[source] <= mean:
            break
        n_bytes = loads[source].bytes_of(partition)
        for target in sorted((s for s in now if s != source), key=lambda s: (now[s], s)):
            better = now[source] - max(now[source] - rows, now[target] + rows)
            if better <= 0:
                break  # those that follow have more to do
            if worth_s * better / before <= costs.seconds(n_bytes):
                continue
            if n_bytes > room[target] or not may_move(partition, target):
                continue
            moves.append(HotMove(partition, source, target))
            now[source] -= rows
            now[target] += rows
            room[target] -= n_bytes
            sent += n_bytes
            break
    gained = before - max(now[source], max(now[m.target] for m in moves)) if moves else 0.0
    if gained < GAIN * before:
        return moves, 0.0
    return moves, worth_s * gained / before - costs.reopen_s - costs.seconds(sent)


def beyond_a_ps(loads: Mapping[Slot, PsLoad], busy: float = BUSY) -> list[tuple[PartitionId, Slot, float, float]]:
    """Return partitions with ``BEYOND`` times the mean load of a ps, or more: wherever they are, there is too much to
    do. With their ps, rows a second, and times the mean."""
    if len(loads) < 2:
        return []
    mean = sum(load.rows_per_s for load in loads.values()) / len(loads)
    return [
        (partition, slot, rows, rows / mean)
        for slot, load in sorted(loads.items())
        for partition, rows in load.loads()
        if mean > 0 and load.busy >= busy and rows >= BEYOND * mean
    ]


class Patience:
    """Whether it is time to move: ``LOOKS`` in a row agree on the ps, and the last moves are long over."""

    def __init__(self) -> None:
        self._slot: Slot | None = None
        self._looks = 0
        self._since = 0.0
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"<patience: ps:{self._slot} for {self._looks} looks>"

    def due(self, hottest: Slot | None, at: float) -> bool:
        """Take one look at ``at`` seconds. True: call ``moved`` after having moved something."""
        same = hottest is not None and hottest == self._slot
        self._looks = self._looks + 1 if same else 1
        self._since = self._since if same else at
        self._slot = hottest
        return hottest is not None and self._looks >= LOOKS and at >= self._quiet_until

    def lasted_s(self, at: float) -> float:
        """Return how long the same ps has had too much to do."""
        return at - self._since if self._slot is not None else 0.0

    def moved(self, at: float) -> None:
        self._looks, self._slot, self._quiet_until = 0, None, at + COOLDOWN_S
