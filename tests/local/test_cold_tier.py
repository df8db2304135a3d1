"""Rows on disk in real jobs: the same bits as in memory, though a ps is killed; a folder that takes none is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from local_jobs import Run, until

from everstep.model.job_view import ShownState
from everstep.model.member import Role
from everstep.monitor.audit import audit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TRAIN = """
import hashlib, os, time
import numpy as np, torch
import everstep as es

ROWS = 30_000
torch.set_num_threads(1)
job = es.join()
table = job.sparse(es.nn.Embedding("rows", 32), optimizer=es.Adagrad(lr=0.1))
for batch in job.steps(job.loader({{"ids": np.arange(ROWS)}}, batch_size=500, epochs=2)):
    ids = torch.cat([batch["ids"], torch.arange(100)]).unique()  # some rows are always hot
    table(ids).square().sum().backward()
    if not os.path.exists({hurry!r}):
        time.sleep(0.1)
if job.chief:
    with job.eval(table):
        seen = torch.cat([table(torch.arange(b, b + 1000)).detach() for b in range(0, ROWS, 1000)])
    print("digest", hashlib.sha256(seen.numpy().tobytes()).hexdigest(), flush=True)
"""


def digest(run: Run) -> str:
    assert run.wait(240) == 0, run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    return next(line for line in run.text().splitlines() if line.startswith("digest"))


def begin(folder: Path, *flags: str) -> Run:
    folder.mkdir()
    run = Run(folder)
    run.script.write_text(TRAIN.format(hurry=str(folder / "hurry")))
    return run.start("--workers", "1", "--consistency", "sync", "--seed", "3", *flags)


def on_disk(run: Run) -> int:
    status = run.status()
    ups = [m for m in status.members if m.role is Role.PS and m.state is ShownState.ALIVE] if status is not None else []
    return min((m.cold_bytes for m in ups), default=0)


def test_a_killed_ps_and_rows_on_disk_change_no_bit(tmp_path: Path) -> None:
    plain = begin(tmp_path / "plain", "--ps", "1")
    plain.hurry()
    wanted = digest(plain)
    cold_dir = tmp_path / "disk"
    cold_dir.mkdir()
    cold = ["--cold-dir", str(cold_dir), "--ps-limit-bytes", "3000000"]
    run = begin(tmp_path / "cold", "--ps", "3", "--parity", "2+1", *cold)
    until(lambda: on_disk(run) > 0, 120, run.story)
    os.kill(run.alive(Role.PS, 1).pid, signal.SIGKILL)
    run.alive(Role.PS, 1, at_least=2)
    code, out = run.everstep("status", str(run.run_dir))
    assert code == 0 and "on disk: ps:0 " in out, out
    run.hurry()
    assert digest(run) == wanted
    assert not list(cold_dir.iterdir())


def test_a_folder_that_takes_no_rows_is_one_line(tmp_path: Path) -> None:
    run = begin(tmp_path / "job", "--ps", "1", "--cold-dir", "/proc/no", "--ps-limit-bytes", "2000000")
    assert run.wait(60) != 0
    lines = [line for line in run.text().splitlines() if "cold_dir" in line]
    assert len(lines) == 1 and "/proc/no" in lines[0] and "No such file or directory" in lines[0], run.text()
