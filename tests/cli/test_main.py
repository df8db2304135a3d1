"""The command line as users meet it: exit codes and one line on stderr, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from everstep.agent.rundir import RunDirLock
from everstep.cli import doctor
from everstep.cli.main import main
from everstep.config.load import load_spec, save_spec


def everstep(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["everstep", *args])
    monkeypatch.delenv("EVERSTEP_DEBUG", raising=False)
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.startswith("everstep: ") and err.count("\n") == 1, err
    return err


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hi')\n")
    return str(path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--wrokers", "2", "x.py"], "--workers"),
        (["run", "--workers", "two", "x.py"], "two"),
        (["run", "--workers", "0", "SCRIPT"], "workers"),
        (["run", "--consistency", "chaos", "SCRIPT"], "chaos"),
        (["run", "--bind", "nonsense", "SCRIPT"], "HOST:PORT"),
        (["run", "nowhere.py"], "nowhere.py"),
        (["run"], "script"),
        (["run", "-c", "no.yaml", "SCRIPT"], "no.yaml"),
        (["frobnicate"], "frobnicate"),
        (["status", "/nonexistent"], "/nonexistent"),
        (["logs", "/nonexistent"], "/nonexistent"),
        (["scale", "/nonexistent", "--workers", "2"], "/nonexistent"),
        (["resize", "/nonexistent", "--ps-memory", "2GB"], "/nonexistent"),
        (["resize", "/nonexistent"], "nothing to resize: give --ps-memory"),
        (["resize", "/nonexistent", "--ps-memory", "much"], "--ps-memory much: expected a size such as 2GB"),
        (["resize", "/nonexistent", "--worker-memory", "0"], "--worker-memory 0: must be above 0"),
        (["resize", "/nonexistent", "--ps-threads", "0"], "--ps-threads 0: at least 1"),
        (["resize", "k8s:flights", "--ps-memory", "2GB"], "of a pod are fixed when it is made"),
        (["run", "--ps-memory", "1MB", "SCRIPT"], "ps_memory = '1MB' (--ps-memory): must be from 128MiB"),
        (["run", "--worker-memory", "lots", "SCRIPT"], "worker_memory = 'lots' (--worker-memory): expected a size"),
        (["run", "--ps", "0", "--mode", "allreduce", "--ps-memory", "1GB", "SCRIPT"], "this job has no ps"),
        (["run", "--ps", "4", "--ps-memory", "2GB", "--max-memory", "7GB", "SCRIPT"], "4 ps of 2GB are more"),
        (["run", "--ps-memory", "900TB", "SCRIPT"], "ps_memory = '900TB'"),
        (["stop", "/nonexistent"], "/nonexistent"),
        (["explain", "/nonexistent"], "/nonexistent"),
        (["replay", "/nonexistent"], "/nonexistent"),
        (["top", "/nonexistent"], "/nonexistent"),
        (["chaos", "/nonexistent", "--heal"], "/nonexistent"),
        (["chaos", "/nonexistent", "--heal", "--kill", "ps:0"], "give one of --slow, --kill"),
        (["chaos", "/nonexistent", "--kill", "ps:0", "--for", "3s"], "--for says nothing about --kill"),
        (["chaos", "/nonexistent", "--slow", "ps:0", "--every", "3s"], "which takes --factor, --for, --burn"),
        (["run", "--policy", "nowhere_beside:choose", "SCRIPT"], "no module 'nowhere_beside'"),
        (["audit", "/nonexistent"], "/nonexistent"),
        (["agent", "--join", "nonsense", "--secret-file", "/nonexistent"], "HOST:PORT"),
        (["agent", "--join", "127.0.0.1:1", "--secret-file", "/nonexistent"], "/nonexistent"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    args: list[str], words: str, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = everstep(monkeypatch, *[script if a == "SCRIPT" else a for a in args])
    assert words in one_line(capsys)
    assert code == 2


def test_a_run_directory_in_use_is_refused(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirLock.take(tmp_path / "run"):
        assert everstep(monkeypatch, "run", "--run-dir", str(tmp_path / "run"), script) == 2
    assert "in use" in one_line(capsys)


def test_a_used_run_directory_and_one_of_another_version_are_refused(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    spec, origins = load_spec(None, {"script": script}, {})
    save_spec(run_dir, spec, origins)
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "worker-0.log").touch()
    assert everstep(monkeypatch, "run", "--run-dir", str(run_dir), script) == 2
    assert "has ended" in one_line(capsys)
    job = run_dir / "job.json"
    job.write_text(job.read_text().replace('"version": 1', '"version": 99'))
    for verb in (["run", "--run-dir", str(run_dir), script], ["status", str(run_dir)], ["audit", str(run_dir)]):
        assert everstep(monkeypatch, *verb) == 2
        assert "99" in one_line(capsys)


def test_verbs_that_need_a_running_job_say_so(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, origins = load_spec(None, {"script": script}, {})
    save_spec(tmp_path, spec, origins)
    for verb in (
        ["stop", str(tmp_path)],
        ["scale", str(tmp_path), "--workers", "3"],
        ["resize", str(tmp_path), "--ps-threads", "1"],
    ):
        assert everstep(monkeypatch, *verb) == 2
        assert "not running" in one_line(capsys)
    assert everstep(monkeypatch, "status", str(tmp_path)) == 0


def test_logs_of_one_member_of_all_and_of_nobody(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, origins = load_spec(None, {"script": script}, {})
    save_spec(tmp_path, spec, origins)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.log").write_text("one\n")
    (tmp_path / "logs" / "ps-0.log").write_text("zero\n")
    assert everstep(monkeypatch, "logs", str(tmp_path), "worker:1", "-f") == 0  # ends: the job is not running
    assert capsys.readouterr().out == "one\n"
    assert everstep(monkeypatch, "logs", str(tmp_path)) == 0
    assert capsys.readouterr().out == "ps:0 | zero\nworker:1 | one\n"
    for member in ("worker:7", "nobody"):
        assert everstep(monkeypatch, "logs", str(tmp_path), member) == 2
        assert member in one_line(capsys)


def test_our_own_bugs_are_one_line_with_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "run_doctor", lambda: 1 // 0)
    assert everstep(monkeypatch, "doctor") == 3
    assert "bug in everstep: ZeroDivisionError" in one_line(capsys)


def test_doctor_finds_this_machine_usable_and_a_bad_one_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert everstep(monkeypatch, "doctor") == 0
    out = capsys.readouterr().out
    for what in ("cores", "memory", "disk", "huge pages", "torch", "native", "Unix sockets", "open files", "clock"):
        assert what in out
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert doctor.check_huge_pages(tmp_path / "enabled").level == "warn"
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Finding("fail", "kernel", "too old"),))
    assert everstep(monkeypatch, "doctor") == 4
