"""Puts back what the script changes in an iteration that does not commit.

That are the options of the optimizers (learning rates, groups, ...), the objects that the script gave to ``job.track``,
and the parameters: weights that the script edits behind ``opt.step()`` (clamps, a teacher's momentum), those that it
freezes or thaws.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from everstep.allreduce.dtensor import local

_EARLY_BYTES: Final = 1 << 16
_EARLY_STEPS: Final = 2


class SavedScript:
    """Holds options, tracked objects and parameters as they were. ``save`` at the step's begin, ``restore`` at any
    time.

    What is large (parameters, a moving average of the model) is saved by ``save_large``, at the end of backward of an
    iteration that will not commit: copying it in every step would cost too much. A script that changes parameters
    before that is found in its first steps, and its parameters are saved at the begin of each step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Any]) -> None:
        self.params: list[nn.Parameter] = []
        self._optimizers, self._tracked = optimizers, tracked
        self._options: list[list[dict[str, Any]]] = []
        self._states: dict[str, Any] = {}
        self._large: set[str] = set()
        self._known: set[str] = set()
        self._values: list[Tensor] | None = None  # of ``params``
        self._trainable: list[bool] = []
        self._kept: list[dict[Any, Any]] | None = None  # the optimizers' states
        self._looks = 0
        self._edits = False  # before backward

    def save(self, several: bool = False, watch: bool = True) -> None:
        """``several``: some iterations of this step do not commit for sure. ``watch``: any may not."""
        self._options = [[_options(g) for g in o.param_groups] for o in self._optimizers]
        self._trainable = [p.requires_grad for p in self.params]
        self._values = self._kept = None
        self._states.clear()
        for name, obj in self._tracked.items():
            if name not in self._known:
                self._known.add(name)
                if _bytes(obj.state_dict()) > _EARLY_BYTES:
                    self._large.add(name)
            if name not in self._large:
                self._states[name] = copy.deepcopy(obj.state_dict())
        if several or (watch and (self._edits or self._looks < _EARLY_STEPS)):
            self._save_values()

    def look(self) -> None:
        """At the end of an iteration's first backward: has the script changed parameters before it?"""
        if self._looks >= _EARLY_STEPS or self._values is None:
            return
        self._looks += 1
        pairs = zip(self.params, self._values, strict=True)
        self._edits = self._edits or any(not _same(p, value) for p, value in pairs)

    def _save_values(self) -> None:
        if self._values is None:
            self._values = [p.detach().clone() for p in self.params]

    def save_large(self, states: bool = False) -> None:
        """The step will not commit with this micro-batch; or it may not, and optimizers step meanwhile (``states``)."""
        self._save_values()
        if states and self._kept is None:
            self._kept = [{key: _copied(value) for key, value in o.state.items()} for o in self._optimizers]
        for name in self._large - self._states.keys():
            self._states[name] = copy.deepcopy(self._tracked[name].state_dict())

    def restore(self) -> None:
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            del optimizer.param_groups[len(groups) :]
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for key in [k for k in group if k != "params" and k not in options]:
                    del group[key]
                for key, value in options.items():
                    now = group.get(key)
                    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                        now.copy_(value)  # others may hold it
                    else:
                        group[key] = value
        for p, trainable in zip(self.params, self._trainable, strict=False):
            if p.requires_grad != trainable:
                p.requires_grad_(trainable)
        if self._kept is not None:
            for optimizer, state in zip(self._optimizers, self._kept, strict=True):
                _put_back(optimizer.state, state)
        for name, tracked in self._states.items():
            self._tracked[name].load_state_dict(copy.deepcopy(tracked))
        if self._values is not None:  # last: state of an optimizer may share a parameter's memory
            with torch.no_grad():
                for p, value in zip(self.params, self._values, strict=True):
                    p.copy_(value)

    def discard_undo(self) -> None:
        """The step is committed."""
        self._values = self._kept = None


def _same(p: Tensor, value: Tensor) -> bool:
    """Compare bit for bit, so that a NaN is equal to itself."""
    mine, other = (local(t) for t in (p.detach(), value))
    return torch.equal(mine, other) or bool(((mine == other) | (mine.isnan() & other.isnan())).all())


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return copy.deepcopy(value)


def _put_back(state: Any, saved: dict[Any, Any]) -> None:
    for key in [k for k in state if k not in saved]:
        del state[key]
    for key, value in saved.items():
        now = state.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape:
            now.detach().copy_(value)
        elif isinstance(value, dict) and isinstance(now, dict):
            _put_back(now, value)
        else:
            state[key] = value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_bytes(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes(v) for v in value)
    return 16
