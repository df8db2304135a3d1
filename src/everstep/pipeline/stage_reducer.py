"""Collects the gradients of a stage in an iteration of several microbatches, and reduces them over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everstep.allreduce.replica_group import Unit
from everstep.allreduce.unit_reducer import UnitReducer
from everstep.errors import ScriptError
from everstep.model.group import Micro
from everstep.pipeline.guard import guard, guarded, plain, unguard


class StageReducer(UnitReducer):
    """Reduces the gradients of one stage. While a schedule runs they are torch's own: what zero-bubble schedules do is
    not seen by hooks. ``end_passes`` takes them all."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        models: Sequence[nn.Module],
        on_end: Callable[[], None],
        unit: Unit,
    ) -> None:
        self._passing = False
        self._guards = unit.size > 1
        super().__init__(params, names, models, on_end, unit)

    def _mine(self, tensor: Tensor) -> Tensor:
        return plain(tensor)

    def _gradient(self, p: nn.Parameter, view: Tensor) -> Tensor:
        return guarded(view) if self._guards else view

    # ------------------------------------------------------------ the passes of model.step

    def begin_passes(self) -> None:
        """``model.step`` begins. Raises ScriptError: it did so in this iteration before."""
        if self._ended or self.rounds:
            raise ScriptError(
                "model.step() twice in one iteration of job.steps(): a pipeline runs each batch once; more batches for "
                "one optimizer step are a larger batch_size"
            )
        self._set_unseen_aside()
        self._passing = True

    def stop_passes(self) -> None:
        """Note that ``model.step`` raised."""
        self._passing = False

    def end_passes(self) -> None:
        """Take what the schedule has left in ``p.grad``; the step's reduction and vote follow."""
        self._passing = False
        if self.clock is not None:
            self.clock.first_gradient()
        for i, p in enumerate(self.params):
            grad = p.grad
            if grad is None:
                continue
            p.grad = None
            if grad.layout != torch.strided:
                raise ScriptError(
                    f"the gradient of {self.names[i]!r} is sparse: build its nn.Embedding with sparse=False"
                )
            self._add(i, grad)
            self._seen[i] = True
            if not self._last:
                p.grad = self._gradient(p, grad)  # ``hide`` makes it zeros
        self._backward_over()

    # ------------------------------------------------------------ autograd, and the script's own gradients

    def _before(self, i: int, grads: Any) -> None:
        if not self._passing:
            self._refuse(i)

    def _after(self, i: int, p: nn.Parameter) -> None:
        if not self._passing:
            self._refuse(i)

    def _refuse(self, i: int) -> None:
        if self._open and not self.dead:
            raise ScriptError(
                f"backward() outside of model.step() reached {self.names[i]!r}: in mode pipeline the schedule runs "
                "backward; what adds to the loss belongs into loss_fn of job.pipeline"
            )

    def take_assigned(self) -> None:
        raise ScriptError("job.reduce_gradients() in mode pipeline: gradients come from model.step() only")

    def begin_micro(self, micro: Micro, last: bool) -> None:
        super().begin_micro(micro, last)
        if self._guards:
            guard(self.params)

    def close_micro(self) -> None:
        super().close_micro()
        unguard(self.params)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor``, in place."""
        held = [plain(p.grad) for p in self.params if p.grad is not None]
        if held:
            torch._foreach_mul_(held, factor)

    def norms(self, names: Sequence[str], norm_type: float) -> Tensor:
        """Return float64 [2, len(names)]: the norm of the gradient of each of the model's parameters, and 1 where it
        has one; zeros for those of other stages."""
        out = torch.zeros(2, len(names), dtype=torch.float64)
        places = {name: at for at, name in enumerate(names)}
        for name, p in zip(self.names, self.params, strict=True):
            if p.grad is not None:
                at = places[name]
                out[0, at] = torch.linalg.vector_norm(plain(p.grad), norm_type)
                out[1, at] = 1.0
        return out
