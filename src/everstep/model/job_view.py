"""Is the read model: everything that is shown of a job, in one struct.

The master makes a :class:`JobView` (``monitor.viewer``). ``everstep status``, ``everstep top``, the display of a run,
the metrics and the head of ``everstep explain`` are made of it, and know nothing else. A fact has one name here, and
the same name in ``status --json`` and in the metrics.

Each docstring names its fields, each with its unit in brackets: ``[text]``, ``[one of ...]``, ``[number]`` (an ordinal
or a version), ``[flag]``, or what is counted or measured. Times without another word are seconds since 1970 by the
master's clock.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.graph_readings import GraphView
from everstep.model.member import Role
from everstep.model.observation import Observations
from everstep.model.partition_load import PartitionView


class ShownState(StrEnum):
    """What a member is doing: the states of ``MemberState``, and two that follow from more than one fact."""

    STARTING = "starting"
    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"
    LEFT = "left"
    WAITING = "waiting"  # no node has a place for it
    LEAVING = "leaving"  # it is being ended on purpose


UP_STATES = (ShownState.ALIVE, ShownState.SUSPECT, ShownState.LEAVING)
RUNNING_STATES = (ShownState.STARTING, *UP_STATES)


class MemberView(msgspec.Struct, frozen=True):
    """Shows the process that fills a slot, or the last one that did.

    - ``role``: of the slot [one of master, worker, ps]
    - ``slot``: of its role [number]
    - ``incarnation``: how many processes have filled the slot [number]
    - ``node``: where it runs [text]
    - ``hardware``: class of that node's machine, as its agent said; "": unknown [text]
    - ``pid``: of the process; 0: there is none yet [number]
    - ``state``: what it is doing [one of ShownState]
    - ``losses``: processes of this slot that were lost [processes]
    - ``works_on``: a worker's shard or its place in the group [text]
    - ``samples_per_s``: that a worker trains, by its last beat [samples/second]
    - ``rss_bytes``: resident memory, by its last beat [bytes]
    - ``peak_bytes``: the most that was resident so far, by its last beat [bytes]
    - ``partitions``: that a ps owns [partitions]
    - ``mirrors``: that a ps keeps of other ps' partitions [mirrors]
    - ``cold_bytes``: of a ps' rows that are on disk alone (cold_dir) [bytes]
    - ``cold_hit_share``: of rows pulled from it, that were in memory; -1: it has no cold_dir [share, 0 to 1]
    """

    role: Role
    slot: Slot
    incarnation: Incarnation
    node: NodeId
    pid: int
    state: ShownState
    losses: int = 0
    works_on: str = ""
    samples_per_s: float = 0.0
    rss_bytes: int = 0
    peak_bytes: int = 0
    partitions: int = 0
    mirrors: int = 0
    hardware: str = ""
    cold_bytes: int = 0
    cold_hit_share: float = -1.0

    def __str__(self) -> str:
        return f"{self.role}:{self.slot}"

    @property
    def up(self) -> bool:
        """The process runs, and has said hello."""
        return self.state in UP_STATES

    @property
    def running(self) -> bool:
        """The process was started, and has not ended."""
        return self.state in RUNNING_STATES


class NodeView(msgspec.Struct, frozen=True):
    """Shows a node and what runs on it.

    - ``node``: its name [text]
    - ``host``: the machine that it stands on [text]
    - ``alive``: its agent is there [flag]
    - ``draining``: it takes no more processes [flag]
    - ``workers``: that run on it [processes]
    - ``ps``: that run on it [processes]
    - ``machine``: that it stands on: nodes of one machine are lost together; "": one of its own [text]
    - ``zone``: where that machine is; "": nobody said [text]
    - ``spot``: its platform may take it back [flag]
    """

    node: NodeId
    host: str = ""
    alive: bool = True
    draining: bool = False
    workers: int = 0
    ps: int = 0
    machine: str = ""
    zone: str = ""
    spot: bool = False


class EpochView(msgspec.Struct, frozen=True):
    """Shows one epoch of one dataset, in shards.

    - ``dataset``: its name [text]
    - ``epoch``: from 0 [number]
    - ``epochs``: of this dataset that were asked for so far [epochs]
    - ``shards``: of the epoch [shards]
    - ``todo``: that nobody works on [shards]
    - ``doing``: that workers hold [shards]
    - ``done``: that are trained [shards]
    - ``samples``: of the epoch [samples]
    - ``samples_done``: of shards that are done [samples]
    """

    dataset: str
    epoch: int
    epochs: int
    shards: int
    todo: int
    doing: int
    done: int
    samples: int
    samples_done: int


class ShardsView(msgspec.Struct, frozen=True):
    """Counts the shards of the newest epoch of each dataset together.

    - ``todo``: that nobody works on [shards]
    - ``doing``: that workers hold [shards]
    - ``done``: that are trained [shards]
    - ``returned``: that came back unfinished, in the whole job [shards]
    """

    todo: int = 0
    doing: int = 0
    done: int = 0
    returned: int = 0


class PlacementView(msgspec.Struct, frozen=True):
    """Tells which ps owns which partition.

    - ``version``: of the map; 0: there is none yet [number]
    - ``partitions``: of the job [partitions]
    - ``ps``: that own at least one [processes]
    - ``hottest``: partitions of all ps with most to do, hottest first [partitions]
    """

    version: int = 0
    partitions: int = 0
    ps: int = 0
    hottest: tuple[PartitionView, ...] = ()


class ProtectionView(msgspec.Struct, frozen=True):
    """Shows what partitions survive now, and what is on its way.

    - ``parity``: as the job was started, e.g. 4+1 [text]
    - ``protect``: when a push is acknowledged [one of acked, eager, lag]
    - ``full``: that survive as many lost ps as the parity promises [partitions]
    - ``less``: that survive fewer, but one [partitions]
    - ``none``: that survive not one [partitions]
    - ``moving``: on their way to another ps [partitions]
    - ``rebuilding``: whose old owner is dead and whose new one does not hold them yet [partitions]
    - ``building``: mirrors being made [mirrors]
    - ``unconfirmed_bytes``: changes that mirrors do not have yet [bytes]
    - ``done_share``: of what is rebuilding, moving and being built, since it began [share, 0 to 1]
    - ``left_s``: that the rest takes at this pace; -1: not known [seconds]
    - ``machines``: that ps stand on [machines]
    - ``lost_with_machine``: that would be lost now with one of these machines, the worst but the master's [partitions]
    - ``worst_machine``: that one; "": no machine takes anything with it [text]
    - ``lag_s``: protect: lag, by which mirrors may be behind; 0: they may not [seconds]
    - ``behind_s``: age of the oldest change that some mirror lacks, of the ps where it is oldest [seconds]
    - ``pushes_waiting``: that wait now until mirrors have caught up [pushes]
    - ``pushes_waited_s``: for that so far, together, at the running ps [seconds]
    - ``rebuild_share``: of a ps' time that contents may take while workers ask for rows [share, 0 to 1]
    - ``contents_bytes``: that the ps took in for rebuilds, new mirrors and moves so far [bytes]
    - ``contents_busy_s``: that ps spent on sending them, without pauses [seconds]
    - ``dense``: how the dense part of the model outlives a lost ps; "": it does not [text]
    """

    parity: str
    protect: str
    full: int = 0
    less: int = 0
    none: int = 0
    moving: int = 0
    rebuilding: int = 0
    building: int = 0
    unconfirmed_bytes: int = 0
    done_share: float = 0.0
    left_s: float = -1.0
    machines: int = 0
    lost_with_machine: int = 0
    worst_machine: str = ""
    lag_s: float = 0.0
    behind_s: float = 0.0
    pushes_waiting: int = 0
    pushes_waited_s: float = 0.0
    rebuild_share: float = 1.0
    contents_bytes: int = 0
    contents_busy_s: float = 0.0
    dense: str = ""


class CheckpointView(msgspec.Struct, frozen=True):
    """Shows the checkpoints of the job.

    - ``newest``: that is complete; 0: none [number]
    - ``at``: when that one was taken [seconds since 1970]
    - ``incremental``: the last one has only what changed since the one before [flag]
    - ``bytes_written``: by the last one [bytes]
    - ``took_s``: the last one, from its order to its manifest [seconds]
    - ``writing``: the one in progress; 0: none [number]
    - ``snapshots``: of that one that are written [partitions]
    - ``partitions``: of the job [partitions]
    - ``given_up``: that came to nothing [checkpoints]
    - ``resumed``: that the job went on from; 0: it began anew [number]
    """

    newest: int = 0
    at: float = 0.0
    incremental: bool = False
    bytes_written: int = 0
    took_s: float = 0.0
    writing: int = 0
    snapshots: int = 0
    partitions: int = 0
    given_up: int = 0
    resumed: int = 0


class GroupView(msgspec.Struct, frozen=True):
    """Shows the group of mode allreduce.

    - ``generation``: how often its members have changed [number]
    - ``members``: that train together [processes]
    - ``joining``: that copy the state, to enter [processes]
    - ``step``: steps that are committed [steps]
    - ``steps_per_s``: lately [steps/second]
    - ``strategy``: what is kept when workers come and go [one of elastic, fixed]
    - ``paused``: why no step may begin; "": steps go on [text]
    - ``logical_workers``: that a step is cut for; 0: for the members [workers]
    - ``steps_void``: that were committed and done again, since every state was lost [steps]
    """

    generation: int
    members: int
    joining: int
    step: int
    steps_per_s: float
    strategy: str
    paused: str = ""
    logical_workers: int = 0
    steps_void: int = 0


class PlanView(msgspec.Struct, frozen=True):
    """Shows what the job's policy wanted last.

    - ``version``: plans that were taken so far [plans]
    - ``last``: the decision of the last one; "": there was none [text]
    - ``restarts``: of members, by plans [processes]
    - ``disabled``: why the policy is asked no more; "": it is asked [text]
    """

    version: int = 0
    last: str = ""
    restarts: int = 0
    disabled: str = ""


class StageView(msgspec.Struct, frozen=True):
    """Is a state that the job came into.

    - ``at``: when [seconds since 1970]
    - ``state``: into which [one of pending, waiting, running, suspended, done, failed, stopped]
    - ``why``: for what reason [text]
    """

    at: float
    state: str
    why: str


class SupervisionView(msgspec.Struct, frozen=True, kw_only=True):
    """Shows the state of the job, and for whom it waits.

    - ``state``: of the job [one of pending, waiting, running, suspended, done, failed, stopped]
    - ``since``: since when it is in it [seconds since 1970]
    - ``why``: for what reason [text]
    - ``lack``: of whom there are too few; "": of nobody [text]
    - ``until``: when it has waited for as long as it may; 0: never, or it does not wait [seconds since 1970]
    - ``suspending``: why it is being suspended; "": it is not [text]
    - ``suspensions``: of the job so far [number]
    - ``seconds``: that it was in each state, by state [seconds]
    - ``on_demand``: asked for in place of spot machines; 0: none [machines]
    - ``stages``: its last changes of state, the newest last [states]
    """

    state: str
    since: float
    why: str
    lack: str = ""
    until: float = 0.0
    suspending: str = ""
    suspensions: int = 0
    seconds: dict[str, float] = {}
    on_demand: int = 0
    stages: tuple[StageView, ...] = ()


class CostView(msgspec.Struct, frozen=True):
    """Shows what the job costs (``--prices``).

    - ``usd``: spent until now, without machines of unknown price [USD]
    - ``usd_per_hour``: that the machines cost that it has now [USD/hour]
    - ``node_hours``: that were paid [node-hours]
    - ``unknown_node_hours``: of these, without a price [node-hours]
    - ``budget``: that it may spend; 0: any sum [USD]
    - ``left_s``: until it is suspended at this rate; -1: never, or not known [seconds]
    """

    usd: float = 0.0
    usd_per_hour: float = 0.0
    node_hours: float = 0.0
    unknown_node_hours: float = 0.0
    budget: float = 0.0
    left_s: float = -1.0


class ProcessCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Has what one process has counted since it began, by its last beat; None: it has not said. They begin anew with
    each incarnation.

    - ``role``: of the process [one of worker, ps]
    - ``slot``: that it fills [number]
    - ``samples``: whose own compute a worker did [samples]
    - ``compute_s``: own compute of a worker [seconds]
    - ``phase_s``: time of a worker's training thread, by phase of a step [seconds]
    - ``bytes_in``: rows that a worker pulled, or that were pushed to a ps [bytes]
    - ``bytes_out``: rows that a worker pushed, or that were pulled from a ps [bytes]
    - ``requests``: pulls and pushes that a ps answered [requests]
    - ``service_s``: own time of a ps for these [seconds]
    - ``rows``: that a ps holds [rows]
    - ``cpu_s``: processor time [seconds]
    - ``resident_memory_bytes``: now [bytes]
    - ``throttled_s``: that its cgroup kept it from running [seconds]
    - ``throttled_periods``: in which that happened [periods]
    """

    role: Role
    slot: Slot
    samples: float | None = None
    compute_s: float | None = None
    phase_s: dict[str, float] = {}
    bytes_in: float | None = None
    bytes_out: float | None = None
    requests: float | None = None
    service_s: float | None = None
    rows: float | None = None
    cpu_s: float | None = None
    resident_memory_bytes: float | None = None
    throttled_s: float | None = None
    throttled_periods: float | None = None


class Judged(msgspec.Struct, frozen=True):
    """Says how slow a member is, and why.

    - ``member``: its role and slot, e.g. worker:1 [text]
    - ``slowness``: times the median of its peers of the same hardware class; 0: nothing to judge by [ratio]
    - ``seconds``: own compute of a sample (worker), own time for a request (ps); 0: no reading [seconds]
    - ``why``: what is noticed of it [text]
    - ``role``: of it [one of worker, ps]
    - ``slot``: of it [number]
    """

    member: str
    slowness: float
    seconds: float
    why: str
    role: Role = Role.WORKER
    slot: Slot = Slot(0)


class RunningFault(msgspec.Struct, frozen=True):
    """Is a member that ``everstep chaos`` made slow, or stopped.

    - ``target``: the member [text]
    - ``what``: is done to it [one of slow, stop]
    - ``factor``: so many times slower [ratio]
    - ``until``: when it ends [seconds since 1970]
    """

    target: str
    what: str
    factor: float
    until: float


class BindingView(msgspec.Struct, frozen=True):
    """Says what keeps the job from being faster.

    - ``words``: for people [text]
    - ``binding_share``: of the time, that would be saved if that did not hold up, by resource [share, 0 to 1]
    """

    words: str
    binding_share: dict[str, float] = {}


class SpeedView(msgspec.Struct, frozen=True, rename={"faults": "drills"}):
    """Shows how fast the members are: what policies see, and what is made of it.

    - ``seen``: what policies see, over the short and the long window [readings]
    - ``judged``: members that are up, slowest first [members]
    - ``counters``: of members that are up [processes]
    - ``dropped``: readings that were wrong, by reason [readings]
    - ``faults``: made on purpose, that last [faults]
    - ``binding``: what keeps the job from being faster; None: not known yet [words]
    """

    seen: Observations
    judged: tuple[Judged, ...] = ()
    counters: tuple[ProcessCounters, ...] = ()
    dropped: dict[str, int] = {}
    faults: tuple[RunningFault, ...] = ()
    binding: BindingView | None = None


class SizeView(msgspec.Struct, frozen=True):
    """Shows what each process of a role gets that starts from now on.

    - ``role``: worker or ps [role]
    - ``threads``: of a worker, those that compute; of a ps, processors; 0: as its node gives them [threads]
    - ``memory_bytes``: private memory that it may have; 0: as its node gives it [bytes]
    """

    role: Role
    threads: int = 0
    memory_bytes: int = 0


class JobView(msgspec.Struct, frozen=True, kw_only=True, tag="job_view"):
    """Shows a job at one moment.

    - ``job``: its name [text]
    - ``mode``: how it trains [one of ps, allreduce]
    - ``consistency``: of mode ps [one of async, sync, bounded]
    - ``phase``: of the job [one of starting, training, finishing, done, failed, stopped, suspended]
    - ``at``: the moment [seconds since 1970]
    - ``started_at``: when it began [seconds since 1970]
    - ``exit_code``: that it ended with; None: it has not [exit status]
    - ``error``: for which it failed; "": none [text]
    - ``master_incarnation``: masters that the job has had [number]
    - ``members``: the master, all slots of workers and of ps [members]
    - ``members_wanted``: how many workers and ps the job wants, by role [processes]
    - ``sizes``: of processes that start from now on, of roles of which something is named [sizes]
    - ``nodes``: that have joined [nodes]
    - ``epochs``: the newest of each dataset [epochs]
    - ``shards``: of the newest epochs [shards]
    - ``samples_done``: that are trained; goes back where a state was lost [samples]
    - ``samples_total``: the most that ``samples_done`` ever was: never goes back [samples]
    - ``samples_per_s``: of all workers together [samples/second]
    - ``batches_retried``: batches or steps that were computed again [batches]
    - ``failures``: processes and nodes that were lost and survived, by role [failures]
    - ``reported``: newest values that the script reported (job.report), by name [as the script has it]
    - ``placement``: None: mode allreduce without tables, or not yet [map]
    - ``protection``: None: nothing is protected, and nothing moves [partitions]
    - ``checkpoint``: None: this job has nothing to do with checkpoints so far [checkpoints]
    - ``group``: None: mode ps, or no group yet [group]
    - ``plan``: None: no policy has wanted anything so far [plans]
    - ``speed``: None: it was not asked for [members]
    - ``supervision``: the state of the job, and for whom it waits [states]
    - ``cost``: None: the job has no prices [costs]
    - ``graph``: the model and the tables; None: it was not asked for, or nothing was told [modules and tables]
    """

    job: str
    mode: str = "ps"
    consistency: str = "async"
    phase: str
    at: float
    started_at: float
    exit_code: int | None = None
    error: str = ""
    master_incarnation: Incarnation
    members: tuple[MemberView, ...]
    members_wanted: dict[str, int] = {}
    sizes: tuple[SizeView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    epochs: tuple[EpochView, ...]
    shards: ShardsView = ShardsView()
    samples_done: int
    samples_total: int = 0
    samples_per_s: float
    batches_retried: int
    failures: dict[str, int]
    reported: dict[str, float]
    placement: PlacementView | None = None
    protection: ProtectionView | None = None
    checkpoint: CheckpointView | None = None
    group: GroupView | None = None
    plan: PlanView | None = None
    speed: SpeedView | None = None
    supervision: SupervisionView | None = None
    cost: CostView | None = None
    graph: GraphView | None = None
