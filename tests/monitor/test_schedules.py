"""Schedules of faults, and recorded slowdowns played again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from everstep.errors import ConfigError
from everstep.monitor.schedules import Planned, choose, parse_recording, parse_schedule, plan_recording

EXCERPT = Path(__file__).parents[2] / "examples" / "recordings" / "pai-job4-excerpt.csv"


def test_lines_become_faults_in_order_of_time() -> None:
    text = """
    30,  stop ps:0 for=500ms   # a pause
    0, slow worker:1 factor=4 for=1m
    45s, kill worker:?
    90, heal
    """
    assert parse_schedule(text) == [
        Planned(0, "slow", "worker:1", 4.0, 60.0),
        Planned(30, "stop", "ps:0", 1.0, 0.5),
        Planned(45, "kill", "worker:?"),
        Planned(90, "heal"),
    ]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("slow worker:1", "SECONDS, WHAT"),
        ("x, heal", "time span"),
        ("1, explode ps:0", "explode"),
        ("1, slow worker factor=4 for=1s", "worker"),
        ("1, slow worker:1 factor=nan for=1s", "nan"),
        ("1, slow worker:1 factor=4", "for=SECONDS"),
        ("1, slow worker:1 factor=1 for=1s", "above 1"),
        ("1, kill", "whom"),
        ("1, stop ps:0 speed=3", "speed=3"),
        ("1, stop ps:0 factor=3 for=1s", "'factor=3' says nothing about stop"),
        ("1, kill worker:1 for=1s", "'for=1s' says nothing about kill"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(line: str, word: str) -> None:
    with pytest.raises(ConfigError, match="line 2") as caught:
        parse_schedule("0, heal\n" + line, "drill.txt")
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_a_schedule_without_a_line_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"drill\.txt: says nothing"):
        parse_schedule("# later\n\n", "drill.txt")


def test_any_worker_is_chosen_by_the_seed() -> None:
    there = ["worker:2", "ps:0", "worker:0", "worker:1"]
    plan = Planned(0, "kill", "worker:?")
    picks = [choose(plan, there, random.Random(seed)) for seed in range(20)]
    assert picks == [choose(plan, reversed(there), random.Random(seed)) for seed in range(20)]
    assert {p.target for p in picks if p is not None} == {"worker:0", "worker:1", "worker:2"}
    assert choose(plan, ["ps:0"], random.Random(0)) is None


def test_a_recording_is_factors_over_the_median() -> None:
    text = "index,worker,gpu,time,batch_time_norm\n" + "".join(
        f"{i},{w},25,{i},{100.0 if w != 1 or i < 3 else 400.0}\n" for i in range(6) for w in range(4)
    )
    factors = parse_recording(text.splitlines())
    assert factors[1] == [1.0, 1.0, 1.0, 4.0, 4.0, 4.0] and factors[0] == [1.0] * 6
    plan = plan_recording(factors, 2.0, {0: "worker:0", 1: "worker:1"})
    assert plan == [Planned(6.0, "slow", "worker:1", 4.0, 6.0)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "worker,batch_time_norm\n", "worker,batch_time_norm\n0,-3\n"])
def test_a_file_that_is_no_recording_is_told(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_recording(text.splitlines())


def test_the_recording_of_the_examples() -> None:
    factors = parse_recording(EXCERPT.read_text().splitlines())
    assert len(factors) == 10
    assert max(sum(row) / len(row) for row in factors) > 2.0  # it has lasting stragglers
    assert plan_recording(factors, 1.0, {0: "worker:0"})
