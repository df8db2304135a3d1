"""Reduces the gradients of a worker of several processes: the leader does it for its followers too, whose gradients lie
in memory that they share with it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.gradient_buckets import BucketLayout, GradientBuckets, digest, join_digests
from everstep.allreduce.reducer import ReducedStep, Reducer
from everstep.allreduce.replica_group import Full, GradientsReduced, Unit
from everstep.allreduce.step import StepAttempt
from everstep.errors import ScriptError

_ALIGN_BYTES: Final = 64
_NO_ROUND: Final = -1  # in the place of a tail: a follower is at the end of its iteration
_DTYPES: Final = {
    str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def shared_buckets(layout: BucketLayout) -> tuple[GradientBuckets, int]:
    """Zeros that another process can map, and their memory's file descriptor."""
    numels = [(n, kind[0]) for n, kind in zip(layout.numels, layout.kinds, strict=True)]
    size = _bytes(numels)
    fd = os.memfd_create("everstep-gradients", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return GradientBuckets(layout, mapped(fd, numels)), fd


def mapped(fd: int, numels: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Return tensors in shared memory, one after the other."""
    memory = mmap.mmap(fd, _bytes(numels))
    out, at = [], 0
    for numel, dtype in numels:
        out.append(
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=at) if numel else torch.empty(0, dtype=dtype)
        )
        at += _rounded(numel * dtype.itemsize)
    return out


def _bytes(numels: Sequence[tuple[int, torch.dtype]]) -> int:
    return max(_ALIGN_BYTES, sum(_rounded(n * d.itemsize) for n, d in numels))


def _rounded(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


class UnitReducer(Reducer):
    """Is a ``Reducer`` of one process of a worker. Every process collects its gradients; the leader reduces them."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        models: Sequence[nn.Module],
        on_end: Callable[[], None],
        unit: Unit,
    ) -> None:
        self._unit = unit
        self._fd = -1  # of memory that the leader does not know yet
        self._followers: list[list[Tensor]] = [[] for _ in unit.followers]
        super().__init__(params, names, models, 0, on_end)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new_buckets(self) -> GradientBuckets:
        if self._unit.leads:
            return GradientBuckets(self._layout)
        if self._fd >= 0:
            os.close(self._fd)
        buckets, self._fd = shared_buckets(self._layout)
        return buckets

    # ------------------------------------------------------------ what differs between ways to divide a model

    def _sum_tails(self, tails: list[Tensor]) -> None:
        """Of the leader: ``tails`` are what its followers say beside their gradients."""

    # ------------------------------------------------------------ reducing

    def _launch(self) -> None:
        if self._unit.leads:
            super()._launch()

    def finish(self, meanwhile: Callable[[], None] | None = None) -> ReducedStep | None:
        if self._unit.size == 1:
            return super().finish(meanwhile)
        if meanwhile is not None:
            meanwhile()
        return self._finish_all() if self._unit.leads else self._finish_mine()

    def _finish_mine(self) -> ReducedStep | None:
        self._ended = True
        self._active = [True] * len(self._active)
        self._zero_untouched()
        self._fill_tail()
        fresh: tuple[tuple[int, str], ...] = ()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            kinds = self._layout.kinds
            numels = self._layout.numels
            fresh = tuple((n, str(k[0]).removeprefix("torch.")) for n, k in zip(numels, kinds, strict=True))
        self._unit.answer(Full(self._layout.tail, fresh), fd if fd >= 0 else None)
        if fd >= 0:
            os.close(fd)
        reduced = self._unit.hear(GradientsReduced)
        if not reduced.ok:
            self._broken = CollectiveError("the group of this worker is broken")
            return None
        if not self.rounds:
            self._check_flags()
        return ReducedStep(0, reduced.finite)

    def _tell_round(self, step: StepAttempt, word: int, touched: list[bool]) -> list[list[bool]] | None:
        """All of a further round is reduced: the leader does not know what its followers have touched."""
        return super()._tell_round(step, word, [True] * len(touched))

    def end_rounds(self, step: StepAttempt, left: bool = False) -> bool:
        if self._unit.size == 1:
            return super().end_rounds(step, left)
        if not self._unit.leads:
            self._unit.answer(Full(_NO_ROUND))
            return self._unit.hear(GradientsReduced).ok
        for follower in self._unit.followers:
            self._check_round(self._unit.hear_full(follower)[0], False)
        ok = super().end_rounds(step, left)
        self._unit.tell_all(GradientsReduced(ok, True))
        return ok

    def _check_round(self, full: Full, round_: bool) -> None:
        assert self._step is not None
        if (full.tail != _NO_ROUND) is not round_:
            raise ScriptError(
                f"step {self._step.number}: the processes of this worker did not call backward() equally often in one "
                "iteration: what decides it must be the same in all of them, e.g. job.step"
            )

    def _finish_all(self) -> ReducedStep | None:
        step = self._step
        assert step is not None
        mine = super().finish()
        found = [mine] if mine is not None else []
        tails: list[int] = []
        for follower in self._unit.followers:  # all are heard, also where the group is broken already
            full, fd = self._unit.hear_full(follower)
            self._check_round(full, True)
            tails.append(full.tail)
            if fd is not None:
                self._followers[follower - 1] = mapped(fd, [(n, _DTYPES[d]) for n, d in full.tensors])
                os.close(fd)
            if len(found) == follower and (reduced := self._reduce(step, self._followers[follower - 1])) is not None:
                found.append(reduced)
        ok = len(found) == self._unit.size
        finite = ok and all(f.finite for f in found)
        if ok:
            lasts = zip((tensors[-1] for tensors in self._followers), tails, strict=True)
            self._sum_tails([last[last.numel() - tail :] for last, tail in lasts])
        self._unit.tell_all(GradientsReduced(ok, finite))
        return ReducedStep(join_digests([f.digest for f in found]), finite) if ok else None

    def _reduce(self, step: StepAttempt, tensors: list[Tensor]) -> ReducedStep | None:
        """Reduce a follower's gradients, over the group. None: it broke."""
        digests, finite = [], True
        with self._tried():
            if step.size > 1:
                works = [step.collective.allreduce(flat) for flat in tensors]
                for work in works:
                    work.wait()
        if self._broken is not None:
            return None
        for flat in tensors:
            sums, fine = digest(flat)
            digests.append(sums)
            finite = finite and fine
        return ReducedStep(join_digests(digests), finite)

    def first_nonfinite(self) -> str:
        return super().first_nonfinite() or "(part of another process)"


__all__ = ["UnitReducer", "mapped", "shared_buckets"]
