"""``--tls control``: somebody stands between a worker and its ps, reads all, and writes. Nothing of that is taken."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from everstep.errors import DeadlineError, WireError
from everstep.ids import Incarnation, NodeId, Slot, TableId
from everstep.model.member import Address
from everstep.net import messages as wire
from everstep.net.auth import Identity, Secret
from everstep.net.data import DataClient, DataServer, _encoder
from everstep.net.frames import FrameKind, FrameSocket, encode_frame
from everstep.net.seal import Seal
from everstep.net.sockets import listen_tcp

PS = Identity(purpose="data", role="ps", slot=Slot(0), incarnation=Incarnation(3), node=NodeId("node0"))
ME = Identity(purpose="data", role="worker", slot=Slot(1), incarnation=Incarnation(1), node=NodeId("far"))
Attack = Callable[[list[bytes]], list[bytes]]
"""The frames of a worker so far, the last one of which has just come; what the ps gets in its place."""


class Doubler:
    """Answers each pull with twice its keys, and remembers them."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def handle(self, request: Any, body: memoryview, arena: object) -> tuple[wire.DataAnswer, Sequence[Any]]:
        keys = np.frombuffer(body, np.int64)
        self.seen.append(keys.tolist()[:3])
        return wire.Pulled(), [keys * 2]


class Between:
    """Passes frames on, of both sides; those of the worker behind its handshake as ``attack`` says."""

    def __init__(self, target: int, attack: Attack, sealed: bool) -> None:
        self._attack, self._tag_bytes = attack, 16 if sealed else 0
        self._listener = listen_tcp("127.0.0.1", 0)
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, args=(target,), daemon=True).start()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _serve(self, target: int) -> None:
        with contextlib.suppress(OSError):
            client = self._listener.accept()[0]
            server = socket.create_connection(("127.0.0.1", target))
            self._sockets += [client, server]
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            for _ in range(2):  # hello, proof
                server.sendall(self._frame(client, 0))
            frames: list[bytes] = []
            while True:
                frames.append(self._frame(client, self._tag_bytes))
                for frame in self._attack(frames):
                    server.sendall(frame)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def _frame(self, source: socket.socket, tag_bytes: int) -> bytes:
        start = self._read(source, 24)
        header, body = struct.unpack_from("<IQ", start, 8)
        return start + self._read(source, header + body + tag_bytes)

    def _read(self, source: socket.socket, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            if not (piece := source.recv(n - len(data))):
                raise OSError("closed")
            data += piece
        return bytes(data)


def request(*keys: int) -> bytes:
    """As anybody can make it."""
    part = wire.RowsPart(TableId(1), len(keys), 0, 0)
    return encode_frame(
        FrameKind.REQUEST, _encoder.encode(wire.Pull(1, (part,), False)), np.array(keys, np.int64).tobytes()
    )


def changed(frames: list[bytes]) -> list[bytes]:
    tag = frames[-1][len(request(1, 2)) :]
    return [request(7, 7) + tag] if len(frames) == 2 else frames[-1:]


def added(frames: list[bytes]) -> list[bytes]:
    return (
        [request(7, 7) + bytes(len(frames[-1]) - len(request(1, 2))), frames[-1]] if len(frames) == 2 else frames[-1:]
    )


def repeated(frames: list[bytes]) -> list[bytes]:
    return [frames[-1], frames[-1]] if len(frames) == 2 else frames[-1:]


def left_out(frames: list[bytes]) -> list[bytes]:
    return [] if len(frames) == 1 else frames[-1:]


def turned(frames: list[bytes]) -> list[bytes]:
    return [] if len(frames) == 1 else [frames[1], frames[0]] if len(frames) == 2 else frames[-1:]


@pytest.fixture
def service() -> Doubler:
    return Doubler()


@pytest.fixture
def ps(service: Doubler, secret: Secret) -> Iterator[int]:
    listener = listen_tcp("127.0.0.1", 0)
    server = DataServer(service, [listener], secret, PS, tls=False)
    yield listener.getsockname()[1]
    server.close()


def converse(port: int, secret: Secret, attack: Attack, sealed: bool = True) -> None:
    """Three pulls, one behind the other; the answers are looked at."""
    between = Between(port, attack, sealed)
    try:
        address = Address(NodeId("node0"), "", "127.0.0.1", between.port)
        with DataClient(address, secret=secret, identity=ME, tls="control") as client:
            for i in range(3):
                client.send(wire.Pull(1, (wire.RowsPart(TableId(1), 2, 0, 0),), False), [np.array([i + 1, i + 2])])
            for i in range(3):
                _, body = client.receive(timeout_s=20.0)
                assert np.frombuffer(body, np.int64).tolist() == [2 * i + 2, 2 * i + 4]
    finally:
        between.close()


def test_who_only_listens_changes_nothing(ps: int, secret: Secret, service: Doubler) -> None:
    converse(ps, secret, lambda frames: frames[-1:])
    assert service.seen == [[1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize("attack", [changed, added, repeated, left_out, turned])
def test_who_writes_is_noticed_before_anything_is_done(
    ps: int, secret: Secret, service: Doubler, attack: Attack
) -> None:
    with pytest.raises((WireError, DeadlineError)):
        converse(ps, secret, attack)
    assert [7, 7] not in service.seen
    assert service.seen == [[1, 2], [2, 3], [3, 4]][: len(service.seen)] and len(service.seen) < 3


@pytest.mark.parametrize("attack", [changed, added, repeated])
def test_without_seals_the_same_goes_through(
    ps: int, secret: Secret, service: Doubler, attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``--tls control`` was: the handshake said who speaks, and not what was said."""
    monkeypatch.setattr(FrameSocket, "exposed", False)
    with pytest.raises(AssertionError):
        converse(ps, secret, attack, sealed=False)
    assert [7, 7] in service.seen or service.seen.count([2, 3]) == 2


@pytest.mark.parametrize("sizes", [(0,), (10, 0, 3), (70_000,), (10, 1 << 20, 5)])
def test_a_seal_is_of_all_pieces_however_they_are_cut(sizes: tuple[int, ...]) -> None:
    key, data = bytes(range(32)), bytes(i % 251 for i in range(sum(sizes)))
    ends = np.cumsum(sizes).tolist()
    pieces = [memoryview(data)[end - n : end] for n, end in zip(sizes, ends, strict=True)]
    sent, received = Seal(key), Seal(key)
    first = sent.tag(pieces)
    received.check([data], first)
    assert sent.tag(pieces) != first, "the same frame a second time is another one"
    with pytest.raises(WireError, match="not as the peer sent it"):
        received.check([data], first)


def test_large_bodies_both_ways(ps: int, secret: Secret, service: Doubler) -> None:
    keys = np.arange(300_000)
    with DataClient(Address(NodeId("node0"), "", "127.0.0.1", ps), secret=secret, identity=ME, tls="control") as client:
        assert client.plain_fd == -1, "nobody else may write there"
        into = np.zeros(300_000, np.int64)
        for _ in range(2):
            message = wire.Pull(1, (wire.RowsPart(TableId(1), len(keys), 0, 0),), False)
            client.request(message, [keys], into=into.data)
            assert np.array_equal(into, keys * 2)
