"""The data plane end to end: rows by body and by shared memory, pipelines, and clients that misbehave."""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from everstep.errors import DeadlineError, EverstepError, WireError
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot, TableId
from everstep.model.member import Address
from everstep.net import messages as wire
from everstep.net.arena import Arena
from everstep.net.auth import Identity, Secret, SecretError, authenticate_client
from everstep.net.data import DataClient, DataServer
from everstep.net.frames import AUTH_LIMITS, FrameKind, FrameSocket, encode_frame, preamble
from everstep.net.retry import Deadline
from everstep.net.sockets import connect_unix, listen_tcp, listen_unix

Until = Callable[[Callable[[], object]], None]
PS = Identity(purpose="data", role="ps", slot=Slot(0), incarnation=Incarnation(3), node=NodeId("node0"))
ME = Identity(purpose="data", role="worker", slot=Slot(1), incarnation=Incarnation(1), node=NodeId("node0"))
SOCKET = "sock/ps-0.sock"
PART = wire.RowsPart(TableId(1), 4, 0, 32)


class Doubler:
    """Answers a pull with twice the int64 keys that came, in place for shared memory."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.hold = threading.Event()
        self.hold.set()

    def handle(
        self, request: wire.DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[wire.DataAnswer, Sequence[Any]]:
        self.requests.append(request)
        assert self.hold.wait(20)
        match request:
            case wire.Pull(shm=True, parts=parts):
                assert arena is not None
                for part in parts:
                    keys = np.frombuffer(arena, np.int64, part.n, part.keys_at)
                    np.frombuffer(arena, np.int64, part.n, part.rows_at)[:] = keys * 2
                return wire.Pulled(), ()
            case wire.Pull():
                return wire.Pulled(), [np.frombuffer(body, np.int64) * 2]
            case wire.OpenShard():
                raise ZeroDivisionError("what now")
            case _:
                return wire.LogTaken(), ()


class Ps:
    def __init__(self, run_dir: Path, secret: Secret, *, tls: bool = True, **more: Any) -> None:
        self.service = Doubler()
        tcp = listen_tcp("127.0.0.1", 0)
        self.unix = Address(NodeId("node0"), SOCKET)
        self.tcp = Address(NodeId("far"), SOCKET, "127.0.0.1", tcp.getsockname()[1])
        self.server = DataServer(self.service, [listen_unix(run_dir / SOCKET), tcp], secret, PS, tls=tls, **more)


@pytest.fixture
def ps(run_dir: Path, secret: Secret) -> Iterator[Ps]:
    served = Ps(run_dir, secret)
    yield served
    served.service.hold.set()
    served.server.close()


@pytest.fixture
def connect(ps: Ps, run_dir: Path, secret: Secret) -> Iterator[Callable[..., DataClient]]:
    clients: list[DataClient] = []

    def make(address: Address | None = None, **more: Any) -> DataClient:
        settings: dict[str, Any] = {"secret": secret, "identity": ME, "run_dir": run_dir}
        clients.append(DataClient(address or ps.unix, **{**settings, **more}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def pull(n: int = 0) -> wire.Pull:
    return wire.Pull(1, (wire.RowsPart(TableId(1), n, 0, 0),), False)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_rows_by_body(ps: Ps, connect: Callable[..., DataClient], way: str) -> None:
    client = connect(ps.unix if way == "unix" else ps.tcp, expect=(0, 3))
    assert client.shm == (way == "unix") and client.server == PS
    for n in (0, 1, 1000, 500_000, 3):
        keys = np.arange(n, dtype=np.int64)
        answer, body = client.request(pull(n), [keys])
        assert answer == wire.Pulled()
        assert np.array_equal(np.frombuffer(body, np.int64), keys * 2)
    into = np.zeros(10, np.int64)
    _, body = client.request(pull(8), [np.arange(8)], into=into.data)
    assert into.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 0, 0] and len(body) == 64


def test_plain_tcp_where_the_spec_says_so(run_dir: Path, secret: Secret) -> None:
    ps = Ps(run_dir, secret, tls=False)
    with DataClient(ps.tcp, secret=secret, identity=ME, tls="control") as client:
        _, body = client.request(pull(2), [np.array([5, 6])])
        assert np.frombuffer(body, np.int64).tolist() == [10, 12]
    with pytest.raises((WireError, DeadlineError)):  # and a client that wants TLS does not settle for less
        DataClient(ps.tcp, secret=secret, identity=ME, tls="all", connect_timeout_s=1.0)
    ps.server.close()


def test_rows_by_shared_memory_that_grows(ps: Ps, connect: Callable[..., DataClient]) -> None:
    client, arena = connect(), Arena(4096)
    client.attach(arena)
    for size in (4096, 8192, 1 << 21):
        arena.grow(size)
        arena.array(size - 64, 4, np.int64)[:] = [1, 2, 3, size]
        part = wire.RowsPart(TableId(1), 4, size - 64, size - 32)
        assert client.request(wire.Pull(1, (part,), True)) == (wire.Pulled(), memoryview(b""))
        assert arena.array(size - 32, 4, np.int64).tolist() == [2, 4, 6, 2 * size]
    assert client.in_flight == 0
    arena.close()


def test_no_shared_memory_with_another_node(ps: Ps, connect: Callable[..., DataClient]) -> None:
    with pytest.raises(WireError, match="another node"):
        connect(ps.tcp).attach(Arena(4096))


def test_a_pipeline_is_answered_in_order(ps: Ps, connect: Callable[..., DataClient]) -> None:
    client = connect()
    ps.service.hold.clear()
    for i in range(20):
        client.send(pull(1), [np.array([i])])
    assert client.in_flight == 20
    ps.service.hold.set()
    for i in range(20):
        _, body = client.receive()
        assert np.frombuffer(body, np.int64).tolist() == [2 * i]
    with pytest.raises(WireError, match="without a request"):
        client.receive()


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_one_thread_that_sends_much_before_it_receives(ps: Ps, connect: Callable[..., DataClient], way: str) -> None:
    """Neither side's socket buffers hold it: without care both would wait for the other."""
    client = connect(ps.unix if way == "unix" else ps.tcp)
    keys = np.arange(250_000, dtype=np.int64)
    for i in range(6):
        client.send(pull(len(keys)), [keys + i], timeout_s=20)
    into = np.zeros(len(keys), np.int64)
    for i in range(6):
        _, body = client.receive(into=into.data if i % 2 else None, timeout_s=20)
        assert np.array_equal(into if i % 2 else np.frombuffer(body, np.int64), (keys + i) * 2)


def test_a_failing_request_is_answered_and_the_connection_stays(
    connect: Callable[..., DataClient], caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    with caplog.at_level(logging.ERROR, "everstep.net"):
        answer, _ = client.request(wire.OpenShard(ShardKey(1), 0, LeaseNo(1)))
    assert answer == wire.Bad("ZeroDivisionError: what now")
    assert client.request(wire.Stat())[0] == wire.LogTaken()


def test_many_clients_at_once(ps: Ps, connect: Callable[..., DataClient], until: Until) -> None:
    wrong = []

    def work(base: int) -> None:
        client = connect()
        for i in range(50):
            keys = np.arange(base, base + i * 50)
            if not np.array_equal(np.frombuffer(client.request(pull(i), [keys])[1], np.int64), keys * 2):
                wrong.append(base)
        client.close()

    threads = [threading.Thread(target=work, args=(n * 10_000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    until(lambda: ps.server.connections == 0)


# ---------------------------------------------------------------- failures


def test_a_ps_that_does_not_answer(ps: Ps, connect: Callable[..., DataClient]) -> None:
    client = connect()
    ps.service.hold.clear()
    with pytest.raises(DeadlineError, match="an answer of ps:0 #3 did not happen"):
        client.request(wire.Stat(), timeout_s=0.05)
    with pytest.raises(WireError, match="closed"):
        client.request(wire.Stat())


def test_a_ps_that_goes_away(ps: Ps, connect: Callable[..., DataClient]) -> None:
    client = connect()
    ps.server.close()
    with pytest.raises(WireError):
        client.request(wire.Stat(), timeout_s=10)
    with pytest.raises(WireError):
        connect()


def test_close_from_another_thread_wakes_the_receiver(ps: Ps, connect: Callable[..., DataClient]) -> None:
    client = connect()
    ps.service.hold.clear()
    client.send(wire.Stat())
    errors: list[Exception] = []

    def receive() -> None:
        try:
            client.receive(timeout_s=60)
        except WireError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    client.close()
    thread.join(10)
    assert not thread.is_alive() and errors


def test_another_incarnation_answers(connect: Callable[..., DataClient]) -> None:
    with pytest.raises(WireError, match="is ps:0 #3 now, not ps:0 #2"):
        connect(expect=(0, 2))


def test_a_wrong_secret(
    ps: Ps,
    connect: Callable[..., DataClient],
    other_secret: Secret,
    caplog: pytest.LogCaptureFixture,
    until: Until,
) -> None:
    good = connect()
    for address, line in ((ps.unix, "another secret"), (ps.tcp, "TLS handshake failed")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            with pytest.raises(SecretError):
                connect(address, secret=other_secret)
            until(lambda: caplog.records)
        assert len(caplog.records) == 1 and line in caplog.text
    assert good.request(wire.Stat())[0] == wire.LogTaken()


def raw_client(run_dir: Path, secret: Secret) -> FrameSocket:
    stream = FrameSocket(connect_unix(run_dir / SOCKET, Deadline(5)), AUTH_LIMITS)
    authenticate_client(stream, secret, ME, Deadline(5))
    return stream


STAT = msgspec.msgpack.encode({"type": "stat"})
ATTACH = msgspec.msgpack.encode(wire.Attach(4096))
GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n" * 4,
    "4 GiB body": preamble(FrameKind.REQUEST, len(STAT), 4 << 30) + STAT,
    "giant header": preamble(FrameKind.REQUEST, 2 << 20),
    "not msgpack": encode_frame(FrameKind.REQUEST, b"\xc1\xc1"),
    "unknown request": encode_frame(FrameKind.REQUEST, msgspec.msgpack.encode({"type": "nonsense"})),
    "wrong kind": encode_frame(FrameKind.ANSWER, STAT),
    "memory without a descriptor": encode_frame(FrameKind.REQUEST, ATTACH),
    "torn": encode_frame(FrameKind.REQUEST, STAT)[:-1],
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_costs_its_sender_the_connection_and_one_line(
    ps: Ps,
    connect: Callable[..., DataClient],
    run_dir: Path,
    secret: Secret,
    caplog: pytest.LogCaptureFixture,
    until: Until,
    what: str,
) -> None:
    good = connect()
    stream = raw_client(run_dir, secret)
    until(lambda: ps.server.connections == 2)
    with caplog.at_level(logging.WARNING):
        stream.send_raw(GARBAGE[what])
        assert isinstance(stream.sock, socket.socket)
        stream.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            stream.recv(deadline=Deadline(10))
        until(lambda: ps.server.connections == 1)
    stream.close()
    assert len(caplog.records) == 1, caplog.text
    assert "worker:1 #1" in caplog.text and caplog.records[0].exc_info is None
    assert good.request(wire.Stat())[0] == wire.LogTaken()


def test_shared_memory_that_could_vanish_is_refused(
    ps: Ps, run_dir: Path, secret: Secret, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    stream = raw_client(run_dir, secret)
    with caplog.at_level(logging.WARNING):
        stream.send(FrameKind.REQUEST, ATTACH, fds=[unsealed])
        with pytest.raises(WireError):
            stream.recv(deadline=Deadline(10))
        until(lambda: "not sealed" in caplog.text)
    stream.close()
    os.close(unsealed)


def test_descriptors_nobody_asked_for_do_not_pile_up(
    ps: Ps, run_dir: Path, secret: Secret, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    stream = raw_client(run_dir, secret)
    until(lambda: ps.server.connections == 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    null = os.open("/dev/null", os.O_RDONLY)
    assert isinstance(stream.sock, socket.socket)
    with caplog.at_level(logging.WARNING), pytest.raises((OSError, WireError)):
        for _ in range(100):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 3))]
            stream.sock.sendmsg([encode_frame(FrameKind.REQUEST, STAT)], rights)
            stream.recv(deadline=Deadline(10))
    os.close(null)
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)  # the server's end, and all that came there
    stream.close()


def test_a_client_that_does_not_read_holds_only_itself(
    ps: Ps, connect: Callable[..., DataClient], run_dir: Path, secret: Secret
) -> None:
    stream = raw_client(run_dir, secret)
    header = msgspec.msgpack.encode(pull(1))
    stream.limits = stream.limits._replace(body_bytes=1 << 30)
    stream.send(FrameKind.REQUEST, header, [bytes(8_000_000)])  # and never takes the answer
    assert connect().request(wire.Stat())[0] == wire.LogTaken()
    stream.close()


def test_strangers_are_few_and_short_lived(
    run_dir: Path, secret: Secret, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    ps = Ps(run_dir, secret, auth_s=0.2, max_local_strangers=2)
    with caplog.at_level(logging.WARNING):
        idle = [connect_unix(run_dir / SOCKET, Deadline(5)) for _ in range(4)]
        for sock in idle:
            sock.settimeout(10)
            assert sock.recv(1) == b""
            sock.close()
        until(lambda: ps.server.connections == 0)
    ps.server._auth_s = 20.0  # a friend's threads may have to wait for their turn
    with DataClient(ps.unix, secret=secret, identity=ME, run_dir=run_dir) as client:
        assert client.request(wire.Stat())[0] == wire.LogTaken()
    ps.server.close()


def test_silent_strangers_over_tcp_keep_nobody_out(run_dir: Path, secret: Secret) -> None:
    ps = Ps(run_dir, secret, auth_s=30.0, max_strangers=8)
    idle = [socket.create_connection(("127.0.0.1", ps.tcp.port), 10) for _ in range(64)]
    for n in range(40):
        for attempt in range(5):  # (a crowded machine may take longer than a stranger is given)
            try:
                where = ps.tcp if n % 8 == 0 else ps.unix
                with DataClient(where, secret=secret, identity=ME, run_dir=run_dir, connect_timeout_s=20) as client:
                    assert client.request(wire.Stat())[0] == wire.LogTaken()
                break
            except WireError:
                assert attempt < 4
    for sock in idle[:40]:  # the oldest had to go
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    for sock in idle:
        sock.close()
    ps.server.close()


def test_threads_end_with_the_server(run_dir: Path, secret: Secret) -> None:
    before = set(threading.enumerate())
    ps = Ps(run_dir, secret)
    clients = [DataClient(ps.unix, secret=secret, identity=ME, run_dir=run_dir) for _ in range(5)]
    ps.server.close(10)
    assert set(threading.enumerate()) <= before
    for client in clients:
        client.close()


def test_a_connection_for_which_there_is_no_thread_is_refused_and_the_next_one_is_taken(
    ps: Ps, connect: Callable[..., DataClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ps without memory for another stack once took no connection any more, for ever: its acceptor had ended."""
    start, failures = threading.Thread.start, [2]

    def without_memory(self: threading.Thread) -> None:
        if self.name == "everstep-data" and failures[0]:
            failures[0] -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", without_memory)
    for _ in range(2):
        with pytest.raises(EverstepError):
            connect()
    assert failures == [0] and not ps.server._threads
    answer, _ = connect().request(pull())
    assert answer == wire.Pulled()
