"""Is the small module over the C++ kernels, which have a NumPy twin as their oracle.

Arrays are checked at the border (dtype, C layout, shape, bounds): a wrong one is a ValueError, a key whose partition is
not owned a KeyError. All long work runs without the GIL. Keys are int64, rows float32, all little-endian.

Worker side, on one batch of one table (``u`` distinct keys, ``n`` ids, ``b`` bags):

- ``unique_route(ids i64[n], n_partitions, table_id, partition_ps i32[n_partitions], n_ps=-1)`` gives ``(keys i64[u],
  inverse i32[n], counts_by_ps i64[n_ps])``: ``keys[inverse] == ids``; keys are grouped by ps in rank order
  (``partition_ps[b]`` is the rank of partition b's ps; -1: as many as the largest rank says), within a ps by ascending
  partition, so that each ps gets one stretch in the order that ``Store`` wants.
- ``gather_rows(rows f32[u, dim], inverse, out f32[n, dim])``.
- ``gather_pieces(pieces f32[...], starts i64[pieces], index i32[n], out f32[n, dim])``: rows of arrays that stand one
  behind the other, the first row of each by ``starts``; zero behind the end of a piece.
- ``same_ids(ids i64 or i32, known i64[n])``: whether ids of any strides (at most two dimensions) equal known ones.
- ``bag_forward(rows, inverse, offsets i64[b + 1] | None, "sum" | "mean", weights f32[n] | None, out f32[b, dim])``;
  ``offsets`` None: every id is its own bag (b == n). An empty bag is 0. Weights go with "sum" only.
- ``bag_backward(grad_out f32[b, dim], inverse, offsets, mode, weights, u, out f32[u, dim], add=False)``: the gradient
  of the rows, written over ``out`` or added to it. Sums run in the order of the ids: the same bits every time.

For the members of a group: ``sum_bits(data, "float32")`` gives the sum of the 64-bit words of ``data`` (mod 2^64; the
last one filled up with zeros) and whether all its elements are finite; ``talk(fds, mine, spin_us, wait_ms)`` sends
``mine`` to every socket and reads as many bytes of each: how many went and what came; less where one would block, is
closed or fails, or nothing came in time. ``tell(fds, mine)`` and ``hear(fds, size, spin_us, wait_ms)`` are its halves.

For stages of a pipeline: ``SpanCopier(block_bytes)`` copies pieces of memory, ``load(from_ u64[n], at i64[n], sizes
i64[n], into u8[size], sums u32[blocks])``, to their places in ``into`` while a span is open (``open(limit_bytes)``,
``close()``), on a thread of low priority; gaps are zeros, ``sums`` gets the crc32c of each block. ``finish()`` copies
the rest, ``drop()`` ends the copy as it is. The caller keeps the pieces' memory until one of the two. ``counts()``
gives bytes copied inside of spans, bytes of blocks that ended behind their span, bytes copied by ``finish``, how many
blocks ended late, and the seconds of those inside.

``out`` of the first two and ``grad_out`` may be column slices of a wider matrix (rows contiguous, any row stride).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.model.table import TRAVELLING, InitKind, OptimizerKind, TableSpec, difference
from everstep.native import _native
from everstep.native._native import (
    Full,
    Recovering,
    SpanCopier,
    bag_backward,
    bag_forward,
    crc32c,
    gather_pieces,
    gather_rows,
    hear,
    isa,
    isfinite_all,
    same_ids,
    sum_bits,
    talk,
    tell,
    unique_route,
)
from everstep.native.blob import BlobKind, check_seal
from everstep.native.ledger import (
    PushLedger,
    PushResult,
    SpanTuple,
    batch_fingerprint,
    bitmap,
    bitmap_partitions,
    mix64,
)

__all__ = [
    "BlobKind",
    "Full",
    "PushLedger",
    "PushResult",
    "Recovering",
    "SpanCopier",
    "SpanTuple",
    "Store",
    "StoreStats",
    "bag_backward",
    "bag_forward",
    "batch_fingerprint",
    "bitmap",
    "bitmap_partitions",
    "check_options",
    "check_spec",
    "crc32c",
    "gather_pieces",
    "gather_rows",
    "hear",
    "isa",
    "isfinite_all",
    "mix64",
    "same_ids",
    "sum_bits",
    "talk",
    "tell",
    "unique_route",
]

PushPart = (
    tuple[int, NDArray[np.int64], NDArray[np.float32], float]
    | tuple[int, NDArray[np.int64], NDArray[np.float32], float, tuple[float, ...]]
)
"""Table, keys, gradients, learning rate and, of an optimizer whose options have changed, those (``TRAVELLING``)."""

# Numbers of the C++ enums (native/rows.h, native/store.h).
_OPTIMIZERS = {kind: number for number, kind in enumerate(OptimizerKind)}
_INITS = {kind: number for number, kind in enumerate(InitKind)}


class LagState(NamedTuple):
    """Says what mirrors that may lag have not been sent yet. ``opened``: number of the newest change that was opened;
    ``closed``: all up to this one are in the outbox. ``partitions``, ``rows``, ``bytes`` (of old records), ``oldest_s``
    (seconds): of the open ones."""

    opened: int
    closed: int
    partitions: int
    rows: int
    bytes: int
    oldest_s: float


class ColdCounts(NamedTuple):
    """Counts what went to disk. ``lookups``: rows that were pulled; ``misses``: of these, that were on disk;
    ``written_bytes``: so far; ``disk_bytes``: of rows that are on disk alone now; ``error``: errno of the last write,
    0: it went well."""

    lookups: int
    misses: int
    written_bytes: int
    disk_bytes: int
    error: int


class StoreStats(NamedTuple):
    """Counts what a store has: ``rows`` by table name; ``bytes`` mapped for rows and indexes; calls so far."""

    rows: dict[str, int]
    bytes: int
    pushes: int
    pulls: int


def check_options(spec: TableSpec, options: tuple[float, ...] = ()) -> None:
    """Raise ValueError if the table's optimizer cannot go by these (``TRAVELLING``; (): its own)."""
    if options and (len(options) != len(TRAVELLING) or not all(np.isfinite(x) and x >= 0 for x in options)):
        raise ValueError(f"table {spec.name!r}: options {options} are not {len(TRAVELLING)} finite numbers >= 0")
    o = spec.optimizer.with_options(options)
    if o.beta1 >= 1 or o.beta2 >= 1:
        raise ValueError(f"table {spec.name!r}: betas ({o.beta1}, {o.beta2}) must be below 1")
    if o.alpha > 1:
        raise ValueError(f"table {spec.name!r}: alpha {o.alpha} must not be above 1")
    if name := spec.optimizer.unfit(options):
        raise ValueError(
            f"table {spec.name!r}: {name} cannot become {getattr(o, name)}: its rows were made for another"
        )


def check_spec(spec: TableSpec) -> None:
    """Raise ValueError if a table cannot be as ``spec`` says."""
    o = spec.optimizer
    if not 1 <= spec.dim <= 65536:
        raise ValueError(f"table {spec.name!r}: dim {spec.dim} is not in 1..65536")
    for name, value in msgspec.structs.asdict(o).items():
        if isinstance(value, float) and not (np.isfinite(value) and value >= 0):
            raise ValueError(f"table {spec.name!r}: {name}={value} of its optimizer must be finite and >= 0")
    for name in ("admit_after", "expire_batches", "expire_s"):
        if not 0 <= getattr(spec, name) < 1 << 31:
            raise ValueError(f"table {spec.name!r}: {name}={getattr(spec, name)} must be in 0..2^31 - 1")
    if spec.dense and spec.has_life_cycle:
        raise ValueError(f"table {spec.name!r}: rows of a dense tensor cannot be admitted late or expire")
    check_options(spec)
    if o.nesterov and (o.momentum <= 0 or o.dampening != 0):
        raise ValueError(f"table {spec.name!r}: nesterov needs momentum > 0 and dampening 0")
    if o.kind is OptimizerKind.FTRL and (o.lr <= 0 or o.weight_decay != 0):
        raise ValueError(f"table {spec.name!r}: ftrl needs lr > 0, and l2 instead of weight_decay")
    if not (np.isfinite(spec.init.a) and np.isfinite(spec.init.b)):
        raise ValueError(f"table {spec.name!r}: its init must be finite")
    if spec.init.kind is InitKind.UNIFORM and spec.init.b < spec.init.a:
        raise ValueError(f"table {spec.name!r}: init [{spec.init.a}, {spec.init.b}) is empty")


class Store(_native.Store):
    """Holds all partitions that one ps owns: rows, optimizer state and the exactly-once ledger.

    Thread-safe. A partition is one critical section; kernels run without the GIL. Unless said otherwise ValueError:
    malformed, KeyError: the partition is not here. Further methods (typed in ``_native.pyi``):

    - for workers: ``own(partitions)``, ``owned()``, ``open(shard, start, lease) -> (partitions i32, watermarks i64) |
      None``, ``pull(table, keys, out)`` (rows that nothing has made yet: as they begin; makes none),
      ``put_absent(table, keys, rows) -> made``,
      ``assign(table, keys, rows) -> replaced`` (values of rows that exist; their state stays),
      ``locate(table, keys, slots i64)`` (-1: no such row), ``release(shards)``, ``watermarks(shard)``,
      ``shards()``, ``scan(table, partition, slot, limit, state=False) -> (keys, values, state | None, next_slot |
      -1)``, ``fingerprints() -> u64[n_partitions]``, ``initialise(table)``, ``initialised() -> tables`` (marked in
      every owned partition). Recovering: rows of it are still being rebuilt; nothing was changed.
    - life cycle: ``expire(partition, now_s, max_slots=65536) -> (freed, round)``: looks at so many slots, from where
      the last call ended, and frees rows and candidates that nobody pushed for as long as their table says; round: the
      end was reached. ``set_limit``; ``used_bytes()``: what counts against it.
    - differences: ``protect(partitions, on)``: every change of these partitions goes to the outbox, as a blob
      (``blob.py``). ``outbox_ticket()``: entries so far; ``wait_outbox(timeout_s)``; ``take_outbox(max_bytes) ->
      (first_ticket, [(partition, seq, kind, offset, length)], bytes u8)``: removes entries from the front (at least
      one, if there is one); ``outbox_bytes()``: what waits.
      With ``set_lag`` changes of a protected partition stay open, and ``flush(partition) -> bool`` makes one difference
      of all since the last one; ``flush_older(age_s, most) -> flushed``: the oldest first; ``lag()``: what is open.
    - contents, into the outbox between the differences: ``emit(partition, kind, table, lo, hi) -> next lo | -1``,
      ``emit_slots(partition, table, slots u32)``, ``emit_marks(partition)``.
    - ``hand_over(partition) -> seq``: requests for it are KeyErrors until ``resume(partition)``, its contents can be
      read until ``drop(partition)``. ``seq(partition)``, ``partition_rows(partition)``, ``partition_bytes(partition)``,
      ``digest(partition)`` (16 bytes: marks and all rows with their slots), ``content_digest(partition)`` (without
      slots, seq and fences).
    - rows on disk (native/cold.h): ``begin_cold``, ``cool(target)``, ``grow_older``, ``cold_counts``.
    - snapshots: ``load_begin(partition)``, ``load_pages(partition, table, page_nos, pages u8)`` (a later page replaces
      an earlier one), ``load_end(partition, marks)``; ``snapshot_begin``, ``snapshot_next(partition, max_bytes) ->
      ([(table, page_no)], pages u8)`` (no pages: that was all), ``snapshot_slots(partition, table, page_nos) ->
      u8[pages * slots / 8]`` (bits of slots that changed since; None: not known, all may have),
      ``snapshot_end(partition)``; ``page_bytes(table)``, ``layout(table) -> (page_bits, head_bytes, record_bytes)``.
    - mirrors of partitions that are elsewhere (native/mirror.h; ``testing/mirror_twin.py``):
      ``mirror_make(id, members, row=0)``,
      ``mirror_drop(id)``, ``mirrors() -> ids``, ``mirror_apply(id, blob) -> 0 applied | 1 repeat | 2 gap (nothing
      changed) | 3 no member``, ``mirror_apply_many(ids i64, offsets i64, lengths i64, data) -> i32`` (ValueError: those
      before the malformed one are applied), ``mirror_state(id) -> [(partition, seq | -1, complete)]``,
      ``mirror_marks(id, partition) -> blob``, ``mirror_bytes(id)``, ``mirror_pages(id, table) -> [(page_no, bytes)]``.
    - ``promote(id, partition)``: a complete mirror of one member becomes the partition, owned, and is gone.
    - recovery of one or two lost members: ``recover_begin(id, lost, here=None)`` (``here``: those of them that are to
      live here; None: all) once every mirror of them has the same seq of them. ``recover_fold(id, blob)``: all contents
      of every survivor, at the place in its stream where they stand, while ``mirror_apply`` goes on. Two lost: also
      ``recover_other(id, data)``, of what ``emit_recovering(id, kind, table, lo, hi) -> (next lo | -1, data)`` gives at
      the mirror of the other row (``lo`` at a page's begin; next lo == lo and no data: not folded yet), for HEADS and
      BODIES of every declared table. ``recover_state(id) -> {partition: (heads_done, bodies_done, slots_present,
      slots_total)}``: once the heads are done the partition is owned, and what asks for rows that are not back is
      Recovering; ``missing(partition, table, keys) -> slots u32`` (``missing_all(table, keys) -> [(partition,
      slot)]`` of all partitions) are those rows, to be asked for out of turn by
      ``emit_slots`` at the survivors and ``emit_recovering_slots(id, table, slots) -> data`` at the other row.
      ``recover_end(id, abort=False)``: ValueError unless all is back; aborted, what came back is dropped, half
      or whole. The mirror stays.
    """

    def __init__(self, n_partitions: int, seed: int) -> None:
        super().__init__(n_partitions, seed & (1 << 64) - 1)
        self._specs: dict[int, TableSpec] = {}
        self._specs_lock = threading.Lock()

    def set_lag(self, most_bytes: int, most_pushes: int, late_s: float) -> None:
        """Let mirrors lag: a push flushes its partition itself where that has more open than this, or for longer."""
        self._set_lag(True, most_bytes, most_pushes, late_s)

    def lag(self, sizes: bool = True) -> LagState:
        """Return what is open. Without ``sizes``, ``rows`` and ``bytes`` are 0, and the answer is cheap."""
        return LagState(*self._lag(sizes))

    def __repr__(self) -> str:
        return f"<Store partitions={len(self.owned())}/{self.n_partitions} tables={len(self._specs)}>"

    def declare(self, spec: TableSpec) -> bool:
        """Make this table exist; False if it did. ValueError: a bad spec, or another one under its name or crc32."""
        check_spec(spec)
        with self._specs_lock:
            known = self._specs.get(spec.id)
            if known is not None and known != spec:
                what = difference(known, spec, "in the job", "in this script")
                raise ValueError(f"table {spec.name!r} exists as another one: {what}")
            if known is not None:
                return False
            o = spec.optimizer
            options = {k: v for k, v in msgspec.structs.asdict(o).items() if k != "kind"} | {"dense": spec.dense}
            init = spec.init
            life = (spec.admit_after, spec.expire_batches, spec.expire_s)
            super()._declare(
                spec.id,
                spec.dim,
                _OPTIMIZERS[o.kind],
                options,
                _INITS[init.kind],
                init.a,
                init.b,
                life,
                spec.candidates_id,
            )
            self._specs[spec.id] = spec
            return True

    def specs(self) -> list[TableSpec]:
        """Return the declared tables, in the order of their declaration."""
        with self._specs_lock:
            return list(self._specs.values())

    def declared(self) -> tuple[int, list[TableSpec]]:
        """Return ``n_tables()`` (candidates count as well) and the specs, of one moment."""
        with self._specs_lock:
            return self.n_tables(), list(self._specs.values())

    def tables(self) -> list[int]:
        """Return the ids of all tables that a partition's contents lie in: of the specs, and of the candidates of late
        admission."""
        return [
            table
            for spec in self.specs()
            for table in ((spec.id, spec.candidates_id) if spec.admit_after else (spec.id,))
        ]

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
        """Apply the gradients of ``[lo, hi)``. Per addressed partition (``partitions``: bitmap, b"": all owned), in one
        critical section: judge fence and watermark (see ``ledger``), update rows, move fingerprint and watermark.

        ``parts``: (table, keys i64[n] unique and grouped by ascending partition, grads f32[n, dim], lr; < 0: the
        table's own; options, as ``check_options``). A table stands once. Rows of partitions that are not addressed are
        left out: a batch that is pushed again, to the partitions behind, has the rows of all. ``now_s``: the time, for
        tables that expire by it. ``step``: this push is one of several of that step, which are one optimizer step of
        the sum of their gradients (but where another step's, or none's, comes between them, or the partition changed
        hands: native/running.h); -1: of none.
        ``more``: spans (shard, lo, hi, lease, learnt) that the same optimizer step consumed besides, each behind the
        one before if it is of the same shard. A partition takes all of them or none. ``skipped``, and spans that are
        not ``learnt``: consumed, and not in the gradients.
        Malformed, or no memory for new rows (Full): ValueError, and nothing was applied, in no partition.
        """
        if partitions and parts:
            parts = [part for part in (self._addressed(part, partitions) for part in parts) if len(part[1])]
        try:
            spans = ((shard, lo, hi, lease, not skipped), *more)
            return PushResult(*super()._push(spans, partitions, list(parts), now_s, step))
        except Full as error:
            raise self._named(error) from None

    def push_at(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        parts: Sequence[object],
        memory: memoryview,
        skipped: bool,
        now_s: int,
        step: int = -1,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        """Do ``push`` to all partitions that are owned, of arrays that lie in ``memory``. ``parts``: objects as
        ``net.messages.RowsPart``. (``pull_at(parts, memory)`` is the same of ``pull``, which writes the rows there.)"""
        try:
            spans = ((shard, lo, hi, lease, not skipped), *more)
            return PushResult(*super()._push_at(spans, parts, memory, now_s, step))
        except Full as error:
            raise self._named(error) from None

    def put_absent(self, table: int, keys: NDArray[np.int64], rows: NDArray[np.float32], now_s: int = 0) -> int:
        """Make rows that are not there; how many. Full: the ceiling; some may have been made."""
        try:
            return super().put_absent(table, keys, rows, now_s)
        except Full as error:
            raise self._named(error) from None

    def _named(self, error: Full) -> Full:
        """Return the same error, with the table's name for its id."""
        text = str(error)
        for spec in self.specs():
            text = text.replace(f"table {spec.id} ", f"table {spec.name!r} ")
            text = text.replace(f"table {spec.candidates_id} ", f"table {spec.name!r} (keys not admitted yet) ")
        return Full(text)

    def _addressed(self, part: PushPart, partitions: bytes) -> PushPart:
        """Return the rows of a part whose partitions are in the bitmap; the part itself if all are."""
        table, keys, grads, *rate = part
        n = self.n_partitions
        if grads.shape[:1] != keys.shape:
            return part  # (refused below)
        _, inverse, counts = unique_route(keys, n, table, np.arange(n, dtype=np.int32), n)
        wanted = np.zeros(n, bool)
        wanted[[b for b in bitmap_partitions(partitions) if b < n]] = True
        mask = np.repeat(wanted, counts)[inverse]
        return part if mask.all() else cast(PushPart, (table, keys[mask], grads[mask], *rate))

    def marks(self, partition: int) -> bytes:
        """Return all marks of the partition, as a sealed blob."""
        return super()._marks(partition)

    def snapshot_begin(self, partition: int, since: int = -1) -> tuple[int, bytes]:
        """Begin to read the partition's pages as they are now, while it goes on changing: (generation, its marks).

        ``since``: the generation of an earlier snapshot of this partition, here and since it came here: only pages
        changed after it; -1: all. One at a time, until ``snapshot_end``.
        """
        generation, marks = super()._snapshot_begin(partition, since)
        return generation, marks

    def load_end(self, partition: int, marks: bytes) -> None:
        """Check what was loaded and own it. ValueError: it is no snapshot of this partition; then it is empty, not
        owned."""
        try:
            check_seal(marks)
        except ValueError:
            with suppress(ValueError):
                super()._load_end(partition, b"")  # forgets what was loaded
            raise
        super()._load_end(partition, marks)

    def set_limit(self, n_bytes: int, on_full: Literal["error", "evict"] = "error") -> None:
        """Set a ceiling for all memory of the store (0: none). Where new rows would need more: "error" refuses the push
        (Full), "evict" frees rows of the same table and partition that were pushed least recently, if it has a life
        cycle.
        """
        if n_bytes < 0 or on_full not in ("error", "evict"):
            raise ValueError(f"a ceiling of {n_bytes} bytes, on_full={on_full!r}: not negative, 'error' or 'evict'")
        super()._set_limit(n_bytes, on_full == "evict")

    def begin_cold(self, folder: Path) -> None:
        """Let rows go to disk, to a file without a name in ``folder``. Call it before rows are made. ``cool(target)``
        moves what was not used for longest, until the store has at most ``target`` bytes of memory. ``grow_older()``
        makes all rows in memory older by one. Raises OSError: the folder takes no file.
        """
        number = super()._begin_cold(str(folder))
        if number:
            raise OSError(number, os.strerror(number), str(folder))

    def cold_counts(self) -> ColdCounts:
        return ColdCounts(*super()._cold_counts())

    def stats(self) -> StoreStats:
        counts = super()._counts()
        names = {spec.id: spec.name for spec in self.specs()}
        rows = {names[table]: n for table, n in counts["rows"].items() if table in names}
        return StoreStats(rows, counts["bytes"], counts["pushes"], counts["pulls"])
