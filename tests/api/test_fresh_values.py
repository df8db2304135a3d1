"""Values that a step of the same iteration has changed: whoever uses them gets the new ones first."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es
from everstep.api.dense import DenseGroup, StaleValues
from everstep.api.job import Job
from everstep.api.optim import TwinGroup
from everstep.errors import ScriptError


class Watched:
    """A layer whose values are stale, and how often they were freshened."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 2)
        self.times = 0
        (options,) = torch.optim.SGD(self.layer.parameters(), 0.1).param_groups
        group = DenseGroup("dense/0/0", TwinGroup("", torch.optim.SGD, options))
        self.stale = StaleValues(self._freshen)
        self.stale.watch([group], [])

    def _freshen(self) -> None:
        self.stale.clear()
        self.times += 1
        with torch.no_grad():
            self.layer.weight.fill_(7.0)


USES: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda layer: layer(torch.ones(1, 3)),
    "data": lambda layer: layer.weight.data,
    "detach": lambda layer: layer.weight.detach(),
    "state_dict": lambda layer: layer.state_dict(),
    "foreach": lambda layer: torch._foreach_norm(list(layer.parameters())),
    "vector": lambda layer: nn.utils.parameters_to_vector(layer.parameters()),
    "item": lambda layer: layer.weight[0, 0].item(),
    "transposed": lambda layer: layer.weight.T,
    "in place": lambda layer: layer.weight.data.mul_(1.0),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES)
def test_whatever_uses_a_value_gets_the_new_one_once(use: str) -> None:
    watched = Watched()
    USES[use](watched.layer)
    USES[use](watched.layer)
    assert watched.times == 1 and float(watched.layer.weight[1, 1].detach()) == 7.0
    assert {type(p) for p in watched.layer.parameters()} == {nn.Parameter}
    pickle.dumps(watched.layer)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.zero_grad(),
        lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
        lambda layer: [(p.shape, p.numel(), p.dtype, p.requires_grad, p.grad) for p in layer.parameters()],
        lambda layer: layer.requires_grad_(True),
        repr,
    ],
)
def test_what_needs_no_value_costs_nothing(use: Callable[[nn.Linear], Any]) -> None:
    watched = Watched()
    layer = watched.layer
    layer.weight.grad = torch.ones(2, 3)
    use(layer)
    assert watched.times == 0


def test_alone_an_edit_of_a_tables_rows_is_seen_without_looking_at_every_batch(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Embedding(8, 2), nn.Flatten(), nn.Linear(2, 1))
    job = es.join(run_dir=str(tmp_path / "run"))
    model = job.replicate(job.sparse(model, optimizer=es.SGD(lr=0.0)))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.steps(job.loader({"i": torch.arange(8).reshape(8, 1)}, 4)):
        model(batch["i"]).sum().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model[0].weight.fill_(2.0)
    assert bool((job.state_dict()["models"][0]["0.weight"] == 2.0).all())
    job.close()


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("place", ["before", "behind", "table"])
def test_a_change_by_hand_takes_no_step_back(join: Callable[..., Job], ahead: int, place: str) -> None:
    """Each step takes 1 away, each change gives 0.5 back. What was pulled ahead lacks a step: it may not be stored."""
    job = join(prefetch=ahead)
    model = nn.ModuleDict({"table": nn.Embedding(2, 1), "dense": nn.Linear(1, 1, bias=False)})
    for p in model.parameters():
        nn.init.zeros_(p)
    ours = job.replicate(job.sparse(model))
    opt = job.optimizer(torch.optim.SGD(ours.parameters(), lr=1.0))
    changed: Any = ours["table"].weight if place == "table" else ours["dense"].weight

    def train() -> None:
        for batch in job.steps(job.loader({"id": np.zeros(24, np.int64)}, batch_size=2)):
            opt.zero_grad()
            with torch.no_grad():
                changed.add_(0.5 if place != "behind" else 0.0)
            (ours["table"](batch["id"]).mean() + ours["dense"].weight.sum()).backward()
            opt.step()
            with torch.no_grad():
                changed.add_(0.5 if place == "behind" else 0.0)

    if ahead and place != "behind":
        with pytest.raises(ScriptError, match="were pulled ahead: the step of the batch before would be lost"):
            train()
        return
    train()
    state = ours.state_dict()
    assert state["dense.weight"].item() == (-12.0 if place == "table" else -6.0)
    assert state["table.weight"][0].item() == (-6.0 if place == "table" else -12.0)
