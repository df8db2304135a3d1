"""Holds all tables of a script at work: declared at the ps, pulled for each batch, looked up by the modules."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.api.dense import FlatGroup
from everstep.api.nn import Lookup, hide_from_compiler
from everstep.api.rows import BatchTable, TableParameter
from everstep.api.sparse import TableInfo
from everstep.errors import InternalError, ScriptError
from everstep.ids import ShardKey, Slot, TableId
from everstep.model.table import OptimizerSpec, TableSpec
from everstep.monitor.stepclock import PULL, StepClock
from everstep.net import messages
from everstep.net.messages import Declared, Put, RowsPart, Scan, Scanned
from everstep.tables.client import PsClient, Ticket
from everstep.tables.prefetch import Predictor, ViewKey, view_key
from everstep.tables.routing import BatchRows, TableRows, check_vocabulary
from everstep.tables.stepped_rows import PeekedRows
from everstep.tables.worker_protocol import RangeWork

_PIECE_BYTES = 8 << 20  # of rows in one Put, Pull or Scan of a whole table

Found = tuple[TableSpec, NDArray[np.int64], list[int]]


class Known(NamedTuple):
    """Says where the ids of one view were found to stand. ``ids`` int64 [n]: what they were then."""

    rows: TableRows
    inverse: NDArray[np.int32]
    ids: NDArray[np.int64]

    def shows(self, ids: Tensor) -> bool:
        """Return whether these are the ids still: the script may have written into them."""
        now: NDArray[np.int64] = ids.numpy()
        return now.size == len(self.ids) and bool((now.reshape(-1) == self.ids).all())


class Fetched(NamedTuple):
    """Is one pull of a batch: what was wanted, and the rows that were added for it."""

    wanted: list[tuple[str, list[Tensor]]]
    create: bool
    dense: bool
    added: list[TableRows]


class BatchItem:
    """Is one batch and its rows. ``work`` is None for an evaluation."""

    def __init__(self, work: RangeWork | None, batch: Any, rows: BatchRows) -> None:
        self.work = work
        self.batch = batch
        self.rows = rows
        self.create = False  # it is trained with
        self.found: dict[str, TableRows] = {}  # what was pulled, by table
        self.lookups: dict[tuple[str, ViewKey], Known] = {}
        self.predicted: list[tuple[str, list[Tensor]]] = []
        self.asked: dict[str, set[ViewKey]] = {}
        self.dense: dict[TableId, TableRows] = {}
        self.ticket: Ticket | None = None
        self.fetched: Fetched | None = None  # what the ticket is for

    def __repr__(self) -> str:
        return f"<Item {self.work} {self.rows}>"

    def close(self) -> None:
        """Free the memory, as soon as no ps writes into it any more."""
        self.lookups.clear()
        self.found.clear()
        if self.ticket is None:
            self.rows.close()
        else:
            self.ticket.then(self._free)

    def _free(self) -> None:
        if self.ticket is not None and self.ticket.adrift:
            self.rows.abandon()
        else:
            self.rows.close()


class TableSet:
    """See the top of this file. Main thread, except ``prepare``, which any thread may call."""

    def __init__(self, client: PsClient) -> None:
        self.client = client
        self.batches: dict[str, BatchTable] = {}  # by table
        self.infos: dict[str, TableInfo] = {}
        self.dense: list[FlatGroup] = []
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
        self.optimizers: list[torch.optim.Optimizer] = []  # that were given to the job
        self.ahead = False  # rows are pulled ahead, and may lack the step before
        self.refuses_renorm = ""  # why lookups may not change rows here
        self.keeps_outside: Callable[[], bool] | None = None
        """Whether rows that a lookup outside of a batch has changed may be stored: no worker's step is lost by it."""
        self._declared: set[str] = set()
        self._asides: list[BatchItem] = []  # evaluation lookups, oldest first
        self._lock = threading.Lock()
        self._told = False

    def __repr__(self) -> str:
        return f"<TableSet {len(self.infos)} sparse, {len(self.dense)} dense>"

    # ------------------------------------------------------------ declaring

    def add(self, infos: Sequence[TableInfo]) -> None:
        given = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        for info in infos:
            if id(info.weight) in given:
                raise ScriptError(
                    f"job.optimizer() was given the weight of {info.spec.name!r} before job.sparse() makes it a table: "
                    "call job.sparse first"
                )
        for info in infos:
            known = self.infos.get(info.spec.name)
            if known is not None and known.spec != info.spec:
                raise ScriptError(f"table {info.spec.name!r} exists already and differs: use other module names")
            if any(i.spec.id == info.spec.id and n != info.spec.name for n, i in self.infos.items()):
                raise ScriptError(f"table {info.spec.name!r} has the same id as another table: rename the module")
            self.infos.setdefault(info.spec.name, info)
            if info.spec.name not in self.batches:
                name, read = info.spec.name, partial(self._read_again, info.spec.name)
                self.batches[name] = table = BatchTable(name, info.spec.dim, info.padding, read)
                table.source = self
                table.zero_padding = info.padding is not None and info.zero_padding
                table.vocabulary = None if info.spec.has_life_cycle else info.spec.rows
                if info.weight is not None:
                    table.adopt(info.weight)
                for module, parameter in info.tied:
                    table.tie(module, parameter)

    def _read_again(self, name: str, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read rows beside those of the batch, as they are now."""
        self.declare()
        info = self.infos[name]
        values = self.read(info.spec, keys)
        if info.padding is not None and info.zero_padding:
            values[keys == info.padding] = 0.0
        return values

    @property
    def in_batch(self) -> bool:
        """Return whether a batch to train with is in hand."""
        return self.current is not None and self.current.create

    def parameter(self, table: str) -> TableParameter:
        return self.batches[table].param

    def vocabulary(self, table: str) -> int | None:
        """Return how many rows a table has; None: any id."""
        return self.infos[table].spec.rows

    def set_optimizer(self, name: str, spec: OptimizerSpec) -> None:
        """Set the optimizer of a table, from whoever holds its parameter. Raises ScriptError once it is in use."""
        info = self.infos[name]
        if name in self._declared and info.spec.optimizer != spec:
            raise ScriptError(
                f"job.optimizer() holds the weight of table {name!r}, which is in use already: call it before job.eval "
                "and job.steps"
            )
        info.spec = msgspec.structs.replace(info.spec, optimizer=spec)

    def declare(self) -> None:
        """Make all tables exist at every ps, with their first values; harmless when repeated."""
        new = [i for i in self.infos.values() if i.spec.name not in self._declared]
        groups = [g for g in self.dense if g.spec.name not in self._declared]
        if not new and not groups:
            return
        specs = [i.spec for i in new] + [g.spec for g in groups]
        ticket = self.client.declare(specs)
        ticket.wait()
        while ticket.moved:
            ticket = self.client.declare(specs)
            ticket.wait()
        ready = np.ones(len(specs), dtype=bool)
        for _, answer, _ in ticket.answers:
            if not isinstance(answer, Declared):
                raise InternalError(f"Declare was answered with {answer!r}")
            ready &= np.array(answer.initialised, dtype=bool)
        for info, there in zip(new, ready[: len(new)], strict=True):
            if info.upload is not None:
                if not there:
                    keys = None if info.upload_keys is None else info.upload_keys.numpy()
                    self.put(info.spec, keys, info.upload.contiguous().numpy())
                info.upload = info.upload_keys = None  # the rows live on the ps now
        for group, there in zip(groups, ready[len(new) :], strict=True):
            if not there:
                self.put(group.spec, None, group.initial())
        self._declared |= {s.name for s in specs}

    @property
    def started(self) -> bool:
        """Whether tables exist at the ps: from then on values can not be loaded."""
        return bool(self._declared)

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
        router = self.client.router
        routed, inverse, counts = router.route(spec.id, ids)
        if len(routed) != len(ids):
            raise ScriptError(f"table {spec.name!r}: the same key twice among the values to load")
        batch = BatchRows(self.client.memory, router)
        (added,) = batch.add([(spec, routed, counts)], grads=False)
        added.values[inverse] = rows
        parts = dict(added.parts(len(router.slots), grads=False))
        empty = RowsPart(spec.id, 0, added.keys_at, added.values_at)

        def message(position: int, slot: Slot) -> Put | None:
            if not last and position not in parts:
                return None
            return Put(router.version, parts.get(position, empty), True, last, replace)

        ticket = self.client.everywhere(message, router)
        ticket.then(batch.close)
        ticket.wait()
        return not ticket.moved

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
            flat = _flat(views)
            keys, inverse, counts = router.route(spec.id, flat)
            all_ids.append(flat)
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
            return self._aside(table, ids)
        key = view_key(ids)
        item.asked.setdefault(table, set()).add(key)
        found = item.lookups.get((table, key))
        batch = self.batches[table]
        if found is not None and not batch.complete and found.rows is item.found.get(table) and found.shows(ids):
            self.hits += 1
            return Lookup(batch, batch.values, found.inverse, found.ids, found.rows.padding_at)
        wanted = _flat([ids])
        if batch.complete:
            check_vocabulary(self.infos[table].spec, wanted)
            padding = self.infos[table].padding
            return Lookup(batch, batch.values, wanted.astype(np.int32), wanted, -1 if padding is None else padding)
        with self._lock:
            foreseeable = self.predictor.learn(table, ids, item.batch)
        self.misses += 1
        if not foreseeable and not self._told:
            self._told = True
            print(
                f"everstep: the ids of table {table!r} are computed inside the model, so their rows can not be pulled "
                "ahead (slower): compute them in the loader's transform",
                flush=True,
            )
        self.declare()
        return self._on_demand(item, table, wanted)

    def renorms(self, table: str) -> None:
        """Lookups of this table will change its rows. Raises ScriptError where they may not."""
        if self.refuses_renorm:
            raise ScriptError(f"max_norm of table {table!r} {self.refuses_renorm}")
        self.batches[table].renorms = True

    def renorm(self, table: str, lookup: Lookup, max_norm: float, norm_type: float) -> None:
        """Scale rows of a lookup down to ``max_norm``, as torch does: each once, and in place. In a batch this is a
        change of rows by hand; outside of one it is kept where the job lets it be."""
        batch = self.batches[table]
        if self.refuses_renorm:
            raise ScriptError(f"max_norm of table {table!r} {self.refuses_renorm}")
        if lookup.table is not None and not batch.renorms and self.ahead:
            raise ScriptError(
                f"max_norm of table {table!r} is given to a function, and rows are pulled ahead: give it to "
                "nn.Embedding, or set EVERSTEP_PREFETCH=0"
            )
        at = np.unique(lookup.inverse)
        if lookup.table is not None:
            batch.used()
            batch.renormed = True
        else:
            lookup.values = lookup.values.copy()
        before = lookup.values[at]
        with torch.no_grad():
            torch.embedding_renorm_(torch.from_numpy(lookup.values), torch.from_numpy(at), max_norm, norm_type)
        if lookup.table is None and self.keeps_outside is not None and self.keeps_outside():
            at = at[(lookup.values[at] != before).any(1)]
            ids = np.empty(len(lookup.values), np.int64)
            ids[lookup.inverse] = lookup.ids
            if len(at):
                self.put(self.infos[table].spec, ids[at], lookup.values[at], replace=True)

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
                values = self.read(spec, missing, create=True)
                if (padding := self.infos[table].padding) is not None and self.infos[table].zero_padding:
                    values[missing == padding] = 0.0
                batch.extend(missing, values)
        inverse = batch.place(ids).astype(np.int32)
        padding = self.infos[table].padding
        at = int(batch.place(np.array([padding]))[0]) if padding is not None else -1
        return Lookup(batch, batch.values, inverse, ids, at)

    def _aside(self, table: str, ids: Tensor) -> Lookup:
        """Look up outside of training: read only, together with those that will follow on the same tensor."""
        self.declare()
        key, wanted_ids = (table, view_key(ids)), _flat([ids])
        for item in self._asides:
            known = item.lookups.get(key)
            if known is not None and np.array_equal(known.ids, wanted_ids):
                return Lookup(None, known.rows.values, known.inverse, known.ids, known.rows.padding_at)
        with self._lock:
            wanted = self.predictor.siblings(table, ids) or [(table, [ids])]
        if len(self._asides) >= 4:
            self._asides.pop(0).close()
        item = BatchItem(None, None, BatchRows(self.client.memory, self.client.router))
        try:
            self._fetch(item, wanted, create=False, dense=False)
        except ScriptError:
            if len(wanted) == 1:
                item.close()
                raise
            self._fetch(item, [(table, [ids])], create=False, dense=False)  # a sibling was a wrong guess
        self._arrive(item)
        self._asides.append(item)
        known = item.lookups[key]
        return Lookup(None, known.rows.values, known.inverse, known.ids, known.rows.padding_at)

    def forget_asides(self) -> None:
        while self._asides:
            self._asides.pop().close()

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
                values = self.read(self.infos[name].spec, table.keys)
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

    # ------------------------------------------------------------ whole tables

    def read(self, spec: TableSpec, keys: NDArray[np.int64], *, create: bool = False) -> NDArray[np.float32]:
        """Read the rows of ``keys`` as they are now, float32 [n, dim]; those that do not exist as they would begin.
        ``create``: to be trained with."""
        out = np.empty((len(keys), spec.dim), np.float32)
        piece = max(1, _PIECE_BYTES // (4 * spec.dim))
        for lo in range(0, len(keys), piece):
            while not self._read(spec, np.ascontiguousarray(keys[lo : lo + piece]), out[lo : lo + piece], create):
                pass  # a partition moved meanwhile: again, by the new map
        if self.fresh is not None:
            self.fresh(spec.name, keys, out)
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
            router = self.client.router
            routed, _, counts = router.route(table, keys)
            bounds = np.cumsum([0, *counts]).tolist()
            asked = [
                messages.Peek(router.version, table, routed[lo:hi].tobytes(), *self.since, of, until)
                for lo, hi in itertools.pairwise(bounds)
            ]
            ticket = self.client.everywhere(lambda position, _, asked=asked: asked[position], router)  # type: ignore[misc]
            ticket.wait()
            if not ticket.moved:
                return ticket

    def _read(self, spec: TableSpec, keys: NDArray[np.int64], out: NDArray[np.float32], create: bool) -> bool:
        router = self.client.router
        routed, inverse, counts = router.route(spec.id, keys)
        item = BatchItem(None, None, BatchRows(self.client.memory, router))
        try:
            (rows,) = item.rows.add([(spec, routed, counts)], grads=False)
            since = self.since if create or self.all_since else (ShardKey(0), 0)
            item.ticket = self.client.pull([rows], router, create=create, since=since)
            item.ticket.wait()
            out[:] = rows.values[inverse]
            return not item.ticket.moved
        finally:
            item.close()

    def scan(self, spec: TableSpec) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Read all rows that exist: keys int64 [n] ascending, values [n, dim], optimizer state [n, floats]."""
        if self.all_since:
            self._peek(spec.id, np.empty(0, np.int64), self.since[0], 0)
        state = spec.optimizer.state_floats(spec.dim)
        limit = max(1, _PIECE_BYTES // (4 * (spec.dim + state) + 8))
        keys: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        states: list[NDArray[np.float32]] = []
        for partition in range(self.client.router.n_partitions):
            slot = 0
            while slot >= 0:
                request = Scan(spec.id, partition, slot, limit, True)
                router = self.client.router
                owner = router.placement.owner[partition]
                ticket = self.client.everywhere(lambda i, ps, r=request, o=owner: r if ps == o else None, router)  # type: ignore[misc]
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
        if self.fresh is not None:
            self.fresh(spec.name, all_keys, all_values)
        return all_keys, all_values, np.concatenate(states)[order]

    def export(self, table: str) -> dict[str, Tensor]:
        """Return ``weight`` of a whole vocabulary, or ``keys`` and ``weight`` of the rows that exist."""
        if (freshen := self.batches[table].stale) is not None:
            freshen()
        self.declare()
        info = self.infos[table]
        spec = info.spec
        if spec.rows is not None:
            weight = self.read(spec, np.arange(spec.rows, dtype=np.int64))
            if info.padding is not None and info.zero_padding:
                weight[info.padding] = 0.0
            return {"weight": torch.from_numpy(weight)}
        keys, values, _ = self.scan(spec)
        return {"keys": torch.from_numpy(keys), "weight": torch.from_numpy(values)}

    def restore(self, table: str, state: dict[str, Tensor]) -> None:
        """Begin with these values. Raises ScriptError where the shape differs, or when training has begun."""
        info = self.infos[table]
        spec = info.spec
        weight = state["weight"].detach().to(torch.float32).contiguous()
        if weight.dim() != 2 or weight.shape[1] != spec.dim or (spec.rows is not None and len(weight) != spec.rows):
            raise ScriptError(
                f"table {table!r}: values of shape {tuple(weight.shape)} do not fit "
                f"({'any' if spec.rows is None else spec.rows}, {spec.dim})"
            )
        keys = state.get("keys")
        if keys is not None and (keys.dtype != torch.int64 or keys.shape != weight.shape[:1]):
            raise ScriptError(f"table {table!r}: keys must be int64 of shape ({len(weight)},)")
        if self.started:
            raise ScriptError(f"table {table!r} is in use: load values before the first batch or evaluation")
        info.upload, info.upload_keys = weight, keys
        info.zero_padding = self.batches[table].zero_padding = False


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


def _flat(views: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return the ids of all views of one table, int64 [n], contiguous."""
    arrays = [ids.numpy().reshape(-1) for ids in views]
    return np.concatenate(arrays, dtype=np.int64)  # a copy: the script may write into its own
