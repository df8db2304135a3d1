"""The optimizer that a script uses in mode allreduce: torch's own, stepping only where the group has committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Stepper(Protocol):
    """What an optimizer asks of the engine."""

    def may_step(self, optimizer: GroupOptimizer, caller: Any) -> float | None:
        """The factor of the learning rate if the step in hand is committed; None: do nothing."""
        ...

    def has_stepped(self, optimizer: GroupOptimizer) -> None: ...

    def check_group(self, param_group: dict[str, Any]) -> None:
        """ScriptError: these parameters cannot be trained from here on."""
        ...


class GroupOptimizer(torch.optim.Optimizer):
    """Stands for ``inner``: the same parameter groups and state. ``step`` does nothing in iterations that do not
    commit (a micro-batch that is not the last one of a step; a step that will be done again)."""

    def __init__(self, inner: torch.optim.Optimizer, stepper: Stepper) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._stepper = stepper
        self._share()

    def __repr__(self) -> str:
        return f"<GroupOptimizer of {type(self.inner).__name__}, {len(self.param_groups)} groups>"

    def _share(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = self._stepper.may_step(self, sys._getframe(1))
        if factor is None:
            return loss
        lrs = [group["lr"] for group in self.param_groups if "lr" in group]
        try:
            if factor != 1.0:
                for group in self.param_groups:
                    group["lr"] = group["lr"] * factor
            self.inner.step()
        finally:
            if factor != 1.0:
                for group, lr in zip(self.param_groups, lrs, strict=True):
                    group["lr"] = lr
        self._stepper.has_stepped(self)
        return loss

    # What torch puts around ``step`` (profile, hooks) is around the inner one already; twice is time in every step.
    step.hooked = True  # type: ignore[attr-defined]

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Runs where ``inner`` really steps, and gets that one."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self.inner.register_step_post_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none or type(self.inner).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.inner.zero_grad(set_to_none)
            return
        for group in self.param_groups:  # what torch's does, without its profile
            for p in group["params"]:
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            self._stepper.check_group(param_group)
            self.inner.add_param_group(param_group)
            self._share()
        else:
            super().add_param_group(param_group)

    def scheduled(self) -> bool:
        """Whether a learning rate scheduler was made for it (torch marks ``step`` then)."""
        return any(hasattr(o.step, "_wrapped_by_lr_sched") for o in (self, self.inner))
