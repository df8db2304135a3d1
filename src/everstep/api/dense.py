"""The dense part on the ps: parameters flattened into the rows of a table, one table per parameter group.

All parameters of a group are views of one flat buffer. Before a batch the newest rows are copied into it; after the
user's ``step`` the gradients are flattened once and pushed. Buffers (such as batch norm's running statistics) stay
local to the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from everstep.api.optim import twin_of
from everstep.errors import ScriptError
from everstep.model.table import InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import gather_rows
from everstep.tables.routing import Router, TableRows

_BIG_FLOATS = 1 << 18  # from here on a row has 1024 floats, below 256


class DenseOrder:
    """How a group's rows are ordered by one map: ``keys`` int64 [rows] grouped by ps and bucket, and back."""

    def __init__(self, spec: TableSpec, n_rows: int, router: Router) -> None:
        self.version = router.version
        self.keys, self.inverse, self.counts = router.route(spec.id, np.arange(n_rows, dtype=np.int64))
        self.index: NDArray[np.int32] = self.keys.astype(np.int32)
        self.found = spec, self.keys, self.counts  # as ``BatchRows.add`` wants it


class DenseGroup:
    """One parameter group of one optimizer. ``flat``: float32 [rows * dim], zero-padded behind the last parameter.

    ``names``: of parameters by ``id()``, as the model's ``state_dict`` has them; they go into checkpoints."""

    def __init__(
        self, name: str, group: dict[str, Any], optimizer: OptimizerSpec, names: Mapping[int, str] | None = None
    ) -> None:
        self.group = group
        self.params: list[nn.Parameter] = [p for p in group["params"] if p.requires_grad]
        for p in self.params:
            if p.dtype != torch.float32 or p.device.type != "cpu":
                raise ScriptError(
                    f"a dense parameter of shape {tuple(p.shape)} is {p.dtype} on {p.device}: the dense part on the ps "
                    "takes float32 on the CPU"
                )
        n = sum(p.numel() for p in self.params)
        dim = 1024 if n >= _BIG_FLOATS else 256
        self.n, self.dim, self.n_rows = n, dim, max(1, -(-n // dim))
        names = names or {}
        shapes = tuple((names.get(id(p), f"{name}/{i}"), tuple(p.shape)) for i, p in enumerate(self.params))
        self.spec = TableSpec(name, dim, optimizer, InitSpec(), rows=self.n_rows, dense=True, parameters=shapes)
        self.flat = torch.zeros(self.n_rows * dim)
        self._scratch = torch.zeros(self.n_rows * dim)
        self._order: DenseOrder | None = None
        at = 0
        for p in self.params:
            view = self.flat[at : at + p.numel()].view(p.shape)
            view.copy_(p.detach())
            p.data = view
            at += p.numel()

    def __repr__(self) -> str:
        return f"<DenseGroup {self.spec.name} {self.n} floats in {self.n_rows} rows>"

    @property
    def lr(self) -> float:
        return float(self.group["lr"])

    def order(self, router: Router) -> DenseOrder:
        """The rows as ``router`` groups them. Rows of a batch keep the order they were pulled in."""
        order = self._order
        if order is None or order.version != router.version:
            self._order = order = DenseOrder(self.spec, self.n_rows, router)
        return order

    def initial(self) -> NDArray[np.float32]:
        """This worker's own values, float32 [rows, dim] in the order of the keys 0, 1, 2, ..."""
        return self._rows(self.flat)

    def take(self, rows: TableRows) -> None:
        """Copy the values of pulled rows into the parameters."""
        gather_rows(rows.values, rows.order.inverse, self._rows(self.flat))

    def has_grad(self) -> bool:
        return any(p.grad is not None for p in self.params)

    def capture(self, rows: TableRows) -> bool:
        """Flatten the parameters' gradients into ``rows.grads`` (added to what is there); False if there are none.

        A parameter without a gradient counts as zero."""
        if not self.has_grad():
            return False
        at, pieces = 0, []
        for p in self.params:
            pieces.append(torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1))
            at += p.numel()
        torch.cat(pieces, out=self._scratch[: self.n])
        if rows.touched:
            rows.grads += self._rows(self._scratch)[rows.order.index]
        else:
            gather_rows(self._rows(self._scratch), rows.order.index, rows.grads)
            rows.touched = True
        return True

    def torch_state(self, keys: NDArray[np.int64], state: NDArray[np.float32]) -> list[dict[str, Any]]:
        """State of each parameter, named as torch does, from that of all rows (float32 [rows, floats])."""
        ordered, dim = state[np.argsort(keys)], self.dim
        fields: dict[str, Tensor] = {}
        match self.spec.optimizer.kind:
            case OptimizerKind.SGD if self.spec.optimizer.momentum > 0:
                fields["momentum_buffer"] = torch.from_numpy(np.nan_to_num(ordered[:, :dim], nan=0.0))
            case OptimizerKind.ADAGRAD:
                fields["sum"] = torch.from_numpy(ordered[:, :dim])
            case OptimizerKind.ADAM | OptimizerKind.ADAMW:
                fields["exp_avg"] = torch.from_numpy(ordered[:, :dim])
                fields["exp_avg_sq"] = torch.from_numpy(ordered[:, dim : 2 * dim])
        flat = {name: value.reshape(-1) for name, value in fields.items()}
        steps = ordered[:, 2 * dim] if "exp_avg" in fields else None
        out: list[dict[str, Any]] = []
        at = 0
        for p in self.params:
            one: dict[str, Any] = {n: v[at : at + p.numel()].view(p.shape).clone() for n, v in flat.items()}
            if steps is not None:
                one["step"] = torch.tensor(float(steps[at // dim]))
            elif "sum" in one:
                one["step"] = torch.tensor(0.0)  # Adagrad counts steps for lr_decay only, which the ps does not have
            out.append(one)
            at += p.numel()
        return out

    def _rows(self, flat: Tensor) -> NDArray[np.float32]:
        out: NDArray[np.float32] = flat.numpy().reshape(self.n_rows, self.dim)
        return out


class Stepper(Protocol):
    """What an optimizer tells the job."""

    def stepped(self, groups: list[DenseGroup]) -> None: ...

    def zeroed(self) -> None: ...

    def dense_state(self, group: DenseGroup) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...


class PsOptimizer(torch.optim.Optimizer):
    """Stands for a torch optimizer whose twin runs on the ps. ``step`` hands the gradients over; learning rate
    schedulers work on its ``param_groups`` (or on those of the optimizer it was made from: they are the same)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        stepper: Stepper,
        names: Mapping[int, str] | None = None,
    ) -> None:
        if any(float(s.get("step", 1)) > 0 for s in optimizer.state.values()):  # Adagrad's begins with step 0
            raise ScriptError("this optimizer has stepped already: give job.optimizer a fresh one")
        specs = [twin_of(optimizer, group) for group in optimizer.param_groups]
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._stepper = stepper
        self.groups = [
            DenseGroup(f"dense/{index}/{i}", group, spec, names)
            for i, (group, spec) in enumerate(zip(self.param_groups, specs, strict=True))
        ]

    def __repr__(self) -> str:
        return f"<PsOptimizer of {len(self.param_groups)} groups>"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand the gradients to the ps. They are applied in the background; the next batches bring the new values."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepper.stepped(self.groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._stepper.zeroed()

    def state_dict(self) -> dict[str, Any]:
        """As the torch optimizer's own, with the state that the ps has now; torch's optimizer can load it."""
        state: dict[int, Any] = {}
        packed, number = [], 0
        for group, dense in zip(self.param_groups, self.groups, strict=True):
            ids = list(range(number, number + len(group["params"])))
            number += len(ids)
            packed.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids})
            trained = {id(p) for p in dense.params}
            of_params = iter(dense.torch_state(*self._stepper.dense_state(dense)))
            for i, p in zip(ids, group["params"], strict=True):
                if id(p) in trained and (one := next(of_params)):
                    state[i] = one
        return {"state": state, "param_groups": packed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options (learning rates, ...) of a saved state. Raises ScriptError where groups differ.

        The state itself (momenta) begins anew: the ps has no way to be given it."""
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ScriptError("the saved optimizer state has other parameter groups than this optimizer")
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "groups"):
            raise ScriptError("job.optimizer: parameter groups can not be added later")
        super().add_param_group(param_group)
