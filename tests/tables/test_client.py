"""Links and routing against a real ps service: over the wire's form of messages, with reconnects and old maps."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.errors import EverstepError, InternalError, ServerLostError, WireError
from everstep.ids import Incarnation, LeaseNo, NodeId, PartitionId, ShardKey, Slot
from everstep.model.member import Address
from everstep.model.placement import Placement, PsPlace
from everstep.model.shard import Token
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.net.arena import Arena
from everstep.net.messages import Declare, OpenShard, Push, Pushed
from everstep.ps.service import PsService
from everstep.tables import client as tables_client
from everstep.tables.client import GONE, PsClient, SocketLink
from everstep.tables.routing import BatchRows, OutOfVocabularyError, check_vocabulary, parts_by_ps

SGD = OptimizerSpec(kind=OptimizerKind.SGD, lr=1.0)
TABLES = (TableSpec("a", 3, SGD, InitSpec(InitKind.CONSTANT, 1.0)), TableSpec("b", 2, SGD, InitSpec()))
PARTITIONS = 16


def placement(n_ps: int, version: int = 1) -> Placement:
    servers = tuple(PsPlace(Slot(i), Incarnation(1), Address(NodeId("n"))) for i in range(n_ps))
    return Placement(version, tuple(Slot(b % n_ps) for b in range(PARTITIONS)), servers)


class Wire:
    """A connection to a service that carries bodies only, as TCP does; ``breaks``: requests to fail at."""

    def __init__(self, service: PsService, shared: Arena | None, breaks: list[int]) -> None:
        self.service, self.shared, self.breaks = service, shared, breaks

    def request(
        self, message: Any, buffers: Any = (), *, into: memoryview | None = None, timeout_s: float = 30.0
    ) -> tuple[Any, memoryview]:
        self.breaks[0] -= 1
        if self.breaks[0] == 0:
            raise WireError("broken")
        body = memoryview(b"".join(bytes(b) for b in buffers))
        answer, out = self.service.handle(message, body, None if self.shared is None else self.shared.view)
        if self.breaks[0] == -1:  # the answer of one request is lost
            raise WireError("broken after it was done")
        data = b"".join(b.tobytes() for b in out)
        if into is not None and len(into) >= len(data):
            into[: len(data)] = data
            return answer, into[: len(data)]
        return answer, memoryview(data)

    def close(self) -> None:
        pass


class World:
    def __init__(self, folder: Path, n_ps: int, shared: bool, break_at: int = 10**9) -> None:
        self.arena = Arena(1 << 20)
        self.map = placement(n_ps)
        self.services = [
            PsService.create(n_partitions=PARTITIONS, seed=1, slot=Slot(i), incarnation=Incarnation(1), run_dir=folder)
            for i in range(n_ps)
        ]
        for service in self.services:
            service.set_placement(self.map)
        self.client = PsClient(self.arena, moved_give_up_s=5.0)
        self.lost: list[EverstepError] = []
        self.failed = threading.Event()
        breaks = [break_at]

        def fail(error: EverstepError) -> None:
            self.lost.append(error)
            self.client.fail(error)
            self.failed.set()

        def link(place: PsPlace) -> SocketLink:
            arena = self.arena if shared else None
            return SocketLink(
                place,
                self.arena,
                self.client.dims,
                lambda p: (Wire(self.services[p.slot], arena, breaks), shared),
                fail,
                give_up_s=0.2,
            )

        self.client.set_placement(self.map, link)
        self.client.declare(TABLES).wait()

    def close(self) -> None:
        self.client.close()
        for service in self.services:
            service.finish()


def train_once(world: World, keys: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Pull, push a gradient of -1 for every row, pull again; the values in the order of ``keys``."""
    client, router = world.client, world.client.router
    shard, lease = ShardKey(7), LeaseNo(1)
    client.everywhere(lambda i, s: OpenShard(shard, 0, lease)).wait()
    batch = BatchRows(world.arena, router)
    found = [router.route(t.id, k) for t, k in zip(TABLES, keys, strict=True)]
    rows = batch.add([(t, k, counts) for t, (k, _, counts) in zip(TABLES, found, strict=True)])
    client.pull(rows, router, create=True).wait()
    for r in rows:
        r.grads[:] = -1.0
        r.touched = True
    parts = parts_by_ps(rows, len(router.slots), grads=True)
    token = Token(shard, 0, 10, lease, Incarnation(1))
    ticket = client.everywhere(lambda i, s: Push(router.version, token, tuple(parts[i]), True))
    ticket.wait()
    pushed = [a for _, a, _ in ticket.answers if isinstance(a, Pushed)]
    assert sum(a.applied + a.repeats for a in pushed) == PARTITIONS
    for r in rows:
        r.values[:] = np.nan
    client.pull(rows, router, create=True).wait()
    out = [r.values[inverse].copy() for r, (_, inverse, _) in zip(rows, found, strict=True)]
    batch.close()
    assert world.arena.used_bytes == 0
    return out


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "wire"])
@pytest.mark.parametrize("n_ps", [1, 3])
def test_pull_and_push(tmp_path: Path, n_ps: int, shared: bool) -> None:
    world = World(tmp_path, n_ps, shared)
    keys = [np.array([5, 5, -3, 99, 7]), np.arange(41)]  # odd numbers of rows: bodies need padding
    a, b = train_once(world, keys)
    assert (a == 2.0).all() and (b == 1.0).all() and a.shape == (5, 3) and b.shape == (41, 2)
    size = 4 * (8 + 4 * 3) + 41 * (8 + 4 * 2)
    assert world.client.carried() == {"bytes_in": 2 * size, "bytes_out": size}, "pulled twice, pushed once"
    world.close()


@pytest.mark.parametrize("at", range(2, 9))
def test_a_connection_that_breaks_is_made_again(tmp_path: Path, at: int) -> None:
    """Also when the request was done and only its answer lost: a repeat does nothing."""
    world = World(tmp_path, 1, False, break_at=at)
    a, _ = train_once(world, [np.arange(10), np.arange(4)])
    assert (a == 2.0).all() and not world.lost
    world.close()


def test_a_ps_that_is_gone_ends_the_wait(tmp_path: Path) -> None:
    world = World(tmp_path, 1, True)
    link = world.client.links[Slot(0)]
    assert isinstance(link, SocketLink)
    link._connection = None
    link._connect = _refuse
    with pytest.raises(ServerLostError, match=r"ps:0 did not answer for \d+ s"):
        world.client.everywhere(lambda i, s: Declare(TABLES)).wait()
    assert len(world.lost) == 1


def _refuse(place: PsPlace) -> Any:
    raise WireError("no such socket")


def test_what_came_with_an_old_map_is_answered_moved_once_the_newer_one_is_here(tmp_path: Path) -> None:
    world = World(tmp_path, 1, True)
    world.services[0].set_placement(placement(1, version=2))
    client = world.client
    timer = threading.Timer(0.05, lambda: client.set_placement(placement(1, 2), lambda p: client.links[p.slot]))
    timer.start()
    batch = BatchRows(world.arena, client.router)
    keys, _, counts = client.router.route(TABLES[0].id, np.arange(5))
    (rows,) = batch.add([(TABLES[0], keys, counts)])
    ticket = client.pull([rows], client.router, create=True)
    ticket.wait()
    assert ticket.moved and not ticket.adrift
    client.pull([rows], client.router, create=True).wait()
    assert (rows.values == 1.0).all()
    world.close()


def test_a_newer_map_ends_the_wait_to_ask_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a ps answers with Moved is not left lying until its time has come."""
    monkeypatch.setattr(tables_client, "_AGAIN_S", 1e4)
    monkeypatch.setattr(tables_client, "_AGAIN_MAX_S", 1e4)
    world = World(tmp_path, 1, True)
    client = world.client
    world.services[0].set_placement(placement(1, version=2))
    batch = BatchRows(world.arena, client.router)
    keys, _, counts = client.router.route(TABLES[0].id, np.arange(5))
    (rows,) = batch.add([(TABLES[0], keys, counts)])
    tickets = [client.pull([rows], client.router, create=True) for _ in range(3)]
    deadline = time.monotonic() + 60.0
    while len(client._later) < len(tickets) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not any(ticket.ready for ticket in tickets)
    client.set_placement(placement(1, 2), lambda p: client.links[p.slot])
    for ticket in tickets:
        ticket.wait()
        assert ticket.moved and len(ticket.answers) == 1
    assert not client._later
    world.close()


def test_a_ps_that_is_lost_is_waited_for_until_the_map_names_another(tmp_path: Path) -> None:
    """Requests to the dead one end; the new one hears of the tables before anything else."""
    world = World(tmp_path, 1, True)
    client = world.client
    dead = client.links[Slot(0)]
    assert isinstance(dead, SocketLink)
    dead._give_up_s, dead._connection, dead._connect = 60.0, None, _refuse
    batch = BatchRows(world.arena, client.router)
    keys, _, counts = client.router.route(TABLES[0].id, np.arange(5))
    (rows,) = batch.add([(TABLES[0], keys, counts)])
    tickets = [client.pull([rows], client.router, create=True) for _ in range(3)]
    again = PsService.create(
        n_partitions=PARTITIONS, seed=1, slot=Slot(0), incarnation=Incarnation(2), run_dir=tmp_path
    )
    place = PsPlace(Slot(0), Incarnation(2), Address(NodeId("n")))
    empty = tuple((PartitionId(b), 0) for b in range(PARTITIONS))
    moved = Placement(2, world.map.owner, (place,), snapshots=empty)
    again.set_placement(moved)

    def link(place: PsPlace) -> SocketLink:
        arena = world.arena
        return SocketLink(place, arena, client.dims, lambda p: (Wire(again, arena, [10**9]), True), world.lost.append)

    assert not any(t.ready for t in tickets)
    client.set_placement(moved, link)
    for ticket in tickets:
        ticket.wait()
        assert ticket.moved
    client.pull([rows], client.router, create=True).wait()  # its tables were declared: this would be refused
    assert (rows.values == 1.0).all() and not world.lost
    again.finish()
    world.close()


def test_an_answer_that_may_still_come_keeps_its_memory(tmp_path: Path) -> None:
    """A ps that was given up with a pull on its way writes into our memory whenever it likes."""
    world = World(tmp_path, 1, True)
    client = world.client
    stuck, entered = threading.Event(), threading.Event()

    class Stopped:
        def request(self, *_: Any, **__: Any) -> tuple[Any, memoryview]:
            entered.set()
            stuck.wait(30.0)
            raise WireError("closed")

        def close(self) -> None:
            stuck.set()

    link = client.links[Slot(0)]
    assert isinstance(link, SocketLink)
    link._connection, link._shared = Stopped(), True
    batch = BatchRows(world.arena, client.router)
    keys, _, counts = client.router.route(TABLES[0].id, np.arange(5))
    rows = batch.add([(TABLES[0], keys, counts)])
    used = world.arena.used_bytes
    ticket = client.pull(rows, client.router, create=True)
    assert entered.wait(30.0)
    client.set_placement(Placement(2, world.map.owner, ()), lambda p: link)
    ticket.wait()
    assert ticket.moved and ticket.adrift
    batch.drop(rows, adrift=ticket.adrift)
    batch.close()
    assert world.arena.used_bytes == used
    world.close()


def test_a_link_that_is_closed_while_it_connects_asks_nothing_more(tmp_path: Path) -> None:
    """Whom it reaches may be stopped a moment later: its answer would be waited for in vain, and for long."""
    world = World(tmp_path, 1, True)
    link = world.client.links[Slot(0)]
    assert isinstance(link, SocketLink)
    connecting, go_on = threading.Event(), threading.Event()
    asked: list[Any] = []
    answers: list[Any] = []

    class Stopped:
        def request(self, message: Any, *_: Any, **__: Any) -> tuple[Any, memoryview]:
            asked.append(message)
            raise WireError("closed")

        def close(self) -> None: ...

    def connect(place: PsPlace) -> Any:
        connecting.set()
        assert go_on.wait(60.0)
        return Stopped(), False

    link._connection, link._connect = None, connect
    link.submit(Declare(TABLES), lambda answer, body: answers.append(answer))
    assert connecting.wait(60.0)
    link.close(wait_s=0.0)
    go_on.set()
    link._thread.join(60.0)
    assert answers == [GONE] and not asked
    world.close()


def test_a_wrong_request_is_an_error_not_a_hang(tmp_path: Path) -> None:
    world = World(tmp_path, 1, True)
    other = TableSpec("a", 4, SGD)
    with pytest.raises(InternalError, match="ps:0 refused"):
        world.client.everywhere(lambda i, s: Declare((other,))).wait()
    world.close()


def test_padding_rows_are_left_out() -> None:
    arena, router = Arena(1 << 16), PsClient(Arena(1 << 12))
    router.set_placement(placement(3), lambda p: None)  # type: ignore[arg-type,return-value]
    for padding in range(10):
        keys, _, counts = router.router.route(TABLES[0].id, np.arange(10))
        batch = BatchRows(arena, router.router)
        (rows,) = batch.add([(TABLES[0], keys, counts)])
        rows.grads[:] = keys[:, None]
        rows.padding_at = int(np.flatnonzero(keys == padding)[0])
        rows.drop_padding()
        assert rows.u == 9 and sum(rows.counts) == 9
        assert rows.keys.tolist() == [k for k in keys if k != padding]
        assert rows.grads[:, 0].tolist() == rows.keys.tolist()
        at = 0
        for ps, n in enumerate(rows.counts):
            partitions_ps = {
                int(router.router.route(TABLES[0].id, rows.keys[i : i + 1])[2].index(1)) for i in range(at, at + n)
            }
            assert partitions_ps <= {ps}
            at += n
        batch.close()
        batch.close()  # harmless
    assert arena.used_bytes == 0


def test_vocabulary() -> None:
    spec = TableSpec("t", 2, SGD, rows=10)
    check_vocabulary(spec, np.array([0, 9]))
    check_vocabulary(TABLES[0], np.array([-(2**63), 2**63 - 1]))
    for bad in (-1, 10):
        with pytest.raises(OutOfVocabularyError, match=f"id {bad} is out of range"):
            check_vocabulary(spec, np.array([3, bad]))
