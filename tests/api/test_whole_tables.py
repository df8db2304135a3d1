"""Small tables are as whole as dense parameters: a script that uses ``weight`` does what plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everstep.api import rows
from everstep.api.job import Job
from everstep.errors import ScriptError

Join = Callable[..., Job]
MODES: list[dict[str, Any]] = [{}, {"mode": "allreduce", "ps": 1}]
IDS = np.random.default_rng(4).integers(0, 12, (40, 3))


class Model(nn.Module):
    """Two tables of 15 rows, of which the data have 12."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(15, 3, padding_idx=2)
        self.bag = nn.EmbeddingBag(15, 3, mode="sum")
        self.last = nn.Linear(3, 1)

    def rows(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.emb(ids[:, 0]) + self.bag(ids)).square().mean()
        return out


def mixed(model: Any, ids: Tensor, i: int) -> Tensor:
    """The whole before, between and behind lookups, in some iterations, and without any."""
    weight = model.emb.weight
    if i % 5 == 0:
        return model.rows(ids)
    loss: Tensor = weight.square().sum() * 0.1
    if i % 5 == 1:
        return loss
    if i % 5 == 2:
        loss = model.rows(ids) + loss
    scores = model.last.weight @ weight.T
    return loss + model.rows(ids) + scores.logsumexp(1).sum() + model.bag.weight[1:4].norm()


def accumulated(model: Any, ids: Tensor, i: int) -> Tensor:
    return mixed(model, ids, 2 + i % 4) if i % 3 else model.rows(ids)


def by_hand(model: Any, ids: Tensor, i: int) -> Tensor:
    loss = model.rows(ids)
    loss.backward(retain_graph=True)
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)
    return loss * (0.5 if i % 2 else 1.0)


def rarely(model: Any, ids: Tensor, i: int) -> Tensor:
    """Iterations without ids, and without any row."""
    ids = ids[: (0, 4, 1)[i % 3]]
    out: Tensor = model.last(model.emb(ids[:, 0]).sum(0) + model.bag(ids).sum(0)).square().sum()
    return out


def hooked(model: Any, ids: Tensor, i: int) -> Tensor:
    """A hook that is not linear sees the gradient of lookups and of the whole at once."""
    weight = model.emb.weight
    handle = weight.register_hook(lambda g: g.clamp(-0.02, 0.02))
    loss: Tensor = model.rows(ids) + weight.square().sum() * 0.1
    if i % 2:
        loss = loss + model.rows(ids.flip(1))
    loss.backward()
    handle.remove()
    (grad,) = torch.autograd.grad(model.rows(ids) + weight.square().mean(), [weight])
    return loss.detach() + (weight * grad.detach()).sum()


SCRIPTS: dict[str, tuple[Callable[[Any, Tensor, int], Tensor], Callable[[Any], torch.optim.Optimizer], int]] = {
    "mixed": (mixed, lambda p: torch.optim.SGD(p, lr=0.05), 1),
    "accumulated": (accumulated, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1), 3),
    "by hand": (by_hand, lambda p: torch.optim.Adagrad(p, lr=0.05), 1),
    "hooked": (hooked, lambda p: torch.optim.SGD(p, lr=0.05), 1),
    "rarely": (rarely, lambda p: torch.optim.Adam(p, lr=0.02), 1),
    "decayed": (rarely, lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.2), 2),
}


@pytest.mark.parametrize("options", MODES, ids=["ps", "hybrid"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_as_plain_pytorch(join: Join, script: str, options: dict[str, Any]) -> None:
    loss_of, make, every = SCRIPTS[script]
    torch.manual_seed(3)
    plain = Model()
    job = join(**options)
    ours: Any = job.replicate(job.sparse(copy.deepcopy(plain)))
    optimizers = job.optimizer(make(ours.parameters())), make(plain.parameters())
    for i, batch in enumerate(job.steps(job.loader({"id": IDS}, batch_size=4, epochs=2))):
        for model, opt in zip((ours, plain), optimizers, strict=True):
            loss_of(model, batch["id"], i).backward()
            if i % every == every - 1:
                opt.step()
                opt.zero_grad()
        if i == 7:
            with job.eval(ours), torch.no_grad():
                torch.testing.assert_close(ours.emb.weight.detach(), plain.emb.weight, atol=1e-5, rtol=1e-4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", MODES, ids=["ps", "hybrid"])
def test_read_outside_of_a_batch(join: Join, options: dict[str, Any]) -> None:
    plain = nn.Embedding(15, 3)
    job = join(**options)
    ours: Any = job.replicate(job.sparse(copy.deepcopy(plain)))
    weight = ours.weight
    assert torch.equal(weight.detach() * 1, plain.weight) and torch.equal(weight.T, plain.weight.T)
    assert torch.equal(weight.norm(), plain.weight.norm()) and weight.detach().shape == (15, 3)
    assert torch.equal(torch.cat([weight, weight]), torch.cat([plain.weight] * 2))
    assert torch.zeros_like(weight).shape == (15, 3)
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1.0
    edits: list[Callable[[], Any]] = [lambda: weight.detach().clamp_(0, 1), lambda: weight.data.zero_()]
    edits += [lambda: nn.init.zeros_(weight), lambda: setattr(weight, "data", torch.zeros(15, 3))]
    for edit in edits:
        with pytest.raises(ScriptError, match="outside of a batch: its rows are on the ps"):
            edit()


def test_assigned_in_a_batch(join: Join) -> None:
    """Its forward computes with what was assigned; what does not fit is refused."""
    plain = nn.Embedding(15, 3)
    job = join(prefetch=0)
    ours: Any = job.replicate(job.sparse(copy.deepcopy(plain)))
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, plain)]
    opts[0] = job.optimizer(opts[0])
    for i, batch in enumerate(job.steps(job.loader({"id": IDS}, batch_size=4, epochs=1))):
        for net, opt in zip((ours, plain), opts, strict=True):
            if i % 3 == 1:
                net.weight.data = net.weight.data * 0.5
            opt.zero_grad()
            net(batch["id"]).square().sum().backward()
            opt.step()
        if i == 2:
            with pytest.raises(ScriptError, match=r"is assigned torch.float32 \(14, 3\), and its rows here"):
                ours.weight.data = torch.zeros(14, 3)
    torch.testing.assert_close(ours.state_dict()["weight"], plain.weight.detach(), atol=1e-5, rtol=1e-4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(15, 4)
        self.head = nn.Linear(4, 15)
        self.head.weight = self.emb.weight
        self.penalized = [self.emb.weight]

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.emb(ids[:, :2]).sum(1)))
        return nn.functional.cross_entropy(scores, ids[:, 2]) + sum(0.01 * p.norm() for p in self.penalized)


@pytest.mark.parametrize("options", MODES, ids=["ps", "hybrid"])
def test_whatever_refers_to_the_parameter_sees_the_table(join: Join, options: dict[str, Any]) -> None:
    """A tied layer, a list of penalties, a hook, and an optimizer that is older than the table."""
    plain, other = Tied(), Tied()
    ours: Any = copy.deepcopy(plain)
    opt = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5)
    older = torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.5)
    for model in (plain, ours):
        model.emb.weight.register_hook(lambda g: g * 0.5)
    job = join(**options)
    ours = job.replicate(job.sparse(ours))
    if not options:
        for model in (plain, ours):
            model.load_state_dict(other.state_dict())
    assert [name for name, _ in ours.head.named_parameters()] == ["weight", "bias"]
    mine = job.optimizer(older)
    for batch in job.steps(job.loader({"id": IDS}, batch_size=5, epochs=2)):
        for model, by in ((ours, mine), (plain, opt)):
            by.zero_grad()
            model(batch["id"]).backward()
            by.step()
    state = ours.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-4)


def test_what_is_too_large(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "USED_WHOLE", 44)
    monkeypatch.setattr(rows, "STEPPED_WHOLE", 44)
    job = join()
    ours: Any = job.sparse(nn.Embedding(15, 3))
    with pytest.raises(ScriptError, match=r"is read \(norm\) outside of a batch"):
        ours.weight.norm()
    with pytest.raises(ScriptError, match=r"is used \(numpy\) outside of a batch"):
        ours.weight.detach().numpy()
    with pytest.raises(ScriptError, match=r"is used as a whole \(T\)"):
        for batch in job.steps(job.loader({"id": IDS}, batch_size=4)):
            assert len(ours(batch["id"]).shape) == 3 and ours.weight.norm() > 0
            _ = ours.weight.T
