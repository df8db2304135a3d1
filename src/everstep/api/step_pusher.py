"""Pushes the unit of mode ps: computed batches with the gradients of one step, handed over to the protocol driver."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.api.protocol_driver import ProtocolDriver, nonfinite_error
from everstep.api.schedule_waits import ScheduleWaits
from everstep.api.tables import TableSet
from everstep.errors import ScriptError
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.computed_step import ComputedStep, Consumed, StepPayload, learnt_samples, samples_of
from everstep.tables.worker_protocol import RangeWork


class StepPusher:
    """See the top of this file. The script's thread.

    ``in_hand``: samples of the batch that the script is at, or raised in; ``pushed``: this loop has pushed gradients;
    ``skipped``: steps whose gradient was not finite; ``left_out``: samples that the script has not stepped with."""

    def __init__(self, driver: ProtocolDriver, tables: TableSet, hand: BatchesInHand, waits: ScheduleWaits) -> None:
        self._driver, self._tables, self._hand, self._waits = driver, tables, hand, waits
        self._sync = driver.admission.sync
        self.in_hand = self.skipped = self.left_out = 0
        self.pushed = False

    def __repr__(self) -> str:
        return f"<StepPusher of {self._driver}>"

    def push(
        self, works: Sequence[Consumed], payload: StepPayload | None, counted: int = -1, more: bool = False
    ) -> None:
        """Consume ``works`` with one optimizer step of ``payload``. ``counted``: samples that it has learnt from; -1:
        those of ``works``. ``more``: the iteration goes on. Raises NonFiniteGradientError (policy raise)."""
        driver = self._driver
        skipped = False
        if payload is not None and payload.bad:
            self._skip(payload, works)
            payload, skipped = None, True
            works = [(work, False) for work, _ in works]
        learnt = learnt_samples(works)
        if payload is not None and driver.admission.planned:
            payload.weigh(driver.admission.share(samples_of(works)))
        if not skipped:
            self.left_out += samples_of(works) - learnt
        if payload is None or counted < 0:
            counted = learnt if payload is not None else 0
        self.pushed = self.pushed or payload is not None
        with driver.lock:
            driver.ready(ComputedStep(tuple(works), payload, counted, skipped), more)

    def _skip(self, payload: StepPayload, works: Sequence[Consumed]) -> None:
        """A gradient is not finite: nothing of the step is applied. Raises NonFiniteGradientError (policy raise)."""
        payload.settle()
        if self._driver.runtime.spec.nonfinite == "raise":
            error = nonfinite_error(payload.bad, works[0][0], works[-1][0])
            self._driver.fail(error)
            raise error
        self.skipped += 1

    def piece(self, works: list[Consumed], payload: StepPayload | None) -> None:
        """Consume ``works``, and one sample of the batch in hand: what is left of it goes with what follows in the
        iteration. Raises ScriptError where nothing is left, NonFiniteGradientError (policy raise)."""
        driver, hand = self._driver, self._hand
        in_loop = self._tables.current is not None
        counted = learnt_samples(works) + self.in_hand
        if self._sync and not in_loop and works:
            self._waits.behind_loop(works[0][0])
        if hand.left is not None:
            works.append((self._cut_sample(hand.left), True))
        if not works:
            raise ScriptError(
                "opt.step() was called more often in one iteration than its batch has samples: use larger batches, or "
                "drop_last=True"
            )
        self.push(works, payload, counted, more=hand.left is not None)
        if self._sync and in_loop:
            self._waits.next_step()
        elif self._sync:
            with driver.lock:
                driver.close_part()

    def _cut_sample(self, left: RangeWork) -> RangeWork:
        """Return the first sample of the batch in hand, or all of it where it cannot be cut; the rest stays in hand."""
        driver, gate = self._driver, self._driver.admission.gate
        halves = None
        if left.hi - left.lo > 1:
            with driver.lock:
                halves = driver.protocol.split(left, left.lo + 1)
                if gate is not None:
                    gate.cut(left, left.lo + 1)
        first, self._hand.left = halves if halves is not None else (left, None)
        return first

    def leave_turn(self) -> None:
        """Behind the loop: no step of this worker is to be waited for."""
        driver, gate = self._driver, self._driver.admission.gate
        if gate is not None:
            with driver.lock:
                gate.leave()
                driver.report_clock()
