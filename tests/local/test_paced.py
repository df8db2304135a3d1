"""Consistency sync and bounded with real processes, some of which die or stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_jobs import Run, until

from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
FLAGS = ("--workers", "3", "--ps", "2", "--no-display")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def test_a_worker_and_a_ps_killed_in_the_middle_of_a_step_cost_nothing(run: Run) -> None:
    """Adagrad and Adam: the ps that take over know nothing of the step's parts so far."""
    run.write(rows=3000, epochs=6, pause_s=0.04)
    run.start(*FLAGS, "--parity", "1+1", "--consistency", "sync:1")
    run.trained(1500)
    for role in (Role.WORKER, Role.PS):
        os.kill(run.alive(role, 1).pid, signal.SIGKILL)
        run.alive(role, 1, at_least=2)
    assert run.wait(280) == 0, run.story()
    run.check_audit()


def test_a_stopped_worker_holds_the_others_only_so_long(run: Run) -> None:
    """The others are never more than two batches of 100 ahead of it; when it is declared lost, they go on."""
    run.write(rows=3000, epochs=16, pause_s=0.04)  # (not over before it is stopped)
    run.start(*FLAGS, "--consistency", "bounded:2")
    run.trained(1500)
    stopped = run.alive(Role.WORKER, 1).pid
    done: list[int] = []  # while it is suspected, and not replaced

    def replaced() -> bool:
        status = run.status()
        if status is None:
            return False
        m = next(m for m in status.members if (m.role, m.slot) == (Role.WORKER, 1))
        if m.state == "suspect" and m.incarnation == 1:
            done.append(status.samples_done)
        return m.incarnation > 1

    for _ in range(10):  # one that holds nothing, at an epoch's end, holds nobody
        os.kill(stopped, signal.SIGSTOP)
        before = run.status()
        time.sleep(0.4)
        after = run.status()
        if before is not None and after is not None and after.samples_done - before.samples_done <= 2 * 4 * 100:
            break
        os.kill(stopped, signal.SIGCONT)
        time.sleep(0.1)
    try:
        until(replaced, why=run.story)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    assert done and done[-1] - done[0] <= 2 * 4 * 100, "two workers, each up to two batches ahead, told by beats"
    assert run.wait(280) == 0, run.story()
    run.check_audit()
