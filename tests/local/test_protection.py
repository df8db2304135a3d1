"""Parameters that survive: ``kill -9`` of ps, alone, in pairs, with workers and the master, while training goes on.

The counting model is the witness apart from the audit: the row of each sample gains exactly 1.0 per epoch.
"""

from __future__ import annotations

import os
import signal

import pytest
from local_jobs import Run

from everstep.model.member import Role
from everstep.monitor.audit import AuditReport, audit

pytestmark = pytest.mark.processes

COUNTING = """
import time
import numpy as np, torch
import everstep as es

EPOCHS, ROWS = {epochs}, 3000
job = es.join()
model = job.sparse(es.nn.Embedding("counts", 2, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
for batch in job.steps(job.loader({{"ids": np.arange(ROWS)}}, batch_size=50, epochs=EPOCHS)):
    (-model(batch["ids"])).sum().backward()
    time.sleep(0.02)
if job.chief:
    with job.eval(model):
        got = model(torch.arange(ROWS)).detach()
    wrong = (got != float(EPOCHS)).any(1).nonzero().flatten().tolist()
    print("counted right" if not wrong else f"counted wrong: {{wrong[:10]}} {{got[wrong[:10]].tolist()}}", flush=True)
"""


def begin(run: Run, flags: str, epochs: int = 10) -> Run:
    run.script.write_text(COUNTING.format(epochs=epochs))
    return run.start("--workers", "2", *flags.split())


def kill(run: Run, *members: str, at_least: int = 1) -> None:
    """SIGKILL to all of them at once: "ps:1", "worker:0", "master"."""
    pids = []
    for member in members:
        role, _, slot = member.partition(":")
        pids.append(run.master_pid() if role == "master" else run.alive(Role(role), int(slot), at_least).pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def check(run: Run) -> AuditReport:
    """The job ended well and left nothing, every row counts right, and the audit says exactly once."""
    assert run.wait(150) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    assert run.leftovers() == {}
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    assert "batches retried: 0" in run.text(), run.text()[-500:]  # what was kept is sent again, not computed
    return report


def test_a_ps_is_lost_and_its_replacement_too(run: Run) -> None:
    begin(run, "--ps 6 --parity 4+1")
    for life in (1, 2):
        run.trained(life * 4000)
        kill(run, "ps:1", at_least=life)
    run.alive(Role.PS, 1, at_least=3)
    report = check(run)
    assert report.counts["rebuilt"] > 0 and report.counts["promoted"] > 0
    assert "2 ps" in run.text()


def test_two_ps_are_lost_at_once_twice(run: Run) -> None:
    begin(run, "--ps 7 --parity 4+2", epochs=12)
    for life, slots in ((1, (1, 2)), (2, (2, 5))):
        run.trained(life * 5000)
        kill(run, *(f"ps:{slot}" for slot in slots))
    report = check(run)
    assert report.counts["rebuilt"] > 0 and "4 ps" in run.text()


def test_a_ps_a_worker_and_the_master_are_lost_at_once(run: Run) -> None:
    begin(run, "--ps 3 --parity 1+1")
    run.trained(4000)
    kill(run, "ps:2", "worker:1", "master")
    run.alive(Role.PS, 2, at_least=2)
    run.alive(Role.WORKER, 1, at_least=2)
    run.trained(12000)
    kill(run, "ps:0", "worker:0")
    assert run.wait(150) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()


def test_the_master_is_lost_while_buckets_are_rebuilt(run: Run) -> None:
    begin(run, "--ps 6 --parity 4+1")
    for life in (1, 2):
        run.trained(life * 4000)
        kill(run, "ps:3", at_least=life)
        kill(run, "master")
    check(run)


def test_eager_protection_may_undo_a_little_and_says_it(run: Run) -> None:
    begin(run, "--ps 4 --parity 2+1 --protect eager")
    for life in (1, 2):
        run.trained(life * 4000)
        kill(run, "ps:1", at_least=life)
    assert run.wait(150) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()


def test_ps_are_added_and_taken_away(run: Run) -> None:
    begin(run, "--ps 2 --parity 1+1", epochs=14)
    run.trained(4000)
    code, out = run.everstep("scale", str(run.run_dir), "--ps", "4")
    assert code == 0, out
    run.alive(Role.PS, 3)
    run.trained(15000)
    code, out = run.everstep("scale", str(run.run_dir), "--ps", "2")
    assert code == 0, out
    report = check(run)
    assert report.counts["promoted"] > 0 and report.counts["void"] == 0


def test_a_ps_is_emptied_on_request(run: Run) -> None:
    begin(run, "--ps 3 --parity 1+1", epochs=12)
    run.trained(4000)
    code, out = run.everstep("drain", str(run.run_dir), "ps:1", "--deadline", "30s")
    assert code == 0, out
    report = check(run)
    assert report.counts["promoted"] > 0 and report.counts["void"] == 0
