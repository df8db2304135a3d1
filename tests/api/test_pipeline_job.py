"""``job.pipeline`` in a job of one process: the numbers of plain PyTorch, and what is refused before any process is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from everstep.api.embedded import EmbeddedRuntime
from everstep.api.job import Job
from everstep.api.pipeline_trainer import PipelineTrainer
from everstep.config.load import load_spec
from everstep.data.loader import Loader
from everstep.errors import ConfigError, ScriptError

Make = Callable[..., Any]
ROWS = 45


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    jobs: list[Job] = []

    def made(mode: str = "pipeline") -> Any:
        given = {"mode": mode, "run_dir": str(tmp_path / f"run{len(jobs)}")}
        jobs.append(Job(EmbeddedRuntime.alone(given, None)))
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def data() -> dict[str, Any]:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    return {"x": x.numpy(), "y": x[:, :2].sin().numpy()}


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def staged(job: Any, **changed: Any) -> Any:
    given = {"schedule": pipelining.Schedule1F1B, "microbatches": 4, "loss_fn": nn.MSELoss(), **changed}
    return job.pipeline(given.pop("model", None) or net(), **given)


def train(job: Any, model: Any, step: Callable[[Any, Any], Any], clip: Callable[[Any], Any], every: int = 1) -> Any:
    opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    norms = []
    for batch in job.steps(job.loader(data(), 12, epochs=2)):
        step(model, batch)
        if job.step % every == every - 1:
            norms.append(float(clip(model)))
            opt.step()
            opt.zero_grad()
    return {**job.state_dict()["models"][0], "norms": torch.tensor(norms)}


@pytest.mark.parametrize("every", [1, 3], ids=["each-step", "accumulated"])
def test_the_numbers_of_plain_pytorch(make: Make, every: int) -> None:
    """Batches of 12 and 9 samples in 4 microbatches; gradients are accumulated over steps, too."""
    job = make()
    found = train(
        job, staged(job), lambda model, b: model.step(b["x"], target=b["y"]), lambda _: job.clip_grad_norm_(0.1), every
    )
    other = make("allreduce")

    def plainly(model: Any, b: Any) -> None:
        nn.functional.mse_loss(model(b["x"]), b["y"]).backward()

    def clip(model: Any) -> Any:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    expected = train(other, other.replicate(net()), plainly, clip, every)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_one_microbatch_is_bit_for_bit_plain_pytorch(make: Make) -> None:
    job = make()
    found = train(
        job,
        staged(job, microbatches=1, schedule=pipelining.ScheduleGPipe),
        lambda model, b: model.step(b["x"], target=b["y"]),
        lambda _: job.clip_grad_norm_(0.1),
    )
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = Loader(data(), 12, epochs=2, seed=0)
    for epoch in range(2):
        for lo in range(0, ROWS, 12):
            batch = loader.read(epoch, lo, min(ROWS, lo + 12))
            nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_saved_and_loaded(make: Make) -> None:
    first, second = make(), make()
    model = staged(first)
    train(first, model, lambda m, b: m.step(b["x"], target=b["y"]), lambda _: first.clip_grad_norm_(1.0))
    state = first.state_dict()
    other = staged(second)
    second.optimizer(torch.optim.AdamW(other.parameters(), lr=0.01))
    second.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), other(torch.ones(2, 4)))


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_job_of_another_mode(make: Make, mode: str) -> None:
    with pytest.raises(ScriptError, match=f"job.pipeline in a job of mode {mode}: everstep run --mode pipeline"):
        staged(make(mode))


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda job: job.replicate(net()), "give the model to job.pipeline"),
        (lambda job: job.sparse(net()), "no tables on the ps"),
        (lambda job: job.device_mesh, "is not sharded"),
        (lambda job: [staged(job), staged(job)], "job.pipeline twice"),
        (lambda job: staged(job, loss_fn=None), "loss_fn=None"),
        (lambda job: staged(job, schedule="1F1B"), "not a schedule that everstep knows"),
        (lambda job: staged(job, microbatches=0), "microbatches=0"),
        (lambda job: staged(job).step(torch.ones(2, 4), target=torch.ones(2, 2)), "outside of job.steps()"),
        (lambda job: staged(job)(torch.ones(2, 4)), "with gradients"),
        (lambda job: [staged(job), job.clip_grad_norm_(1.0)], "before job.steps()"),
        (lambda job: job.track(scaler=torch.amp.GradScaler("cpu")), "a GradScaler"),
        (lambda job: next(iter(job.steps(job.loader(data(), 12)))), "job.pipeline(...) before job.steps()"),
    ],
)
def test_what_is_no_pipeline_is_refused_in_one_line(make: Make, do: Any, words: str) -> None:
    with pytest.raises(ScriptError) as refused:
        do(make())
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda job, model, b: model.step(b["x"], target=b["y"]), "model.step() twice"),
        (lambda job, model, b: sum(p.sum() for p in model.parameters()).backward(), "backward() outside of model.step"),
        (lambda job, model, b: job.reduce_gradients(), "gradients come from model.step() only"),
    ],
)
def test_what_does_not_belong_into_an_iteration(make: Make, do: Any, words: str) -> None:
    job = make()
    model = staged(job)
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(steps := iter(job.steps(job.loader(data(), 12))))
    model.step(batch["x"], target=batch["y"])
    with pytest.raises(ScriptError) as refused:
        do(job, model, batch)
    assert words in str(refused.value)
    steps.close()


class TwoStages:
    """What a trainer sees of a worker with two processes."""

    index, size, leads = 0, 2, True


def test_what_looks_at_all_parameters_is_refused_in_several_stages(make: Make, monkeypatch: Any) -> None:
    class Lookahead(torch.optim.SGD):
        pass

    job = make()
    trainer: PipelineTrainer = job._trainer
    model = net()
    monkeypatch.setattr(trainer, "_unit", TwoStages())
    with pytest.raises(ScriptError, match="everstep does not know whether it looks at all parameters"):
        job.optimizer(Lookahead(model.parameters(), lr=0.1))
    with pytest.raises(ScriptError, match="that holds tensors, in a job of several stages"):
        job.track(average=torch.optim.swa_utils.AveragedModel(model))
    with pytest.raises(ScriptError, match=r"load the parts before job\.pipeline"):
        job.load_state_dict({"models": []})
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stages": 2}, "stages = 2 (--stages): needs mode: pipeline"),
        ({"mode": "allreduce", "stages": 2}, "mode allreduce does not cut a model into stages"),
        ({"mode": "pipeline", "ps": 1}, "a model in stages has no tables on the ps"),
        ({"mode": "pipeline", "processes_per_worker": 2}, "is not sharded"),
        ({"mode": "pipeline", "logical_workers": 2}, "a logical worker has the whole model"),
        ({"mode": "pipeline", "consistency": "sync"}, "mode pipeline is synchronous by itself"),
        ({"mode": "pipeline", "stages": 0}, "stages"),
    ],
)
def test_settings_that_do_not_go_with_stages(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(None, settings, {})
    assert words in str(refused.value)


def test_stages_are_on_the_cpu(make: Make) -> None:
    assert make().device == torch.device("cpu")


def test_a_worker_of_the_mode_has_a_process_for_each_stage() -> None:
    spec, _ = load_spec(None, {"mode": "pipeline", "stages": 3}, {})
    assert (spec.worker_processes, spec.ps, spec.grouped) == (3, 0, True)
