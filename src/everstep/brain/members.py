"""Records nodes and the slots of workers and ps: who fills which, in which life, and what should run where."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import Member, MemberState, Role
from everstep.policies.node_selection import HOME_NODE, NodeRoom, choose_ps_node, choose_worker_node

RUNNING = (MemberState.STARTING, MemberState.ALIVE, MemberState.SUSPECT)


class Node(msgspec.Struct):
    """Is a machine with an agent. ``brought``: worker slots that this node added to the job when it joined.
    ``quiet_since``: when one of its processes was declared lost for its silence; until its agent has said anything the
    whole node may be cut off, and nobody is started there. 0.0: it is heard. ``machine``: that it stands on, "": one of
    its own. ``zone``: "": nobody said. ``since``: when it joined, or came back."""

    node: NodeId
    host: str
    worker_places: int
    ps_places: int
    alive: bool = True
    draining: bool = False  # takes nobody any more
    brought: int = 0
    quiet_since: float = 0.0
    returns: int = 0
    machine: str = ""
    zone: str = ""
    since: float = 0.0


class SlotRecord(msgspec.Struct):
    """Is one slot of a role and the process that fills it (or filled it last).

    ``losses``: processes lost in this slot so far; ``streak``: of those, in a row without a shard done between.
    ``stopping``: being ended on purpose. ``finished``: its script ran to its end. ``waiting``: no node has a place.
    ``drained``: a worker that was sent away by name; its slot stays empty until somebody asks for more. ``avoid``: the
    node on which its next process shall not be, unless there is no other.
    ``failures``: times in a row that its script raised without a step between, ``failed``: at which
    place last, ``failed_at``: when the job had trained so much (the most of all times).
    Workers only: ``loop``: of its script, from 1, the one that it is in, or was in last (0: none yet); ``chief``: what
    it was told when it asked whether it is (see ``brain.duty``); ``held``: its shards, oldest lease first; ``asked``:
    newest ask by dataset; ``granted``: ask -> shard of those that are current, by dataset; ``done``: its newest leases
    that counted (bounded).
    """

    member: Member
    losses: int = 0
    streak: int = 0
    stopping: bool = False
    finished: bool = False
    waiting: bool = False
    drained: bool = False
    avoid: NodeId | None = None
    failures: int = 0
    failed: str = ""
    failed_at: int = 0
    loop: int = 0
    chief: int = 0
    held: list[ShardKey] = []
    asked: dict[int, int] = {}
    granted: dict[int, dict[int, ShardKey]] = {}
    settled: dict[int, int] = {}
    done: list[LeaseNo] = []

    @property
    def running(self) -> bool:
        return self.member.state in RUNNING

    def __repr__(self) -> str:
        return f"<SlotRecord {self.member!r} holds {len(self.held)} losses={self.losses} streak={self.streak}>"


class Members(msgspec.Struct):
    """Holds everyone that is or was part of the job. ``homes``: the node that brought a worker slot along."""

    nodes: dict[NodeId, Node] = {}
    workers: dict[Slot, SlotRecord] = {}
    servers: dict[Slot, SlotRecord] = {}
    homes: dict[Slot, NodeId] = {}

    def of(self, role: Role) -> dict[Slot, SlotRecord]:
        return self.workers if role is Role.WORKER else self.servers

    def all(self) -> Iterator[SlotRecord]:
        yield from self.workers.values()
        yield from self.servers.values()

    def on(self, node: NodeId) -> list[SlotRecord]:
        return [record for record in self.all() if record.member.node == node]

    def current(self, role: Role, slot: Slot, incarnation: Incarnation) -> SlotRecord | None:
        """Return the record, if this very process fills it and was not declared dead; else None: it is fenced."""
        record = self.of(role).get(slot)
        if record is None or record.member.incarnation != incarnation or record.member.state not in RUNNING:
            return None
        return record

    def rooms(self, role: Role) -> list[NodeRoom]:
        """Return what each living node can still take of this role. ``used`` is 0 where the places are not counted."""
        places = {
            n.node: n.worker_places if role is Role.WORKER else n.ps_places
            for n in self.nodes.values()
            if n.alive and not n.draining
        }
        used = dict.fromkeys(places, 0)
        if any(places.values()):  # (else nobody asks: 1,000 members of one node would be counted each time)
            for record in self.of(role).values():
                node = record.member.node
                if record.running and (places.get(node) or (role is Role.PS and node in used)):
                    used[node] += 1
        return [NodeRoom(node, of, used[node], self.machine_of(node)) for node, of in places.items()]

    def machine_of(self, node: NodeId) -> str:
        """Return the machine on which a node stands: what is lost with it."""
        known = self.nodes.get(node)
        return (known.machine if known is not None else "") or node

    def fill(self, role: Role, slot: Slot, node: NodeId, at: float) -> SlotRecord:
        """Give the slot to a new process on ``node``: its incarnation is one more than the last."""
        record = self.of(role).get(slot)
        if record is None:
            member = Member(role=role, slot=slot, incarnation=Incarnation(1), node=node, since=at)
            record = SlotRecord(member)
            self.of(role)[slot] = record
            return record
        record.member = Member(
            role=role, slot=slot, incarnation=Incarnation(record.member.incarnation + 1), node=node, since=at
        )
        record.stopping = record.finished = record.waiting = record.drained = False
        record.chief = record.loop = 0
        record.asked, record.granted, record.settled, record.done = {}, {}, {}, []
        return record

    def adopt(self, role: Role, slot: Slot, incarnation: Incarnation, node: NodeId, at: float) -> SlotRecord:
        """A process of a later life than known (its start was lost with an unsynced journal tail): it is the one."""
        record = self.of(role).get(slot)
        member = Member(role=role, slot=slot, incarnation=incarnation, node=node, since=at)
        if record is None:
            record = self.of(role)[slot] = SlotRecord(member)
        else:
            record.member = member
            record.stopping = record.finished = record.waiting = record.drained = False
            record.chief = record.loop = 0
            record.asked, record.granted, record.settled, record.done = {}, {}, {}, []
        return record


class Rooms:
    """Where processes of a role are started, counted once for all that one event starts: each further one costs
    little, however many nodes and members there are. What it chooses is what ``policies.node_selection`` says."""

    def __init__(self, members: Members, role: Role, at_home: int = 0) -> None:
        """``at_home``: so many ps have to be on the home node's machine before others get any."""
        self._members, self._role, self._at_home = members, role, at_home
        self._rooms: dict[NodeId, NodeRoom] | None = None
        self._order: dict[NodeId, int] = {}
        self._counted: list[tuple[int, int, NodeId]] = []  # heap: most free places first; old entries are left in
        self._open: list[NodeId] = []  # the home node, and those that take any number
        self._offers: list[NodeId] = []  # the home node, and those with counted places

    def choose(self, home: NodeId | None, avoid: NodeId | None) -> NodeId | None:
        """Return the node of the next process, None: it waits. ``home``: of its slot; ``avoid``: only if there is no
        other."""
        rooms, node = self._now(), None
        if self._role is Role.PS:
            offers = [rooms[name] for name in self._offers]
            if avoid is not None:
                node = choose_ps_node((room for room in offers if room.node != avoid), self._at_home)
            return node if node is not None else choose_ps_node(offers, self._at_home)
        if avoid is not None:  # (a home may be left for good reason)
            node = choose_worker_node((room for room in rooms.values() if room.node != avoid), None)
        if node is None and home is not None:
            return home if home in rooms and rooms[home].free else self._emptiest()
        if node is None:
            node = next((room.node for name in self._open if (room := rooms[name]).free), None)
        return node if node is not None else self._emptiest()

    def taken(self, node: NodeId) -> None:
        """A process was started on ``node``."""
        if self._rooms is not None and node in self._rooms:
            room = self._rooms[node]
            self._rooms[node] = NodeRoom(room.node, room.places, room.used + 1, room.machine)
            self._offer(self._rooms[node])

    def _now(self) -> dict[NodeId, NodeRoom]:
        if self._rooms is None:
            self._rooms = {room.node: room for room in self._members.rooms(self._role)}
            for number, room in enumerate(self._rooms.values()):
                self._order[room.node] = number
                if room.node == HOME_NODE or room.places == 0:
                    self._open.append(room.node)
                if room.node == HOME_NODE or room.places > 0:
                    self._offers.append(room.node)
                self._offer(room)
        return self._rooms

    def _offer(self, room: NodeRoom) -> None:
        if room.places > 0 and room.free:
            heapq.heappush(self._counted, (room.used - room.places, self._order[room.node], room.node))

    def _emptiest(self) -> NodeId | None:
        """Return, of the nodes with counted places, the first one that has most of them free."""
        rooms = self._now()
        while self._counted:
            free, _, node = self._counted[0]
            if rooms[node].used - rooms[node].places == free:
                return node
            heapq.heappop(self._counted)
        return None


def set_state(record: SlotRecord, state: MemberState, at: float) -> None:
    if record.member.state is not state:
        record.member.state = state
        record.member.since = at
