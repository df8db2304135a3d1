"""Records nodes and the slots of workers and ps: who fills which, in which life, and what should run where."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.capacity import Market
from everstep.model.member import Address, Member, MemberState, Role
from everstep.model.memory_limit import MemoryLimit
from everstep.policies.node_selection import HOME_NODE, NodeRoom, choose_ps_node, choose_worker_node

_WORKER = Role.WORKER
RUNNING = (MemberState.STARTING, MemberState.ALIVE, MemberState.SUSPECT)


class Node(msgspec.Struct):
    """Is a machine with an agent. ``brought``: worker slots that this node added to the job when it joined.
    ``quiet_since``: when one of its processes was declared lost for its silence; until its agent has said anything the
    whole node may be cut off, and nobody is started there. 0.0: it is heard. ``machine``: that it stands on, "": one of
    its own. ``zone``: "": nobody said. ``since``: when it joined, or came back. ``counted``: no places are
    none (else the home node takes any number). ``market``: of its machine; None, as nobody said, counts as one that
    stays. ``copies``: where its agent keeps copies of stages for workers of other nodes; None: it keeps none.
    ``memory_bytes``, ``memory_limit``: that one process may have there, and who says so; 0: not told."""

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
    counted: bool = False
    market: Market | None = None
    copies: Address | None = None
    memory_bytes: int = 0
    memory_limit: MemoryLimit = MemoryLimit.NONE

    def takes(self, role: Role) -> bool:
        """Return whether processes of this role may run here at all."""
        places = self.worker_places if role is Role.WORKER else self.ps_places
        return places > 0 or (not self.counted and (role is Role.WORKER or self.node == HOME_NODE))

    @property
    def stays(self) -> bool:
        """Return whether nobody may take its machine back."""
        return self.market is not Market.SPOT


class SlotRecord(msgspec.Struct, rename={"answered": "settled"}):
    """Is one slot of a role and the process that fills it (or filled it last).

    ``losses``: processes lost in this slot so far; ``streak``: of those, in a row without a shard done between.
    ``stopping``: being ended on purpose. ``finished``: its script ran to its end. ``waiting``: no node has a place.
    ``drained``: a worker that was sent away by name; its slot stays empty until somebody asks for more. ``avoid``: the
    node on which its next process shall not be, unless there is no other.
    ``failures``: times in a row that its script raised without a step between, ``failed``: at which
    place last, ``failed_at``: when the job had trained so much (the most of all times).
    Workers only: ``loop``: of its script, from 1, the one that it is in, or was in last (0: none yet); ``chief``: what
    it was told when it asked whether it is (see ``brain.duty``); ``chief_asks``: its newest such question; ``held``:
    its shards, oldest lease first; ``asked``: newest ask by dataset; ``granted``: ask -> shard of those that are
    current, by dataset; ``done``: its newest leases that counted (bounded).
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
    chief_asks: int = 0
    held: list[ShardKey] = []
    asked: dict[int, int] = {}
    granted: dict[int, dict[int, ShardKey]] = {}
    answered: dict[int, int] = {}
    done: list[LeaseNo] = []

    @property
    def running(self) -> bool:
        return self.member.state in RUNNING

    def __repr__(self) -> str:
        return f"<SlotRecord {self.member!r} holds {len(self.held)} losses={self.losses} streak={self.streak}>"


class _Index:
    """Keeps what follows from who is where up to date, so that an event costs as much with 10,000 nodes as with ten.

    ``number``: of each slot, in the order in which they were first filled. ``on``: numbers by node; a number may be
    left of one that has gone elsewhere. ``used``: workers that run on a node. ``order``: of nodes. ``free``: nodes that
    may have a free place for a worker, and perhaps more. ``uncounted``: the home node, and nodes whose places for
    workers are not counted, in the order in which nodes are. ``vacated``: a process has left its place since this was
    last set to False."""

    __slots__ = ("_nodes", "free", "number", "on", "order", "records", "uncounted", "used", "vacated")

    def __init__(self, members: Members) -> None:
        self.records: list[SlotRecord] = []
        self.number: dict[tuple[Role, Slot], int] = {}
        self.on: dict[NodeId, set[int]] = {}
        self.used: dict[NodeId, int] = {}
        self.order: dict[NodeId, int] = {}
        self.free: dict[NodeId, None] = {}
        self.uncounted: list[NodeId] = []
        self._nodes = members.nodes
        self.vacated = False
        for record in members.all():
            self.add(record)
            self.came(record)
        for node in members.nodes:
            self.add_node(node)

    def add(self, record: SlotRecord) -> None:
        """Note that a slot is filled for the first time."""
        self.number[record.member.role, record.member.slot] = len(self.records)
        self.records.append(record)

    def add_node(self, node: NodeId) -> None:
        """Note that a node has joined, or may take more than before."""
        self.order.setdefault(node, len(self.order))
        self.free[node] = None
        counted = node != HOME_NODE and self._nodes[node].worker_places > 0
        if counted == (node in self.uncounted):
            self.uncounted = [n for n, each in self._nodes.items() if n == HOME_NODE or not each.worker_places]

    def came(self, record: SlotRecord) -> None:
        """Note that a process is on its node now, or runs again."""
        m = record.member
        self.on.setdefault(m.node, set()).add(self.number[m.role, m.slot])
        if m.role is Role.WORKER and record.running:
            self.used[m.node] = self.used.get(m.node, 0) + 1

    def goes(self, record: SlotRecord) -> None:
        """Note that a process that may run is about to leave its node, or to run no more."""
        m = record.member
        self.vacated = self.vacated or record.running
        if m.role is Role.WORKER and record.running:
            self.used[m.node] -= 1
            self.free[m.node] = None


class Members(msgspec.Struct, dict=True):
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

    @property
    def index(self) -> _Index:
        """Return who is where. It is no part of the state: it is made of that when it is first asked for."""
        found: _Index | None = self.__dict__.get("_index")
        if found is None or len(found.records) != len(self.workers) + len(self.servers):
            found = self.__dict__["_index"] = _Index(self)
        return found

    def on(self, node: NodeId) -> list[SlotRecord]:
        """Return whose last process was on this node: workers first, in the order in which slots were first filled."""
        index = self.index
        here = index.on.get(node)
        if not here:
            return []
        found = []
        for number in sorted(here):
            if index.records[number].member.node == node:
                found.append(index.records[number])
            else:
                here.discard(number)
        return sorted(found, key=lambda record: record.member.role is Role.PS)

    def joined(self, node: Node) -> None:
        """Note that a node has joined, is back, or may take more than before."""
        self.nodes[node.node] = node
        self.index.add_node(node.node)

    def has_room(self, node: NodeId) -> bool:
        """Return whether a worker may be started there."""
        known = self.nodes.get(node)
        if known is None or not known.alive or known.draining:
            return False
        if not known.takes(Role.WORKER):
            return False
        return known.worker_places == 0 or self.index.used.get(node, 0) < known.worker_places

    def emptiest(self) -> NodeId | None:
        """Return the node with most free places for workers of those whose places are counted, the first of several."""
        index, best = self.index, (0, 0, NodeId(""))
        for name in list(index.free):
            node = self.nodes.get(name)
            free = node.worker_places - index.used.get(name, 0) if node is not None else 0
            if node is None or not node.alive or node.draining or free <= 0:
                del index.free[name]  # (until it joins again, or a worker leaves it)
            else:
                best = min(best, (-free, index.order[name], name))
        return best[2] if best[0] else None

    def current(self, role: Role, slot: Slot, incarnation: Incarnation) -> SlotRecord | None:
        """Return the record, if this very process fills it and was not declared dead; else None: it is fenced."""
        record = (self.workers if role is _WORKER else self.servers).get(slot)
        if record is None:
            return None
        member = record.member
        return record if member.incarnation == incarnation and member.state in RUNNING else None

    def rooms(self, role: Role) -> list[NodeRoom]:
        """Return what each living node can still take of this role. ``used`` is 0 where the places are not counted."""
        places = {
            n.node: n.worker_places if role is Role.WORKER else n.ps_places
            for n in self.nodes.values()
            if n.alive and not n.draining and (n.takes(role) or not n.counted)
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
        incarnation = Incarnation(record.member.incarnation + 1 if record is not None else 1)
        return self._put(Member(role=role, slot=slot, incarnation=incarnation, node=node, since=at))

    def adopt(self, role: Role, slot: Slot, incarnation: Incarnation, node: NodeId, at: float) -> SlotRecord:
        """A process of a later life than known (its start was lost with an unsynced journal tail): it is the one."""
        return self._put(Member(role=role, slot=slot, incarnation=incarnation, node=node, since=at))

    def _put(self, member: Member) -> SlotRecord:
        index, records = self.index, self.of(member.role)
        record = records.get(member.slot)
        if record is None:
            record = records[member.slot] = SlotRecord(member)
            index.add(record)
        else:
            index.goes(record)
            record.member = member
            record.stopping = record.finished = record.waiting = record.drained = False
            record.chief = record.chief_asks = record.loop = 0
            record.asked, record.granted, record.answered, record.done = {}, {}, {}, []
        index.came(record)
        return record

    def stands_on(self, record: SlotRecord, node: NodeId) -> None:
        """Note that its process says on which node it is."""
        if record.member.node != node:
            self.index.goes(record)
            record.member.node = node
            self.index.came(record)

    def set_state(self, record: SlotRecord, state: MemberState, at: float) -> None:
        """Note that a process is in another state since ``at``."""
        if record.member.state is state:
            return
        ran, index = record.running, self.index
        if ran and state not in RUNNING:
            index.goes(record)
        record.member.state = state
        record.member.since = at
        if not ran and record.running:
            index.came(record)

    def validate(self) -> None:
        """Assert that the index says what the state says."""
        now, fresh = self.index, _Index(self)
        assert {n: c for n, c in now.used.items() if c} == {n: c for n, c in fresh.used.items() if c}, (
            "workers on nodes"
        )
        assert now.uncounted == fresh.uncounted, "nodes whose places are not counted"
        for node in self.nodes:
            on = [record for record in self.all() if record.member.node == node]
            assert sorted(map(id, self.on(node))) == sorted(map(id, on)), f"who is on {node}"
            free = self.has_room(node) and self.nodes[node].worker_places > 0
            assert not free or node in now.free, f"{node} has a free place"


class Rooms:
    """Says where processes of a role are started; places for ps are counted once for all that one event starts. What it
    chooses is what ``policies.node_selection`` says."""

    def __init__(self, members: Members, role: Role, at_home: int = 0, staying: bool = False) -> None:
        """``at_home``: so many ps have to be on the home node's machine before others get any. ``staying``: ps go to
        machines that stay, while one of these has a place."""
        self._members, self._role, self._at_home, self._staying = members, role, at_home, staying
        self._rooms: dict[NodeId, NodeRoom] | None = None
        self._offers: list[NodeId] = []  # the home node, and those with counted places

    def choose(self, home: NodeId | None, avoid: NodeId | None) -> NodeId | None:
        """Return the node of the next process, None: it waits. ``home``: of its slot; ``avoid``: only if there is no
        other."""
        members, node = self._members, None
        if self._role is Role.PS:
            rooms = self._now()
            offers = [rooms[name] for name in self._offers]
            if self._staying:
                stay = [room for room in offers if members.nodes[room.node].stays]
                offers = stay if any(room.node == HOME_NODE or room.free for room in stay) else offers
            if avoid is not None:
                node = choose_ps_node((room for room in offers if room.node != avoid), self._at_home)
            return node if node is not None else choose_ps_node(offers, self._at_home)
        if avoid is not None:  # (a home may be left for good reason)
            node = choose_worker_node((room for room in members.rooms(Role.WORKER) if room.node != avoid), None)
        if node is None and home is not None:
            return home if members.has_room(home) else members.emptiest()
        if node is None:
            node = next(filter(members.has_room, members.index.uncounted), None)
        return node if node is not None else members.emptiest()

    def full(self) -> bool:
        """Return whether no node has a place for one more worker."""
        index, has_room = self._members.index, self._members.has_room
        return not any(map(has_room, index.free)) and not any(map(has_room, index.uncounted))

    def taken(self, node: NodeId) -> None:
        """A process was started on ``node``."""
        if self._rooms is not None and node in self._rooms:
            room = self._rooms[node]
            self._rooms[node] = NodeRoom(room.node, room.places, room.used + 1, room.machine)

    def _now(self) -> dict[NodeId, NodeRoom]:
        if self._rooms is None:
            self._rooms = {room.node: room for room in self._members.rooms(self._role)}
            self._offers = [room.node for room in self._rooms.values() if room.node == HOME_NODE or room.places > 0]
        return self._rooms
