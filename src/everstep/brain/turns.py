"""Carries words between ``brain.pacing`` and workers: their places in, turns out. Consistency sync and bounded.
Pure."""

from __future__ import annotations

from collections.abc import Callable

from everstep.brain.brain import Brain
from everstep.brain.events import LeaseExpired
from everstep.brain.pacing import Pacing
from everstep.brain.policy_control import portions
from everstep.brain.watch import HeartbeatWatch
from everstep.config.consistency import parse_consistency
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot
from everstep.model.turn import Turn, WorkerClock


class PaceKeeper:
    """Tells workers whose turn it is. ``order(slot, turn)``: to a worker, if it is connected; who is not hears of it
    when it tells its place again. ``pacing``: None in async, where nobody waits for anybody."""

    def __init__(
        self,
        brain: Brain,
        watch: HeartbeatWatch,
        spec: JobSpec,
        master: Incarnation,
        order: Callable[[Slot, Turn], object],
        make: type[Pacing] = Pacing,
    ) -> None:
        self._brain, self._watch, self._order = brain, watch, order
        consistency = parse_consistency(spec.consistency)
        self.pacing = make(consistency, master) if consistency.kind != "async" else None

    def __repr__(self) -> str:
        return f"<pace keeper {self.pacing!r}>"

    def told(self, slot: Slot, incarnation: Incarnation, place: WorkerClock) -> None:
        """A worker says where it is."""
        if self.pacing is None:
            return
        if self._look() | self.pacing.told(slot, incarnation, place):
            self._publish()
        else:
            self._order(slot, self.pacing.turn)

    def handled(self) -> None:
        """The brain has handled an event. Of a LeaseExpired tell ``expired`` before."""
        if self.pacing is not None and self._look():
            self._publish()

    def expired(self, event: LeaseExpired) -> None:
        """Before the brain hears of it: whose lease it is."""
        held = self._brain.leases.get(event.shard)
        if self.pacing is not None and held is not None and held.no == event.lease and self.pacing.expired(held.worker):
            self._publish()

    def tick(self, at: float) -> None:
        """Before the watch's: leases of those who wait for others do not expire for that."""
        if self.pacing is None:
            return
        for held in self._brain.leases.values():
            if self.pacing.waits(held.worker):
                self._watch.excuse(held.no, at)
                self._watch.waits(held.worker, at)

    def _look(self) -> bool:
        assert self.pacing is not None
        here = {s: record.member.incarnation for s, record in self._brain.members.workers.items() if record.running}
        holding = {held.worker for held in self._brain.leases.values()}
        control = self._brain.state.control
        divided = portions(control, here)
        if any(portion.slot not in holding for portion in divided) and self._brain.shards.all_out:
            divided = ()  # the rest of the epoch is of whoever holds it: a slow one's share would be a step of its own
        return self.pacing.look(here, holding, self._brain.job.workers_wanted, control.backup, divided)

    def _publish(self) -> None:
        assert self.pacing is not None
        turn = self.pacing.turn
        for slot in self._brain.members.workers:
            self._order(slot, turn)
