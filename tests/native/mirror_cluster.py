"""Parameter servers with mirrors, and the streams between them, for tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from everstep.model.shard import shard_key
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store
from everstep.testing import mirror_twin, twin
from everstep.testing.mirror_twin import APPLIED, REPEAT, Pages, TwinMirror

ID = 7  # of every mirror here: each is alone at its ps
SHARDS = [shard_key(0, 0, n) for n in range(3)]
TABLES = [
    TableSpec("wide", 9, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), InitSpec(InitKind.NORMAL, 0.0, 1.0)),
    TableSpec("narrow", 1, OptimizerSpec(OptimizerKind.ADAM, 0.1), InitSpec(InitKind.UNIFORM, -1.0, 1.0)),
    TableSpec("plain", 33, OptimizerSpec(OptimizerKind.SGD, 0.1), InitSpec(InitKind.CONSTANT, 0.0)),
    TableSpec("dense", 20, OptimizerSpec(OptimizerKind.ADAMW, 0.1, weight_decay=0.1), InitSpec(), dense=True),
    TableSpec("late", 5, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), InitSpec(), admit_after=1, expire_batches=6),
]
DENSE = {spec.id: spec for spec in TABLES if spec.dense}
PIECE = 200  # slots of one piece of contents


def pages_of(store: Store, partition: int) -> Pages:
    """The partition's pages as they are."""
    store.snapshot_begin(partition)
    out: Pages = {}
    while True:
        names, data = store.snapshot_next(partition, 1 << 20)
        if not names:
            break
        at = 0
        for table, number in names:
            size = store.page_bytes(table)
            out[table, number] = data[at : at + size].copy()
            at += size
    store.snapshot_end(partition)
    return out


def mirror_pages(store: Store, table_specs: list[TableSpec]) -> Pages:
    """Of the tables whose pages are summed."""
    assert {spec.id for spec in table_specs} <= set(store.tables())
    return {
        (table, number): np.frombuffer(page, np.uint8)
        for table in store.tables()
        if table not in DENSE
        for number, page in store.mirror_pages(ID, table)
    }


def dense_pages(store: Store, partition: int) -> Pages:
    """Of the dense tables: the mirror's copy of one member's."""
    return {
        (table, number): np.frombuffer(page, np.uint8)
        for table in DENSE
        if table in store.tables()
        for number, page in store.mirror_pages(ID, table, partition)
    }


def split(pages: Pages) -> tuple[Pages, Pages]:
    """Pages of tables that mirrors sum, and of dense ones."""
    return (
        {at: page for at, page in pages.items() if at[0] not in DENSE},
        {at: page for at, page in pages.items() if at[0] in DENSE},
    )


class Cluster:
    """``k`` ps that own one partition each, ``m`` that hold one row of parity each, and the streams between them."""

    def __init__(self, k: int, m: int, seed: int, specs: list[TableSpec] | None = None, lag: bool = False) -> None:
        self.k, self.m, self.specs = k, m, specs if specs is not None else TABLES
        self.rng = np.random.default_rng(seed)
        self.ps = [Store(k, seed) for _ in range(k)]
        self.homes = [Store(k, seed) for _ in range(m)]
        for store in (*self.ps, *self.homes):
            for spec in self.specs:
                store.declare(spec)
        for b, store in enumerate(self.ps):
            if lag:
                store.set_lag(1 << 30, 1 << 30, 1e6)  # differences go out when they are told to
            store.own([b])
        # (owner, home) -> blobs still to be delivered
        self.links: dict[tuple[int, int], deque[bytes]] = {(b, r): deque() for b in range(k) for r in range(m)}
        self.delivered: dict[tuple[int, int], list[bytes]] = {link: [] for link in self.links}
        self.twins: list[TwinMirror] = []
        self.positions = dict.fromkeys(SHARDS, 0)
        self.syncs: dict[int, Iterator[None]] = {}
        for row in range(m):
            self.make_mirror(row)

    def make_mirror(self, row: int) -> None:
        self.homes[row].mirror_make(ID, list(range(self.k)), row)
        layouts = {table: self.homes[row].layout(table) for table in self.homes[row].tables()}
        self.twins[row : row + 1] = [TwinMirror(layouts, range(self.k), row, list(DENSE.values()))]

    # ---- what happens at the owners

    def open(self, shard: int, lease: int) -> None:
        for store in self.ps:
            store.open(shard, 0, lease)

    def push(self, shard: int, lease: int, n: int, span: int = 200) -> None:
        """The same range of samples at every ps, each with rows of its own."""
        lo = self.positions[shard]
        for b, store in enumerate(self.ps):
            parts = []
            for spec in self.specs:
                keys = np.unique(self.rng.integers(-span, span, n))
                keys = keys[twin.partition_of(keys, spec.id, self.k) == b]
                parts.append((spec.id, keys, self.rng.normal(size=(len(keys), spec.dim)).astype(np.float32), -1.0))
            store.push(shard, lo, lo + 1, lease, b"", parts)
        self.positions[shard] += 1

    def put(self, n: int) -> None:
        """First rows of tables, at every ps."""
        for b, store in enumerate(self.ps):
            for spec in self.specs:
                keys = np.unique(self.rng.integers(-400, 400, n))
                keys = keys[twin.partition_of(keys, spec.id, self.k) == b]
                store.put_absent(spec.id, keys, self.rng.normal(size=(len(keys), spec.dim)).astype(np.float32))
            store.initialise(self.specs[0].id)

    def expire(self) -> None:
        for b, store in enumerate(self.ps):
            store.expire(b, 0)

    @staticmethod
    def sweep_of(store: Store, partition: int) -> Iterator[None]:
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            for table in store.tables():
                lo = 0
                while lo >= 0:
                    lo = store.emit(partition, kind, table, lo, lo + PIECE)
                    yield
        store.emit_marks(partition)
        yield

    def sync(self, partition: int) -> Iterator[None]:
        """Contents of a whole partition, piece by piece."""
        return self.sweep_of(self.ps[partition], partition)

    def flush(self) -> None:
        for b, store in enumerate(self.ps):
            store.flush(b)

    def drain(self) -> None:
        """From the outboxes onto the links."""
        for b, store in enumerate(self.ps):
            _, entries, data = store.take_outbox(1 << 30)
            for partition, _, _, at, length in entries:
                assert partition == b
                for r in range(self.m):
                    self.links[b, r].append(data[at : at + length].tobytes())

    # ---- what happens at the mirrors

    def apply(self, row: int, blob: bytes) -> int:
        got = self.homes[row].mirror_apply(ID, blob)
        assert got == self.twins[row].apply(blob)
        return got

    def deliver(self, b: int, r: int) -> None:
        blob = self.links[b, r].popleft()
        self.delivered[b, r].append(blob)
        assert self.apply(r, blob) in (APPLIED, REPEAT)

    def deliver_all(self) -> None:
        self.drain()
        for link, blobs in self.links.items():
            while blobs:
                self.deliver(*link)

    def build(self) -> None:
        """Everything swept and delivered."""
        for b in range(self.k):
            self.ps[b].protect([b], True)
            for _ in self.syncs.pop(b, None) or self.sync(b):
                pass
        self.deliver_all()
        for r, home in enumerate(self.homes):
            assert home.mirror_state(ID) == [(b, self.ps[b].seq(b), True) for b in range(self.k)]
            self.check(r)

    def check(self, row: int) -> None:
        """The mirror is what it must be: by the twin that followed the stream, and by the members' own pages."""
        held = mirror_twin.trimmed(mirror_pages(self.homes[row], self.specs))
        assert held == mirror_twin.trimmed(self.twins[row].pages)
        members = [split(pages_of(self.ps[b], b)) for b in range(self.k)]
        assert held == mirror_twin.trimmed(mirror_twin.code([summed for summed, _ in members], row))
        for b in range(self.k):
            dense = mirror_twin.trimmed(dense_pages(self.homes[row], b))
            assert dense == mirror_twin.trimmed(self.twins[row].members[b].dense)
            assert dense == mirror_twin.trimmed(members[b][1])
            assert self.homes[row].mirror_marks(ID, b)[32:] == self.ps[b].marks(b)[32:]
