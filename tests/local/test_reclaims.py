"""A notice says that a node goes: it is emptied, and joins again if it stays; or the job is suspended."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from local_jobs import until
from node_jobs import join

from everstep.model.member import Role

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_a_false_alarm_empties_a_node_which_joins_again(run: Run) -> None:
    run.write(epochs=40, pause_s=0.2)
    run.start("--workers", "1", "--ps", "1", "--bind", "127.0.0.1:0")
    run.alive(Role.WORKER, 0)
    at = run.text().partition("--join ")[2].split()[0]
    alarm = run.folder / "going"
    run_dir = join(run, at, "b", "--notices", f"file:{alarm}")
    first = run.alive_on("b")
    run.trained(200)
    alarm.write_text("60")
    until(lambda: "b is empty" in run.join_text("b"), why=lambda: run.join_text("b"))
    assert "this node goes in" in run.join_text("b")
    until(lambda: run.leftovers(run_dir) == {})
    alarm.unlink()
    until(lambda: "is still here: it joins" in run.join_text("b"), why=lambda: run.join_text("b"))
    again = run.alive_on("b")
    assert again.role == first.role and again.pid != first.pid
    run.hurry()
    run.ended_well()
    assert run.wait_join("b") == 0, run.join_text("b")
    assert run.leftovers(run_dir) == {}


@pytest.mark.slow
def test_a_ps_whose_machine_outlives_its_notice_moves_all_the_same_and_joins_again(run: Run) -> None:
    """Its notice is over before it could give anything away, and is never taken back: nothing of it is lost, and the
    node is used again, for good."""
    alarm, settings = run.folder / "going", run.folder / "job.yaml"
    settings.write_text("nodes: 2\nlost_after_s: 60\nstill_here_s: 2\n")
    run.write(epochs=60, pause_s=0.2)
    run.start("-c", str(settings), "--workers", "1", "--ps", "2", "--bind", "127.0.0.1:0")
    until(lambda: "--join " in run.text(), why=run.story)
    at = run.text().partition("--join ")[2].split()[0]
    run_dir = join(run, at, "b", "--ps", "1", "--machine", "mb", "--notices", f"file:{alarm}")
    first = run.alive_on("b")
    run.trained(200)
    status = run.status()
    assert status is not None
    (ps,) = (m for m in status.members if m.role is Role.PS and m.node == "b")
    os.kill(ps.pid, signal.SIGSTOP)
    alarm.write_text("1")
    until(lambda: "the time is over" in run.join_text("b"), why=lambda: run.join_text("b"))
    os.kill(ps.pid, signal.SIGCONT)
    until(lambda: "is still here: it joins" in run.join_text("b"), why=lambda: run.join_text("b"))
    again = run.alive_on("b")
    assert alarm.exists() and again.pid != first.pid
    before = run.samples()
    until(lambda: run.samples() >= before + 500, why=run.story)
    assert run.join_text("b").count("this node is to be emptied") == 1, run.join_text("b")
    status = run.status()
    assert status is not None and status.failures["ps"] == 0, status
    run.hurry()
    run.ended_well()
    assert run.wait_join("b") == 0, run.join_text("b")
    assert run.leftovers(run_dir) == {}


def test_a_notice_of_the_masters_node_suspends_the_job(run: Run) -> None:
    alarm = run.folder / "going"
    run.write(epochs=30)
    run.start("--workers", "1", "--ps", "1", "--notices", f"file:{alarm}")
    run.alive(Role.WORKER, 0)
    run.trained(200)
    alarm.write_text("")
    assert run.wait() == 143, run.story()
    assert "everstep unsuspend" in run.text(), run.text()
    assert run.leftovers() == {}
    code, out = run.everstep("checkpoint", "ls", str(run.run_dir))
    assert code == 0, out
    alarm.unlink()
    run.hurry()
    run.go_on()
    run.ended_well()


def test_a_notice_of_the_only_ps_takes_a_checkpoint_from_which_the_next_one_goes_on(run: Run) -> None:
    """Nobody could take its rows: they are in a checkpoint when its node goes, and each sample counts once."""
    alarm, settings = run.folder / "going", run.folder / "job.yaml"
    settings.write_text("master_alone: true\nnodes: 2\ncheckpoint_every: 1h\nlost_after_s: 5\n")
    run.write(epochs=40, pause_s=0.2)
    run.start("-c", str(settings), "--workers", "1", "--ps", "1", "--bind", "127.0.0.1:0")
    until(lambda: "--join " in run.text(), why=run.story)
    at = run.text().partition("--join ")[2].split()[0]
    join(run, at, "b", "--ps", "1", "--machine", "mb", "--notices", f"file:{alarm}")
    run.alive(Role.PS, 0)
    run.trained(200)
    alarm.write_text("12")
    until(
        lambda: (
            "and no other ps could take them: a checkpoint is taken" in run.everstep("explain", str(run.run_dir))[1]
        ),
        why=run.story,
    )
    until(lambda: "the time is over" in run.join_text("b"), why=lambda: run.join_text("b"))
    run.kill_join("b")  # its machine goes, at last
    join(run, at, "c", "--ps", "1", "--machine", "mc")
    until(lambda: (m := run.status()) is not None and any(n.node == "c" and n.ps for n in m.nodes), why=run.story)
    before = run.samples()
    until(lambda: run.samples() > before, why=run.story)
    run.hurry()
    run.ended_well()
    code, out = run.everstep("checkpoint", "ls", str(run.run_dir))
    assert code == 0 and out.count("\n") >= 2, out
    assert run.wait_join("c") == 0, run.join_text("c")
