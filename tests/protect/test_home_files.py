"""Files of nodes that share no directory: written, read and appended through the first node's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.config.spec import JobSpec
from everstep.errors import StorageError
from everstep.ids import NodeId
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret, create_secret, load_secret
from everstep.net.messages import Bad, FilePut, LogGrown, Stat
from everstep.net.sockets import listen_tcp
from everstep.protect.home_files import (
    CHECKPOINTS,
    PIECE_BYTES,
    RESUMED,
    HomeFiles,
    HomeLink,
    HomePlace,
    LogSender,
    link_home,
    place_opener,
    served_places,
)
from everstep.storage.places import LocalPlace

FAR = Identity(purpose="data", role="ps", node=NodeId("b"), pid=1)


class Home:
    """The first node's files, and a way to them from another node."""

    def __init__(self, folder: Path, secret: Secret, tls: bool) -> None:
        self.logs = folder / "audit"
        self.logs.mkdir()
        self.checkpoints = folder / "checkpoints"
        listener = listen_tcp("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.files = HomeFiles({CHECKPOINTS: self.checkpoints}, self.logs, listener)
        self.files.serve(secret, tls)
        self.link = HomeLink(Address(NodeId("node0"), "", "127.0.0.1", self.port), secret, FAR, tls)
        self.place = HomePlace(self.link, CHECKPOINTS)

    def close(self) -> None:
        self.link.close()
        self.files.close()


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    create_secret(tmp_path / "secret")
    return load_secret(tmp_path / "secret")


@pytest.fixture
def home(tmp_path: Path, secret: Secret) -> Iterator[Home]:
    made = Home(tmp_path, secret, tls=True)
    yield made
    made.close()


def test_a_file_appears_whole_or_not_at_all(home: Home) -> None:
    data = bytes(range(256)) * (PIECE_BYTES // 100)
    with home.place.create("images/000001/b.img") as file:
        for at in range(0, len(data), 300_000):
            file.write(data[at : at + 300_000])
        assert home.place.sizes().get("images/000001/b.img") is None
        file.commit()
    assert (home.checkpoints / "images/000001/b.img").read_bytes() == data
    with home.place.open("images/000001/b.img") as found:
        found.seek(len(data) - 10)
        assert found.read(100) == data[-10:]
        found.seek(0)
        assert found.read() == data
    with home.place.create("images/000001/c.img") as file:
        file.write(data)  # and given up
    assert [
        name for name in home.place.sizes() if "c.img" in name and not name.rpartition("/")[2].startswith(".")
    ] == []
    home.place.put("manifest-1.json", b"{}")
    assert home.place.names() == ["manifest-1.json"] and home.place.read("manifest-1.json", 10) == b"{}"
    home.place.delete("manifest-1.json")
    assert home.place.names() == []
    home.files.close()
    assert not list(home.checkpoints.rglob(".*.tmp")), "nothing half-written stays"


def test_what_is_not_there_and_what_may_not_be_named(home: Home) -> None:
    with pytest.raises(FileNotFoundError):
        home.place.open("images/none.img")
    with pytest.raises(StorageError, match="is no path"):
        home.place.create("../secret")
    with pytest.raises(StorageError, match="is no path"):
        home.link.ask(FilePut(CHECKPOINTS, "../secret", "x", 0, True), b"x")
    with pytest.raises(StorageError, match="no place 'etc'"):
        home.link.ask(FilePut("etc", "passwd", "x", 0, True), b"x")
    with pytest.raises(StorageError, match="no audit log"):
        home.link.ask(LogGrown("b", "../secret", 0), b"x")
    assert isinstance(home.files.handle(Stat(), memoryview(b""), None)[0], Bad)


def test_a_piece_out_of_order_is_refused_and_said(home: Home) -> None:
    home.link.ask(FilePut(CHECKPOINTS, "a", "one", 0), b"1234")
    with pytest.raises(StorageError, match="4 bytes are here, not 9"):
        home.link.ask(FilePut(CHECKPOINTS, "a", "one", 9), b"x")
    with pytest.raises(StorageError, match="its beginning is not here"):
        home.link.ask(FilePut(CHECKPOINTS, "a", "one", 4, True), b"x")
    assert "a" not in home.place.names()


def test_logs_come_as_they_grow_and_what_was_told_stays(home: Home, tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    sender = LogSender(far, NodeId("b"), home.link)
    log = far / "ps-2.1.log"
    log.write_bytes(b"a" * 1000)
    (far / "notes.txt").write_text("nobody's")
    sender.send()
    with log.open("ab") as file:
        file.write(b"b" * (PIECE_BYTES + 7))
    sender.send()
    sender.send()
    assert (home.logs / "ps-2.1.log").read_bytes() == log.read_bytes()
    with log.open("ab") as file:
        file.write(b"end")
    again = LogSender(far, NodeId("b"), home.link)  # it knows nothing of what was sent
    again.start()
    again.close()
    assert (home.logs / "ps-2.1.log").read_bytes() == log.read_bytes()
    assert [p.name for p in home.logs.iterdir()] == ["ps-2.1.log"]
    assert home.files.wait(0.0) == ()


def test_who_is_there_and_owes_logs_is_waited_for_and_who_is_gone_is_not(tmp_path: Path) -> None:
    now = [100.0]
    files = HomeFiles({}, tmp_path, now=lambda: now[0])
    from everstep.net.messages import LogsReported

    files.handle(LogsReported("b", False), memoryview(b""), None)
    files.handle(LogsReported("c", True), memoryview(b""), None)
    assert files.wait(0.0) == ("b",)
    now[0] += 60.0
    assert files.wait(0.0) == ()


def test_a_wrong_secret_gets_nothing(home: Home, tmp_path: Path) -> None:
    create_secret(tmp_path / "other")
    wrong = HomeLink(
        Address(NodeId("node0"), "", "127.0.0.1", home.port), load_secret(tmp_path / "other"), FAR, tls=True
    )
    with pytest.raises(StorageError, match="cannot be reached"):
        HomePlace(wrong, CHECKPOINTS).names()


def test_a_directory_is_the_first_nodes_and_a_url_everybodys(tmp_path: Path, secret: Secret) -> None:
    spec = JobSpec(files_port=7001, resume_from=str(tmp_path / "old"))
    master = Address(NodeId("node0"), "", "10.0.0.1", 7000)
    at_home = Identity(purpose="data", role="ps", node=NodeId("node0"), pid=1)
    assert link_home(spec, master, secret, at_home) is None
    assert link_home(JobSpec(), master, secret, FAR) is None
    opened = place_opener(link_home(spec, master, secret, FAR), spec)
    assert opened(str(tmp_path / "x")).url.endswith(CHECKPOINTS)
    assert opened(spec.resume_from).url.endswith(RESUMED)
    assert isinstance(opened(f"file://{tmp_path}"), LocalPlace)
    assert isinstance(place_opener(None, spec)(str(tmp_path)), LocalPlace)
    assert set(served_places(spec, tmp_path)) == {CHECKPOINTS, RESUMED}
    assert set(served_places(JobSpec(checkpoint_to="s3://b/j"), tmp_path)) == set()
