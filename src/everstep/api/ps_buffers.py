"""Keeps buffers of the models in mode ps (batch norm's running statistics, counters) in rows of a dense table on the
ps.

A worker pushes what its batches changed, along with its steps, and the ps adds it up. So buffers outlive every worker,
are in checkpoints, and a new worker begins with them. Before each batch a worker takes the newest values, plus what it
has changed itself and not pushed yet. Alone they are simply stored as they are after each batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from everstep.allreduce.group_buffers import FLOATS_MAX, INTS_MAX, each_buffer
from everstep.api.dense import FlatGroup
from everstep.errors import ScriptError
from everstep.model.table import OWN, OptimizerKind, OptimizerSpec
from everstep.tables.routing import TableRows

_EXACT = 1 << 24  # whole numbers that float32 holds

_ADDS = OptimizerSpec(OptimizerKind.SGD, lr=1.0)


class BufferGroup(FlatGroup):
    """See the top of this file. ``places``: of each buffer."""

    def __init__(self, name: str, places: Sequence[tuple[str, nn.Module, str]]) -> None:
        self.places = list(places)
        super().__init__(name, [self._of(i) for i in range(len(self.places))], [p[0] for p in self.places], _ADDS)
        self._read()
        self._base = self.flat.clone()  # as the ps has them, as far as this worker knows

    def __repr__(self) -> str:
        return f"<BufferGroup {self.spec.name} {len(self.places)} buffers in {self.n_rows} rows>"

    def _of(self, i: int) -> Tensor:
        name, module, key = self.places[i]
        found = module._buffers.get(key)
        if found is None:
            raise ScriptError(f"buffer {name!r} was removed in the loop: keep it, or make it no buffer of the model")
        return found

    def _read(self) -> None:
        """Copy the buffers into the flat one."""
        for i, (name, _, _) in enumerate(self.places):
            view, now = self.view(i), self._of(i).detach()
            if now.shape != view.shape:
                raise ScriptError(
                    f"buffer {name!r} became {tuple(now.shape)}, and was {tuple(view.shape)}, in the loop"
                )
            view.copy_(now)

    def _write(self) -> None:
        with torch.no_grad():
            for i in range(len(self.places)):
                now, view = self._of(i), self.view(i)
                now.copy_(view if now.is_floating_point() else view.round())

    def take(self, rows: TableRows) -> None:
        """Take the newest values, and what was changed here and not pushed."""
        self._read()
        ours = self.flat - self._base
        super().take(rows)
        self._base.copy_(self.flat)
        self.flat += ours
        self._write()

    def changed(self) -> bool:
        self._read()
        return not torch.equal(self.flat, self._base)

    def store(self) -> NDArray[np.float32]:
        """The values, for an alone job to store: from now on they are what the ps has."""
        self._base.copy_(self.flat)
        return self.initial()

    def gradient(self) -> NDArray[np.float32] | None:
        """Return float32 [rows, dim], whose step of SGD with rate 1 adds what was changed here; None: nothing was. From
        now on that counts as pushed."""
        if not self.changed():
            return None
        change = (self._base - self.flat).numpy().reshape(self.n_rows, self.dim)
        self._base.copy_(self.flat)
        return change


class ConstantBuffer:
    """A buffer that is not kept, and so must not change."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self.module, self.key = name, module, key
        buffer = module._buffers[key]
        self._was = (id(buffer), buffer._version if buffer is not None else 0)
        self._held = buffer

    def check(self) -> None:
        """Raises ScriptError where it has changed."""
        buffer = self.module._buffers.get(self.key)
        if (id(buffer), buffer._version if buffer is not None else 0) != self._was:
            raise ScriptError(
                f"buffer {self.name!r} changes in training, and is too large, or of a type or value, to be kept on the "
                f"ps (finite numbers; at most {FLOATS_MAX:,} floats or {INTS_MAX} whole numbers below {_EXACT:,}): "
                "make it a parameter, or several buffers"
            )


class ModelBuffers:
    """The buffers of a script's models: each has a place on the ps from the first loop on that finds it. ``models``: of
    the script, in the order in which it gave them to the job."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.groups: list[BufferGroup] = []
        self._constant: list[ConstantBuffer] = []
        self._seen: list[int] = []  # the models whose buffers are known

    def __repr__(self) -> str:
        return f"<ModelBuffers {len(self.groups)} groups of {len(self.models)} models>"

    def place(self, count: nn.Module | None) -> BufferGroup | None:
        """Return the group of the buffers that are new; None: none is. ``count``: one more module whose buffers are
        kept."""
        counts = count is not None
        seen = [id(m) for m in self.models] + [0] * counts
        if seen == self._seen:
            return None
        self._seen = seen
        kept, self._constant = find_buffers(self.models)
        if count is not None:
            kept += [(f"{OWN}{key}", count, key) for key in count._buffers]
        known = {(id(module), key) for group in self.groups for _, module, key in group.places}
        new = [place for place in kept if (id(place[1]), place[2]) not in known]
        if not new:
            return None
        group = BufferGroup(f"buffers/{len(self.groups)}", new)
        self.groups.append(group)
        return group

    def check(self) -> None:
        """Raises ScriptError where a buffer has changed that must not."""
        for constant in self._constant:
            constant.check()


def find_buffers(models: Sequence[nn.Module]) -> tuple[list[tuple[str, nn.Module, str]], list[ConstantBuffer]]:
    """Return the buffers that are kept, with their names in ``state_dict``, and those that must not change."""
    kept: list[tuple[str, nn.Module, str]] = []
    constant: list[ConstantBuffer] = []
    for i, full, module, key, buffer in each_buffer(models):
        name = f"{i}.{full}" if len(models) > 1 else full
        if _fits(buffer):
            kept.append((name, module, key))
        else:
            constant.append(ConstantBuffer(name, module, key))
    return kept, constant


def _fits(buffer: Tensor) -> bool:
    if buffer.device.type != "cpu" or buffer.is_complex() or not buffer.numel():
        return False
    if buffer.is_floating_point():
        return buffer.numel() <= FLOATS_MAX and buffer.dtype == torch.float32 and bool(torch.isfinite(buffer).all())
    return buffer.numel() <= INTS_MAX and bool((buffer.to(torch.int64).abs() < _EXACT).all())
