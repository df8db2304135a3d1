"""Memory of the outbox: small entries share a chunk (they once held 4 MiB each), large ones use chunks again."""

from __future__ import annotations

import itertools

import numpy as np

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store

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


def test_what_goes_out_together_uses_the_same_memory_again() -> None:
    store = Store(1, 1)
    store.own([0])
    store.declare(ROWS)
    keys = np.arange(120_000, dtype=np.int64)
    store.put_absent(ROWS.id, keys, np.ones((len(keys), 3), np.float32))
    store.protect([0], True)

    def places(entries: int) -> set[int]:
        """Return where the bytes of so many entries lie that are held together."""
        held = []
        for _ in range(entries):
            store.emit(0, BlobKind.BODIES, ROWS.id, 0, len(keys))
            _, _, data = store.take_outbox(1 << 30)
            assert data.nbytes > CHUNK // 2, "one lies in each chunk"
            held.append(data)
        return {int(np.asarray(data).ctypes.data) for data in held}

    first = places(12)
    assert len(first) == 12
    # What the outbox gave back to the allocator would lie in one of these now.
    others = [np.empty(CHUNK, np.uint8) for _ in range(64)]
    assert all(places(12) == first for _ in range(3))
    del others
