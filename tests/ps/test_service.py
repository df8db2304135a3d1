"""The ps service: what it answers, and that the audit log says exactly what the store did."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import msgspec
import numpy as np
import pytest

from everstep.errors import CheckpointError, PlatformError, WireError
from everstep.ids import Incarnation, LeaseNo, Slot
from everstep.model.member import Address
from everstep.model.placement import Placement, PsPlace
from everstep.model.shard import Token, shard_key
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.monitor.audit import read_log
from everstep.monitor.records import AuditRecord
from everstep.native import batch_fingerprint, bitmap, unique_route
from everstep.net.messages import (
    OPEN_TOGETHER,
    AllOpened,
    Bad,
    DataAnswer,
    DataRequest,
    Declare,
    Declared,
    LeaseClosed,
    LogTaken,
    Moved,
    Opened,
    OpenShard,
    OpenShards,
    Peek,
    Peeked,
    PsStats,
    Pull,
    Pulled,
    Push,
    Pushed,
    Put,
    RowsPart,
    Scan,
    Scanned,
    ShardToOpen,
    Stat,
)
from everstep.ps import mirror_server
from everstep.ps.service import PsService
from everstep.storage.chain import read_chain

B = 8
SPEC = TableSpec("t", 4, OptimizerSpec(OptimizerKind.SGD, 1.0), InitSpec(InitKind.UNIFORM, -1.0, 1.0))
SHARD = shard_key(0, 0, 3)


def placement(version: int, owner: tuple[int, ...], incarnation: int = 1) -> Placement:
    places = tuple(PsPlace(Slot(s), Incarnation(incarnation), Address("node0")) for s in sorted(set(owner)))
    return Placement(version, tuple(Slot(s) for s in owner), places)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[PsService]:
    s = PsService.create(n_partitions=B, seed=5, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    assert s.set_placement(placement(1, (0,) * B))
    assert ask(s, Declare((SPEC,))) == Declared(Incarnation(1), (False,))
    yield s
    if not s.failure:
        s.finish()


def ask(s: PsService, request: DataRequest, body: bytes = b"", arena: memoryview | None = None) -> DataAnswer:
    return s.handle(request, memoryview(body), arena)[0]


def keys_of(n: int) -> np.ndarray:
    return unique_route(np.arange(n), B, SPEC.id, np.zeros(B, np.int32))[0]


def push(lo: int, hi: int, lease: int = 1, *, keys: np.ndarray | None = None, value: float = 1.0) -> tuple[Push, bytes]:
    keys = keys_of(20) if keys is None else keys
    grads = np.full((len(keys), 4), value, np.float32)
    part = RowsPart(SPEC.id, len(keys), 0, 8 * len(keys))
    token = Token(SHARD, lo, hi, LeaseNo(lease), Incarnation(1), Slot(2), Incarnation(7))
    return Push(1, token, (part,), False), keys.tobytes() + grads.tobytes()


def open_shard(s: PsService, lease: int = 1) -> DataAnswer:
    return ask(s, OpenShard(SHARD, 0, LeaseNo(lease)))


def records(path: Path) -> list[AuditRecord]:
    _, raw, problem = read_chain(path)
    assert problem is None
    return [msgspec.msgpack.decode(r, type=AuditRecord) for r in raw]


def log_of(tmp_path: Path) -> Path:
    return tmp_path / "audit" / "ps-0.1.log"


def test_a_push_moves_rows_once(service: PsService) -> None:
    keys = keys_of(20)
    pull = Pull(1, (RowsPart(SPEC.id, 20, 0, 0),), False)
    before = service.handle(pull, memoryview(keys.tobytes()), None)[1][0]
    opened = open_shard(service)
    assert isinstance(opened, Opened)
    assert np.frombuffer(opened.partitions, "<i4").tolist() == list(range(B))
    assert np.frombuffer(opened.watermarks, "<i8").tolist() == [0] * B
    assert ask(service, *push(0, 10)) == Pushed(B, 0)
    assert ask(service, *push(0, 10)) == Pushed(0, B)
    assert ask(service, *push(20, 30)) == Pushed(0, 0, gap=10)
    after = service.handle(pull, memoryview(keys.tobytes()), None)[1][0]
    np.testing.assert_array_equal(after, before - 1)


def test_rows_travel_in_shared_memory(service: PsService) -> None:
    keys = keys_of(10)
    arena = memoryview(bytearray(4096))
    arena[64 : 64 + 80] = keys.tobytes()
    request = Pull(1, (RowsPart(SPEC.id, 10, 64, 1024),), True)
    assert ask(service, request, arena=arena) == Pulled()
    rows = np.frombuffer(arena, np.float32, 40, 1024).reshape(10, 4)
    by_body = service.handle(Pull(1, (RowsPart(SPEC.id, 10, 0, 0),), False), memoryview(keys.tobytes()), None)[1][0]
    np.testing.assert_array_equal(rows, by_body)
    assert isinstance(ask(service, request), Bad)  # no arena attached
    assert isinstance(ask(service, Pull(1, (RowsPart(SPEC.id, 10, 64, 4090),), True), arena=arena), Bad)


@pytest.mark.parametrize(
    "part",
    [
        RowsPart(SPEC.id, 5, 0, 40),
        RowsPart(SPEC.id, -1, 0, 0),
        RowsPart(SPEC.id, 2**40, 0, 0),
        RowsPart(SPEC.id, 2, -8, 16),
        RowsPart(SPEC.id, 2, 1, 16),
        RowsPart(12345, 2, 0, 16),
    ],
)
def test_malformed_parts_change_nothing(service: PsService, part: RowsPart) -> None:
    open_shard(service)
    token = Token(SHARD, 0, 1, LeaseNo(1), Incarnation(1))
    assert isinstance(ask(service, Push(1, token, (part,), False), bytes(56)), Bad)
    assert service.store.watermarks(SHARD)[1].tolist() == [0] * B  # type: ignore[index]
    assert ask(service, *push(0, 1)) == Pushed(B, 0)


def test_stale_maps_and_lives_are_refused(service: PsService) -> None:
    open_shard(service)
    request, body = push(0, 5)
    assert ask(service, msgspec.structs.replace(request, version=9), body) == Moved(1)
    assert ask(service, Pull(0, (), False)) == Moved(1)
    old = msgspec.structs.replace(request.token, ps_incarnation=Incarnation(2))
    assert ask(service, msgspec.structs.replace(request, token=old), body) == Pushed(0, 0, fenced=True)
    assert service.set_placement(placement(2, (0,) * B, incarnation=2)) is False
    assert service.version == 1
    assert service.set_placement(placement(3, (0,) * B))
    assert ask(service, request, body) == Moved(3)


def test_a_request_by_a_newer_map_waits_for_that_map(service: PsService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master tells ps and workers at about the same time: who is first shall not have to ask again."""
    monkeypatch.setattr(mirror_server, "PLACED_S", 60.0)
    asked, answers = threading.Event(), list[DataAnswer]()
    pause = service.mirrors._pause

    def waits(*args: Any) -> bool:
        asked.set()
        return pause(*args)

    monkeypatch.setattr(service.mirrors, "_pause", waits)

    def work() -> None:
        answers.append(ask(service, OpenShard(SHARD, 0, LeaseNo(1), 2)))
        request, body = push(0, 5)
        answers.append(ask(service, msgspec.structs.replace(request, version=2), body))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert asked.wait(60.0) and not answers
    service.set_placement(placement(2, (0,) * B))
    thread.join(60.0)
    assert isinstance(answers[0], Opened) and answers[1] == Pushed(B, 0)


def test_partitions_that_it_never_had_are_not_taken_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    s = PsService.create(n_partitions=B, seed=5, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    assert isinstance(ask(s, OpenShard(SHARD, 0, LeaseNo(1))), Moved)
    s.set_placement(placement(1, (0, 1) * 4))
    assert s.store.owned() == [0, 2, 4, 6]
    s.wait_s = 0.01
    assert s.set_placement(placement(2, (0,) * B))
    assert s.store.owned() == [0, 2, 4, 6]
    assert isinstance(ask(s, OpenShard(SHARD, 0, LeaseNo(1))), Moved)
    assert "partition 1" in caplog.text


def test_leases_that_are_opened_together_are_answered_as_one_by_one(service: PsService) -> None:
    """One is at its watermark, one is fenced by a later lease, one was released, one is new; twice is as once."""
    shards = [shard_key(0, 0, i) for i in range(4)]
    open_shard(service)
    assert shards[3] == SHARD and ask(service, *push(0, 5)) == Pushed(B, 0)
    ask(service, OpenShard(shards[0], 0, LeaseNo(9)))
    service.release([shards[1]])
    wanted = tuple(ShardToOpen(shard, 7, LeaseNo(2)) for shard in shards)
    for _ in range(2):
        found = ask(service, OpenShards(wanted))
        assert isinstance(found, AllOpened) and found.incarnation == 1
        assert np.frombuffer(found.partitions, "<i4").tolist() == list(range(B))
        marks = [None if one is None else np.frombuffer(one, "<i8").tolist() for one in found.watermarks]
        assert marks == [None, None, [7] * B, [5] * B]
    assert ask(service, *push(5, 6)) == Pushed(0, 0, fenced=True), "the newer lease has it"
    alone = ask(service, OpenShard(SHARD, 0, LeaseNo(2)))
    assert alone == Opened(Incarnation(1), found.partitions, found.watermarks[3] or b"")
    none = ask(service, OpenShards(wanted[:2]))
    assert none == AllOpened(Incarnation(1), b"", (None, None))
    many = ask(service, OpenShards((wanted[2],) * (OPEN_TOGETHER + 1)))
    assert isinstance(many, Bad) and f"at most {OPEN_TOGETHER}" in many.error
    service.set_placement(placement(2, (0, 1) * 4))
    assert isinstance(ask(service, OpenShards(wanted, 1)), Moved)


def test_a_later_lease_fences_and_a_released_shard_is_closed(service: PsService) -> None:
    open_shard(service, lease=1)
    assert isinstance(open_shard(service, lease=2), Opened)
    assert ask(service, *push(0, 5, lease=1)) == Pushed(0, 0, fenced=True)
    assert isinstance(open_shard(service, lease=1), LeaseClosed)
    assert ask(service, *push(0, 5, lease=2)) == Pushed(B, 0)
    service.release([SHARD])
    service.release([SHARD])
    assert isinstance(open_shard(service, lease=3), LeaseClosed)
    assert ask(service, *push(5, 6, lease=3)) == Pushed(0, 0, fenced=True)


def test_nan_is_refused_whole(service: PsService, tmp_path: Path) -> None:
    open_shard(service)
    assert ask(service, *push(0, 5, value=float("nan"))) == Pushed(0, 0, nonfinite=SPEC.id)
    skip = msgspec.structs.replace(push(0, 5)[0], parts=(), skipped=True)
    assert ask(service, skip) == Pushed(B, 0)
    service.finish()
    first = records(log_of(tmp_path))[0]
    assert first.skipped and first.applied == B  # type: ignore[union-attr]
    assert not service.store.fingerprints().any()


def test_put_keeps_what_is_there_and_says_when_complete(service: PsService) -> None:
    keys = keys_of(3)
    rows = np.arange(12, dtype=np.float32)
    body = keys.tobytes() + rows.tobytes()
    part = RowsPart(SPEC.id, 3, 0, 24)
    assert ask(service, Put(1, part, False, last=False), body) == LogTaken()
    assert ask(service, Declare((SPEC,))) == Declared(Incarnation(1), (False,))
    assert ask(service, Put(1, part, False, last=True), keys.tobytes() + bytes(48)) == LogTaken()
    assert ask(service, Declare((SPEC,))) == Declared(Incarnation(1), (True,))
    out = service.handle(Pull(1, (RowsPart(SPEC.id, 3, 0, 0),), False), memoryview(keys.tobytes()), None)[1][0]
    np.testing.assert_array_equal(out.ravel(), rows)
    other = TableSpec("t", 5, SPEC.optimizer)
    assert isinstance(ask(service, Declare((other,))), Bad)


def test_scan_reads_a_table_in_pieces(service: PsService) -> None:
    open_shard(service)
    ask(service, *push(0, 1, keys=keys_of(50)))
    found = []
    for b in range(B):
        slot = 0
        while slot >= 0:
            answer, buffers = service.handle(Scan(SPEC.id, b, slot, 3), memoryview(b""), None)
            assert isinstance(answer, Scanned)
            assert answer.n == len(buffers[0]) <= 3
            found += buffers[0].tolist()
            slot = answer.next_slot
    assert sorted(found) == list(range(50))
    stats = ask(service, Stat())
    assert isinstance(stats, PsStats)
    assert stats.rows == {"t": 50}


def test_cuts_agree_with_the_pushes_before_them_under_load(tmp_path: Path) -> None:
    """Four workers on four shards, cuts in between: every cut has exactly the pushes logged before it."""
    s = PsService.create(n_partitions=B, seed=5, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    s.set_placement(placement(1, (0,) * B))
    ask(s, Declare((SPEC,)))
    done = threading.Event()

    def work(index: int) -> None:
        shard = shard_key(0, 1, index)
        ask(s, OpenShard(shard, 0, LeaseNo(1)))
        for lo in range(60):
            request, body = push(lo, lo + 1)
            token = msgspec.structs.replace(request.token, shard=shard)
            some = bitmap([0, 3, 5], B) if lo % 7 == 0 else b""
            if some:  # the rest of the partitions comes in a second message, as after a reconcile
                rest = bitmap([1, 2, 4, 6, 7], B)
                for bits in (some, rest):
                    assert ask(s, Push(1, token, (), False, bits)).gap == -1  # type: ignore[union-attr]
            else:
                assert ask(s, msgspec.structs.replace(request, token=token), body) == Pushed(B, 0)

    def cut() -> None:
        s.cut()  # (the workers may be done before this begins)
        while not done.wait(0.001):
            s.cut()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    cutter = threading.Thread(target=cut)
    for t in [*threads, cutter]:
        t.start()
    for t in threads:
        t.join(60)
    done.set()
    cutter.join(60)
    s.finish()

    log = read_log(log_of(tmp_path))
    assert log.problem is None and log.bad == [] and log.closed
    assert len(log.cuts) >= 2
    sums = [0] * B
    cuts = {cut.before: cut.found for cut in log.cuts}
    for i in range(log.n + 1):
        if i in cuts:
            assert cuts[i].tolist() == [x % 2**64 for x in sums]
        if i < log.n:
            added = batch_fingerprint(int(log.shard[i]), int(log.lo[i]), int(log.hi[i]))
            for b in np.flatnonzero(log.mask(int(log.partitions[i]))):
                sums[b] += added
    whole = sum(batch_fingerprint(shard_key(0, 1, i), 0, 60) for i in range(4)) % 2**64
    assert log.cuts[-1].found.tolist() == [whole] * B


def test_records_of_a_shard_stand_in_the_order_of_its_leases(service: PsService, tmp_path: Path) -> None:
    open_shard(service, lease=1)

    def zombie() -> None:
        for lo in range(200):
            answer = ask(service, *push(lo, lo + 1, lease=1))
            if answer == Pushed(0, 0, fenced=True):
                return

    thread = threading.Thread(target=zombie)
    thread.start()
    while ask(service, Stat()).pushes < 20 and thread.is_alive():  # type: ignore[union-attr]
        pass
    opened = open_shard(service, lease=2)
    assert isinstance(opened, Opened)
    marks = np.frombuffer(opened.watermarks, "<i8")
    if marks.min() == marks.max():
        ask(service, *push(int(marks[0]), 300, lease=2))
    thread.join(30)
    service.finish()
    leases = [r.lease for r in records(log_of(tmp_path)) if hasattr(r, "lease")]
    assert leases == sorted(leases)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_without_audit_nothing_is_acknowledged(tmp_path: Path) -> None:
    told: list[str] = []
    s = PsService.create(
        n_partitions=B, seed=5, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path, on_failure=told.append
    )
    s.set_placement(placement(1, (0,) * B))
    ask(s, Declare((SPEC,)))
    open_shard(s)
    assert ask(s, *push(0, 5)) == Pushed(B, 0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, s._log._fd)  # type: ignore[union-attr]  # the disk is full from here on
    os.close(full)
    answer = ask(s, *push(5, 10))
    assert isinstance(answer, Bad) and "space" in answer.error
    assert told == [answer.error]
    assert isinstance(ask(s, *push(10, 11)), Bad)
    assert isinstance(ask(s, Pull(1, (), False)), Bad)
    with pytest.raises(PlatformError, match="space"):
        s.finish()


def test_the_first_placement_may_come_while_the_threads_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = PsService.create(n_partitions=B, seed=5, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    comes = threading.Thread(target=s.set_placement, args=(placement(1, (0,) * B),))
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "everstep-outbox":
            start(comes)
            comes.join(0.1)  # (it waits for the lock; without one it is done by now)
        start(thread)

    def nobody(place: PsPlace) -> Never:
        raise WireError("nobody is there")

    monkeypatch.setattr(threading.Thread, "start", starts)
    s.mirrors.start(nobody)
    comes.join(60)
    assert s.mirrors.rebuilt and set(s.mirrors._threads) == {"outbox", "sweep", (0, 1)}
    s.mirrors.close()
    s.finish()


def test_finished_is_finished(service: PsService) -> None:
    open_shard(service)
    service.finish()
    service.finish()
    assert isinstance(ask(service, *push(0, 5)), Bad)


def test_a_partition_that_is_not_here_is_not_scanned(tmp_path: Path) -> None:
    """A reader with an older map asks its new owner; a request that is wrong in itself would end the job."""
    s = PsService.create(n_partitions=B, seed=1, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    s.set_placement(placement(1, (0,) * (B - 1) + (1,)))
    ask(s, Declare((SPEC,)))
    assert isinstance(ask(s, Scan(SPEC.id, B - 2, 0, 10)), Scanned)
    assert isinstance(ask(s, Scan(SPEC.id, B - 1, 0, 10)), Moved)
    s.finish()


def test_a_ps_that_cannot_load_stays_and_says_so(tmp_path: Path) -> None:
    """It tries once under each map: whether there is another time, and where, is the master's to say."""
    service = PsService.create(n_partitions=B, seed=1, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    said: list[tuple[int, int, int, str]] = []
    tried: list[int] = []
    heard = threading.Condition()

    def load(partition: int, checkpoint: int) -> Never:
        tried.append(partition)
        raise (CheckpointError("its marks are of another kind") if partition == 2 else ZeroDivisionError("ours"))

    def failed(version: int, partition: int, checkpoint: int, error: str) -> None:
        with heard:
            said.append((version, partition, checkpoint, error))
            heard.notify_all()

    def wait_for(n: int) -> None:
        with heard:
            assert heard.wait_for(lambda: len(said) >= n, 60.0), said

    service.load, service.on_load_failed = load, failed
    owner = (0,) * B
    snapshots = tuple((b, 7 if b in (2, 5) else 0) for b in range(B))
    first = msgspec.structs.replace(placement(1, owner), snapshots=snapshots)
    service.set_placement(first)
    wait_for(2)
    assert sorted(said) == [
        (1, 2, 7, "its marks are of another kind"),
        (1, 5, 7, "ZeroDivisionError: ours"),
    ]
    assert not service.failure and service.mirrors.machine.stuck == (2, 5)
    with service.mirrors.transition() as machine:
        machine.settle()
    assert sorted(tried) == [2, 5], "nothing else under this map"
    service.set_placement(msgspec.structs.replace(first, version=2, routing=2))
    wait_for(4)
    assert {version for version, *_ in said[2:]} == {2}
    service.finish()


def test_a_peek_has_rows_with_their_state_and_says_what_is_in_them(tmp_path: Path) -> None:
    s = PsService.create(n_partitions=B, seed=5, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    s.set_placement(placement(1, (0,) * B))
    spec = TableSpec("a", 2, OptimizerSpec(OptimizerKind.ADAGRAD, 0.5), InitSpec(InitKind.CONSTANT, 1.0, 0.0))
    ask(s, Declare((spec,)))
    ask(s, OpenShard(SHARD, 0, LeaseNo(1)))
    keys = unique_route(np.arange(5), B, spec.id, np.zeros(B, np.int32), 1)[0]
    body = memoryview(keys.tobytes() + np.ones((5, 2), np.float32).tobytes())
    token = Token(SHARD, 0, 3, LeaseNo(1), Incarnation(1), Slot(0), Incarnation(1))
    answer, _ = s.handle(Push(1, token, (RowsPart(spec.id, 5, 0, 40),), False), body, None)
    assert isinstance(answer, Pushed) and answer.applied == B
    wanted = np.array([3, 99, 0], np.int64).tobytes()
    for until, done in ((3, True), (4, False)):
        answer, buffers = s.handle(Peek(1, spec.id, wanted, SHARD, 3, SHARD, until), memoryview(b""), None)
        assert answer == Peeked(2)
        assert sorted(buffers[0].tolist()) == [0, 3]
        np.testing.assert_allclose(buffers[1], 0.5, rtol=1e-6)
        np.testing.assert_allclose(buffers[2], 1.0, rtol=1e-6)
        assert buffers[3].tolist() == [done, done]
    assert isinstance(ask(s, Peek(2, spec.id, wanted, SHARD, 0, SHARD, 1)), Moved)
    assert isinstance(ask(s, Peek(1, spec.id, b"1234567", SHARD, 0, SHARD, 1)), Bad)
    s.finish()
