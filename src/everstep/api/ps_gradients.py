"""Collects what ``grad`` holds in mode ps: of dense parameters, of the rows of tables, and what batches changed of
buffers.

``capture`` copies it to where it can be pushed from. The rest answers what an iteration without a step has left: a new
gradient, or none, or gradients that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from everstep.api.dense import DenseGroup, FlatGroup, PsOptimizer
from everstep.api.firing import TableFiring
from everstep.api.ps_buffers import ModelBuffers
from everstep.api.rows import TableParameter, is_table
from everstep.api.schedule import JobSchedule
from everstep.api.tables import TableSet
from everstep.errors import ScriptError
from everstep.ids import TableId
from everstep.model.table import Rate
from everstep.monitor.stepclock import StepClock
from everstep.native import gather_pieces, gather_rows, isfinite_all
from everstep.tables.computed_step import StepPayload, put_rows
from everstep.tables.routing import BatchRows, Router, TableRows

Captured = tuple[list[TableRows], list[BatchRows], list[TableRows], dict[TableId, Rate]]
"""Rows with gradients, their memory, those of the rows that lie where the script sees them, what tables go by."""


class PsGradients:
    """See the top of this file. ``optimizers``: of the script, in the order in which it gave them to the job."""

    def __init__(self, tables: TableSet, schedule: JobSchedule, alone: bool) -> None:
        """``alone``: no other worker adds to buffers, so they are stored and not added up."""
        self._tables, self._alone = tables, alone
        self.schedule = schedule
        self.optimizers: list[PsOptimizer] = []
        self.firing = TableFiring(tables)
        self.buffers = ModelBuffers()
        self._marks: list[tuple[int, int]] = []  # which gradients there were when the iteration began
        self._probe: tuple[torch.nn.Parameter, torch.Tensor] | None = None  # a gradient that kept batches are in
        self._watched: set[TableId] = set()  # dense groups whose gradients tell the clock

    def __repr__(self) -> str:
        return f"<PsGradients of {len(self.optimizers)} optimizers>"

    # ------------------------------------------------------------ what the script has

    def hold(self, optimizer: PsOptimizer, of_torch: torch.optim.Optimizer) -> None:
        """The script has made ``optimizer``. Raises ScriptError where another one holds one of its tables."""
        tables = (p.everstep_table for g in of_torch.param_groups for p in g["params"] if isinstance(p, TableParameter))
        twice = next((name for name in tables if name in self.firing.names), None)
        if twice is not None:
            raise ScriptError(f"two optimizers hold the weight of table {twice!r}: leave it out of one of them")
        self.firing.hold(optimizer, of_torch)

    def check_tables(self) -> None:
        """Before the first batch: every table has one optimizer that fires it. Raises ScriptError."""
        if len(self.optimizers) > 1 and (free := self.firing.free):
            raise ScriptError(
                f"table {free[0]!r} is in none of the {len(self.optimizers)} optimizers, so no step() is its own: give "
                "its weight to the optimizer that shall step it (model.parameters() has it after job.sparse)"
            )

    def place_buffers(self) -> None:
        """Give the buffers of the models a place on the ps."""
        group = self.buffers.place(self.schedule.counted)
        if group is not None:
            self._tables.dense.append(group)

    def watch_backward(self, clock: StepClock) -> None:
        """The last parameters of a model get their gradients first: there the clock hears of backward."""
        for group in self._tables.dense:
            if isinstance(group, DenseGroup) and group.params and group.spec.id not in self._watched:
                self._watched.add(group.spec.id)
                hook = group.params[-1].register_post_accumulate_grad_hook
                hook(lambda _: clock.first_gradient())  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------ what a step takes

    def has(self, optimizer: PsOptimizer) -> bool:
        """Return whether there is anything that a step of ``optimizer`` applies."""
        return any(held.table.has_grad for held in self.firing.fired(optimizer)) or any(
            group.has_grad() for group in optimizer.groups
        )

    def capture(self, optimizers: Sequence[PsOptimizer | None]) -> StepPayload | None:
        """Return what ``grad`` holds now, ready to be pushed; None: nothing. ``optimizers``: that step, None: tables
        alone."""
        router = self._tables.client.router
        captured: Captured = [], [], [], {}
        out, holders, seen, rates = captured
        try:
            for optimizer in optimizers:
                if optimizer is not None:
                    self._capture_dense(optimizer, router, captured)
                self._capture_tables(optimizer, router, captured)
            if out:
                self.schedule.stepped()
                for buffers in () if self._alone else self.buffers.groups:
                    if (change := buffers.gradient()) is not None:
                        out.append(self._all_rows(buffers, change, router, holders))
        except BaseException:
            for holder in holders:
                holder.close()
            raise
        if not out:
            return None
        payload = StepPayload(out, holders, router, rates)
        payload.seen = seen
        bad = next((rows for rows in out if not isfinite_all(rows.grads)), None)
        payload.bad = bad.spec.name if bad is not None else ""
        return payload

    def _capture_dense(self, optimizer: PsOptimizer, router: Router, captured: Captured) -> None:
        out, holders, _, rates = captured
        self._declare_thawed(optimizer)
        for group in optimizer.groups:
            if (pieces := group.pieces()) is not None:
                rates[group.spec.id] = group.twin.rate()
                out.append(rows := self._new_rows(group, router, holders))
                gather_pieces(pieces, group.row_starts, group.order(router).index, rows.grads)
                continue
            dense = group.gradient()
            if dense is None:
                continue
            rates[group.spec.id] = group.twin.rate()
            if dense.keys is None:
                out.append(self._all_rows(group, dense.grads, router, holders))
            else:
                batch = self._batch(router, holders)
                out.append(put_rows(batch, group.spec, dense.keys, dense.grads))

    def _capture_tables(self, optimizer: PsOptimizer | None, router: Router, captured: Captured) -> None:
        out, holders, seen, rates = captured
        for held in self.firing.fired(optimizer):
            found = held.table.take()
            if found is None:
                continue
            spec = self._tables.infos[held.table.name].spec
            rates[spec.id] = held.rate()
            if held.maximize:
                out.append(put_rows(self._batch(router, holders), spec, found.keys, -found.grads))
            elif found.rows is not None and found.rows.router.version == router.version:
                holders.append(found.rows.batch.retain())
                found.rows.touched = True
                out.append(found.rows)
                seen.append(found.rows)
            else:
                out.append(put_rows(self._batch(router, holders), spec, found.keys, found.grads))

    def _batch(self, router: Router, holders: list[BatchRows]) -> BatchRows:
        batch = BatchRows(self._tables.client.memory, router)
        holders.append(batch)
        return batch

    def _all_rows(
        self, group: FlatGroup, grads: NDArray[np.float32], router: Router, holders: list[BatchRows]
    ) -> TableRows:
        """Return a copy of the gradients of all rows of a group, where they can be pushed from."""
        rows = self._new_rows(group, router, holders)
        gather_rows(grads, group.order(router).index, rows.grads)
        return rows

    def _new_rows(self, group: FlatGroup, router: Router, holders: list[BatchRows]) -> TableRows:
        """Return memory for the gradients of all rows of a group, to be pushed from."""
        (rows,) = self._batch(router, holders).add([group.order(router).found], values=False)
        rows.touched = True
        return rows

    def _declare_thawed(self, optimizer: PsOptimizer) -> None:
        """Give parameters that were frozen when the optimizer was made, and learn now, a table of their own."""
        new = optimizer.thawed()
        if new:
            self._tables.dense += new
            self._tables.declare()

    # ------------------------------------------------------------ what an iteration has left

    def begin(self) -> None:
        """An iteration begins: remember which gradients there are."""
        self._marks = self._marks_now()

    def new(self) -> bool:
        """Whether there is a gradient that was not there, or was another one, when the iteration began."""
        marks = self._marks_now()
        return any(m[0] for m in marks) and marks != self._marks

    def any(self) -> bool:
        """Return whether there is any gradient."""
        return any(t.has_grad for t in self._tables.batches.values()) or any(
            group.has_grad() for optimizer in self.optimizers for group in optimizer.groups
        )

    def zero(self) -> None:
        """Zero all of them, as if by every optimizer's ``zero_grad``."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.zero_tables()

    def zero_tables(self) -> None:
        for table in self._tables.batches.values():
            table.zero()

    def zero_followers(self, optimizer: PsOptimizer) -> None:
        """Zero the tables that follow the only optimizer, with it."""
        for held in self.firing.fired(optimizer):
            held.table.zero()

    def mark_kept(self) -> None:
        """Note that batches wait for a step: remember the smallest dense gradient that they are in. It is kept alive,
        so that another one in its place is seen to be another."""
        found = [p for o in self.optimizers for group in o.groups for p in group.params if p.grad is not None]
        smallest = min(found, key=lambda p: p.numel(), default=None)
        self._probe = None if smallest is None or smallest.grad is None else (smallest, smallest.grad)

    def forget_kept(self) -> None:
        """Note that no batches wait for a step."""
        self._probe = None

    def kept_are_gone(self) -> bool:
        """Return whether the gradients of batches that wait for a step are gone, by whatever way."""
        if self._probe is None:
            return not self.any()
        p, grad = self._probe
        return p.grad is not grad

    def _marks_now(self) -> list[tuple[int, int]]:
        """Return of each gradient which it is, and how often it was changed; (0, 0): there is none."""
        out = [(int(t.has_grad), t.backwards) for t in self._tables.batches.values()]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if not is_table(p):
                        out.append((0, 0) if (g := p.grad) is None else (id(g), g._version))
        return out
