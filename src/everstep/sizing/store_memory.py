"""Computes the memory that rows take in the store of a ps: pages and indexes as ``native/table.h`` lays them out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from everstep.sizing.probe_readings import TableReading

_PAGE_BYTES: Final = 32 << 10  # a page holds as many slots, a power of two, as fit into this
_ENTRY_BYTES: Final = 16  # of the index
_FIRST: Final = 16  # entries of the first index
_TAIL_BYTES: Final = 1 << 20  # half of a mapping: the last one is not full
_OWN_MAPPING: Final = 1 << 20  # a block of so many bytes is a mapping of its own, and is given back
_LOAD: Final = 0.7  # the index is doubled above this share


def row_bytes(table: TableReading) -> float:
    """Return the bytes of one row: key, values, optimizer state and meta words, without the index."""
    return 8 + 4 * (table.dim + table.state + table.meta)


class TableBytes(NamedTuple):
    """Says what the rows of a table take. ``freed``: smaller indexes of before; the process keeps their memory, until
    pages have used it up, or an index has become so large that the one before was a mapping of its own."""

    pages: float
    indexes: float
    freed: float

    @property
    def used(self) -> float:
        return self.pages + self.indexes

    @property
    def resident(self) -> float:
        return self.pages + self.indexes + self.freed


def table_bytes(table: TableReading, rows: float, partitions: int) -> TableBytes:
    """Return the bytes of ``rows`` rows spread over ``partitions`` partitions: whole pages, and indexes that were
    doubled again and again."""
    if rows <= 0 or partitions < 1:
        return TableBytes(0.0, 0.0, 0.0)
    record = 4 * (table.dim + table.state + table.meta)
    bits = 3
    while bits < 10 and (record + 8) << (bits + 1) <= _PAGE_BYTES:
        bits += 1
    slots = 1 << bits
    page = _align(_align((slots + 7) // 8) + slots * 8) + _align(slots * record)
    used = min(float(partitions), rows)
    each = rows / used
    deviation = math.sqrt(each) if rows > partitions else 0.0  # partitions are even up to chance
    pages = used * _expected(lambda n: float(math.ceil(n / slots) * page), each, deviation)
    index = used * _expected(_index_bytes, each, deviation)
    freed = used * _expected(_freed_bytes, each, deviation)
    return TableBytes(pages, index, freed)


def ps_rows_bytes(tables: tuple[TableReading, ...], rows: list[float], partitions: int) -> float:
    """Return what the rows of all tables add to a process. ``rows``: of each table."""
    found = sum(table_bytes(table, n, partitions).resident for table, n in zip(tables, rows, strict=True))
    return found + _TAIL_BYTES if found else 0.0


def _expected(of: Callable[[float], float], mean: float, deviation: float) -> float:
    points = [mean] if not deviation else [mean + k * deviation for k in (-1.2, -0.4, 0.4, 1.2)]
    return sum(of(max(1.0, n)) for n in points) / len(points)


def _index_bytes(rows: float) -> float:
    size = _FIRST
    while rows > size * _LOAD:
        size *= 2
    return float(size * _ENTRY_BYTES)


def _freed_bytes(rows: float) -> float:
    size = _index_bytes(rows)
    return size - _FIRST * _ENTRY_BYTES if size / 2 < _OWN_MAPPING else 0.0


def _align(n: int) -> int:
    return (n + 63) & ~63
