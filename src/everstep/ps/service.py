"""The parameter server without its sockets: one data-plane request in, one answer out.

The ps process calls ``handle`` from a thread per connection, embedded mode calls it directly. What makes a push count
is one order, kept here: the store applies it (fence, watermark, rows, per bucket), then the audit log has it, then
the worker hears of it. If the log cannot be written, nothing is answered as applied from then on: the ps is over.

Two locks make the log say what happened:

- the *gate*: pushes hold it shared, a cut holds it alone, so a cut's fingerprints are those of exactly the pushes
  logged before it;
- a stripe by shard, held from the store's push to the log's append: records of one shard stand in the log in the
  order in which they were applied (a fenced lease never stands behind the one that fenced it).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.errors import EverstepError, InternalError, PlatformError
from everstep.ids import BucketId, Incarnation, Slot
from everstep.model.placement import Placement
from everstep.monitor.records import Applied, AuditRecord, Closed, Cut, audit_header
from everstep.native import Store
from everstep.net.messages import (
    Bad,
    DataAnswer,
    DataRequest,
    Declare,
    Declared,
    Moved,
    Opened,
    OpenShard,
    Part,
    PsStats,
    Pull,
    Pulled,
    Push,
    Pushed,
    Put,
    Scan,
    Scanned,
    Stat,
    Taken,
)
from everstep.net.messages import (
    Closed as ShardClosed,
)
from everstep.storage.chain import ChainWriter

_STRIPES = 64
_ANSWER_MAX_BYTES = 1 << 30
_SCAN_MAX_BYTES = 64 << 20
CUT_EVERY_S = 5.0
"""How often the log gets a cut while pushes come: what a checker can compare in the middle of a run."""

Reply = tuple[DataAnswer, list[Any]]
"""The answer, and the buffers (ndarrays) of its body in order."""


class _Gate:
    """Many holders, or one alone. A waiting exclusive holder keeps new ones out, so it never starves."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class PsService:
    """One ps: its store, its audit log and its view of the placement. Thread-safe.

    ``buckets``: owned from the start; empty: those of the first placement. ``audit``: path of the log, made when the
    buckets are known. ``on_failure``: called once, from any thread, with one line, when this ps can no longer keep its
    promises (log not writable, out of memory in the middle of a push); every later request is answered Bad.
    """

    def __init__(
        self,
        store: Store,
        slot: Slot,
        incarnation: Incarnation,
        buckets: Sequence[int],
        audit: Path,
        *,
        cut_every_s: float = CUT_EVERY_S,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.store = store
        self.slot = slot
        self.incarnation = incarnation
        self.failure = ""
        self.on_failure = on_failure
        self._audit_path = audit
        self._cut_every_s = cut_every_s
        self._gate = _Gate()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._lock = threading.Lock()  # of what follows
        self._log: ChainWriter | None = None
        self._finished = False
        self._placement: Placement | None = None
        self._initialised: set[int] = set()
        self._busy_s = 0.0
        self._cut_due_at = time.monotonic() + cut_every_s
        self._owned: NDArray[np.int32] = np.zeros(0, np.int32)
        if buckets:
            self._own([BucketId(b) for b in buckets])

    @classmethod
    def create(
        cls,
        *,
        n_buckets: int,
        seed: int,
        slot: Slot,
        incarnation: Incarnation,
        run_dir: Path,
        buckets: Sequence[int] = (),
        cut_every_s: float = CUT_EVERY_S,
        on_failure: Callable[[str], None] | None = None,
    ) -> PsService:
        """A service with an empty store, logging to ``RUN_DIR/audit/ps-SLOT.INCARNATION.log``."""
        audit = run_dir / "audit" / f"ps-{slot}.{incarnation}.log"
        store = Store(n_buckets, seed)
        return cls(store, slot, incarnation, buckets, audit, cut_every_s=cut_every_s, on_failure=on_failure)

    def __repr__(self) -> str:
        state = "failed" if self.failure else "finished" if self._finished else "up"
        return f"<PsService ps:{self.slot} #{self.incarnation} {state} v{self.version} {self.store!r}>"

    @property
    def version(self) -> int:
        """Of the placement in force here; 0 before the first."""
        placement = self._placement
        return placement.version if placement is not None else 0

    # ------------------------------------------------------------ what the master says

    def set_placement(self, placement: Placement) -> bool:
        """Take a newer map. False: it has another incarnation in this slot: this process was replaced.

        Raises InternalError when it gives this ps buckets whose rows it does not have, PlatformError when the audit
        log cannot be made.
        """
        for place in placement.servers:
            if place.slot == self.slot and place.incarnation > self.incarnation:
                return False
        if placement.buckets != self.store.n_buckets:
            raise InternalError(f"a placement of {placement.buckets} buckets for a store of {self.store.n_buckets}")
        with self._gate.exclusive():
            if placement.version <= self.version:
                return True
            mine = placement.owned_by(self.slot)
            if self._log is None:
                if mine:
                    self._own(mine)
            elif lacking := sorted(set(mine) - set(self._owned.tolist())):
                raise InternalError(
                    f"placement {placement.version} gives ps:{self.slot} bucket {lacking[0]}, not its own"
                )
            self._placement = placement
        return True

    def release(self, shards: Sequence[int]) -> None:
        """Forget these shards' watermarks, refuse them for ever. Harmless when repeated."""
        self.store.release(list(shards))

    def _own(self, buckets: Sequence[BucketId]) -> None:
        header = audit_header(self.slot, self.incarnation, self.store.n_buckets, [int(b) for b in buckets])
        self._log = ChainWriter(self._audit_path, header)
        self.store.own(buckets)
        self._owned = np.array(sorted(buckets), np.int32)

    # ------------------------------------------------------------ the audit log

    def cut(self) -> None:
        """Log the fingerprints of all owned buckets, consistent with the pushes logged before. PlatformError: disk."""
        with self._gate.exclusive():
            if self._log is not None and not self._finished and not self.failure:
                self._log_cut(Cut)

    def finish(self) -> None:
        """Log the final cut and close the log durably; later pushes are Bad. May be called twice.

        Raises PlatformError when the log cannot be written, or could not be before.
        """
        with self._gate.exclusive():
            if self._finished:
                return
            self._finished = True
            if self._log is None:
                return
            if self.failure:
                raise PlatformError(self.failure)
            self._log_cut(Closed)
            self._log.close()

    def _log_cut(self, kind: type[Cut] | type[Closed]) -> None:
        prints = self.store.fingerprints()[self._owned].astype("<u8").tobytes()
        self._append(lambda seq, at: kind(seq, prints, at))

    def _append(self, record: Callable[[int, float], AuditRecord]) -> None:
        assert self._log is not None
        with self._lock:
            try:
                self._log.append(msgspec.msgpack.encode(record(self._log.next_seq, time.time())))
            except EverstepError as error:
                failure = str(error)
            else:
                return
        self._fail(failure)
        raise PlatformError(failure)

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.failure:
                return
            self.failure = why
        if self.on_failure is not None:
            self.on_failure(why)

    # ------------------------------------------------------------ requests

    def handle(self, request: DataRequest, body: memoryview, arena: memoryview | None) -> Reply:
        """Answer one request. ``body``: what came behind its header; ``arena``: the connection's shared memory.

        Arrays are used in place: neither may change before this returns. Nothing of the answer refers to them.
        """
        if self.failure:
            return Bad(self.failure), []
        began = time.perf_counter()
        try:
            return self._answer(request, body, arena)
        except KeyError as error:
            return Bad(str(error.args[0]) if error.args else "unknown key"), []
        except (ValueError, TypeError, EverstepError) as error:
            return Bad(str(error).partition("\n")[0]), []
        except MemoryError:
            return Bad("this parameter server is out of memory"), []
        finally:
            spent = time.perf_counter() - began
            with self._lock:
                self._busy_s += spent

    def _answer(self, request: DataRequest, body: memoryview, arena: memoryview | None) -> Reply:
        match request:
            case Push():
                return self._push(request, body, arena), []
            case Pull():
                return self._pull(request, body, arena)
            case OpenShard():
                return self._open(request), []
            case Declare():
                return self._declare(request), []
            case Put():
                return self._put(request, body, arena), []
            case Scan():
                return self._scan(request)
            case Stat():
                return self._stat(), []
            case _:
                return Bad(f"a parameter server has no answer to {type(request).__name__}"), []

    def _declare(self, request: Declare) -> Declared:
        for spec in request.tables:
            self.store.declare(spec)
        with self._lock:
            return Declared(self.incarnation, tuple(spec.id in self._initialised for spec in request.tables))

    def _open(self, request: OpenShard) -> Opened | ShardClosed | Moved:
        if self._log is None:
            return Moved(self.version)  # no buckets yet: the worker's map is from the future
        opened = self.store.open(request.shard, request.start, request.lease)
        if opened is None:
            return ShardClosed("a later lease has this shard, or it is over")
        buckets, marks = opened
        return Opened(self.incarnation, buckets.astype("<i4").tobytes(), marks.astype("<i8").tobytes())

    def _pull(self, request: Pull, body: memoryview, arena: memoryview | None) -> Reply:
        if request.version != self.version:
            return Moved(self.version), []
        source = _memory(body, arena, request.shm)
        work = [(part, _keys(part, source), self.store.dim(part.table)) for part in request.parts]
        if request.shm:
            for part, keys, dim in work:
                self.store.pull(part.table, keys, _rows(part, source, dim))
            return Pulled(), []
        if sum(len(keys) * dim for _, keys, dim in work) * 4 > _ANSWER_MAX_BYTES:
            raise ValueError(f"the rows of one pull are over {_ANSWER_MAX_BYTES} bytes: ask for fewer at a time")
        buffers: list[Any] = []
        for part, keys, dim in work:
            out: NDArray[np.float32] = np.empty((len(keys), dim), np.float32)
            self.store.pull(part.table, keys, out)
            buffers.append(out)
        return Pulled(), buffers

    def _push(self, request: Push, body: memoryview, arena: memoryview | None) -> DataAnswer:
        token = request.token
        if token.ps_incarnation != self.incarnation:
            return Pushed(0, 0, fenced=True)
        if request.version != self.version:
            return Moved(self.version)
        source = _memory(body, arena, request.shm)
        parts = [
            (part.table, _keys(part, source), _rows(part, source, self.store.dim(part.table)), part.lr)
            for part in request.parts
        ]
        stripe = self._stripes[hash(token.shard) % _STRIPES]
        with self._gate.shared(), stripe:
            if self._finished or self._log is None:
                return Bad("this parameter server has finished" if self._finished else "no buckets are placed here yet")
            if self.failure:
                return Bad(self.failure)
            try:
                done = self.store.push(
                    token.shard, token.lo, token.hi, token.lease, request.buckets, parts, request.skipped
                )
            except (ValueError, KeyError, TypeError):
                raise  # refused whole, before anything was applied
            except BaseException as error:
                # Some buckets may have it, the log does not: nothing of this ps can be vouched for any more.
                self._fail(f"ps:{self.slot} failed inside a push: {type(error).__name__}: {error}")
                return Bad(self.failure)
            if done.applied:
                self._append(
                    lambda seq, at: Applied(
                        seq,
                        token.shard,
                        token.lo,
                        token.hi,
                        token.lease,
                        token.worker,
                        token.worker_incarnation,
                        done.applied,
                        done.buckets,
                        request.skipped,
                        at,
                    )
                )
        self._cut_if_due()
        if done.moved:
            return Moved(self.version)  # what was applied answers "repeat" when it is sent again
        return Pushed(done.applied, done.repeats, done.gap, done.fenced, done.nonfinite)

    def _cut_if_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._cut_due_at:
                return
            self._cut_due_at = now + self._cut_every_s
        self.cut()

    def _put(self, request: Put, body: memoryview, arena: memoryview | None) -> DataAnswer:
        if request.version != self.version:
            return Moved(self.version)
        source = _memory(body, arena, request.shm)
        part = request.part
        self.store.put_absent(part.table, _keys(part, source), _rows(part, source, self.store.dim(part.table)))
        if request.last:
            with self._lock:
                self._initialised.add(part.table)
        return Taken()

    def _scan(self, request: Scan) -> Reply:
        width = 8 + 4 * (self.store.dim(request.table) + self.store.state_floats(request.table))
        limit = min(request.limit, max(1, _SCAN_MAX_BYTES // width))
        keys, values, state, next_slot = self.store.scan(
            request.table, request.bucket, request.slot, limit, request.state
        )
        return Scanned(len(keys), next_slot), [keys, values] if state is None else [keys, values, state]

    def _stat(self) -> PsStats:
        stats = self.store.stats()
        with self._lock:
            return PsStats(stats.rows, stats.bytes, stats.pushes, stats.pulls, self._busy_s)


# ---------------------------------------------------------------- arrays of a request


def _memory(body: memoryview, arena: memoryview | None, shm: bool) -> memoryview:
    if not shm:
        return body
    if arena is None:
        raise ValueError("the request points into shared memory, but none is attached")
    return arena


def _array(source: memoryview, at: int, count: int, dtype: type[Any], what: str) -> NDArray[Any]:
    """``count`` items at byte ``at``, in place. ValueError if they do not lie within ``source``, aligned."""
    size = np.dtype(dtype).itemsize
    if at < 0 or count < 0 or at + count * size > source.nbytes:
        raise ValueError(f"{what} at {at} do not fit into the {source.nbytes} bytes that came with the request")
    if count == 0:
        return np.empty(0, dtype)
    found = np.frombuffer(source, dtype, count, at)
    if not found.flags.aligned:
        raise ValueError(f"{what} at {at} are not aligned")
    return found


def _keys(part: Part, source: memoryview) -> NDArray[np.int64]:
    return _array(source, part.keys_at, part.n, np.int64, "keys")


def _rows(part: Part, source: memoryview, dim: int) -> NDArray[np.float32]:
    return _array(source, part.rows_at, part.n * dim, np.float32, "rows").reshape(part.n, dim)
