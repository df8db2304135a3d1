"""Works out what a run has used and what that costs. Pure.

Times are seconds since the job began, on the clock that is paid by: that of a recorded cloud where one was played, else
the clock of the master. ``docs/cost.md`` defines every number.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from everstep.ids import NodeId
from everstep.model.capacity import Market
from everstep.monitor.prices import PriceBook

HOUR_S: Final = 3600.0
IDLE: Final = "nobody"
"""Where no member runs on a machine that is paid: it starts, was emptied, or waits."""


class MachineSpan(NamedTuple):
    """Is one machine for as long as it is paid. ``usd``: for an hour, as its source said; None: it did not.
    ``places``: workers that it takes."""

    node: NodeId
    hardware: str
    zone: str
    market: Market
    begin: float
    end: float
    usd: float | None = None
    places: int = 0


class MemberSpan(NamedTuple):
    """Is a member that ran on a node."""

    role: str
    node: NodeId
    begin: float
    end: float


class PlayedClock:
    """Converts from the master's clock to the one that is paid by. ``points``: (master's time, recorded time) that
    belong together; beyond them ``speed`` recorded seconds pass in one. Without points the two clocks are one."""

    def __init__(self, began: float, points: Iterable[tuple[float, float]] = (), speed: float = 1.0) -> None:
        self._real: list[float] = []
        self._recorded: list[float] = []
        for real, recorded in points:
            if not self._real or (real > self._real[-1] and recorded > self._recorded[-1]):
                self._real.append(real)
                self._recorded.append(recorded)
        self._speed = speed if self._real else 1.0
        if not self._real:
            self._real, self._recorded = [began], [0.0]
        self._zero = self._at(began)

    def __repr__(self) -> str:
        return f"<clock of {len(self._real)} points, speed {self._speed:g}>"

    def at(self, real: float) -> float:
        """Return the paid seconds since the job began, at a time of the master's clock."""
        return self._at(real) - self._zero

    def at_recorded(self, recorded: float) -> float:
        """Return the paid seconds since the job began, at a moment of the recording."""
        return recorded - self._zero

    def _at(self, real: float) -> float:
        i = bisect_right(self._real, real) - 1
        if i < 0:
            return self._recorded[0] - (self._real[0] - real) * self._speed
        if i + 1 >= len(self._real):
            return self._recorded[i] + (real - self._real[i]) * self._speed
        share = (real - self._real[i]) / (self._real[i + 1] - self._real[i])
        return self._recorded[i] + share * (self._recorded[i + 1] - self._recorded[i])


class NodeSum(msgspec.Struct):
    """Sums node-seconds, and what they cost. ``unknown_s``: seconds without a price; they are not in ``usd``."""

    seconds: float = 0.0
    usd: float = 0.0
    unknown_s: float = 0.0

    def add(self, seconds: float, usd: float | None) -> None:
        """Add a stretch. ``usd``: for an hour; None: not known."""
        self.seconds += seconds
        if usd is None:
            self.unknown_s += seconds
        else:
            self.usd += seconds / HOUR_S * usd

    @property
    def complete(self) -> bool:
        """Return whether every second has a price."""
        return self.unknown_s <= 0


class Costs(msgspec.Struct):
    """Holds all sums. ``spent``: at the prices of the time. ``on_demand``: the same machines for the same time at
    on-demand prices. ``roles``: spent for master, ps, workers and nobody; ``hours``: spent in each hour since the job
    began; ``nodes``: spent by node. ``unknown``: what has no price, in words. ``role_hours``: spent for each role in
    each hour, as many hours as ``hours``."""

    spent: NodeSum
    on_demand: NodeSum
    roles: dict[str, NodeSum]
    hours: list[NodeSum]
    nodes: dict[NodeId, NodeSum]
    unknown: list[str]
    role_hours: dict[str, list[NodeSum]] = {}

    @property
    def price_part(self) -> float | None:
        """Return what was spent over the same time on demand; None: a price is not known, or nothing would have been
        paid."""
        if not (self.spent.complete and self.on_demand.complete) or self.on_demand.usd <= 0:
            return None
        return self.spent.usd / self.on_demand.usd

    def saved(self, goodput: float | None) -> float | None:
        """Return the share that was saved against on-demand machines which do the same work: 1 - price part / goodput
        part."""
        if self.price_part is None or not goodput:
            return None
        return 1 - self.price_part / goodput


class _Piece(NamedTuple):
    begin: float
    end: float
    usd: float | None
    on_demand: float | None
    roles: tuple[str, ...]


def reckon(machines: Sequence[MachineSpan], members: Sequence[MemberSpan], book: PriceBook, at: float) -> Costs:
    """Return what the machines cost. ``at``: the time of the book, seconds since 1970, at which the job began."""
    spent, on_demand = NodeSum(), NodeSum()
    roles: dict[str, NodeSum] = {}
    nodes: dict[NodeId, NodeSum] = {}
    hours: list[NodeSum] = []
    role_hours: dict[str, dict[int, NodeSum]] = {}
    unknown: dict[str, None] = {}
    for machine in machines:
        for piece in _pieces(machine, [m for m in members if m.node == machine.node], book, at):
            seconds = piece.end - piece.begin
            spent.add(seconds, piece.usd)
            on_demand.add(seconds, piece.on_demand)
            nodes.setdefault(machine.node, NodeSum()).add(seconds, piece.usd)
            hour = max(0, int(piece.begin // HOUR_S))
            for role in piece.roles or (IDLE,):
                share_s = seconds / max(1, len(piece.roles))
                roles.setdefault(role, NodeSum()).add(share_s, piece.usd)
                role_hours.setdefault(role, {}).setdefault(hour, NodeSum()).add(share_s, piece.usd)
            hours += [NodeSum() for _ in range(hour + 1 - len(hours))]
            hours[hour].add(seconds, piece.usd)
            if piece.usd is None:
                unknown[f"{_words(machine)}: no {machine.market.value.replace('_', '-')} price"] = None
            if piece.on_demand is None:
                unknown[f"{_words(machine)}: no on-demand price"] = None
    full = {role: [some.get(n, NodeSum()) for n in range(len(hours))] for role, some in role_hours.items()}
    return Costs(spent, on_demand, roles, hours, nodes, list(unknown), full)


def _words(machine: MachineSpan) -> str:
    return f"{machine.hardware or 'a machine of no class'} in {machine.zone or 'no zone'}"


def _pieces(machine: MachineSpan, members: Sequence[MemberSpan], book: PriceBook, at: float) -> Iterator[_Piece]:
    """Yield a machine's time, cut where a price or a member changes, and at full hours."""
    begin, end = machine.begin, machine.end
    if end <= begin:
        return
    of = (machine.hardware, machine.zone)
    paid = [(p.begin - at, p.end - at, p.usd) for p in book.spans(*of, machine.market, at + begin, at + end)]
    if machine.usd is not None:
        paid = [(begin, end, machine.usd)]
    full = [(p.begin - at, p.end - at, p.usd) for p in book.spans(*of, Market.ON_DEMAND, at + begin, at + end)]
    if machine.usd is not None and machine.market is Market.ON_DEMAND:
        full = paid
    cuts = {begin, end, *(p[0] for p in paid), *(p[0] for p in full)}
    cuts |= {t for m in members for t in (m.begin, m.end)}
    cuts |= {hour * HOUR_S for hour in range(math.ceil(begin / HOUR_S), math.ceil(end / HOUR_S))}
    points = sorted(t for t in cuts if begin <= t <= end)
    for a, b in itertools.pairwise(points):
        middle = (a + b) / 2
        here = tuple(sorted(m.role for m in members if m.begin <= middle < m.end))
        yield _Piece(a, b, _price(paid, middle), _price(full, middle), here)


def _price(spans: Sequence[tuple[float, float, float | None]], t: float) -> float | None:
    i = bisect_right(spans, t, key=lambda span: span[0]) - 1
    return spans[max(0, i)][2] if spans else None


def goodput(machines: Sequence[MachineSpan], useful: Iterable[tuple[NodeId, float, float]]) -> float | None:
    """Return the goodput part: seconds that workers spent on work that counted, over the seconds of all places for
    workers on paid machines; None: there were none. ``useful``: (node, begin, end) of one worker, which may overlap
    with those of others, not with its own."""
    paid = sum((m.end - m.begin) * m.places for m in machines if m.end > m.begin)
    if paid <= 0:
        return None
    spent = 0.0
    for node, begin, end in useful:
        for m in machines:
            if m.node == node:
                spent += max(0.0, min(end, m.end) - max(begin, m.begin))
    return min(1.0, spent / paid)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of one worker without their overlaps."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > begin:
            out.append((begin, end))
    return out
