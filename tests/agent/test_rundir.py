import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.agent.rundir import RunDirLock, in_use, remove_sockets
from everstep.cli.run import refuse_used, run_job
from everstep.config.load import save_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, PlatformError
from everstep.ids import Incarnation
from everstep.monitor.rotated import RotatedFile
from everstep.net.rendezvous import MasterInfo, write_master
from everstep.net.sockets import listen_tcp
from everstep.storage.atomic import private, write_atomic
from everstep.storage.journal import Journal
from everstep.storage.places import LocalPlace


def test_taken_directory_is_refused_in_one_line_and_free_again_after(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDirLock.take(tmp_path / "run"):
            assert in_use(tmp_path / "run")
            with pytest.raises(ConfigError, match=r"in use by another everstep \(pid \d+\)") as caught:
                RunDirLock.take(tmp_path / "run")
            assert "\n" not in str(caught.value)
        assert not in_use(tmp_path / "run")


def test_lock_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from everstep.agent.rundir import RunDirLock\n"
        "lock = RunDirLock.take(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=30)
    assert not in_use(tmp_path)
    RunDirLock.take(tmp_path).close()


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises((ConfigError, PlatformError)):
        RunDirLock.take(tmp_path / "run")


def test_an_unwritable_place_is_refused_in_one_line() -> None:
    with pytest.raises(PlatformError, match="choose another"):
        RunDirLock.take(Path("/proc/everstep-run"))


def test_only_sockets_are_removed(tmp_path: Path) -> None:
    (tmp_path / "sock").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock" / "ps-0.sock"))
    (tmp_path / "sock" / "note").write_text("stays")
    remove_sockets(tmp_path)
    assert [p.name for p in (tmp_path / "sock").iterdir()] == ["note"]


@pytest.mark.parametrize("name", ["logs", "secret", "journal.sqlite", "lock", "job.json", "elsewhere"])
def test_a_planted_link_is_refused(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "mine").mkdir()
    (run / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=f"{name} in it is a link"):
        RunDirLock.take(run)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: (tmp_path / "run").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        RunDirLock.take(tmp_path / "run")


@pytest.mark.parametrize("planted", ["events.jsonl", "logs", "logs/agent.log", "audit/x", "checkpoints/images"])
def test_a_planted_link_is_refused_and_not_followed(planted: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "run" / planted
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=rf"{planted} in it is a link, which everstep does not follow"):
        RunDirLock.take(tmp_path / "run")
    assert not list(elsewhere.iterdir())
    with pytest.raises(OSError, match=r"symbolic link|Is a directory"), open(link, "ab", opener=private):
        pass  # (nor does what writes there later)


def test_files_are_the_users_own(tmp_path: Path) -> None:
    with RunDirLock.take(tmp_path / "run"):
        run = tmp_path / "run"
        Journal(run / "journal.sqlite").close()
        RotatedFile(run / "members.jsonl", 100).close()
        write_atomic(run / "summary.json", b"{}")
        write_master(run, MasterInfo(pid=1, incarnation=Incarnation(1)))
        file = LocalPlace(run / "checkpoints").create("images/000001/bucket-0.img")
        file.write(b"x")
        file.commit()
        modes = {str(path.relative_to(run)): path.stat().st_mode & 0o777 for path in run.rglob("*")}
        assert set(modes.values()) == {0o600, 0o700} and len(modes) > 10, modes
    LocalPlace(tmp_path).put("shared", b"x")
    tmp_path.chmod(0o755)
    before = os.umask(0o027)
    try:
        LocalPlace(tmp_path).put("of a team", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "of a team").stat().st_mode & 0o777 == 0o640


def test_a_run_directory_in_which_nothing_ran_can_be_used_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunDirLock.take(run):
        save_spec(run, JobSpec(script="train.py"), {})
        (run / "journal.sqlite").write_bytes(b"")
        (run / "logs" / "master.log").write_text("cannot listen on 10.0.0.1:7000\n")
        refuse_used(run)
        assert not (run / "job.json").exists() and not (run / "journal.sqlite").exists()
        for sign in ("logs/worker-0.log", "logs/ps-1.log", "audit/ps-0.1.log", "notes.txt"):
            save_spec(run, JobSpec(script="train.py"), {})
            (run / sign).write_text("")
            with pytest.raises(ConfigError, match="holds a job that has ended"):
                refuse_used(run)
            assert (run / "job.json").exists()
            (run / sign).unlink()


def test_an_address_is_tried_before_there_is_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with listen_tcp("127.0.0.1", 0) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PlatformError, match="is in use"):
            run_job(None, {"script": "train.py", "bind": bind, "tls": "control"}, live=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]


def test_a_run_directory_is_its_users_own(tmp_path: Path) -> None:
    with RunDirLock.take(tmp_path / "a" / "run"):
        for folder in (tmp_path / "a" / "run", tmp_path / "a" / "run" / "logs"):
            assert folder.stat().st_mode & 0o077 == 0
