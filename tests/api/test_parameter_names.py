"""Dense parameters have their names in the table's spec, so that a checkpoint can give them back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from everstep.api.job import Job


def test_names_and_shapes_in_the_flat_order(join: Callable[..., Job]) -> None:
    job = join()
    model = job.replicate(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1, bias=False)))
    groups = [{"params": model[2].parameters()}, {"params": model[0].parameters(), "lr": 0.5}]
    twin = job.optimizer(torch.optim.SGD(groups, lr=0.1))
    assert [g.spec.parameters for g in twin.groups] == [
        (("2.weight", (1, 4)),),
        (("0.weight", (4, 3)), ("0.bias", (4,))),
    ]
    first = twin.groups[1]
    assert torch.equal(first.flat[:12].view(4, 3), model.state_dict()["0.weight"])


def test_two_models_and_unknown_parameters(join: Callable[..., Job]) -> None:
    job = join()
    models = [job.replicate(nn.Linear(1, 1, bias=False)) for _ in range(2)]
    loose = nn.Parameter(torch.zeros(2))
    twin = job.optimizer(torch.optim.SGD([*(m.weight for m in models), loose], lr=0.1))
    names = [name for name, _ in twin.groups[0].spec.parameters]
    assert names == ["0.weight", "1.weight", "dense/0/0/2"]
