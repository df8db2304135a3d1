"""Trains models that FSDP2 has sharded over the processes of a worker (``fully_shard(..., mesh=job.device_mesh)``).

FSDP reduce-scatters gradients inside of the worker; what each process then has, its part, is summed with the same part
in the other workers, and that is what its optimizer gets. FSDP's own scaling is switched off: every process multiplies
its gradient by its samples of the step before the reduction, so uneven micro-batches count right. The leader of the
worker reduces for its followers too: their gradients lie in memory that they share with it.

A sharded parameter stays one tensor (a DTensor) to the script. Where the state is read out or compared between workers,
it is the whole one: the same state, whatever number of processes a worker has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from everstep.allreduce.dtensor import local, settle, sharded_as
from everstep.allreduce.replica_group import Unit
from everstep.allreduce.unit_reducer import UnitReducer
from everstep.errors import ScriptError
from everstep.model.group import Micro


def check_model(model: nn.Module, unit: Unit, mesh: Any) -> bool:
    """Return whether it is sharded. Raises ScriptError where it cannot be trained so."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag) and unit.size > 1:
            label = f"{name}.weight" if name else "weight"
            raise ScriptError(f"the gradient of {label!r} is sparse: build its nn.Embedding with sparse=False")
    wanted = f"for part in (*model.layers, model): fully_shard(part, mesh=job.device_mesh)  # {unit.size} processes"
    plain = ""
    found = False
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            plain = plain or name
            continue
        found = True
        if p.device_mesh != mesh:
            raise ScriptError(f"parameter {name!r} is sharded over another mesh than job.device_mesh: {wanted}")
        if p.device.type != "cpu":
            raise ScriptError(f"parameter {name!r} is on {p.device}: sharded models train on the CPU only so far")
    if (found or unit.size > 1) and plain:
        raise ScriptError(f"job.replicate: parameter {plain!r} is not sharded: {wanted}")
    return found


def refuse_replaced(models: Sequence[nn.Module], in_loop: Callable[[], bool]) -> None:
    """From now on a module of ``models`` is refused another parameter in the loop: FSDP would put its own back behind
    the next pass, and what was assigned would be gone."""
    own = {id(module) for model in models for module in model.modules()}

    def assigned(module: nn.Module, name: str, parameter: Any) -> None:
        if id(module) not in own or not in_loop():
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch.nn."):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("torch."):  # FSDP itself
            return
        raise ScriptError(
            f"{type(module).__name__}.{name} = nn.Parameter(...) in the loop: the parameter is sharded over the "
            "worker's processes, and FSDP would put its own back; write new values by copy_ under torch.no_grad()"
        )

    register_module_parameter_registration_hook(assigned)


# ---------------------------------------------------------------- gradients


def _ends_later(model: nn.Module) -> bool:
    """Return whether FSDP has yet to end the backward pass of a root in ``model``."""
    states = (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    return any(s._state_ctx.post_backward_final_callback_queued for s in states)


def _given_whole(model: nn.Module) -> Iterator[str]:
    """Parameters whose whole form, which FSDP makes for a pass, has a gradient behind that."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    made = getattr(one, "_unsharded_param", None)
                    if made is not None and made.grad is not None:
                        yield one._param_fqn or one._module_info.param_name


class _Scatter:
    """Is FSDP's reduce-scatter: of gradients times ``weight``, without dividing."""

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


class ShardedReducer(UnitReducer):
    """Reduces the part of one process of a worker. Every process reduces its part; the leader does it for all of
    them."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        models: Sequence[nn.Module],
        on_end: Callable[[], None],
        unit: Unit,
    ) -> None:
        self._models = list(models)
        self._scatter = _Scatter()
        self._aside = False  # in this backward pass: what the script carries is set aside
        self._reached: set[int] = set()  # parameters (by id) that have a gradient of this process, in this backward
        super().__init__(params, names, models, on_end, unit)
        self._empty = [p.untyped_storage() for p in self.params]
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(cast(Any, self._scatter))
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_all_reduce_hook(self._before_parts)
                    self._watch_groups(module)

    def _shapes(self) -> Sequence[Tensor]:
        return [local(p) for p in self.params]

    def _mine(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def _gradient(self, p: nn.Parameter, view: Tensor) -> Tensor:
        return sharded_as(view, cast(DTensor, p.detach()))

    # ------------------------------------------------------------ micro-batches

    def begin_micro(self, micro: Micro, last: bool) -> None:
        super().begin_micro(micro, last)
        self._aside = False
        self._reached.clear()
        if self._unit.size > 1:
            self._scatter.weight, self._scale = self._weight, 1.0

    def _before_parts(self, reduced: Tensor) -> None:
        """Run as FSDP's hook, with a gradient that it adds to ``p.grad`` next: no parameter of it runs autograd's
        hooks."""
        if self._aside or not self._open or self.dead:
            return
        self._aside = True
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self._set_aside(i, p.grad)

    def _watch_groups(self, module: Any) -> None:
        """Note what is used: a process that does not use a parameter reduces zeros for it, so that all meet."""
        if self._unit.size == 1:
            return
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if not hasattr(group, "everstep_noted"):
                group.everstep_noted = type(group).post_backward
            group.post_backward = partial(self._note_used, group)

    def _note_used(self, group: Any, *unused: Any) -> None:
        used = set()
        for one in group.fsdp_params:
            made = getattr(one, "_unsharded_param", None)
            if made is not None and (made.grad is not None or one.unsharded_accumulated_grad is not None):
                used.add(id(one.sharded_param))
        if used and self._open and not self.dead and self._ended:
            self._again()
            self._reached.clear()
        self._reached |= used
        group.reduce_scatter_unused_params = bool(used)  # (not in torch.autograd.grad, which reaches none of it)
        group.everstep_noted(group, *unused)

    def _before(self, i: int, grads: Any) -> None:
        """Autograd comes to a sharded parameter itself, and not to the whole one that FSDP makes of it."""
        if self._unit.size > 1 and self._open and not self.dead:
            raise ScriptError(
                f"the gradient of {self.names[i]!r} comes from outside of its model's forward: with "
                "--processes-per-worker it is a part of a parameter there, and each process has other samples. "
                "Use it in a method of the model that "
                "torch.distributed.fsdp.register_fsdp_forward_method(model, NAME) knows"
            )
        super()._before(i, grads)

    def _after(self, i: int, p: nn.Parameter) -> None:
        if self._unit.size == 1 or not self._open or self.dead:
            super()._after(i, p)
            return
        if self.replays:
            super()._after(i, p)
            return
        used = self._used[i] or id(p) in self._reached
        self._run_hooks(p)
        super()._after(i, p)
        self._used[i] = used

    def _run_hooks(self, p: nn.Parameter) -> None:
        """Run the script's ``p.register_hook``: FSDP hands gradients over without autograd. They see that of the
        worker."""
        share = min(1.0, self._weight * self._unit.size)
        for hook in list((p._backward_hooks or {}).values()):
            if p.grad is None or not share:
                return
            local(p.grad).div_(share)
            changed = hook(p.grad)
            if changed is not None:
                p.grad = changed
            local(p.grad).mul_(share)

    def assigned(self) -> str:
        for model in self._models if self._open and self._unit.size > 1 else ():
            for name in _given_whole(model):
                raise ScriptError(
                    f"the gradient of {name!r} was not made by backward() but assigned (torch.autograd.grad, "
                    "torch.func), to the whole parameter of one that is sharded: no optimizer would see it; with "
                    "--processes-per-worker gradients come from loss.backward()"
                )
        return super().assigned()

    def _backward_over(self) -> None:
        if any(_ends_later(model) for model in self._models):  # its gradients are reduced behind this
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
            return
        self._aside = False
        super()._backward_over()

    def close_micro(self) -> None:
        super().close_micro()
        settle(self._models)
        self._check_assigned_data()

    def _check_assigned_data(self) -> None:
        """Look for what a script assigned to ``data`` of a DTensor, which torch drops; all that is seen is another
        empty storage."""
        for name, p, storage in zip(self.names, self.params, self._empty, strict=True):
            if isinstance(p, DTensor) and p.untyped_storage()._cdata != storage._cdata:
                raise ScriptError(
                    f"p.data = ... of parameter {name!r}, which is sharded (--processes-per-worker): torch does "
                    "not change it then; write with torch.no_grad(): p.copy_(...)"
                )

    def _sum_tails(self, tails: list[Tensor]) -> None:
        """Sum what processes say beside their gradients: which parameters had one, what became of buffers."""
        mine = self._buckets.tail
        for tail in tails:
            mine.add_(tail)
        for tail in tails:
            tail.copy_(mine)

    def commit_buffers(self) -> None:
        if self._unit.size == 1:
            super().commit_buffers()
        else:
            self.buffers.commit(self._buffer_tail())
