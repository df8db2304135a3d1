"""Gives a member's state to others: snapshots, and what each step after them did.

The thread that trains comes by at each boundary of two steps (``boundary``), takes the snapshots that were asked for
and keeps what the step did; threads of the data server hand both out. Training never waits for a follower: what is kept
is bounded, and a follower that is too slow for it finds what it needs gone, and begins anew.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from everstep import faultpoints
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.state import ReplicaState
from everstep.allreduce.step_log import Did, Recorder
from everstep.ids import Incarnation, Slot
from everstep.model.group import Position
from everstep.net.messages import (
    AskState,
    Bad,
    DataAnswer,
    DataRequest,
    EndFollow,
    LogTaken,
    NextStep,
    NotYet,
    ReadState,
    SnapshotGone,
    StatePart,
    StateReady,
    StepDid,
)

KEEP_BYTES = 1 << 30  # of steps, for followers
KEEP_STEPS = 4096
STEP_MAX_BYTES = 1000 << 20  # below the limit of a frame
SNAPSHOTS = 4
SILENT_S = 10.0  # a follower not heard for so long is gone
PART_MAX_BYTES = 64 << 20
WAIT_MAX_S = 10.0

_Peer = tuple[Slot, Incarnation]
logger = logging.getLogger("everstep.worker")


class Snapshot:
    """Is a snapshot that may be read. ``used_at``: last, in seconds of the monotonic clock."""

    def __init__(self, number: int, position: Position, serialized: SerializedState, lineage: int, now: float) -> None:
        self.number, self.position, self.serialized, self.lineage = number, position, serialized, lineage
        self.used_at = now

    def __repr__(self) -> str:
        return f"<Snapshot {self.number} at {self.position}, {self.serialized.size_bytes} bytes>"


class StateSource:
    """``boundary`` and ``idle`` are for the thread that trains, ``handle`` for any other."""

    def __init__(
        self, state: ReplicaState, *, now: Callable[[], float] = time.monotonic, keep_bytes: int = KEEP_BYTES
    ) -> None:
        self._state, self._now, self._keep_bytes = state, now, keep_bytes
        self.lineage = 0  # of the group whose state it is
        self._lock = threading.Condition()
        self._numbers = itertools.count(1)
        self._snapshots: dict[int, Snapshot] = {}
        self._spare: torch.Tensor | None = None
        self._wanted: dict[_Peer, bool] = {}  # a snapshot; whether to follow from there
        self._followers: dict[_Peer, tuple[int, float]] = {}  # next step that it needs; when it was heard
        self._recorder: Recorder | None = None
        self._log: deque[Did] = deque()
        self._log_bytes = 0
        self._newest = -1  # step that is next, at the last boundary
        self._broken = ""  # why the last log ended
        self._busy = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<StateSource {len(self._followers)} followers, {self._log_bytes} bytes of steps kept>"

    # ------------------------------------------------------------ the thread that trains

    def boundary(self) -> None:
        """A step is over, the state is that of its position."""
        if not self._busy:
            return
        if self._recorder is not None:
            did = self._recorder.boundary()
            with self._lock:
                broken = self._recorder.broken
                if did is not None and did.size_bytes > STEP_MAX_BYTES:
                    broken = f"a step changes {did.size_bytes} bytes: too much to be followed"
                if did is None or broken:
                    logger.warning("followers must copy the state anew: %s", broken)
                    self._stop_log(broken)
                else:
                    self._keep(did)
        self.idle()

    def idle(self) -> None:
        """Nothing was trained since the last boundary: take the snapshots that were asked for."""
        if not self._busy:
            return
        with self._lock:
            self._newest = self._state.position.step
            self._forget_silent()
            wanted, self._wanted = self._wanted, {}
        if wanted:
            self._take(wanted)
        with self._lock:
            self._busy = bool(self._wanted or self._followers or self._snapshots)
            self._lock.notify_all()

    def provide(self) -> None:
        """Keep a snapshot of the state as it is now, for ``AskState(step=...)``."""
        self._take({})

    def _take(self, wanted: dict[_Peer, bool]) -> None:
        with self._lock:
            into, self._spare = self._spare, None
        serialized = self._state.snapshot(into)
        recorder = None
        if any(wanted.values()) and self._recorder is None:
            recorder = Recorder(self._state)
        now, position = self._now(), self._state.position
        with self._lock:
            if recorder is not None:
                self._recorder, self._broken = recorder, ""
            found = Snapshot(next(self._numbers), position, serialized, self.lineage, now)
            self._snapshots[found.number] = found
            self._newest = position.step
            for peer, follows in wanted.items():
                if follows:
                    self._followers[peer] = (position.step, now)
            while len(self._snapshots) > SNAPSHOTS:
                del self._snapshots[min(self._snapshots)]  # (its buffer may be on its way to somebody)
            self._busy = True
            self._lock.notify_all()

    def _keep(self, did: Did) -> None:
        self._log.append(did)
        self._log_bytes += did.size_bytes
        while len(self._log) > 2 and (self._log_bytes > self._keep_bytes or len(self._log) > KEEP_STEPS):
            self._log_bytes -= self._log.popleft().size_bytes
        self._newest = did.position.step
        self._lock.notify_all()

    def _forget_silent(self) -> None:
        now = self._now()
        for peer in [p for p, (_, last) in self._followers.items() if now - last > SILENT_S]:
            logger.warning("worker:%s #%s does not follow any more", *peer)
            del self._followers[peer]
        for number in [n for n, s in self._snapshots.items() if now - s.used_at > SILENT_S]:
            self._spare = self._snapshots.pop(number).serialized.body
        self._prune()

    def _prune(self) -> None:
        """Drop what no follower needs any more."""
        if not self._followers:
            self._stop_log("nobody followed")
            return
        first = min(step for step, _ in self._followers.values())
        while self._log and self._log[0].before.step < first:
            self._log_bytes -= self._log.popleft().size_bytes

    def _stop_log(self, why: str) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder, self._broken = None, why
        self._log.clear()
        self._log_bytes = 0
        self._lock.notify_all()

    def leave(self, peers: Iterable[_Peer]) -> None:
        """These are members now, or lost: nothing is kept for them."""
        with self._lock:
            for peer in peers:
                self._followers.pop(peer, None)
                self._wanted.pop(peer, None)

    def reset(self) -> None:
        """The state became another one: whoever followed begins anew."""
        with self._lock:
            self._followers.clear()
            self._snapshots.clear()
            self._stop_log("the source took over another state")

    def close(self) -> None:
        """Close; whoever waits is told at once."""
        with self._lock:
            self._closed = True
            self._stop_log("this worker ends")
            self._snapshots.clear()
            self._lock.notify_all()

    # ------------------------------------------------------------ threads of the data server

    def handle(
        self, request: DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[DataAnswer, Sequence[Any]]:
        match request:
            case AskState():
                return self._ask(request), ()
            case ReadState():
                return self._read(request)
            case NextStep():
                return self._next(request)
            case EndFollow():
                self.leave([(request.slot, request.incarnation)])
                return LogTaken(), ()
        return Bad(f"a worker has no answer to {type(request).__name__}"), ()

    def _ask(self, r: AskState) -> DataAnswer:
        peer = (r.slot, r.incarnation)
        end = self._now() + min(r.wait_s, WAIT_MAX_S)
        with self._lock:
            first = next(self._numbers) if r.step < 0 else 0
            if r.step < 0:
                self._wanted[peer] = r.follow
                self._busy = True
            while True:
                for found in reversed(self._snapshots.values()):
                    if (found.number > first) if r.step < 0 else (found.position.step == r.step):
                        found.used_at = self._now()
                        sizes = len(found.serialized.header), found.serialized.body.numel()
                        return StateReady(found.number, found.position, *sizes, found.lineage)
                left_s = end - self._now()
                if self._closed:
                    return Bad("this worker ends")
                if left_s <= 0:
                    self._wanted.pop(peer, None)
                    return NotYet()
                self._lock.wait(left_s)

    def _read(self, r: ReadState) -> tuple[DataAnswer, Sequence[Any]]:
        faultpoints.reach("serve_state")
        peer = (r.slot, r.incarnation)
        with self._lock:
            found = self._snapshots.get(r.snapshot)
            if found is None:
                return SnapshotGone(f"snapshot {r.snapshot} is not kept any more"), ()
            now = self._now()
            found.used_at = now
            if peer in self._followers:
                self._followers[peer] = (self._followers[peer][0], now)
            serialized = found.serialized
        if not (0 < r.size_bytes <= PART_MAX_BYTES and 0 <= r.at <= serialized.size_bytes - r.size_bytes):
            return Bad(f"bytes [{r.at}, {r.at + r.size_bytes}) of a snapshot of {serialized.size_bytes}"), ()
        head = len(serialized.header)
        buffers: list[Any] = []
        if r.at < head:
            buffers.append(memoryview(serialized.header)[r.at : r.at + r.size_bytes])
        if r.at + r.size_bytes > head:
            buffers.append(serialized.body.numpy()[max(0, r.at - head) : r.at + r.size_bytes - head])
        return StatePart(), buffers

    def _next(self, r: NextStep) -> tuple[DataAnswer, Sequence[Any]]:
        peer = (r.slot, r.incarnation)
        end = self._now() + min(r.wait_s, WAIT_MAX_S)
        with self._lock:
            while True:
                if peer not in self._followers:
                    return SnapshotGone("nothing is kept for you: too slow, or never asked"), ()
                self._followers[peer] = (r.step, self._now())
                if self._recorder is None:
                    return SnapshotGone(self._broken), ()
                at = r.step - self._log[0].before.step if self._log else 0
                if at < 0 or (not self._log and r.step < self._newest):
                    return SnapshotGone(
                        f"step {r.step} is not kept any more: {self._keep_bytes} bytes of steps are"
                    ), ()
                if at < len(self._log):
                    did = self._log[at]
                    break
                left_s = end - self._now()
                if left_s <= 0 or self._closed:
                    return NotYet(), ()
                self._lock.wait(left_s)
            newest = self._newest
        parts = tuple((len(p.header), p.body.numel()) for p in did.parts)
        return StepDid(did.position, parts, newest), did.buffers()
