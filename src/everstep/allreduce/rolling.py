"""A digest that goes round a replica's state, a slice with every step, so that replicas are compared and not believed.

A slice of parameters, buffers and optimizer state is digested at the begin of each step, and travels in its vote. All
of the state is covered within ``WITHIN_STEPS`` steps, at the speed of memory and for a small part of a step's time.
What is not in a slice's digest by mistake costs a comparison, and nothing else: see ``ReplicaKeeper.compare``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from torch import Tensor

from everstep.allreduce import parts
from everstep.allreduce.flats import join_digests, measure, told

if TYPE_CHECKING:
    from everstep.allreduce.state import ReplicaState

WITHIN_STEPS: Final = 50
_SLICES: Final = 40
_SLICES_MAX: Final = 48
_EVERY_MAX: Final = 4
_OVERHEAD_BYTES: Final = 32 << 10  # as many are digested in the time that a call takes
_ALIGN: Final = 64  # elements

Piece = tuple[Tensor, int, int]
"""Elements ``[lo, hi)`` of a tensor."""


class RollingDigest:
    """Of ``state``. For the thread that trains."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._slices: list[list[Piece]] = []
        self._shape: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<RollingDigest of {len(self._slices)} slices>"

    def of(self, step: int) -> int:
        """The digest of the slice that ``step`` is about, before that step; 0 where it is about none."""
        shape = tuple(len(o.state) for o in self._state.optimizers)
        if shape != self._shape or not self._slices:
            self._plan(shape)
        every = max(1, min(_EVERY_MAX, WITHIN_STEPS // len(self._slices)))  # few slices: not in every step
        if step % every:
            return 0
        number = step // every % len(self._slices)
        if not number:
            self._plan(shape)
        sums = [measure(_flat(tensor)[lo:hi]) for tensor, lo, hi in self._slices[number]]
        return join_digests([total for total, _ in told(sums)])

    def _plan(self, shape: tuple[int, ...]) -> None:
        tensors = [tensor for _, tensor in self._state.tensors() if tensor.numel()]
        room = max(1, sum(_cost(t) for t in tensors) // _SLICES)
        self._shape, self._slices = shape, _cut(tensors, room)
        while len(self._slices) > _SLICES_MAX:
            room += 1 + room // 4
            self._slices = _cut(tensors, room)


def _cost(tensor: Tensor) -> int:
    return parts.local(tensor).nbytes + _OVERHEAD_BYTES


def _cut(tensors: Sequence[Tensor], room: int) -> list[list[Piece]]:
    """Slices of about ``room`` each, tensors cut where they are longer."""
    slices: list[list[Piece]] = [[]]
    left = room
    for tensor in tensors:
        mine = parts.local(tensor)
        lo, n = 0, mine.numel()
        while lo < n:
            if left <= 0:
                slices.append([])
                left = room
            fits = max(_ALIGN, max(left - _OVERHEAD_BYTES, room // 4) // mine.element_size() // _ALIGN * _ALIGN)
            hi = min(n, lo + fits)
            slices[-1].append((tensor, lo, hi))
            left -= (hi - lo) * mine.element_size() + _OVERHEAD_BYTES
            lo = hi
    return slices


def _flat(tensor: Tensor) -> Tensor:
    return parts.local(tensor).detach().reshape(-1)
