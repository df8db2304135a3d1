"""Runs the loop of mode ps: what a script iterates over. It begins and ends iterations, and does nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from everstep.api.batch_item import BatchItem
from everstep.api.batch_reader import BatchReader
from everstep.api.protocol_driver import ProtocolDriver
from everstep.api.ps_gradients import PsGradients
from everstep.api.schedule_waits import ScheduleWaits
from everstep.api.step_builder import StepBuilder
from everstep.api.step_pusher import StepPusher
from everstep.api.tables import TableSet
from everstep.brain.events import Fenced, PlanRegistered, Refused, Registered
from everstep.data.loader import Loader, left_before
from everstep.data.random_streams import STREAMS, seed_range
from everstep.errors import DataError, FencedError, InternalError, NonFiniteGradientError, ScriptError
from everstep.model.shard import split_key
from everstep.monitor import stepclock
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.computed_step import ComputedStep

_LEAVE_S = 10.0  # for pushes on their way and leases to give back, at the end of a loop
_MASTER_S = 300.0  # a master may be away so long
_MASTER_AWAY_S = 1.0  # a killed master grants again after 0.3 to 0.6 s
_AHEAD_BATCHES_MAX = 500  # of tiny batches: what a lost worker gives back stays small


class PsLoop:
    """See the top of this file. ``registered``: loops begun; ``batches``: given to the script; ``compute_s``: seconds
    between two waits; ``looping``: the script is in a loop."""

    def __init__(
        self,
        driver: ProtocolDriver,
        tables: TableSet,
        gradients: PsGradients,
        hand: BatchesInHand,
        waits: ScheduleWaits,
        pusher: StepPusher,
        builder: StepBuilder,
    ) -> None:
        self._driver, self._tables, self._gradients = driver, tables, gradients
        self._hand, self._waits, self._pusher, self._builder = hand, waits, pusher, builder
        self._runtime, self._clock = driver.runtime, tables.clock
        self.registered = self.batches = 0
        self.compute_s = 0.0
        self.looping = False
        self._batch_s = 0.0  # compute of one batch, smoothed
        self._epochs_done: dict[str, int] = {}  # by plan
        self._left: set[str] = set()  # plans of which the script left a loop before its end

    def __repr__(self) -> str:
        return f"<PsLoop {self.registered}, {self.batches} batches>"

    def steps(self, loader: Loader) -> Iterator[Any]:
        """Yield batches of ``loader``, each with its rows in place; what the script computes from them is pushed."""
        driver, pusher, clock = self._driver, self._pusher, self._clock
        reader = self._begin(loader)
        complete = False
        draws = loader.may_draw
        if draws:
            STREAMS.take()
        self.looping = True
        clock.switch(stepclock.DATA)
        try:
            while (item := self._next(reader)) is not None:
                begin = time.perf_counter()
                assert item.work is not None
                samples = item.work.hi - item.work.lo
                clock.begin(samples)
                pusher.in_hand = samples
                yield item.batch
                pusher.in_hand = 0
                clock.computed(samples)
                clock.switch(stepclock.PUSH)
                spent_s = time.perf_counter() - begin
                self.compute_s += spent_s
                self._look_ahead(spent_s)
                self._builder.end(item)
                clock.switch(stepclock.DATA)
            complete = True
        finally:
            if draws:
                STREAMS.give()
            clock.switch(stepclock.OUTSIDE)
            self.looping = False
            failed = driver.ending.failure is not None
            self._end(reader, failed)
            if complete:
                self._complete()
            else:
                self._left.add(loader.plan().name)
                self.leave("the loop ended early" if not failed else "the script failed")

    def leave(self, reason: str) -> None:
        """Wait a little for pushes on their way, then give all leases back. Batches that no step has consumed are left
        out: their gradient was never stepped with. If this worker was asked to leave, the script might still have
        stepped: another worker does them again."""
        driver, ending = self._driver, self._driver.ending
        limit = time.monotonic() + _LEAVE_S
        if self._hand.kept and not ending.over and not ending.stopping:
            kept = self._builder.take_rest()
            with driver.lock:
                driver.close_part()
                self._waits.verdict(limit)
                driver.hand_over(ComputedStep(tuple(kept), None))  # nothing is applied, so it is nobody's turn
        with driver.lock:
            while driver.on_their_way and not ending.over and time.monotonic() < limit:
                driver.changed.wait(0.1)
            gate, protocol = driver.admission.gate, driver.protocol
            if gate is not None:
                gate.leave()
                driver.report_clock()
            if ending.job_over or protocol.finished or not (protocol.held() or protocol.asking):
                return
            driver.feed(lambda: protocol.leave(reason))
            while not protocol.finished and not ending.over and time.monotonic() < limit:
                driver.changed.wait(0.1)

    # ------------------------------------------------------------ begin

    def _begin(self, loader: Loader) -> BatchReader:
        """Register what is to be done, and see that everything has its place on the ps. Raises ScriptError, DataError,
        FencedError."""
        driver, tables, admission = self._driver, self._tables, self._driver.admission
        if tables.current is not None:
            raise ScriptError(
                "job.steps() inside the loop of another job.steps(): end the outer loop first, or read the second "
                "source beside the loop by other.read(epoch, lo, hi) of its loader"
            )
        driver.ending.check()
        if not admission.sync and 0 < loader.largest_batch < loader.batch_size:
            raise ScriptError(
                f"largest_batch={loader.largest_batch} is below batch_size={loader.batch_size}: in mode ps "
                f"({self._runtime.spec.consistency}) each batch is applied alone, so it has to fit; use a smaller "
                "batch_size, or --consistency sync"
            )
        plan = loader.plan()
        if plan.name in self._left:
            raise left_before(plan)
        first = self._epochs_done.get(plan.name, 0)
        until = first + loader.epochs
        dataset = self._register(plan, first, until)
        self.registered += 1
        driver.tells = True
        self._epochs_done[plan.name] = until
        self._gradients.check_tables()
        self._gradients.place_buffers()
        self._builder.edits.keep()
        tables.declare()
        tables.asides.forget()
        self._gradients.watch_backward(self._clock)
        with driver.lock:
            admission.loader_batch, admission.largest_batch = loader.batch_size, loader.largest_batch
            driver.protocol.set_batch_samples(admission.one_pass)
        driver.feed(lambda: driver.protocol.begin(dataset, until))
        # Sync: rows are pulled when the step before is applied.
        renorms = any(table.renorms for table in tables.batches.values())
        ahead = 0 if admission.sync or renorms else self._runtime.prefetch
        tables.renorming.ahead = ahead > 0
        self._pusher.pushed = False
        return BatchReader(loader, ahead, driver, tables, self._waits)

    def _register(self, plan: Any, begin: int, until: int) -> int:
        answer = self._runtime.call(PlanRegistered(plan, self.registered + 1, begin, until), _MASTER_S)
        if isinstance(answer, Registered):
            return answer.dataset
        if isinstance(answer, Refused):
            raise DataError(answer.error)
        if isinstance(answer, Fenced):
            raise FencedError(answer.reason)
        raise InternalError(f"Register was answered with {answer!r}")

    # ------------------------------------------------------------ iterations

    def _next(self, reader: BatchReader) -> BatchItem | None:
        """Return the next batch, its rows in place and the parameters up to date; None at the end of the data."""
        ending, builder = self._driver.ending, self._builder
        while True:
            item = reader.next()
            if ending.stopping:  # scaled in, or the job was stopped: this is a clean end of the script
                if item is not None:
                    item.close()
                raise SystemExit(ending.exit_status)
            if item is None:
                return None
            work = item.work
            assert work is not None
            if not reader.wanted(item):
                continue
            if self._hand.kept and not builder.goes_on(work):
                builder.cut()
                if self._driver.admission.sync:
                    reader.put_back(item)
                    continue
            self._tables.take(item)
            reader.taken()
            builder.begin(work, reader.prefetch)
            self.batches += 1
            if not self._runtime.embedded:
                dataset, epoch, _ = split_key(work.lease.shard)
                seed_range(self._runtime.spec.seed, epoch, work.lo, dataset)
            return item

    def _look_ahead(self, spent_s: float) -> None:
        """Hold leases for ``_MASTER_AWAY_S`` of work, so that a restart of the master finds nobody without one."""
        if self._runtime.embedded or self._driver.admission.sync:
            return
        self._batch_s = 0.8 * self._batch_s + 0.2 * spent_s if self._batch_s else spent_s
        batches = int(_MASTER_AWAY_S / max(self._batch_s, 1e-4))
        self._driver.protocol.ask_ahead = min(max(2, batches), _AHEAD_BATCHES_MAX)

    # ------------------------------------------------------------ end

    def _end(self, reader: BatchReader, failed: bool) -> None:
        """No batch is in hand any more, and none is read."""
        reader.stop()
        item = self._tables.current
        try:
            self._builder.end_loop(item is not None and not failed)
        except (NonFiniteGradientError, ScriptError) as error:
            self._driver.fail(error)
        if item is not None:
            self._tables.over()
            item.close()
        self._tables.current = None
        self._tables.over()
        self._builder.forget_iteration()
        reader.close()

    def _complete(self) -> None:
        """All data is done: let pushes arrive, and show the newest values. Raises the failure."""
        driver, gate = self._driver, self._driver.admission.gate
        if gate is not None and self._hand.kept:
            with driver.lock:
                gate.leave(keeps=True)
                driver.report_clock()
        driver.settle()
        self._tables.refresh_dense()
