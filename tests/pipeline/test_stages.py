"""A batch that is run by several stages has the gradients and the loss of plain PyTorch, with every schedule and any
number of samples; and what stages cannot do ends in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_processes import in_processes
from torch import Tensor, nn
from torch.distributed import pipelining

from everstep.allreduce.replica_group import Unit
from everstep.pipeline.known_schedules import check_schedule, homes, parts_wanted
from everstep.pipeline.parts import cut
from everstep.pipeline.staged_model import StagedModel, parts_of
from everstep.pipeline.stages import StageRunner, WholeRunner

torch.set_num_threads(1)  # other tests fork from this process
pytestmark = pytest.mark.timeout(200)
SAME_BITS = [
    pipelining.ScheduleGPipe,
    pipelining.Schedule1F1B,
    pipelining.ScheduleInterleaved1F1B,
    pipelining.ScheduleInterleavedZeroBubble,
    pipelining.ScheduleZBVZeroBubble,
    pipelining.ScheduleDualPipeV,
]
BATCHES = (12, 10, 7, 3, 1)  # samples; microbatches: 4


class NoPasses:
    """Leaves the gradients where torch puts them."""

    def begin_passes(self) -> None: ...

    def stop_passes(self) -> None: ...

    def end_passes(self) -> None: ...


class Block(nn.Module):
    """Has attention, a residual and a norm, as a GPT's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        return x + self.mlp(x)


def gpt() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 8), *(Block(8) for _ in range(3)), nn.Linear(8, 11))


def mlp(width: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(4, width)]
    for _ in range(3):
        layers += [nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 2))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(11, (samples, 5), generator=torch.Generator().manual_seed(samples))
    return x, x.roll(1, 1)


def rows(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
    return x, x[:, :2].sin()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def staged(
    net: Any, unit: Unit | None, schedule: Any, microbatches: int, loss_fn: Any, split: list[int] | None = None
) -> StagedModel:
    """As ``job.pipeline`` does; ``unit``: None, all in this process."""
    stages, own = (unit.size, unit.index) if unit else (1, 0)
    parts = cut(
        net,
        split,
        parts_wanted(schedule, stages) if unit else 1,
        lambda n: homes(schedule, stages, n) if unit else [0] * n,
        own,
    )
    runner: Any = WholeRunner(parts_of(parts), microbatches)
    if unit:
        check_schedule(schedule, stages, len(parts.children), microbatches)
        where = homes(schedule, stages, len(parts.children))
        runner = StageRunner(parts_of(parts), where, own, schedule, microbatches)
    return StagedModel(parts, runner, microbatches, loss_fn, NoPasses())


def trained(model: StagedModel, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (x, y) in enumerate(batches):
        model.zero_grad()
        torch.manual_seed(number)
        found[f"loss {number}"] = model.step(x, target=y).reshape(())
        found |= {f"{number} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def plain(net: nn.Module, loss_fn: Any, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (x, y) in enumerate(batches):
        net.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        found |= {f"{number} {name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return found


def joined(results: list[Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for result in results:
        assert isinstance(result, dict), result
        found |= result
    return found


@pytest.mark.parametrize("schedule", SAME_BITS, ids=lambda schedule: schedule.__name__)
def test_every_schedule_has_the_numbers_of_plain_pytorch_with_any_number_of_samples(schedule: Any) -> None:
    batches = [tokens(n) for n in BATCHES]
    found = joined(in_processes(2, lambda unit: trained(staged(gpt(), unit, schedule, 4, cross_entropy), batches)))
    alone = trained(staged(gpt(), None, schedule, 4, cross_entropy), batches)
    expected = plain(gpt(), cross_entropy, batches)
    assert found.keys() == alone.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], alone[name], rtol=0, atol=0)
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6)


def test_breadth_first_adds_microbatches_up_in_another_order() -> None:
    batches = [rows(12), rows(5)]
    schedule = pipelining.ScheduleLoopedBFS
    found = joined(in_processes(2, lambda unit: trained(staged(mlp(), unit, schedule, 4, nn.MSELoss()), batches)))
    for name, value in plain(mlp(), nn.MSELoss(), batches).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_three_stages_and_parts_that_a_function_builds() -> None:
    def built() -> list[Callable[[], nn.Module]]:
        torch.manual_seed(3)
        return [lambda: nn.Linear(4, 6), lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), lambda: nn.Linear(6, 2)]

    batches = [rows(8), rows(9)]
    schedule = pipelining.Schedule1F1B
    found = joined(in_processes(3, lambda unit: trained(staged(built(), unit, schedule, 4, nn.MSELoss()), batches)))
    whole = nn.Sequential(*(make() for make in built()))
    for name, value in plain(whole, nn.MSELoss(), batches).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_dropout_draws_the_same_wherever_a_part_is() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 2))

    batches = [rows(12), rows(7)]
    split = [2]
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):

        def body(unit: Unit, schedule: Any = schedule) -> Any:
            return trained(staged(net(), unit, schedule, 4, loosely, split), batches)

        found = joined(in_processes(2, body))
        for name, value in trained(staged(net(), None, schedule, 4, loosely, split), batches).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def loosely(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def test_outputs_are_those_of_the_model_in_every_process() -> None:
    x, _ = rows(9)

    def body(unit: Unit) -> Tensor:
        with torch.no_grad():
            out = staged(mlp(), unit, pipelining.ScheduleGPipe, 3, nn.MSELoss())(x)
        assert isinstance(out, Tensor)
        return out

    with torch.no_grad():
        expected = mlp()(x)
    for out in in_processes(2, body):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_what_a_part_passes_by_has_no_gradient() -> None:
    """Numbers that go along with activations, such as a mask."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), (x > 0).long()

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x) * mask

    def made() -> list[nn.Module]:
        torch.manual_seed(2)
        return [First(), Second()]

    x, _ = rows(8)
    batches = [(x, x.cos())]
    found = joined(
        in_processes(2, lambda unit: trained(staged(made(), unit, pipelining.Schedule1F1B, 4, nn.MSELoss()), batches))
    )
    for name, value in trained(staged(made(), None, pipelining.Schedule1F1B, 4, nn.MSELoss()), batches).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


# ---------------------------------------------------------------- refused


def refused(net: Any, loss_fn: Any, *words: str, processes: int = 2) -> None:
    """One process says all of ``words`` in one line."""

    def body(unit: Unit) -> Any:
        model = staged(net(), unit, pipelining.Schedule1F1B, 4, loss_fn(unit) if processes else loss_fn)
        try:
            model.step(rows(8)[0], target=rows(8)[1])
        except RuntimeError as error:  # the neighbour is gone
            return f"torch: {error}"
        return "trained"

    found = [text for text in in_processes(processes, body) if isinstance(text, str)]
    assert any(all(word in text for word in words) and "\n" not in text for text in found), found


def test_shapes_that_do_not_fit_between_two_stages_are_named_in_all_processes() -> None:
    def body(unit: Unit) -> Any:
        parts = [nn.Linear(4, 6), nn.Linear(5, 2)]
        return trained(staged(parts, unit, pipelining.Schedule1F1B, 4, nn.MSELoss()), [rows(8)])

    for text in in_processes(2, body):
        assert "part 1 (stage 1) cannot be run, part 0 gives it float32 [2, 6]" in text


def test_an_output_without_a_row_for_each_sample() -> None:
    class Total(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    def body(unit: Unit) -> Any:
        return trained(staged([nn.Linear(4, 6), Total(6, 2)], unit, pipelining.Schedule1F1B, 4, loosely), [rows(8)])

    for text in in_processes(2, body):
        assert "part 1 (stage 1) cannot be run" in text and "not one row for each sample" in text


def test_what_a_module_raises_is_the_scripts_own_error() -> None:
    class Failing(nn.Linear):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 2:  # the first run says what shapes are
                raise KeyError("the script's own")
            return super().forward(x)

    def body(unit: Unit) -> str:
        model = staged([nn.Linear(4, 6), Failing(6, 2)], unit, pipelining.Schedule1F1B, 4, nn.MSELoss())
        try:
            model.step(rows(8)[0], target=rows(8)[1])
        except KeyError as error:
            return f"key: {error.args[0]}"
        except RuntimeError:
            return "the neighbour is gone"
        return "trained"

    assert in_processes(2, body)[1] == "key: the script's own"


def test_a_loss_that_is_a_sum_is_refused() -> None:
    refused(mlp, lambda unit: nn.MSELoss(reduction="sum"), "mean over the samples", "microbatches")


def test_a_loss_that_leaves_samples_out_is_refused() -> None:
    def some(output: Tensor, target: Tensor) -> Tensor:
        counts = target[:, 0] > 0.1
        return (output[counts] - target[counts]).square().mean()

    refused(mlp, lambda unit: some, "mean over the samples")


def test_a_penalty_of_weights_in_the_loss_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))

    def penalty(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + weight.square().sum()

    refused(mlp, lambda unit: penalty, "depends on", "a tensor of shape [2]", "weight_decay")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda out, y: (out - y).square(), "returned a tensor of shape"),
        (lambda out, y: 0.5, "returned a float"),
        (lambda out, y: y.mean(), "does not depend on the model's output"),
    ],
    ids=["matrix", "float", "constant"],
)
def test_what_is_no_loss_is_refused(given: Any, words: str) -> None:
    refused(mlp, lambda unit: given, words)
