"""Has what a stage of a pipeline did in an iteration, as it is measured and kept."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

import msgspec

COPIES_VARIABLE: Final = "EVERSTEP_COPIES"
"""The environment variable by which a worker gets the memory for its copies: file descriptors, see
``pipeline.copy_slots``."""
COPY_SLOTS: Final = 4
"""Copies of each stage that there are files for. The third and fourth one take memory only if a copy is being sent for
longer than an iteration, or if a checkpoint is being written from one."""


class SpanKind(Enum):
    """Is what a process does in a span."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the part of backward that zero-bubble schedules put off
    WAIT = "wait"
    REDUCE = "reduce"  # gradients over the replicas, and the vote
    COPY = "copy"  # in a wait: the state is copied; as long as it took, from the wait's begin
    PERSIST = "persist"  # in a wait: a copy is sent to the neighbour; as long as it took, behind the copying


COMPUTE = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WEIGHT)


class WaitUse(NamedTuple):
    """Says how long a copy was made, and sent to the neighbour, in one wait: seconds."""

    copied_s: float = 0.0
    sent_s: float = 0.0


class StageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Is one span, in seconds from the begin of the iteration. ``part``, ``chunk``: of the model, of the batch; -1: of
    none."""

    kind: SpanKind
    begin_s: float
    end_s: float
    part: int = -1
    chunk: int = -1

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


class CopyTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the copies of a stage's state since its process began. ``inside_bytes``: copied in waits; ``late_bytes``:
    of blocks that were begun in a wait and ended behind it; ``stalled_bytes``: just before the optimizer's step, which
    waited for them. ``discarded``: copies of a state that was changed meanwhile; ``skipped``: ones that could not
    begin, since another stage was behind. ``begin_s``, ``stall_s``: what they cost the thread that trains.
    ``overruns``: waits behind which more than one block ended: a defect. ``interval``: one copy in so many iterations;
    ``reason``: why. ``neighbour``: the node whose agent keeps copies, too; ``kept``: copies that it has acknowledged;
    ``sent_bytes``: to it, ``sent_late_bytes``: of those, outside of waits; ``sent_s``, ``received_s``: the processor's
    time that it took here and there; ``received_late_bytes``: about so many were taken in outside of the waits of the
    neighbour's own stages. ``behind``: copies of the own memory that came and went meanwhile."""

    copies: int = 0
    discarded: int = 0
    skipped: int = 0
    inside_bytes: int = 0
    late_bytes: int = 0
    stalled_bytes: int = 0
    overruns: int = 0
    begin_s: float = 0.0
    stall_s: float = 0.0
    interval: int = 1
    reason: str = ""
    neighbour: str = ""
    kept: int = 0
    sent_bytes: int = 0
    sent_late_bytes: int = 0
    sent_s: float = 0.0
    received_s: float = 0.0
    received_late_bytes: int = 0
    behind: int = 0

    @property
    def copied_bytes(self) -> int:
        return self.inside_bytes + self.late_bytes + self.stalled_bytes


class StageIteration(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one iteration of one stage. ``began_s``: on the machine's monotonic clock, which its processes share;
    ``generation``: of the group; ``seen``: how many iterations of this generation and size were before it."""

    worker: int
    stage: int
    stages: int
    parts: int
    microbatches: int
    schedule: str
    step: int
    generation: int
    samples: int
    seen: int
    began_s: float
    spans: tuple[StageSpan, ...]
    state_bytes: int = 0  # parameters, buffers and what optimizers keep of the stage
    copy_bytes_per_s: float = 0.0  # of its copies so far; before, of this process' memory; 0: not known
    copies: CopyTotals | None = None  # None: nothing is copied
