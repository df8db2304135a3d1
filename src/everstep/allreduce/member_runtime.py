"""Says what a member of a group needs of where its script sits (``api.listeners.WorkerRuntime``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from everstep.allreduce.serialize import SerializedState
from everstep.brain.events import Answer
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Committed, HeldCopy
from everstep.net.messages import RequestType
from everstep.protect.home_files import HomeLink


class CopyToBegin(Protocol):
    """Is a copy of the state that outlived the worker which wrote it; ``held``: as it is told. ``steps``: committed
    ones that this worker, ``slot`` of ``incarnation``, may not have told."""

    held: HeldCopy
    slot: int
    incarnation: int
    steps: tuple[Committed, ...]

    def serialized(self) -> SerializedState: ...


class MemberRuntime(Protocol):
    spec: JobSpec
    slot: Slot
    incarnation: Incarnation
    node: NodeId
    run_dir: Path
    embedded: bool

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        """Ask the master and wait. Raises DeadlineError."""
        ...

    def ask(self, request: RequestType, then: Callable[[Answer], None]) -> None:
        """Ask the master; ``then`` gets the answer, on any thread, in the order of the requests."""
        ...

    def home_link(self) -> HomeLink | None:
        """Return what reaches the first node's files; None: they are here."""
        ...
