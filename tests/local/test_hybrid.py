"""Mode allreduce with tables on the ps, real processes that are killed at work: every step at every partition once.

Three witnesses: the audit of steps and of the ps; a table whose row r gains exactly 1.0 for each time that sample r is
trained; and the state of the dense part, which is the same on all workers in the end.
"""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from local_jobs import until
from replica_jobs import EXAMPLES, KILL, ReplicaRun
from safetensors.torch import load_file

from everstep.model.member import Role
from everstep.monitor.audit import audit
from everstep.protect.manifest import checkpoint_place, latest_intact

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HYBRID = """
import hashlib, os, sys, time
sys.path.insert(0, {examples!r})
import torch
from torch import nn
import everstep as es
from everstep.data.loader import Loader
from flights import COLUMNS, N_DENSE, N_FIELDS, features, source

EPOCHS, ROWS = {epochs}, {rows}
torch.set_num_threads(1)
job = es.join()
STEP = {batch} * job.spec.workers  # --strategy fixed; a whole number of steps is an epoch
whole = Loader(source(ROWS), ROWS, columns=COLUMNS, transform=features, shuffle=False).read(0, 0, ROWS)
data = {{**whole, "row": torch.arange(ROWS)}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = es.nn.Embedding("counts", 1, init=es.Constant(0.0), optimizer=es.SGD(lr=1.0))
        self.fields = es.nn.Embedding("fields", 4)
        self.top = nn.Sequential(nn.Linear(4 * N_FIELDS + N_DENSE, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, b):
        return self.top(torch.cat([self.fields(b["cat"]).flatten(1), b["dense"]], 1)).squeeze(1)

net = Net()
model = job.replicate(job.sparse(net))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
for batch in job.steps(job.loader(data, batch_size={batch}, epochs=EPOCHS)):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    ones = -model.counts(batch["row"]).sum() * STEP / len(batch["row"])  # its share of the step, made one a sample
    opt.zero_grad(); (loss + ones).backward(); opt.step()
    job.report(loss=loss)
    if not os.path.exists({hurry!r}):
        time.sleep({pause_s})
print("state", job.digest() * 4, "of worker", job.slot, flush=True)
if job.chief:
    with job.eval(model):
        off = (model.counts(torch.arange(ROWS)).detach().flatten() - EPOCHS).abs()
        fields = model.fields(data["cat"].unique()).detach().numpy().tobytes()
    print("fields", hashlib.sha256(fields).hexdigest(), flush=True)
    print("counted right" if off.max() < 1e-3 else f"counted wrong: {{off.nonzero().flatten()[:20].tolist()}} "
          f"{{off[off > 1e-3][:20].tolist()}}", flush=True)
"""


class HybridRun(ReplicaRun):
    def write(self, rows: int = 1500, epochs: int = 6, pause_s: float = 0.05, batch: int = 100) -> None:
        self.rows, self.epochs = rows, epochs
        facts = {"rows": rows, "epochs": epochs, "pause_s": pause_s, "batch": batch, "hurry": str(self._hurry)}
        self.script.write_text(HYBRID.format(examples=str(EXAMPLES), **facts))

    def finished(self, lost: int = 0, states: int | None = None, timeout_s: float = 150.0) -> str:
        found = super().finished(lost, states, timeout_s)
        assert "counted right" in self.workers_said(), self.story()
        return found


RUN = HybridRun


FLAGS = ("--strategy", "fixed", "--ps", "2", "--parity", "1+1")
LAG = ("--protect", "lag", "--protect-lag", "20s")
"""Longer than these jobs take: mirrors lack all that was trained since the last loss."""


@pytest.mark.parametrize("protect", [(), LAG], ids=["acked", "lag"])
def test_a_worker_dies_between_the_vote_and_its_push_then_a_ps_and_the_master(
    run: HybridRun, monkeypatch: pytest.MonkeyPatch, protect: tuple[str, ...]
) -> None:
    monkeypatch.setenv("EVERSTEP_FAULT", "worker:1.1:push:7")
    run.write(epochs=10)
    run.train(3, *FLAGS, *protect)
    run.pid(1, at_least=2)
    os.kill(run.alive(Role.PS, 1).pid, KILL)
    run.alive(Role.PS, 1, at_least=2)
    os.kill(run.master_pid(), signal.SIGKILL)
    run.finished(1, states=3)
    assert "the dense part needs no mirror: every worker has it" in run.text(), run.text()


@pytest.mark.parametrize("protect", [(), LAG], ids=["acked", "lag"])
def test_a_worker_that_alone_knows_the_vote_dies_and_a_worker_with_a_ps(
    run: HybridRun, monkeypatch: pytest.MonkeyPatch, protect: tuple[str, ...]
) -> None:
    monkeypatch.setenv("EVERSTEP_FAULT", "worker:0.1:voted:8")
    run.write(epochs=10)
    run.train(3, *FLAGS, *protect)
    run.pid(0, at_least=2)
    pids = [run.alive(Role.PS, 0).pid, run.pid(1)]
    for pid in pids:
        os.kill(pid, KILL)
    run.finished(2, states=3)


def test_nothing_is_computed_again_where_mirrors_lag(run: HybridRun) -> None:
    """Both ps are lost, one after the other, and a worker with the second; mirrors lack seconds of training each time.
    Dense part and tables have the bits of a run whose mirrors lacked nothing, and that lost nobody."""
    run.write(rows=1600, epochs=12)
    run.train(2, *FLAGS, *LAG, "--logical-workers", "2")
    run.trained(3000)
    os.kill(run.alive(Role.PS, 0).pid, KILL)
    run.alive(Role.PS, 0, at_least=2)
    run.trained(9000)
    for pid in (run.alive(Role.PS, 1).pid, run.pid(1)):
        os.kill(pid, KILL)
    run.finished(1, states=2)
    (run.folder / "calm").mkdir()
    calm = HybridRun(run.folder / "calm")
    calm.write(rows=1600, epochs=12, pause_s=0.0)
    calm.train(2, *FLAGS, "--logical-workers", "2")
    calm.finished(0, states=2)
    for word in ("state", "fields"):
        found = [set(re.findall(rf"{word} ([0-9a-f]{{64}})", one.workers_said())) for one in (run, calm)]
        assert len(found[0]) == 1 and found[0] == found[1], (word, found, run.story())


BOUNDED = """
from everstep.api.group_push_driver import GroupPushDriver as Driver
import everstep.api.group_push_driver as driver
driver.KEPT_BYTES = {bound}
kept, secure = [], Driver.secure
def noted(self, collective):
    kept.append(sum(held.size_bytes for held in self._sums.values()))
    secure(self, collective)
Driver.secure = noted
job = es.join()
"""
"""Notes how much is kept when a member waits for mirrors."""


def test_workers_keep_a_bounded_amount_of_what_mirrors_lack(run: HybridRun) -> None:
    """With a bound of some steps, mirrors catch up within an epoch, although the lag is longer than the job."""
    bound, epochs = 60_000, 12
    run.write(rows=1600, epochs=epochs)
    text = run.script.read_text().replace("job = es.join()\n", BOUNDED.format(bound=bound))
    run.script.write_text(text + 'print("kept", *kept, flush=True)\n')
    run.train(2, *FLAGS, *LAG)
    run.trained(6000)
    os.kill(run.alive(Role.PS, 0).pid, KILL)
    run.finished(0, states=2)
    for said in re.findall(r"kept ([\d ]+)", run.workers_said()):
        kept = [int(size) for size in said.split()]
        assert len(kept) > epochs and bound < max(kept) < 2 * bound, kept


def test_it_goes_back_to_a_checkpoint_as_a_whole_and_goes_on_from_one(run: HybridRun) -> None:
    """A ps without parity is lost: all go back to the newest checkpoint. Then the job is stopped, and resumed on other
    numbers of workers and ps: over all of that every row has every epoch once."""
    run.write(rows=1600, epochs=12, pause_s=0.12)
    run.train(2, "--strategy", "fixed", "--ps", "2", "--checkpoint-every", "5batches")
    until(lambda: "checkpoint committed: checkpoint 2 " in run.text(), why=run.story)
    os.kill(run.alive(Role.PS, 1).pid, KILL)
    until(lambda: "steps void" in run.text(), why=run.story)
    # (whichever number it has: the one that was under way when the ps was lost is never committed)
    until(lambda: "checkpoint committed" in run.text().partition("steps void")[2], why=run.story)
    code, out = run.everstep("stop", str(run.run_dir))
    assert code == 0, out
    assert run.wait() == 0, run.story()
    code, out = run.everstep("checkpoint", "verify", str(run.run_dir))
    assert code == 0 and "intact" in out, out
    # No ps has anything of the dense part: mirrors would have nothing to copy of it.
    tables = latest_intact(checkpoint_place(run.run_dir)).tables
    assert {(table.name, table.dense) for table in tables} == {("counts", False), ("fields", False)}
    run.hurry()
    code, out = run.everstep(
        *("resume", str(run.run_dir), "--run-dir", str(run.folder / "on"), "--ps", "3", "--workers", "2"),
        timeout_s=280.0,
    )
    assert code == 0 and "counted right" in (run.folder / "on" / "logs" / "worker-0.log").read_text(), out
    report = audit(run.folder / "on")
    assert report.ok and report.finished, report.text()


@pytest.mark.slow
def test_the_model_of_a_job_that_is_stopped_is_of_one_step(run: HybridRun) -> None:
    """Every sample that the dense part has had is in the tables, and no other: row r has gained 1.0 for each time."""
    run.write(rows=1600, epochs=5000, pause_s=0.0)
    run.train(2, "--strategy", "fixed", "--ps", "2")
    run.trained(1000)
    code, out = run.everstep("stop", str(run.run_dir))
    assert code == 0, out
    assert run.wait() == 0, run.story()
    dense = torch.load(run.run_dir / "model" / "training.pt", weights_only=True)
    counts = load_file(run.run_dir / "model" / "tables" / "counts.safetensors")["values"]
    had = dense["epoch"] * run.rows + dense["position"]
    assert had == dense["step"] * 200 and abs(float(counts.sum()) - had) < 0.5, (float(counts.sum()), had)
