"""Sampled pushes tell which keys had a row, which got one, and how far the rows moved."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.ids import TableId
from everstep.model.table import InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, unique_route
from everstep.ps.row_sampler import EVERY, RowSampler

DIM = 4


def store(admit_after: int = 0) -> tuple[Store, TableId]:
    made = Store(1, 3)
    made.own([0])
    spec = TableSpec("users", DIM, OptimizerSpec(OptimizerKind.SGD, lr=0.5), InitSpec(), admit_after=admit_after)
    made.declare(spec)
    made.open(1, 0, 1)
    return made, spec.id


def push(sampler: RowSampler, made: Store, table: TableId, wanted: list[int], at: int) -> None:
    keys, _, _ = unique_route(np.array(wanted, np.int64), 1, table, np.zeros(1, np.int32), 1)
    before = sampler.before([(table, keys)])
    done = made.push(1, at, at + 1, 1, b"", [(table, keys, np.full((len(keys), DIM), 2.0, np.float32), -1.0)])
    assert done.applied
    sampler.after(before)


def test_rows_hits_and_updates() -> None:
    made, table = store()
    sampler = RowSampler(made)
    push(sampler, made, table, [1, 2, 3], 0)
    push(sampler, made, table, [2, 3, 4, 5], 1)
    (reading,) = sampler.readings()
    assert (reading.table, reading.rows, reading.row_bytes) == ("users", 5, 8 + 4 * DIM)
    assert (reading.keys, reading.hits, reading.admitted) == (7, 2, 5)
    assert reading.update_norm == pytest.approx(0.5 * 2.0 * DIM**0.5)  # lr times the gradient's length


def test_keys_that_are_not_admitted_have_no_row() -> None:
    made, table = store(admit_after=2)
    sampler = RowSampler(made)
    for at in range(3):
        push(sampler, made, table, [1, 2], at)
    (reading,) = sampler.readings()
    assert (reading.rows, reading.keys, reading.admitted) == (2, 6, 2) and reading.hits == 0


def test_one_push_in_some_is_sampled() -> None:
    sampler = RowSampler(store()[0])
    due = [i for i in range(1, 2 * EVERY + 20) if sampler.due()]
    assert due == [8, 8 + EVERY, 8 + 2 * EVERY]
