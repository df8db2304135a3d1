"""Measures what a process of a pipeline does in an iteration: forward, backward, and waiting for a neighbour.

Waits are those of the schedule itself: torch's schedules wait in one function, which is watched while one runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple

from torch.distributed.pipelining import schedules as torch_schedules


class SpanKind(Enum):
    """Is what a process does in a span."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the part of backward that zero-bubble schedules put off
    WAIT = "wait"
    REDUCE = "reduce"  # gradients over the replicas, and the vote
    UPDATE = "update"  # the script's own lines: optimizer, report, the next batch


class StageSpan(NamedTuple):
    """Is one span, in seconds from the begin of the iteration. ``part``, ``chunk``: of the model, of the batch; -1: of
    none."""

    kind: SpanKind
    begin_s: float
    end_s: float
    part: int = -1
    chunk: int = -1


class SpanRecorder:
    """Collects the spans of one iteration at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began_at = 0.0
        self.spans: list[StageSpan] = []

    def begin(self) -> None:
        """A new iteration."""
        self.spans = []
        self.began_at = self._clock()

    @property
    def now_s(self) -> float:
        """Return the seconds since the iteration began."""
        return self._clock() - self.began_at

    @contextmanager
    def measure(self, kind: SpanKind, part: int = -1, chunk: int = -1) -> Iterator[None]:
        begin_s = self.now_s
        try:
            yield
        finally:
            self.spans.append(StageSpan(kind, begin_s, self.now_s, part, chunk))


_recording = threading.local()
_WAIT: Final = "_wait_batch_p2p"
_torch_waits: Final[Any] = getattr(torch_schedules, _WAIT, None)


def _wait(work: list[Any]) -> None:
    recorder: SpanRecorder | None = getattr(_recording, "recorder", None)
    if recorder is None or not work:
        _torch_waits(work)
        return
    with recorder.measure(SpanKind.WAIT):
        _torch_waits(work)


@contextmanager
def watched(recorder: SpanRecorder) -> Iterator[None]:
    """While a schedule of torch runs on this thread, its waits are spans of ``recorder``."""
    if _torch_waits is None:  # a torch that waits elsewhere: spans have gaps, which count as waits
        yield
        return
    setattr(torch_schedules, _WAIT, _wait)
    _recording.recorder = recorder
    try:
        yield
    finally:
        _recording.recorder = None
