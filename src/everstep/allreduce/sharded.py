"""Models that FSDP2 has sharded over the processes of a worker (``fully_shard(..., mesh=job.shard_mesh)``).

FSDP reduce-scatters gradients inside of the worker; what each process then has, its part, is summed with the same part
in the other workers, and that is what its optimizer gets. FSDP's own scaling is switched off: every process multiplies
its gradient by its samples of the step before the reduction, so uneven micro-batches count right. The leader of the
worker reduces for its mates too: their gradients lie in memory that they share with it.

A sharded parameter stays one tensor (a DTensor) to the script. Where the state is read out or compared between workers,
it is the whole one: the same state, whatever number of processes a worker has.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.flats import Flats, Layout, digest, join_digests
from everstep.allreduce.parts import local, settle, sharded_as
from everstep.allreduce.reducer import Reduced as ReducedHere
from everstep.allreduce.reducer import Reducer
from everstep.allreduce.step import Step
from everstep.allreduce.units import Full, Reduced, Unit
from everstep.errors import ScriptError
from everstep.model.group import Micro

_ALIGN_BYTES: Final = 64
_DTYPES: Final = {
    str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def check_model(model: nn.Module, unit: Unit, mesh: Any) -> bool:
    """Whether it is sharded. Raises ScriptError where it cannot be trained so."""
    wanted = f"for part in (*model.layers, model): fully_shard(part, mesh=job.shard_mesh)  # {unit.size} processes"
    plain = ""
    found = False
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            plain = plain or name
            continue
        found = True
        if p.device_mesh != mesh:
            raise ScriptError(f"parameter {name!r} is sharded over another mesh than job.shard_mesh: {wanted}")
        if p.device.type != "cpu":
            raise ScriptError(f"parameter {name!r} is on {p.device}: sharded models train on the CPU only so far")
    if (found or unit.size > 1) and plain:
        raise ScriptError(f"job.replicate: parameter {plain!r} is not sharded: {wanted}")
    return found


# ---------------------------------------------------------------- memory of a mate


def shared_flats(layout: Layout) -> tuple[Flats, int]:
    """Zeros that another process can map, and their memory's file descriptor."""
    numels = [(n, kind[0]) for n, kind in zip(layout.numels, layout.kinds, strict=True)]
    size = _bytes(numels)
    fd = os.memfd_create("everstep-gradients", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return Flats(layout, mapped(fd, numels)), fd


def mapped(fd: int, numels: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Tensors in shared memory, one after the other."""
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


# ---------------------------------------------------------------- gradients


class _Scatter:
    """FSDP's reduce-scatter: of gradients times ``weight``, without dividing."""

    def __init__(self) -> None:
        self.weight = 1.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if self.weight:
            input_tensor.mul_(self.weight)
        else:
            input_tensor.zero_()  # (what is not finite, too)
        work: dist.Work | None = dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=dist.ReduceOp.SUM, async_op=async_op
        )
        return work


class ShardedReducer(Reducer):
    """Of one process of a worker. Every process reduces its part; the leader does it for all of them."""

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
        self._models = list(models)
        self._scatter = _Scatter()
        self._mates: list[list[Tensor]] = [[] for _ in unit.mates]
        self._aside = False  # in this backward pass: what the script carries is set aside
        super().__init__(params, names, models, 0, on_end)
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(cast(Any, self._scatter))
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_all_reduce_hook(self._before_parts)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _shapes(self) -> Sequence[Tensor]:
        return [local(p) for p in self.params]

    def _new_flats(self) -> Flats:
        if self._unit.leads:
            return Flats(self._layout)
        if self._fd >= 0:
            os.close(self._fd)
        flats, self._fd = shared_flats(self._layout)
        return flats

    def _mine(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def _gradient(self, p: nn.Parameter, view: Tensor) -> Tensor:
        return sharded_as(view, cast(DTensor, p.detach()))

    # ------------------------------------------------------------ micro-batches

    def begin_micro(self, micro: Micro, last: bool) -> None:
        super().begin_micro(micro, last)
        self._aside = False
        if self._unit.size > 1:
            self._scatter.weight, self._scale = self._weight, 1.0

    def _before_parts(self, reduced: Tensor) -> None:
        """FSDP's hook, with a gradient that it adds to ``p.grad`` next: no parameter of it runs autograd's hooks."""
        if self._aside or not self._open:
            return
        self._aside = True
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self._set_aside(i, p.grad)

    def _backward_over(self) -> None:
        self._aside = False
        super()._backward_over()

    def close_micro(self) -> None:
        super().close_micro()
        settle(self._models)

    # ------------------------------------------------------------ reducing

    def _launch(self) -> None:
        if self._unit.leads:
            super()._launch()

    def finish(self, meanwhile: Callable[[], None] | None = None) -> ReducedHere | None:
        if self._unit.size == 1:
            return super().finish(meanwhile)
        if meanwhile is not None:
            meanwhile()
        return self._finish_all() if self._unit.leads else self._finish_mine()

    def _finish_mine(self) -> ReducedHere | None:
        self._ended = True
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
        said = self._unit.hear(Reduced)
        if not said.ok:
            self._broken = CollectiveError("the group of this worker is broken")
            return None
        self._check_flags()
        return ReducedHere(0, said.finite)

    def _finish_all(self) -> ReducedHere | None:
        step = self._step
        assert step is not None
        mine = super().finish()
        found = [mine] if mine is not None else []
        for mate in self._unit.mates:  # all are heard, also where the group is broken already
            full, fd = self._unit.hear_full(mate)
            if fd is not None:
                self._mates[mate - 1] = mapped(fd, [(n, _DTYPES[d]) for n, d in full.flats])
                os.close(fd)
            if len(found) == mate and (reduced := self._reduce(step, self._mates[mate - 1])) is not None:
                found.append(reduced)
        ok = len(found) == self._unit.size
        finite = ok and all(f.finite for f in found)
        if ok:
            self._sum_tails()
        self._unit.tell_all(Reduced(ok, finite))
        return ReducedHere(join_digests([f.digest for f in found]), finite) if ok else None

    def _reduce(self, step: Step, flats: list[Tensor]) -> ReducedHere | None:
        """A mate's gradients, over the group. None: it broke."""
        digests, finite = [], True
        with self._tried():
            if step.size > 1:
                works = [step.collective.allreduce(flat) for flat in flats]
                for work in works:
                    work.wait()
        if self._broken is not None:
            return None
        for flat in flats:
            sums, fine = digest(flat)
            digests.append(sums)
            finite = finite and fine
        return ReducedHere(join_digests(digests), finite)

    def _sum_tails(self) -> None:
        """What processes say beside their gradients is one sum: which parameters had one, what became of buffers."""
        mine = self._flats.tail
        tails = [flats[-1][flats[-1].numel() - mine.numel() :] for flats in self._mates]
        for tail in tails:
            mine.add_(tail)
        for tail in tails:
            tail.copy_(mine)

    def first_nonfinite(self) -> str:
        return super().first_nonfinite() or "(part of another process)"

    def commit_buffers(self) -> None:
        if self._unit.size == 1:
            super().commit_buffers()
        else:
            self.buffers.commit(self._buffer_tail())
