"""Decides when the steps of one worker may begin, how large they are, and which of them go to the ps. Pure.

Consistency async: each step goes at once. Bounded: the same, and ``gate`` says when the next batch may begin. Sync:
what a worker computes for one step of the job is its *part*, of one or several of its own steps. A part is complete
when it has the samples that a plan wants of it (``size``). It goes when the master has named it for the step::

    size() -> gate.begin -> ready(step)* -> close -> turn(...) -> AdmittedStep | LateStep of each step of the part
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.config.consistency import Consistency
from everstep.ids import Incarnation, Slot
from everstep.model.step_schedule import BatchShare, StepSchedule, WorkerClock
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.computed_step import ComputedStep
from everstep.tables.staleness_gate import Late, StalenessGate, Verdict
from everstep.tables.worker_protocol import wholes_of


class AdmittedStep(NamedTuple):
    """Push this step. Its gradients count ``weight`` times; ``number``: of the job's step, where that has several
    pushes, else -1."""

    step: ComputedStep
    weight: float = 1.0
    number: int = -1


class LateStep(NamedTuple):
    """Push nothing of this step: the job's step was closed without it."""

    step: ComputedStep


Judged = AdmittedStep | LateStep
_NOTHING: tuple[Judged, ...] = ()


class PartSize(NamedTuple):
    """Counts samples of this worker's part of a step, and of the largest batch of it. 0: no plan says so."""

    samples: int = 0
    batch: int = 0

    def next(self, done: int) -> int:
        """Return samples of the next batch of a part that has ``done``: batches as alike as they can be."""
        left = max(1, self.samples - done)
        return -(-left // -(-left // self.batch))


class StepAdmission:
    """See the top of this file. Not thread-safe: the caller has a lock. ``gate``: None with consistency async."""

    __slots__ = ("_hand", "_judged", "_part", "_size", "accumulates", "gate", "largest_batch", "loader_batch", "sync")

    def __init__(self, consistency: Consistency, slot: Slot, incarnation: Incarnation, hand: BatchesInHand) -> None:
        """Take ``hand``: what the script has and no step has consumed; it counts for the size of a part."""
        self._hand = hand
        self.gate = StalenessGate(consistency, slot, incarnation) if consistency.kind != "async" else None
        self.sync = consistency.kind == "sync"
        self.loader_batch = 0  # samples of a batch as the loader makes them
        self.largest_batch = 0  # samples that fit into this worker at once, 0: unknown
        self.accumulates = False  # the script steps less often than once a batch
        self._size = PartSize()  # sync: what is to be taken of the step under way
        self._part: list[ComputedStep] = []  # sync: computed for the step under way, and not said to be ready
        self._judged: list[ComputedStep] = []  # sync: the part that waits for its verdict

    def __repr__(self) -> str:
        return f"<StepAdmission {self.gate or 'async'} {len(self._part)} steps of {self._size}>"

    # ------------------------------------------------------------ how large batches are

    @property
    def planned(self) -> bool:
        """Sync: whether a part has a size of its own; else it is one batch of the loader."""
        return self._size.samples > 0

    @property
    def open(self) -> bool:
        """Sync: whether a part has steps and may get more."""
        return bool(self._part)

    @property
    def judging(self) -> bool:
        """Sync: whether a part waits for its verdict."""
        return bool(self._judged)

    @property
    def one_pass(self) -> int:
        """Return samples of the loader's batch that fit at once."""
        return min(self.loader_batch, self.largest_batch or self.loader_batch)

    def next_batch(self) -> int:
        """Return samples of the next batch of the part under way."""
        return self._size.next(self._done()) if self._size.samples else self.one_pass

    def size(self) -> int:
        """Sync, before a batch begins: samples that it shall have."""
        if not self._part and not self._hand.kept:
            self._size = self._size_of_step()
        return self.next_batch()

    def share(self, samples: int) -> float:
        """Sync: by what a gradient, a mean over ``samples``, counts in that of its part; 1.0: alone."""
        return samples / self._size.samples if self._size.samples else 1.0

    def _size_of_step(self) -> PartSize:
        """Return what to take of a step: by a plan, or in several passes because a batch of the loader does not fit;
        else it is one batch of the loader."""
        assert self.gate is not None
        share: BatchShare | None = None if self.accumulates else self.gate.batch_share()
        batch, fits = self.loader_batch, self.largest_batch
        if share is None:
            return PartSize() if self.accumulates or self.one_pass == batch else PartSize(batch, fits)
        largest = -(-share.samples // share.in_passes(batch))
        return PartSize(share.samples, min(largest, fits) if fits else largest)

    def _done(self) -> int:
        """Sync: samples of the step that are computed, or in hand."""
        return sum(step.samples for step in self._part) + self._hand.samples

    # ------------------------------------------------------------ which steps go

    def ready(self, step: ComputedStep, more: bool = False) -> tuple[Judged, ...]:
        """A step is computed. ``more``: its iteration goes on."""
        if not self.sync:
            return (AdmittedStep(step),)
        self._part.append(step)
        return self.close(more) if self._done() >= self._size.samples else _NOTHING

    def close(self, more: bool = False) -> tuple[Judged, ...]:
        """Sync: nothing will be added to this part. ``more``: its iteration goes on with the next step."""
        part, self._part = self._part, []
        if not part:
            return _NOTHING
        assert self.gate is not None
        self._judged = part
        wholes = [wholes_of(work for work, _ in step.works) for step in part]
        works = tuple(work for found in wholes for work in found)
        nothing = (step.skipped or step.payload is None for step in part)
        dropped = [work for found, none in zip(wholes, nothing, strict=True) if none for work in found]
        return self._judge(self.gate.ready(works, dropped, sum(step.counted for step in part), more))

    def schedule(self, schedule: StepSchedule) -> tuple[Judged, ...]:
        """Take a word of the master: who may go on."""
        return self._judge(self.gate.schedule(schedule)) if self.gate is not None else _NOTHING

    def due(self, again: bool = False) -> WorkerClock | None:
        """Return what to tell the master now; None: it knows all that it needs. ``again``: it may have forgotten."""
        return self.gate.due(again) if self.gate is not None else None

    def _judge(self, verdict: Verdict | None) -> tuple[Judged, ...]:
        if verdict is None:
            return _NOTHING
        part, self._judged = self._judged, []
        if isinstance(verdict, Late):
            return tuple(LateStep(step) for step in part)
        counted = sum(step.counted for step in part)
        weight = verdict.weight * (self._size.samples or counted) / max(1, counted)
        return tuple(AdmittedStep(step, weight, verdict.step) for step in part)
