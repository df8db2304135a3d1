"""Pushes of one step (consistency sync): one optimizer step of the sum of their gradients, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.model.shard import shard_key
from everstep.model.table import TRAVELLING, InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store
from everstep.native.ledger import bitmap
from everstep.testing import twin
from everstep.testing.twin import TwinRows, TwinStore

B, N = 4, 40
ALL = {
    "sgd": OptimizerSpec(OptimizerKind.SGD, 0.1),
    "sgd-decay": OptimizerSpec(OptimizerKind.SGD, 0.1, weight_decay=0.1),
    "momentum": OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.8, dampening=0.5, weight_decay=0.01),
    "nesterov": OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.9, nesterov=True),
    "adagrad": OptimizerSpec(OptimizerKind.ADAGRAD, 0.1, initial_accumulator=0.1, weight_decay=0.001),
    "rowwise": OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.1, weight_decay=0.001),
    "adam": OptimizerSpec(OptimizerKind.ADAM, 0.01, weight_decay=0.1),
    "adamw": OptimizerSpec(OptimizerKind.ADAMW, 0.01, weight_decay=0.1),
    "ftrl": OptimizerSpec(OptimizerKind.FTRL, 0.1, l1=0.05, l2=0.01),
    "amsgrad": OptimizerSpec(OptimizerKind.ADAM, 0.01, amsgrad=True),
    "rmsprop": OptimizerSpec(OptimizerKind.RMSPROP, 0.01, momentum=0.5, centered=True),
    "nadam": OptimizerSpec(OptimizerKind.NADAM, 0.01, momentum_decay=0.004),
}
TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd-decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.5, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1, weight_decay=0.001, eps=1e-8),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
}


class Rows:
    """A table of ``N`` rows on a store; pushes are of shards of their own, as those of several workers are."""

    def __init__(self, opt: OptimizerSpec, kind: Callable[[int, int], Any] = Store, dim: int = 5) -> None:
        self.spec = TableSpec("t", dim, opt, InitSpec(InitKind.NORMAL, 0.0, 0.5), dense=True)
        self.store = kind(B, 1)
        self.store.own(range(B))
        self.store.declare(self.spec)
        self.keys = np.arange(N)[np.argsort(twin.partition_of(np.arange(N), self.spec.id, B), kind="stable")]
        self.pushes = 0

    def push(
        self, step: int, grads: np.ndarray, partitions: bytes = b"", again: bool = False, options: Any = ()
    ) -> None:
        self.pushes += not again
        shard = shard_key(0, 0, self.pushes)
        self.store.open(shard, 0, 1)
        part = (self.spec.id, self.keys, grads, -1.0, options)
        self.store.push(shard, 0, 1, 1, partitions, [part], step=step)

    def values(self) -> np.ndarray:
        out = np.empty((N, self.spec.dim), np.float32)
        self.store.pull(self.spec.id, self.keys, out)
        return out

    def state(self) -> bytes:
        return b"".join(x.tobytes() for b in range(B) for x in self.store.scan(self.spec.id, b, 0, N, True)[1:3])


def gradients(n: int, dim: int = 5, seed: int = 0) -> list[np.ndarray]:
    """Their sums are exact in any order: multiples of 2^-10."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(-2048, 2048, (N, dim)) / 1024).astype(np.float32) for _ in range(n)]


@pytest.mark.parametrize("kind", [Store, TwinStore])
@pytest.mark.parametrize("opt", ALL)
def test_parts_in_any_order_are_one_step_of_their_sum(opt: str, kind: Any) -> None:
    """Two steps of three pushes; one of them comes twice, and in two halves of the partitions."""
    first, second = gradients(3), gradients(3, seed=1)
    whole = Rows(ALL[opt], kind)
    for parts in (first, second):
        whole.push(-1, sum(parts[1:], parts[0]))
    for order in list(permutations(range(3)))[:: 1 if kind is Store else 5]:
        cut = Rows(ALL[opt], kind)
        for step, parts in enumerate((first, second)):
            for i in order:
                cut.push(step, parts[i], bitmap([0, 3], B))
                cut.push(step, parts[i], again=True)
        if ALL[opt].is_linear:
            np.testing.assert_allclose(cut.values(), whole.values(), rtol=1e-5, atol=1e-6)
        else:
            assert cut.state() == whole.state()


@pytest.mark.parametrize("name", TORCH)
def test_a_step_in_parts_is_a_step_of_torch(name: str) -> None:
    rows = Rows(ALL[name], dim=24)
    param = torch.nn.Parameter(torch.from_numpy(rows.values()))
    theirs = TORCH[name]([param])
    rng = np.random.default_rng(0)
    for step in range(20):
        parts = [rng.normal(size=(N, 24)).astype(np.float32) for _ in range(1 + step % 4)]
        param.grad = torch.from_numpy(sum(parts[1:], parts[0]))
        theirs.step()
        for grads in parts:
            rows.push(step, grads)
    np.testing.assert_allclose(rows.values(), param.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_decay_that_comes_with_the_push_counts_once() -> None:
    """A table without decay sums pushes of a step by applying them; with one that a push brings, it must not."""
    parts, options = gradients(3), dict.fromkeys(TRAVELLING, 0.0) | {"weight_decay": 0.5}
    for kind in (Store, TwinStore):
        whole, cut = Rows(ALL["sgd"], kind), Rows(ALL["sgd"], kind)
        whole.push(-1, sum(parts[1:], parts[0]), options=tuple(options.values()))
        for grads in parts:
            cut.push(0, grads, options=tuple(options.values()))
        assert cut.state() == whole.state()


def test_another_push_between_two_parts_is_not_undone() -> None:
    """Of another step, late, or of none: what comes after it is a step by itself."""
    a, b, c = gradients(3)
    for step in (-1, 3, 5):
        mixed, plain = Rows(ALL["adagrad"]), Rows(ALL["adagrad"])
        for at, grads in ((4, a), (step, b), (4, c)):
            mixed.push(at, grads)
            plain.push(-1, grads)
        assert mixed.state() == plain.state()


def test_a_partition_that_changes_hands_begins_without_a_step() -> None:
    a, b = gradients(2)
    moved, plain = Rows(ALL["adagrad"]), Rows(ALL["adagrad"])
    moved.push(4, a)
    for partition in range(B):
        moved.store.hand_over(partition)
        moved.store.resume(partition)
    moved.push(4, b)
    for grads in (a, b):
        plain.push(-1, grads)
    assert moved.state() == plain.state()


def test_what_a_step_keeps_is_given_back() -> None:
    rows = Rows(ALL["adam"])
    rows.push(-1, gradients(1)[0])
    before = rows.store.used_bytes()
    for step in range(5):
        for grads in gradients(3):
            rows.push(step, grads)
        assert before < rows.store.used_bytes() <= before + B * 4096
    rows.push(-1, gradients(1)[0])
    assert rows.store.used_bytes() == before


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_mirror_follows_a_step_in_parts(name: str) -> None:
    """Of a dense table, whose updates mirrors make once more: the later parts come as differences."""
    rows, other = Rows(ALL[name]), Store(B, 1)
    other.declare(rows.spec)
    rows.store.protect(range(B), True)
    for b in range(B):
        other.mirror_make(b + 1, [b])
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            rows.store.emit(b, kind, rows.spec.id, 0, 1 << 20)
        rows.store.emit_marks(b)
    for step in range(3):
        for grads in gradients(3, seed=step):
            rows.push(step, grads)
    for partition, blob in blobs_of(rows.store):
        assert other.mirror_apply(partition + 1, blob) == 0
    for b in range(B):
        other.promote(b + 1, b)
        assert other.digest(b) == rows.store.digest(b)


def blobs_of(store: Store) -> list[tuple[int, bytes]]:
    """All that waits in the outbox, by partition."""
    out = []
    while store.wait_outbox(0):
        _, entries, data = store.take_outbox(1 << 20)
        out += [(partition, data[at : at + n].tobytes()) for partition, _, _, at, n in entries]
    return out


def drive(stores: list[Any], seed: int, n: int) -> None:
    """Random pushes of random steps and rows, rows that expire, partitions handed over: the same everywhere."""
    rng = np.random.default_rng(seed)
    opt = list(ALL.values())[rng.integers(len(ALL))]
    life: dict[str, Any] = [{}, {"expire_batches": 2}, {"admit_after": 1, "expire_batches": 3}][rng.integers(3)]
    spec = TableSpec("t", int(rng.choice([1, 5, 16, 700])), opt, InitSpec(InitKind.UNIFORM, -0.5, 0.5), **life)
    for store in stores:
        store.own(range(B))
        store.declare(spec)
        store.protect(range(2), True)
    for i in range(n):
        shard = shard_key(0, 0, i)
        keys = np.unique(rng.integers(0, N, rng.integers(0, N)))
        keys = keys[np.argsort(twin.partition_of(keys, spec.id, B), kind="stable")]
        grads = rng.normal(size=(len(keys), spec.dim)).astype(np.float32)
        step, bits = int(rng.choice([-1, 1, 2, 2, 2])), [b"", bitmap([1, 2], B)][rng.integers(2)]
        for store in stores:
            store.open(shard, 0, 1)
            store.push(shard, 0, 1, 1, bits, [(spec.id, keys, grads, -1.0)], step=step)
            if i % 3 == 0:
                store.expire(i % B, 0)
        digests = [[(s.used_bytes(), *(s.digest(b) for b in range(B)))] for s in stores]
        assert digests[0] == digests[1], f"push {i} of {spec}"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25))
def test_random_steps_agree_with_the_twin(seed: int, n: int) -> None:
    stores: list[Any] = [Store(B, seed), TwinStore(B, seed)]
    drive(stores, seed, n)
    assert [blob for _, blob in blobs_of(stores[0])] == stores[1].take()


class _NeverForgets(TwinRows):
    def begin_step(self, step: int, keys: list[int], linear: bool) -> None:
        super().begin_step(max(step, self.step), keys, linear)


class _KeepsFreed(TwinRows):
    def erase(self, slot: int) -> None:
        kept = dict(self.running)
        super().erase(slot)
        self.running = kept


class _AddsPlainly(TwinRows):
    def add_to_step(self, row: Any, grad: Any) -> Any:
        return grad


@pytest.mark.parametrize("planted", [_NeverForgets, _KeepsFreed, _AddsPlainly])
def test_planted_bugs_are_found(planted: type[TwinRows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "TwinRows", planted)
    for seed in range(60):
        try:
            drive([Store(B, seed), TwinStore(B, seed)], seed, 20)
        except AssertionError:
            return
    pytest.fail(f"{planted.__name__} was not noticed")
