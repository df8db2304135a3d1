"""The order of sides of ``bubble_overhead``, and what its ratios say of made-up steps."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_each_step_with_a_copy_stands_between_two_without() -> None:
    from benchmarks._bubble_sides import BLOCKS, OTHERS, SETTLE, Cycle

    cycle = Cycle(OTHERS, 2)
    turns = [cycle.turn(step) for step in range(200)]
    for before, turn, behind in zip(turns, turns[1:], turns[2:], strict=False):
        if turn.side == "spans":
            assert (before.side, behind.side) == ("none", "same") and before[2:] == turn[2:] == behind[2:]
    first = [turn for turn in turns if turn.cycle == 0]
    assert [turn.side for turn in first[:7]] == ["none", "spans", "same"] * 2 + [OTHERS[0]]
    for side in OTHERS:
        block = [turn for turn in first if turn.side == side]
        assert [turn.counts for turn in block] == [False] + [True] * (BLOCKS[side] - 1)
    assert not any(turn.counts for turn in turns if turn.side == SETTLE)


def test_a_drift_of_the_machine_is_in_no_ratio_and_an_effect_is() -> None:
    from benchmarks._bubble_sides import Cycle, Step, ratios

    cycle = Cycle(("synchronous",), 5)
    steps = []
    for number in range(400):
        turn = cycle.turn(number)
        factor = {"spans": 1.02, "synchronous": 1.5}.get(turn.side, 1.0)
        if turn.side == "synchronous" and not turn.counts:
            factor = 9.0
        steps.append(Step(turn, (1.0 + number / 100) * factor, 2.0 * factor))
    found = ratios(steps)
    assert all(ratio == pytest.approx(1.02) for ratio in found.wall["spans"] + found.cpu["spans"])
    assert all(ratio == pytest.approx(1.0) for ratio in found.cpu["aa"])
    assert all(ratio == pytest.approx(1.5) for ratio in found.cpu["synchronous"])
    assert all(1.0 < ratio < 1.03 for ratio in found.wall["aa"]) and len(found.none_s) > 70


def test_a_round_that_was_cut_off_counts_for_nothing() -> None:
    from benchmarks._bubble_sides import Cycle, Step, ratios

    cycle = Cycle((), 10)
    found = ratios([Step(cycle.turn(number), 1.0, 1.0) for number in range(8)])
    assert found.wall["spans"] == [1.0]  # (the first round is a warm-up, and the third one has two steps)


def test_a_round_in_which_a_checkpoint_was_still_written_counts_for_nothing() -> None:
    from benchmarks._bubble_sides import Cycle, Step, ratios

    cycle = Cycle(("durable",), 3)
    found = ratios([Step(cycle.turn(number), 1.0, 1.0, 6 <= number < 18) for number in range(27)])
    assert len(found.wall["spans"]) == 1 and found.wall["durable"] == [1.0]


@pytest.mark.parametrize(
    ("between", "word"),
    [
        ((0.99, 1.009), "shown"),
        ((0.98, 1.02), "undecided"),
        ((1.01, 1.02), "refuted"),
        ((0.9, float("nan")), "undecided"),
    ],
)
def test_noise_that_is_larger_than_the_effect_decides_nothing(between: tuple[float, float], word: str) -> None:
    from benchmarks._bubble_sides import verdict

    assert verdict(between, 1.01) == word
