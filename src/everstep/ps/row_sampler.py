"""Measures one push in some: which of its keys had a row, which got one, and by how much the rows changed."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.ids import TableId
from everstep.model.graph_readings import NAME_MAX, TABLES_MAX, RowReading
from everstep.native import Recovering, Store

EVERY: Final = 256
"""One push of so many is sampled."""
_FIRST: Final = 8  # the push that is sampled first
_KEYS: Final = 512  # of one table of a push, at most
_KEPT: Final = 0.9  # of the mean lengths, with each sampled push
_FLOAT_BYTES: Final = 4
_KEY_BYTES: Final = 8


class _Before(NamedTuple):
    table: TableId
    keys: NDArray[np.int64]
    slots: NDArray[np.int64]
    values: NDArray[np.float32]


class _RowSums:
    def __init__(self) -> None:
        self.keys = self.hits = self.admitted = 0
        self.update_norm = self.row_norm = 0.0


class RowSampler:
    """Measures rows of pushes; thread-safe. Where two pushes change a row at the same time, both count as the sampled
    one's change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._left = _FIRST
        self._sums: dict[TableId, _RowSums] = {}

    def __repr__(self) -> str:
        return f"<RowSampler of {len(self._sums)} tables>"

    def due(self) -> bool:
        """A push came: return whether it is to be sampled."""
        self._left -= 1  # (a race loses a push of a sample)
        if self._left > 0:
            return False
        self._left = EVERY
        return True

    def before(self, parts: Sequence[tuple[TableId, NDArray[np.int64]]]) -> list[_Before]:
        """Look at the rows that a push will change: keys int64 [n] by table, grouped as the push has them."""
        found = []
        for table, all_keys in parts:
            keys = all_keys[:_KEYS].copy()
            if not len(keys):
                continue
            with suppress(KeyError, ValueError, Recovering):
                slots = np.empty(len(keys), np.int64)
                self._store.locate(table, keys, slots)
                found.append(_Before(table, keys, slots, self._values(table, keys)))
        return found

    def after(self, seen: Sequence[_Before]) -> None:
        """The push was applied: look at the same rows again."""
        for table, keys, slots, values in seen:
            with suppress(KeyError, ValueError, Recovering):
                now = np.empty(len(keys), np.int64)
                self._store.locate(table, keys, now)
                changed = self._values(table, keys) - values
                there = now >= 0
                self._add(table, slots >= 0, there, changed[there], values[there])

    def _values(self, table: TableId, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        out = np.empty((len(keys), self._store.dim(table)), np.float32)
        self._store.pull(table, keys, out)
        return out

    def _add(self, table: TableId, had: Any, has: Any, changed: Any, values: Any) -> None:
        update, row = (_mean_length(rows) for rows in (changed, values))
        with self._lock:
            first = table not in self._sums
            if first and len(self._sums) >= TABLES_MAX:
                return
            sums = self._sums.setdefault(table, _RowSums())
            sums.keys += len(had)
            sums.hits += int(np.count_nonzero(had))
            sums.admitted += int(np.count_nonzero(has & ~had))
            kept = 0.0 if first else _KEPT
            sums.update_norm = kept * sums.update_norm + (1 - kept) * update
            sums.row_norm = kept * sums.row_norm + (1 - kept) * row

    def readings(self) -> tuple[RowReading, ...]:
        """Return what the ps has of each table."""
        rows = self._store.stats().rows
        out = []
        for spec in self._store.specs()[:TABLES_MAX]:
            with self._lock:
                sums = self._sums.get(spec.id, _RowSums())
                floats = spec.dim + spec.optimizer.state_floats(spec.dim)
                out.append(
                    RowReading(
                        spec.name[:NAME_MAX],
                        rows=rows.get(spec.name, 0),
                        row_bytes=_KEY_BYTES + _FLOAT_BYTES * floats,
                        keys=sums.keys,
                        hits=sums.hits,
                        admitted=sums.admitted,
                        update_norm=sums.update_norm,
                        row_norm=sums.row_norm,
                        dense=spec.dense,
                    )
                )
        return tuple(out)


def _mean_length(rows: NDArray[np.float32]) -> float:
    """Return the mean Euclidean length; 0.0 where there are no rows, or one is not finite."""
    length = float(np.linalg.norm(rows.astype(np.float64), axis=1).mean()) if len(rows) else 0.0
    return length if math.isfinite(length) else 0.0
