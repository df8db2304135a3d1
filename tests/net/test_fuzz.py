"""Valid traffic with random bytes changed, before and after the handshake: the servers close, and serve the others."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from masters import Master

from everstep.brain.events import Ok, ShardAsked
from everstep.ids import NodeId, ShardKey, TableId
from everstep.model.member import Address
from everstep.net import messages as wire
from everstep.net.auth import ClientAuth, Identity, Secret, authenticate_client
from everstep.net.control import ControlClient
from everstep.net.data import DataClient, DataServer
from everstep.net.frames import AUTH_LIMITS, FrameKind, FrameSocket, encode_frame
from everstep.net.retry import Deadline
from everstep.net.sockets import connect_unix, listen_unix

Until = Callable[[Callable[[], object]], None]
NODE = NodeId("node0")
DATA = Identity(purpose="data", role="worker", node=NODE)
CONTROL = Identity(purpose="control", role="worker", node=NODE)
PART = wire.RowsPart(TableId(1), 2, 3, 4)
REQUESTS = (
    wire.Stat(),
    wire.Attach(4096),
    wire.Peek(1, TableId(1), b"12345678", ShardKey(0), 2, ShardKey(0), 3),
    wire.Pull(1, (PART,), True),
    wire.Scan(TableId(1), 2, 3, 4),
)
CALLS = (wire.Call(1, wire.GetStatus()), wire.Call(2, ShardAsked(0, 1, 1)), wire.Call(3, wire.Beat(((5, 6),))))


class Service:
    def handle(
        self, request: wire.DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[wire.DataAnswer, Sequence[Any]]:
        return wire.LogTaken(), ()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("everstep.net").disabled = True
    yield
    logging.getLogger("everstep.net").disabled = False


def attack(path: Path, secret: Secret, identity: Identity, frames: list[bytes], rng: random.Random) -> None:
    """One connection with damaged traffic, to its end (which must come: the server may not wait for more)."""
    stream = FrameSocket(connect_unix(path, Deadline(10)), AUTH_LIMITS)
    hello = ClientAuth(secret, identity).begin()
    if rng.random() < 0.7:
        authenticate_client(stream, secret, identity, Deadline(10))
        blob = bytearray(b"".join(rng.choice(frames) for _ in range(3)))
    else:
        blob = bytearray(hello)
    for _ in range(rng.randrange(1, 6)):
        blob[rng.randrange(len(blob))] = rng.randrange(256)
    assert isinstance(stream.sock, socket.socket)
    with contextlib.suppress(ConnectionError), contextlib.closing(stream):
        stream.sock.sendall(blob)
        stream.sock.shutdown(socket.SHUT_WR)
        stream.sock.settimeout(20)
        while stream.sock.recv(65536):
            pass


@pytest.mark.parametrize("seed", range(4))
def test_the_data_plane(run_dir: Path, secret: Secret, until: Until, seed: int) -> None:
    server = DataServer(Service(), [listen_unix(run_dir / "s")], secret, Identity(purpose="data", role="ps"))
    frames = [encode_frame(FrameKind.REQUEST, msgspec.msgpack.encode(request), b"body") for request in REQUESTS]
    rng = random.Random(seed)
    with DataClient(Address(NODE, "s"), secret=secret, identity=DATA, run_dir=run_dir) as good:
        fds = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(40):
            attack(run_dir / "s", secret, DATA, frames, rng)
        assert good.request(wire.Stat(), timeout_s=20)[0] == wire.LogTaken()
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= fds)
    server.close()


@pytest.mark.parametrize("seed", range(4))
def test_the_control_plane(run_dir: Path, secret: Secret, seed: int) -> None:
    master = Master(run_dir, secret, lambda peer, request: Ok())
    path = run_dir / "sock" / "master.sock"
    frames = [encode_frame(FrameKind.CALL, msgspec.msgpack.encode(call)) for call in CALLS]
    rng = random.Random(seed)
    address = Address(NODE, "sock/master.sock")
    with ControlClient(address=lambda: address, run_dir=run_dir, secret=secret, identity=CONTROL) as good:
        assert good.call(wire.ValuesReported({}), 20) == Ok()
        for _ in range(40):
            attack(path, secret, CONTROL, frames, rng)
        assert good.call(wire.ValuesReported({}), 20) == Ok() and good.connects == 1
    master.stop()
