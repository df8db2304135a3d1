"""What stands in the place of ``everstep`` in the reference: the same names, and nothing behind them but PyTorch.

Tables follow the rule that everstep states for them: an optimizer moves the rows that its step's batches touched, and
no others (torch's sparse optimizers; ``SparseAdam`` for Adam). Where tables are on no ps, they are ordinary parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import everstep
from everstep.data.dataset import Fields
from everstep.data.loader import Loader
from everstep.model.table import OptimizerKind, OptimizerSpec
from meaning.composed import Steps


class Table:
    """An embedding's weight, the rows touched since its gradient was last dropped, and what updates them."""

    def __init__(self, weight: nn.Parameter, spec: OptimizerSpec | None) -> None:
        self.weight, self.spec = weight, spec
        self.touched: Tensor = torch.empty(0, dtype=torch.int64)
        self.reached = False
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(self.reach)  # type: ignore[no-untyped-call]
        self.state: dict[str, Tensor] = {}
        self.counts = torch.zeros(len(weight), dtype=torch.int64)  # steps of each row

    def look(self, ids: Tensor) -> None:
        """Rows that are looked up; those of before are forgotten if their gradient was dropped since."""
        if not torch.is_grad_enabled():
            return
        if self.reached and self.weight.grad is None:
            self.touched = self.touched[:0]
        self.reached = False
        self.touched = torch.cat([self.touched, ids.detach().reshape(-1).long()]).unique()

    def reach(self, weight: Tensor) -> None:
        """The weight has a gradient."""
        self.reached = True

    def update(self, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        """One step of ``kind`` on the touched rows: torch's own formula, on a parameter of just these rows."""
        grad = self.weight.grad
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        if grad is None:
            return
        rows = torch.cat([self.touched, grad.abs().sum(1).nonzero().flatten()]).unique()
        counts = self.counts[rows]  # a row counts its own steps; those with as many are stepped together
        for count in counts.unique():
            self._step(rows[counts == count], int(count), grad, kind, options)

    def _step(
        self, rows: Tensor, count: int, grad: Tensor, kind: type[torch.optim.Optimizer], options: dict[str, Any]
    ) -> None:
        part = nn.Parameter(self.weight.detach()[rows].clone())
        part.grad = grad[rows].clone()
        optimizer = kind([part], **options)
        state = optimizer.state[part]
        if self.state and count:
            for name, whole in self.state.items():
                state[name] = whole[rows].clone()
            if kind is not torch.optim.SGD:
                state["step"] = torch.tensor(float(count))
        optimizer.step()
        for name, value in optimizer.state[part].items():
            if name != "step" and isinstance(value, Tensor):
                if name not in self.state:
                    self.state[name] = torch.zeros_like(self.weight)
                self.state[name][rows] = value
        self.counts[rows] += 1
        with torch.no_grad():
            self.weight[rows] = part


def _joined(parts: list[Any]) -> Any:
    """One batch of several, one behind the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, Fields) or (isinstance(first, list | tuple) and any(isinstance(e, Tensor) for e in first)):
        fields = [_joined([part[i] for part in parts]) for i in range(len(first))]
        return Fields(fields) if isinstance(first, Fields) else type(first)(fields)
    return [element for part in parts for element in part]


def formula_of(spec: OptimizerSpec) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The torch optimizer of the same formula."""
    if spec.kind is OptimizerKind.SGD:
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
        return torch.optim.SGD, {n: getattr(spec, n) for n in names}
    if spec.kind is OptimizerKind.ADAGRAD:
        return torch.optim.Adagrad, {
            "lr": spec.lr,
            "eps": spec.eps,
            "weight_decay": spec.weight_decay,
            "initial_accumulator_value": spec.initial_accumulator,
        }
    kinds = {OptimizerKind.ADAM: torch.optim.Adam, OptimizerKind.ADAMW: torch.optim.AdamW}
    options = {"lr": spec.lr, "betas": (spec.beta1, spec.beta2), "eps": spec.eps, "weight_decay": spec.weight_decay}
    return kinds[spec.kind], options


class PlainJob:
    """The face of a job; every method gives back what it was given."""

    slot, shards, shard, chief = 0, 1, 0, True
    device = torch.device("cpu")

    def __init__(self, scale: int, ps: bool, steps: Steps | None, lazy: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.spec = SimpleNamespace(ps=int(ps), workers=1, mode="plain", seed=seed)
        self._scale, self._lazy = scale, lazy
        self._steps = None if steps is None else list(steps)
        self._datasets: list[str] = []
        self._models: list[nn.Module] = []
        self._tables: list[Table] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tracked: dict[str, Any] = {}
        self._epochs_done: dict[str, int] = {}
        self.step = 0

    # ------------------------------------------------------------ the model

    def sparse(self, model: nn.Module, *, optimizer: OptimizerSpec | None = None, **options: Any) -> nn.Module:
        known = {id(t.weight): t for t in self._tables}
        only = options.get("only")
        for name, module in model.named_modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            label = name or "embedding"
            if only is not None and not (only(label, module) if callable(only) else label in only):
                continue
            table = known.get(id(module.weight))
            if table is None:
                own = getattr(module, "everstep_optimizer", None)
                table = known[id(module.weight)] = Table(module.weight, own or optimizer)
                self._tables.append(table)
            module.register_forward_pre_hook(lambda m, args, t=table: t.look(args[0]))
        self._remember(model)
        return model

    def replicate(self, model: nn.Module) -> nn.Module:
        self._remember(model)
        return model

    def _remember(self, model: nn.Module) -> None:
        if not any(m is model for m in self._models):
            self._models.append(model)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._optimizers.append(optimizer)
        hidden: list[tuple[nn.Parameter, Tensor | None]] = []

        def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for table in self._tables:
                group = next((g for g in opt.param_groups if any(p is table.weight for p in g["params"])), None)
                held = any(p is table.weight for o in self._optimizers for g in o.param_groups for p in g["params"])
                if group is None and (held or len(self._optimizers) > 1):
                    continue  # another one's
                if table.spec is not None:
                    kind, options = formula_of(table.spec)
                    leads = opt.param_groups[0] if group is None else group
                    if "initial_lr" in leads:  # its schedule is that of the table, too
                        options["lr"] *= float(leads["lr"]) / float(leads["initial_lr"])
                elif group is not None and not self._lazy:
                    continue
                elif group is not None:
                    kind = type(opt)
                    options = {k: v for k, v in group.items() if k in opt.defaults}
                    if kind is torch.optim.AdamW:
                        options.pop("decoupled_weight_decay", None)
                    if kind is torch.optim.SparseAdam:
                        kind = torch.optim.Adam
                        options.pop("maximize", None)
                else:
                    kind, options = torch.optim.Adagrad, {"lr": 0.05}
                table.update(kind, options)
                if group is not None:
                    hidden.append((table.weight, table.weight.grad))
                    table.weight.grad = None

        def after(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            while hidden:
                weight, grad = hidden.pop()
                weight.grad = grad

        optimizer.register_step_pre_hook(before)  # type: ignore[arg-type]
        optimizer.register_step_post_hook(after)
        zero = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            zero(set_to_none)
            held = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
            if len(self._optimizers) == 1:  # the tables that it steps
                for table in self._tables:
                    if id(table.weight) not in held:
                        table.weight.grad = None

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        return optimizer

    def track(self, **objects: Any) -> None:
        self._tracked.update(objects)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    # ------------------------------------------------------------ the loop

    def loader(self, source: Any, batch_size: int, *, epochs: int = 1, **options: Any) -> Loader:
        return Loader(source, batch_size, epochs=epochs, **{"seed": self.seed, **options})

    def steps(self, loader: Loader) -> Iterator[Any]:
        first = self._epochs_done.get(loader.name, 0)
        self._epochs_done[loader.name] = first + loader.epochs
        if self._steps is not None:
            yield from self._composed(loader, first + loader.epochs)
            return
        for epoch in range(first, first + loader.epochs):
            step = loader.batch_size * self._scale
            for lo in range(0, loader.samples, step):
                yield loader.read(epoch, lo, min(lo + step, loader.samples))
                self.step += 1

    def _composed(self, loader: Loader, until: int) -> Iterator[Any]:
        """Batches of the samples that the job took for each step."""
        if loader.name not in self._datasets:
            self._datasets.append(loader.name)
        mine = self._datasets.index(loader.name)
        assert self._steps is not None
        while self._steps and all(dataset == mine and epoch < until for dataset, epoch, *_ in self._steps[0]):
            parts = [loader.read(epoch, lo, hi) for _, epoch, lo, hi in self._steps.pop(0)]
            yield _joined(parts)
            self.step += 1

    def report(self, **values: Any) -> None:
        for value in values.values():
            float(value.detach() if isinstance(value, Tensor) else value)

    def log(self, *words: Any) -> None:
        pass

    @contextmanager
    def eval(self, model: nn.Module | None = None) -> Iterator[None]:
        models = [model] if model is not None else self._models
        training = [m.training for m in models]
        for m in models:
            m.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for m, was in zip(models, training, strict=True):
                m.train(was)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "models": [m.state_dict() for m in self._models],
            "optimizers": [o.state_dict() for o in self._optimizers],
            "tracked": {name: o.state_dict() for name, o in self._tracked.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for model, values in zip(self._models, state["models"], strict=True):
            model.load_state_dict(values)

    def close(self) -> None:
        pass


class PlainTables:
    """``es.nn``: tables without a vocabulary have a thousand rows here; those of one name are one."""

    def __init__(self) -> None:
        self._weights: dict[str, nn.Parameter] = {}

    def _named(self, module: Any, name: str, init: Any, optimizer: Any) -> Any:
        if init is not None:
            nn.init.constant_(module.weight, init.a)
        module.weight = self._weights.setdefault(name, module.weight)
        module.everstep_optimizer = optimizer
        return module

    def Embedding(
        self,
        name: str,
        dim: int,
        *,
        vocabulary: int | None = None,
        init: Any = None,
        optimizer: Any = None,
        padding_idx: int | None = None,
    ) -> Any:
        return self._named(nn.Embedding(vocabulary or 1000, dim, padding_idx), name, init, optimizer)

    def EmbeddingBag(
        self,
        name: str,
        dim: int,
        mode: str = "sum",
        *,
        vocabulary: int | None = None,
        init: Any = None,
        optimizer: Any = None,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> Any:
        bag = nn.EmbeddingBag(
            vocabulary or 1000, dim, mode=mode, padding_idx=padding_idx, include_last_offset=include_last_offset
        )
        return self._named(bag, name, init, optimizer)


class Plain:
    """The module: ``Plain(scale=2, ps=True)`` in the place of ``everstep``."""

    plain = True

    def __init__(
        self,
        scale: int = 1,
        ps: bool = False,
        steps: Steps | None = None,
        lazy: bool = False,
        wrong: Callable[[PlainJob], None] | None = None,
        seed: int = 0,
    ) -> None:
        self.scale, self._ps, self._steps, self._lazy, self._wrong = scale, ps, steps, lazy, wrong
        self._seed = seed
        self.nn = PlainTables()

    def join(self, **options: Any) -> PlainJob:
        job = PlainJob(self.scale, self._ps, self._steps, self._lazy, self._seed)
        if self._wrong is not None:
            self._wrong(job)
        return job

    def __getattr__(self, name: str) -> Any:
        return getattr(everstep, name)
