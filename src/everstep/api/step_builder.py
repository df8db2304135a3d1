"""Says which batches each step of the script consumes, and when it is pushed. Mode ps.

An iteration with one ``opt.step()`` is a step: its gradients are captured there and pushed when the iteration is over.
A second step, or a look at the values that a step has changed, pushes what is captured before: such a piece consumes
one sample of the batch, and what is left goes with what follows. An iteration without a step leaves its batch to a
later one (gradient accumulation).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from everstep.api.batch_item import BatchItem
from everstep.api.dense import DenseGroup, PsOptimizer, StaleValues
from everstep.api.hand_edits import HandEdits
from everstep.api.protocol_driver import ProtocolDriver
from everstep.api.ps_gradients import PsGradients
from everstep.api.step_pusher import StepPusher
from everstep.api.tables import TableSet
from everstep.errors import InternalError, ScriptError
from everstep.monitor import stepclock
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.computed_step import Consumed, StepPayload, learnt_samples, samples_of
from everstep.tables.worker_protocol import RangeWork


class StepBuilder:
    """See the top of this file. A ``PsStepper``. The script's thread."""

    def __init__(
        self,
        driver: ProtocolDriver,
        tables: TableSet,
        gradients: PsGradients,
        hand: BatchesInHand,
        pusher: StepPusher,
        *,
        alone: bool,
        only: bool,
    ) -> None:
        """Takes ``alone``: in one process, with the ps in it; ``only``: no other worker steps."""
        self._driver, self._tables, self._gradients = driver, tables, gradients
        self._hand, self._pusher, self._clock = hand, pusher, tables.clock
        self._alone, self._sync = alone, driver.admission.sync
        self.edits = HandEdits(
            tables,
            gradients.buffers,
            driver.admission,
            driver.ending,
            alone=alone,
            only=only,
            before_store=self._before_store,
        )
        self._captured: StepPayload | None = None  # of a step of this iteration, to be pushed at its end
        self._steps = 0  # of this iteration
        self._stale = StaleValues(self.freshen)

    def __repr__(self) -> str:
        return f"<StepBuilder {self._hand}>"

    # ------------------------------------------------------------ what optimizers tell

    @property
    def _immediate(self) -> bool:
        """Whether a step is pushed at once, and the new values are pulled before the script goes on: with several
        optimizers, where what follows in the iteration is computed with them."""
        return len(self._gradients.optimizers) > 1

    def hold(self, optimizer: PsOptimizer, of_torch: torch.optim.Optimizer) -> None:
        self._gradients.hold(optimizer, of_torch)

    def stepped(self, optimizer: PsOptimizer) -> None:
        """Do the script's ``opt.step()``. Raises the failure, ScriptError, NonFiniteGradientError (policy raise)."""
        self._driver.ending.check()
        in_loop = self._tables.current is not None
        if not in_loop and not self._hand.kept:
            if not self._gradients.has(optimizer):
                return  # nothing to apply, as in plain PyTorch
            raise ScriptError(
                "opt.step() outside of job.steps() with a gradient of none of its batches: gradients belong to a batch "
                "of the loop"
            )
        self._clock.switch(stepclock.PUSH)
        self.edits.keep()
        self._push_captured()
        payload = self._gradients.capture([optimizer])
        if payload is not None:
            self._steps += 1
            if self._immediate or not in_loop:
                self._pusher.piece(self._take_kept(), payload)
                self._driver.settle()
                if not in_loop:
                    self._pusher.leave_turn()
                self._renew()
            else:
                if self._hand.kept and self._gradients.kept_are_gone():
                    self._leave_out()
                self._captured = payload
                self._stale.watch(self._tables.dense, self._tables.batches.values())
        self._clock.switch(stepclock.UPDATE)

    def zeroed(self, optimizer: PsOptimizer) -> None:
        """``zero_grad``: batches that no step has consumed are left out, once all of their gradients are gone. Tables
        that follow the only optimizer are zeroed with it."""
        self._gradients.zero_followers(optimizer)
        if self._hand.kept and not self._gradients.any():
            self._leave_out()

    def dense_state(self, group: DenseGroup) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return keys and optimizer state (float32 [rows, floats]) of a group as they are on the ps now."""
        self.freshen()
        self._tables.declare()
        keys, _, state = self._tables.whole.scan(group.spec)
        if len(keys) != group.n_rows:
            raise InternalError(f"{group.spec.name} has {len(keys)} rows instead of {group.n_rows}")
        return keys, state

    # ------------------------------------------------------------ values that a step has changed

    def freshen(self) -> None:
        """The script uses values that its own step of this iteration has changed: the step is pushed now, and the new
        values are pulled."""
        self._stale.clear()
        if self._captured is None or self._tables.current is None:
            self._captured = None
            return
        phase = self._clock.switch(stepclock.PUSH)
        self._push_captured()
        self._driver.settle()
        self._renew()
        self._clock.switch(phase)

    def before_refresh(self) -> None:
        """The newest values are about to be brought: first what the script has stepped with, or changed."""
        if self._captured is not None and self._tables.current is not None:
            self.freshen()
        self.edits.keep()

    def _renew(self) -> None:
        self._tables.renew()
        self.edits.behind = False

    def _before_store(self) -> None:
        """Before a change by hand is stored: what was pushed is at the ps. Sync: a step of the job without gradients
        lies between, so that all workers have pulled the values that all of them change, and none has pushed since."""
        left = self._hand.left
        if self._sync and not self._alone:
            if self._hand.kept or left is None or left.hi - left.lo < 2:
                raise ScriptError(
                    "the script changed weights in place, and its batch has too few samples left, or is a part of an "
                    "accumulated step: change them behind opt.step(), and use larger batches or drop_last=True"
                )
            self._pusher.piece(self._take_kept(), None)
        self._driver.settle()

    # ------------------------------------------------------------ iterations

    def begin(self, work: RangeWork, ahead: bool) -> None:
        """The script's next iteration begins with ``work``. ``ahead``: its rows were pulled ahead."""
        self._hand.take(work)
        self.edits.behind = ahead and self._pusher.pushed
        self._steps = 0
        admission, driver = self._driver.admission, self._driver
        if self._sync and admission.gate is not None and not (admission.planned and admission.open):
            with driver.lock:
                admission.gate.iterate()
        self._gradients.schedule.begin(self._gradients.optimizers)
        self._gradients.begin()

    def end(self, item: BatchItem) -> None:
        """The iteration is over: what it has stepped with is pushed, or its batch waits for a step."""
        gradients = self._gradients
        self._stale.clear()
        self._driver.ending.check()
        self.edits.keep()
        gradients.schedule.end(gradients.optimizers)
        if not gradients.optimizers:
            self._captured = gradients.capture([None])  # tables alone, and nobody who steps: each batch is a step
            if self._captured is not None:
                gradients.zero_tables()
        left = self._hand.take_left()
        self._tables.release(item)
        if self._captured is not None:
            captured, self._captured = self._captured, None
            assert left is not None and item.work is not None
            kept = self._take_kept(consumed=True)
            counted = learnt_samples(kept) + item.work.hi - item.work.lo
            self._pusher.push([*kept, (left, True)], captured, counted)
        elif self._steps:
            if left is not None:
                self._pusher.push([(left, True)], None)
        elif left is not None:
            self._without_step(left)
        item.close()

    def goes_on(self, work: RangeWork) -> bool:
        """Return whether one step can consume the kept batches and ``work``: the same partitions want them."""
        with self._driver.lock:
            return self._driver.protocol.alike([*self._hand.works(), work])

    def cut(self) -> None:
        """What was accumulated cannot be pushed with what comes: some partitions have consumed some of it before, with
        a worker that was lost. It is a step by itself."""
        self._tables.over()  # (the rows of the last batch are no more where its keys were)
        payload = self._gradients.capture(list(self._gradients.optimizers) or [None])
        kept = self._take_kept(consumed=True)
        self._gradients.zero()
        self._pusher.push(kept, payload)

    def end_loop(self, in_iteration: bool) -> None:
        """The loop is over. ``in_iteration``: the script has left it in one, whose step is pushed. Raises ScriptError,
        NonFiniteGradientError (policy raise)."""
        self._stale.clear()
        if not in_iteration:
            return
        self.edits.keep()
        left = self._hand.left
        if (self._captured is None and not self._steps) or left is None:
            return
        captured, self._captured = self._captured, None
        kept = self._take_kept(consumed=True) if captured is not None else []
        self._pusher.push([*kept, (left, True)], captured)
        with self._driver.lock:
            self._driver.close_part()

    def forget_iteration(self) -> None:
        """No batch is in hand any more. What was captured and not pushed is dropped."""
        self._hand.left = None
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.settle()

    def take_rest(self) -> list[Consumed]:
        """Leave out the batches that no step has consumed, since the loop ends early; they are the caller's now."""
        self._leave_out()
        kept = self._take_kept()
        self._pusher.left_out += samples_of(kept)
        return kept

    def _without_step(self, work: RangeWork) -> None:
        """An iteration is over in which the script has not stepped."""
        hand, gradients, driver = self._hand, self._gradients, self._driver
        learnt = gradients.new()
        if hand.kept and gradients.kept_are_gone():
            self._leave_out()
        if learnt:
            driver.admission.accumulates = True
        hand.keep(work, learnt)
        if not hand.learnt:
            self._pusher.push(self._take_kept(), None)
            return
        gradients.mark_kept()
        gate = driver.admission.gate
        if gate is not None and not self._sync:
            with driver.lock:  # a later step will push it: until then it must not count as one that is under way
                gate.finished(work)
        driver.feed(lambda: driver.protocol.hold_back(work))

    def _take_kept(self, consumed: bool = False) -> list[Consumed]:
        """Take what is kept. ``consumed``: by a step that was captured before, when their gradients were there."""
        if self._hand.kept and not consumed and self._gradients.kept_are_gone():
            self._leave_out()
        self._gradients.forget_kept()
        return self._hand.take_kept()

    def _leave_out(self) -> None:
        if self._captured is not None:  # the step in hand has consumed them, whatever becomes of gradients now
            return
        self._hand.leave_out()
        self._gradients.forget_kept()

    def _push_captured(self) -> None:
        captured, self._captured = self._captured, None
        if captured is not None:
            self._pusher.piece(self._take_kept(consumed=True), captured)
