"""Moves whole tables between a script and the ps, in pieces: values put, rows read, peeked at and scanned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.api.batch_item import BatchItem
from everstep.errors import InternalError, ScriptError
from everstep.ids import ShardKey, Slot, TableId
from everstep.model.table import TableSpec
from everstep.net import messages
from everstep.net.messages import Put, RowsPart, Scan, Scanned
from everstep.tables.client import PsClient, Ticket
from everstep.tables.routing import BatchRows
from everstep.tables.stepped_rows import PeekedRows

_PIECE_BYTES = 8 << 20  # of rows in one Put, Pull or Scan of a whole table

Since = tuple[ShardKey, int]
"""Rows are as they are with all positions of this shard below that."""
_ANY: Since = (ShardKey(0), 0)


class WholeTables:
    """Reads and writes rows beside those of a batch. Each call waits for the ps; none is made for each batch of mode
    ps."""

    def __init__(
        self,
        client: PsClient,
        since: Callable[[bool], Since | None],
        freshen: Callable[[str, NDArray[np.int64], NDArray[np.float32]], None],
    ) -> None:
        """Take ``since``: which rows are wanted, to train with (True) or else; None: any. ``freshen``: gets a table,
        keys int64 [n] and values float32 [n, dim] that came from the ps, and makes them, in place, what they are for
        this script."""
        self._client, self._since, self._freshen = client, since, freshen

    def __repr__(self) -> str:
        return f"<WholeTables of {self._client}>"

    def put(
        self, spec: TableSpec, keys: NDArray[np.int64] | None, values: NDArray[np.float32], *, replace: bool = False
    ) -> None:
        """Give rows their first values, in pieces; rows that exist keep theirs, unless ``replace``.

        ``keys`` None: 0, 1, 2, ..."""
        n = len(values)
        piece = max(1, _PIECE_BYTES // (4 * spec.dim))
        starts = range(0, n, piece) if n else range(1)
        for lo in starts:
            rows = values[lo : lo + piece]
            ids = np.arange(lo, lo + len(rows), dtype=np.int64) if keys is None else keys[lo : lo + len(rows)]
            while not self._put(spec, np.ascontiguousarray(ids), rows, lo + piece >= n, replace):
                pass  # a partition moved meanwhile: again, by the new map

    def _put(
        self, spec: TableSpec, ids: NDArray[np.int64], rows: NDArray[np.float32], last: bool, replace: bool
    ) -> bool:
        router = self._client.router
        routed, inverse, counts = router.route(spec.id, ids)
        if len(routed) != len(ids):
            raise ScriptError(f"table {spec.name!r}: the same key twice among the values to load")
        batch = BatchRows(self._client.memory, router)
        (added,) = batch.add([(spec, routed, counts)], grads=False)
        added.values[inverse] = rows
        parts = dict(added.parts(len(router.slots), grads=False))
        empty = RowsPart(spec.id, 0, added.keys_at, added.values_at)

        def message(position: int, slot: Slot) -> Put | None:
            if not last and position not in parts:
                return None
            return Put(router.version, parts.get(position, empty), True, last, replace)

        ticket = self._client.everywhere(message, router)
        ticket.then(batch.close)
        ticket.wait()
        return not ticket.moved

    def read(self, spec: TableSpec, keys: NDArray[np.int64], *, create: bool = False) -> NDArray[np.float32]:
        """Read the rows of ``keys`` as they are now, float32 [n, dim]; those that do not exist as they would begin.
        ``create``: to be trained with."""
        out = np.empty((len(keys), spec.dim), np.float32)
        piece = max(1, _PIECE_BYTES // (4 * spec.dim))
        for lo in range(0, len(keys), piece):
            while not self._read(spec, np.ascontiguousarray(keys[lo : lo + piece]), out[lo : lo + piece], create):
                pass  # a partition moved meanwhile: again, by the new map
        self._freshen(spec.name, keys, out)
        return out

    def peek(self, spec: TableSpec, keys: NDArray[np.int64], of: ShardKey, until: int) -> PeekedRows:
        """Read rows with their optimizer state; ``done`` where they have all positions of ``of`` below ``until``."""
        width = spec.optimizer.state_floats(spec.dim)
        piece = max(1, _PIECE_BYTES // (4 * (spec.dim + width) + 9))
        found = [
            _peeked(self._peek(spec.id, keys[lo : lo + piece], of, until), spec.dim, width)
            for lo in range(0, len(keys), piece)
        ]
        return PeekedRows(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _peek(self, table: TableId, keys: NDArray[np.int64], of: ShardKey, until: int) -> Ticket:
        """Ask every ps, also those without any of the rows."""
        while True:
            router = self._client.router
            routed, _, counts = router.route(table, keys)
            bounds = np.cumsum([0, *counts]).tolist()
            asked = [
                messages.Peek(router.version, table, routed[lo:hi].tobytes(), *(self._since(True) or _ANY), of, until)
                for lo, hi in itertools.pairwise(bounds)
            ]
            ticket = self._client.everywhere(lambda position, _, asked=asked: asked[position], router)  # type: ignore[misc]
            ticket.wait()
            if not ticket.moved:
                return ticket

    def _read(self, spec: TableSpec, keys: NDArray[np.int64], out: NDArray[np.float32], create: bool) -> bool:
        router = self._client.router
        routed, inverse, counts = router.route(spec.id, keys)
        item = BatchItem(None, None, BatchRows(self._client.memory, router))
        try:
            (rows,) = item.rows.add([(spec, routed, counts)], grads=False)
            item.ticket = self._client.pull([rows], router, create=create, since=self._since(create) or _ANY)
            item.ticket.wait()
            out[:] = rows.values[inverse]
            return not item.ticket.moved
        finally:
            item.close()

    def scan(self, spec: TableSpec) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Read all rows that exist: keys int64 [n] ascending, values [n, dim], optimizer state [n, floats]."""
        if (since := self._since(False)) is not None:
            self._peek(spec.id, np.empty(0, np.int64), since[0], 0)
        state = spec.optimizer.state_floats(spec.dim)
        limit = max(1, _PIECE_BYTES // (4 * (spec.dim + state) + 8))
        keys: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        states: list[NDArray[np.float32]] = []
        for partition in range(self._client.router.n_partitions):
            slot = 0
            while slot >= 0:
                request = Scan(spec.id, partition, slot, limit, True)
                router = self._client.router
                owner = router.placement.owner[partition]
                ticket = self._client.everywhere(lambda i, ps, r=request, o=owner: r if ps == o else None, router)  # type: ignore[misc]
                ticket.wait()
                if ticket.moved:
                    continue  # rows keep their slots when a partition moves: on from here
                ((_, answer, body),) = ticket.answers
                if not isinstance(answer, Scanned):
                    raise InternalError(f"Scan was answered with {answer!r}")
                n, at = answer.n, 8 * answer.n
                keys.append(np.frombuffer(body[:at], np.int64).copy())
                values.append(np.frombuffer(body[at : at + 4 * n * spec.dim], np.float32).reshape(n, spec.dim).copy())
                at += 4 * n * spec.dim
                states.append(np.frombuffer(body[at : at + 4 * n * state], np.float32).reshape(n, state).copy())
                slot = answer.next_slot
        all_keys = np.concatenate(keys) if keys else np.empty(0, np.int64)
        order = np.argsort(all_keys, kind="stable")
        all_keys, all_values = all_keys[order], np.concatenate(values)[order]
        self._freshen(spec.name, all_keys, all_values)
        return all_keys, all_values, np.concatenate(states)[order]


def _peeked(ticket: Ticket, dim: int, width: int) -> PeekedRows:
    columns: list[list[Any]] = [[np.empty(0, np.int64)], [np.empty((0, dim), np.float32)]]
    columns += [[np.empty((0, width), np.float32)], [np.empty(0, np.bool_)]]
    for _, answer, body in ticket.answers:
        if not isinstance(answer, messages.Peeked):
            raise InternalError(f"Peek was answered with {answer!r}")
        n = answer.n
        ends = np.cumsum([8 * n, 4 * n * dim, 4 * n * width, n]).tolist()
        columns[0].append(np.frombuffer(body[: ends[0]], np.int64))
        columns[1].append(np.frombuffer(body[ends[0] : ends[1]], np.float32).reshape(n, dim))
        columns[2].append(np.frombuffer(body[ends[1] : ends[2]], np.float32).reshape(n, width))
        columns[3].append(np.frombuffer(body[ends[2] : ends[3]], np.uint8).astype(np.bool_))
    return PeekedRows(*(np.concatenate(column) for column in columns))
