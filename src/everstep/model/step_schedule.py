"""Says whose turn it is in mode ps where workers do not run freely (consistency sync and bounded)."""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.bounds import Whole, WholeOrNone
from everstep.ids import Incarnation, Slot


class ComputedShare(msgspec.Struct, frozen=True, array_like=True):
    """Is one worker's part of a step: its samples, of which it has the gradient."""

    slot: Slot
    incarnation: Incarnation
    samples: Whole


class BatchShare(msgspec.Struct, frozen=True, array_like=True):
    """Says what one worker is to take of each step, by a plan: ``samples``, in ``passes`` (0: in as few as hold no more
    than a batch of its loader each)."""

    slot: Slot
    samples: int
    passes: int = 0

    def in_passes(self, batch: int) -> int:
        """Return in how many passes, where the loader's batches are of ``batch`` samples."""
        return self.passes or -(-self.samples // batch)


class StepSchedule(msgspec.Struct, frozen=True, array_like=True):
    """Says where the job is, by the master. Words of one master are numbered; a later master's replace an earlier
    one's.

    Sync: ``step`` is under way. ``parts`` empty: its gradients are being computed. Else it is closed: these parts are
    it, and are being pushed; the next step begins when all ps have them. Bounded: ``step`` is how many batches the
    slowest worker has finished. -1: not known yet (a new master asks around). ``batch_shares``: of this step; who is
    not named takes a batch of its loader. ``iterations``: of the job's scripts, in all closed steps.
    ``inside``: the step under way goes on with an iteration that has stepped before; nobody begins with it.
    """

    master: Incarnation
    number: int
    step: int = -1
    parts: tuple[ComputedShare, ...] = ()
    batch_shares: tuple[BatchShare, ...] = ()
    iterations: Whole = 0
    inside: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.master, self.number

    @property
    def samples(self) -> int:
        """Return the samples of a closed step."""
        return sum(part.samples for part in self.parts)


State = Literal["idle", "new", "busy", "ready", "pushed"]
"""Of a worker. idle: it has nothing to compute; new: it has, and needs to hear where the job is; busy: computing for
``step``; ready: it has its gradient of ``step``; pushed: all ps have it."""


class WorkerClock(msgspec.Struct, frozen=True, array_like=True):
    """Says where a worker is, as it tells the master: whenever that changes, and again when a master may not know.

    Sync: ``step`` is the one it takes part in; ``samples`` of its part; ``parts``: of the closed step, where it has
    heard of them (so that a new master keeps to what the one before has decided). Bounded: ``step`` is how many batches
    it has finished. Idle and new: ``step`` is the last one heard of. ``number``: larger for each new place, so that
    one which comes late does not count. ``iterations``: of the job's scripts, with those of this part where it is
    computed. ``more``: the iteration of this part goes on in the next step.
    """

    state: State
    step: WholeOrNone = -1
    samples: Whole = 0
    parts: tuple[ComputedShare, ...] = ()
    number: Whole = 0
    iterations: Whole = 0
    more: bool = False
