"""``max_norm``: rows that are looked up are scaled down in place, as torch does it, and stay so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everstep as es
from everstep.api.job import Job
from everstep.errors import ScriptError

Join = Callable[..., Job]
IDS = np.random.default_rng(2).integers(0, 18, (40, 3))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 4, max_norm=0.8, padding_idx=2)
        self.bag = nn.EmbeddingBag(20, 4, mode="mean", max_norm=1.0, norm_type=1.0)
        self.free = nn.Embedding(20, 4)

    def forward(self, ids: Tensor, i: int = 1) -> Tensor:
        twice = self.emb(ids[:, 0]) * self.emb(ids[:, 1:]).sum(1)
        out = twice + self.bag(ids[: len(ids) - 1 + i % 2])[0]
        return out + nn.functional.embedding(ids[:, 2], self.free.weight, max_norm=0.5)


@pytest.mark.parametrize("every", [1, 3])
def test_as_torch(join: Join, every: int) -> None:
    plain = Normed()
    job = join()
    ours: Any = job.replicate(job.sparse(copy.deepcopy(plain), optimizer=es.Adagrad(lr=0.1)))
    dense = nn.Linear(1, 1)
    opts: list[Any] = [job.optimizer(torch.optim.SGD(dense.parameters(), lr=0.1))]
    opts.append(torch.optim.Adagrad(plain.parameters(), lr=0.1))
    for i, batch in enumerate(job.steps(job.loader({"id": IDS}, batch_size=5, epochs=2))):
        for model, opt in zip((ours, plain), opts, strict=True):
            (3 * model(batch["id"], i).sin()).sum().backward()
            if i % every == every - 1:
                opt.step()
                opt.zero_grad()
        if i == 4:
            with job.eval(ours), torch.no_grad():
                torch.testing.assert_close(ours(torch.tensor([[1, 2, 3]])), plain(torch.tensor([[1, 2, 3]])))
    with torch.no_grad():  # an evaluation scales its rows, too
        ids = torch.arange(18).reshape(6, 3)
        torch.testing.assert_close(ours(ids), plain(ids), atol=1e-5, rtol=1e-4)
    state = ours.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-4)


def test_in_mode_allreduce_it_is_refused(join: Join) -> None:
    with pytest.raises(ScriptError, match="max_norm of table 'emb' changes rows in forward"):
        join(mode="allreduce", ps=1).sparse(Normed())


def test_a_function_is_told_where_rows_are_pulled_ahead(join: Join) -> None:
    job = join(prefetch=2)
    model: Any = job.sparse(nn.Embedding(20, 4))
    with pytest.raises(ScriptError, match="max_norm of table 'embedding' is given to a function"):
        for batch in job.steps(job.loader({"id": IDS}, batch_size=5)):
            nn.functional.embedding(batch["id"], model.weight, max_norm=1.0)
