"""Makes one run of the simulator: build the cluster, let chaos loose, heal, and check every promise.

``simulate(seed)`` raises ``Violation`` if a promise is broken, an ``AssertionError`` of the brain if an invariant is;
else it returns what happened. The last act of every run is to read the whole journal as bytes, replay it through a
fresh brain and compare the states.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import DrainAsked, Event, FactType, Note, Reply, ScaleAsked
from everstep.brain.step_scheduler import StepScheduler
from everstep.brain.watch import HeartbeatWatch
from everstep.ids import Incarnation, PartitionId, ShardKey, Slot
from everstep.model.member import Role
from everstep.model.placement import MirrorKind, Placement
from everstep.model.shard import Lease, ShardState, split_key
from everstep.model.snapshot import Manifest
from everstep.native.ledger import PushLedger, batch_fingerprint
from everstep.policies.placement_builder import How
from everstep.policies.recovery import recover
from everstep.protect.machine import Machine
from everstep.protect.replication import PeerKey
from everstep.sim.cluster import Disk, Ps, SimAgent, SimMaster, SimMember, Worker
from everstep.sim.kernel import Kernel, Network, SimProcess, Violation
from everstep.sim.lineage import Lineage
from everstep.sim.named_steps import NamedSteps
from everstep.sim.scenario import Scenario, random_scenario
from everstep.sim.sim_server import MirrorPs
from everstep.sim.sim_store import Partition, SimStore
from everstep.sim.truth import Truth
from everstep.tables.staleness_gate import StalenessGate
from everstep.tables.worker_protocol import WorkerProtocol

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[Event])


class Parts(NamedTuple):
    """Names the code under test. Mutations replace some of it."""

    brain: type[Brain] = Brain
    watch: type[HeartbeatWatch] = HeartbeatWatch
    protocol: type[WorkerProtocol] = WorkerProtocol
    ledger: type[PushLedger] = PushLedger
    machine: type[Machine] = Machine
    ps: type[MirrorPs] = MirrorPs
    store: type[SimStore] = SimStore
    scheduler: type[StepScheduler] = StepScheduler
    gate: type[StalenessGate] = StalenessGate
    early_replies: bool = False  # a shell that answers before the event is durable
    no_ps_incarnation: bool = False  # a ps that does not look at the token's incarnation


class SimOutcome(NamedTuple):
    seed: int
    crc: int
    events: int
    brain_events: int
    virtual_s: float
    faults: int  # that struck
    masters: int
    failovers: int  # masters that died after everyone alive had joined them
    replayed: int  # events
    deaths: int  # of workers
    applied: int  # (partition, position) pairs
    retried: int  # batches
    late: int = 0  # parts of steps


class Simulation:
    """All of one run's state. ``origin``: the manifest that the present job goes on from, and the last number of a
    checkpoint before it; ``jobs``: how many there were (see ``sim.resume``)."""

    origin: tuple[Manifest, int] | None = None
    jobs = 1

    def __init__(
        self, seed: int, scenario: Scenario, parts: Parts = Parts(), trace: bool = False, validate: bool = True
    ) -> None:
        self.seed, self.scenario, self.parts, self.validate = seed, scenario, parts, validate
        self.kernel = Kernel(seed, trace)
        self.net = Network(self.kernel)
        self.spec, self.plan = scenario.spec(), scenario.plan()
        self.truth: Any = Truth(self.plan, scenario.epochs, scenario.partitions)
        self.placed: Any = Worker  # who is told of each new map
        if scenario.mirrors:
            lenient = scenario.protect != "acked" or bool(scenario.checkpoint_s)
            acked = scenario.protect == "acked"
            self.truth = Lineage(self.plan, scenario.epochs, scenario.partitions, acked, lenient)
            self.placed = Worker | MirrorPs
        self.lives: dict[PeerKey, MirrorPs] = {}
        self.stuck: list[str] = []
        self.files: dict[str, Partition] = {}  # snapshots, durable or not
        self.manifests: dict[int, Manifest] = {}
        self.ps_deaths = 0
        self.inconsistent: set[int] = set()  # mirrors; ids are never used again
        self.doomed: set[Slot] = set()  # lost, or about to be, and the map still names them
        self.doomed_lives: dict[Slot, Incarnation] = {}
        self.steps = NamedSteps()
        self.late = 0  # parts of steps
        self.disk = Disk()
        self.servers: dict[Slot, Any] = {}
        self.processes: list[SimMember] = []
        self.over: tuple[int, str] | None = None
        self.healed = False
        self.paused_until = 0.0  # of all processes, had they not been healed
        self.faults = self.masters = self.failovers = self.replayed = self.brain_events = self.deaths = self.retried = 0
        self.master: SimMaster = self.new_master()
        self.home = SimAgent(self, "node0", 0, scenario.ps)
        self.agents = {"node0": self.home}
        self.home.start()
        if scenario.second_node:
            self.new_agent("node1")
        for number, (_, when) in enumerate(scenario.nodes, 1):
            self.kernel.at(when, self.new_agent, f"node{number}")

    # ------------------------------------------------------------ what happens to processes

    def new_master(self) -> SimMaster:
        self.masters += 1
        master = self.master = SimMaster(self, self.masters)
        return master

    def first_facts(self, brain: Brain) -> list[FactType]:
        """Return what a new master says before it begins."""
        return []

    def new_agent(self, node: str) -> None:
        of_ps = bool(self.scenario.nodes)
        agent = self.agents[node] = SimAgent(self, node, 0 if of_ps else 2, 8 if of_ps else 0)
        agent.start()

    def process_ended(self, process: SimMember, status: int) -> None:
        self.kernel.say(process, f"ended with {status}")
        if isinstance(process, SimAgent):
            return
        if isinstance(process, Worker):
            self.deaths += status != 0
            self.retried += process.protocol.retried
        elif status != 0:
            self.ps_deaths += 1
        if process in self.processes:
            self.processes.remove(process)
        agent = self.agents.get(process.node)
        if agent is not None and agent.alive:
            agent.fire(agent.child_ended, (process, status))

    def kill_master(self) -> None:
        master = self.master
        if not master.alive:
            return
        clients = [c for c in (*self.agents.values(), *self.processes) if c.alive]
        if all(c.welcome and c.conn is not None and c.conn.server is master for c in clients):
            self.failovers += 1
        self.kernel.say(master, "killed")
        master.die()
        self.home.later(self.scenario.restart_s * (0.5 + self.kernel.random()), self.restart_master, master)

    def restart_master(self, dead: SimMaster) -> None:
        if self.master is dead:
            self.kernel.say(self.new_master(), "started")

    def job_over(self, exit_code: int, error: str) -> None:
        if self.over is None:
            self.over = exit_code, error
            self.kernel.say("job", f"over: {exit_code} {error}")
            self.kernel.stopped = True

    def server_of(self, slot: Slot, incarnation: Incarnation) -> Any:
        """Return the process that a worker's map names; None: it never was."""
        if self.scenario.mirrors:
            return self.lives.get((slot, incarnation))
        return self.servers[slot]

    def snapshot_of(self, checkpoint: int, partition: PartitionId) -> Partition:
        """Return what the manifest of ``checkpoint`` names for ``partition``."""
        return self.files[self.manifests[checkpoint].snapshots[partition].files[0].path]

    def lease_current(self, brain: Brain, lease: Lease) -> bool:
        held = brain.leases.get(lease.shard)
        return held is not None and held.no == lease.no

    # ------------------------------------------------------------ faults

    def held(self) -> bool:
        """Return whether what holds a worker up now is its script, and no signal."""
        return self.scenario.vouch and random.Random(f"held {self.seed} {self.faults}").random() < 0.5

    def strike(self, fault: str) -> None:
        rng, net = self.kernel.rng, self.net
        if self.over is not None:
            return
        self.kernel.say("FAULT", fault)
        self.faults += 1
        workers = [p for p in self.processes if isinstance(p, Worker)]
        worker = rng.choice(workers) if workers else None
        if fault in ("kill master", "kill worker and master"):
            self.kill_master()
        if fault in ("kill worker", "kill worker and master") and worker is not None:
            worker.exit(-9)
        elif fault == "stop worker" and worker is not None:
            (worker.hold if self.held() else worker.pause)(rng.choice([0.3, 1.5, 4.0]))
        elif fault == "hold worker" and worker is not None:
            worker.hold(rng.choice([1.5, 4.0, 9.0]))
        elif fault == "stop master":
            self.master.pause(rng.choice([0.2, 2.0]))
        elif fault == "stop agent":
            rng.choice(list(self.agents.values())).pause(rng.choice([0.3, 4.0]))
        elif fault == "cut worker from master" and worker is not None:
            a, b = worker.name, self.master.name
            self.cut(a, b, rng.random() < 0.7, rng.uniform(0.2, 4.0))
        elif fault == "cut worker from a ps" and worker is not None and self.servers:
            ps = rng.choice(list(self.servers.values()))
            self.cut(worker.name, ps.name, rng.random() < 0.5, rng.uniform(0.2, 4.0))
        elif fault == "cut node":
            self.cut("node1", "node0", rng.random() < 0.7, rng.uniform(0.3, 4.0))
        elif fault == "kill node":
            self.kill_node("node1", rng.uniform(0.1, 4.0) if rng.random() < 0.7 else -1.0)
        elif fault == "second master":
            self.kernel.say(self.new_master(), "started beside the old one")
        elif fault == "scale":
            self.scale(rng.randint(1, 4))
        elif fault == "sever":
            conns = [c.conn for c in (*self.agents.values(), *self.processes) if c.conn is not None]
            if conns:
                net.sever(rng.choice(conns), 0.3)
        elif fault == "lossy":
            net.loss = min(0.4, net.loss + 0.1)
        elif fault in ("kill machine", "cut machine"):
            self.strike_machine(fault)
        elif self.scenario.mirrors:
            self.strike_ps(fault, worker)
        if self.scenario.ps_restarts and self.servers and rng.random() < 0.3:
            self.restart_ps(rng.choice(list(self.servers.values())))

    def strike_machine(self, fault: str) -> None:
        """Lose a machine with all nodes on it, or its link for a while; only where that can be borne. Where the layout
        is at rest and there are machines enough, it must be."""
        rng = self.kernel.rng
        machines = sorted({machine for machine, _ in self.scenario.nodes})
        machine = rng.choice(machines)
        nodes = [f"node{n}" for n, (at, _) in enumerate(self.scenario.nodes, 1) if at == machine]
        self.check_apart()
        lost = [p for p in self.processes if isinstance(p, MirrorPs) and p.node in nodes]
        back_s, for_s = (rng.uniform(0.1, 4.0) if rng.random() < 0.8 else -1.0), rng.choice([0.3, 1.0, 4.0, 8.0])
        if not self.may_lose_all(lost):
            return
        self.kernel.say("FAULT", f"{fault} {machine}: {[str(p) for p in lost]}")
        for node in nodes:
            if fault == "kill machine":
                self.kill_node(node, back_s)
                continue
            way = rng.random()
            for other in [o for o in self.agents if o not in nodes]:
                if way < 0.8:
                    self.cut(node, other, way < 0.6, for_s)
                else:
                    self.cut(other, node, False, for_s)

    def check_apart(self) -> None:
        """Raise Violation if, at rest, units of a stripe share a machine although there are enough with ps."""
        brain = self.master.brain
        placement, code = brain.placement, brain.partitions.code
        if not self.master.alive or placement is None or not code.m or brain.job.over or not brain.partitions.at_rest():
            return
        at: dict[Slot, str] = {}
        for place in placement.servers:
            if (ps := self.lives.get((place.slot, place.incarnation))) is not None:
                at[place.slot] = self.scenario.machine_of(ps.node) or ps.node
        if len(set(at.values())) < code.width:
            return
        units: dict[int, list[Slot]] = {}
        for partition, slot in enumerate(placement.owner):
            units.setdefault(partition // code.k, []).append(slot)
        for mirror in placement.mirrors:
            if mirror.kind is MirrorKind.PARITY:
                units.setdefault(mirror.members[0] // code.k, []).append(mirror.at)
        for stripe, slots in units.items():
            where = [at[slot] for slot in slots if slot in at]
            if len(set(where)) < len(where):
                raise Violation(
                    f"stripe {stripe} has two units on one machine: {where}, and there are {set(at.values())}"
                )

    def may_lose_all(self, lost: list[MirrorPs]) -> bool:
        """Return whether every partition can still be had without these ps; if so, their loss is noted."""
        brain = self.master.brain
        placement = brain.placement
        if not self.master.alive or placement is None or brain.job.over or self.master.outdated():
            return False
        placed = {(p.slot, p.incarnation) for p in placement.servers}
        self.doomed = {s for s in self.doomed if (s, self.doomed_lives[s]) in placed}
        gone = {p.key.slot: p.incarnation for p in lost if (p.key.slot, p.incarnation) in placed}
        if not self._bearable(placement, {*gone, *self.doomed}):
            return False
        self.doomed |= set(gone)
        self.doomed_lives |= gone
        return True

    def strike_ps(self, fault: str, worker: Worker | None) -> None:
        """Strike with a fault of a ps that keeps mirrors; those that lose it, only while it can be borne."""
        rng, kernel = self.kernel.rng, self.kernel
        if fault == "scale ps":
            self.record(ScaleAsked(Role.PS, rng.randint(*self.scenario.ps_range)))
        elif fault == "drain ps" and self.servers:
            self.record(DrainAsked(f"ps:{rng.choice(sorted(self.servers))}", 30.0))
        living = [p for p in self.processes if isinstance(p, MirrorPs) and p.key.slot not in self.doomed]
        if not living:
            return
        ps = rng.choice(living)
        if fault == "stop ps briefly":
            ps.pause(rng.uniform(0.05, 0.9))
        elif fault == "cut ps from ps" and len(living) > 1:
            other = rng.choice([p for p in living if p is not ps])
            self.cut(ps.name, other.name, rng.random() < 0.6, rng.uniform(0.1, 3.0))
        elif fault == "tear mirror":
            whole = [m for m in ps.machine.complete if self.may_tear(m)]
            if whole:
                mirror = rng.choice(whole)
                kernel.say("FAULT", f"mirror {mirror} at {ps} is inconsistent")
                ps.mark_inconsistent(mirror)
        elif fault == "cut ps from master briefly":
            self.cut(ps.name, self.master.name, rng.random() < 0.7, rng.uniform(0.05, 0.8))
        elif fault in ("kill ps", "kill ps and worker", "kill ps and master", "kill two ps", "zombie ps"):
            if not self.may_lose(ps):
                return
            if fault == "zombie ps":  # declared lost, but it goes on, and its agent does not end it
                kernel.say("FAULT", f"{ps} is a zombie")
                self.cut(ps.name, "master", True, 6.0)
                self.home.pause(rng.uniform(0.0, 4.0))
                if rng.random() < 0.3:
                    ps.pause(rng.uniform(2.0, 4.0))
                return
            ps.exit(-9)
            if fault == "kill ps and worker" and worker is not None:
                worker.exit(-9)
            elif fault == "kill ps and master":
                self.kill_master()
            elif fault == "kill two ps":
                others = [p for p in living if p is not ps]
                if others and self.may_lose(other := rng.choice(others)):
                    kernel.after(rng.choice([0.0, 0.3, 1.0]) * rng.random(), self.kill_again_ps, other)

    def kill_again_ps(self, ps: MirrorPs) -> None:
        if self.lives.get(ps.me) is not ps:
            return  # of a job that is no more
        self.doomed.discard(ps.key.slot)
        if ps.alive and self.may_lose(ps):
            ps.exit(-9)

    def may_lose(self, ps: MirrorPs) -> bool:
        """Return whether every partition can still be had without this ps and those whose loss the master has not
        noticed yet. If so, its loss is noted."""
        brain = self.master.brain
        placement = brain.placement
        if not self.master.alive or placement is None or brain.job.over or self.master.outdated():
            return False
        placed = {(p.slot, p.incarnation) for p in placement.servers}
        self.doomed = {s for s in self.doomed if (s, self.doomed_lives[s]) in placed}
        if (ps.key.slot, ps.incarnation) not in placed:
            return False
        if not self._bearable(placement, {ps.key.slot, *self.doomed}):
            return False
        self.doomed.add(ps.key.slot)
        self.doomed_lives[ps.key.slot] = ps.incarnation
        return True

    def may_tear(self, mirror: int) -> bool:
        """Return whether every partition can still be had without this mirror, and those whose tear the master has not
        heard of. If so, it is noted."""
        placement = self.master.brain.placement
        if not self.master.alive or placement is None or self.master.brain.job.over or self.master.outdated():
            return False
        self.inconsistent.add(mirror)
        if self._bearable(placement, set(self.doomed)):
            return True
        self.inconsistent.remove(mirror)
        return False

    def _bearable(self, placement: Placement, gone: set[Slot]) -> bool:
        """Return whether every partition could be had without the ps ``gone`` and the torn mirrors."""
        partitions = self.master.brain.partitions
        for switched in (False, True):  # a mirror's "ready" may be on its way: then the partition goes to who is lost
            builder = partitions.builder()
            builder.living = {p.slot for p in placement.servers if p.slot in builder.living} - gone
            builder.drop([m for m in builder.mirrors if m.id in self.inconsistent])
            away = set(builder.missing)
            if switched:
                moves = [m for m in builder.mirrors if m.kind is MirrorKind.MOVE and m.at in gone]
                away |= {b for m in moves for b in m.members}
                # ... or a partition's: then who handed it over has dropped it when the loss is noticed.
                builder.missing = {b: p for b, p in builder.missing.items() if p.how is not How.HAND_OVER}
            builder.owner = [Slot(-1) if b in away else slot for b, slot in enumerate(builder.owner)]
            if not builder.living or (recover(builder, partitions.snapshot_of).lost and not self.may_begin_again()):
                return False
        return True

    def outlived(self, life: PeerKey, partition: PartitionId) -> bool:
        """Return whether the map does not name this life of a ps, which still runs, as the owner of ``partition``."""
        placement = self.master.brain.placement
        if placement is None:
            return False
        return placement.owner[partition] != life[0] or life not in {(p.slot, p.incarnation) for p in placement.servers}

    def may_begin_again(self) -> bool:
        """Whether nothing was released, and nothing is about to be: then what is lost may begin empty."""
        shards = self.master.brain.shards
        return not shards.released and not shards.releasing and self.master.brain.partitions.may_begin_again()

    def record(self, fact: FactType) -> None:
        if self.master.alive and self.kernel.now >= self.master.paused_until:
            self.master.record(fact)

    def cut(self, a: str, b: str, both: bool, seconds: float) -> None:
        self.net.partition(a, b, both)
        self.kernel.after(seconds, self.uncut, a, b)

    def uncut(self, a: str, b: str) -> None:
        self.net.cut -= {(a, b), (b, a)}

    def kill_node(self, node: str, back_s: float) -> None:
        agent = self.agents.get(node)
        if agent is None or not agent.alive:
            return
        agent.exit(-9)
        for child in list(agent.children.values()):
            child.exit(-9)
        if back_s >= 0:
            self.kernel.after(back_s, self.node_back, node)

    def node_back(self, node: str) -> None:
        if not self.agents[node].alive:
            self.new_agent(node)

    def restart_ps(self, ps: Ps) -> None:
        """It comes back at once, in a new life, with all its state; nobody saw it go."""
        if not ps.alive or not self.home.welcome:  # a hello of its agent under way would still tell of the old life
            return
        self.kernel.say(ps, "restarts with its state")
        ps.alive = False
        if ps.conn is not None:
            ps.conn.up = False
        self.processes.remove(ps)
        new = Ps(self, ps.key.slot, Incarnation(ps.incarnation + 1), ps.node)
        self.servers[ps.key.slot] = new
        self.processes.append(new)
        self.home.children[Role.PS, ps.key.slot] = new
        new.start()

    def fall_back(self, ps: Ps) -> None:
        """The new life's snapshot may be older than what the old life acknowledged, for shards that are not done."""
        rng, brain = self.kernel.rng, self.master.brain
        for partition, entry in ps.ledger.partitions.items():
            for shard, mark in entry.shards.items():
                key = ShardKey(shard)
                if key in self.truth.done or brain.shards.state(key) >= ShardState.DONE or rng.random() < 0.5:
                    continue
                start, _ = self.plan.bounds(split_key(key)[2])
                lo, hi = rng.randint(start, mark[0]), mark[0]
                if lo < hi:
                    self.truth.undoes(partition, key, lo, hi)
                    entry.fingerprint = (entry.fingerprint - batch_fingerprint(shard, lo, hi)) & (1 << 64) - 1
                    mark[0] = lo
                    if self.kernel.lines is not None:
                        self.kernel.say(ps, f"partition {partition} of shard {shard:x} fell back from {hi} to {lo}")

    def scale(self, count: int) -> None:
        if self.master.alive and self.kernel.now >= self.master.paused_until:
            self.master.record(ScaleAsked(Role.WORKER, count))

    def heal(self) -> None:
        """End all faults."""
        self.kernel.say("HEAL", "")
        self.healed = True
        net = self.net
        net.loss = net.duplicate = net.straggle = 0.0
        net.cut.clear()
        for process in (*self.processes, *self.agents.values(), self.master):
            self.paused_until = max(self.paused_until, process.paused_until)
            process.paused_until = min(process.paused_until, self.kernel.now)

    # ------------------------------------------------------------ the run

    def run(self) -> SimOutcome:
        kernel, scenario, net = self.kernel, self.scenario, self.net
        net.loss, net.duplicate, net.straggle = scenario.loss, scenario.duplicate, scenario.straggle
        for when, fault in scenario.faults:
            kernel.at(when, self.strike, fault)
        if scenario.master_every_s:
            kernel.after(scenario.master_every_s, self.kill_again)
        kernel.at(scenario.chaos_s, self.heal)
        kernel.run(scenario.chaos_s + scenario.deadline_s)
        if self.over is None:
            raise Violation(f"not finished {scenario.deadline_s:g} s after the last fault: {self.where()}")
        if self.over[0] != 0:
            raise Violation(f"the job failed: {self.over[1]}")
        self.truth.finished(self.at_rest() if scenario.mirrors else self.fingerprints())
        self.replay()
        return SimOutcome(
            self.seed,
            kernel.crc,
            kernel.events,
            self.brain_events,
            kernel.now,
            self.faults,
            self.masters,
            self.failovers,
            self.replayed,
            self.deaths,
            self.truth.applied,
            self.retried,
            self.late,
        )

    def run_traced(self, trace: list[str] | None) -> SimOutcome:
        """``trace``: lines are appended to it, also of a run that fails."""
        try:
            return self.run()
        finally:
            if trace is not None:
                trace += self.kernel.lines or []

    def fingerprints(self) -> dict[int, int]:
        return {b: ps.ledger.fingerprints()[b] for ps in self.servers.values() for b in ps.owned}

    def at_rest(self) -> dict[int, int]:
        """Once everything under way has come to its end: what each owner has is the truth's, and so are all mirrors of
        the map that are whole."""
        kernel, placement = self.kernel, self.master.brain.placement
        assert placement is not None
        if not self.healed:
            self.heal()
        kernel.stopped = False
        lag_s = self.scenario.lag_s * self.scenario.partitions if self.scenario.protect == "lag" else 0.0
        # (What came to a process that was paused is handled when its pause would have ended, also if it was healed.)
        kernel.run(max(kernel.now, self.paused_until) + 3.0 + lag_s)
        fingerprints: dict[int, int] = {}
        contents: dict[int, Partition] = {}
        of_dead: set[PartitionId] = set()  # partitions whose owner has died unnoticed
        lives = {p.slot: self.lives[p.slot, p.incarnation] for p in placement.servers}
        if not lives and len(placement.snapshots) == len(placement.owner):
            return self.at_rest_in_snapshots(placement)
        waiting: dict[PartitionId, MirrorPs] = {}
        for b, slot in enumerate(placement.owner):
            partition, ps = PartitionId(b), lives.get(slot)
            if ps is not None and not ps.machine.serves(partition):
                old = self.old_owner_waiting_with(partition, ps)
                if old is None and self.over is not None and ps.alive and self.asks_dead(partition, ps):
                    waiting[partition] = ps  # no master is left to say that the other one has died
                    continue
                ps = old
            if ps is None:
                raise Violation(f"partition {b} is not served by ps:{slot} at the end: {self.where()} {self.stuck}")
            contents[b] = ps.store.partitions[partition]
            of_dead |= set() if ps.alive else {partition}
        served = {b: contents[b] for b in contents.keys() - of_dead}
        for partition, ps in waiting.items():
            decoded = ps.store.decoded(partition, ps.machine.complete, served)
            if decoded is None:
                raise Violation(f"partition {partition} is nowhere at the end: {self.where()} {self.stuck}")
            contents[partition] = decoded
        for b, there in sorted(contents.items()):
            self.truth.at_rest(PartitionId(b), there)
            fingerprints[b] = there.ledger.fingerprint
        self.check_apart()
        for mirror in placement.mirrors:
            ps = lives.get(mirror.at)
            if ps is None or not ps.alive or mirror.id not in ps.machine.complete:
                continue  # who died unnoticed shortly before the end has what it had then
            members = {b: contents[b] for b in mirror.members}
            dead = of_dead & members.keys()
            if self.scenario.protect == "acked":
                ps.store.check_mirror(mirror.id, members, dead)
            elif not dead:
                ps.store.check_mirror(mirror.id, members)
        return fingerprints

    def at_rest_in_snapshots(self, placement: Placement) -> dict[int, int]:
        """Check what the checkpoint has, and return its fingerprints. A job that was suspended behind its last sample
        goes on and ends before its ps are there: nobody needs them."""
        fingerprints: dict[int, int] = {}
        for partition, checkpoint in placement.snapshots:
            snapshot = self.snapshot_of(checkpoint, partition)
            self.truth.at_rest(partition, snapshot)
            fingerprints[partition] = snapshot.ledger.fingerprint
        return fingerprints

    def old_owner_waiting_with(self, partition: PartitionId, owner: MirrorPs) -> MirrorPs | None:
        """Return the old owner of a partition that was on its way to ``owner`` when the job ended, if that alone is
        why ``owner`` does not serve it: it has died, or a third ps which it must ask, and no master is left to say so.
        The old owner keeps the partition until ``owner`` has it."""
        if self.over is None or (owner.alive and not self.asks_dead(partition, owner)):
            return None
        return next((ps for ps in self.lives.values() if ps.alive and ps.machine.keeps_for_next_owner(partition)), None)

    def asks_dead(self, partition: PartitionId, owner: MirrorPs) -> bool:
        """Return whether ``owner`` waits for the answer of a ps that has died, before it can serve the partition."""
        asked = [ask.peer for ask in owner.machine.asks() if ask.request.partition == partition]
        return not all(self.lives[peer].alive for peer in asked)

    def kill_again(self) -> None:
        if not self.healed:
            self.kill_master()
            self.kernel.after(self.scenario.master_every_s * (0.5 + self.kernel.random()), self.kill_again)

    def replay(self) -> None:
        """Replay the journal as bytes, through a fresh brain: the same state, from snapshots or from the start."""
        log = [event for event, _ in self.disk.log]
        fresh = self.parts.brain()
        for event in _events.decode(_encoder.encode(log)):
            fresh.handle(event)
        if fresh.snapshot() != self.master.brain.snapshot():
            raise Violation("replaying the journal from its start gives another state")

    def where(self) -> str:
        brain = self.master.brain
        epochs = [repr(e) for d in brain.shards.datasets for e in d.epochs]
        held = [f"{h.shard:x} by worker:{h.worker}" for h in brain.leases.values()]
        return f"{epochs}, leases {held}, processes {[str(p) for p in self.processes]}"

    def say_event(self, master: SimProcess, event: Event, instructions: list[Any]) -> None:
        """Write the trace of one brain step."""
        self.kernel.say(master, f"{event.sender}: {event.fact!r:.160}")
        for i in instructions:
            text = repr(i.answer) if isinstance(i, Reply) else str(i.decision) if isinstance(i, Note) else repr(i)
            self.kernel.say(master, f"   -> {text:.140}")


def simulate(
    seed: int,
    scenario: Scenario | None = None,
    parts: Parts = Parts(),
    trace: list[str] | None = None,
    validate: bool = True,
) -> SimOutcome:
    """Make one whole run. ``trace``: lines are appended to it. Raises Violation or AssertionError if a promise
    broke."""
    sim = Simulation(seed, scenario or random_scenario(seed), parts, trace is not None, validate)
    return sim.run_traced(trace)
