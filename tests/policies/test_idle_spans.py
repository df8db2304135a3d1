"""Where the stages of a pipeline are idle: measured iterations of ideal pipelines say what the formula says."""

from __future__ import annotations

import pytest

from everstep.model.stage_spans import StageIteration, StageSpan
from everstep.policies.ideal_pipeline import IdealSchedule, ideal_spans, timeline
from everstep.policies.idle_spans import SpanSampler, expected_share, gaps, iterations, measure, typical, window

FORWARD_S, BACKWARD_S = 1.0, 2.0
gpipe, one_f_one_b = IdealSchedule.GPIPE, IdealSchedule.ONE_F_ONE_B


def ideal(schedule: IdealSchedule, stages: int, m: int, **facts: object) -> list[StageIteration]:
    """An iteration in which nothing costs time but forward (1 s) and backward (2 s)."""
    given = {"step": 7, "generation": 1, "samples": 32, "seen": 5, "began_s": 100.0, "worker": 0, **facts}
    return [
        StageIteration(
            stage=stage,
            stages=stages,
            parts=stages,
            microbatches=m,
            schedule=schedule.value,
            spans=tuple(StageSpan(kind, begin, end, stage, chunk) for kind, chunk, begin, end in line),
            **given,  # type: ignore[arg-type]
        )
        for stage, line in enumerate(timeline(schedule, stages, m, FORWARD_S, BACKWARD_S))
    ]


@pytest.mark.parametrize("order", IdealSchedule)
@pytest.mark.parametrize(("stages", "m"), [(2, 4), (2, 8), (4, 8), (4, 16), (3, 3)])
def test_an_ideal_pipeline_is_idle_as_the_formula_says(order: IdealSchedule, stages: int, m: int) -> None:
    (found,) = measure(ideal(order, stages, m))
    assert found.expected == pytest.approx((stages - 1) / (m + stages - 1))
    for stage in found.stages:
        assert stage.shares[1] == pytest.approx(found.expected)
        assert stage.idle_s == pytest.approx((stages - 1) * (FORWARD_S + BACKWARD_S))  # whatever m is
        assert sum(span.length_s for span in stage.spans) == pytest.approx(stage.idle_s)
    assert found.window_s == pytest.approx((m + stages - 1) * (FORWARD_S + BACKWARD_S))
    assert [list(stage.spans) for stage in found.stages] == ideal_spans(order, stages, m, FORWARD_S, BACKWARD_S)


def test_where_the_last_stage_waits() -> None:
    (found,) = measure(ideal(gpipe, 4, 8))
    assert [(s.offset_s, s.length_s) for s in found.stages[3].spans] == [(0.0, 3.0), (27.0, 6.0)]
    assert [(s.offset_s, s.length_s) for s in found.stages[0].spans] == [(8.0, 9.0)]


def test_spans_are_medians_over_iterations_and_their_spread_is_told() -> None:
    records = [r for n in range(5) for r in ideal(one_f_one_b, 2, 4, step=n, seen=n, began_s=100.0 * n)]
    (found,) = measure(records)
    assert found.iterations == 3  # the first two are no measure
    assert all(span.spread_s == 0.0 for stage in found.stages for span in stage.spans)


def test_generations_and_sizes_are_apart_and_steps_done_again_are_two_iterations() -> None:
    records = [
        *ideal(gpipe, 2, 4, step=5),
        *ideal(gpipe, 2, 4, step=5, began_s=200.0),
        *ideal(gpipe, 2, 4, step=6, samples=20),
        *ideal(gpipe, 2, 4, step=6, generation=2),
        ideal(gpipe, 2, 4, step=9)[0],  # of the other stage nothing is known
    ]
    assert len(iterations(records)) == 4
    assert [(one.generation, one.samples, one.iterations) for one in measure(records)] == [
        (1, 20, 1),
        (1, 32, 2),
        (2, 32, 1),
    ]


def test_the_typical_iteration_is_the_median_one() -> None:
    short, middle, long = (ideal(gpipe, 2, m, step=m, began_s=100.0 * m) for m in (2, 4, 8))
    assert typical(iterations([*long, *short, *middle]))[0].step == 4
    assert window(()) == (0.0, 0.0)


def test_gaps_cover_what_is_not_computed() -> None:
    record = ideal(one_f_one_b, 2, 4)[1]
    assert gaps(record, 100.0, 115.0) == [(0.0, 1.0), *[(0.0 + a, 0.0) for a in (2, 4, 5, 7, 8, 10, 11)], (13.0, 2.0)]


def test_schedules_without_that_formula() -> None:
    assert expected_share("ScheduleZBVZeroBubble", 2, 4, 8) is None
    assert expected_share("ScheduleInterleaved1F1B", 4, 8, 8) == pytest.approx(3 / 19)


def test_the_first_iterations_of_each_generation_and_size_are_kept() -> None:
    sampler = SpanSampler(first=3, then_every=10)
    kept = [sampler.take(1, 32) for _ in range(31)]
    assert [seen for seen in kept if seen >= 0] == [0, 1, 2, 10, 20, 30]
    assert [sampler.take(1, 20), sampler.take(2, 32), sampler.take(2, 20)] == [0, 0, 0]
