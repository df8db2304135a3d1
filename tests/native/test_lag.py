"""Mirrors that may lag get one difference of many changes, and are bit for bit what they would be with each of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_cluster import ID, SHARDS, TABLES, Cluster

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store
from everstep.native.blob import parse
from everstep.testing import twin

FLEETING = TableSpec(
    "fleeting", 3, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), InitSpec(InitKind.UNIFORM, -1.0, 1.0), expire_batches=2
)


def lagging(specs: list[TableSpec] | None = None, k: int = 3, m: int = 2) -> Cluster:
    cluster = Cluster(k, m, 5, specs, lag=True)
    for shard in SHARDS:
        cluster.open(shard, 1)
    cluster.build()
    return cluster


def push(cluster: Cluster, spec: TableSpec, keys: list[int]) -> None:
    """One batch with these rows of one table."""
    lo = cluster.positions[SHARDS[0]]
    for b, store in enumerate(cluster.ps):
        mine = np.array(sorted(keys), np.int64)
        mine = mine[twin.partition_of(mine, spec.id, cluster.k) == b]
        grads = cluster.rng.normal(size=(len(mine), spec.dim)).astype(np.float32)
        store.push(SHARDS[0], lo, lo + 1, 1, b"", [(spec.id, mine, grads, -1.0)])
    cluster.positions[SHARDS[0]] += 1


def test_a_row_that_many_pushes_change_is_sent_once() -> None:
    cluster = lagging()
    ticket = cluster.ps[0].outbox_ticket()
    seq = cluster.ps[0].seq(0)
    for _ in range(20):
        push(cluster, TABLES[0], [1, 2, 3, 4, 5, 6, 7, 8])
    lag = cluster.ps[0].lag()
    rows = cluster.ps[0].partition_rows(0)[TABLES[0].id]
    assert cluster.ps[0].outbox_ticket() == ticket
    assert cluster.ps[0].seq(0) == seq + 1
    assert (lag.partitions, lag.rows, lag.opened, lag.closed) == (1, rows, lag.opened, lag.opened - 1)
    assert lag.bytes == rows * cluster.ps[0].layout(TABLES[0].id)[2] and lag.oldest_s >= 0
    assert [store.flush(b) for b, store in enumerate(cluster.ps)] == [True, True, True]
    assert not cluster.ps[0].flush(0)
    _, entries, data = cluster.ps[0].take_outbox(1 << 30)
    ((partition, at_seq, kind, at, size),) = entries
    assert (partition, at_seq, kind) == (0, seq + 1, BlobKind.CHANGE)
    blob = parse(data[at : at + size].tobytes(), lambda t: cluster.ps[0].layout(t)[2])
    assert [(part.table, len(part.slots)) for part in blob.parts] == [(TABLES[0].id, rows)]
    assert blob.marks.shards == [(SHARDS[0], 20, 1)]
    for r in range(cluster.m):
        assert cluster.apply(r, data[at : at + size].tobytes()) == 0
    assert cluster.ps[0].lag().closed == cluster.ps[0].lag().opened
    cluster.deliver_all()
    for r in range(cluster.m):
        cluster.check(r)


@pytest.mark.parametrize("rows", [40, 1500])
def test_rows_are_in_the_order_in_which_they_lie_in_memory(rows: int) -> None:
    """They were changed in another order; mirrors are as they would be with each change. Few and many are sorted
    differently."""
    cluster = lagging()
    spec = TABLES[0]
    push(cluster, spec, list(range(rows)))
    cluster.flush()
    cluster.deliver_all()
    for _ in range(3):
        push(cluster, spec, sorted(cluster.rng.permutation(rows)[: rows // 2].tolist()))
    cluster.ps[0].flush(0)
    _, entries, data = cluster.ps[0].take_outbox(1 << 30)
    ((_, _, _, at, size),) = entries
    (part,) = parse(data[at : at + size].tobytes(), lambda t: cluster.ps[0].layout(t)[2]).parts
    slots = np.array(part.slots)
    assert len(slots) > rows // 8 and (np.diff(slots) > 0).all()
    for r in range(cluster.m):
        assert cluster.apply(r, data[at : at + size].tobytes()) == 0
    cluster.flush()
    cluster.deliver_all()
    for r in range(cluster.m):
        cluster.check(r)


def test_a_slot_that_goes_to_another_row_within_one_difference() -> None:
    cluster = lagging([FLEETING])
    for key in range(40):
        push(cluster, FLEETING, [key])
    cluster.flush()
    cluster.deliver_all()
    slots = np.empty(200, np.int64)
    keys = np.arange(200, dtype=np.int64)
    reused = False
    for step in range(12):  # rows expire, and later ones take their slots, before the next difference is made
        before = [set(store.scan(FLEETING.id, b, 0, 1000)[0].tolist()) for b, store in enumerate(cluster.ps)]
        cluster.expire()
        for key in range(100 + 8 * step, 108 + 8 * step):
            push(cluster, FLEETING, [key])
        for b, store in enumerate(cluster.ps):
            mine = keys[twin.partition_of(keys, FLEETING.id, cluster.k) == b]
            store.locate(FLEETING.id, mine, slots[: len(mine)])
            now = {int(k) for k, s in zip(mine, slots, strict=False) if s >= 0}
            reused |= bool(before[b] - now) and bool(now - before[b])
        cluster.flush()
        cluster.deliver_all()
        for r in range(cluster.m):
            cluster.check(r)
    assert reused


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_that_come_and_go_in_one_difference(data: st.DataObject) -> None:
    cluster = lagging([FLEETING, TABLES[4]], k=2, m=1)
    for _ in range(data.draw(st.integers(1, 12), "differences")):
        for _ in range(data.draw(st.integers(0, 8), "changes")):
            what = data.draw(st.sampled_from(["push", "push", "expire", "put"]))
            if what == "push":
                cluster.push(SHARDS[0], 1, data.draw(st.integers(0, 12)), span=12)
            elif what == "put":
                cluster.put(data.draw(st.integers(0, 4)))
            else:
                cluster.expire()
        cluster.flush()
        cluster.deliver_all()
        cluster.check(0)


def test_contents_come_behind_what_was_open() -> None:
    cluster = Cluster(1, 1, 3, lag=True)
    cluster.open(SHARDS[0], 1)
    store = cluster.ps[0]
    store.protect([0], True)
    cluster.push(SHARDS[0], 1, 30)
    seq = store.seq(0)
    for _ in cluster.sync(0):
        cluster.push(SHARDS[0], 1, 30)
    _, entries, _ = store.take_outbox(1 << 30)
    assert entries[0][1:3] == (seq, BlobKind.CHANGE)
    assert entries[1][1:3] == (seq, BlobKind.HEADS)
    assert [e[1] for e in entries] == sorted(e[1] for e in entries)


@pytest.mark.parametrize("way", ["hand_over", "protect", "snapshot", "marks", "slots"])
def test_what_is_open_is_sent_before_the_stream_ends_or_is_read(way: str) -> None:
    cluster = lagging(k=1, m=1)
    store = cluster.ps[0]
    cluster.push(SHARDS[0], 1, 30)
    ticket, seq = store.outbox_ticket(), store.seq(0)
    if way == "hand_over":
        assert store.hand_over(0) == seq
    elif way == "protect":
        store.protect([0], False)
    elif way == "snapshot":
        store.snapshot_begin(0)
        store.snapshot_end(0)
    elif way == "marks":
        store.emit_marks(0)
    else:
        store.emit_slots(0, TABLES[0].id, np.zeros(1, np.uint32))
    assert store.outbox_ticket() == ticket + 1 + (way in ("marks", "slots"))
    assert store.lag().partitions == 0 and not store.flush(0)
    _, entries, data = store.take_outbox(1 << 30)
    assert entries[0][1:3] == (seq, BlobKind.CHANGE)
    assert cluster.apply(0, data[entries[0][3] :][: entries[0][4]].tobytes()) == 0
    assert cluster.homes[0].mirror_state(ID) == [(0, seq, True)]
    cluster.check(0)


def test_a_push_flushes_what_is_too_much_or_too_old() -> None:
    for limits, pushes in (((1, 1000, 1e6), 1), ((1 << 30, 3, 1e6), 3), ((1 << 30, 1000, 1e-9), 1)):
        cluster = lagging(k=1, m=1)
        store = cluster.ps[0]
        store.set_lag(*limits)
        ticket = store.outbox_ticket()
        for n in range(pushes + 1):
            assert store.outbox_ticket() == ticket, (limits, n)
            cluster.push(SHARDS[0], 1, 10)
        assert store.outbox_ticket() == ticket + 1
        assert store.lag().partitions == 1  # the push itself is open
        cluster.flush()
        cluster.deliver_all()
        cluster.check(0)


def test_the_oldest_is_flushed_first() -> None:
    store = Store(4, 1)
    store.declare(TABLES[0])
    store.own([0, 1, 2, 3])
    store.protect([0, 1, 2, 3], True)
    store.set_lag(1 << 30, 1 << 30, 1e6)
    assert store.lag().opened == 0
    store.open(SHARDS[0], 0, 1)  # a change of the marks of all
    assert store.lag()[:3] == (4, 0, 4)
    assert store.flush_older(1e6, 4) == 0
    store.flush(2)
    assert store.flush_older(0.0, 1) == 1
    assert store.lag()[:3] == (4, 1, 2)
    assert store.flush_older(0.0, 9) == 2
    assert store.lag()[:3] == (4, 4, 0)
    _, entries, _ = store.take_outbox(1 << 30)
    assert [e[0] for e in entries] == [2, 0, 1, 3]


@pytest.mark.parametrize("limits", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, float("nan")), (1, 1, 1e9)])
def test_limits_that_cannot_be(limits: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Store(1, 1).set_lag(*limits)
