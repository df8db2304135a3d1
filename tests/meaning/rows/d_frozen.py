"""Freezing and thawing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meaning.kit import DIM, KEYS, Net, Script
from meaning.table import Result, row, topic

FROZEN = topic("Freezing and thawing")


def train(s: Script, opt: Any, after: Any = lambda: None) -> Result:
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        after()
    return s.end()


@row(FROZEN, "a layer frozen from the beginning (`requires_grad_(False)` before `job.replicate`)")
def frozen_layer(es: Any) -> Result:
    def make() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        return net

    s = Script(es, make)
    return train(s, s.sgd(weight_decay=0.05))


@row(FROZEN, "a layer left out of the optimizer")
def left_out(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(params=[*s.model.last.parameters(), *s.model.first.parameters()][:2]))


@row(FROZEN, "a layer frozen after 6 steps")
def freeze_later(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05, momentum=0.9)

    def after() -> None:
        if s.job.step == 6:
            s.model.first.requires_grad_(False)

    return train(s, opt, after)


@row(FROZEN, "a layer thawed after 6 steps")
def thaw_later(es: Any) -> Result:
    def make() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        return net

    s = Script(es, make)

    def after() -> None:
        if s.job.step == 6:
            s.model.first.requires_grad_(True)

    return train(s, s.sgd(0.05), after)


@row(FROZEN, "a layer thawed between two loops")
def thaw_between(es: Any) -> Result:
    def make() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        return net

    s = Script(es, make)
    opt = s.sgd()
    for epoch in range(2):
        s.model.first.requires_grad_(epoch == 1)
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
    return s.end()


@row(FROZEN, "a layer frozen in every other step")
def alternating(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        s.model.first.requires_grad_(s.job.step % 2 == 1)

    return train(s, s.sgd(), after)


@row(FROZEN, "`nn.Embedding.from_pretrained(freeze=True)`")
def pretrained_frozen(es: Any) -> Result:
    class Given(Net):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(KEYS, DIM, generator=torch.Generator().manual_seed(3))
            self.emb = nn.Embedding.from_pretrained(values, freeze=True)

    s = Script(es, Given)
    return train(s, s.sgd())


@row(FROZEN, "`nn.Embedding.from_pretrained(freeze=False)`")
def pretrained(es: Any) -> Result:
    class Given(Net):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(KEYS, DIM, generator=torch.Generator().manual_seed(3))
            self.emb = nn.Embedding.from_pretrained(values, freeze=False)

    s = Script(es, Given)
    return train(s, s.sgd())


@row(FROZEN, "`emb.weight.requires_grad = False` before `job.sparse`")
def table_frozen_before(es: Any) -> Result:
    def make() -> Net:
        net = Net()
        net.emb.weight.requires_grad = False
        return net

    s = Script(es, make)
    return train(s, s.sgd())


@row(FROZEN, "`emb.weight.requires_grad_(False)` after `job.sparse`")
def table_frozen_after(es: Any) -> Result:
    s = Script(es)
    s.model.emb.weight.requires_grad_(False)
    return train(s, s.sgd())


@row(FROZEN, "`emb.requires_grad_(False)` in the middle, thawed later")
def table_frozen_later(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        s.model.emb.requires_grad_(not 3 <= s.job.step < 8)

    return train(s, s.sgd(), after)


@row(FROZEN, "an embedding's output detached")
def detached(es: Any) -> Result:
    class Detached(Net):
        def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            parts = [self.emb(batch["ids"][:, 0]).detach(), self.bag(batch["ids"][:, 1:]), batch["x"]]
            out: torch.Tensor = torch.tanh(self.first(torch.cat(parts, 1)))
            return out

    s = Script(es, Detached)
    return train(s, s.sgd())


@row(FROZEN, "a part of forward under `torch.no_grad()`")
def no_grad_part(es: Any) -> Result:
    class Part(Net):
        def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                x = torch.cat([self.emb(batch["ids"][:, 0]), self.bag(batch["ids"][:, 1:]), batch["x"]], 1)
            out: torch.Tensor = torch.tanh(self.first(x))
            return out

    s = Script(es, Part)
    return train(s, s.sgd())


@row(FROZEN, "only the head trained (`filter(requires_grad, ...)` for the optimizer)")
def head_only(es: Any) -> Result:
    def make() -> Net:
        net = Net()
        for p in net.parameters():
            p.requires_grad_(False)
        net.last.requires_grad_(True)
        return net

    s = Script(es, make)
    return train(s, s.sgd(params=[p for p in s.model.parameters() if p.requires_grad]))


@row(FROZEN, "frozen batch norm: `bn.eval()` in training")
def frozen_norm(es: Any) -> Result:
    def make() -> Net:
        net = Net(nn.BatchNorm1d(8))
        net.middle.eval()
        return net

    s = Script(es, make)
    return train(s, s.sgd())
