"""Has the optimizers that run on the ps, ways for rows to begin, and the twins of torch's optimizers.

A plain torch optimizer given to ``job.optimizer`` never steps here: its options are copied into an
``OptimizerSpec`` and the ps applies the same formula to the pushed gradients.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import torch

from everstep.errors import ScriptError
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, Rate


def _positive(name: str, value: float) -> float:
    if not value >= 0:
        raise ScriptError(f"{name}={value} must not be negative")
    return float(value)


def _check_nesterov(momentum: float, dampening: float, nesterov: bool) -> None:
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ScriptError("SGD: nesterov needs momentum > 0 and dampening = 0")


def SGD(
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> OptimizerSpec:
    """Describe ``torch.optim.SGD``, row by row: a row that no batch touches keeps its momentum."""
    _check_nesterov(momentum, dampening, nesterov)
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
    """Describe ``torch.optim.Adagrad`` without learning rate decay."""
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
    """Describe Adagrad with one accumulator per row: the mean of the row's squared gradients (as FBGEMM)."""
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
    """Describe ``torch.optim.Adam`` with a step count per row (lazy Adam: untouched rows do not decay)."""
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
    """Describe ``torch.optim.AdamW`` (decoupled weight decay), lazy as ``Adam``."""
    return OptimizerSpec(
        kind=OptimizerKind.ADAMW,
        lr=_positive("lr", lr),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=_positive("weight_decay", weight_decay),
    )


def FTRL(lr: float = 0.05, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0) -> OptimizerSpec:
    """Describe FTRL-proximal (McMahan et al., KDD 2013): sparse weights through ``l1``."""
    return OptimizerSpec(kind=OptimizerKind.FTRL, lr=_positive("lr", lr), l1=l1, l2=l2, beta=beta)


def Uniform(low: float, high: float) -> InitSpec:
    """Draw every value of a new row uniformly from ``[low, high)``."""
    return InitSpec(InitKind.UNIFORM, float(low), float(high))


def Normal(mean: float = 0.0, std: float = 1.0) -> InitSpec:
    """Draw every value of a new row from a normal distribution (a sum of eight uniforms: bit-exact on every
    machine)."""
    return InitSpec(InitKind.NORMAL, float(mean), float(std))


def Constant(value: float = 0.0) -> InitSpec:
    """Set every value of a new row to the same."""
    return InitSpec(InitKind.CONSTANT, float(value), 0.0)


# Options of torch optimizers that change how the same formula is computed, not what it computes.
_HARMLESS = frozenset(
    {
        *("params", "lr", "foreach", "fused", "differentiable", "capturable", "param_names", "name"),
        *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),  # (of schedulers)
    }
)

# Of each torch optimizer with a twin: its kind, and the options that it knows.
_KINDS: dict[type[torch.optim.Optimizer], tuple[OptimizerKind, frozenset[str]]] = {
    kind: (of, frozenset(options.split()))
    for kind, of, options in (
        (torch.optim.SGD, OptimizerKind.SGD, "momentum dampening nesterov weight_decay"),
        (torch.optim.Adagrad, OptimizerKind.ADAGRAD, "lr_decay weight_decay eps initial_accumulator_value"),
        (torch.optim.Adam, OptimizerKind.ADAM, "betas eps weight_decay amsgrad decoupled_weight_decay"),
        (torch.optim.AdamW, OptimizerKind.ADAMW, "betas eps weight_decay amsgrad decoupled_weight_decay"),
        (torch.optim.RMSprop, OptimizerKind.RMSPROP, "alpha eps weight_decay momentum centered"),
        (torch.optim.Adadelta, OptimizerKind.ADADELTA, "rho eps weight_decay"),
        (torch.optim.Adamax, OptimizerKind.ADAMAX, "betas eps weight_decay"),
        (torch.optim.NAdam, OptimizerKind.NADAM, "betas eps weight_decay momentum_decay decoupled_weight_decay"),
        (torch.optim.RAdam, OptimizerKind.RADAM, "betas eps weight_decay decoupled_weight_decay"),
    )
}


# Options that are called otherwise in an ``OptimizerSpec``, those that are flags there, and those that may change while
# a job trains: they travel with each step.
_WORDS = {"rho": "alpha", "initial_accumulator_value": "initial_accumulator", "decoupled_weight_decay": "decoupled"}
_FLAGS = frozenset(("nesterov", "amsgrad", "centered", "decoupled"))
_TRAVELS = frozenset(
    ("eps", "momentum", "dampening", "weight_decay", "alpha", "lr_decay", "momentum_decay", "rho", "betas", "maximize")
)


def fixed_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that say its formula, all but the learning rate."""
    return {k: v for k, v in group.items() if k not in _HARMLESS and not k.startswith("_")}


def moves_all(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> bool:
    """Return whether a step of torch's changes rows whose gradient is zero, or their state, too."""
    if issubclass(kind, torch.optim.SGD | torch.optim.Adagrad):
        return bool(group.get("momentum") or group["weight_decay"] or group.get("lr_decay"))
    return not issubclass(kind, torch.optim.SparseAdam)


def table_twin_of_kind(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> OptimizerSpec:
    """Return the ps-side twin of a group of an optimizer of this class, for the tables in it: rows that are not pushed
    are not changed.

    Raises ScriptError as ``twin_of_kind`` does."""
    if kind is torch.optim.SparseAdam:
        betas = (float(group["betas"][0]), float(group["betas"][1]))
        return Adam(float(group["lr"]), betas, float(group["eps"]))
    return twin_of_kind(kind, group)


def twin_of_kind(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> OptimizerSpec:
    """Return the ps-side twin of one parameter group of an optimizer of this class.

    Raises ScriptError naming the optimizer or the option for which the ps has no formula. ``maximize`` is no part of
    the twin: gradients are negated before they are pushed."""
    if kind not in _KINDS:
        *names, last = sorted(known.__name__ for known in _KINDS)
        raise ScriptError(
            f"torch.optim.{kind.__name__} has no twin on the ps: use torch.optim.{', '.join(names)} or {last} for the "
            "dense part"
        )
    of, known = _KINDS[kind]
    fields: dict[str, Any] = {}
    for option, value in group.items():
        if option in _HARMLESS or option == "maximize":
            continue
        if option not in known:
            raise ScriptError(
                f"torch.optim.{kind.__name__}({option}={value!r}) has no twin on the ps: leave {option} at its default"
            )
        if option == "betas":
            fields["beta1"], fields["beta2"] = (float(beta) for beta in value)
        else:
            name = _WORDS.get(option, option)
            fields[name] = bool(value) if name in _FLAGS else _positive(option, value)
    if of is OptimizerKind.ADAM and fields.pop("decoupled", False):
        of = OptimizerKind.ADAMW
    if of is OptimizerKind.ADAMW:
        fields.pop("decoupled", None)
    if of is OptimizerKind.SGD:
        _check_nesterov(fields["momentum"], fields["dampening"], fields["nesterov"])
    return OptimizerSpec(kind=of, lr=_positive("lr", float(group["lr"])), **fields)


class TwinGroup:
    """Is a parameter group of a torch optimizer, for its twin on the ps: as it was given to the job, and as it is now.

    ``label``: names it in errors. ``table``: the twin is that of the tables in it."""

    def __init__(
        self, label: str, kind: type[torch.optim.Optimizer], group: dict[str, Any], table: bool = False
    ) -> None:
        self.group = group
        self._label, self._kind, self._make = label, kind, table_twin_of_kind if table else twin_of_kind
        self._given, self._lr = fixed_options(group), group["lr"]

    def __repr__(self) -> str:
        return f"<TwinGroup {self._label} of {self._kind.__name__}>"

    @cached_property
    def spec(self) -> OptimizerSpec:
        """Return the twin as it began. Raises ScriptError as ``twin_of_kind`` does."""
        return self._make(self._kind, {**self._given, "lr": self._lr})

    @property
    def maximize(self) -> bool:
        return bool(self.group.get("maximize"))

    def moves_all(self) -> bool:
        """Return whether a step of torch's now changes rows whose gradient is zero, or their state, too."""
        return moves_all(self._kind, self.group)

    def rate(self) -> Rate:
        """Return what a step now goes by. Raises ScriptError where the state of the twin's rows was made for other
        options."""
        lr = float(self.group["lr"])
        for name, value in self._given.items():
            if self.group.get(name) != value:
                break
        else:
            return Rate(lr)
        now = fixed_options(self.group)
        spec = self._make(self._kind, {**now, "lr": lr})
        options = spec.options()
        wrong = self.spec.unfit(options)
        if not wrong and spec != msgspec.structs.replace(self.spec.with_options(options), lr=spec.lr):
            wrong = next(name for name in now if name not in _TRAVELS and now[name] != self._given.get(name))
        if wrong:
            raise ScriptError(
                f"{self._label}[{wrong!r}] was {self._given.get(wrong)!r} when job.optimizer() was called and is "
                f"{now[wrong]!r} now: the state of its twin on the ps was made for the former; give job.optimizer() an "
                f"optimizer that begins with {wrong}={now[wrong]!r}"
            )
        return Rate(lr) if options == self.spec.options() else Rate(lr, options)
