"""Carries messages between ``brain.step_scheduler`` and workers: their clocks in, step schedules out. Consistency sync
and bounded. Pure."""

from __future__ import annotations

from collections.abc import Callable

from everstep.brain.brain import Brain
from everstep.brain.events import LeaseExpired
from everstep.brain.policy_control import batch_shares
from everstep.brain.step_scheduler import StepScheduler
from everstep.brain.watch import HeartbeatWatch
from everstep.config.consistency import parse_consistency
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot
from everstep.model.step_schedule import StepSchedule, WorkerClock


class ScheduleController:
    """Tells workers whose turn it is. ``order(slot, schedule)``: to a worker, if it is connected; who is not hears of
    it when it reports its clock again. ``scheduler``: None in async, where nobody waits for anybody."""

    def __init__(
        self,
        brain: Brain,
        watch: HeartbeatWatch,
        spec: JobSpec,
        master: Incarnation,
        order: Callable[[Slot, StepSchedule], object],
        make: type[StepScheduler] = StepScheduler,
    ) -> None:
        self._brain, self._watch, self._order = brain, watch, order
        consistency = parse_consistency(spec.consistency)
        self.scheduler = make(consistency, master) if consistency.kind != "async" else None

    def __repr__(self) -> str:
        return f"<schedule controller {self.scheduler!r}>"

    def report(self, slot: Slot, incarnation: Incarnation, clock: WorkerClock) -> None:
        """A worker says where it is."""
        if self.scheduler is None:
            return
        if self._look() | self.scheduler.report(slot, incarnation, clock):
            self._publish()
        else:
            self._order(slot, self.scheduler.schedule)

    def handled(self) -> None:
        """The brain has handled an event. Of a LeaseExpired tell ``expired`` before."""
        if self.scheduler is not None and self._look():
            self._publish()

    def expired(self, event: LeaseExpired) -> None:
        """Before the brain hears of it: whose lease it is."""
        held = self._brain.leases.get(event.shard)
        if (
            self.scheduler is not None
            and held is not None
            and held.no == event.lease
            and self.scheduler.expired(held.worker)
        ):
            self._publish()

    def tick(self, at: float) -> None:
        """Before the watch's: leases of those who wait for others do not expire for that."""
        if self.scheduler is None:
            return
        for held in self._brain.leases.values():
            if self.scheduler.waits(held.worker):
                self._watch.excuse(held.no, at)
                self._watch.waits(held.worker, at)

    def _look(self) -> bool:
        assert self.scheduler is not None
        here = {s: record.member.incarnation for s, record in self._brain.members.workers.items() if record.running}
        holding = {held.worker for held in self._brain.leases.values()}
        control = self._brain.state.control
        divided = batch_shares(control, here)
        if any(batch_share.slot not in holding for batch_share in divided) and self._brain.shards.all_out:
            divided = ()  # the rest of the epoch is of whoever holds it: a slow one's share would be a step of its own
        return self.scheduler.look(here, holding, self._brain.job.workers_wanted, control.backup, divided)

    def _publish(self) -> None:
        assert self.scheduler is not None
        schedule = self.scheduler.schedule
        for slot in self._brain.members.workers:
            self._order(slot, schedule)
