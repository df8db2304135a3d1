"""Runs a whole job in virtual time: the production brain, and a thin shell that answers it after the times of a model.

Nothing here decides. A recorded cloud gives machines and takes them back (``platforms.traces``), ``platforms.fleet``
says what is done about that, and the brain what follows. The shell carries out each instruction after the time that
the ``JobModel`` has for it, and tells the brain what a real agent, ps or worker would tell. Heartbeats do not happen:
a process that lives is heard, and one that is gone is known to be after ``detect_s``. Samples are no events: work is a
span between two of them.

What is not modelled: the network but for the seconds that bytes take, the master's own time and its death, slow
workers, and what scripts do behind their last batch. ``sim.simulation`` and ``sim.group`` have the messages.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    RULES,
    AnswerType,
    CapacityChanged,
    CheckpointAsked,
    CheckpointCommitted,
    CommitManifest,
    DrainAsked,
    Event,
    FactType,
    FinishJob,
    GroupDue,
    InstructionType,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    NodesDue,
    Note,
    OrderSnapshots,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    Reply,
    Sender,
    StartProcess,
    StopProcess,
    SupervisionDue,
    by_ps,
)
from everstep.brain.job import Phase
from everstep.config.every import parse_every
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.capacity import RETURNS_A_LIFE, CapacityStep, Gone, Grant, Market, Warned
from everstep.model.member import Address, Role
from everstep.model.placement import Placement
from everstep.model.reasons import CheckpointReason
from everstep.model.shard import ShardSchedule
from everstep.model.snapshot import Holdings
from everstep.monitor.node_costs import MachineSpan
from everstep.platforms.fleet import (
    Fleet,
    FleetAction,
    Remember,
    StartAgent,
    StopAgent,
    WarnAgent,
)
from everstep.platforms.traces import TraceMarket
from everstep.policies.node_selection import HOME_NODE
from everstep.sim.elastic.job_model import JobModel
from everstep.sim.elastic.outcome import Outcome, WorkMeter, uneven
from everstep.sim.elastic.virtual_ps import VirtualPs
from everstep.sim.kernel import Handler, Kernel

STARTED_AT = 1.0e9
"""Seconds since 1970 at which a virtual job begins."""
SPARE_S = 3.0  # of a notice, which agents keep in hand
SOON_S = 0.05
NOTES_MAX = 400


class Work(NamedTuple):
    """Says what there is to train. ``epoch_samples``: of one pass over the data."""

    epoch_samples: int
    epochs: int
    shard_samples: int

    @property
    def samples(self) -> int:
        return self.epoch_samples * self.epochs

    @property
    def schedule(self) -> ShardSchedule:
        return ShardSchedule(name="data", samples=self.epoch_samples, shard_samples=self.shard_samples, seed=0)


class VirtualProcess:
    """Is one worker or ps. ``ready``: it has said hello."""

    __slots__ = ("alive", "held", "incarnation", "leaving", "node", "ready", "role", "slot")

    def __init__(self, role: Role, slot: Slot, incarnation: Incarnation, node: VirtualNode) -> None:
        self.role, self.slot, self.incarnation, self.node = role, slot, incarnation, node
        self.alive = True
        self.ready = self.leaving = False
        self.held: object = None  # what its way of training keeps of it

    def __repr__(self) -> str:
        return f"<{self.role}:{self.slot} #{self.incarnation}>"


class VirtualNode:
    """Is one machine, while the job has it. ``goes_at``: that it was told to go then."""

    __slots__ = ("alive", "goes_at", "joined", "life", "name", "processes", "span")

    def __init__(self, name: NodeId, life: int, span: MachineSpan) -> None:
        self.name, self.life, self.span = name, life, span
        self.alive = True
        self.joined = False
        self.goes_at: float | None = None
        self.processes: dict[tuple[Role, Slot], VirtualProcess] = {}


class VirtualWorkers(Protocol):
    """Says how workers train: ``lease_workers`` (mode ps), ``group_workers`` (mode allreduce)."""

    def before(self) -> None:
        """The brain is about to be told something: tell it first what was trained meanwhile."""
        ...

    def hello(self, worker: VirtualProcess) -> None:
        """A worker's script is at its loop."""
        ...

    def after(self) -> None:
        """The brain has handled something."""
        ...

    def gone(self, worker: VirtualProcess) -> None:
        """A worker is no more."""
        ...

    def asked_to_stop(self, worker: VirtualProcess, grace_s: float) -> None:
        """The brain wants a worker to end."""
        ...

    def published(self, instruction: PublishGroup) -> None: ...

    def placed(self) -> None:
        """There is a new map of partitions."""
        ...

    def order(self, checkpoint: int, since: int) -> bool:
        """Write a worker's state for a checkpoint; False: the ps write theirs."""
        ...

    def speed(self, share: float) -> None:
        """Have everybody train with this share of the speed from now on."""
        ...

    def through(self) -> bool:
        """Return whether all data is trained."""
        ...

    def in_hand(self) -> int:
        """Return samples that are trained, of what is not done as a whole."""
        ...


class VirtualJob:
    """Is one job. ``market``: the machines beside the first one, which stays. ``most``: so many of them, at most.
    ``known``: whether the source says that a machine is gone."""

    def __init__(
        self,
        spec: JobSpec,
        work: Work,
        model: JobModel,
        market: TraceMarket,
        most: int,
        seed: int = 0,
        keep_events: bool = False,
    ) -> None:
        from everstep.sim.elastic.group_workers import GroupWorkers
        from everstep.sim.elastic.lease_workers import LeaseWorkers

        self.spec, self.work, self.model, self.market = spec, work, model, market
        self.brain = Brain()
        self.kernel = Kernel(seed)
        self.meter = WorkMeter(model)
        self.nodes: dict[NodeId, VirtualNode] = {}
        self.machines: list[MachineSpan] = []
        self.events: list[Event] | None = [] if keep_events else None
        self.reported = 0
        self.reclaims = self.losses = 0
        self.notes: dict[str, float] = {}  # what was decided about the job, and when it was for the first time
        self.error = ""
        self._fleet = Fleet()
        self._every = parse_every(spec.checkpoint_every)
        self._due_at = 0.0
        self._look_at = 0.0
        self._gathers = False
        self._cpu_s = 0.0
        self._most = most
        self.ps = VirtualPs(self)
        self.workers: VirtualWorkers = GroupWorkers(self) if spec.mode == "allreduce" else LeaseWorkers(self)

    def __repr__(self) -> str:
        return f"<virtual job at {self.kernel.now:.0f} s: {len(self.nodes)} machines, {self.brain!r}>"

    # ------------------------------------------------------------ the run

    def run(self, limit_s: float) -> Outcome:
        """Run to the job's end, or for ``limit_s`` seconds."""
        began = time.process_time()
        self.begin()
        self.advance(limit_s)
        self.workers.before()
        for node in self.nodes.values():
            if node.alive:
                self._paid(node)
        self._cpu_s = time.process_time() - began
        return self._outcome(limit_s)

    def begin(self) -> None:
        """Begin, where somebody else says how far it goes (``advance``). ``run`` does both."""
        spec = self.spec
        self.tell(MasterStarted(Incarnation(1), spec, **RULES))
        span = MachineSpan(HOME_NODE, spec.hardware, spec.zone, Market(spec.market), 0.0, -1.0, None, spec.workers)
        home = self.nodes[HOME_NODE] = VirtualNode(HOME_NODE, 0, span)
        self.meter.places(0.0, spec.workers)
        home.joined = True
        self.tell(NodeJoined(HOME_NODE, "", 0, 0, (), spec.hardware, 0, spec.zone, Market(spec.market)), _agent(home))
        self.market.request(self._most)
        self._look_at_market()
        if self._every.seconds:
            self.kernel.after(self._every.seconds, self._checkpoint_due)

    def advance(self, until_s: float) -> None:
        """Run to this second of the job, or to its end."""
        self.kernel.run(until_s)
        if not self.kernel.stopped:
            self.kernel.now = until_s

    @property
    def samples(self) -> int:
        """Return the samples that are trained."""
        return self.brain.shards.samples_done + (0 if self.workers.through() else self.workers.in_hand())

    def _outcome(self, limit_s: float) -> Outcome:
        ended = self.workers.through()
        length_s = min(self.kernel.now, limit_s) if ended or self.error else limit_s
        self.meter.close(length_s)
        why = self.error
        if not ended and not why:
            why = (
                f"not over after {limit_s / 3600:.1f} h: {self.samples:,} of {self.work.samples:,} samples are trained"
            )
        return Outcome(
            ended=ended,
            why=why,
            length_s=length_s,
            samples=self.samples,
            wanted=self.work.samples,
            could=self.meter.could,
            reclaims=self.reclaims,
            losses=self.losses,
            machines=tuple(self.machines),
            bins=self.meter.bins(),
            notes=tuple((at, words) for words, at in self.notes.items()),
            events=self.reported,
            cpu_s=self._cpu_s,
        )

    @property
    def at(self) -> float:
        return STARTED_AT + self.kernel.now

    def tell(self, fact: FactType, sender: Sender = MASTER) -> AnswerType | None:
        """Tell the brain something, as the master would, and carry out what it wants. Returns its answer."""
        if self.kernel.stopped:
            return None
        self.workers.before()
        return self._handle(fact, sender)

    def tell_now(self, fact: FactType, sender: Sender) -> AnswerType | None:
        """Tell the brain, as ``tell`` does, of what was trained until now."""
        return None if self.kernel.stopped else self._handle(fact, sender)

    def _handle(self, fact: FactType, sender: Sender) -> AnswerType | None:
        event = Event(self.at, fact, sender)
        self.reported += 1
        if self.events is not None:
            self.events.append(event)
        answer: AnswerType | None = None
        out = self.brain.handle(event)
        for one in out:
            if isinstance(one, Reply):
                answer = one.answer
            else:
                self._carry_out(one)
        nodes_due_at = self.brain.job.nodes_due_at
        if nodes_due_at and not self._gathers:
            self._gathers = True
            self.kernel.at(max(self.kernel.now, nodes_due_at - STARTED_AT), self._nodes_due)
        look_at = self.brain.state.supervision.due_at
        if look_at and look_at != self._look_at:
            self._look_at = look_at
            self.kernel.at(max(self.kernel.now, look_at - STARTED_AT), self._supervise, look_at)
        due_at = self.brain.state.groups.timing.due_at
        if due_at and due_at != self._due_at:
            self._due_at = due_at
            self.kernel.at(max(self.kernel.now, due_at - STARTED_AT), self._due, due_at)
        self.workers.after()
        if self.workers.through() and not self.kernel.stopped:
            self.kernel.stopped = True
        return answer

    def _supervise(self, look_at: float) -> None:
        if self.brain.state.supervision.due_at == look_at:
            self._look_at = 0.0
            self.tell(SupervisionDue())

    def _nodes_due(self) -> None:
        self.tell(NodesDue())

    def _due(self, due_at: float) -> None:
        if self.brain.state.groups.timing.due_at == due_at:
            self._due_at = 0.0
            self.tell(GroupDue())

    def _carry_out(self, one: InstructionType) -> None:
        match one:
            case StartProcess():
                self._start(one)
            case StopProcess():
                process = self.process(one.node, one.role, one.slot, one.incarnation)
                if process is not None and one.role is Role.PS:
                    self.kernel.after(SOON_S, self.exit, process, 0)
                elif process is not None:
                    self.workers.asked_to_stop(process, one.grace_s)
            case PublishPlacement():
                self.ps.published(one.placement)
                self.workers.placed()
            case PublishGroup():
                self.workers.published(one)
            case OrderSnapshots(checkpoint, since):
                if not self.workers.order(checkpoint, since):
                    self.ps.order(checkpoint, since)
            case CommitManifest(manifest):
                self.kernel.after(SOON_S, self._committed, manifest.checkpoint)
            case FinishJob(exit_code, error):
                suspended = (
                    f"suspended: {self.brain.state.supervision.why}" if self.brain.job.phase is Phase.SUSPENDED else ""
                )
                self.error = error or suspended or (f"it ended with {exit_code}" if exit_code else "")
                self.kernel.stopped = True
            case Note("", decision):
                if len(self.notes) < NOTES_MAX:
                    self.notes.setdefault(f"job: {decision.action}", self.kernel.now)
            case _:
                pass

    def after(self, seconds: float, handler: Handler, *args: object) -> None:
        """Call ``handler`` after ``seconds``, give or take ``outcome.JITTER``."""
        self.kernel.after(seconds * uneven(self.kernel.random()), handler, *args)

    # ------------------------------------------------------------ processes

    def process(self, node: NodeId, role: Role, slot: Slot, incarnation: Incarnation) -> VirtualProcess | None:
        """Return this process if it lives."""
        found = self.nodes[node].processes.get((role, slot)) if node in self.nodes else None
        return found if found is not None and found.alive and found.incarnation == incarnation else None

    def _start(self, order: StartProcess) -> None:
        node = self.nodes.get(order.node)
        if node is None or not node.alive:
            return
        known = node.processes.get((order.role, order.slot))
        if known is not None and known.alive and known.incarnation >= order.incarnation:
            return
        process = VirtualProcess(order.role, order.slot, order.incarnation, node)
        node.processes[order.role, order.slot] = process
        if order.role is Role.PS:
            self.after(order.after_s + self.model.fork_s, self._ps_hello, process)
        else:
            self.after(order.after_s + self.model.start_s(self._starting()), self._worker_hello, process)

    def _starting(self) -> int:
        """Return how many workers start at this time, with those whose machine has only been granted."""
        if not self.model.forks:
            return 1
        nodes = [node for node in self.nodes.values() if node.alive]
        workers = (p for node in nodes for p in node.processes.values() if p.role is Role.WORKER)
        return sum(not node.joined for node in nodes) + sum(p.alive and not p.ready for p in workers)

    def _ps_hello(self, ps: VirtualProcess) -> None:
        if not ps.alive:
            return
        ps.ready = True
        address = Address(ps.node.name, f"sock/ps-{ps.slot}.sock")
        hello = MemberJoined(Role.PS, ps.slot, ps.incarnation, ps.node.name, 1, address, (), Holdings())
        self.tell(hello, by_ps(ps.slot, ps.incarnation))

    def _worker_hello(self, worker: VirtualProcess) -> None:
        if worker.alive:
            worker.ready = True
            self.workers.hello(worker)

    def exit(self, process: VirtualProcess, status: int) -> None:
        """Have a process end by itself."""
        if not process.alive:
            return
        self.workers.before()
        self._dies(process)
        fact = ProcessExited(process.role, process.slot, process.incarnation, status)
        self.tell(fact, _agent(process.node))

    def _dies(self, process: VirtualProcess) -> None:
        process.alive = False
        process.node.processes.pop((process.role, process.slot), None)
        if process.role is Role.WORKER:
            self.workers.gone(process)
        else:
            self.ps.gone(process)

    # ------------------------------------------------------------ machines

    def _look_at_market(self) -> None:
        for news in self.market.until(self.kernel.now + 1e-9):
            if isinstance(news, Gone):
                self._machine_gone(news)
            else:
                self._do(self._fleet.handle(news))
        if self.market.due_at is not None:
            self.kernel.at(max(self.kernel.now, self.market.due_at), self._look_at_market)

    def _do(self, actions: list[FleetAction]) -> None:
        for action in actions:
            match action:
                case StartAgent(grant, life):
                    self._granted(grant, life)
                case Remember(grant, step, recorded_s, life):
                    self._remember(grant, step, recorded_s, life)
                case WarnAgent(node, in_s):
                    self._warned(node, in_s)
                case StopAgent():
                    pass  # (the machine is gone: see _machine_gone)
                case _:
                    pass

    def _remember(self, grant: Grant, step: CapacityStep, recorded_s: float | None, life: int) -> None:
        offer = grant.offer
        of = (offer.hardware, offer.zone, offer.market, offer.price)
        self.tell(CapacityChanged(grant.node, step, *of, recorded_s, life))

    def _granted(self, grant: Grant, life: int) -> None:
        now, offer, places = self.kernel.now, grant.offer, self.spec.capacity_workers
        span = MachineSpan(grant.node, offer.hardware, offer.zone, offer.market, now, -1.0, offer.price, places)
        node = self.nodes[grant.node] = VirtualNode(grant.node, life, span)
        self.meter.places(now, places)
        self.after(self.model.agent_s, self._agent_hello, node)

    def _agent_hello(self, node: VirtualNode) -> None:
        if not node.alive:
            return
        node.joined = True
        span = node.span
        returns = node.life * RETURNS_A_LIFE
        fact = NodeJoined(node.name, "10.0.0.1", span.places, self.spec.capacity_ps, (), span.hardware, returns)
        fact = msgspec.structs.replace(fact, zone=span.zone, market=span.market, machine=node.name)
        self.tell(fact, _agent(node))
        if node.goes_at is not None:
            self._drain(node, node.goes_at)

    def _warned(self, name: NodeId, in_s: float | None) -> None:
        """Tell the agent of the node; one that is still starting finds the notice when it is up."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        node.goes_at = self.kernel.now + (15.0 if in_s is None else in_s)
        if node.joined:
            self._drain(node, node.goes_at)

    def _drain(self, node: VirtualNode, goes_at: float) -> None:
        lead_s = max(1.0, goes_at - self.kernel.now - SPARE_S)
        self.tell(DrainAsked(node.name, lead_s), _agent(node))
        self.kernel.after(lead_s, self._agent_leaves, node)

    def _agent_leaves(self, node: VirtualNode) -> None:
        for process in list(node.processes.values()):
            if node.alive:
                self.exit(process, -15)

    def _machine_gone(self, news: Gone) -> None:
        """Have the machine end now; the master knows of it at once, or when it has been silent for so long."""
        node = self.nodes.get(news.node)
        if node is not None and node.alive:
            self.workers.before()
            node.alive = False
            self.reclaims += 1
            self.losses += sum(p.role is Role.WORKER for p in node.processes.values())
            for process in list(node.processes.values()):
                self._dies(process)
            self._paid(node)
            self.meter.places(self.kernel.now, -node.span.places)
        actions = self._fleet.handle(news)
        if self.model.detect_s > 0:
            self.after(self.model.detect_s, self._do, actions)
        else:
            self._do(actions)

    def _paid(self, node: VirtualNode) -> None:
        self.machines.append(node.span._replace(end=self.kernel.now))

    # ------------------------------------------------------------ checkpoints

    def _checkpoint_due(self) -> None:
        checkpoints, job = self.brain.checkpoints, self.brain.job
        every_s = self._every.seconds
        if job.over or not every_s:
            return
        since_s = self.at - max(checkpoints.begun_at, STARTED_AT)
        if job.phase is Phase.TRAINING and checkpoints.writing is None and since_s >= every_s - 1e-6:
            self.tell(CheckpointAsked(CheckpointReason.DUE))
            since_s = 0.0
        self.kernel.after(max(1.0, every_s - since_s), self._checkpoint_due)

    def _committed(self, checkpoint: int) -> None:
        self.tell(CheckpointCommitted(checkpoint))

    @property
    def placement(self) -> Placement | None:
        return self.brain.placement


def _agent(node: VirtualNode) -> Sender:
    return Sender("agent", Slot(0), Incarnation(0), node.name)


__all__ = ["STARTED_AT", "VirtualJob", "VirtualNode", "VirtualProcess", "Warned", "Work"]
