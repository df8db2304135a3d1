"""Decides who may go on (consistency sync and bounded): the master's side, a pure machine, soft state like the watch.

Theory
------
Nothing here is needed for exactly-once: partitions apply a range only at its watermark, whoever says what about steps.
So nothing of it is journaled, and a word that is lost, repeated or late costs time only. What it is needed for is that
all ps take the same decision about a late gradient. It is taken here, before the gradient leaves its worker: a worker
pushes only what a closed step names, all of it; else nothing, and gives its shard back.

Sync, one step after the other::

    open --as many ready as the quorum--> closed (parts named) --all of them have pushed, or are lost--> open, step + 1

The quorum is as many workers as the job wants, less the backups, or all who have work where these are fewer. Who has no
work (waits for somebody else's shards, has just come, is lost, holds a lease that expired) is waited for by nobody.

Bounded: the *floor* is the least number of finished batches among those who have work. It never falls; who comes or
comes back begins at it.

A new master knows nothing. It takes over what workers tell of: the highest step, and the parts of it if one of them
knows that it was closed. It closes nothing itself, and says no floor, before it has heard everybody who holds a lease:
one of them may know what the last master decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from everstep.config.consistency import Consistency
from everstep.ids import Incarnation, Slot
from everstep.model.step_schedule import BatchShare, ComputedShare, StepSchedule, WorkerClock


class _Seen(msgspec.Struct):
    """Holds what a worker told last. ``out``: it does not count until it tells something else (its lease expired)."""

    incarnation: Incarnation
    clock: WorkerClock
    out: bool = False


class StepScheduler:
    """``report`` with what workers tell, ``look`` after the brain has changed; then ``schedule`` is the word for
    all."""

    __slots__ = (
        "_backup_next",
        "_batch_shares",
        "_batch_shares_next",
        "_closed",
        "_going",
        "_here",
        "_number",
        "_seen",
        "_unheard",
        "backup",
        "consistency",
        "iterations",
        "master",
        "step",
        "wanted",
    )

    def __init__(self, consistency: Consistency, master: Incarnation) -> None:
        self.consistency, self.master = consistency, master
        self.backup = self._backup_next = consistency.backup  # of the step under way; of the next one
        self._batch_shares: tuple[BatchShare, ...] = ()
        self._batch_shares_next: tuple[BatchShare, ...] = ()
        self.wanted = 0  # workers
        self.step = 0 if master == 1 else -1
        self.iterations = 0  # of the job's scripts, in all closed steps: the most that a worker has told of
        self._closed: dict[Slot, ComputedShare] = {}
        self._going: set[Slot] = set()  # in the middle of an iteration, which goes on with the step under way
        self._seen: dict[Slot, _Seen] = {}
        self._here: dict[Slot, Incarnation] = {}
        self._unheard: set[Slot] | None = set() if master == 1 else None  # None: not looked yet
        self._number = 0

    def __repr__(self) -> str:
        what = f"closed with {sorted(self._closed)}" if self._closed else "open"
        return f"<step scheduler {self.consistency} step {self.step} {what}, {len(self._seen)} workers>"

    @property
    def schedule(self) -> StepSchedule:
        parts = tuple(share for _, share in sorted(self._closed.items()))
        step = -1 if self._unheard or self._unheard is None else self.step
        return StepSchedule(
            self.master, self._number, step, parts, self._batch_shares, self.iterations, bool(self._going)
        )

    @property
    def quorum(self) -> int:
        """Return parts that close the step now."""
        return max(1, min(len(self._active()), self.wanted - self.backup))

    def waits(self, slot: Slot) -> bool:
        """Return whether this worker does not get on because it has to wait for others."""
        seen = self._seen.get(slot)
        if seen is None or seen.out:
            return False
        if self.consistency.kind == "sync":
            return seen.clock.state != "busy" or seen.clock.step < self.step
        return seen.clock.state != "busy" or seen.clock.step > self.step

    def working(self) -> tuple[Slot, ...]:
        """Return workers that take part now."""
        return tuple(sorted(self._active()))

    # ------------------------------------------------------------ inputs

    def look(
        self,
        here: Mapping[Slot, Incarnation],
        holding: Collection[Slot],
        wanted: int,
        backup: int = -1,
        batch_shares: tuple[BatchShare, ...] = (),
    ) -> bool:
        """Look at who is there; return whether a word is due. ``here``: the processes that run, by slot; ``holding``:
        those who hold a lease; ``wanted``: workers of the job; ``backup`` (-1: as the job says), ``batch_shares``: from
        the next step on. Whether ``schedule`` changed."""
        before = self._state()
        self.wanted = wanted
        self._backup_next = backup if backup >= 0 else self.consistency.backup
        self._batch_shares_next = batch_shares
        if self.step < 0 or not self._seen:  # nothing of a step is known, or nobody has begun one
            self.backup, self._batch_shares = self._backup_next, batch_shares
        self._here = dict(here)
        if self._unheard is None:
            self._unheard = set(holding)
        self._unheard = {s for s in self._unheard if s in holding and s in here and s not in self._seen}
        for slot in [s for s, seen in self._seen.items() if here.get(s) != seen.incarnation]:
            del self._seen[slot]
        return self._settle(before)

    def report(self, slot: Slot, incarnation: Incarnation, clock: WorkerClock) -> bool:
        """A worker told where it is. Whether ``schedule`` changed."""
        before = self._state()
        if self._here.get(slot, incarnation) > incarnation:
            return False
        self._here[slot] = incarnation
        seen = self._seen.get(slot)
        if seen is not None and seen.incarnation == incarnation and seen.clock.number >= clock.number:
            return False
        self._seen[slot] = _Seen(incarnation, clock)
        if self._unheard:
            self._unheard.discard(slot)
        if self.consistency.kind == "sync":
            if clock.step > self.step:
                self.step, self._closed = clock.step, {}
            if clock.state != "ready":
                self.iterations = max(self.iterations, clock.iterations)
            if clock.step == self.step and clock.parts and not self._closed:
                self._closed = {part.slot: part for part in clock.parts}
        return self._settle(before)

    def expired(self, slot: Slot) -> bool:
        """A lease of this worker was taken back because it did not get on. Whether ``schedule`` changed."""
        before = self._state()
        if (seen := self._seen.get(slot)) is not None:
            seen.out = True
        return self._settle(before)

    # ------------------------------------------------------------ inside

    def _state(self) -> tuple[object, ...]:
        schedule = self.schedule
        return schedule.step, schedule.parts, schedule.batch_shares, schedule.inside

    def _active(self) -> dict[Slot, _Seen]:
        active = {s: seen for s, seen in self._seen.items() if not seen.out and seen.clock.state != "idle"}
        return {s: seen for s, seen in active.items() if s in self._going} if self._going else active

    def _settle(self, before: tuple[object, ...]) -> bool:
        if not self._unheard and self._unheard is not None:
            if self.consistency.kind == "sync":
                self.step = max(self.step, 0)
                while self._advance():
                    pass
                if not self._active():
                    self._going = set()  # they are lost, or left the loop
                    while self._advance():
                        pass
            else:
                active = self._active().values()
                reported = [seen.clock.step for seen in active if seen.clock.state != "new"]
                if self.step >= 0 and len(reported) < len(active):
                    reported.append(self.step)  # it begins there, and is about to say so
                self.step = max([self.step, 0, *([min(reported)] if reported else [])])
        if self._state() == before:
            return False
        self._number += 1
        return True

    def _advance(self) -> bool:
        """Make one transition of a step, if it is due."""
        if self._closed:
            if any(self._owes(share) for share in self._closed.values()):
                return False
            more = {slot for slot in self._closed if slot in self._seen and self._seen[slot].clock.more}
            self.step, self._closed, self._going = self.step + 1, {}, more
            self.backup, self._batch_shares = self._backup_next, self._batch_shares_next
            return True
        active = self._active()
        ready = {
            slot: ComputedShare(slot, seen.incarnation, seen.clock.samples)
            for slot, seen in active.items()
            if seen.clock.state == "ready" and seen.clock.step == self.step
        }
        if not ready or len(ready) < self.quorum:
            return False
        self._closed = ready
        self.iterations = max(self.iterations, *(active[slot].clock.iterations for slot in ready))
        return True

    def _owes(self, share: ComputedShare) -> bool:
        """Return whether a named worker is still to push its part."""
        if self._here.get(share.slot) != share.incarnation:
            return False
        seen = self._seen.get(share.slot)
        if seen is None:
            return True  # a new master has not heard it
        if seen.out or seen.clock.step > self.step or seen.clock.state in ("idle", "new"):
            return False
        return seen.clock.state != "pushed"
