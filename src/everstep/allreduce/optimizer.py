"""Is the optimizer that a script uses in mode allreduce: torch's own, stepping only where the group has committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from everstep.model.saved_optimizer import has_momenta


class GroupStepper(Protocol):
    """Is what an optimizer asks of the engine."""

    def may_step(self, optimizer: GroupOptimizer, caller: Any) -> float | None:
        """Return the factor of the learning rate if the step in hand is committed; None: do nothing."""
        ...

    def has_stepped(self, optimizer: GroupOptimizer) -> None: ...

    def zeroed(self, optimizer: GroupOptimizer) -> None: ...

    def check_group(self, param_group: dict[str, Any]) -> None:
        """ScriptError: these parameters cannot be trained from here on."""
        ...

    def check_state(self, optimizer: GroupOptimizer) -> None:
        """ScriptError: a saved state with momenta cannot be given to this optimizer."""
        ...


class GroupOptimizer(torch.optim.Optimizer):
    """Stands for ``inner``: the same parameter groups and state. ``step`` does nothing in iterations that do not
    commit (a micro-batch that is not the last one of a step; a step that will be done again)."""

    def __init__(self, inner: torch.optim.Optimizer, stepper: GroupStepper) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._stepper = stepper
        self._scaling = False  # the learning rate is multiplied by a step's factor
        self.nested = [v for v in vars(inner).values() if isinstance(v, torch.optim.Optimizer)]
        """Optimizers that ``inner`` steps itself (SAM, Lookahead): part of the state too."""
        for nested in self.nested:
            self._guard(nested)
        self._share()

    def __getattr__(self, name: str) -> Any:
        """Return what only ``inner`` has, e.g. ``first_step`` of SAM."""
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _guard(self, nested: torch.optim.Optimizer) -> None:
        """Steps of ``nested`` are steps of this one."""
        step = nested.step

        def guarded(closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure, step, nested.param_groups)

        nested.step = guarded  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<GroupOptimizer of {type(self.inner).__name__}, {len(self.param_groups)} groups>"

    def _share(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._step(closure, self.inner.step, self.param_groups)

    def _step(self, closure: Callable[[], Any] | None, step: Callable[[], Any], groups: list[dict[str, Any]]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = self._stepper.may_step(self, sys._getframe(2))
        if factor is None:
            return loss
        if self._scaling:  # ``inner`` steps what is nested in it
            factor = 1.0
        lrs = [group.get("lr") for group in groups]
        try:
            if factor != 1.0:
                self._scaling = True
                for group in groups:
                    if "lr" in group:
                        group["lr"] = group["lr"] * factor
            step()
        finally:
            if factor != 1.0:
                self._scaling = False
                for group, lr in zip(groups, lrs, strict=True):
                    if "lr" in group:
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
            self._stepper.zeroed(self)
            return
        for group in self.param_groups:  # what torch's does, without its profile
            for p in group["params"]:
                p.grad = None
        self._stepper.zeroed(self)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do as ``inner`` does. Its groups stay the objects that they are: what tables go by is looked up there."""
        if has_momenta(state_dict):
            self._stepper.check_state(self)
        known = list(self.inner.param_groups)
        self.inner.load_state_dict(state_dict)
        for group, loaded in zip(known, self.inner.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.inner.param_groups = known
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            self._stepper.check_group(param_group)
            self.inner.add_param_group(param_group)
            self._share()
        else:
            super().add_param_group(param_group)

    def scheduled(self) -> bool:
        """Return whether a learning rate scheduler was made for it (torch marks ``step`` then)."""
        return any(hasattr(o.step, "_wrapped_by_lr_sched") for o in (self, self.inner))
