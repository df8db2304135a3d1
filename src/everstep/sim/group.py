"""Runs mode allreduce under virtual time: the real brain, watch, journal rules, machine of a group and state of
committed steps; the shells and the collectives are modelled.

A collective completes when every member has come and all links between them work; its result reaches each member on
its own, so that a death in between leaves some with it and some without. What each worker's state went through is one
number, which two states share only if the same steps made them.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, Literal

from everstep.allreduce.commits import Commits
from everstep.allreduce.group_machine import AbortGroup, Action, Connect, Counted, Follow, GroupMachine
from everstep.brain.brain import Brain
from everstep.brain.checkpoints import replica_start
from everstep.brain.events import (
    AnswerType,
    ChiefAsked,
    DrainAsked,
    EndOfData,
    Fenced,
    GroupAsked,
    GroupDue,
    Grouped,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    InstructionType,
    LossNote,
    PlanMade,
    PlanRegistered,
    PublishGroup,
    Refused,
    Registered,
    ReplicaWritten,
    Reply,
    StepsCommitted,
    Wait,
    Welcome,
    Yes,
    by_worker,
)
from everstep.brain.watch import HeartbeatWatch
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.decision import Decision
from everstep.model.group import Committed, Group, Position, StepSplit
from everstep.model.member import MemberKey, Role
from everstep.model.plan import Action as PlanAction
from everstep.model.plan import AdjustAccum, AdjustBatch, KillRestart
from everstep.model.plan import Plan as PolicyPlan
from everstep.model.reasons import LeaveReason
from everstep.model.snapshot import CheckpointFile, Manifest, ReplicaCopy
from everstep.monitor.steps import StepFold, StepLog, check_steps
from everstep.policies.step_split import StepCut as StepCut
from everstep.policies.step_split import cut_step
from everstep.sim.cluster import Child, Disk, SimAgent, SimMaster
from everstep.sim.kernel import Conn, Kernel, Network, SimProcess, Violation
from everstep.sim.scenario import Scenario
from everstep.sim.simulation import Parts, SimOutcome, Simulation

STALL_S = 1.0
NEWS_EVERY_S = 2.0
CONFIRM_EVERY_S = 0.2  # whether the journal has what was copied
TELL_S = 0.05
TELL_ANYWAY_S = 2.0
CONNECT_S = 5.0
LEAVE_S = 15.0
CLOSE_S = 60.0  # for the last reports, when the script is over
BATCH = 2
ALL_LOST = 0.2  # so often while a manifest is being written
BEHIND_S = 0.5  # at most, that a script does something behind its loop
END_LOOK_S = 0.1  # between two questions whether it may end
UPDATE = 0.4  # of a step's time, at most, is the script's iteration after the vote
BUSY = ("out", "computing", "updating", "behind")  # of its script, or between two steps: in no collective


class GroupScenario(Scenario, frozen=True, kw_only=True, rename={"partitions": "buckets"}):
    """Is as :class:`Scenario`; ``batch_s`` is the time of a step."""

    strategy: Literal["elastic", "fixed"] = "elastic"
    min_workers: int = 1
    logical: int = 0
    patient: bool = False  # max_restarts and the like never end the job
    at_entry: bool = False  # workers of several processes: a newcomer copies the state when it enters
    kill_chief: bool = False  # the first chief dies as soon as it knows that it is
    accumulate: int = 1  # steps whose gradients of tables are one step of these (``sim.hybrid``)
    lag_s: float = 0.0  # mirrors of the ps may be so far behind, and ps are lost (``sim.hybrid``)

    def spec(self) -> JobSpec:
        return JobSpec(
            name="sim",
            mode="allreduce",
            workers=self.workers,
            ps=0,
            strategy=self.strategy,
            min_workers=self.min_workers,
            logical_workers=self.logical,
            suspect_after_s=1.2,
            lost_after_s=2.5,
            checkpoint_every=f"{self.checkpoint_s:g}s" if self.checkpoint_s else "",
            max_restarts=100_000,
            quarantine_after=0,
        )


FAULTS = {
    "kill worker": 8,
    "kill two workers": 3,
    "kill all workers": 1,
    "kill worker and master": 2,
    "kill master": 4,
    "stop worker": 4,
    "stop master": 1,
    "stop agent": 1,
    "cut worker from master": 2,
    "cut worker from worker": 2,
    "cut worker off": 3,
    "cut node": 2,
    "kill node": 2,
    "second master": 1,
    "scale": 3,
    "term worker": 3,
    "drain": 2,
    "sever": 2,
    "lossy": 1,
}


DEAD = ("dead connection", "dead pair")
"""Two members do not reach each other any more, and nobody notices: in their present group; or until one is replaced.
(Struck in some seeds, beside the others.)"""


BLURRED = ("cut", "stop", "dead")
"""Faults (the first word) that may break a group, at once or later, though no worker ends."""

NOTICED_S = 0.05  # an end is noticed so soon by who is in its group


def group_scenario(seed: int) -> GroupScenario:
    """Return the scenario of ``seed``."""
    rng = random.Random(f"group {seed}")
    dead = random.Random(f"dead {seed}")
    second = rng.random() < 0.4
    names = [n for n in FAULTS if second or n not in ("cut node", "kill node")]
    weights = [FAULTS[n] for n in names]
    if rng.random() < 0.35:
        chosen = rng.sample(range(len(names)), 2)
        weights = [w if i in chosen else 0 for i, w in enumerate(weights)]
    chaos_s = rng.uniform(1.0, 8.0)
    count = rng.randint(0, 12)
    faults = sorted((round(rng.uniform(0.1, chaos_s), 3), name) for name in rng.choices(names, weights, k=count))
    checkpoint_s = dead.choice([0.2, 0.6]) if seed % 13 == 5 else 0.0
    if checkpoint_s:
        faults = sorted([*faults, (round(dead.uniform(0.5, chaos_s), 3), "kill all workers")])
    if seed % 13 == 8:
        faults = sorted([*faults, (round(dead.uniform(0.1, chaos_s), 3), dead.choice(DEAD))])
    workers = rng.randint(1, 4)
    logical = rng.choice([0, 0, 0, 6])
    return GroupScenario(
        workers=workers,
        ps=0,
        samples=rng.randint(20, 150),
        shard_samples=rng.choice([8, 15, 20]),
        epochs=rng.choice([1, 2, 3]),
        batch_s=rng.choice([0.02, 0.06, 0.15]),
        second_node=second,
        loss=rng.choice([0.0, 0.0, 0.01]),
        duplicate=rng.choice([0.0, 0.02, 0.1]),
        fsync_s=rng.choice([0.001, 0.004, 0.03]),
        restart_s=rng.choice([0.01, 0.05, 0.5]),
        snapshot_every=rng.choice([10, 40, 10_000]),
        chaos_s=chaos_s,
        heal_s=60.0,
        faults=tuple(faults),
        strategy="elastic" if logical else rng.choice(["elastic", "elastic", "fixed"]),
        min_workers=rng.choice([1, 1, min(2, workers)]),
        logical=logical,
        checkpoint_s=checkpoint_s,
        straggle=0.2 if seed % 9 == 8 else 0.0,
        vouch=seed % 4 == 3,
        at_entry=seed % 23 == 22 and not logical,
        kill_chief=seed % 46 == 22,
    )


MASK = (1 << 64) - 1


@lru_cache(maxsize=64)  # every member of a group asks for the same
def range_fingerprint(epoch: int, lo: int, hi: int) -> int:
    """Return what training these positions adds to a state's print, in whatever steps."""
    return sum(hash((epoch, position)) & MASK for position in range(lo, hi))


# ---------------------------------------------------------------- collectives


def reduced(kind: str, values: list[Any]) -> list[Any]:
    """Return what every member computes from all values, once."""
    if kind in ("vote", "last vote"):
        return [max(column) for column in zip(*values, strict=True)]
    if kind == "reduce" and len({(c.first, c.epoch, c.lo, c.hi, cut.micros) for c, cut in values}) > 1:
        raise Violation(f"members reduce different steps: {values}")
    if kind == "agree":
        states = [state for state in values if state[0] is not None]
        newest = max(states, key=lambda s: s[0].step, default=None)
        if newest is not None and len({s[1:] for s in states if s[0].step == newest[0].step}) > 1:
            raise Violation(f"states of one step differ: {states}")
        return [newest]
    return values


class Ring:
    """Is one attempt to connect one generation, and the collectives on it."""

    def __init__(self, sim: GroupSimulation, group: Group) -> None:
        self.sim, self.group = sim, group
        self.there: dict[int, GroupWorker] = {}
        self.connected = self.broken = self.dead = False
        self.broken_by: GroupWorker | None = None
        self.posted: dict[tuple[str, int], dict[int, Any]] = {}
        self.numbers: dict[tuple[int, str], int] = {}

    def join(self, rank: int, worker: GroupWorker, attempt: int) -> None:
        if self.broken:
            worker.later(0.01, worker.connect_failed, self, attempt)
            return
        self.there[rank] = worker
        worker.later(CONNECT_S, worker.connect_failed, self, attempt)
        if len(self.there) == self.group.size:
            self._connect(attempt)

    def _connect(self, attempt: int) -> None:
        if self.broken:
            return
        if not self._whole():
            self.sim.kernel.after(0.05, self._connect, attempt)
            return
        self.connected = True
        for worker in self.there.values():
            worker.later(0.005 + 0.02 * self.sim.kernel.random(), worker.connect_done, self, attempt)

    def _whole(self) -> bool:
        """Return whether every link between two members works."""
        if self.dead:
            return False
        if not self.sim.net.cut and not self.sim.dead_pairs:
            return True
        reaches, there = self.sim.net.reaches, list(self.there.values())
        names = {worker.name for worker in there}
        if any(pair <= names for pair in self.sim.dead_pairs):
            return False
        return all(reaches(a, b) for a in there for b in there if a is not b)

    def post(self, kind: str, rank: int, value: Any) -> None:
        """One member comes to its next collective of this kind; ``on_result`` brings all values by rank."""
        number = self.numbers.get((rank, kind), 0)
        self.numbers[rank, kind] = number + 1
        op = self.posted.setdefault((kind, number), {})
        op[rank] = value
        if self.broken and rank in self.there:  # it broke while we were not in it yet: nobody would tell us again
            self._notice(self.there[rank], self.broken_by)
        if len(op) == self.group.size:
            self._complete(kind, number)

    def _complete(self, kind: str, number: int) -> None:
        if self.broken:
            return
        if not self._whole():
            self.sim.kernel.after(0.05, self._complete, kind, number)
            return
        op = self.posted.pop((kind, number))
        values = reduced(kind, [op[rank] for rank in range(self.group.size)])
        spread, straggle = self.sim.kernel.random, self.sim.scenario.straggle
        for worker in self.there.values():
            delay_s = 0.0005 + 0.003 * spread()
            if straggle and spread() < straggle:
                delay_s += 0.6 * spread()  # sent again and again; what the others know meanwhile, they may tell
            worker.later(delay_s, worker.on_result, self, kind, values)

    def fail(self, by: GroupWorker | None) -> None:
        """A member died or cut it: nothing of it comes any more, and everybody it reaches notices."""
        self.broken, self.broken_by = True, by
        for worker in self.there.values():
            if worker is not by:
                self._notice(worker, by)

    def _notice(self, worker: GroupWorker, by: GroupWorker | None) -> None:
        if by is not None and not self.sim.net.reaches(by, worker):
            self.sim.kernel.after(0.2, self._notice, worker, by)
            return
        worker.later(0.001 + 0.014 * self.sim.kernel.random(), worker.on_failed, self)


# ---------------------------------------------------------------- the master


class GroupMaster(SimMaster):
    """Besides: groups go to every worker, a stall is looked into, and what is due is said."""

    commit_s = 1.0

    def carry_out(
        self, instructions: list[InstructionType], conn: Conn | None, handler: Any, args: tuple[Any, ...], event: Any
    ) -> None:
        super().carry_out(instructions, conn, handler, args, event)
        for i in instructions:
            if isinstance(i, LossNote) and i.key.role is Role.WORKER:
                sim: Any = self.sim
                before = self.brain.state.groups.generations - any(isinstance(j, PublishGroup) for j in instructions)
                sim.lost[int(i.key.slot), i.incarnation] = before
            if isinstance(i, PublishGroup):
                if self.brain.state.groups.waits.apart:  # the brain helps, but members must not get there
                    raise Violation("members of different groups waited for each other")
                for other in list(self.conns.values()):
                    if isinstance(other.client, GroupWorker):
                        self.net.to_client(other, other.client.on_group, other, i.group)

    def tick(self) -> None:
        super().tick()
        if self.alive and 0 < self.brain.state.groups.timing.due_at <= self.now():
            self.record(GroupDue())

    def commit(self, manifest: Manifest) -> None:
        begins = self.committing != manifest.checkpoint
        super().commit(manifest)
        sim: Any = self.sim
        if begins and self.kernel.now < sim.scenario.chaos_s and self.kernel.random() < ALL_LOST:
            sim.strike("kill all workers")

    def tick_checkpoints(self, now: float) -> None:
        writing = self.brain.checkpoints.writing
        if writing is not None or self.brain.state.groups.step > replica_start(self.brain.checkpoints)[0].step:
            super().tick_checkpoints(now)

    def order_snapshots(self) -> None:
        writing, group = self.brain.checkpoints.writing, self.brain.state.groups.group
        if writing is not None and writing.manifest is None and group is not None and group.members:
            self.snapshots_asked_at = self.now()
            writer = self.brain.members.workers.get(writing.writer)
            slot = writer.member.slot if writer is not None and writer.running else group.members[0].slot
            self.order(("worker", slot), "save", writing.number)

    def on_may_end(self, conn: Conn, worker: Slot, life: Incarnation) -> None:
        client: Any = conn.client
        self.net.to_client(conn, client.on_may_end, conn, self.brain.may_end(worker, life))

    def on_stalled(
        self, conn: Conn, worker: Slot, life: Incarnation, generation: int, step: int, waited: float
    ) -> None:
        now = self.now()
        silent = self.watch.stalled(self.brain, now)
        client: Any = conn.client
        fact = GroupStalled(generation, step, waited, silent)
        self.record(fact, conn, client.on_grouped, (), by_worker(worker, life))


class GroupAgent(SimAgent):
    def spawn(self, role: Role, slot: Slot, incarnation: Incarnation) -> None:
        if self.starting.get((role, slot)) != incarnation:
            return
        del self.starting[role, slot]
        sim: Any = self.sim
        child = sim.worker_class(sim, slot, incarnation, self.node)
        self.children[role, slot] = child
        sim.processes.append(child)
        self.kernel.say(self, f"started {child.name}")
        child.start()


# ---------------------------------------------------------------- a worker


class GroupWorker(Child):
    """Does what ``allreduce.session`` does, driven by events. ``chain``, ``fingerprint``: of the state: of the steps
    that made it, and of the samples that are in it, whatever the steps."""

    tell_s = TELL_S
    reports_agreed: bool | None = None
    """Members say that their group has met, as ``allreduce.session`` does. None: but in every fourth seed, as if that
    came late; some planted bugs show there alone."""
    copies_the_end = True

    def __init__(self, sim: GroupSimulation, slot: Slot, incarnation: Incarnation, node: str) -> None:
        super().__init__(sim, f"worker:{slot}.{incarnation}", node)
        self.gsim = sim
        self.key = MemberKey(Role.WORKER, slot)
        self.incarnation = incarnation
        self.machine = sim.machine_class(slot, incarnation)
        self.commits = Commits()
        self.position, self.chain, self.fingerprint, self.has_state = Position(), 0, 0, False
        self.lineage: int | None = None
        self.rings: dict[int, Ring] = {}  # ready, by generation
        self.rank = self.announced_to = -1
        self.building: Ring | None = None
        self.ring: Ring | None = None  # of the present group
        self.phase = "out"
        self.agreed_at = self.reported_agreed = 0
        self.agreed_in: int | None = None  # line
        self.resolved = self.agreed = self.formed = self.parted = False
        self.step: tuple[Committed, StepCut] | None = None  # whose gradients are, or are being, reduced
        self.begun = 0.0, -1  # when it began to compute last, and which step
        self.ready = self.entered = self.over = self.closing = False
        self.chief = self.asked_chief = self.done_reported = False
        self.chief_asks = 0
        self.behind_since = 0.0
        self.leaving_since = -1.0
        self.synced = 0
        self.waits_since = self.broke_at = self.stalled_at = self.connecting_since = 0.0
        self.asked_at = self.telling = self.untold_since = 0.0
        self.connecting = 0  # the group that ``connecting_since`` is about
        self.log: list[Committed] = sim.logs.setdefault((slot, incarnation), [])
        self.follows = 0
        self.save = self.writing = self.copies = self.committed_everywhere = (
            0  # checkpoints: ordered, being written; steps
        )
        self.later(0.05 + 0.2 * sim.kernel.random(), self.attend)

    # ------------------------------------------------------------ the master

    def hello(self, conn: Conn) -> None:
        server: Any = conn.server
        node = NodeId(self.node)
        self.net.to_server(conn, server.on_hello_member, conn, self.key, self.incarnation, node, None, ())

    def send_beat(self, conn: Conn) -> None:
        server: Any = conn.server
        self.net.to_server(conn, server.on_beat, conn, self.key, self.incarnation, ())

    def on_welcome(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
        elif isinstance(answer, Welcome) and self.welcomed(conn):
            self.telling = 0.0
            if not self.entered:
                self.call(PlanRegistered(self.sim.plan), self.on_registered, ())
            else:
                self.ask()
                self.say_synced()

    @property
    def me(self) -> tuple[Slot, Incarnation]:
        return self.key.slot, self.incarnation

    def on_registered(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Registered):
            self.entered = True
            self.ask()
        elif isinstance(answer, Fenced):
            self.exit(4)

    def ask(self) -> None:
        self.asked_at = self.kernel.now
        position = self.position if self.has_state else None
        self.call(GroupAsked(0, self.sim.scenario.epochs, BATCH, None, position), self.on_grouped, ())

    def again(self) -> None:
        if not self.entered:
            self.call(PlanRegistered(self.sim.plan), self.on_registered, ())
        elif self.machine.newest is None:
            self.ask()

    def on_grouped(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
        elif isinstance(answer, Grouped) and answer.group is not None:
            if answer.group.lineage == self.lineage:  # what is in the journal, whoever told it
                self.commits.confirm(answer.position.step - 1)
            self.on_group(conn, answer.group)
        elif isinstance(answer, EndOfData):
            self.over = True
            self.pump()

    def on_group(self, conn: Conn, group: Group) -> None:
        if self.closing:
            newest = self.machine.newest
            self.machine.newest = group if newest is None or group.generation > newest.generation else newest
            return
        self.do(self.machine.published(group))
        self.pump()

    def on_order(self, conn: Conn, what: str, args: tuple[Any, ...]) -> None:
        if what == "save" and args[0] != self.writing:
            self.save = args[0]

    # ------------------------------------------------------------ checkpoints

    def copy(self) -> None:
        """Write what is ordered, between two steps in the background."""
        number, self.save, self.writing = self.save, 0, self.save
        self.copies += 1
        path = f"images/{number:06d}/replica-{self.key.slot}.{self.incarnation}-{self.copies}.rep"
        self.gsim.states[path] = self.position, self.chain, self.fingerprint
        snapshot = ReplicaCopy(
            position=self.position, file=CheckpointFile(path, 1, ""), lineage=self.lineage or 0, parameters=1
        )
        self.later(0.02 + 0.3 * self.kernel.random(), self.written, number, snapshot)

    def written(self, number: int, snapshot: ReplicaCopy) -> None:
        if self.committed_everywhere < snapshot.position.step:
            self.later(0.05, self.written, number, snapshot)
            return
        if self.writing == number:  # (until it is answered)
            self.call(ReplicaWritten(number, snapshot), self.on_written, (number, snapshot))
            self.later(1.0, self.written, number, snapshot)

    def on_written(self, conn: Conn, number: int, snapshot: ReplicaCopy, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
        elif not isinstance(answer, Refused) and self.writing == number:
            self.writing = 0

    def settle(self, before: int) -> None:
        present = self.machine.present
        self.commits.settle(before, present.generation if present is not None else 0)
        self.committed_everywhere = max(self.committed_everywhere, self.savable(before))

    def savable(self, before: int) -> int:
        """Return below which step checkpoints may be, where everybody has every step below ``before``."""
        return before

    def terminate(self) -> None:
        """Do what SIGTERM makes it do: leave the group first; without one, end."""
        if self.phase == "behind":
            if not self.closing:
                self.exit(143)
        elif self.leaving_since < 0 and self.entered and not self.closing:
            self.leaving_since = self.kernel.now
            self.call(GroupLeft(LeaveReason.ASKED), self.on_grouped, ())
            self.pump()
        elif not self.closing and not self.entered:
            self.exit(143)

    # ------------------------------------------------------------ what the machine wants

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Connect):
                self.connect_to(action.group, action.attempt)
            elif isinstance(action, AbortGroup):
                self.cut(action.generation)
            elif isinstance(action, Follow):
                self.synced = 0
                self.follows += 1
                if self.gsim.at_entry and not (action.group.over and self.copies_the_end):
                    if not self.has_state:
                        self.later(0.0, self.enter_without)
                    continue
                self.later(0.02 + 0.2 * self.kernel.random(), self.fetch, action.group, self.follows)

    def connect_to(self, group: Group, attempt: int) -> None:
        ring = self.gsim.ring(group, attempt)
        if self.machine.idle:
            if group.generation != self.connecting:  # each group has connections of its own, and waits of its own
                self.connecting, self.connecting_since = group.generation, 0.0
            self.connecting_since = self.connecting_since or self.kernel.now
        if group.size == 1:
            ring.there[0] = self
            self.rings[group.generation] = ring
            self.do(self.machine.connected(group.generation, attempt))
            return
        self.building = ring
        ring.join(group.rank(*self.me), self, attempt)

    def connect_done(self, ring: Ring, attempt: int) -> None:
        if self.building is not ring or ring.broken:
            return
        self.building = None
        self.rings[ring.group.generation] = ring
        self.do(self.machine.connected(ring.group.generation, attempt))
        self.pump()

    def connect_failed(self, ring: Ring, attempt: int) -> None:
        if self.building is not ring:
            return
        self.building = None
        ring.fail(self)
        self.do(self.machine.failed(ring.group.generation, attempt))

    def cut(self, generation: int) -> None:
        for ring in (self.building, self.rings.get(generation), self.ring):
            if ring is not None and ring.group.generation == generation and not ring.broken:
                ring.fail(self)
        if self.building is not None and self.building.group.generation == generation:
            self.building = None
        self.rings.pop(generation, None)
        if self.ring is not None and self.ring.group.generation == generation:
            self.interrupted()

    def on_failed(self, ring: Ring) -> None:
        """Handle that a collective, or an attempt to connect, fails."""
        if ring is self.building:
            self.building = None
            attempt = next(a for (g, a), r in self.gsim.rings.items() if r is ring)
            self.do(self.machine.failed(ring.group.generation, attempt))
        elif ring is self.ring:
            if ring.group.generation == (self.machine.present.generation if self.machine.present else 0):
                self.broke_at = self.broke_at or self.kernel.now
                self.do(self.machine.broke())
            self.interrupted()
        self.pump()

    def interrupted(self) -> None:
        """Get out of the collective in flight; a computation goes on, for nothing."""
        if self.phase not in BUSY:
            self.phase = "out"
            self.waits_since = 0.0
            self.later(0.0, self.pump)

    # ------------------------------------------------------------ the copy of a newcomer

    def fetch(self, group: Group, number: int) -> None:
        """Copy the state of a member, as of now; what it misses meanwhile it gets when it enters."""
        if number != self.follows or not self.outside or self.closing or self.phase == "behind":
            return
        for m in group.members:
            source = self.gsim.worker(m.slot, m.incarnation)
            if source is not None and source.has_state and self.net.reaches(self, source):
                if source.paused_until > self.kernel.now:
                    continue
                self.position, self.chain, self.fingerprint = source.position, source.chain, source.fingerprint
                self.has_state, self.lineage = True, source.lineage
                self.synced = self.machine.newest.generation if self.machine.newest is not None else 0
                if self.trained():
                    self.ask()  # its loop is over as soon as the journal has what it copied
                else:
                    self.say_synced()
                return
        self.later(0.2, self.fetch, group, number)

    def enter_without(self) -> None:
        """A state that cannot be followed: it is copied in the group, while the others wait."""
        if self.machine.newest is not None and not self.closing:
            self.synced = self.machine.newest.generation
            self.say_synced()

    def trained(self) -> bool:
        """Return whether the state that it copied is that of the end."""
        return self.has_state and self.outside and self.next_cut(1) is None

    @property
    def outside(self) -> bool:
        """Whether it is in no group, or was put out of one that it had just entered."""
        m = self.machine
        return m.present is None or (not m.whole and not m.member_of(m.newest))

    def say_synced(self) -> None:
        if self.synced and self.machine.present is None and not self.closing and not self.trained():
            self.call(GroupSynced(self.synced), self.on_grouped, ())

    # ------------------------------------------------------------ the loop

    def next_cut(self, size: int) -> StepCut | None:
        return self.gsim.cut_of(self.position, size, self.machine.split)

    def pump(self) -> None:
        """Go on as far as possible without waiting."""
        m = self.machine
        if self.phase != "out" or self.closing or not self.alive:
            return
        if m.pending is not None and m.excluded and not m.whole and m.entry is None:
            m.pending = None  # the others decide without us
            self.step = None
        if m.parting and self.ring is not None and not self.ring.broken and not self.parted:
            self.post("part", self.position.step)  # so that who goes can tell the last step
            return
        entry = m.entry
        if entry is not None:
            self.parted = False
            m.enter(entry)
            self.rank = entry.rank(*self.me)
            self.ring = self.rings.pop(entry.generation)
            self.resolved = self.agreed = False
            self.broke_at = self.connecting_since = 0.0
        leaving = self.leaving_since >= 0
        if m.let_go and entry is None:
            self.leave()
            return
        if m.present is None or not m.whole or (m.outside and entry is None):
            late = leaving and self.kernel.now - self.leaving_since > LEAVE_S
            if leaving and (m.outside or m.present is None or late):
                self.leave()
            elif self.over and not m.member_of(m.newest):
                self.finish()
            return
        group, ring = m.present, self.ring
        assert ring is not None
        late = leaving and self.kernel.now - self.leaving_since > LEAVE_S
        if leaving and late:
            self.leave()
            return
        if not self.resolved:
            void = self.lineage is not None and self.lineage != group.lineage
            self.post("resolve", m.word(self.position.step if self.has_state and not void else -1, 0))
        elif not self.agreed:
            if self.lineage is not None and self.lineage != group.lineage:
                self.has_state = False
            self.post("agree", (self.position if self.has_state else None, self.chain, self.fingerprint))
        elif self.save:
            self.copy()
            self.pump()
        elif not group.hold:
            cut = self.next_cut(group.size)
            if not self.surveyed(cut):
                return
            cut = self.next_cut(group.size)  # (perhaps a shorter one)
            if cut is None:
                self.post("last vote", m.ballot(self.position.step, 0, False, self.commits.confirmed))
                return
            new = Committed(group.generation, self.position.step, self.position.step, 0, cut.epoch, cut.lo, cut.hi)
            self.step = new, cut
            self.gsim.begins(self, new)
            self.phase = "computing"
            self.later(self.sim.scenario.batch_s * (0.7 + 0.6 * self.kernel.random()), self.computed, ring)

    def surveyed(self, cut: StepCut | None) -> bool:
        """Return whether the step may begin (see ``sim.hybrid``); if not, whoever can say so pumps."""
        return True

    def gradients(self, step: tuple[Committed, StepCut]) -> None:
        """They are computed: reduce them."""
        self.post("reduce", step)

    def post(self, phase: str, value: Any) -> None:
        assert self.ring is not None and self.machine.present is not None
        self.phase, self.waits_since = phase, self.kernel.now
        self.ring.post(phase, self.rank, value)

    def computed(self, ring: Ring) -> None:
        self.phase = "out"
        if ring is not self.ring or not self.machine.whole or ring.broken:
            self.step = None  # it will be done again
            self.pump()
            return
        assert self.step is not None
        self.gradients(self.step)

    def on_result(self, ring: Ring, kind: str, values: list[Any]) -> None:
        if ring is not self.ring or self.phase != kind or not self.machine.whole:
            return
        self.waits_since = 0.0
        self.phase = "out"
        m = self.machine
        if kind == "resolve":
            self.resolved = True
            self.formed = all(word[0] < 0 for word in values)
            void = self.lineage is not None and m.present is not None and self.lineage != m.present.lineage
            if m.resolve(values) and not void:
                self.apply()
            self.step = None
        elif kind == "part":
            self.settle(self.position.step)
            self.parted = True
        elif kind == "agree":
            self.agree(values)
        elif kind == "reduce":
            assert self.step is not None
            if not m.whole:
                self.step = None
            else:
                self.post("vote", m.ballot(self.step[0].first, self.step[0].hi, False, self.commits.confirmed))
                return
        else:
            tally, actions = m.count(values)
            if tally.counted is not Counted.AGREED:
                raise Violation(f"a vote without agreement: {tally}")
            self.commits.confirm(tally.confirmed)
            if tally.behind and self.kernel.now - self.asked_at > NEWS_EVERY_S:
                self.ask()
            if kind == "last vote":
                self.do(actions)
                self.settle(self.position.step)
                self.finish()
                return
            assert self.step is not None
            self.settle(self.step[0].first)
            self.apply()
            self.do(actions)
            self.phase = "updating"  # the rest of the script's iteration, while news come
            self.later(self.sim.scenario.batch_s * UPDATE * self.kernel.random(), self.updated)
            return
        self.pump()

    def updated(self) -> None:
        self.phase = "out"
        self.pump()

    def apply(self) -> None:
        """The step is committed here."""
        assert self.step is not None and self.lineage is not None
        c = self.step[0]
        self.step = None
        if not self.has_state or self.position.step != c.first:
            raise Violation(f"{self} applies step {c.first} to a state at {self.position}")
        self.gsim.applies(self.lineage, c)
        before, self.chain = self.chain, hash((self.chain, c.first, c.epoch, c.lo, c.hi))
        self.gsim.history[self.chain] = before, c
        self.fingerprint = (self.fingerprint + range_fingerprint(c.epoch, c.lo, c.hi)) & MASK
        self.position = Position(c.first + 1, 0, c.epoch, c.hi)
        self.commits.done(c)
        if self.machine.present is not None and self.machine.present.size == 1:
            self.settle(c.first + 1)

    def agree(self, values: list[Any]) -> None:
        group = self.machine.present
        assert group is not None
        if values[0] is None:
            self.position, self.chain, self.fingerprint, self.has_state = group.begin, 0, 0, True
            if group.restore:
                found = self.gsim.manifests[group.restore].replica
                assert found is not None
                position, self.chain, self.fingerprint = self.gsim.states[found.file.path]
                if position.step != group.begin.step:
                    raise Violation(f"{group} begins at {group.begin}, but its checkpoint is at {position}")
            elif group.begin != Position():
                raise Violation(f"{group} begins at {group.begin}, and there is no checkpoint")
        else:
            self.position, self.chain, self.fingerprint = values[0]
            self.has_state = True
        if self.lineage != group.lineage:
            self.committed_everywhere = 0
            self.commits.begin(self.position.step if self.formed else 0)
        self.lineage, self.agreed, self.synced = group.lineage, True, 0
        self.agreed_at, self.agreed_in = self.position.step, self.lineage
        self.settle(self.position.step)

    # ------------------------------------------------------------ the ends

    def leave(self) -> None:
        m = self.machine
        if not (m.let_go or m.outside or m.present is None):
            self.gsim.ends.append(self.kernel.now)  # it could not wait any longer: a loss to the others
        self.closing = True
        self.later(0.01, self.end, 143, self.kernel.now)

    def finish(self) -> None:
        """The loop is over; the script goes on behind it."""
        self.phase, self.chief = "behind", False
        self.behind_since = self.kernel.now
        self.ask_chief()
        self.later(BEHIND_S * self.kernel.random(), self.behind)

    def ask_chief(self) -> None:
        if self.phase == "behind":
            self.chief_asks += 1  # (an answer to the question before was lost with its connection)
            self.call(ChiefAsked(self.chief_asks), self.on_chief, (self.chief_asks,))

    def on_chief(self, conn: Conn, number: int, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
        elif isinstance(answer, Yes) and self.phase == "behind" and number == self.chief_asks:
            self.asked_chief, self.chief = True, answer.yes
            if answer.yes and self.gsim.kill_chief:
                self.gsim.kill_chief = False
                self.later(0.0, self.exit, -9)

    def behind(self) -> None:
        if not self.asked_chief:
            self.ask_chief()
            self.later(0.1, self.behind)
            return
        if self.chief:
            self.gsim.saves(self)
        self.closing = True
        self.later(0.01, self.end, 0, self.kernel.now)

    def on_may_end(self, conn: Conn, may: bool) -> None:
        if may and self.done_reported:
            self.exit(0)

    def end(self, status: int, since: float) -> None:
        """Tell what is untold, then go."""
        newest = self.machine.newest
        void = newest is not None and self.lineage is not None and newest.lineage > self.lineage
        if void and (self.commits.waiting or (status == 0 and not self.done_reported)):
            self.exit(4)  # they are done again: not the end
            return
        if self.commits.waiting and self.kernel.now - since < CLOSE_S:
            self.tell(True)
            self.later(0.02, self.end, status, since)
            return
        if status == 0:
            if self.save:
                self.copy()
            if self.done_reported and self.conn is not None and self.welcome:
                server: Any = self.conn.server
                self.net.to_server(self.conn, server.on_may_end, self.conn, *self.me)
            elif not self.done_reported:
                self.gsim.finished(self)
                copied = self.agreed_at if self.lineage == self.agreed_in else 0
                self.call(GroupLeft(LeaveReason.DONE, self.lineage or 0, copied), self.on_done_reported, ())
            self.later(END_LOOK_S, self.end, status, since)
            return
        self.exit(status)

    def on_done_reported(self, conn: Conn, answer: AnswerType) -> None:
        if isinstance(answer, Fenced | Refused):
            self.exit(4)
        elif not isinstance(answer, Wait):
            self.done_reported = True

    def exit(self, status: int) -> None:
        if self.alive:
            if not self.closing:
                self.gsim.ends.append(self.kernel.now)
            super().exit(status)
            for ring in (self.building, self.ring, *self.rings.values()):
                if ring is not None and not ring.broken:
                    ring.fail(None)

    # ------------------------------------------------------------ beside the loop

    def attend(self) -> None:
        now = self.kernel.now
        self.later(self.tell_s if self.commits.waiting else 0.25, self.attend)
        if self.closing:
            return
        self.tell(False)
        m = self.machine
        lost = m.present is not None and not m.whole
        if lost and self.broke_at and now - self.broke_at > NEWS_EVERY_S:
            self.do(m.reconnect())
        often = CONFIRM_EVERY_S if self.trained() else NEWS_EVERY_S
        if self.entered and not m.member_of(m.newest) and now - self.asked_at > often:
            self.ask()
            self.say_synced()
        if self.leaving_since >= 0 and now - self.asked_at > NEWS_EVERY_S:
            self.asked_at = now
            self.call(GroupLeft(LeaveReason.ASKED), self.on_grouped, ())
        self.stall(now, lost)
        self.pump()

    def stall(self, now: float, lost: bool) -> None:
        m = self.machine
        group = m.newest if m.idle else m.present
        since = self.waits_since if self.phase not in BUSY else self.broke_at if lost else 0.0
        since = since or (self.connecting_since if m.idle and self.building is not None else 0.0)
        if group is None or not since or now - since < STALL_S or now - self.stalled_at < STALL_S:
            return
        self.stalled_at = now
        known = m.newest.generation if m.newest is not None and not lost else 0
        gone = self.gsim.lost
        if self.me not in gone and any(gone.get((x.slot, x.incarnation), known) < known for x in group.members):
            raise Violation(f"{self} was told {m.newest}, and waits in {group} for one that is lost")
        conn = self.conn
        if conn is not None and self.welcome:
            server: Any = conn.server
            waited = now - since
            self.net.to_server(conn, server.on_stalled, conn, *self.me, group.generation, self.position.step, waited)

    @property
    def pushed_to(self) -> int:
        """Of steps below it the ps have everything."""
        return self.agreed_at

    def report_agreed(self) -> None:
        """Do as ``allreduce.session`` does."""
        group = self.machine.present
        if group is None or not self.agreed or group.generation == self.reported_agreed or group.size == 1:
            return
        if self.commits.confirmed >= self.agreed_at - 1 and self.pushed_to >= self.agreed_at:
            self.reported_agreed = group.generation
            self.call(GroupSynced(group.generation), self.on_grouped, ())

    def tell(self, everybody: bool) -> None:
        now = self.kernel.now
        if self.reports_agreed or (self.reports_agreed is None and self.sim.seed % 4):
            self.report_agreed()
        self.log += self.commits.to_log()
        steps = self.commits.to_tell()
        if not steps:
            if self.commits.waiting and now - self.asked_at > 1.0:
                self.ask()  # is there a gap before ours? whoever has those steps may be gone, and have told them
            self.untold_since = 0.0
            return
        if self.commits.confirmed != self.announced_to:
            self.announced_to, self.untold_since = self.commits.confirmed, now
        self.untold_since = self.untold_since or now
        present = self.machine.present
        first = present is not None and self.rank == 0
        if now - self.telling < 1.0 or not (first or everybody or now - self.untold_since > TELL_ANYWAY_S):
            return
        self.telling = now
        self.call(StepsCommitted(steps), self.on_announced, (steps[-1].last, self.lineage))

    def on_announced(self, conn: Conn, last: int, lineage: int | None, answer: AnswerType) -> None:
        if isinstance(answer, Fenced):
            self.exit(4)
            return
        self.telling = 0.0
        if lineage == self.lineage:
            self.commits.confirm(last)


# ---------------------------------------------------------------- one run


class GroupSimulation(Simulation):
    """See ``sim.simulation.Simulation``."""

    def __init__(
        self,
        seed: int,
        scenario: GroupScenario,
        parts: Parts = Parts(),
        trace: bool = False,
        validate: bool = True,
        worker: type[GroupWorker] = GroupWorker,
        machine: type[GroupMachine] = GroupMachine,
    ) -> None:
        self.seed, self.scenario, self.parts, self.validate = seed, scenario, parts, validate
        self.worker_class, self.machine_class = worker, machine
        self.kernel = Kernel(seed, trace)
        self.net = Network(self.kernel)
        self.spec, self.plan = scenario.spec(), scenario.plan()
        self.disk = Disk()
        self.processes = []
        self.rings: dict[tuple[int, int], Ring] = {}
        self.logs: dict[tuple[Slot, Incarnation], list[Committed]] = {}
        self.applied = 0
        self.history: dict[int, tuple[int, Committed]] = {}  # by a state's chain: the one before, and the step between
        self.manifests = {}
        self.states: dict[str, tuple[Position, int, int]] = {}  # mark, chain, print: files of checkpoints
        self.dead_pairs: list[set[str]] = []
        self.lost: dict[tuple[int, Any], int] = {}  # slot, incarnation: the last generation before it was declared so
        self.last_cut: tuple[tuple[Position, int, StepSplit, int], StepCut | None] | None = None
        self.ended_well: list[tuple[int, int, int]] = []  # origin, step, print
        self.saved: list[tuple[int, int, int]] = []  # by a chief: the same
        self.ended_with: list[tuple[int, int]] = []  # origin, chain
        self.ends: list[float] = []  # when a worker ended that had not left its group
        self.at_entry, self.kill_chief = scenario.at_entry, scenario.kill_chief
        self.blurred = False  # a fault has struck that may break a group without an end
        self.over = None
        self.healed = False
        self.paused_until = 0.0  # of all processes, had they not been healed
        self.faults = self.masters = self.failovers = self.replayed = self.brain_events = self.deaths = self.retried = 0
        self.master = self.new_master()
        self.home = GroupAgent(self, "node0", 0, 0)
        self.agents = {"node0": self.home}
        self.home.start()
        if scenario.second_node:
            self.new_agent("node1")

    # ------------------------------------------------------------ what happens

    def new_master(self) -> SimMaster:
        self.masters += 1
        master = self.master = GroupMaster(self, self.masters)
        return master

    def new_agent(self, node: str) -> None:
        agent = self.agents[node] = GroupAgent(self, node, 2, 0)
        agent.start()

    def process_ended(self, process: Any, status: int) -> None:
        self.kernel.say(process, f"ended with {status}")
        if isinstance(process, SimAgent):
            return
        self.deaths += status not in (0, 143)
        if process in self.processes:
            self.processes.remove(process)
        agent = self.agents.get(process.node)
        if agent is not None and agent.alive:
            agent.fire(agent.child_ended, (process, status))

    def ring(self, group: Group, attempt: int) -> Ring:
        key = group.generation, attempt
        if key not in self.rings:
            self.rings[key] = Ring(self, group)
        return self.rings[key]

    def cut_of(self, position: Position, size: int, split: StepSplit, stop: int = 0) -> StepCut | None:
        """Return the cut as every member computes it, once."""
        key = position, size, split, stop
        if self.last_cut is None or self.last_cut[0] != key:
            cut = cut_step(position, self.plan, self.scenario.epochs, BATCH, self.spec, size, split, stop)
            self.last_cut = key, cut
        return self.last_cut[1]

    def worker(self, slot: Slot, incarnation: Incarnation) -> GroupWorker | None:
        for process in self.processes:
            if isinstance(process, GroupWorker) and process.me == (slot, incarnation):
                return process
        return None

    def begins(self, worker: GroupWorker, c: Committed) -> None:
        """A worker begins to compute this step: once, and once more for each loss that it met with in it. Not after a
        planned change, nor twice after one loss. (Where links were cut or processes stopped, nobody says how often.)"""
        since, step = worker.begun
        worker.begun = self.kernel.now, c.first
        if step == c.first and not self.blurred and not any(at > since - NOTICED_S for at in self.ends):
            raise Violation(f"{worker} begins step {step} again, and nobody was lost since {since:.3f} s")

    def applies(self, lineage: int, c: Committed) -> None:
        """Note that a worker committed a step. (Not all who do are survived by somebody who knows.)"""
        self.applied += 1

    def saves(self, worker: GroupWorker) -> None:
        """The chief saves the result, and comes to the end of its script."""
        assert worker.lineage is not None
        self.saved.append((worker.lineage, worker.position.step, worker.fingerprint))

    def finished(self, worker: GroupWorker) -> None:
        if worker.has_state and worker.lineage is not None:
            self.ended_well.append((worker.lineage, worker.position.step, worker.fingerprint))
            self.ended_with.append((worker.lineage, worker.chain))

    # ------------------------------------------------------------ faults

    def strike(self, fault: str) -> None:
        rng = self.kernel.rng
        if self.over is not None:
            return
        self.kernel.say("FAULT", fault)
        self.faults += 1
        self.blurred = self.blurred or fault.startswith(BLURRED)
        workers = [p for p in self.processes if isinstance(p, GroupWorker)]
        worker = rng.choice(workers) if workers else None
        if fault in ("kill master", "kill worker and master"):
            self.kill_master()
        if fault in ("kill worker", "kill worker and master", "kill two workers") and worker is not None:
            worker.exit(-9)
            others = [w for w in workers if w is not worker]
            if fault == "kill two workers" and others:
                self.kernel.after(rng.choice([0.0, 0.05, 0.3]) * rng.random(), rng.choice(others).exit, -9)
        elif fault == "kill all workers":
            for w in workers:
                w.exit(-9)
        elif fault == "stop worker" and worker is not None:
            (worker.hold if self.held() else worker.pause)(rng.choice([0.3, 1.5, 4.0, 9.0]))
        elif fault == "hold worker" and worker is not None:
            worker.hold(rng.choice([1.5, 4.0, 9.0]))
        elif fault == "stop master":
            self.master.pause(rng.choice([0.2, 2.0]))
        elif fault == "stop agent":
            rng.choice(list(self.agents.values())).pause(rng.choice([0.3, 4.0]))
        elif fault == "cut worker from master" and worker is not None:
            self.cut(worker.name, self.master.name, rng.random() < 0.7, rng.uniform(0.2, 4.0))
        elif fault == "cut worker from worker" and len(workers) > 1:
            a, b = rng.sample(workers, 2)
            self.cut(a.name, b.name, rng.random() < 0.5, rng.uniform(0.2, 3.0))
        elif fault == "dead connection" and worker is not None and worker.ring is not None:
            worker.ring.dead = worker.ring.group.size > 1
        elif fault == "dead pair" and len(workers) > 1:
            self.dead_pairs.append({w.name for w in rng.sample(workers, 2)})
        elif fault == "cut worker off" and worker is not None:
            seconds = rng.uniform(0.3, 6.0)
            for other in [w for w in workers if w is not worker] + [self.master]:
                self.cut(worker.name, other.name, True, seconds)
        elif fault == "cut node":
            self.cut("node1", "node0", rng.random() < 0.7, rng.uniform(0.3, 4.0))
        elif fault == "kill node":
            self.kill_node("node1", rng.uniform(0.1, 4.0) if rng.random() < 0.7 else -1.0)
        elif fault == "second master":
            self.kernel.say(self.new_master(), "started beside the old one")
        elif fault == "scale":
            most = self.spec.logical_workers or 5
            self.scale(rng.randint(1, min(most, 5)))
        elif fault == "divide" and (group := self.master.brain.state.groups.group) is not None and group.members:
            slots = [m.slot for m in group.members]
            shares, total = dict.fromkeys(slots, 1), self.master.brain.groups.samples()
            for _ in range(total - len(slots)):
                shares[rng.choice(slots)] += 1
            self.wanted_by_policy(AdjustBatch(batch=shares), AdjustAccum(accum={slots[0]: rng.randint(1, 3)}))
        elif fault == "replace worker" and worker is not None:
            slot, incarnation = worker.me
            self.wanted_by_policy(KillRestart(role=Role.WORKER, slot=slot, incarnation=incarnation))
        elif fault == "term worker" and worker is not None:
            worker.fire(worker.terminate, ())
        elif fault == "drain" and worker is not None:
            self.record(DrainAsked(f"worker:{worker.key.slot}", rng.choice([1.0, 30.0])))
        elif fault == "sever":
            conns = [c.conn for c in (*self.agents.values(), *self.processes) if c.conn is not None]
            if conns:
                self.net.sever(rng.choice(conns), 0.3)
        elif fault == "lossy":
            self.net.loss = min(0.2, self.net.loss + 0.05)

    def wanted_by_policy(self, *actions: PlanAction) -> None:
        """A policy wants this."""
        self.record(PlanMade("sim", PolicyPlan(actions=actions, decision=Decision("plan", "drawn"))))

    def heal(self) -> None:
        super().heal()
        if self.over is None and not self.agents["node0"].alive:
            self.node_back("node0")
        for node, agent in list(self.agents.items()):
            if not agent.alive:
                self.node_back(node)
        self.wanted()

    def wanted(self) -> None:
        """Ask for workers: whoever healed the job asks for the workers that it needs."""
        if self.over is not None:
            return
        if not self.master.alive or self.kernel.now < self.master.paused_until:
            self.kernel.after(0.5, self.wanted)
            return
        self.scale(max(self.spec.workers, self.spec.min_workers))

    # ------------------------------------------------------------ the run

    def run(self) -> SimOutcome:
        kernel, scenario, net = self.kernel, self.scenario, self.net
        net.loss, net.duplicate = scenario.loss, scenario.duplicate
        for when, fault in scenario.faults:
            kernel.at(when, self.strike, fault)
        ends = max([scenario.chaos_s, *(at for at, _ in scenario.faults)])  # (rounded, some come a little later)
        kernel.at(ends, self.heal)
        kernel.run(ends + scenario.deadline_s)
        if self.over is None:
            raise Violation(f"not finished {scenario.deadline_s:g} s after the last fault: {self.where()}")
        if self.over[0] != 0:
            raise Violation(f"the job failed: {self.over[1]}")
        self.check()
        self.replay()
        groups = self.master.brain.state.groups
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
            groups.step,
            sum(v.last + 1 - v.first for v in groups.history.voids),
        )

    def check(self) -> None:
        """Every sample exactly once, by the journal, by the workers' logs, and in the states of those that ended."""
        brain, scenario = self.master.brain, self.scenario
        groups = brain.state.groups
        if brain.shards.samples_done != scenario.epochs * scenario.samples:
            raise Violation(f"{brain.shards.samples_done} samples done of {scenario.epochs} x {scenario.samples}")
        fold, fresh = StepFold(), Brain()
        for event, _ in self.disk.log:
            out = fresh.handle(event)
            fact = event.fact
            if isinstance(fact, StepsCommitted) and not isinstance(getattr(out[0], "answer", None), Fenced):
                fold.announced(fact.steps)
            for i in out:
                if isinstance(i, PublishGroup):
                    fold.published(i.group)
        logs = [StepLog(slot, life, steps) for (slot, life), steps in self.logs.items()]
        report = check_steps(fold, [self.plan], logs, "", True)
        if not report.ok:
            raise Violation(report.text())
        whole = sum(range_fingerprint(epoch, 0, scenario.samples) for epoch in range(scenario.epochs)) & MASK
        ended = [(step, found) for lineage, step, found in self.ended_well if lineage == groups.lineage]
        if not ended:  # (of a line before: its end was lost with its agent)
            raise Violation("nobody ended with the trained state")
        for step, found in ended:
            if (step, found) != (groups.step, whole):
                raise Violation(f"a script ended with the state of step {step}, not {groups!r}")
        if (groups.lineage, groups.step, whole) not in self.saved:
            raise Violation(f"no chief saved the result of {groups!r}: {self.saved}")

    def where(self) -> str:
        brain = self.master.brain
        workers = [
            f"{p} {p.phase} at {p.position.step} {p.machine!r}{' leaving' if p.leaving_since >= 0 else ''}"
            for p in self.processes
            if isinstance(p, GroupWorker)
        ]
        return f"{brain.state.groups!r} {brain.state.groups.group} {workers}"

    def say_event(self, master: SimProcess, event: Any, instructions: list[Any]) -> None:
        self.kernel.say(master, f"{event!r:.160}")
        for i in instructions:
            text = repr(i.answer) if isinstance(i, Reply) else repr(i)
            self.kernel.say(master, f"   -> {text:.240}")


def simulate_group(
    seed: int,
    scenario: GroupScenario | None = None,
    parts: Parts = Parts(),
    trace: list[str] | None = None,
    validate: bool = True,
    worker: type[GroupWorker] = GroupWorker,
    machine: type[GroupMachine] = GroupMachine,
) -> SimOutcome:
    """Make one whole run, as ``sim.simulation.simulate``."""
    sim = GroupSimulation(seed, scenario or group_scenario(seed), parts, trace is not None, validate, worker, machine)
    return sim.run_traced(trace)


__all__ = ["GroupScenario", "GroupSimulation", "HeartbeatWatch", "group_scenario", "simulate_group"]
