"""Decides which bundle of which placement group a node of a job gets. Pure.

The nodes that a job asks for together are one group, spread over machines. A group is given back as a whole, since Ray
has no smaller unit: a node that is asked for later takes a free bundle of an older group first. It takes one that is on
a machine before one that Ray has to move: there may be no machine for that one, as none takes two bundles of its group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from everstep.ids import NodeId


class BundlePlace(NamedTuple):
    """Names a bundle: the number of its group and its own."""

    group: int
    bundle: int


class Bundles:
    """Keeps which node is in which bundle."""

    def __init__(self) -> None:
        self._groups: dict[int, list[NodeId | None]] = {}
        self._newest = 0

    def __repr__(self) -> str:
        return f"<{len(self._groups)} placement groups, {len(self.nodes())} nodes>"

    def adopt(self, group: int, size: int) -> None:
        """A group of an earlier ``everstep run`` is there."""
        self._groups[group] = [None] * size
        self._newest = max(self._newest, group)

    def take(self, place: BundlePlace, node: NodeId) -> None:
        """A node is in a bundle already."""
        self._groups[place.group][place.bundle] = node

    def assign(
        self, nodes: Sequence[NodeId], placed_now: Collection[BundlePlace] = ()
    ) -> tuple[list[tuple[NodeId, BundlePlace]], tuple[int, int] | None]:
        """Return the bundle of each node, and the number and size of a group that has to be made for them first; None:
        there are free bundles enough. ``placed_now``: bundles that are on a machine that lives."""
        free = [BundlePlace(g, i) for g, taken in self._groups.items() for i, node in enumerate(taken) if node is None]
        free.sort(key=lambda place: place not in placed_now)
        lack = len(nodes) - len(free)
        made = None
        if lack > 0:
            self._newest += 1
            made = (self._newest, lack)
            self._groups[self._newest] = [None] * lack
            free += [BundlePlace(self._newest, i) for i in range(lack)]
        placed = list(zip(nodes, free, strict=False))
        for node, place in placed:
            self.take(place, node)
        return placed, made

    def misplaced(self, waiting: Collection[NodeId], placed_now: Collection[BundlePlace]) -> list[NodeId]:
        """Return those of the ``waiting`` nodes that wait in a bundle that is on no machine, while another free one is:
        each could have that one. (That a machine was lost may be known only after a node was given its bundle.)"""
        free, lost = 0, []
        for group, taken in self._groups.items():
            for bundle, node in enumerate(taken):
                here = BundlePlace(group, bundle) in placed_now
                free += here and node is None
                if node is not None and node in waiting and not here:
                    lost.append(node)
        return lost[:free]

    def free(self, nodes: Iterable[NodeId]) -> list[int]:
        """Nodes are gone. Return the groups that are empty now: they are given back."""
        gone = set(nodes)
        for taken in self._groups.values():
            taken[:] = [None if node in gone else node for node in taken]
        empty = [group for group, taken in self._groups.items() if not any(node is not None for node in taken)]
        for group in empty:
            del self._groups[group]
        return empty

    def nodes(self) -> list[NodeId]:
        """Return the nodes that have a bundle."""
        return [node for taken in self._groups.values() for node in taken if node is not None]
