"""A notice says that a node goes: it is emptied, and joins again if it stays; or the job is suspended."""

from __future__ import annotations

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
