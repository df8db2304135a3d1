"""The memory of rows, computed, is what a store really takes."""

from __future__ import annotations

import numpy as np
import pytest
from sizes import keys

from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store
from everstep.sizing.probe_readings import TableReading
from everstep.sizing.store_memory import ps_rows_bytes, row_bytes, table_bytes


@pytest.mark.parametrize("kind", [OptimizerKind.ADAGRAD, OptimizerKind.ADAM, OptimizerKind.SGD])
@pytest.mark.parametrize("dim", [1, 16, 64])
@pytest.mark.parametrize("rows", [5_000, 20_000, 60_000])
def test_it_is_what_a_store_takes(kind: OptimizerKind, dim: int, rows: int) -> None:
    partitions = 16
    spec = TableSpec("t", dim, OptimizerSpec(kind, 0.1))
    store = Store(partitions, 0)
    store.own(list(range(partitions)))
    store.declare(spec)
    mapped = store.stats().bytes
    ids = np.unique(np.random.default_rng(rows).integers(0, 1 << 62, rows))
    for lo in range(0, rows, 1000):  # as batches bring them
        part = ids[lo : lo + 1000]
        store.put_absent(spec.id, part, np.zeros((len(part), dim), np.float32))
    used = sum(store.partition_bytes(p) for p in range(partitions))
    reading = TableReading("t", dim, spec.optimizer.state_floats(dim), keys=keys(rows))
    assert store.stats().rows == {"t": rows}
    found = table_bytes(reading, rows, partitions)
    assert found.used == pytest.approx(used, rel=0.03)
    assert used >= rows * row_bytes(reading)
    whole = ps_rows_bytes((reading,), [rows], partitions)
    assert abs(whole - (store.stats().bytes - mapped)) <= (2 << 20) + 0.08 * whole


def test_no_rows_take_nothing() -> None:
    assert table_bytes(TableReading("t", 8, 8), 0, 64).resident == 0.0
    assert ps_rows_bytes((TableReading("t", 8, 8),), [0.0], 64) == 0.0
