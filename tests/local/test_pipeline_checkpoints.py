"""Checkpoints of a model in stages come from its copies, as a real job that is killed at the worst moments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_pipeline import PipelineRun, alone

from everstep.cli.status import stop_job
from everstep.protect.manifest import list_checkpoints, read_manifest
from everstep.storage.places import open_place

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
RUN = PipelineRun
FLAGS = ("--copy-every", "1", "--checkpoint-every", "5batches")


def in_parts(run_dir: Path) -> list[int]:
    """Numbers of the checkpoints there that were written from copies; all have the same number of files as stages."""
    place = open_place(run_dir / "checkpoints")
    found = [read_manifest(place, number) for number in list_checkpoints(place)]
    return [m.checkpoint for m in found if m.replica is not None and m.replica.parts]


def as_if_undisturbed(run: PipelineRun) -> None:
    state = run.finished(states=1)
    expected, digest = alone(run)
    assert f"state {digest}" in run.logs()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def test_killed_between_the_parts_of_a_checkpoint(run: PipelineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first life ends when the second checkpoint has the file of one stage. The first checkpoint stays, and later
    ones follow."""
    monkeypatch.setenv("EVERSTEP_FAULT", "worker:0.1:part:3")
    run.write(pause="0.03 if life == 1 else 0.2")  # (the master says its order again after 5 s)
    run.train("--stages", "2", *FLAGS, "--checkpoint-keep", "9")
    as_if_undisturbed(run)
    assert "failures survived: 1 worker" in run.text()
    made = in_parts(run.run_dir)
    assert len(made) >= 2 and made[0] == 1, made
    code, out = run.everstep("checkpoint", "verify", str(run.run_dir))
    assert code == 0 and f"checkpoint {made[-1]}: intact, 3 files" in out, out
    assert "no whole copy" not in run.logs()


@pytest.mark.parametrize(
    "fault", ["worker:0.1:checkpoint:2", "master:0.1:before_manifest:2", "master:0.1:after_manifest:2"]
)
def test_killed_between_parts_and_manifest(run: PipelineRun, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is stopped, and goes on in three stages."""
    monkeypatch.setenv("EVERSTEP_FAULT", fault)
    run.write(pause="0.03 if job.step < 22 else 0.3")
    run.train("--stages", "2", *FLAGS)
    run.trained(22 * run.batch)
    stop_job(run.run_dir, True)
    assert run.wait() == 0, run.story()
    code, out = run.everstep("checkpoint", "verify", str(run.run_dir))
    assert code == 0, out
    monkeypatch.delenv("EVERSTEP_FAULT")
    run.write()
    old, run.run_dir = run.run_dir, run.folder / "resumed"
    run.start_verb("resume", str(old), "--stages", "3", "--run-dir", str(run.run_dir), "--no-display")
    as_if_undisturbed(run)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_checkpoint_of_copies_goes_on_in_another_number_of_stages(run: PipelineRun, stages: int) -> None:
    """The job is killed, all of it, so that the newest checkpoint is one that was written from copies."""
    run.write(pause="0.03 if job.step < 22 else 1.0")
    run.train("--stages", "2", *FLAGS)
    run.trained(22 * run.batch)
    made = in_parts(run.run_dir)
    assert made
    run.close()
    code, out = run.everstep("checkpoint", "show", str(run.run_dir), "--checkpoint", str(made[-1]))
    assert code == 0 and "2 stages and their index" in out and "mode pipeline" in out, out
    code, out = run.everstep("checkpoint", "export", str(run.run_dir), str(run.folder / "out"))
    assert code == 0 and "model.safetensors: 6 tensors" in out, out
    run.write()
    old, run.run_dir = run.run_dir, run.folder / "resumed"
    run.start_verb("resume", str(old), "--stages", str(stages), "--run-dir", str(run.run_dir), "--no-display")
    as_if_undisturbed(run)
    assert re.search(r"resume: checkpoint \d+ ", run.text())
