"""Runs the job's processes under virtual time: shells as thin as the real ones round the same brain, watch and
protocol.

What is modelled of the shells: the journal's group commit and its durable point (nothing is answered or ordered
before), the loss of the unsynced tail with the master, snapshots, hello after every reconnect, calls that are said
again, the agent that starts and buries processes, a ps that answers from its ledger.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    RULES,
    AnswerType,
    CheckpointAsked,
    CheckpointCommitted,
    CommitManifest,
    Event,
    FactType,
    Fenced,
    FinishJob,
    Granted,
    InstructionType,
    LeaseExpired,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    NodeJoined,
    NodesDue,
    Ok,
    OrderSnapshots,
    PlanRegistered,
    ProcessExited,
    PublishPlacement,
    Registered,
    ReleaseShards,
    Reply,
    RevokeLease,
    Sender,
    ShardAsked,
    ShardDone,
    ShardReturned,
    StartProcess,
    StopProcess,
    SupervisionDue,
    Welcome,
)
from everstep.brain.job import Phase
from everstep.brain.schedule_controller import ScheduleController
from everstep.brain.states import StateCheck
from everstep.config.consistency import parse_consistency
from everstep.ids import Incarnation, LeaseNo, NodeId, PartitionId, ShardKey, Slot
from everstep.model.member import Address, MemberKey, Role
from everstep.model.placement import Placement
from everstep.model.reasons import CheckpointReason
from everstep.model.shard import Lease, ShardState, Span, Token, split_key
from everstep.model.snapshot import Holdings, Manifest
from everstep.model.step_schedule import StepSchedule, WorkerClock
from everstep.native.ledger import PushLedger, SpanTuple
from everstep.net.messages import Pushed
from everstep.sim.kernel import Conn, SimClient, SimProcess, Violation
from everstep.tables.staleness_gate import Late, StalenessGate, Verdict
from everstep.tables.worker_protocol import (
    AskLater,
    AskShard,
    BatchFinished,
    Drop,
    Halt,
    RangeWork,
    SendDone,
    SendGiveBack,
    SendOpen,
    SendPush,
    WorkerAction,
    WorkerProtocol,
    WorkFinished,
)

if TYPE_CHECKING:
    from everstep.sim.simulation import Simulation

EPOCH_S = 1_000_000.0  # the brain's clock at virtual time 0
BEAT_S = 0.5
TICK_S = 0.25
OVERDUE_S = 1.0  # a call without an answer is said again


# ---------------------------------------------------------------- the disk


class Disk:
    """The journal as the disk keeps it: it survives masters; what is behind ``log[:durable]`` dies with them."""

    def __init__(self) -> None:
        self.log: list[tuple[Event, tuple[ShardKey, LeaseNo] | None]] = []
        self.durable = 0
        self.snapshots: list[tuple[int, bytes]] = []  # state after so many events; only those <= durable are valid
        self.incarnation = 0  # of the newest master that opened it: older ones can not commit

    def commit(self, upto: int, sim: Simulation) -> None:
        """Events before ``upto`` are on disk."""
        for _, done in self.log[self.durable : upto]:
            if done is not None:
                sim.truth.is_done(*done)
        self.durable = max(self.durable, upto)

    def crash(self) -> None:
        """Lose what was not synced."""
        del self.log[self.durable :]
        while self.snapshots and self.snapshots[-1][0] > self.durable:
            self.snapshots.pop()


# ---------------------------------------------------------------- the master


class SimMaster(SimProcess):
    """Is a shell round a brain."""

    commit_s = 0.1  # at most, of a manifest

    def __init__(self, sim: Simulation, life: int) -> None:
        super().__init__(sim.kernel, f"master.{life}", "node0")
        self.sim, self.net, self.disk = sim, sim.net, sim.disk
        self.conns: dict[tuple[str, int], Conn] = {}
        self.pending: list[tuple[list[InstructionType], Conn | None, Any, tuple[Any, ...], Event]] = []
        self.flushing = 0  # up to here, when the fsync under way returns
        self.snapshots_asked_at = 0.0
        self.committing = 0  # a manifest is being written
        self.states = StateCheck()
        disk = self.disk
        # As the real journal: opening it raises the fence in its own transaction.
        disk.incarnation += 1
        self.incarnation = Incarnation(disk.incarnation)
        brain_class: type[Brain] = sim.parts.brain
        if disk.snapshots:
            position, state = disk.snapshots[-1]
            self.brain = brain_class.restore(state)
        else:
            position, self.brain = 0, brain_class()
        handle = self.brain.handle
        for event, _ in disk.log[position:]:
            handle(event)
        sim.replayed += len(disk.log) - position
        self.watch = sim.parts.watch(sim.spec)
        self.step_schedules = ScheduleController(
            self.brain, self.watch, sim.spec, self.incarnation, self.order_schedule, sim.parts.scheduler
        )
        self.clock = max(EPOCH_S + self.kernel.now, disk.log[-1][0].at if disk.log else 0.0)
        for fact in sim.first_facts(self.brain):
            self.record(fact)
        self.record(MasterStarted(self.incarnation, sim.spec, **RULES))
        self.later(TICK_S, self.tick)

    def die(self) -> None:
        """Die as by SIGKILL. The transaction under way may have reached the disk, or not."""
        self.alive = False
        if not self.outdated():
            if self.flushing > self.disk.durable and self.kernel.random() < 0.5:
                self.disk.commit(self.flushing, self.sim)
            self.disk.crash()
        for conn in self.conns.values():
            self.net.sever(conn, self.net.notice_s)
        self.conns.clear()

    # ------------------------------------------------------------ journal first, then act

    def record(
        self,
        fact: FactType,
        conn: Conn | None = None,
        handler: Any = None,
        args: tuple[Any, ...] = (),
        sender: Sender = MASTER,
    ) -> None:
        """Write ``fact`` to the journal and handle it; its instructions are carried out, and its reply goes to
        ``handler`` of the client behind ``conn``, once it is durable."""
        if not self.alive:
            return
        if self.outdated():
            self.superseded()
            return
        disk, sim = self.disk, self.sim
        if type(fact) is LeaseExpired:
            self.step_schedules.expired(fact)
        event = Event(self.now(), fact, sender)
        instructions = self.brain.handle(event)
        self.step_schedules.handled()
        sim.brain_events += 1
        done = None
        if type(fact) is ShardDone:
            for i in instructions:
                if type(i) is not Reply or type(i.answer) is not Ok or fact.shard in sim.truth.done:
                    continue
                if self.brain.shards.state(fact.shard) >= ShardState.DONE:  # Ok also to a repeat of one reopened since
                    done = fact.shard, fact.lease
        elif type(fact) is ShardAsked:
            for i in instructions:
                if type(i) is Reply and type(i.answer) is Granted:
                    before = sim.truth.granted.get((event.slot, event.incarnation, fact.ask))
                    current = before is not None and sim.lease_current(self.brain, before)
                    sim.truth.grants(event.slot, event.incarnation, fact.ask, i.answer.lease, current)
        elif type(fact) is MemberJoined and fact.leases:
            for lease in fact.leases:
                sim.truth.confirms(lease, sim.lease_current(self.brain, lease))
        disk.log.append((event, done))
        if sim.validate:
            self.brain.validate()
            self.states.look(self.brain, fact)
        if self.kernel.lines is not None:
            sim.say_event(self, event, instructions)
        if len(disk.log) - (disk.snapshots[-1][0] if disk.snapshots else 0) >= sim.scenario.snapshot_every:
            disk.snapshots.append((len(disk.log), self.brain.snapshot()))
            del disk.snapshots[:-3]
        if sim.parts.early_replies:
            self.carry_out(instructions, conn, handler, args, event)
        else:
            self.pending.append((instructions, conn, handler, args, event))
        if not self.flushing:
            self.flush()

    def flush(self) -> None:
        self.flushing = len(self.disk.log)
        self.later(self.sim.scenario.fsync_s * (0.5 + self.kernel.random()), self.flushed, len(self.pending))

    def flushed(self, n: int) -> None:
        if self.outdated():
            self.superseded()
            return
        self.disk.commit(self.flushing, self.sim)
        self.flushing = 0
        ready, self.pending = self.pending[:n], self.pending[n:]
        for entry in ready:
            self.carry_out(*entry)
        if self.disk.durable < len(self.disk.log) or self.pending:
            self.flush()

    def outdated(self) -> bool:
        """Return whether the journal refuses this master's commits."""
        return self.incarnation != self.disk.incarnation

    def superseded(self) -> None:
        """A later master holds the journal: this one's commit is refused, and it ends."""
        self.kernel.say(self, "a later master holds the journal: end")
        self.alive = False
        for conn in self.conns.values():
            self.net.sever(conn, self.net.notice_s)

    def carry_out(
        self,
        instructions: list[InstructionType],
        conn: Conn | None,
        handler: Any,
        args: tuple[Any, ...],
        event: Event,
    ) -> None:
        net, sim = self.net, self.sim
        for i in instructions:
            kind = type(i)
            if kind is Reply:
                answer = i.answer  # type: ignore[union-attr]
                if conn is not None:
                    net.to_client(conn, handler, conn, *args, answer)
            elif kind is StartProcess:
                self.order(("agent", i.node), "start", i.role, i.slot, i.incarnation)  # type: ignore[union-attr]
            elif kind is StopProcess:
                self.order(("agent", i.node), "stop", i.role, i.slot, i.incarnation, i.grace_s)  # type: ignore[union-attr]
            elif kind is PublishPlacement:
                for conn_ in list(self.conns.values()):
                    if isinstance(conn_.client, sim.placed):
                        net.to_client(conn_, conn_.client.on_placement, conn_, i.placement)  # type: ignore[union-attr]
            elif kind is ReleaseShards:
                for conn_ in list(self.conns.values()):
                    if not isinstance(conn_.client, SimAgent | Worker):
                        net.to_client(conn_, conn_.client.on_release, conn_, i.shards)  # type: ignore[union-attr, attr-defined]
            elif kind is RevokeLease:
                self.order(("worker", i.member.slot), "revoke", i.lease)  # type: ignore[union-attr]
            elif kind is OrderSnapshots:
                self.order_snapshots()
            elif kind is CommitManifest:
                self.commit(i.manifest)  # type: ignore[union-attr]
            elif kind is FinishJob:
                sim.job_over(i.exit_code, i.error)  # type: ignore[union-attr]

    def order(self, whom: tuple[str, Any], what: str, *args: Any) -> None:
        """Send an order to a client that is connected; if it is not, it is told at its next hello."""
        conn = self.conns.get(whom)
        if conn is not None:
            self.net.to_client(conn, conn.client.on_order, conn, what, args)  # type: ignore[attr-defined]

    # ------------------------------------------------------------ requests

    def now(self) -> float:
        self.clock = max(self.clock, EPOCH_S + self.kernel.now)
        return self.clock

    def on_hello_node(
        self, conn: Conn, node: NodeId, places: int, ps_places: int, running: Any, machine: str = ""
    ) -> None:
        if conn.greeted or self.stale(conn, ("agent", node)):
            return
        self.greet(conn, ("agent", node))
        self.watch.node_heard(node, self.now())
        self.record(NodeJoined(node, "", places, ps_places, running, machine=machine))
        self.net.to_client(conn, conn.client.on_welcome, conn, None)  # type: ignore[attr-defined]

    def on_hello_member(
        self,
        conn: Conn,
        key: MemberKey,
        incarnation: Incarnation,
        node: NodeId,
        address: Any,
        leases: Any,
        holds: Holdings | None = None,
    ) -> None:
        whom = (key.role.value, key.slot)
        if self.stale(conn, whom):
            return
        fact = MemberJoined(key.role, key.slot, incarnation, node, 1, address, leases, holds)
        self.record(fact, conn, conn.client.on_welcome)  # type: ignore[attr-defined]
        if self.brain.members.current(key.role, key.slot, incarnation) is not None:
            self.greet(conn, whom)  # orders of later events follow its answer
            self.hear(self.watch.heard(key, incarnation, self.now(), (), node))

    def stale(self, conn: Conn, whom: tuple[str, Any]) -> bool:
        """Whether this hello comes late, from an older connection than the one that is known: it does not count."""
        known = self.conns.get(whom)
        return known is not None and known is not conn and known.opened_at > conn.opened_at

    def greet(self, conn: Conn, whom: tuple[str, Any]) -> None:
        self.conns[whom] = conn
        conn.greeted = True

    def on_beat(
        self, conn: Conn, key: MemberKey | NodeId, incarnation: Incarnation, progress: Any, runs: Any = ()
    ) -> None:
        if isinstance(key, MemberKey):
            if self.brain.members.current(key.role, key.slot, incarnation) is None:
                self.net.to_client(conn, conn.client.on_fenced, conn)  # type: ignore[attr-defined]
                return
            self.hear(self.watch.heard(key, incarnation, self.now(), progress))
            self.watch.moved(key, incarnation, self.now(), 0.0, True)
        else:
            node = self.brain.members.nodes.get(key)
            if node is not None and not node.alive:
                self.net.sever(conn, 0.01)  # it joins anew with its next hello
                return
            self.watch.node_heard(key, self.now())
            for member, life in runs:
                if (record := self.brain.members.current(member.role, member.slot, life)) and record.member.node == key:
                    self.hear(self.watch.vouched(member, life, self.now(), 0.0))
        self.net.to_client(conn, conn.client.on_beaten, conn)  # type: ignore[attr-defined]

    def on_call(self, conn: Conn, fact: FactType, handler: Any, key: tuple[Any, ...], sender: Sender) -> None:
        """Take a request that becomes one event; its reply goes to ``handler(conn, *key, answer)``."""
        self.record(fact, conn, handler, key, sender)

    def hear(self, events: Sequence[MemberHeard]) -> None:
        for event in events:
            self.record(event)

    def tick(self) -> None:
        if self.outdated():  # else an idle old master would keep its members for ever
            self.superseded()
            return
        now = self.now()
        self.watch.look(self.brain, now)
        self.step_schedules.tick(now)
        for event in self.watch.tick(now):
            self.record(event)
        if self.brain.job.waits_for_nodes and 0 < self.brain.job.nodes_due_at <= now:
            self.record(NodesDue())
        if 0 < self.brain.state.supervision.due_at <= now:
            self.record(SupervisionDue())
        if self.sim.scenario.checkpoint_s:
            self.tick_checkpoints(now)
        self.later(TICK_S, self.tick)

    # ------------------------------------------------------------ turns

    def order_schedule(self, slot: Slot, schedule: StepSchedule) -> None:
        self.sim.steps.says(schedule)
        self.order(("worker", slot), "schedule", schedule)

    def on_clock(self, conn: Conn, slot: Slot, incarnation: Incarnation, clock: WorkerClock) -> None:
        if self.brain.members.current(Role.WORKER, slot, incarnation) is not None:
            self.step_schedules.report(slot, incarnation, clock)

    # ------------------------------------------------------------ checkpoints, as master/checkpoints.py has them

    def tick_checkpoints(self, now: float) -> None:
        brain = self.brain
        if brain.job.over:
            return
        writing = brain.checkpoints.writing
        if writing is None:
            began_at = max(brain.checkpoints.begun_at, brain.job.started_at)
            if brain.job.phase is Phase.TRAINING and now - began_at >= self.sim.scenario.checkpoint_s:
                self.record(CheckpointAsked(CheckpointReason.DUE))
        elif writing.manifest is not None:
            self.commit(writing.manifest)
        elif now - writing.began_at >= brain.checkpoints.limit_s:
            self.record(CheckpointAsked(CheckpointReason.LATE))
        elif now - self.snapshots_asked_at >= 1.0:
            self.order_snapshots()

    def order_snapshots(self) -> None:
        brain = self.brain
        writing, placement = brain.checkpoints.writing, brain.placement
        if writing is None or placement is None or writing.manifest is not None:
            return
        self.snapshots_asked_at = self.now()
        for slot in sorted({s for b, s in enumerate(placement.owner) if b not in writing.snapshots}):
            self.order(("ps", slot), "images", writing.number)

    def commit(self, manifest: Manifest) -> None:
        if self.committing != manifest.checkpoint:
            self.committing = manifest.checkpoint
            self.later(0.02 + self.commit_s * self.kernel.random(), self.committed, manifest)

    def committed(self, manifest: Manifest) -> None:
        self.sim.manifests.setdefault(manifest.checkpoint, manifest)
        self.record(CheckpointCommitted(manifest.checkpoint))


# ---------------------------------------------------------------- clients of the master


class SimMember(SimClient):
    """What agents, workers and ps have in common: one connection, hello on it, beats, calls said again."""

    def __init__(self, sim: Simulation, name: str, node: str) -> None:
        super().__init__(sim.kernel, name, node)
        self.sim, self.net = sim, sim.net
        self.conn: Conn | None = None
        self.welcome = False
        self.heard_at = 0.0

    def start(self) -> None:
        self.connect()
        self.later(BEAT_S * self.kernel.random(), self.beat)

    def connect(self) -> None:
        self.welcome = False
        self.heard_at = self.kernel.now
        self.conn = self.net.connect(self, self.sim.master)
        if self.sim.master.alive:
            self.hello(self.conn)
        else:
            self.net.sever(self.conn, 0.1)

    def connection_lost(self, conn: Conn) -> None:
        if conn is self.conn:
            self.conn = None
            self.connect()

    @property
    def sender(self) -> Sender:
        """Return the sender, as its connection proves it."""
        return Sender("command")

    def call(self, fact: FactType, handler: Any, key: tuple[Any, ...]) -> None:
        if self.conn is not None and self.welcome:
            server: Any = self.conn.server
            self.net.to_server(self.conn, server.on_call, self.conn, fact, handler, key, self.sender)

    def beat(self) -> None:
        """Beat every half second; an answer that is overdue breaks the connection, and hello says everything again."""
        self.later(BEAT_S, self.beat)
        conn = self.conn
        if conn is None:
            return
        if self.kernel.now - self.heard_at > OVERDUE_S:
            self.net.sever(conn, 0.01)
        elif self.welcome:
            self.send_beat(conn)
            self.again()

    def on_beaten(self, conn: Conn) -> None:
        if conn is self.conn:
            self.heard_at = self.kernel.now

    def on_fenced(self, conn: Conn) -> None:
        self.exit(4)

    def welcomed(self, conn: Conn) -> bool:
        if conn is not self.conn:
            return False
        self.heard_at = self.kernel.now
        self.welcome = True
        return True

    def hello(self, conn: Conn) -> None:
        raise NotImplementedError

    def send_beat(self, conn: Conn) -> None:
        raise NotImplementedError

    def again(self) -> None:
        """Say again what is overdue."""

    def terminate(self) -> None:
        """Do what SIGTERM makes it do."""
        self.exit(-15)

    def exit(self, status: int) -> None:
        """End of the process; its agent sees it."""
        if self.alive:
            self.alive = False
            if self.conn is not None:
                self.conn.up = False
            self.sim.process_ended(self, status)


class Child(SimMember):
    """Is a worker or ps: what an agent starts."""

    key: MemberKey
    incarnation: Incarnation

    @property
    def sender(self) -> Sender:
        return Sender("ps" if self.key.role is Role.PS else "worker", self.key.slot, self.incarnation)


class SimAgent(SimMember):
    """Is what starts and buries the processes of one node."""

    def __init__(self, sim: Simulation, node: str, places: int, ps_places: int) -> None:
        super().__init__(sim, f"agent@{node}", node)
        self.id, self.places, self.ps_places = NodeId(node), places, ps_places
        self.children: dict[tuple[Role, Slot], Child] = {}
        self.starting: dict[tuple[Role, Slot], Incarnation] = {}
        self.exits: dict[tuple[Role, Slot, Incarnation], int] = {}
        self.vouches = sim.scenario.vouch

    @property
    def sender(self) -> Sender:
        return Sender("agent", node=self.id)

    def hello(self, conn: Conn) -> None:
        running = [(r, s, p.incarnation, 1) for (r, s), p in self.children.items() if p.alive]
        running += [(r, s, i, 0) for (r, s), i in self.starting.items()]
        server: Any = conn.server
        self.net.to_server(
            conn,
            server.on_hello_node,
            conn,
            self.id,
            self.places,
            self.ps_places,
            tuple(sorted(running)),
            self.sim.scenario.machine_of(self.node),
        )

    def on_welcome(self, conn: Conn, answer: Any) -> None:
        if self.welcomed(conn):
            self.again()

    def send_beat(self, conn: Conn) -> None:
        server: Any = conn.server
        runs = tuple((c.key, c.incarnation) for c in self.children.values() if c.runs) if self.vouches else ()
        self.net.to_server(conn, server.on_beat, conn, self.id, 0, (), runs)

    def again(self) -> None:
        for (role, slot, incarnation), status in list(self.exits.items()):
            key = (role, slot, incarnation)
            self.call(ProcessExited(role, slot, incarnation, status), self.on_exited, key)

    def on_exited(self, conn: Conn, role: Role, slot: Slot, incarnation: Incarnation, answer: Any = None) -> None:
        self.exits.pop((role, slot, incarnation), None)

    def child_ended(self, child: Child, status: int) -> None:
        key = (child.key.role, child.key.slot)
        if self.children.get(key) is child:
            del self.children[key]
        self.exits[*key, child.incarnation] = status
        self.later(0.01 * self.kernel.random(), self.again)

    def on_order(self, conn: Conn, what: str, args: tuple[Any, ...]) -> None:
        role, slot, incarnation = args[:3]
        child = self.children.get((role, slot))
        if what == "start":
            if self.starting.get((role, slot), 0) >= incarnation:
                return
            if child is not None:
                if child.incarnation >= incarnation:
                    return
                child.exit(-9)
            if (role, slot, incarnation) in self.exits:
                return
            self.starting[role, slot] = incarnation
            low, high = self.sim.scenario.spawn_s
            self.later(low + (high - low) * self.kernel.random(), self.spawn, role, slot, incarnation)
        elif what == "stop" and self.sim.over is None:
            if self.starting.get((role, slot)) == incarnation:
                del self.starting[role, slot]
                self.exits[role, slot, incarnation] = -15
                self.later(0.01, self.again)
            if child is not None and child.incarnation == incarnation:
                child.fire(child.terminate, ())
                self.later(args[3], self.kill, child)

    def kill(self, child: Child) -> None:
        child.exit(-9)

    def spawn(self, role: Role, slot: Slot, incarnation: Incarnation) -> None:
        if self.starting.get((role, slot)) != incarnation:
            return
        del self.starting[role, slot]
        child: Child
        if role is Role.WORKER:
            child = Worker(self.sim, slot, incarnation, self.node)
        else:
            child = (
                self.sim.parts.ps(self.sim, slot, incarnation, self.node)
                if self.sim.scenario.mirrors
                else Ps(self.sim, slot, incarnation, self.node)
            )
            self.sim.servers[slot] = child
        self.children[role, slot] = child
        self.sim.processes.append(child)
        self.kernel.say(self, f"started {child.name}")
        child.start()


# ---------------------------------------------------------------- a ps


class Ps(Child):
    """Is a ps that answers from its ledger. Every apply is told to the truth.

    A later life takes over what the one before had, "as if recovered" from a snapshot: shards that are done are
    complete, others may have fallen back. It serves once the master knows of it, as a recovery ordered by the master
    does.
    """

    ledger: PushLedger

    def __init__(self, sim: Simulation, slot: Slot, incarnation: Incarnation, node: str) -> None:
        super().__init__(sim, f"ps:{slot}.{incarnation}", node)
        self.key = MemberKey(Role.PS, slot)
        self.incarnation = incarnation
        self.owned = tuple(b for b in range(sim.spec.partitions) if b % sim.spec.ps == slot)
        old = sim.servers.get(slot)
        self.ledger = old.ledger if old is not None else sim.parts.ledger(sim.spec.partitions, self.owned)
        self.serving = old is None
        self.address = Address(NodeId(node), f"ps-{slot}.{incarnation}")

    def hello(self, conn: Conn) -> None:
        server: Any = conn.server
        self.net.to_server(
            conn, server.on_hello_member, conn, self.key, self.incarnation, NodeId(self.node), self.address, ()
        )

    def on_welcome(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
            return
        self.welcomed(conn)
        if not self.serving:
            self.serving = True
            self.sim.fall_back(self)

    def send_beat(self, conn: Conn) -> None:
        server: Any = conn.server
        self.net.to_server(conn, server.on_beat, conn, self.key, self.incarnation, ())

    def on_placement(self, conn: Conn, placement: Placement) -> None:
        pass

    def on_order(self, conn: Conn, what: str, args: tuple[Any, ...]) -> None:
        pass

    def on_release(self, conn: Conn, shards: tuple[ShardKey, ...]) -> None:
        self.sim.truth.releases(self.key.slot, shards)
        self.ledger.release(shards)

    def on_open(self, worker: Worker, lease: Lease, route: int) -> None:
        if not self.serving:
            return
        answer = self.ledger.open(lease.shard, lease.start, lease.no)
        if self.kernel.lines is not None:
            self.kernel.say(self, f"open {lease.shard:x} lease {lease.no:x} of {worker}: {answer}")
        if answer is None:
            self.net.send(self, worker, worker.on_closed, self.key.slot, lease.no)
            return
        self.sim.truth.opens(self.key.slot, lease.shard, lease.no)
        partitions, marks = answer
        self.net.send(self, worker, worker.on_opened, self.key.slot, lease.no, self.incarnation, partitions, marks)

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
        sim, slot = self.sim, self.key.slot
        spans = spans_of(token, skipped, more)
        if not self.serving:
            return
        if token.ps_incarnation != self.incarnation and not sim.parts.no_ps_incarnation:
            answer = Pushed(0, 0, fenced=True)
        else:
            before = watermarks(self.ledger, spans)
            r = self.ledger.push(*spans[0][:4], bitmap, skipped, spans[1:])
            answer = Pushed(r.applied, r.repeats, r.gap, r.fenced)
            sim.truth.takes_whole(slot, spans, before, watermarks(self.ledger, spans))
            if r.applied:
                bits = int.from_bytes(r.partitions, "little") if r.partitions else -1
                for partition in self.owned:
                    if bits >> partition & 1:
                        for shard, lo, hi, lease, learnt in spans:
                            sim.truth.applies(slot, PartitionId(partition), shard, lo, hi, lease, not learnt)
            if r.gap < 0 and not r.fenced:
                bits = int.from_bytes(bitmap, "little") if bitmap else -1
                addressed = tuple(b for b in self.owned if bits >> b & 1)
                for shard, lo, hi, _, _ in spans:
                    if shard not in sim.truth.done:
                        sim.truth.acknowledges(slot, addressed, shard, lo, hi)
        if self.kernel.lines is not None:
            self.kernel.say(
                self, f"push {token.shard:x} [{token.lo},{token.hi}) lease {token.lease:x} of {worker}: {answer} {more}"
            )
        self.net.send(self, worker, worker.on_pushed, self.key.slot, token, answer, life)


def spans_of(token: Token, skipped: bool, more: Sequence[Span]) -> tuple[SpanTuple, ...]:
    """Return all spans of one push, as the ledger takes them."""
    first = (token.shard, token.lo, token.hi, token.lease, not skipped)
    return (first, *((s.shard, s.lo, s.hi, s.lease, s.learnt) for s in more))


def watermarks(ledger: PushLedger, spans: Sequence[SpanTuple]) -> dict[int, dict[int, int]]:
    """Return, by partition, the watermarks of the shards that these spans are of."""
    shards = {span[0] for span in spans}
    return {b: {s: entry.shards[s][0] for s in shards if s in entry.shards} for b, entry in ledger.partitions.items()}


# ---------------------------------------------------------------- a worker


class Worker(Child):
    """Drives the protocol machine: one batch computed at a time, the next one handed out ahead."""

    def __init__(self, sim: Simulation, slot: Slot, incarnation: Incarnation, node: str) -> None:
        super().__init__(sim, f"worker:{slot}.{incarnation}", node)
        self.key = MemberKey(Role.WORKER, slot)
        self.incarnation = incarnation
        scenario, rng = sim.scenario, sim.kernel.rng
        self.protocol: WorkerProtocol = sim.parts.protocol(
            worker=slot,
            incarnation=incarnation,
            batch_samples=rng.randint(*scenario.batch),
            window=rng.randint(1, 3),
            ask_ahead=rng.choice([0, 1, 2, 2, 6, 12]),
        )
        consistency = parse_consistency(sim.spec.consistency)
        self.gate = sim.parts.gate(consistency, slot, incarnation) if consistency.kind != "async" else None
        self.dropped: set[tuple[LeaseNo, int, int, int]] = (
            set()
        )  # sync: of the part in hand, the gradient is not finite
        self.part: list[RangeWork] = []  # sync: computed for the step under way, and not said to be ready
        # The script's own choices: of a generator of their own, so that runs without them are what they were.
        self.choices = random.Random(f"script {sim.seed} {sim.jobs} {slot}.{incarnation}")
        self.holding = scenario.hold if self.gate is None else 0.0
        self.leaves_out = not scenario.mirrors and not scenario.ps_restarts
        self.kept: list[tuple[RangeWork, bool]] = []  # the script is through with it, and has not stepped; learnt
        self.queue: list[RangeWork] = []
        self.opened_anew = False  # a shard, while work is in the queue
        self.depth = rng.randint(1, 2)
        self.busy = False
        self.leaving = False
        self.plan_known = False
        self.loop = 0  # of the script, from 1; it has one for each epoch, or counts none
        self.step_schedules = scenario.batch_s * (0.5 + rng.random())
        self.stamps: dict[Slot, float] = {}
        self.soon: set[Slot] = set()  # ps that are asked again shortly
        self.master_stamp = 0.0

    # ------------------------------------------------------------ the master

    def hello(self, conn: Conn) -> None:
        server: Any = conn.server
        node, held = NodeId(self.node), self.protocol.held()
        self.net.to_server(conn, server.on_hello_member, conn, self.key, self.incarnation, node, None, held)

    def on_welcome(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
            return
        if not isinstance(answer, Welcome) or not self.welcomed(conn):
            return
        if self.kernel.lines is not None:
            self.kernel.say(self, f"welcome, revoked {answer.revoked}")
        if answer.placement is None:
            self.later(0.1, self.hello_again, conn)
            return
        self.act(self.protocol.placement(answer.placement))
        for lease in answer.revoked:
            self.act(self.protocol.revoked(lease))
        if not self.plan_known:
            self.register()
        else:
            self.act(self.protocol.master_lost())
        self.report_clock(again=True)
        self.pump()

    def hello_again(self, conn: Conn) -> None:
        if conn is self.conn:
            self.hello(conn)

    def register(self) -> None:
        begin = self.loop
        fact = PlanRegistered(self.sim.plan)
        if self.sim.scenario.loops:
            fact = PlanRegistered(self.sim.plan, begin + 1, begin, begin + 1)
        self.call(fact, self.on_registered, (begin,))

    def on_registered(self, conn: Conn, begin: int, answer: AnswerType) -> None:
        if isinstance(answer, Registered) and not self.plan_known and begin == self.loop:
            self.plan_known = True
            self.loop += self.sim.scenario.loops
            self.act(self.protocol.begin(answer.dataset, self.loop or self.sim.scenario.epochs))
            self.pump()
        elif isinstance(answer, Fenced):
            self.exit(4)

    def on_placement(self, conn: Conn, placement: Placement) -> None:
        self.act(self.protocol.placement(placement))
        self.pump()

    def on_order(self, conn: Conn, what: str, args: tuple[Any, ...]) -> None:
        if what == "revoke":
            self.act(self.protocol.revoked(args[0]))
            self.pump()
        elif what == "schedule" and self.gate is not None:
            self.judge(self.gate.schedule(args[0]))
            self.report_clock()
            self.pump()

    def on_answer(self, conn: Conn, ask: int, answer: AnswerType) -> None:
        self.master_stamp = self.kernel.now
        if self.kernel.lines is not None:
            self.kernel.say(self, f"ask {ask}: {answer}")
        self.act(self.protocol.answered(ask, answer))
        for lease in self.protocol.held() if self.sim.scenario.loops else ():
            if split_key(lease.shard)[1] + 1 != self.loop:
                raise Violation(f"{self.name} got {lease} in loop {self.loop} of the script")
        self.pump()

    def on_done(self, conn: Conn, lease: LeaseNo, answer: AnswerType) -> None:
        self.master_stamp = self.kernel.now
        self.act(self.protocol.done_answered(lease, answer))
        self.pump()

    def on_given_back(self, conn: Conn, lease: LeaseNo, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
            return
        self.act(self.protocol.given_back(lease))

    def send_beat(self, conn: Conn) -> None:
        server: Any = conn.server
        self.net.to_server(conn, server.on_beat, conn, self.key, self.incarnation, self.protocol.progress())

    # ------------------------------------------------------------ the ps

    def on_opened(
        self, ps: Slot, lease: LeaseNo, incarnation: Incarnation, partitions: Sequence[int], marks: Sequence[int]
    ) -> None:
        self.stamps[ps] = self.kernel.now
        self.act(self.protocol.opened(ps, lease, incarnation, partitions, marks))
        self.opened_anew = bool(self.queue)
        self.pump()

    def on_closed(self, ps: Slot, lease: LeaseNo) -> None:
        self.act(self.protocol.closed(ps, lease, f"closed by ps:{ps}"))
        self.pump()

    def on_pushed(self, ps: Slot, token: Token, answer: Pushed, life: int) -> None:
        self.stamps[ps] = self.kernel.now
        self.act(self.protocol.pushed(ps, token, answer, life))
        self.pump()

    def on_moved(self, ps: Slot, route: int) -> None:
        """Its map is another one: the newer map will come; or it is behind, or not ready yet: once more, soon."""
        if route <= self.protocol.route and ps not in self.soon:
            self.soon.add(ps)
            self.later(0.05 + 0.1 * self.kernel.random(), self.again_to, ps)

    def again_to(self, ps: Slot) -> None:
        self.soon.discard(ps)
        self.stamps[ps] = self.kernel.now
        self.act(self.protocol.lost(ps))

    # ------------------------------------------------------------ work

    def pump(self) -> None:
        """Hand out ahead, and compute if idle."""
        protocol, queue, rng = self.protocol, self.queue, self.kernel.rng
        while len(queue) < self.depth:
            work = protocol.next_work()
            if work is None:
                break
            queue.append(work)
            if not self.sim.healed and rng.random() < 0.1:
                protocol.set_batch_samples(rng.randint(*self.sim.scenario.batch))
            self.act(protocol.more())
        gate = self.gate
        if gate is not None:
            often = 0.6 if self.opened_anew else 0.05  # (its partitions may be others than when it was handed out)
            if gate.sync and queue and rng.random() < often and protocol.put_back(queue[-1]):
                self.opened_anew = False
                queue.pop()  # it will be cut anew: shares are others now
                protocol.set_batch_samples(rng.randint(*self.sim.scenario.batch))
                self.later(0.01, self.pump)
            self.pump_in_turn(gate)
        elif queue and not self.busy:
            work = queue.pop(0)
            if not self.holding and queue and work.joins(queue[0]) and rng.random() < 0.2:
                work = work.join(queue.pop(0))
            self.busy = True
            self.later(self.step_schedules * (0.5 + rng.random()), self.computed, work)
        elif self.kept and not self.busy and protocol.ended:
            self.end_of_loop()

    def pump_in_turn(self, gate: StalenessGate) -> None:
        """Compute if it is our turn (consistency sync and bounded)."""
        queue, protocol = self.queue, self.protocol
        while queue and not protocol.current(queue[0]):
            self.act(protocol.computed(queue.pop(0)))
        if queue:
            gate.work()
        elif not gate.pending and not self.busy and (protocol.waiting or protocol.finished):
            gate.rest()
        self.report_clock()
        if not queue and not self.busy and self.part and (protocol.waiting or protocol.finished):
            self.ready(gate)
        if queue and not self.busy and gate.may_begin():
            work = queue.pop(0)
            gate.begin(work)
            if gate.sync:
                self.sim.steps.begins(self.key.slot, self.incarnation, work, gate.clock().step)
            self.busy = True
            self.later(self.step_schedules * (0.5 + self.kernel.random()), self.computed, work)

    def report_clock(self, again: bool = False) -> None:
        if self.gate is None or not self.plan_known or self.conn is None or not self.welcome:
            return
        clock = self.gate.due(again)
        if clock is not None:
            server: Any = self.conn.server
            self.net.to_server(self.conn, server.on_clock, self.conn, self.key.slot, self.incarnation, clock)

    def judge(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        self.sim.late += isinstance(verdict, Late)
        for work in verdict.works:
            if self.kernel.lines is not None:
                self.kernel.say(self, f"{type(verdict).__name__} [{work.lo},{work.hi}) of {work.lease.shard:x}")
            if isinstance(verdict, Late):
                self.act(self.protocol.late(work))
            else:
                self.act(self.protocol.computed(work, work.key in self.dropped))

    def computed(self, work: RangeWork) -> None:
        self.busy = False
        skip = self.sim.scenario.skip
        skipped = bool(skip) and self.kernel.random() < skip
        if self.gate is not None and self.gate.sync:
            self.part.append(work)
            if skipped:
                self.dropped.add(work.key)
            if self.kernel.random() < 0.7:
                self.ready(self.gate)
        elif self.holding:
            self.through(work, skipped)
        else:
            self.act(self.protocol.computed(work, skipped))
        self.pump()

    # ------------------------------------------------------------ a script that steps when it likes

    def through(self, work: RangeWork, skipped: bool) -> None:
        """The script is through with ``work``: it steps, or does not yet."""
        choices, protocol = self.choices, self.protocol
        if not protocol.current(work):
            self.act(protocol.computed(work))
            return
        kept = [w for w, _ in self.kept]
        if kept and not protocol.alike([*kept, work]) and choices.random() < 0.9:
            self.step([])
        while work.hi - work.lo > 1 and choices.random() < 0.1:
            halves = protocol.split(work, choices.randint(work.lo + 1, work.hi - 1))
            if halves is None:
                break
            first, work = halves
            self.step([(first, True)])
        if choices.random() >= self.holding:
            self.step([(work, not skipped)], skipped)
            return
        learnt = not self.leaves_out or choices.random() < 0.8
        self.kept.append((work, learnt))
        if not any(learnt for _, learnt in self.kept):
            self.step([])
            return
        self.sim.truth.holds_back(self.key.slot, self.incarnation, work)
        self.act(protocol.hold_back(work))

    def step(self, works: list[tuple[RangeWork, bool]], skipped: bool = False) -> None:
        """Make one step with all that is kept, and ``works``."""
        kept, self.kept = self.kept, []
        if self.leaves_out and self.choices.random() < 0.05:
            kept = [(work, False) for work, _ in kept]  # their gradients were zeroed before
        if skipped:
            kept = [(work, False) for work, _ in kept]
        self.act(self.protocol.step([*kept, *works], skipped=skipped))

    def end_of_loop(self) -> None:
        """The data is at its end: the script steps once more with what is left, or it is left out."""
        if self.leaves_out and self.choices.random() < 0.5:
            self.kept = [(work, False) for work, _ in self.kept]
        self.step([])

    def ready(self, gate: StalenessGate) -> None:
        """Sync: nothing will be added to the part in hand."""
        part, self.part = tuple(self.part), []
        self.sim.steps.joins(self.key.slot, self.incarnation, part)
        dropped = [w for w in part if w.key in self.dropped]
        self.dropped = {w.key for w in dropped}
        self.judge(gate.ready(part, dropped))

    def again(self) -> None:
        now = self.kernel.now
        self.report_clock(again=True)
        if not self.plan_known:
            self.register()
        elif now - self.master_stamp > OVERDUE_S:
            self.act(self.protocol.master_lost())
            self.master_stamp = now
        for ps, at in self.stamps.items():
            if now - at > OVERDUE_S:
                self.stamps[ps] = now
                self.act(self.protocol.lost(ps))

    def act(self, actions: list[WorkerAction]) -> None:
        sim, net, now = self.sim, self.net, self.kernel.now
        me = self.key.slot, self.incarnation
        for a in actions:
            if not self.alive:
                return
            kind = type(a)
            if kind is BatchFinished and self.gate is not None:
                self.gate.finished(a.work)  # type: ignore[attr-defined]
            elif kind is SendPush:
                if self.gate is not None and self.gate.sync:
                    sim.steps.pushes(*me, a.work)  # type: ignore[attr-defined]
                self.stamps[a.ps] = now  # type: ignore[attr-defined]
                ps = sim.server_of(a.ps, a.token.ps_incarnation)  # type: ignore[attr-defined]
                if ps is not None:
                    route = self.protocol.route
                    what = a.token, a.bitmap, a.skipped, a.life, route, a.more  # type: ignore[attr-defined]
                    net.send(self, ps, ps.on_push, self, *what)
            elif kind is SendOpen:
                self.stamps[a.ps] = now  # type: ignore[attr-defined]
                ps = sim.server_of(a.ps, self.protocol._servers[a.ps])  # type: ignore[attr-defined]
                if ps is not None:
                    net.send(self, ps, ps.on_open, self, a.lease, self.protocol.route)  # type: ignore[attr-defined]
            elif kind is AskShard:
                self.master_stamp = now
                if a.pending:  # type: ignore[attr-defined]
                    sim.truth.pends(*me, [h for h in self.protocol.held() if h.no in a.pending])  # type: ignore[attr-defined]
                asked = ShardAsked(a.dataset, a.until_epoch, a.ask, a.pending)  # type: ignore[attr-defined]
                self.call(asked, self.on_answer, (a.ask,))  # type: ignore[attr-defined]
            elif kind is SendDone:
                self.master_stamp = now
                key = (a.lease.no,)  # type: ignore[attr-defined]
                done = ShardDone(a.lease.shard, a.lease.no, a.servers, a.skipped, a.route)  # type: ignore[attr-defined]
                self.call(done, self.on_done, key)
            elif kind is SendGiveBack:
                key = (a.lease.no,)  # type: ignore[attr-defined]
                back = ShardReturned(a.lease.shard, a.lease.no, a.reason, a.late)  # type: ignore[attr-defined]
                self.call(back, self.on_given_back, key)
            elif kind is AskLater:
                self.later(min(a.after_s, 1.0), self.ask_again, a.ask)  # type: ignore[attr-defined]
            elif kind is Halt:
                self.kernel.say(self, f"halt: {a.reason}")  # type: ignore[attr-defined]
                self.exit(4)
            elif kind is WorkFinished and self.sim.scenario.loops and self.loop < self.sim.scenario.epochs:
                self.plan_known = False
                self.register()
            elif kind is WorkFinished:
                self.exit(0)
            elif kind is Drop and self.kernel.lines is not None:
                self.kernel.say(self, f"drop {a.lease.no:x}: {a.reason}")  # type: ignore[attr-defined]

    def ask_again(self, ask: int) -> None:
        self.act(self.protocol.ask_again(ask))

    def terminate(self) -> None:
        if not self.leaving:
            self.leaving = True
            self.act(self.protocol.leave("asked to end"))
