"""Chooses who owns the partitions of ps that were lost, and where their contents come from.

From the present state alone, so that a second loss in the middle of a recovery, the loss of either end of a move, and a
restart of the master need no rules of their own. For every partition whose owner lives no more, the first that is
possible:

1. *promote*: a ps that has a complete mirror of this partition alone (a replica, or one that was made to move it);
2. *fold*: as many complete mirrors of its stripe as members are lost: all go to the ps of the lowest row, which folds
   the living members out of it. Members that are being folded already count as lost, and go along; so they do when a
   row that their fold needs is lost with its ps meanwhile;
3. *take back*: it was just handed over, its new owner died before it said that it has it, and the old one lives;
4. *load*: the newest snapshot of it; the mirrors of its stripe are void then.

None: it is lost for good, unless it may begin empty again (:func:`begin_again`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.ids import PartitionId, Slot
from everstep.model.placement import Mirror
from everstep.policies.placement_builder import How, PlacementBuilder
from everstep.policies.stripes import members_of


class Recovered(msgspec.Struct):
    """Is what :func:`recover` decided, by partition. ``lost``: of these nothing is left. ``behind``: not all that was
    acknowledged for these is there any more (taken back, loaded, begun again)."""

    promoted: list[PartitionId] = []
    folded: list[PartitionId] = []
    taken_back: list[PartitionId] = []
    loaded: list[PartitionId] = []
    begun: list[PartitionId] = []
    lost: list[PartitionId] = []

    @property
    def partitions(self) -> list[PartitionId]:
        return sorted([*self.promoted, *self.folded, *self.taken_back, *self.loaded, *self.begun])

    @property
    def behind(self) -> list[PartitionId]:
        return sorted([*self.taken_back, *self.loaded, *self.begun])

    def words(self) -> str:
        parts = [
            (self.promoted, "promoted from a mirror"),
            (self.folded, "rebuilt from parity"),
            (self.taken_back, "taken back by the ps that had handed them over"),
            (self.loaded, "loaded from their newest image"),
            (self.begun, "begin empty again"),
        ]
        return ", ".join(f"{len(partitions)} partitions {what}" for partitions, what in parts if partitions)


def recover(builder: PlacementBuilder, snapshot_of: Callable[[PartitionId], int | None]) -> Recovered:
    """Give every partition whose owner is not living, or cannot get it, a new one. ``snapshot_of``: the checkpoint with
    its newest snapshot.

    Mirrors at ps that live no more are dropped. With no living ps at all, partitions that have a snapshot wait for the
    next one under their old owner's name.
    """
    builder.drop([m for m in builder.mirrors if m.at not in builder.living])
    # Whatever the state says of a mirror of it there, its ps has tried.
    builder.drop(
        [m for m in builder.mirrors if any(b in builder.stuck and builder.owner[b] == m.at for b in m.members)]
    )
    result = Recovered()
    homeless = [
        PartitionId(b) for b, slot in enumerate(builder.owner) if slot not in builder.living or b in builder.stuck
    ]
    reconstructing_at = {b // builder.code.k for b in builder.missing if _is_reconstructing(builder, b)}
    if not homeless and not reconstructing_at:
        return result
    rest: list[PartitionId] = []
    for partition in homeless:
        copies = builder.copies(partition)
        if copies:
            builder.give(partition, min(copies, key=lambda m: m.id).at, How.PROMOTE)
            result.promoted.append(partition)
        else:
            rest.append(partition)
    for stripe in sorted({partition // builder.code.k for partition in rest} | reconstructing_at):
        members = members_of(builder.code, stripe, len(builder.owner))
        reconstructing = [b for b in members if b not in rest and _is_reconstructing(builder, b)]
        lost = sorted([*(b for b in rest if b in members), *reconstructing])
        source = _source(builder, stripe, len(lost))
        if source is not None:
            if not any(b in rest for b in lost):
                continue  # a fold that is under way and still has all rows that it needs
            for partition in lost:
                if partition in rest or builder.owner[partition] != source.at:
                    builder.give(partition, source.at, How.RECONSTRUCT)
                    result.folded.append(partition)
            continue
        void = False
        for partition in lost:
            pending = builder.missing.get(partition)
            if (
                pending is not None
                and pending.how is How.HAND_OVER
                and pending.version >= builder.routing  # after another change of owners it has dropped it
                and pending.source in builder.living
            ):
                builder.give(partition, pending.source, How.TAKE_BACK)
                result.taken_back.append(partition)
                void = True
                continue
            snapshot = snapshot_of(partition)
            if snapshot is None:
                result.lost.append(partition)
                continue
            if builder.living:
                builder.give(partition, _loader(builder, members), How.LOAD)
            else:
                builder.give(partition, builder.owner[partition], How.LOAD)
            builder.snapshots[partition] = snapshot
            result.loaded.append(partition)
            void = True
        if void:
            changed = {*result.taken_back, *result.loaded}
            builder.drop([m for m in builder.mirrors if changed & set(m.members)])
    return result


def begin_again(builder: PlacementBuilder, result: Recovered) -> None:
    """Let the partitions that are lost begin empty. Only where nothing of what they had was released: then all of it
    can be trained again for them."""
    for partition in result.lost:
        members = builder.members(partition // builder.code.k) if builder.code.m else (partition,)
        builder.give(partition, _loader(builder, members) if builder.living else builder.owner[partition], How.BEGIN)
    result.begun, result.lost = result.lost, []
    begun = set(result.begun)
    builder.drop([m for m in builder.mirrors if begun & set(m.members)])


def _is_reconstructing(builder: PlacementBuilder, partition: PartitionId) -> bool:
    pending = builder.missing.get(partition)
    return pending is not None and pending.how is How.RECONSTRUCT and partition not in builder.stuck


def _source(builder: PlacementBuilder, stripe: int, lost: int) -> Mirror | None:
    """Return the mirror out of which ``lost`` members can be rebuilt: each further one needs another row at another
    ps."""
    rows: dict[int, Mirror] = {}
    at: set[Slot] = set()
    found = builder.rows()
    for row in range(builder.code.m):
        for mirror in sorted(found.get((stripe, row), []), key=lambda m: m.id):
            if mirror.id in builder.ready and mirror.at not in at and row not in rows:
                rows[row] = mirror
                at.add(mirror.at)
    return rows[min(rows)] if len(rows) >= lost and rows else None


def _loader(builder: PlacementBuilder, members: tuple[PartitionId, ...]) -> Slot:
    """Return the living ps that takes a partition from a snapshot: one without a mirror of the stripe (it would be
    void) and without other members, else the one with the fewest partitions."""
    beside = [builder.owner[b] for b in members]
    mirrors = {m.at for m in builder.mirrors if set(m.members) & set(members)}

    def cost(slot: Slot) -> tuple[bool, int, int, Slot]:
        return slot in mirrors, beside.count(slot), builder.owner.count(slot), slot

    return min(builder.living, key=cost)
