from __future__ import annotations

import pytest

from everstep.policies.advise import Case, coded, options, within
from everstep.policies.measured_costs import KernelCosts, MeasuredCosts, StepLoad, measured_case, share_of

CASE = Case(table_bytes=220e9, bandwidth=1.4e9, mtbf_s=8 * 3600.0, ps=8)
ACKED = KernelCosts(push_s=100e-9, difference_s=50e-9, send_s=20e-9, apply_s=30e-9)
LAG = KernelCosts(push_s=100e-9, difference_s=30e-9, send_s=5e-9, apply_s=5e-9)
COSTS = MeasuredCosts(ACKED, LAG, 20, 0.4, write_bytes_per_s=5e8, write_cpu_s_per_byte=1e-9, took_s=28.0)
LOAD = StepLoad(rows=100_000, step_s=0.1, cores=4)
ALL = frozenset({"bandwidth", "parity", "replica", "lag", "stall"})


def test_a_share_is_of_all_that_the_cores_do() -> None:
    """100,000 rows at 100 ns are 10 ms, beside the 400 ms that four cores give to a step of 100 ms."""
    assert share_of(ACKED.protect_s * LOAD.rows, LOAD) == pytest.approx(10 / 410)
    assert share_of(0.0, LOAD) == 0.0


def test_what_was_measured_replaces_the_constants() -> None:
    made = measured_case(CASE, COSTS, LOAD, ALL)
    assert made.parity == made.replica == pytest.approx(10 / 410)
    assert made.lag == pytest.approx(4 / 404)
    assert made.bandwidth == 5e8 and made.stall == pytest.approx(0.125)
    assert made.table_bytes == CASE.table_bytes and made.changed == CASE.changed


def test_what_the_user_gave_stays() -> None:
    made = measured_case(CASE, COSTS, LOAD, ALL - {"bandwidth", "parity"})
    assert made.bandwidth == CASE.bandwidth and made.parity == CASE.parity
    assert made.stall == pytest.approx(1.4e9 * 1e-9 / 4), "of the bandwidth that the user gave"


def test_lag_costs_less_and_trains_a_little_again() -> None:
    lagging = coded(CASE, 4, 1, lag=True)
    assert lagging.parts["parity"] == CASE.lag and lagging.redo_s == CASE.lag_s
    assert lagging.parts["trained again"] == pytest.approx(CASE.lag_s / CASE.mtbf_s)
    assert coded(CASE, 4, 1).redo_s == 0.0
    assert {o.name for o in options(CASE)} >= {"parity 4+1 lag 4s", "parity 4+2 lag 4s", "parity 4+1"}


def test_checkpoints_with_the_same_promise_wait_for_the_storage() -> None:
    slow = within(CASE, 2.0)
    assert slow.parts["waiting for the storage"] > 1.0 and slow.binds == "waiting for the storage"
    small = within(CASE._replace(table_bytes=1e8), 2.0)
    assert small.parts["waiting for the storage"] == 0.0 and small.redo_s == 2.0
