"""Defines what the brain is told (events) and what it wants done (instructions).

One struct for each fact: it is the request on the wire, what the brain handles, and, in an :class:`Event` that the
master stamps, the journal's entry. The brain's state is the fold of its events. The shell answers a request with the
``Reply`` instruction that handling its event returned. Members say things more than once and in any order after a
reconnect: every event is harmless when repeated.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from everstep.bounds import ExitStatus, HostName, Members, PlaceName, Places, PriceUsd, Seconds, Whole, WholeOrNone
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, PartitionId, ShardKey, Slot
from everstep.model.capacity import CapacityStep, Market
from everstep.model.decision import Decision
from everstep.model.failure import Failure
from everstep.model.group import Committed, Group, HeldCopy, Position
from everstep.model.member import Address, MemberKey, Role
from everstep.model.memory_limit import MemoryLimit, OutOfMemory
from everstep.model.placement import Placement
from everstep.model.plan import Plan as PolicyPlan
from everstep.model.process_size import ProcessSize
from everstep.model.reasons import Arrival, CheckpointReason, LeaveReason
from everstep.model.shard import Lease, ShardSchedule
from everstep.model.snapshot import Holdings, Manifest, PartitionSnapshot, ReplicaCopy
from everstep.model.spent import Spent
from everstep.model.spot_choice import SpotChoice
from everstep.model.table import TableSpec
from everstep.policies.hot import AlonePartition, HotMove

# ---------------------------------------------------------------- events


class Fact(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Is the base of what the brain is told: by a request, or by the master, which noticed it. The same struct is the
    request on the wire, what the brain handles, and what the journal keeps."""


class MasterStarted(Fact, frozen=True, tag="master_started"):
    """A master took over the journal. Its incarnation numbers its leases and fences older masters. ``settles``: its
    brain settles after each fact until nothing more follows. Brains of before this release asked each concern once, so
    that some instructions came with the next fact, and let workers train on while a job that is asked to stop takes its
    last checkpoint; what their masters recorded is replayed in their way. ``empties``, likewise: a node that is drained
    is emptied also where too few ps are left for the parity. ``ranks``, likewise: of ps that leave, what would be lost
    with them goes to others first. ``refills``, likewise: a place that becomes free is taken by a process that
    waits for one, and a job that is scaled goes on emptying the nodes that are drained. ``saves``, likewise: mode ps
    takes a checkpoint where a node goes with partitions of which nobody else has a complete copy. ``flows``, likewise:
    a ps that leaves begins to move its next partitions while others of it are on their way. ``keeps``, likewise:
    a ps that leaves keeps the mirrors that have no place elsewhere until it has given its partitions away. ``frees``,
    likewise: a member that waits in a group whose others have come to the end of their scripts leaves it, and hears
    that its loop is over. ``recalls``, likewise: what a ps has no way to get is remembered until those workers have
    ended that must not see it begin again. ``awaits``, likewise: after the loss of a ps, partitions move when what was
    lost is rebuilt and the ps in its place has joined. ``resizes``, likewise: if a process died of a limit of its own,
    the next ones of its role get more memory, once. ``lengthens``, likewise: a job that was suspended before it trained
    waits longer the next time. ``concludes``, likewise: a ps that was told to end before it began has left when its
    agent does not know it; a job whose last checkpoint is given up as a ps is lost ends without it, or is not
    suspended. ``raises``, likewise: a ps that has almost reached a limit of its own gets more memory, once, and so
    do those that run, also after a death."""

    incarnation: Incarnation
    spec: JobSpec
    settles: bool = False
    empties: bool = False
    ranks: bool = False
    refills: bool = False
    saves: bool = False
    flows: bool = False
    keeps: bool = False
    frees: bool = False
    recalls: bool = False
    awaits: bool = False
    resizes: bool = False
    lengthens: bool = False
    concludes: bool = False
    raises: bool = False


RULES: Final[dict[str, bool]] = dict.fromkeys(
    (
        "settles",
        "empties",
        "ranks",
        "refills",
        "saves",
        "flows",
        "keeps",
        "frees",
        "recalls",
        "awaits",
        "resizes",
        "lengthens",
        "concludes",
        "raises",
    ),
    True,
)
"""What today's masters say of themselves in :class:`MasterStarted`."""


class NodeJoined(Fact, frozen=True, tag="node_joined"):
    """An agent said hello (also after a reconnect or a master restart), with what it runs now."""

    node: NodeId
    host: HostName  # address by which other nodes reach its processes; "" on one machine
    worker_places: Places  # how many workers it takes; 0: as many as the job wants
    ps_places: Places
    running: tuple[tuple[Role, Slot, Incarnation, Whole], ...] = ()  # role, slot, incarnation, pid
    hardware: str = ""  # the class of its machine: members on machines of one class should be equally fast
    returns: Whole = 0  # how often it was emptied because it was to go away, and stayed
    zone: PlaceName = ""  # where its machine is, as prices name it
    market: Market | None = None  # whether the platform may take its machine back; None: nobody said
    machine: PlaceName = ""  # nodes of one machine are lost together; "": it is the only one of its machine
    copies: Address | None = None  # where it keeps copies of stages for workers of other nodes (mode pipeline)
    memory_bytes: Whole = 0  # that one process may have there at most; 0: not told
    memory_limit: MemoryLimit = MemoryLimit.NONE  # who says so: its machine, its container, its user's limit


class NodeLost(Fact, frozen=True, tag="node_lost"):
    node: NodeId
    reason: str


class NodeHeard(Fact, frozen=True, tag="node_heard"):
    """The agent of a node gave a sign of life after one of its processes was declared lost for its silence
    (``Node.quiet_since``)."""

    node: NodeId


class MemberJoined(Fact, frozen=True, tag="member_joined"):
    """A worker or ps said hello (also after a reconnect). A worker tells which leases it holds. Answer: Welcome |
    Fenced."""

    role: Role
    slot: Slot
    incarnation: Incarnation
    node: NodeId
    pid: Whole
    address: Address | None = None
    leases: tuple[Lease, ...] = ()
    holds: Holdings | None = None  # a ps: what it holds


class MirrorsReady(Fact, frozen=True, tag="mirrors_ready"):
    """A ps has everything of these mirrors' members. ``inconsistent``: mirrors that lack something for good. Answer: Ok
    | Fenced."""

    mirrors: tuple[Whole, ...]
    inconsistent: tuple[Whole, ...] = ()


class PartitionsReady(Fact, frozen=True, tag="buckets_ready"):
    """Says that partitions which a placement gave to a ps are whole there; ``how`` STUCK: they are not, and the ps has
    no way to get them. Answer: Ok | Fenced."""

    placement: Whole  # version
    partitions: tuple[PartitionId, ...]
    how: Arrival


class LoadFailed(Fact, frozen=True, tag="load_failed"):
    """A ps cannot load the snapshot of a partition that a placement gave it (``error``, one line). Answer: Ok |
    Fenced."""

    placement: Whole  # version
    partition: PartitionId
    checkpoint: Whole
    error: str


class MemoryShort(Fact, frozen=True, tag="memory_short"):
    """A ps has almost reached the limit of memory of its process; its pushes wait for a moment for a higher one.
    Answer: Ok | Fenced."""

    limit_bytes: Whole
    used_bytes: Whole


class SnapshotsWritten(Fact, frozen=True, tag="images_written"):
    """A ps wrote its part of a checkpoint durably, or could not (``error``, one line). Answer: Ok | Fenced."""

    checkpoint: Whole
    snapshots: tuple[PartitionSnapshot, ...] = ()
    tables: tuple[TableSpec, ...] = ()
    error: str = ""


class ReplicaWritten(Fact, frozen=True, tag="replica_written"):
    """Mode allreduce: a worker wrote its state durably, for a checkpoint, or could not (``error``, one line).
    Answer: Ok | Refused (say it again, a little later) | Fenced."""

    checkpoint: Whole
    replica: ReplicaCopy | None = None
    error: str = ""


class CheckpointCommitted(Fact, frozen=True, tag="checkpoint_committed"):
    """Says that the manifest which the brain ordered is durable; or it could not be written (``error``)."""

    checkpoint: int
    error: str = ""


class CheckpointAsked(Fact, frozen=True, tag="checkpoint_asked", rename={"full": "base"}):
    """A checkpoint is due, or somebody wants one; ``reason`` LATE: the one in progress takes too long. ``full``:
    everything, not only what changed. Answer: CheckpointBegun | Refused."""

    reason: CheckpointReason
    full: bool = False


class JobResumed(Fact, frozen=True, tag="job_resumed"):
    """This job goes on from ``manifest``, which lies under ``url``; said before anybody else is heard. ``numbers``:
    checkpoints up to this number are, or were, another job's: none of them is used again."""

    manifest: Manifest
    url: str
    numbers: int


class ShardsConfirmed(Fact, frozen=True, tag="shards_confirmed"):
    """Says that all that the ps applied before ``before`` (seconds since the epoch) is kept by all mirrors (protect:
    eager or lag)."""

    before: float


class DrainAsked(Fact, frozen=True, tag="drain_asked"):
    """Comes from ``everstep drain``, an agent's reclaim notice, or a ps that was told to end: empty this node or member
    within ``deadline_s`` seconds. ``again``: then start another one in its slot. Answer: Ok | Refused."""

    target: str  # "ps:1", "worker:0" or a node
    deadline_s: Seconds
    again: bool = False


class MemberSilent(Fact, frozen=True, tag="member_silent"):
    """Says that there was no heartbeat for ``silent_s`` seconds; ``lost``: beyond the limit, else only suspect.
    ``why``: it is lost for another reason than its silence (its script makes no progress)."""

    role: Role
    slot: Slot
    incarnation: Incarnation
    silent_s: float
    lost: bool
    progress: tuple[tuple[LeaseNo, int], ...] = ()  # as in ProcessExited
    why: str = ""


class MemberHeard(Fact, frozen=True, tag="member_heard"):
    """A suspect member was heard again."""

    role: Role
    slot: Slot
    incarnation: Incarnation


class ProcessExited(Fact, frozen=True, tag="process_exited"):
    """An agent saw a process end. ``status``: exit code, or minus the signal's number. ``error``: the script's own
    last line where it raised (then the job fails), else "". ``progress``: of a worker, the last positions that it
    told of its leases, as far as known: a shard on which workers get on is not to blame for their loss.
    ``too_large``: the script's memory was too small for a pass of so many samples, more than a batch of its loader:
    not the script's fault but the plan's (then the worker is started again, and gets smaller ones); 0: it was
    something else. ``memory``: it died because there was none. Answer: Ok."""

    role: Role
    slot: Slot
    incarnation: Incarnation
    status: ExitStatus
    error: str = ""
    progress: tuple[tuple[LeaseNo, Whole], ...] = ()
    too_large: Whole = 0
    failure: Failure | None = None  # with ``error``: what it may come from; None: the script
    memory: OutOfMemory | None = None


class PlanRegistered(Fact, frozen=True, tag="plan_registered"):
    """A worker wants to train on this dataset. Idempotent; a different plan under the same name is refused.
    ``loop``: of its script, from 1 (0: not said), which is over epochs ``[begin, until)``; the audit compares.
    Answer: Registered | Refused | Fenced."""

    plan: ShardSchedule
    loop: Whole = 0
    begin: Whole = 0
    until: Whole = 0


class ShardAsked(Fact, frozen=True, tag="shard_asked"):
    """A worker wants its next shard of ``dataset``, in epochs below ``until_epoch``. ``ask`` counts this worker's
    requests: asking again with the same number gets the same answer. ``pending``: leases with all of which the
    worker is through, and whose rest it will step with later. Answer: Granted | Wait | EndOfData | Fenced."""

    dataset: Whole
    until_epoch: Whole
    ask: Whole
    pending: tuple[LeaseNo, ...] = ()


class ShardDone(Fact, frozen=True, tag="shard_done"):
    """Says that every ps acknowledged the whole shard. ``servers``: (slot, incarnation) of those that did; an
    acknowledgement of a dead incarnation does not count, and the shard is reopened. ``route``: of the map by which they
    did, 0: not told; one from before a loss that cost something does not count either. Answer: Ok (taken, or taken
    before) | Refused (the lease is not current) | Fenced."""

    shard: ShardKey
    lease: LeaseNo
    servers: tuple[tuple[Slot, Incarnation], ...]
    skipped: tuple[tuple[Whole, Whole], ...] = ()  # [lo, hi) whose gradients were not finite (policy: skip)
    route: Whole = 0


class ShardReturned(Fact, frozen=True, tag="shard_returned"):
    """A worker gives a shard back unfinished (clean leave, lease refused). ``reason``: for people. ``late``: its
    step went on without it, which is nothing to tell people of each time. Answer: Ok | Fenced."""

    shard: ShardKey
    lease: LeaseNo
    reason: str
    late: bool = False


class LeaseExpired(Fact, frozen=True, tag="lease_expired"):
    """A live worker made no progress on a shard for ``idle_s`` seconds."""

    shard: ShardKey
    lease: LeaseNo
    idle_s: float


class ScaleAsked(Fact, frozen=True, tag="scale_asked"):
    """Asks for another number of members. ``also``: more of the same plan, which is taken or refused as a whole.
    Answer: Ok | Refused."""

    role: Role
    count: Members
    also: tuple[tuple[Role, Members], ...] = ()


class ResizeAsked(Fact, frozen=True, tag="resize_asked"):
    """Asks for another size of processes that start from now on, by role; those that run keep theirs. The whole is
    taken, or refused. Answer: Ok | Refused."""

    sizes: tuple[tuple[Role, ProcessSize], ...]  # of a wish 0: as before


class GroupAsked(Fact, frozen=True, tag="group_asked", rename={"position": "mark"}):
    """A worker is in the loop over ``dataset``, in epochs below ``until_epoch``, and wants to train in the group.
    Said again after every hello. ``position``: of the state that it has, None: it has none yet (it has just started).
    ``batch_samples``: the loader's batch size; ``address``: where peers fetch state from it; ``copy``: it could begin
    with this one. Answer: Grouped | EndOfData | Refused | Fenced."""

    dataset: Whole
    until_epoch: Whole
    batch_samples: Whole
    address: Address | None = None
    position: Position | None = None
    copy: HeldCopy | None = None


class GroupSynced(Fact, frozen=True, tag="group_synced"):
    """A joining worker has the state of the group, and follows it step by step: it can enter. Or a member of that
    group has met the others there, and the journal has all that it had committed before. Answer: Ok | Fenced."""

    generation: WholeOrNone  # of the group that it follows


class GroupLeft(Fact, frozen=True, tag="group_left", rename={"lineage": "origin"}):
    """A worker wants to leave at the next boundary of two steps (scale-in, SIGTERM, the loop ended early), or its
    script has ended (DONE). ``lineage``: the generation that began the lineage with which it ended; 0: not said.
    ``copied``: steps before this one were not its own to tell: it copied a state that has them. ``reached``: its state
    has all steps before this one, the last of which it did in ``generation``; 0: not said. Answer: Grouped (the group
    may still have you: go on until a later one does not) | Wait (the journal lacks copied steps) | Refused (that line
    has ended: begin anew) | Fenced."""

    reason: LeaveReason
    lineage: Whole = 0
    copied: Whole = 0
    reached: Whole = 0
    generation: Whole = 0


class StepsCommitted(Fact, frozen=True, tag="steps_committed"):
    """Tells steps that the group committed, in groups, off the critical path; from any member, the lowest rank as a
    rule, and again until it is answered. Repeats and overlaps are harmless. Answer: Ok (durable) | Fenced."""

    steps: tuple[Committed, ...]


class GroupStalled(Fact, frozen=True, tag="group_stalled"):
    """Says that a member waits in a collective for ``waited_s`` seconds. ``silent``: members of its group that the
    watch has not heard for longer than the limit of stalls (filled in by the shell): they are lost. Answer: Ok |
    Fenced."""

    generation: WholeOrNone
    step: WholeOrNone
    waited_s: Seconds
    silent: tuple[Slot, ...] = ()


class ChiefAsked(Fact, frozen=True, tag="chief_asked"):
    """A worker wants to know whether it is the chief: the one to evaluate and save. ``ask`` counts its questions, from
    1; 0: not said. One that comes late, or again, changes nothing. Answer: Yes | Fenced."""

    ask: Whole = 0


class OnceAsked(Fact, frozen=True, tag="once_asked"):
    """A worker comes to what the job does once (``job.once``). ``done``: it has done it. Answer: Yes | Refused |
    Fenced."""

    key: str
    done: bool = False


class GroupDue(Fact, frozen=True, tag="group_due"):
    """The time is over that workers who are there already waited for the others (``Groups.due_at``)."""


class NodesDue(Fact, frozen=True, tag="nodes_due"):
    """The time is over in which the job waits for its first nodes (``JobState.nodes_due_at``)."""


class HotPartitions(Fact, frozen=True, tag="hot_buckets"):
    """Names partitions that should move from a ps that has too much to do. ``loads``: rows a second, by ps. ``alone``:
    partitions that are more than a ps should have, wherever they are. ``sent_bytes``: that the moves take."""

    moves: tuple[HotMove, ...]
    loads: tuple[tuple[Slot, int], ...] = ()
    alone: tuple[AlonePartition, ...] = ()
    sent_bytes: int = 0


class PlanMade(Fact, frozen=True, tag="plan_made"):
    """The job's policy wants this; it was checked against what the policy had seen (see ``brain.policy_control``)."""

    policy: str
    plan: PolicyPlan


class PolicyDisabled(Fact, frozen=True, tag="policy_disabled"):
    """The job's policy failed (``error``, one line): it is asked no more."""

    policy: str
    error: str


class StopAsked(Fact, frozen=True, tag="stop_asked"):
    """Comes from ``everstep stop`` or the agent. ``checkpoint``: where the job has checkpoints, take a last one first,
    for a minute at most. Answer: Ok."""

    reason: str
    checkpoint: bool = False


class SuspendAsked(Fact, frozen=True, tag="suspend_asked"):
    """Comes from ``everstep suspend`` or the agent of the master's node: make the job's state safe, and end all of its
    processes. ``deadline_s``: if no checkpoint is written after so long, the job is suspended with the one before; 0:
    it is waited for. ``suspensions``: how many the job had when this was asked; a request that comes after a later one
    is old, and changes nothing; -1: it counts whenever it comes. Answer: Ok."""

    reason: str
    deadline_s: Seconds = 0.0
    suspensions: WholeOrNone = -1


class RemarkMade(Fact, frozen=True, tag="remark_made"):
    """From ``everstep note``: somebody tells what the job cannot know. Answer: Ok | Refused."""

    text: str


class CapacityChanged(Fact, frozen=True, tag="capacity_changed"):
    """Comes from ``everstep run --capacity``: what became of a machine beside the first one. Costs are reckoned from
    it. A machine that is gone is a node that is lost, at once. ``price``: USD for an hour, where the source says one.
    ``recorded_s``: the moment of the recording that is played. ``life``: so many machines of this name came before.
    Answer: Ok."""

    node: NodeId
    step: CapacityStep
    hardware: PlaceName = ""
    zone: PlaceName = ""
    market: Market = Market.ON_DEMAND
    price: PriceUsd | None = None
    recorded_s: Seconds | None = None
    life: Whole = 0


class SupervisionDue(Fact, frozen=True, tag="supervision_due"):
    """The time is over that the job waits for members, or that they had to stay (``Supervision.due_at``)."""


class SpendingNoted(Fact, frozen=True, tag="spending_noted"):
    """The master's ledger, whenever machines have changed, and once a minute: the next master goes on from it."""

    spent: Spent


class SpotChosen(Fact, frozen=True, tag="spot_chosen"):
    """The spot policy of the job chose anew, or failed: the next master goes on from it."""

    choice: SpotChoice


class JobUnsuspended(Fact, frozen=True, tag="job_unsuspended"):
    """A suspended job goes on, in a new run of its master; said before that master begins. ``number``: of the
    suspension that ends. ``reason``: for people."""

    number: Whole
    reason: str


Reported = (
    NodeJoined
    | MemberJoined
    | ProcessExited
    | PlanRegistered
    | ShardAsked
    | ShardDone
    | ShardReturned
    | ScaleAsked
    | ResizeAsked
    | StopAsked
    | SuspendAsked
    | MirrorsReady
    | PartitionsReady
    | LoadFailed
    | MemoryShort
    | SnapshotsWritten
    | ReplicaWritten
    | CheckpointAsked
    | DrainAsked
    | GroupAsked
    | GroupSynced
    | GroupLeft
    | StepsCommitted
    | GroupStalled
    | ChiefAsked
    | OnceAsked
    | RemarkMade
    | CapacityChanged
)
"""Facts that come as requests; who may send which: ``machines.rights``."""

Noticed = (
    MasterStarted
    | NodeLost
    | NodeHeard
    | MemberSilent
    | MemberHeard
    | LeaseExpired
    | CheckpointCommitted
    | JobResumed
    | ShardsConfirmed
    | HotPartitions
    | PlanMade
    | PolicyDisabled
    | GroupDue
    | NodesDue
    | SpendingNoted
    | SpotChosen
    | SupervisionDue
    | JobUnsuspended
)
"""Facts that the master finds out by itself."""

FactType = Reported | Noticed

# ---------------------------------------------------------------- the envelope


class Sender(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Is who said it, as its connection proved to be. ``master``: nobody, the master noticed. ``node``: of an agent."""

    role: Literal["worker", "ps", "agent", "command", "master"] = "master"
    slot: Slot = Slot(0)
    incarnation: Incarnation = Incarnation(0)
    node: NodeId = NodeId("")

    def __str__(self) -> str:
        match self.role:
            case "worker" | "ps":
                return f"{self.role}:{self.slot} #{self.incarnation}"
            case "agent":
                return f"agent of {self.node}"
        return self.role


MASTER: Final = Sender()


def by_worker(slot: Slot, incarnation: Incarnation) -> Sender:
    return Sender("worker", slot, incarnation)


def by_ps(slot: Slot, incarnation: Incarnation) -> Sender:
    return Sender("ps", slot, incarnation)


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Is a fact as the master stamped it; an entry of the journal.

    ``at``: seconds since the epoch, from the shell's clock; never goes back (the shell sees to it). ``cause``: number
    of the event whose instruction led to this one, 0: none, or not known."""

    at: float
    fact: FactType
    sender: Sender = MASTER
    cause: int = 0

    @property
    def slot(self) -> Slot:
        """Return the slot of the worker or ps that said it."""
        return self.sender.slot

    @property
    def incarnation(self) -> Incarnation:
        return self.sender.incarnation


# ---------------------------------------------------------------- answers (inside a Reply)


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Is the base of what a request can be answered with."""


class Welcome(Answer, frozen=True, tag="welcome"):
    """You are a member. ``placement`` is None until every ps has said hello: ask again with a hello."""

    master_incarnation: Incarnation
    placement: Placement | None
    revoked: tuple[LeaseNo, ...] = ()  # leases you told of that are no longer yours


class Fenced(Answer, frozen=True, tag="fenced"):
    """You have been replaced; end now, change nothing."""

    reason: str


class Registered(Answer, frozen=True, tag="registered"):
    dataset: int  # number of the plan, the first part of its shard keys


class Refused(Answer, frozen=True, tag="refused"):
    """The user must change something; ``error`` is the one line to show."""

    error: str


class Granted(Answer, frozen=True, tag="granted"):
    lease: Lease


class Wait(Answer, frozen=True, tag="wait"):
    """Nothing to hand out now, but the epoch is not over: a shard may come back."""

    retry_after_s: float


class EndOfData(Answer, frozen=True, tag="end_of_data"):
    """Every shard of every epoch below ``until_epoch`` is done."""


class Ok(Answer, frozen=True, tag="ok"):
    """Says that it is taken; there is nothing more to say."""


class CheckpointBegun(Answer, frozen=True, tag="checkpoint_begun"):
    checkpoint: int


class Grouped(Answer, frozen=True, tag="grouped", rename={"position": "cursor"}):
    """Is the group as it is now; you may be in it, joining, or still waiting for it (the order follows). ``position``:
    where the journal is in the dataset that was asked for."""

    group: Group | None
    position: Position = Position()


class Yes(Answer, frozen=True, tag="yes"):
    """Is the answer to a question (ChiefAsked, OnceAsked)."""

    yes: bool


AnswerType = Welcome | Fenced | Registered | Refused | Granted | Wait | EndOfData | Ok | CheckpointBegun | Grouped | Yes

# ---------------------------------------------------------------- instructions


class Instruction(msgspec.Struct, frozen=True, tag=True):
    """Is the base of what the brain wants done. Doing one twice is harmless."""


class Reply(Instruction, frozen=True, tag="reply"):
    """Answer the request that caused the event being handled."""

    answer: AnswerType


class StartProcess(Instruction, frozen=True, tag="start_process"):
    """The agent of ``node`` starts this process, unless it runs it already; not before ``after_s`` seconds. It gets
    ``size``."""

    node: NodeId
    role: Role
    slot: Slot
    incarnation: Incarnation
    decision: Decision
    after_s: float = 0.0
    size: ProcessSize = ProcessSize()


class StopProcess(Instruction, frozen=True, tag="stop_process"):
    """The agent of ``node`` ends this process: SIGTERM, then SIGKILL after ``grace_s`` seconds."""

    node: NodeId
    role: Role
    slot: Slot
    incarnation: Incarnation
    grace_s: float
    decision: Decision


class RaiseMemory(Instruction, frozen=True, tag="raise_memory"):
    """The agent of ``node`` raises the limit of private memory of this process, as far as its hard limit lets it. A
    limit that is as high already stays."""

    node: NodeId
    role: Role
    slot: Slot
    incarnation: Incarnation
    memory_bytes: Whole


class PublishPlacement(Instruction, frozen=True, tag="publish_placement"):
    """Tell every worker and ps the new map."""

    placement: Placement
    decision: Decision


class PublishGroup(Instruction, frozen=True, tag="publish_group"):
    """Tell every member of the group, and who is joining or was in the one before, the new group."""

    group: Group
    decision: Decision


class ReleaseShards(Instruction, frozen=True, tag="release_shards"):
    """Every ps may forget the watermarks of these shards (and must refuse them for ever)."""

    shards: tuple[ShardKey, ...]


class RevokeLease(Instruction, frozen=True, tag="revoke_lease"):
    """Tell the worker that this lease is no longer its own."""

    member: MemberKey
    lease: LeaseNo
    decision: Decision


class Note(Instruction, frozen=True, tag="note"):
    """Is a line for people: display, event log, ``everstep explain``."""

    member: str  # "worker:1", "" for the job as a whole
    decision: Decision


class LossNote(Note, frozen=True, tag="note"):
    """Tells people that a process was lost; code goes by ``key`` and ``incarnation``."""

    @property
    def key(self) -> MemberKey:
        role, _, slot = self.member.partition(":")
        return MemberKey(Role(role), Slot(int(slot)))

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(int(self.decision.inputs["incarnation"]))


class FinishJob(Instruction, frozen=True, tag="finish_job"):
    """The job is over. ``exit_code`` 0: done; else ``error`` says why in one line."""

    exit_code: int
    error: str


class OrderSnapshots(Instruction, frozen=True, tag="order_images"):
    """Every ps of the placement writes snapshots of the partitions it owns (see messages.TakeSnapshots); in mode
    allreduce the leader of the group its state (messages.TakeReplica)."""

    checkpoint: int
    since: int


class CommitManifest(Instruction, frozen=True, tag="commit_manifest"):
    """Write this manifest durably, then tell the brain (CheckpointCommitted); harmless when repeated."""

    manifest: Manifest
    decision: Decision


class DropCheckpoints(Instruction, frozen=True, tag="drop_checkpoints"):
    """These checkpoints, and files that no other one needs, may be deleted."""

    checkpoints: tuple[int, ...]


InstructionType = (
    Reply
    | StartProcess
    | StopProcess
    | RaiseMemory
    | PublishPlacement
    | PublishGroup
    | ReleaseShards
    | RevokeLease
    | Note
    | FinishJob
    | OrderSnapshots
    | CommitManifest
    | DropCheckpoints
)
