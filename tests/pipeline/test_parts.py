"""How a model is cut, how a batch is cut, and which models and schedules are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from everstep.errors import ScriptError
from everstep.pipeline.known_schedules import check_schedule, homes, kind_of, parts_wanted
from everstep.pipeline.microbatches import BatchCut, samples_of
from everstep.pipeline.parts import ModelParts, cut


def in_parts(model: Any, count: int = 2, split: list[int] | None = None, own: int = 0) -> ModelParts:
    return cut(model, split, count, lambda n: [part % count for part in range(n)], own)


def names(parts: ModelParts) -> list[list[str]]:
    return [[name for _, name, _ in children] for children in parts.children]


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def test_a_sequential_is_cut_evenly_by_parameters_or_where_the_script_says() -> None:
    net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.Linear(50, 2))
    assert names(in_parts(net)) == [["0", "1", "2", "3"], []]
    assert names(in_parts(net, own=1)) == [[], ["4", "5"]]
    assert names(in_parts(net, split=[1], own=1)) == [[], ["1", "2", "3", "4", "5"]]
    assert in_parts(net).names == [name for name, _ in net.named_parameters()]


def test_each_of_many_parts_has_parameters() -> None:
    net = nn.Sequential(nn.Linear(1000, 10), nn.ReLU(), nn.Linear(10, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU())
    parts = in_parts(net, 3)
    assert len(parts.children) == 3
    assert [len(in_parts(net, 3, own=own).children[own]) for own in range(3)] == [2, 2, 2]


def test_parts_of_others_are_built_and_dropped() -> None:
    built: list[int] = []

    def make(number: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            built.append(number)
            return nn.Linear(3, 3)

        return build

    parts = in_parts([make(0), make(1), make(2)], 3, own=1)
    assert built == [0, 1, 2] and names(parts) == [[], ["1"], []]
    assert parts.names == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def shared() -> nn.Sequential:
    net = linears(3, 3, 3)
    net[1].weight = net[0].weight
    return net


def twice() -> nn.Sequential:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    ("model", "split", "words"),
    [
        (lambda: nn.Linear(3, 3), None, "not Linear"),
        (lambda: [], None, "not list"),
        (lambda: [nn.Linear(1, 1), 5], None, "part 1 is a int"),
        (lambda: linears(3, 3), None, "cannot be cut into 2 parts"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), None, "1 modules with parameters cannot be cut into 2"),
        (lambda: linears(3, 3, 3), [0], "split=[0]"),
        (lambda: linears(3, 3, 3), [2], "split=[2]"),
        (lambda: [nn.Linear(3, 3)], [1], "cut already"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [1], "part 1 (modules 1) has no parameters"),
        (lambda: [nn.Linear(3, 3), nn.ReLU()], None, "part 1 (modules 1) has no parameters"),
        (shared, [1], "'1.weight' of part 1 is one of part 0 ('0.weight') too"),
        (twice, [1], "'2.weight' of part 1 is one of part 0 ('0.weight') too"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1], "'1' is a BatchNorm1d"),
        (lambda: nn.Sequential(nn.Embedding(3, 3, max_norm=1.0), nn.Linear(3, 3)), [1], "max_norm of '0'"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)), [1], "'1.weight' has no shape yet"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), [1], "is on meta"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_in_one_line(model: Any, split: list[int] | None, words: str) -> None:
    with pytest.raises(ScriptError) as refused:
        in_parts(model(), split=split)
    assert words in str(refused.value) and "\n" not in str(refused.value)


# ---------------------------------------------------------------- schedules


def test_where_parts_live() -> None:
    assert homes(pipelining.Schedule1F1B, 3, 3) == [0, 1, 2]
    assert homes(pipelining.ScheduleInterleaved1F1B, 2, 4) == [0, 1, 0, 1]
    assert homes(pipelining.ScheduleZBVZeroBubble, 3, 6) == [0, 1, 2, 2, 1, 0]
    assert parts_wanted(pipelining.ScheduleGPipe, 4) == 4
    assert parts_wanted(pipelining.ScheduleInterleaved1F1B, 4) == 8


@pytest.mark.parametrize("schedule", ["Schedule1F1B", pipelining.PipelineStage, 5, None])
def test_a_schedule_that_nobody_knows(schedule: Any) -> None:
    with pytest.raises(ScriptError, match="not a schedule that everstep knows"):
        kind_of(schedule)


@pytest.mark.parametrize(
    ("schedule", "stages", "parts", "microbatches", "words"),
    [
        (pipelining.Schedule1F1B, 3, 2, 4, "run with --stages 2"),
        (pipelining.ScheduleGPipe, 1, 2, 4, "as many parts"),
        (pipelining.Schedule1F1B, 4, 4, 3, "needs at least as many as there are stages (4)"),
        (pipelining.ScheduleInterleaved1F1B, 2, 3, 4, "a multiple of 2 parts"),
        (pipelining.ScheduleInterleaved1F1B, 2, 4, 5, "take 4 or 6"),
        (pipelining.ScheduleInterleavedZeroBubble, 4, 8, 11, "do not divide"),
        (pipelining.ScheduleZBVZeroBubble, 2, 6, 4, "in 4 parts"),
        (pipelining.ScheduleGPipe, 2, 2, 0, "microbatches=0"),
        (pipelining.ScheduleGPipe, 2, 2, True, "microbatches=True"),
    ],
)
def test_numbers_that_do_not_fit_a_schedule(
    schedule: Any, stages: int, parts: int, microbatches: int, words: str
) -> None:
    with pytest.raises(ScriptError) as refused:
        check_schedule(schedule, stages, parts, microbatches)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_gpipe_takes_fewer_microbatches_than_stages() -> None:
    check_schedule(pipelining.ScheduleGPipe, 4, 4, 2)


# ---------------------------------------------------------------- microbatches


@pytest.mark.parametrize("samples", range(1, 20))
@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
def test_each_sample_counts_in_one_microbatch(samples: int, microbatches: int) -> None:
    made = BatchCut.of(samples, microbatches)
    batch = torch.arange(samples)
    filled = made.filled(batch)
    assert len(filled) == microbatches * made.size
    counted = []
    for number in range(microbatches):
        rows = filled[number * made.size : (number + 1) * made.size][: made.counts[number]]
        assert torch.equal(rows, made.target(batch, number))
        counted += rows.tolist()
    assert counted == list(range(samples))
    assert sum(made.weight(n) for n in range(microbatches)) == pytest.approx(1.0)


def test_targets_may_be_nested_and_rows_are_counted() -> None:
    made = BatchCut.of(4, 2)
    target = {"a": torch.arange(4), "b": (torch.arange(8).reshape(4, 2), 3)}
    assert made.target(target, 1)["a"].tolist() == [2, 3]
    assert made.target(target, 1)["b"][0].tolist() == [[4, 5], [6, 7]]
    assert samples_of((torch.ones(4, 2),), target) == 4


@pytest.mark.parametrize(
    ("inputs", "target"),
    [
        ((), torch.ones(3)),
        ((5,), torch.ones(3)),
        ((torch.ones(()),), torch.ones(3)),
        ((torch.ones(3),), torch.ones(4)),
        ((torch.ones(0, 2),), torch.ones(0)),
    ],
)
def test_what_is_no_batch(inputs: Any, target: Any) -> None:
    with pytest.raises(ScriptError, match=r"model\.step"):
        samples_of(inputs, target)
