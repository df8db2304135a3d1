"""Has ``es.nn``: embeddings whose rows live on the ps, with or without a vocabulary.

``Embedding(name, dim)`` and ``EmbeddingBag(name, dim)`` are also what ``job.sparse`` puts in the place of torch's
modules. Modules of the same name share one table. Their ``weight`` has the rows of the batch in hand (``api/rows``).
Rows come from the ps for every batch, and what ``weight.grad`` holds when the optimizer steps goes there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from everstep.api.batch_table import BatchTable, GradientSum
from everstep.api.rows import ALL_ROWS, LOOKUPS, TableParameter, table_of
from everstep.errors import ScriptError
from everstep.model.table import InitSpec, OptimizerSpec
from everstep.native import bag_backward, bag_forward, gather_rows

Mode = Literal["sum", "mean"]  # of the kernels; torch's max is left to torch


class Lookup:
    """Is what one call of a module needs: the rows of this batch, and for each id the index of its row.

    ``ids`` int64 [n]: what was looked up, whatever becomes of the tensor that it came from. ``table``: None for one
    outside of training, whose rows are only read."""

    __slots__ = ("by_count", "dim", "ids", "inverse", "leads", "padding_at", "sum", "table", "values")

    def __init__(
        self,
        table: BatchTable | None,
        values: NDArray[np.float32],
        inverse: NDArray[np.int32],
        ids: NDArray[np.int64],
        padding_at: int = -1,
    ) -> None:
        self.table, self.values, self.inverse, self.ids = table, values, inverse, ids
        self.dim = values.shape[1]
        self.padding_at = padding_at  # index of the padding row, which gets no gradient
        self.by_count = False  # the gradient of a row is divided by how often it was looked up
        self.sum: GradientSum | None = None  # where its gradient goes
        self.leads = False  # its node of autograd gives the sum to the weight

    def source(self, weight: Tensor, may_lead: bool = True) -> Tensor:
        """Return what a module's output is computed from, for autograd. The first lookup of a batch leads: it is
        computed from ``weight``, all others from a token that it gives besides, so that its node of autograd comes
        behind all others'. ``may_lead``: nothing else that learns goes into it."""
        table = self.table
        if table is None or not torch.is_grad_enabled() or not table.learns:
            return weight
        self.sum = found = table.sum(self.padding_at)
        if found.node is not None:
            return found.node
        if may_lead:
            self.leads = True
            return weight
        node: Tensor = _SumOfLookups.apply(weight, found)  # type: ignore[no-untyped-call]
        found.node = node
        return node

    def gradient(
        self,
        grad: NDArray[np.float32],
        offsets: NDArray[np.int64] | None = None,
        mode: Mode = "sum",
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add the gradient ``grad`` float32 [bags, dim] of what this lookup gave to that of the table's rows.

        Raises ScriptError when the batch is over."""
        table, found = self.table, self.sum
        if table is None or found is None or table.batch != found.batch:
            name = table.name if table is not None else ""
            raise ScriptError(
                f"backward() reached {f'table {name!r}' if name else 'a table'} of a batch that is over, or of an "
                "evaluation: call backward() inside the same iteration of job.steps()"
            )
        out, begun = found.target()
        u, inverse, padding_at = len(out), self.inverse, self.padding_at
        if table.complete and found.layout != table.layout:  # the rows stand elsewhere since
            inverse = table.moved[inverse].astype(np.int32)
            padding_at = int(table.moved[padding_at]) if padding_at >= 0 else -1
        if not self.by_count and (padding_at < 0 or not table.grown):
            bag_backward(grad, inverse, offsets, mode, weights, u, out, begun)
            return
        own = np.empty((u, self.dim), np.float32)
        bag_backward(grad, inverse, offsets, mode, weights, u, own)
        if self.by_count:
            own /= np.maximum(np.bincount(inverse, minlength=u), 1).astype(np.float32)[:, None]
        if padding_at >= 0:
            own[padding_at] = 0.0
        if begun:
            out += own
        else:
            np.copyto(out, own)

    def result(self, out: Tensor) -> Tensor:
        """Take what its node gave as a module's output. That of one which leads goes into all further ones."""
        if self.leads and self.sum is not None:
            self.sum.node = out
        return out

    def given(self) -> Tensor | None:
        """Return what the weight is given when its node's backward is over."""
        return self.sum.take() if self.leads and self.sum is not None else None

    def pad(self, padding_idx: int | None) -> None:
        """``padding_idx`` is what this call says of padding, whatever the table's module says. Raises ScriptError where
        both differ, and the row is among the ids."""
        table = self.table
        if (table is not None and table.padding == padding_idx) or (padding_idx is None and self.padding_at < 0):
            return
        if table is not None and table.padding is not None and self.padding_at >= 0 and torch.is_grad_enabled():
            raise ScriptError(
                f"table {table.name!r} has padding_idx={table.padding}, a row without a gradient, and is looked up "
                f"there with padding_idx={padding_idx}: give both the same"
            )
        found = np.flatnonzero(self.ids == padding_idx) if padding_idx is not None else np.empty(0, np.int64)
        self.padding_at = int(self.inverse[found[0]]) if len(found) else -1


class RowSource(Protocol):
    """Has the rows: the job's tables."""

    def lookup(self, table: str, ids: Tensor) -> Lookup: ...

    def parameter(self, table: str) -> TableParameter: ...

    def vocabulary(self, table: str) -> int | None: ...

    def renorms(self, table: str) -> None: ...

    def renorm(self, table: str, lookup: Lookup, max_norm: float, norm_type: float) -> None: ...

    def export(self, table: str) -> dict[str, Tensor]: ...

    def restore(self, table: str, state: dict[str, Tensor]) -> None: ...


def _rows_of(grad: Tensor) -> NDArray[np.float32]:
    """Return a gradient ``[n, dim]`` as an array whose rows are contiguous (they may be far apart)."""
    if grad.dtype != torch.float32:
        grad = grad.float()
    if grad.stride(-1) != 1 or grad.stride(0) < grad.shape[-1]:
        grad = grad.contiguous()
    out: NDArray[np.float32] = grad.numpy()
    return out


class _SumOfLookups(torch.autograd.Function):
    """Stands between a table's parameter and the lookups of a batch, where none of them can lead: they add to one
    array, and autograd sums up nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, found: GradientSum) -> Tensor:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.found.take(), None


class _Gather(torch.autograd.Function):
    """Gathers one row per id."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, lookup: Lookup, shape: tuple[int, ...]) -> Any:
        ctx.lookup = lookup
        ctx.set_materialize_grads(False)
        out = torch.empty(shape)  # (no view of something else: scripts change it in place)
        gather_rows(
            lookup.values, lookup.inverse, out.numpy() if len(shape) == 2 else out.numpy().reshape(-1, shape[-1])
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        lookup: Lookup = ctx.lookup
        if (grad := grads[0]) is not None:
            lookup.gradient(_rows_of(grad if grad.dim() == 2 else grad.reshape(-1, lookup.dim)))
        return lookup.given(), None, None


class _Bag(torch.autograd.Function):
    """Makes a weighted sum or mean of rows per bag. ``offsets``: int64 [bags + 1]."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, weights: Tensor | None, lookup: Lookup, offsets: NDArray[np.int64], mode: Mode
    ) -> Any:
        ctx.lookup, ctx.offsets, ctx.mode = lookup, offsets, mode
        ctx.save_for_backward(*(() if weights is None else (weights,)))
        out = torch.empty((len(offsets) - 1, lookup.dim))
        w = None if weights is None else weights.detach().numpy()
        bag_forward(lookup.values, lookup.inverse, offsets, mode, w, out.numpy())
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        lookup: Lookup = ctx.lookup
        if grads[0] is None:  # only others of its sum are in this pass
            return lookup.given(), None, None, None, None
        saved = ctx.saved_tensors  # once: gradient checkpointing unpacks a tensor one time
        weights = saved[0] if saved else None
        w = None if weights is None else weights.detach().numpy()
        grad = _rows_of(grads[0])
        grad_weights = None
        if weights is not None and ctx.needs_input_grad[1]:
            bags = np.repeat(np.arange(len(ctx.offsets) - 1), np.diff(ctx.offsets))
            products = np.einsum("nd,nd->n", grad[bags], lookup.values[lookup.inverse])
            grad_weights = torch.from_numpy(products.astype(np.float32))
        if ctx.needs_input_grad[0]:
            lookup.gradient(grad, ctx.offsets, ctx.mode, w)
        return lookup.given(), grad_weights, None, None, None


def _gathered(weight: Tensor, lookup: Lookup, shape: tuple[int, ...]) -> Tensor:
    return lookup.result(_Gather.apply(lookup.source(weight), lookup, shape))  # type: ignore[no-untyped-call]


def _bagged(weight: Tensor, weights: Tensor | None, lookup: Lookup, offsets: NDArray[np.int64], mode: str) -> Tensor:
    origin = lookup.source(weight, may_lead=weights is None or not weights.requires_grad)
    return lookup.result(_Bag.apply(origin, weights, lookup, offsets, mode))  # type: ignore[no-untyped-call]


def _nothing(weight: TableParameter, shape: tuple[int, ...]) -> Tensor:
    """Return what a lookup of no ids gives. The gradient of the table is zero then, and not None: an optimizer that
    moves all rows steps because of it."""
    table = weight._table
    if not table.moves_all() or not table.source.in_batch:
        return torch.zeros(shape)
    lookup = Lookup(table, table.values, np.empty(0, np.int32), np.empty(0, np.int64))
    bounds = np.zeros(shape[0] + 1, np.int64)
    return _bagged(weight, None, lookup, bounds, "sum").view(shape)


class Options(NamedTuple):
    """Holds what a call says beside its ids; names as in ``torch.nn.functional``."""

    padding_idx: int | None = None
    scale_grad_by_freq: bool = False
    mode: str = "sum"
    include_last_offset: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0

    def tell(self, lookup: Lookup, source: RowSource, name: str) -> None:
        if self is _PLAIN and lookup.padding_at < 0:
            return
        lookup.pad(self.padding_idx)
        lookup.by_count = self.scale_grad_by_freq
        if self.max_norm is not None:
            source.renorm(name, lookup, self.max_norm, self.norm_type)


_PLAIN = Options()


def _embedding(weight: TableParameter, source: RowSource, name: str, dim: int, ids: Tensor, options: Options) -> Tensor:
    """Do as ``torch.nn.functional.embedding`` does."""
    if ids.numel() == 0:
        return _nothing(weight, (0, dim)).view((*ids.shape, dim))
    lookup = source.lookup(name, ids)
    options.tell(lookup, source, name)
    return _gathered(weight, lookup, (*ids.shape, dim))


def _bag(
    weight: TableParameter,
    source: RowSource,
    name: str,
    dim: int,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    options: Options,
) -> Tensor:
    """Do as ``torch.nn.functional.embedding_bag`` does. Raises ScriptError."""
    mode = options.mode
    if ids.dim() == 2:
        if offsets is not None:
            raise ScriptError(f"table {name!r}: offsets go with ids of one dimension, these have two")
        bags, per_bag = ids.shape
        bounds = None if per_bag == 1 else np.arange(0, bags * per_bag + 1, max(per_bag, 1), dtype=np.int64)
        if per_bag == 0:
            return _nothing(weight, (bags, dim))
    elif ids.dim() == 1:
        if offsets is None:
            raise ScriptError(f"table {name!r}: ids of one dimension need offsets")
        bounds = _bounds(name, offsets, ids.numel(), options.include_last_offset)
        bags = len(bounds) - 1
    else:
        raise ScriptError(f"table {name!r}: ids must have one or two dimensions, not {ids.dim()}")
    if weights is not None:
        if mode != "sum":
            raise ScriptError(f"table {name!r}: per_sample_weights need mode='sum'")
        if weights.shape != ids.shape:
            raise ScriptError(
                f"table {name!r}: per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}"
            )
        weights = weights.reshape(-1).float().contiguous()
    if ids.numel() == 0 or bags == 0:
        return _nothing(weight, (bags, dim))
    lookup = source.lookup(name, ids)
    options.tell(lookup, source, name)
    if mode == "max":
        return _largest(weight, lookup, np.arange(bags + 1) if bounds is None else bounds)
    if lookup.padding_at >= 0:
        if bounds is None:
            bounds = np.arange(bags + 1, dtype=np.int64)
        weights = _without_padding(lookup, bounds, mode, weights)
        mode = "sum"
    if bounds is None and weights is None:
        return _gathered(weight, lookup, (bags, dim))
    if bounds is None:
        bounds = np.arange(bags + 1, dtype=np.int64)
    return _bagged(weight, weights, lookup, bounds, mode)


def _largest(weight: TableParameter, lookup: Lookup, bounds: NDArray[np.int64]) -> Tensor:
    """Return the largest of each column in each bag. Torch itself finds it, among the rows of the batch: which of equal
    ones gets the gradient is torch's choice."""
    inverse = lookup.inverse[: bounds[-1]].astype(np.int64)
    lookup.inverse = np.arange(len(lookup.values), dtype=np.int32)
    rows = _gathered(weight, lookup, lookup.values.shape)
    return nn.functional.embedding_bag(
        torch.from_numpy(inverse),
        rows,
        torch.from_numpy(bounds[:-1].astype(np.int64)),
        mode="max",
        padding_idx=lookup.padding_at if lookup.padding_at >= 0 else None,
    )


def _hidden(function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """Return ``function``, where torch's compiler does not look inside. None: the script has not imported the compiler,
    which would cost seconds."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return None
    from torch._dynamo import disable

    hidden: Callable[..., Tensor] = disable(function)  # type: ignore[no-untyped-call]
    return hidden


_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None: no compiler looks at what is called
_QUIET: list[Callable[..., Tensor]] = []


def hide_from_compiler() -> None:
    """If the script may have a compiler: from now on it does not look inside lookups. It must not come to that while it
    compiles."""
    if not _QUIET and (hidden := _hidden(_look_up)) is not None:
        _QUIET.append(hidden)


def _look_up(module: _Table, *args: Any) -> Tensor:
    return module._look_up(*args)


def _quietly(module: _Table, *args: Any) -> Tensor:
    """Look up where a compiler of the script's model does not look inside: rows come from the ps."""
    hide_from_compiler()
    return (_QUIET[0] if _QUIET else _look_up)(module, *args)


class _Table(nn.Module):
    """Has what both kinds of module have in common. ``vocabulary``: number of rows, None for any int64."""

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        vocabulary: int | None = None,
        padding_idx: int | None = None,
        init: InitSpec | None = None,
        optimizer: OptimizerSpec | None = None,
        admit_after: int = 0,
        expire_batches: int = 0,
        expire_s: int = 0,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ScriptError(f"table {name!r}: dim={dim} must be at least 1")
        self.admit_after, self.expire_batches, self.expire_s = admit_after, expire_batches, expire_s
        self.name, self.dim, self.vocabulary = name, dim, vocabulary
        self.embedding_dim = dim
        self.padding_idx = padding_idx
        self.scale_grad_by_freq = False
        self.max_norm: float | None = None
        self.norm_type = 2.0
        self.init, self.optimizer = init, optimizer
        self._source: RowSource | None = None
        self.freeze = False  # its rows do not learn

    def attach(self, source: RowSource) -> None:
        """Belong to a job: from now on ``weight`` is the parameter of the table's rows."""
        self.weight = source.parameter(self.name)
        self._source = source
        if self.max_norm is not None:
            source.renorms(self.name)
        if self.freeze:
            self.weight.requires_grad_(False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.__dict__.get("_source") is not None and value is not self.weight:
            raise ScriptError(
                f"the weight of table {self.name!r} lives on the ps and can not be another parameter: write new values "
                "by weight.copy_(...) under torch.no_grad(), or assign the parameter before job.sparse(model)"
            )
        super().__setattr__(name, value)

    def _look_up(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def _options(self) -> Options:
        if self.padding_idx is None and self.max_norm is None and not self.scale_grad_by_freq:
            return _PLAIN
        norm = self.max_norm, self.norm_type
        return Options(self.padding_idx, self.scale_grad_by_freq, "sum", False, *norm)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self  # rows are float32 on the CPU, wherever the rest of the model goes

    def _attached(self) -> RowSource:
        if self._source is None:
            raise ScriptError(f"table {self.name!r} belongs to no job yet: call job.sparse(model) first")
        return self._source

    def __deepcopy__(self, memo: dict[int, Any]) -> _Table:
        raise ScriptError(
            f"table {self.name!r} lives on the ps and can not be copied: copy the model before job.sparse"
        )

    def __getstate__(self) -> dict[str, Any]:
        parameters = {name: p for name, p in self._parameters.items() if name != "weight"}
        return {**self.__dict__, "_source": None, "_parameters": parameters}

    def extra_repr(self) -> str:
        rows = "any id" if self.vocabulary is None else str(self.vocabulary)
        return f"{self.name!r}, {rows} x {self.dim}, on the ps"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in self._attached().export(self.name).items():
            destination[prefix + name] = value

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = {name: state_dict[prefix + name] for name in ("keys", "weight") if prefix + name in state_dict}
        if "weight" not in found or (self.vocabulary is None and "keys" not in found):
            missing_keys.append(prefix + ("weight" if self.vocabulary is not None else "keys"))
            return
        self._attached().restore(self.name, found)


class Embedding(_Table):
    """Is ``torch.nn.Embedding`` with its rows on the ps. ``input``: int64 or int32 of any shape -> float32 ``[...,
    dim]``."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or _compiler() is not None:
            return _quietly(self, input)
        return self._look_up(input)

    def _look_up(self, input: Tensor) -> Tensor:
        source = self._attached()
        return _embedding(self.weight, source, self.name, self.dim, input, self._options())


class EmbeddingBag(_Table):
    """Is ``torch.nn.EmbeddingBag`` with its rows on the ps.

    ``input``: int64 or int32 ``[bags, ids]``, or ``[n]`` with ``offsets`` -> float32 ``[bags, dim]``."""

    def __init__(
        self,
        name: str,
        dim: int,
        mode: str = "sum",
        *,
        vocabulary: int | None = None,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        init: InitSpec | None = None,
        optimizer: OptimizerSpec | None = None,
        admit_after: int = 0,
        expire_batches: int = 0,
        expire_s: int = 0,
    ) -> None:
        super().__init__(
            name,
            dim,
            vocabulary=vocabulary,
            padding_idx=padding_idx,
            init=init,
            optimizer=optimizer,
            admit_after=admit_after,
            expire_batches=expire_batches,
            expire_s=expire_s,
        )
        if mode not in ("sum", "mean", "max"):
            raise ScriptError(f"table {name!r}: mode={mode!r} is not one of sum, mean and max")
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling() or _compiler() is not None:
            return _quietly(self, input, offsets, per_sample_weights)
        return self._look_up(input, offsets, per_sample_weights)

    def _options(self) -> Options:
        if self.padding_idx is None and self.max_norm is None and not self.include_last_offset and self.mode == "sum":
            return _PLAIN
        norm = self.max_norm, self.norm_type
        return Options(self.padding_idx, False, self.mode, self.include_last_offset, *norm)

    def _look_up(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:
        source, options = self._attached(), self._options()
        return _bag(self.weight, source, self.name, self.dim, input, offsets, per_sample_weights, options)


def bags_by_frequency(what: str) -> ScriptError:
    """Torch divides the gradient of a row by the count of another one, depending on all ids of the batch."""
    return ScriptError(
        f"{what}: scale_grad_by_freq of bags is not offered for tables on the ps (torch divides by counts of other "
        "rows there): leave it out, use nn.Embedding, or only="
    )


def _bounds(name: str, offsets: Tensor, n: int, include_last: bool) -> NDArray[np.int64]:
    """Return the offsets with the end of the last bag, int64 [bags + 1]. Raises ScriptError where they do not fit."""
    out: NDArray[np.int64] = offsets.to(torch.int64).numpy()
    if not include_last:
        out = np.append(out, n)
    if len(out) == 0 or out[0] != 0 or out[-1] > n or (np.diff(out) < 0).any():
        raise ScriptError(f"table {name!r}: offsets must begin with 0, not fall, and end within the {n} ids")
    return np.ascontiguousarray(out)


def _without_padding(lookup: Lookup, bounds: NDArray[np.int64], mode: str, weights: Tensor | None) -> Tensor:
    """Return weights float32 [n] that make a sum leave out the padding row (and a mean count without it)."""
    keep = (lookup.inverse != lookup.padding_at).astype(np.float32)
    if mode == "mean":
        sums = np.add.reduceat(np.append(keep, 0.0), bounds[:-1]) * (np.diff(bounds) > 0)
        keep *= np.repeat(1.0 / np.maximum(sums, 1.0), np.diff(bounds)).astype(np.float32)
    mask = torch.from_numpy(keep)
    return mask if weights is None else weights * mask


# ---------------------------------------------------------------- torch's functions, given the weight of a table


def _functional_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if (known := table_of(weight)) is None:
        return NotImplemented
    table, source = known, known.source
    norm = max_norm, norm_type
    options = Options(_within(source, table, padding_idx), scale_grad_by_freq, "sum", False, *norm)
    with _as_the_weight(weight):
        return _embedding(table.param, source, table.name, table.dim, input, options)


def _functional_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if table_of(input) is not None:
        input, weight = weight, input  # (torch's older order)
    if (known := table_of(weight)) is None:
        return NotImplemented
    table, source = known, known.source
    if mode not in ("sum", "mean", "max"):
        raise ScriptError(f"table {table.name!r}: mode={mode!r} is not one of sum, mean and max")
    if scale_grad_by_freq:
        raise bags_by_frequency(f"table {table.name!r}")
    norm = max_norm, norm_type
    options = Options(_within(source, table, padding_idx), False, mode, include_last_offset, *norm)
    with _as_the_weight(weight):
        return _bag(table.param, source, table.name, table.dim, input, offsets, per_sample_weights, options)


def _torch_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    return _functional_embedding(
        indices, weight, padding_idx if padding_idx >= 0 else None, scale_grad_by_freq=scale_grad_by_freq
    )


def _indexed(weight: Tensor, index: Any) -> Any:
    """Do as ``weight[ids]`` does."""
    whole = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    return _functional_embedding(index, weight) if whole else NotImplemented


def _selected(input: Tensor, dim: int, index: Tensor) -> Any:
    return _functional_embedding(index, input) if dim in (0, -2) and index.dim() == 1 else NotImplemented


@contextmanager
def _as_the_weight(weight: Tensor) -> Iterator[None]:
    """Take what was detached as the weight: it brings no gradient."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and isinstance(weight, TableParameter)):
        yield


def _within(source: RowSource, table: BatchTable, padding_idx: int | None) -> int | None:
    """Return ``padding_idx`` from 0: torch counts a negative one from the end."""
    rows = source.vocabulary(table.name)
    if padding_idx is None or rows is None:
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ScriptError(f"table {table.name!r}: padding_idx={padding_idx} is not one of its {rows} rows")
    return padding_idx % rows


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    quiet: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not quiet and (hidden := _hidden(function)) is not None:
            quiet.append(hidden)
        return (quiet[0] if quiet else function)(*args, **kwargs)

    return call


def _all_rows(weight: TableParameter) -> Tensor:
    """Return float32 [vocabulary, dim] of a complete table, by the way of lookups."""
    table = weight._table
    ids = np.arange(len(table.keys))
    lookup = Lookup(table, table.values, ids.astype(np.int32), ids)
    return _gathered(weight, lookup, table.values.shape)


ALL_ROWS.append(_uncompiled(_all_rows))
LOOKUPS.update(
    {
        nn.functional.embedding: _uncompiled(_functional_embedding),
        nn.functional.embedding_bag: _uncompiled(_functional_bag),
        torch.embedding: _uncompiled(_torch_embedding),
        torch.Tensor.__getitem__: _uncompiled(_indexed),
        torch.index_select: _uncompiled(_selected),
        torch.Tensor.index_select: _uncompiled(_selected),
    }
)
