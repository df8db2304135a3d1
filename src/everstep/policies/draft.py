"""Builds the next placement, and knows what is known of the present one."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.config.parity import ParityCode
from everstep.ids import BucketId, Slot
from everstep.model.placement import Mirror, MirrorKind
from everstep.policies.stripes import NOWHERE, StripeLayout, members_of


class How(StrEnum):
    """Says how the owner of a partition that it does not hold yet comes by it."""

    PROMOTE = "promote"  # it has a mirror of this bucket alone; the old owner is dead
    FOLD = "fold"  # out of a stripe's mirror, which it has
    LOAD = "load"  # from a checkpoint's image
    HAND_OVER = "hand_over"  # it has a mirror of this bucket alone; the old owner lives and stops first
    TAKE_BACK = "take_back"  # it had handed it over to one that died before it said that it has it
    BEGIN = "begin"  # empty, as at the job's beginning: nothing is left of it, and nothing that it had was released


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """Is a partition that placement ``version`` gave to its owner, who has not said yet that it is whole there."""

    version: int
    how: How
    source: Slot = NOWHERE  # who handed it over


class Draft(msgspec.Struct, kw_only=True):
    """Is the next placement while it is being made. ``ready``: ids of mirrors that have everything. ``version``: of the
    placement that this becomes; ``routing``: of the one before, when its owners last changed. ``next_id``: of the next
    new mirror. ``images``: as in the placement. ``stuck``: buckets of which their living owner says that it cannot get
    them."""

    code: ParityCode
    version: int
    routing: int
    living: set[Slot]
    owner: list[Slot]
    mirrors: list[Mirror]
    ready: set[int]
    missing: dict[BucketId, Pending]
    images: dict[BucketId, int]
    next_id: int
    stuck: frozenset[BucketId] = frozenset()

    @property
    def stripes(self) -> int:
        return self.code.stripes(len(self.owner)) if self.code.m else 0

    def members(self, stripe: int) -> tuple[BucketId, ...]:
        return members_of(self.code, stripe, len(self.owner))

    def rows(self) -> dict[tuple[int, int], list[Mirror]]:
        """Return the stripes' mirrors by (stripe, row); more than one while a row goes to another ps."""
        found: dict[tuple[int, int], list[Mirror]] = {}
        for mirror in self.mirrors:
            if mirror.kind is MirrorKind.PARITY:
                found.setdefault((mirror.members[0] // self.code.k, mirror.row), []).append(mirror)
        return found

    def copies(self, bucket: BucketId) -> list[Mirror]:
        """Return the mirrors of this bucket alone that have everything, at living ps."""
        return [m for m in self.mirrors if m.members == (bucket,) and m.id in self.ready and m.at in self.living]

    def give(self, bucket: BucketId, slot: Slot, how: How, source: Slot = NOWHERE) -> None:
        """``slot`` becomes the owner, and does not hold it yet."""
        old = self.owner[bucket]
        if old != slot:  # the mirror that the old owner had it from became the bucket
            self.drop([m for m in self.mirrors if m.members == (bucket,) and m.at == old])
        self.owner[bucket] = slot
        self.missing[bucket] = Pending(self.version, how, source)
        if how is How.BEGIN:
            self.images[bucket] = 0
        elif how is not How.LOAD:
            self.images.pop(bucket, None)

    def add(self, members: tuple[BucketId, ...], at: Slot, row: int, kind: MirrorKind) -> None:
        self.mirrors.append(Mirror(self.next_id, members, at, row, kind))
        self.next_id += 1

    def drop(self, mirrors: list[Mirror]) -> None:
        gone = {m.id for m in mirrors}
        if gone:
            self.mirrors = [m for m in self.mirrors if m.id not in gone]
            self.ready -= gone


def level_counts(draft: Draft) -> dict[str, int]:
    """Buckets by how many ps may be lost at once, whichever they are, without losing the bucket: "full" as many as the
    parity promises, "less", or "none"."""
    counts = {"full": 0, "less": 0, "none": 0}
    rows = draft.rows()
    for stripe in range(draft.stripes):
        members = draft.members(stripe)
        mirrors = [m for r in range(draft.code.m) for m in rows.get((stripe, r), []) if m.id in draft.ready]
        for bucket in members:
            level = _level(draft, members, mirrors, bucket)
            counts["full" if level >= draft.code.m else "less" if level else "none"] += 1
    if not draft.code.m:
        counts["none"] = len(draft.owner)
    return counts


def at_risk(draft: Draft, gone: set[Slot]) -> int:
    """Return how many buckets would be lost if these ps were lost at once, now."""
    if not draft.code.m:
        return sum(slot in gone for slot in draft.owner)
    lost, rows = 0, draft.rows()
    for stripe in range(draft.stripes):
        members = draft.members(stripe)
        mirrors = [m for r in range(draft.code.m) for m in rows.get((stripe, r), []) if m.id in draft.ready]
        lost += sum(not _survives(draft, members, mirrors, bucket, gone) for bucket in members)
    return lost


def _level(draft: Draft, members: tuple[BucketId, ...], mirrors: list[Mirror], bucket: BucketId) -> int:
    places = sorted({*(draft.owner[b] for b in members), *(m.at for m in mirrors)})
    level = 0
    for lost in ([{p} for p in places], [{p, q} for p in places for q in places if p < q])[: draft.code.m]:
        if not all(_survives(draft, members, mirrors, bucket, gone) for gone in lost):
            break
        level += 1
    return level


def _survives(
    draft: Draft, members: tuple[BucketId, ...], mirrors: list[Mirror], bucket: BucketId, gone: set[Slot]
) -> bool:
    """Return whether the bucket can be had when the ps ``gone`` are."""
    lost = {b for b in members if b in draft.missing or draft.owner[b] in gone}
    left = [m for m in mirrors if m.at not in gone]  # two rows at one ps cannot help each other
    return bucket not in lost or len(lost) <= min(len({m.row for m in left}), len({m.at for m in left}))


__all__ = ["Draft", "How", "Pending", "StripeLayout", "level_counts"]
