import socket
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.agent.rundir import RunDirLock, in_use, remove_sockets
from everstep.errors import ConfigError, PlatformError


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


def test_a_run_directory_is_its_users_own(tmp_path: Path) -> None:
    with RunDirLock.take(tmp_path / "a" / "run"):
        for folder in (tmp_path / "a" / "run", tmp_path / "a" / "run" / "logs"):
            assert folder.stat().st_mode & 0o077 == 0
