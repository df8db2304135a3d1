"""What rows share: small data, a small model with tables, and the lines around a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meaning.table import Result

ROWS, KEYS, DIM = 96, 20, 4
Factory = Callable[[], nn.Module]


def data(n: int = ROWS, seed: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    """``ids`` int64 [n, 3], ``x`` float32 [n, 4], ``y`` float32 [n, 1], ``row`` int64 [n]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, KEYS, (n, 3))
    x = rng.normal(size=(n, 4)).astype(np.float32)
    y = (x.sum(1, keepdims=True) + ids.sum(1, keepdims=True) / 10 - 3).astype(np.float32)
    return {"ids": ids, "x": x, "y": y, "row": np.arange(n)}


class Net(nn.Module):
    """An embedding, a bag and a dense part: ``first``, whatever stands in the ``middle``, ``last``."""

    def __init__(self, middle: nn.Module | None = None, padding_idx: int | None = None, **bag: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(KEYS, DIM, padding_idx=padding_idx)
        self.bag = nn.EmbeddingBag(KEYS, DIM, **{"mode": "sum", **bag})
        self.first = nn.Linear(2 * DIM + 4, 8)
        self.middle = middle or nn.Identity()
        self.last = nn.Linear(8, 1)

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        """For scripts. (Not for ``forward``: behind a method that FSDP knows it shards the model again.)"""
        return self._hidden(batch)

    def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.cat([self.emb(batch["ids"][:, 0]), self.bag(batch["ids"][:, 1:]), batch["x"]], 1)
        out: Tensor = torch.tanh(self.middle(self.first(x)))
        return out

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.last(self._hidden(batch))
        return out

    def total(self) -> Tensor:
        """The sum of the last layer's weights: a loss where only the data are looked at."""
        return self.last.weight.sum()

    def rows(self, ids: Tensor) -> Tensor:
        out: Tensor = self.emb(ids)
        return out

    def penalty(self) -> Tensor:
        """L2 of the dense part."""
        return torch.stack([p.square().sum() for p in self.dense()]).sum()

    def dense(self) -> list[nn.Parameter]:
        """All parameters but the tables'."""
        return [p for m in (self.first, self.middle, self.last) for p in m.parameters()]


class Script:
    """The job, the model and what is noted on the way."""

    def __init__(
        self,
        es: Any,
        make: Factory = Net,
        *,
        table: Any = "sgd",
        batch: int = 8,
        epochs: int = 2,
        of: dict[str, Any] | None = None,
        sparse: dict[str, Any] | None = None,
        loader: dict[str, Any] | None = None,
    ) -> None:
        """``table``: the tables' own optimizer; None: that of the torch optimizer that holds them."""
        self.es = es
        self.job = es.join()
        self.model: Any = self.put(make(), table=table, **(sparse or {}))
        self.data = data() if of is None else of
        self.batch, self.epochs, self.options = batch, epochs, loader or {}
        self.losses: list[Tensor] = []
        self.notes: dict[str, Any] = {}

    def put(self, model: nn.Module, *, table: Any = "sgd", **sparse: Any) -> Any:
        """``job.sparse`` where there is a ps, ``fully_shard`` with several processes a worker, ``job.replicate``."""
        if self.job.spec.ps and _tables(model, self.es):
            given = (
                {"optimizer": self.es.SGD(lr=0.1)} if table == "sgd" else {} if table is None else {"optimizer": table}
            )
            model = self.job.sparse(model, **given, **sparse)
        if getattr(self.job, "processes_per_worker", 1) > 1:
            shard(model, self.job.device_mesh)
        return self.job.replicate(model)

    def sgd(self, lr: float = 0.1, params: Any = None, **options: Any) -> Any:
        return self.of(torch.optim.SGD(self.model.parameters() if params is None else params, lr=lr, **options))

    def of(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.job.optimizer(optimizer)

    def loader(self, **options: Any) -> Any:
        return self.job.loader(self.data, self.batch, **{"epochs": self.epochs, **self.options, **options})

    def batches(self, **options: Any) -> Iterator[Any]:
        return iter(self.job.steps(self.loader(**options)))

    def loss(self, batch: dict[str, Tensor], model: Any = None) -> Tensor:
        out = (self.model if model is None else model)(batch)
        loss: Tensor = nn.functional.mse_loss(out, batch["y"])
        self.losses.append(loss.detach().clone())
        return loss

    def note(self, name: str, value: Any) -> None:
        """Something compared like a parameter."""
        self.notes[name] = value

    def each(self, name: str, value: Any) -> None:
        """Something of an iteration: compared where an iteration is one of plain PyTorch's."""
        self.notes.setdefault(f"each.{name}", []).append(value)

    def end(self) -> Result:
        """Everything that was trained, and everything noted."""
        out: Result = {}
        for i, state in enumerate(self.job.state_dict()["models"]):
            for name, value in state.items():
                if isinstance(value, Tensor) and name.rpartition(".")[2] != "keys":
                    out[f"{i}.{name}"] = _array(value)
        for name, value in self.notes.items():
            out[name] = _array(value)
        out["each.loss"] = _array(self.losses)
        return out


def shard(model: nn.Module, mesh: Any) -> None:
    """As a script for FSDP2 does it: modules of another dtype by themselves, and the methods that use parameters."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    dtypes = {p.dtype for p in model.parameters()}
    for part in model.children() if len(dtypes) > 1 else ():
        if any(p.dtype != torch.float32 for p in part.parameters()):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "penalty", "total", "rows", "short"):
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """In here a sharded model has its whole parameters, for what uses them outside of its forward."""
    if not hasattr(model, "unshard"):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """``full_tensor()`` of what is sharded over processes (a DTensor), as scripts for FSDP2 read it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def mine(tensor: Tensor) -> Tensor:
    """What this process has of it: ``to_local()``."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_it_lies(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, sharded as ``like`` is: ``distribute_tensor``."""
    if not hasattr(like, "to_local"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements)  # type: ignore[attr-defined]


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        return whole(value.detach()).cpu().numpy().copy()
    if isinstance(value, list):
        return np.array([_array(v) for v in value])
    return np.asarray(value)


def _tables(model: nn.Module, es: Any) -> bool:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    ours = tuple(k for k in (es.nn.Embedding, es.nn.EmbeddingBag) if isinstance(k, type))
    return any(isinstance(m, kinds + ours) for m in model.modules())
