"""On-demand machines in place of spot ones: asked for after a wait, given back once spot machines are enough."""

from __future__ import annotations

from everstep.brain.concerns.concern import Concern, Inputs, Out
from everstep.brain.events import CapacityChanged, DrainAsked, Event, Note, Reply
from everstep.brain.members import RUNNING
from everstep.brain.supervision import least_workers
from everstep.model.capacity import CapacityStep, Market
from everstep.model.decision import Decision
from everstep.model.member import MemberState
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.waits import fallback_s, stabilization_s, stand_ins_needed

_HERE = (MemberState.ALIVE, MemberState.SUSPECT)


class FallbackConcern(Concern):
    """Decides how many on-demand machines the job asks for. Whoever holds the source of machines reads that off the
    view of the job; the supervisor asks this concern whenever others may be there than before."""

    __slots__ = ()

    def look(self, event: Event) -> Out:
        """Return what follows from who is there now."""
        wait_s = fallback_s(self.job.spec)
        supervision = self.state.supervision
        if not wait_s or self.job.over or self.checkpoints.stopping:
            return []
        if isinstance(event.fact, CapacityChanged):
            self._changed(event.fact)
        if not supervision.on_demand:
            return [*self._empty_stand_ins(event), *self._wait(event.at, wait_s)]
        if supervision.lack:
            supervision.spot_since = 0.0
            supervision.on_demand = max(supervision.on_demand, self._needed())
            return []
        return self._go_back(event)

    def _changed(self, e: CapacityChanged) -> None:
        """Remember which machines stand in for spot ones."""
        supervision, gone = self.state.supervision, (CapacityStep.TAKEN_BACK, CapacityStep.GIVEN_BACK)
        others = [node for node in supervision.stand_ins if node != e.node]
        if e.step is CapacityStep.GRANTED and e.market is Market.ON_DEMAND:
            supervision.stand_ins = [*others, e.node]
        elif e.step in (CapacityStep.GRANTED, *gone):
            supervision.stand_ins = others

    def _wait(self, at: float, wait_s: float) -> Out:
        """Ask for on-demand machines once the job has waited for spot ones for long enough."""
        supervision = self.state.supervision
        if not supervision.lack or not supervision.short_since:
            return []
        if at < supervision.short_since + wait_s:
            self._look_again(supervision.short_since + wait_s)
            return []
        needed = self._needed()
        if not needed:
            return []  # (they start, or ps are lacking: machines would not help)
        supervision.on_demand, supervision.spot_since, supervision.on_demand_since = needed, 0.0, at
        waited_s = at - supervision.short_since
        words = (
            f"{supervision.lack}, for {waited_s:.0f} s (fallback={self.job.spec.fallback}): {needed} "
            "on-demand machines are asked for, until spot machines are enough"
        )
        inputs: Inputs = {"machines": supervision.on_demand, "waited_s": round(waited_s, 1)}
        return [Note("", Decision("ask for on-demand", words, inputs, ("wait on for spot: it costs time",)))]

    def _needed(self) -> int:
        """Return how many machines bring the workers that others lack, those that start among them."""
        least = least_workers(self.job, self.members)
        return stand_ins_needed(self.job.spec, least - self._workers_elsewhere(RUNNING))

    def _workers_elsewhere(self, states: tuple[MemberState, ...] = _HERE) -> int:
        """Count workers in these states, but for those on machines that stand in for others. (A machine may join before
        its source tells that it was granted.)"""
        supervision = self.state.supervision
        held = set(supervision.stand_ins)
        for node in self.members.nodes.values():
            if node.market is Market.ON_DEMAND and node.node != HOME_NODE and node.since >= supervision.on_demand_since:
                held.add(node.node)
        return sum(
            record.finished
            or (record.member.state in states and not record.stopping and record.member.node not in held)
            for record in self.members.workers.values()
        )

    def _go_back(self, event: Event) -> Out:
        """Give the on-demand machines back once the others have been enough for long enough."""
        supervision, at = self.state.supervision, event.at
        least = least_workers(self.job, self.members)
        if self._workers_elsewhere() < least:
            supervision.spot_since = 0.0
            return []
        supervision.spot_since = supervision.spot_since or at
        steady_at = supervision.spot_since + stabilization_s(self.job.spec)
        if at < steady_at:
            self._look_again(steady_at)
            return []
        supervision.on_demand, supervision.spot_since = 0, 0.0
        words = f"{least} workers and more are on other machines, for {self.job.spec.stabilization}"
        words += f": {', '.join(supervision.stand_ins) or 'nothing'} is emptied and given back"
        note = Note("", Decision("back to spot", words, {"machines": len(supervision.stand_ins)}))
        return [note, *self._empty_stand_ins(event)]

    def _empty_stand_ins(self, event: Event) -> Out:
        """Empty machines that nobody needs any more, also those of which a late word came."""
        out: Out = []
        for name in self.state.supervision.stand_ins:
            node = self.members.nodes.get(name)
            if node is not None and node.alive and not node.draining:
                drained = self.concerns.processes.drain(DrainAsked(name, 0.0), event)
                out += [i for i in drained if not isinstance(i, Reply)]
        return out

    def _look_again(self, at: float) -> None:
        supervision = self.state.supervision
        supervision.due_at = min(supervision.due_at or at, at)
