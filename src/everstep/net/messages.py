"""Has every message that crosses a process boundary.

Control plane (agents, workers, ps, commands <-> master): ``Call`` carries a request and expects a ``Return`` with the
same ``id``; ``Order`` comes from the master unasked, needs no answer, and is harmless when repeated or lost (what it
asks for is said again at the next hello). Data plane (workers <-> ps): one request, one answer, in order, per
connection; arrays travel behind the header, or in the connection's shared-memory arena.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from everstep.bounds import Finite, Measured, Seconds, Whole, WholeOrNone
from everstep.brain.events import (
    Answer,
    AnswerType,
    FinishJob,
    Note,
    PublishGroup,
    PublishPlacement,
    RaiseMemory,
    ReleaseShards,
    Reported,
    RevokeLease,
    StartProcess,
    StopProcess,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, PartitionId, ShardKey, Slot, TableId
from everstep.model.copy_places import CopyPlace
from everstep.model.graph_readings import TABLES_MAX, GraphReading, RowReading
from everstep.model.group import Position
from everstep.model.job_view import JobView
from everstep.model.member import Role
from everstep.model.partition_load import Readings as PartitionReadings
from everstep.model.shard import Span, Token
from everstep.model.step_schedule import StepSchedule, WorkerClock
from everstep.model.table import TableSpec

# ---------------------------------------------------------------- control plane: requests


class Query(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Is the base of requests that become no event. (Those that do: ``brain.events.Said``.)"""


class Beat(Query, frozen=True, tag="beat"):
    """Sent every second by members and agents. ``progress``: next position by lease. Not journaled.

    Answer: Ok | Fenced."""

    progress: tuple[tuple[LeaseNo, Whole], ...] = ()
    readings: dict[str, Measured] = {}  # samples (count so far), samples_per_s, loss, ...; see monitor/windows.py
    values: dict[str, Measured] = {}  # what the script reported (job.report), newest
    idle_s: Seconds = 0.0  # of a worker: since its script last did anything; 0.0 where it waits for others
    inside: bool = False  # its script is in the loop, and has done a step
    runs: tuple[
        tuple[Role, Slot, Incarnation, Seconds], ...
    ] = ()  # of an agent: its processes that run, and their cpu_s
    graph: GraphReading | None = None  # of a worker: its sampled steps, where there is news
    rows: Annotated[tuple[RowReading, ...], msgspec.Meta(max_length=TABLES_MAX)] = ()  # of a ps: its tables
    partitions: PartitionReadings = ()  # of a ps: its hottest partitions


class StackTaken(Query, frozen=True, tag="stack_taken"):
    """Says that an agent looked where a worker's script is: ``place`` in a few words ("train.py line 31 in evaluate";
    "" where it could not be found out), ``stack`` its main thread's frames, innermost last. Answer: Ok."""

    slot: Slot
    incarnation: Incarnation
    idle_s: Seconds
    place: str
    stack: tuple[str, ...] = ()


class MayEnd(Query, frozen=True, tag="may_end"):
    """From a worker of a group whose script is over: is nobody in need of its state any more? Not journaled. Answer:
    Ok | StillNeeded | Fenced."""


class CopyPlacesAsked(Query, frozen=True, tag="copy_places_asked"):
    """Asks, in mode pipeline, which agents keep copies of stages for workers of other nodes. Answer: CopyPlaces."""


class StoreSet(Query, frozen=True, tag="store_set"):
    """Sets a key of one attempt to connect a group (torch.distributed.Store): in the master's memory only, bounded,
    forgotten with the generation. ``attempt``: told apart by the caller. Answer: Ok | Refused."""

    generation: WholeOrNone
    attempt: str
    values: dict[str, bytes]


class StoreGet(Query, frozen=True, tag="store_get"):
    """Answer: StoreValues as soon as all keys are there; without those missing after ``wait_s`` seconds."""

    generation: WholeOrNone
    attempt: str
    keys: tuple[str, ...]
    wait_s: Seconds = 0.0


class ValuesReported(Query, frozen=True, tag="report"):
    """Brings values the script reported, at once instead of with the next beat (e.g. the final AUC). Answer: Ok."""

    values: dict[str, Measured]


class GetStatus(Query, frozen=True, tag="get_status"):
    """Asks how the job is. ``speed``: also how fast its members are; ``graph``: also the model and the tables. Answer:
    JobView."""

    speed: bool = False
    graph: bool = False


class FaultAsked(Query, frozen=True, tag="drill"):
    """From ``everstep chaos``: do something bad to ``target`` ("worker:1"; "" with ``heal``: to all).

    ``what``: ``slow`` (``factor`` times, for ``for_s`` seconds; ``burn``: by computing instead of sleeping), ``kill``
    (SIGKILL), ``stop`` (SIGSTOP, and SIGCONT after ``for_s``), ``heal`` (ends slow and stop). Answer: Ok | Refused."""

    what: Literal["slow", "kill", "stop", "heal"]
    target: str = ""
    factor: Finite = 1.0
    for_s: Seconds = 0.0
    burn: bool = False


class GetSpec(Query, frozen=True, tag="get_spec"):
    """Asks for the job's spec, from an agent that joins from another node. Answer: SpecReport."""


class ClockReported(Query, frozen=True, tag="tell_place"):
    """Says where this worker is (consistency sync and bounded). Answer: Ok; what follows for all comes as
    NewSchedule."""

    clock: WorkerClock


QueryType = (
    Beat
    | ValuesReported
    | GetStatus
    | GetSpec
    | FaultAsked
    | StoreSet
    | StoreGet
    | ClockReported
    | StackTaken
    | MayEnd
    | CopyPlacesAsked
)
"""Requests that are answered from what the master knows, or that it keeps in memory: none becomes an event."""

RequestType = Reported | QueryType


class SpecReport(msgspec.Struct, frozen=True, tag="spec_report"):
    """Is the job as it was started."""

    spec: JobSpec


class StillNeeded(Answer, frozen=True, tag="still_needed"):
    """Ask again in ``retry_after_s`` seconds. ``committed_everywhere``: the scripts of all workers have ended, and the
    state of each has all steps before this one: they may be told; 0: some may lack some."""

    retry_after_s: float
    committed_everywhere: int = 0


class CopyPlaces(Answer, frozen=True, tag="copy_places"):
    """Lists the agents that keep copies and whose nodes are alive. ``failures``: how often this job needed copies so
    far; ``age_s``: of the job."""

    places: tuple[CopyPlace, ...] = ()
    failures: int = 0
    age_s: float = 0.0


class StoreValues(msgspec.Struct, frozen=True, tag="store_values"):
    values: dict[str, bytes]


class Call(msgspec.Struct, frozen=True, array_like=True):
    id: WholeOrNone
    request: RequestType


Answered = AnswerType | JobView | SpecReport | StoreValues | CopyPlaces | StillNeeded


class Return(msgspec.Struct, frozen=True, array_like=True):
    id: int
    answer: Answered


# ---------------------------------------------------------------- control plane: orders from the master


class Order(msgspec.Struct, frozen=True, tag=True):
    """Is the base of what the master tells a client unasked."""


class TakeSnapshots(Order, frozen=True, tag="take_images"):
    """To a ps: write snapshots of all partitions it owns, as part of checkpoint ``checkpoint``, under ``url``; only
    pages changed
    since checkpoint ``since`` (0: everything). Said again at hello while it is wanted; harmless when repeated."""

    checkpoint: int
    since: int
    url: str


class TakeReplica(Order, frozen=True, tag="take_replica"):
    """Tells the leader of the group to write its state at the next boundary of two steps as checkpoint ``checkpoint``
    under ``url``, and to tell with ReplicaWritten. Said again while it is wanted; harmless when repeated."""

    checkpoint: int
    url: str
    model: str = ""  # leave the model there too: a directory or URL
    limit_bytes: int = 0  # if it has no more than that, 0: whatever it has
    idle: bool = False  # write it in idle slots of the steps: nobody waits for it
    since: int = 0  # the newest checkpoint that exists: what did not change is not written again; 0: write everything
    copies: bool = False  # it may be of the step that begins next, from the copies that stages make in it


class SlowDown(Order, frozen=True, tag="slow"):
    """Tells a worker or ps, in a fault on purpose, to be ``factor`` times slower for ``for_s`` s; 1.0: as ever. See
    monitor/slowdown.py."""

    factor: float
    for_s: float
    burn: bool = False


class SignalProcess(Order, frozen=True, tag="hit"):
    """Tells an agent, in a fault on purpose, to SIGKILL this process, or SIGSTOP it and SIGCONT it after ``stop_s``
    (``what`` "stop"), or SIGCONT it now ("go")."""

    role: Role
    slot: Slot
    incarnation: Incarnation
    what: Literal["kill", "stop", "go"]
    stop_s: float = 0.0


class TakeStack(Order, frozen=True, tag="take_stack"):
    """Asks an agent what the script of this worker is doing. Answered with ``StackTaken``."""

    slot: Slot
    incarnation: Incarnation
    idle_s: float


class NewSchedule(Order, frozen=True, tag="new_turn", rename={"schedule": "turn"}):
    """Tells workers who may go on (consistency sync and bounded)."""

    schedule: StepSchedule


OrderType = (
    StartProcess
    | StopProcess
    | RaiseMemory
    | PublishPlacement
    | PublishGroup
    | NewSchedule
    | ReleaseShards
    | RevokeLease
    | FinishJob
    | Note
    | TakeSnapshots
    | TakeReplica
    | SlowDown
    | SignalProcess
    | TakeStack
)
"""What the brain wants goes to whom it is about as it is: an instruction is the order."""

# ---------------------------------------------------------------- data plane: worker -> ps


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Brings the client's memfd (sealed against shrinking) as SCM_RIGHTS, over Unix sockets only; offsets in later
    messages are into it. Sent again when the client's arena grew. Answer: Taken."""

    size_bytes: Whole


class Declare(msgspec.Struct, frozen=True, tag="declare"):
    """Make these tables exist. Idempotent; a different spec under the same name is Bad."""

    tables: tuple[TableSpec, ...]


class OpenShard(msgspec.Struct, frozen=True, tag="open"):
    """Raise the shard's fence to ``lease`` in every partition of this ps. ``version``: of the routing; 0: whatever it
    has. ``mirrored``: answer when all mirrors have everything, also where pushes do not wait for them.
    Answer: Opened | Closed | Moved."""

    shard: ShardKey
    start: Whole
    lease: LeaseNo
    version: Whole = 0
    mirrored: bool = False


class ShardToOpen(msgspec.Struct, frozen=True, array_like=True):
    """Is a lease of ``shard`` from ``start`` on."""

    shard: ShardKey
    start: Whole
    lease: LeaseNo


OPEN_TOGETHER = 16
"""Leases in one ``OpenShards``, at most: the answer is a header, and a ps may own thousands of partitions."""


class OpenShards(msgspec.Struct, frozen=True, tag="open_all"):
    """Does what an ``OpenShard`` of each would do. Answer: AllOpened | Moved | Bad."""

    shards: tuple[ShardToOpen, ...]
    version: Whole = 0


class RowsPart(msgspec.Struct, frozen=True, array_like=True):
    """Is the rows of one table in one message. ``keys``: int64[n], unique, grouped by partition ascending.

    ``keys_at``/``rows_at``: byte offsets into the arena when ``shm``, else into the frame's body (a pull's rows:
    into the answer's body). ``rows``: float32[n, dim]: values of a pull or put, gradients of a push."""

    table: TableId
    n: Whole
    keys_at: Whole
    rows_at: Whole
    lr: Finite = -1.0  # push only: learning rate of this update; < 0: the table's own
    options: tuple[Finite, ...] = ()  # push only: TRAVELLING of its optimizer; (): the table's own


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Asks for rows by key. ``create``: rows not there yet are made (training) or only computed (evaluation).

    ``since``: not before every partition of this ps has all positions of ``shard`` below it; Moved: not yet, ask again.

    Answer: Pulled | Moved | Bad."""

    version: Whole
    parts: tuple[RowsPart, ...]
    shm: bool
    create: bool = True
    shard: ShardKey = ShardKey(0)
    since: Whole = 0


class Push(msgspec.Struct, frozen=True, tag="push", rename={"partitions": "buckets"}):
    """Brings gradients of the samples ``[token.lo, token.hi)``: one message per ps and batch, for all its partitions
    (also those without rows). ``partitions``: bitmap (little-endian bits, bit b = partition b) of those addressed, b""
    for all. ``skipped``: no rows, the watermarks move, the audit says so. ``step`` (consistency sync): this is one of
    several pushes of that step, which are one optimizer step of the sum of their gradients; -1: it is one by itself.
    ``left_out``: it is skipped because the script left it out. ``more``: what the same optimizer step of the script
    consumed besides, in order: a partition takes all of it or nothing. Answer: Pushed | Moved | Bad."""

    version: Whole
    token: Token
    parts: tuple[RowsPart, ...]
    shm: bool
    partitions: bytes = b""
    skipped: bool = False
    step: WholeOrNone = -1
    left_out: bool = False
    more: tuple[Span, ...] = ()


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Brings initial rows (a dense tensor, pretrained embeddings): a key that exists keeps what it has. ``replace``:
    its values become these, its optimizer state stays. Answer: Taken."""

    version: Whole
    part: RowsPart
    shm: bool
    last: bool  # true with the last piece: the table counts as initialised from now on
    replace: bool = False


class Scan(msgspec.Struct, frozen=True, tag="scan", rename={"partition": "bucket"}):
    """Read a table piece by piece (state_dict, export): up to ``limit`` rows of one partition from ``slot`` on.

    Answer: Scanned, body = keys int64[n] then values float32[n, dim] then, if ``state``, float32[n, state]."""

    table: TableId
    partition: Whole
    slot: WholeOrNone
    limit: Whole
    state: bool = False


class Peek(msgspec.Struct, frozen=True, tag="peek"):
    """Asks for rows with their optimizer state, to compute what a step will make of them. ``keys``: int64, grouped by
    partition. Not before every partition of this ps has all positions of ``shard`` below ``since``. The answer says of
    each row whether all positions of ``of`` below ``until`` are in it.

    Answer: Peeked | Moved | Bad."""

    version: Whole
    table: TableId
    keys: bytes
    shard: ShardKey
    since: Whole
    of: ShardKey
    until: Whole


class Stat(msgspec.Struct, frozen=True, tag="stat"):
    """Asks for numbers of this ps. Answer: PsStats."""


# ---------------------------------------------------------------- data plane: ps -> ps


class StreamEntry(msgspec.Struct, frozen=True, array_like=True):
    """Is one blob of a partition's stream (format: native/blob.h), ``size_bytes`` long, in order behind the header.

    ``sync``: of contents, the number of the FetchContents that asked for them."""

    partition: PartitionId
    seq: WholeOrNone
    kind: WholeOrNone
    size_bytes: Whole
    sync: Whole = 0


class Append(msgspec.Struct, frozen=True, tag="append"):
    """Brings differences and contents of partitions for the mirrors at this ps, in order. ``mirrors``: per entry the
    mirror id it is for, 0: every mirror here that has the partition. From the partitions' owner only. ``first``: number
    of the first entry in the stream number ``stream`` from this life of the sender to this life of the receiver; an
    entry that came before is a repeat, a stream with a larger number begins at 0. ``confirmed``: (partition, seq) that
    all its mirrors have: older entries of their logs may go. Answer: Appended | Moved | Bad."""

    version: Whole
    sender: Slot
    incarnation: Incarnation
    tables: tuple[TableSpec, ...]  # new ones since the last Append of this connection
    entries: tuple[StreamEntry, ...]
    mirrors: tuple[Whole, ...]
    confirmed: tuple[tuple[PartitionId, WholeOrNone], ...] = ()
    first: Whole = 0
    stream: Whole = 0


class FetchContents(msgspec.Struct, frozen=True, tag="want", rename={"partition": "bucket", "sync": "sweep"}):
    """From a mirror's ps to the owner of ``partition``: send its contents into your stream to me (in order with its
    differences). ``purpose``: "build" a mirror, or "fold" it out of mirror ``mirror`` (recovery); or "other", to the ps
    of the stripe's other row, of which ``partition`` and more are lost: the rest of your row when the living members
    are folded out of it. Out of turn, because somebody waits for them: "rows", to fold these ``slots`` (uint32 bytes)
    of ``table`` now, and "rest", the same of what was asked for by "other". ``sync``: number of this wish at the
    sender; a wish with another number is another one. Idempotent. Answer: Taken | Moved | Bad."""

    version: Whole
    sender: Slot
    incarnation: Incarnation
    mirror: Whole
    partition: PartitionId
    purpose: str
    sync: Whole = 0
    lost: tuple[PartitionId, ...] = ()  # "other", "rest": all members that are lost
    table: Whole = 0  # "rows", "rest"
    slots: bytes = b""


class FetchLog(msgspec.Struct, frozen=True, tag="tail", rename={"partition": "bucket"}):
    """Tells a ps with another mirror of ``partition``, from its new owner: from now on take differences of it from me
    only (you have placement ``version`` or newer, else Moved), and give me those after ``seq``. Answer: LogFetched."""

    version: Whole
    sender: Slot
    incarnation: Incarnation
    mirror: Whole
    partition: PartitionId
    seq: WholeOrNone


class TransferOwnership(msgspec.Struct, frozen=True, tag="hand_over", rename={"partition": "bucket"}):
    """Tells the old, living owner, from the new one (its move mirror complete): stop serving ``partition``, let all its
    mirrors confirm everything, then answer with its last seq (-1: it is not here). ``done``: the new owner has it, drop
    it. Idempotent. Answer: OwnershipTransferred | Moved (also: not all is confirmed yet, ask again) | Bad."""

    version: Whole
    partition: PartitionId
    done: bool = False


# ---------------------------------------------------------------- data plane: worker -> worker


class AskState(msgspec.Struct, frozen=True, tag="ask_state"):
    """Asks, in mode allreduce, for a snapshot of your training state, taken at your next boundary of two steps, or,
    with ``step`` >= 0, the one that you keep of the state before that step. ``follow``: keep what the steps after it
    did, too. Waits at most ``wait_s`` seconds. Answer: StateReady | NotYet | Bad."""

    slot: Slot
    incarnation: Incarnation
    step: WholeOrNone = -1
    follow: bool = False
    wait_s: Seconds = 0.0


class ReadState(msgspec.Struct, frozen=True, tag="read_state"):
    """Asks for bytes ``[at, at + size_bytes)`` of that snapshot: header, then tensors. Answer: StatePart with them as
    body | Gone."""

    slot: Slot
    incarnation: Incarnation
    snapshot: Whole
    at: Whole
    size_bytes: Whole


class NextStep(msgspec.Struct, frozen=True, tag="next_step"):
    """Asks what step ``step`` did, for a follower whose state is before it (and that needs no step before it any more).
    Waits at most ``wait_s`` seconds. Answer: StepDid with it as body | NotYet | Gone."""

    slot: Slot
    incarnation: Incarnation
    step: WholeOrNone
    wait_s: Seconds = 0.0


class EndFollow(msgspec.Struct, frozen=True, tag="end_follow"):
    """Keep nothing more for this follower. Answer: Taken."""

    slot: Slot
    incarnation: Incarnation


# ---------------------------------------------------------------- data plane: worker -> agent of another node


class CopyBegun(msgspec.Struct, frozen=True, tag="copy_begun"):
    """Begins to send a stage's copy, of the state before ``step``, to an agent that keeps it (mode pipeline). Body:
    what the copy says of itself. What the agent has of an older step of all ``stages`` stays until this one is whole.
    Answer: CopyTaken | Bad (no memory; a later life of this worker has written)."""

    slot: Slot
    incarnation: Incarnation
    stage: Whole
    stages: Whole
    step: Whole
    meta_bytes: Whole
    header_bytes: Whole
    body_bytes: Whole


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy_blocks"):
    """Brings the next ``count`` blocks of that copy, from number ``first`` on. Body: their checksums as little-endian
    uint32, then they. Answer: CopyTaken | Bad (a checksum is wrong)."""

    slot: Slot
    incarnation: Incarnation
    stage: Whole
    step: Whole
    first: Whole
    count: Whole


class CopyEnded(msgspec.Struct, frozen=True, tag="copy_ended"):
    """Says that the copy is whole at its worker. Answer: CopyTaken (it is whole here, too, and outlives the worker) |
    Bad (blocks are missing)."""

    slot: Slot
    incarnation: Incarnation
    stage: Whole
    step: Whole


class CopiesDropped(msgspec.Struct, frozen=True, tag="copies_dropped"):
    """Says that copies of this worker are of no use any more: it ended, or its lineage did. Answer: CopyTaken."""

    slot: Slot
    incarnation: Incarnation


class KeptCopiesAsked(msgspec.Struct, frozen=True, tag="kept_copies_asked"):
    """Asks which copies of a worker are whole. Answer: KeptCopies."""

    slot: Slot


class CopyRead(msgspec.Struct, frozen=True, tag="copy_read"):
    """Asks for bytes ``[at, at + size_bytes)`` of a copy: what it says of itself, checksums, blocks. Answer: StatePart
    with them as body | SnapshotGone."""

    slot: Slot
    stage: Whole
    step: Whole
    life: Whole
    at: Whole
    size_bytes: Whole


# ---------------------------------------------------------------- files of the first node


class FilePut(msgspec.Struct, frozen=True, tag="file_put"):
    """Brings the bytes ``at`` .. of a new file of ``place``; ``part``: one word of the writer's, the same for all of
    it. ``last``: the file is whole, and appears under its name. Answer: FileTaken | Bad."""

    place: str
    path: str
    part: str
    at: Whole
    last: bool = False


class FileRead(msgspec.Struct, frozen=True, tag="file_read"):
    """Asks for ``size_bytes`` of a file from ``at`` on, or less at its end. Answer: FilePiece | Bad."""

    place: str
    path: str
    at: Whole
    size_bytes: Whole


class FileList(msgspec.Struct, frozen=True, tag="file_list"):
    """Asks which files a place has; ``below``: in its folders, too. Answer: FileNames | Bad."""

    place: str
    below: bool = False


class FileDrop(msgspec.Struct, frozen=True, tag="file_drop"):
    """Asks to delete a file, which need not be there. Answer: FileTaken | Bad."""

    place: str
    path: str


class LogGrown(msgspec.Struct, frozen=True, tag="log_grown"):
    """Brings what an audit log of ``node`` has from byte ``at`` on. Answer: FileTaken (how much of it is here: go on
    from there) | Bad."""

    node: str
    name: str
    at: Whole


class LogsReported(msgspec.Struct, frozen=True, tag="logs_told"):
    """Says that ``node`` is there, and whether it has told all that its logs will ever have. Answer: FileTaken."""

    node: str
    over: bool


DataRequest = (
    Attach
    | Declare
    | OpenShard
    | OpenShards
    | Pull
    | Push
    | Put
    | Scan
    | Peek
    | Stat
    | Append
    | FetchContents
    | FetchLog
    | TransferOwnership
    | AskState
    | ReadState
    | NextStep
    | EndFollow
    | CopyBegun
    | CopyBlocks
    | CopyEnded
    | CopiesDropped
    | KeptCopiesAsked
    | CopyRead
    | FilePut
    | FileRead
    | FileList
    | FileDrop
    | LogGrown
    | LogsReported
)

# ---------------------------------------------------------------- data plane: answers


class LogTaken(msgspec.Struct, frozen=True, tag="taken"):
    """Says that it is done; nothing more to say."""


class Declared(msgspec.Struct, frozen=True, tag="declared"):
    """Answers a declaration; ``initialised``: per table, whether its initial rows are already there (see Put)."""

    incarnation: Incarnation
    initialised: tuple[bool, ...]


class Opened(msgspec.Struct, frozen=True, tag="opened", rename={"partitions": "buckets"}):
    """Brings watermarks int64[len(partitions)] of the shard at this ps, partitions ascending, both little-endian
    bytes."""

    incarnation: Incarnation
    partitions: bytes  # int32
    watermarks: bytes  # int64


class AllOpened(msgspec.Struct, frozen=True, tag="all_opened"):
    """Brings what an ``Opened`` of each shard would bring, in the order of the request; None: its lease is closed."""

    incarnation: Incarnation
    partitions: bytes  # int32
    watermarks: tuple[bytes | None, ...]  # int64 each


LEASE_CLOSED = "a later lease has this shard, or it is over"
"""Why a ps does not open a lease, in words."""


class LeaseClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The lease is fenced by a later one, or the shard was released: give it up."""

    reason: str


class Pulled(msgspec.Struct, frozen=True, tag="pulled"):
    """Rows are in the arena, or in the body in the order of the parts."""


class Pushed(msgspec.Struct, frozen=True, tag="pushed"):
    """Counts over the addressed partitions. ``gap``: the lowest watermark of those that answered "gap" (they need
    ``[gap, lo)`` first), -1 if none. ``fenced``: this lease is over (also: shard not open, incarnation wrong).
    ``nonfinite``: id of the table whose gradient has NaN or Inf, -1 if none; nothing was applied then. ``mirrored``:
    where mirrors may lag, all of them have all pushes up to the one that ended at this position of this shard."""

    applied: int
    repeats: int
    gap: int = -1
    fenced: bool = False
    nonfinite: int = -1
    mirrored: tuple[ShardKey, int] = (ShardKey(0), 0)


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Your placement map is old (or newer than mine: ask again shortly)."""

    version: int


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    """``applied``: per entry: 0 applied, 1 repeat, 2 gap (a difference before it is missing), 3 no such mirror, 4
    refused: another ps owns the partition."""

    applied: bytes


class LogFetched(msgspec.Struct, frozen=True, tag="tailed"):
    """Brings the end of a log; ``seq``: where the mirror is; ``entries``: what it has after the asked seq, blobs in the
    body."""

    seq: int
    entries: tuple[StreamEntry, ...] = ()


class OwnershipTransferred(msgspec.Struct, frozen=True, tag="handed_over"):
    seq: int


class Scanned(msgspec.Struct, frozen=True, tag="scanned"):
    n: int
    next_slot: int  # -1: the partition's last row was in this piece


class Peeked(msgspec.Struct, frozen=True, tag="peeked"):
    """Brings the rows that exist; body = keys int64[n] then values float32[n, dim] then float32[n, state] then
    uint8[n]: whether all positions below ``Peek.until`` are in the row."""

    n: int


class PsStats(msgspec.Struct, frozen=True, tag="ps_stats"):
    rows: dict[str, int]
    bytes: int
    pushes: int
    pulls: int
    busy_s: float


class StateReady(msgspec.Struct, frozen=True, tag="state_ready", rename={"position": "mark", "lineage": "origin"}):
    """Says that a state is ready; ``lineage``: of the group whose state it is (see ``Group.origin``)."""

    snapshot: int
    position: Position
    header_bytes: int
    body_bytes: int
    lineage: int = 0


class StatePart(msgspec.Struct, frozen=True, tag="state_part"):
    """Brings the bytes that were asked for, in the body."""


class StepDid(msgspec.Struct, frozen=True, tag="step_did", rename={"position": "mark"}):
    """Brings what a step did; ``parts``: (header bytes, tensor bytes) of each piece of the body. ``newest``: the step
    that is next there."""

    position: Position
    parts: tuple[tuple[int, int], ...]
    newest: int


class CopyTaken(msgspec.Struct, frozen=True, tag="copy_taken"):
    """Says that it is taken. ``spent_s``: the processor's time that the agent has spent on this connection so far;
    ``late_blocks``: blocks that it took in outside of its node's waits so far."""

    spent_s: float = 0.0
    late_blocks: Whole = 0


class KeptPart(msgspec.Struct, frozen=True, array_like=True):
    """Describes a whole copy of one stage; ``lineage``: of the first stage's, else 0. Sizes in bytes."""

    stage: Whole
    step: Whole
    life: Whole
    lineage: Whole
    meta_bytes: Whole
    header_bytes: Whole
    body_bytes: Whole
    text_crc: Whole


class KeptCopies(msgspec.Struct, frozen=True, tag="kept_copies"):
    """Lists what is whole. ``stages``: of the worker, as it wrote them; 0: nothing of it is here."""

    stages: Whole = 0
    parts: tuple[KeptPart, ...] = ()


class NotYet(msgspec.Struct, frozen=True, tag="not_yet"):
    """Ask again."""


class SnapshotGone(msgspec.Struct, frozen=True, tag="gone"):
    """It is not kept (any more), and why: begin with a new snapshot."""

    reason: str


class Bad(msgspec.Struct, frozen=True, tag="bad"):
    """The request was wrong; ``error`` is one line. The connection stays usable."""

    error: str


class FileTaken(msgspec.Struct, frozen=True, tag="file_taken"):
    """Says that it is done; ``size_bytes``: of the file now."""

    size_bytes: Whole = 0


class FilePiece(msgspec.Struct, frozen=True, tag="file_piece"):
    """Brings what was asked for of a file of ``size_bytes``; -1: it is not there."""

    size_bytes: WholeOrNone


class FileNames(msgspec.Struct, frozen=True, tag="file_names"):
    sizes: dict[str, Whole]


DataAnswer = (
    LogTaken
    | Declared
    | Opened
    | AllOpened
    | LeaseClosed
    | Pulled
    | Pushed
    | Moved
    | Scanned
    | Peeked
    | PsStats
    | Appended
    | LogFetched
    | OwnershipTransferred
    | StateReady
    | StatePart
    | StepDid
    | NotYet
    | CopyTaken
    | KeptCopies
    | SnapshotGone
    | FileTaken
    | FilePiece
    | FileNames
    | Bad
)
