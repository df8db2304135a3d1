"""Is a worker's side of ``brain/step_scheduler.py``: when it may begin a batch, and whether its gradient counts. Pure.

Bounded: batch number i (of this worker) begins when ``i - floor <= ahead``. Batches that were begun and are not
finished are ``_begun``; so finished ones are counted without counting what was given up twice.

Sync: a *part* is all that is computed for one step, of one or several shards::

    begin, begin, ... -> ready --(turn names it)--> Pushing -> finished -> pushed -> (turn of the next step) -> begin
                              --(turn does not)---> Late: nothing of it may leave; the shard goes back
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from everstep.config.consistency import Consistency
from everstep.ids import Incarnation, LeaseNo, Slot
from everstep.model.step_schedule import BatchShare, ComputedShare, State, StepSchedule, WorkerClock
from everstep.tables.worker_protocol import RangeWork


class Pushing(msgspec.Struct, frozen=True):
    """Push this part; its gradient is a mean over its own samples and counts ``weight`` times in the step's.

    ``step``: its number, for the ps, if there is more than one push of it; else -1."""

    works: tuple[RangeWork, ...]
    weight: float
    step: int = -1


class Late(msgspec.Struct, frozen=True):
    """The step was closed without this part."""

    works: tuple[RangeWork, ...]


Verdict = Pushing | Late
_Begun = tuple[LeaseNo, int, int]


class StalenessGate:
    """See the top of this file. Not thread-safe: the caller has a lock."""

    __slots__ = (
        "_before",
        "_begun",
        "_counted",
        "_finished",
        "_here",
        "_known",
        "_left",
        "_me",
        "_more",
        "_part",
        "_parts",
        "_reported",
        "_resting",
        "_schedule",
        "_stage",
        "_step",
        "consistency",
        "late",
    )

    def __init__(self, consistency: Consistency, slot: Slot, incarnation: Incarnation) -> None:
        self.consistency = consistency
        self.late = 0  # parts that came too late
        self._me = slot, incarnation
        self._schedule: StepSchedule | None = None
        self._begun: list[_Begun] = []  # batches begun and not finished
        self._finished = 0  # bounded
        self._before = 0  # sync: iterations of the job's scripts before this step
        self._here = 0  # sync: those of the script here in this step
        self._counted = 0  # sync: samples that the computed part has learnt from
        self._more = False  # sync: the iteration of the computed part goes on in the next step
        self._known = -1  # the last step heard of: a new master may not know it
        self._step = -1  # sync: of the part in hand, or of the one pushed last while its step is not over
        self._part: tuple[RangeWork, ...] = ()  # sync: computed
        self._left: set[tuple[LeaseNo, int, int, int]] = set()  # of it: not finished
        self._parts: tuple[ComputedShare, ...] = ()  # sync: of the closed step
        self._stage: State = "busy"  # sync, with a step: busy, ready (also while it is pushed), pushed
        self._resting = True
        self._reported: WorkerClock | None = None

    def __repr__(self) -> str:
        return f"<gate {self.consistency} {self.clock()} {len(self._begun)} begun>"

    # ------------------------------------------------------------ facts

    @property
    def sync(self) -> bool:
        return self.consistency.kind == "sync"

    @property
    def pending(self) -> bool:
        """Whether something is computed, waits for its verdict, or is being pushed."""
        return bool(self._begun)

    @property
    def iteration(self) -> int:
        """Sync: the number of the iteration in hand, from 0, which is the same for all workers; -1: none yet."""
        return self._before + self._here - 1

    def may_begin(self, goes_on: bool = False) -> bool:
        """Return whether the rows of another batch may be pulled now. ``goes_on``: sync, of the batch in hand, in which
        there was a step already."""
        schedule = self._schedule
        if schedule is None or schedule.step < 0:
            return False
        if not self.sync:
            return self._finished + len(self._begun) - schedule.step <= self.consistency.ahead
        if self._step < 0:
            return not schedule.parts and (goes_on or not schedule.inside)
        return self._stage == "busy"

    def batch_share(self) -> BatchShare | None:
        """Sync: what to take of the step under way; None: no plan says so, a batch of the loader."""
        me, _ = self._me
        schedule = self._schedule
        return (
            next((p for p in schedule.batch_shares if p.slot == me), None)
            if self.sync and schedule is not None
            else None
        )

    def clock(self) -> WorkerClock:
        """Return where this worker is."""
        known = self._schedule is not None and self._schedule.step >= 0
        if self._resting and not self._begun:
            return WorkerClock("idle", self._known)
        if not self.sync:
            return WorkerClock("busy" if known else "new", self._finished if known else -1)
        if self._step < 0:
            return WorkerClock("busy" if known else "new", self._known)
        computed = self._stage != "busy"
        samples, iterations = (self._counted, self._before + self._here) if computed else (0, self._before)
        return WorkerClock(
            self._stage, self._step, samples, self._parts, iterations=iterations, more=computed and self._more
        )

    def due(self, again: bool = False) -> WorkerClock | None:
        """Return what to tell the master now; None: it knows all that it needs. ``again``: it may have forgotten."""
        clock, reported = self.clock(), self._reported
        if reported is not None:
            clock = msgspec.structs.replace(clock, number=reported.number)
            known = clock == reported or (clock.state == "idle" == reported.state)
            known = known or (clock.state == "ready" == reported.state and clock.step == reported.step)
            known = known or (self.sync and clock.state == "busy" and reported.state in ("busy", "pushed"))
            if known and not again:
                return None
        if clock != reported:
            clock = msgspec.structs.replace(clock, number=clock.number + 1)
        self._reported = clock
        return clock

    # ------------------------------------------------------------ inputs

    def work(self) -> None:
        """There is something to compute."""
        self._resting = False

    def rest(self) -> None:
        """There is nothing to compute."""
        self._resting = True

    def leave(self, keeps: bool = False) -> None:
        """The loop is over; nothing that is in hand will be pushed. ``keeps``: a later step will have it, together with
        what comes, and the iterations go on to count."""
        self._resting, self._begun, self._part, self._left = True, [], (), set()
        here = self._here if keeps else 0
        self._here -= here
        self._end_step()
        self._here = here

    def begin(self, work: RangeWork) -> None:
        """The rows for ``work`` are asked for. Only after ``may_begin``."""
        self._resting = False
        self._begun.append((work.lease.no, work.lo, work.hi))
        if self.sync and self._step < 0:
            assert self._schedule is not None
            self._step, self._stage = self._schedule.step, "busy"
            self._before = max(self._before, self._schedule.iterations)

    def iterate(self) -> None:
        """Sync: the script begins an iteration with what was begun last. (A further pass of a step is none.)"""
        self._here += 1

    def cut(self, work: RangeWork, at: int) -> None:
        """Count what is before ``at`` of a work that was begun as pushed by itself, with the rest."""
        begun = (work.lease.no, work.lo, work.hi)
        self._begun = [(b[0], at, b[2]) if b == begun else b for b in self._begun]

    def ready(
        self, works: tuple[RangeWork, ...], dropped: Collection[RangeWork] = (), samples: int = -1, more: bool = False
    ) -> Verdict | None:
        """Sync: the part is computed. ``dropped``: of it, what does not count (a gradient that is not finite).
        ``samples``: that it counts for; -1: all that are not dropped. ``more``: the iteration goes on."""
        self._part, self._stage, self._more = works, "ready", more
        self._left = {work.key for work in works}
        self._begun = [(w.lease.no, w.lo, w.lo if w in dropped else w.hi) for w in works]
        self._counted = sum(hi - lo for _, lo, hi in self._begun) if samples < 0 else samples
        return self._judge()

    def finished(self, work: RangeWork) -> None:
        """The gradients of ``work`` are at all ps, or were given up."""
        left = [b for b in self._begun if not (b[0] == work.lease.no and work.lo <= b[1] and b[2] <= work.hi)]
        before, gone, self._begun = self._begun, len(self._begun) - len(left), left
        if not self.sync:
            self._finished += gone
        elif work.key in self._left:
            self._left.discard(work.key)
            self._begun = before  # (said of the part as long as any of it is under way)
            if not self._left:
                self._part, self._stage, self._begun = (), "pushed", []
                self._over()
        elif gone and not left and not self._part:
            self._end_step()  # nothing has come of it

    def schedule(self, schedule: StepSchedule) -> Verdict | None:
        """Take in a word of the master."""
        if self._schedule is not None and schedule.order <= self._schedule.order:
            return None
        self._schedule = schedule
        self._known = max(self._known, schedule.step)
        if not self.sync:
            self._finished = max(self._finished, schedule.step)
            return None
        self._over()
        return self._judge()

    # ------------------------------------------------------------ inside

    def _over(self) -> None:
        """End the step of what was pushed."""
        if self._stage == "pushed" and self._schedule is not None and self._schedule.step > self._step >= 0:
            self._end_step()

    def _end_step(self) -> None:
        """End the step in hand: what comes is of another one."""
        self._step, self._stage, self._parts = -1, "busy", ()
        self._before, self._here = self._before + self._here, 0

    def _judge(self) -> Verdict | None:
        works, schedule = self._part, self._schedule
        if not works or schedule is None or self._parts or schedule.step < self._step:
            return None
        if schedule.step == self._step:
            if not schedule.parts:
                return None
            mine = next((p for p in schedule.parts if (p.slot, p.incarnation) == self._me), None)
            if mine is not None:
                self._parts = schedule.parts
                several = len(schedule.parts) > 1 or len(works) > 1
                return Pushing(works, mine.samples / max(1, schedule.samples), schedule.step if several else -1)
        self.late += 1
        self._part, self._begun, self._left = (), [], set()
        self._end_step()
        return Late(works)
