"""A job whose master's machine is taken back goes on on another one, with nothing shared but the place of its
checkpoints: the audit spans both parts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_jobs import until

from everstep.cli.display import read_summary
from everstep.cli.replay import replay
from everstep.model.member import Role

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "mode",
    [
        ("--ps", "2", "--parity", "1+1"),
        ("--mode", "allreduce"),
        ("--mode", "allreduce", "--ps", "1"),
    ],
    ids=["ps", "allreduce", "hybrid"],
)
def test_a_notice_for_the_masters_machine_moves_the_job(run: Run, mode: tuple[str, ...], tmp_path: Path) -> None:
    run.write(epochs=30, pause_s=0.1)
    if "--ps" not in mode:
        run.script.write_text(run.script.read_text().replace("job.sparse(Net())", "Net()"))
    place, going = tmp_path / "place", tmp_path / "going"
    run.start("--workers", "2", *mode, "--checkpoint-to", str(place), "--notices", f"file:{going}")
    run.alive(Role.WORKER, 1)
    run.trained(300)
    going.write_text("20")
    told = time.time()
    assert run.wait() == 143, run.story()
    assert time.time() - told < 20.0 or not run.leftovers(), run.story()
    assert f"everstep unsuspend {place} goes on" in run.text(), run.story()
    assert run.leftovers() == {}
    old, run.run_dir = run.run_dir, tmp_path / "elsewhere" / "run"
    shutil.rmtree(old)  # with its machine
    script = tmp_path / "elsewhere" / "train.py"
    script.parent.mkdir()
    run.script.rename(script)
    going.unlink()
    source = str(place)
    code, text = run.everstep("unsuspend", source, "--run-dir", str(run.run_dir))
    assert code == 2 and "does not exist" in text, text
    run.go_on_from(source, "--run-dir", str(run.run_dir), "--script", str(script))
    run.alive(Role.WORKER, 0, 2)
    code, text = run.everstep("unsuspend", source, "--run-dir", str(tmp_path / "third"))
    assert code == 2 and "it went on at" in text and str(run.run_dir) in text, text
    run.hurry()
    run.ended_well(400)
    assert replay(run.run_dir).ok


def test_of_two_that_unsuspend_a_place_at_once_one_goes_on(run: Run, tmp_path: Path) -> None:
    run.write(epochs=20, pause_s=0.1)
    place, going = tmp_path / "place", tmp_path / "going"
    run.start("--ps", "2", "--checkpoint-to", str(place), "--notices", f"file:{going}")
    run.alive(Role.WORKER, 0)
    run.trained(300)
    going.write_text("20")
    assert run.wait() == 143, run.story()
    shutil.rmtree(run.run_dir)
    going.unlink()
    takers: dict[Path, subprocess.Popen[bytes]] = {}
    for name in ("one", "two"):
        run_dir = tmp_path / name / "run"
        run_dir.parent.mkdir()
        argv = [
            sys.executable,
            "-m",
            "everstep.cli",
            "unsuspend",
            str(place),
            "--no-display",
            "--run-dir",
            str(run_dir),
        ]
        out = run_dir.with_name("out").open("w")
        takers[run_dir] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=run.folder)
    try:
        until(lambda: any(taker.poll() is not None for taker in takers.values()))
    except BaseException:
        for taker in takers.values():
            taker.kill()
        raise
    (loser,) = (run_dir for run_dir, taker in takers.items() if taker.poll() is not None)
    (winner,) = (run_dir for run_dir in takers if run_dir != loser)
    run.run_dir, run.popen, run.out = winner, takers[winner], winner.with_name("out")
    text = loser.with_name("out").read_text()
    assert takers[loser].returncode == 2, text
    assert text.count("\n") == 1 and "it went on at" in text and str(winner) in text, text
    run.alive(Role.WORKER, 0, 2)
    run.hurry()
    run.ended_well(400)


def test_a_checkpoint_that_is_not_written_in_time_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    run.write(epochs=30, pause_s=0.1)
    text = run.script.read_text().replace("time.sleep(0.1)", "time.sleep(0.1 if not os.path.exists('stuck') else 600)")
    run.script.write_text(text)
    place, going = tmp_path / "place", tmp_path / "going"
    run.start(
        "--ps", "2", "--checkpoint-to", str(place), "--checkpoint-every", "1s", "--notices", f"file:{going}"
    )  # fmt: skip
    run.alive(Role.WORKER, 0)
    until(lambda: len(list(place.glob("manifest-*.json"))) > 1, why=run.story)
    (tmp_path / "stuck").touch()
    until(lambda: run.samples() > 0, why=run.story)
    time.sleep(0.5)
    going.write_text("9")
    assert run.wait() == 143, run.story()
    summary = read_summary(run.run_dir)
    assert summary is not None and summary.is_suspended, run.story()
    (tmp_path / "stuck").unlink()
    old, run.run_dir = run.run_dir, tmp_path / "elsewhere"
    shutil.rmtree(old)
    going.unlink()
    run.go_on_from(str(place), "--run-dir", str(run.run_dir))
    run.alive(Role.WORKER, 0, 2)
    run.hurry()
    run.ended_well(400)
