"""Where a script sits: alone in this process (embedded), or as a worker process of a job. Same protocol both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from everstep.brain.events import Answer
from everstep.config.spec import JobSpec
from everstep.errors import EverstepError
from everstep.ids import Incarnation, LeaseNo, Slot
from everstep.model.group import Group
from everstep.model.placement import Placement
from everstep.model.shard import Lease
from everstep.monitor.stepclock import StepClock
from everstep.net.messages import Beat, RequestType
from everstep.tables.client import PsClient


class Listener(Protocol):
    """What the master's orders become; called on any thread."""

    @property
    def clock(self) -> StepClock: ...

    def placed(self, placement: Placement) -> None: ...

    def revoked(self, lease: LeaseNo) -> None: ...

    def fail(self, error: EverstepError) -> None: ...

    def finish(self) -> None: ...

    def leave_soon(self, status: int) -> bool: ...

    def held(self) -> tuple[Lease, ...]: ...

    def beat(self) -> Beat: ...


class GroupListener(Listener, Protocol):
    """In mode allreduce."""

    def grouped(self, group: Group) -> None: ...

    def welcomed(self) -> None:
        """Said hello to a master, perhaps another one than before."""
        ...


class Seat(Protocol):
    spec: JobSpec
    slot: Slot
    incarnation: Incarnation
    run_dir: Path
    embedded: bool
    prefetch: int  # batches pulled ahead; 0: pull when the batch is taken, which is exactly what one process would do
    client: PsClient

    def start(self, listener: Listener) -> None:
        """Say hello. The placement comes by ``listener.placed``."""
        ...

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        """Ask the master and wait. Raises DeadlineError."""
        ...

    def ask(self, request: RequestType, then: Callable[[Answer], None]) -> None:
        """Ask the master; ``then`` gets the answer, on any thread, in the order of the requests."""
        ...

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``after_s`` seconds, on any thread."""
        ...

    def chief(self) -> bool:
        """Whether this is the lowest living worker slot."""
        ...

    def close(self, error: str) -> None: ...
