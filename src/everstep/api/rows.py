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
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from everstep.errors import ScriptError
from everstep.native import bag_backward, sum_bits
from everstep.tables.routing import TableRows

STEPPED_WHOLE = 1 << 16
"""Numbers (rows x dim) of a table that is as whole as a dense one, without being asked for: an optimizer that moves
rows without a gradient moves all of them, and what the script does with ``weight`` is done with all rows. Of a larger
table it is the rows of the batch."""
USED_WHOLE = 1 << 22
"""Numbers of a table that is pulled whole where the script asks for what only the whole can be: ``weight.T``, say, or
values outside of a batch. A larger one is refused."""

_GRAD: Any = torch._C.TensorBase.grad
_DATA: Any = torch._C.TensorBase.data
_OTHER_TYPE = torch.empty(0, dtype=torch.float64)

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
        return super().register_hook(_of_gradients(hook))  # type: ignore[no-untyped-call]

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
        _refuse_whole(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _of_gradients(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor | None], Tensor | None]:
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


class Carried(NamedTuple):
    """Is a gradient from before: ``keys`` int64 [n], ``grads`` float32 [n, dim]. ``lent``: a push under way reads it.

    ``values`` float32 [n, dim]: the rows then; None: a step has changed them since."""

    keys: NDArray[np.int64]
    grads: Tensor
    lent: bool
    values: NDArray[np.float32] | None = None


class Gradient(NamedTuple):
    """Is what a step takes of a table. ``rows``: it lies there already, where it can be pushed from."""

    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    rows: TableRows | None


class GradientSum:
    """The gradient of the rows that a table has in one batch: all lookups of a backward pass add to one array."""

    __slots__ = ("_open", "_padding_at", "_table", "batch", "layout", "node")

    def __init__(self, table: BatchTable, padding_at: int) -> None:
        """Take ``padding_at``: the index of the row that gets no gradient; -1: there is none."""
        self._table, self._padding_at = table, padding_at
        self.batch, self.layout = table.batch, table.layout
        self.node: Tensor | None = None  # of autograd; all further lookups of the batch come by it
        self._open: dict[int, NDArray[np.float32]] = {}  # by backward pass; one that failed stays until the batch ends

    def target(self) -> tuple[NDArray[np.float32], bool]:
        """The array float32 [rows, dim] of this backward pass, and whether it has a gradient already."""
        table, task = self._table, torch._C._current_graph_task_id()
        if table.grown:
            return table.by_hand(task), True
        if (found := self._open.get(task)) is not None:
            return found, True
        out = self._open[task] = table.target()
        return out, False

    def take(self) -> Tensor | None:
        """The sum, at the end of a backward pass. None: nothing has come, or it is added by hand."""
        table, task = self._table, torch._C._current_graph_task_id()
        out = self._open.pop(task, None)
        if table.grown:
            if out is not None:  # rows came in the middle of this pass
                if self._padding_at >= 0:
                    out[self._padding_at] = 0.0
                moved = table.complete and self.layout != table.layout
                table.by_hand(task)[table.moved[: len(out)] if moved else slice(len(out))] += out
            table.add_at_the_end(task)
            return None
        if out is None:
            return None
        if self._padding_at >= 0:
            out[self._padding_at] = 0.0
        return table.arrived(out)


class BatchTable:
    """Holds what is behind a ``TableParameter``. ``keys`` int64 [u] and ``values`` float32 [u, dim]: what the parameter
    shows."""

    def __init__(
        self, name: str, dim: int, padding: int | None, read: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    ) -> None:
        """Take ``read``: values of rows as they are now, float32 [n, dim], by their keys."""
        self.name, self.dim, self.padding, self._read = name, dim, padding, read
        self.source: Any = None  # who looks rows up (``api/nn.Source``)
        self.vocabulary: int | None = None  # rows of the whole table, whose keys are 0, 1, ...; None: it has no whole
        self.complete = False  # the parameter shows all rows, in the order of their keys
        self.moved: NDArray[np.int64] = np.empty(0, np.int64)  # ``complete``: where rows stand that were there before
        self.zero_padding = padding is not None  # the padding row is zero, whatever the script makes of its gradient
        self.renorms = False  # lookups change rows: those above a norm are scaled down (``max_norm``)
        self.renormed = False  # of this batch: such a lookup was
        self.moves_all: Callable[[], bool] = lambda: False  # does what steps it change rows without a gradient, too?
        self.keys: NDArray[np.int64] = np.empty(0, np.int64)
        self.values: NDArray[np.float32] = np.empty((0, dim), np.float32)
        self.batch = 0  # grows with every ``show``
        self.layout = 0  # grows whenever the rows are others, or more
        self.backwards = 0  # gradients that have come
        self.drops = 0  # times that its gradient was dropped
        self._rows: TableRows | None = None  # of the first ``u`` keys: as they were pulled
        self._carried: Carried | None = None
        self._exposed = False  # somebody has looked at the gradient
        self._lent = False  # the memory for gradients that came with the rows is in use
        self._handed = False  # the script has seen what is carried
        self._stepped = False  # since the last backward
        self.stale: Callable[[], None] | None = None  # brings the values of a step of this iteration
        self._collected = False  # backward's gradients go to the group: what is here besides is not of this process
        self._local = False  # what is here came from backward and was not collected
        self.hidden = False  # torch's optimizer, which holds the parameter, is not to step it
        self._arrived: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []  # see ``arrive``
        self._digest = 0
        self.grown = False  # rows of this batch came behind those that a lookup has used
        self.edges: list[GradientEdge] = []  # of this batch, if ``grown``: to the parameter when it had fewer rows
        self._lent_at = 0  # address of the memory for gradients that is in use
        self._used = False  # of this batch: the script has the parameter in hand, and may change its values
        self._sorted: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # of the keys, and their order
        self._sums: dict[int, GradientSum] = {}  # of these rows, by the index of the padding row
        self.parts: list[GradientSum] = []  # of this batch, if ``grown``: of all rows, and of fewer before
        self.summed: dict[int, NDArray[np.float32]] = {}  # if ``grown``: gradients of all rows, by backward pass
        self.asked = False  # by torch.autograd.grad, which takes them
        self._ending: set[int] = set()  # backward passes whose gradients are added by hand when they end
        self.param = TableParameter(torch.empty((0, dim)))
        self.param.everstep_table = name
        self.param._table = self

    def __repr__(self) -> str:
        return f"<BatchTable {self.name!r} {len(self.keys)} rows{' +carried' if self._carried else ''}>"

    def adopt(self, weight: nn.Parameter) -> None:
        """The script's own parameter becomes that of the table: whatever refers to it (a tied layer, a list of
        penalties, an optimizer) sees the table."""
        with torch._C.DisableTorchFunctionSubclass():
            weight.grad = None
            hooks: dict[int, Any] = weight._backward_hooks or {}
            for key, hook in list(hooks.items()):
                hooks[key] = _of_gradients(hook)
            weight.__class__ = TableParameter
        assert isinstance(weight, TableParameter)
        weight.everstep_table, weight._table = self.name, self
        self.param = weight
        self._set(self.keys, self.values)

    def tie(self, module: nn.Module, parameter: str) -> None:
        """Another module has the parameter, too: its ``state_dict`` has all rows, and it is loaded with the table."""

        def save(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[prefix + parameter] = torch.from_numpy(self.read_all())

        def before(_: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
            state.pop(prefix + parameter, None)
            module._parameters[parameter] = None  # (its place among the others stays)

        def after(_: nn.Module, keys: Any) -> None:
            module._parameters[parameter] = self.param

        module.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(after)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------ the rows of a batch

    def show(self, rows: TableRows | None) -> None:
        """Show, from now on, the rows of another batch; None: of none."""
        self.stash()
        self.batch += 1
        self._rows = rows
        self._lent = self._handed = self._used = self.grown = self.complete = self.renormed = False
        for part in self.parts:
            part.node = None  # which knows of it: a circle that keeps the rows' memory
        self.parts.clear()
        self.edges.clear()
        self.summed.clear()
        self._ending.clear()
        if rows is None:
            self._set(np.empty(0, np.int64), np.empty((0, self.dim), np.float32))
        else:
            self._set(rows.keys, rows.values)

    def extend(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Add more rows of the same batch, behind those that are there. ``keys``: none of them known."""
        if not len(keys):
            return
        grad, edited = self._grad(), self.changed()
        old = len(self.keys)
        self._grow()
        self._set(np.concatenate([self.keys, keys]), np.concatenate([self.values, values]))
        if not edited:
            self.seen()
        if grad is not None:
            grown = torch.zeros((len(self.keys), self.dim))
            grown[:old] = grad
            self._put_grad(grown)

    def _grow(self) -> None:
        """Rows are about to come behind those that are there."""
        for found in self._sums.values():
            if found.node is None or found.node.grad_fn is None:
                continue
            self.grown = True
            weight, number = found.node.grad_fn.next_functions[0]
            if weight is not None:
                self.edges.append(GradientEdge(weight, number))

    def fits(self, numbers: int) -> bool:
        """Return whether there is a whole of at most so many numbers."""
        return self.vocabulary is not None and self.vocabulary * self.dim <= numbers

    def read_all(self) -> NDArray[np.float32]:
        """Return all rows as they are now, float32 [vocabulary, dim]: a copy."""
        assert self.vocabulary is not None
        if self.stale is not None:
            self.stale()
        return self._read(np.arange(self.vocabulary, dtype=np.int64))

    def make_whole(self) -> None:
        """From now on, in this batch, the parameter shows all rows."""
        n = self.vocabulary
        if self.complete or n is None:
            return
        grad, edited, old = self._grad(), self.changed(), self.keys
        values = np.empty((n, self.dim), np.float32)
        values[old] = self.values
        missing = np.ones(n, np.bool_)
        missing[old] = False
        others = np.flatnonzero(missing)
        values[others] = self._read(others)
        self._grow()
        self.summed = {task: self._placed(found, old) for task, found in self.summed.items()}
        self._set(np.arange(n, dtype=np.int64), values)
        self.complete, self.moved = True, old
        if not edited:
            self.seen()
        if grad is not None:
            grown = torch.zeros((n, self.dim), dtype=grad.dtype)
            grown[torch.from_numpy(old)] = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            _DATA.__set__(grad, grown)  # the script may have it in hand
            self._put_grad(grad)

    def _placed(self, first: NDArray[np.float32], at: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return numbers of the rows that were there first, among those of all rows."""
        assert self.vocabulary is not None
        out = np.zeros((self.vocabulary, self.dim), np.float32)
        out[at[: len(first)]] = first
        return out

    def place(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each key stands, int64; -1: nowhere."""
        if self._sorted is None:
            order = np.argsort(self.keys, kind="stable")
            self._sorted = self.keys[order], order
        known, order = self._sorted
        at = np.searchsorted(known, keys)
        at_most = np.minimum(at, max(0, len(known) - 1))
        if not len(known):
            return np.full(len(keys), -1, np.int64)
        return np.where(known[at_most] == keys, order[at_most], -1)

    def renew(self, values: NDArray[np.float32]) -> None:
        """Show the same rows, with newer values."""
        np.copyto(self.values, values)

    def _set(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self.keys, self.values = keys, values
        self.layout += 1
        self._sorted = None
        self._sums.clear()
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.param, None)
            # An accumulator of a graph that still lives would want the gradient in the old shape: another type ends it.
            _DATA.__set__(self.param, _OTHER_TYPE)
            _DATA.__set__(self.param, torch.from_numpy(values))

    # ------------------------------------------------------------ gradients

    def _grad(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = _GRAD.__get__(self.param)
        return found

    def _put_grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.param, value)

    def sum(self, padding_at: int) -> GradientSum:
        """Return where lookups of these rows add their gradients."""
        found = self._sums.get(padding_at)
        if found is None or found.batch != self.batch:
            found = self._sums[padding_at] = GradientSum(self, padding_at)
            self.parts.append(found)
        return found

    def arrived(self, grads: NDArray[np.float32]) -> Tensor:
        """Return a gradient that lies in what ``target`` gave, for autograd."""
        out = torch.from_numpy(grads)
        if self._lent and self._rows is not None and grads is self._rows.grads:
            self._lent_at = out.data_ptr()
        return out

    def target(self) -> NDArray[np.float32]:
        """Return where a backward pass may write the gradient of all rows, float32 [rows, dim]."""
        rows, n_rows = self._rows, len(self.keys)
        self.backwards += 1
        self._stepped = False
        self._begin_local()
        if (
            rows is None
            or self.complete
            or self._lent
            or n_rows != rows.u
            or not hasattr(rows, "grads")
            or self._hooked()
        ):
            return np.empty((n_rows, self.dim), np.float32)
        self._lent = True
        return rows.grads

    def _hooked(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.param._backward_hooks is not None or bool(self.param._post_accumulate_grad_hooks)

    @property
    def learns(self) -> bool:
        """Return whether autograd is to bring a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.param.requires_grad

    def by_hand(self, task: int) -> NDArray[np.float32]:
        """Return where lookups of a backward pass add gradients, float32 [rows, dim], if rows came behind others."""
        found = self.summed.get(task)
        if found is None or len(found) < len(self.keys):
            whole = np.zeros((len(self.keys), self.dim), np.float32)
            if found is not None:
                whole[: len(found)] = found
            found = self.summed[task] = whole
        return found

    def whole(self, task: int) -> NDArray[np.float32]:
        """Return what lookups of a backward pass have added up, float32 [rows, dim]; it is gone from here."""
        self.by_hand(task)
        return self.summed.pop(task)

    def add_at_the_end(self, task: int) -> None:
        """When this backward pass ends, its gradient is added by hand: an accumulator of autograd has the shape of the
        rows that there were when it was made."""
        if self.asked or task in self._ending:
            return
        self._ending.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._add_whole, task))

    def _add_whole(self, task: int) -> None:
        self._ending.discard(task)
        if task in self.summed:
            self.backwards += 1
            self._stepped = False
            self._add(torch.from_numpy(self.whole(task)))

    def _add(self, whole: Tensor) -> None:
        self._begin_local()
        for hook in (self.param._backward_hooks or {}).values():
            whole = whole if (changed := hook(whole)) is None else changed
        now = self._grad()
        self._put_grad(whole if now is None else now + whole)
        for hook in (self.param._post_accumulate_grad_hooks or {}).values():
            hook(self.param)

    def _begin_local(self) -> None:
        """Backward brings a gradient. What the group has added up before is set aside: it is not added up again."""
        if self._collected and not self._local and self._grad() is not None:
            self.stash()
        self._local = True

    def arrive(self, keys: NDArray[np.int64], grads: NDArray[np.float32]) -> None:
        """Add a gradient from elsewhere to what is carried (mode allreduce: of all members). Keys may repeat."""
        self.backwards += 1
        self._stepped = False
        self._arrived.append((keys, grads))

    def _take_in(self) -> bool:
        """Carry what has arrived. Whether anything had."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return False
        if self._carried is not None:
            arrived.insert(0, (self._carried.keys, _numbers(self._carried.grads)))
        all_keys = np.concatenate([keys for keys, _ in arrived])
        keys, inverse = np.unique(all_keys, return_inverse=True)
        grads = np.empty((len(keys), self.dim), np.float32)
        whole = np.concatenate([g for _, g in arrived])
        bag_backward(whole, inverse.astype(np.int32).reshape(-1), None, "sum", None, len(keys), grads)
        # Their values are not known here: whoever computes with them shall see it.
        values = np.full((len(keys), self.dim), np.nan, np.float32)
        self._carried = Carried(keys, torch.from_numpy(grads), False, values)
        return True

    def save(self) -> Any:
        """Return the gradient from before this iteration, to go back to (mode allreduce)."""
        return self._carried, list(self._arrived), self.drops, self._stepped

    def restore(self, saved: Any) -> None:
        self._put_grad(None)
        self._carried, self._arrived = saved[0], list(saved[1])
        self.drops, self._stepped = saved[2:]

    @property
    def waits(self) -> bool:
        """Return whether a gradient is here that no step has taken."""
        return self.has_grad and not self._stepped

    def kept(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Return, between two batches, what is carried, by ascending key, without rows that have nothing; None: nothing
        is. The same on all members of a group."""
        self._take_in()
        if self._carried is None:
            return None
        keys, grads = self._carried.keys, _numbers(self._carried.grads).reshape(-1, self.dim)
        order = np.argsort(keys, kind="stable")
        order = order[np.any(grads[order] != 0, axis=1)]
        return keys[order].copy(), grads[order].copy()

    def put_kept(self, keys: NDArray[np.int64], grads: NDArray[np.float32], waits: bool) -> None:
        """Put back what ``kept`` gave elsewhere. ``waits``: as there."""
        if len(keys) != len(grads) or grads.shape[1:] != (self.dim,):
            raise ValueError(
                f"gradients {list(grads.shape)} of {len(keys)} rows of table {self.name!r}, dim {self.dim}"
            )
        self.arrive(np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(grads, np.float32))
        self._stepped = not waits

    def take_local(self) -> Gradient | None:
        """Return what backward has brought here, without what is carried; it is gone from here."""
        for task in list(self._ending):  # whoever asks was to be called at the pass's end before this table
            self._add_whole(task)
        if self._collected and not self._local:
            return None
        self._collected, self._local = True, False
        now = self._grad()
        if now is None:
            return None
        keys, numbers = self.keys, _numbers(now)
        if self.zero_padding and not (keep := keys != self.padding).all():
            keys, numbers = keys[keep], numbers[keep]
        found = Gradient(keys.copy(), numbers.copy(), None)
        self._put_grad(None)
        self._lent = self._exposed = False
        return found

    def look(self) -> Tensor | None:
        """Return the gradient for somebody who may keep or change it."""
        if self.hidden:
            return None
        if self._take_in() and self.in_hand:
            self._combine()
        now, carried = self._grad(), self._carried
        if carried is not None:
            if carried.lent:
                self._carried = carried = Carried(carried.keys, carried.grads.clone(), False)
            if now is None:
                self._handed = True
                return carried.grads
            self._combine()
            now = self._grad()
        self._exposed = now is not None
        return now

    def set_grad(self, value: Tensor | None) -> None:
        """The script assigns it."""
        if value is None:
            self.drops += 1
            self._carried = None
            self._arrived = []
            self._put_grad(None)
            self._exposed = False
            return
        carried = self._carried
        alike = carried is not None and self._grad() is None and value.shape == carried.grads.shape
        if carried is not None and alike and (self._handed or value.shape != self.values.shape):
            self._carried = Carried(carried.keys, value, False, carried.values)  # it is made of what is carried
            return
        self._carried = None
        self.backwards += 1
        self._put_grad(value)
        self._exposed = True

    @property
    def in_hand(self) -> bool:
        """Whether a batch is, and has rows of this table here."""
        return self._rows is not None or len(self.keys) > 0

    @property
    def has_grad(self) -> bool:
        return self._carried is not None or bool(self._arrived) or self._grad() is not None

    def zero(self) -> None:
        """Drop the gradient, without looking at it."""
        self.set_grad(None)

    def _combine(self) -> None:
        """Combine what is carried and what has come: one gradient, of the rows of both."""
        carried, now = self._carried, self._grad()
        if carried is None:
            return
        at = self.place(carried.keys)
        new = at < 0
        self._carried = None
        if new.any():
            n = int(new.sum())
            at[new] = np.arange(len(self.keys), len(self.keys) + n)
            old = carried.values[new] if carried.values is not None else self._read(carried.keys[new])
            self.extend(carried.keys[new], old)
            now = self._grad()
        whole = torch.zeros((len(self.keys), self.dim)) if now is None else now
        whole.index_add_(0, torch.from_numpy(at), carried.grads.reshape(len(at), self.dim).to(whole.dtype))
        self._put_grad(whole)

    def stash(self) -> None:
        """The rows are about to go: keep their gradient, by key."""
        if self._grad() is None:
            return
        self._combine()
        now = self._grad()
        assert now is not None
        values = None if self._stepped else self.values.copy()
        self._carried = Carried(self.keys.copy(), now, False, values)
        self._put_grad(None)
        self._exposed = False

    def take(self) -> Gradient | None:
        """Return the gradient for a step; it stays what the script sees. None: there is none."""
        found = self._take()
        if found is None or not self.moves_all() or self.vocabulary is None:
            return found
        grads = np.zeros((self.vocabulary, self.dim), np.float32)
        grads[found.keys] = found.grads
        return Gradient(np.arange(self.vocabulary, dtype=np.int64), grads, None)

    def _take(self) -> Gradient | None:
        self._stepped = True
        self._take_in()
        if self._carried is None or self._grad() is not None or len(self.keys):
            self._combine()
            keys, now = self.keys, self._grad()
        else:  # no batch is in hand
            keys, now = self._carried.keys, self._carried.grads
        if now is None:
            return None
        rows, numbers = self._rows, _numbers(now)
        if self.zero_padding and not (keep := keys != self.padding).all():
            return Gradient(keys[keep], numbers[keep], None)
        lies = self._lent and not now.is_sparse and now.data_ptr() == self._lent_at and now.is_contiguous()
        if rows is None or not lies or self._exposed or numbers.shape != rows.grads.shape:
            return Gradient(keys, numbers, None)
        self._carried = Carried(self.keys.copy(), now, True)
        self._put_grad(None)
        return Gradient(self.keys, rows.grads, rows)

    # ------------------------------------------------------------ edits

    def used(self, whole: int = 0) -> None:
        """The script is about to use the values, perhaps to change them. ``whole``: a table of at most so many numbers
        is to be there as a whole."""
        if self.stale is not None:
            self.stale()
        if self.fits(whole) and (self.in_hand or (self.source is not None and self.source.in_batch)):
            self.make_whole()
        if not self._used and self.in_hand:
            self._used = True
            self.seen()

    def seen(self) -> None:
        """The values are those of the ps now."""
        if self._used:
            self._digest = sum_bits(self.values, "float32")[0] if len(self.keys) else 0

    def changed(self) -> bool:
        """Return whether the script has changed values since ``seen``; if by assigning another tensor, it is taken
        in."""
        if not self._used:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            data: Tensor = _DATA.__get__(self.param)
            if data.data_ptr() != self.values.ctypes.data and tuple(data.shape) == self.values.shape:
                np.copyto(self.values, data.numpy())
                _DATA.__set__(self.param, torch.from_numpy(self.values))
        return bool(len(self.keys)) and sum_bits(self.values, "float32")[0] != self._digest


def _numbers(grads: Tensor) -> NDArray[np.float32]:
    """Return float32 [n, dim], C order; a sparse gradient as a dense one."""
    if grads.is_sparse:
        grads = grads.to_dense()
    if grads.dtype != torch.float32:
        grads = grads.float()
    out: NDArray[np.float32] = grads.detach().contiguous().numpy()
    return out
