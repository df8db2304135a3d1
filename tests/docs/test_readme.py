"""Every command and every script of README.md is run, or, for the two long ones, is exactly what CI runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embedded import run_embedded
from everstep.cli.link import ask_master
from everstep.errors import EverstepError
from everstep.model.job_view import JobView, MemberView
from everstep.net.messages import GetStatus

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


SHELL = [block.strip().splitlines() for block in blocks("sh")]


def everstep(*arguments: str, cwd: Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_it_opens_with_exactly_two_commands() -> None:
    assert [len(block) for block in SHELL[:2]] == [1, 1]
    first, second = SHELL[0][0], SHELL[1][0]
    assert README.index(first) < README.index(second) < README.index("## ")
    assert "python3 -m venv" in first and "everstep run" in first
    assert second.endswith("&& pytest -n 4")


def test_ci_runs_the_two_long_commands() -> None:
    """``.ci/run`` takes both lines out of README.md, so they are run as they stand there."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script
    taken = subprocess.run(
        ["bash", ROOT / ".ci" / "run", "--print-commands"], capture_output=True, text=True, timeout=30, check=True
    ).stdout.splitlines()
    assert taken == [SHELL[0][0], SHELL[1][0]]


def test_every_file_it_names_exists() -> None:
    for name in re.findall(r"`((?:docs|examples)/[\w./-]*|[A-Z]+\.md)`|\]\((\S+?)\)", README):
        path = name[0] or name[1]
        assert (ROOT / path).exists(), path


def test_every_everstep_command_and_flag_it_names_exists() -> None:
    lines = [line for block in SHELL for line in block] + re.findall(r"`(everstep[^`]*)`", README)
    used: dict[str, set[str]] = {}
    for line in lines:
        for verb, rest in re.findall(r"everstep (\w+)([^&]*)", line):
            used.setdefault(verb, set()).update(re.findall(r"--[a-z-]+", rest.partition("examples/")[0]))
    assert set(used) >= {"run", "status", "scale", "logs", "explain", "audit", "replay", "doctor", "stop", "agent"} | {
        "drain",
        "checkpoint",
        "resume",
        "advise",
    }
    for verb, flags in used.items():
        shown = everstep(verb, "--help", cwd=ROOT)
        assert shown.returncode == 0, verb
        for flag in flags:
            assert flag in shown.stdout, f"everstep {verb} {flag}"


@pytest.mark.processes
def test_the_script_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[0])
    done = run_embedded(tmp_path, 110.0)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"accuracy ([\d.]+)", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 0.7, done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert everstep("audit", str(run_dir), cwd=tmp_path).returncode == 0


PACE = """if not os.path.exists("hurry"): time.sleep({pause_s})
    job.report("""


def shorter(examples: Path, flights_rows: int) -> None:
    """The commands stay as they stand; what they read is shortened, and a step takes long until all that was to happen
    in the job has happened: tests/examples trains on all of it."""
    for name, pause_s in (("01_flights_dlrm.py", 2.0), ("04_fashion_mnist.py", 0.2)):
        text = (examples / name).read_text()
        assert text.count("\n    job.report(loss=loss)") == 1
        text = text.replace("\n    job.report(loss", "\n    " + PACE.format(pause_s=pause_s) + "loss")
        (examples / name).write_text(text.replace("\nimport torch\n", "\nimport os, time, torch\n", 1))
    data = examples / "data"
    flights = data / "flights.parquet"
    pq.write_table(pq.read_table(flights).slice(0, flights_rows), flights)
    for which, head in (("images-idx3", 16), ("labels-idx1", 8)):
        path = data / "fashion_mnist" / f"train-{which}-ubyte.gz"
        size = 28 * 28 if "images" in which else 1
        raw = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(raw[:4] + (400).to_bytes(4, "big") + raw[8 : head + 400 * size], 1))
    text = data / "tinyshakespeare.txt.gz"
    text.write_bytes(gzip.compress(gzip.decompress(text.read_bytes())[:400_000], 1))


class Job:
    """A command of README.md in the background, in a folder with the examples."""

    def __init__(self, command: str, folder: Path, flights: int = 0) -> None:
        shutil.copytree(ROOT / "examples", folder / "examples")
        shorter(folder / "examples", flights)
        self.replicated = "--mode allreduce" in command
        self.folder, self.run_dir = folder, re.search(r"--run-dir (\S+)", command)[1]  # type: ignore[index]
        self.process = subprocess.Popen(
            command.split(),
            cwd=folder,
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            executable=BIN / "everstep",
            start_new_session=True,
        )

    def status(self) -> JobView | None:
        try:
            answer = ask_master(self.folder / self.run_dir, GetStatus(), timeout_s=20.0)
        except (EverstepError, OSError):
            return None
        assert isinstance(answer, JobView)
        return answer

    def living(self, role: str) -> MemberView | None:
        """A member of this role that is up (a worker: at work)."""
        status = self.status()
        members = status.members if status is not None else ()
        alive = [m for m in members if m.role.value == role and m.state == "alive"]
        up = [m for m in alive if role == "ps" or m.works_on or self.replicated]
        return up[0] if up else None

    def samples(self) -> int:
        status = self.status()
        return status.samples_done if status is not None else 0

    def protected(self) -> bool:
        status = self.status()
        found = status.protection if status is not None else None
        return found is not None and found.full > 0 and not found.less + found.none

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def run(self, line: str, role: str = "worker") -> str:
        """A line of README.md beside the job; ``kill -9 PID`` kills a member of ``role``."""
        if line == "kill -9 PID":
            victim = self.living(role)
            assert victim is not None
            os.kill(victim.pid, signal.SIGKILL)
            return ""
        shown = everstep(*line.split()[1:], cwd=self.folder, timeout_s=280.0)
        assert shown.returncode == 0, f"{line}: {shown.stdout}{shown.stderr}"
        return shown.stdout

    def finish(self, timeout_s: float, words: str = "AUC") -> str:
        output, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, output
        assert words in output
        return output

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_what_to_kill_and_what_to_watch(tmp_path: Path) -> None:
    """The second part of the README, line by line, against one job that is killed meanwhile."""
    (start,), during, after = SHELL[2], SHELL[3], SHELL[4]
    job = Job(start, tmp_path, flights=12_000)
    try:
        until(lambda: job.living("worker") is not None, job.process)
        for line in during:
            job.run(line)
            if line == "kill -9 PID":
                os.kill(int(json.loads((tmp_path / "runs/demo/master.json").read_text())["pid"]), signal.SIGKILL)
        job.hurry()
        job.finish(150)
        for line in after:
            job.run(line)
        report = job.run("everstep audit runs/demo")
        assert "exactly once" in report and "train e4" in report
        summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
        assert summary["failures"]["worker"] >= 1 and summary["failures"]["master"] >= 1
    finally:
        job.close()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_parameters_that_survive(tmp_path: Path) -> None:
    """The third part: a ps is killed, ps are added and emptied, checkpoints are taken and gone on from."""
    (start,), during, after = SHELL[5], SHELL[6], SHELL[7]
    job = Job(start, tmp_path, flights=12_000)
    try:
        until(lambda: job.living("worker") is not None and job.protected(), job.process)
        for line in during:
            job.run(line, role="ps")
        job.hurry()
        job.finish(200)
        for line in after:
            job.run(line)
        for run in ("safe", "again"):
            assert "exactly once" in job.run(f"everstep audit runs/{run}")
        summary = json.loads((tmp_path / "runs/safe/summary.json").read_text())
        assert summary["failures"]["ps"] >= 1
        assert (
            list((tmp_path / "runs/export").glob("*.parquet")) and (tmp_path / "runs/export/dense.safetensors").exists()
        )
    finally:
        job.close()


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_whole_model_on_every_worker(tmp_path: Path) -> None:
    """The fourth part: a worker is killed, another one is taken away; then the same bits on any number of workers."""
    (start,), during, after = SHELL[8], SHELL[9], SHELL[10]
    job = Job(start, tmp_path)
    try:
        until(lambda: job.samples() > 500, job.process)
        for line in during:
            job.run(line)
        job.hurry()
        job.finish(150, "test accuracy")
        for line in after:
            job.run(line)
        report = job.run("everstep audit runs/clothes")
        assert "exactly once" in report and "train e39" in report
        assert json.loads((tmp_path / "runs/clothes/summary.json").read_text())["failures"]["worker"] >= 1
    finally:
        job.close()


def until(holds: Callable[[], bool], job: subprocess.Popen[str], timeout_s: float = 240.0) -> None:
    """Wait for ``holds()``; fails when the job ends first or it takes too long."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.2)
