"""Chooses which node a process goes to."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.ids import NodeId

HOME_NODE = NodeId("node0")
"""The node that started the job: it takes every ps, and as many workers as the job asks for."""


class NodeRoom(msgspec.Struct, frozen=True):
    """Says what one living node can take. ``places`` 0: any number."""

    node: NodeId
    places: int
    used: int

    @property
    def free(self) -> bool:
        return self.places == 0 or self.used < self.places


def choose_worker_node(rooms: Iterable[NodeRoom], home: NodeId | None) -> NodeId | None:
    """Return the node for one worker slot, None if it has to wait.

    ``home``: the node that brought this slot along. Such a slot is extra capacity: it goes back home, or into a free
    place of another node with counted places, but never on top of the node that takes any number (it would only
    crowd the workers there). A slot that the job itself asked for goes to the home node first.
    """
    free = [room for room in rooms if room.free]
    if home is not None:
        if any(room.node == home for room in free):
            return home
        free = [room for room in free if room.places > 0]
    else:
        for room in free:
            if room.node == HOME_NODE or room.places == 0:
                return room.node
    best = max(free, key=lambda room: room.places - room.used, default=None)
    return best.node if best is not None else None


def choose_ps_node(rooms: Iterable[NodeRoom]) -> NodeId | None:
    """Return the node for one ps slot: the home node, else one that offers places for ps; None if it has to wait."""
    offers: list[NodeRoom] = []
    for room in rooms:
        if room.node == HOME_NODE:
            return room.node
        if room.places > 0 and room.free:
            offers.append(room)
    best = max(offers, key=lambda room: room.places - room.used, default=None)
    return best.node if best is not None else None
