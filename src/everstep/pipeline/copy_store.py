"""Keeps copies of stages for workers of other nodes, in the memory of an agent. Without torch.

A stage sends a copy in blocks with checksums. The agent checks each block, and acknowledges the copy when all of it is
there. Of each stage there are two slots: the newest step that all stages have stays until a newer one is whole."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from everstep.errors import CheckpointError, EverstepError, PlatformError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret
from everstep.net.data import DataServer
from everstep.net.frames import Buffer
from everstep.net.messages import (
    Bad,
    CopiesDropped,
    CopyBegun,
    CopyBlocks,
    CopyEnded,
    CopyRead,
    CopyTaken,
    DataAnswer,
    DataRequest,
    KeptCopies,
    KeptCopiesAsked,
    KeptPart,
    SnapshotGone,
    StatePart,
)
from everstep.net.sockets import listen_tcp
from everstep.pipeline.idle_board import IdleBoard
from everstep.pipeline.slot_memory import BLOCK_BYTES, CopySlot, SlotHead, check_blocks
from everstep.policies.receiving import has_room

KEPT_SLOTS: Final = 2
STAGES_MAX: Final = 4096
READ_BYTES: Final = 4 << 20
LOWEST_PRIORITY: Final = 19
MOST_S: Final = 0.05
"""So long a block waits for the node's own stages to be idle."""
_LOOK_S: Final = 0.002
_TEXT_MAX_BYTES: Final = 64 << 20
_BODY_MAX_BYTES: Final = 1 << 41


class _Writing(NamedTuple):
    """Is a copy that is being received: where its blocks and their checksums belong."""

    slot: CopySlot
    step: int
    body: Any
    sums: Any


class _StageCopies:
    """Holds the copies of one stage. Its lock guards all of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._fds = [os.memfd_create("everstep-kept", os.MFD_CLOEXEC) for _ in range(KEPT_SLOTS)]
        self.slots = [CopySlot(fd) for fd in self._fds]
        self.writing: _Writing | None = None
        self.done = 0  # blocks of it

    def heads(self) -> dict[tuple[int, int], tuple[CopySlot, SlotHead]]:
        """Return what is whole, by life and step."""
        found = ((slot, slot.head()) for slot in self.slots)
        return {(head.life, head.step): (slot, head) for slot, head in found if head is not None}

    def close(self) -> None:
        self.writing = None
        for fd in self._fds:
            os.close(fd)  # (its memory goes with the last view of it)
        self.slots, self._fds = [], []


class _WorkerCopies:
    def __init__(self, stages: int) -> None:
        self.stages = [_StageCopies() for _ in range(stages)]
        self.life = Incarnation(0)  # the newest that has written

    def newest(self) -> tuple[int, int] | None:
        """Return life and step of the newest copy that all stages have; None: there is none."""
        return max(set.intersection(*(set(stage.heads()) for stage in self.stages)), default=None)

    def close(self) -> None:
        for stage in self.stages:
            with stage.lock:
                stage.close()


class CopyStore:
    """Serves copies of stages. Thread-safe; ``close`` ends it, and forgets them."""

    def __init__(self, board: IdleBoard | None = None) -> None:
        """Take ``board``: what this node's own stages do; None: it has none."""
        self._board = board
        self._block_s = 0.0  # what a block took lately
        self._lock = threading.Lock()
        self._workers: dict[Slot, _WorkerCopies] = {}
        self._low = threading.local()
        self._server: DataServer | None = None

    def __repr__(self) -> str:
        return f"<CopyStore of {len(self._workers)} workers>"

    def serve(self, host: str, node: NodeId, secret: Secret, tls: bool) -> Address:
        """Answer at a free port of ``host`` from now on. Raises PlatformError."""
        listener = listen_tcp(host, 0)
        identity = Identity(purpose="data", role="agent", node=node, pid=os.getpid())
        self._server = DataServer(self, [listener], secret, identity, tls=tls)
        return Address(node, "", host, listener.getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with self._lock:
            workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.close()

    # ------------------------------------------------------------ requests

    def handle(
        self, request: DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[DataAnswer, Sequence[Buffer]]:
        self._step_back()
        try:
            return self._answer(request, body)
        except EverstepError as error:
            return Bad(str(error)), ()

    def _step_back(self) -> None:
        """Have this thread run behind all that trains on this node."""
        if not getattr(self._low, "done", False):
            self._low.done = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)

    def _await_room(self, blocks: int) -> None:
        """Wait until this node's own stages leave room for a block; a node that always computes is not waited for long.
        Meanwhile nothing more is read from this sender."""
        board = self._board
        if board is None:
            return
        end = time.monotonic() + MOST_S
        while not has_room(board.stages(), now := time.monotonic(), blocks * self._block_s):
            if now >= end:
                self._low.late = getattr(self._low, "late", 0) + blocks
                return
            time.sleep(_LOOK_S)

    def _answer(self, request: DataRequest, body: memoryview) -> tuple[DataAnswer, Sequence[Buffer]]:
        match request:
            case CopyBegun():
                self._begin(request, body)
            case CopyBlocks():
                self._await_room(request.count)
                before_s = time.thread_time()
                self._take(request, body)
                self._block_s = (time.thread_time() - before_s) / max(1, request.count)
            case CopyEnded():
                self._end(request)
            case CopiesDropped(slot, incarnation):
                self._drop(slot, incarnation)
            case KeptCopiesAsked(slot):
                return self._kept(slot), ()
            case CopyRead():
                return self._read(request)
            case _:
                return Bad(f"{type(request).__name__} is nothing for an agent that keeps copies"), ()
        late = getattr(self._low, "late", 0)
        return CopyTaken(time.thread_time(), late), ()  # (a stage's connection has a thread of its own)

    def _begin(self, r: CopyBegun, body: memoryview) -> None:
        if not r.stage < r.stages <= STAGES_MAX:
            raise PlatformError(f"a copy of stage {r.stage} of {r.stages}: there is no such stage")
        text = bytes(body)
        if len(text) != r.meta_bytes + r.header_bytes or len(text) > _TEXT_MAX_BYTES or r.body_bytes > _BODY_MAX_BYTES:
            raise PlatformError(f"a copy of {len(text)} and {r.body_bytes} bytes was announced: too large, or torn")
        with self._lock:
            worker = self._workers.get(r.slot)
            if worker is not None and r.incarnation < worker.life:
                raise PlatformError(f"worker:{r.slot} #{r.incarnation} was replaced by #{worker.life}")
            if worker is None or len(worker.stages) != r.stages:
                if worker is not None:
                    worker.close()
                worker = self._workers[r.slot] = _WorkerCopies(r.stages)
            worker.life = r.incarnation
            keep = worker.newest()
        stage = worker.stages[r.stage]
        with stage.lock:
            stage.writing = None
            heads = stage.heads()
            kept = heads[keep][0] if keep in heads else None
            slot = next(slot for slot in stage.slots if slot is not kept)
            meta, header = text[: r.meta_bytes], text[r.meta_bytes :]
            stage.writing = _Writing(slot, r.step, *slot.begin(r.step, r.incarnation, meta, header, r.body_bytes))
            stage.done = 0

    def _stage(self, slot: Slot, incarnation: Incarnation, stage: int) -> _StageCopies:
        with self._lock:
            worker = self._workers.get(slot)
        if worker is None or worker.life != incarnation or stage >= len(worker.stages):
            raise PlatformError(f"no copy of worker:{slot} #{incarnation}, stage {stage}, was begun here")
        return worker.stages[stage]

    def _take(self, r: CopyBlocks, body: memoryview) -> None:
        stage = self._stage(r.slot, r.incarnation, r.stage)
        with stage.lock:
            writing = stage.writing
            if writing is None or writing.step != r.step or r.first != stage.done:
                raise PlatformError(f"blocks of step {r.step} from {r.first} on do not follow what is here")
            lo, hi = r.first * BLOCK_BYTES, min((r.first + r.count) * BLOCK_BYTES, len(writing.body))
            if r.first + r.count > len(writing.sums) or len(body) != 4 * r.count + hi - lo:
                raise PlatformError(f"{len(body)} bytes came for {r.count} blocks of step {r.step}")
            sums = np.frombuffer(body[: 4 * r.count], np.uint32)
            blocks = np.frombuffer(body[4 * r.count :], np.uint8)
            check_blocks(blocks, sums, r.first, f"the copy of step {r.step} on its way")
            writing.body[lo:hi] = blocks
            writing.sums[r.first : r.first + r.count] = sums
            stage.done += r.count

    def _end(self, r: CopyEnded) -> None:
        stage = self._stage(r.slot, r.incarnation, r.stage)
        with stage.lock:
            writing = stage.writing
            if writing is None or writing.step != r.step or stage.done != len(writing.sums):
                raise PlatformError(f"the copy of step {r.step} is not all here")
            writing.slot.end()
            stage.writing = None

    def _drop(self, slot: Slot, incarnation: Incarnation) -> None:
        with self._lock:
            worker = self._workers.get(slot)
            if worker is None or worker.life > incarnation:
                return
            del self._workers[slot]
        worker.close()

    def _kept(self, slot: Slot) -> KeptCopies:
        with self._lock:
            worker = self._workers.get(slot)
        if worker is None:
            return KeptCopies()
        parts = []
        for number, stage in enumerate(worker.stages):
            with stage.lock:
                for kept, head in stage.heads().values():
                    with contextlib.suppress(CheckpointError):
                        lineage = kept.meta(head).lineage if head.meta_bytes else 0
                        sizes = head.meta_bytes, head.header_bytes, head.body_bytes
                        parts.append(KeptPart(number, head.step, head.life, lineage, *sizes, head.text_crc))
        return KeptCopies(len(worker.stages), tuple(parts))

    def _read(self, r: CopyRead) -> tuple[DataAnswer, Sequence[Buffer]]:
        with self._lock:
            worker = self._workers.get(r.slot)
        gone = SnapshotGone(f"the copy of step {r.step}, stage {r.stage}, is not here any more"), ()
        if worker is None or r.stage >= len(worker.stages):
            return gone
        stage = worker.stages[r.stage]
        with stage.lock:
            found = stage.heads().get((r.life, r.step))
            if found is None:
                return gone
            text, body, sums = found[0].contents(found[1])
            pieces = memoryview(text), sums.view(np.uint8).data, body.data
            out, at = bytearray(), 0
            end = r.at + min(r.size_bytes, READ_BYTES)
            for piece in pieces:
                out += piece[max(0, r.at - at) : max(0, end - at)]
                at += len(piece)
        return StatePart(), (out,)


__all__ = ["CopyStore"]
