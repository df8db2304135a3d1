"""TLS: the job's certificate and no other; both directions at once."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from everstep.errors import WireError
from everstep.net.auth import Secret
from everstep.net.frames import DATA_LIMITS, ClosedError, FrameKind, FrameSocket
from everstep.net.retry import Deadline
from everstep.net.tls import TlsSocket, client_context, server_context


def handshake(server: Secret, client: Secret) -> tuple[FrameSocket, FrameSocket, list[Exception]]:
    a, b = socket.socketpair()
    one = TlsSocket(a, server_context(server), server_side=True)
    two = TlsSocket(b, client_context(client), server_side=False)
    streams = FrameSocket(one, DATA_LIMITS, recv_tick_s=0.01), FrameSocket(two, DATA_LIMITS, recv_tick_s=0.01)
    errors: list[Exception] = []

    def side(tls: TlsSocket, stream: FrameSocket) -> None:
        try:
            tls.handshake(Deadline(10, "the handshake"))
        except Exception as error:
            errors.append(error)
            stream.close()

    threads = [threading.Thread(target=side, args=x) for x in ((one, streams[0]), (two, streams[1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return *streams, errors


@pytest.fixture
def pair(secret: Secret) -> Iterator[tuple[FrameSocket, FrameSocket]]:
    one, two, errors = handshake(secret, secret)
    assert not errors
    yield one, two
    one.close()
    two.close()


def test_big_frames_both_ways_at_once(pair: tuple[FrameSocket, FrameSocket]) -> None:
    body = os.urandom(3_000_000)
    got: dict[int, bytes] = {}

    def send(i: int) -> None:
        for n in range(3):
            pair[i].send(FrameKind.REQUEST, b"%d" % n, [body[n:], body[:1000]], deadline=Deadline(30))

    def receive(i: int) -> None:
        for n in range(3):
            frame = pair[i].recv(deadline=Deadline(30))
            assert frame.header == b"%d" % n
            got[i] = bytes(frame.body)

    threads = [threading.Thread(target=t, args=(i,)) for t in (send, receive) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert got == {0: body[2:] + body[:1000], 1: body[2:] + body[:1000]}


def test_another_jobs_certificate(secret: Secret, other_secret: Secret) -> None:
    one, two, errors = handshake(secret, other_secret)
    assert any("certificate is not this job's" in str(error) for error in errors)
    assert all(isinstance(error, WireError) for error in errors)
    one.close()
    two.close()


def test_nothing_readable_crosses_the_wire(secret: Secret) -> None:
    a, b = socket.socketpair()
    tls = TlsSocket(a, client_context(secret), server_side=False)
    stream = FrameSocket(tls, DATA_LIMITS, recv_tick_s=0.01)

    def greet() -> None:
        with pytest.raises(WireError):
            tls.handshake(Deadline(5))

    thread = threading.Thread(target=greet)
    thread.start()
    assert b"ESF1" not in b.recv(4096)
    b.close()
    thread.join(10)
    stream.close()


def test_the_end_of_the_stream(pair: tuple[FrameSocket, FrameSocket]) -> None:
    pair[0].send(FrameKind.ANSWER, b"last")
    pair[0].close()
    assert pair[1].recv(deadline=Deadline(5)).header == b"last"
    with pytest.raises(ClosedError):
        pair[1].recv(deadline=Deadline(5))


def test_an_unusable_certificate_is_one_line() -> None:
    with pytest.raises(WireError, match="certificate in the job's secret file is unusable"):
        server_context(Secret(b"x" * 32, "no", "pem"))
    with pytest.raises(WireError, match="certificate in the job's secret file is unusable"):
        client_context(Secret(b"x" * 32, "no", "pem"))
