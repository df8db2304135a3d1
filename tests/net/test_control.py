"""The control plane end to end over real sockets: calls, orders, reconnects, and those who do not belong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from masters import Master

from everstep.brain.events import (
    Fenced,
    Granted,
    MemberJoined,
    Note,
    Ok,
    Refused,
    RevokeLease,
    ShardAsked,
    Wait,
    Welcome,
)
from everstep.errors import DeadlineError, InternalError, WireError
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.member import Address, MemberKey, Role
from everstep.model.shard import Lease
from everstep.net import messages as wire
from everstep.net.auth import Identity, Secret, SecretError, VersionError, authenticate_client
from everstep.net.control import Answered, ControlClient
from everstep.net.control_server import Later, Peer
from everstep.net.frames import AUTH_LIMITS, FrameKind, FrameSocket, encode_frame, preamble
from everstep.net.retry import Deadline
from everstep.net.sockets import connect_unix

MEMBER, WHY = MemberKey(Role.WORKER, Slot(0)), Decision("why", "a test")

Until = Callable[[Callable[[], object]], None]
ME = Identity(purpose="control", role="worker", slot=Slot(1), incarnation=Incarnation(1), node=NodeId("node0"))
UNIX = Address(NodeId("node0"), "sock/master.sock")


@pytest.fixture
def start(run_dir: Path, secret: Secret) -> Iterator[Callable[..., Master]]:
    masters: list[Master] = []

    def make(handle: Callable[..., Any], **more: Any) -> Master:
        masters.append(Master(run_dir, secret, handle, **more))
        return masters[-1]

    yield make
    for master in masters:
        master.stop()


@pytest.fixture
def join(run_dir: Path, secret: Secret) -> Iterator[Callable[..., ControlClient]]:
    clients: list[ControlClient] = []

    def make(**more: Any) -> ControlClient:
        settings: dict[str, Any] = {
            "address": lambda: UNIX,
            "run_dir": run_dir,
            "secret": secret,
            "identity": ME,
            "hello": hello,
        }
        clients.append(ControlClient(**{**settings, **more}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def hello() -> MemberJoined:
    return MemberJoined(Role.WORKER, Slot(1), Incarnation(1), NodeId("node0"), 1)


def polite(peer: Peer, request: wire.RequestType) -> Answered:
    match request:
        case MemberJoined():
            return Welcome(Incarnation(1), None)
        case ShardAsked(ask=ask):
            return Granted(Lease(LeaseNo(ask), ShardKey(0), 0, 10))
    return Ok()


def ask(n: int) -> ShardAsked:
    return ShardAsked(0, 1, n)


# ---------------------------------------------------------------- calls and orders


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_calls_from_many_threads_get_their_own_answers(
    start: Callable[..., Master], join: Callable[..., ControlClient], way: str
) -> None:
    master = start(polite, tcp=True)
    address = UNIX if way == "unix" else Address(NodeId("far"), host="127.0.0.1", port=master.port)
    client = join(address=lambda: address)
    wrong: list[object] = []

    def caller(base: int) -> None:
        for i in range(base, base + 100):
            answer = client.call(ask(i), 20)
            if not (isinstance(answer, Granted) and answer.lease.no == i):
                wrong.append((i, answer))

    threads = [threading.Thread(target=caller, args=(n * 1000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert client.connected and client.connects == 1


def a_future() -> tuple[Awaitable[Answered], Callable[[Answered], None]]:
    future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
    return future, future.set_result


def a_later() -> tuple[Later, Callable[[Answered], None]]:
    later = Later()
    return later, later.give


@pytest.mark.parametrize("made", [a_future, a_later])
def test_answers_may_come_in_any_order(
    start: Callable[..., Master], join: Callable[..., ControlClient], made: Callable[[], Any]
) -> None:
    held: list[Callable[[Answered], None]] = []

    def handle(peer: Peer, request: wire.RequestType) -> Any:
        if not isinstance(request, ShardAsked):
            return polite(peer, request)
        answer, give = made()
        held.append(give)
        if len(held) == 3:
            for i in reversed(range(3)):
                held[i](Wait(float(i)))
        return answer

    start(handle)
    client = join()
    client.wait_connected(20)
    futures = [client.submit(ask(i), 20) for i in range(3)]
    assert [f.result(20) for f in futures] == [Wait(0.0), Wait(1.0), Wait(2.0)]


def test_the_first_of_two_later_answers_counts(
    start: Callable[..., Master], join: Callable[..., ControlClient], until: Until
) -> None:
    """Also one that is given before the handler returns it, and one to a caller that is gone."""
    kept: list[Later] = []

    def handle(peer: Peer, request: wire.RequestType) -> Any:
        if not isinstance(request, ShardAsked):
            return polite(peer, request)
        kept.append(Later())
        if len(kept) == 1:
            kept[0].give(Wait(1.0))
        return kept[-1]

    master = start(handle)
    client, other = join(), join()
    first = client.submit(ask(0), 20)
    assert first.result(20) == Wait(1.0)
    second = client.submit(ask(1), 20)
    until(lambda: len(kept) == 2)
    master.do(lambda: [kept[0].give(Wait(9.0)), kept[1].give(Wait(2.0)), kept[1].give(Wait(9.0))])
    assert second.result(20) == Wait(2.0)
    client.submit(ask(2), 20)
    until(lambda: len(kept) == 3)
    client.close()
    until(lambda: len(master.server.peers) == 1)
    master.do(lambda: kept[2].give(Wait(3.0)))
    assert other.call(wire.ValuesReported({}), 20) == Ok() and other.connects == 1


def test_hello_first_then_orders(
    start: Callable[..., Master], join: Callable[..., ControlClient], until: Until
) -> None:
    said: list[object] = []

    async def handle(peer: Peer, request: wire.RequestType) -> Answered:
        if isinstance(request, MemberJoined):
            peer.send(RevokeLease(MEMBER, LeaseNo(1), WHY))  # may overtake the answer
            await asyncio.sleep(0)
        return polite(peer, request)

    master = start(handle)
    client = join(on_welcome=said.append, on_order=said.append)
    client.wait_connected(20)
    master.do(lambda: [peer.send(RevokeLease(MEMBER, LeaseNo(2), WHY)) for peer in master.server.peers])
    until(lambda: len(said) == 3)
    assert said == [
        Welcome(Incarnation(1), None),
        RevokeLease(MEMBER, LeaseNo(1), WHY),
        RevokeLease(MEMBER, LeaseNo(2), WHY),
    ]


def test_a_callback_that_fails_does_not_end_the_client(
    start: Callable[..., Master], join: Callable[..., ControlClient]
) -> None:
    def bad(_: object) -> None:
        raise ZeroDivisionError

    start(polite)
    client = join(on_welcome=bad)
    assert client.call(wire.ValuesReported({}), 20) == Ok()


def test_call_inside_a_callback_is_an_error_not_a_deadlock(
    start: Callable[..., Master], join: Callable[..., ControlClient], until: Until
) -> None:
    errors: list[Exception] = []
    box: list[ControlClient] = []

    def welcomed(_: object) -> None:
        until(lambda: box)
        try:
            box[0].call(wire.ValuesReported({}), 1)
        except InternalError as error:
            errors.append(error)

    start(polite)
    box.append(join(on_welcome=welcomed))
    until(lambda: errors)


def test_fenced_is_told_once(start: Callable[..., Master], join: Callable[..., ControlClient]) -> None:
    fenced: list[Fenced] = []
    start(lambda peer, request: Welcome(Incarnation(1), None) if isinstance(request, MemberJoined) else Fenced("old"))
    client = join(on_fenced=fenced.append)
    for _ in range(3):
        assert client.call(wire.ValuesReported({}), 20) == Fenced("old")
    assert fenced == [Fenced("old")]


def test_beats_carry_on(start: Callable[..., Master], join: Callable[..., ControlClient], until: Until) -> None:
    beats: list[wire.Beat] = []
    count = iter(range(10_000))

    def beat() -> wire.Beat:
        n = next(count)
        if n == 1:
            raise ZeroDivisionError  # readings fail: an empty beat goes out all the same
        return wire.Beat(readings={"samples": float(n)})

    def handle(peer: Peer, request: wire.RequestType) -> Answered:
        if isinstance(request, wire.Beat):
            beats.append(request)
        return polite(peer, request)

    start(handle)
    join(beat=beat, beat_s=0.02)
    until(lambda: len(beats) >= 4)
    assert [b.readings for b in beats[:3]] == [{"samples": 0.0}, {}, {"samples": 2.0}]


def test_news_come_before_their_time_and_once(
    start: Callable[..., Master], join: Callable[..., ControlClient], until: Until
) -> None:
    beats: list[wire.Beat] = []
    news = threading.Event()

    def handle(peer: Peer, request: wire.RequestType) -> Answered:
        if isinstance(request, wire.Beat):
            beats.append(request)
        return polite(peer, request)

    start(handle)
    client = join(beat=wire.Beat, beat_s=3600.0, news=news.is_set)
    until(lambda: len(beats) == 1)
    news.set()
    until(lambda: len(beats) == 2)
    assert client.call(wire.ValuesReported({}), 20) is not None
    time.sleep(0.3)  # three ticks of the client's thread
    assert len(beats) == 2, "one more between two beats, whatever it says"


# ---------------------------------------------------------------- failures


def test_a_call_survives_the_connection(
    start: Callable[..., Master], join: Callable[..., ControlClient], until: Until
) -> None:
    """The master dies between request and answer: the call is asked again on the next connection."""
    asked: list[int] = []
    box: list[Master] = []

    def handle(peer: Peer, request: wire.RequestType) -> Answered | None:
        if isinstance(request, ShardAsked):
            asked.append(request.ask)
            if len(asked) == 1:
                box[0].cut()
                return None
        return polite(peer, request)

    box.append(start(handle))
    welcomes: list[object] = []
    client = join(on_welcome=welcomes.append)
    answer = client.call(ask(5), 20)
    assert isinstance(answer, Granted) and answer.lease.no == 5
    assert asked == [5, 5] and len(welcomes) == 2 and client.connects == 2


def test_a_master_that_restarts(start: Callable[..., Master], join: Callable[..., ControlClient], until: Until) -> None:
    first = start(polite)
    client = join()
    assert client.call(wire.ValuesReported({}), 20) == Ok()
    first.stop()
    until(lambda: not client.connected)
    waiting = client.submit(ask(1), 30)  # asked while there is no master
    with pytest.raises(DeadlineError, match=r"answer to report did not happen within 0\.05 s: not connected: "):
        client.call(wire.ValuesReported({}), 0.05)
    start(polite)
    assert isinstance(waiting.result(30), Granted)


def test_no_answer_is_a_deadline(start: Callable[..., Master], join: Callable[..., ControlClient]) -> None:
    start(lambda peer, request: polite(peer, request) if isinstance(request, MemberJoined) else None)
    client = join()
    client.wait_connected(20)
    with pytest.raises(DeadlineError, match="it is connected, but slow or stuck"):
        client.call(ask(1), 0.05)


def test_a_failing_handler_costs_that_connection_only(
    start: Callable[..., Master], join: Callable[..., ControlClient], caplog: pytest.LogCaptureFixture
) -> None:
    failed = []

    def handle(peer: Peer, request: wire.RequestType) -> Answered:
        if isinstance(request, ShardAsked) and not failed:
            failed.append(1)
            raise ZeroDivisionError
        return polite(peer, request)

    start(handle)
    client, other = join(), join()
    other.wait_connected(20)
    with caplog.at_level(logging.ERROR, "everstep.net"):
        assert isinstance(client.call(ask(1), 20), Granted)
    assert other.connects == 1
    assert "failed" in caplog.text


def test_a_refusal_reaches_the_caller(start: Callable[..., Master], join: Callable[..., ControlClient]) -> None:
    start(lambda peer, request: Refused("no"))
    said: list[object] = []
    assert join(on_welcome=said.append).call(wire.ValuesReported({}), 20) == Refused("no")
    assert said == [Refused("no")]


def test_close_fails_what_waits(start: Callable[..., Master], join: Callable[..., ControlClient]) -> None:
    start(lambda peer, request: polite(peer, request) if isinstance(request, MemberJoined) else None)
    client = join()
    client.wait_connected(20)
    waiting = client.submit(ask(1), 60)
    client.close()
    with pytest.raises(WireError, match="was closed"):
        waiting.result(60)
    with pytest.raises(WireError, match="was closed"):
        client.call(ask(1), 5)
    client.close()


def test_a_client_does_not_survive_a_fork(start: Callable[..., Master], join: Callable[..., ControlClient]) -> None:
    start(polite)
    client = join()
    client.wait_connected(20)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            client.call(wire.ValuesReported({}), 1)
        except InternalError:
            client.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.call(wire.ValuesReported({}), 20) == Ok()


# ---------------------------------------------------------------- those who do not belong


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_a_wrong_secret_ends_the_client_with_one_log_line(
    start: Callable[..., Master],
    join: Callable[..., ControlClient],
    other_secret: Secret,
    caplog: pytest.LogCaptureFixture,
    until: Until,
    way: str,
) -> None:
    master = start(polite, tcp=True)
    address = UNIX if way == "unix" else Address(NodeId("far"), host="127.0.0.1", port=master.port)
    good = join()
    with caplog.at_level(logging.WARNING):
        client = join(secret=other_secret, address=lambda: address)
        with pytest.raises(SecretError):
            client.call(wire.ValuesReported({}), 20)
        if way == "unix":
            until(lambda: "another secret" in caplog.text)
    assert good.call(wire.ValuesReported({}), 20) == Ok()
    lines = [r for r in caplog.records if "control client" not in r.getMessage()]
    assert len(lines) <= 1 and all("\n" not in r.getMessage() and not r.exc_info for r in lines)
    assert isinstance(client.failed, SecretError)


def test_another_version_ends_the_client(start: Callable[..., Master], join: Callable[..., ControlClient]) -> None:
    start(polite)
    client = join(identity=msgspec.structs.replace(ME, package="0.0.0"))
    with pytest.raises(VersionError, match="install the same version"):
        client.call(wire.ValuesReported({}), 20)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "giant header": preamble(FrameKind.CALL, 2**32 - 1, 0),
    "giant body": preamble(FrameKind.CALL, 10, 2**32),
    "no handshake": encode_frame(FrameKind.CALL, msgspec.msgpack.encode([1, ["stop_asked", "x"]])),
    "zeros": bytes(100),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_closed_with_one_line(
    start: Callable[..., Master],
    join: Callable[..., ControlClient],
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    until: Until,
    what: str,
) -> None:
    start(polite)
    client = join()
    client.wait_connected(20)
    with caplog.at_level(logging.WARNING), connect_unix(run_dir / UNIX.unix, Deadline(5)) as sock:
        sock.sendall(GARBAGE[what])
        sock.settimeout(10)
        assert sock.recv(100) == b""
        until(lambda: caplog.records)
    assert len(caplog.records) == 1 and "\n" not in caplog.text.strip()
    assert client.call(wire.ValuesReported({}), 20) == Ok() and client.connects == 1


def test_garbage_behind_a_good_handshake(
    start: Callable[..., Master], run_dir: Path, secret: Secret, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    master = start(polite)
    for garbage in (
        preamble(FrameKind.CALL, 9 << 20),
        encode_frame(FrameKind.CALL, b"\xc1"),
        encode_frame(FrameKind.RETURN, b"\x92\x01\x02"),
        encode_frame(FrameKind.CALL, b"\x91" * 100_000),
    ):
        caplog.clear()
        stream = FrameSocket(connect_unix(run_dir / UNIX.unix, Deadline(5)), AUTH_LIMITS)
        authenticate_client(stream, secret, ME, Deadline(5))
        with caplog.at_level(logging.WARNING):
            stream.send_raw(garbage)
            with pytest.raises(WireError):
                stream.recv(deadline=Deadline(10))
            stream.close()
            until(lambda: caplog.records)
        assert len(caplog.records) == 1 and "worker:1 #1" in caplog.text
    until(lambda: not master.server.connections)
    assert master.server.strangers == 0
    assert master.events == ["+worker:1 #1", "-worker:1 #1"] * 4


def test_strangers_are_few_and_short_lived(
    start: Callable[..., Master], join: Callable[..., ControlClient], run_dir: Path, until: Until
) -> None:
    master = start(polite, auth_s=0.2, max_local_strangers=2)
    idle = [connect_unix(run_dir / UNIX.unix, Deadline(5)) for _ in range(4)]
    for sock in idle:  # two are turned away at once, two when their time is over
        sock.settimeout(10)
        assert sock.recv(1) == b""
        sock.close()
    until(lambda: master.server.strangers == 0)
    assert join().call(wire.ValuesReported({}), 20) == Ok()


def test_silent_strangers_over_tcp_keep_nobody_out(
    start: Callable[..., Master], join: Callable[..., ControlClient], until: Until
) -> None:
    """They count from accept on, before TLS, in places of their own; where those are taken, the newest get them."""
    master = start(polite, tcp=True, auth_s=30.0, max_strangers=20)
    idle = [socket.create_connection((master.host, master.port), 10) for _ in range(120)]
    members = [join() for _ in range(4)]
    assert all(member.call(wire.ValuesReported({}), 20) == Ok() for member in members)
    far = Address(NodeId("node0"), "", master.host, master.port)
    for _ in range(3):
        assert join(address=lambda: far).call(wire.ValuesReported({}), 20) == Ok()
    for sock in idle[:100]:  # the oldest had to go
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert len(master.server.waiting[False]) <= 20
    for sock in idle:
        sock.close()
    until(lambda: master.server.strangers == 0)


def test_a_peer_that_does_not_read_is_dropped(
    start: Callable[..., Master], join: Callable[..., ControlClient], run_dir: Path, secret: Secret, until: Until
) -> None:
    master = start(polite, max_queue_bytes=1 << 20)
    other = join()
    other.wait_connected(20)
    sock = connect_unix(run_dir / UNIX.unix, Deadline(5))
    stream = FrameSocket(sock, AUTH_LIMITS)
    authenticate_client(stream, secret, msgspec.structs.replace(ME, slot=Slot(9)), Deadline(5))
    until(lambda: "+worker:9 #1" in master.events)
    order = Note("x", Decision("y", "y" * 100_000))

    def flood() -> None:
        for peer in master.server.peers:
            if peer.identity.slot == 9:
                peer.send(order)

    for _ in range(40):
        master.do(flood)
    until(lambda: "-worker:9 #1" in master.events)
    stream.close()
    assert other.call(wire.ValuesReported({}), 20) == Ok() and other.connects == 1


@pytest.mark.parametrize("made", [a_future, a_later])
def test_an_unread_flood_of_calls_is_bounded(
    start: Callable[..., Master], run_dir: Path, secret: Secret, until: Until, made: Callable[[], Any]
) -> None:
    """The server stops reading from a peer with too many calls in its hands."""
    seen = []
    gate: list[Any] = []

    def handle(peer: Peer, request: wire.RequestType) -> Any:
        seen.append(1)
        gate.append(made())
        return gate[-1][0]

    master = start(handle, max_calls=10)
    stream = FrameSocket(connect_unix(run_dir / UNIX.unix, Deadline(5)), AUTH_LIMITS)
    authenticate_client(stream, secret, ME, Deadline(5))
    one = encode_frame(FrameKind.CALL, msgspec.msgpack.encode(wire.Call(1, wire.ValuesReported({"x" * 1000: 1.0}))))

    def flood() -> None:
        with pytest.raises(WireError):
            stream.send_raw(one * 3000)

    sender = threading.Thread(target=flood)
    sender.start()
    until(lambda: seen)
    master.stop()
    sender.join(20)
    assert not sender.is_alive()
    assert len(seen) < 1000  # what one read brought, and no more
    stream.close()


def test_tcp_without_tls_gets_nowhere(
    start: Callable[..., Master],
    join: Callable[..., ControlClient],
    secret: Secret,
    caplog: pytest.LogCaptureFixture,
    until: Until,
) -> None:
    master = start(polite, tcp=True, auth_s=0.5)
    good = join(address=lambda: Address(NodeId("far"), host="127.0.0.1", port=master.port))
    good.wait_connected(20)
    caplog.clear()  # (it may have been too slow the first time)
    raw = socket.create_connection(("127.0.0.1", master.port))
    stream = FrameSocket(raw, AUTH_LIMITS)
    with pytest.raises(WireError):
        authenticate_client(stream, secret, ME, Deadline(10))
    stream.close()
    until(lambda: caplog.records)
    assert [r.getMessage() for r in caplog.records] == [
        "a connection over TCP closed: its TLS handshake failed (another job's secret, or not everstep)"
    ]
    assert good.call(wire.ValuesReported({}), 20) == Ok() and good.connects == 1
