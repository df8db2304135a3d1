"""``everstep run --workers auto``: real jobs begin with one worker and are scaled while they train, in each mode.

Each sample takes the script a time of its own, so more workers are faster whatever the machine does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_jobs import Run, until
from replica_jobs import ReplicaRun
from test_hybrid import HybridRun
from test_pipeline import MODEL, PipelineRun

from everstep.monitor.audit import audit

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]
WAIT_S = 400.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERSTEP_WINDOW_S", "3")
    return tmp_path


def grown(run: Run, workers: int = 3) -> None:
    def look() -> bool:
        status = run.status()
        return status is not None and sum(m.role == "worker" and m.up for m in status.members) >= workers

    until(look, WAIT_S, why=run.story)


def judged(run: Run) -> None:
    """The policy made few changes, each said, and none of them was impossible."""
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    changes = [e for e in events if e["action"] == "scale" and e["inputs"].get("policy") == "auto"]
    assert 1 <= len(changes) <= 6, run.story()
    assert "instead of 1 workers" in changes[0]["reason"] and changes[0]["inputs"]["changes_left"] == 5
    assert not [e for e in events if e["action"] == "disable the policy"], "it makes no impossible plan"
    assert run.everstep("replay", str(run.run_dir))[0] == 0


def test_ps(home: Path) -> None:
    run = Run(home)
    run.write(rows=60_000, epochs=1, pause_s=0.1, batch=20)
    run.start("--workers", "auto", "--ps", "auto", "--max-workers", "3", "--max-ps", "2")
    grown(run)
    run.hurry()
    run.ended_well()
    assert "auto: begins with 1 workers and 1 ps (no earlier job says more); --max-workers 3, --max-ps 2" in run.text()
    judged(run)


def test_allreduce(home: Path) -> None:
    """A step is 64 samples of each member: with more of them it has more."""
    run = ReplicaRun(home)
    run.write(rows=1920, epochs=40, pause_s=0.15)
    run.start("--mode", "allreduce", "--workers", "auto", "--max-workers", "3")
    grown(run)
    run.hurry()
    run.finished(timeout_s=WAIT_S)
    judged(run)


def test_hybrid_with_the_ps_that_were_asked_for(home: Path) -> None:
    """A step is 100 samples, divided among the members; a table counts how often each row was trained."""
    run = HybridRun(home)
    run.write(rows=1500, epochs=40)
    text = run.script.read_text()
    assert "time.sleep(0.05)" in text
    run.script.write_text(text.replace("time.sleep(0.05)", "time.sleep(0.004 * len(batch['row']))"))
    flags = "--mode", "allreduce", "--strategy", "fixed", "--workers", "auto", "--max-workers", "3", "--ps", "2"
    run.start(*flags, "--parity", "1+1")
    grown(run)
    run.hurry()
    run.finished(timeout_s=WAIT_S)
    judged(run)
    assert audit(run.run_dir).ok


PIPELINE = """
import everstep as es

torch.set_num_threads(1)
job = es.join(mode="pipeline")
model = job.pipeline(build(), schedule=pipelining.Schedule1F1B, microbatches=4, loss_fn=nn.functional.mse_loss)
opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
for batch in job.steps(job.loader(data(), batch_size=8, epochs={epochs})):
    opt.zero_grad()
    model.step(batch["x"], target=batch["y"])
    opt.step()
    if not os.path.exists({hurry!r}):
        time.sleep(0.15)
"""


def test_pipeline_replicas(home: Path) -> None:
    """A worker is a replica of two stages; each replica has its own eight samples of a step."""
    run = PipelineRun(home)
    text = MODEL.format(rows=320) + PIPELINE.format(epochs=60, hurry=str(home / "hurry"))
    run.script.write_text(text)
    run.start("--mode", "pipeline", "--stages", "2", "--workers", "auto", "--max-workers", "2")
    grown(run, 2)
    run.hurry()
    assert run.wait(WAIT_S) == 0, run.story()
    report = audit(run.run_dir)
    assert report.ok, report.text()
    assert run.leftovers() == {}
    judged(run)
