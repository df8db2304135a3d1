"""Consistency sync and bounded with real processes, some of which die or stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_jobs import Run

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


def _stopped_until_replaced(run: Run) -> bool:
    """Stops worker 1 until it is replaced; False: the others went on, so it was let go again.

    The others may be two batches ahead each. What beats tell is late, so that counts from when it is suspected.
    """
    stopped = run.alive(Role.WORKER, 1)
    first: int | None = None
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + 180.0
        while time.monotonic() < end:
            if (status := run.status()) is not None:
                now = next(m for m in status.members if (m.role, m.slot) == (Role.WORKER, 1))
                if now.incarnation > stopped.incarnation:
                    return first is not None
                if now.state == "suspect":
                    first = status.samples_done if first is None else first
                    if status.samples_done - first > 2 * 4 * 100:
                        return False
            time.sleep(0.05)
        raise AssertionError(f"a stopped worker was not replaced\n{run.story()}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped.pid, signal.SIGCONT)


def test_a_stopped_worker_holds_the_others_only_so_long(run: Run) -> None:
    """The others are never more than two batches of 100 ahead of it; when it is declared lost, they go on."""
    run.write(rows=6000, epochs=16, pause_s=0.04)
    run.start(*FLAGS, "--consistency", "bounded:2")
    run.trained(1500)
    for _ in range(8):  # one that holds no shard at the moment, at an epoch's end, holds nobody: once more
        if _stopped_until_replaced(run):
            break
    else:
        raise AssertionError(f"the others went on without it, each time\n{run.story()}")
    run.hurry()
    assert run.wait(280) == 0, run.story()
    run.check_audit()
