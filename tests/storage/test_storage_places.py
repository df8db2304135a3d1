"""Places: files appear completely or not at all; what goes wrong is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.errors import ConfigError, StorageError
from everstep.storage.places import LocalPlace, StoragePlace, open_place


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePlace:
    return open_place(tmp_path / "new" / "place" if request.param == "local" else f"memory://{tmp_path}")


def test_a_file_is_there_after_its_commit(place: StoragePlace) -> None:
    assert place.names() == [] and place.sizes() == {}
    with place.create("images/1/a.img") as file:
        file.write(b"one")
        file.write(memoryview(b"two"))
        file.commit()
    place.put("manifest", b"x" * 100)
    assert place.sizes() == {"images/1/a.img": 6, "manifest": 100}
    assert place.names() == ["manifest"]
    with place.open("images/1/a.img") as stream:
        assert stream.read(4) == b"onet" and stream.read() == b"wo"
    assert place.read("manifest", 100) == b"x" * 100
    with pytest.raises(StorageError, match="longer than 99"):
        place.read("manifest", 99)
    place.put("manifest", b"y")
    assert place.read("manifest", 9) == b"y"
    place.delete("manifest")
    place.delete("manifest")
    place.delete("images/1/a.img")
    assert place.sizes() == {}
    with pytest.raises(FileNotFoundError):
        place.open("manifest")


def test_a_local_file_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    place.put("a", b"old")
    with pytest.raises(RuntimeError), place.create("a") as file:
        file.write(b"new")
        raise RuntimeError
    assert place.read("a", 9) == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a process of its own: the write fails in the middle as on a full disk."""
    code = (
        "import resource, signal, sys\n"
        "from everstep.storage.places import LocalPlace\n"
        "from everstep.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "place = LocalPlace(__import__('pathlib').Path(sys.argv[1]))\n"
        "place.put('old', b'good')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    place.put('new', b'x' * 5000)\n"
        "except StorageError as error:\n"
        "    print(error, error.passing)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"cannot write {tmp_path}/new: File too large False", done
    assert {p.name for p in tmp_path.iterdir()} == {"old"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_file_system_is_one_line(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        place = LocalPlace(tmp_path)
        place.put("old", b"good")
        with pytest.raises(StorageError, match="No space left on device") as caught:
            place.put("new", b"x" * 1_000_000)
        assert not caught.value.passing
        assert place.sizes() == {"old": 4}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*file/a: Not a directory|File exists"):
        open_place(tmp_path / "file").put("a", b"")
    assert open_place(tmp_path / "file").names() == []


def test_unknown_protocols_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://x: .*"):
        open_place("nosuch://x")


def test_file_urls_are_directories(tmp_path: Path) -> None:
    open_place(f"file://{tmp_path}").put("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["ftp://host/a", "sftp://host/a", "https://host/a", "nosuch://host/a"])
def test_a_url_that_does_not_work_says_which_do(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_place(url)
    assert "s3://" in str(error.value) and "file://" in str(error.value) and "\n" not in str(error.value)
