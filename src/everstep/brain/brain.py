"""The master's pure core: ``handle(event) -> list[Instruction]``.

Theory. The state is the fold of the events; nothing here reads a clock, draws a number or waits. Three rules carry
the exactly-once protocol:

1. *Fencing.* A slot's incarnation grows with every process started for it. Whatever an older one says is answered
   with ``Fenced`` and changes nothing. A shard's lease number grows with every grant; ``done`` counts only for the
   current lease, and only if every ps acknowledged in its present life.
2. *Nothing is lost.* A lease ends in exactly one of: done, returned, its worker lost, expired, or reopened because a
   ps that acknowledged is dead. All but the first put the shard back at the head of TODO. An epoch begins only when
   every shard of the one before is done (or set aside, named).
3. *Everything may be said twice.* Members repeat themselves after each reconnect; a restart of the master changes
   no member and no lease.

The shell journals an event, calls ``handle``, waits until the event is durable, and only then lets anyone see an
instruction. Instructions that matter carry the ``Decision`` behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from everstep.bounds import MALFORMED
from everstep.brain.checkpoints import Checkpoints, ends_with_checkpoint
from everstep.brain.duty import MAX_RERUNS as MAX_CHIEF_RERUNS
from everstep.brain.duty import ONCE_KEYS, Duty
from everstep.brain.events import (
    BucketsReady,
    CheckpointAsked,
    CheckpointBegun,
    CheckpointCommitted,
    ChiefAsked,
    DrainAsked,
    EndOfData,
    Event,
    Fenced,
    FinishJob,
    Granted,
    GroupAsked,
    GroupDue,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    HotBuckets,
    ImagesWritten,
    InstructionType,
    JobResumed,
    LeaseExpired,
    LoadFailed,
    LossNote,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    MirrorsReady,
    NodeHeard,
    NodeJoined,
    NodeLost,
    Note,
    Ok,
    OnceAsked,
    PlanMade,
    PlanRegistered,
    PolicyDisabled,
    ProcessExited,
    Refused,
    Registered,
    ReleaseShards,
    RemarkMade,
    ReplicaWritten,
    Reply,
    RevokeLease,
    ScaleAsked,
    ShardAsked,
    ShardDone,
    ShardReturned,
    ShardsConfirmed,
    StartProcess,
    StepsCommitted,
    StopAsked,
    StopProcess,
    Wait,
    Welcome,
    Yes,
)
from everstep.brain.failures import judge
from everstep.brain.group import GroupKeeper, Groups
from everstep.brain.job import JobState, Phase
from everstep.brain.members import Members, Node, Rooms, SlotRecord, set_state
from everstep.brain.policy_control import PolicyControl, divide, stale
from everstep.brain.protection import PlacementController, Protection
from everstep.brain.replicas import replica_start, resume_replica, save_in_time, take_replica, why_save
from everstep.brain.shards import Dataset, Epoch, HeldLease, Shards, lease_words
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.failure import pause_s
from everstep.model.group import Mark
from everstep.model.image import Holdings
from everstep.model.member import MemberState, Role
from everstep.model.placement import Placement
from everstep.model.plan import (
    Action,
    AdjustAccum,
    AdjustBatch,
    AdjustRate,
    BackupWorkers,
    KillRestart,
    MoveBuckets,
    Scale,
)
from everstep.model.reasons import Arrival, CheckpointReason, LeaveReason
from everstep.model.shard import LEASE_COUNTER_BITS, Lease, lease_no, split_key
from everstep.model.words import cause_words, exit_words
from everstep.policies.hot import HotMove
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.restarts import is_poison, may_restart
from everstep.policies.scaling import after_drain, refuse_ps, refuse_workers

SNAPSHOT_VERSION = 5
RESULT_LOST = 5  # exit code of a job whose data is trained, and whose script did not get to its end
END_GRACE_S = 0.1  # one whose work is void
STOP_GRACE_S = 10.0  # a worker asked to leave finishes its batch and gives its shards back
MAX_RERUNS = 3  # of a script that has ended, for shards that came back afterwards
DONE_REMEMBERED = 32  # leases that counted, by worker: a repeated report is answered Ok again
WAIT_MIN_S = 0.05
WAIT_WORKERS_PER_S = 2000.0  # waiting workers together ask about so often a second

_NO_PS = Placement(1, (), ())  # of a job whose parameters are all on its workers
_CLEAN_EXITS = (0, 128 + 15)  # of a worker that left the group by itself, also upon SIGTERM

_OK = Reply(Ok())
_END = Reply(EndOfData())


class State(msgspec.Struct, kw_only=True):
    """All that the brain knows; a snapshot is this, encoded."""

    version: int = SNAPSHOT_VERSION
    job: JobState = msgspec.field(default_factory=JobState)
    members: Members = msgspec.field(default_factory=Members)
    shards: Shards = msgspec.field(default_factory=Shards)
    checkpoints: Checkpoints = msgspec.field(default_factory=Checkpoints)
    protection: Protection = msgspec.field(default_factory=Protection)
    groups: Groups = msgspec.field(default_factory=Groups)
    control: PolicyControl = msgspec.field(default_factory=PolicyControl)
    duty: Duty = msgspec.field(default_factory=Duty)

    @property
    def placement(self) -> Placement | None:
        return self.protection.placement


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


class Brain:
    """See the top of this file. ``state`` is for reading; only ``handle`` changes it."""

    __slots__ = ("_handlers", "checkpoints", "duty", "groups", "job", "keeper", "members", "shards", "state")

    def __init__(self, state: State | None = None) -> None:
        self.state = state if state is not None else State()
        self.job = self.state.job
        self.members = self.state.members
        self.shards = self.state.shards
        self.checkpoints = self.state.checkpoints
        self.keeper = PlacementController(self.job, self.members, self.shards, self.checkpoints, self.state.protection)
        self.duty = self.state.duty
        self.groups = GroupKeeper(self.job, self.members, self.shards, self.state.groups, self.duty)
        handlers: dict[type, Callable[[Any, Event], list[InstructionType]]] = {
            MasterStarted: self._master_started,
            NodeJoined: self._node_joined,
            NodeLost: self._node_lost,
            NodeHeard: self._node_heard,
            MemberJoined: self._member_joined,
            MemberSilent: self._member_silent,
            MemberHeard: self._member_heard,
            ProcessExited: self._process_exited,
            PlanRegistered: self._plan_registered,
            ShardAsked: self._shard_asked,
            ShardDone: self._shard_done,
            ShardReturned: self._shard_returned,
            LeaseExpired: self._lease_expired,
            ScaleAsked: self._scale_asked,
            StopAsked: self._stop_asked,
            DrainAsked: self._drain_asked,
            HotBuckets: self._hot_buckets,
            PlanMade: self._plan_made,
            PolicyDisabled: self._policy_disabled,
            MirrorsReady: self._ps_told,
            BucketsReady: self._ps_told,
            LoadFailed: self._load_failed,
            CheckpointAsked: self._checkpoint_asked,
            ImagesWritten: self._images_written,
            ReplicaWritten: self._replica_written,
            CheckpointCommitted: self._checkpoint_committed,
            ShardsConfirmed: lambda e, told: self.checkpoints.confirm(self.job, self.shards, e.before),
            GroupAsked: self._group_asked,
            GroupSynced: self._group_synced,
            GroupLeft: self._group_left,
            GroupStalled: self._group_stalled,
            StepsCommitted: self._steps_committed,
            GroupDue: lambda e, told: [],
            ChiefAsked: self._chief_asked,
            OnceAsked: self._once_asked,
            JobResumed: self._job_resumed,
            RemarkMade: self._remark_made,
        }
        self._handlers = handlers

    def __repr__(self) -> str:
        s = self.shards
        return (
            f"<brain {self.job!r} {len(self.members.workers)} workers, {len(s.leases)} leases, {s.samples_done} done>"
        )

    # ------------------------------------------------------------ the contract

    def handle(self, event: Event) -> list[InstructionType]:
        """Take one event in; return what to do, a ``Reply`` (if any) first."""
        self._tell_groups()
        kind = type(event.fact)
        grouped = self.replicated and kind is not StepsCommitted
        left = grouped and self.groups.last_ones_leave()
        self.state.protection.went_back = False
        out = self._handlers[kind](event.fact, event)
        if grouped:
            out += self._save_for_leavers(left, event.at)
            self._tell_groups()
            out += self.groups.settle(event.at)
            if (why := why_save(event.fact, out, self.job)) is not None:
                out += save_in_time(self.checkpoints, self.job, self.state.groups, why, event.at)
        if self.state.protection.gone and not self.job.over:
            out += self._settle()  # it waits for workers to end
        if self.replicated and self.state.protection.went_back and not self.job.over:
            out += self._not_the_end(event.at)
        if grouped and not self.job.over:
            out += self._nobody_saves(event.at)
            out += self._final_replica(event.at)
        return out

    @property
    def replicated(self) -> bool:
        """Whether every worker has the whole model (mode allreduce): a group instead of leases; ps only for tables."""
        return self.job.spec.mode == "allreduce"

    def snapshot(self) -> bytes:
        return _encoder.encode(self.state)

    @classmethod
    def restore(cls, snapshot: bytes) -> Brain:
        """The brain of ``snapshot()``. Raises ``msgspec.ValidationError`` on bytes that are none (of this version)."""
        try:
            state = _decoder.decode(snapshot)
        except MALFORMED as error:
            raise msgspec.ValidationError(f"no snapshot: {error}") from None
        if state.version != SNAPSHOT_VERSION:
            raise msgspec.ValidationError(f"snapshot version {state.version}, this everstep reads {SNAPSHOT_VERSION}")
        return cls(state)

    def become(self, other: Brain) -> None:
        """Take over the state of ``other``, which is not used any more. For whoever holds this one."""
        Brain.__init__(self, other.state)

    @property
    def placement(self) -> Placement | None:
        return self.state.placement

    @property
    def leases(self) -> dict[ShardKey, HeldLease]:
        """Current leases by shard; for reading."""
        return self.shards.leases

    def validate(self) -> None:
        """Assert the invariants. One pass over everything: for tests, the simulator, and after a restart."""
        self.shards.validate()
        self.checkpoints.validate(self.job)
        by_worker: dict[Slot, list[ShardKey]] = {}
        for held in self.shards.leases.values():
            by_worker.setdefault(held.worker, []).append(held.shard)
            seat = self.members.workers.get(held.worker)
            assert seat is not None, f"lease of worker:{held.worker}, who is nobody"
            assert seat.member.incarnation == held.incarnation, f"lease {held.no} of a fenced process of {seat!r}"
            assert seat.running, f"lease {held.no} of {seat!r}"
            assert held.no >> LEASE_COUNTER_BITS <= self.job.master_incarnation, f"lease {held.no} of a later master"
        for slot, seat in self.members.workers.items():
            assert sorted(seat.held) == sorted(by_worker.get(slot, [])), f"{seat!r} and the leases disagree"
            assert slot == seat.member.slot and seat.member.role is Role.WORKER
        for slot, seat in self.members.servers.items():
            assert slot == seat.member.slot and seat.member.role is Role.PS and not seat.held
        self.keeper.validate()
        self.groups.validate()

    # ------------------------------------------------------------ master and nodes

    def _master_started(self, e: MasterStarted, told: Event) -> list[InstructionType]:
        job = self.job
        if e.incarnation <= job.master_incarnation:
            return []
        first = job.master_incarnation == 0
        job.master_incarnation = e.incarnation
        job.leases = 0
        out: list[InstructionType] = []
        if first:
            job.spec = e.spec
            job.started_at = told.at
            job.workers_wanted, job.ps_wanted = e.spec.workers, e.spec.ps
            why = f"{e.spec.workers} workers, {e.spec.ps} ps, {e.spec.buckets} buckets"
            if self.replicated:
                why = f"{e.spec.workers} workers, each with the whole model"
                if e.spec.ps:
                    why += f" but its tables, {e.spec.ps} ps, {e.spec.buckets} buckets"
            out.append(Note("", Decision("job started", why, {"seed": e.spec.seed})))
        else:
            job.master_failures += 1
            inputs: dict[str, str | int | float | bool] = {
                "incarnation": e.incarnation,
                "leases": len(self.shards.leases),
            }
            out.append(
                Note(
                    "master",
                    Decision(
                        "restarted",
                        "the last master ended; its journal was replayed",
                        inputs,
                        ("restart the members: they kept training and hold their leases",),
                    ),
                )
            )
        if job.over:
            out.append(FinishJob(cast(int, job.exit_code), job.error))
        return out

    def _node_joined(self, e: NodeJoined, told: Event) -> list[InstructionType]:
        job, members = self.job, self.members
        node = members.nodes.get(e.node)
        out: list[InstructionType] = [_OK]
        if node is None:
            node = members.nodes[e.node] = Node(e.node, e.host, e.worker_places, e.ps_places)
            if e.node != HOME_NODE and e.worker_places > 0 and not job.over:
                node.brought = e.worker_places
                for slot in range(job.workers_wanted, job.workers_wanted + e.worker_places):
                    members.homes[Slot(slot)] = e.node
                job.workers_wanted += e.worker_places
            places = e.worker_places if e.worker_places else "any number of"
            out.append(Note(e.node, Decision("node joined", f"it has {places} places for workers", {"host": e.host})))
        else:
            if e.returns > node.returns:
                node.draining, node.returns = False, e.returns  # what it was to be emptied for is over
            if not node.alive:
                out.append(Note(e.node, Decision("node back", "its agent said hello again", {"host": e.host})))
            node.host, node.worker_places, node.ps_places, node.alive = e.host, e.worker_places, e.ps_places, True
        node.quiet_since = 0.0
        runs: set[tuple[Role, Slot, Incarnation]] = set()
        for role, slot, incarnation, pid in e.running:
            seat = members.of(role).get(slot)
            if seat is not None and incarnation > seat.member.incarnation:
                out += self._drop_leases(seat, told.at, "its place was taken by a later process")
                self.groups.ended(seat, clean=False)
                seat = members.adopt(role, slot, incarnation, e.node, told.at)
            if (
                job.over
                or seat is None
                or incarnation < seat.member.incarnation
                or not seat.running
                or seat.member.node != e.node
            ):
                now = f"#{seat.member.incarnation} {seat.member.state}" if seat is not None else "nobody's"
                why = Decision("stop", "the job is over" if job.over else f"it was replaced: the slot is {now}")
                out.append(StopProcess(e.node, role, slot, incarnation, 0.0, why))
                continue
            runs.add((role, slot, incarnation))
            seat.member.pid = pid or seat.member.pid
            if seat.stopping and not (self.replicated and self.groups.trains(seat)):
                why = Decision("stop", "it was asked to leave; its agent may not have heard")
                out.append(StopProcess(e.node, role, slot, incarnation, STOP_GRACE_S, why))
        if job.over:
            out.append(FinishJob(cast(int, job.exit_code), job.error))
            return out
        for seat in members.on(e.node):
            member = seat.member
            if not seat.running or (member.role, member.slot, member.incarnation) in runs:
                continue
            if member.state is MemberState.STARTING and not seat.stopping:
                why = Decision("start", "it was ordered before, and its agent does not run it")
                out.append(StartProcess(e.node, member.role, member.slot, member.incarnation, why))
            elif member.role is Role.PS:
                # Its loss is final, and this word may be an old one: let its own silence prove it.
                if member.state is MemberState.ALIVE:
                    set_state(seat, MemberState.SUSPECT, told.at)
                    why = Decision("suspect", f"the agent of {e.node} does not list it")
                    out.append(Note(str(member.key), why))
            else:
                out += self._gone(seat, told.at, "its agent no longer runs it", {"node": e.node})
                if job.over:
                    return out
        return out + self._fill(told.at)

    def _node_lost(self, e: NodeLost, told: Event) -> list[InstructionType]:
        node = self.members.nodes.get(e.node)
        if node is None or not node.alive:
            return []
        node.alive, node.quiet_since = False, 0.0
        if self.job.over:
            return []
        self.job.node_failures += 1
        seats = [seat for seat in self.members.on(e.node) if seat.running]
        for seat in seats:  # all at once: none of them is to take over from another one
            if seat.member.role is Role.PS and not seat.stopping:
                set_state(seat, MemberState.LOST, told.at)
        out: list[InstructionType] = [
            Note(e.node, Decision("node lost", e.reason, {"members": ", ".join(str(s.member.key) for s in seats)}))
        ]
        rooms, why = Rooms(self.members, Role.WORKER), f"its node {e.node} was lost: {e.reason}"
        for seat in seats:
            out += self._gone(seat, told.at, why, {"node": e.node}, node_lost=True, counted=rooms)
            if self.job.over:
                return out
        return out + self._fill(told.at)

    def _await_word(self, node: NodeId, at: float) -> None:
        """A process of this node was silent for too long: it alone, or a node that is cut off. One that is started
        there now would be lost with the node, a second time."""
        if (known := self.members.nodes.get(node)) is not None:
            known.quiet_since = at

    def _node_heard(self, e: NodeHeard, told: Event) -> list[InstructionType]:
        node = self.members.nodes.get(e.node)
        if node is None or not node.quiet_since:
            return []
        node.quiet_since = 0.0
        return self._fill(told.at)

    def _fill(self, at: float) -> list[InstructionType]:
        """Start a process in every slot that wants one and finds a place."""
        if self.job.over:
            return []
        out: list[InstructionType] = []
        rooms = Rooms(self.members, Role.PS)
        for slot in map(Slot, range(self.job.ps_wanted)):
            seat = self.members.servers.get(slot)
            if (seat is None or seat.waiting) and slot not in self.state.protection.leaving:
                out += self._start(Role.PS, slot, at, Decision("start", "the job wants this ps"), rooms)
        rooms = Rooms(self.members, Role.WORKER)
        for slot in map(Slot, range(self.job.workers_wanted)):
            seat = self.members.workers.get(slot)
            if seat is None or seat.waiting:
                out += self._start(Role.WORKER, slot, at, Decision("start", "the job wants this worker"), rooms)
        return out

    def _start(
        self,
        role: Role,
        slot: Slot,
        at: float,
        why: Decision,
        counted: Rooms | None = None,
        replaces: bool = False,
    ) -> list[InstructionType]:
        """Start a new process in this slot, or let the slot wait for a node with a place. ``counted``: what nodes can
        take, where many slots are started at once. ``replaces``: a process that was lost; if its script failed, the new
        one comes a little later."""
        members = self.members
        home = members.homes.get(slot) if role is Role.WORKER else None
        seat = members.of(role).get(slot)
        node = (counted or Rooms(members, role)).choose(home, seat.avoid if seat is not None else None)
        quiet = node is not None and bool(members.nodes[node].quiet_since)
        if node is None or quiet:
            if seat is None or seat.waiting:
                return []
            seat.waiting = True
            words = "no node has a free place for it"
            if quiet:
                words = f"{node} may be cut off: its agent has to be heard first"
            return [Note(str(seat.member.key), Decision("waiting", words, {"slot": slot}))]
        seat = members.fill(role, slot, node, at)
        seat.avoid = None
        if counted is not None:
            counted.taken(node)
        after_s = pause_s(seat.failures) if replaces else 0.0
        return [StartProcess(node, role, slot, seat.member.incarnation, why, after_s)]

    # ------------------------------------------------------------ members

    def _member_joined(self, e: MemberJoined, told: Event) -> list[InstructionType]:
        members, job = self.members, self.job
        seat = members.of(e.role).get(e.slot)
        if seat is None:
            return [Reply(Fenced(f"{e.role}:{e.slot} is not a member of this job"))]
        out: list[InstructionType] = []
        if e.incarnation > seat.member.incarnation:
            out += self._drop_leases(seat, told.at, "its place was taken by a later process")
            self.groups.ended(seat, clean=False)
            seat = members.adopt(e.role, e.slot, e.incarnation, e.node, told.at)
        member = seat.member
        if e.incarnation < member.incarnation or not seat.running:
            return [_fenced(e.role, e.slot, e.incarnation, seat)]
        new = member.state is MemberState.STARTING
        set_state(seat, MemberState.ALIVE, told.at)
        member.pid, member.node = e.pid, e.node
        moved = e.address is not None and e.address != member.address
        member.address = e.address if e.address is not None else member.address
        if new:
            inputs: dict[str, str | int | float | bool] = {"pid": e.pid, "incarnation": e.incarnation}
            out.append(Note(str(member.key), Decision("joined", f"process {e.pid} on {e.node}", inputs)))
        if e.role is Role.PS:
            out += self._place(seat, moved or new, e.holds)
        revoked = tuple(lease.no for lease in e.leases if not self._confirm(seat, lease))
        placement = self.state.placement if job.spec.ps else _NO_PS
        welcome: list[InstructionType] = [Reply(Welcome(job.master_incarnation, placement, revoked))]
        if e.role is Role.PS and self.shards.released:
            out.append(ReleaseShards(tuple(self.shards.released)))
        return welcome + out

    def _confirm(self, seat: SlotRecord, lease: Lease) -> bool:
        """Whether this lease, which the worker says it holds, is its own (from now on)."""
        held = self.shards.leases.get(lease.shard)
        member = seat.member
        if held is not None:
            return held.no == lease.no and held.worker == member.slot and held.incarnation == member.incarnation
        if member.role is not Role.WORKER or self.job.over or not self.shards.can_adopt(lease):
            return False
        master, counter = lease.no >> LEASE_COUNTER_BITS, lease.no & ((1 << LEASE_COUNTER_BITS) - 1)
        if master > self.job.master_incarnation:
            return False
        if master == self.job.master_incarnation:
            self.job.leases = max(self.job.leases, counter)
        self.shards.adopt(lease, member.slot, member.incarnation)
        seat.held.append(lease.shard)
        return True

    def _place(self, seat: SlotRecord, changed: bool, holds: Holdings | None) -> list[InstructionType]:
        """A ps said hello: make the first map once all have, or take up what it tells."""
        member, keeper = seat.member, self.keeper
        old = self.state.placement
        if old is None:
            servers = self.members.servers
            missing = [
                slot
                for slot in map(Slot, range(self.job.ps_wanted))
                if (s := servers.get(slot)) is None or not s.running or s.member.address is None
            ]
            if missing:
                return []
            if self.job.phase is Phase.STARTING:
                self.job.phase = Phase.TRAINING
            return keeper.first()
        known = next((p for p in old.servers if p.slot == member.slot), None)
        trusted = False
        if known is None:
            why = f"{member.key} joined"
        else:
            why = f"{member.key} is at a new address or in a new life" if changed else f"{member.key} said hello"
            trusted = known.incarnation != member.incarnation and holds is None
        if holds is not None:
            keeper.holds(member.slot, holds)
        return self._settle(why, trusted)

    def _settle(self, why: str = "", trusted: bool = False) -> list[InstructionType]:
        """The next map, if anything calls for one; the end of the job, if something is lost for good; the end of ps
        that have given everything away."""
        out = self.keeper.settle(why, trusted)
        if self.state.protection.lost and not self.job.over:
            spec, lost = self.job.spec, len(self.state.protection.lost)
            what = (
                "which nothing protects" if spec.parity in ("", "0") else f"more than parity {spec.parity} can rebuild"
            )
            error = (
                f"{why} and with it {lost} of {spec.buckets} buckets, {what}; "
                "trust nothing of the run directory beyond the last export"
            )
            rejected = ("go on without its rows: results would be wrong",)
            out.append(Note("", Decision("fail the job", error, {"buckets_lost": lost}, rejected)))
            return [*out, self._fail(4, error)]
        for slot, incarnation in self.state.protection.ending:
            worker = self.members.current(Role.WORKER, slot, incarnation)
            if worker is not None and not worker.stopping:
                words = f"{len(self.keeper.books.gone)} buckets begin empty: the first rows of its tables are due again"
                if self.replicated:
                    words = f"{len(self.keeper.books.gone)} buckets go back to what is older than its state"
                out.append(self._send_away(worker, Decision("stop", words), END_GRACE_S))
        for slot in self.state.protection.leaving:
            seat = self.members.servers.get(slot)
            if seat is not None and seat.running and not seat.stopping and self.keeper.empty(slot):
                out.append(self._send_away(seat, Decision("stop", "others have all that it held")))
        return out + self.keeper.covers()

    def _ps_told(self, e: MirrorsReady | BucketsReady, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.PS, told.slot, told.incarnation)
        if seat is None:
            return [Reply(Fenced(f"ps:{told.slot} #{told.incarnation} was replaced"))]
        if self.job.over:
            return [_OK]
        out = self.keeper.told(told.slot, e)
        if isinstance(e, BucketsReady) and e.how is Arrival.STUCK:
            return [_OK, *out, *self._settle(f"ps:{told.slot} cannot get what it was given")]
        seat.streak = 0  # it got somewhere
        return [_OK, *out, *self._settle()]

    def _load_failed(self, e: LoadFailed, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.PS, told.slot, told.incarnation)
        if seat is None:
            return [Reply(Fenced(f"ps:{told.slot} #{told.incarnation} was replaced"))]
        if self.job.over:
            return [_OK]
        out = self.keeper.load_failed(told.slot, e)
        if self.checkpoints.aside:
            return [_OK, *out, self._fail(4, self.checkpoints.aside_words)]
        return [_OK, *out, *self._settle(f"ps:{told.slot} cannot load bucket {e.bucket}")]

    def _died_loading(self, seat: SlotRecord, reason: str, status: int) -> list[InstructionType]:
        """A ps crashed: if it was loading, that may have been why."""
        if status not in _CRASHES:
            return []
        slot = seat.member.slot
        out: list[InstructionType] = []
        for checkpoint in sorted({c for _, c in self.keeper.loading(slot)}):
            out += self.checkpoints.load_failed(checkpoint, f"ps:{slot}", f"{reason} while it loaded it")
        return out

    def _member_silent(self, e: MemberSilent, told: Event) -> list[InstructionType]:
        seat = self.members.current(e.role, e.slot, e.incarnation)
        if seat is None or self.job.over:
            return []
        if not e.lost:
            if seat.member.state is not MemberState.ALIVE:
                return []
            set_state(seat, MemberState.SUSPECT, told.at)
            reason = f"no heartbeat for {e.silent_s:.1f} s"
            inputs: dict[str, str | int | float | bool] = {"silent_s": round(e.silent_s, 3)}
            rejected = (f"replace it now: it may only be slow (lost after {self.job.spec.lost_after_s:g} s)",)
            return [Note(str(seat.member.key), Decision("suspect", reason, inputs, rejected))]
        member = seat.member
        starting = member.state is MemberState.STARTING
        reason = f"no hello for {e.silent_s:.0f} s" if starting else f"no heartbeat for {e.silent_s:.1f} s"
        reason = e.why or reason
        stop = StopProcess(
            member.node,
            member.role,
            member.slot,
            member.incarnation,
            0.0,
            Decision("stop", f"it was declared lost ({reason}); it must not come back to life"),
        )
        if not e.why:  # (else its node is heard)
            self._await_word(member.node, told.at)
        return [stop, *self._gone(seat, told.at, reason, {"silent_s": round(e.silent_s, 3)}, progress=e.progress)]

    def _member_heard(self, e: MemberHeard, told: Event) -> list[InstructionType]:
        seat = self.members.current(e.role, e.slot, e.incarnation)
        if seat is None or seat.member.state is not MemberState.SUSPECT:
            return []
        silent_s = told.at - seat.member.since
        set_state(seat, MemberState.ALIVE, told.at)
        return [Note(str(seat.member.key), Decision("heard again", f"{silent_s:.1f} s after it was suspected"))]

    def _process_exited(self, e: ProcessExited, told: Event) -> list[InstructionType]:
        seat = self.members.current(e.role, e.slot, e.incarnation)
        if seat is None:  # an older life, or said before: its end is known
            ended = self.members.of(e.role).get(e.slot)
            if ended is None or ended.member.incarnation != e.incarnation:
                return [_OK]
            return [_OK, *self._node_heard(NodeHeard(ended.member.node), told)]
        finished = e.status == 0 and not seat.stopping
        if self.replicated:
            said = self.groups.said_done(seat) and not e.error  # (however it went then)
            if said or (e.status == 0 and self.groups.ended_well(seat)):
                finished, seat.stopping = True, False
            self.groups.ended(seat, e.status in _CLEAN_EXITS or (seat.stopping and e.status >= 0))
        if self.job.over:
            set_state(seat, MemberState.LEFT, told.at)
            return [_OK, *self._drop_leases(seat, told.at, "")]
        reason = exit_words(e.status)
        inputs: dict[str, str | int | float | bool] = {"exit_status": e.status}
        if e.error:
            inputs["error"] = e.error
        if e.role is Role.PS:
            refused = self._died_loading(seat, reason, e.status)
            if self.checkpoints.aside:
                set_state(seat, MemberState.LOST, told.at)
                return [_OK, *refused, self._fail(4, self.checkpoints.aside_words)]
            return [
                _OK,
                *refused,
                *self._gone(seat, told.at, reason + (f" ({e.error})" if e.error else ""), inputs, error=e.error),
            ]
        if finished:
            out: list[InstructionType] = [_OK, *self._drop_leases(seat, told.at, "its script ended")]
            set_state(seat, MemberState.LEFT, told.at)
            seat.finished, seat.streak, seat.failures = True, 0, 0
            self.duty.ended_well(self.members, seat)
            out.append(Note(str(seat.member.key), Decision("left", "its script ran to the end", inputs)))
            return out + self._finish_if_all_left(told.at)
        if e.too_large and not seat.stopping:
            most = self.state.control.too_large(e.slot, e.too_large)
            reason = (
                f"its memory was too small for {e.too_large} samples at once: no plan gives it more than {most} now"
            )
            return [_OK, *self._gone(seat, told.at, reason, {**inputs, "samples": e.too_large}, progress=e.progress)]
        if e.error and not seat.stopping:
            why_not = judge(e.failure, seat, self.members, self.job.spec.script_retries, self._trained())
            if not why_not:
                return [_OK, *self._try_again(seat, e, told, inputs)]
            set_state(seat, MemberState.LEFT, told.at)
            out = [_OK, *self._drop_leases(seat, told.at, "its script failed")]
            why = Decision("fail the job", "the script raised an error", inputs, (f"restart it: {why_not}",))
            out.append(Note(str(seat.member.key), why))
            no = f"; {why_not}" if e.failure is not None and e.failure.cause != "script" else ""
            exit_code = e.failure.exit_code if e.failure is not None else 1
            return [*out, self._fail(exit_code or 1, f"the script failed in {seat.member.key}: {e.error}{no}")]
        return [_OK, *self._gone(seat, told.at, reason, inputs, progress=e.progress)]

    def _trained(self) -> int:
        return self.state.groups.step if self.replicated else self.shards.samples_done

    def _try_again(
        self, seat: SlotRecord, e: ProcessExited, told: Event, inputs: dict[str, str | int | float | bool]
    ) -> list[InstructionType]:
        """Its script raised what may pass: as a loss, but the next process comes a little later."""
        assert e.failure is not None
        retries = self.job.spec.script_retries
        words = f"{cause_words(e.failure.cause)}; try {seat.failures} of {retries} without a step between"
        why = Decision("try again", f"its script raised {e.error}: {words}", {**inputs, "cause": e.failure.cause})
        return [
            Note(str(seat.member.key), why),
            *self._gone(seat, told.at, f"its script raised {e.error}", inputs, progress=e.progress),
        ]

    def _gone(
        self,
        seat: SlotRecord,
        at: float,
        reason: str,
        inputs: dict[str, str | int | float | bool],
        node_lost: bool = False,
        progress: tuple[tuple[LeaseNo, int], ...] = (),
        counted: Rooms | None = None,
        error: str = "",
    ) -> list[InstructionType]:
        """A process is no more, or counts as such. Take its leases back and fill the slot again. ``error``: that it
        told of itself."""
        if seat.member.role is Role.PS:
            return self._ps_gone(seat, at, reason, inputs, error)
        member = seat.member
        trained = self.replicated and self.groups.member(seat)
        if self.replicated and self.groups.said_done(seat):  # its exit status was lost with its agent
            self.groups.ended(seat, clean=True)
            set_state(seat, MemberState.LEFT, at)
            seat.finished, seat.stopping = True, False
            self.duty.ended_well(self.members, seat)
            why = Decision("left", f"it had said that its script ran to the end; then {reason}", inputs)
            return [Note(str(member.key), why), *self._finish_if_all_left(at)]
        self.groups.ended(seat, clean=False)
        if seat.stopping:
            return self._stopped(seat, at)
        self.job.worker_failures += 1
        seat.losses += 1
        if not node_lost:
            seat.streak += 1
        blamed = self.shards.leases[seat.held[0]] if seat.held and not node_lost else None
        inputs = {**inputs, "incarnation": member.incarnation}
        if seat.held:
            inputs["shards"] = ", ".join(self.shards.name(key) for key in seat.held)
        set_state(seat, MemberState.LOST, at)
        out: list[InstructionType] = [LossNote(str(member.key), Decision("lost", reason, inputs))]
        out += self._drop_leases(seat, at, f"{member.key} was lost")
        if blamed is not None:
            position = max((told for no, told in progress if no == blamed.no), default=blamed.start)
            if position > self.shards.kills_at.get(blamed.shard, blamed.start):
                seat.streak = 1  # it got on; only those that get nowhere use up the restarts
            out += self._blame(blamed.shard, position, member.key)
            if self.job.over:
                return out
        if trained and not node_lost and (error := self.groups.blame(seat, at, reason)):
            return [*out, self._fail(4, error)]
        if not may_restart(seat.streak, self.job.spec.max_restarts):
            if self._all_trained():
                error = (
                    f"the result is lost: all data is trained, and {member.key} was lost {seat.streak} times in a row "
                    f"(last: {reason}) before its script came to its end; see logs/worker-{member.slot}.log"
                )
                return [*out, self._fail(RESULT_LOST, error)]
            what = "a step" if self.replicated else "a shard"
            error = (
                f"{member.key} was lost {seat.streak} times in a row without finishing {what} (last: {reason}); "
                f"gave up after max_restarts={self.job.spec.max_restarts}: see logs/worker-{member.slot}.log"
            )
            return [*out, self._fail(4, error)]
        why = Decision(
            "restart",
            f"it was lost: {reason}",
            {**inputs, "in_a_row": seat.streak, "max_restarts": self.job.spec.max_restarts},
            ("go on without it: its share of the machine would idle", "wait for it: it is fenced and cannot count"),
        )
        if self._nothing_left():
            words = "every step is committed, and scripts have ended with the result"
            out.append(Note(str(member.key), Decision("not started again", words, inputs)))
        elif member.slot < self.job.workers_wanted:
            out += self._start(Role.WORKER, member.slot, at, why, counted, replaces=True)
        return out + self._finish_if_all_left(at)

    def _nothing_left(self) -> bool:
        """Whether a new worker could only come too late: the steps are done, and the chief's script has ended well."""
        return self.replicated and self.groups.data_done() and self.duty.done

    def _all_trained(self) -> bool:
        """Whether all data that was asked for is trained."""
        if self.replicated:
            return self.groups.data_done()
        asked = [d for d in self.shards.datasets if d.epochs_known]
        return bool(asked) and all(d.current >= d.epochs_known for d in asked)

    # ------------------------------------------------------------ the chief

    def _final(self) -> frozenset[Slot]:
        """Workers that have the state that all end with: in mode ps all of them, once all data is trained."""
        if not (self.replicated or self._all_trained()):
            return frozenset()
        seats = [s for s in self.members.workers.values() if s.member.state in (MemberState.ALIVE, MemberState.SUSPECT)]
        return frozenset(s.member.slot for s in seats if not self.replicated or self.groups.has_state(s))

    def _chief_asked(self, e: ChiefAsked, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        before = self.duty.slot
        yes = self.duty.ask(self.members, seat, self._final(), self._all_trained())
        out: list[InstructionType] = [Reply(Yes(yes))]
        if before >= 0 and before != self.duty.slot:
            words = f"worker:{before} is lost, late or about to leave"
            out.append(Note(str(seat.member.key), Decision("chief", words, {"instead_of": before})))
        return out

    def _once_asked(self, e: OnceAsked, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        if not e.done:
            if e.key not in self.duty.once and len(self.duty.once) >= ONCE_KEYS:
                return [Reply(Refused(f"job.once({e.key!r}): the job has {ONCE_KEYS} keys already"))]
            return [Reply(Yes(self.duty.claim(self.members, e.key, seat)))]
        self.duty.did(e.key, seat)
        return [Reply(Yes(True)), Note(str(seat.member.key), Decision("done once", repr(e.key)))]

    def may_end(self, slot: Slot, incarnation: Incarnation) -> bool:
        """Whether a worker of a group whose script has ended may go: nobody will need its state any more."""
        seat = self.members.current(Role.WORKER, slot, incarnation)
        if seat is None or seat.stopping or self.job.over or not self.groups.has_state(seat):
            return True
        if not self.duty.done:
            return False
        writing, groups = self.checkpoints.writing, self.state.groups
        if writing is None or writing.reason is not CheckpointReason.FINAL:
            return not ends_with_checkpoint(self.job.spec) or groups.final_for == groups.origin
        return (writing.manifest or writing.draft) is not None  # (else the one that writes it may be lost yet)

    def _final_replica(self, at: float) -> list[InstructionType]:
        """Mode allreduce: the first worker whose script is over writes what the job ends with; another one, if it is
        lost before that is done."""
        checkpoints, groups = self.checkpoints, self.state.groups
        if not groups.origin or not ends_with_checkpoint(self.job.spec):
            return []
        writing = checkpoints.writing
        if checkpoints.stopping or (writing is not None and (writing.manifest or writing.draft) is not None):
            return []
        seats = [s for s in self.members.workers.values() if s.running and not s.stopping]
        through = [s for s in seats if self.groups.has_ended(s) and self.groups.has_state(s)]
        if not through:
            return []
        if groups.final_for == groups.origin:
            if writing is not None and writing.reason is CheckpointReason.FINAL:
                slots = [s.member.slot for s in through]
                writing.writer = writing.writer if writing.writer in slots else slots[0]
            return []
        groups.final_for, checkpoints.last = groups.origin, 0
        out = checkpoints.give_up("scripts have ended, and what they end with is to be written")
        out += checkpoints.begin(self.job, at, CheckpointReason.FINAL, base=True)
        if checkpoints.writing is not None:
            checkpoints.writing.writer = through[0].member.slot
        return out

    def _nobody_saves(self, at: float) -> list[InstructionType]:
        """Mode allreduce: every worker that runs has come to the end of its script, and none of them was the chief: one
        is started that will be, while they keep the state for it."""
        workers = self.members.workers
        if not self.duty.done and self.groups.end_is_lost() and any(s.finished for s in workers.values()):
            words = "every state was lost before the chief's script had ended"
            return self._not_the_end(at, f"its script had ended, and {words}", words)
        running = [s for s in workers.values() if s.running]
        if self.duty.done or not running or not all(self.groups.has_ended(s) for s in running):
            return []
        if any(seat.waiting for slot, seat in workers.items() if slot < self.job.workers_wanted):
            return []
        return self._run_for_the_chief(at)

    def _run_for_the_chief(self, at: float) -> list[InstructionType]:
        duty, workers = self.duty, self.members.workers
        if duty.reruns >= MAX_CHIEF_RERUNS:
            error = (
                f"the result is lost: all data is trained, and in {duty.reruns + 1} runs no worker that job.chief "
                "named came to the end of the script; see logs/"
            )
            return [self._fail(RESULT_LOST, error)]
        free = [slot for slot in map(Slot, range(len(workers) + 1)) if slot not in workers or not workers[slot].running]
        slot = free[0]
        duty.reruns += 1
        duty.slot = slot
        if slot in workers:
            workers[slot].drained = workers[slot].finished = False
        why = Decision(
            "start",
            "scripts have ended, and none of them was told to be the chief: nobody may have saved the result",
            {"reruns": duty.reruns},
            ("end the job: there may be no result",),
        )
        return self._start(Role.WORKER, slot, at, why)

    def _stopped(self, seat: SlotRecord, at: float) -> list[InstructionType]:
        """A worker that was asked to leave has left; how it ended does not matter."""
        out = self._drop_leases(seat, at, "its worker was scaled in")
        set_state(seat, MemberState.LEFT, at)
        seat.stopping = False
        out.append(Note(str(seat.member.key), Decision("left", "as it was asked to")))
        if seat.member.slot < self.job.workers_wanted and not seat.drained and not self._nothing_left():
            why = Decision("start", "the job wants this worker, here or elsewhere")
            out += self._start(Role.WORKER, seat.member.slot, at, why)  # (it may find no place and wait)
        return out + self._finish_if_all_left(at)

    def _ps_gone(
        self, seat: SlotRecord, at: float, reason: str, inputs: dict[str, str | int | float | bool], failed: str
    ) -> list[InstructionType]:
        """Others take over what it had; without protection its loss is the end, unless it held nothing. ``failed``: the
        error that it told of itself: a new one would tell the same."""
        job, member = self.job, seat.member
        if seat.stopping:
            return self._ps_stopped(seat, at)
        set_state(seat, MemberState.LOST, at)
        job.ps_failures += 1
        seat.losses += 1
        seat.streak += 1
        out: list[InstructionType] = [Note(str(member.key), Decision("lost", reason, inputs))]
        if self.state.placement is None:
            if not failed and may_restart(seat.streak, min(3, job.spec.max_restarts)):
                why = Decision("restart", f"it was lost before it held anything: {reason}", inputs)
                return out + self._start(Role.PS, member.slot, at, why, replaces=True)
            return [*out, self._fail(4, f"{member.key} does not start: {reason}; see logs/ps-{member.slot}.log")]
        out += self._settle(f"{member.key} was lost ({reason})")
        self._refill(member.slot)
        if job.over or member.slot in self.state.protection.leaving or member.slot >= job.ps_wanted:
            return out
        if not may_restart(seat.streak, job.spec.max_restarts):
            if not any(other.running for other in self.members.servers.values()):
                error = (
                    f"no ps is left that could serve: {member.key} was lost {seat.streak} times in a row (last: "
                    f"{reason}); gave up after max_restarts={job.spec.max_restarts}: see logs/ps-{member.slot}.log"
                )
                return [*out, self._fail(4, error)]
            words = f"it was lost {seat.streak} times in a row (last: {reason}); the others go on without it"
            return [*out, Note(str(member.key), Decision("not started again", words, inputs))]
        why = Decision(
            "restart",
            f"it was lost: {reason}",
            {**inputs, "in_a_row": seat.streak, "max_restarts": job.spec.max_restarts},
            ("go on without it: the others hold its buckets, with less protection and memory",),
        )
        return out + self._start(Role.PS, member.slot, at, why, replaces=True)

    def _ps_stopped(self, seat: SlotRecord, at: float) -> list[InstructionType]:
        """A ps that had given everything away has ended."""
        set_state(seat, MemberState.LEFT, at)
        seat.stopping, slot = False, seat.member.slot
        out: list[InstructionType] = [Note(str(seat.member.key), Decision("left", "others have all that it held"))]
        leaving, node = self.state.protection.leaving, self.members.nodes.get(seat.member.node)
        self._refill(slot)
        if slot in leaving and (slot >= self.job.ps_wanted or (node is not None and node.draining)):
            leaving.remove(slot)
        if slot < self.job.ps_wanted and slot not in leaving:
            out += self._start(Role.PS, slot, at, Decision("start", "the job wants this ps, here or elsewhere"))
        return out

    def _refill(self, slot: Slot) -> None:
        """It has ended: whether another one may be started there, although it was emptied."""
        books = self.state.protection
        if slot in books.refill:
            books.refill.remove(slot)
            books.leaving[:] = [other for other in books.leaving if other != slot]

    def _drop_leases(self, seat: SlotRecord, at: float, reason: str) -> list[InstructionType]:
        """Every shard of this worker back to the head of TODO, oldest lease first. ``reason`` "": say nothing."""
        positions: dict[int, int] = {}
        returned: list[HeldLease] = []
        for key in seat.held:
            number = split_key(key)[0]
            position = positions.get(number, 0)
            positions[number] = position + 1
            returned.append(self.shards.take_back(key, position))
        seat.held = []
        seat.granted = {}
        if not returned or not reason:
            return []
        if len(returned) == 1:
            return [self._returned_note(seat, returned[0], reason)]
        names = ", ".join(self.shards.name(held.shard) for held in returned)
        inputs: dict[str, str | int | float | bool] = {
            "shards": len(returned),
            "leases": ", ".join(lease_words(held.no) for held in returned),
        }
        return [Note(str(seat.member.key), Decision("shards returned", f"{names}: {reason}", inputs))]

    def _returned_note(self, seat: SlotRecord, held: HeldLease, reason: str) -> Note:
        inputs: dict[str, str | int | float | bool] = {
            "shard": self.shards.name(held.shard),
            "lease": lease_words(held.no),
            "start": held.start,
            "stop": held.stop,
        }
        return Note(
            str(seat.member.key), Decision("shard returned", f"{self.shards.name(held.shard)}: {reason}", inputs)
        )

    def _blame(self, key: ShardKey, position: int, member: object) -> list[InstructionType]:
        """A worker was lost while it worked on this shard: count, and set the shard aside at the limit."""
        shards, spec = self.shards, self.job.spec
        count = shards.blame(key, position)
        if not is_poison(count, spec.quarantine_after):
            return []
        number, _, index = split_key(key)
        start, stop = shards.datasets[number].plan.bounds(index)
        name = shards.name(key)
        words = (
            f"{name} (samples {start}..{stop - 1} of the epoch's order) cost {count} workers in a row, last {member}"
        )
        finished = shards.quarantine(key, words)
        why = Decision(
            "set the shard aside",
            words,
            {"shard": name, "start": start, "stop": stop, "workers_lost": count},
            ("hand it out again: the next worker would most likely be lost too",),
        )
        out: list[InstructionType] = [Note("", why)]
        if not spec.skip_quarantined:
            error = f"{words}; look at these rows, or allow to skip them with skip_quarantined: true"
            return [*out, self._fail(1, error)]
        return out + (self._epoch_finished(key) if finished else [])

    # ------------------------------------------------------------ shards

    def _plan_registered(self, e: PlanRegistered, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        plan, shards = e.plan, self.shards
        known = shards.find(plan.name)
        if known is not None:
            for field in ("samples", "shard_samples", "seed", "fingerprint"):
                ours, its = getattr(known.plan, field), getattr(plan, field)
                if ours != its:
                    where = "checkpoint that it goes on from" if known.number < self.checkpoints.datasets else "job"
                    error = (
                        f"dataset '{plan.name}': {field} is {its!r} in worker:{told.slot}, but {ours!r} in the {where}"
                    )
                    way = "every worker must read the same data, and other data need another name: job.loader(name=)"
                    return [Reply(Refused(f"{error}; {way}"))]
            self._loop_begins(seat, known, e)
            return [Reply(Registered(known.number))]
        if plan.samples <= 0 or plan.shard_samples <= 0:
            return [
                Reply(Refused(f"dataset '{plan.name}' has {plan.samples} samples in shards of {plan.shard_samples}"))
            ]
        if plan.shards >= 1 << 32 or len(shards.datasets) >= (1 << 10) - 1:
            return [Reply(Refused(f"dataset '{plan.name}': {plan.shards} shards, or too many datasets (1023 a job)"))]
        dataset = shards.register(plan)
        self._loop_begins(seat, dataset, e)
        inputs: dict[str, str | int | float | bool] = {"samples": plan.samples, "shard_samples": plan.shard_samples}
        why = Decision("dataset registered", f"'{plan.name}': {plan.samples} samples in {plan.shards} shards", inputs)
        return [Reply(Registered(dataset.number)), Note(f"worker:{told.slot}", why)]

    def _loop_begins(self, seat: SlotRecord, dataset: Dataset, e: PlanRegistered) -> None:
        if e.loop and not self.replicated:
            dataset.said(e.loop, e.begin, e.until)
            seat.loop = max(seat.loop, e.loop)

    def _shard_asked(self, e: ShardAsked, told: Event) -> list[InstructionType]:
        by = told.sender
        seat = self.members.current(Role.WORKER, by.slot, by.incarnation)
        if seat is None:
            return [self._fence(by.slot, by.incarnation)]
        shards = self.shards
        number = e.dataset
        if not 0 <= number < len(shards.datasets):
            return [Reply(Refused(f"dataset {number} is not registered"))]
        granted = seat.granted.get(number)
        if granted is not None and (key := granted.get(e.ask)) is not None:
            return [Reply(Granted(shards.leases[key].lease))]
        newest = seat.asked.get(number, -1)
        if e.ask < newest or seat.settled.get(number) == e.ask:
            return [self._wait()]  # an old copy of a request whose answer has arrived: nobody listens
        seat.asked[number] = e.ask
        dataset = shards.datasets[number]
        dataset.epochs_known = max(dataset.epochs_known, e.until_epoch)
        for key in seat.held:  # not of those that the worker has not heard of
            if (held := shards.leases[key]).dataset == number:
                held.pending = held.no in e.pending
        if shards.over(dataset, e.until_epoch):
            shards.tell_end(dataset, e.until_epoch)
            return [_END]
        if seat.stopping or self.job.over:
            return [self._wait()]
        index = None
        for epoch in dataset.open_epochs(e.until_epoch):
            if 0 < (loop := dataset.loop_of(epoch.number)) < seat.loop:
                index = shards.next_carried(dataset, epoch)
                if index is None and epoch.returned and (sent := self._back_to(loop, seat, dataset, epoch)):
                    return [self._wait(), *sent]
            else:
                index = shards.next_index(epoch)
            if index is not None:
                break
        if index is None:
            begun = shards.begin_next(dataset, e.until_epoch)
            index = shards.next_index(begun) if begun is not None else None
            if begun is None or index is None:
                return [self._wait()]
            epoch = begun
        self.job.leases += 1
        no = lease_no(self.job.master_incarnation, self.job.leases)
        held = shards.grant(dataset, epoch, index, no, by.slot, by.incarnation, e.ask)
        seat.held.append(held.shard)
        if granted is None:
            seat.granted[number] = {e.ask: held.shard}
        else:
            granted[e.ask] = held.shard
        return [Reply(Granted(held.lease))]

    def _back_to(self, loop: int, asker: SlotRecord, dataset: Dataset, epoch: Epoch) -> list[InstructionType]:
        """Shards of this loop are to do again, and ``asker`` is in a later one. They belong to the loop that asked for
        them: unless some worker will come by there, this one begins its script anew. Where all workers make their steps
        together (sync), all do."""
        workers = self.members.workers.values()
        behind = [s for s in workers if s.running and not s.stopping and s.loop > loop]
        if any(s.running and s.loop <= loop for s in workers) or any(map(self._comes_again, workers)):
            return []
        words = (
            f"shards of '{dataset.plan.name}' e{epoch.number} came back, and every worker has passed loop {loop} of "
            "the script, which they belong to: it begins its script anew, to train them there"
        )
        if dataset.sent_back >= MAX_RERUNS:
            error = (
                f"{len(epoch.returned)} shards of '{dataset.plan.name}' e{epoch.number} came back, which belong to loop"
                f" {loop} of the script, and it did not train them when it ran again; everstep resume goes on from here"
            )
            return [self._fail(4, error)]
        dataset.sent_back += 1
        inputs: dict[str, str | int | float | bool] = {"loop": loop, "shards": len(epoch.returned)}
        why = Decision("stop", words, inputs, ("train them in a later loop: results would be others",))
        together = self.job.spec.consistency.startswith("sync")
        return [self._send_away(seat, why) for seat in (behind if together else [asker])]

    def _comes_again(self, seat: SlotRecord) -> bool:
        """Of a worker that is being ended: whether another process begins in its slot."""
        return seat.running and seat.stopping and not seat.drained and seat.member.slot < self.job.workers_wanted

    def _keep_in_its_loop(self, seat: SlotRecord, key: ShardKey) -> None:
        """This worker had the shard. It may have taken samples of it into a later loop, for a step of that one."""
        number, epoch, _ = split_key(key)
        if 0 < self.shards.datasets[number].loop_of(epoch) < seat.loop and not seat.stopping:
            self.shards.carried.add(key)

    def _wait(self) -> Reply:
        return Reply(Wait(max(WAIT_MIN_S, len(self.members.workers) / WAIT_WORKERS_PER_S)))

    def _held_by(self, seat: SlotRecord, key: ShardKey, lease: int) -> HeldLease | None:
        held = self.shards.leases.get(key)
        if held is None or held.no != lease or held.worker != seat.member.slot:
            return None
        return held

    def _release_hold(self, seat: SlotRecord, held: HeldLease, settled: bool) -> None:
        """Take the lease out of the worker's books. ``settled``: by the worker itself, so it had the answer."""
        seat.held.remove(held.shard)
        granted = seat.granted.get(held.dataset)
        if granted is not None:
            granted.pop(held.ask, None)
        if settled and held.ask >= 0:
            seat.settled[held.dataset] = max(held.ask, seat.settled.get(held.dataset, -1))

    def _shard_done(self, e: ShardDone, told: Event) -> list[InstructionType]:
        by = told.sender
        seat = self.members.current(Role.WORKER, by.slot, by.incarnation)
        if seat is None:
            return [self._fence(by.slot, by.incarnation)]
        held = self._held_by(seat, e.shard, e.lease)
        if held is None:
            if e.lease in seat.done:
                return [_OK]
            return [Reply(Refused(f"lease {lease_words(e.lease)} of {self.shards.name(e.shard)} is not current"))]
        dead = self.keeper.unacknowledged(e.servers, e.route)
        if dead:
            self._release_hold(seat, held, settled=True)
            self.shards.take_back(e.shard, 0)
            return [Reply(Refused(f"reopened: {dead}")), self._returned_note(seat, held, dead)]
        self._release_hold(seat, held, settled=True)
        seat.done.append(held.no)
        if len(seat.done) > DONE_REMEMBERED:
            del seat.done[0]
        seat.streak, seat.failures = 0, 0
        skipped = sum(hi - lo for lo, hi in e.skipped)
        finished = self.shards.done(e.shard, skipped, told.at)
        out: list[InstructionType] = [_OK]
        if skipped:
            ranges = ", ".join(f"{lo}..{hi - 1}" for lo, hi in e.skipped)
            words = f"{self.shards.name(e.shard)}: samples {ranges} gave gradients that are not finite"
            why = Decision("samples skipped", words, {"samples": skipped, "policy": self.job.spec.nonfinite})
            out.append(Note(str(seat.member.key), why))
        if finished:
            out += self._epoch_finished(e.shard)
        else:
            out += self.checkpoints.release_due(self.job, self.shards, finished=False)
        return out

    def _epoch_finished(self, key: ShardKey) -> list[InstructionType]:
        out = self.checkpoints.release_due(self.job, self.shards, finished=True)
        number, number_epoch, _ = split_key(key)
        dataset: Dataset = self.shards.datasets[number]
        epoch: Epoch = dataset.epochs[number_epoch]
        words = f"'{dataset.plan.name}' epoch {number_epoch}: all {epoch.shards} shards are done"
        if epoch.quarantined:
            aside = len(epoch.quarantined)
            words = f"'{dataset.plan.name}' epoch {number_epoch}: {epoch.done} shards done, {aside} set aside"
        inputs: dict[str, str | int | float | bool] = {"samples": epoch.samples_done, "shards": epoch.done}
        out.append(Note("", Decision("epoch finished", words, inputs)))
        return out

    def _shard_returned(self, e: ShardReturned, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        held = self._held_by(seat, e.shard, e.lease)
        if held is None:
            return [_OK]
        self._release_hold(seat, held, settled=True)
        self.shards.take_back(e.shard, 0)
        self._keep_in_its_loop(seat, e.shard)
        return [_OK] if e.late else [_OK, self._returned_note(seat, held, e.reason or "given back")]

    def _lease_expired(self, e: LeaseExpired, told: Event) -> list[InstructionType]:
        held = self.shards.leases.get(e.shard)
        if held is None or held.no != e.lease or self.job.over:
            return []
        seat = self.members.workers[held.worker]
        self._release_hold(seat, held, settled=False)
        self.shards.take_back(e.shard, 0)
        self._keep_in_its_loop(seat, e.shard)
        why = Decision(
            "revoke the lease",
            f"no progress on {self.shards.name(e.shard)} for {e.idle_s:.0f} s",
            {"idle_s": round(e.idle_s, 3), "lease_s": self.job.spec.lease_s, "lease": lease_words(held.no)},
            ("replace the worker: it still sends heartbeats",),
        )
        return [
            RevokeLease(seat.member.key, held.no, why),
            self._returned_note(seat, held, f"no progress for {e.idle_s:.0f} s"),
        ]

    # ------------------------------------------------------------ the group

    def _start_of_line(self) -> tuple[Mark, int]:
        """Where a group begins of which nobody has a state: place and checkpoint."""
        return replica_start(self.checkpoints)

    def _group_asked(self, e: GroupAsked, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        if not self.replicated:
            return [Reply(Refused("this job trains in mode ps: start it with --mode allreduce, or use job.sparse"))]
        if self.job.over:
            return [_END]
        if self.groups.over_for(seat, e):
            self.groups.told_over(seat)
            return [_END]
        refused = self.groups.asks(seat, e)
        if refused is not None:
            return [Reply(refused)]
        out, home = self.groups.settle(told.at), self.groups.too_late(e)
        out += home
        if not home and seat.stopping and (not self.groups.trains(seat) or self.groups.left_to_wait(seat)):
            m, why = seat.member, Decision("stop", "it was asked to leave; its agent may not have heard")
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, STOP_GRACE_S, why))
        return [self.groups.grouped(e.dataset), *out]

    def _group_synced(self, e: GroupSynced, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        before = self.state.groups.confirmed
        out: list[InstructionType] = [_OK, *self.groups.synced(seat, e.generation)]
        if self.state.groups.confirmed != before:
            out += self.groups.settle(told.at)
        return out

    def _group_left(self, e: GroupLeft, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        before = self.groups.last_ones_leave()
        self.groups.leaves(seat, e.reason)
        if e.reason is LeaveReason.DONE and not seat.stopping:
            self.duty.ended_well(self.members, seat)
        out = self._save_for_leavers(before, told.at)
        out += self.groups.settle(told.at)
        return [self.groups.grouped(0), *out]

    def _save_for_leavers(self, before: bool, at: float) -> list[InstructionType]:
        """A checkpoint if the last ones that have the state were asked to go just now (``before``: they had been)."""
        out: list[InstructionType] = []
        if not before and self.groups.last_ones_leave():
            more = self.groups.steps_on()
            why = CheckpointReason.RECLAIM
            out = save_in_time(self.checkpoints, self.job, self.state.groups, why, at, more)
        self._tell_groups()
        return out

    def _tell_groups(self) -> None:
        """What the groups' keeper has to know of checkpoints."""
        writing, groups = self.checkpoints.writing, self.groups
        groups.start = self._start_of_line()
        groups.saving = writing is not None
        groups.committing = writing is not None and writing.manifest is not None
        groups.void = bool(self.state.protection.ending)

    def _group_stalled(self, e: GroupStalled, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        if self.job.over:
            return [_OK]
        out: list[InstructionType] = []
        for slot in e.silent:
            silent = self.members.workers.get(slot)
            if silent is None or silent is seat or not silent.running or not self.groups.trains(silent):
                continue
            m = silent.member
            reason = f"worker:{told.slot} waits for it in step {e.step} for {e.waited_s:.1f} s, and it is not heard"
            why = Decision("stop", f"it was declared lost ({reason}); it must not come back to life")
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, 0.0, why))
            inputs: dict[str, str | int | float | bool] = {"waited_s": round(e.waited_s, 3), "step": e.step}
            self._await_word(m.node, told.at)
            out += self._gone(silent, told.at, reason, inputs)
            if self.job.over:
                return [_OK, *out]
        last, reason = self.groups.stuck(told.slot, e.generation, e.waited_s, told.at)
        if last is not None:
            m = last.member
            out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, 0.0, Decision("stop", reason)))
            facts: dict[str, str | int | float | bool] = {"waited_s": round(e.waited_s, 3), "step": e.step}
            out += self._gone(last, told.at, reason, facts, node_lost=True)  # (not the script's fault)
            if self.job.over:
                return [_OK, *out]
        self.groups.stalled(e.generation)
        out += self.groups.settle(told.at)
        group = self.state.groups.group
        stale = group is not None and group.generation != e.generation
        return [self.groups.grouped(0) if stale else _OK, *out]

    def _steps_committed(self, e: StepsCommitted, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        if self.job.over:
            return [_OK]
        out, error = self.groups.committed(e, told)
        if error:
            return [_OK, *out, self._fail(3, error)]
        return [_OK, *out]

    # ------------------------------------------------------------ checkpoints

    def _checkpoint_asked(self, e: CheckpointAsked, told: Event) -> list[InstructionType]:
        job, checkpoints = self.job, self.checkpoints
        if job.over:
            return [Reply(Refused("the job is over"))]
        if self.replicated and self.state.groups.group is None:
            return [Reply(Refused("the job has no state yet: no group of workers has begun"))]
        if not self.replicated and self.state.placement is None:
            return [Reply(Refused("the job has no parameters yet: not every ps has joined"))]
        out = checkpoints.late(told.at)
        if e.reason is not CheckpointReason.LATE:
            out += checkpoints.begin(job, told.at, e.reason, e.base or self.replicated)
        else:
            out += self._finish_if_all_left(told.at)
        return [Reply(CheckpointBegun(checkpoints.numbers)), *out]

    def _images_written(self, e: ImagesWritten, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.PS, told.slot, told.incarnation)
        if seat is None:
            return [Reply(Fenced(f"ps:{told.slot} #{told.incarnation} was replaced"))]
        if self.job.over:
            return [_OK]
        writing = self.checkpoints.writing
        draft = writing.draft if writing is not None else None
        if draft is not None and draft.replica is not None and draft.replica.origin != self.state.groups.origin:
            return [
                _OK,
                *self.checkpoints.give_up("every state was lost meanwhile; its replica is of steps that are void"),
            ]
        owned = set(self.placement.owned_by(told.slot)) if self.placement is not None else set()
        took = self.checkpoints.take(
            self.job, self.shards, told.at, told.slot, e.checkpoint, e.images, e.tables, e.error, owned
        )
        return [_OK, *took, *self._finish_if_all_left(told.at)]

    def _replica_written(self, e: ReplicaWritten, told: Event) -> list[InstructionType]:
        seat = self.members.current(Role.WORKER, told.slot, told.incarnation)
        if seat is None:
            return [self._fence(told.slot, told.incarnation)]
        if self.job.over:
            return [_OK]
        out, again = take_replica(
            self.checkpoints,
            self.job,
            self.shards,
            self.state.groups,
            e.checkpoint,
            told.slot,
            e.replica,
            e.error,
            told.at,
        )
        return [Reply(Refused(again)) if again else _OK, *out]

    def _job_resumed(self, e: JobResumed, told: Event) -> list[InstructionType]:
        if self.replicated:
            return resume_replica(self.checkpoints, self.job, self.shards, self.groups, e.manifest, e.url, e.numbers)
        return self.checkpoints.resume(self.job, self.shards, e.manifest, e.url, e.numbers)

    def _checkpoint_committed(self, e: CheckpointCommitted, told: Event) -> list[InstructionType]:
        pinned = {number for _, number in self.placement.images} if self.placement is not None else set()
        out = self.checkpoints.commit(self.job, self.shards, told.at, e.checkpoint, e.error, pinned)
        return out + self._finish_if_all_left(told.at)

    # ------------------------------------------------------------ commands and the end

    def _scale_asked(self, e: ScaleAsked, told: Event) -> list[InstructionType]:
        """All or nothing: a plan for both roles is refused as a whole."""
        job = self.job
        if job.over:
            return [Reply(Refused("the job is over"))]
        wanted = {e.role: e.count, **dict(e.also)}
        for role, count in wanted.items():
            error = f"the number of {role}s cannot be changed"
            if role is Role.WORKER:
                error = refuse_workers(count)
            elif role is Role.PS and not job.spec.ps:
                error = "this job of mode allreduce has no ps: every worker has the whole model"
            elif role is Role.PS:
                error = refuse_ps(count, self.keeper.code, job.spec.buckets)
                if not error and self.state.placement is None:
                    error = "not yet: not every ps has joined"
            if error:
                return [Reply(Refused(error))]
        out: list[InstructionType] = [_OK]
        if Role.PS in wanted:  # first: where there are more of both, the rows have a place when the workers come
            out += self._scale_ps(wanted[Role.PS], told.at)
        if Role.WORKER in wanted:
            out += self._scale_workers(wanted[Role.WORKER], told.at)
        return out

    def _scale_workers(self, count: int, at: float) -> list[InstructionType]:
        job, workers = self.job, self.members.workers
        old, job.workers_wanted = job.workers_wanted, count
        out: list[InstructionType] = []
        if count != old:
            inputs: dict[str, str | int | float | bool] = {"from": old, "to": count}
            out.append(Note("", Decision("scale workers", f"asked for {count} instead of {old}", inputs)))
        for slot in map(Slot, range(count, old)):
            seat = workers.get(slot)
            if seat is None:
                continue
            seat.waiting = False
            if not seat.running or seat.stopping:
                continue
            why = Decision("stop", f"scaled in to {count} workers; the highest slots leave", {"to": count})
            out.append(self._send_away(seat, why, 0.0))
        drained = [slot for slot, seat in workers.items() if seat.drained and slot < old]
        rooms = Rooms(self.members, Role.WORKER)
        for slot in sorted({*map(Slot, range(old, count)), *drained} & set(map(Slot, range(count)))):
            seat = workers.get(slot)
            if seat is not None:
                seat.drained = False
            if seat is None or (not seat.running and not seat.finished):
                if seat is not None:
                    seat.waiting = True
                why = Decision("start", f"scaled out to {count} workers", {"to": count})
                out += self._start(Role.WORKER, slot, at, why, rooms)
        return out

    def _scale_ps(self, count: int, at: float) -> list[InstructionType]:
        """The highest slots give everything away and end; new ones get their share when they have joined."""
        job, servers, leaving = self.job, self.members.servers, self.state.protection.leaving
        old, job.ps_wanted = job.ps_wanted, count
        out: list[InstructionType] = []
        if count != old:
            inputs: dict[str, str | int | float | bool] = {"from": old, "to": count}
            out.append(Note("", Decision("scale ps", f"asked for {count} instead of {old}", inputs)))
        leaving[:] = [slot for slot, seat in sorted(servers.items()) if slot >= count and seat.running]
        for slot, seat in servers.items():
            if slot >= count:
                seat.waiting = False
                if seat.member.state is MemberState.STARTING:  # it has nothing yet
                    seat.stopping = True
                    m, why = seat.member, Decision("stop", f"scaled in to {count} ps before it had joined")
                    out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, 0.0, why))
        wave = []
        rooms = Rooms(self.members, Role.PS)
        for slot in map(Slot, range(count)):
            known = servers.get(slot)
            if known is None or not known.running:
                why = Decision("start", f"scaled out to {count} ps", {"to": count})
                out += self._start(Role.PS, slot, at, why, rooms)
                wave.append(slot)
        self.state.protection.wave = wave
        return out + self._settle(f"scaled from {old} to {count} ps")

    def _send_away(self, seat: SlotRecord, why: Decision, grace_s: float = STOP_GRACE_S) -> StopProcess | Note:
        """``grace_s`` 0: as long as it takes."""
        seat.stopping = True
        m = seat.member
        if not grace_s and self.replicated and self.groups.member(seat):
            # told to end when the group has changed over to one without it: a step may take longer than any grace
            return Note(str(m.key), Decision("leave", f"{why.reason}; it leaves the group first", why.inputs))
        grace_s = grace_s or STOP_GRACE_S
        return StopProcess(m.node, m.role, m.slot, m.incarnation, grace_s, why)

    def _drain_asked(self, e: DrainAsked, told: Event) -> list[InstructionType]:
        """Empty a member, or all members of a node, so that nothing is lost when it goes."""
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        members = self.members
        node = members.nodes.get(NodeId(e.target))
        if node is not None:
            if node.node == HOME_NODE:
                return [Reply(Refused(f"{e.target} has the job's master: everstep stop ends the job"))]
            seats = [seat for seat in members.on(node.node) if seat.running]
        else:
            role, _, number = e.target.partition(":")
            seat = None
            if role in (Role.WORKER, Role.PS) and number.isascii() and number.isdigit():
                seat = members.of(Role(role)).get(Slot(int(number)))
            if seat is None or not seat.running:
                return [Reply(Refused(f"{e.target!r} is no node, and no running worker or ps such as ps:1"))]
            seats = [seat]
        servers = [seat.member.slot for seat in seats if seat.member.role is Role.PS and not seat.stopping]
        leaving = self.state.protection.leaving
        left = [m.slot for m in self.keeper.servers() if m.slot not in leaving and m.slot not in servers]
        if servers and self.state.placement is None:
            return [Reply(Refused(f"{e.target}: not yet: not every ps has joined"))]
        if servers and not left:
            return [Reply(Refused(f"{e.target}: no other ps could take its buckets; first: everstep scale --ps N"))]
        if node is not None:
            node.draining = True
        out: list[InstructionType] = [_OK]
        words = f"empty it within {e.deadline_s:g} s" if e.deadline_s else "empty it"
        words += f": {', '.join(str(seat.member.key) for seat in seats) or 'nothing'}"
        words += ", and start another process in its place" if e.again else ""
        less = after_drain(self.keeper.code, len(left)) if servers else ""
        words += f"; {less}" if less else ""
        inputs: dict[str, str | int | float | bool] = {"deadline_s": e.deadline_s, "buckets": 0}
        inputs["buckets"] = sum(self.keeper.left_at(slot) for slot in servers)
        out.append(Note(e.target, Decision("drain", words, inputs)))
        for seat in seats:
            if seat.member.role is Role.WORKER and not seat.stopping:
                seat.drained = node is None
                why = Decision("stop", f"{e.target} is to be emptied")
                grace_s = e.deadline_s if self.replicated else min(STOP_GRACE_S, e.deadline_s)
                out.append(self._send_away(seat, why, grace_s))
        leaving[:] = sorted({*leaving, *servers})
        if e.again:
            self.state.protection.refill = sorted({*self.state.protection.refill, *servers})
        return out + self._settle(f"{e.target} is to be emptied")

    def _hot_buckets(self, e: HotBuckets, told: Event) -> list[InstructionType]:
        """Move them, if nothing else is on its way and no policy divides them: it goes by time where this goes by rows,
        so one would take back what the other gives."""
        plan = self.state.control.plan
        if plan is not None and any(isinstance(action, MoveBuckets) for action in plan.actions):
            return []
        if self.job.over or not self.keeper.at_rest():
            return []
        moved = self.keeper.spread(e.moves)
        if not moved:
            return []
        loads = ", ".join(f"ps:{slot} {rows}" for slot, rows in e.loads)
        words = f"ps:{moved[0].source} has too much to do ({loads} rows a second)"
        inputs: dict[str, str | int | float | bool] = {f"bucket {m.bucket}": f"to ps:{m.target}" for m in moved}
        rejected = ("leave them: the slowest ps sets everybody's pace", "move all: each move costs contents once")
        return [Note("", Decision("move hot buckets", words, inputs, rejected)), *self._settle("buckets are hot")]

    # ------------------------------------------------------------ plans of policies

    def _policy_disabled(self, e: PolicyDisabled, told: Event) -> list[InstructionType]:
        control = self.state.control
        if control.disabled or self.job.over:
            return []
        control.disabled = e.error
        words = f"policy {e.policy}: {e.error}; it is asked no more, and the job goes on with the last plan"
        inputs: dict[str, str | int | float | bool] = {"policy": e.policy, "plans": control.version}
        return [Note("", Decision("disable the policy", words, inputs))]

    def _plan_made(self, e: PlanMade, told: Event) -> list[InstructionType]:
        """Do all of it, or nothing: members may have come and gone since the policy looked."""
        control, plan = self.state.control, e.plan
        if self.job.over or control.disabled:
            return []
        here = {
            role: {s.member.slot: s.member.incarnation for s in seats.values() if s.running and not s.stopping}
            for role, seats in ((Role.WORKER, self.members.workers), (Role.PS, self.members.servers))
        }
        starting = [s for s in self.members.all() if s.member.state is MemberState.STARTING]
        why = stale(plan, self.job, here, str(starting[0].member.key) if starting else "")
        moves = next((a for a in plan.actions if isinstance(a, MoveBuckets)), None)
        adjusts = [a for a in plan.actions if isinstance(a, AdjustBatch | AdjustAccum | AdjustRate)]
        if not why and moves is not None and not (self.state.placement is not None and self.keeper.at_rest()):
            why = "buckets are under way"
        for action in plan.actions:
            if not why and isinstance(action, KillRestart):
                if action.role is Role.PS and action.slot in self.state.protection.leaving:
                    why = f"ps:{action.slot} is being emptied"  # (it may have been asked to go for good)
                elif action.role is Role.WORKER and self.replicated:
                    why = self.groups.cannot_replace(action.slot, action.incarnation)
        if not why and adjusts and self.replicated:
            why = self.groups.cannot_divide(next((a.batch for a in adjusts if isinstance(a, AdjustBatch)), {}))
        if why:
            dropped = Decision("drop a plan", f"{plan.decision}: {why}", plan.decision.inputs)
            return [Note("", dropped)]
        control.version += 1
        step = self.state.groups.step if self.replicated else 0
        plan = msgspec.structs.replace(plan, version=control.version, effective_step=step and step + 1)
        control.plan = plan
        inputs = {**plan.decision.inputs, "plan": plan.version, "policy": e.policy}
        decision = msgspec.structs.replace(plan.decision, inputs=inputs)
        out: list[InstructionType] = [Note("", decision)]
        if adjusts and not self.replicated:
            divide(control, plan.actions, here[Role.WORKER])
        elif adjusts:
            out += self.groups.adjust(adjusts, Decision("divide steps", plan.decision.reason, {"plan": plan.version}))
        for action in plan.actions:
            out += self._act(action, decision, told)
        return [x for x in out if not isinstance(x, Reply)]

    def _act(self, action: Action, decision: Decision, told: Event) -> list[InstructionType]:
        match action:
            case KillRestart(role=role, slot=slot):
                seat = self.members.of(role)[slot]
                before, seat.avoid = seat.avoid, seat.member.node
                if role is Role.PS:
                    out = self._drain_asked(DrainAsked(str(seat.member.key), 0.0, again=True), told)
                    if isinstance(out[0], Reply) and isinstance(refused := out[0].answer, Refused):
                        seat.avoid = before
                        return [Note("", Decision("drop a plan", f"{decision}: {refused.error}"))]
                else:
                    out = [self._send_away(seat, Decision("stop", decision.reason, {"restart": True}), 0.0)]
                self.state.control.restarts += 1
                self.state.control.restarted_at = told.at
                return out
            case MoveBuckets(owners=owners):
                placement = self.state.placement
                assert placement is not None
                moves = [HotMove(bucket, placement.owner[bucket], slot) for bucket, slot in owners.items()]
                moved = self.keeper.spread(moves)
                return (
                    self._settle(f"{len(moved)} buckets change hands by plan {self.state.control.version}")
                    if moved
                    else []
                )
            case Scale(workers=count):
                return self._scale_workers(count, told.at)
            case BackupWorkers(backup=backup):
                self.state.control.backup = backup  # from the next step on: see brain.pacing
                return []
            case _:
                return []

    def _stop_asked(self, e: StopAsked, told: Event) -> list[InstructionType]:
        if self.job.over:
            return [_OK, FinishJob(cast(int, self.job.exit_code), self.job.error)]
        trained = any(dataset.epochs for dataset in self.shards.datasets)
        if self.replicated:  # something that is in no checkpoint yet, and somebody to write it
            begun = replica_start(self.checkpoints)[0].step
            trained = self.groups.view() is not None and (self.state.groups.step > begun or self.groups.steps_on())
            writing = self.checkpoints.writing  # or what the job ends with: its workers may have gone
            trained = trained or (writing is not None and writing.reason is CheckpointReason.FINAL)
        if e.checkpoint and ends_with_checkpoint(self.job.spec) and trained:
            if self.checkpoints.stopping:
                return [_OK]
            self.checkpoints.stopping = e.reason
            why = Decision("stop the job", f"{e.reason}: after a last checkpoint", {}, ("stop it at once",))
            return [_OK, Note("", why), *self._stop_when_saved(told.at)]
        why = Decision("stop the job", e.reason)
        return [_OK, Note("", why), self.job.finish(Phase.STOPPED, 0, "")]

    def _remark_made(self, e: RemarkMade, told: Event) -> list[InstructionType]:
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        return [_OK, Note("", Decision("remark", e.text))]

    def _stop_when_saved(self, at: float) -> list[InstructionType]:
        """Towards the end of a job that was asked to stop with a last checkpoint, committed or given up."""
        if not self.checkpoints.stopped:
            # (nothing while another one is written)
            return self.checkpoints.begin(self.job, at, CheckpointReason.STOP, base=False)
        why = Decision("stop the job", self.checkpoints.stopping)
        return [Note("", why), self.job.finish(Phase.STOPPED, 0, "")]

    def _train_again(self, at: float) -> list[InstructionType]:
        """Shards came back after scripts had ended, as a ps was lost, or a worker that had not stepped with what was
        left: somebody must train them."""
        shards = self.shards
        left = ", ".join(shards.name(key) for key in sorted(shards.came_back)[:3])
        words = f"{len(shards.came_back)} shards came back after every script had ended ({left}, ...)"
        slot = min(slot for slot, seat in self.members.workers.items() if seat.finished)
        if self.checkpoints.reruns >= MAX_RERUNS:
            error = f"{words} and the script did not train them when it ran again; everstep resume goes on from here"
            return [self._fail(4, error)]
        if self.members.workers[slot].waiting:
            return []  # for a node with a place
        self.checkpoints.not_the_end()
        self.duty.undone()
        self.members.workers[slot].finished = False
        why = Decision("start", words, {"shards": len(shards.came_back)}, ("end the job: results would be wrong",))
        return self._start(Role.WORKER, slot, at, why)

    def _not_the_end(
        self,
        at: float,
        words: str = "its script had ended, and buckets went back to what is older than its result",
        what: str = "buckets were lost while scripts ended",
    ) -> list[InstructionType]:
        """Buckets of a group's tables go back to what is older than the state that its scripts end with. Whose script
        had ended runs it again, once the others have ended too: from them it would copy what does not count."""
        out: list[InstructionType] = []
        ended = [seat for seat in self.members.workers.values() if seat.finished]
        for seat in ended:
            seat.finished, seat.waiting = False, True
            self.duty.undone()
            out.append(Note(str(seat.member.key), Decision("not the end", words)))
        if ended:
            if self.checkpoints.reruns >= MAX_RERUNS:
                error = f"the result is lost: {what}, {MAX_RERUNS + 1} times; everstep resume goes on from here"
                return [*out, self._fail(RESULT_LOST, error)]
            self.checkpoints.not_the_end()
        if not self.state.protection.gone:
            out += self._fill(at)
        return out

    def _finish_if_all_left(self, at: float) -> list[InstructionType]:
        """The job is done when every script ran to its end and nobody is left who could still train."""
        seats = self.members.workers.values()
        writers = not self.replicated or any(s.running for s in seats)  # (a state goes with its last process)
        if self.checkpoints.stopping and not self.job.over and (writers or self.checkpoints.stopped):
            return self._stop_when_saved(at)
        if self.job.over or not any(s.finished for s in seats) or any(s.running for s in seats):
            return []
        if not any(dataset.epochs_known for dataset in self.shards.datasets):
            error = "the script ended without taking a batch from job.steps(...): nothing was trained"
            return [self._fail(1, error)]
        if self.shards.came_back:
            return self._train_again(at)
        self.duty.settle(self.members)
        if not self.duty.done:
            return self._run_for_the_chief(at)
        writing = self.checkpoints.writing
        final = writing is not None and writing.reason is CheckpointReason.FINAL
        unsaved = final and writing is not None and (writing.manifest or writing.draft) is None
        if self.replicated and unsaved:
            what = "every state was lost before what the job ends with was written"
            return self._not_the_end(at, f"its script had ended, and {what}", what)
        if (last := self.checkpoints.finish(self.job, at)) is not None:
            return last
        why = Decision("finish the job", "every worker's script ran to its end", {"samples": self.shards.samples_done})
        return [Note("", why), self.job.finish(Phase.DONE, 0, "")]

    def _fail(self, exit_code: int, error: str) -> FinishJob:
        return self.job.finish(Phase.FAILED, exit_code, error)

    def _fence(self, worker: Slot, incarnation: Incarnation) -> Reply:
        seat = self.members.workers.get(worker)
        if seat is None:
            return Reply(Fenced(f"worker:{worker} is not a member of this job"))
        return _fenced(Role.WORKER, worker, incarnation, seat)

    def doing(self) -> Iterator[HeldLease]:
        """Current leases, for a display."""
        yield from self.shards.leases.values()


def _fenced(role: Role, slot: Slot, incarnation: Incarnation, seat: SlotRecord) -> Reply:
    now = seat.member
    return Reply(Fenced(f"{role}:{slot} #{incarnation} was replaced (the slot is #{now.incarnation}, {now.state})"))


_CRASHES = frozenset({-4, -6, -7, -8, -11})  # ILL, ABRT, BUS, FPE, SEGV: of its own doing


__all__ = ["Brain", "State"]
