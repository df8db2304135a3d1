"""The curve of growing tables: exact laws are found, and what is not known is in the error bar."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.sizing.heaps import GrowthCurve, Reading


def readings(exponent: float, n: int = 20, fixed: float = 1e6, factor: float = 400.0) -> list[Reading]:
    return [Reading(k * 1000, fixed + factor * (k * 1000.0) ** exponent) for k in range(1, n + 1)]


@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("times", [1.1, 2.0, 4.0])
def test_an_exact_law_is_predicted(exponent: float, times: float) -> None:
    curve = GrowthCurve(readings(exponent))
    more = round(20_000 * (times - 1))
    truth = 400.0 * ((20_000 + more) ** exponent - 20_000**exponent)
    found = curve.after(more)
    assert found.likely == pytest.approx(truth, rel=0.1)
    assert found.high >= 0.97 * truth
    assert curve.exponent == pytest.approx(exponent, abs=0.06)


def test_a_table_that_is_whole_does_not_grow() -> None:
    assert GrowthCurve([Reading(k, 5e6) for k in range(1, 9)]).after(10**6) == (0.0, 0.0)


def test_new_data_is_not_taken_for_the_old_law() -> None:
    flat = [Reading(k * 100, 1e6) for k in range(1, 30)]
    risen = [*flat, *(Reading(3000 + k * 100, 1e6 + k * 1e5) for k in range(4))]
    found = GrowthCurve(risen).after(1000)
    assert found.high >= 1e6 > 0.5 * found.likely, "as fast as it has just grown"


@pytest.mark.parametrize("wrong", [[], [Reading(1, 1.0)], [Reading(2, 1.0), Reading(2, 2.0)]])
def test_what_is_no_curve_is_refused(wrong: list[Reading]) -> None:
    with pytest.raises(ValueError, match="at least two, in the order of samples"):
        GrowthCurve(wrong)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e12)), min_size=2, max_size=64),
    st.integers(0, 10**9),
)
def test_any_readings_give_a_finite_prediction(steps: list[tuple[int, float]], more: int) -> None:
    at, points = 0, []
    for step, size in steps:
        at += step
        points.append(Reading(at, size))
    found = GrowthCurve(points).after(more)
    assert 0 <= found.likely <= found.high < float("inf")
