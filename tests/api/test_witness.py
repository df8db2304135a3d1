"""The witness counts what is trained, agrees with the audit, and finds what the audit cannot see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import everstep as es
from everstep.api.job import Job
from everstep.api.step_builder import StepBuilder
from everstep.errors import ConfigError, ScriptError
from everstep.monitor.audit import audit
from everstep.monitor.report import AuditReport, Verdict
from everstep.monitor.witness import read_counts, witnessed

SAMPLES, BATCH, LOOPS = 48, 8, (1, 2)
DATA = {"row": torch.arange(SAMPLES).numpy(), "x": torch.randn(SAMPLES, 3).numpy()}
Plant = Callable[[int, Any, Any], None]
MODES: dict[str, dict[str, Any]] = {
    "ps": {"mode": "ps"},
    "allreduce": {"mode": "allreduce"},
    "logical": {"mode": "allreduce", "logical_workers": 2},
    "hybrid": {"mode": "allreduce", "ps": 1},
}


def nothing(step: int, net: Any, opt: Any) -> None: ...


def twice(step: int, net: Any, opt: Any) -> None:
    """The gradients of one step count twice."""
    for p in net.witness.parameters() if step == 4 else ():
        p.grad.mul_(2.0)


def lost(step: int, net: Any, opt: Any) -> None:
    """One step reaches nobody."""
    for p in net.witness.parameters() if step == 4 else ():
        p.grad.zero_()


def again(step: int, net: Any, opt: Any) -> None:
    """The last step of the first loop counts as one of the second, too."""
    if step == 4:
        net.witness.witness_steps.grad[1, 0] = -1.0


def train(join: Callable[..., Job], mode: str, plant: Plant = nothing, leave_out: int = 0, every: int = 1) -> Path:
    """A job alone, and the model that it leaves; where both are."""
    job = join(**MODES[mode])
    net: Any = nn.Sequential(nn.Linear(3, 1))
    net.witness = es.testing.Witness(job, SAMPLES, sum(LOOPS), len(LOOPS))
    model: Any = job.replicate(job.sparse(net) if job.spec.ps or job.spec.mode == "ps" else net)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model.witness.parameters()), "lr": 1.0}]
    opt = job.optimizer(torch.optim.SGD(groups, lr=0.1))
    step = 0
    for epochs in LOOPS:
        for batch in job.steps(job.loader(DATA, batch_size=BATCH, epochs=epochs)):
            step = job.step
            counted = model.witness(batch["row"])
            assert float(counted.detach()) == 0.0
            (model[0](batch["x"]).square().mean() + counted).backward()
            if leave_out and step % leave_out == leave_out - 1:
                opt.zero_grad()
            elif step % every == every - 1:
                plant(step, model, opt)
                opt.step()
                opt.zero_grad()
    folder = Path(job.run_dir) / "model"
    folder.mkdir()
    state = {k: v.contiguous() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    save_file({k: v for k, v in state.items() if not k.startswith("witness.witness_rows.")}, folder / "m.safetensors")
    names = {"keys": "keys", "weight": "values"}
    table = {names[k.rpartition(".")[2]]: v for k, v in state.items() if k.startswith("witness.witness_rows.")}
    if table:  # (as the job leaves its tables)
        (folder / "tables").mkdir()
        save_file(table, folder / "tables" / "witness_rows.safetensors")
    job.close()
    return Path(job.run_dir)


def said(run_dir: Path) -> AuditReport:
    return witnessed(run_dir, audit(run_dir))


@pytest.mark.parametrize("mode", MODES)
def test_it_agrees_with_the_audit(join: Callable[..., Job], mode: str) -> None:
    report = said(train(join, mode))
    assert report.verdict is Verdict.EXACT and not report.witness, report.text()
    assert report.counts["witnessed_samples"] == SAMPLES * sum(LOOPS)
    assert "the witness agrees" in report.text()


@pytest.mark.parametrize("mode", ["ps", "allreduce", "hybrid"])
def test_steps_that_the_script_leaves_out_or_accumulates(join: Callable[..., Job], mode: str) -> None:
    left = train(join, mode, leave_out=3)
    assert said(left).verdict is Verdict.EXACT, said(left).text()
    assert said(left).counts["witnessed_samples"] == SAMPLES * sum(LOOPS) * 2 // 3
    accumulated = said(train(join, mode, every=2))
    assert accumulated.verdict is Verdict.EXACT, accumulated.text()
    assert accumulated.counts["witnessed_samples"] == SAMPLES * sum(LOOPS)


@pytest.mark.parametrize("alike", [True, False])
def test_what_a_step_consumed_stays_so_when_its_gradients_are_zeroed(
    join: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """As a worker of a job has it: a step is pushed when the iteration is over, behind ``opt.zero_grad()``. ``alike``:
    the partitions want all batches of a step, else each is a step by itself."""
    monkeypatch.setattr(StepBuilder, "_immediate", False)
    monkeypatch.setattr(StepBuilder, "goes_on", lambda builder, work: alike)
    report = said(train(join, "ps", every=2))
    assert report.verdict is Verdict.EXACT and report.counts["left_out_samples"] == 0, report.text()
    assert report.counts["witnessed_samples"] == SAMPLES * sum(LOOPS)


@pytest.mark.parametrize("plant", [twice, lost, again])
@pytest.mark.parametrize("mode", ["ps", "allreduce", "hybrid"])
def test_what_the_audit_cannot_see_is_found(join: Callable[..., Job], mode: str, plant: Plant) -> None:
    run_dir = train(join, mode, plant)
    assert audit(run_dir).verdict is Verdict.EXACT
    report = said(run_dir)
    assert report.verdict is Verdict.WITNESS and report.exit_code == 8, report.text()
    words = {twice: "more than once", lost: "samples were applied once, and the audit says", again: "steps of epoch 0"}
    assert any(words[plant] in line for line in report.witness), report.witness


def test_a_model_without_a_witness(join: Callable[..., Job], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model with a witness"):
        read_counts(tmp_path)
    with pytest.raises(ScriptError, match="needs tables on the ps"):
        es.testing.Witness(join(mode="allreduce"), 8, 1, dense=False)
    with pytest.raises(ScriptError, match=r"outside of job\.steps"):
        es.testing.Witness(join(mode="allreduce"), 8, 1)(torch.arange(4))
