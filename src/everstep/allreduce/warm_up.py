"""What a process does for the first time is done before it enters a group: there the others would wait for it.

A first backward pass starts threads and loads kernels, which costs more than a step of a small model. The script's own
model is not touched: its hooks, buffers and random numbers are none of our business before its first batch.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import functional


def warm_up(like: Tensor) -> None:
    """One tiny forward and backward pass, with the type and on the device of ``like``. Draws no random numbers."""
    with contextlib.suppress(RuntimeError), torch.enable_grad():  # a type without some of these: then it is not warm
        weight = torch.ones(4, 4, dtype=like.dtype, device=like.device, requires_grad=True)
        bias = torch.ones(4, dtype=like.dtype, device=like.device, requires_grad=True)
        rows = torch.ones(2, 4, dtype=like.dtype, device=like.device)
        labels = torch.zeros(2, dtype=torch.int64, device=like.device)
        hidden = functional.relu(functional.linear(rows, weight, bias))
        torch.autograd.grad(functional.cross_entropy(hidden, labels), [weight, bias])
