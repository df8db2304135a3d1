"""Does ``job.sparse``: it decides which modules of a model become ps tables, and how their rows begin."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from everstep.api import nn as esnn
from everstep.api.optim import Adagrad, Normal
from everstep.api.rows import USED_WHOLE
from everstep.errors import ScriptError
from everstep.model.table import InitSpec, OptimizerSpec, TableSpec

InitChoice = Literal["auto"] | InitSpec
Only = Collection[str] | Callable[[str, nn.Module], bool] | None

DEFAULT_OPTIMIZER = Adagrad(lr=0.05)


class LifeCycle(NamedTuple):
    """Says when rows are made and freed; see ``TableSpec``."""

    admit_after: int = 0
    expire_batches: int = 0
    expire_s: int = 0

    def check(self, where: str) -> None:
        """Raises ScriptError."""
        for name, value in self._asdict().items():
            if not isinstance(value, int) or not 0 <= value < 1 << 31:
                raise ScriptError(f"{where}: {name}={value!r} must be a whole number, 0 (off) or more")


NO_LIFE_CYCLE = LifeCycle()


@dataclass
class TableInfo:
    """Is a table as the script means it. ``upload``: float32 [rows, dim] to begin with, where there are values.

    ``own``: its optimizer was given to job.sparse or to its module; else the optimizer that holds its parameter
    counts."""

    spec: TableSpec
    own: bool = False
    padding: int | None = None
    zero_padding: bool = True  # the padding row is zero; False where uploaded values say otherwise
    upload: Tensor | None = None
    upload_keys: Tensor | None = None  # int64 [rows]: keys of ``upload``; None: 0, 1, 2, ...
    weight: nn.Parameter | None = None  # of the script's module: becomes the table's parameter
    tied: list[tuple[nn.Module, str]] = field(default_factory=list)  # other modules that have it, and its name there


def swap(
    model: nn.Module,
    *,
    optimizer: OptimizerSpec | None,
    init: InitChoice,
    min_rows: int,
    only: Only,
    taken: Collection[str] = (),
    life: LifeCycle = NO_LIFE_CYCLE,
) -> tuple[nn.Module, list[TableInfo], list[esnn.Embedding | esnn.EmbeddingBag]]:
    """Put es.nn modules in the place of torch's. Returns the model, its tables and the modules to attach.

    ``taken``: tables of earlier calls; a torch module of the same name in another model gets a table of its own.
    ``life``: of tables whose module says nothing of it."""
    if not isinstance(model, nn.Module):
        raise ScriptError(f"job.sparse needs a torch.nn.Module, not {type(model).__name__}")
    tables: dict[str, TableInfo] = {}
    new: dict[int, esnn.Embedding | esnn.EmbeddingBag] = {}
    by_weight: dict[int, str] = {}
    tied: list[tuple[nn.Module, str]] = []
    for name, module in list(model.named_modules()):
        label = name or "embedding"
        if isinstance(module, esnn.Embedding | esnn.EmbeddingBag):
            info = _of_ours(module, optimizer, init, life)
            known = tables.get(module.name)
            if known is not None and known.spec != info.spec:
                raise ScriptError(
                    f"two modules share the table {module.name!r} but differ: {_difference(known.spec, info.spec)}"
                )
            tables.setdefault(module.name, info)
            new[id(module)] = module
        elif type(module) in (nn.Embedding, nn.EmbeddingBag) and _wanted(label, module, min_rows, only):
            assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
            table = by_weight.get(id(module.weight), "")
            if not table:
                table = by_weight[id(module.weight)] = _free(label, taken)
                tied = _tied(model, label, module.weight)
            twin, info = _of_torch(table, module, optimizer, init, life)
            info.tied = tied
            if table in tables and tables[table].spec != info.spec:
                raise ScriptError(f"table {table!r} has two meanings: rename one of the modules")
            tables.setdefault(table, info)
            new[id(module)] = twin
    if not new:
        raise ScriptError(
            "job.sparse found no nn.Embedding or nn.EmbeddingBag in the model"
            + (f" with at least {min_rows} rows" if min_rows else "")
            + ": leave the call out, or check min_rows and only"
        )
    if id(model) in new:
        return new[id(model)], list(tables.values()), list(new.values())
    for module in list(model.modules()):
        for child_name, child in list(module._modules.items()):
            if child is not None and id(child) in new:
                module._modules[child_name] = new[id(child)]
    return model, list(tables.values()), list(new.values())


def _free(label: str, taken: Collection[str]) -> str:
    """Return a free name: ``label``, or ``label@2``, ``@3``, ...: the same on every worker, for all run the same
    script."""
    names = (label if n == 1 else f"{label}@{n}" for n in itertools.count(1))
    return next(name for name in names if name not in taken)


def _tied(model: nn.Module, label: str, weight: Tensor) -> list[tuple[nn.Module, str]]:
    """Return other modules that have the weight. Raises ScriptError if it is too large to be used as a whole in each
    batch."""
    out: list[tuple[nn.Module, str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            for parameter, value in module._parameters.items():
                if value is weight:
                    if weight.numel() > USED_WHOLE or type(weight) is not nn.Parameter or weight.is_meta:
                        raise ScriptError(
                            f"the weight of {label!r} is also {parameter!r} of {name!r}: a table on the ps of more "
                            f"than {USED_WHOLE:,} numbers, or on meta, can not be tied to a dense parameter; leave it "
                            "out with only="
                        )
                    out.append((module, parameter))
    return out


def _wanted(name: str, module: nn.Module, min_rows: int, only: Only) -> bool:
    if only is not None:
        return only(name, module) if callable(only) else name in only
    return int(module.num_embeddings) >= min_rows  # type: ignore[arg-type]


def _of_ours(
    module: esnn.Embedding | esnn.EmbeddingBag, optimizer: OptimizerSpec | None, init: InitChoice, life: LifeCycle
) -> TableInfo:
    begin = module.init
    if begin is None:
        begin = init if isinstance(init, InitSpec) else Normal(0.0, module.dim**-0.5)
    own = LifeCycle(module.admit_after, module.expire_batches, module.expire_s)
    own.check(f"table {module.name!r}")
    how = module.optimizer or optimizer or DEFAULT_OPTIMIZER
    lives = (own if any(own) else life)._asdict()
    spec = TableSpec(module.name, module.dim, how, begin, rows=module.vocabulary, **lives)
    return TableInfo(spec, own=(module.optimizer or optimizer) is not None, padding=module.padding_idx)


def _of_torch(
    name: str,
    module: nn.Embedding | nn.EmbeddingBag,
    optimizer: OptimizerSpec | None,
    init: InitChoice,
    life: LifeCycle,
) -> tuple[esnn.Embedding | esnn.EmbeddingBag, TableInfo]:
    meta = module.weight.device.type == "meta"
    if not meta and (module.weight.device.type != "cpu" or module.weight.dtype != torch.float32):
        raise ScriptError(f"{name!r}: the weight must be float32 on the CPU or on meta, not {module.weight.dtype}")
    rows, dim, padding = int(module.num_embeddings), int(module.embedding_dim), module.padding_idx
    twin: esnn.Embedding | esnn.EmbeddingBag
    if isinstance(module, nn.EmbeddingBag):
        if module.scale_grad_by_freq:
            raise esnn.bags_by_frequency(repr(name))
        twin = esnn.EmbeddingBag(
            name,
            dim,
            module.mode,
            vocabulary=rows,
            padding_idx=padding,
            include_last_offset=module.include_last_offset,
        )
    else:
        twin = esnn.Embedding(name, dim, vocabulary=rows, padding_idx=padding)
    twin.scale_grad_by_freq = module.scale_grad_by_freq
    twin.max_norm, twin.norm_type = module.max_norm, module.norm_type
    twin.train(module.training)
    twin.freeze = not module.weight.requires_grad
    begin = init if isinstance(init, InitSpec) else Normal(0.0, 1.0)
    upload = None if meta or isinstance(init, InitSpec) else module.weight.detach()
    spec = TableSpec(name, dim, optimizer or DEFAULT_OPTIMIZER, begin, rows=rows, **life._asdict())
    own = optimizer is not None
    weight = module.weight if type(module.weight) is nn.Parameter and not meta else None
    if weight is None:
        _watch_replaced(name, module.weight)
    return twin, TableInfo(spec, own, padding, zero_padding=upload is None, upload=upload, weight=weight)


def _watch_replaced(name: str, weight: Tensor) -> None:
    """Watch for a script that still uses the parameter that a table has replaced: it would train something that nobody
    reads."""

    def hook(p: Tensor) -> None:
        raise ScriptError(
            f"a gradient reached the old weight of {name!r}, which is a table on the ps since job.sparse: something "
            "(a penalty, a tied layer, a list of parameters) refers to it still; take it from the model after "
            "job.sparse, or leave the embedding out with job.sparse(model, only=...)"
        )

    weight.everstep_replaced = name  # type: ignore[attr-defined]
    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _difference(a: TableSpec, b: TableSpec) -> str:
    names = [f for f in a.__struct_fields__ if getattr(a, f) != getattr(b, f)]
    return ", ".join(f"{f} {getattr(a, f)!r} and {getattr(b, f)!r}" for f in names)
