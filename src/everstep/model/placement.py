"""Buckets and where they are."""

from __future__ import annotations

import msgspec

from everstep.ids import BucketId, Incarnation, Slot
from everstep.model.member import Address


class PsPlace(msgspec.Struct, frozen=True, array_like=True):
    """One living parameter server, as clients need to know it."""

    slot: Slot
    incarnation: Incarnation
    address: Address


class Placement(msgspec.Struct, frozen=True):
    """The map bucket -> ps. ``owner[b]`` is the slot that owns bucket ``b``; ``version`` grows with every change."""

    version: int
    owner: tuple[Slot, ...]
    servers: tuple[PsPlace, ...]

    @property
    def buckets(self) -> int:
        return len(self.owner)

    def owned_by(self, slot: Slot) -> list[BucketId]:
        return [BucketId(b) for b, s in enumerate(self.owner) if s == slot]
