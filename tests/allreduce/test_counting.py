"""``enumerate`` over the batches counts steps; integers that count samples are told from those of iterations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from everstep.allreduce.counting import Enumerated, SampleCounts

PASSES = (0, 0, 1, 1, 2, 2)  # steps of two passes each


def batches(steps: Iterable[int] = PASSES) -> Iterator[int]:
    enumerated = Enumerated(sys._getframe())
    for step in steps:
        enumerated.set(sys._getframe(), step)
        yield step


def around(batches: Iterable[int]) -> Iterator[int]:
    """As tqdm."""
    yield from batches


def test_enumerate_counts_steps_and_not_passes() -> None:
    assert [i for i, _ in enumerate(batches())] == list(PASSES)
    assert [i for i, _ in enumerate(batches(), 5)] == [5 + step for step in PASSES]
    assert [i for i, _ in enumerate(around(batches()), 1)] == [1 + step for step in PASSES]


def test_a_worker_that_joins_and_a_step_that_is_done_again_count_the_steps() -> None:
    assert [i for i, _ in enumerate(batches((7, 8, 8, 9)))] == [7, 8, 8, 9]


def test_a_loop_that_is_left_ends_at_once() -> None:
    ended = []

    def watched() -> Iterator[int]:
        enumerated = Enumerated(sys._getframe())
        try:
            for step in PASSES:
                enumerated.set(sys._getframe(), step)
                yield step
        finally:
            ended.append(True)

    for i, _ in enumerate(watched()):
        if i == 1:
            break
    assert ended


def test_no_other_enumerate_is_touched() -> None:
    others = enumerate("abc")
    next(others)
    assert list(batches()) == list(PASSES)
    assert next(others) == (1, "b")


def _run(script: Any) -> SampleCounts:
    """``script(samples)`` is a generator that counts, one iteration for each ``next``."""
    counts, run = SampleCounts(), script(4)
    next(run)
    for _ in range(3):
        counts.begin(run.gi_frame)
        next(run)
        counts.end(run.gi_frame, 4, set(), False)
    return counts


def test_counts_of_samples_are_trusted_where_nothing_counts_iterations() -> None:
    def by_samples(samples: int) -> Iterator[None]:
        seen = 0
        while True:
            yield
            seen += samples

    def by_iterations(samples: int) -> Iterator[None]:
        seen = at = 0
        while True:
            yield
            seen += samples
            at += 1

    assert _run(by_samples).trusted
    assert not _run(by_iterations).trusted
