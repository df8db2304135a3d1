"""Records the job from one master to the next, and what people remark about it."""

from __future__ import annotations

from typing import cast

from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.events import Event, FinishJob, MasterStarted, Note, Refused, RemarkMade, Reply, SpendingNoted
from everstep.model.decision import Decision


class LifetimeConcern(Concern):
    """A master takes over: the first one brings the job's spec, by which its concerns are composed."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            MasterStarted: self._master_started,
            RemarkMade: self._remark_made,
            SpendingNoted: self._spending_noted,
        }

    def _master_started(self, e: MasterStarted, event: Event) -> Out:
        job = self.job
        if e.incarnation <= job.master_incarnation:
            return []
        first, goes_on = job.master_incarnation == 0, self.state.supervision.goes_on
        self.state.supervision.goes_on = False
        job.master_incarnation = e.incarnation
        job.leases, job.settles, job.empties, job.ranks = 0, e.settles, e.empties, e.ranks
        job.refills = e.refills
        out: Out = []
        if first:
            job.spec = e.spec
            job.started_at = event.at
            job.workers_wanted, job.ps_wanted = e.spec.workers, e.spec.ps
            self.concerns.compose()
            why = self.concerns.training.begun_words()
            out.append(Note("", Decision("job started", why, {"seed": e.spec.seed})))
        elif not goes_on:
            job.master_failures += 1
            inputs: Inputs = {
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

    def _spending_noted(self, e: SpendingNoted, event: Event) -> Out:
        self.state.spent = e.spent
        return []

    def _remark_made(self, e: RemarkMade, event: Event) -> Out:
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        return [OK, Note("", Decision("remark", e.text))]
