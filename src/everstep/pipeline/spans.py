"""Measures what a process of a pipeline does in an iteration: forward, backward, and waiting for a neighbour.

Waits are those of the schedule itself: torch's schedules wait in one function, which is watched while one runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from everstep.allreduce.replica_group import Waits
from everstep.model.stage_spans import SpanKind, StageSpan, WaitUse


class SpanRecorder:
    """Collects the spans of one iteration at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began_s = 0.0
        self.spans: list[StageSpan] = []
        self.copies: Waits | None = None

    def begin(self) -> None:
        """Begin a new iteration."""
        self.spans = []
        self.began_s = self._clock()

    @property
    def now_s(self) -> float:
        """Return the seconds since the iteration began."""
        return self._clock() - self.began_s

    @contextmanager
    def measure(self, kind: SpanKind, part: int = -1, chunk: int = -1) -> Iterator[None]:
        begin_s = self.now_s
        copies = self.copies if kind is SpanKind.WAIT else None
        if copies is not None:
            copies.wait_begins()
        try:
            yield
        finally:
            used = WaitUse() if copies is None else copies.wait_ends()
            end_s = self.now_s
            self.spans.append(StageSpan(kind, begin_s, end_s, part, chunk))
            copied_s = min(begin_s + used.copied_s, end_s)
            for use, at, to in (
                (SpanKind.COPY, begin_s, copied_s),
                (SpanKind.PERSIST, copied_s, min(copied_s + used.sent_s, end_s)),
            ):
                if to > at:
                    self.spans.append(StageSpan(use, at, to))


def copy_rate(size_bytes: int = 16 << 20, times: int = 3) -> float:
    """Return the bytes per second at which this process copies memory: the best of a few."""
    source, target = torch.ones(size_bytes, dtype=torch.uint8), torch.empty(size_bytes, dtype=torch.uint8)
    best_s = float("inf")
    for _ in range(times):
        begin_s = time.monotonic()
        target.copy_(source)
        best_s = min(best_s, time.monotonic() - begin_s)
    return size_bytes / max(best_s, 1e-9)


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
    if _torch_waits is None:  # a torch that waits elsewhere: gaps between computations are what is left
        yield
        return
    setattr(torch_schedules, _WAIT, _wait)
    _recording.recorder = recorder
    try:
        yield
    finally:
        _recording.recorder = None
