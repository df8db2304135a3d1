"""What a script may do with the gradients of one stage: element by element; nothing that is meant of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everstep.errors import ScriptError
from everstep.pipeline.guard import StageGradient, guard, plain, unguard


@pytest.fixture
def net() -> nn.Module:
    net = nn.Linear(3, 2)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    guard(net.parameters())
    return net


@pytest.mark.parametrize(
    "compute",
    [
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True),
        lambda net: nn.utils.get_total_norm([p.grad for p in net.parameters()]),
        lambda net: sum(p.grad.pow(2).sum() for p in net.parameters()),
        lambda net: net.weight.grad.norm(),
        lambda net: torch.stack([p.grad.max() for p in net.parameters()]),
        lambda net: nn.utils.parameters_to_vector([p.grad for p in net.parameters()]),
        lambda net: float(net.bias.grad[0]),
        lambda net: net.weight.grad.numpy(),
        lambda net: torch.cat([p.grad.flatten() for p in net.parameters()]),
        lambda net: bool((net.weight.grad * 2).isnan().any()),
    ],
)
def test_norms_and_sums_are_refused(net: Any, compute: Any) -> None:
    with pytest.raises(ScriptError, match=r"job\.clip_grad_norm_"):
        compute(net)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.5),
        lambda net: net.weight.grad.mul_(0.5),
        lambda net: torch._foreach_mul_([p.grad for p in net.parameters()], 0.5),
        lambda net: net.weight.grad.clamp_(-0.5, 0.5),
        lambda net: setattr(net.weight, "grad", net.weight.grad * 0.5),
        lambda net: net.weight.grad.copy_(net.weight.grad / 2),
        lambda net: net.weight.grad.sub_(0.5 * torch.ones(2, 3)),
    ],
)
def test_what_is_done_element_by_element_is_the_scripts(net: Any, change: Any) -> None:
    change(net)
    unguard(net.parameters())
    assert type(net.weight.grad) is torch.Tensor
    assert net.weight.grad.tolist() == [[0.5] * 3] * 2


def test_zeroed_printed_and_stepped(net: Any) -> None:
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    assert net.weight.grad.shape == (2, 3) and net.weight.grad.dtype == torch.float32
    before = net.weight.detach().clone()
    opt.zero_grad(set_to_none=False)
    assert isinstance(net.weight.grad, StageGradient) and not plain(net.weight.grad).any()
    unguard(net.parameters())
    opt.step()
    assert torch.equal(net.weight, before)
    opt.zero_grad()
    assert net.weight.grad is None
