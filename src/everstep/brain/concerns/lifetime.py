"""Records the job from one master to the next, and what people remark about it."""

from __future__ import annotations

from typing import cast

from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.events import (
    RULES,
    Event,
    FinishJob,
    MasterStarted,
    Note,
    Refused,
    RemarkMade,
    Reply,
    SpendingNoted,
    SpotChosen,
)
from everstep.brain.job import JobRules
from everstep.model.decision import Decision
from everstep.policies.process_sizes import asked_sizes


class LifetimeConcern(Concern):
    """A master takes over: the first one brings the job's spec, by which its concerns are composed."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            MasterStarted: self._master_started,
            RemarkMade: self._remark_made,
            SpendingNoted: self._spending_noted,
            SpotChosen: self._spot_chosen,
        }

    def _master_started(self, e: MasterStarted, event: Event) -> Out:
        job = self.job
        if e.incarnation <= job.master_incarnation:
            return []
        first, goes_on = job.master_incarnation == 0, self.state.supervision.goes_on
        self.state.supervision.goes_on = False
        job.master_incarnation = e.incarnation
        job.leases, job.rules = 0, JobRules(**{rule: getattr(e, rule) for rule in RULES})
        out: Out = []
        if first:
            job.spec = e.spec
            job.started_at = event.at
            job.workers_wanted, job.ps_wanted = e.spec.workers, e.spec.ps
            job.sizes = asked_sizes(e.spec)
            self.concerns.compose()
            why = self.concerns.training.begun_words()
            out.append(Note("", Decision("job started", why, {"seed": e.spec.seed})))
        elif not goes_on:
            job.failures.master += 1
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

    def _spot_chosen(self, e: SpotChosen, event: Event) -> Out:
        before, self.state.spot = self.state.spot, e.choice
        choice, spec = e.choice, self.job.spec
        if choice.failed:
            words = f"spot policy {spec.spot_policy}: {choice.failed}; it is asked no more, and the interval stays"
            return [Note("", Decision("disable the spot policy", words))]
        inputs: Inputs = {"interval_s": round(choice.interval_s, 1), "reclaims": choice.seen.reclaims}
        inputs |= {"held_s": round(choice.seen.held_s), "most_at_once": choice.seen.most}
        words = f"spot policy {spec.spot_policy}: a checkpoint every {choice.interval_s:.0f} s"
        words += f": {choice.why}" if choice.why else ""
        rejected = [f"go on with {spec.checkpoint_every}"] if not before.interval_s else []
        if choice.parity and spec.ps and choice.parity != (spec.parity or "0"):
            inputs["parity"] = choice.parity
            rejected.append(f"parity {choice.parity}: a running job keeps its own ({spec.parity or '0'})")
        if choice.safe_ps:
            inputs["safe_ps"] = choice.safe_ps
            if "ps" not in spec.reliable:
                rejected.append(f"{choice.safe_ps} ps on machines that stay: the job has no --reliable ps")
        return [Note("", Decision("checkpoint interval", words, inputs, tuple(rejected)))]

    def _remark_made(self, e: RemarkMade, event: Event) -> Out:
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        return [OK, Note("", Decision("remark", e.text))]
