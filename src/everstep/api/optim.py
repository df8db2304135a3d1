"""Optimizers that run on the ps, ways for rows to begin, and the twins of torch's optimizers.

A plain torch optimizer given to ``job.optimizer`` never steps here: its options are copied into an
``OptimizerSpec`` and the ps applies the same formula to the pushed gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from everstep.errors import ScriptError
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec


def _positive(name: str, value: float) -> float:
    if not value >= 0:
        raise ScriptError(f"{name}={value} must not be negative")
    return float(value)


def SGD(
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> OptimizerSpec:
    """``torch.optim.SGD``, row by row: a row that no batch touches keeps its momentum."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ScriptError("SGD: nesterov needs momentum > 0 and dampening = 0")
    return OptimizerSpec(
        kind=OptimizerKind.SGD,
        lr=_positive("lr", lr),
        momentum=_positive("momentum", momentum),
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=_positive("weight_decay", weight_decay),
    )


def Adagrad(
    lr: float = 0.01, eps: float = 1e-10, weight_decay: float = 0.0, initial_accumulator: float = 0.0
) -> OptimizerSpec:
    """``torch.optim.Adagrad`` without learning rate decay."""
    return OptimizerSpec(
        kind=OptimizerKind.ADAGRAD,
        lr=_positive("lr", lr),
        eps=eps,
        weight_decay=_positive("weight_decay", weight_decay),
        initial_accumulator=initial_accumulator,
    )


def RowWiseAdagrad(
    lr: float = 0.01, eps: float = 1e-10, weight_decay: float = 0.0, initial_accumulator: float = 0.0
) -> OptimizerSpec:
    """Adagrad with one accumulator per row: the mean of the row's squared gradients (as FBGEMM)."""
    return OptimizerSpec(
        kind=OptimizerKind.ROWWISE_ADAGRAD,
        lr=_positive("lr", lr),
        eps=eps,
        weight_decay=_positive("weight_decay", weight_decay),
        initial_accumulator=initial_accumulator,
    )


def Adam(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> OptimizerSpec:
    """``torch.optim.Adam`` with a step count per row (lazy Adam: untouched rows do not decay)."""
    return OptimizerSpec(
        kind=OptimizerKind.ADAM,
        lr=_positive("lr", lr),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=_positive("weight_decay", weight_decay),
    )


def AdamW(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> OptimizerSpec:
    """``torch.optim.AdamW`` (decoupled weight decay), lazy as ``Adam``."""
    return OptimizerSpec(
        kind=OptimizerKind.ADAMW,
        lr=_positive("lr", lr),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=_positive("weight_decay", weight_decay),
    )


def FTRL(lr: float = 0.05, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0) -> OptimizerSpec:
    """FTRL-proximal (McMahan et al., KDD 2013): sparse weights through ``l1``."""
    return OptimizerSpec(kind=OptimizerKind.FTRL, lr=_positive("lr", lr), l1=l1, l2=l2, beta=beta)


def Uniform(low: float, high: float) -> InitSpec:
    """Every value of a new row uniform in ``[low, high)``."""
    return InitSpec(InitKind.UNIFORM, float(low), float(high))


def Normal(mean: float = 0.0, std: float = 1.0) -> InitSpec:
    """Every value of a new row normal (a sum of eight uniforms: bit-exact on every machine)."""
    return InitSpec(InitKind.NORMAL, float(mean), float(std))


def Constant(value: float = 0.0) -> InitSpec:
    """Every value of a new row the same."""
    return InitSpec(InitKind.CONSTANT, float(value), 0.0)


# Options of torch optimizers that change how the same formula is computed, not what it computes.
_HARMLESS = frozenset(
    {
        *("params", "lr", "foreach", "fused", "differentiable", "capturable", "param_names", "name"),
        *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),  # (of schedulers)
    }
)


def fixed_options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that its twin has for good: all that change its formula but the learning rate."""
    return {k: v for k, v in group.items() if k not in _HARMLESS and not k.startswith("_")}


def moves_all(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step of torch's moves rows whose gradient is zero, too."""
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        return bool(group.get("momentum") or group["weight_decay"])
    return not isinstance(optimizer, torch.optim.SparseAdam)


def table_twin_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> OptimizerSpec:
    """The ps-side twin of a group for the tables in it: rows that are not pushed are not changed.

    Raises ScriptError as ``twin_of`` does."""
    if type(optimizer) is torch.optim.SparseAdam:
        if group.get("maximize"):
            raise ScriptError("torch.optim.SparseAdam(maximize=True) has no twin on the ps: negate the loss")
        betas = (float(group["betas"][0]), float(group["betas"][1]))
        return Adam(float(group["lr"]), betas, float(group["eps"]))
    return twin_of(optimizer, group)


def twin_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> OptimizerSpec:
    """The ps-side twin of one parameter group.

    Raises ScriptError naming the optimizer or the option for which the ps has no formula."""
    return twin_of_kind(type(optimizer), group)


def twin_of_kind(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> OptimizerSpec:
    """As ``twin_of``, of a group of an optimizer of this class."""
    name = kind.__name__
    lr = float(group["lr"])
    known: dict[str, Any]
    match kind:
        case torch.optim.SGD:
            known = {
                "momentum": group["momentum"],
                "dampening": group["dampening"],
                "nesterov": group["nesterov"],
                "weight_decay": group["weight_decay"],
            }
            spec = SGD(lr, **known)
            never = {"maximize": False}
        case torch.optim.Adagrad:
            known = {"eps": group["eps"], "weight_decay": group["weight_decay"], "initial_accumulator_value": 0}
            spec = Adagrad(lr, group["eps"], group["weight_decay"], float(group["initial_accumulator_value"]))
            never = {"maximize": False, "lr_decay": False}  # 0 == False
        case torch.optim.Adam | torch.optim.AdamW:
            known = {"betas": group["betas"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
            betas = (float(group["betas"][0]), float(group["betas"][1]))
            decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
            spec = (AdamW if decoupled else Adam)(lr, betas, group["eps"], group["weight_decay"])
            never = {"maximize": False, "amsgrad": False}
            known["decoupled_weight_decay"] = decoupled
        case _:
            raise ScriptError(
                f"torch.optim.{name} has no twin on the ps: use torch.optim.SGD, Adagrad, Adam or AdamW for the "
                "dense part"
            )
    for option, value in group.items():
        if option in _HARMLESS or option in known:
            continue
        if option in never and value == never[option]:
            continue
        raise ScriptError(
            f"torch.optim.{name}({option}={value!r}) has no twin on the ps: leave {option} at its default"
        )
    return spec
