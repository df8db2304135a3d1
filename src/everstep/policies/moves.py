"""Leads from the present placement towards the layout that is wanted, without stopping anybody.

A partition moves by a mirror at its destination, made while training goes on; a stripe's mirror moves by a second one
at the new ps. Nothing is given up before its successor is complete. Every change of owners costs each worker a round of
opening its shards, so all moves under way switch together, in one placement, once all are complete; then the next
begin.

A ps that leaves does not wait for this: as many of its partitions as may be are on their way at any time, and those
that are complete switch as soon as they are many.

After the loss of a ps, what it had is rebuilt first. Then mirrors are made for the stripes that have none. Other ps
keep their partitions until the ps in its place has joined, if one is awaited: it takes its share in one change of
owners, and nothing moves twice.

Of ps that leave, what would be lost with all of them moves first, and nothing beside it: they may go before they are
empty, and what others have a mirror of comes back without them.

Again from the state alone: whatever was lost on the way, the next step follows from what there is.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec

from everstep.ids import PartitionId, Slot
from everstep.model.placement import Mirror, MirrorKind
from everstep.policies.placement_builder import How, PlacementBuilder, lost_with
from everstep.policies.stripes import StripeLayout

MOVES_AT_ONCE = 8  # into or out of one ps; of one that leaves: that are not complete
MOVES_TOGETHER = 32  # the same of masters with the rule ``awaits``: each change of owners costs more than its moves
BUILDS_AT_ONCE = 4  # stripes' mirrors being made at one ps; each reads all members of its stripe


class MoveSteps(msgspec.Struct):
    """Is what :func:`advance` decided. ``switched``, ``begun``: partitions; ``built``: mirrors begun; ``dropped``:
    ids."""

    switched: list[PartitionId] = []
    begun: list[PartitionId] = []
    built: int = 0
    dropped: int = 0

    def words(self) -> str:
        parts = [
            (len(self.switched), "partitions change their owner"),
            (len(self.begun), "partitions begin to move"),
            (self.built, "mirrors are made"),
            (self.dropped, "mirrors are dropped"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count)


def advance(builder: PlacementBuilder, layout: StripeLayout, first: bool = False) -> MoveSteps:
    """Return the next steps towards ``layout``, whose ps all live. ``first``: nothing holds anything yet, so nothing
    has to be spared."""
    steps = MoveSteps()
    _clean(builder, layout, steps)
    _switch(builder, steps)
    exposed = exposed_at(builder, layout)
    _mirrors(builder, layout, steps, 1 << 30 if first else BUILDS_AT_ONCE, exposed)
    _begin(builder, layout, steps, exposed)
    return steps


def exposed_at(builder: PlacementBuilder, layout: StripeLayout) -> set[PartitionId]:
    """Return the partitions of ps that leave which would be lost if all of these went now, and can go elsewhere."""
    if not builder.leaving:
        return set()
    found = lost_with(builder, builder.leaving)
    found = {b for b in found if builder.owner[b] in builder.leaving and builder.owner[b] != layout.owner[b]}
    return {b for b in found if not any(m in builder.missing for m in builder.members(b // builder.code.k))}


def under_way(builder: PlacementBuilder) -> list[Mirror]:
    """Mirrors being made for moves that have not switched."""
    return [
        m
        for m in builder.mirrors
        if m.kind is MirrorKind.MOVE and builder.owner[m.members[0]] != m.at and m.members[0] not in builder.missing
    ]


def _drop(builder: PlacementBuilder, mirrors: list[Mirror], steps: MoveSteps) -> None:
    builder.drop(mirrors)
    steps.dropped += len(mirrors)


def _clean(builder: PlacementBuilder, layout: StripeLayout, steps: MoveSteps) -> None:
    """Drop mirrors that became their partition, and those of moves that are wanted no more."""
    gone: list[Mirror] = []
    for mirror in builder.mirrors:
        partition = mirror.members[0]
        if len(mirror.members) == 1 and builder.owner[partition] == mirror.at:
            if not builder.missing:  # all of them in one placement
                gone.append(mirror)
        elif mirror.kind is MirrorKind.MOVE and layout.owner[partition] != mirror.at:
            gone.append(mirror)
    _drop(builder, gone, steps)


def _switch(builder: PlacementBuilder, steps: MoveSteps) -> None:
    """All moves under way change the owner, once all are complete; of ps that leave, once many are."""
    moves = under_way(builder)
    complete = [m for m in moves if m.id in builder.ready]
    if len(complete) < len(moves):
        complete = [m for m in complete if _leaves(builder, m.members[0])]
        if len(complete) < MOVES_AT_ONCE or builder.missing:
            return
    for mirror in complete:
        partition = mirror.members[0]
        builder.give(partition, mirror.at, How.HAND_OVER, builder.owner[partition])
        steps.switched.append(partition)


def _mirrors(
    builder: PlacementBuilder, layout: StripeLayout, steps: MoveSteps, at_once: int, exposed: AbstractSet[PartitionId]
) -> None:
    """Lead every row of every stripe towards its place; while partitions are ``exposed``, make mirrors of their stripes
    alone."""
    rows = builder.rows()
    building: dict[Slot, int] = {}
    rebuilds, stays = builder.rebuilds, builder.stays
    for mirror in builder.mirrors:
        if mirror.kind is MirrorKind.PARITY and mirror.id not in builder.ready:
            building[mirror.at] = building.get(mirror.at, 0) + 1
    wanted = [(not rows.get((j, r)), j, r) for j in range(builder.stripes) for r in range(builder.code.m)]
    for _, stripe, row in sorted(wanted, key=lambda w: (not w[0], w[1], w[2])):  # those that have none at all first
        members = builder.members(stripe)
        if any(b in builder.missing for b in members):
            continue  # a recovery may need what there is, and nothing can be made before it is over
        if _worthless(builder, layout, stripe, row):
            if all(_is_made(builder, layout, rows, stripe, other) for other in range(builder.code.m)):
                _drop(builder, _given_up(builder, rows.get((stripe, row), [])), steps)
            continue
        site, have = _site(builder, layout, stripe, row, stays), rows.get((stripe, row), [])
        there = sorted((m for m in have if m.at == site), key=lambda m: (m.id not in builder.ready, m.id))
        spare = [m for m in have if m.at != site and m.id in builder.ready]
        if there and there[0].id in builder.ready:
            owners = {builder.owner[b] for b in members}
            leaves = [
                b for b in members if builder.owner[b] == site and (layout.owner[b] != site or not builder.empties)
            ]
            if leaves:  # its place is still taken by a member that is to move away
                spare = [m for m in spare if m.at not in owners]
            else:
                spare = []
        keep = {m.id for m in (*there[:1], *spare[:1])}
        _drop(builder, [m for m in have if m.id not in keep], steps)
        if rebuilds or (stays and spare):
            continue  # a mirror that shares a ps with a member protects against the loss of the other ps
        if not there and building.get(site, 0) < at_once and (not exposed or not exposed.isdisjoint(members)):
            builder.add(members, site, row, MirrorKind.PARITY)
            building[site] = building.get(site, 0) + 1
            steps.built += 1


def _site(builder: PlacementBuilder, layout: StripeLayout, stripe: int, row: int, stays: bool) -> Slot:
    """Return the place of a row's mirror. ``stays``: where a member has it that does not move now, the place where that
    member was to be."""
    site = layout.sites[stripe][row]
    here = [b for b in builder.members(stripe) if builder.owner[b] == site] if stays else []
    return layout.owner[here[0]] if here else site


def _leaves(builder: PlacementBuilder, partition: PartitionId) -> bool:
    """Return whether it is on a ps that leaves, and need not wait for the moves of others."""
    return builder.flows and builder.owner[partition] in builder.leaving


def _worthless(builder: PlacementBuilder, layout: StripeLayout, stripe: int, row: int) -> bool:
    """Return whether this row's mirror would be a second copy beside the only partition it has: too few ps are left."""
    members = builder.members(stripe)
    return (
        builder.empties
        and len(members) == 1
        and layout.sites[stripe][row] == builder.owner[members[0]] == layout.owner[members[0]]
    )


def _given_up(builder: PlacementBuilder, mirrors: list[Mirror]) -> list[Mirror]:
    """Return those of mirrors without a place that nobody needs: at a ps that leaves they protect until it has given
    its own partitions away."""
    if not builder.keeps:
        return mirrors
    busy = {*builder.owner, *(pending.source for pending in builder.missing.values())} & builder.leaving
    return [m for m in mirrors if m.at not in busy]


def _is_made(
    builder: PlacementBuilder,
    layout: StripeLayout,
    rows: dict[tuple[int, int], list[Mirror]],
    stripe: int,
    row: int,
) -> bool:
    """Return whether this row's mirror is complete at its place, or worth nothing there."""
    site = layout.sites[stripe][row]
    there = any(m.at == site and m.id in builder.ready for m in rows.get((stripe, row), []))
    return there or _worthless(builder, layout, stripe, row)


def _begin(
    builder: PlacementBuilder, layout: StripeLayout, steps: MoveSteps, exposed: AbstractSet[PartitionId]
) -> None:
    """Begin the next moves, if none is under way, or their ps leaves: of ``exposed`` partitions alone, if there are
    any; first where units of a stripe share a ps."""
    moves = under_way(builder)
    rows = builder.rows()
    busy: dict[Slot, int] = {}
    for mirror in moves:
        if mirror.id not in builder.ready:
            for slot in (builder.owner[mirror.members[0]], mirror.at):
                busy[slot] = busy.get(slot, 0) + 1

    def shares(partition: PartitionId) -> bool:
        stripe = partition // builder.code.k
        places = [builder.owner[b] for b in builder.members(stripe)]
        places += [m.at for r in range(builder.code.m) for m in rows.get((stripe, r), [])[:1]]
        return places.count(builder.owner[partition]) > 1

    wanted = [
        PartitionId(b) for b, slot in enumerate(builder.owner) if slot != layout.owner[b] and b not in builder.missing
    ]
    wanted = [b for b in wanted if b in exposed] or wanted
    if builder.stays:
        wanted = []
    at_once = MOVES_TOGETHER if builder.awaits and not builder.leaving else MOVES_AT_ONCE
    if moves:
        moving = {m.members[0] for m in moves}
        wanted = [b for b in wanted if b not in moving and _leaves(builder, b)]
    for partition in sorted(wanted, key=lambda b: (not shares(b), b)):
        source, target = builder.owner[partition], layout.owner[partition]
        if any(b in builder.missing for b in builder.members(partition // builder.code.k)):
            continue
        if max(busy.get(source, 0), busy.get(target, 0)) >= at_once:
            continue
        busy[source] = busy.get(source, 0) + 1
        busy[target] = busy.get(target, 0) + 1
        builder.add((partition,), target, 0, MirrorKind.MOVE)
        steps.begun.append(partition)
