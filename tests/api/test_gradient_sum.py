"""All lookups of a table in one backward pass add to one array: the gradient that PyTorch has, however it is asked."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everstep as es
from everstep.api.job import Job

Join = Callable[..., Job]
IDS = np.random.default_rng(3).integers(0, 20, (24, 4))


class Two(nn.Module):
    """One table looked up four times, as rows and as bags with weights that learn, and one with a padding row."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 5)
        self.bags = nn.EmbeddingBag(40, 5, mode="sum")
        self.bags.weight = self.rows.weight
        self.padded = nn.Embedding(20, 5, padding_idx=3)
        self.w = nn.Parameter(torch.linspace(0.5, 1, 4))
        self.scale = scale  # 2: ids that are computed, so that rows come behind those that are looked up before

    def forward(self, ids: Tensor) -> Tensor:
        first = self.rows(ids[:, 0]).sin() + self.rows(ids[:, 1] * self.scale)
        bag = self.bags(ids, per_sample_weights=self.w.expand(ids.shape))
        return torch.tanh(first * bag + self.padded(ids[:, 2]) * self.padded(ids[:, 3]).cos())


def once(net: nn.Module, ids: Tensor) -> None:
    net(ids).sum().backward()


def retained(net: nn.Module, ids: Tensor) -> None:
    loss = net(ids).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def parts(net: nn.Module, ids: Tensor) -> None:
    out = net(ids)
    out[:3].sum().backward(retain_graph=True)
    out[3:].square().sum().backward()


def two_graphs(net: nn.Module, ids: Tensor) -> None:
    a, b = net(ids), net(ids.flip(1))
    a.sum().backward()
    b.square().sum().backward()


def failed_before(net: nn.Module, ids: Tensor) -> None:
    out = net(ids)
    dense = out * 1.0

    def fail(_: Tensor) -> None:
        raise RuntimeError("planted")

    handle = net.get_parameter("w").register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="planted"):
        dense.sum().backward(retain_graph=True)
    handle.remove()
    net.zero_grad()
    dense.sum().backward()


def asked(net: nn.Module, ids: Tensor) -> None:
    weight = net.get_parameter("rows.weight")
    (grad,) = torch.autograd.grad(net(ids).sum(), [weight])
    weight.grad = grad * 2


def hooked(net: nn.Module, ids: Tensor) -> None:
    handle = net.get_parameter("rows.weight").register_hook(lambda g: g.clamp(-0.5, 0.5))  # type: ignore[no-untyped-call]
    net(ids).sum().backward()
    handle.remove()


def without_weights(net: nn.Module, ids: Tensor) -> None:
    w = net.get_parameter("w")
    w.requires_grad_(False)
    net(ids).sum().backward()
    w.requires_grad_(True)


def frozen_then_thawed(net: nn.Module, ids: Tensor) -> None:
    weight = net.get_parameter("rows.weight")
    weight.requires_grad_(False)
    net(ids).sum().backward()
    weight.requires_grad_(True)
    with torch.no_grad():
        net(ids)
    net(ids).sum().backward()


def recomputed(net: nn.Module, ids: Tensor) -> None:
    checkpoint(net, ids, use_reentrant=False).sum().backward()


def recomputed_within(net: nn.Module, ids: Tensor) -> None:
    x = torch.zeros((), requires_grad=True)
    out = net(ids).sum() + checkpoint(lambda x: net(ids.flip(1)) + x, x, use_reentrant=True).sum()
    out.backward()


def recomputed_between(net: nn.Module, ids: Tensor) -> None:
    """Rows come in the middle of backward, between the lookups that were first and those that were last."""
    x = torch.zeros((), requires_grad=True)
    first = net(ids).sum()
    middle = checkpoint(lambda x: net((ids + 7) % 20) + x, x, use_reentrant=True).sum()
    (first + middle + net(ids.flip(1)).sum()).backward()


def both_ways(net: nn.Module, ids: Tensor) -> None:
    """The first lookup is in a graph of its own, and in none of the loss."""
    net(ids)
    net(ids.flip(1)).sum().backward()
    net(ids).sum().backward(inputs=[net.get_parameter("w"), net.get_parameter("rows.weight")])


def weights_first(net: nn.Module, ids: Tensor) -> None:
    """Bags whose own weights learn are looked up first."""
    w = net.get_parameter("w").expand(ids.shape).square()
    bag = net.get_submodule("bags")(ids, per_sample_weights=w).sum()
    rows = net(ids).sum()
    bag.backward()
    rows.backward()


WAYS = [
    *(once, retained, parts, two_graphs, failed_before, asked, hooked, without_weights, frozen_then_thawed),
    *(recomputed, recomputed_within, recomputed_between, both_ways, weights_first),
]


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_as_torch(join: Join, way: Callable[[nn.Module, Tensor], None], scale: int) -> None:
    torch.manual_seed(1)
    plain = Two(scale)
    job = join()
    ours = job.sparse(copy.deepcopy(plain))
    opts = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (ours, plain)]
    opts[0] = job.optimizer(opts[0])
    for batch in job.steps(job.loader({"id": IDS}, batch_size=6, epochs=2)):
        for net, opt in zip((ours, plain), opts, strict=True):
            opt.zero_grad()
            way(net, batch["id"])
            opt.step()
    state, expected = ours.state_dict(), plain.state_dict()
    for name in ("rows.weight", "padded.weight", "w"):
        torch.testing.assert_close(state[name], expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1, 2])
def test_who_was_to_be_called_first_at_the_end_of_a_pass_gets_the_whole(join: Join, scale: int) -> None:
    """A group takes the gradients of tables when backward ends. Its call may have been queued before the table's, which
    adds the gradient of rows that came in the middle of the batch."""
    torch.manual_seed(1)
    plain = Two(scale)
    job = join()
    model = job.sparse(copy.deepcopy(plain), optimizer=es.SGD(lr=0.0))
    table = job._tables.batches["rows"]
    taken = []

    def at_the_end(grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: taken.append(table.take_local()))

    for batch in job.steps(job.loader({"id": IDS}, batch_size=6)):
        loss = model(batch["id"]).sum()
        loss.register_hook(at_the_end)
        loss.backward()
        plain.zero_grad()
        plain(batch["id"]).sum().backward()
        found = taken.pop()
        expected = plain.rows.weight.grad
        torch.testing.assert_close(torch.from_numpy(found.grads), expected[found.keys])
        assert int(expected.any(1).sum()) <= len(found.keys)
        assert table.take_local() is None


def test_memory_of_a_batch_is_given_back(join: Join) -> None:
    """The node that all lookups share and what it knows of are no circle that keeps a batch's rows."""
    job = join()
    model = job.sparse(Two(), optimizer=es.SGD(lr=0.1))
    opt = job.optimizer(torch.optim.SGD([model.w], lr=0.1))
    sums = []
    for batch in job.steps(job.loader({"id": IDS}, batch_size=6)):
        opt.zero_grad()
        model(batch["id"]).sum().backward()
        opt.step()
        sums.append(job._tables.batches["rows"].sum(-1))
    assert all(s.node is None and not s._open for s in sums)
