"""Plans of policies: all of one is done, or nothing."""

from __future__ import annotations

import msgspec

from everstep.brain.concerns.concern import Concern, Handlers, Inputs, Out
from everstep.brain.events import DrainAsked, Event, Note, PlanMade, PolicyDisabled, Refused, Reply
from everstep.brain.policy_control import stale
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.model.plan import (
    Action,
    AdjustAccum,
    AdjustBatch,
    AdjustRate,
    BackupWorkers,
    KillRestart,
    MovePartitions,
    Resize,
    Scale,
)
from everstep.policies.hot import HotMove
from everstep.policies.process_sizes import wishes


class PlanConcern(Concern):
    """Follows the plans that a policy makes; see ``brain.policy_control``."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            PlanMade: self._plan_made,
            PolicyDisabled: self._policy_disabled,
        }

    def _policy_disabled(self, e: PolicyDisabled, event: Event) -> Out:
        control = self.state.control
        if control.disabled or self.job.over:
            return []
        control.disabled = e.error
        words = f"policy {e.policy}: {e.error}; it is asked no more, and the job goes on with the last plan"
        inputs: Inputs = {"policy": e.policy, "plans": control.version}
        return [Note("", Decision("disable the policy", words, inputs))]

    def _plan_made(self, e: PlanMade, event: Event) -> Out:
        """Do all of it, or nothing: members may have come and gone since the policy looked."""
        control, plan, training = self.state.control, e.plan, self.concerns.training
        if self.job.over or control.disabled:
            return []
        here = {
            role: {s.member.slot: s.member.incarnation for s in records.values() if s.running and not s.stopping}
            for role, records in ((Role.WORKER, self.members.workers), (Role.PS, self.members.servers))
        }
        starting = [s for s in self.members.all() if s.member.state is MemberState.STARTING]
        why = stale(plan, self.job, here, str(starting[0].member.key) if starting else "", training.cannot_follow)
        moves = next((a for a in plan.actions if isinstance(a, MovePartitions)), None)
        adjusts = [a for a in plan.actions if isinstance(a, AdjustBatch | AdjustAccum | AdjustRate)]
        scale = next((a for a in plan.actions if isinstance(a, Scale)), None)
        if not why and scale is not None and scale.ps:
            why = self.concerns.processes.refuse_scale({Role.WORKER: scale.workers, Role.PS: scale.ps})
        if not why and (resizes := wishes(plan.actions)):
            why = self.concerns.sizes.refuse(resizes)
        if (
            not why
            and moves is not None
            and not (self.state.placement is not None and self.concerns.placement.reader.at_rest())
        ):
            why = "partitions are under way"
        for action in plan.actions:
            if not why and isinstance(action, KillRestart):
                if action.role is Role.PS and action.slot in self.state.protection.leaving:
                    why = f"ps:{action.slot} is being emptied"  # (it may have been asked to go for good)
                elif action.role is Role.WORKER:
                    why = training.cannot_replace(action.slot, action.incarnation)
        if not why and adjusts:
            why = training.cannot_divide(next((a.batch for a in adjusts if isinstance(a, AdjustBatch)), {}))
        if why:
            dropped = Decision("drop a plan", f"{plan.decision}: {why}", plan.decision.inputs)
            return [Note("", dropped)]
        control.version += 1
        step = training.step()
        plan = msgspec.structs.replace(plan, version=control.version, effective_step=step and step + 1)
        control.plan = plan
        inputs = {**plan.decision.inputs, "plan": plan.version, "policy": e.policy}
        decision = msgspec.structs.replace(plan.decision, inputs=inputs)
        out: Out = [Note("", decision)]
        if adjusts:
            out += training.divide(plan, adjusts, here[Role.WORKER])
        for action in plan.actions:
            out += self._act(action, decision, event)
        return [x for x in out if not isinstance(x, Reply)]

    def _act(self, action: Action, decision: Decision, event: Event) -> Out:
        match action:
            case KillRestart(role=role, slot=slot):
                record = self.members.of(role)[slot]
                before, record.avoid = record.avoid, record.member.node
                if role is Role.PS:
                    out = self.concerns.processes.drain(DrainAsked(str(record.member.key), 0.0, again=True), event)
                    if isinstance(out[0], Reply) and isinstance(refused := out[0].answer, Refused):
                        record.avoid = before
                        return [Note("", Decision("drop a plan", f"{decision}: {refused.error}"))]
                else:
                    out = [
                        self.concerns.processes.send_away(
                            record, Decision("stop", decision.reason, {"restart": True}), 0.0
                        )
                    ]
                self.state.control.restarts += 1
                self.state.control.restarted_at = event.at
                return out
            case MovePartitions(owners=owners):
                placement = self.state.placement
                assert placement is not None
                moves = [HotMove(partition, placement.owner[partition], slot) for partition, slot in owners.items()]
                moved = self.concerns.placement.reports.spread(moves)
                return (
                    self.concerns.placement.settle_map(
                        f"{len(moved)} partitions change hands by plan {self.state.control.version}"
                    )
                    if moved
                    else []
                )
            case Scale(workers=count, ps=0):
                return self.concerns.processes.scale_workers(count, event.at)
            case Scale(workers=count, ps=servers):
                return self.concerns.processes.scale({Role.WORKER: count, Role.PS: servers}, event.at)
            case Resize(role=role, running=running):
                out = self.concerns.sizes.resize(wishes([action]), f"by plan {self.state.control.version}")
                return [*out, *(self.concerns.sizes.raise_running() if running else [])]
            case BackupWorkers(backup=backup):
                self.state.control.backup = backup  # from the next step on: see brain.step_scheduler
                return []
            case _:
                return []
