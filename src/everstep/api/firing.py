"""Decides which ``step()`` fires which table: that of the optimizer that holds its parameter, else that of the only
one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from everstep.api.batch_table import BatchTable
from everstep.api.optim import TwinGroup
from everstep.api.rows import STEPPED_WHOLE, TableParameter
from everstep.api.tables import TableSet
from everstep.errors import ScriptError
from everstep.model.table import OptimizerSpec, Rate


class HeldTable(NamedTuple):
    """Is a table that an optimizer fires. ``group``: of the optimizer, whose learning rate it goes by; ``twin``: by all
    of whose options it goes.

    ``own``: the table's optimizer was given to job.sparse; then the group's rate counts in relation to ``base_lr``."""

    table: BatchTable
    group: dict[str, Any]
    own: OptimizerSpec | None
    base_lr: float
    optimizer: Any
    twin: TwinGroup | None = None

    @property
    def maximize(self) -> bool:
        """A step goes up its gradient."""
        return self.twin is not None and self.twin.maximize

    def rate(self, factor: float = 1.0) -> Rate:
        """Return what a step goes by now; its learning rate times ``factor``."""
        if self.twin is not None:
            lr, options = self.twin.rate()
            return Rate(lr * factor, options)
        now = float(self.group["lr"])
        if self.own is None:
            return Rate(now * factor)
        base = float(self.group.get("initial_lr", self.base_lr))
        return Rate((self.own.lr if base == 0.0 else self.own.lr * (now / base)) * factor)


class TableFiring:
    """See the top of this file. ``optimizers``: that the script gave to the job, so far."""

    def __init__(self, tables: TableSet) -> None:
        self._tables = tables
        self._held: list[HeldTable] = []
        self._names: set[str] = set()
        self._base_lrs: dict[int, float] = {}  # of an optimizer that tables follow
        self._given: list[Any] = []
        self.optimizers = 0

    def __repr__(self) -> str:
        return f"<TableFiring {self.optimizers} optimizers, {len(self._held)} tables held, {len(self.free)} free>"

    @property
    def names(self) -> set[str]:
        """Return the tables whose parameter some optimizer holds."""
        return self._names

    @property
    def free(self) -> list[str]:
        """Return the tables that no optimizer holds."""
        batches = self._tables.batches
        names = self.names
        return [] if len(names) == len(batches) else [name for name in batches if name not in names]

    def hold(self, optimizer: Any, of_torch: torch.optim.Optimizer) -> None:
        """Let ``optimizer`` (as the script has it) fire the tables whose parameters ``of_torch`` holds. Raises
        ScriptError where its formula has no twin on the ps."""
        self._tables.declarations.optimizers.append(of_torch)
        for i, group in enumerate(of_torch.param_groups):
            for p in group["params"]:
                if not isinstance(p, TableParameter):
                    continue
                name = p.everstep_table
                info = self._tables.infos[name]
                twin = None if info.own else TwinGroup(f"param_groups[{i}]", type(of_torch), group, table=True)
                if twin is not None:
                    self._tables.declarations.set_optimizer(name, twin.spec)
                elif group.get("maximize"):
                    raise ScriptError(
                        f"{type(of_torch).__name__}(maximize=True) holds the weight of table {name!r}, whose own "
                        "optimizer minimizes: leave optimizer= of job.sparse out, or negate the loss and drop maximize"
                    )
                own = info.spec.optimizer if info.own else None
                table = self._tables.batches[name]
                if twin is not None and table.fits(STEPPED_WHOLE):
                    table.moves_all = twin.moves_all
                base = float(group.get("initial_lr", group["lr"]))
                self._held.append(HeldTable(table, group, own, base, optimizer, twin))
                self._names.add(name)
        self._given.append(optimizer)
        self.optimizers += 1

    def check(self, scaled: bool) -> None:
        """Raises ScriptError if a table has no optimizer that fires it; ``scaled``: a GradScaler is tracked, which
        unscales only what an optimizer holds."""
        free, optimizers = self.free, self.optimizers
        if free and (scaled or optimizers > 1):
            why = "a GradScaler is tracked, which unscales only what an optimizer holds"
            several = f"there are {optimizers} optimizers, so no step() is its own"
            raise ScriptError(
                f"table {free[0]!r} is in no optimizer, and {why if scaled else several}: give its weight to the "
                "optimizer that shall step it (model.parameters() has it after job.sparse)"
            )

    def goes_by(self, optimizer: Any) -> bool:
        """Return whether some table goes by all options of ``optimizer``, and has its state on the ps."""
        return any(held.optimizer is optimizer and held.twin is not None for held in self._held)

    def all_fired(self) -> list[HeldTable]:
        """Return the tables that steps of all optimizers fire."""
        return [held for optimizer in self._given for held in self.fired(optimizer)]

    def fired(self, optimizer: Any) -> list[HeldTable]:
        """Return the tables that a step of ``optimizer`` fires. One that no optimizer holds follows the only one, by
        the factor of its first group's rate; without any (``optimizer`` None) it goes by its own rate."""
        found = [held for held in self._held if held.optimizer is optimizer]
        if self.optimizers > 1:
            return found
        for name in self.free:
            table, spec = self._tables.batches[name], self._tables.infos[name].spec.optimizer
            if optimizer is None:
                found.append(HeldTable(table, {"lr": spec.lr}, None, spec.lr, None))
                continue
            group = optimizer.param_groups[0]
            base = self._base_lrs.setdefault(id(optimizer), float(group["lr"]))
            found.append(HeldTable(table, group, spec, base, optimizer))
        return found
