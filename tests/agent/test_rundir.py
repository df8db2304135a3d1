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
