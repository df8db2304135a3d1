"""Buckets -> ps: the first map, and the map after a ps came back in a new life."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.ids import Incarnation, Slot
from everstep.model.member import Member
from everstep.model.placement import Placement, PsPlace


def places_of(servers: Iterable[Member]) -> tuple[PsPlace, ...]:
    """Where the given ps listen; those without an address are left out."""
    found = [PsPlace(m.slot, m.incarnation, m.address) for m in servers if m.address is not None]
    return tuple(sorted(found, key=lambda place: place.slot))


def first_placement(buckets: int, servers: Iterable[Member]) -> Placement:
    """Buckets dealt out in turn: bucket b goes to the (b mod n)-th ps."""
    places = places_of(servers)
    return Placement(1, tuple(places[b % len(places)].slot for b in range(buckets)), places)


def refreshed(old: Placement, servers: Iterable[Member]) -> Placement:
    """The same owners at their present addresses and lives, one version later."""
    return Placement(old.version + 1, old.owner, places_of(servers))


def acknowledged_by_all(placement: Placement, acks: tuple[tuple[Slot, Incarnation], ...]) -> str:
    """ "" if every ps of the map acknowledged in its present life; else which one did not, in words."""
    got = dict(acks)
    for place in placement.servers:
        incarnation = got.get(place.slot)
        if incarnation is None:
            return f"ps:{place.slot} did not acknowledge it"
        if incarnation != place.incarnation:
            return f"ps:{place.slot} acknowledged it in life #{incarnation}, now it is #{place.incarnation}"
    return ""
