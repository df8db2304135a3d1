"""Chooses which node a process goes to."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.ids import NodeId
from everstep.model.copy_places import CopyPlace

HOME_NODE = NodeId("node0")
"""The node that started the job: it takes as many workers and ps as the job asks for."""


class NodeRoom(msgspec.Struct, frozen=True):
    """Says what one living node can take. ``places`` 0: any number of workers; no ps, but at the home node any number.
    ``machine``: nodes of one machine are lost together."""

    node: NodeId
    places: int
    used: int
    machine: str = ""

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


def choose_ps_node(rooms: Iterable[NodeRoom], at_home: int = 0) -> NodeId | None:
    """Return the node for one ps slot, None if it has to wait: on the machine with the fewest ps of those that offer
    places; the home node's first, where several have as few. ``at_home``: that one gets so many before others do."""
    rooms = list(rooms)
    used: dict[str, int] = {}
    for room in rooms:
        used[room.machine or room.node] = used.get(room.machine or room.node, 0) + room.used
    offers = [room for room in rooms if room.node == HOME_NODE or (room.places > 0 and room.free)]
    home = next((room for room in offers if room.node == HOME_NODE), None)
    if home is not None and (len(offers) == 1 or used[home.machine or home.node] < at_home):
        return home.node
    best = min(
        offers, key=lambda r: (used[r.machine or r.node], r.used, r.node != HOME_NODE, r.used - r.places), default=None
    )
    return best.node if best is not None else None


def choose_neighbour(places: Iterable[CopyPlace], node: NodeId, machine: str) -> CopyPlace | None:
    """Return which agent keeps the copies of a worker on ``node``: that of the next node by name, the first one follows
    on the last; one on another machine, if there is any. None: the job has no other node."""
    others = sorted((p for p in places if p.node != node), key=lambda p: (p.node <= node, p.node))
    apart = [p for p in others if not machine or p.machine != machine]
    return next(iter(apart or others), None)
