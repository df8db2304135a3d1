"""The C++ store and kernels give the same answers and the same bits as the NumPy twin."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import native
from everstep.model.shard import shard_key
from everstep.model.table import TRAVELLING, InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store
from everstep.native.ledger import bitmap
from everstep.testing import twin
from everstep.testing.twin import TwinStore

B = 8
OWNED = (0, 1, 2, 4, 5, 7)

OPTIMIZERS = [
    OptimizerSpec(OptimizerKind.SGD, 0.1),
    OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.9, weight_decay=0.01),
    OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.9, nesterov=True),
    OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.8, dampening=0.5),
    OptimizerSpec(OptimizerKind.ADAGRAD, 0.1, eps=1e-10, initial_accumulator=0.1, weight_decay=0.001),
    OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.1, weight_decay=0.001),
    OptimizerSpec(OptimizerKind.ADAM, 0.01, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.ADAMW, 0.01, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.FTRL, 0.1, l1=0.05, l2=0.01),
]
NEWER = [
    OptimizerSpec(OptimizerKind.ADAGRAD, 0.1, lr_decay=0.1, initial_accumulator=0.1),
    OptimizerSpec(OptimizerKind.ADAM, 0.01, amsgrad=True),
    OptimizerSpec(OptimizerKind.ADAMW, 0.01, amsgrad=True, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.RMSPROP, 0.01),
    OptimizerSpec(OptimizerKind.RMSPROP, 0.01, momentum=0.9, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.RMSPROP, 0.01, momentum=0.5, centered=True, alpha=0.9),
    OptimizerSpec(OptimizerKind.ADADELTA, 1.0, eps=1e-6, alpha=0.9),
    OptimizerSpec(OptimizerKind.ADAMAX, 0.01, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.NADAM, 0.01, momentum_decay=0.004),
    OptimizerSpec(OptimizerKind.NADAM, 0.01, momentum_decay=0.004, decoupled=True, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.RADAM, 0.01, beta2=0.9, weight_decay=0.1),
    OptimizerSpec(OptimizerKind.RADAM, 0.01, decoupled=True, weight_decay=0.1),
]
INITS = [
    InitSpec(InitKind.CONSTANT, 0.25),
    InitSpec(InitKind.UNIFORM, -0.5, 0.25),
    InitSpec(InitKind.NORMAL, 0.1, 2.0),
]
# admit_after, expire_batches, expire_s
LIVES = [(0, 0, 0), (0, 0, 0), (1, 0, 0), (2, 3, 0), (0, 2, 0), (0, 0, 5), (3, 4, 4)]


def other_options(spec: OptimizerSpec, rng: np.random.Generator) -> tuple[float, ...]:
    """As a scheduler may change them."""
    now = spec.with_options(tuple(float(x * rng.choice([0.5, 0.9, 1.0])) for x in spec.options()))
    decay = 0.0 if spec.kind is OptimizerKind.FTRL else float(rng.choice([0.0, 0.05]))
    return msgspec.structs.replace(now, weight_decay=decay).options()


def same(a: Any, b: Any) -> None:
    assert (a is None) == (b is None), (a, b)
    if isinstance(a, tuple) and not isinstance(a, native.PushResult):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape, (a, b)
        assert a.tobytes() == b.tobytes(), (a, b)
    else:
        assert a == b


def both(stores: list[Any], call: Any, refusals: bool = True) -> Any:
    """Same answer, or both refuse: in the same way, if ``refusals`` (several things may be wrong with one push)."""
    answers = []
    for store in stores:
        try:
            answers.append(call(store))
        except (ValueError, KeyError) as error:
            answers.append(type(error).__name__ if refusals else "refused")
    same(answers[0], answers[1])
    return answers[0]


def blobs(store: Store) -> list[bytes]:
    """All that waits in the outbox."""
    out = []
    while store.wait_outbox(0):
        _, entries, data = store.take_outbox(1 << 20)
        out += [data[at : at + n].tobytes() for *_, at, n in entries]
    return out


def all_rows(stores: list[Any], tables: list[TableSpec]) -> None:
    for spec in tables:
        for b in OWNED:
            both(stores, lambda s, spec=spec, b=b: s.scan(spec.id, b, 0, 10_000, True))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_operations_agree(data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**64 - 1), "seed")
    stores: list[Any] = [Store(B, seed), TwinStore(B, seed)]
    for store in stores:
        store.own(OWNED)
    tables = []
    for i in range(draw(st.integers(1, 3), "tables")):
        opt, init = draw(st.sampled_from(OPTIMIZERS + NEWER)), draw(st.sampled_from(INITS))
        admit, batches, seconds = draw(st.sampled_from(LIVES))
        dim = draw(st.sampled_from([1, 3, 16, 19, 32, 64, 900]))
        life = {"admit_after": admit, "expire_batches": batches, "expire_s": seconds}
        tables.append(TableSpec(f"t{i}", dim, opt, init, **life))
        assert both(stores, lambda s: s.declare(tables[-1])) is True
    shards = [shard_key(0, 0, 0), shard_key(0, 0, 1), shard_key(1, 3, 0)]
    shard_of, position, lease = st.sampled_from(shards), st.integers(0, 12), st.integers(1, 4)
    step = st.sampled_from([-1, -1, 3, 3, 4])
    rng = np.random.default_rng(draw(st.integers(0, 2**32), "values"))
    protected = draw(st.sampled_from([(), OWNED[:3], OWNED]), "protected")
    for store in stores:
        store.protect(protected, True)
    ceiling = draw(st.sampled_from([0, 0, 40_000, 200_000, 800_000]), "ceiling")
    both(stores, lambda s, how=draw(st.sampled_from(["error", "evict"])): s.set_limit(ceiling, how))
    now_s = 100

    def keys_of(spec: TableSpec, among: tuple[int, ...], tidy: bool) -> np.ndarray:
        keys = np.unique(rng.integers(-30, 30, rng.integers(0, 40)))
        partitions = twin.partition_of(keys, spec.id, B)
        if tidy:
            keep = np.isin(partitions, among)
            keys, partitions = keys[keep], partitions[keep]
            return keys[np.argsort(partitions, kind="stable")]
        return keys

    for _ in range(draw(st.integers(1, 25), "operations")):
        spec = tables[rng.integers(len(tables))]
        match draw(
            st.sampled_from(["open", "push", "push", "push", "pull", "put", "release", "marks", "expire", "mark"])
        ):
            case "open":
                shard, start, no = draw(shard_of), draw(st.sampled_from([0, 0, 4])), draw(lease)
                both(stores, lambda s, a=(shard, start, no): s.open(*a))
            case "push":
                lo = draw(position)
                hi = lo + draw(st.integers(0, 4))
                some = draw(st.sampled_from([(), (), (1, 4), (0, 3), OWNED]))
                bits = bitmap(some, B) if some else b""
                tidy = draw(st.sampled_from([True] * 9 + [False]))
                parts = []
                for t in tables[: draw(st.integers(0, len(tables)))]:
                    keys = keys_of(t, some or OWNED, tidy)
                    grads = rng.normal(size=(len(keys), t.dim)).astype(np.float32)
                    if len(keys) and draw(st.integers(0, 19)) == 0:
                        grads[rng.integers(len(keys)), rng.integers(t.dim)] = rng.choice([np.nan, np.inf, -np.inf])
                    options = draw(st.sampled_from([(), (), other_options(t.optimizer, rng)]))
                    parts.append((t.id, keys, grads, draw(st.sampled_from([-1.0, 0.05])), options))
                skipped = not parts and draw(st.booleans())
                args = (draw(shard_of), lo, hi, draw(lease), bits, parts, skipped, now_s, draw(step))
                both(stores, lambda s, a=args: s.push(*a), refusals=tidy)
            case "pull":
                keys = keys_of(spec, OWNED, draw(st.booleans()))
                outs = [np.zeros((len(keys), spec.dim), np.float32) for _ in stores]
                pairs = dict(zip(map(id, stores), outs, strict=True))
                both(stores, lambda s, k=keys, p=pairs, t=spec: s.pull(t.id, k, p[id(s)]))
                same(outs[0], outs[1])
            case "put":
                keys = keys_of(spec, OWNED, True)
                rows = rng.normal(size=(len(keys), spec.dim)).astype(np.float32)
                both(stores, lambda s, k=keys, r=rows, t=spec: s.put_absent(t.id, k, r))
            case "release":
                gone = [draw(shard_of)]
                both(stores, lambda s, g=gone: s.release(g))
            case "expire":
                now_s += draw(st.integers(0, 4))
                b, most = draw(st.sampled_from(OWNED)), draw(st.sampled_from([1, 7, 100, 1 << 16]))
                both(stores, lambda s, b=b, now_s=now_s, most=most: s.expire(b, now_s, most))
            case "mark":
                both(stores, lambda s, t=spec: (s.initialise(t.id), s.initialised()))
            case "marks":
                both(stores, lambda s, k=draw(shard_of): s.watermarks(k))
        both(stores, lambda s: s.shards())
        both(stores, lambda s: s.fingerprints())
        both(stores, lambda s: s.used_bytes())
        assert blobs(stores[0]) == stores[1].take()
        for b in OWNED:
            both(stores, lambda s, b=b: (s.seq(b), s.marks(b), s.digest(b), s.content_digest(b)))
    all_rows(stores, tables)
    assert stores[0].stats()._replace(bytes=0) == stores[1].stats()._replace(bytes=0)


@pytest.mark.parametrize("opt", OPTIMIZERS, ids=lambda o: f"{o.kind}-{o.momentum}-{o.nesterov}-{o.dampening}")
@pytest.mark.parametrize("dim", [1, 16, 33, 64, 128])
def test_many_updates_stay_bit_equal(opt: OptimizerSpec, dim: int) -> None:
    updated_alike(opt, dim)


@pytest.mark.parametrize("number", range(len(NEWER)))
def test_optimizers_of_any_width_stay_bit_equal(number: int) -> None:
    updated_alike(NEWER[number], 19, options=True)


@pytest.mark.parametrize("opt", OPTIMIZERS[:-1], ids=lambda o: f"{o.kind}-{o.momentum}-{o.nesterov}-{o.dampening}")
def test_updates_by_other_options_stay_bit_equal(opt: OptimizerSpec) -> None:
    updated_alike(opt, 16, options=True)


def test_options_that_do_not_fit_are_refused() -> None:
    """No finite numbers, too few, or some that the rows' state was not made for: nothing is changed, by neither."""
    spec = TableSpec("t", 4, OptimizerSpec(OptimizerKind.SGD, 0.1))
    stores: list[Any] = [Store(B, 3), TwinStore(B, 3)]
    for store in stores:
        store.own(range(B))
        store.declare(spec)
        store.open(0, 0, 1)
    own = dict(zip(TRAVELLING, spec.optimizer.options(), strict=True))
    wrong = [{"momentum": 0.5}, {"dampening": 0.5}, {"lr_decay": 0.1}, {"beta1": 1.0}, {"eps": -1.0}, {"eps": np.nan}]
    keys, grads = np.arange(1), np.ones((1, 4), np.float32)
    for options in [(0.1,), *(tuple((own | w).values()) for w in wrong)]:
        refused = both(stores, lambda s, o=options: s.push(0, 0, 1, 1, b"", [(spec.id, keys, grads, -1.0, o)]))
        assert refused == "ValueError", options
    for b in range(B):
        both(stores, lambda s, b=b: s.digest(b))
    assert stores[0].stats().pushes == 0


def updated_alike(opt: OptimizerSpec, dim: int, options: bool = False) -> None:
    """30 pushes to both; ``options``: every other one brings its own."""
    spec = TableSpec("t", dim, opt, InitSpec(InitKind.NORMAL, 0.0, 0.1))
    stores: list[Any] = [Store(B, 3), TwinStore(B, 3)]
    shard = shard_key(0, 0, 0)
    rng = np.random.default_rng(dim)
    keys, _, _ = native.unique_route(np.arange(24), B, spec.id, np.zeros(B, np.int32))
    for store in stores:
        store.own(range(B))
        store.declare(spec)
        store.open(shard, 0, 1)
    for i in range(30):
        grads = (rng.normal(size=(24, dim)) * 10.0 ** rng.integers(-6, 4)).astype(np.float32)
        given = other_options(opt, rng) if options and i % 2 else ()
        args = (shard, i, i + 1, 1, b"", [(spec.id, keys, grads, -1.0 if i % 3 else 0.02, given)])
        assert both(stores, lambda s, a=args: s.push(*a)).applied == B
    for b in range(B):
        both(stores, lambda s, b=b: s.scan(spec.id, b, 0, 100, True))


@pytest.mark.parametrize("init", INITS, ids=lambda i: str(i.kind))
@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_first_values_equal_at_the_ends_of_int64(init: InitSpec, key: int) -> None:
    stores: list[Any] = [Store(B, 2**64 - 1), TwinStore(B, 2**64 - 1)]
    spec = TableSpec("ends", 37, OptimizerSpec(OptimizerKind.FTRL, 0.1, l1=0.3), init)
    for store in stores:
        store.own(range(B))
        store.declare(spec)
    out = [np.empty((1, 37), np.float32) for _ in stores]
    for store, rows in zip(stores, out, strict=True):
        store.pull(spec.id, np.array([key]), rows)
        store.put_absent(spec.id, np.array([key]), rows)
    same(out[0], out[1])
    for b in range(B):
        both(stores, lambda s, b=b: s.scan(spec.id, b, 0, 10, True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 500), st.integers(1, 64), st.integers(1, 4))
def test_unique_route(seed: int, n: int, span: int, n_partitions: int, n_ps: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-span, span, n)
    partition_ps = rng.integers(0, n_ps, n_partitions).astype(np.int32)
    same(
        native.unique_route(ids, n_partitions, 77, partition_ps, n_ps),
        twin.unique_route(ids, n_partitions, 77, partition_ps, n_ps),
    )


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 40),
    st.sampled_from([1, 7, 16, 32, 64, 128, 130]),
    st.sampled_from(["sum", "mean", "weights", "single", "single-weights"]),
)
def test_bags(seed: int, bags: int, dim: int, how: str) -> None:
    rng = np.random.default_rng(seed)
    u = 9
    rows = rng.normal(size=(u, dim)).astype(np.float32)
    lengths = np.ones(bags, np.int64) if how.startswith("single") else rng.integers(0, 5, bags)
    offsets = None if how.startswith("single") else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(lengths.sum())
    inverse = rng.integers(0, u, n).astype(np.int32)
    weights = rng.normal(size=n).astype(np.float32) if how.endswith("weights") else None
    mode: Any = "mean" if how == "mean" else "sum"
    wide = [np.zeros((bags, dim + 5), np.float32) for _ in range(2)]
    for out, module in zip(wide, (native, twin), strict=True):
        module.bag_forward(rows, inverse, offsets, mode, weights, out[:, 3 : 3 + dim])
    same(wide[0], wide[1])
    grad = rng.normal(size=(bags, dim + 4)).astype(np.float32)[:, 2 : 2 + dim]
    outs = [np.full((u, dim), 7, np.float32) for _ in range(2)]
    for out, module in zip(outs, (native, twin), strict=True):
        module.bag_backward(grad, inverse, offsets, mode, weights, u, out)
    same(outs[0], outs[1])
    for out, module in zip(outs, (native, twin), strict=True):
        module.bag_backward(grad, inverse, offsets, mode, weights, u, out, True)
    same(outs[0], outs[1])
    if offsets is None and weights is None:
        gathered = np.zeros((bags, dim + 5), np.float32)
        native.gather_rows(rows, inverse, gathered[:, 3 : 3 + dim])
        same(gathered, wide[0])


@given(sizes=st.lists(st.integers(0, 23), min_size=1, max_size=5), dim=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_rows_of_pieces_are_rows_of_what_they_make_together(sizes: list[int], dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces = [rng.normal(size=n).astype(np.float32) for n in sizes]
    rows = [max(1, -(-n // dim)) for n in sizes]
    whole = np.concatenate([np.pad(p, (0, r * dim - len(p))) for p, r in zip(pieces, rows, strict=True)])
    index = rng.permutation(sum(rows)).astype(np.int32)
    out = np.full((len(index), dim), 7, np.float32)
    native.gather_pieces(pieces, np.cumsum([0, *rows[:-1]]), index, out)
    same(out, whole.reshape(-1, dim)[index])


def test_pieces_that_do_not_fit_are_refused() -> None:
    one, out = np.zeros(4, np.float32), np.zeros((1, 2), np.float32)
    for starts, index in (([1], [0]), ([0, 1], [0]), ([0], [2]), ([0], [-1])):
        with pytest.raises(ValueError):
            native.gather_pieces([one], np.array(starts), np.array(index, np.int32), out)
    with pytest.raises(ValueError):
        native.gather_pieces([one.astype(np.float64)], np.array([0]), np.array([0], np.int32), out)


@given(seed=st.integers(0, 2**16), wide=st.booleans(), other=st.booleans())
def test_ids_are_compared_as_they_lie(seed: int, wide: bool, other: bool) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 5, (7, 6)).astype(np.int64 if wide else np.int32)[:, 1:6:2]
    known = ids.astype(np.int64).reshape(-1)
    if other:
        known[rng.integers(0, len(known))] += 1
    assert native.same_ids(ids, known) is not other
    assert native.same_ids(ids[:, 0], known[::3].copy()) is not bool((known[::3] != ids[:, 0]).any())
    assert not native.same_ids(ids[:5], known)
