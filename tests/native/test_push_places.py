"""Arrays of a request by their places in somebody's memory: the same as arrays, and never outside of it."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.ids import TableId
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store
from everstep.net.messages import RowsPart

TABLE = TableSpec("t", 6, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1))
ID = TableId(TABLE.id)
N = 5


def store() -> Store:
    made = Store(1, 3)
    made.declare(TABLE)
    made.own([0])
    made.open(0, 0, 1)
    return made


def test_places_are_as_good_as_arrays() -> None:
    keys, grads = np.arange(N), np.random.default_rng(1).standard_normal((N, TABLE.dim), np.float32)
    memory = bytearray(16) + keys.tobytes() + grads.tobytes()
    one, two = store(), store()
    assert one.push(0, 0, 1, 1, b"", [(TABLE.id, keys, grads, 0.5)]) == two.push_at(
        0, 0, 1, 1, [RowsPart(ID, N, 16, 16 + 8 * N, 0.5)], memoryview(memory), False, 0
    )
    assert one.digest(0) == two.digest(0)
    out = np.empty((N, TABLE.dim), np.float32)
    one.pull(TABLE.id, keys, out)
    two.pull_at([RowsPart(ID, N, 16, 16 + 8 * N)], memoryview(memory))
    assert memory[16 + 8 * N :] == out.tobytes()


@pytest.mark.parametrize(
    "part",
    [
        RowsPart(ID, N, -8, 40),
        RowsPart(ID, N, 168, 40),
        RowsPart(ID, N, 0, 48),
        RowsPart(ID, N, 4, 40),
        RowsPart(ID, N, 0, 42),
        RowsPart(ID, -1, 0, 40),
        RowsPart(ID, 1 << 62, 0, 40),
        RowsPart(TableId(1), N, 0, 40),
    ],
)
def test_places_outside_of_the_memory_are_refused(part: RowsPart) -> None:
    memory, here = memoryview(bytearray(160)), store()
    before = here.digest(0)
    with pytest.raises(ValueError, match=r"fit into|aligned|keys in|declared"):
        here.pull_at([part], memory)
    with pytest.raises(ValueError, match=r"fit into|aligned|keys in|declared"):
        here.push_at(0, 0, 1, 1, [part], memory, False, 0)
    assert here.digest(0) == before
    with pytest.raises((BufferError, ValueError)):
        here.pull_at([], memoryview(b"12345678"))
