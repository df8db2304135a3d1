"""Says where partitions are: the desired state that every ps compares with what it holds."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.member import Address


class PsPlace(msgspec.Struct, frozen=True, array_like=True):
    """Is one living parameter server, as clients need to know it."""

    slot: Slot
    incarnation: Incarnation
    address: Address


class MirrorKind(StrEnum):
    PARITY = "parity"  # one row of a stripe's code (a replica is a stripe of one)
    MOVE = "move"  # one member, at the place where the partition is to go


class Mirror(msgspec.Struct, frozen=True, array_like=True):
    """Is what ps ``at`` keeps of ``members``, which live at other ps: the XOR of their pages (``row`` 0), or the sum of
    ``g**i`` times the page of member ``i`` over GF(2^8) (``row`` 1); and a copy of each one's marks.

    A new ``id`` is built anew from its members' contents; ids are never used twice in a job.
    """

    id: int
    members: tuple[PartitionId, ...]
    at: Slot
    row: int = 0
    kind: MirrorKind = MirrorKind.PARITY


class Placement(msgspec.Struct, frozen=True, rename={"snapshots": "images"}):
    """``owner[b]`` is the slot that owns partition ``b``; ``version`` grows with every change.

    ``routing``: the version at which ``owner`` or ``servers`` last changed; pulls and pushes carry and compare it, so
    that a change of mirrors alone disturbs no worker. ``snapshots``: partitions whose contents are to be loaded from a
    checkpoint by their owner, unless it holds them: ``(partition, checkpoint id)``. ``emptied``: ps that are to give
    away all that they have, as fast as they can.
    """

    version: int
    owner: tuple[Slot, ...]
    servers: tuple[PsPlace, ...]
    routing: int = 0  # 0: as version
    mirrors: tuple[Mirror, ...] = ()
    snapshots: tuple[tuple[PartitionId, int], ...] = ()
    emptied: tuple[Slot, ...] = ()

    @property
    def partitions(self) -> int:
        return len(self.owner)

    @property
    def route(self) -> int:
        """Return the version of ``owner`` and ``servers``."""
        return self.routing or self.version

    def owned_by(self, slot: Slot) -> list[PartitionId]:
        return [PartitionId(b) for b, s in enumerate(self.owner) if s == slot]

    def mirrors_of(self, partition: PartitionId) -> list[Mirror]:
        return [m for m in self.mirrors if partition in m.members]

    def mirrors_at(self, slot: Slot) -> list[Mirror]:
        return [m for m in self.mirrors if m.at == slot]
