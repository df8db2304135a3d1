"""Is the job as a whole: its phase and its counters."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.brain.events import FinishJob
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation
from everstep.model.member import Role
from everstep.model.memory_limit import OutOfMemory
from everstep.model.process_size import ProcessSize


class Phase(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    SUSPENDED = "suspended"


class FailureCounts(msgspec.Struct):
    """Counts the processes and nodes that were lost, by role. ``memory``: those that died of their memory, which are
    counted by their role, too."""

    worker: int = 0
    ps: int = 0
    master: int = 0
    node: int = 0
    memory: int = 0


class JobRules(msgspec.Struct, frozen=True, kw_only=True):
    """Says by which rules the master decides: see :class:`everstep.brain.events.MasterStarted`."""

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


class JobState(msgspec.Struct, kw_only=True):
    """``workers_wanted``, ``ps_wanted``: slots 0..n-1 should be filled. ``leases``: counter of this master's lease
    numbers. ``rules``: how its present master decides.
    ``gathered``: the job waits for no more nodes before it begins (``nodes``); ``nodes_due_at``: until then it does,
    0.0: none has joined. ``anyway``: the job has waited for long enough, and runs with those who are there.
    ``workers_asked``: how many it was scaled to last, beside those that nodes bring along; 0: it was not scaled.
    ``sizes``: of processes that start from now on, by role. ``raised``: roles that got more memory since one of their
    processes had died of its own limit. ``too_small``: the largest limit of memory that a process died of, by role."""

    spec: JobSpec = JobSpec()
    master_incarnation: Incarnation = Incarnation(0)
    leases: int = 0
    phase: Phase = Phase.STARTING
    exit_code: int | None = None
    error: str = ""
    started_at: float = 0.0
    workers_wanted: int = 0
    ps_wanted: int = 0
    failures: FailureCounts = msgspec.field(default_factory=FailureCounts)
    rules: JobRules = JobRules()
    gathered: bool = False
    nodes_due_at: float = 0.0
    anyway: bool = False
    workers_asked: int = 0
    sizes: dict[Role, ProcessSize] = {}
    raised: list[Role] = []
    too_small: dict[Role, OutOfMemory] = {}

    @property
    def over(self) -> bool:
        return self.exit_code is not None

    @property
    def waits_for_nodes(self) -> bool:
        return self.spec.nodes > 1 and not self.gathered

    def finish(self, phase: Phase, exit_code: int, error: str) -> FinishJob:
        """End the job; the first end stands."""
        if self.exit_code is None:
            self.phase, self.exit_code, self.error = phase, exit_code, error
        return FinishJob(self.exit_code, self.error)

    def __repr__(self) -> str:
        return f"<job {self.spec.name} {self.phase} master #{self.master_incarnation} wants {self.workers_wanted}>"
