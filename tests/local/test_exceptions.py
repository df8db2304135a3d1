"""One worker's exception: what may pass is tried again, what would be raised again ends the job; shown once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

RAISES = """
import os, time
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
flag = {flag!r}
data = {{"x": np.ones((480, 4), np.float32), "label": np.ones(480, np.float32)}}
model = job.replicate(nn.Linear(4, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

def read(times, error, wait=0):
    while job.slot == 0 and len(os.listdir(flag)) < wait:
        time.sleep(0.05)  # (else it might train all before worker 1 has come)
    if job.slot == 1 and (seen := len(os.listdir(flag))) < times:
        open(os.path.join(flag, str(seen)), "w").close()
        raise error

for number, batch in enumerate(job.steps(job.loader(data, batch_size=40, epochs=2))):
    loss = ((model(batch["x"]).squeeze(1) - batch["label"]) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.03)
    {body}
"""


def write(run: Run, folder: Path, body: str) -> None:
    (folder / "flags").mkdir()
    run.script.write_text(RAISES.format(flag=str(folder / "flags"), body=body))


def actions(run: Run) -> list[str]:
    return [json.loads(line)["action"] for line in (run.run_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
@pytest.mark.parametrize(
    "error", ["OSError(5, 'flaky read')", "RuntimeError('CUDA error: unspecified launch failure')"]
)
def test_what_may_pass_is_tried_again_and_its_traceback_shown_once(
    run: Run, tmp_path: Path, mode: str, error: str
) -> None:
    write(run, tmp_path, f"read(1, {error}, wait={int(mode == 'ps')})")
    run.start("--mode", mode, "--workers", "2", "--no-display")
    run.ended_well()
    assert actions(run).count("try again") == 1
    assert run.text().count("Traceback (most recent call last)") == 1, run.text()


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_mistake_ends_the_job_at_once(run: Run, tmp_path: Path, mode: str) -> None:
    write(run, tmp_path, f"read(99, TypeError('no such thing'), wait={int(mode == 'ps')})")
    run.start("--mode", mode, "--workers", "2", "--no-display")
    assert run.wait() == 1, run.story()
    assert "try again" not in actions(run)
    assert run.text().count("Traceback (most recent call last)") == 1, run.text()
    assert "everstep: worker:1: TypeError: no such thing" in run.text()
    assert run.leftovers() == {}


def test_what_does_not_pass_ends_the_job_within_its_tries(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path, "")
    with run.script.open("a") as script:
        script.write("\nprint('never')\n")
    text = run.script.read_text().replace(
        "for number, batch in", "read(99, ConnectionResetError('gone'), wait=3)\nfor number, batch in"
    )
    run.script.write_text(text)
    run.start("--mode", "allreduce", "--workers", "2", "--no-display", "--script-retries", "2")
    assert run.wait() == 1, run.story()
    assert actions(run).count("try again") == 2
    assert run.text().count("Traceback (most recent call last)") == 1, run.text()
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("everstep: worker:1: ConnectionResetError: gone") and "script_retries=2" in last, last


def test_memory_that_is_too_small_twice_at_the_same_place_is_the_scripts_fault(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path, "")
    text = run.script.read_text().replace(
        "for number, batch in", "read(99, MemoryError(), wait=2)\nfor number, batch in"
    )
    run.script.write_text(text)
    run.start("--mode", "ps", "--workers", "2", "--no-display")
    assert run.wait() == 1, run.story()
    assert actions(run).count("try again") == 1
    assert "the same at the same place" in run.text()


def test_a_file_that_is_missing_on_the_only_node_is_not_looked_for_again(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path, "open('/nowhere/at/all')")
    run.start("--mode", "ps", "--workers", "2", "--no-display")
    assert run.wait() == 1, run.story()
    assert "try again" not in actions(run)
    assert run.text().count("Traceback (most recent call last)") == 1, run.text()


def test_a_worker_that_ends_itself_in_the_loop_ends_the_job(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path, "if job.slot == 1: raise SystemExit(3)")
    run.start("--mode", "allreduce", "--workers", "2", "--no-display")
    assert run.wait() == 1, run.story()
    assert "ended itself with exit code 3" in run.text()


def test_a_save_behind_the_loop_that_never_succeeds_ends_the_job(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path, "")
    with run.script.open("a") as script:
        script.write("\nraise ConnectionResetError('the store is gone')\n")
    run.start("--mode", "allreduce", "--workers", "1", "--no-display", "--script-retries", "2")
    assert run.wait() == 1, run.story()
    assert actions(run).count("try again") == 2
