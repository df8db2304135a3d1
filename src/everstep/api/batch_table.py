"""Keeps the gradient of a table's rows: of the batch in hand, and what is carried from batches before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.api.growing_rows import GrowingRows
from everstep.api.rows import TableParameter
from everstep.native import bag_backward
from everstep.tables.routing import TableRows


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


class BatchTable(GrowingRows):
    """Holds what is behind a ``TableParameter``: its rows (``ShownRows``) and their gradient."""

    def __init__(
        self, name: str, dim: int, padding: int | None, read: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    ) -> None:
        super().__init__(name, dim, padding, read)
        self.moves_all: Callable[[], bool] = lambda: False  # does what steps it change rows without a gradient, too?
        self.batch = 0  # grows with every ``show``
        self.backwards = 0  # gradients that have come
        self.drops = 0  # times that its gradient was dropped
        self._carried: Carried | None = None
        self._exposed = False  # somebody has looked at the gradient
        self._lent = False  # the memory for gradients that came with the rows is in use
        self._handed = False  # the script has seen what is carried
        self._stepped = False  # since the last backward
        self._collected = False  # backward's gradients go to the group: what is here besides is not of this process
        self._local = False  # what is here came from backward and was not collected
        self.hidden = False  # torch's optimizer, which holds the parameter, is not to step it
        self._arrived: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []  # see ``arrive``
        self._lent_at = 0  # address of the memory for gradients that is in use
        self.param = TableParameter(torch.empty((0, self.dim)))
        self.param.everstep_table = self.name
        self.param._table = self

    def __repr__(self) -> str:
        return f"<BatchTable {self.name!r} {len(self.keys)} rows{' +carried' if self._carried else ''}>"

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

    # ------------------------------------------------------------ gradients of backward

    def sum(self, padding_at: int) -> GradientSum:
        """Return where lookups of these rows add their gradients."""
        found = self._sums.get(padding_at)
        if found is None or found.batch != self.batch:
            found = self._sums[padding_at] = GradientSum(self, padding_at)
            self.parts.append(found)
        return found

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

    def arrived(self, grads: NDArray[np.float32]) -> Tensor:
        """Return a gradient that lies in what ``target`` gave, for autograd."""
        out = torch.from_numpy(grads)
        if self._lent and self._rows is not None and grads is self._rows.grads:
            self._lent_at = out.data_ptr()
        return out

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

    # ------------------------------------------------------------ gradients from elsewhere

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

    # ------------------------------------------------------------ the gradient, and a step

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

    def zero(self) -> None:
        """Drop the gradient, without looking at it."""
        self.set_grad(None)

    @property
    def has_grad(self) -> bool:
        return self._carried is not None or bool(self._arrived) or self._grad() is not None

    @property
    def waits(self) -> bool:
        """Return whether a gradient is here that no step has taken."""
        return self.has_grad and not self._stepped

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
        keys, now, rows = self.keys, self._grad(), self._rows
        if self._carried is not None:
            if now is not None or len(keys):
                self._combine()
                keys, now = self.keys, self._grad()
            else:  # no batch is in hand
                keys, now = self._carried.keys, self._carried.grads
        if now is None:
            return None
        if self.zero_padding and not (keep := keys != self.padding).all():
            return Gradient(keys[keep], _numbers(now)[keep], None)
        lies = self._lent and not now.is_sparse and now.data_ptr() == self._lent_at and now.is_contiguous()
        if rows is None or not lies or self._exposed or tuple(now.shape) != rows.grads.shape:
            return Gradient(keys, _numbers(now), None)
        self._carried = Carried(keys.copy(), now, True)
        self._put_grad(None)
        return Gradient(keys, rows.grads, rows)


def _numbers(grads: Tensor) -> NDArray[np.float32]:
    """Return float32 [n, dim], C order; a sparse gradient as a dense one."""
    if grads.is_sparse:
        grads = grads.to_dense()
    if grads.dtype != torch.float32:
        grads = grads.float()
    out: NDArray[np.float32] = grads.detach().contiguous().numpy()
    return out
