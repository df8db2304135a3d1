"""Decides which nodes a job asks a cluster for and gives back (Ray, Slurm). Pure: no clock, no cluster.

A cluster is looked at again and again. Each look lists all nodes of the job, in whatever state: what follows depends on
the list, on how many nodes are wanted, and on what the list said before. So a look that is late, or the first one of an
``everstep run`` that was started again, needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, Gone, Grant, Offer, Warned

APPEAR_S: Final = 30.0
"""A node that was asked for is in the list within so long, or was never made."""
STEADY_S: Final = 60.0
"""An agent that fails sooner than this after its start counts as one that cannot start."""
TRIES: Final = 8
"""After so many agents in a row that cannot start no node is asked for any more."""
_FIRST_WAIT_S: Final = 1.0
_LAST_WAIT_S: Final = 60.0


class NodeState(StrEnum):
    """Says what a cluster shows of a node."""

    ASKED = "asked"
    """It waits for resources, or starts."""
    RUNNING = "running"
    LEAVING = "leaving"
    """The cluster takes it back: it was told to go."""
    ENDED = "ended"


class SeenNode(msgspec.Struct, frozen=True):
    """Is what a cluster shows of a node of the job.

    ``left_s``: seconds until the cluster ends it, None: it has no end. ``failed``: it ended by its own failure, not by
    the cluster's. ``done``: its agent ended because the job is over. ``why``: for people."""

    node: NodeId
    state: NodeState
    offer: Offer
    left_s: float | None = None
    failed: bool = False
    done: bool = False
    why: str = ""


class AddNodes(msgspec.Struct, frozen=True):
    """Ask the cluster for these nodes, together."""

    nodes: tuple[NodeId, ...]


class CancelNode(msgspec.Struct, frozen=True):
    """Give up a node in whatever state; harmless where it is gone."""

    node: NodeId


class SayLine(msgspec.Struct, frozen=True):
    """Is a line for people."""

    text: str


NodeAction = AddNodes | CancelNode | SayLine


class NodeRecord(msgspec.Struct):
    """Is what is known of a node. ``asked_at``: when it was asked for, or first seen. ``granted_at``: when the job got
    it, -1.0: not yet. ``warned``: it goes, and does not count any more; ``ends_at``: when, None: soon. ``before``: an
    earlier ``everstep run`` had it; None: it had not."""

    asked_at: float
    seen: bool = False
    granted_at: float = -1.0
    warned: bool = False
    ends_at: float | None = None
    before: Offer | None = None


class ClusterLook(NamedTuple):
    """Is what follows from a look at the cluster."""

    news: list[CapacityNews]
    actions: list[NodeAction]


class ClusterNodes:
    """Holds the nodes that a job has of a cluster. ``prefix``: of their names. ``lead_s``: a node whose end is known is
    emptied so long before it. ``number``: of the last name that was used; a name is used once. ``before``: the nodes
    that an earlier ``everstep run`` had when it ended. One of these that is no more is told as granted and gone."""

    def __init__(
        self, prefix: str, lead_s: float, number: int = 0, before: Mapping[NodeId, Offer] | None = None
    ) -> None:
        self._prefix, self._lead_s, self.number = prefix, lead_s, number
        self._known: dict[NodeId, NodeRecord] = {
            node: NodeRecord(0.0, seen=True, before=offer) for node, offer in (before or {}).items()
        }
        self._released: set[NodeId] = set()
        self._wanted = 0
        self._failures, self._not_before, self._over = 0, 0.0, False

    def __repr__(self) -> str:
        return f"<{len(self._known)} nodes, {self._wanted} wanted>"

    @property
    def wanted(self) -> int:
        """Return how many nodes are wanted."""
        return self._wanted

    def going(self, now: float) -> dict[NodeId, float | None]:
        """Return the nodes that were told to go, with the seconds that each has left; None: nobody says."""
        return {
            node: None if record.ends_at is None else max(0.0, record.ends_at - now)
            for node, record in self._known.items()
            if record.warned
        }

    def request(self, count: int) -> None:
        """Want ``count`` nodes from now on. Another number than before ends a wait after failures."""
        if count != self._wanted:
            self._wanted, self._failures, self._not_before, self._over = count, 0, 0.0, False

    def release(self, node: NodeId) -> list[NodeAction]:
        """Give a node back."""
        self._known.pop(node, None)
        self._released.add(node)
        return [CancelNode(node)]

    def refused(self, now: float, nodes: Sequence[NodeId]) -> None:
        """Forget nodes that the cluster did not take on; they are asked for again later."""
        for node in nodes:
            self._known.pop(node, None)
        self._wait(now)

    def look(self, now: float, found: Sequence[SeenNode]) -> ClusterLook:
        """The cluster shows ``found``: all nodes of the job. Return what follows."""
        news: list[CapacityNews] = []
        actions: list[NodeAction] = []
        for seen in found:
            self._see(now, seen, news, actions)
        here = {seen.node for seen in found}
        for node in [n for n in self._known if n not in here]:
            record = self._known[node]
            if record.seen or now - record.asked_at >= APPEAR_S:
                del self._known[node]
                _tell_gone(node, record, news)
        self._released &= here
        self._settle(now, actions)
        return ClusterLook(news, actions)

    def _see(self, now: float, seen: SeenNode, news: list[CapacityNews], actions: list[NodeAction]) -> None:
        node = seen.node
        if node in self._released:
            actions.append(CancelNode(node))
            return
        record = self._known.get(node)
        if record is None:
            if seen.state is NodeState.ENDED:
                actions.append(CancelNode(node))  # (of before: what it left goes)
                return
            record = self._known[node] = NodeRecord(now)
        record.seen = True
        if seen.state is NodeState.ENDED:
            self._ended(now, seen, record, news, actions)
            return
        if seen.state is NodeState.ASKED:
            return
        if record.granted_at < 0:
            record.granted_at = now
            news.append(Grant(node, seen.offer))
        if now - record.granted_at >= STEADY_S:
            self._failures = 0
        near = seen.left_s is not None and seen.left_s <= self._lead_s
        if (seen.state is NodeState.LEAVING or near) and not record.warned:
            record.warned = True
            record.ends_at = None if seen.left_s is None else now + seen.left_s
            news.append(Warned(node, seen.left_s))

    def _ended(
        self, now: float, seen: SeenNode, record: NodeRecord, news: list[CapacityNews], actions: list[NodeAction]
    ) -> None:
        self._over |= seen.done
        del self._known[seen.node]
        self._released.add(seen.node)
        actions.append(CancelNode(seen.node))
        granted = _tell_gone(seen.node, record, news)
        if not granted:
            self._wait(now)
        if not seen.failed or record.warned or (granted and now - record.granted_at >= STEADY_S):
            return
        self._failures += 1
        self._wait(now)
        words = f"{seen.node} could not start: {seen.why or 'its agent ended'}"
        if self._failures >= TRIES:
            words += f"; {TRIES} in a row: no more nodes are asked for (everstep scale asks anew)"
        actions.append(SayLine(words))

    def _wait(self, now: float) -> None:
        self._not_before = now + min(_LAST_WAIT_S, _FIRST_WAIT_S * 2 ** max(0, self._failures - 1))

    def _settle(self, now: float, actions: list[NodeAction]) -> None:
        """Ask for what is lacking; take back what was asked for and is not wanted any more."""
        if not self._wanted:
            for node in list(self._known):
                actions += self.release(node)
            return
        counted = [node for node, record in self._known.items() if not record.warned]
        waiting = [node for node in counted if self._known[node].granted_at < 0 and self._known[node].before is None]
        for node in waiting[len(waiting) - max(0, min(len(waiting), len(counted) - self._wanted)) :]:
            actions += self.release(node)
        lack = self._wanted - len(counted)
        if lack <= 0 or now < self._not_before or self._failures >= TRIES or self._over:
            return
        names = []
        for _ in range(lack):
            self.number += 1
            names.append(NodeId(f"{self._prefix}-{self.number}"))
            self._known[names[-1]] = NodeRecord(now)
        actions.append(AddNodes(tuple(names)))


def node_number(node: NodeId) -> int:
    """Return the number in a node's name; 0: it has none."""
    number = node.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def _tell_gone(node: NodeId, record: NodeRecord, news: list[CapacityNews]) -> bool:
    """Add the news that a node is gone. Return whether the job had it."""
    if record.granted_at < 0:
        if record.before is None:
            return False
        news.append(Grant(node, record.before))
    news.append(Gone(node))
    return True
