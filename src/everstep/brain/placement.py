"""Names the ps of a map, and which acknowledgements of a shard are those of all its partitions."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.ids import Incarnation, Slot
from everstep.model.member import Member
from everstep.model.placement import PsPlace


def places_of(servers: Iterable[Member]) -> tuple[PsPlace, ...]:
    """Return where the given ps listen; those without an address are left out."""
    found = [PsPlace(m.slot, m.incarnation, m.address) for m in servers if m.address is not None]
    return tuple(sorted(found, key=lambda place: place.slot))


class Acks(msgspec.Struct, frozen=True, array_like=True):
    """Names who has to acknowledge a shard under one map: every one of ``owners`` (slot, life), and nobody who is not
    one of ``servers``: whoever is none of them had partitions that are elsewhere by now."""

    owners: tuple[tuple[Slot, Incarnation], ...]
    servers: tuple[tuple[Slot, Incarnation], ...]

    def by(self, acks: tuple[tuple[Slot, Incarnation], ...]) -> str:
        """Return "" if these do; else which one does not, in words."""
        if acks == self.owners == self.servers:  # nearly always
            return ""
        got, lives = dict(acks), dict(self.servers)
        for slot, incarnation in self.owners:
            acknowledged = got.get(slot)
            if acknowledged is None:
                return f"ps:{slot} did not acknowledge it"
            if acknowledged != incarnation:
                return f"ps:{slot} acknowledged it in life #{acknowledged}, now it is #{incarnation}"
        for slot, incarnation in acks:
            if lives.get(slot) != incarnation:
                return f"ps:{slot} #{incarnation} acknowledged it, which is no more; its partitions are elsewhere"
        return ""
