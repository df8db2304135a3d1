"""A disk that fills up while a job runs: the job waits for space, and logs give way first."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_jobs import until

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def small_disk(run: Run) -> Iterator[Path]:
    """The run directory, on a disk of its own."""
    run.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(run.run_dir)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk")
    try:
        yield run.run_dir
    finally:
        subprocess.run(["umount", "-l", str(run.run_dir)], capture_output=True, check=False)


def fill(folder: Path) -> Path:
    """A file that takes all the space there is."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as stream:
        piece = b"x" * 65536
        while piece:
            try:
                if stream.write(piece) < len(piece):
                    break
            except OSError:
                piece = piece[: len(piece) // 2]
    return path


def grow(path: Path) -> None:
    """Take what became free meanwhile, too."""
    with path.open("ab", buffering=0) as stream:
        try:
            while stream.write(b"x" * 4096) == 4096:
                pass
        except OSError:
            pass


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_job_waits_for_space_and_goes_on(run: Run, small_disk: Path, mode: str) -> None:
    run.write(epochs=10, pause_s=0.1)
    run.start("--mode", mode, "--workers", "2", "--ps", "1")
    run.trained(600)
    filler = fill(small_disk)
    until(lambda: "no space left on the disk" in run.text(), why=run.story)
    grow(filler)
    at = run.samples()
    until(lambda: run.master_pid() and run.samples() >= at, why=run.story)
    filler.unlink()
    until(lambda: "there is space again" in run.text(), why=run.story)
    run.hurry()
    run.ended_well()
    assert "Traceback" not in run.text() and "lost: " not in run.text(), run.text()


def test_a_job_that_gets_no_space_ends_in_one_line(run: Run, small_disk: Path) -> None:
    config = run.folder / "job.yaml"
    config.write_text("disk_full_s: 4\n")
    run.write(epochs=100, pause_s=0.05)
    run.start("-c", str(config), "--workers", "2")
    run.trained(600)
    filler = fill(small_disk)
    until(lambda: "no space left on the disk" in run.text(), why=run.story)
    grow(filler)
    assert run.wait() == 4, run.story()
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("everstep: ") and ("space" in last or "full" in last), run.text()
    assert "Traceback" not in run.text()
    assert run.leftovers() == {}
