"""Votes over our own connections: what everybody hears, who is let in, and how one gets out of a wait."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from everstep.allreduce import exchange
from everstep.allreduce.exchange import LOOPBACK, SUM_BYTES_MAX, VALUES_MAX, Exchange
from everstep.errors import DeadlineError, WireError
from everstep.net.retry import Deadline

OVER_TCP = "127.0.0.2"
LONG_S = 30.0

pytestmark = pytest.mark.parametrize("host", [LOOPBACK, OVER_TCP])


def connected(size: int, host: str) -> list[Exchange]:
    members = [Exchange(rank, size, "1.0", host) for rank in range(size)]
    doors = [m.door for m in members]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda m: m.connect(doors, Deadline(LONG_S)), members))
    return members


def close(members: list[Exchange]) -> None:
    for member in members:
        member.close()


def test_everybody_hears_everybody_again_and_again(host: str) -> None:
    members = connected(4, host)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(50):
            said = [[m.rank, -(1 << 62), turn, *([7] * (turn % 3))] for m in members]
            for heard in pool.map(lambda m, said=said: m.gather(said[m.rank]), members):
                assert [list(row) for row in heard] == said
        widest = list(pool.map(lambda m: m.gather([m.rank] * VALUES_MAX), members))
    assert all(rows == [(r,) * VALUES_MAX for r in range(4)] for rows in widest)
    close(members)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_sums_have_the_same_bits_everywhere_and_those_of_the_order_of_ranks(host: str, kind: type) -> None:
    members = connected(4, host)
    longest = SUM_BYTES_MAX // np.dtype(kind).itemsize

    def member(m: Exchange, parts: list[np.ndarray], waits: bool) -> tuple[bytes, list[tuple[int, ...]]]:
        mine = parts[m.rank].copy()
        total = m.begin_sum(mine)
        if waits:
            m.end_sum(total)
        heard = m.gather([m.rank])  # a sum that nobody waited for is over too
        m.end_sum(total)
        return mine.tobytes(), heard

    assert not members[0].takes_sum(longest * np.dtype(kind).itemsize + 1)
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(4) as pool:
        for size in (1, 17, longest):
            parts = [(rng.standard_normal(size) * 10.0**r).astype(kind) for r in range(4)]
            expected = parts[0].copy()
            for part in parts[1:]:
                expected += part
            works = [pool.submit(member, m, parts, m.rank % 2 == 0) for m in members]
            assert {w.result(LONG_S)[0] for w in works} == {expected.tobytes()}
            assert all(w.result(LONG_S)[1] == [(0,), (1,), (2,), (3,)] for w in works)
    close(members)


def summed(member: Exchange) -> None:
    member.end_sum(member.begin_sum(np.ones(4, np.float32)))


def voted(member: Exchange) -> None:
    member.gather([1])


@pytest.mark.parametrize("take_part", [voted, summed])
def test_who_waits_is_freed_by_its_own_abort_and_by_a_peers(host: str, take_part: Callable[[Exchange], None]) -> None:
    members = connected(3, host)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(take_part, m) for m in members[:2])  # the third one never comes
        members[0].abort()
        for waiting in (first, second):
            with pytest.raises(WireError):
                waiting.result(LONG_S)
    close(members)


def test_strangers_are_sent_away_and_members_still_get_in(host: str) -> None:
    first, guest = (Exchange(rank, 2, "1.0", host) for rank in range(2))
    stranger = Exchange(1, 2, "1.0", host)
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(first.connect, [first.door, guest.door], Deadline(LONG_S))
        with first.door.call(LONG_S) as noise:
            noise.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
            with pytest.raises(WireError):  # it does not know the key
                stranger.connect([first.door._replace(key=bytes(32)), stranger.door], Deadline(LONG_S))
            guest.connect([first.door, guest.door], Deadline(LONG_S))
            waiting.result(LONG_S)
        rows = pool.submit(first.gather, [1])
        assert guest.gather([2]) == rows.result(LONG_S) == [(1,), (2,)]
    close([first, guest, stranger])


def test_connecting_ends_when_nobody_comes_and_when_it_is_given_up(host: str) -> None:
    alone = Exchange(0, 2, "1.0", host)
    with pytest.raises(DeadlineError):
        alone.connect([alone.door, alone.door], Deadline(0.05))
    alone.close()
    other = Exchange(0, 2, "1.0", host)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.connect, [other.door, other.door], Deadline(LONG_S))
        threading.Timer(0.05, other.abort).start()
        with pytest.raises(WireError, match="given up"):
            waiting.result(LONG_S)
    other.close()


def test_what_one_call_does_not_get_done_is_done_piece_by_piece(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = connected(3, host)

    def half(fds: list[int], mine: bytes, spin_us: int, wait_ms: int) -> tuple[list[int], list[bytes]]:
        """As of buffers that are full: the first peer got three bytes and nothing was heard."""
        with socket.socket(fileno=os.dup(fds[0])) as first:
            first.send(mine[:3])
        return [3] + [0] * (len(fds) - 1), [b""] * len(fds)

    monkeypatch.setattr(exchange, "talk", half)
    monkeypatch.setattr(exchange, "tell", lambda fds, mine: half(fds, mine, 0, 0)[0])
    monkeypatch.setattr(exchange, "hear", lambda fds, size, spin_us, wait_ms: [b""] * len(fds))
    with ThreadPoolExecutor(3) as pool:
        for turn in range(3):
            heard = list(pool.map(lambda m, turn=turn: m.gather([m.rank, turn]), members))
            assert all(rows == [(r, turn) for r in range(3)] for rows in heard)
            list(pool.map(summed, members))
    close(members)
