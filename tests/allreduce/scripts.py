"""Scripts, models and data of the tests of the training step."""

from __future__ import annotations

from typing import Any

import torch
from groups import ListLoader, Member
from torch import nn

torch.set_num_threads(1)  # members are forked: a pool of threads would not come along

State = dict[str, torch.Tensor]


def data(n: int = 48, features: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(n, features, generator=generator)
    return {"x": x, "y": (x.sum(1, keepdim=True) > 0).float()}


def net(norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(6, 16)]
    if norm:
        layers.append(nn.BatchNorm1d(16))
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def values(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain(batch: int, epochs: int = 2, n: int = 48, norm: bool = False) -> State:
    """One process, plain PyTorch, batches of ``batch``."""
    model, samples = net(norm), data(n)
    opt = adam(model)
    for _ in range(epochs):
        for lo in range(0, n, batch):
            opt.zero_grad()
            loss_of(model, {k: v[lo : lo + batch] for k, v in samples.items()}).backward()
            opt.step()
    return values(model)


def trained(member: Member, batch: int = 8, epochs: int = 2, n: int = 48, norm: bool = False) -> State:
    """The same in a group."""
    model = member.replicate(net(norm))
    opt = member.optimizer(adam(model))
    for one in member.steps(ListLoader(data(n), batch, epochs)):
        opt.zero_grad()
        loss_of(model, one).backward()
        opt.step()
    return values(model)


def loop(member: Member, model: nn.Module, opt: Any, body: Any = None) -> None:
    for one in member.steps(ListLoader(data(), 8)):
        opt.zero_grad()
        loss_of(model, one).backward()
        if body is not None:
            body(one)
        opt.step()


def close(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def same(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
