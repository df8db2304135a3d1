"""Frames: any cut of the bytes gives the same frames; garbage and giants are refused before anything is reserved."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import DeadlineError, WireError
from everstep.net.frames import (
    CONTROL_LIMITS,
    DATA_LIMITS,
    PREAMBLE_BYTES,
    ClosedError,
    FrameDecoder,
    FrameKind,
    FrameSocket,
    Limits,
    decode_header,
    encode_frame,
    preamble,
)
from everstep.net.messages import Call
from everstep.net.retry import Deadline

LIMITS = Limits(1000, 1000)

frames_strategy = st.lists(
    st.tuples(st.sampled_from(list(FrameKind)), st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 255)),
    max_size=6,
)


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    a, b = socket.socketpair()
    one, two = FrameSocket(a, DATA_LIMITS, recv_tick_s=0.01), FrameSocket(b, DATA_LIMITS, recv_tick_s=0.01)
    yield one, two
    one.close()
    two.close()


@settings(deadline=None)  # the first frame of the data plane loads the compiled module
@given(frames=frames_strategy, data=st.data())
def test_any_cut_gives_the_same_frames(frames: list[tuple[FrameKind, bytes, bytes, int]], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(k, h, b, flags) for k, h, b, flags in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder(LIMITS)
    got = []
    for lo, hi in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[lo:hi])
    assert [(f.kind, f.header, bytes(f.body), f.flags) for f in got] == frames
    assert decoder.buffered_bytes == 0


@given(st.binary(min_size=PREAMBLE_BYTES, max_size=200))
def test_garbage_is_a_wire_error_or_nothing(data: bytes) -> None:
    decoder = FrameDecoder(LIMITS)
    if data[:4] == b"ESF1":
        return
    with pytest.raises(WireError, match="not an everstep frame"):
        decoder.feed(data)
    with pytest.raises(WireError):
        decoder.feed(b"")


@given(frame=st.binary(max_size=60), flip=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_never_escapes_as_another_error(frame: bytes, flip: int, bit: int) -> None:
    stream = bytearray(encode_frame(FrameKind.CALL, frame, frame))
    stream[flip % len(stream)] ^= 1 << bit
    decoder = FrameDecoder(LIMITS)
    try:
        decoder.feed(bytes(stream))
    except WireError:
        assert decoder.error is not None


def test_good_frames_before_garbage_are_delivered() -> None:
    decoder = FrameDecoder(LIMITS)
    assert [f.header for f in decoder.feed(encode_frame(FrameKind.CALL, b"good") + b"x" * 40)] == [b"good"]
    with pytest.raises(WireError):
        decoder.feed(b"")


@pytest.mark.parametrize("header_bytes, body_bytes", [(1001, 0), (0, 1001), (2**32 - 1, 0), (0, 2**32), (0, 2**64 - 1)])
def test_a_giant_is_refused_without_allocation(
    header_bytes: int, body_bytes: int, pair: tuple[FrameSocket, FrameSocket]
) -> None:
    giant = preamble(FrameKind.REQUEST, header_bytes, body_bytes)
    one, two = pair
    two.limits = LIMITS
    one.send_raw(giant)
    tracemalloc.start()
    with pytest.raises(WireError, match=r"announced, at most 1000 allowed"):
        FrameDecoder(LIMITS).feed(giant)
    with pytest.raises(WireError, match=r"announced, at most 1000 allowed"):
        two.recv(deadline=Deadline(5))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_control_frames_have_no_body() -> None:
    with pytest.raises(WireError, match="frame body of 1 bytes"):
        FrameDecoder(CONTROL_LIMITS).feed(encode_frame(FrameKind.CALL, b"", b"x"))


def test_bodies_arrive_in_place(pair: tuple[FrameSocket, FrameSocket]) -> None:
    one, two = pair
    keys = np.arange(100_000, dtype=np.int64)
    rows = np.random.default_rng(0).random((1000, 64), dtype=np.float32)
    sender = threading.Thread(target=one.send, args=(FrameKind.REQUEST, b"h", [keys, b"", rows, np.zeros((0, 4))]))
    sender.start()
    place = bytearray(2_000_000)
    frame = two.recv(deadline=Deadline(10), into=memoryview(place))
    sender.join()
    assert frame.header == b"h"
    assert np.array_equal(np.frombuffer(place, np.int64, 100_000), keys)
    assert np.array_equal(np.frombuffer(place, np.float32, 64_000, 800_000).reshape(1000, 64), rows)
    assert frame.body == memoryview(place)[: 800_000 + 256_000]


def test_many_buffers_and_a_big_header(pair: tuple[FrameSocket, FrameSocket]) -> None:
    one, two = pair
    header = b"h" * 300_000
    pieces = [bytes([i % 256]) * (i % 7) for i in range(3000)]  # more than the kernel takes in one call
    sender = threading.Thread(target=one.send, args=(FrameKind.ANSWER, header, pieces))
    sender.start()
    frame = two.recv(deadline=Deadline(10))
    sender.join()
    assert frame.header == header
    assert bytes(frame.body) == b"".join(pieces)


def test_frames_in_a_row_reuse_the_buffer(pair: tuple[FrameSocket, FrameSocket]) -> None:
    one, two = pair
    for i in range(50):
        one.send(FrameKind.REQUEST, b"%d" % i, [b"b" * (i * 37)])
        frame = two.recv(deadline=Deadline(5))
        assert (frame.header, len(frame.body)) == (b"%d" % i, i * 37)


def test_the_end_of_the_stream(pair: tuple[FrameSocket, FrameSocket]) -> None:
    one, two = pair
    one.send(FrameKind.CALL, b"last")
    one.send_raw(encode_frame(FrameKind.CALL, b"torn")[:-2])
    one.close()
    assert two.recv(deadline=Deadline(5)).header == b"last"
    with pytest.raises(WireError, match="within a frame"):
        two.recv(deadline=Deadline(5))


def test_a_closed_peer_between_frames_is_told_apart(pair: tuple[FrameSocket, FrameSocket]) -> None:
    one, two = pair
    one.close()
    with pytest.raises(ClosedError):
        two.recv(deadline=Deadline(5))


def test_silence_ends_at_the_deadline(pair: tuple[FrameSocket, FrameSocket]) -> None:
    with pytest.raises(DeadlineError, match=r"a word did not happen within 0\.02 s"):
        pair[1].recv(deadline=Deadline(0.02, "a word"))


def test_a_trickle_does_not_outlive_the_deadline(pair: tuple[FrameSocket, FrameSocket]) -> None:
    """A peer that sends a byte now and then holds nobody beyond the deadline."""
    one, two = pair
    done = threading.Event()

    def trickle() -> None:
        for byte in encode_frame(FrameKind.CALL, b"x" * 1000):
            if done.wait(0.002):
                return
            one.send_raw(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(DeadlineError):
            two.recv(deadline=Deadline(0.1))
    finally:
        done.set()
        thread.join()


def test_a_slow_reader_does_not_hold_the_sender_for_ever(pair: tuple[FrameSocket, FrameSocket]) -> None:
    one, _two = pair
    one.set_ticks(0.01, 0.01)
    waits: list[int] = []
    with pytest.raises(DeadlineError):
        one.send(
            FrameKind.ANSWER,
            b"",
            [bytes(4_000_000)],
            deadline=Deadline(1.0, "sending"),
            on_wait=lambda: waits.append(1),
        )
    assert waits


def test_shutdown_wakes_the_receiver(pair: tuple[FrameSocket, FrameSocket]) -> None:
    _one, two = pair
    errors: list[Exception] = []

    def receive() -> None:
        try:
            two.recv()
        except WireError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    two.shutdown()
    thread.join(60)
    assert not thread.is_alive() and len(errors) == 1


@given(st.binary(max_size=300))
def test_a_malformed_header_is_a_wire_error(data: bytes) -> None:
    try:
        decode_header(msgspec.msgpack.Decoder(Call), data, "request")
    except WireError as error:
        assert str(error).startswith("malformed request: ")


def test_deep_nesting_is_a_wire_error() -> None:
    class Lenient(msgspec.Struct):
        x: int

    deep = b"\x81\xa1y" + b"\x91" * 100_000
    with pytest.raises(WireError, match="malformed thing"):
        decode_header(msgspec.msgpack.Decoder(Lenient), deep, "thing")
