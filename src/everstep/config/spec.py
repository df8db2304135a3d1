"""Has the job spec: every setting of a job with its unit, default and reason."""

from __future__ import annotations

from typing import Literal

import msgspec

# In files and on the wire these fields keep the names that they had (decision 0190): run directories, journals and
# checkpoints of before are read as they are.
_ENCODED = {
    "processes_per_worker": "shard",
    "partitions": "buckets",
    "checkpoint_full_every": "checkpoint_base_every",
}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_ENCODED):
    """Describes one training run, as in ``job.yaml`` (all fields are optional there; flags win over the file)."""

    name: str = "job"
    script: str = ""  # path of the training script
    args: tuple[str, ...] = ()  # its arguments
    workers: int = 1
    ps: int = 1
    consistency: str = "async"  # mode ps: async, bounded:S, sync, sync:B (see config.consistency)
    mode: Literal["ps", "allreduce", "pipeline"] = "ps"  # where the dense part lives: on the ps, or on every worker
    strategy: Literal["elastic", "fixed"] = "elastic"  # allreduce, fewer workers: smaller global batch, or the same
    min_workers: int = 1  # below so many, training waits
    max_workers: int = 0  # no more than so many, whatever nodes bring along; 0: any number
    min_ps: int = 1  # below so many, the job counts as waiting
    max_ps: int = 0  # no more than so many; 0: any number
    max_wait: str = "off"  # so long the job waits for enough workers and ps; "off": for ever
    on_wait_timeout: Literal["suspend", "fail", "run"] = "suspend"  # what then; run: with what there is
    recovery: Literal["run_with_available", "wait_for_all"] = "run_with_available"  # after a loss
    fail_tolerance: int = -1  # so many lost workers and ps are taken, beside those of lost nodes; -1: any number
    reliable: tuple[str, ...] = ()  # roles that stand on machines which stay, while there is one: master, ps
    fallback: str = "off"  # after so long a wait for spot machines on-demand ones are asked for; "off": never
    spot_policy: str = "none"  # who sets the interval between checkpoints: none, hazard, or module:callable
    prices: str = ""  # file of what machines cost: the cost of the job is shown while it runs; empty: none
    budget: float = 0.0  # USD: the job is suspended before it has spent more; 0: any sum. Needs prices
    stabilization: str = "10s"  # capacity that is back counts once it has stayed for so long
    logical_workers: int = 0  # allreduce: parts of every global batch, on however many workers: same bits; 0: off
    processes_per_worker: int = 1  # allreduce: processes that share one replica of the model (FSDP2: fully_shard)
    stages: int = 1  # pipeline: processes of a worker, each with one stage of the model
    copy_every: str = "auto"  # pipeline: a copy of each stage in one of so many iterations; auto: for 1 % of time; off
    graph_every: str = "auto"  # everstep graph: one step in so many is sampled; auto: for 0.2 % of the time; off
    lr_rule: Literal["none", "linear", "sqrt"] = "none"  # allreduce, elastic: learning rate when the batch changes
    heal_from: Literal["none", "lowest", "highest"] = "none"  # allreduce: whose state counts without a majority
    seed: int = 0
    run_dir: str = ""  # empty: runs/NAME-DATE-TIME under the current directory
    partitions: int = 64  # unit of placement and recovery; fixed for the life of the job (design: 64 to 256)
    bind: str = ""  # HOST:PORT of the master for other nodes; empty: this machine only, over Unix sockets
    master_alone: bool = False  # the first node has the master only; other nodes are places, and bring no workers along
    files_port: int = 0  # with bind: where other nodes' processes leave checkpoints and logs; 0: any free port
    notices: str = ""  # who is asked whether a node goes away: aws, gcp, azure, alibaba, file:PATH, command:WORDS
    capacity: str = (
        ""  # where further machines come from: trace:FILE, command:WORDS, ray, slurm; empty: who joins by hand
    )
    capacity_speed: float = 1.0  # trace: so many times as fast as it was recorded
    capacity_quiet: str = "0s"  # trace: no pause longer than this between two events; 0s: as recorded
    capacity_lead: str = "0s"  # trace: notice before a machine goes, as it passes here; 0s: gone without a word
    capacity_nodes: int = 0  # machines to hold at a time, at most; 0: all that a trace has
    capacity_workers: int = 1  # workers of each machine of a trace
    capacity_ps: int = 0  # ps that each machine of a trace takes; 0: all stay on the first node
    node_cpus: int = 0  # ray, slurm: CPUs that each node asks for; 0: one for each of its workers and ps
    node_gpus: int = 0  # ray, slurm: GPUs that each node asks for
    slurm_partition: str = ""  # in which the nodes are; empty: the default one
    slurm_account: str = ""  # that pays for them; empty: the user's default
    slurm_time: str = ""  # limit of each node's job, as sbatch --time; empty: the partition's
    slurm_steps: bool = False  # nodes are steps of srun in the job of Slurm that everstep run stands in
    slurm_options: str = ""  # more words for sbatch, such as --mem=8G
    nodes: int = 1  # before so many nodes are there, this one included, nothing is started
    nodes_wait_s: float = 300.0  # but for so long at most; then the job begins with what there is
    zone: str = ""  # of the first node's machine, as prices name it
    market: Literal["on_demand", "spot"] = "on_demand"  # of the first node's machine
    metrics: str = ""  # HOST:PORT of the Prometheus endpoint; empty: none; not this machine's own address: with a token
    hardware: str = ""  # class of the first node's machine; empty: named after its GPUs or its processor
    tls: Literal["all", "control"] = "all"  # between nodes: all, or the control plane; the rest is authenticated
    nonfinite: Literal["raise", "skip"] = "raise"  # what to do with a batch whose gradient has NaN or Inf
    max_restarts: int = 10  # of one slot in a row without a shard done between them; then the job gives up
    script_retries: int = 3  # of a worker in a row without a step between, where its script raised what may pass
    quarantine_after: int = 4  # workers lost in a row on one shard before it is set aside
    skip_quarantined: bool = False  # true: finish without quarantined shards; false: they fail the job
    progress_timeout: str = "10m"  # a worker whose script does nothing for so long is replaced; "off": waited for
    lease_s: float = 120.0  # without progress for so long, a shard is taken back from a live worker
    suspect_after_s: float = 3.0  # silence before a member is shown as suspect
    lost_after_s: float = 8.0  # silence before it is declared lost and replaced
    disk_full_s: float = 240.0  # so long the job waits for space on a full disk; then it ends
    cut_off_s: float = 120.0  # another node without the master for so long ends what runs on it
    rejoin_s: float = 600.0  # so long its agent then tries to come back, before it goes away
    still_here_s: float = 600.0  # so long after a notice said that a node goes, the node counts as staying
    master_silent_s: float = 5.0  # a master that does not answer its agent for so long is told of
    master_lost_s: float = 15.0  # ... and for so long is replaced
    start_s: float = 600.0  # from the order to start a process to its hello (es.join); then it is replaced
    threads_per_worker: int = 0  # OMP_NUM_THREADS of a worker; 0: cores of the node / workers on it, at least 1
    ps_threads: int = 0  # processors that one ps may use; 0: all of its node
    worker_memory: str = ""  # "4GB": private memory that each worker may have; empty: what its node gives
    ps_memory: str = ""  # the same of each ps
    preload: tuple[str, ...] = ()  # more modules for the warm template to import
    parity: str = "0"  # "K+M": K data partitions a stripe, M parity partitions; "1+1" is a replica; "0" is off
    protect: Literal["acked", "eager", "lag"] = "acked"  # whether a push waits until parity has it; lag: later
    protect_lag: str = "4s"  # lag: parity may be so far behind
    rebuild_share: float = 0.1  # of a ps' time that rebuilds, new mirrors and moves take while workers ask for rows
    checkpoint_every: str = ""  # "30s", "10m" or "10000batches"; empty: only when asked
    model_to: str = ""  # where the model is left when the job ends: none, run_dir, a directory or URL; empty: run_dir
    checkpoint_to: str = ""  # directory or fsspec URL; empty: RUN_DIR/checkpoints
    checkpoint_keep: int = 3  # newest checkpoints that are kept
    checkpoint_keep_every: str = ""  # "6h": besides, one for every so long; empty: none
    checkpoint_full_every: int = 8  # after so many incremental snapshots of a partition a full one is written
    ps_limit_bytes: int = 0  # memory for rows of one ps; 0: no limit
    cold_dir: str = ""  # rows that do not fit into ps_limit_bytes go to a file in this directory of the ps' machine
    on_full: Literal["error", "evict"] = "error"  # at that limit: refuse the push, or free rows not used for longest
    policy: str = "none"  # none, shared, exclusive, backup, auto, memory, one's own (module:callable); several with +
    optimize: Literal["time", "waste", "cost"] = "time"  # what policy auto chooses sizes for
    sizes: Literal["both", "workers", "ps"] = "both"  # which numbers policy auto changes
    max_memory: str = ""  # policy auto: "16GB": of all workers and ps together; empty: any
    resume_from: str = ""  # directory or URL of checkpoints this job began from
    trust_checkpoint: bool = False  # everstep resume: also one that was not written with the job's key
    trusted: tuple[str, ...] = ()  # digests of manifests that the user said to trust (everstep resume)
    torchrun_env: bool = False  # workers find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, as of when they started

    @property
    def grouped(self) -> bool:
        """Return whether workers train in a group, each with a replica of the model; else it is on the ps."""
        return self.mode != "ps"

    @property
    def worker_processes(self) -> int:
        """Return how many processes a worker has."""
        return self.stages if self.mode == "pipeline" else self.processes_per_worker
