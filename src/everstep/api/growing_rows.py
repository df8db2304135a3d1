"""Lets rows of a table come behind those that a lookup of the same batch has used already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import GradientEdge

from everstep.api.rows import DATA, GRAD, OTHER_TYPE, TableParameter, of_gradients
from everstep.api.shown_rows import ShownRows

if TYPE_CHECKING:
    from everstep.api.batch_table import BatchTable, GradientSum


class GrowingRows(ShownRows):
    """Shows more rows of a batch, and adds up the gradients of those that came late by hand: an accumulator of autograd
    has the shape of the rows that there were when it was made."""

    def __init__(
        self, name: str, dim: int, padding: int | None, read: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    ) -> None:
        super().__init__(name, dim, padding, read)
        self.moved: NDArray[np.int64] = np.empty(0, np.int64)  # ``complete``: where rows stand that were there before
        self.grown = False  # rows of this batch came behind those that a lookup has used
        self.edges: list[GradientEdge] = []  # of this batch, if ``grown``: to the parameter when it had fewer rows
        self._sums: dict[int, GradientSum] = {}  # of these rows, by the index of the padding row
        self.parts: list[GradientSum] = []  # of this batch, if ``grown``: of all rows, and of fewer before
        self.summed: dict[int, NDArray[np.float32]] = {}  # if ``grown``: gradients of all rows, by backward pass
        self.asked = False  # by torch.autograd.grad, which takes them
        self._ending: set[int] = set()  # backward passes whose gradients are added by hand when they end

    def adopt(self, weight: nn.Parameter) -> None:
        """The script's own parameter becomes that of the table: whatever refers to it (a tied layer, a list of
        penalties, an optimizer) sees the table."""
        with torch._C.DisableTorchFunctionSubclass():
            weight.grad = None
            hooks: dict[int, Any] = weight._backward_hooks or {}
            for key, hook in list(hooks.items()):
                hooks[key] = of_gradients(hook)
            weight.__class__ = TableParameter
        assert isinstance(weight, TableParameter)
        weight.everstep_table, weight._table = self.name, cast("BatchTable", self)
        self.param = weight
        self._set(self.keys, self.values)

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
            DATA.__set__(grad, grown)  # the script may have it in hand
            self._put_grad(grad)

    def _grow(self) -> None:
        """Rows are about to come behind those that are there."""
        for found in self._sums.values():
            if found.node is None or found.node.grad_fn is None:
                continue
            self.grown = True
            weight, number = found.node.grad_fn.next_functions[0]
            if weight is not None:
                self.edges.append(GradientEdge(weight, number))

    def _placed(self, first: NDArray[np.float32], at: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return numbers of the rows that were there first, among those of all rows."""
        assert self.vocabulary is not None
        out = np.zeros((self.vocabulary, self.dim), np.float32)
        out[at[: len(first)]] = first
        return out

    def _set(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self.keys, self.values = keys, values
        self.layout += 1
        self._sorted = None
        self._sums.clear()
        with torch._C.DisableTorchFunctionSubclass():
            GRAD.__set__(self.param, None)
            # An accumulator of a graph that still lives would want the gradient in the old shape: another type ends it.
            DATA.__set__(self.param, OTHER_TYPE)
            DATA.__set__(self.param, torch.from_numpy(values))

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
