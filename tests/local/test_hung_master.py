"""A master that is stopped is told of, replaced, and can change nothing afterwards."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from local_jobs import until

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_stopped_master_is_told_of_and_replaced_while_training_goes_on(run: Run, mode: str) -> None:
    run.write(epochs=8)
    config = run.folder / "job.yaml"
    config.write_text("master_silent_s: 3\nmaster_lost_s: 7\n")
    run.start("-c", str(config), "--mode", mode, "--workers", "2", "--ps", "1")
    first = run.master_pid()
    run.trained(400)
    os.kill(first, signal.SIGSTOP)
    until(lambda: "the master has not answered for" in run.text(), why=run.story)
    assert run.master_pid(other_than=first) != first
    assert run.gone(first)
    run.hurry()
    run.ended_well()
    assert "it is killed" in run.text() and "lost: " not in run.text(), run.text()


def test_a_master_that_goes_on_in_time_is_left_alone(run: Run) -> None:
    run.write(epochs=8)
    config = run.folder / "job.yaml"
    config.write_text("master_silent_s: 3\nmaster_lost_s: 60\n")
    run.start("-c", str(config), "--workers", "2")
    first = run.master_pid()
    run.trained(400)
    os.kill(first, signal.SIGSTOP)
    until(lambda: "the master has not answered for" in run.text(), why=run.story)
    os.kill(first, signal.SIGCONT)
    until(lambda: "the master answers again" in run.text(), why=run.story)
    assert run.master_pid() == first
    run.hurry()
    run.ended_well()
    assert "lost: " not in run.text(), run.text()
