"""Readings of workers and ps become one view: means by steps, sums over ps, growth over time."""

from __future__ import annotations

import msgspec
import pytest

from everstep.ids import Incarnation, Slot
from everstep.model.graph_readings import GraphReading, GraphView, LookupReading, ModuleReading, RowReading
from everstep.model.member import MemberKey, Role
from everstep.monitor.graph_fold import GraphFold

ONE, TWO = Incarnation(1), Incarnation(2)
W0, W1 = MemberKey(Role.WORKER, Slot(0)), MemberKey(Role.WORKER, Slot(1))
PS0, PS1 = MemberKey(Role.PS, Slot(0)), MemberKey(Role.PS, Slot(1))


def worker(steps: int, forward_s: float, hottest: tuple[tuple[int, float], ...] = ()) -> GraphReading:
    modules = (
        ModuleReading("Net", "Net", 1.0, forward_s, forward_s / 2, forward_s * 2, 5, 20, 8.0),
        ModuleReading("Net.body", "Sequential", 1.0, forward_s / 2, 0.0, forward_s, 0, 0, 8.0),
        ModuleReading("Net.body.0", "Linear", 2.0, forward_s / 2, forward_s / 2, forward_s, 10, 40, 8.0),
    )
    return GraphReading(50, steps, forward_s * 3, 0.002, 0, "", modules, (LookupReading("users", 100, 60, hottest),))


def view_of(fold: GraphFold) -> GraphView:
    view = fold.view()
    assert view is not None
    return view


def test_nothing_told_is_no_view() -> None:
    fold = GraphFold()
    assert fold.view() is None and not fold.take(W0, ONE, None, (), 1.0)


def test_modules_are_means_by_steps_and_parameters_add_up_the_tree() -> None:
    fold = GraphFold()
    fold.take(W0, ONE, worker(30, 0.01), (), 1.0)
    fold.take(W1, ONE, worker(10, 0.05), (), 1.0)
    view = view_of(fold)
    assert (view.workers, view.steps, view.every) == (2, 40, 50)
    net, body, linear = view.modules
    assert net.forward_s == pytest.approx(0.02) and net.backward_s == pytest.approx(0.04)
    assert (net.parameters, body.parameters, linear.parameters) == (15, 10, 10) and net.parameter_bytes == 60
    assert (net.depth, body.depth, linear.depth) == (0, 1, 2) and linear.calls == 2.0


def test_tables_are_sums_over_ps_and_grow() -> None:
    fold = GraphFold()
    row = RowReading("users", rows=1000, row_bytes=72, keys=400, hits=300, admitted=50, update_norm=0.1, row_norm=1.0)
    fold.take(PS0, ONE, None, (row,), 10.0)
    fold.take(PS1, ONE, None, (msgspec.structs.replace(row, keys=100, hits=100, admitted=0, update_norm=0.6),), 10.0)
    fold.take(PS0, ONE, None, (msgspec.structs.replace(row, rows=1500),), 20.0)
    (table,) = view_of(fold).tables
    assert (table.rows, table.bytes) == (2500, 2500 * 72)
    assert (table.hit_share, table.admitted_share) == (0.8, 0.5) and table.update_norm == pytest.approx(0.2)
    assert table.rows_per_s == pytest.approx(150.0)  # (from 1,000: the second ps was not there yet)
    assert table.unique_share == -1.0 and table.hottest == ()


def test_a_ps_that_is_gone_has_no_rows() -> None:
    fold = GraphFold()
    for key in (PS0, PS1):
        fold.take(key, ONE, None, (RowReading("users", rows=10),), 10.0)
    fold.gone([Slot(1)])
    assert view_of(fold).tables[0].rows == 10


def test_hottest_keys_of_all_workers() -> None:
    fold = GraphFold()
    fold.take(W0, ONE, worker(30, 0.01, ((7, 0.4), (8, 0.2))), (), 1.0)
    fold.take(W1, ONE, worker(10, 0.01, ((9, 0.8), (8, 0.2))), (), 1.0)
    (table,) = view_of(fold).tables
    assert [key for key, _ in table.hottest] == [7, 8, 9]
    assert [share for _, share in table.hottest] == pytest.approx([0.3, 0.2, 0.2])
    assert (table.ids, table.unique_share) == (100, 0.6)


def test_a_replaced_worker_says_nothing_more() -> None:
    fold = GraphFold()
    fold.take(W0, TWO, worker(3, 0.01), (), 1.0)
    assert not fold.take(W0, ONE, worker(900, 0.01), (), 2.0) and view_of(fold).steps == 3
