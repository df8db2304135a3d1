"""Shows rows of a table as a parameter: what they are, where keys stand, and whether the script has changed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from everstep.api.rows import DATA, GRAD, TableParameter
from everstep.errors import ScriptError
from everstep.native import sum_bits
from everstep.tables.routing import TableRows


class ShownRows:
    """Holds the rows that a ``TableParameter`` shows. ``keys`` int64 [u] and ``values`` float32 [u, dim]."""

    param: TableParameter

    def __init__(
        self, name: str, dim: int, padding: int | None, read: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    ) -> None:
        """Take ``read``: values of rows as they are now, float32 [n, dim], by their keys."""
        self.name, self.dim, self.padding, self._read = name, dim, padding, read
        self.source: Any = None  # who looks rows up (``api/nn.Source``)
        self.vocabulary: int | None = None  # rows of the whole table, whose keys are 0, 1, ...; None: it has no whole
        self.complete = False  # the parameter shows all rows, in the order of their keys
        self.zero_padding = padding is not None  # the padding row is zero, whatever the script makes of its gradient
        self.renorms = False  # lookups change rows: those above a norm are scaled down (``max_norm``)
        self.renormed = False  # of this batch: such a lookup was
        self.keys: NDArray[np.int64] = np.empty(0, np.int64)
        self.values: NDArray[np.float32] = np.empty((0, dim), np.float32)
        self.layout = 0  # grows whenever the rows are others, or more
        self._rows: TableRows | None = None  # of the first ``u`` keys: as they were pulled
        self.stale: Callable[[], None] | None = None  # brings the values of a step of this iteration
        self._digest = 0
        self._used = False  # of this batch: the script has the parameter in hand, and may change its values
        self._sorted: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # of the keys, and their order

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

    def fits(self, numbers: int) -> bool:
        """Return whether there is a whole of at most so many numbers."""
        return self.vocabulary is not None and self.vocabulary * self.dim <= numbers

    def read_all(self) -> NDArray[np.float32]:
        """Return all rows as they are now, float32 [vocabulary, dim]: a copy."""
        assert self.vocabulary is not None
        if self.stale is not None:
            self.stale()
        return self._read(np.arange(self.vocabulary, dtype=np.int64))

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

    @property
    def in_hand(self) -> bool:
        """Whether a batch is, and has rows of this table here."""
        return self._rows is not None or len(self.keys) > 0

    @property
    def learns(self) -> bool:
        """Return whether autograd is to bring a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.param.requires_grad

    def _hooked(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.param._backward_hooks is not None or bool(self.param._post_accumulate_grad_hooks)

    def _grad(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = GRAD.__get__(self.param)
        return found

    def _put_grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            GRAD.__set__(self.param, value)

    def assign(self, values: Tensor) -> None:
        """Take in what the script assigns to ``weight.data``, float32 [rows, dim]: lookups see it at once. Raises
        ScriptError where it is of another shape or type."""
        if tuple(values.shape) != self.values.shape or values.dtype != torch.float32:
            raise ScriptError(
                f"weight.data of table {self.name!r} is assigned {values.dtype} {tuple(values.shape)}, and its rows "
                f"here are torch.float32 {self.values.shape}: assign as many, or change them in place"
            )
        with torch._C.DisableTorchFunctionSubclass():
            np.copyto(self.values, values.detach().cpu().numpy())

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
            data: Tensor = DATA.__get__(self.param)
            if data.data_ptr() != self.values.ctypes.data and tuple(data.shape) == self.values.shape:
                np.copyto(self.values, data.numpy())
                DATA.__set__(self.param, torch.from_numpy(self.values))
        return bool(len(self.keys)) and sum_bits(self.values, "float32")[0] != self._digest
