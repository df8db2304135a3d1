"""Describes what the master has seen of its members' speed, at one moment: the input of every policy of stragglers.

A worker is judged by seconds per sample of its *own* compute (in a synchronous job everybody's step lasts as long as
the slowest one's), a ps by its service time and queue. Times are seconds of the master's clock; a reading that nobody
has yet is 0, never NaN or negative.
"""

from __future__ import annotations

import warnings

import msgspec

from everstep.config.renamed import renamed_line
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit
from everstep.model.process_size import ProcessSize


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Measures a worker over one window of time."""

    samples: int = 0  # trained in the window
    compute_s: float = 0.0  # own compute of those, summed
    per_sample_s: float = 0.0  # median of own compute per sample; 0.0: no reading
    at_least_s: float = 0.0  # own compute per sample so far of the step under way; 0.0: none is
    phases: dict[str, float] = {}  # seconds of the window by phase of a step: data, pull, forward, backward, push, ...

    @property
    def under_way(self) -> bool:
        """``per_sample_s`` is of a step that is not over: a lower bound."""
        return 0.0 < self.per_sample_s == self.at_least_s


class ProcessLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Measures a process over one window of time. Shares: 1.0 is one processor, or all of the time; ``service_s``,
    ``queue`` and ``requests_per_s`` are of a ps."""

    cpu_share: float = 0.0
    throttled_share: float = 0.0
    service_s: float = 0.0  # median of a request; 0.0: no reading
    queue: float = 0.0  # requests at the ps at a time, mean
    requests_per_s: float = 0.0
    bytes_per_s: float = 0.0  # of keys and rows, in and out; of a worker in mode ps only


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one worker that is up. ``history``: see :class:`ServerSeen`, of ``per_sample_s``."""

    slot: Slot
    incarnation: Incarnation
    node: NodeId
    hardware: str = ""  # the class of its machine; "": unknown. Members of one class should be equally fast
    since: float = 0.0  # when this incarnation came up
    batch: int = 0  # samples per micro-batch; 0: unknown
    loader_batch: int = 0  # samples of a batch by the script; 0: unknown
    accum: int = 1  # micro-batches per step
    share: int = 0  # samples that it takes of one step now; 0: unknown, or there are no common steps
    memory_batch: int = 0  # largest micro-batch that fits, by its script (``largest_batch``); 0: unknown
    short: Pace = Pace()
    long: Pace = Pace()
    history: tuple[float, ...] = ()
    cpu_share: float = 0.0  # processors that it used, in the short window
    rss_bytes: int = 0
    throttled_share: float = 0.0  # of the short window, in which its cgroup was kept from running: 0..1
    bytes_per_s: float = 0.0  # mode ps: of rows pulled and pushed
    long_load: ProcessLoad = ProcessLoad()  # the same over the long window

    def __str__(self) -> str:
        return f"{Role.WORKER}:{self.slot}"


class ServerSeen(msgspec.Struct, frozen=True, kw_only=True, rename={"partitions": "buckets"}):
    """Describes one ps that is up."""

    slot: Slot
    incarnation: Incarnation
    node: NodeId
    hardware: str = ""
    since: float = 0.0
    service_s: float = 0.0  # median per request in the short window; 0.0: no reading
    queue: float = 0.0  # requests at the ps at a time, mean
    bytes_per_s: float = 0.0  # in and out
    partitions: int = 0
    owned: tuple[PartitionId, ...] = ()  # those
    closed: tuple[PartitionId, ...] = ()  # those it must not have: it keeps what brings them back when their ps is lost
    history: tuple[float, ...] = ()  # medians of consecutive short windows, newest last; 0.0: no reading in that one
    cpu_share: float = 0.0
    rss_bytes: int = 0
    throttled_share: float = 0.0
    long_load: ProcessLoad = ProcessLoad()  # the same over the long window
    row_bytes: int = 0  # of its rows and their indexes, mirrors included; part of ``rss_bytes``
    rows: int = 0
    limit_kind: MemoryLimit = MemoryLimit.NONE  # the limit of memory that leaves it least room
    limit_bytes: int = 0  # 0: there is none
    limit_used_bytes: int = 0

    def __str__(self) -> str:
        return f"{Role.PS}:{self.slot}"

    @property
    def buckets(self) -> int:
        """Is ``partitions`` under its old name, and says so."""
        warnings.warn(renamed_line("ServerSeen.buckets", "ServerSeen.partitions"), FutureWarning, stacklevel=2)
        return self.partitions


class Observations(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the whole job, at ``at``. Only members that are up are in it, by slot.

    A policy is asked once per short window (of workers, that is all since the last look), and no reading is in two of
    them: so what it proposes at one look can be judged by the readings of the next."""

    at: float
    window_s: float = 0.0  # length of a short window; 0.0: unknown
    mode: str = "ps"  # ps, allreduce (or what else ``config.spec`` names)
    consistency: str = "async"  # of mode ps: async, sync, bounded; of mode allreduce: sync
    backup: int = 0  # mode ps, sync: workers that a step does not wait for
    step: int = 0  # committed steps; 0 in mode ps
    global_batch: int = 0  # samples of one step of the whole group; 0: there is no such thing (mode ps, async)
    loader_batch: int = 0  # samples of a micro-batch by the script: so much fits where no worker says less; 0: unknown
    wanted_workers: int = 0
    pending: int = 0  # members that were started and are not up yet, and ps that are being emptied
    remaining_s: float = 0.0  # estimate of what is left of the job at the speed of the last seconds; 0.0: unknown
    remaining_samples: int = 0  # the same in samples, of the epochs that were asked for so far; 0: unknown
    places: tuple[NodeId, ...] = ()  # nodes that would take another worker (may be the ones in use)
    ps_places: tuple[NodeId, ...] = ()  # nodes that would take another ps
    restarts: int = 0  # by policies, in the whole job
    restarted_at: float = 0.0  # the last of them
    workers: tuple[WorkerSeen, ...] = ()
    servers: tuple[ServerSeen, ...] = ()
    wanted_ps: int = 0
    min_workers: int = 1  # bounds of the job; of ``max_*`` 0: none
    max_workers: int = 0
    min_ps: int = 1
    max_ps: int = 0
    optimize: str = "time"  # what sizes are chosen for: time, waste, cost
    sizes: str = "both"  # which numbers may be changed: both, workers, ps
    rest_since: float = 0.0  # since when no partition is on its way; 0.0: there are none, or nobody looked
    max_memory_bytes: int = 0  # of all workers and ps together; 0: any
    worker_size: ProcessSize = ProcessSize()  # that workers get which start from now on (``plan.Resize``)
    ps_size: ProcessSize = ProcessSize()
    ps_memory_most: int = 0  # bytes that one ps may have on each of their nodes; 0: nobody said
    samples_done: int = 0
