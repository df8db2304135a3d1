"""Is a ps that keeps mirrors, under virtual time: the real machine and streams round the simulated store.

What is modelled of the real shell: the outbox is drained a moment after each change; one message at a time to each
peer, said again until it is answered; pushes that wait for their mirrors, and those for partitions that are on their
way here; snapshots that are written while training goes on; reports that are repeated after each hello.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.brain.events import (
    AnswerType,
    Fenced,
    MirrorsReady,
    Ok,
    PartitionsReady,
    SnapshotsWritten,
    Welcome,
)
from everstep.ids import Incarnation, NodeId, PartitionId, ShardKey, Slot
from everstep.model.member import Address, MemberKey, Role
from everstep.model.placement import Placement
from everstep.model.reasons import Arrival
from everstep.model.shard import Lease, Span, Token
from everstep.model.snapshot import CheckpointFile, PartitionSnapshot
from everstep.native.ledger import SpanTuple
from everstep.net.messages import Append, Appended, FetchContents, FetchLog, Moved, Pushed, TransferOwnership
from everstep.protect.machine import (
    Acquired,
    Ask,
    LoadSnapshot,
    Machine,
    PartitionRebuilt,
    Released,
    ReportProgress,
    Stuck,
)
from everstep.protect.replication import PeerKey, PythonReplicationSender
from everstep.sim.cluster import Child, spans_of, watermarks
from everstep.sim.kernel import Conn, Violation
from everstep.sim.sim_store import SimStore

if TYPE_CHECKING:
    from everstep.sim.cluster import Worker
    from everstep.sim.simulation import Simulation

ASK_S = 0.05
AGAIN_S = 0.3  # a message to a peer without an answer is said again
STUCK_S = 1.0
CONFIRM_S = 1.5  # so long a push waits for its mirrors


class Opening(NamedTuple):
    """Is the answer to an open."""

    partitions: list[int]
    marks: list[int]


class _Waiting(NamedTuple):
    """The answer to a push that was applied, or is a repeat, or to an open: it waits for the mirrors."""

    worker: Worker
    token: Token
    bitmap: bytes
    life: int
    route: int
    before: int  # the outbox's ticket before and after
    after: int
    answer: Pushed | Opening
    until: float = 0.0
    spans: tuple[SpanTuple, ...] = ()


class MirrorPs(Child):
    """See the module's docstring. Every apply is told to the truth, and what came to be here."""

    def __init__(self, sim: Simulation, slot: Slot, incarnation: Incarnation, node: str) -> None:
        super().__init__(sim, f"ps:{slot}.{incarnation}", node)
        self.key = MemberKey(Role.PS, slot)
        self.incarnation = incarnation
        self.me: PeerKey = (slot, incarnation)
        plan, scenario = sim.plan, sim.scenario
        self.store: SimStore = sim.parts.store(
            sim.parts.ledger(sim.spec.partitions, ()), plan.samples * scenario.epochs, plan.samples
        )
        self.streams = PythonReplicationSender()
        self.machine: Machine = sim.parts.machine(slot, incarnation, self.store, self.streams)
        self.address = Address(NodeId(node), f"ps-{slot}.{incarnation}")
        self.acked = scenario.protect == "acked"
        self.store.lag = scenario.protect == "lag"
        self.flushing = False
        self.waiting: list[_Waiting] = []
        self.released: list[ShardKey] = []
        self.reports: list[Any] = []  # what the master has not answered
        self.appends: dict[PeerKey, tuple[int, float]] = {}  # request under way, when it is said again
        self.asked: dict[int, tuple[Ask, float]] = {}
        self.requests = 0
        self.draining = self.syncing = False
        self.snapshots = 0
        self.stuck: tuple[int, tuple[PartitionId, ...]] = (0, ())
        self.stuck_at = 0.0
        sim.lives[self.me] = self

    # ------------------------------------------------------------ the master

    def start(self) -> None:
        super().start()
        self.later(ASK_S, self.look)

    def hello(self, conn: Conn) -> None:
        server: Any = conn.server
        node = NodeId(self.node)
        holds = self.machine.holdings()
        self.net.to_server(
            conn, server.on_hello_member, conn, self.key, self.incarnation, node, self.address, (), holds
        )

    def on_welcome(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
            return
        if not isinstance(answer, Welcome) or not self.welcomed(conn):
            return
        if answer.placement is not None:
            self.place(answer.placement)
        if self.alive:
            self.report()

    def send_beat(self, conn: Conn) -> None:
        server: Any = conn.server
        self.net.to_server(conn, server.on_beat, conn, self.key, self.incarnation, ())

    def on_placement(self, conn: Conn, placement: Placement) -> None:
        if conn is self.conn:
            self.place(placement)

    def on_order(self, conn: Conn, what: str, args: tuple[Any, ...]) -> None:
        if what == "images" and conn is self.conn:
            self.take_snapshots(args[0])

    def on_release(self, conn: Conn, shards: tuple[ShardKey, ...]) -> None:
        self.sim.truth.releases(self.key.slot, shards)
        self.released += shards
        self.store.release(shards)
        self.moved_on()

    def report(self) -> None:
        self.reports = [MirrorsReady(tuple(self.machine.complete), tuple(sorted(self.machine.inconsistent)))]
        self.reports += [PartitionsReady(version, partitions, how) for version, how, partitions in self.machine.ready()]
        self.again()

    def again(self) -> None:
        for i, fact in enumerate(self.reports):
            self.call(fact, self.on_reported, (i, fact))

    def on_reported(self, conn: Conn, i: int, fact: Any, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
        elif isinstance(answer, Ok):
            self.reports = [r for r in self.reports if r != fact]

    # ------------------------------------------------------------ the machine

    def place(self, placement: Placement) -> None:
        for place in placement.servers:
            if place.slot == self.key.slot and place.incarnation > self.incarnation:
                self.exit(4)
                return
        if placement.version > self.machine.version and self.kernel.lines is not None:
            self.kernel.say(self, f"placement {placement.version} route {placement.route}")
        self.machine.place(placement)
        self.moved_on()

    def moved_on(self) -> None:
        """Go on after anything that the machine or the store did."""
        if self.machine.dirty:
            self.machine.settle()
        if unexplained := self.machine.inconsistent - self.sim.inconsistent:
            raise Violation(f"{self}: mirrors {sorted(unexplained)} are inconsistent, and no fault explains it")
        truth, store = self.sim.truth, self.store
        came = False
        for action in self.machine.take_actions():
            if self.kernel.lines is not None:
                self.kernel.say(self, f"{action}")
            kind = type(action)
            if kind is Acquired:
                partition = action.partition  # type: ignore[attr-defined]
                if partition in truth.restarted and self.sim.outlived(self.me, partition):
                    continue  # it ends, by an old map, what is over for everybody else: nothing of it counts
                truth.acquired(self.me, partition, action.how, store.partitions[partition])  # type: ignore[attr-defined]
                came = came or action.how is not Arrival.NEW  # type: ignore[attr-defined]
            elif kind is PartitionRebuilt:
                truth.whole(self.me, action.partition, store.partitions[action.partition])  # type: ignore[attr-defined]
            elif kind is Released:
                truth.released(self.me, action.partition)  # type: ignore[attr-defined]
            elif kind is LoadSnapshot:
                self.load(action.partition, action.checkpoint)  # type: ignore[attr-defined]
            elif kind is ReportProgress:
                self.report()
            elif kind is Stuck:
                self.sim.stuck.append(f"{self}: {action.why}")  # type: ignore[attr-defined]
        if came and self.released:
            store.release(self.released)  # what came here may not have heard of them
        if not self.flushing and store.unsent:
            self.flushing = True
            self.later(self.sim.scenario.lag_s * (0.5 + 0.5 * self.kernel.random()), self.flush)
        if not self.draining and store.outbox:
            self.draining = True
            self.later(0.004 * self.kernel.random(), self.drain)
        if not self.syncing and self.machine.syncing:
            self.syncing = True
            self.later(0.004 + 0.02 * self.kernel.random(), self.sync)
        self.send()
        self.acknowledge()

    def flush(self) -> None:
        """Send what mirrors lack of some partitions: the oldest, and maybe more."""
        self.flushing = False
        for partition in list(self.store.unsent)[: 1 + int(4 * self.kernel.random())]:
            self.store.flush(partition)
        self.moved_on()

    def drain(self) -> None:
        self.draining = False
        self.deal_out()
        self.moved_on()

    def deal_out(self) -> None:
        first, entries = self.store.take()
        if entries:
            self.streams.append(first, entries)

    def sync(self) -> None:
        self.syncing = False
        self.deal_out()
        self.machine.sync()
        self.moved_on()

    def load(self, partition: PartitionId, checkpoint: int) -> None:
        self.store.load_begin(partition)
        slow = self.kernel.random() < 0.1  # its place cannot be read at once
        self.later((2.0 if slow else 0.02) + 0.2 * self.kernel.random(), self.loaded, partition, checkpoint)

    def loaded(self, partition: PartitionId, checkpoint: int) -> None:
        there = self.kernel.random() < 0.8 or self.machine.awaits_snapshot(partition, checkpoint)
        self.store.load_end(partition, self.sim.snapshot_of(checkpoint, partition).copy() if there else None)
        self.machine.loaded(partition, checkpoint, there)
        self.moved_on()

    def mark_inconsistent(self, mirror: int) -> None:
        self.machine.mark_inconsistent(mirror, "chaos")
        self.moved_on()

    # ------------------------------------------------------------ other ps

    def look(self) -> None:
        """Ask, every now and then, what is to be asked, say again what is overdue."""
        self.later(ASK_S, self.look)
        now = self.kernel.now
        stuck = (self.machine.version, self.machine.stuck)
        if stuck != self.stuck:
            self.stuck, self.stuck_at = stuck, now
        elif stuck[1] and now - self.stuck_at > STUCK_S:  # no other placement came
            self.stuck_at = now
            self.call(PartitionsReady(*stuck, Arrival.STUCK), self.on_snapshots, ())
        self.asked = {i: (a, until) for i, (a, until) in self.asked.items() if until > now}
        under_way = [a for a, _ in self.asked.values()]
        for ask in self.machine.asks():
            if ask not in under_way:
                self.requests += 1
                self.asked[self.requests] = (ask, now + AGAIN_S)
                self.to_peer(ask.peer, "asked_by", self.requests, ask.request)
        self.moved_on()

    def send(self) -> None:
        """Send the next message to each peer that is owed something."""
        now = self.kernel.now
        for peer in self.streams.peers:
            request, until = self.appends.get(peer, (0, 0.0))
            if request and until > now:
                continue
            batch = self.streams.batch(peer, 1 << 20, 8)
            if batch is None:
                self.appends.pop(peer, None)
                continue
            self.requests += 1
            self.appends[peer] = self.requests, now + AGAIN_S
            append, blobs = self.machine.append_of(batch), [item.blob for item in batch.items]
            self.to_peer(peer, "appended_by", self.requests, append, blobs)

    def to_peer(self, peer: PeerKey, handler: str, *args: Any) -> None:
        target = self.sim.lives.get(peer)
        if target is not None:
            self.net.send(self, target, getattr(target, handler), self, *args)

    def appended_by(self, sender: MirrorPs, request: int, append: Append, blobs: list[Any]) -> None:
        answer = self.machine.append(append, blobs)
        self.moved_on()
        if self.alive:
            self.net.send(self, sender, sender.on_appended, self.me, request, append.first, answer)

    def on_appended(self, peer: PeerKey, request: int, first: int, answer: Appended | Moved) -> None:
        if self.appends.get(peer, (0, 0.0))[0] != request:
            return
        if isinstance(answer, Moved):  # it is behind: again when that is due
            return
        del self.appends[peer]
        for partition, ticket in self.streams.answered(peer, first, answer.applied).items():
            self.machine.refused(partition, ticket)
        self.machine.settle()
        self.moved_on()

    def asked_by(self, sender: MirrorPs, request: int, what: FetchContents | FetchLog | TransferOwnership) -> None:
        blobs: list[Any] = []
        answer: Any
        if isinstance(what, FetchContents):
            answer = self.machine.fetch_contents(what)
        elif isinstance(what, FetchLog):
            answer, blobs = self.machine.fetch_log(what)
        else:
            self.deal_out()
            answer = self.machine.hand_over(what)
        self.moved_on()
        if self.alive:
            self.net.send(self, sender, sender.on_asked, request, answer, blobs)

    def on_asked(self, request: int, answer: Any, blobs: list[Any]) -> None:
        ask, _ = self.asked.pop(request, (None, 0.0))
        if ask is not None:
            self.machine.answered(ask, answer, blobs)
            self.moved_on()

    # ------------------------------------------------------------ workers

    @property
    def route(self) -> int:
        placement = self.machine.placement
        return placement.route if placement is not None else 0

    def on_open(self, worker: Worker, lease: Lease, route: int) -> None:
        slot = self.key.slot
        if route != self.route or not self.machine.answering:
            self.net.send(self, worker, worker.on_moved, slot, self.route)
            return
        before = self.store.ticket()
        answer = self.store.open(lease.shard, lease.start, lease.no)
        if self.kernel.lines is not None:
            self.kernel.say(self, f"open {lease.shard:x} lease {lease.no:x} of {worker}: {answer}")
        if answer is None:
            self.net.send(self, worker, worker.on_closed, slot, lease.no)
            return
        partitions, marks = answer
        self.sim.truth.opened(
            self.me, lease.shard, lease.no, {PartitionId(b): self.store.seq(PartitionId(b)) for b in partitions}
        )
        # The watermarks are as good as an acknowledgement of what is before them.
        token = Token(
            lease.shard, lease.start, lease.stop, lease.no, self.incarnation, worker.key.slot, worker.incarnation
        )
        self.wait(_Waiting(worker, token, b"", 0, route, before, self.store.ticket(), Opening(partitions, marks)))

    def serves(self, bitmap: bytes) -> bool:
        bits = int.from_bytes(bitmap, "little")
        if not bitmap:
            return self.machine.answering and bool(self.store.ledger.partitions)
        return all(b in self.store.ledger.partitions for b in range(bits.bit_length()) if bits >> b & 1)

    def on_push(
        self,
        worker: Worker,
        token: Token,
        bitmap: bytes,
        skipped: bool,
        life: int,
        route: int,
        more: tuple[Span, ...] = (),
    ) -> None:
        if token.ps_incarnation != self.incarnation:
            self.net.send(self, worker, worker.on_pushed, self.key.slot, token, Pushed(0, 0, fenced=True), life)
            return
        if route != self.route or not self.serves(bitmap):
            self.net.send(self, worker, worker.on_moved, self.key.slot, self.route)
            return
        store, truth, spans = self.store, self.sim.truth, spans_of(token, skipped, more)
        if any(
            store.lacks(bitmap, shard, lo, hi) for shard, lo, hi, _, _ in spans
        ):  # as at the end of the real ps's patience
            self.net.send(self, worker, worker.on_moved, self.key.slot, self.route)
            return
        before = store.ticket()
        marks = watermarks(store.ledger, spans)
        r = store.push(spans, bitmap)
        truth.takes_whole(self.key.slot, spans, marks, watermarks(store.ledger, spans))
        answer = Pushed(r.applied, r.repeats, r.gap, r.fenced)
        if r.applied:
            bits = int.from_bytes(r.partitions, "little") if r.partitions else -1
            for b in list(store.ledger.partitions):
                if bits >> b & 1:
                    partition = PartitionId(b)
                    for shard, lo, hi, lease, _ in spans:
                        truth.applied_by(self.me, partition, store.seq(partition), shard, lo, hi, lease)
        if self.kernel.lines is not None:
            what = f"push {token.shard:x} [{token.lo},{token.hi}) lease {token.lease:x} of {worker}: {answer} {more}"
            self.kernel.say(self, what)
        if not (r.applied or r.repeats):
            self.net.send(self, worker, worker.on_pushed, self.key.slot, token, answer, life)
            return
        self.wait(_Waiting(worker, token, bitmap, life, route, before, store.ticket(), answer, spans=spans))

    def wait(self, waiting: _Waiting) -> None:
        self.waiting.append(waiting._replace(until=self.kernel.now + CONFIRM_S))
        self.moved_on()

    def confirmed(self, push: _Waiting) -> bool | None:
        """Return whether it is confirmed; None: not yet."""
        if not self.acked:
            return True
        if self.streams.done_ticket < push.after or self.streams.levelling:
            return None if self.kernel.now < push.until else False
        return self.streams.refused_ticket < push.before and push.route == self.route and self.serves(push.bitmap)

    def acknowledge(self) -> None:
        """Answer the pushes whose mirrors have them."""
        left: list[_Waiting] = []
        for push in self.waiting:
            confirmed = self.confirmed(push)
            token, worker, slot = push.token, push.worker, self.key.slot
            if confirmed is None:
                left.append(push)
            elif not confirmed:
                self.net.send(self, worker, worker.on_moved, slot, self.route)
            elif isinstance(push.answer, Opening):
                partitions, marks = push.answer
                self.net.send(self, worker, worker.on_opened, slot, token.lease, self.incarnation, partitions, marks)
            else:
                if push.answer.gap < 0 and not push.answer.fenced:
                    bits = int.from_bytes(push.bitmap, "little") if push.bitmap else -1
                    addressed = tuple(PartitionId(b) for b in self.store.ledger.partitions if bits >> b & 1)
                    for shard, lo, hi, _, _ in push.spans:
                        self.sim.truth.acknowledged(self.me, addressed, ShardKey(shard), lo, hi)
                self.net.send(self, worker, worker.on_pushed, slot, token, push.answer, push.life)
        self.waiting = left

    # ------------------------------------------------------------ checkpoints

    def take_snapshots(self, checkpoint: int) -> None:
        """Copy what is served now, at once; it is told when it is durable."""
        snapshots = []
        for b in self.machine.serving:
            self.store.flush(b)
            partition = self.store.partitions[b]
            self.snapshots += 1
            path = f"images/{self.sim.jobs:06}/bucket-{self.name.replace(':', '-')}-{self.snapshots}"
            self.sim.files[path] = partition.copy()
            marks = tuple((ShardKey(s), m[0]) for s, m in sorted(partition.ledger.shards.items()))
            snapshots.append(
                PartitionSnapshot(
                    partition=b,
                    seq=partition.seq,
                    fingerprint=partition.ledger.fingerprint,
                    watermarks=marks,
                    files=(CheckpointFile(path, 1, ""),),
                )
            )
        self.later(0.05 + 0.3 * self.kernel.random(), self.snapshots_durable, checkpoint, tuple(snapshots))

    def snapshots_durable(self, checkpoint: int, snapshots: tuple[PartitionSnapshot, ...]) -> None:
        self.call(SnapshotsWritten(checkpoint, snapshots), self.on_snapshots, ())

    def on_snapshots(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
