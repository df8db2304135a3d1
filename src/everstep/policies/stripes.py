"""Arranges stripes: which partitions a parity covers together, and a balanced place for every partition and every
mirror.

Partitions ``[j*k, (j+1)*k)`` are stripe j (the last one may be shorter) for the life of a job; only their places
change. A *unit* is a partition of a stripe or one of its m mirrors. A layout is good if

1. the units of a stripe are on different ps, so that losing m of them loses nothing,
2. no machine (nor zone) has more of them than its limit says (``policies/domains.py``), and
3. no ps has more than its share of partitions, nor of mirrors: ``ceil(all / ps)``, as far as the limits leave that
   open.

With fewer than k+m ps the first cannot hold everywhere; then as few units as possible share a ps. A layout is made
out of the present one: what is well placed stays, so the cost of a change is near what it has to be.

With k+m ps or more a unit always finds a place: places are a matroid (a ps takes one unit of a stripe, a machine and
the zone around it as many as their limits say, and the limits leave room for all), so no order of placing units gets
stuck.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import msgspec

from everstep.config.parity import ParityCode
from everstep.ids import PartitionId, Slot
from everstep.policies.domains import Limit

NOWHERE = Slot(-1)

_ROUNDS = 20_000  # of improvement; far more than any layout of 4096 partitions needs


def members_of(code: ParityCode, stripe: int, partitions: int) -> tuple[PartitionId, ...]:
    """Return the partitions of a stripe."""
    start = stripe * code.k
    return tuple(PartitionId(b) for b in range(start, min(start + code.k, partitions)))


class StripeLayout(msgspec.Struct, frozen=True):
    """Says where all is: ``owner[b]`` is the ps of partition b, ``sites[j][r]`` the ps of row r of stripe j.
    ``sites[j][r]``: the ps of row r of stripe j."""

    owner: tuple[Slot, ...]
    sites: tuple[tuple[Slot, ...], ...]

    def stripe(self, code: ParityCode, number: int) -> list[Slot]:
        """Return the places of all units of a stripe, partitions first."""
        return [*(self.owner[b] for b in members_of(code, number, len(self.owner))), *self.sites[number]]

    def shared(self, code: ParityCode) -> int:
        """Return how many units are on a ps that has another one of their stripe."""
        return sum(len(at) - len(set(at)) for j in range(len(self.sites)) for at in [self.stripe(code, j)])

    def crowded(self, code: ParityCode, limits: Sequence[Limit]) -> int:
        """Return how many units are more than their machine or zone may have of one stripe."""
        return sum(limit.beyond(self.stripe(code, j)) for limit in limits for j in range(len(self.sites)))


def closed_slots(taken: Sequence[Slot], limits: Sequence[Limit]) -> set[Slot]:
    """Return the ps that take no further unit of a stripe with units at ``taken``."""
    closed = set(taken)
    for limit in limits:
        closed |= limit.full(taken)
    return closed


def arrange(
    code: ParityCode,
    partitions: int,
    slots: Iterable[Slot],
    old: StripeLayout | None = None,
    limits: Sequence[Limit] = (),
) -> StripeLayout:
    """Return a good layout over ``slots`` (at least one), out of ``old``, whose units may be on ps that are gone.
    ``limits``: of the machines and zones of these ps (``limits_of``)."""
    work = _Work(code, partitions, sorted(set(slots)), old, limits)
    work.part()
    work.fill()
    work.balance()
    return StripeLayout(tuple(work.owner), tuple(tuple(row) for row in work.sites))


class _Work:
    """Is the layout being changed. A unit is ``(stripe, i)``: its i-th partition if i < k, else mirror row i - k."""

    def __init__(
        self,
        code: ParityCode,
        partitions: int,
        slots: Sequence[Slot],
        old: StripeLayout | None,
        limits: Sequence[Limit] = (),
    ) -> None:
        self.code, self.partitions, self.slots, self.limits = code, partitions, slots, limits
        known = set(slots)
        stripes = code.stripes(partitions)
        self.owner: list[Slot] = [NOWHERE] * partitions
        self.sites: list[list[Slot]] = [[NOWHERE] * code.m for _ in range(stripes)]
        if old is not None:
            self.owner = [s if s in known else NOWHERE for s in old.owner]
            self.sites = [[s if s in known else NOWHERE for s in row] for row in old.sites]
        self.data = dict.fromkeys(slots, 0)
        self.mirrors = dict.fromkeys(slots, 0)
        for slot in self.owner:
            if slot != NOWHERE:
                self.data[slot] += 1
        for row in self.sites:
            for slot in row:
                if slot != NOWHERE:
                    self.mirrors[slot] += 1

    def units(self, stripe: int) -> list[Slot]:
        start = stripe * self.code.k
        return [*self.owner[start : min(start + self.code.k, self.partitions)], *self.sites[stripe]]

    def _width(self, stripe: int) -> int:
        return min(self.code.k, self.partitions - stripe * self.code.k)

    def _set(self, stripe: int, unit: int, slot: Slot) -> None:
        """Move one unit; its index among :meth:`units`."""
        width = self._width(stripe)
        if unit < width:
            partition = stripe * self.code.k + unit
            self._count(self.data, self.owner[partition], slot)
            self.owner[partition] = slot
        else:
            self._count(self.mirrors, self.sites[stripe][unit - width], slot)
            self.sites[stripe][unit - width] = slot

    @staticmethod
    def _count(counts: dict[Slot, int], old: Slot, new: Slot) -> None:
        if old != NOWHERE:
            counts[old] -= 1
        if new != NOWHERE:
            counts[new] += 1

    def part(self) -> None:
        """Take its place from all but one of the units that share a ps, if there is a better one for them, and from
        those that their machine or zone has too many of.

        A mirror of one partition that sits with it was used up by its promotion and has to be made anyway; of a wider
        stripe the partition goes: one partition is copied instead of all members read.
        """
        for stripe in range(len(self.sites)):
            width = self._width(stripe)
            order = range(width + self.code.m) if width == 1 else [*range(width, width + self.code.m), *range(width)]
            units = self.units(stripe)
            free = len(set(self.slots) - set(units)) if not self.limits else len(units)
            seen: list[Slot] = []
            for unit in order:
                slot = units[unit]
                if slot != NOWHERE and free > 0 and slot in closed_slots(seen, self.limits):
                    self._set(stripe, unit, NOWHERE)
                    free -= 1
                elif slot != NOWHERE:
                    seen.append(slot)

    def fill(self) -> None:
        """Find a place for every unit that has none: not beside another one of its stripe, where the load is least."""
        least = {mirror: [self._load(mirror, slot) for slot in self.slots] for mirror in (False, True)}
        for heap in least.values():
            heapq.heapify(heap)
        for stripe in range(len(self.sites)):
            width = self._width(stripe)
            for unit in [*range(width, width + self.code.m), *range(width)]:
                units = self.units(stripe)
                if units[unit] != NOWHERE:
                    continue
                mirror = unit >= width
                slot = self._least(least[mirror], mirror, closed_slots(units, self.limits))
                if slot is None:  # every ps has one already
                    slot = min(self.slots, key=lambda s: (units.count(s), *self._load(mirror, s)))
                self._set(stripe, unit, slot)
                for kind, heap in least.items():
                    heapq.heappush(heap, self._load(kind, slot))

    def _load(self, mirror: bool, slot: Slot) -> tuple[int, int, Slot]:
        """Return what a ps has to do already, for a mirror that needs a place, or a partition."""
        # Mirrors go first, to the ps with most partitions: it takes no partition of this stripe then.
        if mirror:
            return self.mirrors[slot], -self.data[slot], slot
        return self.data[slot], self.mirrors[slot], slot

    def _least(self, heap: list[tuple[int, int, Slot]], mirror: bool, beside: set[Slot]) -> Slot | None:
        """Return the ps with the least load that may take something of the stripe; ``heap`` has everybody's load, and
        older ones. ``beside``: those that may not."""
        aside: list[tuple[int, int, Slot]] = []
        found = None
        while heap and found is None:
            slot = heap[0][2]
            if heap[0] != self._load(mirror, slot):
                heapq.heappop(heap)
            elif slot in beside:
                aside.append(heapq.heappop(heap))
            else:
                found = slot
        for load in aside:
            heapq.heappush(heap, load)
        return found

    def balance(self) -> None:
        """Even out partitions, then mirrors, then both again: each step is a chain of moves from a ps that has more to
        one that has at least two less, no unit ever beside another one of its stripe."""
        for _ in range(_ROUNDS):
            if not (self._even(True) or self._even(False)):
                return

    def _even(self, data: bool) -> bool:
        """Make one improvement of partitions (else of mirrors); False if there is none."""
        counts = self.data if data else self.mirrors
        most = max(counts.values())
        if most - min(counts.values()) < 2:
            return False
        for source in [s for s in self.slots if counts[s] == most]:
            if self._direct(source, data, counts):
                return True
            chain = self._chain(source, data, counts)
            if chain is not None:
                for stripe, unit, slot in chain:
                    self._set(stripe, unit, slot)
                return True
        return False

    def _direct(self, source: Slot, data: bool, counts: dict[Slot, int]) -> bool:
        """Move one unit off ``source`` to a ps with two less, the emptiest that can take it."""
        targets = sorted((s for s in self.slots if counts[s] <= counts[source] - 2), key=lambda s: (counts[s], s))
        for stripe in range(len(self.sites) if targets else 0):
            units = self.units(stripe)
            if source not in units:
                continue
            width = self._width(stripe)
            unit = next((u for u in (range(width) if data else range(width, len(units))) if units[u] == source), None)
            beside = self._beside(units, unit) if unit is not None else set()
            target = next((s for s in targets if s not in beside), None)
            if unit is not None and target is not None:
                self._set(stripe, unit, target)
                return True
        return False

    def _beside(self, units: Sequence[Slot], unit: int) -> set[Slot]:
        """Return the ps to which this unit of a stripe cannot move."""
        return set(units) | closed_slots([*units[:unit], *units[unit + 1 :]], self.limits)

    def _chain(self, source: Slot, data: bool, counts: dict[Slot, int]) -> list[tuple[int, int, Slot]] | None:
        """Return the shortest chain of steps from ``source`` to a ps with two less, breadth first."""
        came: dict[Slot, tuple[Slot, list[tuple[int, int, Slot]]]] = {}
        queue = [source]
        used: set[int] = set()
        for here in queue:
            for there, steps in self._steps(here, data).items():
                if there == source or there in came or steps[0][0] in used:
                    continue
                came[there] = (here, steps)
                queue.append(there)
                if counts[there] <= counts[source] - 2:
                    chain: list[tuple[int, int, Slot]] = []
                    at, stripes = there, []
                    while at != source:
                        at, part = came[at]
                        chain += part
                        stripes.append(part[0][0])
                    if len(set(stripes)) == len(stripes):  # each step was judged with its stripe as it is now
                        return chain
        return None

    def _steps(self, here: Slot, data: bool) -> dict[Slot, list[tuple[int, int, Slot]]]:
        """Return what can be moved off ``here``, by target: a unit alone; or in exchange for a unit of the other kind
        of the same stripe, where that makes the other kind no worse."""
        other = self.mirrors if data else self.data
        out: dict[Slot, list[tuple[int, int, Slot]]] = {}
        swaps: dict[Slot, list[tuple[int, int, Slot]]] = {}
        for stripe in range(len(self.sites)):
            units = self.units(stripe)
            if here not in units:
                continue
            width = self._width(stripe)
            kinds = range(width) if data else range(width, len(units))
            unit = next((u for u in kinds if units[u] == here), None)
            if unit is None:
                continue
            beside = self._beside(units, unit)
            for there in self.slots:
                if there == here:
                    continue
                if there not in beside:
                    out.setdefault(there, [(stripe, unit, there)])
                elif there not in swaps and other[there] > other[here]:
                    others = range(width, len(units)) if data else range(width)
                    back = next((u for u in others if units[u] == there), None)
                    if back is not None and units.count(there) == 1:
                        swaps[there] = [(stripe, unit, there), (stripe, back, here)]
        return swaps | out
