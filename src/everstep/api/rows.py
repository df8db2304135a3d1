"""Shows the rows of one table that the batch in hand has as a parameter of the script's model.

``module.weight`` of a table is a real ``nn.Parameter`` of the shape ``[rows of the batch, dim]``. Clipping, scaling,
hooks, penalties and ``requires_grad`` see it, and an optimizer may hold it. Its rows change with every batch.
A gradient that the script has not zeroed is *carried*, by key, and is part of ``weight.grad`` when the script looks:
gradients add up over batches as in plain PyTorch.

A gradient usually lies in memory that the ps reads, and is pushed without a copy. If the script has looked at it, the
script may change it later, so a copy is pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from everstep.errors import ScriptError

if TYPE_CHECKING:
    from everstep.api.batch_table import BatchTable

STEPPED_WHOLE = 1 << 16
"""Numbers (rows x dim) of a table that is as whole as a dense one, without being asked for: an optimizer that moves
rows without a gradient moves all of them, and what the script does with ``weight`` is done with all rows. Of a larger
table it is the rows of the batch."""
USED_WHOLE = 1 << 22
"""Numbers of a table that is pulled whole where the script asks for what only the whole can be: ``weight.T``, say, or
values outside of a batch. A larger one is refused."""

GRAD: Any = torch._C.TensorBase.grad
DATA: Any = torch._C.TensorBase.data
OTHER_TYPE = torch.empty(0, dtype=torch.float64)

_WHOLE = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "einsum", "tensordot"),
        *("embedding", "embedding_bag", "__getitem__", "index_select", "gather", "take", "cdist", "cosine_similarity"),
        *("t", "transpose", "permute", "T.__get__", "mT.__get__", "normalize", "softmax", "log_softmax", "inner"),
    }
)
"""Operations that mean the whole table. For the others (norms, sums, powers) a batch's rows are a meaningful part."""

_READS = frozenset(
    {
        *(
            "numpy",
            "tolist",
            "clone",
            "norm",
            "sum",
            "mean",
            "std",
            "var",
            "max",
            "min",
            "abs",
            "pow",
            "square",
            "item",
        ),
        *("mul", "add", "sub", "div", "__mul__", "__add__", "__sub__", "__truediv__", "__pow__", "cpu", "to", "float"),
        *("allclose", "equal", "isnan", "isfinite", "all", "any", "stack", "cat", "copysign", "dist", "histc"),
    }
)
_HARMLESS = frozenset({"requires_grad_", "detach_", "retain_grad_", "is_shared_"})
_VALUELESS = _HARMLESS | {
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "ndimension", "element_size", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook", "data_ptr", "is_contiguous", "get_device", "__hash__"),
    *("storage_offset", "is_inference", "nelement"),
}
_VALUELESS_ATTRIBUTES = frozenset(
    {
        *("grad", "_grad", "requires_grad", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_version"),
        *("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "names", "name", "_backward_hooks"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_mps", "is_quantized", "is_mkldnn", "is_nested"),
        "_post_accumulate_grad_hooks",
    }
)
_SHOWN = frozenset({"detach", "data.__get__"})
_WRITES = frozenset({"__setitem__", "index_copy_", "scatter_", "index_fill_"})

LOOKUPS: dict[Any, Callable[..., Any]] = {}
"""Functions of torch that look rows up in a weight, and what they are for the weight of a table (``api/nn``): called
with the same arguments, NotImplemented where these mean something else."""
ALL_ROWS: list[Callable[[Any], Tensor]] = []
"""One function (of ``api/nn``): all rows of a weight, as a lookup of all ids gives them."""


class TableParameter(nn.Parameter):
    """Is ``weight`` of a table. ``everstep_table``: the table's name. See the top of this file."""

    everstep_table: str
    _table: BatchTable

    @property
    def grad(self) -> Tensor | None:
        """Return float32 [rows, dim]; of carried rows alone before this batch's first backward."""
        return self._table.look()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._table.set_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self._table.set_grad(None)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Do as ``Tensor.register_hook`` does. Where rows came behind those of a lookup, its gradient is added by hand,
        and autograd has none for the hook."""
        return super().register_hook(of_gradients(hook))  # type: ignore[no-untyped-call]

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: torch does not tell a subclass when its memory becomes another."""
        raise ScriptError(
            f"weight.set_ of table {self.everstep_table!r}: its memory belongs to the batch in hand; write new values "
            "by weight.copy_(...) under torch.no_grad(), or by weight[ids] = ..."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<rows of table {self.everstep_table!r} in the batch in hand: {tuple(self.shape)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        raise ScriptError(
            f"table {self.everstep_table!r} lives on the ps and can not be copied: copy the model before job.sparse"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (ours := LOOKUPS.get(func)) is not None and (found := ours(*args, **kwargs)) is not NotImplemented:
            return found
        name = _word(func)
        if name.endswith("_like") or name.startswith("new_"):
            return _outside(func, name, args, kwargs)
        if asks_for_values(func):
            asks = func is torch.autograd.grad or name == "backward"
            limit = 0 if asks else USED_WHOLE if name in _WHOLE or name in _WRITES else STEPPED_WHOLE
            outside = False
            for a in flat_arguments(args, kwargs):
                if isinstance(a, TableParameter):
                    a._table.used(limit)
                    outside |= not a._table.in_hand
            if func is torch.autograd.grad:
                return _asked_gradients(*args, **kwargs)
            if outside and not asks:
                return _outside(func, name, args, kwargs)
            if not asks and not _writes(name) and name not in _SHOWN and torch.is_grad_enabled():
                args, kwargs = _by_lookups(args), dict(zip(kwargs, _by_lookups(kwargs.values()), strict=True))
        if name in _SHOWN and len(args) == 1 and not args[0]._table.complete:
            with torch._C.DisableTorchFunctionSubclass():
                shown = func(*args).as_subclass(_Detached)
            shown.everstep_table = args[0]._table
            return shown
        if name == "data.__set__" and isinstance(args[0], TableParameter):
            return args[0]._table.assign(args[1])
        _refuse_whole(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def of_gradients(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor | None], Tensor | None]:
    return lambda grad: None if grad is None else hook(grad)


def _by_lookups(args: Any) -> list[Any]:
    """Give a weight whose rows were looked up before all were there its gradient by the way of lookups only: so hooks
    see one gradient."""
    out = []
    for a in args:
        if type(a) in (list, tuple):
            a = type(a)(_by_lookups(a))
        elif isinstance(a, TableParameter) and a._table.grown and a._table.complete and a._table.learns:
            a = ALL_ROWS[0](a)
        out.append(a)
    return out


def _asked_gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``torch.autograd.grad``, where tables are asked for. Of a table whose rows came in several parts, autograd
    knows the last part only: it goes by the nodes of all parts, and the lookups have added up the whole."""
    if isinstance(inputs, dict):
        found = _asked_gradients(outputs, list(inputs.values()), *args, **kwargs)
        return dict(zip(inputs, found, strict=True))
    wanted: list[Tensor] = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    grown = {i: p._table for i, p in enumerate(wanted) if isinstance(p, TableParameter) and p._table.grown}
    differentiate: Any = torch.autograd.grad
    with torch._C.DisableTorchFunctionSubclass():
        if not grown:
            return differentiate(outputs, wanted, *args, **kwargs)
        unused, zeros = kwargs.pop("allow_unused", None), kwargs.pop("materialize_grads", False)
        before = {i: set(table.summed) for i, table in grown.items()}
        edges = [edge for table in grown.values() for edge in table.edges]
        for table in grown.values():
            table.asked = True
        try:
            out = list(differentiate(outputs, [*wanted, *edges], *args, allow_unused=True, **kwargs))
        finally:
            for table in grown.values():
                table.asked = False
        out = out[: len(wanted)]
        for i, table in grown.items():
            for task in table.summed.keys() - before[i]:
                out[i] = torch.from_numpy(table.whole(task))
        for i, p in enumerate(wanted):
            if out[i] is None and zeros:
                out[i] = torch.zeros_like(p)
        if any(g is None for g in out) and not unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
    return tuple(out)


def _outside(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Do a function of torch on the weight of a table outside of a batch, or one that wants its shape."""
    table = next(t for a in flat_arguments(args, kwargs) if (t := table_of(a)) is not None)
    if name.endswith("_") and not name.endswith("__"):
        if name not in _HARMLESS:
            raise ScriptError(
                f"{name}() on the weight of table {table.name!r} outside of a batch: its rows are on the ps; give it "
                "its values before job.sparse(), or job.sparse(model, init=...), or (mode ps) in a batch behind step()"
            )
    elif name == "data.__set__":
        raise ScriptError(
            f"weight.data = ... of table {table.name!r} outside of a batch: its rows are on the ps; give it its values "
            "before job.sparse(), or job.sparse(model, init=...), or (mode ps) in a batch behind step()"
        )
    elif name in _SHOWN and len(args) == 1:
        return _not_here(table)
    elif (name.endswith("_like") or name.startswith("new_")) and not table.in_hand:
        with torch._C.DisableTorchFunctionSubclass():
            return func(_not_here(table), *args[1:], **kwargs)
    elif table.fits(USED_WHOLE) and not _writes(name) and not name.startswith("__reduce") and "storage" not in name:
        return _with_copies(func, args, kwargs)
    elif name in _READS:
        raise ScriptError(
            f"the weight of table {table.name!r} is read ({name}) outside of a batch: its rows are "
            "on the ps; model.state_dict() pulls them all"
        )
    _refuse_whole(name, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _not_here(table: BatchTable) -> _NotHere:
    with torch._C.DisableTorchFunctionSubclass():
        rows = table.vocabulary if table.vocabulary is not None and table.fits(USED_WHOLE) else 0
        shown = torch.zeros((1, 1)).expand(rows, table.dim).as_subclass(_NotHere)
    shown.everstep_table = table
    return shown


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITES or "__set" in name


def _with_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Do ``func`` of all rows as they are now, where it is given the weight of a table: a copy, which is only read."""

    def copied(a: Any) -> Any:
        if isinstance(a, list | tuple):
            return type(a)(copied(x) for x in a) if type(a) in (list, tuple) else a
        return a if (table := table_of(a)) is None else torch.from_numpy(table.read_all())

    with torch._C.DisableTorchFunctionSubclass():
        out = func(*(copied(a) for a in args), **{name: copied(a) for name, a in kwargs.items()})
    if isinstance(out, np.ndarray):
        out.flags.writeable = False
    return out


def asks_for_values(func: Any) -> bool:
    """Return whether a function of torch may read or write the values of a tensor, and not only its gradient or its
    shape."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUELESS_ATTRIBUTES
    return name not in _VALUELESS


def flat_arguments(args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of a function of torch; those in lists, too."""
    out: list[Any] = []
    for a in (*args, *kwargs.values()):
        out += a if isinstance(a, list | tuple) else [a]
    return out


def is_table(p: object) -> bool:
    """Return whether a parameter is that of a table."""
    return isinstance(p, TableParameter)


def table_of(weight: object) -> BatchTable | None:
    """Return the table whose weight it is, or what was detached of it."""
    if isinstance(weight, TableParameter):
        return weight._table
    return weight.everstep_table if isinstance(weight, _Detached | _NotHere) else None


def _refuse_whole(name: str, args: Any, kwargs: Any) -> None:
    if name not in _WHOLE and name not in _WRITES:
        return
    tables = (t for a in flat_arguments(args, kwargs) if (t := table_of(a)) is not None)
    table = next((t for t in tables if not t.complete), None)
    if table is not None:
        word = name.removesuffix(".__get__")
        raise ScriptError(
            f"the weight of table {table.name!r} is used as a whole ({word}): its rows are on the "
            "ps, and here are those of the batch only; keep the embedding in the dense part, "
            "job.sparse(model, only=...), or look ids up through the module"
        )


def _word(func: Any) -> str:
    """Return the name of a function of torch; of an attribute, ``data.__get__``."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    return str(name)


class _Detached(Tensor):
    """Is ``weight.detach()`` or ``weight.data`` in a batch: its rows. Ids are looked up in it as in the weight."""

    everstep_table: BatchTable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (ours := LOOKUPS.get(func)) is not None and (found := ours(*args, **kwargs)) is not NotImplemented:
            return found
        name = _word(func)
        if name in _WHOLE or name in _WRITES:
            for a in flat_arguments(args, kwargs):
                if isinstance(a, _Detached):
                    a.everstep_table.used(USED_WHOLE)
            _refuse_whole(name, args, kwargs)
            args, kwargs = _renewed(args), dict(zip(kwargs, _renewed(kwargs.values()), strict=True))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _renewed(args: Any) -> list[Any]:
    """Return what was detached when the weight had fewer rows, as it is now."""
    return [a.everstep_table.param.detach() if isinstance(a, _Detached) else a for a in args]


class _NotHere(Tensor):
    """What a table's weight shows outside of a batch: it may be asked about, and ids be looked up."""

    everstep_table: BatchTable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (ours := LOOKUPS.get(func)) is not None and (found := ours(*args, **kwargs)) is not NotImplemented:
            return found
        name = _word(func)
        if asks_for_values(func):
            table = next(t for a in flat_arguments(args, kwargs) if (t := table_of(a)) is not None)
            if table.fits(USED_WHOLE) and not _writes(name) and "out" not in kwargs:
                return _with_copies(func, args, kwargs)
            raise ScriptError(
                f"the weight of table {table.name!r} is used ({name}) outside of a batch: its rows are on the ps; "
                "model.state_dict() pulls them all, and values are given before job.sparse()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
