"""Pushes of steps that consumed ranges of several shards: the C++ store takes or refuses just what the twin does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_twin import blobs, both

from everstep.model.shard import shard_key
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store
from everstep.native.ledger import SpanTuple, batch_fingerprint, bitmap
from everstep.testing import twin
from everstep.testing.twin import TwinStore

B = 4
OWNED = (0, 1, 3)
SHARDS = (shard_key(0, 0, 0), shard_key(0, 0, 1), shard_key(0, 1, 0))
SPEC = TableSpec("t", 3, OptimizerSpec(OptimizerKind.SGD, 0.5), InitSpec(InitKind.CONSTANT, 1.0))


def pair() -> list[Any]:
    stores: list[Any] = [Store(B, 5), TwinStore(B, 5)]
    for store in stores:
        store.own(OWNED)
        assert store.declare(SPEC)
        store.protect(OWNED, True)
    return stores


def rows(count: int = 40) -> np.ndarray:
    keys = np.arange(count)
    partitions = twin.partition_of(keys, SPEC.id, B)
    here = np.isin(partitions, OWNED)
    return keys[here][np.argsort(partitions[here], kind="stable")]


def push(store: Any, spans: tuple[SpanTuple, ...], bits: bytes = b"", value: float = 0.25) -> Any:
    shard, lo, hi, lease, learnt = spans[0]
    keys = rows()
    parts = [(SPEC.id, keys, np.full((len(keys), SPEC.dim), value, np.float32), -1.0)]
    if not any(span[4] for span in spans):
        parts = []
    return store.push(shard, lo, hi, lease, bits, parts, not learnt, 0, -1, spans[1:])


def equal(stores: list[Any]) -> None:
    both(stores, lambda s: s.fingerprints())
    for shard in SHARDS:
        both(stores, lambda s, k=shard: s.watermarks(k))
    for b in OWNED:
        both(stores, lambda s, b=b: (s.seq(b), s.marks(b), s.digest(b), s.content_digest(b)))
    assert blobs(stores[0]) == stores[1].take()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_steps_of_several_shards_agree(data: st.DataObject) -> None:
    draw = data.draw
    stores = pair()
    for shard in SHARDS[: draw(st.integers(2, 3), "opened")]:
        both(stores, lambda s, k=shard: s.open(k, 0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32), "values"))
    for _ in range(draw(st.integers(1, 15), "operations")):
        match draw(st.sampled_from(["push", "push", "push", "push", "open", "assign", "release"])):
            case "open":
                shard, lease = draw(st.sampled_from(SHARDS)), draw(st.sampled_from([1, 2, 3]))
                both(stores, lambda s, a=(shard, 0, lease): s.open(*a) is None)
            case "release":
                if draw(st.integers(0, 5)) == 0:
                    gone = [draw(st.sampled_from(SHARDS))]
                    both(stores, lambda s, g=gone: s.release(g))
            case "assign":
                keys = rows(draw(st.sampled_from([0, 5, 60])))
                values = rng.normal(size=(len(keys), SPEC.dim)).astype(np.float32)
                if len(keys) and draw(st.integers(0, 7)) == 0:
                    values[0, 0] = np.nan
                both(stores, lambda s, k=keys, v=values: s.assign(SPEC.id, k, v))
            case _:
                spans: list[SpanTuple] = []
                at: dict[int, int] = {}
                for _ in range(draw(st.integers(1, 4))):
                    shard = draw(st.sampled_from(SHARDS))
                    known = stores[1].watermarks(shard)
                    fits = int(draw(st.sampled_from(list(known[1])))) if known is not None else 0
                    lo = at.get(shard, fits) + draw(st.sampled_from([0] * 12 + [1, -1]))
                    hi = lo + draw(st.sampled_from([1, 2, 5, 5, 5, 0]))
                    at[shard] = hi
                    lease = draw(st.sampled_from([2] * 8 + [1, 3]))
                    spans.append((shard, lo, hi, lease, draw(st.sampled_from([True, True, False]))))
                some = draw(st.sampled_from([(), (), (1,), (0, 3), (0, 2)]))
                bits = bitmap(some, B) if some else b""
                args = tuple(spans), bits, float(rng.normal())
                both(stores, lambda s, a=args: push(s, *a), refusals=2 not in some)  # both may be wrong
        equal(stores)


def test_a_partition_takes_a_step_of_two_shards_whole_or_not_at_all() -> None:
    stores = pair()
    one, two, _ = SHARDS
    for shard in (one, two):
        both(stores, lambda s, k=shard: s.open(k, 0, 1) is None)
    ahead: tuple[SpanTuple, ...] = ((two, 0, 4, 1, True),)
    assert both(stores, lambda s: push(s, ahead, bitmap([1], B))).applied == 1
    step: tuple[SpanTuple, ...] = ((one, 0, 3, 1, True), (two, 0, 2, 1, False), (two, 2, 6, 1, True))
    answer = both(stores, lambda s: push(s, step))
    assert (answer.applied, answer.repeats, answer.gap) == (2, 0, 0)
    equal(stores)
    for store in stores:
        assert [list(map(int, part)) for part in store.watermarks(one)] == [list(OWNED), [3, 0, 3]]
        assert [list(map(int, part)) for part in store.watermarks(two)] == [list(OWNED), [6, 4, 6]]
        learnt = batch_fingerprint(one, 0, 3) + batch_fingerprint(two, 2, 6)
        assert int(store.fingerprints()[0]) == learnt & (1 << 64) - 1
    again = both(stores, lambda s: push(s, step))
    assert (again.applied, again.repeats, again.gap) == (0, 2, 0)
    equal(stores)


@pytest.mark.parametrize(
    "spans",
    [
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[0], 3, 4, 1, True)),  # a hole
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[0], 1, 4, 1, True)),  # twice
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[0], 2, 4, 2, True)),  # two leases
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[1], 2, 2, 1, True)),  # empty
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[1], -1, 2, 1, True)),
        ((SHARDS[0], 0, 2, 1, True), (-1, 0, 2, 1, True)),
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[1], 0, 2, -1, True)),
        ((SHARDS[0], 0, 2, 1, True), (SHARDS[1], 0, (1 << 24) + 1, 1, True)),
    ],
)
def test_spans_that_make_no_step_are_refused_and_change_nothing(spans: tuple[SpanTuple, ...]) -> None:
    stores = pair()
    for shard in SHARDS:
        both(stores, lambda s, k=shard: s.open(k, 0, 1) is None)
    equal(stores)
    before = [store.digest(0) for store in stores]
    assert both(stores, lambda s: push(s, spans)) == "ValueError"
    assert [store.digest(0) for store in stores] == before
    equal(stores)


def test_what_nothing_was_learnt_from_has_no_rows() -> None:
    stores = pair()
    for shard in SHARDS:
        both(stores, lambda s, k=shard: s.open(k, 0, 1) is None)
    keys = rows()
    parts = [(SPEC.id, keys, np.ones((len(keys), SPEC.dim), np.float32), -1.0)]
    more = ((SHARDS[1], 0, 2, 1, False),)
    assert both(stores, lambda s: s.push(SHARDS[0], 0, 2, 1, b"", parts, True, 0, -1, more)) == "ValueError"
    some = ((SHARDS[1], 0, 2, 1, True),)
    assert both(stores, lambda s: s.push(SHARDS[0], 0, 2, 1, b"", parts, True, 0, -1, some)).applied == len(OWNED)
    equal(stores)
