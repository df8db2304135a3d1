"""Has the store and the kernels once more, in NumPy and Python: slow, plain, and the oracle of the C++ ones.

Same hash, same initial values, same operations in the same order in float32, so results are equal bit for bit; the
ledger is ``everstep.native.ledger.Ledger``. Not for use in training: a Python loop over rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from everstep.model.table import InitKind, InitSpec, OptimizerKind, Rate, TableSpec, difference
from everstep.native import Full, PushPart, StoreStats, check_options, check_spec
from everstep.native.blob import MOST_SLOTS, Blob, BlobKind, BlobMarks, BlobPart, build, check_seal, parse_marks
from everstep.native.ledger import PushLedger, PushResult, SpanTuple, bitmap_partitions, by_shard
from everstep.native.ledger import mix64 as mix64_int
from everstep.native.row_update import first_state, update

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: U64) -> U64:
    """Apply the finalizer of splitmix64, element by element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key_hash(keys: I64, table: int) -> U64:
    """Hash of int64 keys ``[n]`` of one table."""
    return mix64(np.asarray(keys, np.int64).view(np.uint64) ^ np.uint64(mix64_int(table + 1)))


def partition_of(keys: I64, table: int, n_partitions: int) -> NDArray[np.int32]:
    """Return the partition of each key: the high half of its hash, scaled to ``n_partitions``."""
    return (((key_hash(keys, table) >> np.uint64(32)) * np.uint64(n_partitions)) >> np.uint64(32)).astype(np.int32)


def first_values(seed: int, table: int, key: int, dim: int, init: InitSpec) -> F32:
    """Return the row of ``key`` before any update, float32 ``[dim]``: a pure function of its arguments."""
    if init.kind is InitKind.CONSTANT:
        return np.full(dim, init.a, np.float32)
    row = mix64_int(mix64_int((seed + _GOLDEN * (table + 1)) & _MASK) ^ (key & _MASK))
    columns = np.arange(dim, dtype=np.uint64)

    def words(counter: U64) -> U64:
        return mix64(np.uint64(row) + counter * np.uint64(_GOLDEN))

    if init.kind is InitKind.UNIFORM:
        u = (words(columns + np.uint64(1)) >> np.uint64(40)).astype(np.float64) * 2.0**-24
        x = (init.a + (init.b - init.a) * u).astype(np.float32)
        top = np.float32(init.b)
        return np.where(x == top, np.nextafter(top, np.float32(init.a)), x)
    total = np.zeros(dim, np.int64)
    for half in (1, 2):
        w = words(np.uint64(2) * columns + np.uint64(half))
        for shift in (0, 16, 32, 48):
            total += ((w >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    scale = 1.0 / math.sqrt(8.0 * (65536.0 * 65536.0 - 1.0) / 12.0)
    return (init.a + init.b * ((total - 262140).astype(np.float64) * scale)).astype(np.float32)


@dataclass
class _Row:
    """Is one used slot."""

    key: int
    values: F32
    state: F32
    meta: NDArray[np.uint32]

    def record(self) -> bytes:
        return self.values.tobytes() + self.state.tobytes() + self.meta.tobytes()


@dataclass(frozen=True)
class PagePlan:
    """Says how a page of a table lies in memory, as native/table.h does."""

    dim: int
    state: int
    meta: int

    @property
    def record_bytes(self) -> int:
        return 4 * (self.dim + self.state + self.meta)

    @property
    def page_bits(self) -> int:
        bits = 3
        while bits < 10 and (self.record_bytes + 8) << (bits + 1) <= 32 << 10:
            bits += 1
        return bits

    @property
    def keys_at(self) -> int:
        return _align64((1 << self.page_bits) // 8)

    @property
    def head_bytes(self) -> int:
        return self.keys_at + 8 * (1 << self.page_bits)

    @property
    def page_bytes(self) -> int:
        return self.head_bytes + _align64((1 << self.page_bits) * self.record_bytes)


def _align64(n: int) -> int:
    return (n + 63) & ~63


class TwinRows:
    """Holds the rows of one table in one partition. A new row gets the lowest unused slot of the pages that have rows,
    else of the first page without. ``spec``: whose life cycle they have; ``candidates``: they only count pushes."""

    def __init__(self, table: int, layout: PagePlan, spec: TableSpec, candidates: bool = False) -> None:
        self.table = table
        self.layout = layout
        self.spec = spec
        self.candidates = candidates
        self.slots: list[_Row | None] = []
        self.index: dict[int, int] = {}
        self.index_size = 0
        self.expire_slot = 0
        self.step = -1
        self.running: dict[int, tuple[F32, F32, F32]] = {}  # by key: values and state before the step, its gradient
        self.kept = self.chunks = 0  # rows of the step, also those freed since, and the memory for them

    def empty(self) -> TwinRows:
        return TwinRows(self.table, self.layout, self.spec, self.candidates)

    def _page_counts(self) -> list[int]:
        n = 1 << self.layout.page_bits
        return [sum(r is not None for r in self.slots[i : i + n]) for i in range(0, len(self.slots), n)]

    @property
    def free_slots(self) -> int:
        """Return how many slots are unused in the pages that have rows."""
        return sum(c > 0 for c in self._page_counts()) * (1 << self.layout.page_bits) - len(self.index)

    @property
    def held_bytes(self) -> int:
        pages = sum(c > 0 for c in self._page_counts()) * self.layout.page_bytes
        return pages + self.index_size * 16 + (self.chunks * self._chunk_bytes if self.chunks else 0)

    def bytes_for(self, n: int) -> int:
        """Return what n more rows add to ``held_bytes``."""
        slots, size = 1 << self.layout.page_bits, self.index_size
        while n and (len(self.index) + n) * 10 > size * 7:
            size = size * 2 or 16
        pages = -(-max(0, n - self.free_slots) // slots)
        return pages * self.layout.page_bytes + (size - self.index_size) * 16

    def insert(self, row: _Row) -> int:
        while (len(self.index) + 1) * 10 > self.index_size * 7:
            self.index_size = self.index_size * 2 or 16
        slots, counts = 1 << self.layout.page_bits, self._page_counts()
        page = next((p for p, c in enumerate(counts) if 0 < c < slots), None)
        if page is None:
            page = next((p for p, c in enumerate(counts) if c == 0), len(counts))
        self.slots += [None] * max(0, (page + 1) * slots - len(self.slots))
        slot = next(s for s in range(page * slots, (page + 1) * slots) if self.slots[s] is None)
        self.slots[slot] = row
        self.index[row.key] = slot
        return slot

    def erase(self, slot: int) -> None:
        row = self.slots[slot]
        assert row is not None
        del self.index[row.key]
        self.running.pop(row.key, None)
        self.slots[slot] = None

    def begin_step(self, step: int, keys: list[int], linear: bool) -> None:
        """A push of ``step`` (-1: of none) is about to change the rows of these keys that have one. ``linear``: its
        optimizer is."""
        if linear:
            return
        if step != self.step:
            self.step, self.running, self.kept, self.chunks = step, {}, 0, 0
        if step >= 0:
            self.kept += sum(key in self.index and key not in self.running for key in keys)
            self.chunks = max(self.chunks, -(-self.kept // (self._chunk_bytes // self._kept_bytes)))

    @property
    def _kept_bytes(self) -> int:
        return 4 * (2 * self.layout.dim + self.layout.state)

    @property
    def _chunk_bytes(self) -> int:
        return max(4096, 1 << (self._kept_bytes - 1).bit_length())

    def add_to_step(self, row: _Row, grad: F32) -> F32:
        """Put the row back to before its step; the gradient of the step so far."""
        if row.key not in self.running:
            self.running[row.key] = (row.values.copy(), row.state.copy(), grad.copy())
            return grad
        values, state, total = self.running[row.key]
        total += grad
        row.values[:], row.state[:] = values, state
        return total

    def row(self, key: int) -> _Row | None:
        return self.slots[self.index[key]] if key in self.index else None

    def used(self) -> list[tuple[int, _Row]]:
        """Return (slot, row) of all rows, ascending."""
        return [(slot, row) for slot, row in enumerate(self.slots) if row is not None]

    def pages(self) -> dict[int, bytes]:
        """Return the pages that hold a row."""
        layout, out = self.layout, {}
        n = 1 << layout.page_bits
        for page in range(-(-len(self.slots) // n)):
            held = [(i, r) for i, r in enumerate(self.slots[page * n : (page + 1) * n]) if r is not None]
            if not held:
                continue
            snapshot = np.zeros(layout.page_bytes, np.uint8)
            for i, row in held:
                snapshot[i >> 3] |= 1 << (i & 7)
                snapshot[layout.keys_at + 8 * i :][:8] = np.frombuffer(np.int64(row.key).tobytes(), np.uint8)
                at = layout.head_bytes + i * layout.record_bytes
                snapshot[at : at + layout.record_bytes] = np.frombuffer(row.record(), np.uint8)
            out[page] = snapshot.tobytes()
        return out

    def adopt(self, pages: dict[int, NDArray[np.uint8]], partition: int, n_partitions: int) -> None:
        """Take pages of a snapshot; this is empty. ValueError: no store has made them."""
        layout, n = self.layout, 1 << self.layout.page_bits
        where = f"table {self.table} of partition {partition}: "
        found: dict[int, _Row] = {}
        for number, page in sorted(pages.items()):
            used = np.unpackbits(page[: n // 8], bitorder="little").astype(bool)
            keys = page[layout.keys_at : layout.head_bytes].view("<i8")
            tail = layout.head_bytes + n * layout.record_bytes
            records = page[layout.head_bytes : tail].reshape(n, layout.record_bytes)
            for i in range(n):
                if not used[i]:
                    if keys[i] or records[i].any():
                        raise ValueError(f"{where}a slot that is not used is not zero")
                    continue
                if partition_of(keys[i : i + 1], self.salted, n_partitions)[0] != partition:
                    raise ValueError(f"{where}key {keys[i]} belongs to another partition")
                words, dim, state = records[i].tobytes(), 4 * layout.dim, 4 * layout.state
                found[number * n + i] = _Row(
                    int(keys[i]),
                    np.frombuffer(words[:dim], np.float32).copy(),
                    np.frombuffer(words[dim : dim + state], np.float32).copy(),
                    np.frombuffer(words[dim + state :], np.uint32).copy(),
                )
            if page[n // 8 : layout.keys_at].any() or page[tail:].any():
                raise ValueError(f"{where}a page's padding is not zero")
        if len({row.key for row in found.values()}) != len(found):
            raise ValueError(f"{where}a key stands twice")
        if pages:
            self.slots = [found.get(slot) for slot in range((max(pages) + 1) * n)]
        self.index = {row.key: slot for slot, row in found.items()}
        self.index_size = 16 if found else 0
        while len(found) * 10 > self.index_size * 7:
            self.index_size *= 2

    @property
    def salted(self) -> int:
        """Return the table whose hash says the partition of a key: candidates lie with the rows that they may
        become."""
        return self.spec.id


@dataclass
class _Partition:
    """Holds what a partition has beside its part of the ledger."""

    seq: int = 0
    clock: int = 0
    protect: bool = False
    initialised: list[int] = field(default_factory=list)
    expire_table: int = 0
    rows: dict[int, TwinRows] = field(default_factory=dict)  # by table, in the order of their declaration


# (rows, slot, key if the row was made or freed, record before, record after)
_Touched = tuple[TwinRows, int, int | None, bytes, bytes]


class TwinStore:
    """Is ``everstep.native.Store`` in Python: same methods, same answers, same bits. Not thread-safe."""

    def __init__(self, n_partitions: int, seed: int) -> None:
        self.n_partitions = n_partitions
        self.seed = seed & _MASK
        self.ledger = PushLedger(n_partitions, ())
        self.outbox: list[bytes] = []
        self._specs: dict[int, TableSpec] = {}
        self._held = {b: _Partition() for b in range(n_partitions)}
        self._incoming: dict[int, dict[int, dict[int, NDArray[np.uint8]]]] = {}  # pages by partition, table and number
        self._pushes = self._pulls = 0
        self._limit, self._evict = 0, False

    def __repr__(self) -> str:
        return f"<TwinStore {self.ledger!r} tables={len(self._specs)}>"

    def own(self, partitions: Sequence[int]) -> None:
        self.ledger.own(partitions)

    def owned(self) -> list[int]:
        return list(self.ledger.partitions)

    def declare(self, spec: TableSpec) -> bool:
        check_spec(spec)
        known = self._specs.setdefault(spec.id, spec)
        if known != spec:
            what = difference(known, spec, "in the job", "in this script")
            raise ValueError(f"table {spec.name!r} exists as another one: {what}")
        new = spec.id not in self._held[0].rows
        layout = PagePlan(spec.dim, spec.optimizer.state_floats(spec.dim), 2 if spec.has_life_cycle else 0)
        for held in self._held.values() if new else ():
            held.rows[spec.id] = TwinRows(spec.id, layout, spec)
            if spec.admit_after:
                held.rows[spec.candidates_id] = TwinRows(spec.candidates_id, PagePlan(0, 0, 3), spec, True)
        return new

    # ------------------------------------------------------------ changes

    def _change(
        self,
        partition: int,
        shards: Sequence[tuple[int, int, int]] = (),
        touched: Sequence[_Touched] = (),
        initialised: Sequence[int] = (),
        fingerprint: int | None = None,
    ) -> None:
        """One change of a partition that has happened: seq grows, the difference goes to the outbox if protected."""
        held = self._held[partition]
        held.seq += 1
        if not held.protect:
            return
        if fingerprint is None:
            fingerprint = self.ledger.partitions[partition].fingerprint
        marks = BlobMarks(fingerprint, held.clock, list(shards), list(initialised))
        parts = []
        for rows in {id(t[0]): t[0] for t in touched}.values():
            of = [t for t in touched if t[0] is rows]
            records = [np.bitwise_xor(*(np.frombuffer(x, np.uint8) for x in t[3:])) for t in of]
            toggled = np.array([t[2] is not None for t in of])
            keys = np.array([t[2] for t in of if t[2] is not None], np.int64)
            slots = np.array([t[1] for t in of], np.uint32)
            parts.append(BlobPart(rows.table, slots, toggled, keys, np.array(records, np.uint8)))
        self.outbox.append(build(Blob(BlobKind.CHANGE, partition, held.seq, marks, parts)))

    def protect(self, partitions: Sequence[int], on: bool) -> None:
        for b in partitions:
            if on and b not in self.ledger.partitions:
                raise KeyError(f"partition {b} is not owned here")
            self._held[b].protect = on

    def take(self) -> list[bytes]:
        """Return everything in the outbox; it is empty then."""
        out, self.outbox = self.outbox, []
        return out

    def _marks(self, partition: int) -> dict[int, tuple[int, int]]:
        return {shard: (mark[0], mark[1]) for shard, mark in self.ledger.partitions[partition].shards.items()}

    def open(self, shard: int, start: int, lease: int) -> tuple[NDArray[np.int32], I64] | None:
        before = {b: self._marks(b).get(shard) for b in self.ledger.partitions}
        found = self.ledger.open(shard, start, lease)
        for b in self.ledger.partitions:
            mark = self._marks(b).get(shard)
            if mark is not None and mark != before[b]:
                self._change(b, [(shard, *mark)])
        return _arrays(found)

    def watermarks(self, shard: int) -> tuple[NDArray[np.int32], I64] | None:
        return _arrays(self.ledger.watermarks(shard))

    def release(self, shards: Sequence[int]) -> None:
        before = {b: self._marks(b) for b in self.ledger.partitions}
        self.ledger.release(shards)
        for b, marks in before.items():
            gone = [shard for shard in dict.fromkeys(shards) if shard in marks]
            if gone:
                self._change(b, [(shard, -1, 0) for shard in gone])

    def initialise(self, table: int) -> None:
        self._spec(table)
        for b in self.ledger.partitions:
            if table not in self._held[b].initialised:
                self._held[b].initialised = sorted([*self._held[b].initialised, table])
                self._change(b, initialised=[table])

    def initialised(self) -> list[int]:
        all_of = [set(self._held[b].initialised) for b in self.ledger.partitions]
        return sorted(set.intersection(*all_of)) if all_of else []

    def shards(self) -> list[int]:
        return self.ledger.shards()

    def fingerprints(self) -> U64:
        return np.array(self.ledger.fingerprints(), np.uint64)

    # ------------------------------------------------------------ whole partitions

    def marks(self, partition: int) -> bytes:
        ledger, held = self.ledger.partitions[partition], self._held[partition]
        shards = [(shard, *mark) for shard, mark in sorted(self._marks(partition).items())]
        marks = BlobMarks(ledger.fingerprint, held.clock, shards, held.initialised)
        return build(Blob(BlobKind.MARKS, partition, held.seq, marks))

    def seq(self, partition: int) -> int:
        return self._held[partition].seq

    def rows(self, partition: int, table: int) -> TwinRows:
        return self._held[partition].rows[table]

    def partition_rows(self, partition: int) -> dict[int, int]:
        return {table: len(rows.index) for table, rows in self._held[partition].rows.items()}

    def drop(self, partition: int) -> None:
        self.ledger.partitions.pop(partition, None)
        self._incoming.pop(partition, None)
        rows = {table: r.empty() for table, r in self._held[partition].rows.items()}
        self._held[partition] = _Partition(rows=rows)

    def load_begin(self, partition: int) -> None:
        if partition in self.ledger.partitions:
            raise ValueError(f"partition {partition} is here already: drop it first")
        self.drop(partition)
        self._incoming[partition] = {}

    def load_pages(self, partition: int, table: int, page_nos: Sequence[int], pages: NDArray[np.uint8]) -> None:
        layout = self._held[partition].rows[table].layout if table in self._held[partition].rows else None
        if layout is None:
            raise ValueError(f"table {table} was not declared")
        if pages.size != len(page_nos) * layout.page_bytes:
            raise ValueError(f"pages must be {len(page_nos)} x {layout.page_bytes} bytes")
        for number in page_nos:
            if not 0 <= number < 1 << 24 or (number + 1) << layout.page_bits > MOST_SLOTS:
                raise ValueError(f"page {number} of table {table} cannot be")
        if partition not in self._incoming:
            raise ValueError(f"partition {partition} is not being loaded")
        of_table = self._incoming[partition].setdefault(table, {})
        of_table.update(zip(page_nos, pages.reshape(len(page_nos), -1).copy(), strict=True))

    def load_end(self, partition: int, marks: bytes) -> None:
        if partition not in self._incoming:
            raise ValueError(f"partition {partition} is not being loaded")
        incoming = self._incoming.pop(partition)
        check_seal(marks)
        blob = parse_marks(marks)
        if blob.partition != partition:
            raise ValueError(f"these are not the marks of partition {partition}")
        held = self._held[partition]
        try:
            for table, pages in incoming.items():
                held.rows[table].adopt(pages, partition, self.n_partitions)
        except ValueError:
            self.drop(partition)
            raise
        self.ledger.own([partition])
        ledger = self.ledger.partitions[partition]
        ledger.fingerprint = blob.marks.fingerprint
        ledger.shards = {shard: [watermark, fence] for shard, watermark, fence in blob.marks.shards}
        held.seq, held.clock = blob.seq, blob.marks.clock
        held.initialised = sorted(set(blob.marks.initialised))

    def digest(self, partition: int, by_key: bool = False) -> bytes:
        """Return a digest as the native one does: sums over hashed items, so that their order does not matter."""
        items: list[list[int]] = []
        for table, rows in self._held[partition].rows.items():
            for slot, row in rows.used():
                words = np.frombuffer(row.record(), np.uint32).tolist()
                items.append([1, table, 0 if by_key else slot, row.key & _MASK, *words])
        for shard, (watermark, fence) in self._marks(partition).items():
            items.append([2, shard, watermark, 0 if by_key else fence])
        held = self._held[partition]
        items.append([3, 0 if by_key else held.seq, self.ledger.partitions[partition].fingerprint, held.clock])
        items += [[4, table] for table in held.initialised]
        a = b = 0
        for words in items:
            counters = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
            item = int(mix64(np.array(words, np.uint64) + counters).sum(dtype=np.uint64))
            a += mix64_int(item ^ _GOLDEN)
            b += mix64_int((item + mix64_int(_GOLDEN)) & _MASK)
        return (a & _MASK).to_bytes(8, "little") + (b & _MASK).to_bytes(8, "little")

    def content_digest(self, partition: int) -> bytes:
        return self.digest(partition, by_key=True)

    # ------------------------------------------------------------ rows

    def _spec(self, table: int) -> TableSpec:
        if table not in self._specs:
            raise ValueError(f"table {table} was not declared")
        return self._specs[table]

    def dim(self, table: int) -> int:
        return self._spec(table).dim

    def state_floats(self, table: int) -> int:
        spec = self._spec(table)
        return spec.optimizer.state_floats(spec.dim)

    def _partitions(self, table: int, keys: I64) -> list[int]:
        partitions: list[int] = partition_of(keys, table, self.n_partitions).tolist()
        for b in partitions:
            if b not in self.ledger.partitions:
                raise KeyError(f"partition {b} is not owned here")
        return partitions

    def _new_row(self, spec: TableSpec, key: int, values: F32 | None = None) -> _Row:
        if values is None:
            values = first_values(self.seed, spec.id, key, spec.dim, spec.init)
        meta = np.zeros(2 if spec.has_life_cycle else 0, np.uint32)
        return _Row(key, values.copy(), first_state(values, spec.optimizer), meta)

    def _pushed(self, spec: TableSpec, row: _Row, clock: int, now_s: int) -> None:
        if spec.has_life_cycle:
            row.meta[:2] = clock & 0xFFFFFFFF, now_s if spec.expire_s else 0

    def pull(self, table: int, keys: I64, out: F32) -> None:
        spec = self._spec(table)
        if out.shape != (len(keys), spec.dim):
            raise ValueError("out must be [keys, dim of the table]")
        self._pulls += 1
        for i, (b, key) in enumerate(zip(self._partitions(table, keys), keys.tolist(), strict=True)):
            row = self._held[b].rows[table].row(key)
            out[i] = row.values if row else first_values(self.seed, table, key, spec.dim, spec.init)

    def put_absent(self, table: int, keys: I64, values: F32, now_s: int = 0) -> int:
        spec = self._spec(table)
        if values.shape != (len(keys), spec.dim):
            raise ValueError("rows must be [keys, dim of the table]")
        if not np.isfinite(values).all():
            raise ValueError("initial rows hold NaN or Inf")
        made = 0
        numbered = enumerate(zip(self._partitions(table, keys), keys.tolist(), strict=True))
        for b, run in groupby(numbered, lambda item: item[1][0]):
            rows = self._held[b].rows[table]
            touched: list[_Touched] = []
            for i, (_, key) in run:
                if key not in rows.index:
                    if self._limit and self.used_bytes() + rows.bytes_for(1) > self._limit:
                        for _, slot, *_ in touched:
                            rows.erase(slot)
                        raise Full("the ceiling")
                    row = self._new_row(spec, key, values[i])
                    self._pushed(spec, row, self._held[b].clock, now_s)
                    touched.append((rows, rows.insert(row), key, bytes(rows.layout.record_bytes), row.record()))
            if touched:
                self._change(b, touched=touched)
            made += len(touched)
        return made

    def assign(self, table: int, keys: I64, values: F32) -> int:
        spec = self._spec(table)
        if values.shape != (len(keys), spec.dim):
            raise ValueError("rows must be [keys, dim of the table]")
        if not np.isfinite(values).all():
            raise ValueError("assigned rows hold NaN or Inf")
        replaced = 0
        numbered = enumerate(zip(self._partitions(table, keys), keys.tolist(), strict=True))
        for b, run in groupby(numbered, lambda item: item[1][0]):
            rows = self._held[b].rows[table]
            touched: list[_Touched] = []
            for i, (_, key) in run:
                row = rows.row(key)
                if row is None:
                    continue
                old = row.record()
                row.values[:] = values[i]
                touched.append((rows, rows.index[key], None, old, row.record()))
            if touched:
                self._change(b, touched=touched)
            replaced += len(touched)
        return replaced

    def locate(self, table: int, keys: I64, slots: I64) -> None:
        self._spec(table)
        for i, (b, key) in enumerate(zip(self._partitions(table, keys), keys.tolist(), strict=True)):
            slots[i] = self._held[b].rows[table].index.get(key, -1)

    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes,
        parts: Sequence[PushPart],
        skipped: bool = False,
        now_s: int = 0,
        step: int = -1,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        if partitions:  # a batch pushed again to the partitions behind has the rows of all
            parts = [part for part in (self._addressed(part, partitions) for part in parts) if len(part[1])]
        self.ledger.check_push(shard, lo, hi, lease, partitions)
        shards = [whole[0] for whole in by_shard(((shard, lo, hi, lease, not skipped), *more))]
        if skipped and not any(span[4] for span in more) and parts:
            raise ValueError("a skipped range has no rows")
        if len({part[0] for part in parts}) != len(parts):
            raise ValueError("a table stands twice in one push")
        work = []
        for table, keys, grads, lr, *more_of_it in parts:
            spec = self._spec(table)
            options = more_of_it[0] if more_of_it else ()
            check_options(spec, options)
            if grads.shape != (len(keys), spec.dim):
                raise ValueError("grads must be [keys, dim of the table]")
            if not math.isfinite(lr):
                raise ValueError("the learning rate is not finite")
            own = spec.optimizer.lr if lr < 0 else lr
            if spec.optimizer.kind is OptimizerKind.FTRL and own == 0:
                raise ValueError("FTRL needs a learning rate above 0")
            at = self._partitions(table, keys)
            if at != sorted(at):
                raise ValueError("keys are not grouped by ascending partition")
            work.append((spec, at, keys.tolist(), grads, Rate(own, options)))
        for spec, _, _, grads, _ in work:
            if not np.isfinite(grads).all():
                return PushResult(0, 0, nonfinite=spec.id)
        if any(len(set(keys)) != len(keys) for _, _, keys, _, _ in work):
            raise ValueError("a key stands twice in one push")
        self._check_room([(spec, at, keys) for spec, at, keys, _, _ in work])
        self._pushes += 1
        before = {b: [self._marks(b).get(s) for s in shards] for b in self.ledger.partitions}
        fingerprints = {b: ledger.fingerprint for b, ledger in self.ledger.partitions.items()}
        done = self.ledger.push(shard, lo, hi, lease, partitions, skipped, more)
        for b, marks in before.items():
            after = [self._marks(b).get(s) for s in shards]
            if after == marks:
                continue
            pairs = zip(shards, marks, after, strict=True)
            changed = [(s, *now) for s, was, now in pairs if now is not None and now != was]
            touched: list[_Touched] = []
            applied = any(
                was is None or (now is not None and now[0] != was[0]) for was, now in zip(marks, after, strict=True)
            )
            if applied:
                held = self._held[b]
                here = [(spec, [k for k, x in zip(keys, at, strict=True) if x == b]) for spec, at, keys, _, _ in work]
                self._make_room(b, here, fingerprints[b])
                held.clock += 1
                for spec, at, keys, grads, rate in work:
                    pushed = [(keys[i], grads[i]) for i in range(len(keys)) if at[i] == b]
                    touched += self._push_rows(held, spec, pushed, rate, now_s, step)
                self._change(b, changed, touched)
            else:
                for mark in changed:  # fences rise one by one
                    self._change(b, [mark], touched)
        return done

    def _addressed(self, part: PushPart, partitions: bytes) -> PushPart:
        """Return the rows of a part whose partitions are in the bitmap."""
        table, keys, grads, *rate = part
        mask = np.isin(partition_of(keys, table, self.n_partitions), bitmap_partitions(partitions))
        return cast(PushPart, (table, keys[mask], grads[mask], *rate)) if grads.shape[:1] == keys.shape else part

    def _push_rows(
        self, held: _Partition, spec: TableSpec, pushed: list[tuple[int, F32]], rate: Rate, now_s: int, step: int
    ) -> list[_Touched]:
        """Return the gradients of one table in one partition, whose clock has moved on."""
        rows, waiting = held.rows[spec.id], held.rows.get(spec.candidates_id)
        counted: list[_Touched] = []
        new: set[int] = set()
        over: list[int] = []
        for key, _ in pushed:
            if key in rows.index:
                continue
            if waiting is not None:
                zero = bytes(waiting.layout.record_bytes)
                row = waiting.row(key)
                if row is None:
                    row = _Row(key, np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(3, np.uint32))
                    slot, old, toggled = waiting.insert(row), zero, True
                else:
                    slot, old, toggled = waiting.index[key], row.record(), False
                if row.meta[2] >= spec.admit_after:
                    over.append(slot)
                    counted.append((waiting, slot, key, old, zero))
                else:
                    self._pushed(spec, row, held.clock, now_s)
                    row.meta[2] += 1
                    counted.append((waiting, slot, key if toggled else None, old, row.record()))
                    continue
            rows.insert(self._new_row(spec, key))
            new.add(key)
        for slot in over:
            assert waiting is not None
            waiting.erase(slot)
        touched: list[_Touched] = []
        optimizer = spec.optimizer.with_options(rate.options)
        if pushed:
            rows.begin_step(step, [key for key, _ in pushed], optimizer.is_linear)
        for key, grad in pushed:
            row = rows.row(key)
            if row is None:
                continue
            old = bytes(rows.layout.record_bytes) if key in new else row.record()
            if step >= 0 and not optimizer.is_linear:
                grad = rows.add_to_step(row, grad)
            update(row.values, row.state, grad, optimizer, rate.lr)
            self._pushed(spec, row, held.clock, now_s)
            touched.append((rows, rows.index[key], key if key in new else None, old, row.record()))
        return touched + counted

    # ------------------------------------------------------------ life cycle

    def set_limit(self, n_bytes: int, on_full: str = "error") -> None:
        self._limit, self._evict = n_bytes, on_full == "evict"

    def used_bytes(self) -> int:
        return sum(rows.held_bytes for held in self._held.values() for rows in held.rows.values())

    def _growth(self, partition: int, spec: TableSpec, keys: list[int]) -> list[tuple[TwinRows, int]]:
        """Return the rows of one partition, and its candidates, that will be more: by how many."""
        rows, waiting = self._held[partition].rows[spec.id], self._held[partition].rows.get(spec.candidates_id)
        new = [key for key in keys if key not in rows.index]
        if waiting is None:
            return [(rows, len(new))] if new else []
        known = [row.meta[2] for row in map(waiting.row, new) if row is not None]
        counts = [(rows, sum(n >= spec.admit_after for n in known)), (waiting, len(new) - len(known))]
        return [(of, n) for of, n in counts if n]

    def _check_room(self, work: list[tuple[TableSpec, list[int], list[int]]]) -> None:
        more, stuck = 0, False
        for spec, at, keys in work:
            for b in sorted(set(at)):
                here = [key for key, x in zip(keys, at, strict=True) if x == b]
                for rows, n in self._growth(b, spec, here):
                    more += rows.bytes_for(n)
                    free = rows.free_slots
                    stuck |= n > free and (not spec.has_life_cycle or len(rows.index) + free < n + len(here))
        if self._limit and more and self.used_bytes() + more > self._limit and (stuck or not self._evict):
            raise Full("the ceiling")

    def _make_room(self, b: int, here: list[tuple[TableSpec, list[int]]], fingerprint: int) -> None:
        growth = [(rows, n, keys) for spec, keys in here for rows, n in self._growth(b, spec, keys)]
        need = sum(rows.bytes_for(n) for rows, n, _ in growth)
        if not (self._limit and self._evict and need and self.used_bytes() + need > self._limit):
            return
        for rows, n, keys in growth:
            if n <= rows.free_slots or not rows.spec.has_life_cycle:
                continue
            clock = self._held[b].clock
            ages = [
                (-((clock - int(row.meta[0])) & 0xFFFFFFFF), slot) for slot, row in rows.used() if row.key not in keys
            ]
            count = max(n - rows.free_slots, len(rows.index) // 16)
            self._free(b, rows, sorted(slot for _, slot in sorted(ages)[:count]), fingerprint)

    def _free(self, b: int, rows: TwinRows, slots: list[int], fingerprint: int | None = None) -> None:
        """Free these rows in one change. ``fingerprint``: as it was then, if the ledger is ahead already."""
        touched: list[_Touched] = []
        for slot in slots:
            row = rows.slots[slot]
            assert row is not None
            touched.append((rows, slot, row.key, row.record(), bytes(rows.layout.record_bytes)))
            rows.erase(slot)
        if touched:
            self._change(b, touched=touched, fingerprint=fingerprint)

    def expire(self, partition: int, now_s: int, max_slots: int = 65536) -> tuple[int, bool]:
        held = self._held[partition]
        tables = list(held.rows.values())
        freed = 0
        while max_slots:
            if held.expire_table >= len(tables):
                held.expire_table = 0
                return freed, True
            rows = tables[held.expire_table]
            spec = rows.spec
            end = min(len(rows.slots), rows.expire_slot + max_slots)
            over = []
            for slot, row in rows.used() if spec.expire_batches or spec.expire_s else []:
                pushed, at = row.meta[:2].tolist()
                by_clock = spec.expire_batches and (held.clock - pushed) & 0xFFFFFFFF >= spec.expire_batches
                by_time = spec.expire_s and now_s - at >= spec.expire_s
                if rows.expire_slot <= slot < end and (by_clock or by_time):
                    over.append(slot)
            self._free(partition, rows, over)
            freed += len(over)
            if spec.expire_batches or spec.expire_s:
                max_slots -= end - rows.expire_slot
                rows.expire_slot = end
            else:
                end = len(rows.slots)
            if end == len(rows.slots):
                held.expire_table += 1
                rows.expire_slot = 0
        return freed, False

    def scan(
        self, table: int, partition: int, slot: int, limit: int, state: bool = False
    ) -> tuple[I64, F32, F32 | None, int]:
        spec = self._spec(table)
        if not 0 <= partition < self.n_partitions or slot < 0 or limit < 1:
            raise ValueError("no such partition or slot, or the limit is not positive")
        if partition not in self.ledger.partitions:
            raise KeyError(f"partition {partition} is not owned here")
        rows = [(s, row) for s, row in self._held[partition].rows[table].used() if s >= slot]
        found = [row for _, row in rows[:limit]]
        width = spec.optimizer.state_floats(spec.dim)
        keys = np.array([row.key for row in found], np.int64)
        values = np.array([row.values for row in found], np.float32).reshape(len(found), spec.dim)
        states = np.array([row.state for row in found], np.float32).reshape(len(found), width) if state else None
        return keys, values, states, rows[limit][0] if limit < len(rows) else -1

    def specs(self) -> list[TableSpec]:
        return list(self._specs.values())

    def stats(self) -> StoreStats:
        rows = {
            spec.name: sum(len(self._held[b].rows[spec.id].index) for b in self.ledger.partitions)
            for spec in self._specs.values()
        }
        return StoreStats(rows, 0, self._pushes, self._pulls)


def _arrays(found: tuple[list[int], list[int]] | None) -> tuple[NDArray[np.int32], I64] | None:
    return (np.array(found[0], np.int32), np.array(found[1], np.int64)) if found is not None else None


# ---------------------------------------------------------------- worker-side kernels


def unique_route(
    ids: I64, n_partitions: int, table_id: int, partition_ps: NDArray[np.int32], n_ps: int = -1
) -> tuple[I64, NDArray[np.int32], I64]:
    """Route as the native function does: keys in order of (ps, partition, first appearance), inverse, keys of each
    ps."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    partitions = partition_of(distinct, table_id, n_partitions)
    order = np.lexsort((first, partitions, partition_ps[partitions]))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    n_ps = int(partition_ps.max()) + 1 if n_ps < 0 else n_ps
    return distinct[order], place[inverse], np.bincount(partition_ps[partitions], minlength=n_ps).astype(np.int64)


def bag_forward(
    rows: F32,
    inverse: NDArray[np.int32],
    offsets: I64 | None,
    mode: Literal["sum", "mean"],
    weights: F32 | None,
    out: F32,
) -> None:
    """Do as the native function does."""
    bounds = np.arange(len(inverse) + 1) if offsets is None else offsets
    for i, (lo, hi) in enumerate(pairwise(bounds.tolist())):
        total = np.zeros(rows.shape[1], np.float32)
        for k in range(lo, hi):
            row = rows[inverse[k]] if weights is None else weights[k] * rows[inverse[k]]
            total = row if k == lo else total + row
        out[i] = total / np.float32(hi - lo) if mode == "mean" and hi > lo else total


def bag_backward(
    grad_out: F32,
    inverse: NDArray[np.int32],
    offsets: I64 | None,
    mode: Literal["sum", "mean"],
    weights: F32 | None,
    u: int,
    out: F32,
    add: bool = False,
) -> None:
    """Do as the native function does."""
    bounds = np.arange(len(inverse) + 1) if offsets is None else offsets
    if not add:
        out[:u] = 0
    for i, (lo, hi) in enumerate(pairwise(bounds.tolist())):
        for k in range(lo, hi):
            g = grad_out[i] if weights is None else weights[k] * grad_out[i]
            out[inverse[k]] += g / np.float32(hi - lo) if mode == "mean" else g
