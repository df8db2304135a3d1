"""Groups over several nodes where nothing may travel in the clear: gloo behind tunnels, which only members open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from group_hub import Hub

from everstep.allreduce import tunnel
from everstep.allreduce.collective import CollectiveError, GlooCollective
from everstep.allreduce.group_store import GroupStore, moved
from everstep.allreduce.tunnel import ENTRY, INSIDE, Tunnels, TunnelService
from everstep.net.auth import Secret, create_secret
from everstep.net.tls import TlsSocket

NODES = ("a", "b", "a", "c")
LONG_S = 60.0


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Secret:
    return create_secret(tmp_path_factory.mktemp("job") / "secret")


@pytest.fixture
def group(secret: Secret) -> Iterator[list[GlooCollective]]:
    """Of four members on three nodes, connected."""
    hub = Hub()
    members = [GlooCollective(rank, len(NODES), INSIDE, "1.0") for rank in range(len(NODES))]
    for c, node in zip(members, NODES, strict=True):
        c.tunnels = Tunnels(c.rank, secret, node, "127.0.0.1")
    with ThreadPoolExecutor(len(NODES)) as pool:
        list(pool.map(lambda c: c.connect(GroupStore(hub, 1, 0, INSIDE, c.size, LONG_S), LONG_S), members))
    yield members
    for c in members:
        c.close()


def test_sums_and_votes_are_right_and_never_in_the_clear(
    group: list[GlooCollective], monkeypatch: pytest.MonkeyPatch
) -> None:
    needle = torch.full((4096,), 1234.5)
    seen = {"plain": 0, "sent": 0}
    send = TlsSocket.sendmsg

    def look(self: TlsSocket, buffers: list[memoryview]) -> int:
        seen["plain"] += any(bytes(needle[:8].numpy().tobytes()) in bytes(b) for b in buffers)
        taken = send(self, buffers)
        seen["sent"] += taken
        return taken

    monkeypatch.setattr(TlsSocket, "sendmsg", look)

    def member(c: GlooCollective) -> tuple[float, list[int], list[list[int]]]:
        total = torch.full((100_000,), float(c.rank + 1))
        c.allreduce(total).wait(LONG_S)
        assert torch.equal(c.exchange(needle)[0], needle)
        return float(total.sum()), c.vote([c.rank, -c.rank]), c.gather([c.rank])

    with ThreadPoolExecutor(len(group)) as pool:
        for total, vote, gathered in pool.map(member, group):
            assert (total, vote, gathered) == (1_000_000.0, [3, 0], [[0], [1], [2], [3]])
    assert seen["plain"] and seen["sent"] > 100_000  # what went between nodes went into TLS
    for c in group:  # and no connection of gloo's leaves loopback addresses of its own
        assert c._store is not None
        assert {host for host, _ in c._store.peer_addresses} <= {INSIDE, ENTRY, tunnel.NEVER}


def test_the_end_of_one_member_frees_the_others(group: list[GlooCollective]) -> None:
    def member(c: GlooCollective) -> None:
        try:
            c.reduce(torch.ones(1000)).wait(LONG_S)
        except CollectiveError:
            c.abort("a member is gone")
            raise

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(member, c) for c in group[:3]]
        while not all(c.waiting_since for c in group[:3]):
            threading.Event().wait(0.001)
        group[3].abort("gone")
        for future in waiting:
            with pytest.raises(CollectiveError, match="broken"):
                future.result(2 * LONG_S)


def test_strangers_get_nothing_through_a_door(secret: Secret, tmp_path: Path) -> None:
    """With nothing, with another job's secret, with the job's secret but without the member's key."""
    behind = socket.create_server((INSIDE, 0))
    behind.settimeout(0.5)
    home = Tunnels(0, secret, "a", "127.0.0.1")
    home.ports[TunnelService.GLOO] = int(behind.getsockname()[1])
    other = create_secret(tmp_path / "other")
    with socket.create_connection(("127.0.0.1", home.door.port)) as plain:
        plain.sendall(b"\x00" * 100)
        plain.settimeout(LONG_S)
        while plain.recv(100):
            pass
    wrong = home.door._replace(key=bytes(32))
    for whose, door in ((other, home.door), (secret, wrong)):
        guest = Tunnels(1, whose, "b", "127.0.0.1")
        with socket.create_connection((ENTRY, guest.entry(0, door, TunnelService.GLOO))) as caller:
            caller.settimeout(LONG_S)
            try:
                caller.sendall(b"gradients")
                assert caller.recv(1) == b""
            except ConnectionError:
                pass
        guest.close()
    with pytest.raises(TimeoutError):  # nobody came as far as what is behind it
        behind.accept()
    friend = Tunnels(1, secret, "b", "127.0.0.1")
    with socket.create_connection((ENTRY, friend.entry(0, home.door, TunnelService.GLOO))) as caller:
        caller.sendall(b"gradients")
        behind.settimeout(LONG_S)
        inside, _ = behind.accept()
        with inside:
            inside.settimeout(LONG_S)
            assert inside.recv(100) == b"gradients"
            friend.close()
            assert inside.recv(1) == b""
    home.close()
    behind.close()


def test_an_address_that_gloo_wrote_otherwise_is_refused() -> None:
    blob = b"\x02\x00\x1b\x59\x7f\x00\x00\x02" + bytes(8)
    assert moved(blob, (INSIDE, 7001), (ENTRY, 258)) == b"\x02\x00\x01\x02\x7f\x00\x00\x01" + bytes(8)
    with pytest.raises(RuntimeError, match="another version of torch"):
        moved(bytes(16), (INSIDE, 7001), (ENTRY, 258))
