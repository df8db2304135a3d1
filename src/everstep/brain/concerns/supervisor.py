"""Watches whether enough members are there, how long the job waits for them, and what it does then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.brain.brain_state import State
from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.concerns.fallback import FallbackConcern
from everstep.brain.events import (
    CapacityChanged,
    CheckpointCommitted,
    DrainAsked,
    Event,
    GroupAsked,
    GroupDue,
    JobUnsuspended,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    NodeJoined,
    NodeLost,
    Note,
    PlanMade,
    ProcessExited,
    ScaleAsked,
    ShardAsked,
    StopAsked,
    SupervisionDue,
    SuspendAsked,
)
from everstep.brain.job import Phase
from everstep.brain.members import SlotRecord
from everstep.brain.supervision import CHANGES_KEPT, JobStage, StageChange, least_workers
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.policies.waits import AfterWait, lack_words, longer_wait_s, max_wait_s, stabilization_s

if TYPE_CHECKING:
    from everstep.brain.concerns.composition import Concerns

_HERE = (MemberState.ALIVE, MemberState.SUSPECT)
_COUNTS_ANEW = (
    CapacityChanged,
    CheckpointCommitted,
    DrainAsked,
    GroupDue,
    JobUnsuspended,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    NodeJoined,
    NodeLost,
    PlanMade,
    ProcessExited,
    ScaleAsked,
    StopAsked,
    SupervisionDue,
    SuspendAsked,
)
"""Facts after which other members may be there than before."""
_OVER = {
    Phase.DONE: JobStage.DONE,
    Phase.FAILED: JobStage.FAILED,
    Phase.STOPPED: JobStage.STOPPED,
    Phase.SUSPENDED: JobStage.SUSPENDED,
}


class SupervisorConcern(Concern):
    """Waits for members as long as the job's settings say, suspends the job, and lets it go on."""

    __slots__ = ("_fallback",)

    def __init__(self, state: State, concerns: Concerns) -> None:
        super().__init__(state, concerns)
        self._fallback = FallbackConcern(state, concerns)

    def handlers(self) -> Handlers:
        return {
            SuspendAsked: self._suspend_asked,
            SupervisionDue: self._due,
            JobUnsuspended: self._unsuspended,
        }

    # ------------------------------------------------------------ facts

    def _suspend_asked(self, e: SuspendAsked, event: Event) -> Out:
        if e.suspensions not in (-1, self.state.supervision.suspensions):
            return [OK]  # (it was meant for a suspension that is over: the job goes on by now)
        if self.job.over or self.checkpoints.stopping:
            return [OK, *self._hurry(e, event.at)]  # (it ends already, and keeps its state safe)
        out = self._suspend(e.reason, event.at, by_itself=False)
        return [OK, *out, *self._hurry(e, event.at)]

    def _hurry(self, e: SuspendAsked, at: float) -> Out:
        """The job is being suspended: this is how long its last checkpoint may take; an earlier time counts."""
        supervision = self.state.supervision
        if self.job.over or not supervision.suspending or not e.deadline_s:
            return []
        by = at + e.deadline_s
        if 0 < supervision.suspend_by <= by:
            return []
        supervision.suspend_by = supervision.due_at = by
        words = f"the checkpoint has {e.deadline_s:.1f} s; else the job is suspended with the one before"
        return [Note("", Decision("suspend in time", words, {"deadline_s": round(e.deadline_s, 1)}))]

    def _due(self, e: SupervisionDue, event: Event) -> Out:
        return []  # (what follows from the time, ``settle`` says)

    def _unsuspended(self, e: JobUnsuspended, event: Event) -> Out:
        """The job goes on in a new run of its master. Nothing that ran before runs any more."""
        job, supervision = self.job, self.state.supervision
        if job.phase is not Phase.SUSPENDED or e.number != supervision.suspensions:
            return []
        job.exit_code, job.error = None, ""
        begun = self.state.placement is not None or self.state.groups.group is not None
        job.phase = Phase.TRAINING if begun else Phase.STARTING
        job.anyway, job.gathered, job.nodes_due_at = False, False, 0.0
        supervision.in_vain = supervision.in_vain + 1 if supervision.by_itself and not supervision.begun else 0
        supervision.suspending, supervision.begun, supervision.announced, supervision.goes_on = "", False, "", True
        supervision.short_since = supervision.enough_since = supervision.suspend_by = 0.0
        supervision.on_demand, supervision.stand_ins, supervision.spot_since = 0, [], 0.0
        self.checkpoints.go_on()
        for node in self.members.nodes.values():
            node.alive, node.draining, node.quiet_since = False, False, 0.0
        self.duty.undone()
        for record in self.members.all():
            self._begins_anew(record, event.at)
        out: Out = [Note("", Decision("unsuspend", e.reason, {"suspensions": supervision.suspensions}))]
        protection = self.state.protection
        protection.leaving[:] = [slot for slot in protection.leaving if slot >= job.ps_wanted]
        if self.state.placement is not None and self.checkpoints.newest is None:
            protection.forget()  # (nothing was trained: no partition is worth looking for)
        return out + self.concerns.placement.settle_map("the job goes on after it was suspended")

    def _begins_anew(self, record: SlotRecord, at: float) -> None:
        """The process of this slot is gone, and another one is wanted there."""
        if record.running:
            self.concerns.training.take_back(record, "")
            self.concerns.training.ended(record, clean=True)
            self.members.set_state(record, MemberState.LEFT, at)
        record.stopping = record.finished = record.drained = False
        record.streak, record.avoid = 0, None
        wanted = self.job.workers_wanted if record.member.role is Role.WORKER else self.job.ps_wanted
        record.waiting = record.member.slot < wanted

    # ------------------------------------------------------------ what follows

    def settle(self, event: Event, out: Out) -> Out:
        job, supervision = self.job, self.state.supervision
        kind = type(event.fact)
        if kind in _COUNTS_ANEW or (not supervision.begun and kind in (GroupAsked, ShardAsked)):
            more = self._look(event.at, kind is SupervisionDue) if not job.over else []
            more += self._fallback.look(event)
        elif not job.over:
            return []
        else:
            more = []
        return [*more, *self._stage(event.at)]

    def _look(self, at: float, due: bool) -> Out:
        """Count who is there, and do what is due (``due``: the clock says so)."""
        job, supervision = self.job, self.state.supervision
        tolerated = job.spec.fail_tolerance
        if 0 <= tolerated < supervision.losses:
            error = (
                f"{supervision.losses} workers and ps were lost, beside those of lost nodes: more than "
                f"fail_tolerance={tolerated}; see everstep explain"
            )
            return [self.fail(4, error)]
        if supervision.suspend_by:
            return self._suspend_in_time(at, due)
        anyway, job.anyway, supervision.due_at = job.anyway, False, 0.0
        lack = self._lack()
        if lack:
            supervision.enough_since = 0.0
            supervision.short_since = supervision.short_since or at
            job.anyway = anyway
            supervision.lack = self._lack() if anyway else lack
            if not supervision.lack or self.checkpoints.stopping:
                return []
            return self._wait(at, due)
        supervision.lack = ""
        if supervision.short_since:
            supervision.enough_since = supervision.enough_since or at
            steady_at = supervision.enough_since + stabilization_s(job.spec)
            if at < steady_at:
                supervision.due_at, job.anyway = steady_at, anyway
                return []
        supervision.short_since = supervision.enough_since = 0.0
        supervision.announced = ""
        return []

    def _suspend_in_time(self, at: float, due: bool) -> Out:
        """The job is being suspended, and has so long for its last checkpoint."""
        supervision = self.state.supervision
        supervision.due_at = supervision.suspend_by
        if not due or at < supervision.suspend_by:
            return []
        supervision.suspend_by = supervision.due_at = 0.0
        return self.concerns.ending.suspend_now(at)

    def _wait(self, at: float, due: bool) -> Out:
        """Too few are there. What is done about it is done by the clock alone, and not in the midst of a loss."""
        supervision, job = self.state.supervision, self.job
        wait_s = longer_wait_s(job.spec, supervision.in_vain if job.rules.lengthens else 0)
        if not wait_s:
            return []
        if not due or at < supervision.short_since + wait_s:
            supervision.due_at = supervision.short_since + wait_s
            return []
        return self._waited(at, wait_s)

    def _lack(self) -> str:
        job, training = self.job, self.concerns.training
        if training.all_trained() or self.duty.done:
            return ""  # nobody is waited for any more
        least = least_workers(job, self.members)
        workers, ps = self._count_workers(least), 0
        least_ps = job.spec.min_ps if job.spec.ps else 0
        for record in self.members.servers.values():
            if ps >= least_ps:
                break
            ps += record.member.state in _HERE and not record.stopping
        return lack_words(workers, least, ps, least_ps)

    def _count_workers(self, least: int) -> int:
        """Return how many workers are there, or whose scripts have ended; no more than are needed are counted."""
        there = 0
        for record in self.members.workers.values():
            if there >= least:
                break
            there += record.finished or (record.member.state in _HERE and not record.stopping)
        return there

    def _waited(self, at: float, wait_s: float) -> Out:
        """The job has waited for as long as it may."""
        job, supervision = self.job, self.state.supervision
        inputs: Inputs = {"max_wait_s": wait_s, "waited_s": round(at - supervision.short_since, 1)}
        longer = f", {wait_s:.0f} s as the last waits were in vain" if wait_s > max_wait_s(job.spec) else ""
        words = f"{supervision.lack}, for {at - supervision.short_since:.0f} s (max_wait={job.spec.max_wait}{longer})"
        then = AfterWait(job.spec.on_wait_timeout)
        if then is AfterWait.FAIL:
            return [self.fail(4, f"{words}, and on_wait_timeout is fail")]
        if then is AfterWait.RUN:
            if not job.anyway:
                job.anyway = True
                supervision.lack = self._lack()
                return [Note("", Decision("run with fewer", words, inputs))]
            if supervision.announced == supervision.lack:
                return []
            supervision.announced = supervision.lack
            return [Note("", Decision("wait on", f"{words}: nobody is there to run with", inputs))]
        return self._suspend(words, at, by_itself=True)

    def _suspend(self, reason: str, at: float, by_itself: bool) -> Out:
        supervision = self.state.supervision
        supervision.suspending, supervision.by_itself = reason, by_itself
        supervision.due_at = supervision.suspend_by = 0.0
        return self.concerns.ending.suspend(reason, at)

    def cannot_suspend(self, at: float) -> None:
        """The job's state could not be made safe: it goes on, and waits anew."""
        supervision = self.state.supervision
        supervision.suspending, supervision.by_itself, supervision.suspend_by = "", False, 0.0
        supervision.short_since = at if supervision.short_since else 0.0

    # ------------------------------------------------------------ the state of the job

    def _stage(self, at: float) -> Out:
        """Remember the state of the job, if it has changed; tell people, where a setting of this room is used."""
        supervision = self.state.supervision
        now = job_stage(self.job.phase, self.job.over, supervision.begun, supervision.lack)
        if now is JobStage.RUNNING:
            supervision.begun = True
        if now is supervision.stage and supervision.changes:
            return []
        supervision.spent = supervision.seconds(at)
        before, supervision.stage = supervision.stage, now
        why = self._why(now)
        supervision.changes = [*supervision.changes[-(CHANGES_KEPT - 1) :], StageChange(at, now, why)]
        tells = max_wait_s(self.job.spec) > 0 or self.job.spec.recovery == "wait_for_all"
        if not tells or now is before or self.job.over:
            return []
        return [Note("", Decision(now.value, why, {"before": before.value}))]

    def _why(self, now: JobStage) -> str:
        supervision = self.state.supervision
        match now:
            case JobStage.PENDING:
                return supervision.lack or "not every ps has joined, or the workers have not begun"
            case JobStage.WAITING:
                return supervision.lack
            case JobStage.RUNNING:
                return "enough workers and ps are there"
            case JobStage.SUSPENDED:
                return supervision.suspending
            case JobStage.FAILED:
                return self.job.error
            case JobStage.DONE:
                return "every script ran to its end"
            case JobStage.STOPPED:
                return self.checkpoints.stopping or "it was asked to stop"


def job_stage(phase: Phase, over: bool, begun: bool, lack: str) -> JobStage:
    """Return the state of the job."""
    if over:
        return _OVER.get(phase, JobStage.FAILED)
    if lack:
        return JobStage.WAITING if begun else JobStage.PENDING
    return JobStage.PENDING if phase is Phase.STARTING else JobStage.RUNNING
