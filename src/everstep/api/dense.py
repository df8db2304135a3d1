"""Puts the dense part on the ps: parameters flattened into the rows of a table, one table per parameter group.

All parameters of a group are views of one flat buffer, each beginning a row. Before a batch the newest rows are copied
into it. At the script's ``step`` the gradients of those parameters that have one are copied out and pushed. A
parameter whose ``grad`` is None is not stepped, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from everstep.api.batch_table import BatchTable
from everstep.api.optim import TwinGroup
from everstep.api.rows import TableParameter, asks_for_values, flat_arguments, is_table
from everstep.errors import ScriptError
from everstep.model.saved_optimizer import NO_STATE, has_momenta
from everstep.model.table import InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import gather_rows, sum_bits
from everstep.tables.routing import Router, TableRows

_BIG_FLOATS = 1 << 18  # from here on a row has 1024 floats, below 256


class DenseOrder:
    """Says how a group's rows are ordered by one map: ``keys`` int64 [rows] grouped by ps and partition, and back."""

    def __init__(self, spec: TableSpec, n_rows: int, router: Router) -> None:
        self.version = router.version
        self.keys, self.inverse, self.counts = router.route(spec.id, np.arange(n_rows, dtype=np.int64))
        self.index: NDArray[np.int32] = self.keys.astype(np.int32)
        self.found = spec, self.keys, self.counts  # as ``BatchRows.add`` wants it


class FlatGroup:
    """Holds tensors in the rows of one dense table. ``flat``: float32 [rows * dim], zero behind each tensor's end.

    ``names``: of the tensors, as the model's ``state_dict`` has them; they go into checkpoints."""

    def __init__(self, name: str, tensors: Sequence[Tensor], names: Sequence[str], optimizer: OptimizerSpec) -> None:
        self.tensors = list(tensors)
        n = sum(t.numel() for t in self.tensors)
        dim = 1024 if n >= _BIG_FLOATS else 256
        self.dim = dim
        self.starts: list[int] = []  # first float of each
        at = 0
        for t in self.tensors:
            self.starts.append(at)
            at += -(-max(1, t.numel()) // dim) * dim
        self.n_rows = max(1, at // dim)
        shapes = tuple((name, tuple(t.shape)) for name, t in zip(names, self.tensors, strict=True))
        self.spec = TableSpec(
            name, dim, optimizer, InitSpec(), rows=self.n_rows, dense=True, parameters=shapes, aligned=True
        )
        self.flat = torch.zeros(self.n_rows * dim)
        self.row_starts = np.array(self.starts, np.int64) // dim
        self._scratch = torch.zeros(self.n_rows * dim)
        self._order: DenseOrder | None = None
        self._digest: int | None = None  # None: nobody has seen the values of the ps yet

    def order(self, router: Router) -> DenseOrder:
        """Return the rows as ``router`` groups them. Rows of a batch keep the order they were pulled in."""
        order = self._order
        if order is None or order.version != router.version:
            self._order = order = DenseOrder(self.spec, self.n_rows, router)
        return order

    def initial(self) -> NDArray[np.float32]:
        """Return this worker's own values, float32 [rows, dim] in the order of the keys 0, 1, 2, ..."""
        return self._rows(self.flat)

    def take(self, rows: TableRows) -> None:
        """Copy the values of pulled rows into the tensors."""
        gather_rows(rows.values, rows.order.inverse, self._rows(self.flat))
        self.seen()

    def view(self, i: int) -> Tensor:
        """Return the place of tensor ``i`` in the flat buffer, in its shape."""
        t = self.tensors[i]
        return self.flat[self.starts[i] : self.starts[i] + t.numel()].view(t.shape)

    def seen(self) -> None:
        """The values are those of the ps now."""
        self._digest = sum_bits(self.flat.numpy(), "float32")[0]

    def changed(self) -> bool:
        """Return whether the script has changed values since ``seen``."""
        return self._digest is not None and sum_bits(self.flat.numpy(), "float32")[0] != self._digest

    def changed_names(self, rows: TableRows | None) -> list[str]:
        """Return the names of the tensors that are not as in ``rows``, the pulled ones."""
        if rows is None:
            return []
        pulled = torch.from_numpy(rows.values[rows.order.inverse]).reshape(-1)
        return [
            name
            for (name, _), t, at in zip(self.spec.parameters, self.tensors, self.starts, strict=True)
            if not torch.equal(pulled[at : at + t.numel()], self.flat[at : at + t.numel()])
        ]

    def _rows(self, flat: Tensor) -> NDArray[np.float32]:
        out: NDArray[np.float32] = flat.numpy().reshape(self.n_rows, self.dim)
        return out


class StaleParameter(nn.Parameter):
    """A dense parameter between the script's ``step`` and the end of its iteration: the ps has newer values, or will
    have. Whatever reads or writes it gets those first (``StaleValues.freshen``)."""

    everstep_values: StaleValues

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_for_values(func):
            for a in flat_arguments(args, kwargs or {}):
                if isinstance(a, StaleParameter):
                    a.everstep_values.freshen()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.everstep_values.freshen()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.everstep_values.freshen()
        return self.__reduce_ex__(protocol)


class StaleValues:
    """Is told when the script uses values that its own ``step`` has changed. ``freshen``: brings the new ones, and
    calls ``clear``."""

    def __init__(self, freshen: Callable[[], None]) -> None:
        self.freshen = freshen
        self._params: list[nn.Parameter] = []
        self._tables: list[BatchTable] = []

    def __repr__(self) -> str:
        return f"<StaleValues {len(self._params)} parameters, {len(self._tables)} tables>"

    def watch(self, groups: Sequence[FlatGroup], tables: Iterable[BatchTable]) -> None:
        """Watch these: from now on whoever uses them gets the new values first."""
        self._tables = list(tables)
        for table in self._tables:
            table.stale = self.freshen
        for group in groups:
            for p in group.tensors:
                if type(p) is nn.Parameter:
                    p.__class__ = StaleParameter
                    p.everstep_values = self  # type: ignore[attr-defined]
                    self._params.append(p)

    def clear(self) -> None:
        """The values are new, or nobody needs them any more."""
        params, self._params = self._params, []
        for p in params:
            p.__class__ = nn.Parameter
            del p.everstep_values  # type: ignore[attr-defined]
        for table in self._tables:
            table.stale = None
        self._tables = []


class DenseGradient(NamedTuple):
    """Is what a step takes of a dense group. ``keys`` int64 [n]: its rows, None for all; ``grads`` float32 [n, dim]."""

    keys: NDArray[np.int64] | None
    grads: NDArray[np.float32]


class DenseGroup(FlatGroup):
    """Holds the parameters of one group of one optimizer, all of float32 on the CPU. ``twin``: of the group."""

    def __init__(
        self,
        name: str,
        twin: TwinGroup,
        names: Mapping[int, str] | None = None,
        params: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.twin, group = twin, twin.group
        chosen = params if params is not None else [p for p in group["params"] if p.requires_grad and not is_table(p)]
        self.params: list[nn.Parameter] = list(chosen)
        for p in self.params:
            if p.dtype != torch.float32 or p.device.type != "cpu":
                raise ScriptError(
                    f"a dense parameter of shape {tuple(p.shape)} is {p.dtype} on {p.device}: the dense part on the ps "
                    "takes float32 on the CPU: convert it (model.float().cpu()), or train with --mode allreduce, "
                    "which takes every type and device"
                )
        names = names or {}
        labels = [names.get(id(p), f"{name}/{i}") for i, p in enumerate(self.params)]
        super().__init__(name, self.params, labels, twin.spec)
        self._places: list[int] = []  # addresses of the views
        self._copies: list[Tensor] = []  # where the gradient of each is copied to
        for i, p in enumerate(self.params):
            view = self.view(i)
            view.copy_(p.detach())
            p.data = view
            self._places.append(view.data_ptr())
            self._copies.append(self._scratch[self.starts[i] : self.starts[i] + p.numel()].view(p.shape))

    def __repr__(self) -> str:
        return f"<DenseGroup {self.spec.name} {len(self.params)} parameters in {self.n_rows} rows>"

    def changed(self) -> bool:
        for i, p in enumerate(self.params):  # a parameter that was given another tensor takes its values along
            if p.data_ptr() != self._places[i] and p.numel():
                view = self.view(i)
                if p.shape != view.shape or p.dtype != view.dtype:
                    raise ScriptError(
                        f"parameter {self.spec.parameters[i][0]!r} became {p.dtype} {tuple(p.shape)} in the loop: the "
                        "dense part on the ps keeps its shape and type"
                    )
                view.copy_(p.detach())
                p.data = view
        return super().changed()

    def has_grad(self) -> bool:
        return any(p.grad is not None for p in self.params)

    def pieces(self) -> list[NDArray[np.float32]] | None:
        """Return the gradients of all parameters where they lie; None: some have none, or not as the ps takes it."""
        found: list[NDArray[np.float32]] = []
        if self.twin.maximize:
            return None
        for p in self.params:
            grad = p.grad
            if grad is None or grad.is_sparse or grad.dtype != torch.float32 or not grad.is_contiguous():
                return None
            found.append(grad.detach().numpy())
        return found or None

    def gradient(self) -> DenseGradient | None:
        """Return the gradients of all parameters that have one; None: none has. Valid until the next call."""
        with_grad = [i for i, p in enumerate(self.params) if p.grad is not None]
        if not with_grad:
            return None
        turn = self.twin.maximize
        for i in with_grad:
            grad, place = self.params[i].grad, self._copies[i]
            assert grad is not None
            if grad.is_sparse:
                grad = grad.to_dense()
            place.copy_(grad.detach())
            if turn:  # up the gradient: as torch does, before anything else is made of it
                place.neg_()
        rows = self._rows(self._scratch)
        if len(with_grad) == len(self.params):
            return DenseGradient(None, rows)
        ends = [*self.starts[1:], self.n_rows * self.dim]
        found = [np.arange(self.starts[i] // self.dim, ends[i] // self.dim) for i in with_grad]
        keys = np.concatenate(found).astype(np.int64)
        return DenseGradient(keys, rows[keys])

    def torch_state(self, keys: NDArray[np.int64], state: NDArray[np.float32]) -> list[dict[str, Any]]:
        """Return the state of each parameter, named as torch does, from that of all rows (float32 [rows, floats])."""
        ordered, dim = state[np.argsort(keys)], self.dim
        if self.spec.optimizer.kind is OptimizerKind.SGD:
            ordered = np.nan_to_num(ordered, nan=0.0)  # NaN: there was no gradient yet
        out: list[dict[str, Any]] = [{} for _ in self.params]
        done = 0
        for field in self.spec.optimizer.state_fields():
            piece = torch.from_numpy(np.ascontiguousarray(ordered[:, done : done + (dim if field.each else 1)]))
            done += piece.shape[1]
            for one, p, at in zip(out, self.params, self.starts, strict=True):
                found = piece.reshape(-1)[at : at + p.numel()].view(p.shape) if field.each else piece[at // dim, 0]
                one[field.name] = found.clone()
        if self.spec.optimizer.kind is OptimizerKind.ADAGRAD:
            for one in out:
                one.setdefault("step", torch.tensor(0.0))  # without lr_decay the ps does not count them
        return out


class PsStepper(Protocol):
    """Is what an optimizer tells the job."""

    def stepped(self, optimizer: PsOptimizer) -> None: ...

    def zeroed(self, optimizer: PsOptimizer) -> None: ...

    def dense_state(self, group: DenseGroup) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...

    def hold(self, optimizer: PsOptimizer, of_torch: torch.optim.Optimizer) -> None: ...


class PsOptimizer(torch.optim.Optimizer):
    """Stands for a torch optimizer whose twin runs on the ps. ``step`` hands over what ``grad`` holds then, of dense
    parameters and of tables; learning rate schedulers work on its ``param_groups`` (or on those of the optimizer it was
    made from: they are the same)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        stepper: PsStepper,
        names: Mapping[int, str] | None = None,
    ) -> None:
        if any(float(s.get("step", 1)) > 0 for s in optimizer.state.values()):  # Adagrad's begins with step 0
            raise ScriptError("this optimizer has stepped already: give job.optimizer a fresh one")
        self._index, self._names = index, names or {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._stepper = stepper
        self.groups: list[DenseGroup] = []
        self._twins = [
            TwinGroup(f"param_groups[{i}]", type(optimizer), group) for i, group in enumerate(self.param_groups)
        ]
        self._given_up: list[nn.Parameter] = []  # another optimizer has them now
        for group in self.param_groups:
            for p in group["params"]:
                if (name := getattr(p, "everstep_replaced", "")) != "":
                    raise ScriptError(
                        f"the optimizer holds the old weight of table {name!r}, which job.sparse has replaced: make "
                        "the optimizer after job.sparse(model)"
                    )
        for i, group in enumerate(self.param_groups):
            if any(p.requires_grad and not is_table(p) for p in group["params"]):
                self.groups.append(DenseGroup(f"dense/{index}/{i}", self._twins[i], names))
        stepper.hold(self, optimizer)

    def __repr__(self) -> str:
        return f"<PsOptimizer of {len(self.param_groups)} groups>"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand the gradients to the ps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None for p in self._given_up):
            raise ScriptError(
                "opt.step() of an optimizer whose parameters were given to another job.optimizer() since: on the ps a "
                "parameter has one optimizer at a time; step the newer one, or train with --mode allreduce"
            )
        self._stepper.stepped(self)
        return loss

    def give_up(self, params: Collection[int]) -> list[DenseGroup]:
        """Give up some of the parameters (by ``id()``) to another optimizer: the groups that they were in are no more.
        Those of their other parameters that get a gradient begin a group anew."""
        gone = [group for group in self.groups if any(id(p) in params for p in group.params)]
        self.groups = [group for group in self.groups if group not in gone]
        self._given_up += [p for group in gone for p in group.params if id(p) in params]
        return gone

    def thawed(self) -> list[DenseGroup]:
        """Return new groups of parameters that were frozen when the optimizer was made and have a gradient now."""
        known = {id(p) for dense in self.groups for p in dense.params} | {id(p) for p in self._given_up}
        out: list[DenseGroup] = []
        for i, group in enumerate(self.param_groups):
            new = [p for p in group["params"] if id(p) not in known and not is_table(p) and p.grad is not None]
            if new:
                first = next(k for k, p in enumerate(group["params"]) if p is new[0])
                out.append(DenseGroup(f"dense/{self._index}/{i}/{first}", self._twins[i], self._names, new))
        self.groups += out
        return out

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, TableParameter):
                    p._table.zero()
                elif set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
        self._stepper.zeroed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as the torch optimizer's own, with the state that the ps has now; torch's optimizer can load
        it. The state of tables is not in it: it is in checkpoints and exports."""
        state: dict[int, Any] = {}
        groups, number = [], 0
        known: dict[int, dict[str, Any]] = {}
        for dense in self.groups:
            found = dense.torch_state(*self._stepper.dense_state(dense))
            known |= {id(p): one for p, one in zip(dense.params, found, strict=True)}
        for group in self.param_groups:
            ids = list(range(number, number + len(group["params"])))
            number += len(ids)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids})
            for i, p in zip(ids, group["params"], strict=True):
                if one := known.get(id(p)):
                    state[i] = one
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options (learning rates, ...) of a saved state. Raises ScriptError where groups differ, and where
        there is state (momenta): the ps has no way to be given it."""
        saved = state_dict["param_groups"]
        if has_momenta(state_dict):
            raise ScriptError(NO_STATE.format("opt.load_state_dict"))
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ScriptError("the saved optimizer state has other parameter groups than this optimizer")
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "groups"):
            raise ScriptError("job.optimizer: parameter groups can not be added later")
        super().add_param_group(param_group)
