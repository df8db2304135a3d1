"""Alone, a script computes what plain PyTorch computes: same batches, same initial values, same updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everstep as es
from everstep.api.job import Job
from everstep.model.table import OptimizerSpec
from everstep.monitor.audit import audit

Join = Callable[..., Job]


class Net(nn.Module):
    """One bag over two columns, one embedding over the third, and a small dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 6, mode="mean")
        self.emb = nn.Embedding(30, 6)
        self.mlp = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.cat([self.bag(batch["cat"][:, :2]), self.emb(batch["cat"][:, 2])], 1)
        out: Tensor = self.mlp(x)
        return out.squeeze(1)


def samples(n: int = 330, seed: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {"cat": rng.integers(0, 30, (n, 3)), "y": rng.random(n).astype(np.float32)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = ((model(batch) - batch["y"]) ** 2).mean()
    return out


Torch = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SPARSE: list[tuple[OptimizerSpec, Torch]] = [
    (es.SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    (es.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (es.Adagrad(lr=0.1, initial_accumulator=0.1), lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1)),
]
DENSE: list[Torch] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=1e-3),
    lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-6),
    lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    lambda p: torch.optim.NAdam(p, lr=0.003),
    lambda p: torch.optim.Adam(p, lr=0.003, amsgrad=True),
]


def both(join: Join, sparse: tuple[OptimizerSpec, Torch], dense: Torch, epochs: int = 2) -> tuple[nn.Module, nn.Module]:
    job = join(seed=7)
    plain = Net()
    ours = job.replicate(job.sparse(copy.deepcopy(plain), optimizer=sparse[0]))
    opt = job.optimizer(dense(list(ours.parameters())))
    opt_dense = dense(list(plain.mlp.parameters()))
    opt_sparse = sparse[1]([plain.bag.weight, plain.emb.weight])
    for batch in job.steps(job.loader(samples(), batch_size=32, epochs=epochs)):
        loss = loss_of(ours, batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        reference = loss_of(plain, batch)
        opt_dense.zero_grad()
        opt_sparse.zero_grad()
        reference.backward()
        opt_dense.step()
        opt_sparse.step()
        assert torch.allclose(loss, reference, atol=1e-5, rtol=1e-4)
    return ours, plain


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dense", DENSE, ids=range(len(DENSE)))
def test_dense_optimizers_are_torchs(join: Join, dense: Torch) -> None:
    assert_same(*both(join, SPARSE[0], dense))


@pytest.mark.parametrize("sparse", SPARSE, ids=range(len(SPARSE)))
def test_sparse_optimizers_are_torchs(join: Join, sparse: tuple[OptimizerSpec, Torch]) -> None:
    assert_same(*both(join, sparse, DENSE[0]))


@pytest.mark.parametrize("number", [1, 3, 4, 7, 8, 9])
def test_state_of_the_optimizer_is_torchs(join: Join, number: int) -> None:
    """state_dict() can be loaded into torch's optimizer, and holds what that would hold."""
    job = join(seed=7)
    plain, make = nn.Linear(5, 70), DENSE[number]
    ours = job.replicate(copy.deepcopy(plain))
    opt, other = job.optimizer(make(list(ours.parameters()))), make(list(plain.parameters()))
    for batch in job.steps(job.loader({"x": np.random.default_rng(0).random((60, 5), np.float32)}, batch_size=10)):
        for model, optimizer in ((ours, opt), (plain, other)):
            optimizer.zero_grad()
            model(batch["x"]).cos().sum().backward()
            optimizer.step()
    mine, theirs = opt.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for i, fields in theirs["state"].items():
        assert mine["state"][i].keys() == fields.keys()
        for name, value in fields.items():
            if name != "step" or number >= 4:
                torch.testing.assert_close(mine["state"][i][name], value, atol=1e-3, rtol=1e-3)
    other.load_state_dict(mine)


def test_scheduler_and_groups(join: Join) -> None:
    """Learning rates of two groups, changed by a scheduler, reach the ps."""
    job = join(seed=7)
    plain = Net()
    ours = job.replicate(job.sparse(copy.deepcopy(plain), optimizer=es.SGD(lr=0.5)))

    def groups(net: Net) -> list[dict[str, Any]]:
        return [{"params": list(net.mlp[0].parameters())}, {"params": list(net.mlp[2].parameters()), "lr": 0.3}]

    opt = job.optimizer(torch.optim.SGD(groups(ours), lr=0.1))
    other = torch.optim.SGD([*groups(plain), {"params": [plain.bag.weight, plain.emb.weight], "lr": 0.5}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    other_schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda e: 0.5 ** (e // 3))  # of the tables too
    for batch in job.steps(job.loader(samples(), batch_size=32)):
        for model, optimizer, scheduler in ((ours, opt, schedule), (plain, other, other_schedule)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert_same(ours, plain)


def test_accumulation(join: Join) -> None:
    """A step every third batch pushes the sum of three gradients; the end of a shard pushes what is left."""
    job = join(seed=7)
    plain = Net()
    ours = job.replicate(job.sparse(copy.deepcopy(plain), optimizer=es.SGD(lr=0.5)))
    opt = job.optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    other = torch.optim.SGD(
        [{"params": plain.mlp.parameters()}, {"params": [plain.bag.weight, plain.emb.weight], "lr": 0.5}], lr=0.1
    )
    loader = job.loader(samples(16 * 66 * 3), batch_size=16)
    shard = loader.plan().shard_samples // 16
    assert shard == 3  # three batches a shard: the same boundaries as ours
    for i, batch in enumerate(job.steps(loader)):
        loss_of(ours, batch).backward()
        loss_of(plain, batch).backward()
        if i % 3 == 2:
            for optimizer in (opt, other):
                optimizer.step()
                optimizer.zero_grad()
    assert_same(ours, plain)


def test_what_is_never_stepped_is_left_out(join: Join) -> None:
    job = join()
    model = job.sparse(es.nn.Embedding("count", 1, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
    dense = job.replicate(nn.Linear(1, 1, bias=False))
    start = dense.weight.item()
    job.optimizer(torch.optim.SGD(dense.parameters(), lr=1.0))
    ids = np.arange(100) % 10
    for batch in job.steps(job.loader({"id": ids}, batch_size=7)):
        (-model(batch["id"]).sum() - dense.weight.sum()).backward()  # never steps
    assert dense.weight.grad is not None and dense.weight.grad.item() == -15
    job.close()
    report = audit(Path(job.run_dir))
    assert report.ok, report
    assert dense.weight.item() == start


def test_prefetch_trains_too_and_counts_exactly(join: Join) -> None:
    """With rows pulled a batch ahead values are a step old, but every gradient is applied once."""
    job = join(prefetch=1)
    model = job.sparse(es.nn.Embedding("count", 1, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 50)
    samples = np.repeat(ids, 20)
    for batch in job.steps(job.loader({"id": samples}, batch_size=33, epochs=3)):
        (-model(batch["id"]).sum()).backward()
    state = model.state_dict()
    assert state["keys"].tolist() == sorted(ids.tolist())
    assert state["weight"].flatten().tolist() == [60.0] * 50
    assert job._tables.hits > 60 and job._tables.misses < 5
    assert job.readings["samples"] == 3000
