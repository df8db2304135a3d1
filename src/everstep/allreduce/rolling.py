"""Goes round a replica's state with a digest, a slice with every step, so that replicas are compared and not believed.

A slice of parameters, buffers and optimizer state is digested at the begin of each step, and travels in its vote. All
of the state is covered within ``WITHIN_STEPS`` steps, at the speed of memory and for a small part of a step's time.
What is not in a slice's digest by mistake costs a comparison, and nothing else: see ``ReplicaSync.compare``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from torch import Tensor

from everstep.allreduce import dtensor
from everstep.allreduce.gradient_buckets import Measured, digest_of, join_digests, measure, octets, read_digests

if TYPE_CHECKING:
    from everstep.allreduce.state import ReplicaState

WITHIN_STEPS: Final = 50
_SLICES: Final = 40
_SLICES_MAX: Final = 48
_EVERY_MAX: Final = 6
_SLICE_BYTES: Final = 256 << 10  # of a small state: fewer slices, and not in every step, since a call takes its time
_OVERHEAD_BYTES: Final = 32 << 10  # as many are digested in the time that a call takes
_ALIGN: Final = 64  # elements


class TensorPiece:
    """Is the elements ``[lo, hi)`` of a tensor, and where they lay when slices were cut."""

    __slots__ = ("_octets", "_ptr", "hi", "lo", "tensor")

    def __init__(self, tensor: Tensor, lo: int, hi: int) -> None:
        self.tensor, self.lo, self.hi = tensor, lo, hi
        mine = dtensor.local(tensor).detach()
        self._ptr = mine.data_ptr()
        self._octets = octets(mine.view(-1)[lo:hi]) if mine.is_contiguous() else None

    def measured(self) -> Measured:
        """Return its digest. Where the script has put other memory into the tensor, or freed it, that is looked at."""
        known, mine = self._octets, dtensor.local(self.tensor)
        if known is not None and mine.data_ptr() == self._ptr:
            return digest_of(*known)
        return measure(mine.detach().reshape(-1)[self.lo : self.hi])


class RollingDigest:
    """Digests ``state`` slice by slice. For the thread that trains."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._slices: list[list[TensorPiece]] = []
        self._shape: tuple[int, ...] = ()
        self._cut_of: list[tuple[int, int, int]] = []  # the tensors that there were: which, where, elements

    def __repr__(self) -> str:
        return f"<RollingDigest of {len(self._slices)} slices>"

    def of(self, step: int) -> int:
        """Return the digest of the slice that ``step`` is about, before that step; 0 where it is about none."""
        shape = tuple(len(o.state) for o in self._state.optimizers)
        if shape != self._shape or not self._slices:
            self._plan(shape)
        every = max(1, min(_EVERY_MAX, WITHIN_STEPS // len(self._slices)))  # few slices: not in every step
        if step % every:
            return 0
        number = step // every % len(self._slices)
        if not number:
            self._plan(shape)
        return join_digests([total for total, _ in read_digests([piece.measured() for piece in self._slices[number]])])

    def _plan(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        tensors = [tensor for _, tensor in self._state.tensors() if tensor.numel()]
        cut_of = [(id(t), dtensor.local(t).data_ptr(), t.numel()) for t in tensors]
        if cut_of == self._cut_of:
            return
        self._cut_of = cut_of
        whole = sum(_cost(t) for t in tensors)
        room = max(1, whole // min(_SLICES, max(1, whole // _SLICE_BYTES)))
        self._slices = _cut(tensors, room)
        while len(self._slices) > _SLICES_MAX:
            room += 1 + room // 4
            self._slices = _cut(tensors, room)


def _cost(tensor: Tensor) -> int:
    return dtensor.local(tensor).nbytes + _OVERHEAD_BYTES


def _cut(tensors: Sequence[Tensor], room: int) -> list[list[TensorPiece]]:
    """Return slices of about ``room`` each, tensors cut where they are longer."""
    slices: list[list[TensorPiece]] = [[]]
    left = room
    for tensor in tensors:
        mine = dtensor.local(tensor)
        lo, n = 0, mine.numel()
        while lo < n:
            if left <= 0:
                slices.append([])
                left = room
            fits = max(_ALIGN, max(left - _OVERHEAD_BYTES, room // 4) // mine.element_size() // _ALIGN * _ALIGN)
            hi = min(n, lo + fits)
            slices[-1].append(TensorPiece(tensor, lo, hi))
            left -= (hi - lo) * mine.element_size() + _OVERHEAD_BYTES
            lo = hi
    return slices
