"""Knows a batch's ids before the model runs, without touching the loop.

In its first batches the predictor records which view of which tensor of the batch each table was asked for, for
example ``batch["cat"][:, 3]`` as (path, offset, shape, stride). The same views of the next batch are then known as
soon as it is read, and their rows are pulled one batch ahead. A prediction is only a guess: the lookup that the
model makes is matched by address, shape, stride and version of the tensor, and pulls on demand where it differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

ViewKey = tuple[int, torch.Size, tuple[int, ...], torch.dtype, int]
_FORGET_AFTER = 8  # batches in which a predicted view was not asked for


def view_key(ids: Tensor) -> ViewKey:
    """Return what identifies a view of a living tensor, including in-place changes of what it shows (the version)."""
    return ids.data_ptr(), ids.shape, ids.stride(), ids.dtype, ids._version


class View(NamedTuple):
    """A view relative to a tensor of the batch: ``path`` in the batch, the base's shape and stride, the view's own."""

    path: tuple[str | int, ...]
    base_shape: tuple[int, ...]
    base_stride: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, base: Tensor) -> Tensor | None:
        """Return the same view of another batch's tensor, None where it can not be said."""
        if base.dtype != self.dtype or tuple(base.stride()) != self.base_stride:
            return None
        shape: tuple[int, ...] | None = self.shape
        if tuple(base.shape) != self.base_shape:
            if base.dim() == 0 or tuple(base.shape[1:]) != self.base_shape[1:]:
                return None
            shape = self.scaled(base.shape[0])
        if shape is None:
            return None
        return base.as_strided(shape, self.stride, base.storage_offset() + self.offset)

    def scaled(self, n: int) -> tuple[int, ...] | None:
        """The view's shape when the base has ``n`` rows instead of as many as it was recorded with."""
        if not self.base_shape:
            return None
        old, row = self.base_shape[0], self.base_stride[0]
        if old == n:
            return self.shape
        if self.shape and self.shape[0] == old and self.stride[0] == row and self.offset < max(row, 1):
            return (n, *self.shape[1:])
        if len(self.shape) == 1 and self.offset == 0 and self.stride[0] == 1 and old and self.shape[0] == old * row:
            return (n * row,)  # the whole tensor, flattened
        return None


def integer_tensors(batch: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Tensor]]:
    """Yield all int64 and int32 tensors inside dicts, lists and tuples of a batch, with their paths."""
    if isinstance(batch, Tensor):
        if batch.dtype in (torch.int64, torch.int32) and batch.numel():
            yield path, batch
    elif isinstance(batch, dict):
        for name, value in batch.items():
            yield from integer_tensors(value, (*path, name))
    elif isinstance(batch, list | tuple):
        for i, value in enumerate(batch):
            yield from integer_tensors(value, (*path, i))


class Predictor:
    """Views asked for by table, learned from the batches seen so far. Not thread-safe: the caller has a lock."""

    def __init__(self) -> None:
        self._views: dict[str, dict[View, int]] = {}  # table -> view -> batches in a row without a use
        self.generation = 0  # grows whenever predictions change

    def __repr__(self) -> str:
        return f"<Predictor {sum(map(len, self._views.values()))} views of {len(self._views)} tables>"

    def learn(self, table: str, ids: Tensor, batch: Any) -> bool:
        """Record that ``table`` was asked for ``ids``; False where they are no view of a tensor of the batch."""
        at = ids.untyped_storage().data_ptr()
        best: View | None = None
        for path, base in integer_tensors(batch):
            offset = int(ids.storage_offset()) - int(base.storage_offset())
            if base.untyped_storage().data_ptr() != at or base.dtype != ids.dtype or offset < 0:
                continue
            if best is None or offset < best.offset:
                base_form = (tuple(base.shape), tuple(base.stride()))
                best = View(path, *base_form, offset, tuple(ids.shape), tuple(ids.stride()), ids.dtype)
        if best is None:
            return False
        views = self._views.setdefault(table, {})
        if not any(_same(best, known) for known in views):
            views[best] = 0
            self.generation += 1
        return True

    def predict(self, batch: Any) -> list[tuple[str, list[Tensor]]]:
        """Return every table's views of this batch, in the order in which they were learned."""
        bases = dict(integer_tensors(batch))
        out = []
        for table, views in self._views.items():
            found = []
            for view in views:
                base = bases.get(view.path)
                ids = None if base is None else view.of(base)
                if ids is not None:
                    found.append(ids)
            if found:
                out.append((table, found))
        return out

    def siblings(self, table: str, ids: Tensor) -> list[tuple[str, list[Tensor]]]:
        """Return the views that the other tables will be asked for, guessed from one lookup in a batch never seen
        (evaluation): the same views of the tensor that ``ids`` is a view of. Contains ``ids`` itself, or is empty."""
        for known in self._views.get(table, ()):
            if known.stride != tuple(ids.stride()) or known.dtype != ids.dtype or not known.base_shape:
                continue
            n = ids.shape[0] if ids.dim() and known.shape[0] == known.base_shape[0] else known.base_shape[0]
            start = ids.storage_offset() - known.offset
            if start < 0 or known.scaled(n) != tuple(ids.shape):
                continue
            out = [(table, [ids])]
            end = ids.untyped_storage().nbytes() // ids.element_size()
            for other, views in self._views.items():
                if other == table:
                    continue
                found = []
                for view in views:
                    shape = view.scaled(n)
                    if view.path != known.path or shape is None or not all(shape):
                        continue
                    last = start + view.offset + sum((s - 1) * t for s, t in zip(shape, view.stride, strict=True))
                    if last < end:
                        found.append(ids.as_strided(shape, view.stride, start + view.offset))
                if found:
                    out.append((other, found))
            return out
        return []

    def used(self, asked: dict[str, set[ViewKey]], predicted: list[tuple[str, list[Tensor]]]) -> None:
        """Forget views that were predicted and not asked for in several batches running."""
        for table, found in predicted:
            views = self._views.get(table)
            if views is None or len(found) != len(views):
                continue
            keys = asked.get(table, set())
            for view, ids in zip(list(views), found, strict=True):
                if view_key(ids) in keys:
                    views[view] = 0
                elif views[view] + 1 >= _FORGET_AFTER:
                    del views[view]
                    self.generation += 1
                else:
                    views[view] += 1


def _same(a: View, b: View) -> bool:
    """Return whether two views show the same columns, of batches that may differ in length."""
    if a == b:
        return True
    if a.path != b.path or a.offset != b.offset or a.stride != b.stride or a.dtype != b.dtype:
        return False
    return bool(a.base_shape) and bool(b.base_shape) and a.scaled(b.base_shape[0]) == b.shape
