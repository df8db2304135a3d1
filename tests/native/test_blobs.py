"""Differences, contents and snapshots of partitions: what goes out is what is in the pages, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, unique_route
from everstep.native.blob import LAST, Blob, BlobKind, build, check_seal, parse, seal
from everstep.testing import twin
from everstep.testing.twin import TwinStore

B = 4
SPECS = [
    TableSpec("a", 5, OptimizerSpec(OptimizerKind.ADAM, 0.01), InitSpec(InitKind.NORMAL, 0.0, 1.0)),
    TableSpec("b", 64, OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.1), InitSpec(InitKind.UNIFORM, -1.0, 1.0)),
    TableSpec("c", 2000, OptimizerSpec(OptimizerKind.SGD, 0.1)),
]
BY_ID = {spec.id: spec for spec in SPECS}


def filled(kind: Callable[[int, int], Any], seed: int = 7) -> Any:
    store = kind(B, seed)
    store.own(range(B))
    for spec in SPECS:
        store.declare(spec)
    return store


def width(table: int) -> int:
    spec = BY_ID[table]
    return 4 * (spec.dim + spec.optimizer.state_floats(spec.dim))


def take(store: Store, still: bool = True) -> list[bytes]:
    """Everything in the outbox; the metadata beside each entry is what its header says. ``still``: nobody pushes."""
    out: list[bytes] = []
    while store.wait_outbox(0):
        first, entries, data = store.take_outbox(1 << 16)
        assert first + len(entries) <= store.outbox_ticket()
        for partition, seq, kind, offset, length in entries:
            blob = data[offset : offset + length].tobytes()
            head = parse(blob, width)
            assert (head.partition, head.seq, head.kind) == (partition, seq, BlobKind.BODIES if kind == 5 else kind)
            out.append(blob)
    assert not still or store.outbox_bytes() == 0
    return out


def keys_of(spec: TableSpec, ids: np.ndarray) -> np.ndarray:
    return unique_route(ids, B, spec.id, np.zeros(B, np.int32))[0]


class Steps:
    """Random changes, the same to every store."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.at = 0
        self.lease = 1
        self.begun = False

    def step(self, stores: list[Any]) -> None:
        rng = self.rng
        spec = SPECS[rng.integers(len(SPECS))]
        keys = keys_of(spec, rng.integers(-200, 200, rng.integers(1, 60)))
        rows = rng.normal(size=(len(keys), spec.dim)).astype(np.float32)
        what = rng.integers(8) if self.begun else 0
        if what == 0:
            self.begun = True
            self.lease += 1
        for store in stores:
            if what == 0:
                store.open(1, self.at, self.lease)
            elif what == 1:
                store.put_absent(spec.id, keys, rows)
            elif what == 2:
                store.open(100 + self.at, 0, self.lease)
            elif what == 3:
                store.release([97 + self.at, 100 + self.at])
            elif what == 4:
                store.initialise(spec.id)
            else:
                parts = [(spec.id, keys, rows, -1.0)]
                assert store.push(1, self.at, self.at + 3, self.lease, b"", parts).applied == B
        if what > 4:
            self.at += 3


class Pages:
    """Pages and marks as they follow from blobs alone."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pages: dict[tuple[int, int, int], np.ndarray] = {}
        self.shards: dict[int, dict[int, tuple[int, int]]] = {b: {} for b in range(B)}
        self.initialised: dict[int, list[int]] = {b: [] for b in range(B)}
        self.seq = dict.fromkeys(range(B), 0)
        self.clock: dict[int, tuple[int, int]] = {}

    def apply(self, data: bytes) -> None:
        blob = parse(data, width)
        b = blob.partition
        if blob.kind is BlobKind.CHANGE:
            assert blob.seq == self.seq[b] + 1
        self.seq[b] = blob.seq
        self.clock[b] = (blob.marks.fingerprint, blob.marks.clock)
        for shard, watermark, fence in blob.marks.shards:
            self.shards[b][shard] = (watermark, fence)
            if watermark < 0:
                del self.shards[b][shard]
        self.initialised[b] = sorted({*self.initialised[b], *blob.marks.initialised})
        for part in blob.parts:
            bits, head, record = self.store.layout(part.table)
            keys_at = head - 8 * (1 << bits)
            toggled = iter(part.keys if part.keys is not None else [])
            for i, slot in enumerate(part.slots.tolist()):
                page = self.pages.setdefault(
                    (b, part.table, slot >> bits), np.zeros(self.store.page_bytes(part.table), np.uint8)
                )
                s = slot & ((1 << bits) - 1)
                if blob.kind is BlobKind.HEADS or (part.toggled is not None and part.toggled[i]):
                    page[s >> 3] ^= 1 << (s & 7)
                    page[keys_at + 8 * s :][:8] ^= np.frombuffer(next(toggled).tobytes(), np.uint8)
                if part.records is not None:
                    page[head + s * record :][:record] ^= part.records[i]

    def agree(self, store: Store) -> None:
        """They are the store's, which had all of it."""
        for b in store.owned():
            assert self.seq[b] == store.seq(b)
            marks = parse(store.marks(b)).marks
            assert self.clock[b] == (marks.fingerprint, marks.clock)
            assert marks.shards == [(s, *m) for s, m in sorted(self.shards[b].items())]
            assert marks.initialised == self.initialised[b]
            snapshot = snapshot_of(store, b)
            mine = {(t, p): x.tobytes() for (c, t, p), x in self.pages.items() if c == b and x.any()}
            assert mine == snapshot


def snapshot_of(store: Store, partition: int) -> dict[tuple[int, int], bytes]:
    store.snapshot_begin(partition, -1)
    out = read_snapshot(store, partition)
    store.snapshot_end(partition)
    return out


def read_snapshot(
    store: Store, partition: int, max_bytes: int = 100_000, between: Callable[[], Any] = lambda: None
) -> dict[tuple[int, int], bytes]:
    out: dict[tuple[int, int], bytes] = {}
    while True:
        between()
        names, data = store.snapshot_next(partition, max_bytes)
        if not names:
            return out
        at = 0
        for table, page in names:
            n = store.page_bytes(table)
            out[table, page] = data[at : at + n].tobytes()
            at += n
        assert at == len(data)


def load(store: Store, partition: int, snapshot: dict[tuple[int, int], bytes], marks: bytes) -> None:
    store.load_begin(partition)
    for (table, page), data in snapshot.items():
        store.load_pages(partition, table, [page], np.frombuffer(data, np.uint8))
    store.load_end(partition, marks)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 30))
def test_differences_are_the_pages(seed: int, n: int) -> None:
    store, oracle, steps = filled(Store), filled(TwinStore), Steps(seed)
    for s in (store, oracle):
        s.protect(range(B), True)
    pages = Pages(store)
    for _ in range(n):
        steps.step([store, oracle])
        blobs = take(store)
        assert blobs == oracle.take()
        for blob in blobs:
            pages.apply(blob)
            assert build(parse(blob, width)) == blob
    if n:
        pages.agree(store)
    for b in range(B):
        snapshot = snapshot_of(store, b)
        twins = {(t, p): x for t in BY_ID for p, x in oracle.rows(b, t).pages().items()}
        assert snapshot == twins


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 300))
def test_contents_are_the_pages(seed: int, stride: int) -> None:
    store, steps = filled(Store), Steps(seed)
    for _ in range(12):
        steps.step([store])
    pages = Pages(store)
    for b in range(B):
        for spec in SPECS:
            for kind in (BlobKind.HEADS, BlobKind.BODIES):
                lo = 0
                while lo >= 0:
                    lo = store.emit(b, kind, spec.id, lo, lo + stride)
        store.emit_marks(b)
    for blob in take(store):
        pages.apply(blob)
    pages.agree(store)


def test_contents_end_with_a_part_that_says_so() -> None:
    store, steps = filled(Store), Steps(3)
    for _ in range(12):
        steps.step([store])
    assert store.emit(1, BlobKind.BODIES, SPECS[0].id, 0, 1) == 1
    assert store.emit(1, BlobKind.BODIES, SPECS[0].id, 1, 100_000) == -1
    first, last = (parse(blob, width).parts[0] for blob in take(store))
    assert first.flags == 0 and last.flags == LAST
    store.emit_slots(1, SPECS[0].id, np.array([0, 5_000], np.uint32))
    (listed,) = (parse(blob, width).parts[0] for blob in take(store))
    assert listed.records is not None and listed.records[0].any() and not listed.records[1].any()


def test_an_snapshot_becomes_the_partition() -> None:
    store, steps = filled(Store), Steps(5)
    for _ in range(25):
        steps.step([store])
    other = Store(B, 7)
    for spec in reversed(SPECS):
        other.declare(spec)
    for b in range(B):
        load(other, b, snapshot_of(store, b), store.marks(b))
        assert other.digest(b) == store.digest(b)
        assert other.content_digest(b) == store.content_digest(b)
        assert other.partition_rows(b) == store.partition_rows(b)
    for _ in range(25):
        steps.step([store, other])
    assert [other.digest(b) for b in range(B)] == [store.digest(b) for b in range(B)]


def test_an_increment_over_its_base_is_the_partition() -> None:
    store, steps = filled(Store), Steps(6)
    for _ in range(20):
        steps.step([store])
    generation, _ = store.snapshot_begin(2, -1)
    snapshot = read_snapshot(store, 2)
    store.snapshot_end(2)
    for _ in range(3):
        before = store.seq(2)
        for _ in range(2):
            steps.step([store])
        changed_marks = store.seq(2) != before
        generation, marks = store.snapshot_begin(2, generation)
        increment = read_snapshot(store, 2)
        store.snapshot_end(2)
        assert changed_marks or not increment
        snapshot.update(increment)
        other = filled(Store)
        other.drop(2)
        load(other, 2, snapshot, marks)
        assert other.digest(2) == store.digest(2)
    generation, _ = store.snapshot_begin(2, generation)
    assert read_snapshot(store, 2) == {}  # nothing has changed since
    with pytest.raises(ValueError, match="is being read"):
        store.snapshot_begin(2, -1)
    store.snapshot_end(2)
    with pytest.raises(ValueError, match="had no snapshot"):
        store.snapshot_begin(2, generation + 1)


def test_a_snapshot_is_the_moment_it_began_while_threads_push() -> None:
    store = filled(Store)
    store.protect([1], True)
    spec = SPECS[1]
    store.open(9, 0, 1)
    stop, pushed = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def push() -> None:
        rng = np.random.default_rng(1)
        at = 0
        try:
            while not stop.is_set():
                keys = keys_of(spec, rng.integers(0, 3000, 500))
                rows = rng.normal(size=(len(keys), spec.dim)).astype(np.float32)
                store.push(9, at, at + 1, 1, b"", [(spec.id, keys, rows, -1.0)])
                at += 1
                pushed.set()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    pages, snapshots = Pages(store), []
    blobs: list[bytes] = []
    for _ in range(8):
        _, marks = store.snapshot_begin(1, -1)
        snapshot = read_snapshot(store, 1, 100_000, lambda: pushed.clear() or pushed.wait(10))
        store.snapshot_end(1)
        snapshots.append((parse(marks).seq, snapshot, marks))
        blobs += take(store, still=False)
    stop.set()
    thread.join(60)
    assert not failed
    blobs += take(store)
    at_seq = {seq: (snapshot, marks) for seq, snapshot, marks in snapshots}
    checked = 0
    for blob in blobs:
        pages.apply(blob)
        if pages.seq[1] in at_seq:
            snapshot, marks = at_seq[pages.seq[1]]
            assert snapshot == {(t, p): x.tobytes() for (b, t, p), x in pages.pages.items() if b == 1 and x.any()}
            other = filled(Store)
            other.drop(1)
            load(other, 1, snapshot, marks)
            checked += 1
    assert checked == len([seq for seq in at_seq if seq])
    assert checked > 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_snapshot_is_refused(data: st.DataObject) -> None:
    """Heads and marks: their own structure and checksum say it. Bodies have the checksums of the file they lie in."""
    store, steps = filled(Store), Steps(5)
    for _ in range(10):
        steps.step([store])
    snapshot, marks = snapshot_of(store, 1), bytearray(store.marks(1))
    names = sorted(snapshot)
    which = data.draw(st.integers(0, len(names)))
    if which == len(names):
        at = data.draw(st.integers(0, len(marks) * 8 - 1))
        marks[at >> 3] ^= 1 << (at & 7)
    else:
        page = bytearray(snapshot[names[which]])
        at = data.draw(st.integers(0, store.layout(names[which][0])[1] * 8 - 1))
        page[at >> 3] ^= 1 << (at & 7)
        snapshot[names[which]] = bytes(page)
    other = filled(Store)
    other.drop(1)
    try:
        load(other, 1, snapshot, bytes(marks))
    except ValueError:
        assert other.owned() == [0, 2, 3]
        with pytest.raises(KeyError):
            other.seq(1)
        load(other, 1, snapshot_of(store, 1), store.marks(1))
        assert other.digest(1) == store.digest(1)
    else:
        # The key became another one of the same partition: only a checksum over the page can tell.
        assert which < len(names) and other.digest(1) != store.digest(1)


def test_what_is_handed_over_is_not_served_but_can_be_read() -> None:
    store, steps = filled(Store), Steps(4)
    for _ in range(10):
        steps.step([store])
    digest, seq = store.digest(2), store.seq(2)
    assert store.hand_over(2) == seq
    assert store.hand_over(2) == seq
    assert store.owned() == [0, 1, 3]
    spec = SPECS[0]
    keys = keys_of(spec, np.arange(100))
    of_2 = keys[twin.partition_of(keys, spec.id, B) == 2]
    with pytest.raises(KeyError):
        store.pull(spec.id, of_2, np.empty((len(of_2), spec.dim), np.float32))
    with pytest.raises(KeyError):
        store.push(1, steps.at, steps.at + 1, steps.lease, b"", [(spec.id, of_2, np.zeros((len(of_2), 5), "f4"), -1.0)])
    with pytest.raises(ValueError, match="drop it first"):
        store.own([2])
    assert store.digest(2) == digest
    assert len(store.scan(spec.id, 2, 0, 1000)[0]) == store.partition_rows(2)[spec.id]
    before = store.stats().bytes
    store.drop(2)
    with pytest.raises(KeyError):
        store.digest(2)
    store.own([2])
    assert store.seq(2) == 0 and not any(store.partition_rows(2).values())
    assert store.stats().bytes == before  # the pool keeps it for others


def test_nonsense_is_no_blob() -> None:
    store = filled(Store)
    good = store.marks(0)
    for bad in (b"", good[:-1], good + b"\0", b"\0" + good[1:]):
        with pytest.raises(ValueError, match="blob"):
            parse(bad)
        other = filled(Store)
        other.drop(0)
        other.load_begin(0)
        with pytest.raises(ValueError, match="blob"):
            other.load_end(0, bad)
        assert other.owned() == [1, 2, 3]
    other.drop(1)
    with pytest.raises(ValueError, match="not the marks of partition 1"):
        load(other, 1, {}, good)
    assert seal(good) == good
    check_seal(good)
    assert parse(build(Blob(BlobKind.MARKS, 3, 9, parse(good).marks))).seq == 9
