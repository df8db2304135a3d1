"""Lays gradients into flat memory: parameters in gradient buckets, one contiguous tensor each, and a small tail behind
the last one.

Buckets are filled in the order in which backward finds the gradients (last layers first), so that the first ones can
be reduced while the rest is still computed. The tail carries what is reduced along with the gradients: which parameters
had one, what became of buffers, who did what in this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.native import sum_bits

FIRST_BYTES: Final = 1 << 20
"""Of the first bucket: small, so that the network has work early (as in torch's DDP)."""
BUCKET_BYTES: Final = 25 << 20
_DIGEST_MASK: Final = (1 << 62) - 1
_NATIVE: Final = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class BucketLayout:
    """Where each parameter lies: ``buckets[b]`` are parameter numbers in the order of their memory.

    ``tail``: float32 elements behind the last bucket (a bucket of its own where that is not float32)."""

    def __init__(self, params: Sequence[Tensor], tail: int) -> None:
        self.buckets: list[list[int]] = []
        self.kinds: list[tuple[torch.dtype, torch.device]] = []
        self.bucket_of = [0] * len(params)
        self.shapes = [(p.shape, _strides(p)) for p in params]
        open_: dict[tuple[torch.dtype, torch.device], int] = {}
        sizes: list[int] = []
        for i in reversed(range(len(params))):
            kind = (params[i].dtype, params[i].device)
            size = params[i].numel() * params[i].element_size()
            b = open_.get(kind, -1)
            # Full is what has reached its limit, as in torch's DDP: what is a little larger is not cut in two, since
            # each bucket costs several changes of thread.
            if b < 0 or sizes[b] >= (FIRST_BYTES if b == 0 else BUCKET_BYTES):
                b = open_[kind] = len(self.buckets)
                self.buckets.append([])
                self.kinds.append(kind)
                sizes.append(0)
            self.buckets[b].append(i)
            self.bucket_of[i] = b
            sizes[b] += size
        self.numels = [sum(params[i].numel() for i in b) for b in self.buckets]
        device = self.kinds[-1][1] if self.kinds else torch.device("cpu")
        if not self.kinds or self.kinds[-1][0] != torch.float32:
            self.buckets.append([])
            self.kinds.append((torch.float32, device))
            self.numels.append(0)
        self.tail = tail
        self.tail_at = self.numels[-1]
        self.numels[-1] += tail

    def __repr__(self) -> str:
        return f"<Layout {len(self.shapes)} parameters in {len(self.buckets)} buckets, tail {self.tail}>"


class GradientBuckets:
    """Is one set of flat tensors in a layout. ``views[i]``: the place of parameter i, shaped as it is."""

    def __init__(self, layout: BucketLayout, tensors: list[Tensor] | None = None) -> None:
        """Take ``tensors``: memory to use, as long as the layout says."""
        self.layout = layout
        # Written to now, so that a member's first step, for which others wait, does not wait for the kernel's pages.
        self.tensors = tensors or [
            torch.empty(n, dtype=d, device=v).zero_() for n, (d, v) in zip(layout.numels, layout.kinds, strict=True)
        ]
        views: dict[int, Tensor] = {}
        for flat, members in zip(self.tensors, layout.buckets, strict=True):
            at = 0
            for i in members:
                shape, strides = layout.shapes[i]
                views[i] = flat.as_strided(shape, strides, at)
                at += shape.numel()
        self.views = [views[i] for i in range(len(views))]
        self.tail = self.tensors[-1][layout.tail_at :]
        # The same memory: a few numbers are read and written by NumPy in a tenth of the time that torch takes.
        self._words = self.tail.numpy() if self.tail.device.type == "cpu" else None

    def read_flags(self, lo: int, hi: int) -> list[float]:
        """Return the elements ``[lo, hi)`` of the tail."""
        found: list[float] = (self.tail if self._words is None else self._words)[lo:hi].tolist()
        return found

    def say(self, values: Sequence[float]) -> None:
        """Put ``values`` at the begin of the tail."""
        if self._words is None:
            self.tail[: len(values)].copy_(torch.tensor(values))
        else:
            self._words[: len(values)] = values

    def add_(self, other: GradientBuckets) -> None:
        for mine, others in zip(self.tensors, other.tensors, strict=True):
            mine.add_(others)


Measured = tuple[int, bool] | Tensor
"""A digest; or what it will be, on the device that computes it: int64 [2]."""


def digest(flat: Tensor) -> tuple[int, bool]:
    """Return a sum over the bit pattern (any flipped bit changes it), and whether all values are finite."""
    return read_digests([measure(flat)])[0]


def measure(flat: Tensor) -> Measured:
    """Return the digest of ``flat``; of one on a device it is only begun, and ``read_digests`` waits for it."""
    if not flat.numel():
        return 0, True
    here = octets(flat)
    return measure_there(flat) if here is None else digest_of(*here)


Octets = tuple[NDArray[np.uint8], str]


def octets(flat: Tensor) -> Octets | None:
    """Return the bytes of a flat tensor and what they are, for ``digest_of``. None: native code can not read them."""
    dtype = _NATIVE.get(flat.dtype)
    return (flat.view(torch.uint8).numpy(), dtype) if dtype is not None and flat.device.type == "cpu" else None


def digest_of(data: NDArray[np.uint8], dtype: str) -> tuple[int, bool]:
    """Return the digest as ``measure`` does."""
    sums, finite = sum_bits(data, dtype)
    return sums & _DIGEST_MASK, finite


def measure_there(flat: Tensor) -> Tensor:
    """Measure as ``sum_bits`` does, by torch, where ``flat`` lies: int64 [2], the sum of its 64-bit words mod 2^64 (the
    last one filled up with zeros), and 1 where all values are finite."""
    octets = flat.view(torch.uint8)
    words = octets.numel() // 8
    total = octets[: words * 8].view(torch.int64).sum()
    rest = octets[words * 8 :].to(torch.int64)
    if rest.numel():
        total = total + (rest << torch.arange(0, 8 * rest.numel(), 8, device=flat.device)).sum()
    values = flat if flat.dtype in _NATIVE or flat.is_complex() else flat.to(torch.float32)
    return torch.stack([total, torch.isfinite(values).all().to(torch.int64)])


def read_digests(measured: Sequence[Measured]) -> list[tuple[int, bool]]:
    """Return digests in their order. What is on devices comes in one small copy from each."""
    found: dict[int, tuple[int, bool]] = {}
    there: dict[torch.device, list[int]] = {}
    for number, one in enumerate(measured):
        if isinstance(one, Tensor):
            there.setdefault(one.device, []).append(number)
        else:
            found[number] = one
    for numbers in there.values():
        rows = torch.stack([one for n in numbers if isinstance(one := measured[n], Tensor)]).tolist()
        found |= {n: (sums & _DIGEST_MASK, bool(fine)) for n, (sums, fine) in zip(numbers, rows, strict=True)}
    return [found[n] for n in range(len(measured))]


def join_digests(parts: Sequence[int]) -> int:
    """Return one 62-bit number of several."""
    total = 0
    for part in parts:
        total = (total * 0x9E3779B97F4A7C15 + part + 1) & _DIGEST_MASK
    return total


def _strides(p: Tensor) -> tuple[int, ...]:
    """Return those of the parameter where its elements lie densely (channels_last, ...), else of a contiguous one."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(p.stride(), p.shape, strict=True) if n != 1):
        if stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= size
    return p.stride()
