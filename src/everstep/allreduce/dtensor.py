"""Converts between a DTensor, its local shard and the full tensor. Plain tensors are returned unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """Return what this process has of it; shares its memory."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of it. Of a sharded one every process that has a part must come here."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def gathered(value: Any) -> Any:
    """Return nested dicts and lists with whole tensors; every process must come here."""
    if isinstance(value, dict):
        return {k: gathered(v) for k, v in value.items()}
    if isinstance(value, list):
        return [gathered(v) for v in value]
    return whole(value) if isinstance(value, Tensor) else value


def part_of(full: Tensor, like: DTensor) -> Tensor:
    """Return what this process has of ``full``, where it is sharded as ``like`` is: a view."""
    shape, offset = compute_local_shape_and_global_offset(full.shape, like.device_mesh, like.placements)
    return full[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))]


def sharded_as(mine: Tensor, like: DTensor) -> DTensor:
    """Return the DTensor of which this process has ``mine``."""
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill(tensor: Tensor, full: Tensor) -> None:
    """Copy as ``tensor.copy_(full)`` does, of a sharded one its part."""
    if isinstance(tensor, DTensor):
        local(tensor).copy_(part_of(full, tensor))
    else:
        tensor.copy_(full)


def as_owner(full: Tensor, owner: Tensor) -> Tensor:
    """Return a tensor as large as ``owner`` (its gradient, what its optimizer keeps), sharded as that is."""
    if isinstance(owner, DTensor) and not isinstance(full, DTensor) and full.shape == owner.shape:
        return sharded_as(part_of(full, owner).contiguous().clone(), owner)
    return full


def settle(models: Sequence[nn.Module]) -> None:
    """After a forward pass without backward the whole parameters may still be there: only parts are trained."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
