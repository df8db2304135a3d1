"""Every command and every script of README.md is run, or, for the two long ones, is exactly what CI runs."""

from __future__ import annotations

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

import pytest

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
    assert second.endswith("&& pytest -n 2")


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
    assert set(used) >= {"run", "status", "scale", "logs", "explain", "audit", "replay", "doctor", "stop", "agent"}
    for verb, flags in used.items():
        shown = everstep(verb, "--help", cwd=ROOT)
        assert shown.returncode == 0, verb
        for flag in flags:
            assert flag in shown.stdout, f"everstep {verb} {flag}"


@pytest.mark.processes
def test_the_script_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[0])
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    loss = re.search(r"loss ([\d.]+)", done.stdout)
    assert loss is not None and float(loss[1]) < 0.6, done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert everstep("audit", str(run_dir), cwd=tmp_path).returncode == 0


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_what_to_kill_and_what_to_watch(tmp_path: Path) -> None:
    """The second part of the README, line by line, against one job that is killed meanwhile."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (start,), during, after = SHELL[2], SHELL[3], SHELL[4]
    path = f"{BIN}:{os.environ['PATH']}"
    job = subprocess.Popen(
        start.split(),
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        executable=BIN / "everstep",
        start_new_session=True,
    )

    def members() -> list[dict[str, int | str]]:
        shown = everstep("status", "runs/demo", "--json", cwd=tmp_path)
        return json.loads(shown.stdout).get("members", []) if shown.returncode == 0 else []

    def living(role: str) -> dict[str, int | str] | None:
        found = [m for m in members() if m["role"] == role and m["state"] == "alive" and m.get("shard", "-")]
        return found[0] if found else None

    try:
        until(lambda: living("worker") is not None, job)
        for line in during:
            if line == "kill -9 PID":
                victim = living("worker")
                assert victim is not None
                os.kill(int(victim["pid"]), signal.SIGKILL)
                os.kill(int(json.loads((tmp_path / "runs/demo/master.json").read_text())["pid"]), signal.SIGKILL)
            else:
                shown = everstep(*line.split()[1:], cwd=tmp_path)
                assert shown.returncode == 0, f"{line}: {shown.stdout}{shown.stderr}"
        output, _ = job.communicate(timeout=150)
        assert job.returncode == 0, output
        assert "AUC" in output
        for line in after:
            shown = everstep(*line.split()[1:], cwd=tmp_path)
            assert shown.returncode == 0, f"{line}: {shown.stdout}{shown.stderr}"
        report = everstep("audit", "runs/demo", cwd=tmp_path).stdout
        assert "exactly once" in report and "train e4" in report
        summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
        assert summary["failures"]["worker"] >= 1 and summary["failures"]["master"] >= 1
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)


def until(holds: Callable[[], bool], job: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
    """Wait for ``holds()``; fails when the job ends first or it takes too long."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.2)
