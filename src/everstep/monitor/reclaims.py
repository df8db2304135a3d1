"""Counts the machines of a running job that are taken back. Pure: each event costs the same, however long it runs."""

from __future__ import annotations

from everstep.brain.events import CapacityChanged, Event, NodeJoined, NodeLost
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep, Market
from everstep.model.spot_choice import ReclaimsSeen
from everstep.policies.node_selection import HOME_NODE

MOMENT_S = 10.0
"""Machines that go within so many seconds go at one moment."""


class ReclaimCounter:
    """Is the count, which goes on from ``seen``. A machine counts if its source granted it, or if it joined as one that
    may be taken back. A machine that the job gave back was held, and not taken."""

    def __init__(self, seen: ReclaimsSeen = ReclaimsSeen()) -> None:
        self._seen = seen
        self._granted: dict[NodeId, bool] = {}  # of machines that are held: whether their source says when they go
        self._at = 0.0  # up to here is counted
        self._last_at, self._last_count = float("-inf"), 0

    def __repr__(self) -> str:
        return f"<{self._seen.reclaims} reclaims, {len(self._granted)} machines held>"

    @property
    def held(self) -> frozenset[NodeId]:
        """Return the machines that are held and may be taken back."""
        return frozenset(self._granted)

    def seen(self, at: float) -> ReclaimsSeen:
        """Return the count, up to ``at``."""
        self._advance(at)
        return self._seen

    def take(self, event: Event) -> None:
        """Add one event."""
        fact = event.fact
        match fact:
            case NodeJoined(node=node, market=Market.SPOT) if node != HOME_NODE:
                self._advance(event.at)
                self._granted.setdefault(node, False)
            case NodeLost(node=node) if self._granted.get(node) is False:
                self._goes(node, event.at)
            case CapacityChanged(node=node, step=CapacityStep.GRANTED):
                self._advance(event.at)
                self._granted[node] = True
            case CapacityChanged(node=node, step=CapacityStep.TAKEN_BACK) if node in self._granted:
                self._goes(node, event.at)
            case CapacityChanged(node=node, step=CapacityStep.GIVEN_BACK):
                self._advance(event.at)
                self._granted.pop(node, None)
            case _:
                pass

    def over(self, at: float) -> None:
        """The job is suspended or over: it holds nothing."""
        self._advance(at)
        self._granted.clear()

    def _advance(self, at: float) -> None:
        """Count up to ``at``. A clock that goes back adds nothing."""
        seconds = max(0.0, at - self._at) if self._at else 0.0
        self._at = max(self._at, at)
        if seconds and self._granted:
            s = self._seen
            held_s = s.held_s + seconds * len(self._granted)
            self._seen = ReclaimsSeen(held_s, s.reclaims, s.moments, s.shared, s.most)

    def _goes(self, node: NodeId, at: float) -> None:
        self._advance(at)
        del self._granted[node]
        new = not 0.0 <= at - self._last_at <= MOMENT_S
        self._last_count = 1 if new else self._last_count + 1
        self._last_at = at if new else self._last_at
        s = self._seen
        self._seen = ReclaimsSeen(
            held_s=s.held_s,
            reclaims=s.reclaims + 1,
            moments=s.moments + new,
            shared=s.shared + (self._last_count == 2),
            most=max(s.most, self._last_count),
        )
