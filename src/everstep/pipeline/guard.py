"""Refuses what a script would compute from the gradients of one stage and mean of the whole model: a norm, a sum.

Behind ``model.step`` the script's ``p.grad`` is a ``StageGradient``: the gradient itself, which takes part in what is
done element by element, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from everstep.errors import ScriptError

_BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "addcmul",
    "addcdiv",
    "lerp",
    "clamp",
    "clamp_min",
    "clamp_max",
    "clip",
)
_UNARY = (
    "sign",
    "neg",
    "abs",
    "nan_to_num",
    "tanh",
    "pow",
    "square",
    "sqrt",
    "zero",
    "fill",
    "copy",
    "float",
    "double",
)
_LISTS = (
    "_foreach_mul",
    "_foreach_add",
    "_foreach_sub",
    "_foreach_div",
    "_foreach_zero",
    "_foreach_copy",
    "_foreach_neg",
)
_KEEPS = ("detach", "clone", "to", "contiguous", "requires_grad", "type", "bfloat16", "half")
_FACTS = (
    "dim",
    "size",
    "numel",
    "nelement",
    "is_contiguous",
    "stride",
    "element_size",
    "__len__",
    "__repr__",
    "ndimension",
    "data_ptr",
    "is_floating_point",
    "is_complex",
    "storage_offset",
    "__hash__",
    "_is_view",
    "is_pinned",
    "get_device",
)
_LIKE = ("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like")
_OPERATORS = (
    "__add__",
    "__radd__",
    "__iadd__",
    "__sub__",
    "__rsub__",
    "__isub__",
    "__mul__",
    "__rmul__",
    "__imul__",
    "__truediv__",
    "__rtruediv__",
    "__rdiv__",
    "__itruediv__",
    "__pow__",
    "__ipow__",
    "__neg__",
    "rsub",
)
ALLOWED: Final = frozenset(
    (*_BINARY, *_UNARY, *_LISTS, *_KEEPS, *_FACTS, *_LIKE, *_OPERATORS, "__get__", "__set__", "__deepcopy__")
) | frozenset(f"{name}_" for name in (*_BINARY, *_UNARY, *_LISTS, *_KEEPS))
"""Names of functions that compute each element from elements at its own place, or none."""


class StageGradient(Tensor):
    """Is a gradient of one stage, as the script sees it. See the top of this file."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ALLOWED:
            raise ScriptError(
                f"{name} of a gradient in a job of several stages: each process has the gradients of its stage, and "
                "what is computed of them is not of the model; for the norm and for clipping: "
                "job.clip_grad_norm_(max_norm), which returns the norm"
            )
        return super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]


def plain(gradient: Tensor) -> Tensor:
    """Return the gradient itself; shares its memory."""
    if not isinstance(gradient, StageGradient):
        return gradient
    return gradient.as_subclass(Tensor)


def unguard(params: Iterable[nn.Parameter]) -> None:
    """Let optimizers at the gradients of ``params``."""
    for p in params:
        if isinstance(p.grad, StageGradient):
            p.grad = plain(p.grad)


def guard(params: Iterable[nn.Parameter]) -> None:
    """Keep scripts from computing with the gradients of ``params``."""
    for p in params:
        if p.grad is not None and not isinstance(p.grad, StageGradient):
            p.grad = guarded(p.grad)


def guarded(gradient: Tensor) -> Tensor:
    found: Tensor = gradient.as_subclass(StageGradient)
    return found


__all__ = ["ALLOWED", "StageGradient", "guard", "guarded", "plain", "unguard"]
