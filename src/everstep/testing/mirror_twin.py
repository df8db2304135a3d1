"""Mirrors once more, in NumPy: slow, plain, and the oracle of native/mirror.cpp.

A page is its bytes; sums and products are those of GF(2^8) with polynomial 0x11d, byte by byte. ``code`` says what a
mirror must hold, ``solve`` what its lost members were: both from whole pages, with no stream. ``TwinMirror`` follows a
stream of blobs as the native one does (format: native/blob.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from everstep.model.table import TableSpec
from everstep.native.blob import LAST, Blob, BlobKind, BlobPart, parse
from everstep.native.row_update import update

U8 = NDArray[np.uint8]
Pages = dict[tuple[int, int], U8]
"""(table, page number) -> its bytes; what is not there is all zero."""

APPLIED, REPEAT, GAP, NOT_MEMBER = 0, 1, 2, 3
NO_LIMIT = 1 << 32


def _product(a: int, b: int) -> int:
    out = 0
    while b:
        if b & 1:
            out ^= a
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return out


MUL: U8 = np.array([[_product(a, b) for b in range(256)] for a in range(256)], np.uint8)
"""``MUL[a, b]`` is the product of two bytes."""

INVERSE: list[int] = [0] + [int(np.flatnonzero(MUL[a] == 1)[0]) for a in range(1, 256)]


def weight(row: int, member: int) -> int:
    """Return the weight of member number ``member``: 1 in row 0, 2**member in row 1."""
    out = 1
    for _ in range(member if row else 0):
        out = int(MUL[out, 2])
    return out


def add(to: Pages, pages: Mapping[tuple[int, int], U8], factor: int) -> None:
    """Add in place: ``to += factor * pages``."""
    for at, page in pages.items():
        to[at] = to.get(at, np.zeros_like(page)) ^ MUL[factor][page]


def trimmed(pages: Mapping[tuple[int, int], U8]) -> dict[tuple[int, int], bytes]:
    """Return the pages that are not all zero, for comparing."""
    return {at: page.tobytes() for at, page in sorted(pages.items()) if page.any()}


def code(members: Sequence[Mapping[tuple[int, int], U8]], row: int) -> Pages:
    """Return what the mirror of ``row`` of these members' pages holds."""
    out: Pages = {}
    for i, pages in enumerate(members):
        add(out, pages, weight(row, i))
    return out


def solve(
    mirrors: Mapping[int, Mapping[tuple[int, int], U8]],
    survivors: Mapping[int, Mapping[tuple[int, int], U8]],
    lost: Sequence[int],
) -> list[Pages]:
    """Pages of the lost members (by number), from the mirrors that are left (by row) and the surviving members."""
    rest: dict[int, Pages] = {}
    for row, pages in mirrors.items():
        rest[row] = dict(pages)
        for i, member in survivors.items():
            add(rest[row], member, weight(row, i))
    if len(lost) == 1:
        row = min(rest)
        out: Pages = {}
        add(out, rest[row], INVERSE[weight(row, lost[0])])
        return [out]
    (a, c), (b, d) = ((weight(0, i), weight(1, i)) for i in lost)
    inverse = INVERSE[int(MUL[a, d] ^ MUL[b, c])]
    first: Pages = {}
    second: Pages = {}
    add(first, rest[0], int(MUL[inverse, d]))
    add(first, rest[1], int(MUL[inverse, b]))
    add(second, rest[0], int(MUL[inverse, c]))
    add(second, rest[1], int(MUL[inverse, a]))
    return [first, second]


def _end(part: BlobPart) -> int:
    return NO_LIMIT if part.flags & LAST else part.hi


@dataclass
class _TwinSync:
    heads: int = 0
    bodies: int = 0
    dropped: bool = False

    @property
    def ended(self) -> bool:
        return self.heads == NO_LIMIT and self.bodies == NO_LIMIT


@dataclass
class _TwinMember:
    weight: int
    stage: Literal["empty", "swept", "complete"] = "empty"
    seq: int = -1
    fingerprint: int = 0
    clock: int = 0
    shards: dict[int, tuple[int, int]] = field(default_factory=dict)
    initialised: set[int] = field(default_factory=set)
    syncs: dict[int, _TwinSync] = field(default_factory=dict)
    dense: Pages = field(default_factory=dict)  # of dense tables: its own pages, not summed with those of others


class TwinMirror:
    """Is a mirror as ``Store.mirror_make(id, members, row)`` makes it; ``layouts`` as ``Store.layout(table)`` says."""

    def __init__(
        self,
        layouts: Mapping[int, tuple[int, int, int]],
        members: Sequence[int],
        row: int,
        dense: Sequence[TableSpec] = (),
    ) -> None:
        self.layouts = dict(layouts)
        self.dense: dict[int, TableSpec] = {spec.id: spec for spec in dense}
        self.members = {partition: _TwinMember(weight(row, i)) for i, partition in enumerate(members)}
        self.pages: Pages = {}

    def __repr__(self) -> str:
        return f"<TwinMirror of {list(self.members)}, {len(self.pages)} pages>"

    def state(self) -> list[tuple[int, int, bool]]:
        return [(partition, m.seq, m.stage == "complete") for partition, m in self.members.items()]

    def apply(self, data: bytes) -> int:
        """Do as ``Store.mirror_apply`` does."""
        blob = parse(data, lambda table: self.layouts[table][2])
        member = self.members.get(blob.partition)
        if member is None:
            return NOT_MEMBER
        if blob.kind is BlobKind.CHANGE:
            return self._change(member, blob)
        return self._marks(member, blob) if blob.kind is BlobKind.MARKS else self._contents(member, blob)

    def _change(self, m: _TwinMember, blob: Blob) -> int:
        if m.stage == "empty":
            for part in blob.parts:
                m.syncs.setdefault(part.table, _TwinSync()).dropped = True
            return APPLIED
        if blob.seq != m.seq + 1:
            return REPEAT if blob.seq <= m.seq else GAP
        for part in blob.parts:
            sync = _TwinSync(NO_LIMIT, NO_LIMIT)
            if m.stage == "swept":
                sync = m.syncs.setdefault(part.table, _TwinSync())
                sync.dropped |= not sync.ended
            assert part.toggled is not None and part.keys is not None
            for slot, key in zip(part.slots[part.toggled].tolist(), part.keys, strict=True):
                if slot < sync.heads:
                    self._add_head(m, part.table, slot, key)
            if part.records is not None:
                for slot, record in zip(part.slots.tolist(), part.records, strict=True):
                    if slot < sync.bodies:
                        self._add_record(m, part.table, slot, record)
            elif part.gradients is not None:
                for slot, gradient in zip(part.slots.tolist(), part.gradients, strict=True):
                    if slot < sync.bodies:
                        self._update(m, self.dense[part.table], slot, gradient, part)
        marks = blob.marks
        m.seq, m.fingerprint, m.clock = blob.seq, marks.fingerprint, marks.clock
        for shard, watermark, fence in marks.shards:
            if watermark < 0:
                m.shards.pop(shard, None)
            else:
                m.shards[shard] = (watermark, fence)
        m.initialised.update(marks.initialised)
        return APPLIED

    def _contents(self, m: _TwinMember, blob: Blob) -> int:
        if m.stage == "complete":
            return REPEAT if blob.seq <= m.seq else GAP
        (part,) = blob.parts
        heads = blob.kind is BlobKind.HEADS
        sync = m.syncs.get(part.table, _TwinSync())
        covered = sync.heads if heads else sync.bodies
        end = _end(part)
        if not end or end <= covered:  # not end: listed slots, asked for by somebody who recovers
            return REPEAT
        if part.lo > covered or (m.stage == "swept" and blob.seq != m.seq):
            return GAP
        if m.stage == "empty":
            m.stage, m.seq = "swept", blob.seq
        for i, slot in enumerate(part.slots.tolist()):
            if slot < covered:
                continue
            if part.keys is not None and heads:
                self._add_head(m, part.table, slot, part.keys[i])
            elif part.records is not None:
                self._add_record(m, part.table, slot, part.records[i])
        m.syncs[part.table] = sync
        if heads:
            sync.heads = end
        else:
            sync.bodies = end
        m.fingerprint, m.clock = blob.marks.fingerprint, blob.marks.clock
        return APPLIED

    def _marks(self, m: _TwinMember, blob: Blob) -> int:
        if m.stage == "complete":
            return REPEAT if blob.seq <= m.seq else GAP
        if m.stage == "swept" and blob.seq != m.seq:
            return GAP
        if any(not s.ended and (s.dropped or s.heads or s.bodies) for s in m.syncs.values()):
            return GAP
        marks = blob.marks
        m.stage, m.seq, m.fingerprint, m.clock = "complete", blob.seq, marks.fingerprint, marks.clock
        m.shards = {shard: (watermark, fence) for shard, watermark, fence in marks.shards}
        m.initialised = set(marks.initialised)
        m.syncs.clear()
        return APPLIED

    def _page(self, m: _TwinMember, table: int, slot: int) -> tuple[U8, int, int]:
        """Return the page of a slot, the slot's place in it, and the weight of what is added there."""
        bits, head_bytes, record_bytes = self.layouts[table]
        slots = 1 << bits
        size = head_bytes + -(-slots * record_bytes // 64) * 64
        pages, factor = (m.dense, 1) if table in self.dense else (self.pages, m.weight)
        page = pages.setdefault((table, slot >> bits), np.zeros(size, np.uint8))
        return page, slot & (slots - 1), factor

    def _add_head(self, m: _TwinMember, table: int, slot: int, key: np.int64) -> None:
        page, i, factor = self._page(m, table, slot)
        page[i >> 3] ^= MUL[factor, 1 << (i & 7)]
        at = self.layouts[table][1] - (8 << self.layouts[table][0]) + 8 * i
        page[at : at + 8] ^= MUL[factor][np.frombuffer(key.tobytes(), np.uint8)]

    def _add_record(self, m: _TwinMember, table: int, slot: int, record: U8) -> None:
        page, i, factor = self._page(m, table, slot)
        at = self.layouts[table][1] + i * len(record)
        page[at : at + len(record)] ^= MUL[factor][record]

    def _update(
        self, m: _TwinMember, spec: TableSpec, slot: int, gradient: NDArray[np.float32], part: BlobPart
    ) -> None:
        page, i, _ = self._page(m, spec.id, slot)
        record_bytes = self.layouts[spec.id][2]
        at = self.layouts[spec.id][1] + i * record_bytes
        record = page[at : at + record_bytes].view(np.float32)
        optimizer = spec.optimizer.with_options(part.options)
        update(record[: spec.dim], record[spec.dim :], gradient, optimizer, part.rate)
