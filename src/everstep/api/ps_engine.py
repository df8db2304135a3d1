"""Composes what trains in mode ps, and is told what the master orders.

``PsLoop`` is what the script iterates over; ``StepBuilder`` says which batches a step consumes,
and ``StepPusher`` pushes it; ``PsGradients`` is what
``grad`` holds; ``HandEdits`` what the script changed by itself; ``ScheduleWaits`` and ``BatchReader`` wait and read.
Below them ``ProtocolDriver`` talks to the ps and the master for three pure machines: ``WorkerProtocol`` (exactly once),
``StepAdmission`` (consistency) and ``BatchesInHand`` (accumulation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from everstep.api.listeners import WorkerRuntime
from everstep.api.protocol_driver import ProtocolDriver
from everstep.api.ps_gradients import PsGradients
from everstep.api.ps_loop import PsLoop
from everstep.api.schedule import JobSchedule
from everstep.api.schedule_waits import ScheduleWaits
from everstep.api.step_builder import StepBuilder
from everstep.api.step_pusher import StepPusher
from everstep.api.tables import TableSet
from everstep.api.worker_readings import WorkerReadings
from everstep.config.consistency import parse_consistency
from everstep.data.loader import Loader
from everstep.errors import EverstepError
from everstep.ids import LeaseNo, TableId
from everstep.model.graph_readings import GraphReading
from everstep.model.placement import Placement
from everstep.model.shard import Lease, split_key
from everstep.model.step_schedule import StepSchedule
from everstep.net.messages import Beat
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.step_admission import StepAdmission


class PsEngine:
    """See the top of this file. A ``TrainingLoop`` and a ``ScheduleListener``."""

    def __init__(self, runtime: WorkerRuntime, tables: TableSet) -> None:
        consistency = parse_consistency(runtime.spec.consistency)
        alone = runtime.embedded and consistency.kind == "async"
        only = runtime.embedded or (runtime.spec.workers == 1 and runtime.slot == 0)
        self.tables, self.clock = tables, tables.clock
        self._hand = BatchesInHand()
        self._admission = StepAdmission(consistency, runtime.slot, runtime.incarnation, self._hand)
        self.driver = ProtocolDriver(runtime, self._admission, self._name_of)
        self.gradients = PsGradients(tables, JobSchedule(alone, several=runtime.spec.workers != 1), alone)
        waits = ScheduleWaits(self.driver, self._hand, self.clock)
        self._pusher = StepPusher(self.driver, tables, self._hand, waits)
        self.builder = StepBuilder(
            self.driver, tables, self.gradients, self._hand, self._pusher, alone=alone, only=only
        )
        self.loop = PsLoop(self.driver, tables, self.gradients, self._hand, waits, self._pusher, self.builder)
        self.graph: Callable[[], GraphReading | None] = lambda: None  # readings of the model
        self._readings = WorkerReadings(self.driver, tables, self._pusher, self.loop)
        tables.before_refresh = self.builder.before_refresh
        tables.renorming.keeps_outside = lambda: only

    def __repr__(self) -> str:
        return f"<PsEngine {self.driver}>"

    def steps(self, loader: Loader) -> Iterator[Any]:
        """Yield batches of ``loader``, each with its rows in place; what the script computes from them is pushed."""
        return self.loop.steps(loader)

    def leave(self, reason: str) -> None:
        """Give back what is unfinished."""
        self.loop.leave(reason)

    # ------------------------------------------------------------ facts

    @property
    def values(self) -> dict[str, float]:
        return self._readings.values

    @property
    def failure(self) -> EverstepError | None:
        return self.driver.ending.failure

    @property
    def samples(self) -> int:
        """Return how many samples are applied, by this process."""
        return self.driver.samples

    @property
    def batches(self) -> int:
        """Return how many batches were given to the script."""
        return self.loop.batches

    @property
    def registered(self) -> int:
        return self.loop.registered

    @property
    def in_hand(self) -> int:
        return self._pusher.in_hand

    @property
    def loader_batch(self) -> int:
        return self._admission.loader_batch

    @property
    def in_loop(self) -> bool:
        return self.tables.current is not None

    @property
    def step_number(self) -> int:
        """Return the number of the iteration in hand, from 0; behind the loop, how many there were. Sync: of the job,
        else of this worker."""
        behind = 0 if self.in_loop else 1
        gate = self._admission.gate
        if gate is not None and gate.sync:
            return gate.iteration + behind
        return self.batches - 1 + behind

    def place(self) -> tuple[int, int, int, int] | None:
        """Of the batch in hand: the loop of the script (from 1), dataset, epoch, and 0: gradients are not averaged with
        others', or over a number that nobody knows yet. None: there is no batch."""
        work = self._hand.left
        if work is None:
            return None
        dataset, epoch, _ = split_key(work.lease.shard)
        return self.registered, dataset, epoch, 0

    # ------------------------------------------------------------ what the master orders; any thread

    def placed(self, placement: Placement) -> None:
        self.driver.placed(placement)

    def revoked(self, lease: LeaseNo) -> None:
        self.driver.revoked(lease)

    def fail(self, error: EverstepError) -> None:
        self.driver.fail(error)

    def scheduled(self, schedule: StepSchedule) -> None:
        self.driver.scheduled(schedule)

    def welcomed(self) -> None:
        self.driver.welcomed()

    def finish(self) -> None:
        """The job is over: the loop ends the script after the batch in hand, and waits for nobody (the ps and the
        master are leaving too)."""
        ending = self.driver.ending
        ending.stopping = ending.job_over = True

    def leave_soon(self, status: int) -> bool:
        """Return, to a signal handler, whether the loop will end the script by itself, with ``status``. False the
        second time."""
        ending = self.driver.ending
        if not self.loop.looping or ending.stopping:
            return False
        ending.stopping, ending.exit_status = True, status
        return True

    def held(self) -> tuple[Lease, ...]:
        return self.driver.held()

    def beat(self) -> Beat:
        return msgspec.structs.replace(self._readings.beat(), graph=self.graph())

    def _name_of(self, table: TableId) -> str:
        names = [i.spec for i in self.tables.infos.values()] + [g.spec for g in self.tables.dense]
        return next((s.name for s in names if s.id == table), f"#{table}")
