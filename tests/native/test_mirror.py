"""Mirrors follow streams of differences and contents, whatever order the sweeps and the pushes come in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_cluster import ID, SHARDS, TABLES, Cluster, mirror_pages, pages_of, split

from everstep.model.table import TRAVELLING, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store
from everstep.native.blob import build, parse, seal
from everstep.testing import mirror_twin, twin
from everstep.testing.mirror_twin import APPLIED, GAP, NOT_MEMBER, REPEAT


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mirrors_follow_random_streams(data: st.DataObject) -> None:
    draw = data.draw
    k, m = draw(st.integers(1, 5), "k"), draw(st.integers(1, 2), "m")
    lag = draw(st.booleans(), "lag")
    cluster = Cluster(k, m, draw(st.integers(0, 2**32), "seed"), lag=lag)
    links = list(cluster.links)
    partition = st.integers(0, k - 1)
    shard = st.sampled_from(SHARDS)
    for s in SHARDS:
        cluster.open(s, 1)
    for _ in range(draw(st.integers(0, 3), "before")):
        cluster.push(draw(shard), 1, 20)
    for b in range(k):
        cluster.ps[b].protect([b], True)
    actions = [
        "open",
        "put",
        "push",
        "push",
        "push",
        "sweep",
        "sweep",
        "deliver",
        "deliver",
        "again",
        "early",
        "expire",
        "release",
        "flush",
    ]
    for _ in range(draw(st.integers(0, 40), "actions")):
        match draw(st.sampled_from(actions)):
            case "open":
                cluster.open(draw(shard), draw(st.integers(1, 3)))
            case "push":
                cluster.push(draw(shard), 3, draw(st.integers(0, 60)))
            case "put":
                cluster.put(draw(st.integers(0, 30)))
            case "sweep":
                b = draw(partition)
                sync = cluster.syncs.setdefault(b, cluster.sync(b))
                next(sync, None)
            case "deliver":
                cluster.drain()
                link = draw(st.sampled_from(links))
                for _ in range(min(len(cluster.links[link]), draw(st.integers(1, 8)))):
                    cluster.deliver(*link)
            case "again":
                link = draw(st.sampled_from(links))
                if sent := cluster.delivered[link]:
                    cluster.apply(link[1], sent[draw(st.integers(0, len(sent) - 1))])
            case "early":
                link = draw(st.sampled_from(links))
                waiting = cluster.links[link]
                if len(waiting) > 1 and parse(waiting[0], lambda t: cluster.ps[0].layout(t)[2]).kind is BlobKind.CHANGE:
                    later = [
                        blob
                        for blob in list(waiting)[1:]
                        if parse(blob, lambda t: cluster.ps[0].layout(t)[2]).kind is BlobKind.CHANGE
                    ]
                    member = cluster.twins[link[1]].members[link[0]]
                    if later and member.stage != "empty":
                        assert cluster.apply(link[1], later[-1]) == GAP
            case "expire":
                cluster.expire()
            case "flush":
                cluster.flush()
            case "release":
                for store in cluster.ps:
                    store.release([SHARDS[2]])
    cluster.build()


def filled(k: int, m: int, seed: int, pushes: int = 6) -> Cluster:
    cluster = Cluster(k, m, seed)
    for shard in SHARDS:
        cluster.open(shard, 1)
    for _ in range(pushes):
        cluster.push(SHARDS[0], 1, 80)
    return cluster


def test_a_partition_moves_while_it_is_pushed_to() -> None:
    cluster = filled(1, 1, 11)
    source, target = cluster.ps[0], cluster.homes[0]
    source.protect([0], True)
    for _ in cluster.sync(0):
        cluster.push(SHARDS[0], 1, 30)
    with pytest.raises(ValueError, match="not complete"):
        target.promote(ID, 0)
    cluster.deliver_all()
    cluster.push(SHARDS[1], 1, 30)
    last = source.hand_over(0)
    with pytest.raises(KeyError):
        cluster.push(SHARDS[1], 1, 30)
    cluster.deliver_all()
    assert target.mirror_state(ID) == [(0, last, True)]
    digest = source.digest(0)
    before = target.mirror_bytes(ID)
    assert before
    target.promote(ID, 0)
    assert target.mirrors() == [] and target.owned() == [0]
    assert target.digest(0) == digest and target.seq(0) == last
    source.drop(0)
    cluster.ps[0] = target
    cluster.positions[SHARDS[1]] = 1  # the push that was refused counts for nothing
    cluster.push(SHARDS[1], 1, 30)
    assert target.watermarks(SHARDS[1])[1].tolist() == [2]


@pytest.mark.parametrize("row", [0, 1])
def test_a_mirror_is_built_anew_under_pushes(row: int) -> None:
    cluster = filled(4, 2, 12)
    cluster.build()
    old = cluster.homes[row].mirror_pages(ID, TABLES[0].id)
    assert cluster.homes[row].mirror_drop(ID) and not cluster.homes[row].mirror_drop(ID)
    cluster.homes[row] = Store(4, 12)
    for spec in TABLES:
        cluster.homes[row].declare(spec)
    cluster.make_mirror(row)
    syncs = [cluster.sync(b) for b in range(4)]
    for step in range(200):
        next(syncs[step % 4], None)
        if step % 3 == 0:
            cluster.push(SHARDS[0], 1, 40)
        if step % 7 == 0:
            cluster.deliver_all()
    cluster.syncs = dict(enumerate(syncs))
    cluster.build()
    assert cluster.homes[row].mirror_pages(ID, TABLES[0].id) != old


def test_members_order_and_ids_are_checked() -> None:
    store = filled(3, 1, 1).homes[0]
    store.mirror_make(1, [2, 0], 1)
    assert store.mirrors() == [1, ID] and store.mirror_state(1) == [(2, -1, False), (0, -1, False)]
    for members, row in (([], 0), ([0, 0], 0), ([3], 0), ([-1], 0), (list(range(17)), 0), ([0], 2)):
        with pytest.raises(ValueError):
            store.mirror_make(2, members, row)
    with pytest.raises(ValueError, match="exists already"):
        store.mirror_make(1, [1], 0)
    with pytest.raises(ValueError, match="no mirror 9"):
        store.mirror_state(9)
    with pytest.raises(ValueError, match="no member"):
        store.mirror_marks(1, 1)
    with pytest.raises(ValueError, match="several members"):
        store.promote(1, 2)


def test_a_table_that_the_sweep_forgot_is_a_gap() -> None:
    cluster = filled(1, 1, 2)
    cluster.ps[0].protect([0], True)
    spec = TABLES[0]
    for kind in (BlobKind.HEADS, BlobKind.BODIES):
        cluster.ps[0].emit(0, kind, spec.id, 0, 100_000)
    cluster.push(SHARDS[0], 1, 30)
    cluster.deliver_all()
    cluster.ps[0].emit_marks(0)
    cluster.drain()
    assert cluster.apply(0, cluster.links[0, 0].popleft()) == GAP
    cluster.build()  # goes on where it was


def test_damaged_blobs_are_refused_and_change_nothing() -> None:
    cluster = filled(3, 2, 21)
    for b in range(3):
        cluster.ps[b].protect([b], True)
        for _ in cluster.sync(b):
            pass
    cluster.push(SHARDS[0], 1, 20)
    cluster.drain()
    rng = np.random.default_rng(0)
    home = cluster.homes[1]
    refused = 0

    def held() -> tuple[object, ...]:
        return home.mirror_state(ID), mirror_twin.trimmed(mirror_pages(home, TABLES))

    for b in range(3):
        for blob in list(cluster.links[b, 1]):
            before = held()
            for size in (0, 1, 31, 40, len(blob) - 1):
                with pytest.raises(ValueError):
                    home.mirror_apply(ID, blob[:size])
            with pytest.raises(ValueError):
                home.mirror_apply(ID, blob + b"\0")
            for _ in range(60):
                at = int(rng.integers(min(len(blob), 200)))  # where the headers are
                bad = bytearray(blob)
                bad[at] ^= 1 << int(rng.integers(8))
                try:
                    Probe(home, cluster, 1).apply(seal(bytes(bad)))  # the checksum would notice all
                except ValueError:
                    refused += 1
            assert held() == before
            cluster.deliver(b, 1)
    assert refused > 100
    with pytest.raises(ValueError):
        home.mirror_apply(ID, object())
    with pytest.raises(ValueError, match="far beyond"):
        home.mirror_apply(ID, far_away(cluster))


class Probe:
    """Applies a blob to a mirror of its own, as far along as none: whatever it does, no other one is touched."""

    def __init__(self, store: Store, cluster: Cluster, row: int) -> None:
        self.store = store
        store.mirror_make(99, list(range(cluster.k)), row)

    def apply(self, blob: bytes) -> int:
        try:
            return self.store.mirror_apply(99, blob)
        finally:
            self.store.mirror_drop(99)


def far_away(cluster: Cluster) -> bytes:
    """Heads of one row in slot 2^31, which would need gigabytes of pages."""
    store = Store(1, 0)
    store.own([0])
    store.declare(TABLES[0])
    store.put_absent(TABLES[0].id, np.array([5]), np.zeros((1, 9), np.float32))
    store.emit(0, BlobKind.HEADS, TABLES[0].id, 0, 1 << 20)
    _, ((_, _, _, at, length),), data = store.take_outbox(1 << 20)
    blob = bytearray(data[at : at + length].tobytes())
    part = 32 + 24
    blob[8:12] = (0).to_bytes(4, "little")
    blob[part + 24 : part + 28] = (1 << 31).to_bytes(4, "little")
    return seal(bytes(blob))


def test_many_blobs_in_one_call() -> None:
    cluster = filled(2, 1, 3)
    for b in range(2):
        cluster.ps[b].protect([b], True)
        for _ in cluster.sync(b):
            pass
    cluster.drain()
    blobs = [*cluster.links[0, 0], *cluster.links[1, 0]]
    lengths = np.array([len(blob) for blob in blobs])
    offsets = np.cumsum(lengths) - lengths
    ids = np.full(len(blobs), ID)
    home = cluster.homes[0]
    data = b"".join(blobs)
    assert home.mirror_apply_many(ids, offsets, lengths, data).tolist() == [APPLIED] * len(blobs)
    assert home.mirror_apply_many(ids, offsets, lengths, data).tolist() == [REPEAT] * len(blobs)
    home.mirror_make(1, [1], 0)
    assert home.mirror_apply_many(ids[:1] * 0 + 1, offsets[:1], lengths[:1], data).tolist() == [NOT_MEMBER]
    with pytest.raises(ValueError, match="outside of the message"):
        home.mirror_apply_many(ids, offsets + 1, lengths, data)
    with pytest.raises(ValueError, match="no mirror"):
        home.mirror_apply_many(ids + 1, offsets, lengths, data)


def test_mirrors_of_one_ps_are_fed_by_threads() -> None:
    """Owners push, senders send, sweeps run, all at once; at the end every byte is right."""
    k, shard = 3, SHARDS[0]
    owners = [Store(k, 9) for _ in range(k)]
    home = Store(k, 9)
    for store in (*owners, home):
        for spec in TABLES:
            store.declare(spec)
    home.mirror_make(ID, list(range(k)), 1)
    home.mirror_make(ID + 1, [1], 0)
    errors: list[BaseException] = []
    over = [threading.Event() for _ in range(k)]

    def own(b: int) -> None:
        rng = np.random.default_rng(b)
        store = owners[b]
        store.own([b])
        store.open(shard, 0, 1)
        store.protect([b], True)
        sync = Cluster.sweep_of(store, b)
        for at in range(120):
            parts = []
            for spec in TABLES:
                keys = np.unique(rng.integers(-300, 300, 60))
                keys = keys[twin.partition_of(keys, spec.id, k) == b]
                parts.append((spec.id, keys, rng.normal(size=(len(keys), spec.dim)).astype(np.float32), -1.0))
            assert store.push(shard, at, at + 1, 1, b"", parts).applied == 1
            if at > 20:
                next(sync, None)
        for _ in sync:
            pass
        over[b].set()

    def send(b: int) -> None:
        while True:
            done = over[b].is_set()
            _, entries, data = owners[b].take_outbox(1 << 16)
            if not entries and done:
                return
            if not entries:
                owners[b].wait_outbox(0.01)
            for mirror in (ID, ID + 1):
                at = np.array([e[3] for e in entries], np.int64)
                length = np.array([e[4] for e in entries], np.int64)
                got = home.mirror_apply_many(np.full(len(entries), mirror), at, length, data)
                assert set(got.tolist()) <= {APPLIED, NOT_MEMBER}

    def guarded(what: object, b: int) -> None:
        try:
            what(b)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)
            over[b].set()

    threads = [threading.Thread(target=guarded, args=(what, b)) for what in (own, send) for b in range(k)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    members = [split(pages_of(store, b))[0] for b, store in enumerate(owners)]
    held = mirror_twin.trimmed(mirror_pages(home, TABLES))
    assert held == mirror_twin.trimmed(mirror_twin.code(members, 1))
    home.promote(ID + 1, 1)
    assert home.digest(1) == owners[1].digest(1)


KERNELS = """
import numpy as np, sys
from everstep.native import _native
from everstep.testing import mirror_twin
assert _native.gf_isa() == sys.argv[1] or sys.argv[1] == "", _native.gf_isa()
rng = np.random.default_rng(0)
for n in (0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 200, 1000):
    for c in (0, 1, 2, 29, 255, *rng.integers(0, 256, 20).tolist()):
        a, b = rng.integers(0, 256, (2, n + 3), np.uint8)
        expected = a[3:] ^ mirror_twin.MUL[c][b[:n]]
        into = a[3:]
        _native.gf_add_mul(into, b[:n], c)
        assert (into == expected).all(), (n, c)
        _native.gf_mul(into, c)
        assert (into == mirror_twin.MUL[c][expected]).all(), (n, c)
"""


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512", ""])
def test_kernels_of_every_width_agree(isa: str) -> None:
    flags = open("/proc/cpuinfo").read()  # noqa: PTH123, SIM115
    if isa not in ("", "base") and (isa if isa == "avx2" else "avx512bw") not in flags:
        pytest.skip(f"this machine has no {isa}")
    env = {**os.environ, "EVERSTEP_ISA": isa}
    subprocess.run([sys.executable, "-c", KERNELS, isa], env=env, check=True, timeout=60)


def test_two_equations_are_solved() -> None:
    """The algebra of the twin, by itself: any two of four members and two mirrors."""
    rng = np.random.default_rng(4)
    members = [{(1, 0): rng.integers(0, 256, 50, np.uint8)} for _ in range(4)]
    mirrors = {row: mirror_twin.code(members, row) for row in (0, 1)}
    for lost in ([0, 1], [3, 1], [2], [0]):
        survivors = {i: members[i] for i in range(4) if i not in lost}
        for rows in ([0, 1],) if len(lost) == 2 else ([0], [1]):
            back = mirror_twin.solve({r: mirrors[r] for r in rows}, survivors, lost)
            for i, pages in zip(lost, back, strict=True):
                assert mirror_twin.trimmed(pages) == mirror_twin.trimmed(members[i])


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_updates_of_dense_tables_are_made_again(kind: OptimizerKind) -> None:
    """Their differences are the gradients alone; what the mirror has is bit for bit what the owner has."""
    spec = TableSpec("net", 48, OptimizerSpec(kind, 0.01), dense=True)
    owner, home = Store(2, 1), Store(2, 1)
    rng = np.random.default_rng(3)
    for store in (owner, home):
        store.declare(spec)
    owner.own([0, 1])
    owner.open(SHARDS[0], 0, 1)
    keys = np.arange(40)
    keys = keys[np.argsort(twin.partition_of(keys, spec.id, 2), kind="stable")]
    owner.put_absent(spec.id, keys, rng.normal(size=(40, 48)).astype(np.float32))
    home.mirror_make(ID, [0, 1], 1)
    owner.protect([0, 1], True)
    for b in (0, 1):
        for _ in Cluster.sweep_of(owner, b):
            pass
    for at in range(30):
        grads = (rng.normal(size=(40, 48)) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
        decay = msgspec.structs.replace(spec.optimizer, weight_decay=0.01 if kind != OptimizerKind.FTRL else 0.0)
        options = () if at % 3 else decay.options()  # a scheduler's change goes along
        owner.push(SHARDS[0], at, at + 1, 1, b"", [(spec.id, keys, grads, -1.0 if at % 2 else 0.002, options)])
    _, entries, data = owner.take_outbox(1 << 30)
    changes = [(at, n) for _, _, k, at, n in entries if k == BlobKind.CHANGE]
    assert len(changes) == 60
    assert sum(n for _, n in changes) < 30 * 40 * (48 * 4 + 8) + 60 * 280
    for _, _, _, at, n in entries:
        shifted = np.zeros(n + 1, np.uint8)  # a message may lie anywhere in memory
        shifted[1:] = data[at : at + n]
        assert home.mirror_apply(ID, shifted[1:]) == APPLIED
    some = [data[at : at + n].tobytes() for at, n in changes[:8]]
    assert [build(parse(blob)) for blob in some] == some
    assert {len(parse(blob).parts[0].options) for blob in some} == {0, len(TRAVELLING)}
    bad = bytearray(data[changes[0][0] : sum(changes[0])].tobytes())
    bad[32 + 48 + 16] ^= 2  # says that the gradients are a difference
    with pytest.raises(ValueError):
        home.mirror_apply(ID, bad)
    home.recover_begin(ID, [1])
    owner.emit_marks(0)
    _, ((_, _, _, at, n),), data = owner.take_outbox(1 << 30)
    home.recover_fold(ID, data[at : at + n])
    assert home.recover_state(ID) == {1: (True, True, 0, 0)}
    home.recover_end(ID)
    assert home.digest(1) == owner.digest(1)
    home.promote(one_member(home, owner), 0)
    assert home.digest(0) == owner.digest(0)


def one_member(home: Store, owner: Store) -> int:
    """A mirror of partition 0 alone, built now."""
    home.mirror_make(ID + 1, [0], 0)
    for _ in Cluster.sweep_of(owner, 0):
        pass
    _, entries, data = owner.take_outbox(1 << 30)
    for _, _, _, at, n in entries:
        assert home.mirror_apply(ID + 1, data[at : at + n]) == APPLIED
    return ID + 1
