"""A push to some partitions, with the rows of all."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, bitmap, unique_route
from everstep.testing.twin import TwinStore

SPEC = TableSpec("t", 2, OptimizerSpec(OptimizerKind.SGD, lr=1.0))
PARTITIONS = 8


@pytest.mark.parametrize("kind", [Store, TwinStore])
def test_rows_of_other_partitions_are_left_out(kind: type) -> None:
    store = kind(PARTITIONS, 0)
    store.own(list(range(PARTITIONS)))
    store.declare(SPEC)
    shard = 1
    assert store.open(shard, 0, 1) is not None
    keys, _, counts = unique_route(
        np.arange(100, dtype=np.int64), PARTITIONS, SPEC.id, np.arange(PARTITIONS, dtype=np.int32), PARTITIONS
    )
    grads = np.full((len(keys), 2), -1.0, np.float32)
    parts = [(SPEC.id, keys, grads, -1.0)]
    some = [1, 4, 5]
    first = store.push(shard, 0, 10, 1, bitmap(some, PARTITIONS), parts)
    assert first.applied == len(some)

    def values() -> np.ndarray:
        out = np.empty((len(keys), 2), np.float32)
        store.pull(SPEC.id, keys, out)
        return out

    of = np.repeat(np.arange(PARTITIONS), counts)
    assert (values() == np.isin(of, some)[:, None]).all()
    rest = [b for b in range(PARTITIONS) if b not in some]
    assert store.push(shard, 0, 10, 1, bitmap(rest, PARTITIONS), parts).applied == len(rest)
    assert (values() == 1.0).all()
    assert store.push(
        shard, 0, 10, 1, bitmap([2], PARTITIONS), [(SPEC.id, keys[of == 3], grads[of == 3], -1.0)]
    ).repeats
    with pytest.raises(ValueError, match=r"grads|rows"):
        store.push(shard, 10, 20, 1, bitmap(some, PARTITIONS), [(SPEC.id, keys, grads[:-1], -1.0)])
