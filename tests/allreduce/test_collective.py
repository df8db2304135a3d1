"""Groups over gloo: connecting through the master's store, what they compute, and how one gets out of them."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from group_hub import Hub

from everstep.allreduce import collective
from everstep.allreduce.collective import (
    Alone,
    CollectiveError,
    GlooCollective,
    GlooPassed,
    GlooWork,
    cut_sockets,
    find_sockets,
    port_in,
    silence,
)
from everstep.allreduce.group_store import GroupStore
from everstep.errors import InternalError
from everstep.net.retry import Deadline

LOOPBACK = "127.0.0.1"
LONG_S = 30.0


def group_of(size: int) -> list[GlooCollective]:
    return [GlooCollective(rank, size, LOOPBACK, "1.0") for rank in range(size)]


def connect(hub: Hub, collective: GlooCollective, generation: int = 1, timeout_s: float = LONG_S) -> None:
    collective.connect(GroupStore(hub, generation, 0, LOOPBACK, collective.size, timeout_s), timeout_s)


def connected(size: int) -> tuple[list[GlooCollective], Hub]:
    hub, group = Hub(), group_of(size)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda c: connect(hub, c), group))
    return group, hub


def test_members_reduce_gather_and_send() -> None:
    group, hub = connected(3)

    def member(c: GlooCollective) -> tuple[float, list[int], list[list[int]], float]:
        total = torch.full((1000,), float(c.rank + 1))
        high = torch.tensor([c.rank, -c.rank])
        c.allreduce(total).wait()
        c.allreduce(high, "max").wait(LONG_S)
        inbox = torch.zeros(4)
        works = [c.send(torch.full((4,), float(c.rank)), (c.rank + 1) % 3), c.recv(inbox, (c.rank - 1) % 3)]
        for work in works:
            work.wait(LONG_S)
        return float(total.sum()), high.tolist(), c.gather([c.rank, 7]), float(inbox[0])

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(member, group))
    for rank, (total, high, gathered, received) in enumerate(results):
        assert total == 6000.0
        assert high == [2, 0]
        assert gathered == [[0, 7], [1, 7], [2, 7]]
        assert received == float((rank - 1) % 3)
    assert hub.gets() <= 6  # all addresses in one or two questions, not one each
    for c in group:
        c.close()


def test_who_receives_waits_for_who_sends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    passed = GlooPassed._ended

    def look(work: GlooPassed, wait_s: float) -> bool:
        looks.append(wait_s)
        return passed(work, wait_s)

    monkeypatch.setattr(collective, "_LOOK_S", 0.001)
    monkeypatch.setattr(GlooPassed, "_ended", look)
    group, _ = connected(2)
    inbox = torch.zeros(4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: group[0].recv(inbox, 1).wait())
        while len(looks) < 10 and not waiting.done():  # it has looked often
            time.sleep(0.001)
        group[1].send(torch.ones(4), 0).wait(LONG_S)
        waiting.result(LONG_S)
    assert inbox.tolist() == [1.0] * 4
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: group[0].recv(inbox, 1).wait())
        while not group[0].waiting_since:
            time.sleep(0.001)
        group[1].abort("gone")
        with pytest.raises(CollectiveError):
            waiting.result(LONG_S)
    for c in group:
        c.close()


def test_a_peer_that_left_before_anybody_looked_has_left() -> None:
    group, _ = connected(2)
    assert group[0]._sockets
    group[1].abort("gone")
    until = Deadline(LONG_S)
    while _open_ones(group[0]):  # gloo closes what its peer has ended: nothing is left to look at then
        until.check()
        time.sleep(0.001)
    assert group[0].parted()
    for c in group:
        c.close()


def _open_ones(collective: GlooCollective) -> set[int]:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(path.readlink()))
    return {inode for inode in collective._sockets if f"socket:[{inode}]" in links}


def test_it_listens_on_loopback_only() -> None:
    before = _listeners()
    group, _ = connected(2)
    new = _listeners() - before
    assert len(new) == 2
    assert {host for host, _ in new} == {LOOPBACK}
    for c in group:
        c.close()


@pytest.mark.parametrize("size", [4, 1 << 16])  # over our own connections, over gloo
def test_abort_frees_a_member_that_waits_for_one_that_never_comes(size: int) -> None:
    group, _ = connected(3)
    tensor = torch.ones(size)
    with ThreadPoolExecutor(2) as pool:
        waiting: Future[None] = pool.submit(lambda: group[0].allreduce(tensor).wait())
        while not group[0].waiting_since:
            threading.Event().wait(0.001)
        group[0].abort("a member is lost")
        with pytest.raises(CollectiveError, match=r"generation 1\.0 is broken: a member is lost"):
            waiting.result(LONG_S)
    assert group[0].waiting_since == 0.0
    with pytest.raises(CollectiveError):
        group[0].allreduce(tensor)
    with pytest.raises(CollectiveError):
        group[1].allreduce(tensor).wait(LONG_S)  # its connection to the one that aborted is gone: no word is needed
    for c in group:
        c.close()


def test_who_waits_for_what_gloo_forgot_is_freed() -> None:
    """Gloo forgets to wake who waits for a message that was half read."""
    group, _ = connected(2)

    class Forgotten:
        """A work that never ends, whatever happens to its sockets."""

        def __init__(self) -> None:
            self.waits = 0

        def wait(self, timeout: Any) -> None:
            self.waits += 1
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    work = group[0].allreduce(torch.ones(4))
    group[1].allreduce(torch.ones(4)).wait()
    work.wait()
    stuck = GlooWork(group[0], Forgotten(), None)
    group[0]._flying[id(stuck)] = (stuck._work, None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stuck.wait)
        group[0].abort("a member is lost")
        with pytest.raises(CollectiveError, match="a member is lost"):
            waiting.result(LONG_S)
    for c in group:
        c.close()


def test_a_socket_that_nobody_reads_is_taken_out_of_the_loop() -> None:
    with socket.create_server((LOOPBACK, 0)) as server, select.epoll() as poll, select.epoll() as other:
        client = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
        poll.register(client, select.EPOLLIN)
        other.register(accepted, select.EPOLLIN)
        inodes = find_sockets(("", 0), [server.getsockname()])
        assert inodes == {os.fstat(client.fileno()).st_ino}
        accepted.sendall(b"x")
        client.sendall(b"x")
        assert poll.poll(LONG_S) and other.poll(LONG_S)
        assert silence(inodes) == 1
        assert poll.poll(0) == []
        assert other.poll(LONG_S)
        client.close()
        accepted.close()


def test_connecting_ends_at_once_when_it_is_given_up() -> None:
    hub, group = Hub(), group_of(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect, hub, group[0])
        while not hub.gets():
            threading.Event().wait(0.001)
        assert group[0].waiting_since
        group[0].abort("superseded")
        with pytest.raises(CollectiveError, match="superseded"):
            waiting.result(LONG_S)


def test_an_attempt_that_failed_at_a_peer_ends_here_too() -> None:
    hub, group = Hub(), group_of(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect, hub, group[0])
        GroupStore(hub, 1, 0, LOOPBACK, 2, LONG_S).say_failed()
        with pytest.raises(CollectiveError, match="failed at a peer"):
            waiting.result(LONG_S)


def test_a_member_that_never_comes_ends_the_attempt_by_its_time() -> None:
    with pytest.raises(CollectiveError, match="no word of"):
        connect(Hub(), group_of(2)[0], timeout_s=0.2)


def test_what_was_said_is_said_again_to_an_empty_store() -> None:
    hub, group = Hub(), group_of(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect, hub, group[0])
        while not hub.gets():
            threading.Event().wait(0.001)
        hub.forget()
        second = pool.submit(connect, hub, group[1])
        first.result(LONG_S)
        second.result(LONG_S)
    for c in group:
        c.close()


def test_groups_do_not_disturb_each_other() -> None:
    """Connect the next one while the present one computes; then cut the present one."""
    group, hub = connected(2)
    later = [GlooCollective(rank, 2, LOOPBACK, "2.0") for rank in range(2)]
    with ThreadPoolExecutor(4) as pool:
        building = [pool.submit(connect, hub, c, 2) for c in later]
        for _ in range(20):
            sums = [torch.ones(1000) for _ in group]
            for work in [pool.submit(lambda c=c, t=t: c.allreduce(t).wait()) for c, t in zip(group, sums, strict=True)]:
                work.result(LONG_S)
        for b in building:
            b.result(LONG_S)
        for c in group:
            c.abort()
        assert [f.result(LONG_S) for f in [pool.submit(c.gather, [c.rank]) for c in later]] == [[[0], [1]]] * 2
    for c in (*group, *later):
        c.close()


def test_closed_groups_leave_no_sockets_and_threads() -> None:
    connected_once, _ = connected(2)
    for c in connected_once:
        c.close()
    fds, threads = _entries("fd"), _entries("task")
    for _ in range(5):
        group, _ = connected(2)
        for c in group:
            c.close()
    assert _entries("fd") <= fds + 2
    assert _entries("task") <= threads + 4


@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_that_collects_a_group_as_garbage_harms_nobody() -> None:
    """Its destructor needs threads that a fork has not, and its connections are the other process's too."""
    group, _ = connected(2)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(20)  # a fork that hangs is a failure too
            del group
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    tensors = [torch.ones(1000) for _ in group]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: pair[0].allreduce(pair[1]).wait(LONG_S), zip(group, tensors, strict=True)))
    assert [float(t[0]) for t in tensors] == [2.0, 2.0]
    for c in group:
        c.close()


def test_only_connections_of_the_group_are_cut() -> None:
    with socket.create_server((LOOPBACK, 0)) as one, socket.create_server((LOOPBACK, 0)) as other:
        to_one = socket.create_connection(one.getsockname())
        to_other = socket.create_connection(other.getsockname())
        at_one, at_other = one.accept()[0], other.accept()[0]
        assert cut_sockets(find_sockets(one.getsockname(), [])) == 1
        assert to_one.recv(1) == b""
        at_other.sendall(b"x")
        assert to_other.recv(1) == b"x"
        assert cut_sockets(find_sockets((LOOPBACK, 1), [other.getsockname()])) == 1
        for sock in (to_one, to_other, at_one, at_other):
            sock.close()


def test_the_port_is_found_in_an_address_of_gloo() -> None:
    v4 = b"\x07" * 24 + struct.pack("<H", socket.AF_INET) + struct.pack(">H", 36693) + socket.inet_aton("10.1.2.3")
    assert port_in(v4 + b"\0" * 8, "10.1.2.3") == 36693
    v6 = struct.pack("<H", socket.AF_INET6) + struct.pack(">HI", 4242, 0) + socket.inet_pton(socket.AF_INET6, "fd00::7")
    assert port_in(b"\x01" * 3 + v6, "fd00::7") == 4242
    with pytest.raises(InternalError, match="another version of torch"):
        port_in(b"\0" * 186, LOOPBACK)


def test_alone_there_is_nothing_to_exchange() -> None:
    alone = Alone()
    alone.allreduce(torch.ones(3)).wait()
    assert alone.gather([3, 4]) == [[3, 4]]
    with pytest.raises(InternalError):
        alone.send(torch.ones(1), 1)


def _entries(folder: str) -> int:
    return len(list(Path("/proc/self", folder).iterdir()))


def _listeners() -> set[tuple[str, int]]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(path.name))) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(sock.getsockname()[:2])
        except OSError:
            pass
    return found
