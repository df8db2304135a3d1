"""Builds the next placement, and knows what is known of the present one."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from everstep.config.parity import ParityCode
from everstep.ids import PartitionId, Slot
from everstep.model.placement import Mirror, MirrorKind
from everstep.policies.stripes import NOWHERE, StripeLayout, members_of


class How(StrEnum):
    """Says how the owner of a partition that it does not hold yet comes by it."""

    PROMOTE = "promote"  # it has a mirror of this partition alone; the old owner is dead
    RECONSTRUCT = "fold"  # out of a stripe's mirror, which it has
    LOAD = "load"  # from a checkpoint's snapshot
    HAND_OVER = "hand_over"  # it has a mirror of this partition alone; the old owner lives and stops first
    TAKE_BACK = "take_back"  # it had handed it over to one that died before it said that it has it
    BEGIN = "begin"  # empty, as at the job's beginning: nothing is left of it, and nothing that it had was released


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """Is a partition that placement ``version`` gave to its owner, who has not said yet that it is whole there."""

    version: int
    how: How
    source: Slot = NOWHERE  # who handed it over


class PlacementBuilder(msgspec.Struct, kw_only=True):
    """Is the next placement while it is being made. ``ready``: ids of mirrors that have everything. ``version``: of the
    placement that this becomes; ``routing``: of the one before, when its owners last changed. ``next_id``: of the next
    new mirror. ``snapshots``: as in the placement. ``stuck``: partitions of which their living owner says that it
    cannot get them. ``leaving``: ps that are to give everything away, and may go before they have. ``awaited``: a ps is
    being started in the place of a lost one. ``empties``, ``flows``, ``keeps``, ``awaits``: see
    :class:`everstep.brain.events.MasterStarted`."""

    code: ParityCode
    version: int
    routing: int
    living: set[Slot]
    owner: list[Slot]
    mirrors: list[Mirror]
    ready: set[int]
    missing: dict[PartitionId, Pending]
    snapshots: dict[PartitionId, int]
    next_id: int
    stuck: frozenset[PartitionId] = frozenset()
    empties: bool = True
    flows: bool = True
    leaving: frozenset[Slot] = frozenset()
    keeps: bool = True
    awaits: bool = True
    awaited: bool = False

    @property
    def stripes(self) -> int:
        return self.code.stripes(len(self.owner)) if self.code.m else 0

    def members(self, stripe: int) -> tuple[PartitionId, ...]:
        return members_of(self.code, stripe, len(self.owner))

    @property
    def rebuilds(self) -> bool:
        """Return whether lost partitions are being rebuilt, before anything else is made or moved."""
        first = self.awaits and not self.leaving
        return first and any(pending.how is How.RECONSTRUCT for pending in self.missing.values())

    @property
    def stays(self) -> bool:
        """Return whether partitions, and mirrors that are complete, stay where they are for now."""
        return self.rebuilds or (self.awaits and self.awaited and not self.leaving)

    def rows(self) -> dict[tuple[int, int], list[Mirror]]:
        """Return the stripes' mirrors by (stripe, row); more than one while a row goes to another ps."""
        found: dict[tuple[int, int], list[Mirror]] = {}
        for mirror in self.mirrors:
            if mirror.kind is MirrorKind.PARITY:
                found.setdefault((mirror.members[0] // self.code.k, mirror.row), []).append(mirror)
        return found

    def copies(self, partition: PartitionId) -> list[Mirror]:
        """Return the mirrors of this partition alone that have everything, at living ps."""
        return [m for m in self.mirrors if m.members == (partition,) and m.id in self.ready and m.at in self.living]

    def give(self, partition: PartitionId, slot: Slot, how: How, source: Slot = NOWHERE) -> None:
        """``slot`` becomes the owner, and does not hold it yet."""
        old = self.owner[partition]
        if old != slot:  # the mirror that the old owner had it from became the partition
            self.drop([m for m in self.mirrors if m.members == (partition,) and m.at == old])
        self.owner[partition] = slot
        self.missing[partition] = Pending(self.version, how, source)
        if how is How.BEGIN:
            self.snapshots[partition] = 0
        elif how is not How.LOAD:
            self.snapshots.pop(partition, None)

    def add(self, members: tuple[PartitionId, ...], at: Slot, row: int, kind: MirrorKind) -> None:
        self.mirrors.append(Mirror(self.next_id, members, at, row, kind))
        self.next_id += 1

    def drop(self, mirrors: list[Mirror]) -> None:
        gone = {m.id for m in mirrors}
        if gone:
            self.mirrors = [m for m in self.mirrors if m.id not in gone]
            self.ready -= gone


def level_counts(builder: PlacementBuilder) -> dict[str, int]:
    """Partitions by how many ps may be lost at once, whichever they are, without losing the partition: "full" as many
    as the parity promises, "less", or "none"."""
    counts = {"full": 0, "less": 0, "none": 0}
    rows = builder.rows()
    for stripe in range(builder.stripes):
        members = builder.members(stripe)
        mirrors = [m for r in range(builder.code.m) for m in rows.get((stripe, r), []) if m.id in builder.ready]
        for partition in members:
            level = _level(builder, members, mirrors, partition)
            counts["full" if level >= builder.code.m else "less" if level else "none"] += 1
    if not builder.code.m:
        counts["none"] = len(builder.owner)
    return counts


def at_risk(builder: PlacementBuilder, gone: set[Slot]) -> int:
    """Return how many partitions would be lost if these ps were lost at once, now."""
    return len(lost_with(builder, gone))


def lost_with(builder: PlacementBuilder, gone: Collection[Slot]) -> set[PartitionId]:
    """Return the partitions that would be lost if these ps were lost at once, now."""
    if not builder.code.m:
        return {PartitionId(b) for b, slot in enumerate(builder.owner) if slot in gone}
    lost, rows = set[PartitionId](), builder.rows()
    for stripe in range(builder.stripes):
        members = builder.members(stripe)
        mirrors = [m for r in range(builder.code.m) for m in rows.get((stripe, r), []) if m.id in builder.ready]
        lost |= {partition for partition in members if not _survives(builder, members, mirrors, partition, gone)}
    return lost


def _level(
    builder: PlacementBuilder, members: tuple[PartitionId, ...], mirrors: list[Mirror], partition: PartitionId
) -> int:
    places = sorted({*(builder.owner[b] for b in members), *(m.at for m in mirrors)})
    level = 0
    for lost in ([{p} for p in places], [{p, q} for p in places for q in places if p < q])[: builder.code.m]:
        if not all(_survives(builder, members, mirrors, partition, gone) for gone in lost):
            break
        level += 1
    return level


def _survives(
    builder: PlacementBuilder,
    members: tuple[PartitionId, ...],
    mirrors: list[Mirror],
    partition: PartitionId,
    gone: Collection[Slot],
) -> bool:
    """Return whether the partition can be had when the ps ``gone`` are."""
    lost = {b for b in members if b in builder.missing or builder.owner[b] in gone}
    left = [m for m in mirrors if m.at not in gone]  # two rows at one ps cannot help each other
    return partition not in lost or len(lost) <= min(len({m.row for m in left}), len({m.at for m in left}))


__all__ = ["How", "Pending", "PlacementBuilder", "StripeLayout", "level_counts"]
