"""One command, real processes, ``kill -9``: the wiring of everything. Every recovery twice in a row within a run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from local_jobs import Run, until

from everstep.agent.rundir import in_use
from everstep.cli.scale import scale
from everstep.cli.status import stop_job
from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.cold
def test_a_job_trains_to_its_end_and_leaves_nothing(run: Run) -> None:
    run.write(epochs=1, pause_s=0.0)
    code = run.start("--workers", "2", "--ps", "2").wait()
    assert code == 0, run.story()
    text = run.text()
    assert "worker 0 begins" in text and "worker 0 ends" in text and "worker 1 begins" not in text
    assert "done: 2,000 samples" in text, text
    assert run.leftovers() == {}
    assert list((run.run_dir / "sock").iterdir()) == []
    run.check_audit()
    for verb, words in {
        "audit": "exactly once",
        "replay": "every instruction is the same",
        "explain": "finish the job",
        "status": "done: 2,000 samples",
        "logs": "worker:1 | worker 1 ends",
    }.items():
        code, out = run.everstep(verb, str(run.run_dir))
        assert code == 0 and words in out, out
    code, out = run.everstep("run", "--run-dir", str(run.run_dir), str(run.script))
    assert code == 2 and out.startswith("everstep: ") and "has ended" in out, out


def test_workers_killed_twice(run: Run) -> None:
    run.start("--workers", "2")
    for life in (1, 2):
        member = run.alive(Role.WORKER, 1, at_least=life)
        run.trained(life * 150)
        os.kill(member.pid, signal.SIGKILL)
    run.alive(Role.WORKER, 1, at_least=3)
    run.hurry()
    run.ended_well()
    assert "2 worker" in run.text()


def test_a_worker_told_to_end_by_somebody_else_is_replaced_twice(run: Run) -> None:
    run.start("--workers", "1")
    for life in (1, 2):
        member = run.alive(Role.WORKER, 0, at_least=life)
        run.trained(life * 150)
        os.kill(member.pid, signal.SIGTERM)
    run.hurry()
    run.ended_well()
    assert "done: 8,000 samples" in run.text(), run.text()


def test_status_tells_of_a_running_job(run: Run) -> None:
    import json

    run.start("--workers", "2", "--ps", "2")
    for slot in range(2):
        run.alive(Role.WORKER, slot)
    run.trained(100)
    code, out = run.everstep("status", str(run.run_dir), "--json")
    report = json.loads(out)
    assert code == 0 and report["running"] and report["phase"] == "training"
    assert {(m["role"], m["slot"]) for m in report["members"]} >= {("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)}
    for m in report["members"]:
        assert m["pid"] > 0 and m["incarnation"] == 1 and m["node"] == "node0" and m["state"] == "alive"
    code, out = run.everstep("status", str(run.run_dir))
    assert code == 0 and "worker:1" in out and "alive" in out
    code, out = run.everstep("run", "--run-dir", str(run.run_dir), str(run.script))
    assert code == 2 and "in use" in out
    code, out = run.everstep("stop", str(run.run_dir))
    assert (code, out) == (0, "stopping\n")
    assert run.wait() == 0, run.story()


def test_master_killed_twice_while_workers_train_on(run: Run) -> None:
    run.start("--workers", "2")
    pid = 0
    for life in (1, 2):
        pid = run.master_pid(other_than=pid)
        run.trained(life * 150)
        os.kill(pid, signal.SIGKILL)
    run.master_pid(other_than=pid)
    assert run.alive(Role.WORKER, 0).incarnation == 1
    run.hurry()
    run.ended_well()


def test_worker_and_master_killed_at_once_twice(run: Run) -> None:
    run.start("--workers", "2")
    pid = 0
    for life in (1, 2):
        pid = run.master_pid(other_than=pid)
        member = run.alive(Role.WORKER, 0, at_least=life)
        run.trained(life * 150)
        for victim in (pid, member.pid):
            os.kill(victim, signal.SIGKILL)
    run.hurry()
    run.ended_well()


def test_template_killed_twice(run: Run) -> None:
    run.start("--workers", "2")
    for life in (1, 2):
        member = run.alive(Role.WORKER, 0, at_least=life)
        run.trained(life * 100)
        template = int(Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(template, signal.SIGKILL)
    run.hurry()
    run.ended_well()


def test_losing_a_ps_ends_the_job_with_one_clear_line(run: Run) -> None:
    run.start("--workers", "2", "--ps", "2")
    member = run.alive(Role.PS, 1)
    run.trained(100)
    os.kill(member.pid, signal.SIGKILL)
    assert run.wait() == 4, run.story()
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("everstep: ") and "ps" in last and "export" in last, run.text()
    assert run.leftovers() == {}


@pytest.mark.parametrize(("signo", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_stop_everything_with_a_code_each(run: Run, signo: int, exit_code: int) -> None:
    run.write(epochs=50)
    run.start("--workers", "2")
    run.trained(100)
    assert run.popen is not None
    run.popen.send_signal(signo)
    assert run.wait() == exit_code, run.story()
    code, text = run.everstep("audit", str(run.run_dir))
    assert code == 10 and "not over (stopped" in text, text
    assert "stopping" in run.text() and "Traceback" not in run.text()
    assert run.leftovers() == {}
    assert not in_use(run.run_dir)


def test_the_agent_killed_takes_everything_along(run: Run) -> None:
    run.write(epochs=50)
    run.start("--workers", "2", "--ps", "2")
    run.trained(100)
    assert run.popen is not None
    run.popen.send_signal(signal.SIGKILL)
    run.popen.wait()
    assert run.leftovers() == {}


def test_the_agent_killed_at_any_moment_of_its_start_leaves_nothing(run: Run) -> None:
    for processes in (1, 2, 3, 5):
        run.run_dir = run.folder / f"run{processes}"
        run.start("--workers", "2", "--ps", "1")
        assert run.popen is not None
        until(lambda n=processes: len(run.processes()) >= n or run.popen.poll() is not None)  # type: ignore[misc]
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait()
        assert run.leftovers() == {}, processes


def test_the_parent_killed_ends_the_job(run: Run) -> None:
    run.write(epochs=50)
    # a parent that starts the job and waits
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    run.start("--workers", "2", under=(sys.executable, "-c", code))
    run.trained(100)
    assert run.popen is not None
    run.popen.send_signal(signal.SIGKILL)
    run.popen.wait()
    assert run.leftovers() == {}


def test_the_terminal_closed_ends_the_job(run: Run) -> None:
    import pty

    run.write(epochs=50)
    argv = [sys.executable, "-m", "everstep.cli", "run", "--run-dir", str(run.run_dir), str(run.script)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, argv)
    run.trained(100)
    os.close(terminal)  # the kernel sends SIGHUP to the session of a terminal that is gone
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert run.leftovers() == {}


def test_scaling_up_and_down_twice_restarts_nobody(run: Run) -> None:
    run.write(epochs=6, pause_s=0.4)
    run.start("--workers", "1")
    first = run.alive(Role.WORKER, 0)
    for life in (1, 2):
        scale(run.run_dir, 2, None)
        run.alive(Role.WORKER, 1, at_least=life)
        run.trained(life * 100)
        scale(run.run_dir, 1, None)
    assert run.alive(Role.WORKER, 0).pid == first.pid
    run.hurry()
    run.ended_well()


def test_stop_ends_the_job(run: Run) -> None:
    run.write(epochs=50)
    run.start("--workers", "2")
    run.trained(100)
    stop_job(run.run_dir)
    assert run.wait() == 0, run.story()
    assert run.leftovers() == {}


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import everstep as es\njob = es.join()\nraise ValueError('no good')", 1, "ValueError: no good (train.py:3)"),
        ("import nowhere_to_be_found", 1, "No module named 'nowhere_to_be_found'"),
        ("import everstep as es\njob = es.join()", 1, "without taking a batch"),
        ("print('not a job')", 1, "without joining the job"),
        ("import everstep as es\nes.join().loader('no.parquet', batch_size=8)", 2, "no.parquet"),
    ],
)
def test_the_scripts_own_error_is_shown_once(run: Run, code: str, exit_code: int, words: str) -> None:
    run.script.write_text(code)
    assert run.start("--workers", "2").wait() == exit_code, run.story()
    text = run.text()
    last = text.strip().splitlines()[-1]
    assert last.startswith("everstep: ") and words in last and "worker" in last, text
    assert text.count("Traceback") <= 1 and text.count("no good (train.py:3)") <= 2
    assert run.leftovers() == {}


def test_a_port_in_use_is_one_line(run: Run) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run.start("--bind", f"127.0.0.1:{port}").wait() == 4, run.story()
    assert f"port {port}" in run.text() and "Traceback" not in run.text()
    assert run.leftovers() == {}


def test_a_full_disk_ends_the_job_in_one_line(run: Run) -> None:
    import subprocess

    run.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(run.run_dir)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    try:
        run.write(epochs=200, pause_s=0.0)
        config = run.folder / "job.yaml"
        config.write_text("disk_full_s: 3\n")
        assert run.start("-c", str(config), "--workers", "2").wait() == 4, run.story()
        last = run.text().strip().splitlines()[-1]
        assert last.startswith("everstep: ") and "space" in last and "Traceback" not in run.text(), run.text()
        assert run.leftovers() == {}
    finally:
        subprocess.run(["umount", "-l", str(run.run_dir)], capture_output=True)
