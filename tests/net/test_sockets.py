"""Unix sockets under long paths, TCP sockets that notice dead peers, errors in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from everstep.errors import ConfigError, PlatformError, WireError
from everstep.ids import Incarnation, NodeId
from everstep.model.member import Address
from everstep.net.rendezvous import MasterInfo, master_address, read_master, write_master
from everstep.net.retry import Deadline
from everstep.net.sockets import connect_tcp, connect_unix, is_local, listen_tcp, listen_unix, parse_host_port


def test_a_long_run_directory(run_dir: Path) -> None:
    path = run_dir / "sock" / "master.sock"
    assert len(str(path)) > 108
    with listen_unix(path) as listener, connect_unix(path, Deadline(5)) as one:
        other, _ = listener.accept()
        with other:
            one.sendall(b"x")
            assert other.recv(1) == b"x"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_stale_socket_is_replaced_in_one_step(run_dir: Path) -> None:
    path = run_dir / "ps-0.sock"
    listen_unix(path).close()  # its file stays, as after kill -9
    with pytest.raises(WireError, match=r"nobody listens at .*ps-0\.sock: Connection refused"):
        connect_unix(path, Deadline(5))
    with listen_unix(path) as listener, connect_unix(path, Deadline(5)):
        listener.accept()[0].close()
    assert [p.name for p in run_dir.iterdir()] == ["ps-0.sock"]


def test_no_socket(run_dir: Path) -> None:
    with pytest.raises(WireError, match="No such file"):
        connect_unix(run_dir / "none.sock", Deadline(5))
    with pytest.raises(WireError, match="No such file"):
        connect_unix(run_dir / "no" / "none.sock", Deadline(5))


def test_a_directory_that_cannot_be_made(run_dir: Path) -> None:
    (run_dir / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot listen at"):
        listen_unix(run_dir / "file" / "x.sock")


def test_a_port_in_use_is_one_line() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PlatformError, match=rf"port {port} of 127\.0\.0\.1 is in use") as error:
            listen_tcp("127.0.0.1", port)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("host, port", [("no.such.host.invalid", 1), ("192.0.2.1", 0), ("127.0.0.1", 70000)])
def test_an_address_that_is_not_ours(host: str, port: int) -> None:
    with pytest.raises(PlatformError, match="cannot listen on") as error:
        listen_tcp(host, port)
    assert "\n" not in str(error.value)


def test_tcp_options_on_both_sides() -> None:
    with (
        listen_tcp("127.0.0.1", 0) as listener,
        connect_tcp("127.0.0.1", listener.getsockname()[1], Deadline(5)) as one,
        listener.accept()[0] as other,
    ):
        for sock in (one, other):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_nobody_at_a_port() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WireError, match=r"cannot connect to 127\.0\.0\.1:"):
        connect_tcp("127.0.0.1", port, Deadline(5))


def test_host_port() -> None:
    assert parse_host_port("10.0.0.1:7000") == ("10.0.0.1", 7000)
    assert parse_host_port("[::1]:0") == ("::1", 0)
    for bad in ("", "host", ":1", "host:", "host:x", "host:70000", "host:-1"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            parse_host_port(bad)


def test_who_is_reached_over_a_unix_socket() -> None:
    here = Address(NodeId("node0"), "sock/ps-0.sock", "10.0.0.1", 7)
    assert is_local(here, NodeId("node0"), Path("/run"))
    assert not is_local(here, NodeId("node1"), Path("/run"))
    assert not is_local(here, NodeId("node0"), None)
    assert not is_local(Address(NodeId("node0"), "", "10.0.0.1", 7), NodeId("node0"), Path("/run"))


def test_where_the_master_is(tmp_path: Path) -> None:
    assert master_address(tmp_path) is None
    write_master(tmp_path, MasterInfo(pid=1, incarnation=Incarnation(2), host="10.0.0.1", port=7000))
    assert master_address(tmp_path) == Address(NodeId("node0"), "sock/master.sock", "10.0.0.1", 7000)
    (tmp_path / "master.json").write_text("{half")
    assert read_master(tmp_path) is None
