"""Readings of the model: what a script computes stays as it is, and what is told of it is right."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.api import module_spans
from everstep.api.graph_sampler import GraphSampler
from everstep.api.job import Job
from everstep.api.module_spans import ModuleTree, StepRecorder, compiled_words
from everstep.cli.main import cli
from everstep.model.graph_readings import DEPTH_MAX, MODULES_MAX, GraphReading, ModuleReading

Join = Callable[..., Job]


class Twice(nn.Module):
    """Calls one layer twice, has another at two places, writes in place, and has hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 6)
        self.layer = nn.Linear(6, 6)
        self.again = self.layer
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 1))
        self.unused = nn.Linear(3, 3)
        self.seen: list[float] = []
        self.trained: dict[str, Tensor] = {}
        self.block[0].register_forward_hook(lambda m, args, out: out * 1.5)
        self.block[2].register_full_backward_hook(
            lambda m, grads_in, grads_out: self.seen.append(float(grads_out[0].sum()))
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.emb(ids).mean(1))
        x = self.again(torch.relu(x))
        out: Tensor = self.block(x)
        return out.squeeze(1)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process compiled is not this script's."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        monkeypatch.setitem(utils.counters["frames"], "total", 0)


def data(n: int = 320) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    return {"ids": rng.integers(0, 30, (n, 4)), "y": rng.random(n).astype(np.float32)}


def train(job: Job, model: Twice, every: str, epochs: int = 2) -> GraphReading | None:
    sampler = GraphSampler(job._trainer, every)
    model = job.replicate(job.sparse(model))
    opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in sampler.steps(job._trainer.steps(job.loader(data(), batch_size=16, epochs=epochs))):
        opt.zero_grad()
        ((model(batch["ids"]) - batch["y"]) ** 2).mean().backward()
        opt.step()
    model.trained = {name: value.clone() for name, value in model.state_dict().items()}
    return sampler.last()


@pytest.mark.parametrize("every", ["1", "3", "auto"])
def test_the_same_bits_with_and_without(join: Join, every: str) -> None:
    torch.manual_seed(1)
    first = Twice()
    second = copy.deepcopy(first)
    second.seen.clear()
    second.block[2]._backward_hooks.clear()
    second.block[2].register_full_backward_hook(lambda m, i, o: second.seen.append(float(o[0].sum())))
    assert train(join(seed=7), first, "off") is None
    reading = train(join(seed=7), second, every)
    assert reading is not None and reading.steps > 0
    assert first.trained.keys() == second.trained.keys()
    for name, a in first.trained.items():
        assert torch.equal(a, second.trained[name]), name
    assert first.seen == second.seen and len(first.seen) == 40


def test_what_is_told_of_the_modules(join: Join) -> None:
    reading = train(join(seed=7), Twice(), "4", epochs=1)
    assert reading is not None and (reading.every, reading.steps, reading.note) == (4, 5, "")
    by_path = {m.path: m for m in reading.modules}
    assert by_path["Twice.layer"].calls == 2 and "Twice.again" not in by_path  # (one module, under its first name)
    assert by_path["Twice.unused"].calls == 0
    assert by_path["Twice.block.0"].parameters == 42 and by_path["Twice.block.0"].parameter_bytes == 168
    assert by_path["Twice.block.2"].output_bytes == 16 * 4
    whole, block = by_path["Twice"], by_path["Twice.block"]
    assert whole.forward_s > block.forward_s > by_path["Twice.block.0"].forward_s > 0
    assert whole.backward_s > block.backward_s > by_path["Twice.block.0"].backward_s > 0
    parts = [m for m in reading.modules if m.calls]
    assert sum(m.own_s for m in parts) == pytest.approx(whole.forward_s, rel=0.05)
    (lookups,) = reading.lookups
    assert (lookups.table, lookups.ids) == ("emb", 64) and 20 < lookups.unique <= 30
    assert len(lookups.hottest) == 10 and lookups.hottest[0][1] >= lookups.hottest[-1][1] > 1 / 64


class Clock:
    """Is the time in tests of times: it passes in :class:`Takes` alone, so a busy machine changes nothing."""

    ns = 0

    @classmethod
    def passes(cls, seconds: float) -> None:
        cls.ns += round(seconds * 1e9)


class Takes(torch.autograd.Function):
    """Takes so long forward, and so long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        Clock.passes(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Clock.passes(ctx.backward_s)
        return grads[0], None, None


class Slow(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.spans = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Takes.apply(x, *self.spans)
        return out


def recorded(model: nn.Module, step: Callable[[], Any]) -> dict[str, tuple[float, float, int]]:
    """Forward and backward seconds and calls by path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_spans, "time", SimpleNamespace(perf_counter_ns=lambda: Clock.ns))
        recorder = StepRecorder(ModuleTree([model]), lambda: False)
        with recorder:
            step()
    assert recorder.failed == ""
    out: dict[str, tuple[float, float, int]] = {}
    for call in recorder.calls:
        path = recorder.tree.known[call.index].path
        forward_s, backward_s, n = out.get(path, (0.0, 0.0, 0))
        out[path] = forward_s + recorder.forward_s(call), backward_s + recorder.backward_s(call), n + 1
    return out


def test_backward_goes_to_the_module_that_made_it() -> None:
    """Also where branches meet, so that autograd could have run them in another order."""
    left, right = Slow(0.0, 0.06), nn.Sequential(Slow(0.02, 0.0), Slow(0.0, 0.03))

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = left, right

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.left(x) + self.right(x) * 2
            return out

    model, x = Branches(), torch.ones(3, requires_grad=True)
    found = recorded(model, lambda: model(x).sum().backward())
    spans = {
        path: (pytest.approx(forward_s), pytest.approx(backward_s))
        for path, (forward_s, backward_s, _) in found.items()
    }
    assert spans == {
        "Branches": (0.02, 0.09),
        "Branches.left": (0.0, 0.06),
        "Branches.right": (0.02, 0.03),
        "Branches.right.0": (0.02, 0.0),
        "Branches.right.1": (0.0, 0.03),
    }


def test_what_a_checkpoint_computes_again_counts_as_backward() -> None:
    inner = nn.Sequential(Slow(0.03, 0.0), nn.Tanh())

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    model, x = Saved(), torch.ones(2, 4, requires_grad=True)
    forward_s, backward_s, calls = recorded(model, lambda: model(x).sum().backward())["Saved.inner"]
    assert (calls, forward_s, backward_s) == (1, pytest.approx(0.03), pytest.approx(0.03))


def test_a_module_that_raises_is_no_open_call() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Raises(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(ValueError, match="no"):
                self.bad(x)
            out: Tensor = self.good(x)
            return out

    model = Catches()
    found = recorded(model, lambda: model(torch.ones(1, 2)).sum().backward())
    assert found["Catches"][2] == 1 and found["Catches.good"][2] == 1 and found["Catches.bad"][2] == 1


def test_copies_and_files_made_in_a_sampled_step_are_as_ever() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plain, sampled = io.BytesIO(), io.BytesIO()
    torch.save(model, plain)
    recorder = StepRecorder(ModuleTree([model]), lambda: False)
    with recorder:
        model(torch.ones(1, 2))
        torch.save(model, sampled)
        assert not copy.deepcopy(model)._forward_hooks and not model[0]._forward_pre_hooks
    assert plain.getvalue() == sampled.getvalue()
    before = len(recorder.calls)
    model(torch.ones(1, 2))
    assert len(recorder.calls) == before  # the hooks are gone


def test_an_evaluation_is_no_training(join: Join) -> None:
    job = join(seed=7)
    sampler = GraphSampler(job._trainer, "1")
    model = job.replicate(job.sparse(Twice()))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in sampler.steps(job._trainer.steps(job.loader(data(32), batch_size=16))):
        ((model(batch["ids"]) - batch["y"]) ** 2).mean().backward()
        opt.step()
        with job.eval(model):
            model(batch["ids"])
    reading = sampler.last()
    assert reading is not None and reading.modules[0].calls == 1.0


def test_compiled_modules_are_left_alone_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert compiled_words([model]) == ""
    model[1].compile(backend="eager")
    assert compiled_words([model]) == "modules are not measured: 1 is compiled by torch.compile"


def test_a_large_model_is_cut_at_its_lower_levels() -> None:
    wide = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(150)))
    tree = ModuleTree([wide])
    paths = {known.path for known in tree.known}
    assert len(tree.known) == MODULES_MAX and tree.left_out == 1 + 150 + 300 - MODULES_MAX
    assert {f"Sequential.{i}" for i in range(150)} <= paths
    deep: nn.Module = nn.Identity()
    for _ in range(20):
        deep = nn.Sequential(deep)
    assert len(ModuleTree([deep]).known) == DEPTH_MAX


def test_two_models_of_one_class_have_two_names() -> None:
    assert [k.path for k in ModuleTree([nn.Linear(1, 1), nn.Linear(1, 1)]).known] == ["Linear", "Linear#2"]


def test_auto_samples_less_often_where_a_sample_costs_more(join: Join) -> None:
    sampler = GraphSampler(join(seed=7)._trainer, "auto")
    assert sampler._plan(cost_s=0.004, passed_s=1.004, steps=100) in (199, 200)  # of steps of 10 ms: 0.2 %
    assert sampler._plan(cost_s=0.01, passed_s=1.01, steps=100) in (499, 500)
    assert sampler._plan(cost_s=0.0, passed_s=1.0, steps=1) == 100
    assert sampler._plan(cost_s=9.0, passed_s=9.0, steps=20) == 100_000


def test_a_reading_fits_the_wire(join: Join) -> None:
    reading = train(join(seed=7), Twice(), "2", epochs=1)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(reading), type=GraphReading)
    assert again == reading and isinstance(again.modules[0], ModuleReading)


def test_a_script_alone_leaves_its_readings_behind(join: Join, tmp_path: Path) -> None:
    job = join(seed=7)
    model = job.replicate(job.sparse(Twice()))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in job.steps(job.loader(data(), batch_size=16)):
        opt.zero_grad()
        ((model(batch["ids"]) - batch["y"]) ** 2).mean().backward()
        opt.step()
    job.close()
    shown = CliRunner().invoke(cli, ["graph", str(tmp_path / "run0")]).output
    assert "1 step of 1 worker sampled (one in " in shown  # (the tenth of 20)
    assert "Twice" in shown and "Sequential" in shown and "emb" in shown and "30" in shown
