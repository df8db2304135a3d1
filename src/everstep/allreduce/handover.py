"""Gets the state of a group's member: whole, and then step by step until one trains along.

A joiner does it in the background, while the others train: it copies a snapshot in pieces (whose frames have checksums)
and then does to the copy what each later step did (the step log), so that it enters with nothing left to copy. When its
source is lost it goes on with another member, from the beginning; when it is too slow to follow, it says that it can
enter all the same, and what it lacks is copied while the group changes over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from everstep import faultpoints
from everstep.allreduce.devices import wait_for
from everstep.allreduce.serialize import ALIGN_BYTES, BODY_MAX_BYTES, HEADER_MAX_BYTES, SerializedState
from everstep.allreduce.state import ReplicaState
from everstep.allreduce.step_log import replay
from everstep.errors import CheckpointError, DeadlineError, EverstepError, WireError
from everstep.ids import Incarnation, Slot
from everstep.model.group import GroupMember, Position
from everstep.net.messages import (
    AskState,
    Bad,
    DataAnswer,
    DataRequest,
    EndFollow,
    NextStep,
    NotYet,
    ReadState,
    SnapshotGone,
    StatePart,
    StateReady,
    StepDid,
)
from everstep.net.retry import Deadline, backoff

PART_BYTES = 4 << 20
IN_FLIGHT = 4  # parts that are asked for ahead
POLL_S = 1.0
ANSWER_S = 15.0  # a source that does not answer for so long is given up
LAG_STEPS = 3  # so few steps behind, a joiner may enter: it catches up while the group changes over
TRIES = 3  # of following; then the state is copied at the change-over
PARTS_MAX = 1 << 16

logger = logging.getLogger("everstep.worker")


class HandoverClient(Protocol):
    """Is what is needed of ``net.data.DataClient``."""

    def request(
        self, message: DataRequest, *, into: memoryview | None = None, timeout_s: float = 30.0
    ) -> tuple[DataAnswer, memoryview]: ...

    def send(self, message: DataRequest, *, timeout_s: float = 30.0) -> None: ...

    def receive(self, *, into: memoryview | None = None, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]: ...

    def close(self) -> None: ...


Connect = Callable[[GroupMember], HandoverClient]


class GoneError(WireError):
    """The source does not have it any more."""


# ---------------------------------------------------------------- whole


def fetch(
    client: HandoverClient,
    me: tuple[Slot, Incarnation],
    *,
    step: int = -1,
    follow: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    timeout_s: float = 600.0,
) -> tuple[StateReady, SerializedState]:
    """Return a member's state at its next boundary, or before ``step``. Raises WireError (broken, gone),
    DeadlineError."""
    deadline = Deadline(timeout_s, "a snapshot of a member's state")
    while True:
        answer, _ = client.request(AskState(*me, step, follow, POLL_S), timeout_s=ANSWER_S)
        if isinstance(answer, StateReady):
            break
        if not isinstance(answer, NotYet):
            raise WireError(f"no state to be had: {_why(answer)}")
        if stopped():
            raise WireError("not wanted any more")
        deadline.check()
    if answer.header_bytes > HEADER_MAX_BYTES or answer.body_bytes > BODY_MAX_BYTES:
        raise WireError(f"a state of {answer.header_bytes} and {answer.body_bytes} bytes was announced: too large")
    return answer, read_parts(client, me, answer, stopped)


def read_parts(
    client: HandoverClient, me: tuple[Slot, Incarnation], ready: StateReady, stopped: Callable[[], bool] = lambda: False
) -> SerializedState:
    """Return the snapshot's bytes, several parts on their way at a time. Raises WireError, DeadlineError."""
    header = bytearray(ready.header_bytes)
    body = torch.empty(ready.body_bytes, dtype=torch.uint8)
    places = _places(memoryview(header), body.numpy().data)
    total = ready.header_bytes + ready.body_bytes
    asked = got = 0
    flight: list[int] = []
    while got < total:
        while asked < total and len(flight) < IN_FLIGHT:
            size = min(PART_BYTES, _room(asked, ready.header_bytes, total))
            client.send(ReadState(*me, ready.snapshot, asked, size), timeout_s=ANSWER_S)
            flight.append(size)
            asked += size
        if stopped():
            raise WireError("not wanted any more")
        size = flight.pop(0)
        into = places(got, size)
        answer, piece = client.receive(into=into, timeout_s=ANSWER_S)
        if isinstance(answer, SnapshotGone):
            raise GoneError(answer.reason)
        if not isinstance(answer, StatePart) or piece.nbytes != size:
            raise WireError(f"no part of a state: {_why(answer)}")
        got += size
        faultpoints.reach("load_state")
    return SerializedState(bytes(header), body)


def _places(header: memoryview, body: memoryview) -> Callable[[int, int], memoryview]:
    def place(at: int, size: int) -> memoryview:
        if at < len(header):
            return header[at : at + size]
        return body[at - len(header) : at - len(header) + size]

    return place


def _room(at: int, header_bytes: int, total: int) -> int:
    """No part is of header and body both: each has one place."""
    return header_bytes - at if at < header_bytes else total - at


def _why(answer: DataAnswer) -> str:
    match answer:
        case Bad(error=error):
            return error
        case SnapshotGone(reason=reason):
            return reason
    return f"answered {type(answer).__name__}"


# ---------------------------------------------------------------- step by step


class StateFollower:
    """Brings ``state`` to where the group is and keeps it there, in a thread, until ``stop``; or copies it once, where
    it does not change any more (``over``).

    ``on_synced`` is called each time that it can enter: caught up, or (after ``TRIES`` breaks) known to be too slow.
    ``on_error``: the state cannot be had whatever is tried (of another script).
    """

    def __init__(
        self,
        state: ReplicaState,
        me: tuple[Slot, Incarnation],
        connect: Connect,
        on_synced: Callable[[], None],
        on_error: Callable[[EverstepError], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """``before``: called in the thread, before the state is overwritten for the first time."""
        self._state, self._me, self._connect = state, me, connect
        self._on_synced, self._on_error = on_synced, on_error
        self._before, self._over = before, False
        self._lock = threading.Condition()
        self._sources: tuple[GroupMember, ...] = ()
        self._source: GroupMember | None = None
        self._client: HandoverClient | None = None
        self._stop = False
        self._breaks = 0
        self._too_slow = False  # the thread has ended: what is lacking is copied at the change-over
        self.lineage = 0
        self.whole = False  # the state is that of ``state.position``: not in the middle of being loaded, or of a step
        self._stepping = False  # in the middle of a step
        self.following = False  # what the next steps do is on its way
        self.bytes_read = 0
        self._room = torch.empty(0, dtype=torch.uint8)
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="everstep-follow", daemon=True)

    def __repr__(self) -> str:
        return f"<Follower of {self._source} at {self._state.position}, {self._breaks} breaks>"

    def follow(self, sources: Sequence[GroupMember], over: bool = False) -> None:
        """These have the state. Starts at the first call; a source that is not among them is given up. One that is
        too slow to follow says again, of each new group, that it can enter all the same. ``over``: none of them changes
        the state any more, and there is no group to enter."""
        with self._lock:
            self._sources = tuple(m for m in sources if m.address is not None)
            lost = self._source is not None and self._source not in self._sources
            client = self._client
            self._over = self._over or over
            if over and self._too_slow and not self._thread.is_alive():
                self._too_slow, self._thread = False, self._new_thread()
            if self._thread.ident is None and not self._stop:
                self._thread.start()
            too_slow = self._too_slow and not self._stop
            self._lock.notify_all()
        if lost and client is not None:
            client.close()
        if too_slow:
            self._on_synced()

    @property
    def holds(self) -> bool:
        """Return whether there is a state, be it in the middle of the step that leads to the next one."""
        with self._lock:
            return self.whole or self._stepping

    def reach(self, position: Position, timeout_s: float) -> bool:
        """Wait until the state is that of ``position``; False: it does not get there by following."""
        deadline = Deadline(timeout_s)
        with self._lock:
            while not (self.whole and self._state.position >= position):
                if self._stop or not self.following or deadline.expired:
                    return False
                self._lock.wait(min(0.1, deadline.left_s))
            return self._state.position == position

    def stop(self) -> None:
        """On return the thread does not touch the state any more."""
        with self._lock:
            self._stop = True
            client = self._client
            self._lock.notify_all()
        if client is not None:
            client.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        turn = 0
        waits = backoff(0.05, 1.0)
        while not self._stop:
            source = self._choose(turn)
            if source is None:
                return
            turn += 1
            try:
                if self._over:
                    self._copy(source)
                    return
                self._from(source)
                waits = backoff(0.05, 1.0)
            except (WireError, DeadlineError) as error:
                if self._stop:
                    return
                logger.warning("the state of %s is copied anew: %s", source, error)
                if isinstance(error, GoneError):
                    self._breaks += 1
                    turn -= 1  # (the source is alive)
            except EverstepError as error:
                self._on_error(error)
                return
            except Exception as error:  # of an optimizer's or a tracked object's own code
                logger.exception("the state of %s cannot be taken over", source)
                self._on_error(CheckpointError(f"the state of {source} cannot be taken over: {error}"))
                return
            finally:
                with self._lock:
                    client, self._client, self._source = self._client, None, None
                    self.following = False
                    self._lock.notify_all()
                if client is not None:
                    client.close()
            if self._breaks >= TRIES:
                with self._lock:
                    self._too_slow = True
                logger.warning("worker:%s cannot follow; it copies the state when it enters", self._me[0])
                self._on_synced()
                return
            with self._lock:
                self._lock.wait(next(waits))

    def _choose(self, turn: int) -> GroupMember | None:
        """Choose a member to copy from: joiners spread over the members, and each takes another one the next time."""
        with self._lock:
            while not self._sources and not self._stop:
                self._lock.wait(1.0)
            if self._stop:
                return None
            self._source = self._sources[(self._me[0] + turn) % len(self._sources)]
            return self._source

    def _copy(self, source: GroupMember) -> None:
        self._load(self._open(source), source, follow=False)
        self._on_synced()

    def _from(self, source: GroupMember) -> None:
        client = self._open(source)
        self._load(client, source, follow=True)
        self._step_by_step(client, source)

    def _open(self, source: GroupMember) -> HandoverClient:
        client = self._connect(source)
        with self._lock:
            self._client = client
            if self._stop or self._source not in self._sources:
                raise WireError("not wanted any more")
        return client

    def _load(self, client: HandoverClient, source: GroupMember, follow: bool) -> None:
        began = time.monotonic()
        ready, serialized = fetch(client, self._me, follow=follow, stopped=lambda: self._stop)
        self._before()
        self.whole = False
        self._state.load(serialized, f"the state of {source}")
        wait_for(self._state.devices())  # (the script's thread may use another stream)
        self.bytes_read += serialized.size_bytes
        with self._lock:
            self.lineage, self.whole, self.following = ready.lineage, True, follow
            self._lock.notify_all()
        logger.info(
            "copied %d bytes of %s in %.3f s: step %d",
            serialized.size_bytes,
            source,
            time.monotonic() - began,
            self._state.position.step,
        )

    def _step_by_step(self, client: HandoverClient, source: GroupMember) -> None:
        ready = False
        while not self._stop:
            step = self._state.position.step
            answer, body = client.request(NextStep(*self._me, step, POLL_S if ready else 0.0), timeout_s=ANSWER_S)
            match answer:
                case NotYet():
                    lag = 0
                case StepDid():
                    self._apply(answer, body, source)
                    lag = answer.newest - self._state.position.step
                case _:
                    raise GoneError(_why(answer))
            if not ready and lag <= LAG_STEPS:
                ready = True
                self._on_synced()
        with contextlib.suppress(EverstepError):
            client.request(EndFollow(*self._me), timeout_s=1.0)

    def _room_for(self, size_bytes: int) -> torch.Tensor:
        """Return where the tensors of a step lie until it is done: the same memory for each, since new one is slow."""
        if self._room.numel() < size_bytes:
            self._room = torch.empty(size_bytes, dtype=torch.uint8)
        return self._room

    def _apply(self, did: StepDid, body: memoryview, source: GroupMember) -> None:
        faultpoints.reach("follow")
        parts = []
        at = used = 0
        room = self._room_for(body.nbytes + ALIGN_BYTES * len(did.parts))
        for header_bytes, body_bytes in did.parts[:PARTS_MAX]:
            if min(header_bytes, body_bytes) < 0 or at + header_bytes + body_bytes > body.nbytes:
                raise WireError("a step is longer than what came")
            header = bytes(body[at : at + header_bytes])
            at += header_bytes
            tensors = room[used : used + body_bytes]  # (aligned, which the place in the frame is not)
            tensors.numpy()[:] = body[at : at + body_bytes]
            at += body_bytes
            used += -(-body_bytes // ALIGN_BYTES) * ALIGN_BYTES
            parts.append(SerializedState(header, tensors))
        if not parts:
            raise WireError("a step without its end")
        with self._lock:
            self.whole, self._stepping = False, True
        try:
            replay(self._state, did.position, parts, f"a step of {source}")
            wait_for(self._state.devices())
        except BaseException:
            self._stepping = False  # neither the old state nor the new one
            raise
        self.bytes_read += at
        with self._lock:
            self.whole, self._stepping = True, False
            self._lock.notify_all()
