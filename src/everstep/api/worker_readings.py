"""Says what a worker of mode ps tells with each beat: progress, and what it measures of itself."""

from __future__ import annotations

import time
from collections import deque

from everstep.api.protocol_driver import ProtocolDriver
from everstep.api.ps_loop import PsLoop
from everstep.api.step_pusher import StepPusher
from everstep.api.tables import TableSet
from everstep.monitor import stepclock
from everstep.monitor.process_readings import ProcessReadings
from everstep.net.messages import Beat


class WorkerReadings:
    """Makes beats. Any thread, one at a time. ``values``: what ``job.report`` was given, by name."""

    def __init__(self, driver: ProtocolDriver, tables: TableSet, pusher: StepPusher, loop: PsLoop) -> None:
        self._driver, self._tables, self._pusher, self._loop = driver, tables, pusher, loop
        self.values: dict[str, float] = {}
        self._process = ProcessReadings()
        self._rate: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=12)

    def __repr__(self) -> str:
        return f"<WorkerReadings of {self._driver}>"

    def beat(self) -> Beat:
        driver, tables, pusher, loop = self._driver, self._tables, self._pusher, self._loop
        admission, clock = driver.admission, tables.clock
        with driver.lock:
            progress = driver.protocol.progress()
            samples, retried = driver.samples, driver.protocol.retried
        now = time.monotonic()
        then, before = self._rate[0]
        self._rate.append((now, samples))
        busy = loop.compute_s + tables.wait_s
        readings = {
            "samples": float(samples),
            "batches": float(loop.batches),
            "samples_per_s": (samples - before) / (now - then) if now > then else 0.0,
            "retried": float(retried),
            "skipped": float(pusher.skipped),
            "left_out": float(pusher.left_out),
            "wait_fraction": tables.wait_s / busy if busy else 0.0,
            "accum": 2.0 if admission.accumulates else 1.0,  # by the script, not by a plan
            "loader_batch": float(admission.loader_batch),
            "memory_batch": float(admission.largest_batch),
            **clock.readings(),
            **self._process.readings(),
            **tables.client.carried(),
        }
        slot, stalled_s = tables.client.stalled()
        if slot >= 0:
            readings.update(stalled_ps=float(slot), stalled_s=stalled_s)
        if "loss" in self.values:
            readings["loss"] = self.values["loss"]
        idle_s = clock.idle_s if progress or clock.phase != stepclock.DATA else 0.0  # (no shard: it waits)
        return Beat(progress, readings, dict(self.values), idle_s, clock.inside)
