"""Plants bugs of consistency sync and bounded one at a time (``--mix paced``)."""

from __future__ import annotations

from everstep.brain.step_scheduler import StepScheduler
from everstep.model.step_schedule import ComputedShare
from everstep.sim.mutations import Mutation
from everstep.sim.simulation import Parts
from everstep.tables.staleness_gate import Late, Pushing, StalenessGate, Verdict
from everstep.tables.worker_protocol import BatchFinished, RangeWork, SendGiveBack, WorkerAction, WorkerProtocol


class PushesLate(StalenessGate):
    def _judge(self) -> Verdict | None:
        verdict = super()._judge()
        if not isinstance(verdict, Late):
            return verdict
        self._part, self._stage = verdict.works, "ready"
        self._left = {work.key for work in verdict.works}
        self._begun = [(work.lease.no, work.lo, work.hi) for work in verdict.works]
        self._step = max(0, self._schedule.step if self._schedule is not None else 0)
        self._parts = (ComputedShare(*self._me, 1),)
        return Pushing(verdict.works, 1.0)


class KeepsLate(WorkerProtocol):
    def late(self, work: RangeWork) -> list[WorkerAction]:
        return [BatchFinished(work, False)]


class PushesAndReturns(WorkerProtocol):
    """The range is pushed, and goes back for somebody else besides."""

    def late(self, work: RangeWork) -> list[WorkerAction]:
        return [*self.computed(work), SendGiveBack(work.lease, "late")]


class PutsBackAsItWas(WorkerProtocol):
    """Puts it back for the ps that needed it when it was handed out, though partitions may have moved since."""

    def put_back(self, work: RangeWork) -> bool:
        held = self._held.get(work.lease.no)
        if not super().put_back(work):
            return False
        assert held is not None
        if held.ragged and held.ragged[-1][0] == work.lo:
            lo, hi, _ = held.ragged[-1]
            held.ragged[-1] = (lo, hi, work.partitions)
        return True


class WaitsForTheLost(StepScheduler):
    def look(self, here, holding, wanted, backup=-1, batch_shares=()):  # type: ignore[no-untyped-def]
        return super().look({**self._here, **here}, holding, wanted, backup, batch_shares)


PACED_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("pushes-late", "a late part is pushed, too", Parts(gate=PushesLate)),
    Mutation("keeps-late", "a late part's range goes back to nobody", Parts(protocol=KeepsLate)),
    Mutation("pushes-and-returns", "a late part's range goes back, and is pushed", Parts(protocol=PushesAndReturns)),
    Mutation(
        "puts-back-as-it-was", "work that is put back goes to who had the partitions", Parts(protocol=PutsBackAsItWas)
    ),
    Mutation("waits-for-the-lost", "who has died without a successor is waited for", Parts(scheduler=WaitsForTheLost)),
)
