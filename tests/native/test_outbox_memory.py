"""Small entries that takers hold share chunks: they once held four megabytes each."""

from __future__ import annotations

import itertools

import numpy as np

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store

ROWS = TableSpec("rows", 3, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), InitSpec(InitKind.UNIFORM, -1.0, 1.0))
CHUNK = 4 << 20


def test_entries_that_are_held_do_not_hold_a_chunk_each() -> None:
    store = Store(2, 1)
    store.own([0, 1])
    store.declare(ROWS)
    store.protect([0, 1], True)
    held, contents = [], []
    for i in range(200):
        store.emit_marks(i % 2)
        _, entries, data = store.take_outbox(1 << 30)
        assert len(entries) == 1
        held.append(data)
        contents.append(data.tobytes())
    places = sorted(int(np.asarray(data).ctypes.data) for data in held)
    chunks = 1 + sum(b - a > CHUNK // 2 for a, b in itertools.pairwise(places))
    assert chunks <= 5
    assert [data.tobytes() for data in held] == contents, "what one holds is not written over"
