"""Collectives on tensors of a device, by way of the host's memory: copied out, sent over gloo, copied back.

Nothing waits where a tensor is given: the copy is on its way behind the kernels that compute it, and gloo begins when
the copy has come, at the next call or when somebody waits; always in the order of the calls, which is that of all.
A tensor is written when its ``wait`` is over and not before, so of a collective that broke nothing is seen.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everstep.allreduce.step import GroupWork

Begin = Callable[[Tensor], GroupWork]
"""Starts a collective on memory of the host."""


class HostBuffer:
    """Is memory of the host, as long as a tensor; ``used``: by a copy of the device, until that event."""

    def __init__(self, like: Tensor) -> None:
        pinned = like.device.type == "cuda"
        self.memory = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
        self.used: Any = None

    def wait(self) -> None:
        """Wait until no copy is at it: milliseconds at most, a copy depends on nobody else."""
        if self.used is not None:
            self.used.synchronize()
            self.used = None

    def arrived(self) -> bool:
        return self.used is None or bool(self.used.query())


class StagedWork:
    """Is one collective. ``wait`` is for the thread that began it."""

    def __init__(self, staged: HostStaged, tensor: Tensor, room: HostBuffer, begin: Begin, back: bool) -> None:
        self._staged, self._tensor, self._room = staged, tensor, room
        self._begin, self._back = begin, back  # ``back``: the result is copied to the tensor
        self._work: GroupWork | None = None

    def begin(self) -> None:
        self._room.wait()
        self._work = self._begin(self._room.memory)

    def arrived(self) -> bool:
        return self._room.arrived()

    def wait(self, timeout_s: float | None = None) -> None:
        """Raises what gloo's collective raises; the tensor is as it was then."""
        self._staged.begin_all()  # also what came after it: peers may wait for that before they do their part of this
        assert self._work is not None
        self._work.wait(timeout_s)
        room = self._room
        if self._back:
            self._tensor.copy_(room.memory, non_blocking=True)
            room.used = _event(self._tensor)
        self._staged.give_back(room)


class HostStaged:
    """See the top of this file. Used by one thread at a time. ``begin`` and so on: the group's own, over gloo."""

    def __init__(
        self,
        allreduce: Callable[[Tensor, str], GroupWork],
        send: Callable[[Tensor, int], GroupWork],
        recv: Callable[[Tensor, int], GroupWork],
    ) -> None:
        self._allreduce, self._send, self._recv = allreduce, send, recv
        self._queue: deque[StagedWork] = deque()
        self._free: dict[tuple[Any, ...], list[HostBuffer]] = defaultdict(list)

    def __repr__(self) -> str:
        return f"<HostStaged {len(self._queue)} to begin>"

    def allreduce(self, tensor: Tensor, op: str = "sum") -> StagedWork:
        """Reduce in place, over a contiguous tensor."""
        return self._enqueue(tensor, self._copied(tensor), lambda memory: self._allreduce(memory, op), True)

    def send(self, tensor: Tensor, peer: int) -> StagedWork:
        return self._enqueue(tensor, self._copied(tensor), lambda memory: self._send(memory, peer), False)

    def recv(self, tensor: Tensor, peer: int) -> StagedWork:
        return self._enqueue(tensor, self._room(tensor), lambda memory: self._recv(memory, peer), True)

    def _enqueue(self, tensor: Tensor, room: HostBuffer, begin: Begin, back: bool) -> StagedWork:
        work = StagedWork(self, tensor, room, begin, back)
        self._queue.append(work)
        while self._queue and self._queue[0].arrived():
            self.begin_next()
        return work

    def begin_next(self) -> None:
        """Begin the first that has not begun; waits for its copy."""
        self._queue.popleft().begin()

    def begin_all(self) -> None:
        """Begin all, before a collective that does not come through here, so that all members have one order."""
        while self._queue:
            self.begin_next()

    # ------------------------------------------------------------ memory

    def _copied(self, tensor: Tensor) -> HostBuffer:
        room = self._room(tensor)
        room.wait()
        room.memory.copy_(tensor, non_blocking=True)
        room.used = _event(tensor)
        return room

    def _room(self, tensor: Tensor) -> HostBuffer:
        free = self._free[_kind(tensor)]
        return free.pop() if free else HostBuffer(tensor)

    def give_back(self, room: HostBuffer) -> None:
        """Give back the memory of a collective that is over. What broke keeps its room: gloo may still write there."""
        self._free[_kind(room.memory)].append(room)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype


def _event(tensor: Tensor) -> Any:
    """Return what has been asked of the tensor's device so far, on this stream; None: it is done."""
    if tensor.device.type == "cuda":
        return torch.cuda.current_stream(tensor.device).record_event()
    if tensor.device.type != "cpu":
        getattr(torch, tensor.device.type).synchronize()
    return None
