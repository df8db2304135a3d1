"""A job that is suspended and goes on in the same run, with real processes: the audit spans both parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_jobs import until

from everstep.brain.events import JobUnsuspended
from everstep.cli.display import read_summary
from everstep.cli.replay import replay
from everstep.cli.run import SUSPENDED
from everstep.model.member import Role
from everstep.monitor.audit import audit
from everstep.storage.journal import read_journal

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

RECORDED = Path(__file__).parents[2] / "benchmarks" / "traces" / "spot"


def times_gone_on(run: Run) -> int:
    return sum(isinstance(event.fact, JobUnsuspended) for _, event, _ in read_journal(run.run_dir / "journal.sqlite"))


@pytest.mark.parametrize(
    "mode",
    [
        ("--ps", "2"),
        ("--ps", "2", "--parity", "1+1", "--checkpoint-every", "2s"),
        ("--mode", "allreduce"),
        ("--mode", "allreduce", "--ps", "1"),
    ],
)
def test_suspended_twice_and_each_sample_counts_once(run: Run, mode: tuple[str, ...]) -> None:
    run.write(epochs=30, pause_s=0.1)
    if "--ps" not in mode:
        run.script.write_text(run.script.read_text().replace("job.sparse(Net())", "Net()"))
    run.start("--workers", "2", *mode)
    for times in (1, 2):
        run.alive(Role.WORKER, 1, times)
        before = run.samples()
        run.trained(before + 200)
        code, text = run.everstep("suspend", str(run.run_dir))
        assert code == 0 and "suspended" in text, text + run.story()
        assert run.wait() == SUSPENDED, run.story()
        assert run.leftovers() == {}, "a suspended job holds nothing"
        summary = read_summary(run.run_dir)
        assert summary is not None and summary.is_suspended and not summary.by_itself
        assert summary.suspensions == times
        report = audit(run.run_dir)
        assert report.ok and "suspended" in report.why, report.text()
        code, text = run.everstep("status", str(run.run_dir), "--json")
        assert code == 0 and json.loads(text)["phase"] == "suspended", text
        code, text = run.everstep("scale", str(run.run_dir), "--workers", "3")
        assert code == 2 and "everstep unsuspend" in text, text
        run.go_on()
        until(lambda n=times: times_gone_on(run) == n, why=run.story)  # type: ignore[misc]
    run.alive(Role.WORKER, 0, 3)
    run.hurry()
    run.ended_well(400)
    assert replay(run.run_dir).ok
    code, text = run.everstep("unsuspend", str(run.run_dir))
    assert code == 2 and "the job is not suspended, it is done" in text, text


def test_capacity_that_falls_to_zero_suspends_the_job_and_brings_it_back(run: Run) -> None:
    run.write(epochs=200, pause_s=0.2)
    trace = f"trace:{RECORDED / 'us-east-1f_v100_1.json.gz'}"
    played = ("--speed", "60", "--quiet", "8s", "--capacity-nodes", "2")
    waits = ("--min-workers", "2", "--max-wait", "2s", "--stabilization", "1s")
    run.start("--workers", "1", "--ps", "2", "--parity", "1+1", "--capacity", trace, *played, *waits)
    popen = run.popen
    assert popen is not None
    until(lambda: run.status() is not None, why=run.story)
    until(lambda: times_gone_on(run) >= 2 or popen.poll() is not None, 600.0, run.story)
    assert popen.poll() is None, run.story()
    run.hurry()
    code = run.wait(400)
    while code == SUSPENDED:  # (nobody is there any more: the recording is over)
        run.go_on()
        code = run.wait(400)
    assert code == 0, run.story()
    assert run.leftovers() == {}
    run.check_audit()
    assert replay(run.run_dir).ok
