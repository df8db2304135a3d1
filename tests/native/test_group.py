"""What members of a group do natively in every step: the sum and the check of gradients, a few bytes to everybody."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from everstep.native import hear, sum_bits, talk, tell

FLOATS = {"float32": np.float32, "float64": np.float64, "float16": np.float16}
NO_SPIN, SHORT_MS, LONG_MS = 0, 20, 30_000


def words(data: bytes) -> int:
    """The oracle: 64-bit words, the last one filled up with zeros."""
    return int(np.frombuffer(data + bytes(-len(data) % 8), np.uint64).sum())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 3, 2047, 2048, 5001])
def test_bits_are_summed_and_what_is_not_finite_is_found_wherever_it_lies(dtype: str, count: int) -> None:
    numbers = np.random.default_rng(count).standard_normal(count).astype(FLOATS[dtype])
    numbers[0] = np.finfo(FLOATS[dtype]).max
    assert sum_bits(numbers, dtype) == (words(numbers.tobytes()), True)
    for at in {0, count // 2, count - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = numbers.copy()
            spoiled[at] = bad
            assert sum_bits(spoiled, dtype) == (words(spoiled.tobytes()), False)


def test_bfloat16_goes_by_its_own_exponent() -> None:
    largest, infinite = np.array([0x7F7F] * 9, np.uint16), np.array([0] * 8 + [0xFF80], np.uint16)
    assert sum_bits(largest, "bfloat16")[1] and not sum_bits(infinite, "bfloat16")[1]
    with pytest.raises(ValueError, match="int32"):
        sum_bits(largest, "int32")


def test_talk_tells_everybody_and_leaves_what_is_more_than_an_answer() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    fds = [mine.fileno() for mine, _ in pairs]
    for number, (_, peer) in enumerate(pairs):
        peer.send(bytes([number]) * 4 + b"next")
    assert talk(fds, b"said", NO_SPIN, LONG_MS) == ([4] * 3, [bytes([n]) * 4 for n in range(3)])
    assert [peer.recv(99) for _, peer in pairs] == [b"said"] * 3
    assert [mine.recv(99) for mine, _ in pairs] == [b"next"] * 3
    for pair in pairs:
        for end in pair:
            end.close()


def test_talk_ends_where_one_is_silent_or_gone() -> None:
    (mine, peer), (other, quiet) = socket.socketpair(), socket.socketpair()
    fds = [mine.fileno(), other.fileno()]
    peer.send(b"ab")
    assert talk(fds, b"said", NO_SPIN, SHORT_MS) == ([4, 4], [b"ab", b""])
    peer.close()
    sent, came = talk(fds, b"said", NO_SPIN, LONG_MS)
    assert sent[1] == 4 and came == [b"", b""]
    for end in (mine, other, quiet):
        end.close()


def test_told_now_and_heard_later_is_talking() -> None:
    mine, peer = socket.socketpair()
    assert tell([mine.fileno()], b"said") == [4]
    peer.send(b"heardnext")
    assert hear([mine.fileno()], 5, NO_SPIN, LONG_MS) == [b"heard"]
    assert (mine.recv(99), peer.recv(99)) == (b"next", b"said")
    peer.close()
    assert hear([mine.fileno()], 5, NO_SPIN, LONG_MS) == [b""]
    mine.close()


def test_who_hears_the_end_of_one_does_not_wait_for_the_words_of_another() -> None:
    (first, quiet), (second, gone) = socket.socketpair(), socket.socketpair()
    gone.close()
    assert hear([first.fileno(), second.fileno()], 4, NO_SPIN, LONG_MS) == [b"", b""]
    for end in (first, quiet, second):
        end.close()
