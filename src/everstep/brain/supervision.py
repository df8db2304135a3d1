"""Holds what the supervisor knows: whether enough members are there, since when they are not, and what the job's state
was.

Theory. The state of the job follows from the phase and from who is there. It is kept beside them only to say since when
and why. The clock of a wait begins when members become too few, and ends when they have been enough for the job's
``stabilization``: members that come and go every second do not wind it back.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.brain.job import JobState
from everstep.brain.members import Members
from everstep.ids import NodeId

CHANGES_KEPT = 64  # of the state of the job, for displays


class JobStage(StrEnum):
    """Is the state of the job as a whole."""

    PENDING = "pending"  # it has not trained since it began or was unsuspended
    WAITING = "waiting"  # it has trained, and too few members are there
    RUNNING = "running"
    SUSPENDED = "suspended"  # its state is safe, and nothing is held
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class StageChange(msgspec.Struct, frozen=True):
    """The job came into this state, at ``at``, for this reason."""

    at: float
    stage: JobStage
    why: str


class Supervision(msgspec.Struct, kw_only=True, rename={"announced": "told"}):
    """Is what the supervisor knows.

    ``stage``: as of the last fact. ``changes``: of it, the newest last. ``begun``: the job has trained since it began
    or was unsuspended. ``lack``: of whom there are too few; "": of nobody. ``short_since``: since when, 0: there are
    enough, and have been for long enough. ``enough_since``: since when there are enough again, 0: there are not.
    ``due_at``: when the supervisor has to look again, 0: never. ``suspending``: why the job is being suspended.
    ``suspend_by``: when it is suspended without a new checkpoint, 0: never. ``by_itself``: it is suspended because of
    who was there, and goes on when they are back. ``suspensions``: so far. ``losses``: of processes, beside those of
    lost nodes. ``announced``: what was said last of a wait that cannot end. ``spent``: seconds in states that are
    over, by state. ``goes_on``: the next master does not replace a lost one, but is the first one after a suspension.
    ``on_demand``: machines asked for in place of spot ones, 0: none; ``on_demand_since``: since when. ``stand_ins``:
    that were granted and are held. ``spot_since``: since when the other machines are enough. ``in_vain``: how often in
    a row the job suspended itself before it trained."""

    stage: JobStage = JobStage.PENDING
    changes: list[StageChange] = []
    spent: dict[str, float] = {}
    begun: bool = False
    lack: str = ""
    short_since: float = 0.0
    enough_since: float = 0.0
    due_at: float = 0.0
    suspending: str = ""
    by_itself: bool = False
    suspensions: int = 0
    losses: int = 0
    announced: str = ""
    goes_on: bool = False
    on_demand: int = 0
    on_demand_since: float = 0.0
    stand_ins: list[NodeId] = []
    spot_since: float = 0.0
    suspend_by: float = 0.0
    in_vain: int = 0

    def __repr__(self) -> str:
        return f"<supervision {self.stage}{f', {self.lack}' if self.lack else ''}>"

    @property
    def why(self) -> str:
        """Return why the job is in its state."""
        return self.changes[-1].why if self.changes else ""

    @property
    def since(self) -> float:
        """Return since when it is; 0.0 before the first fact."""
        return self.changes[-1].at if self.changes else 0.0

    def seconds(self, at: float) -> dict[str, float]:
        """Return how long the job has been in each state, up to ``at``."""
        out = dict(self.spent)
        if self.changes:
            out[self.stage.value] = out.get(self.stage.value, 0.0) + max(0.0, at - self.since)
        return out


def least_workers(job: JobState, members: Members) -> int:
    """Return with how many workers the job trains, at least."""
    if job.anyway:
        return 1
    if job.spec.recovery == "run_with_available":
        return job.spec.min_workers
    asked = min(job.workers_asked or job.spec.workers, job.workers_wanted)  # (nodes come and go with what they bring)
    away = sum(record.drained for slot, record in members.workers.items() if slot < asked)
    all_of_them = asked - away  # (nobody waits for a worker that was sent away by name)
    return max(job.spec.min_workers, min(all_of_them, job.spec.logical_workers or all_of_them))
