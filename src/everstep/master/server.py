"""Is the shell round the brain: request -> event -> brain -> journal -> durable -> answers and orders.

One asyncio loop owns brain, watch and connections; only the journal's writer has a thread of its own. Nobody hears
of an event before it is durable: answers and orders wait in ``_undurable``, in the order of their events. Heartbeats
are not events; they feed the watch and the readings.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everstep import faultpoints
from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    RULES,
    AnswerType,
    CommitManifest,
    DropCheckpoints,
    FactType,
    Fenced,
    FinishJob,
    GroupDue,
    GroupStalled,
    InstructionType,
    JobUnsuspended,
    LeaseExpired,
    MasterStarted,
    MemberJoined,
    MemberSilent,
    NodeJoined,
    NodesDue,
    Note,
    Ok,
    OrderSnapshots,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    RaiseMemory,
    Refused,
    ReleaseShards,
    Reply,
    RevokeLease,
    Sender,
    StartProcess,
    StopProcess,
    SupervisionDue,
)
from everstep.brain.job import Phase
from everstep.brain.schedule_controller import ScheduleController
from everstep.brain.watch import TICK_S, HeartbeatWatch
from everstep.config.load import read_spec
from everstep.config.spec import JobSpec
from everstep.errors import EverstepError, FencedError, InternalError, PlatformError, escaped
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.machines.causes import Causes
from everstep.machines.dispatch import BrainError, Dispatch, Handled
from everstep.master.checkpoints import CheckpointController
from everstep.master.cold_rows import ColdRows
from everstep.master.confirm import Confirmations
from everstep.master.costs import CostController
from everstep.master.fault_injection import FaultInjector
from everstep.master.graph_controller import GraphController
from everstep.master.hangs import Hangs
from everstep.master.hot import HotPartitionController
from everstep.master.metrics import MetricsServer
from everstep.master.notes import agents_to_tell
from everstep.master.observe import Observer
from everstep.master.policy import PolicyController
from everstep.master.readings import METRICS_FILE, Readings
from everstep.master.spot_policy import SpotController
from everstep.master.stalls import Stalls
from everstep.master.store_server import StoreServer
from everstep.model.copy_places import CopyPlace
from everstep.model.decision import Decision
from everstep.model.job_view import JobView
from everstep.model.member import MemberKey, Role
from everstep.model.step_schedule import StepSchedule
from everstep.monitor.prometheus import Key, MetricsPage
from everstep.monitor.viewer import make_job_view, make_speed_view
from everstep.monitor.vitals import peak_bytes
from everstep.net import messages as wire
from everstep.net.auth import Identity, Secret, load_secret
from everstep.net.control_server import ControlServer, Later, Peer, broadcast
from everstep.net.log import log_plainly
from everstep.net.rendezvous import MASTER_SOCKET, SECRET_FILE, MasterInfo, read_master, write_master
from everstep.net.sockets import listen_tcp, listen_unix, parse_host_port
from everstep.net.strangers import allow_many_descriptors
from everstep.storage.atomic import private, write_atomic
from everstep.storage.journal import Journal
from everstep.storage.space import be_patient, with_space
from everstep.storage.suspension import read_unsuspension

logger = logging.getLogger("everstep.master")

METRICS_S = 2.0
PS_LEAVE_S = 12.0  # how long the end of the job waits for the ps to write their final cuts
END_LOOK_S = 0.1  # between two questions of a worker whether it may end
LAST_WORDS_S = 0.2  # for the last orders to leave
FAULTS_MAX = 10  # requests of one sender on which the brain failed; more of it are not looked at
FAILURES_RUNNING_MAX = 50  # events on which the brain failed without one that it took between: begin anew
RESTORE_S = 10.0
YOUNG_S = 10.0  # of a new master: it may not have heard yet what agents run

Answer = wire.Answered
_OK = Ok()


class Clock:
    """Tells seconds since the epoch that never go back, also across masters, and follow the monotonic clock
    meanwhile."""

    def __init__(self, not_before: float) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


class LineFile:
    """Appends JSON lines; a full disk costs lines, never the job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", opener=private)  # noqa: SIM115
        self._failed = False

    def write(self, line: object) -> None:
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write %s: %s", self._path, error.strerror or error)
            self._failed = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Master:
    """Is one master. ``run`` serves until the job is over and returns the exit status of the process."""

    def __init__(self, run_dir: Path, spec: JobSpec, secret: Secret) -> None:
        self.run_dir, self.spec = run_dir, spec
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._stopped_by: int | None = None
        self._failure: EverstepError | None = None
        self.journal = Journal(
            run_dir / "journal.sqlite",
            on_durable=lambda seq: self._from_thread(self._durable, seq),
            on_error=lambda error: self._from_thread(self._journal_failed, error),
        )
        causes = Causes()
        restored = self.journal.restore(note=causes.note)
        self.brain: Brain = restored.brain
        self.restored = restored
        self.clock = Clock(restored.at)
        self.watch = HeartbeatWatch(spec)
        self.readings = Readings(run_dir)
        self.checkpoints = CheckpointController(
            self.brain,
            spec,
            run_dir,
            self.readings,
            self.clock.now,
            self._tell,
            self._order_ps,
            self._order_worker,
            secret.checkpoint_key,
        )
        self.confirmations = Confirmations(self.brain, spec, self._tell)
        self.store = StoreServer()
        self.stalls = Stalls()
        self.cold_rows = ColdRows(spec.cold_dir)
        self.hangs = Hangs(self.watch, self._reach_agent, self._note)
        self.step_schedules = ScheduleController(
            self.brain, self.watch, spec, self.journal.incarnation, self._order_schedule
        )
        self.hot = HotPartitionController(self.brain, self.readings, self._tell)
        self.observer = Observer(self.brain, self.readings, self.watch, run_dir)
        self.graph = GraphController(self.brain, self.observer, run_dir, self.hot.hottest)
        self.policy = PolicyController(
            brain=self.brain,
            spec=spec,
            observe=self.observer.observe,
            window_s=self.observer.windows.short_s,
            tell=self._tell,
            made=lambda: self._from_thread(self.policy.tick, self.clock.now()),
        )
        self.costs = CostController(self.brain, spec, self._tell, self._note) if spec.prices else None
        self.spot = SpotController(self.brain, spec, self._tell) if spec.spot_policy != "none" else None
        self._counted: dict[Key, float] = {}
        self.metrics = MetricsServer(spec.metrics, run_dir, self._page) if spec.metrics else None
        self.faults = FaultInjector(self.brain, self._reach, self._reach_agent, self._note)
        self._undurable: collections.deque[tuple[Handled, Later | None]] = collections.deque()
        self._senders: dict[int, Sender] = {}  # by number of the connection
        self._agents: dict[NodeId, Peer] = {}
        self._members: dict[MemberKey, Peer] = {}
        self._finish: FinishJob | None = None
        self._finished_at = 0.0
        self._asking: tuple[Peer, wire.RequestType] | None = None  # what is being handled, and whose it is
        self._faults: dict[str, int] = {}  # requests on which the brain failed, by sender
        self._failures_running = 0
        self._young = self.clock.now() + YOUNG_S
        self._events = LineFile(run_dir / "events.jsonl")
        self._metrics = LineFile(run_dir / METRICS_FILE)
        identity = Identity(
            purpose="control", role="master", incarnation=self.journal.incarnation, node=_NODE0, pid=os.getpid()
        )
        self.server = ControlServer(secret, identity, self._request, on_disconnect=self._disconnected)
        self.machine = Dispatch(
            self.brain,
            self.clock.now,
            self.journal.append,
            self._submit,
            {
                NodeJoined: self._node_joined,
                MemberJoined: self._member_joined,
                ProcessExited: self._process_exited,
                GroupStalled: self._group_stalled,
                wire.Beat: self._beat,
                wire.StackTaken: self._stack_taken,
                wire.ValuesReported: self._report,
                wire.ClockReported: self._report_clock,
                wire.MayEnd: self._may_end,
                wire.CopyPlacesAsked: self._copy_places,
                wire.StoreSet: lambda r, sender: self.store.set(r.generation, r.attempt, r.values),
                wire.StoreGet: lambda r, sender: self.store.get(r.generation, r.attempt, r.keys, r.wait_s),
                wire.GetStatus: lambda r, sender: self.view(r.speed, r.graph),
                wire.GetSpec: lambda r, sender: wire.SpecReport(self.spec),
                wire.FaultAsked: lambda r, sender: self.faults.ask(r, self.clock.now()),
            },
            self._refuse,
            causes,
        )

    def __repr__(self) -> str:
        return f"<master #{self.journal.incarnation} {self.brain!r} {len(self._undurable)} waiting for the disk>"

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """0: the job is over, summary.json says how. Else the number of an error that stderr tells of."""
        try:
            faultpoints.begin("master", 0, self.journal.incarnation)
            self._go_on()
            self._tell(MasterStarted(self.journal.incarnation, self.spec, **RULES))
            self.checkpoints.start()
            self.watch.look(self.brain, self.clock.now())
            await self._listen()
            self._signals()
            gc.freeze()  # what was replayed stays: no collection needs to look at it
            tick = asyncio.create_task(self._ticking())
            tick.add_done_callback(_ticked)
            try:
                await self._over.wait()
            finally:
                tick.cancel()
        except EverstepError as error:
            self._failure = self._failure or error
        return await self._leave()

    def _go_on(self) -> None:
        """A suspended job goes on, if ``everstep unsuspend`` has said so for this suspension."""
        asked = read_unsuspension(self.run_dir)
        if asked is not None and self.brain.job.phase is Phase.SUSPENDED:
            self._tell(JobUnsuspended(asked.number, asked.reason))

    async def _listen(self) -> None:
        info = MasterInfo(pid=os.getpid(), incarnation=self.journal.incarnation)
        await self.server.listen(listen_unix(self.run_dir / MASTER_SOCKET))
        if self.spec.bind:
            host, port = parse_host_port(self.spec.bind)
            sock = listen_tcp(host, port)
            info = MasterInfo(pid=info.pid, incarnation=info.incarnation, host=host, port=sock.getsockname()[1])
            await self.server.listen(sock)
        with_space(lambda: write_master(self.run_dir, info))
        if self.metrics is not None:
            self.metrics.start()

    def _signals(self) -> None:
        for signo in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signo, self._signalled, signo)

    def _signalled(self, signo: int) -> None:
        self._stopped_by = signo
        self._over.set()

    async def _leave(self) -> int:
        if self._failure is not None:
            self._say_failure(self._failure)
        if self.metrics is not None:
            await self.metrics.close()
        await self.checkpoints.close()
        await self.server.close(1.0)
        await asyncio.to_thread(self.journal.close)
        if self._finish is not None and self._failure is None:
            self._write_summary()
        self._events.close()
        self._metrics.close()
        self.observer.close()
        if self._failure is not None:
            return self._failure.exit_code
        if self._finish is None and self._stopped_by is not None:
            return 128 + self._stopped_by  # a master that is only told to end will be started again
        return 0

    def _say_failure(self, error: EverstepError) -> None:
        """Nothing more can be decided durably: the job ends here."""
        _say(error)
        for peer in self.server.peers:
            peer.send(FinishJob(error.exit_code, str(error)))

    def _from_thread(self, call: Callable[[Any], None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, argument)

    def _journal_failed(self, error: EverstepError) -> None:
        self._failure = error
        self._over.set()

    # ------------------------------------------------------------ events in, instructions out

    def _tell(self, fact: FactType, sender: Sender = MASTER, later: Later | None = None) -> None:
        """Hand a fact to the brain and queue what follows until it is durable."""
        if isinstance(fact, LeaseExpired):
            self.step_schedules.expired(fact)
        try:
            handled = self.machine.tell(fact, sender)
        except BrainError as error:
            self._failed_on(error, later)
            return
        except EverstepError as error:
            self._journal_failed(error)
            return
        self._failures_running = 0
        self.journal.maybe_snapshot(self.brain)
        self._undurable.append((handled, later))
        if self.costs is not None:
            self.costs.take(handled.event)
        if self.spot is not None:
            self.spot.take(handled.event)
        self.step_schedules.handled()

    def _failed_on(self, error: BrainError, later: Later | None) -> None:
        """Undo an event on which the brain raised. The event is not journaled; what handling it changed is undone by
        what the journal has. Who sent it is refused."""
        event = error.event
        asked = escaped(str(self._asking))
        logger.error("the brain failed on %s, asked by %s", escaped(repr(event)), asked, exc_info=error.__cause__)
        self._failures_running += 1
        try:
            if self._failures_running > FAILURES_RUNNING_MAX:
                raise InternalError(f"it failed on {self._failures_running} events running")
            self.journal.flush(RESTORE_S)
            self.brain.become(self.journal.restore(check=False).brain)
        except Exception:
            logger.exception("and its state cannot be restored: the next master begins anew")
            os._exit(3)
        what = type(event.fact).__name__
        if self._asking is not None:
            sender = str(self._asking[0].identity)
            self._faults[sender] = self._faults.get(sender, 0) + 1
            why = Decision("request refused", f"handling {what} of {sender} failed: a bug, see logs/master.log", {})
            self._note(event.at, "master", why)
        if later is not None:
            later.give(Refused(f"the master cannot handle this {what}: a bug, see logs/master.log"))

    def _submit(self, fact: FactType, sender: Sender) -> Later:
        later = Later()
        self._tell(fact, sender, later)
        return later

    def _durable(self, seq: int) -> None:
        """Everything up to ``seq`` is on disk: act and answer."""
        waiting = self._undurable
        while waiting and waiting[0][0].seq <= seq:
            done, later = waiting.popleft()
            for instruction in done.instructions:
                if type(instruction) is not Reply:
                    self._execute(instruction, done.event.at)
            if later is not None and done.answer is not None:
                later.give(done.answer)

    def _execute(self, instruction: InstructionType, at: float) -> None:
        match instruction:
            case StartProcess(node, role, slot, incarnation, decision):
                self._order(self._agents.get(node), instruction)
                if incarnation > 1 or decision.inputs:
                    self._note(at, f"{role}:{slot}", decision, incarnation=incarnation)
            case StopProcess(node, role, slot, incarnation, _, decision):
                self._order(self._agents.get(node), instruction)
                self._note(at, f"{role}:{slot}", decision, incarnation=incarnation)
            case RaiseMemory(node):
                self._order(self._agents.get(node), instruction)
            case PublishPlacement(placement, decision):
                broadcast(self._members.values(), instruction)
                self._note(at, "", decision, version=placement.version)
            case PublishGroup(group, decision):
                self.store.forget(group.generation)
                broadcast([peer for key, peer in self._members.items() if key.role is Role.WORKER], instruction)
                self._note(at, "", decision)
            case ReleaseShards():
                broadcast([peer for key, peer in self._members.items() if key.role is Role.PS], instruction)
            case RevokeLease(member, _, decision):
                self._order(self._members.get(member), instruction)
                self._note(at, str(member), decision)
            case Note(member, decision):
                self._note(at, member, decision)
            case OrderSnapshots():
                self.checkpoints.order_snapshots()
            case CommitManifest(manifest):
                self.checkpoints.commit(manifest)
            case DropCheckpoints(checkpoints):
                self.checkpoints.drop(checkpoints)
            case FinishJob():
                self._finish_job(instruction)

    def _order(self, peer: Peer | None, order: wire.OrderType) -> None:
        """Send an order to whoever is connected; the others hear of it at their next hello."""
        if peer is not None and not peer.closed:
            peer.send(order)

    def _order_ps(self, slot: Slot, order: wire.OrderType) -> None:
        self._order(self._members.get(MemberKey(Role.PS, slot)), order)

    def _order_worker(self, slot: Slot, order: wire.OrderType) -> None:
        self._order(self._members.get(MemberKey(Role.WORKER, slot)), order)

    def _order_schedule(self, slot: Slot, schedule: StepSchedule) -> None:
        self._order_worker(slot, wire.NewSchedule(schedule))

    def _reach(self, key: MemberKey, order: wire.OrderType) -> bool:
        """Whether that member is connected, and so gets the order."""
        peer = self._members.get(key)
        self._order(peer, order)
        return peer is not None and not peer.closed

    def _reach_agent(self, node: NodeId, order: wire.OrderType) -> bool:
        peer = self._agents.get(node)
        self._order(peer, order)
        return peer is not None and not peer.closed

    def _note(self, at: float, member: str, decision: Decision, **more: int) -> None:
        line = {
            "at": round(at, 6),
            "member": member,
            "action": decision.action,
            "reason": decision.reason,
            "inputs": {**decision.inputs, **more},
        }
        if decision.rejected:
            line["rejected"] = decision.rejected
        self._events.write(line)
        agents = agents_to_tell(member, self._agents, self.brain.members)
        broadcast(agents, Note(member, Decision(decision.action, decision.reason)))

    # ------------------------------------------------------------ requests

    def _request(self, peer: Peer, request: wire.RequestType) -> Any:
        if self._failure is not None:
            return None
        sender = self._senders.get(peer.number) or self._sender(peer)
        if self._faults and self._faults.get(str(sender), 0) >= FAULTS_MAX:
            words = f"{sender} sent {FAULTS_MAX} requests that could not be handled: no more of it is"
            return self._refuse(request, sender, Refused(words))
        self._asking = (peer, request)
        try:
            return self.machine.dispatch(request, sender)
        finally:
            self._asking = None

    def _refuse(self, request: wire.RequestType, sender: Sender, answer: AnswerType) -> AnswerType | None:
        if isinstance(request, MemberJoined) and isinstance(answer, Fenced) and self.clock.now() < self._young:
            return None  # its agent, which knows it, may say hello next
        self.server.limit.warning(f"refused: {escaped(str(answer))}")
        return answer

    def _sender(self, peer: Peer) -> Sender:
        who = peer.identity
        node = who.node if who.role == "agent" else _NOWHERE
        sender = self._senders[peer.number] = Sender(who.role, who.slot, who.incarnation, node)
        return sender

    @property
    def _peer(self) -> Peer:
        """Return who asks what is being handled."""
        assert self._asking is not None
        return self._asking[0]

    def _node_joined(self, r: NodeJoined, sender: Sender) -> Any:
        peer = self._peer
        known = self._agents.get(r.node)
        if known is not None and known.number > peer.number:
            return None  # said on an older connection than the one it uses now: orders must not go there
        running = self._run_by(peer, r)
        peer.tag = r.node
        self._agents[r.node] = peer
        self.observer.node(r.node, r.hardware)
        self.watch.node_heard(r.node, self.clock.now())
        return self._submit(msgspec.structs.replace(r, running=running), sender)

    def _run_by(self, peer: Peer, r: NodeJoined) -> tuple[tuple[Role, Slot, Incarnation, int], ...]:
        """What the agent says that it runs, without later lives of processes that live on other nodes: those end."""
        out = []
        for process in r.running:
            role, slot, incarnation, _ = process
            record = self.brain.members.of(role).get(slot)
            if record is not None and incarnation > record.member.incarnation and record.member.node != r.node:
                logger.warning("%s runs %s:%d #%d, which was never started", peer.identity, role, slot, incarnation)
                why = Decision("stop", "it was never started")
                self._order(peer, StopProcess(r.node, role, slot, incarnation, 0.0, why))
            else:
                out.append(process)
        return tuple(out)

    def _member_joined(self, r: MemberJoined, sender: Sender) -> Any:
        peer = self._peer
        key = MemberKey(r.role, r.slot)
        known = self._members.get(key)
        if known is not None and known.number > peer.number and known.identity.incarnation == r.incarnation:
            return None  # as in _node_joined
        later = self._submit(r, sender)
        if self.brain.members.current(r.role, r.slot, r.incarnation) is not None:
            self._members[key] = peer  # orders reach it from now on; those of a later event follow its answer
            peer.tag = key
            for heard in self.watch.heard(key, r.incarnation, self.clock.now(), node=r.node):
                self._tell(heard)
            if r.role is Role.PS:
                self.checkpoints.hello(r.slot)
        if self._finish is not None:
            self._order(peer, self._finish)
        return later

    def _beat(self, r: wire.Beat, who: Sender) -> Answer | None:
        at, peer = self.clock.now(), self._peer
        if who.role == "agent":
            if isinstance(peer.tag, str):
                node = self.brain.members.nodes.get(NodeId(peer.tag))
                if node is not None and not node.alive:
                    # Stopped for so long that its node was declared lost; the connection lived on. It joins anew with
                    # the hello of its next connection, and what runs there is judged by that.
                    peer.close()
                    return None
                self.watch.node_heard(NodeId(peer.tag), at)
                self._vouched(NodeId(peer.tag), r, at)
            return _OK
        role = Role(who.role)
        key = MemberKey(role, who.slot)
        record = self.brain.members.current(role, who.slot, who.incarnation)
        if record is None:
            return Fenced(f"{key} #{who.incarnation} was replaced")
        own = {self.brain.leases[shard].no for shard in record.held}
        progress = tuple(each for each in r.progress if each[0] in own)
        for heard in self.watch.heard(key, who.incarnation, at, progress):
            self._tell(heard)
        self.watch.moved(key, who.incarnation, at, r.idle_s, r.inside)
        self.readings.take(key, who.incarnation, r.readings, at)
        self.graph.fold.take(key, who.incarnation, r.graph, r.rows, at)
        if role is Role.PS:
            self.hot.take(key.slot, who.incarnation, r.partitions)
        if (dropped := self.observer.take(key, who.incarnation, r.readings, at)) is not None:
            self._note(at, str(key), dropped)
        if role is Role.PS:
            self.confirmations.beat(who.slot, who.incarnation, r.readings, at)
            if (cold := self.cold_rows.beat(key.slot, r.readings)) is not None:
                self._note(at, str(key), cold)
        elif (stall := self.stalls.beat(key, who.incarnation, r.readings)) is not None:
            self._note(at, str(key), stall)
        if r.values:
            self.readings.reported(r.values)
        self.policy.tick(at)
        return _OK

    def _vouched(self, node: NodeId, r: wire.Beat, at: float) -> None:
        """Take in an agent's word of its own processes; of others' it says nothing."""
        for role, slot, incarnation, cpu_s in r.runs:
            record = self.brain.members.current(role, slot, incarnation)
            if record is not None and record.member.node == node:
                for heard in self.watch.vouched(record.member.key, incarnation, at, cpu_s):
                    self._tell(heard)

    def _stack_taken(self, r: wire.StackTaken, who: Sender) -> Answer:
        self.hangs.taken(r, self.clock.now())
        return _OK

    def _report(self, r: wire.ValuesReported, who: Sender) -> Answer:
        self.readings.reported(r.values)
        self._write_metrics()  # at once: its worker may be gone, and this master killed, before the next line is due
        return _OK

    def _report_clock(self, r: wire.ClockReported, who: Sender) -> Answer:
        if self.brain.members.current(Role.WORKER, who.slot, who.incarnation) is None:
            return Fenced(f"worker:{who.slot} #{who.incarnation} was replaced")
        self.step_schedules.report(who.slot, who.incarnation, r.clock)
        return _OK

    def _may_end(self, r: wire.MayEnd, who: Sender) -> Answer:
        if self.brain.may_end(who.slot, who.incarnation):
            return _OK
        return wire.StillNeeded(END_LOOK_S, self.brain.groups.committed_everywhere())

    def _copy_places(self, r: wire.CopyPlacesAsked, who: Sender) -> Answer:
        nodes = self.brain.members.nodes.values()
        found = [CopyPlace(n.node, n.machine, n.copies) for n in nodes if n.alive and n.copies is not None]
        job, voids = self.brain.job, self.brain.state.groups.history.voids
        needed = job.failures.worker if job.workers_wanted == 1 else len(voids)  # (else peers have the state)
        return wire.CopyPlaces(tuple(found), needed, max(0.0, self.clock.now() - job.started_at))

    def _group_stalled(self, r: GroupStalled, sender: Sender) -> Any:
        silent = self.watch.stalled(self.brain, self.clock.now())
        return self._submit(msgspec.structs.replace(r, silent=silent), sender)

    def _process_exited(self, r: ProcessExited, sender: Sender) -> Any:
        return self._submit(msgspec.structs.replace(r, progress=self._progress(r.role, r.slot)), sender)

    def _progress(self, role: Role, slot: Slot) -> tuple[tuple[LeaseNo, int], ...]:
        """Return what the process in this slot last told of its leases."""
        record = self.brain.members.of(role).get(slot)
        if record is None:
            return ()
        held = [self.brain.leases[key] for key in record.held]
        return tuple((h.no, self.watch.position(h.no, h.start)) for h in held)

    def _disconnected(self, peer: Peer) -> None:
        """Only a hint: the watch decides. Orders to it are dropped until its next hello."""
        self._senders.pop(peer.number, None)
        if isinstance(peer.tag, MemberKey):
            if self._members.get(peer.tag) is peer:
                del self._members[peer.tag]
        elif isinstance(peer.tag, str) and self._agents.get(NodeId(peer.tag)) is peer:
            del self._agents[NodeId(peer.tag)]

    def view(self, speed: bool, graph: bool = False) -> JobView:
        """Return the read model: all that is shown of the job. ``speed``: also how fast its members are; ``graph``:
        also the model and the tables."""
        at, windows = self.clock.now(), self.observer.windows
        measured = msgspec.structs.replace(
            self.readings.measured(self.brain, self.watch, at),
            hardware=self.observer.hardware,
            master_pid=os.getpid(),
            master_peak_bytes=peak_bytes(os.getpid()),
            finishing=self._finish is not None,
            cost=self.costs.view(at) if self.costs is not None else None,
            graph=self.graph.fold.view() if graph else None,
            hottest=self.hot.hottest(),
        )
        seen = None
        if speed:
            seen = make_speed_view(
                self.observer.observe(at),
                windows.newest,
                windows.dropped,
                self.faults.running(at),
                self.graph.binding(at),
            )
        return make_job_view(self.brain, at, measured, seen)

    def _page(self) -> str:
        """Return the page for the endpoint of metrics."""
        page = MetricsPage(self._counted)
        page.fill(self.view(speed=True, graph=True))
        return page.text()

    # ------------------------------------------------------------ time

    async def _ticking(self) -> None:
        metrics_at = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            at = self.clock.now()
            self.watch.look(self.brain, at)
            self.step_schedules.tick(at)
            self.hangs.tick(at)
            for fact in self.watch.tick(at):
                if isinstance(fact, MemberSilent) and fact.lost:
                    fact = msgspec.structs.replace(fact, progress=self._progress(fact.role, fact.slot))
                    fact = self.hangs.complete(fact)
                self._tell(fact)
            if 0 < self.brain.state.groups.timing.due_at <= at:
                self._tell(GroupDue())
            job = self.brain.job
            if not job.gathered and 0 < job.nodes_due_at <= at:
                self._tell(NodesDue())
            if 0 < self.brain.state.supervision.due_at <= at:
                self._tell(SupervisionDue())
            self.checkpoints.tick(at)
            self.confirmations.tick(at)
            self.hot.tick(at)
            self.policy.tick(at)
            if self.costs is not None:
                self.costs.tick(at)
            if self.spot is not None:
                self.spot.tick(at)
            if at - metrics_at >= METRICS_S and self._finish is None:
                metrics_at = at
                self._check_fence()
                self._write_metrics()
                self.observer.tick(at)
                self.graph.tick(at)

    def _check_fence(self) -> None:
        """The journal refuses a replaced master's next commit; an idle one commits nothing and must look."""
        now = read_master(self.run_dir)
        if now is not None and now.incarnation > self.journal.incarnation:
            self._journal_failed(FencedError(f"master #{self.journal.incarnation} was replaced by #{now.incarnation}"))

    def _write_metrics(self) -> None:
        self._metrics.write(self.readings.metrics(self.brain, self.watch, self.clock.now()))

    # ------------------------------------------------------------ the end

    def _finish_job(self, finish: FinishJob) -> None:
        """Tell everyone (again, to those who said hello since), and leave when every ps has written its last cut."""
        broadcast(self.server.peers, finish)
        if self._finish is None:
            self._finish = finish
            self._finished_at = self.clock.now()
            if self.costs is not None:
                self.costs.end(self._finished_at)
            self._write_summary()
            self.graph.write()
            self._finishing = asyncio.create_task(self._wait_for_ps())

    async def _wait_for_ps(self) -> None:
        end = self._loop.time() + PS_LEAVE_S
        while self._loop.time() < end and any(key.role is Role.PS for key in self._members):
            await asyncio.sleep(0.02)
        await asyncio.sleep(LAST_WORDS_S)
        self._over.set()

    def _write_summary(self) -> None:
        try:
            summary = self.readings.summary(self.brain, self._finished_at)
            if self.costs is not None:
                cost = self.costs.view(self._finished_at)
                summary.spent_usd, summary.budget_asked = cost.usd, self.costs.asked
            data = msgspec.json.format(msgspec.json.encode(summary))
            write_atomic(self.run_dir / "summary.json", data + b"\n")
        except PlatformError as error:
            logger.warning("%s", error)


_NODE0 = NodeId("node0")
_NOWHERE = NodeId("")


def _ticked(task: asyncio.Task[None]) -> None:
    """A master of which the clock has stopped notices no loss any more: the next one does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the master's clock stopped", exc_info=error)
        os._exit(3)


async def _main(run_dir: Path) -> int:
    spec = read_spec(run_dir)
    be_patient(spec.disk_full_s)
    return await Master(run_dir, spec, load_secret(run_dir / SECRET_FILE)).run()


def serve(run_dir: Path) -> int:
    """Be the master of ``run_dir`` until the job is over; returns the exit status."""
    import uvloop

    allow_many_descriptors()
    sys.setswitchinterval(0.0005)  # the journal's writer must not wait 5 ms for its turn
    log_plainly("%(asctime)s %(name)s %(levelname)s %(message)s", logging.INFO)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(run_dir))
    except EverstepError as error:
        _say(error)
        return error.exit_code


def _say(error: EverstepError) -> None:
    """Log a line, in a log which may lie on the very disk that is full."""
    with contextlib.suppress(OSError):
        print(f"everstep: {error}", file=sys.stderr, flush=True)
