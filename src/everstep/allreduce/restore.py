"""What the script changes in an iteration that does not commit, and how it is put back.

That are the options of the optimizers (learning rates, ...) and the objects that the script gave to ``job.track``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

_EARLY_BYTES: Final = 1 << 16


class SavedScript:
    """Options and tracked objects as they were. ``save`` at the step's begin, ``restore`` as often as needed.

    Objects with much in them (a moving average of the model) are saved when the step turns out not to commit, at the
    end of backward: before that nobody changes them, and copying them in every step would cost too much."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Any]) -> None:
        self._optimizers, self._tracked = optimizers, tracked
        self._options: list[list[dict[str, Any]]] = []
        self._states: dict[str, Any] = {}
        self._large: set[str] = set()
        self._known: set[str] = set()

    def save(self) -> None:
        self._options = [[_options(g) for g in o.param_groups] for o in self._optimizers]
        self._states.clear()
        for name, obj in self._tracked.items():
            if name not in self._known:
                self._known.add(name)
                if _bytes(obj.state_dict()) > _EARLY_BYTES:
                    self._large.add(name)
            if name not in self._large:
                self._states[name] = copy.deepcopy(obj.state_dict())

    def save_large(self) -> None:
        """The step will not commit with this micro-batch."""
        for name in self._large - self._states.keys():
            self._states[name] = copy.deepcopy(self._tracked[name].state_dict())

    def restore(self) -> None:
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for key in [k for k in group if k != "params" and k not in options]:
                    del group[key]
                for key, value in options.items():
                    now = group.get(key)
                    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                        now.copy_(value)  # others may hold it
                    else:
                        group[key] = value
        for name, state in self._states.items():
            self._tracked[name].load_state_dict(copy.deepcopy(state))


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
