"""Says where a script sits: alone in this process (embedded), or as a worker process of a job. Same protocol both
ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everstep.allreduce.member_runtime import MemberRuntime
from everstep.errors import EverstepError
from everstep.ids import LeaseNo
from everstep.model.group import Group
from everstep.model.placement import Placement
from everstep.model.shard import Lease
from everstep.model.step_schedule import StepSchedule
from everstep.monitor.stepclock import StepClock
from everstep.net.messages import Beat
from everstep.tables.client import PsClient


class Listener(Protocol):
    """Is what the master's orders become; called on any thread."""

    @property
    def clock(self) -> StepClock: ...

    def placed(self, placement: Placement) -> None: ...

    def revoked(self, lease: LeaseNo) -> None: ...

    def fail(self, error: EverstepError) -> None: ...

    def finish(self) -> None: ...

    def leave_soon(self, status: int) -> bool: ...

    def held(self) -> tuple[Lease, ...]: ...

    def beat(self) -> Beat: ...

    @property
    def in_loop(self) -> bool: ...


class ScheduleListener(Listener, Protocol):
    """Is what they become in mode ps."""

    def scheduled(self, schedule: StepSchedule) -> None: ...

    def welcomed(self) -> None:
        """Said hello to a master, perhaps another one than before."""
        ...


class GroupListener(Listener, Protocol):
    """Is what they become in mode allreduce."""

    def grouped(self, group: Group) -> None: ...

    def welcomed(self) -> None:
        """Said hello to a master, perhaps another one than before."""
        ...


class WorkerRuntime(MemberRuntime, Protocol):
    prefetch: int  # batches pulled ahead; 0: pull when the batch is taken, which is exactly what one process would do
    client: PsClient

    def start(self, listener: Listener) -> None:
        """Say hello. The placement comes by ``listener.placed``."""
        ...

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``after_s`` seconds, on any thread."""
        ...

    def chief(self) -> bool:
        """Return whether this is the worker that evaluates and saves."""
        ...

    def close(self, error: str) -> None: ...
