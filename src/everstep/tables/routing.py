"""Knows which ps owns which key, and the rows of one batch: where keys, values and gradients lie in memory.

``BatchRows`` is one region of the worker's memory (shared with the ps of the same node): for every table the
unique keys of the batch, grouped by ps and by partition, then the values pulled for them, then the gradients to push.
Pull and push name offsets into that region, so rows are never copied on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from everstep.errors import ScriptError
from everstep.ids import Slot, TableId
from everstep.model.placement import Placement
from everstep.model.table import Rate, TableSpec
from everstep.native import unique_route
from everstep.net.messages import RowsPart

_ALIGN = 64
_OWN_RATE = Rate()
_NOTHING: NDArray[np.float32] = np.empty((0, 0), np.float32)


class Memory(Protocol):
    """Is where rows live: ``everstep.net.arena.Arena``."""

    def alloc(self, n: int) -> int: ...

    def free(self, offset: int) -> None: ...

    def array(self, offset: int, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]: ...

    def lend(self, n: int) -> tuple[int, Any]:
        """Return the offset of ``n`` bytes and a buffer of them; they are free again once nothing refers to it any
        more."""
        ...


class Router:
    """Holds a placement as arrays. ``slots``: the ps in ascending order, also owners that are not up;
    ``partition_ps[b]``: position in ``slots``, int32; ``version``: of the routing."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.version = placement.route
        self.slots: tuple[Slot, ...] = tuple(sorted({p.slot for p in placement.servers} | set(placement.owner)))
        position = {slot: i for i, slot in enumerate(self.slots)}
        self.n_partitions = placement.partitions
        self.partition_ps = np.array([position[s] for s in placement.owner], dtype=np.int32)

    def __repr__(self) -> str:
        return f"<Router v{self.version} {self.n_partitions} partitions on ps {list(self.slots)}>"

    def route(self, table: TableId, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32], list[int]]:
        """Return ``(keys int64 [u], inverse int32 [n], counts per ps)``: unique ids, grouped by ps, then by
        partition."""
        keys, inverse, counts = unique_route(ids, self.n_partitions, table, self.partition_ps, len(self.slots))
        return keys, inverse, counts.tolist()


class TableRows:
    """Is one table's part of one batch. ``keys`` int64 [u], ``values`` and ``grads`` float32 [u, dim], views of
    memory."""

    __slots__ = (
        "batch",
        "counts",
        "dim",
        "grads",
        "grads_at",
        "keys",
        "keys_at",
        "order",
        "padding_at",
        "region",
        "router",
        "spec",
        "table",
        "touched",
        "u",
        "values",
        "values_at",
    )

    def __init__(self, spec: TableSpec, u: int, counts: list[int]) -> None:
        self.spec = spec
        self.table = spec.id
        self.dim = spec.dim
        self.u = u
        self.counts = counts
        self.touched = False  # grads hold this batch's gradient
        self.padding_at = -1  # index of the padding key, whose gradient is dropped
        self.keys_at = self.values_at = self.grads_at = self.region = 0
        self.router: Router
        self.order: Any = None  # of a dense group: how its parameters lie in these rows
        self.keys: NDArray[np.int64]
        self.values: NDArray[np.float32]
        self.grads: NDArray[np.float32]
        self.batch: BatchRows

    def __repr__(self) -> str:
        return f"<TableRows {self.spec.name} {self.u} x {self.dim}{' touched' if self.touched else ''}>"

    def parts(self, n_ps: int, *, grads: bool, rate: Rate = _OWN_RATE) -> list[tuple[int, RowsPart]]:
        """Return ``(position of the ps, Part)`` for every ps that owns some of the keys, offsets into memory."""
        out, done = [], 0
        rows_at = self.grads_at if grads else self.values_at
        for ps in range(n_ps):
            n = self.counts[ps]
            if n:
                part = RowsPart(self.table, n, self.keys_at + 8 * done, rows_at + 4 * self.dim * done, *rate)
                out.append((ps, part))
            done += n
        return out

    def drop_padding(self) -> None:
        """Leave the padding row, which has no gradient, out of what is pushed. Lookups are not possible afterwards."""
        at, self.padding_at = self.padding_at, -1
        if at < 0:
            return
        self.keys[at:-1] = self.keys[at + 1 :].copy()
        self.grads[at:-1] = self.grads[at + 1 :].copy()
        self.u -= 1
        self.keys, self.grads = self.keys[:-1], self.grads[:-1]
        ps = int(np.searchsorted(np.cumsum(self.counts), at, side="right"))
        self.counts = [n - (i == ps) for i, n in enumerate(self.counts)]


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


class BatchRows:
    """Holds all tables' rows of one batch in regions of memory, freed by ``close`` (harmless when repeated); gradients
    are freed when nothing refers to them any more.

    ``router``: by which the keys of the next ``add`` are grouped."""

    def __init__(self, memory: Memory, router: Router) -> None:
        self.memory = memory
        self.router = router
        self.tables: list[TableRows] = []
        self.closed = False
        self._users = 1
        self._region: list[int] = []  # of each ``add``

    def __repr__(self) -> str:
        return f"<BatchRows {len(self.tables)} tables, {sum(t.u for t in self.tables)} rows>"

    def add(
        self,
        found: Sequence[tuple[TableSpec, NDArray[np.int64], list[int]]],
        *,
        values: bool = True,
        grads: bool = True,
    ) -> list[TableRows]:
        """Make room for ``(spec, keys grouped by ps and partition, counts per ps)`` and copy the keys in."""
        added = [TableRows(spec, len(keys), counts) for spec, keys, counts in found]
        size = of_grads = 0
        for rows in added:
            rows.keys_at, size = size, size + _up(8 * rows.u)
            rows.grads_at, of_grads = of_grads, of_grads + _up(4 * rows.dim * rows.u)
        for rows in added:
            if values:
                rows.values_at = size
                size += _up(4 * rows.dim * rows.u)
        base = self.memory.alloc(size)
        if grads:  # the script may keep what it is shown of them
            grads_base, lent = self.memory.lend(max(1, of_grads))
        self._region.append(base)
        view = self.memory.array
        for rows, (_, keys, _) in zip(added, found, strict=True):
            rows.region, rows.router = base, self.router
            rows.keys_at += base
            rows.keys = view(rows.keys_at, (rows.u,), np.int64)
            rows.keys[:] = keys
            if values:
                rows.values_at += base
                rows.values = view(rows.values_at, (rows.u, rows.dim), np.float32)
            if grads:
                count = rows.u * rows.dim
                flat = np.frombuffer(lent, np.float32, count, rows.grads_at) if count else np.empty(0, np.float32)
                rows.grads = flat.reshape(rows.u, rows.dim)
                rows.grads_at += grads_base
            rows.batch = self
        self.tables += added
        return added

    def drop(self, added: Sequence[TableRows], *, adrift: bool) -> None:
        """Take back one ``add``. ``adrift``: its memory is never used again, as somebody may still write into it."""
        base = added[0].region
        self.tables = [rows for rows in self.tables if rows.region != base]
        self._region.remove(base)
        if not adrift:
            self.memory.free(base)

    def abandon(self) -> None:
        """Never use this memory again: somebody may still write into it."""
        self.closed = True
        self._region = []

    def retain(self) -> BatchRows:
        """One more ``close`` is needed to free it."""
        self._users += 1
        return self

    def close(self) -> None:
        self._users -= 1
        if self._users > 0:
            return
        self.closed = True
        for rows in self.tables:
            rows.grads = _NOTHING  # freed now, unless the script holds what it was shown
        regions, self._region = self._region, []
        for base in regions:
            self.memory.free(base)


class HeldRows:
    """The rows of pushes: freed when nobody needs them any more (``settle``), and no link reads them."""

    __slots__ = ("_flying", "_holders", "_released")

    def __init__(self, holders: Iterable[BatchRows] = ()) -> None:
        self._holders = list(holders)
        self._flying = 0  # pushes given to a link and not answered
        self._released = False

    def hold(self, more: BatchRows) -> None:
        self._holders.append(more)

    def sent(self) -> None:
        self._flying += 1

    def landed(self) -> None:
        self._flying -= 1
        self._free()

    def settle(self) -> None:
        self._released = True
        self._free()

    def _free(self) -> None:
        if self._released and not self._flying:
            for rows in self._holders:
                rows.close()


def parts_by_ps(
    tables: Iterable[TableRows], n_ps: int, *, grads: bool, rates: dict[TableId, Rate] | None = None
) -> list[list[RowsPart]]:
    """Return the parts of one message for each ps (by position)."""
    out: list[list[RowsPart]] = [[] for _ in range(n_ps)]
    for rows in tables:
        for ps, part in rows.parts(n_ps, grads=grads, rate=rates.get(rows.table, _OWN_RATE) if rates else _OWN_RATE):
            out[ps].append(part)
    return out


def check_vocabulary(spec: TableSpec, keys: NDArray[np.int64]) -> None:
    """Raise ScriptError when a key is outside the table's vocabulary ``[0, rows)``."""
    if spec.rows is None or not len(keys):
        return
    low, high = int(keys.min()), int(keys.max())
    if low < 0 or high >= spec.rows:
        bad = low if low < 0 else high
        raise OutOfVocabularyError(
            f"id {bad} is out of range for {spec.name!r}, which has rows 0..{spec.rows - 1}: make the embedding "
            "larger, or give it no vocabulary (es.nn.EmbeddingBag)"
        )


class OutOfVocabularyError(ScriptError, IndexError):
    """Says that the embedding has no row for an id."""
