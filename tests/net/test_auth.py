"""The secret file, and the mutual challenge: every way in which two sides may not belong together."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ConfigError, DeadlineError, PlatformError, WireError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.net import auth
from everstep.net.auth import (
    ClientAuth,
    Identity,
    Secret,
    SecretError,
    ServerAuth,
    VersionError,
    authenticate_client,
    authenticate_server,
    create_secret,
    load_secret,
)
from everstep.net.frames import AUTH_LIMITS, FrameDecoder, FrameKind, FrameSocket, encode_frame
from everstep.net.retry import Deadline

RIGHT, WRONG = Secret(bytes(range(32))), Secret(b"w" * 32)
WORKER = Identity(purpose="data", role="worker", slot=Slot(3), incarnation=Incarnation(2), node=NodeId("node1"))
PS = Identity(purpose="data", role="ps", slot=Slot(0), incarnation=Incarnation(7), node=NodeId("node0"))


def meet(client: Callable[[FrameSocket], object], server: Callable[[FrameSocket], object]) -> tuple[object, object]:
    """Both sides over a socketpair; each result is what it returned or raised."""
    a, b = socket.socketpair()
    results: list[object] = [None, None]

    def side(at: int, sock: socket.socket, act: Callable[[FrameSocket], object]) -> None:
        stream = FrameSocket(sock, AUTH_LIMITS, recv_tick_s=0.01)
        try:
            results[at] = act(stream)
        except Exception as error:
            results[at] = error
        finally:
            stream.close()

    threads = [threading.Thread(target=side, args=(0, a, client)), threading.Thread(target=side, args=(1, b, server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results[0], results[1]


def client(secret: Secret, identity: Identity = WORKER) -> Callable[[FrameSocket], object]:
    return lambda stream: authenticate_client(stream, secret, identity, Deadline(5, "the handshake"))


def server(secret: Secret, identity: Identity = PS, seconds: float = 5) -> Callable[[FrameSocket], object]:
    return lambda stream: authenticate_server(stream, secret, identity, Deadline(seconds, "the handshake"))


# ---------------------------------------------------------------- handshake


def test_both_learn_who_the_other_is() -> None:
    assert meet(client(RIGHT), server(RIGHT)) == (PS, WORKER)


def test_a_wrong_secret_is_told_to_both() -> None:
    at_client, at_server = meet(client(WRONG), server(RIGHT))
    assert isinstance(at_client, SecretError) and "belongs to another job" in str(at_client)
    assert isinstance(at_server, SecretError) and "another secret" in str(at_server)


def test_a_client_that_skips_the_check_is_still_refused() -> None:
    """Whoever ignores that the server's proof is wrong cannot make its own."""

    def liar(stream: FrameSocket) -> object:
        side = ClientAuth(WRONG, WORKER)
        stream.send_raw(side.begin())
        stream.recv(deadline=Deadline(5))
        stream.send_raw(encode_frame(FrameKind.AUTH, msgspec.msgpack.encode({"type": "proof", "mac": b"0" * 32})))
        return stream.recv(deadline=Deadline(5)).header

    at_client, at_server = meet(liar, server(RIGHT))
    assert isinstance(at_server, SecretError) and "worker:3 #2" in str(at_server)
    assert isinstance(at_client, bytes) and b"refusal" in at_client


def test_a_replayed_proof_is_refused() -> None:
    frames: list[bytes] = []

    def recorded(stream: FrameSocket) -> object:
        side = ClientAuth(RIGHT, WORKER)
        hello = side.begin()
        stream.send_raw(hello)
        proof = side.answer(stream.recv(deadline=Deadline(5)))
        frames.extend([hello, proof])
        stream.send_raw(proof)
        return None

    assert meet(recorded, server(RIGHT))[1] == WORKER

    def replay(stream: FrameSocket) -> object:
        for frame in frames:
            stream.send_raw(frame)
        return stream.recv(deadline=Deadline(5))

    assert isinstance(meet(replay, server(RIGHT))[1], SecretError)


def test_a_proof_is_bound_to_the_identity() -> None:
    """Proof made as worker:3, shown behind the hello of worker:4."""
    genuine, other = ClientAuth(RIGHT, WORKER), msgspec.structs.replace(WORKER, slot=Slot(4))
    listening = ServerAuth(RIGHT, PS)
    hello = msgspec.msgpack.decode(FrameDecoder(AUTH_LIMITS).feed(genuine.begin())[0].header)
    hello["identity"] = msgspec.to_builtins(other)
    forged = encode_frame(FrameKind.AUTH, msgspec.msgpack.encode(hello))
    challenge = listening.take(FrameDecoder(AUTH_LIMITS).feed(forged)[0])
    with pytest.raises(SecretError):  # the server's proof names worker:4: the client notices too
        genuine.answer(FrameDecoder(AUTH_LIMITS).feed(challenge)[0])


def test_a_servers_proof_cannot_be_sent_back_as_a_clients() -> None:
    listening = ServerAuth(RIGHT, PS)
    hello = FrameDecoder(AUTH_LIMITS).feed(ClientAuth(RIGHT, WORKER).begin())[0]
    challenge = msgspec.msgpack.decode(FrameDecoder(AUTH_LIMITS).feed(listening.take(hello))[0].header)
    back = encode_frame(FrameKind.AUTH, msgspec.msgpack.encode({"type": "proof", "mac": challenge["mac"]}))
    with pytest.raises(SecretError):
        listening.take(FrameDecoder(AUTH_LIMITS).feed(back)[0])


@pytest.mark.parametrize("changed", [{"protocol": 99}, {"package": "9.9.9"}])
def test_another_version_is_its_own_error(changed: dict[str, object]) -> None:
    other = msgspec.structs.replace(WORKER, **changed)  # type: ignore[arg-type]
    at_client, at_server = meet(client(RIGHT, other), server(RIGHT))
    assert isinstance(at_client, VersionError) and "same version" in str(at_client)
    assert isinstance(at_server, VersionError)


def test_a_later_version_with_other_fields_is_still_recognised() -> None:
    message = {"type": "hello3", "identity": {"protocol": 4, "package": "3.0.0", "role": "oracle", "more": [1]}}
    frame = FrameDecoder(AUTH_LIMITS).feed(encode_frame(FrameKind.AUTH, msgspec.msgpack.encode(message)))[0]
    with pytest.raises(VersionError, match=r"everstep 3\.0\.0 \(wire 4\)"):
        ServerAuth(RIGHT, PS).take(frame)


def test_the_wrong_door() -> None:
    at_client, at_server = meet(client(RIGHT, msgspec.structs.replace(WORKER, purpose="control")), server(RIGHT))
    assert isinstance(at_client, WireError) and "takes no control connections" in str(at_client)
    assert isinstance(at_server, WireError)


def test_silence_ends_at_the_deadline() -> None:
    over = threading.Event()

    def waits(stream: FrameSocket) -> object:
        try:
            return server(RIGHT, seconds=0.05)(stream)
        finally:
            over.set()

    _, at_server = meet(lambda stream: over.wait(20), waits)
    assert isinstance(at_server, DeadlineError)


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=3))
def test_garbage_frames_are_wire_errors(headers: list[bytes]) -> None:
    listening = ServerAuth(RIGHT, PS)
    for header in headers:
        frame = FrameDecoder(AUTH_LIMITS).feed(encode_frame(FrameKind.AUTH, header))[0]
        with pytest.raises(WireError):
            listening.take(frame)
        with pytest.raises(WireError):
            ClientAuth(RIGHT, WORKER).answer(frame)
    assert not listening.done


def test_nothing_large_before_the_proof() -> None:
    def shout(stream: FrameSocket) -> object:
        stream.send_raw(encode_frame(FrameKind.AUTH, b"x" * 5000))
        return None

    at_server = meet(shout, server(RIGHT))[1]
    assert isinstance(at_server, WireError) and "at most 4096" in str(at_server)


def test_a_secret_never_shows() -> None:
    assert "7f" not in repr(Secret(b"\x7f" * 32)) and repr(RIGHT) == "<Secret>"


# ---------------------------------------------------------------- the file


def test_round_trip_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    made = create_secret(path)
    assert load_secret(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert create_secret(path) != made  # replaced, whole
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_no_secret_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no secret file at"):
        load_secret(tmp_path / "secret")


def test_a_secret_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"open to others \(mode 0640\): chmod 600"):
        load_secret(path)


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"secret": "zz"}', '{"secret": "abcd"}', "[1]"])
def test_a_malformed_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as error:
        load_secret(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_secret_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="cannot write the job's secret"):
        create_secret(tmp_path / "no" / "secret")


def test_the_identity_says_who(tmp_path: Path) -> None:
    assert str(WORKER) == "worker:3 #2"
    assert str(Identity(purpose="control", role="agent", node=NodeId("node1"))) == "agent of node1"
    assert auth.PROTOCOL == 3
