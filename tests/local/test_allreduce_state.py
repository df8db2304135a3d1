"""Mode allreduce with real processes that die in the midst of handing state over or saving it, and jobs that go on from
a checkpoint: every sample once, and the same bits on everybody."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from local_jobs import until
from replica_jobs import KILL, ReplicaRun

from everstep.cli.scale import scale

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


RUN = ReplicaRun


@pytest.mark.parametrize(
    "fault",
    [
        "worker:0.1:serve_state:2",  # the source, in mid-transfer: the joiner goes on with another member
        "worker:2.1:load_state:1",  # the joiner, in mid-transfer
        "worker:2.1:follow:1",  # the joiner, while it follows
        "worker:1.1:agree:2",  # a member, in the midst of letting the joiner in
        "worker:2.1:agree:1",  # the joiner there
    ],
)
def test_a_death_while_state_is_handed_over(run: ReplicaRun, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_FAULT", fault)
    run.write(epochs=4, pause_s=0.1)
    run.train(2)
    run.trained(300)
    scale(run.run_dir, workers=3, ps=None)
    slot = int(fault[7])
    run.pid(slot, at_least=2)  # it was killed there, and is replaced
    run.hurry()
    run.finished(1, states=1)


@pytest.mark.parametrize("step", ["agree", "agreed"])
def test_the_other_one_dies_when_the_replacement_comes_in(
    run: ReplicaRun, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two losses in a row: of two workers one is killed, and the other one as soon as the replacement has its state."""
    monkeypatch.setenv("EVERSTEP_FAULT", f"worker:0.1:{step}:3")
    run.write(epochs=4, pause_s=0.1)
    run.train(2, "--min-workers", "1")
    run.trained(300)
    os.kill(run.pid(1), KILL)
    run.pid(0, at_least=2)
    run.hurry()
    run.finished(2, states=1)


def test_all_are_lost_and_go_on_from_the_newest_checkpoint(run: ReplicaRun) -> None:
    run.write(epochs=4, pause_s=0.1)
    run.train(2, "--checkpoint-every", "5batches")
    until(lambda: "checkpoint committed: checkpoint 3 " in run.text(), why=run.story)
    for pid in (run.pid(0), run.pid(1)):
        os.kill(pid, KILL)
    run.hurry()
    run.finished(2)
    assert "from checkpoint" in run.text() and "from nothing" not in run.text(), run.text()
    code, out = run.everstep("checkpoint", "verify", str(run.run_dir))
    assert code == 0 and "intact, 1 files" in out, out


def test_the_last_ones_save_the_state_in_time(run: ReplicaRun) -> None:
    """One of two is killed: the other one saves it. Both are told to go: so does the last one, and stays for it."""
    run.write(epochs=3, pause_s=0.15)
    run.train(2, "--checkpoint-every", "1h")
    run.trained(200)
    os.kill(run.pid(1), KILL)
    until(lambda: "checkpoint committed: checkpoint 1 " in run.text(), why=run.story)
    assert "checkpoint 1 (one healthy replica is left)" in run.text(), run.story()
    pids = run.pid(0), run.pid(1, at_least=2)
    run.entered(1)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    until(lambda: "checkpoint committed: checkpoint 2 " in run.text(), why=run.story)
    assert "checkpoint 2 (reclaim)" in run.text(), run.story()
    run.finished(3)
    assert "from the beginning" not in run.text(), run.text()


def test_the_leader_dies_before_it_tells_of_its_file(run: ReplicaRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, the next leader writes the checkpoint."""
    monkeypatch.setenv("EVERSTEP_FAULT", "worker:0.1:checkpoint:1")
    run.write(epochs=4, pause_s=0.1)
    run.train(2, "--checkpoint-every", "10batches")
    run.pid(0, at_least=2)
    run.hurry()
    run.finished(1)
    code, out = run.everstep("checkpoint", "ls", str(run.run_dir))
    assert code == 0 and "7,680" in out, out  # (the last one has every sample)


def test_a_job_goes_on_from_a_checkpoint_with_another_number_of_workers(run: ReplicaRun, tmp_path: Path) -> None:
    """Saved by hand, and once more as it is stopped. With logical workers: to the bits of a run that never was."""
    folder = tmp_path / "whole"
    folder.mkdir()
    whole = ReplicaRun(folder)
    try:
        whole.write(rows=640, epochs=4, pause_s=0.0, batch=16)
        whole.train(2, "--logical-workers", "4")
        bits = whole.finished()
    finally:
        whole.close()
    run.write(rows=640, epochs=4, pause_s=0.1, batch=16)
    run.train(2, "--logical-workers", "4", "--checkpoint-every", "1h")
    run.trained(200)
    code, out = run.everstep("checkpoint", "take", str(run.run_dir))  # by hand, while it trains
    assert code == 0 and re.search(r"checkpoint \d+: full", out), out
    code, out = run.everstep("stop", str(run.run_dir))  # at once: perhaps nothing was told since then
    assert code == 0 and "after a last checkpoint" in out, out
    assert run.wait() == 0, run.story()
    assert re.search(r"checkpoint \d+ \(stop\)", run.text()), run.text()
    run.write(rows=640, epochs=4, pause_s=0.0, batch=16)
    again = tmp_path / "again"
    code, out = run.everstep("resume", str(run.run_dir), "--workers", "1", "--run-dir", str(again), "--no-display")
    assert code == 0, out
    logs = (again / "logs" / "worker-0.log").read_text()
    assert f"state {bits}" in logs, logs
    code, out = run.everstep("audit", str(again))
    assert code == 0 and "exactly once" in out, out
