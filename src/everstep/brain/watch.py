"""Notices who is silent, and which lease makes no progress: soft state from heartbeats, never journaled.

The watch turns time into events (``MemberSilent``, ``MemberHeard``, ``NodeLost``, ``NodeHeard``, ``LeaseExpired``);
only these events change the brain. Pure: every call is told the time. Five cautions keep it from killing the living:

- *Grace.* Whoever the watch has just come to know (a joiner, everybody after a restart of the master) counts as heard
  at that moment.
- *Own pauses.* If the time since the last tick is much longer than ticks are apart, the master itself was stopped, or
  the clock jumped: heartbeats may lie unread in its sockets. Everybody's silence restarts then. What a tick is late by
  is never counted against anybody.
- *The agent's word.* A process whose script holds the interpreter (a sort, a native call) cannot beat. Its agent looks
  at it from outside (``monitor.vitals``) and says with each of its own beats whether it runs. A stopped process does
  not run, and a node that is gone says nothing: both are silent as ever.
- *Waiting is no standstill.* A worker that waits for others (rows, the group, a shard) makes no progress through no
  fault of its own.
- *A silent agent* is no lost node while a member on the node is heard.

A process that was ordered but never says hello is lost too, after ``start_s``. So is a worker whose script makes no
progress for ``progress_timeout``, however alive its process is.
"""

from __future__ import annotations

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import LeaseExpired, MemberHeard, MemberSilent, NodeHeard, NodeLost
from everstep.config.limit import parse_limit
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import MemberKey, MemberState, Role

WatchEvent = MemberSilent | MemberHeard | NodeLost | NodeHeard | LeaseExpired

TICK_S = 0.25  # how often the shell ticks
STALL_S = 1.5  # silence of a worker for which its group waits; they beat every 0.5 s (mode allreduce)
STALL_TOO_S = 1.1  # of more, once there is one
PAUSE_S = 1.5  # ticks farther apart than this: the time was lost by us, not by them
PS_HELD_S = 60.0  # a ps runs no script: one that runs and says nothing for so long is stuck
CPU_SHARE = 0.05  # of a processor: who uses more, outside of its loop, does something
CPU_LOOK_S = 5.0  # between two looks at that


class _Ear(msgspec.Struct):
    """What was heard of one member: ``at`` last, ``suspect``/``lost`` once told. ``starting``: no hello yet.

    ``vouched``: when its agent last said that the process runs. ``moved``: when its script last did anything, as far as
    known. ``inside``: the script is in its loop, where only batches and calls of the job count as progress; elsewhere
    the time that the process spends on a processor (``cpu_s``, at ``cpu_at``) counts too."""

    incarnation: Incarnation
    node: NodeId
    at: float
    suspect: bool = False
    lost: bool = False
    starting: bool = False
    vouched: float = 0.0
    moved: float = 0.0
    inside: bool = False
    cpu_s: float = 0.0
    cpu_at: float = 0.0

    @property
    def alive_at(self) -> float:
        """Return when anybody last had a sign of life of the process."""
        return max(self.at, self.vouched)


class Idle(msgspec.Struct, frozen=True):
    """Is a worker whose script makes no progress."""

    key: MemberKey
    incarnation: Incarnation
    node: NodeId
    idle_s: float
    silent_s: float  # of these, without a heartbeat of its own


class _Progress(msgspec.Struct):
    """Holds what is known of a lease. ``at``: of its last progress; ``named``: when it began, or its worker last told
    of it."""

    shard: ShardKey
    position: int
    at: float
    named: float


class HeartbeatWatch:
    """Watches heartbeats: ``heard`` and ``node_heard`` with every heartbeat, ``look`` after the brain changed, ``tick``
    at 4 Hz."""

    __slots__ = ("_leases", "_members", "_nodes", "_quiet", "_spoke", "_ticked", "progress_s", "spec")

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.progress_s = parse_limit(spec.progress_timeout, "progress_timeout")
        self._members: dict[MemberKey, _Ear] = {}
        self._nodes: dict[NodeId, _Ear] = {}
        self._leases: dict[LeaseNo, _Progress] = {}
        self._quiet: dict[NodeId, float] = {}  # nodes whose agents have to be heard: since when
        self._spoke: set[NodeId] = set()  # of those: heard
        self._ticked: float | None = None

    def __repr__(self) -> str:
        return f"<watch {len(self._members)} members {len(self._nodes)} nodes {len(self._leases)} leases>"

    # ------------------------------------------------------------ inputs

    def heard(
        self,
        key: MemberKey,
        incarnation: Incarnation,
        at: float,
        progress: tuple[tuple[LeaseNo, int], ...] = (),
        node: NodeId | None = None,
    ) -> list[MemberHeard]:
        """Take a sign of life at time ``at``; ``progress``: next position by lease. Returns word of a suspect's return,
        for the brain to hear before the next ``look``."""
        ear = self._members.get(key)
        out: list[MemberHeard] = []
        if ear is None or incarnation > ear.incarnation:
            self._members[key] = _Ear(incarnation, node or NodeId(""), at, moved=at)
        elif incarnation == ear.incarnation and not ear.lost:
            if ear.starting:
                ear.moved = max(ear.moved, at)
            ear.at, ear.starting = max(ear.at, at), False
            if node:
                ear.node = node
            if ear.suspect:
                ear.suspect = False
                out.append(MemberHeard(key.role, key.slot, incarnation))
        moved = False
        for no, position in progress:
            known = self._leases.get(no)
            if known is None:
                continue
            known.named = max(known.named, at)
            if position != known.position:
                known.position, known.at = position, at
                moved = True
        if moved:  # leases held ahead wait for their turn: a worker that gets on keeps them
            for no, _ in progress:
                if (known := self._leases.get(no)) is not None:
                    known.at = at
        return out

    def moved(self, key: MemberKey, incarnation: Incarnation, at: float, idle_s: float, inside: bool) -> None:
        """A heartbeat's word of the script itself: it last did something ``idle_s`` seconds ago (0.0 also where it
        waits for others)."""
        ear = self._members.get(key)
        if ear is not None and ear.incarnation == incarnation:
            ear.moved, ear.inside = max(ear.moved, at - idle_s), inside

    def vouched(self, key: MemberKey, incarnation: Incarnation, at: float, cpu_s: float) -> list[MemberHeard]:
        """The agent of its node says that this process runs, and how long it was on a processor so far. Returns word of
        a suspect's return, as ``heard``."""
        ear = self._members.get(key)
        if ear is None or ear.incarnation != incarnation or ear.lost:
            return []
        ear.vouched = max(ear.vouched, at)
        if at - ear.cpu_at >= CPU_LOOK_S:
            if not ear.inside and cpu_s - ear.cpu_s >= CPU_SHARE * (at - ear.cpu_at):
                ear.moved = max(ear.moved, at)
            ear.cpu_s, ear.cpu_at = cpu_s, at
        if ear.suspect and not ear.starting:
            ear.suspect = False
            return [MemberHeard(key.role, key.slot, incarnation)]
        return []

    def idle(self, at: float) -> list[Idle]:
        """Return workers whose script has made no progress for half of what it may take."""
        limit_s = self.progress_s
        if not limit_s:
            return []
        return [
            Idle(key, ear.incarnation, ear.node, at - ear.moved, at - ear.at)
            for key, ear in self._members.items()
            if key.role is Role.WORKER and not ear.starting and not ear.lost and at - ear.moved >= limit_s / 2
        ]

    def counts(self, key: MemberKey, incarnation: Incarnation) -> bool:
        """Whether this life of it is there, and not lost."""
        ear = self._members.get(key)
        return ear is not None and ear.incarnation == incarnation and not ear.lost

    def node_heard(self, node: NodeId, at: float) -> None:
        """The node's agent gave a sign of life."""
        if at > self._quiet.get(node, at):
            self._spoke.add(node)
        ear = self._nodes.get(node)
        if ear is None or ear.lost:
            self._nodes[node] = _Ear(Incarnation(0), node, at)
        else:
            ear.at = max(ear.at, at)

    def granted(self, no: LeaseNo, shard: ShardKey, start: int, at: float) -> None:
        """A lease begins; its clock runs from ``at``."""
        self._leases.setdefault(no, _Progress(shard, start, at, at))

    def ended(self, no: LeaseNo) -> None:
        """A lease is over (done, returned, revoked)."""
        self._leases.pop(no, None)

    def excuse(self, no: LeaseNo, at: float) -> None:
        """Excuse a lease that makes no progress because its worker has to wait for others. One that its worker does not
        tell of is not excused: the answer that granted it was lost, and nobody would ever take it up."""
        known = self._leases.get(no)
        if known is not None and at - known.named < self.spec.lease_s:
            known.at = max(known.at, at)

    def waits(self, slot: Slot, at: float) -> None:
        """This worker has to wait for others."""
        if (ear := self._members.get(MemberKey(Role.WORKER, slot))) is not None:
            ear.moved = max(ear.moved, at)

    def position(self, no: LeaseNo, default: int) -> int:
        """Return the last position that its worker told of a lease."""
        known = self._leases.get(no)
        return known.position if known is not None else default

    def stalled(self, brain: Brain, at: float) -> tuple[Slot, ...]:
        """Return workers that a stalled group need not wait for: no sign of life for ``STALL_S``, neither their own nor
        their agent's word; where there is one, also those that missed two beats: what took it (a node, a switch) may
        have taken them. Never by our own fault: not after a pause of ours."""
        if self._ticked is None or at - self._ticked > PAUSE_S:
            return ()
        silent_s: dict[Slot, float] = {}
        for record in brain.members.workers.values():
            ear = self._members.get(record.member.key)
            if record.running and ear is not None and ear.incarnation == record.member.incarnation and not ear.starting:
                silent_s[record.member.slot] = at - ear.alive_at
        if max(silent_s.values(), default=0.0) <= STALL_S:
            return ()
        return tuple(sorted(slot for slot, s in silent_s.items() if s > STALL_TOO_S))

    def forget(self, key: MemberKey, incarnation: Incarnation | None = None) -> None:
        """This process is known to be gone (any incarnation if None)."""
        ear = self._members.get(key)
        if ear is not None and (incarnation is None or ear.incarnation <= incarnation):
            del self._members[key]

    def look(self, brain: Brain, at: float) -> None:
        """Follow the brain's state: forget who is gone, start the clock of members, nodes and leases not known yet.
        After a restart of the master this is the grace period."""
        known: set[MemberKey] = set()
        for record in brain.members.all():
            member = record.member
            starting = member.state is MemberState.STARTING
            if not record.running:
                continue
            key = member.key
            known.add(key)
            ear = self._members.get(key)
            if ear is None or ear.incarnation < member.incarnation:
                suspect = member.state is MemberState.SUSPECT
                self._members[key] = _Ear(
                    member.incarnation, member.node, at, suspect=suspect, starting=starting, moved=at
                )
            else:
                ear.node = member.node
                ear.starting = ear.starting and starting
                ear.suspect = ear.suspect or member.state is MemberState.SUSPECT
        for key in [key for key in self._members if key not in known]:
            del self._members[key]
        self._quiet = {n.node: n.quiet_since for n in brain.members.nodes.values() if n.quiet_since}
        self._spoke &= self._quiet.keys()
        for node in brain.members.nodes.values():
            if not node.alive:
                self._nodes.pop(node.node, None)
            elif node.node not in self._nodes:
                self._nodes[node.node] = _Ear(Incarnation(0), node.node, at)
        current: set[LeaseNo] = set()
        for held in brain.leases.values():
            current.add(held.no)
            if held.no not in self._leases:
                self._leases[held.no] = _Progress(held.shard, held.start, at, at)
        if len(current) != len(self._leases):
            for no in [no for no in self._leases if no not in current]:
                del self._leases[no]

    # ------------------------------------------------------------ time

    def tick(self, at: float) -> list[WatchEvent]:
        """Return what the silence up to ``at`` means. Each thing is said once."""
        last, self._ticked = self._ticked, at
        if last is None or not 0 <= at - last <= PAUSE_S:  # the first one: we may have been stopped before it
            self._forgive(at)
            return []
        if (late_s := at - last - TICK_S) > TICK_S:
            self._forgive(at, late_s)
        out: list[WatchEvent] = []
        suspect_s, lost_s = self.spec.suspect_after_s, self.spec.lost_after_s
        heard_on: set[NodeId] = set()
        limit_s = self.progress_s
        for key, ear in self._members.items():
            silent_s = at - ear.alive_at
            if key.role is Role.PS and at - ear.at >= max(lost_s, PS_HELD_S):
                silent_s = at - ear.at
            if ear.starting:
                if at - ear.at >= self.spec.start_s and not ear.lost:
                    ear.lost = True
                    out.append(MemberSilent(key.role, key.slot, ear.incarnation, at - ear.at, True))
            elif limit_s and key.role is Role.WORKER and at - ear.moved >= limit_s and silent_s < suspect_s:
                heard_on.add(ear.node)
                if not ear.lost:
                    ear.lost = True
                    why = f"its script made no progress for {at - ear.moved:.0f} s"
                    out.append(MemberSilent(key.role, key.slot, ear.incarnation, at - ear.at, True, (), why))
            elif silent_s < suspect_s:
                heard_on.add(ear.node)
            elif silent_s >= lost_s:
                if not ear.lost:
                    ear.lost = True
                    out.append(MemberSilent(key.role, key.slot, ear.incarnation, silent_s, True))
            elif not ear.suspect and not ear.lost:
                ear.suspect = True
                out.append(MemberSilent(key.role, key.slot, ear.incarnation, silent_s, False))
        lost_nodes: list[WatchEvent] = []
        for node, ear in self._nodes.items():
            silent_s = at - ear.at
            if silent_s >= lost_s and not ear.lost and node not in heard_on:
                ear.lost = True
                lost_nodes.append(NodeLost(node, f"no heartbeat of its agent or members for {silent_s:.1f} s"))
        heard: list[WatchEvent] = [NodeHeard(node) for node in sorted(self._spoke)]
        self._spoke.clear()
        for no, lease in self._leases.items():
            idle_s = at - lease.at
            if idle_s >= self.spec.lease_s:
                lease.at = at  # said again after another lease_s, should the brain not have taken it
                out.append(LeaseExpired(lease.shard, no, idle_s))
        return heard + lost_nodes + out  # the node first: its members are then known to be lost with it

    def _forgive(self, at: float, lost_s: float | None = None) -> None:
        """Count ``lost_s`` seconds (None: all up to now) against nobody."""

        def later(then: float) -> float:
            return at if lost_s is None else min(at, then + lost_s)

        for ear in self._members.values():
            ear.at, ear.moved = later(ear.at), later(ear.moved)
            ear.vouched = later(ear.vouched) if ear.vouched else 0.0
        for ear in self._nodes.values():
            ear.at = later(ear.at)
        for lease in self._leases.values():
            lease.at, lease.named = later(lease.at), later(lease.named)
