"""Describes tables: what a row is, how it begins and how it is updated."""

from __future__ import annotations

import math
import zlib
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from everstep.bounds import Finite, Whole
from everstep.ids import TableId


class OptimizerKind(StrEnum):
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    ADAM = "adam"
    ADAMW = "adamw"  # as adam, decoupled weight decay
    FTRL = "ftrl"
    RMSPROP = "rmsprop"
    ADADELTA = "adadelta"
    ADAMAX = "adamax"
    NADAM = "nadam"
    RADAM = "radam"


TRAVELLING = (
    *("eps", "beta1", "beta2", "momentum", "dampening", "weight_decay", "alpha"),
    *("lr_decay", "momentum_decay"),
)
"""Options of an optimizer that a push may say otherwise, as schedulers change them: in this order (native/rows.h). The
learning rate travels with every push."""


class Rate(NamedTuple):
    """Says what one update goes by. ``lr`` < 0: the table's own. ``options``: as ``TRAVELLING``; (): the table's
    own."""

    lr: float = -1.0
    options: tuple[float, ...] = ()


class StateField(NamedTuple):
    """Is a piece of a row's optimizer state, by torch's name. ``each``: one float for each value, else one for the
    row."""

    name: str
    each: bool = True


class OptimizerSpec(msgspec.Struct, frozen=True):
    """Describes an optimizer that runs on the ps. Formulas as in torch.optim (FTRL: McMahan et al., KDD 2013).

    Each row has its own step count (lazy Adam): a row that no batch touches is not decayed. For a dense table,
    where every push touches every row, this is exactly torch's Adam.
    """

    kind: OptimizerKind
    lr: Finite
    eps: Finite = 1e-8
    beta1: Finite = 0.9
    beta2: Finite = 0.999
    momentum: Finite = 0.0  # sgd, rmsprop
    dampening: Finite = 0.0
    nesterov: bool = False
    weight_decay: Finite = 0.0
    initial_accumulator: Finite = 0.0  # adagrad, rowwise_adagrad
    l1: Finite = 0.0  # ftrl
    l2: Finite = 0.0  # ftrl
    beta: Finite = 1.0  # ftrl
    alpha: Finite = 0.99  # rmsprop; of adadelta: rho
    lr_decay: Finite = 0.0  # adagrad
    momentum_decay: Finite = 0.0  # nadam
    amsgrad: bool = False  # adam, adamw
    centered: bool = False  # rmsprop
    decoupled: bool = False  # nadam, radam: the weight decay

    def state_fields(self) -> tuple[StateField, ...]:
        """Return the optimizer state of one row, in its order."""
        step = StateField("step", each=False)
        match self.kind:
            case OptimizerKind.SGD:
                names = ("momentum_buffer",) if self.momentum > 0 else ()
                return tuple(StateField(name) for name in names)
            case OptimizerKind.ADAGRAD:
                return (StateField("sum"), *([step] if self.lr_decay > 0 else []))
            case OptimizerKind.ROWWISE_ADAGRAD:
                return (StateField("sum", each=False),)
            case OptimizerKind.ADAM | OptimizerKind.ADAMW:
                top = [StateField("max_exp_avg_sq")] if self.amsgrad else []
                return (StateField("exp_avg"), StateField("exp_avg_sq"), step, *top)
            case OptimizerKind.FTRL:
                return (StateField("z"), StateField("n"))
            case OptimizerKind.RMSPROP:
                centre = [StateField("grad_avg")] if self.centered else []
                buffer = [StateField("momentum_buffer")] if self.momentum > 0 else []
                return (StateField("square_avg"), step, *centre, *buffer)
            case OptimizerKind.ADADELTA:
                return (StateField("square_avg"), StateField("acc_delta"), step)
            case OptimizerKind.ADAMAX:
                return (StateField("exp_avg"), StateField("exp_inf"), step)
            case OptimizerKind.NADAM:
                return (StateField("exp_avg"), StateField("exp_avg_sq"), step, StateField("mu_product", each=False))
            case OptimizerKind.RADAM:
                return (StateField("exp_avg"), StateField("exp_avg_sq"), step)

    def state_floats(self, dim: int) -> int:
        """Return the size of one row's optimizer state, in float32s."""
        return sum(dim if field.each else 1 for field in self.state_fields())

    def options(self) -> tuple[float, ...]:
        """Return its own values of ``TRAVELLING``."""
        return tuple(getattr(self, name) for name in TRAVELLING)

    def with_options(self, options: tuple[float, ...]) -> OptimizerSpec:
        """Return the same with other values of ``TRAVELLING``; (): itself."""
        if not options:
            return self
        changed: dict[str, Any] = dict(zip(TRAVELLING, options, strict=True))
        return msgspec.structs.replace(self, **changed)

    def unfit(self, options: tuple[float, ...]) -> str:
        """Return the option that cannot become so for rows of this optimizer, because their state was not made for
        it."""
        now = self.with_options(options)
        if now.momentum > 0 and self.momentum == 0:
            return "momentum"
        if now.lr_decay > 0 and self.lr_decay == 0:
            return "lr_decay"
        if now.weight_decay > 0 and self.kind is OptimizerKind.FTRL:
            return "weight_decay"
        return "dampening" if now.dampening > 0 and self.dampening == 0 else ""

    @property
    def is_linear(self) -> bool:
        """One step with the sum of some gradients is one step with each of them, one after the other."""
        return self.kind is OptimizerKind.SGD and self.momentum == 0 and self.weight_decay == 0


class InitKind(StrEnum):
    CONSTANT = "constant"  # a
    UNIFORM = "uniform"  # in [a, b)
    NORMAL = "normal"  # mean a, standard deviation b (sum of eight 16-bit uniforms: bit-exact everywhere)


class InitSpec(msgspec.Struct, frozen=True):
    """Says how a row begins: a pure function of (seed, table, key, column), whoever creates it and whenever."""

    kind: InitKind = InitKind.CONSTANT
    a: Finite = 0.0
    b: Finite = 0.0


class TableSpec(msgspec.Struct, frozen=True):
    """A named set of rows ``key (int64) -> float32[dim]``.

    Life cycle: a partition counts the pushes it applied. ``admit_after``: so many pushes of a key only count it, their
    gradients are dropped; the next one makes its row. ``expire_batches``, ``expire_s``: a row that no push touched for
    so many pushes of its partition, or seconds, may be freed; should its key come back, it begins anew. 0: off.
    """

    name: str
    dim: Whole
    optimizer: OptimizerSpec
    init: InitSpec = InitSpec()
    rows: Whole | None = None  # None: no vocabulary, any int64 is a key
    dense: bool = False  # rows of a flattened tensor; every push touches all of them
    parameters: tuple[tuple[str, tuple[Whole, ...]], ...] = ()  # of a dense table: name and shape, in the flat order
    admit_after: Whole = 0
    expire_batches: Whole = 0
    expire_s: Whole = 0
    aligned: bool = False  # of a dense table: each parameter begins a row

    @property
    def id(self) -> TableId:
        return table_id(self.name)

    @property
    def candidates_id(self) -> TableId:
        """Return the id of the table that counts the pushes of keys that have no row yet."""
        return table_id(f"{self.name}\0candidates")

    @property
    def has_life_cycle(self) -> bool:
        """Return whether its records say when they were pushed last."""
        return self.admit_after > 0 or self.expire_batches > 0 or self.expire_s > 0


OWN = "everstep."
"""Begins the name of what is kept in a dense table and is no part of the script's model."""


def table_id(name: str) -> TableId:
    """Return a table's id from its name alone, so that processes agree without asking anyone."""
    return TableId(zlib.crc32(name.encode()))


def difference(a: TableSpec, b: TableSpec, in_a: str, in_b: str) -> str:
    """Return the first field in which two specs of a table differ, in words: ``dim is 8 in the checkpoint, 16
    here``."""
    for name in a.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, OptimizerSpec | InitSpec) and isinstance(y, type(x)):
            for inner in x.__struct_fields__:
                if getattr(x, inner) != getattr(y, inner):
                    return f"{name}.{inner} is {_word(getattr(x, inner))} {in_a}, {_word(getattr(y, inner))} {in_b}"
        elif x != y:
            return f"{name} is {_word(x)} {in_a}, {_word(y)} {in_b}"
    return "is the same"


def _word(value: object) -> str:
    return str(value) if isinstance(value, StrEnum | int | float) else repr(value)


def flat_places(spec: TableSpec) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, shape and first float of each parameter in the flat rows of a dense table."""
    out: list[tuple[str, tuple[int, ...], int]] = []
    at = 0
    for name, shape in spec.parameters:
        out.append((name, shape, at))
        at += math.prod(shape)
        if spec.aligned:
            at += -at % spec.dim
    return out
