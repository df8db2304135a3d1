"""Runs the parts of a model that a process has: as stages of torch's schedule, and one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from everstep.data.random_streams import range_seed
from everstep.errors import ScriptError
from everstep.model.stage_spans import SpanKind
from everstep.pipeline.known_schedules import build_schedule
from everstep.pipeline.links import PartShapes, TensorShape, tell_shapes, tell_tensor
from everstep.pipeline.microbatches import BatchCut
from everstep.pipeline.parts import Child
from everstep.pipeline.spans import SpanRecorder, watched

_KEPT: Final = 8  # schedules for so many sizes of microbatches; each has its own buffers
LossFunction = Callable[[Any, Any], Tensor]


class PartModule(nn.Module):
    """Is one part. What its modules draw (dropout) depends on the batch, the module and the microbatch, and not on
    where and when it is computed."""

    def __init__(self, children: Sequence[Child]) -> None:
        super().__init__()
        self._numbers = [number for number, _, _ in children]
        self._parts = [module for _, _, module in children]
        for _, name, module in children:
            self.add_module(name, module)
        self.draw, self.chunk = -1, -1  # seed of the batch, and microbatch; below 0: as torch's stream goes

    def forward(self, *inputs: Any) -> Any:
        values: Any = inputs
        for number, module in zip(self._numbers, self._parts, strict=True):
            if self.draw >= 0:
                torch.default_generator.manual_seed(range_seed(self.draw, number, self.chunk))
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values


class TimedStage(pipelining.PipelineStage):
    """Is torch's stage, with its spans measured."""

    recorder: SpanRecorder
    part: PartModule

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.part.chunk = fwd_chunk_id
        with self.recorder.measure(SpanKind.FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.measure(SpanKind.BACKWARD, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.measure(SpanKind.WEIGHT, self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


@contextmanager
def own_stream(parts: Sequence[PartModule], draw: int) -> Iterator[None]:
    """Let modules draw as ``PartModule`` says; behind it torch's stream is where it was."""
    state = torch.default_generator.get_state()
    for part in parts:
        part.draw = draw
    try:
        yield
    finally:
        for part in parts:
            part.draw = part.chunk = -1
        torch.default_generator.set_state(state)


def microbatch_loss(loss_fn: LossFunction, output: Any, target: Any, cut: BatchCut, number: int) -> Tensor:
    """Return what microbatch ``number`` adds to the loss of the batch. Raises ScriptError."""
    count = cut.counts[number]
    if not count:  # only filled up: nothing of it counts
        first = output[0] if isinstance(output, tuple) else output
        nothing: Tensor = first.sum() * 0.0
        return nothing
    loss = loss_fn(first_rows(output, count), cut.target(target, number))
    check_loss(loss)
    return loss if cut.weight(number) == 1.0 else loss * cut.weight(number)


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ScriptError(f"loss_fn of job.pipeline returned {what}: return one number, the mean over the samples")
    if not loss.requires_grad:
        raise ScriptError("loss_fn of job.pipeline returned a loss that does not depend on the model's output")


def first_rows(output: Any, count: int) -> Any:
    if isinstance(output, tuple):
        return tuple(first_rows(one, count) for one in output)
    return output[:count] if len(output) != count else output


class StageRunner:
    """Runs a batch on the processes of this worker. ``parts``: by number, those of this process. Every process calls
    the same methods in the same order."""

    def __init__(
        self, parts: dict[int, PartModule], homes: list[int], own: int, schedule: Any, microbatches: int
    ) -> None:
        self.parts, self.homes, self.own = parts, homes, own
        self._schedule, self._microbatches = schedule, microbatches
        self.recorder = SpanRecorder()
        self._built: dict[tuple[Any, ...], Any] = {}
        self._loss: Callable[[Any, Tensor], Tensor] = _no_loss

    def __repr__(self) -> str:
        return f"<StageRunner process {self.own}, parts {sorted(self.parts)} of {len(self.homes)}>"

    @property
    def last(self) -> int:
        """Return the process that has the last part."""
        return self.homes[-1]

    def train(self, inputs: tuple[Tensor, ...], loss: Callable[[Any, int], Tensor]) -> Tensor | None:
        """Run all microbatches of ``inputs`` forward and backward. Returns the loss, where the last part is."""
        step = self._prepared(inputs)
        self._loss = lambda output, number: loss(output, int(number))
        losses: list[Tensor] = []
        try:
            with watched(self.recorder):
                step(
                    *(inputs if self.homes[0] == self.own else ()),
                    target=torch.arange(self._microbatches),
                    losses=losses,
                    return_outputs=False,
                )
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):  # what a module raised, in torch's words about it
                raise error.__cause__ from None
            raise
        finally:
            self._loss = _no_loss
        return torch.stack([one.detach() for one in losses]).sum() if losses else None

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """Return the model's output, in every process: one part after the other."""
        values: Any = inputs
        for number, home in enumerate(self.homes):
            shapes: PartShapes | None = None
            if home == self.own:
                values = _tuple(self.parts[number](*_tuple(values)))
                shapes = PartShapes(tuple(TensorShape.of(value) for value in values))
            shapes = tell_shapes(shapes, home)
            values = tuple(
                tell_tensor(values[at] if home == self.own else None, shape, home)
                for at, shape in enumerate(shapes.outputs)
            )
        return values[0] if len(values) == 1 else values

    # ------------------------------------------------------------ shapes

    def _prepared(self, inputs: tuple[Tensor, ...]) -> Any:
        key = tuple((tuple(value.shape), value.dtype) for value in inputs)
        found = self._built.get(key)
        if found is None:
            if len(self._built) >= _KEPT:
                self._built.pop(next(iter(self._built)))
            found = self._built[key] = self._build(inputs)
        return found

    def _build(self, inputs: tuple[Tensor, ...]) -> Any:
        first = tuple(value[: len(value) // self._microbatches].detach() for value in inputs)
        given: tuple[Tensor, ...] = first
        stages = []
        for number, home in enumerate(self.homes):
            output = self._try(number, given) if home == self.own else None
            shapes = tell_shapes(output, home)
            if shapes.error:
                got = ", ".join(str(TensorShape.of(value)) for value in given)
                before = f"part {number - 1} gives it {got}" if number else f"its input is {got}"
                raise ScriptError(f"job.pipeline: part {number} (stage {home}) cannot be run, {before}: {shapes.error}")
            made = tuple(shape.zeros() for shape in shapes.outputs)
            if home == self.own:
                stages.append(self._stage(number, given, made))
            given = made
        return build_schedule(self._schedule, stages, self._microbatches, lambda out, at: self._loss(out, at)).step

    def _stage(self, number: int, given: tuple[Tensor, ...], made: tuple[Tensor, ...]) -> TimedStage:
        part = self.parts[number]
        stage = TimedStage(part, number, len(self.homes), torch.device("cpu"), input_args=given, output_args=made)
        stage.part, stage.recorder = part, self.recorder
        return stage

    def _try(self, number: int, given: tuple[Tensor, ...]) -> PartShapes:
        """Return what a part gives: it is run once, and nothing of that stays."""
        part = self.parts[number]
        buffers = [(buffer, buffer.clone()) for buffer in part.buffers()]
        state = torch.default_generator.get_state()
        try:
            with torch.enable_grad():
                outputs = _tuple(part(*(value.detach().requires_grad_(value.requires_grad) for value in given)))
        except Exception as error:
            return PartShapes(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        finally:
            torch.default_generator.set_state(state)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        for output in outputs:
            if not isinstance(output, Tensor):
                return PartShapes(error=f"it returns a {type(output).__name__}, and parts give each other tensors")
            if number == len(self.homes) - 1 and (not output.dim() or len(output) != len(given[0])):
                return PartShapes(error=f"its output {TensorShape.of(output)} has not one row for each sample")
        return PartShapes(tuple(TensorShape.of(output) for output in outputs))


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _no_loss(output: Any, number: Tensor) -> Tensor:
    raise ScriptError("a pipeline's schedule runs by model.step() only")


class WholeRunner:
    """Runs all parts in this process, microbatch by microbatch: the same numbers."""

    def __init__(self, parts: dict[int, PartModule], microbatches: int) -> None:
        self.parts = parts
        self._microbatches = microbatches
        self.recorder = SpanRecorder()
        self.homes, self.own, self.last = [0] * len(parts), 0, 0

    def train(self, inputs: tuple[Tensor, ...], loss: Callable[[Any, int], Tensor]) -> Tensor | None:
        size = len(inputs[0]) // self._microbatches
        losses = []
        for number in range(self._microbatches):
            for part in self.parts.values():
                part.chunk = number
            with self.recorder.measure(SpanKind.FORWARD, 0, number):
                output = self.forward(tuple(value[number * size : (number + 1) * size] for value in inputs))
                mine = loss(output, number)
            with self.recorder.measure(SpanKind.BACKWARD, 0, number):
                mine.backward()  # type: ignore[no-untyped-call]
            losses.append(mine.detach())
        return torch.stack(losses).sum()

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        values: Any = inputs
        for number in sorted(self.parts):
            values = self.parts[number](*_tuple(values))
        return values
