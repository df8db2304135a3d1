"""A pipeline loses more than one of its processes, or the same one again, or its master: the state is the same."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import pytest
import torch
from local_jobs import until
from test_pipeline import PipelineRun, alone, close_to_plain

from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(390)]
RUN = PipelineRun

PID = '"pid%d.%d.%d" % (job.slot, {stage}, life)'
WRITE = f"""
if not os.path.exists({PID.format(stage="job.process_index")}):
    open({PID.format(stage="job.process_index")}, "w").write(str(os.getpid()))
"""


def kills(when: str, *stages: str) -> str:
    """Lines of a script: where ``when`` holds, a process kills these stages of its worker, in this order. Alone it
    kills nobody."""
    lines = [WRITE, f"if {when} and os.path.exists({PID.format(stage=stages[0])}):"]
    lines += [f"    os.kill(int(open({PID.format(stage=stage)}).read()), 9)" for stage in stages]
    return textwrap.indent("\n".join(lines), " " * 4).strip()


def undisturbed(run: PipelineRun, losses: int) -> None:
    """The state is that of all stages in one process; no more was done again than two steps for each loss."""
    state = run.finished(states=1)
    expected, digest = alone(run)
    assert f"state {digest}" in run.logs()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert f"failures survived: {losses} worker" in run.text(), run.text()
    code, out = run.everstep("audit", str(run.run_dir))
    void = re.search(r"steps committed 62(?:, (\d+) more void)?", out)
    assert code == 0 and void is not None and int(void[1] or 0) <= 2 * losses, out


@pytest.mark.parametrize(
    ("change", "deaths", "losses"),
    [
        (kills("(job.step, job.process_index, life) == (17, 1, 1)", "2", "1"), "{}", 1),
        (kills("(job.step, job.process_index, life) == (17, 2, 1)", "0"), "{}", 1),
        (kills("(job.step, job.process_index, life) == (17, 0, 1)", "2", "1", "0"), "{}", 1),
        ("", "{(17, 0, 1, 1): 9, (0, 0, 'loss', 2): 9, (0, 0, 0, 3): 9}", 3),
    ],
    ids=["two-neighbours", "one-that-waits-and-copies", "all-at-once", "three-times-in-a-row"],
)
def test_the_only_replica_loses(run: PipelineRun, change: str, deaths: str, losses: int) -> None:
    run.write(pause="0.01", change=change)
    run.train("--stages", "3", "--copy-every", "1", deaths=deaths)
    undisturbed(run, losses)


def test_a_whole_replica_is_lost_and_the_other_goes_on(run: PipelineRun) -> None:
    """Both stages of the second replica are killed at once."""
    change = kills("job.slot == 1 and life == 1 and job.process_index == 0 and job.step >= 4", "1", "0")
    run.write(pause="0.02 if os.path.exists('here' if job.step < 4 else 'back') else 2.0", change=change)
    run.train("--workers", "2", "--stages", "2", "--min-workers", "1")
    close_to_plain(run.finished(states=2), 2 * run.batch)
    assert "failures survived: 1 worker" in run.text()


def test_the_master_is_killed(run: PipelineRun) -> None:
    """Stages train on, or wait; nothing is done again, and nothing is lost."""
    run.write(pause="0.1")
    run.train("--stages", "2", "--copy-every", "1")
    run.trained(10 * run.batch)
    first = run.master_pid()
    os.kill(first, signal.SIGKILL)
    assert run.master_pid(other_than=first) != first
    state = run.finished(states=1)
    expected, digest = alone(run)
    assert f"state {digest}" in run.logs()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def test_replicas_come_and_go_while_it_trains(run: PipelineRun) -> None:
    """One replica becomes two, and one again; every sample counts exactly once."""
    run.write(pause="0.2 if os.path.exists('wait') else 0.01")
    (run.folder / "wait").touch()
    run.train("--stages", "2", "--copy-every", "1")
    run.trained(5 * run.batch)
    code, out = run.everstep("scale", str(run.run_dir), "--workers", "2")
    assert code == 0, out
    run.alive(Role.WORKER, 1)
    until((run.folder / "here").exists, why=run.story)
    code, out = run.everstep("scale", str(run.run_dir), "--workers", "1")
    assert code == 0, out

    def gone() -> bool:
        member = run.member(Role.WORKER, 1)
        return member is None or member.state != "alive"

    until(gone, why=run.story)
    (run.folder / "wait").unlink()
    run.finished()
    assert "failures survived: none" in run.text(), run.text()
