"""The loop: leaving it early, coming back, bad gradients, evaluation, saving, and the mistakes of scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es
from everstep.api.job import Job
from everstep.brain import events
from everstep.errors import DataError, NonFiniteGradientError, ScriptError
from everstep.monitor.audit import audit

Join = Callable[..., Job]
N = 300


def counting(job: Job) -> es.nn.Embedding:
    """A table whose row r gains exactly 1.0 for every sample r that is trained on."""
    model: es.nn.Embedding = job.sparse(es.nn.Embedding("count", 1, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
    return model


def counts(model: nn.Module) -> dict[int, float]:
    state = model.state_dict()
    return dict(zip(state["keys"].tolist(), state["weight"].flatten().tolist(), strict=True))


def audited(job: Job) -> None:
    job.close()
    report = audit(Path(job.run_dir))
    assert report.ok, report


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loop_that_was_left_is_not_begun_again(join: Join, prefetch: int) -> None:
    """Leaving the loop gives the rest back; the batch that was stepped counts. Plain PyTorch begins a new epoch."""
    job = join(prefetch=prefetch)
    model = counting(job)
    dense = job.replicate(nn.Linear(1, 1))
    opt = job.optimizer(torch.optim.SGD(dense.parameters(), lr=0.0))
    loader = job.loader({"id": np.arange(N)}, batch_size=7)
    taken = 0
    for batch in job.steps(loader):
        opt.zero_grad()
        (dense(torch.ones(1)).sum() - model(batch["id"]).sum()).backward()
        opt.step()
        taken += len(batch["id"])
        if taken > 100:
            break
    assert sum(counts(model).values()) == taken
    with pytest.raises(ScriptError, match="'train', of which this script left its last loop before"):
        next(iter(job.steps(loader)))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_every_loop_is_another_pass(join: Join, prefetch: int) -> None:
    job = join(prefetch=prefetch)
    model = counting(job)
    loader = job.loader({"id": np.arange(N)}, batch_size=64)
    for epoch in range(1, 4):
        for batch in job.steps(loader):
            (-model(batch["id"]).sum()).backward()
        assert counts(model) == {i: float(epoch) for i in range(N)}
    audited(job)


def test_exception_in_the_loop_gives_back(join: Join) -> None:
    job = join()
    model = counting(job)
    with pytest.raises(ZeroDivisionError):
        for batch in job.steps(job.loader({"id": np.arange(N)}, batch_size=64)):
            (-model(batch["id"]).sum()).backward()
            raise ZeroDivisionError
    job.close()
    assert not job._engine.held()
    assert job._engine.samples == 0


def test_nonfinite_raises_and_applies_nothing(join: Join) -> None:
    job = join()
    model = counting(job)
    seen = 0
    with pytest.raises(
        NonFiniteGradientError, match=r"gradient of table 'count' has NaN or Inf in samples 50\.\.60 of"
    ):
        for batch in job.steps(job.loader({"id": np.arange(100)}, batch_size=10, shuffle=False)):
            bad = seen == 50
            (-model(batch["id"]).sum() * (float("nan") if bad else 1.0)).backward()
            seen += len(batch["id"])
    with pytest.raises(NonFiniteGradientError):
        job._tables.client.everywhere(lambda i, s: None)  # nothing more is asked
        job.steps(job.loader({"id": np.arange(100)}, batch_size=10)).__next__()  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["table", "dense"])
def test_nonfinite_skips_and_says_so(join: Join, where: str) -> None:
    job = join(nonfinite="skip")
    model = counting(job)
    dense = job.replicate(nn.Linear(1, 1))
    opt = job.optimizer(torch.optim.SGD(dense.parameters(), lr=0.1))
    for i, batch in enumerate(job.steps(job.loader({"id": np.arange(100)}, batch_size=10, shuffle=False))):
        opt.zero_grad()
        loss = -model(batch["id"]).sum() * (float("inf") if where == "table" and i == 4 else 1.0)
        loss = loss + (dense(torch.ones(1)) * (float("nan") if where == "dense" and i == 4 else 1.0)).sum()
        loss.backward()
        opt.step()
    assert {k for k, v in counts(model).items() if v == 1.0} == set(range(100)) - set(range(40, 50))
    assert torch.isfinite(dense.weight).all()
    assert job.readings["skipped"] == 1
    job.close()
    report = audit(Path(job.run_dir))
    assert report.ok and "10" in str(report)


def test_ids_computed_in_the_model_are_pulled_on_demand(join: Join, capsys: pytest.CaptureFixture[str]) -> None:
    job = join(prefetch=1)
    model = counting(job)
    for batch in job.steps(job.loader({"id": np.arange(N)}, batch_size=32)):
        (-model(batch["id"] % 10).sum()).backward()
    assert counts(model) == dict.fromkeys(range(10), 30.0)
    assert capsys.readouterr().out.count("pulled ahead") == 1


def test_ids_changed_in_place_after_the_pull(join: Join) -> None:
    """The rows were pulled for the old ids: the change is seen, and the right ones are pulled."""
    job = join(prefetch=1)
    model = counting(job)
    for batch in job.steps(job.loader({"id": np.arange(N)}, batch_size=32)):
        batch["id"] %= 10
        (-model(batch["id"]).sum()).backward()
    assert {k: v for k, v in counts(model).items() if v} == dict.fromkeys(range(10), 30.0)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_lease_taken_away_in_the_middle(join: Join, prefetch: int) -> None:
    """The master gives the shard away (to us again, under a new lease): what was pushed counts once, the rest is
    done by the new owner from where the partitions are."""
    job = join(prefetch=prefetch)
    model = counting(job)
    runtime, engine = job._runtime, job._engine
    taken = 0
    for i, batch in enumerate(job.steps(job.loader({"id": np.arange(2000)}, batch_size=4, epochs=2))):
        (-model(batch["id"]).sum()).backward()
        if i % 37 == 5:
            lease = engine.tables.current.work.lease  # type: ignore[union-attr]
            runtime.master.tell(events.LeaseExpired(lease.shard, lease.no, 1.0))  # type: ignore[attr-defined]
            engine.revoked(lease.no)
            taken += 1
    assert taken > 10
    assert counts(model) == dict.fromkeys(range(2000), 2.0)
    audited(job)


def test_eval_reads_only(join: Join) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = es.nn.EmbeddingBag("ids", 4)
            self.drop = nn.Dropout(0.5)
            self.out = nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.drop(self.emb(ids)))
            return y

    job = join()
    model = job.replicate(job.sparse(Net()))
    opt = job.optimizer(torch.optim.Adam(model.parameters()))
    loader = job.loader({"id": np.arange(N)[:, None]}, batch_size=50, split="80/20")
    for i, batch in enumerate(job.steps(loader)):
        opt.zero_grad()
        model(batch["id"]).sum().backward()
        opt.step()
        if i == 2:  # in the middle of the loop
            with job.eval(model):
                assert not model.training
                first = [model(b["id"]) for b in loader.eval_batches()]
            assert model.training
    with job.eval(model):
        outputs = [model(b["id"]) for b in loader.eval_batches()]
        again = [model(b["id"]) for b in loader.eval_batches()]
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(outputs, first, strict=True))  # the dense part had moved on
    assert len(model.state_dict()["emb.keys"]) == loader.samples  # none of the test rows was created


def test_state_dict_round_trip(join: Join) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.EmbeddingBag(50, 3, mode="sum", device="meta"), es.nn.Embedding("ids", 3)
            self.out = nn.Linear(3, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.a(ids[:, None]) + self.b(ids))
            return y

    def build(job: Job) -> nn.Module:
        model: nn.Module = job.replicate(job.sparse(Net()))
        opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        model.opt = opt  # type: ignore[assignment]
        return model

    job = join(seed=1)
    model = build(job)
    for batch in job.steps(job.loader({"id": np.arange(50)}, batch_size=5)):
        model.opt.zero_grad()  # type: ignore[operator,union-attr]
        model(batch["id"]).sum().backward()
        model.opt.step()  # type: ignore[operator,union-attr]
    state = job.state_dict()
    ids = torch.arange(50)
    with job.eval(model):
        expected = model(ids)
    job = join(seed=2)
    model = build(job)
    with pytest.raises(
        ScriptError, match=r"job.load_state_dict: the saved state has momenta .*, which the ps can not be"
    ):
        job.load_state_dict(state)
    with pytest.raises(
        ScriptError, match=r"opt.load_state_dict: the saved state has momenta .*: go on by everstep resume"
    ):
        model.opt.load_state_dict(state["optimizers"][0])  # type: ignore[operator,union-attr]
    job.load_state_dict({"models": state["models"]})
    with job.eval(model):
        torch.testing.assert_close(model(ids), expected)


def test_mistakes(join: Join) -> None:
    job = join()
    with pytest.raises(ScriptError, match=r"Rprop has no twin on the ps: use torch\.optim\.Adadelta, .* or SGD for"):
        job.optimizer(torch.optim.Rprop(nn.Linear(1, 1).parameters()))
    tables = job.sparse(nn.Embedding(3, 3), optimizer=es.SGD(0.1))
    with pytest.raises(ScriptError, match=r"SGD\(maximize=True\) holds the weight of table 'embedding', whose own"):
        job.optimizer(torch.optim.SGD(tables.parameters(), maximize=True))
    with pytest.raises(ScriptError, match=r"job\.optimizer needs a torch\.optim"):
        job.optimizer(es.Adam())  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match="float64"):
        job.optimizer(torch.optim.Adam(nn.Linear(1, 1, dtype=torch.float64).parameters()))
    with pytest.raises(ScriptError, match=r"es\.SGD"):
        job.sparse(nn.Embedding(3, 3), optimizer=torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match=r"job\.report\(loss=\.\.\.\): not one number"):
        job.report(loss=torch.ones(3))
    with pytest.raises(ScriptError, match=r"job\.loader"):
        next(iter(job.steps([1, 2])))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch_size"):
        job.loader({"id": np.arange(3)}, batch_size=0)
    alone = nn.Linear(1, 1)
    opt = job.optimizer(torch.optim.SGD(alone.parameters(), lr=0.1))
    opt.step()  # nothing to apply, as in plain PyTorch
    alone(torch.ones(1)).sum().backward()
    with pytest.raises(ScriptError, match="outside of"):
        opt.step()


def test_a_different_dataset_under_the_same_name(join: Join) -> None:
    job = join()
    model = counting(job)
    for batch in job.steps(job.loader({"id": np.arange(N)}, batch_size=64)):
        model(batch["id"]).sum().backward()
    with pytest.raises(DataError, match="train"):
        next(iter(job.steps(job.loader({"id": np.arange(N + 1)}, batch_size=64))))


def test_backward_of_an_old_batch(join: Join) -> None:
    job = join()
    model = counting(job)
    old = None
    with pytest.raises(ScriptError, match="of a batch that is over"):
        for batch in job.steps(job.loader({"id": np.arange(N)}, batch_size=64)):
            if old is not None:
                old.backward()
            old = model(batch["id"]).sum()
            model(batch["id"]).sum().backward()


def run_script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-X", "fork", str(script)], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )


HEAD = """
import numpy as np, torch, everstep as es
job = es.join(name="small")
model = job.sparse(es.nn.Embedding("ids", 2))
loader = job.loader({"id": np.arange(100)}, batch_size=10)
"""


@pytest.mark.processes
def test_a_script_alone(tmp_path: Path) -> None:
    done = run_script(
        tmp_path, HEAD + "for b in job.steps(loader):\n    model(b['id']).sum().backward()\n    job.report(loss=1.5)\n"
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["samples_done"] == 100 and summary["values"] == {"loss": 1.5} and summary["exit_code"] == 0
    assert audit(run_dir).ok


@pytest.mark.processes
def test_a_script_that_takes_no_batch(tmp_path: Path) -> None:
    done = run_script(tmp_path, HEAD)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "without taking a batch from job.steps" in done.stderr


@pytest.mark.processes
def test_a_script_that_raises(tmp_path: Path) -> None:
    done = run_script(tmp_path, HEAD + "for b in job.steps(loader):\n    raise KeyError('x')\n")
    assert done.returncode == 1 and "KeyError: 'x'" in done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit_code"] == 1 and "KeyError" in summary["error"]


def test_what_was_accumulated_by_a_worker_that_is_asked_to_leave_is_done_again(join: Join) -> None:
    """It is not left out: the script might still have stepped."""
    job = join(prefetch=0)
    model = counting(job)
    dense = job.replicate(nn.Linear(1, 1))
    opt = job.optimizer(torch.optim.SGD(dense.parameters(), lr=0.0))
    engine = job._trainer.engine  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        for number, batch in enumerate(job.steps(job.loader({"id": np.arange(N)}, batch_size=10))):
            (dense(torch.ones(1)).sum() - model(batch["id"]).sum()).backward()
            if number == 1:
                opt.step()
                opt.zero_grad()
            if number == 4:
                assert engine.leave_soon(143)
    job.close()
    report = audit(Path(job.run_dir))
    assert not report.counts.get("left_out_samples"), report.counts
