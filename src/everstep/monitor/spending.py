"""Reads what the journal says about machines, members and work that counted: from it alone, for every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CapacityChanged,
    Event,
    Granted,
    NodeJoined,
    NodeLost,
    Ok,
    PublishGroup,
    Reply,
    ShardAsked,
    ShardDone,
    StepsCommitted,
)
from everstep.brain.job import Phase
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.model.capacity import CapacityStep, Market
from everstep.model.member import Role
from everstep.monitor.node_costs import MachineSpan, MemberSpan, PlayedClock, goodput, merged
from everstep.policies.node_selection import HOME_NODE


class _Machine(msgspec.Struct):
    """``granted``: its source says when it comes and goes; else its agent's hello and its silence do. ``recorded``:
    begin and end in the recording."""

    node: NodeId
    hardware: str
    zone: str
    market: Market
    begin: float
    end: float = -1.0
    usd: float | None = None
    granted: bool = False
    recorded: tuple[float | None, float | None] = (None, None)
    places: int = 0


class _UsefulWork(NamedTuple):
    node: NodeId
    worker: Slot
    begin: float
    end: float


class Spending:
    """Is the fold of a journal. Call ``take`` with every event, then ``close``."""

    def __init__(self) -> None:
        self.brain = Brain()
        self.began = 0.0
        self.ended = 0.0
        self._terms: list[tuple[float, float]] = []  # of the job, that ended as it was suspended
        self._term_began = 0.0
        self._machines: list[_Machine] = []
        self._open: dict[NodeId, _Machine] = {}
        self._points: list[tuple[float, float]] = []
        self._running: dict[tuple[Role, Slot, Incarnation], tuple[NodeId, float]] = {}
        self._members: list[tuple[Role, NodeId, float, float]] = []
        self._leases: dict[LeaseNo, tuple[NodeId, Slot, float]] = {}
        self._work: list[_UsefulWork] = []
        self._groups: dict[int, tuple[float, tuple[tuple[NodeId, Slot], ...]]] = {}
        self._committed: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<spending of {len(self._machines)} machines>"

    def take(self, event: Event) -> None:
        """Add one event. Raise nothing that the brain does not raise."""
        over = self.brain.job.over
        out = self.brain.handle(event)
        fact, sender, at = event.fact, event.sender, event.at
        self.began = self.began or at
        if over:
            if not self.brain.job.over:
                self.ended = self._term_began = max(self.ended, at)
            return
        self._term_began = self._term_began or at
        self.ended = max(self.ended, at)
        match fact:
            case ShardAsked():
                for reply in out:
                    if isinstance(reply, Reply) and isinstance(reply.answer, Granted):
                        node = self._node_of(sender.slot)
                        self._leases.setdefault(reply.answer.lease.no, (node, sender.slot, at))
            case ShardDone():
                if any(isinstance(r, Reply) and isinstance(r.answer, Ok) for r in out) and fact.lease in self._leases:
                    node, slot, since = self._leases.pop(fact.lease)
                    self._work.append(_UsefulWork(node, slot, since, at))
            case StepsCommitted():
                if any(isinstance(r, Reply) and isinstance(r.answer, Ok) for r in out):
                    for steps in fact.steps:
                        self._committed[steps.generation] = at
            case NodeJoined():
                self._joined(fact, at)
            case NodeLost():
                machine = self._open.get(fact.node)
                if machine is not None and not machine.granted:
                    self._gone(fact.node, at - self.brain.job.spec.lost_after_s)
            case CapacityChanged():
                self._changed(fact, at)
            case _:
                pass
        for instruction in out:
            if isinstance(instruction, PublishGroup):
                group = instruction.group
                members = tuple((self._node_of(m.slot), m.slot) for m in group.members)
                self._groups.setdefault(group.generation, (at, members))
        if not isinstance(fact, ShardAsked | ShardDone | StepsCommitted):
            self._look_at_members(at)
        if self.brain.job.phase is Phase.SUSPENDED:
            self._nothing_is_held(at)

    def _nothing_is_held(self, at: float) -> None:
        """The job is suspended: nobody pays for it until it goes on."""
        for node in list(self._open):
            self._gone(node, at)
        self._members += [(role, node, since, at) for (role, _, _), (node, since) in self._running.items()]
        self._running.clear()
        self._terms.append((self._term_began, at))

    def close(self) -> None:
        """End all that is open, which ends with the job, or with the last event of one that is not over."""
        for node in list(self._open):
            self._gone(node, self.ended)
        for (role, _, _), (node, since) in self._running.items():
            self._members.append((role, node, since, self.ended))
        self._running.clear()
        for generation, (since, members) in self._groups.items():
            if generation in self._committed:
                self._work += [_UsefulWork(node, slot, since, self._committed[generation]) for node, slot in members]

    def _node_of(self, worker: Slot) -> NodeId:
        record = self.brain.members.workers.get(worker)
        return record.member.node if record is not None else HOME_NODE

    def _joined(self, fact: NodeJoined, at: float) -> None:
        machine = self._open.get(fact.node)
        if machine is None:
            market = fact.market or Market.ON_DEMAND
            machine = self._open[fact.node] = _Machine(fact.node, fact.hardware, fact.zone, market, at)
            if fact.node == HOME_NODE:
                machine.begin = self._term_began  # (its master was there before its agent's hello)
            self._machines.append(machine)
        machine.hardware, machine.zone = machine.hardware or fact.hardware, machine.zone or fact.zone
        machine.places = max(machine.places, fact.worker_places)

    def _changed(self, fact: CapacityChanged, at: float) -> None:
        if fact.recorded_s is not None:
            self._points.append((at, fact.recorded_s))
        match fact.step:
            case CapacityStep.GRANTED:
                known = self._open.get(fact.node)
                of = (fact.hardware, fact.zone, fact.market, fact.price)
                if known is not None and known.granted and of == (known.hardware, known.zone, known.market, known.usd):
                    return  # an ``everstep run`` that was started again may have said it again
                places = known.places if known is not None else 0
                self._gone(fact.node, at)
                new = _Machine(fact.node, fact.hardware, fact.zone, fact.market, at, usd=fact.price, granted=True)
                new.recorded, new.places = (fact.recorded_s, None), places
                self._open[fact.node] = new
                self._machines.append(new)
            case CapacityStep.TAKEN_BACK | CapacityStep.GIVEN_BACK:
                self._gone(fact.node, at, fact.recorded_s)
            case CapacityStep.WARNED:
                pass

    def _gone(self, node: NodeId, at: float, recorded_s: float | None = None) -> None:
        machine = self._open.pop(node, None)
        if machine is not None:
            machine.end = max(machine.begin, at)
            machine.recorded = (machine.recorded[0], recorded_s)

    def _look_at_members(self, at: float) -> None:
        now = {}
        for record in self.brain.members.all():
            if record.running:
                m = record.member
                now[m.role, m.slot, m.incarnation] = m.node
        for key, (node, since) in list(self._running.items()):
            if key not in now:
                del self._running[key]
                self._members.append((key[0], node, since, at))
        for key, node in now.items():
            self._running.setdefault(key, (node, at))
        workers = [node for (role, _, _), node in now.items() if role is Role.WORKER]
        if (home := self._open.get(HOME_NODE)) is not None:  # (it takes any number)
            home.places = max(home.places, workers.count(HOME_NODE))

    # ------------------------------------------------------------ what the ledger needs

    def clock(self) -> PlayedClock:
        """Return the clock that is paid by."""
        return PlayedClock(self.began, self._points, self.brain.job.spec.capacity_speed)

    @property
    def played(self) -> bool:
        """Return whether a recorded cloud was played."""
        return bool(self._points)

    def machines(self, clock: PlayedClock | None = None) -> list[MachineSpan]:
        """Return the machines, on ``clock``; without one on the master's own, where the job began at 0."""
        out = []
        for m in self._machines:
            begin, end = m.begin - self.began, m.end - self.began
            if clock is not None:
                first, last = m.recorded
                begin = clock.at(m.begin) if first is None else clock.at_recorded(first)
                end = clock.at(m.end) if last is None else clock.at_recorded(last)
                # (a machine is not paid before the job begins: one that was there already is granted a little later)
                begin, end = max(0.0, begin), max(0.0, begin, end)
            out.append(MachineSpan(m.node, m.hardware, m.zone, m.market, begin, end, m.usd, m.places))
        return out

    def members(self, clock: PlayedClock) -> list[MemberSpan]:
        """Return members, the master among them, on ``clock``."""
        out = [MemberSpan(str(role), node, clock.at(a), clock.at(b)) for role, node, a, b in self._members]
        terms = list(self._terms)
        if self.brain.job.phase is not Phase.SUSPENDED:
            terms.append((self._term_began, self.ended))
        return [*(MemberSpan("master", HOME_NODE, clock.at(a), clock.at(b)) for a, b in terms), *out]

    def goodput(self) -> float | None:
        """Return the goodput part, in the seconds that passed here."""
        by_worker: dict[tuple[NodeId, Slot], list[tuple[float, float]]] = {}
        for work in self._work:
            span = (work.begin - self.began, work.end - self.began)
            by_worker.setdefault((work.node, work.worker), []).append(span)
        useful = [(node, a, b) for (node, _), spans in by_worker.items() for a, b in merged(spans)]
        return goodput(self.machines(), useful)


def read_spending(events: Iterable[Event]) -> Spending:
    """Return the fold of all events of a journal."""
    found = Spending()
    for event in events:
        found.take(event)
    found.close()
    return found
