"""Mode allreduce in one process: ``es.join(mode="allreduce")``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es
from everstep.api import job as api_job
from everstep.api.embedded import EmbeddedRuntime
from everstep.api.job import Job, pass_too_large
from everstep.errors import ScriptError
from everstep.monitor.audit import audit

N, BATCH = 96, 8


def data() -> dict[str, Any]:
    x = np.random.default_rng(5).normal(size=(N, 6)).astype(np.float32)
    return {"x": x, "y": (x.sum(1, keepdims=True) > 0).astype(np.float32)}


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    one = Job(EmbeddedRuntime.alone({"mode": "allreduce", "run_dir": str(tmp_path / "run")}, None))
    yield one
    one.close()


def test_its_device_is_the_cpu_or_its_turn_of_the_gpus(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.device == torch.device("cpu") or torch.cuda.is_available()
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("EVERSTEP_LOCAL_RANK", "6")
    assert job.device == torch.device("cuda", 2)
    assert current == [torch.device("cuda", 2)]


def test_a_script_alone_computes_what_plain_pytorch_computes_and_its_audit_is_exact(job: Any, tmp_path: Path) -> None:
    model = job.replicate(net())
    opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)
    job.track(scheduler=scheduler)
    loader = job.loader(data(), BATCH, epochs=2)
    for batch in job.steps(loader):
        opt.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        opt.step()
        scheduler.step()
        job.report(loss=loss)
    assert job.step == 2 * N // BATCH
    digest = job.digest()
    with job.eval(), torch.no_grad():
        model(torch.randn(4, 6))
    assert job.digest() == digest

    plain = net()
    inner = torch.optim.Adam(plain.parameters(), lr=0.01)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(inner, 5, 0.5)
    for epoch in range(2):
        for lo in range(0, N, BATCH):
            inner.zero_grad()
            loss_of(plain, loader.read(epoch, lo, lo + BATCH)).backward()
            inner.step()
            plain_scheduler.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name

    job.close()
    report = audit(tmp_path / "run")
    assert report.ok, report


def test_a_batch_that_does_not_fit_is_computed_in_passes_that_do(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(6, 1)

    model = job.replicate(linear())
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    sizes = []
    loader = job.loader(data(), BATCH, largest_batch=3)
    for batch in job.steps(loader):
        sizes.append(len(batch["y"]))
        opt.zero_grad()
        loss_of(model, batch).backward()
        opt.step()
        assert job.readings["memory_batch"] == 3.0
    assert sizes == [2, 3, 3] * (N // BATCH)
    plain = linear()
    inner = torch.optim.SGD(plain.parameters(), lr=0.5)
    for lo in range(0, N, BATCH):
        inner.zero_grad()
        loss_of(plain, loader.read(0, lo, lo + BATCH)).backward()
        inner.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])

    monkeypatch.setattr(api_job, "_job", job)
    cannot = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried")
    for error, batch_of in ((cannot, BATCH), (torch.OutOfMemoryError("CUDA out of memory."), 2), (KeyError("x"), 2)):
        with pytest.raises(type(error)):
            for _ in job.steps(job.loader(data(), BATCH, name=type(error).__name__)):
                job._engine.loader_batch = batch_of  # as if a plan had made the pass larger
                raise error
        assert pass_too_large(error) == ((0, False) if isinstance(error, KeyError) else (BATCH, batch_of < BATCH))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Job, {}, r"largest_batch=3 is below batch_size=8: in mode ps \(async\)"),
        (Job, {"mode": "allreduce", "logical_workers": 2}, "largest_batch=3 is below batch_size=8: a logical"),
    ],
)
def test_where_a_batch_cannot_be_cut_it_has_to_fit(
    tmp_path: Path, kind: type[Job], options: dict[str, Any], words: str
) -> None:
    job = kind(EmbeddedRuntime.alone({"run_dir": str(tmp_path / "run"), **options}, None))
    model = job.replicate(nn.Linear(6, 1))
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(ScriptError, match=words):
        next(iter(job.steps(job.loader(data(), BATCH, largest_batch=3))))
    job.close()


def test_state_dict_round_trip(job: Any, tmp_path: Path) -> None:
    def script(of: Any, state: Any = None) -> tuple[Any, Any]:
        model = of.replicate(net())
        opt = of.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        if state is not None:
            of.load_state_dict(state)
        for batch in of.steps(of.loader(data(), BATCH)):
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
        return of.state_dict(), opt

    first, _ = script(job)
    torch.save(first, tmp_path / "state.pt")
    job.close()
    again = Job(EmbeddedRuntime.alone({"mode": "allreduce", "run_dir": str(tmp_path / "again")}, None))
    try:
        _, opt = script(again, torch.load(tmp_path / "state.pt", weights_only=True))
        assert {float(s["step"]) for s in opt.state.values()} == {2.0 * N / BATCH}
        with pytest.raises(ScriptError, match=r"only before job.steps"):
            again.load_state_dict(first)
    finally:
        again.close()


def test_mistakes_are_one_clear_error(job: Any) -> None:
    with pytest.raises(ScriptError, match=r"job.sparse in mode allreduce"):
        job.sparse(net())
    with pytest.raises(ScriptError, match=r"init_process_group\(\) was called"):
        torch.distributed.init_process_group("gloo")
    with pytest.raises(ScriptError, match="LBFGS runs backward several times"):
        job.optimizer(torch.optim.LBFGS(net().parameters()))
    with pytest.raises(ScriptError, match="no state_dict"):
        job.track(number=3)
    with pytest.raises(ScriptError, match="got a DataParallel"):
        job.replicate(nn.DataParallel(net()))
    with pytest.raises(ScriptError, match=r"'0.weight' has no shape yet"):
        job.replicate(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ScriptError, match=r"logical_workers='2'"):
        es.join(mode="allreduce", logical_workers="2")  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match=r"mode='sync'"):
        es.join(mode="sync")


def test_the_ban_on_process_groups_ends_with_the_job(job: Any) -> None:
    job.close()
    assert torch.distributed.init_process_group.__name__ != "refuse"
