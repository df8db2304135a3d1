"""Carries tensors and small facts between the processes of one worker, over its own torch process group.

Shapes travel as JSON: nothing is unpickled."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from everstep.allreduce.serialize import _DTYPES
from everstep.errors import InternalError


class TensorShape(msgspec.Struct, frozen=True):
    """Says what a tensor between two parts looks like."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=_DTYPES[self.dtype]).requires_grad_(self.grad)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class PartShapes(msgspec.Struct, frozen=True):
    """Says what a part gives for given inputs; ``error``: it raised."""

    outputs: tuple[TensorShape, ...] = ()
    error: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PartShapes)


def tell_shapes(shapes: PartShapes | None, source: int) -> PartShapes:
    """Return what ``source`` says, to all processes; ``shapes``: of ``source``."""
    data = _encoder.encode(shapes) if shapes is not None else b""
    length = torch.tensor([len(data)])
    dist.broadcast(length, source)
    body = torch.empty(int(length), dtype=torch.uint8)
    if shapes is not None:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(body, source)
    try:
        return _decoder.decode(body.numpy().tobytes())
    except msgspec.MsgspecError as error:
        raise InternalError(f"a process of this worker says of its part: {error}") from None


def tell_tensor(tensor: Tensor | None, shape: TensorShape, source: int) -> Tensor:
    """Return a tensor of ``source``, to all processes."""
    here = tensor.detach().contiguous() if tensor is not None else shape.zeros().detach()
    dist.broadcast(here, source)
    return here


def tell_numbers(values: Tensor, source: int) -> Tensor:
    """Give everybody the ``values`` of ``source``, in place."""
    dist.broadcast(values, source)
    return values


def add_up(values: Tensor) -> Tensor:
    """Sum ``values`` over the processes, in place."""
    dist.all_reduce(values)
    return values


__all__: list[str] = ["PartShapes", "TensorShape", "add_up", "tell_numbers", "tell_shapes", "tell_tensor"]
