"""Holds all waits for the next work and for this worker's turn: the thread that computes sleeps here, and nowhere
else."""

from __future__ import annotations

import threading
import time

from everstep.api.protocol_driver import ProtocolDriver
from everstep.monitor.stepclock import BARRIER, StepClock
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.staleness_gate import StalenessGate
from everstep.tables.worker_protocol import RangeWork

_TICK_S = 0.2
_PATIENCE_S = 0.15  # three times as long as the master lets a worker wait before it asks again
_SAY_AGAIN_S = 1.0  # where we are, while we wait for the others: a word may have been lost


class ScheduleWaits:
    """See the top of this file. ``stop``: of a loop, set when it is over."""

    def __init__(self, driver: ProtocolDriver, hand: BatchesInHand, clock: StepClock) -> None:
        self._driver, self._hand, self._clock = driver, hand, clock
        self._ending, self._admission = driver.ending, driver.admission

    def __repr__(self) -> str:
        return f"<ScheduleWaits of {self._driver}>"

    def work(self, stop: threading.Event) -> RangeWork | None:
        """Return the next work; None: there is none any more, or the loop is to end. Raises the failure."""
        driver, admission = self._driver, self._admission
        protocol, gate = driver.protocol, admission.gate
        nothing_at = time.monotonic()
        with driver.lock:
            while True:
                self._ending.check()
                if stop.is_set() or self._ending.stopping:
                    return None
                if admission.planned:
                    protocol.set_batch_samples(admission.next_batch())
                work = protocol.next_work()
                driver.feed(protocol.more)
                if work is not None:
                    if gate is not None:
                        gate.work()
                        driver.report_clock()
                    return work
                if gate is not None:
                    self._rest(gate, nothing_at)
                if protocol.finished or protocol.ended:
                    return None
                driver.changed.wait(_PATIENCE_S if admission.sync else _TICK_S)

    def _rest(self, gate: StalenessGate, nothing_at: float) -> None:
        """There has been nothing to compute since ``nothing_at``: the others need not wait for this worker."""
        driver, admission, hand = self._driver, self._admission, self._hand
        protocol = driver.protocol
        over = protocol.waiting or protocol.finished
        if over and not hand.kept:
            driver.close_part()  # it stays smaller
        if admission.sync and over and hand.kept and protocol.pending and self._rests(nothing_at):
            gate.leave(keeps=True)  # the others need not wait for a step that we may never make
            driver.report_clock()
        if not gate.pending and (protocol.waiting or protocol.finished) and self._rests(nothing_at):
            gate.rest()
            driver.report_clock()

    def _rests(self, since: float) -> bool:
        """Sync: whether a worker that has had nothing to do ``since`` is not to be waited for any more: the next epoch
        begins as soon as all are through with this one, and shall not begin without it."""
        return not self._admission.sync or self._driver.protocol.ended or time.monotonic() > since + _PATIENCE_S

    def turn(self, work: RangeWork, stop: threading.Event, ahead: bool) -> bool:
        """Wait until the rows of ``work`` may be pulled. ``ahead``: by a reader's thread. False: it is not wanted any
        more, or the loop is to end. Raises the failure."""
        gate = self._admission.gate
        if gate is None:
            return True
        if ahead:
            return self._turn(gate, work, stop)
        phase = self._clock.switch(BARRIER)
        try:
            return self._turn(gate, work, stop)
        finally:
            self._clock.switch(phase)

    def _turn(self, gate: StalenessGate, work: RangeWork, stop: threading.Event) -> bool:
        driver = self._driver
        say_at = time.monotonic() + _SAY_AGAIN_S
        with driver.lock:
            while True:
                self._ending.check()
                if stop.is_set() or self._ending.stopping:
                    return False
                if not driver.protocol.current(work):
                    driver.feed(lambda: driver.protocol.computed(work))
                    return False
                if gate.may_begin():
                    if self._admission.sync and not self._fits(work):
                        return False
                    gate.begin(work)
                    return True
                if time.monotonic() >= say_at:
                    say_at = time.monotonic() + _SAY_AGAIN_S
                    driver.report_clock(again=True)
                driver.changed.wait(_TICK_S)

    def _fits(self, work: RangeWork) -> bool:
        """Sync: whether ``work`` is as large as this step wants it. False: it was put back, and will be cut anew."""
        protocol = self._driver.protocol
        wanted = self._admission.size()
        if wanted == protocol.batch_samples or not protocol.put_back(work):
            return True
        protocol.set_batch_samples(wanted)
        return False

    def put_back(self, work: RangeWork) -> None:
        """Sync: ``work`` begins with the next step of the job, and is handed out again. Wait while its lease is being
        opened. Raises the failure."""
        driver = self._driver
        with driver.lock:
            while not driver.protocol.put_back(work):
                self._ending.check()
                if self._ending.stopping:
                    return
                if not driver.protocol.current(work):
                    driver.feed(lambda: driver.protocol.computed(work))
                    return
                driver.changed.wait(_TICK_S)

    def behind_loop(self, work: RangeWork) -> None:
        """Sync: a step behind the loop belongs to the next step of the job, too. Wait until that may begin."""
        driver, gate = self._driver, self._admission.gate
        assert gate is not None
        with driver.lock:
            while True:
                self._ending.check()
                if self._ending.stopping or gate.may_begin():
                    gate.begin(work)
                    return
                driver.report_clock(again=True)
                driver.changed.wait(_TICK_S)

    def next_step(self) -> None:
        """Sync: what follows in the iteration belongs to the next step of the job. Wait until that may begin."""
        driver, gate, left = self._driver, self._admission.gate, self._hand.left
        assert gate is not None
        with driver.lock:
            driver.close_part(more=left is not None)
            while left is not None:
                self._ending.check()
                if self._ending.stopping or not driver.protocol.current(left):
                    return
                if gate.may_begin(goes_on=True):
                    gate.begin(left)
                    return
                driver.report_clock(again=True)
                driver.changed.wait(_TICK_S)

    def verdict(self, until: float) -> None:
        """Sync: wait for the verdict of the part that is ready, at most ``until`` (monotonic). With the lock held."""
        while self._admission.judging and not self._ending.over and time.monotonic() < until:
            self._driver.changed.wait(0.1)
