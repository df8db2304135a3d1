"""Is what a script has of a model in stages: ``model.step`` trains a batch, ``model(x)`` computes outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from everstep.errors import ScriptError
from everstep.model.stage_spans import SpanKind
from everstep.pipeline.links import tell_numbers
from everstep.pipeline.microbatches import BatchCut, samples_of
from everstep.pipeline.parts import ModelParts
from everstep.pipeline.spans import SpanRecorder
from everstep.pipeline.stages import (
    LossFunction,
    PartModule,
    StageRunner,
    WholeRunner,
    check_loss,
    first_rows,
    microbatch_loss,
    own_stream,
)

_LOOKS: Final = 2  # batches in which the loss of microbatches is compared with that of the batch
_CLOSE: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
_CLOSE_HALF: Final = 3e-2


class Passes(Protocol):
    """Is what the engine does round the passes of a batch."""

    def begin_passes(self) -> None: ...

    def stop_passes(self) -> None: ...

    def end_passes(self) -> None: ...


class StagedModel(nn.Module):
    """Is a model in stages; made by ``job.pipeline``. Its parameters, buffers and modules are those of this process's
    stage, by their names in the whole model."""

    def __init__(
        self,
        parts: ModelParts,
        runner: StageRunner | WholeRunner,
        microbatches: int,
        loss_fn: LossFunction,
        passes: Passes,
    ) -> None:
        super().__init__()
        for children in parts.children:
            for _, name, module in children:
                self.add_module(name, module)
        self._runner: Any = (runner,)  # (not a module of this one)
        self._microbatches, self._loss_fn, self._passes = microbatches, loss_fn, passes
        self._looks = 0
        self._outputs: list[tuple[int, Any]] = []  # of microbatches that are compared with their batch
        self.on_batch: Callable[[SpanRecorder, int], None] | None = None

    def __repr__(self) -> str:
        return f"<StagedModel {self.runner!r}, {self._microbatches} microbatches>"

    @property
    def runner(self) -> Any:
        return self._runner[0]

    def step(self, *inputs: Tensor, target: Any = None) -> Tensor:
        """Run a batch forward and backward, in microbatches, as the schedule says. Returns its mean loss, the same in
        all processes of the worker. In an iteration of ``job.steps``, once. Raises ScriptError."""
        samples = samples_of(inputs, target)
        cut = BatchCut.of(samples, self._microbatches)
        filled = tuple(cut.filled(value) for value in inputs)
        draw = int(torch.randint(2**62, ()))
        self._passes.begin_passes()
        runner = self.runner
        runner.recorder.begin()
        self._outputs.clear()
        try:
            with torch.enable_grad(), own_stream(list(runner.parts.values()), draw):
                loss = runner.train(filled, lambda output, number: self._loss(output, target, cut, number))
                if loss is not None and self._looks < _LOOKS:
                    self._compare(target, float(loss))
        finally:
            self._passes.stop_passes()
            self._outputs.clear()
        self._looks += 1
        if isinstance(runner, StageRunner):
            dtype = torch.float64
            mine = loss.to(dtype) if loss is not None else torch.zeros((), dtype=dtype)
            with runner.recorder.measure(SpanKind.WAIT):
                loss = tell_numbers(mine, runner.last).to(torch.get_default_dtype())
        assert isinstance(loss, Tensor)
        with runner.recorder.measure(SpanKind.REDUCE):
            self._passes.end_passes()
        if self.on_batch is not None:
            self.on_batch(runner.recorder, samples)
        return loss

    def forward(self, *inputs: Tensor) -> Any:
        """Return the model's output for a batch, in every process: to evaluate (all processes of the worker have to
        come here). Raises ScriptError where gradients would be needed."""
        if torch.is_grad_enabled():
            raise ScriptError(
                "model(x) of a pipeline with gradients: train by loss = model.step(x, target=y), and evaluate under "
                "job.eval() or torch.no_grad()"
            )
        return self.runner.forward(inputs)

    # ------------------------------------------------------------ the loss

    def _loss(self, output: Any, target: Any, cut: BatchCut, number: int) -> Tensor:
        if self._looks < _LOOKS and cut.counts[number]:
            output_here = _detached(first_rows(output, cut.counts[number]))
            if number == 0 and isinstance(self.runner, StageRunner):
                self._check_reach(output_here, cut.target(target, number))
            if self._microbatches > 1:
                self._outputs.append((number, output_here))
        return microbatch_loss(self._loss_fn, output, target, cut, number)

    def _check_reach(self, output: Any, target: Any) -> None:
        """Raises ScriptError where the loss goes by more than the model's output: parameters, which other stages have
        of their own."""
        leaves = [one.requires_grad_() for one in _tensors(output) if one.is_floating_point()]
        loss = self._loss_fn(output, target)
        check_loss(loss)
        names = {id(p): name for name, p in self.named_parameters()}
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node: Any = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and not any(variable is leaf for leaf in leaves):
                name = names.get(id(variable), f"a tensor of shape {list(variable.shape)}")
                raise ScriptError(
                    f"loss_fn of job.pipeline depends on {name!r} beside the model's output: it is called where "
                    "the last stage is, and knows nothing of the others; for a penalty of weights see weight_decay"
                )
            todo += [following for following, _ in node.next_functions]

    def _compare(self, target: Any, loss: float) -> None:
        """Raises ScriptError where the mean of the microbatches' losses is not the loss of the batch."""
        if len(self._outputs) < 2:
            return
        outputs = [output for _, output in sorted(self._outputs, key=lambda one: one[0])]
        joined = _joined(outputs)
        with torch.no_grad():
            whole = float(self._loss_fn(joined, target))
        dtype = next((one.dtype for one in _tensors(joined) if one.is_floating_point()), torch.float32)
        if not abs(whole - loss) <= _CLOSE.get(dtype, _CLOSE_HALF) * max(abs(whole), abs(loss), 1e-3):
            raise ScriptError(
                f"loss_fn of job.pipeline gives {whole:.6g} for a batch, and the mean over its {len(outputs)} "
                f"microbatches is {loss:.6g}: it has to be a mean over the samples (not a sum, nor a mean that leaves "
                "out or weighs samples, nor one that compares samples with each other)"
            )


def _detached(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_detached(one) for one in output)
    return output.detach()


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for one in output for leaf in _tensors(one)] if isinstance(output, tuple) else [output]


def _joined(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(ones)) for ones in zip(*outputs, strict=True))
    return torch.cat([one.detach() for one in outputs])


def parts_of(model: ModelParts) -> dict[int, PartModule]:
    """Return the parts of this process, by number."""
    return {number: PartModule(children) for number, children in enumerate(model.children) if children}
