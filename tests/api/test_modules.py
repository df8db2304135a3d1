"""Each kind of embedding gives torch's outputs and torch's gradients, and refuses clearly what it does not offer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everstep as es
from everstep.api import sparse
from everstep.api.job import Job
from everstep.errors import ScriptError

Join = Callable[..., Job]
IDS = np.random.default_rng(1).integers(0, 20, (24, 4))


class One(nn.Module):
    """A single embedding, called by ``call(module, ids)``."""

    def __init__(self, table: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = table
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        return self.call(self.table, ids)


def offsets_call(module: nn.Module, ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    offsets = torch.tensor([0, 1, 1, 5, len(flat) - 2])  # with an empty bag
    out: Tensor = module(flat, offsets)
    return out


def last_offset_call(module: nn.Module, ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    out: Tensor = module(flat, torch.tensor([0, 3, 3, len(flat)]))
    return out


def weighted_call(module: nn.Module, ids: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, ids.numel()).reshape(ids.shape)
    out: Tensor = module(ids, per_sample_weights=weights)
    return out


def plain_call(module: nn.Module, ids: Tensor) -> Tensor:
    out: Tensor = module(ids)
    return out


def column_call(module: nn.Module, ids: Tensor) -> Tensor:
    out: Tensor = module(ids[:, 1:2])
    return out


def scalar_call(module: nn.Module, ids: Tensor) -> Tensor:
    out: Tensor = module(ids[:, 2])
    return out


def functional_call(module: Any, ids: Tensor) -> Tensor:
    """Three lookups in one weight, by position and by keyword."""
    weight, padding = module.weight, module.padding_idx
    out = nn.functional.embedding(ids[:, :2], weight, padding, sparse=True)
    last = torch.index_select(weight, 0, ids[:, 3]) if padding is None else weight.detach()[ids[:, 3]]
    return out * nn.functional.embedding(input=ids[:, 2:3], weight=weight, padding_idx=padding) + last[:, None]


def functional_bags_call(module: Any, ids: Tensor) -> Tensor:
    flat, offsets = ids.reshape(-1), torch.tensor([0, 1, 1, 5, ids.numel() - 2])
    bag, weight = nn.functional.embedding_bag, module.weight
    largest = bag(flat, weight, offsets, mode="max", padding_idx=3)
    weighed = bag(flat, weight, offsets, mode="sum", per_sample_weights=torch.linspace(-1, 1, flat.numel()))
    return largest + weighed + bag(input=ids[:5], weight=weight) + bag(ids[:5, :1], weight, padding_idx=-1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "embedding 2-D": (lambda: nn.Embedding(20, 5), plain_call),
    "embedding 1-D": (lambda: nn.Embedding(20, 5), scalar_call),
    "embedding padding": (lambda: nn.Embedding(20, 5, padding_idx=3), plain_call),
    "bag sum": (lambda: nn.EmbeddingBag(20, 5, mode="sum"), plain_call),
    "bag mean": (lambda: nn.EmbeddingBag(20, 5, mode="mean"), plain_call),
    "bag of one": (lambda: nn.EmbeddingBag(20, 5, mode="sum"), column_call),
    "bag sum padding": (lambda: nn.EmbeddingBag(20, 5, mode="sum", padding_idx=7), plain_call),
    "bag mean padding": (lambda: nn.EmbeddingBag(20, 5, mode="mean", padding_idx=7), plain_call),
    "bag of one padding": (lambda: nn.EmbeddingBag(20, 5, mode="mean", padding_idx=7), column_call),
    "bag offsets": (lambda: nn.EmbeddingBag(20, 5, mode="sum"), offsets_call),
    "bag offsets mean padding": (lambda: nn.EmbeddingBag(20, 5, mode="mean", padding_idx=1), offsets_call),
    "bag last offset": (lambda: nn.EmbeddingBag(20, 5, mode="mean", include_last_offset=True), last_offset_call),
    "bag weights": (lambda: nn.EmbeddingBag(20, 5, mode="sum"), weighted_call),
    "bag max": (lambda: nn.EmbeddingBag(20, 5, mode="max"), plain_call),
    "bag max padding": (lambda: nn.EmbeddingBag(20, 5, mode="max", padding_idx=7), offsets_call),
    "bag max last offset": (lambda: nn.EmbeddingBag(20, 5, mode="max", include_last_offset=True), last_offset_call),
    "by frequency": (lambda: nn.Embedding(20, 5, padding_idx=3, scale_grad_by_freq=True), plain_call),
    "functional": (lambda: nn.Embedding(20, 5), functional_call),
    "functional padding": (lambda: nn.Embedding(20, 5, padding_idx=7), functional_call),
    "functional bags": (lambda: nn.EmbeddingBag(20, 5), functional_bags_call),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", ["int64", "int32"])
def test_as_torch(join: Join, case: str, width: str) -> None:
    make, call = CASES[case]
    plain = One(make(), call)
    job = join()
    ours = job.sparse(copy.deepcopy(plain), optimizer=es.SGD(lr=0.02))
    target = torch.randn(1)
    opt = torch.optim.SGD(plain.parameters(), lr=0.02)
    loader = job.loader({"id": IDS.astype(width)}, batch_size=8, epochs=2)
    for batch in job.steps(loader):
        ids = batch["id"] if width == "int64" else batch["id"].to(torch.int32)
        mine, theirs = ours(ids), plain(ids)
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        (mine * target).sin().sum().backward()
        opt.zero_grad()
        (theirs * target).sin().sum().backward()
        opt.step()
    torch.testing.assert_close(
        ours.state_dict()["table.weight"], plain.state_dict()["table.weight"], atol=1e-4, rtol=1e-4
    )


def test_gradient_of_per_sample_weights(join: Join) -> None:
    plain = nn.EmbeddingBag(20, 5, mode="sum")
    job = join()
    ours = job.sparse(copy.deepcopy(plain), optimizer=es.SGD(lr=0.0))
    for batch in job.steps(job.loader({"id": IDS}, batch_size=24)):
        gradients = []
        for module in (ours, plain):
            weights = torch.linspace(0, 1, batch["id"].numel()).reshape(batch["id"].shape).requires_grad_()
            module(batch["id"], per_sample_weights=weights).sin().sum().backward()
            gradients.append(weights.grad)
        torch.testing.assert_close(*gradients)


def test_several_uses_of_a_table_in_one_batch(join: Join) -> None:
    """The same module called twice, a shared weight and a shared name: one table, gradients added."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(20, 5)
            self.b = nn.Embedding(20, 5)
            self.b.weight = self.a.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.a(ids[:, 0]) * self.a(ids[:, 1]) + self.b(ids[:, 2]).cos()
            return out

    plain = Shared()
    job = join()
    ours = job.sparse(copy.deepcopy(plain), optimizer=es.SGD(lr=0.1))
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in job.steps(job.loader({"id": IDS}, batch_size=6, epochs=3)):
        opt.zero_grad()
        for module in (ours, plain):
            module(batch["id"]).sum().backward()
        opt.step()
    assert len(job._tables.infos) == 1
    torch.testing.assert_close(ours.a.state_dict()["weight"], plain.a.weight.detach())


def test_meta_begins_as_the_initialiser_says_and_needs_no_memory(join: Join) -> None:
    job = join(seed=5)
    model = job.sparse(nn.Embedding(10**12, 64, device="meta"))
    ids = torch.arange(0, 10**12, 10**9)
    with job.eval():
        rows = model(ids)
    assert rows.shape == (1000, 64)
    assert abs(float(rows.mean())) < 0.02 and abs(float(rows.std()) - 1) < 0.02
    assert job._runtime.service._stat().rows.get("embedding", 0) == 0  # type: ignore[attr-defined] # only looked at
    uniform = join(seed=5).sparse(nn.Embedding(100, 4, device="meta"), init=es.Uniform(2, 3))
    weight = uniform.state_dict()["weight"]
    assert float(weight.min()) >= 2 and float(weight.max()) < 3


def test_padding_row_of_meta_stays_zero(join: Join) -> None:
    job = join()
    model = job.sparse(nn.Embedding(20, 4, padding_idx=3, device="meta"), optimizer=es.Adam(lr=0.1, weight_decay=0.1))
    for batch in job.steps(job.loader({"id": IDS}, batch_size=6)):
        out = model(batch["id"])
        assert (out[batch["id"] == 3] == 0).all()
        out.sum().backward()
    assert (model.state_dict()["weight"][3] == 0).all()


def test_no_vocabulary(join: Join) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = es.nn.EmbeddingBag("shared", 3, "mean")
            self.y = es.nn.Embedding("shared", 3)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.x(ids[:, :2]) + self.y(ids[:, 2])
            return out

    job = join()
    model = job.sparse(Net(), optimizer=es.RowWiseAdagrad(lr=0.1))
    wide = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, (40, 3))
    for batch in job.steps(job.loader({"id": wide}, batch_size=7)):
        model(batch["id"]).sum().backward()
    state = model.state_dict()
    assert set(state) == {"x.keys", "x.weight", "y.keys", "y.weight"}
    assert state["x.keys"].tolist() == sorted(set(wide.reshape(-1).tolist()))


WRONG: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.EmbeddingBag(9, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    (lambda: nn.Embedding(9, 3, dtype=torch.float64), "float32"),
    (lambda: nn.Linear(3, 3), "found no nn.Embedding"),
    (lambda: nn.ModuleList([es.nn.Embedding("t", 3), es.nn.Embedding("t", 4)]), "dim 3 and 4"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[w for _, w in WRONG])
def test_what_is_not_offered(join: Join, make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        join().sparse(make())


def test_the_padding_of_a_table_is_one(join: Join) -> None:
    job = join()
    model = job.sparse(nn.Embedding(20, 4, padding_idx=3))
    with pytest.raises(ScriptError, match="has padding_idx=3, a row without a gradient, and is looked up there"):
        for batch in job.steps(job.loader({"id": IDS}, batch_size=24)):
            nn.functional.embedding(batch["id"], model.weight).sum().backward()


def test_ids_out_of_range(join: Join) -> None:
    job = join()
    model = job.sparse(nn.Embedding(20, 4))
    with pytest.raises(IndexError, match=r"id 20 is out of range for 'embedding', which has rows 0\.\.19"):
        for batch in job.steps(job.loader({"id": np.arange(21)}, batch_size=7, shuffle=False)):
            model(batch["id"]).sum().backward()


def test_before_a_job(join: Join) -> None:
    with pytest.raises(ScriptError, match=r"call job\.sparse"):
        es.nn.Embedding("t", 3)(torch.tensor([1]))


def test_two_models_with_the_same_names_do_not_share(join: Join) -> None:
    job = join()
    towers = [nn.ModuleDict({"emb": nn.Embedding(10, 2)}) for _ in range(2)]
    before = [copy.deepcopy(t.state_dict()) for t in towers]
    swapped = [job.sparse(t) for t in towers]
    assert [t["emb"].name for t in swapped] == ["emb", "emb@2"]
    for tower, values in zip(swapped, before, strict=True):
        torch.testing.assert_close(tower.state_dict()["emb.weight"], values["emb.weight"])


def test_a_weight_that_is_too_large_to_be_tied(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "USED_WHOLE", 39)
    model = nn.ModuleDict({"emb": nn.Embedding(10, 4), "head": nn.Linear(4, 10)})
    model["head"].weight = model["emb"].weight
    with pytest.raises(ScriptError, match="is also 'weight' of 'head'"):
        join().sparse(model)


@pytest.mark.parametrize("options", [{}, {"mode": "allreduce", "ps": 1}], ids=["ps", "hybrid"])
def test_an_optimizer_that_was_given_before_the_table(join: Join, options: dict[str, Any]) -> None:
    model, job = nn.Embedding(10, 4), join(**options)
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        ScriptError, match=r"job\.optimizer\(\) was given the weight of 'embedding' before job\.sparse\(\)"
    ):
        job.sparse(model)


def test_ids_that_are_no_ids(join: Join) -> None:
    model = join().sparse(nn.Embedding(10, 4))
    with pytest.raises(ScriptError, match=r"must be int64 or int32 on the CPU, not torch\.float32"):
        model(torch.ones(3))


def test_only_and_min_rows(join: Join) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.big = nn.Embedding(5, 2), nn.Embedding(500, 2)

    job = join()
    model = job.sparse(Two(), min_rows=100)
    assert isinstance(model.small, nn.Embedding) and isinstance(model.big, es.nn.Embedding)
    model = join().sparse(Two(), only=["small"])
    assert isinstance(model.small, es.nn.Embedding) and isinstance(model.big, nn.Embedding)


def test_grads_given_as_column_slices(join: Join) -> None:
    """The gradient of a concatenation comes as slices of a wide matrix: rows far apart."""
    tables: Any = nn.ModuleList(nn.EmbeddingBag(20, 3, mode="sum") for _ in range(4))
    job = join()
    ours = job.sparse(copy.deepcopy(tables), optimizer=es.SGD(lr=0.1))
    opt = torch.optim.SGD(tables.parameters(), lr=0.1)
    for batch in job.steps(job.loader({"id": IDS}, batch_size=6)):
        opt.zero_grad()
        for net in (ours, tables):
            out = torch.cat([t(batch["id"][:, i : i + 1]) for i, t in enumerate(net)], 1)
            (out @ torch.arange(12.0) / 12).sin().sum().backward()
        opt.step()
    for mine, theirs in zip(ours.state_dict().values(), tables.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
