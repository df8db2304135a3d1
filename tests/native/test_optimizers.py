"""Optimizers on the ps against torch.optim, and row-wise Adagrad and FTRL against their papers' formulas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.api.optim import TwinGroup, twin_of_kind
from everstep.errors import ScriptError
from everstep.model.shard import shard_key
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, Rate, TableSpec
from everstep.native import Store, unique_route

Make = Callable[[Any], torch.optim.Optimizer]

CASES: list[tuple[OptimizerSpec, Make]] = [
    (OptimizerSpec(OptimizerKind.SGD, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (
        OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    (
        OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
    (
        OptimizerSpec(OptimizerKind.ADAGRAD, 0.1, eps=1e-10, initial_accumulator=0.2, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-10, initial_accumulator_value=0.2, weight_decay=0.01),
    ),
    (
        OptimizerSpec(OptimizerKind.ADAM, 0.01, beta1=0.8, beta2=0.95, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), weight_decay=0.01),
    ),
    (
        OptimizerSpec(OptimizerKind.ADAMW, 0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
]


class Rows:
    """One table of 50 rows on a store, driven like a dense tensor."""

    def __init__(self, opt: OptimizerSpec, dim: int = 24) -> None:
        self.spec = TableSpec("t", dim, opt, InitSpec(InitKind.NORMAL, 0.0, 0.5))
        self.store = Store(16, 1)
        self.store.own(range(16))
        self.store.declare(self.spec)
        self.keys, _, _ = unique_route(np.arange(50), 16, self.spec.id, np.zeros(16, np.int32))
        self.shard = shard_key(0, 0, 0)
        self.store.open(self.shard, 0, 1)
        self.steps = 0

    def values(self) -> np.ndarray:
        out = np.empty((50, self.spec.dim), np.float32)
        self.store.pull(self.spec.id, self.keys, out)
        return out

    def step(self, grads: np.ndarray, lr: float = -1.0, options: tuple[float, ...] = ()) -> None:
        parts = [(self.spec.id, self.keys, grads, lr, options)]
        assert self.store.push(self.shard, self.steps, self.steps + 1, 1, b"", parts).applied == 16
        self.steps += 1


@pytest.mark.parametrize(("spec", "make"), CASES, ids=lambda c: str(getattr(c, "kind", "")))
def test_equals_torch(spec: OptimizerSpec, make: Make) -> None:
    rows = Rows(spec)
    param = torch.nn.Parameter(torch.from_numpy(rows.values()))
    theirs = make([param])
    rng = np.random.default_rng(0)
    for i in range(60):
        lr = spec.lr * (0.5 if i > 30 else 1.0)  # a scheduler's change travels with the push
        theirs.param_groups[0]["lr"] = lr
        grads = rng.normal(size=param.shape).astype(np.float32)
        param.grad = torch.from_numpy(grads)
        theirs.step()
        rows.step(grads, lr)
    np.testing.assert_allclose(rows.values(), param.detach().numpy(), rtol=2e-5, atol=2e-6)


KINDS = {
    torch.optim.SGD: ("momentum", "dampening", "nesterov", "weight_decay"),
    torch.optim.Adagrad: ("lr_decay", "initial_accumulator_value", "weight_decay", "eps"),
    torch.optim.Adam: ("betas", "eps", "weight_decay", "amsgrad"),
    torch.optim.AdamW: ("betas", "eps", "weight_decay", "amsgrad"),
    torch.optim.RMSprop: ("alpha", "eps", "weight_decay", "momentum", "centered"),
    torch.optim.Adadelta: ("rho", "eps", "weight_decay"),
    torch.optim.Adamax: ("betas", "eps", "weight_decay"),
    torch.optim.NAdam: ("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"),
    torch.optim.RAdam: ("betas", "eps", "weight_decay", "decoupled_weight_decay"),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "betas": st.tuples(st.floats(0.5, 0.99), st.floats(0.5, 0.9999)),
    "eps": st.sampled_from([1e-8, 1e-5, 1e-2]),
    "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
    "momentum": st.sampled_from([0.0, 0.5, 0.95]),
    "dampening": st.sampled_from([0.0, 0.3]),
    "alpha": st.floats(0.5, 0.999),
    "rho": st.floats(0.5, 0.999),
    "lr_decay": st.sampled_from([0.0, 0.1]),
    "initial_accumulator_value": st.sampled_from([0.0, 0.1]),
    "momentum_decay": st.sampled_from([0.0, 4e-3, 0.1]),
    **{name: st.booleans() for name in ("nesterov", "amsgrad", "centered", "decoupled_weight_decay")},
}
TRAVEL = ("betas", "eps", "weight_decay", "momentum", "alpha", "rho", "momentum_decay")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_twins_go_by_what_their_group_says(data: st.DataObject) -> None:
    """Random optimizers of torch, whose options change between steps as a scheduler's or a script's would."""
    kind = data.draw(st.sampled_from(list(KINDS)))
    options = {name: data.draw(VALUES[name], name) for name in KINDS[kind]}
    if options.get("nesterov"):
        options |= {"momentum": 0.9, "dampening": 0.0}
    param = torch.nn.Parameter(torch.zeros(50, 5))
    theirs = kind([param], lr=0.01, maximize=data.draw(st.booleans()), **options)
    (group,) = theirs.param_groups
    ours = TwinGroup("param_groups[0]", kind, group)
    rows = Rows(ours.spec, dim=5)
    param.data = torch.from_numpy(rows.values())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(8):
        if rng.integers(2):
            name = data.draw(st.sampled_from(["lr", "maximize", *(n for n in KINDS[kind] if n in TRAVEL)]))
            fits = name != "momentum" or options[name] > 0
            value = {"lr": st.floats(0.0, 0.05), "maximize": st.booleans()} | VALUES
            group[name] = data.draw(value[name]) if fits else group[name]
            if name == "momentum" and fits and (kind is torch.optim.RMSprop or group["nesterov"]):
                group[name] = max(group[name], 0.1)  # (torch itself cannot begin with none there)
        grads = rng.normal(size=param.shape).astype(np.float32)
        param.grad = torch.from_numpy(grads)
        theirs.step()
        rows.step(-grads if ours.maximize else grads, *ours.rate())
    np.testing.assert_allclose(rows.values(), param.detach().numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (torch.optim.SGD, "momentum", 0.9),
        (torch.optim.RMSprop, "momentum", 0.9),
        (torch.optim.RMSprop, "centered", True),
        (torch.optim.Adagrad, "lr_decay", 0.1),
        (torch.optim.Adam, "amsgrad", True),
        (torch.optim.NAdam, "decoupled_weight_decay", True),
    ],
)
def test_state_is_not_made_later(kind: type[torch.optim.Optimizer], option: str, value: Any) -> None:
    (group,) = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups
    twin = TwinGroup("param_groups[0]", kind, group)
    assert twin.rate() == Rate(0.1)
    group[option] = value
    with pytest.raises(ScriptError, match=rf"param_groups\[0\]\['{option}'\] was .* begins with {option}={value!r}"):
        twin.rate()


def test_a_spec_of_before_is_the_same_optimizer() -> None:
    """Checkpoints and journals of an earlier release: what they do not say is as it was, and so is the state."""
    old = b'{"kind":"adam","lr":0.01,"eps":1e-08,"beta1":0.9,"beta2":0.999,"momentum":0.0,"dampening":0.0,'
    old += b'"nesterov":false,"weight_decay":0.0,"initial_accumulator":0.0,"l1":0.0,"l2":0.0,"beta":1.0}'
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    assert msgspec.json.decode(old, type=OptimizerSpec) == twin_of_kind(torch.optim.Adam, optimizer.param_groups[0])
    floats = {kind: OptimizerSpec(kind, 0.1, momentum=0.5).state_floats(10) for kind in list(OptimizerKind)[:6]}
    assert list(floats.values()) == [10, 10, 1, 21, 21, 20]


def test_rowwise_adagrad_is_fbgemms() -> None:
    rows = Rows(OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.1, eps=1e-8))
    w = rows.values().astype(np.float64)
    acc = np.zeros((50, 1))
    rng = np.random.default_rng(0)
    for _ in range(40):
        g = rng.normal(size=w.shape).astype(np.float32)
        acc += (g.astype(np.float64) ** 2).mean(1, keepdims=True)
        w -= 0.1 / (np.sqrt(acc) + 1e-8) * g
        rows.step(g)
    np.testing.assert_allclose(rows.values(), w, rtol=1e-4, atol=1e-5)


def test_ftrl_is_mcmahans_and_makes_zeros() -> None:
    lr, l1, l2, beta = 0.1, 0.5, 0.01, 1.0
    rows = Rows(OptimizerSpec(OptimizerKind.FTRL, lr, l1=l1, l2=l2, beta=beta))
    w = rows.values().astype(np.float64)
    n = np.zeros_like(w)
    z = -w * (beta / lr + l2) - np.sign(w) * l1  # where the closed form gives the row's first values
    rng = np.random.default_rng(0)
    for _ in range(40):
        g = (rng.normal(size=w.shape) * 0.3).astype(np.float32)
        sigma = (np.sqrt(n + g.astype(np.float64) ** 2) - np.sqrt(n)) / lr
        z += g - sigma * w
        n += g.astype(np.float64) ** 2
        w = np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / lr + l2))
        rows.step(g)
    got = rows.values()
    np.testing.assert_allclose(got, w, rtol=1e-3, atol=1e-4)
    assert (got == 0).any()


def test_adam_counts_steps_per_row() -> None:
    rows = Rows(OptimizerSpec(OptimizerKind.ADAM, 0.1))
    before = rows.values()
    g = np.ones((50, 24), np.float32)
    rows.step(g)
    half = rows.keys[:25].copy()
    rows.store.push(rows.shard, 1, 2, 1, b"", [(rows.spec.id, half, g[:25], -1.0)])
    moved = before - rows.values()
    np.testing.assert_allclose(moved[:25], 0.2, rtol=1e-4)
    np.testing.assert_allclose(moved[25:], 0.1, rtol=1e-4)


_DIGEST = """
import hashlib, numpy as np
from everstep.model.table import *
from everstep.native import Store, isa, unique_route, bag_backward, bag_forward
h = hashlib.sha256()
rng = np.random.default_rng(0)
for dim in (5, 16, 64, 100):
    for kind in OptimizerKind:
        spec = TableSpec("t", dim, OptimizerSpec(kind, 0.1, momentum=0.9 if kind == "sgd" else 0.0),
                         InitSpec(InitKind.NORMAL, 0.0, 0.1))
        s = Store(4, 9); s.own(range(4)); s.declare(spec); s.open(0, 0, 1)
        keys, _, _ = unique_route(np.arange(33), 4, spec.id, np.zeros(4, np.int32))
        for i in range(10):
            s.push(0, i, i + 1, 1, b"", [(spec.id, keys, rng.normal(size=(33, dim)).astype(np.float32), -1.0)])
        for b in range(4):
            for a in s.scan(spec.id, b, 0, 100, True)[:3]:
                h.update(a.tobytes())
    rows = rng.normal(size=(20, dim)).astype(np.float32)
    inv = rng.integers(0, 20, 90).astype(np.int32)
    offs = np.arange(0, 91, 3)
    out = np.empty((30, dim), np.float32); bag_forward(rows, inv, offs, "mean", None, out); h.update(out.tobytes())
    back = np.empty((20, dim), np.float32); bag_backward(out, inv, offs, "mean", None, 20, back)
    h.update(back.tobytes())
print(isa(), h.hexdigest())
"""


@pytest.mark.processes
def test_every_instruction_set_gives_the_same_bits() -> None:
    found = {}
    for isa in ("base", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "EVERSTEP_ISA": isa},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        used, digest = done.stdout.split()
        found[used] = digest
    assert "base" in found
    assert len(set(found.values())) == 1, found
