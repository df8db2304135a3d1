"""Holds all tables of a script at work: declared at the ps, pulled for each batch, looked up by the modules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.api.aside_lookups import AsideLookups, flat
from everstep.api.batch_item import BatchItem, Fetched, Known
from everstep.api.nn import Lookup, hide_from_compiler
from everstep.api.renorming import Renorming
from everstep.api.rows import TableParameter
from everstep.api.sparse import TableInfo
from everstep.api.table_declarations import TableDeclarations
from everstep.api.whole_tables import Since, WholeTables
from everstep.errors import ScriptError
from everstep.ids import ShardKey
from everstep.model.table import TableSpec
from everstep.monitor.stepclock import PULL, StepClock
from everstep.tables.client import PsClient, Ticket
from everstep.tables.prefetch import Predictor, view_key
from everstep.tables.routing import BatchRows, check_vocabulary
from everstep.tables.worker_protocol import RangeWork

Found = tuple[TableSpec, NDArray[np.int64], list[int]]


class TableSet:
    """See the top of this file. Main thread, except ``prepare``, which any thread may call."""

    def __init__(self, client: PsClient) -> None:
        self.client = client
        self.whole = WholeTables(client, self._since, self._freshen)
        self.declarations = TableDeclarations(client, self.whole, self)
        self.asides = AsideLookups(
            client, self._siblings, partial(self._fetch, create=False, dense=False), self._arrive
        )
        self.renorming = Renorming(self.whole)
        self.batches = self.declarations.batches
        self.infos = self.declarations.infos
        self.dense = self.declarations.dense
        self.predictor = Predictor()
        self.current: BatchItem | None = None  # the batch in the user's hands
        self.misses = 0  # lookups that were not predicted, once predictions exist
        self.hits = 0
        self.wait_s = 0.0  # seconds the main thread waited for rows
        self.clock = StepClock()  # of the main thread
        self.before_refresh: Callable[[], None] | None = None  # what the script has changed is about to be overwritten
        self.since = (ShardKey(0), 0)  # rows to train with: as they are with all positions of this shard below that
        self.all_since = False  # so are those of an evaluation
        self.fresh: Callable[[str, NDArray[np.int64], NDArray[np.float32]], None] | None = None
        """Called with a table, keys int64 [n] and their values float32 [n, dim], which came from the ps: makes them, in
        place, what they are for this script."""
        self._lock = threading.Lock()
        self._warned = False

    def __repr__(self) -> str:
        return f"<TableSet {len(self.infos)} sparse, {len(self.dense)} dense>"

    # ------------------------------------------------------------ the tables (the modules)

    def add(self, infos: Sequence[TableInfo]) -> None:
        """Add tables (see ``TableDeclarations``)."""
        self.declarations.add(infos)

    def declare(self) -> None:
        """Make all tables exist at every ps, with their first values; harmless when repeated."""
        self.declarations.declare()

    def export(self, table: str) -> dict[str, Tensor]:
        """Return ``weight`` of a whole vocabulary, or ``keys`` and ``weight`` of the rows that exist."""
        return self.declarations.export(table)

    def restore(self, table: str, state: dict[str, Tensor]) -> None:
        """Begin with these values. Raises ScriptError where the shape differs, or when training has begun."""
        self.declarations.restore(table, state)

    def renorms(self, table: str) -> None:
        """Note that lookups of this table will change its rows. Raises ScriptError where they may not."""
        self.renorming.check(table)
        self.batches[table].renorms = True

    def renorm(self, table: str, lookup: Lookup, max_norm: float, norm_type: float) -> None:
        """Scale rows of a lookup down (see ``Renorming``)."""
        self.renorming.renorm(self.infos[table], self.batches[table], lookup, max_norm, norm_type)

    def _since(self, create: bool) -> Since | None:
        return self.since if create or self.all_since else None

    def _freshen(self, table: str, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        if self.fresh is not None:
            self.fresh(table, keys, values)

    def _siblings(self, table: str, ids: Tensor) -> list[tuple[str, list[Tensor]]]:
        with self._lock:
            return self.predictor.siblings(table, ids)

    @property
    def in_batch(self) -> bool:
        """Return whether a batch to train with is in hand."""
        return self.current is not None and self.current.create

    def parameter(self, table: str) -> TableParameter:
        return self.batches[table].param

    def vocabulary(self, table: str) -> int | None:
        """Return how many rows a table has; None: any id."""
        return self.infos[table].spec.rows

    # ------------------------------------------------------------ batches

    def prepare(self, work: RangeWork | None, batch: Any, *, create: bool, dense: bool = True) -> BatchItem:
        """Route the ids that this batch is expected to need and ask for their rows. Any thread."""
        with self._lock:
            predicted = self.predictor.predict(batch)
        item = BatchItem(work, batch, BatchRows(self.client.memory, self.client.router))
        item.create = create
        try:
            item.predicted = predicted
            self._fetch(item, predicted, create=create, dense=dense)
        except BaseException:
            item.close()
            raise
        return item

    def _fetch(self, item: BatchItem, wanted: list[tuple[str, list[Tensor]]], *, create: bool, dense: bool) -> None:
        """Make ids unique, once per table, and pull their rows in one message per ps."""
        item.rows.router = router = self.client.router
        found: list[Found] = []
        inverses: list[NDArray[np.int32]] = []
        all_ids: list[NDArray[np.int64]] = []
        for name, views in wanted:
            spec = self.infos[name].spec
            ids_of = flat(views)
            keys, inverse, counts = router.route(spec.id, ids_of)
            all_ids.append(ids_of)
            check_vocabulary(spec, keys)
            found.append((spec, keys, counts))
            inverses.append(inverse)
        groups = self.dense if dense else []
        orders = [g.order(router) for g in groups]
        found += [order.found for order in orders]
        if not found:
            item.ticket, item.fetched = Ticket(self.client, 0), None
            return
        added = item.rows.add(found, grads=create)
        for (name, views), ids_of, rows, inverse in zip(wanted, all_ids, added, inverses, strict=False):
            padding = self.infos[name].padding
            if padding is not None:
                at = np.flatnonzero(rows.keys == padding)
                rows.padding_at = int(at[0]) if len(at) else -1
            at_id = 0
            item.found[name] = rows
            for ids in views:
                n = ids.numel()
                known = Known(rows, inverse[at_id : at_id + n], ids_of[at_id : at_id + n])
                item.lookups[name, view_key(ids)] = known
                at_id += n
        for order, rows in zip(orders, added[len(wanted) :], strict=True):
            rows.order = order
            item.dense[rows.table] = rows
        item.fetched = Fetched(wanted, create, dense, added)
        since = self.since if create or self.all_since else (ShardKey(0), 0)
        item.ticket = self.client.pull(added, router, create=create, since=since)

    def take(self, item: BatchItem) -> None:
        """Wait for the rows of ``item`` and make it the current batch."""
        hide_from_compiler()
        self._arrive(item)
        for group in self.dense:
            rows = item.dense.get(group.spec.id)
            if rows is not None:
                group.take(rows)
        if item.create:
            for name, table in self.batches.items():
                found = item.found.get(name)
                if found is not None or table.in_hand:
                    table.show(found)
        self.current = item

    def _arrive(self, item: BatchItem) -> None:
        """Wait for what was fetched last; where a partition moved meanwhile, fetch it all again."""
        while True:
            ticket, fetched = item.ticket, item.fetched
            assert ticket is not None
            if not ticket.ready:
                phase = self.clock.switch(PULL)
                begin = time.perf_counter()
                ticket.wait()
                self.wait_s += time.perf_counter() - begin
                self.clock.switch(phase)
            ticket.wait()
            if fetched is None:
                return
            if not ticket.moved:
                break
            item.rows.drop(fetched.added, adrift=ticket.adrift)
            self._fetch(item, fetched.wanted, create=fetched.create, dense=fetched.dense)
        for rows in fetched.added:
            if self.fresh is not None and rows.spec.name in self.infos:
                self.fresh(rows.spec.name, rows.keys, rows.values)
            if rows.padding_at >= 0 and self.infos[rows.spec.name].zero_padding:
                rows.values[rows.padding_at] = 0.0

    def release(self, item: BatchItem) -> None:
        """The user is done with this batch: learn from what was asked for."""
        with self._lock:
            self.predictor.used(item.asked, item.predicted)
        if item.create:
            for table in self.batches.values():
                table.stash()
        if self.current is item:
            self.current = None

    # ------------------------------------------------------------ lookups (the modules)

    def lookup(self, table: str, ids: Tensor) -> Lookup:
        """Return the rows for ``ids`` in the current batch, pulled now where they were not foreseen."""
        if ids.dtype not in (torch.int64, torch.int32) or ids.device.type != "cpu":
            raise ScriptError(
                f"ids of table {table!r} must be int64 or int32 on the CPU, not {ids.dtype} on {ids.device}"
            )
        if (freshen := self.batches[table].stale) is not None:
            freshen()
        item = self.current
        if item is None:
            self.declare()
            return self.asides.lookup(table, ids)
        key = view_key(ids)
        item.asked.setdefault(table, set()).add(key)
        found = item.lookups.get((table, key))
        batch = self.batches[table]
        if found is not None and not batch.complete and found.rows is item.found.get(table) and found.shows(ids):
            self.hits += 1
            return Lookup(batch, batch.values, found.inverse, found.ids, found.rows.padding_at)
        wanted = flat([ids])
        if batch.complete:
            check_vocabulary(self.infos[table].spec, wanted)
            padding = self.infos[table].padding
            return Lookup(batch, batch.values, wanted.astype(np.int32), wanted, -1 if padding is None else padding)
        with self._lock:
            foreseeable = self.predictor.learn(table, ids, item.batch)
        self.misses += 1
        if not foreseeable and not self._warned:
            self._warned = True
            print(
                f"everstep: the ids of table {table!r} are computed inside the model, so their rows can not be pulled "
                "ahead (slower): compute them in the loader's transform",
                flush=True,
            )
        self.declare()
        return self._on_demand(item, table, wanted)

    def _on_demand(self, item: BatchItem, table: str, ids: NDArray[np.int64]) -> Lookup:
        """Pull rows that were not foreseen, beside those that the batch has already."""
        spec, batch = self.infos[table].spec, self.batches[table]
        if not batch.in_hand:
            self._fetch(item, [(table, [torch.from_numpy(ids)])], create=True, dense=False)
            self._arrive(item)
            batch.show(item.found[table])
            batch.seen()
        else:
            check_vocabulary(spec, ids)
            keys = np.unique(ids)
            missing = keys[batch.place(keys) < 0]
            if len(missing):
                values = self.whole.read(spec, missing, create=True)
                if (padding := self.infos[table].padding) is not None and self.infos[table].zero_padding:
                    values[missing == padding] = 0.0
                batch.extend(missing, values)
        inverse = batch.place(ids).astype(np.int32)
        padding = self.infos[table].padding
        at = int(batch.place(np.array([padding]))[0]) if padding is not None else -1
        return Lookup(batch, batch.values, inverse, ids, at)

    def refresh_dense(self) -> None:
        """Bring the newest dense values into the parameters (evaluation, end of a loop)."""
        self.declare()
        if not self.dense:
            return
        if self.before_refresh is not None:
            self.before_refresh()
        current = self.current
        item = self.prepare(None, None, create=False)
        try:
            self.take(item)
        finally:
            self.current = current
            item.close()

    def renew(self) -> None:
        """Show, after a step inside a batch, parameters and the rows in hand as the ps has them now."""
        self.refresh_dense()
        for name, table in self.batches.items():
            if len(table.keys):
                values = self.whole.read(self.infos[name].spec, table.keys)
                info = self.infos[name]
                if info.padding is not None and info.zero_padding:
                    values[table.keys == info.padding] = 0.0
                table.renew(values)
                table.seen()

    def over(self) -> None:
        """No batch is in hand."""
        for table in self.batches.values():
            if table.in_hand:
                table.show(None)
