"""Sends the copies of a stage to the agent of another node, while the process waits for its neighbours.

A copy is sent block by block behind the native code that makes it. A block is begun in a wait; outside of waits one
block goes twice in an iteration, so that a pipeline without waits gets on, too. If the job says how often to copy, the
rest goes as soon as the copy is whole. One copy of a stage is on its way at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from everstep.errors import EverstepError, WireError
from everstep.ids import Incarnation, Slot
from everstep.model.copy_places import CopyPlace
from everstep.net.messages import (
    Bad,
    CopiesDropped,
    CopyBegun,
    CopyBlocks,
    CopyEnded,
    CopyTaken,
    DataAnswer,
    DataRequest,
)
from everstep.pipeline.copy_slots import BLOCK_BYTES, CopyPage
from everstep.pipeline.copy_store import LOWEST_PRIORITY

ANSWER_S: Final = 10.0
DROP_S: Final = 0.2
RETRY_S: Final = 10.0
"""So long after a failure nothing is sent to that node."""
_FLIGHT: Final = 4  # requests on their way
_LOOK_S: Final = 0.001  # in a wait, for the next block that is copied

logger = logging.getLogger("everstep.worker")


class CopyClient(Protocol):
    """Is what is needed of ``net.data.DataClient``."""

    def request(
        self, message: DataRequest, buffers: Any = (), *, timeout_s: float = 30.0
    ) -> tuple[DataAnswer, memoryview]: ...

    def send(self, message: DataRequest, buffers: Any = (), *, timeout_s: float = 30.0) -> None: ...

    def receive(self, *, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]: ...

    def close(self) -> None: ...


class _DroppedError(Exception):
    """The copy is not to be sent any more."""


class _Job:
    """Is one copy on its way. ``ready``: how many of its blocks are copied, while it is not ``whole``."""

    def __init__(self, step: int, meta: bytes, header: bytes, body: Any, sums: Any, ready: Callable[[], int]) -> None:
        self.step, self.meta, self.header, self.body, self.sums = step, meta, header, body, sums
        self._ready = ready
        self.whole = self.dropped = False

    @property
    def ready(self) -> int:
        return len(self.sums) if self.whole else self._ready()


class CopySender:
    """Has a thread of its own. ``begin``, ``open``, ``shut``, ``whole`` and ``drop`` are for the thread that trains."""

    def __init__(
        self,
        page: CopyPage,
        stage: int,
        me: tuple[Slot, Incarnation],
        connect: Callable[[CopyPlace], CopyClient],
        clock: Callable[[], float] = time.monotonic,
        at_once: bool = False,
    ) -> None:
        """Take ``at_once``: what waits had no room for goes as soon as the copy is whole; else in later waits."""
        self._at_once = at_once
        self._page, self._stage, self._me, self._connect, self._clock = page, stage, me, connect, clock
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._open = self._stop = False
        self._extra = 0  # blocks that may go outside of waits
        self._client: CopyClient | None = None
        self._place: CopyPlace | None = None
        self._refused_at = -RETRY_S
        self._refused = ""  # node that did not keep the last copy
        self.kept = self.sent_bytes = self.late_bytes = 0
        self.sent_s = self.received_s = self.sending_s = 0.0
        self._received_before_s = 0.0
        self.received_late_blocks = self._late_before = 0
        page.sending[stage] = -1
        self._thread = threading.Thread(target=self._run, name="everstep-copies", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CopySender stage {self._stage} to {self.neighbour or 'nobody'}, {self.kept} kept>"

    @property
    def neighbour(self) -> str:
        return str(self._place.node) if self._place is not None else ""

    @property
    def busy(self) -> bool:
        """Return whether a copy is on its way: its slot must not change."""
        return self._job is not None

    # ------------------------------------------------------------ the thread that trains

    def begin(self, step: int, meta: bytes, header: bytes, body: Any, sums: Any, ready: Callable[[], int]) -> bool:
        """Begin to send a copy that is being made. False: not now."""
        if self._job is not None or self._page.place is None or self._clock() - self._refused_at < RETRY_S:
            return False
        with self._changed:
            self._page.sending[self._stage] = step
            self._job = _Job(step, meta, header, body, sums, ready)
            self._changed.notify()
        return True

    def open(self) -> None:
        """A wait begins."""
        if self._job is not None:
            with self._changed:
                self._open = True
                self._changed.notify()

    def shut(self) -> None:
        """The wait is over; a block that is on its way goes on."""
        self._open = False

    def whole(self) -> None:
        """The copy is whole, and stays so until it is sent."""
        self._allow(True)

    def next_iteration(self) -> None:
        self._allow(False)

    def _allow(self, whole: bool) -> None:
        job = self._job
        if job is not None:
            with self._changed:
                job.whole = job.whole or whole
                self._extra = len(job.sums) if job.whole and self._at_once else 1
                self._changed.notify()

    def drop(self) -> None:
        """Send the copy no more: its bytes are about to change. Returns when the thread does not look at them."""
        job = self._job
        if job is None:
            return
        with self._changed:
            job.dropped = True
            self._changed.notify()
            if self._changed.wait_for(lambda: self._job is not job, DROP_S):
                return
            client = self._client
        if client is not None:
            client.close()  # the thread waits for a neighbour that does not answer: it finds out at once
        with self._changed:
            self._changed.wait_for(lambda: self._job is not job, ANSWER_S)

    def forget(self) -> None:
        """Have the neighbour forget all: its copies are of a lineage that is no more."""
        self.drop()
        client = self._client
        if client is not None:
            with contextlib.suppress(EverstepError, OSError):
                client.request(CopiesDropped(*self._me), timeout_s=1.0)

    def close(self, forget: bool) -> None:
        """End the thread. ``forget``: the worker has ended well, and needs no copies."""
        self.drop()
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join(ANSWER_S)
        if forget:
            self.forget()
        self._disconnect()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._stop)
                if self._stop:
                    return
                job = self._job
            assert job is not None
            try:
                self._send(job)
            except _DroppedError:
                pass
            except (EverstepError, OSError) as error:
                self._failed(error)
            finally:
                self.sent_s = time.thread_time()
                with self._changed:
                    self._job = None
                    self._page.sending[self._stage] = -1  # (last: from here on the first stage may choose another)
                    self._changed.notify_all()

    def _send(self, job: _Job) -> None:
        client = self._connected()
        of = (*self._me, self._stage)
        sizes = len(job.meta), len(job.header), len(job.body)
        begun = CopyBegun(*of, len(self._page.newest), job.step, *sizes)
        self._take(client.request(begun, (job.meta + job.header,), timeout_s=ANSWER_S))
        sent = flight = 0
        try:
            while sent < len(job.sums):
                self._await_turn(job, sent)
                body = job.body[sent * BLOCK_BYTES : (sent + 1) * BLOCK_BYTES]
                blocks = CopyBlocks(*of, job.step, sent, 1)
                begin_s = time.perf_counter()
                client.send(blocks, (job.sums[sent : sent + 1].tobytes(), body.data), timeout_s=ANSWER_S)
                self.sending_s += time.perf_counter() - begin_s
                self.sent_bytes += len(body)
                self.late_bytes += 0 if self._open else len(body)
                sent, flight = sent + 1, flight + 1
                if flight == _FLIGHT:
                    flight -= 1
                    self._take(client.receive(timeout_s=ANSWER_S))
        finally:
            while flight and client is self._client:
                flight -= 1
                self._take(client.receive(timeout_s=ANSWER_S))
        with self._changed:
            self._changed.wait_for(lambda: job.whole or job.dropped)
            if job.dropped:
                raise _DroppedError
        self._take(client.request(CopyEnded(*of, job.step), timeout_s=ANSWER_S))
        self.kept += 1
        self._page.kept[self._stage] = job.step
        if self._refused:
            logger.info("stage %d: node %s keeps copies again", self._stage, self.neighbour)
            self._refused = ""

    def _await_turn(self, job: _Job, sent: int) -> None:
        """Wait until one more block may go. Raises _DroppedError."""
        with self._changed:
            while True:
                if job.dropped:
                    raise _DroppedError
                if (self._open or self._extra > 0) and job.ready > sent:
                    self._extra -= 0 if self._open else 1
                    return
                self._changed.wait(_LOOK_S if self._open else None)

    def _take(self, answered: tuple[DataAnswer, memoryview]) -> None:
        answer = answered[0]
        if isinstance(answer, Bad):
            raise WireError(answer.error)
        if isinstance(answer, CopyTaken):
            self.received_s = self._received_before_s + answer.spent_s
            self.received_late_blocks = self._late_before + answer.late_blocks

    def _connected(self) -> CopyClient:
        place = self._page.place
        if place is None:
            raise _DroppedError
        if self._client is None or place != self._place:
            self._disconnect()
            self._place = place
            self._client = self._connect(place)
        return self._client

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._received_before_s, self._late_before = self.received_s, self.received_late_blocks
        if client is not None:
            client.close()

    def _failed(self, error: Exception) -> None:
        self._refused_at = self._clock()
        self._disconnect()
        self._page.kept[self._stage] = -1
        if self._refused != self.neighbour:
            self._refused = self.neighbour
            logger.warning(
                "stage %d: node %s does not keep copies: %s; training goes on with the copies in its own memory",
                self._stage,
                self.neighbour,
                error,
            )


__all__ = ["CopySender"]
