"""Chooses who owns the partitions of ps that were lost, and where their contents come from.

From the present state alone, so that a second loss in the middle of a recovery, the loss of either end of a move, and a
restart of the master need no rules of their own. For every bucket whose owner lives no more, the first that is
possible:

1. *promote*: a ps that has a complete mirror of this bucket alone (a replica, or one that was made to move it);
2. *fold*: as many complete mirrors of its stripe as members are lost: all go to the ps of the lowest row, which folds
   the living members out of it. Members that are being folded already count as lost, and go along; so they do when a
   row that their fold needs is lost with its ps meanwhile;
3. *take back*: it was just handed over, its new owner died before it said that it has it, and the old one lives;
4. *load*: the newest image of it; the mirrors of its stripe are void then.

None: it is lost for good, unless it may begin empty again (:func:`begin_again`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.ids import BucketId, Slot
from everstep.model.placement import Mirror
from everstep.policies.draft import Draft, How
from everstep.policies.stripes import members_of


class Recovered(msgspec.Struct):
    """Is what :func:`recover` decided, by partition. ``lost``: of these nothing is left. ``behind``: not all that was
    acknowledged for these is there any more (taken back, loaded, begun again)."""

    promoted: list[BucketId] = []
    folded: list[BucketId] = []
    taken_back: list[BucketId] = []
    loaded: list[BucketId] = []
    begun: list[BucketId] = []
    lost: list[BucketId] = []

    @property
    def buckets(self) -> list[BucketId]:
        return sorted([*self.promoted, *self.folded, *self.taken_back, *self.loaded, *self.begun])

    @property
    def behind(self) -> list[BucketId]:
        return sorted([*self.taken_back, *self.loaded, *self.begun])

    def words(self) -> str:
        parts = [
            (self.promoted, "promoted from a mirror"),
            (self.folded, "rebuilt from parity"),
            (self.taken_back, "taken back by the ps that had handed them over"),
            (self.loaded, "loaded from their newest image"),
            (self.begun, "begin empty again"),
        ]
        return ", ".join(f"{len(buckets)} buckets {what}" for buckets, what in parts if buckets)


def recover(draft: Draft, image_of: Callable[[BucketId], int | None]) -> Recovered:
    """Give every bucket whose owner is not living, or cannot get it, a new one. ``image_of``: the checkpoint with its
    newest image.

    Mirrors at ps that live no more are dropped. With no living ps at all, buckets that have an image wait for the next
    one under their old owner's name.
    """
    draft.drop([m for m in draft.mirrors if m.at not in draft.living])
    # Whatever the books say of a mirror of it there, its ps has tried.
    draft.drop([m for m in draft.mirrors if any(b in draft.stuck and draft.owner[b] == m.at for b in m.members)])
    result = Recovered()
    homeless = [BucketId(b) for b, slot in enumerate(draft.owner) if slot not in draft.living or b in draft.stuck]
    folding_at = {b // draft.code.k for b in draft.missing if _is_folding(draft, b)}
    if not homeless and not folding_at:
        return result
    rest: list[BucketId] = []
    for bucket in homeless:
        copies = draft.copies(bucket)
        if copies:
            draft.give(bucket, min(copies, key=lambda m: m.id).at, How.PROMOTE)
            result.promoted.append(bucket)
        else:
            rest.append(bucket)
    for stripe in sorted({bucket // draft.code.k for bucket in rest} | folding_at):
        members = members_of(draft.code, stripe, len(draft.owner))
        folding = [b for b in members if b not in rest and _is_folding(draft, b)]
        lost = sorted([*(b for b in rest if b in members), *folding])
        base = _base(draft, stripe, len(lost))
        if base is not None:
            if not any(b in rest for b in lost):
                continue  # a fold that is under way and still has all rows that it needs
            for bucket in lost:
                if bucket in rest or draft.owner[bucket] != base.at:
                    draft.give(bucket, base.at, How.FOLD)
                    result.folded.append(bucket)
            continue
        void = False
        for bucket in lost:
            pending = draft.missing.get(bucket)
            if (
                pending is not None
                and pending.how is How.HAND_OVER
                and pending.version >= draft.routing  # after another change of owners it has dropped it
                and pending.source in draft.living
            ):
                draft.give(bucket, pending.source, How.TAKE_BACK)
                result.taken_back.append(bucket)
                void = True
                continue
            image = image_of(bucket)
            if image is None:
                result.lost.append(bucket)
                continue
            if draft.living:
                draft.give(bucket, _loader(draft, members), How.LOAD)
            else:
                draft.give(bucket, draft.owner[bucket], How.LOAD)
            draft.images[bucket] = image
            result.loaded.append(bucket)
            void = True
        if void:
            changed = {*result.taken_back, *result.loaded}
            draft.drop([m for m in draft.mirrors if changed & set(m.members)])
    return result


def begin_again(draft: Draft, result: Recovered) -> None:
    """Let the buckets that are lost begin empty. Only where nothing of what they had was released: then all of it can
    be trained again for them."""
    for bucket in result.lost:
        members = draft.members(bucket // draft.code.k) if draft.code.m else (bucket,)
        draft.give(bucket, _loader(draft, members) if draft.living else draft.owner[bucket], How.BEGIN)
    result.begun, result.lost = result.lost, []
    begun = set(result.begun)
    draft.drop([m for m in draft.mirrors if begun & set(m.members)])


def _is_folding(draft: Draft, bucket: BucketId) -> bool:
    pending = draft.missing.get(bucket)
    return pending is not None and pending.how is How.FOLD and bucket not in draft.stuck


def _base(draft: Draft, stripe: int, lost: int) -> Mirror | None:
    """Return the mirror out of which ``lost`` members can be rebuilt: each further one needs another row at another
    ps."""
    rows: dict[int, Mirror] = {}
    at: set[Slot] = set()
    found = draft.rows()
    for row in range(draft.code.m):
        for mirror in sorted(found.get((stripe, row), []), key=lambda m: m.id):
            if mirror.id in draft.ready and mirror.at not in at and row not in rows:
                rows[row] = mirror
                at.add(mirror.at)
    return rows[min(rows)] if len(rows) >= lost and rows else None


def _loader(draft: Draft, members: tuple[BucketId, ...]) -> Slot:
    """Return the living ps that takes a bucket from an image: one without a mirror of the stripe (it would be void) and
    without other members, else the one with the fewest buckets."""
    beside = [draft.owner[b] for b in members]
    mirrors = {m.at for m in draft.mirrors if set(m.members) & set(members)}

    def cost(slot: Slot) -> tuple[bool, int, int, Slot]:
        return slot in mirrors, beside.count(slot), draft.owner.count(slot), slot

    return min(draft.living, key=cost)
