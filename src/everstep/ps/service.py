"""Is the parameter server without its sockets: one data-plane request in, one answer out.

The ps process calls ``handle`` from a thread per connection, embedded mode calls it directly. What makes a push count
is one order, kept here: the store applies it (fence, watermark, rows, per partition), then the audit log has it, then
the worker hears of it. If the log cannot be written, nothing is answered as applied from then on: the ps is over.

Two locks make the log say what happened:

- the *gate*: pushes hold it shared; a cut holds it alone, so a cut's fingerprints are those of exactly the pushes
  logged before it; and so does whatever changes which partitions are served (see ``mirrors``);
- a stripe by shard, held from the store's push to the log's append: records of one shard stand in the log in the
  order in which they were applied (a fenced lease never stands behind the one that fenced it).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep import faultpoints
from everstep.errors import EverstepError, InternalError, PlatformError, StorageError
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.placement import Placement
from everstep.model.reasons import Arrival
from everstep.model.shard import Span, Token
from everstep.monitor.records import (
    AcquiredRecord,
    Applied,
    AuditRecord,
    CutRecord,
    FinalCutRecord,
    ReleasedRecord,
    audit_header,
)
from everstep.monitor.slowdown import Slowdown
from everstep.native import Full, PushResult, Recovering, Store, _native, bitmap_partitions, unique_route
from everstep.net.log import LineLimit
from everstep.net.messages import (
    LEASE_CLOSED,
    OPEN_TOGETHER,
    AllOpened,
    Append,
    Bad,
    DataAnswer,
    DataRequest,
    Declare,
    Declared,
    FetchContents,
    FetchLog,
    LogTaken,
    Moved,
    Opened,
    OpenShard,
    OpenShards,
    Peek,
    Peeked,
    PsStats,
    Pull,
    Pulled,
    Push,
    Pushed,
    Put,
    RowsPart,
    Scan,
    Scanned,
    ShardToOpen,
    Stat,
    TransferOwnership,
)
from everstep.net.messages import (
    LeaseClosed as ShardClosed,
)
from everstep.net.retry import backoff
from everstep.protect import machine
from everstep.protect.machine import MirrorAction
from everstep.protect.snapshots import read_marks
from everstep.ps.cold_controller import ColdTierController
from everstep.ps.memory_gate import MemoryGate
from everstep.ps.meter import Meter
from everstep.ps.mirror_server import MirrorServer
from everstep.ps.mirrored_pushes import NOTHING, PushEnd
from everstep.ps.ps_load import PartitionLoad
from everstep.ps.rebuild_pacer import RebuildPacer
from everstep.ps.row_sampler import RowSampler
from everstep.ps.rw_lock import RwLock
from everstep.storage.chain import ChainWriter

logger = logging.getLogger("everstep.ps")

_STRIPES = 64
_ANSWER_MAX_BYTES = 1 << 30
_SCAN_MAX_BYTES = 64 << 20
_ROWS_S = 0.02  # between two looks for rows that were asked for out of turn
_REMEMBERED = 4096  # released shards
_SINCE_S = 0.25  # a pull waits so long for pushes before it; then it is asked again, so that what is behind it gets in
WAIT_S = 5.0
"""How long a request waits for a partition that is on its way here, or for mirrors, before it is answered Moved."""

CUT_EVERY_S = 5.0
"""How often the log gets a cut while pushes come: what a checker can compare in the middle of a run."""

Reply = tuple[DataAnswer, list[Any]]
"""The answer, and the buffers (ndarrays) of its body in order."""


class PsService:
    """Is one ps: its store, its audit log and its view of the placement. Thread-safe.

    ``audit``: path of the log, made with the first placement. ``acked``: a push is answered only when all mirrors of
    the partitions that it changed have it; else, ``lag_s`` above 0: mirrors may be so far behind. ``rebuild_share``: of
    the time that contents for rebuilds, mirrors and moves take while requests come. ``on_failure``: called once, from
    any thread, with one line, when this ps can no longer keep its promises (log not writable, out of memory in the
    middle of a push); every later request is answered Bad. ``load(partition, checkpoint)``: read that snapshot into the
    store, own it; raises EverstepError. ``on_report()``: there is more to tell the master
    (``mirrors.machine.complete``, ``ready``, ``inconsistent``). ``on_released(partition)``.
    """

    def __init__(
        self,
        store: Store,
        slot: Slot,
        incarnation: Incarnation,
        audit: Path,
        *,
        acked: bool = True,
        lag_s: float = 0.0,
        rebuild_share: float = 1.0,
        cut_every_s: float = CUT_EVERY_S,
        wait_s: float = WAIT_S,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.store = store
        self.slot = slot
        self.incarnation = incarnation
        self.acked = acked
        self.wait_s = wait_s
        self.failure = ""
        self.on_failure = on_failure
        self.memory_gate: MemoryGate | None = None  # None: pushes never wait for room
        self.load: Callable[[PartitionId, int], None] | None = None
        self.on_load_failed: Callable[[int, PartitionId, int, str], None] | None = None
        self.on_report: Callable[[], None] | None = None
        self.on_released: Callable[[PartitionId], None] | None = None
        self._audit_path = audit
        self._cut_every_s = cut_every_s
        self._receiver = _native.ReplicationReceiver(store)
        self._gate = RwLock(self._receiver)
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._pushed = threading.Condition()  # a push was applied
        self._lock = threading.Lock()  # of what follows
        self._log: ChainWriter | None = None
        self._finished = False
        self._cut_due_at = time.monotonic() + cut_every_s
        self._owned: NDArray[np.int32] = np.zeros(0, np.int32)  # as the log says
        self._released: deque[int] = deque(maxlen=_REMEMBERED)
        self._limit = LineLimit()
        self.cold: ColdTierController | None = None  # None: all rows are in memory
        self.load_of = PartitionLoad(store.n_partitions)
        self.rows = RowSampler(store)
        self.meter = Meter()
        self.slowdown = Slowdown()
        self.mirrors = MirrorServer(store, slot, incarnation, self._gate, self._receiver, self._carry_out, self._fail)
        self.mirrors.pacer = RebuildPacer(rebuild_share, lambda: self.meter.requests)
        if lag_s and not acked:
            self.mirrors.may_lag(lag_s, lambda: self.meter.requests)

    @classmethod
    def create(
        cls,
        *,
        n_partitions: int,
        seed: int,
        slot: Slot,
        incarnation: Incarnation,
        run_dir: Path,
        acked: bool = True,
        lag_s: float = 0.0,
        rebuild_share: float = 1.0,
        cut_every_s: float = CUT_EVERY_S,
        wait_s: float = WAIT_S,
        on_failure: Callable[[str], None] | None = None,
    ) -> PsService:
        """Return a service with an empty store, logging to ``RUN_DIR/audit/ps-SLOT.INCARNATION.log``."""
        audit = run_dir / "audit" / f"ps-{slot}.{incarnation}.log"
        store = Store(n_partitions, seed)
        return cls(
            store,
            slot,
            incarnation,
            audit,
            acked=acked,
            lag_s=lag_s,
            rebuild_share=rebuild_share,
            cut_every_s=cut_every_s,
            wait_s=wait_s,
            on_failure=on_failure,
        )

    def limit(self, n_bytes: int, on_full: Literal["error", "evict"], cold_dir: str = "") -> None:
        """Give rows so many bytes of memory; 0: any number. ``cold_dir``: what does not fit goes to disk there. Raises
        PlatformError: it takes no file."""
        self.store.set_limit(n_bytes, on_full)
        if cold_dir:
            self.cold = ColdTierController(self.store, Path(cold_dir), n_bytes)

    def __repr__(self) -> str:
        state = "failed" if self.failure else "finished" if self._finished else "up"
        return f"<PsService ps:{self.slot} #{self.incarnation} {state} v{self.version} {self.store!r}>"

    @property
    def version(self) -> int:
        """Return the version of the placement in force here; 0 before the first."""
        return self.mirrors.machine.version

    @property
    def route(self) -> int:
        """Return the version of its routing: what pulls and pushes must have been routed by; 0 before the first."""
        placement = self.mirrors.machine.placement
        return placement.route if placement is not None else 0

    # ------------------------------------------------------------ what the master says

    def set_placement(self, placement: Placement) -> bool:
        """Take a newer map. False: it has another incarnation in this slot: this process was replaced.

        Partitions that it gives to this ps are got in the background where that takes time; requests for them wait.
        Raises PlatformError when the audit log cannot be written.
        """
        for place in placement.servers:
            if place.slot == self.slot and place.incarnation > self.incarnation:
                return False
        if placement.partitions != self.store.n_partitions:
            raise InternalError(
                f"a placement of {placement.partitions} partitions for a store of {self.store.n_partitions}"
            )
        self.mirrors.place(placement)
        return True

    def release(self, shards: Sequence[int]) -> None:
        """Forget these shards' watermarks, refuse them for ever. Harmless when repeated."""
        with self._gate.shared():
            with self._lock:
                self._released.extend(shards)
            # A partition that is being rebuilt must not change before its mirrors hear of its changes.
            if not self.mirrors.machine.unheard:
                self.store.release(list(shards))

    def _carry_out(self, actions: list[MirrorAction]) -> None:
        """Do what the machine wants done; the gate is held alone."""
        new = [a.partition for a in actions if isinstance(a, machine.Acquired) and a.how is Arrival.NEW]
        if self._log is None and self.mirrors.machine.placement is not None:
            header = audit_header(self.slot, self.incarnation, self.store.n_partitions, [int(b) for b in new])
            self._log = ChainWriter(self._audit_path, header)
            self._owned = np.array(sorted(new), np.int32)
        for action in actions:
            match action:
                case machine.Acquired(partition=partition, how=how):
                    if partition not in self._owned:
                        self._log_acquired(partition, how)
                        self._owned = np.array(sorted([*self._owned.tolist(), partition]), np.int32)
                case machine.Released(partition=partition, seq=partition_seq):
                    self._log_released(partition, partition_seq)
                    self._owned = self._owned[self._owned != partition]
                    if self.on_released is not None:
                        self.on_released(partition)
                case machine.LoadSnapshot(partition=partition, checkpoint=checkpoint):
                    args = (partition, checkpoint)
                    threading.Thread(target=self._load, args=args, name="everstep-load", daemon=True).start()
                case machine.ReportProgress():
                    if self.on_report is not None:
                        self.on_report()
                case machine.Stuck(why=why) | machine.MirrorDiscarded(why=why):
                    logger.warning("%s", why)
        came = any(isinstance(a, machine.Acquired) and a.how is not Arrival.NEW for a in actions)
        if came and self.mirrors.lag is not None:
            self.mirrors.lag.pushes.came()
        if came and self._released and not self.mirrors.machine.unheard:
            self.store.release(list(self._released))  # what came here may not have heard of them

    def _log_acquired(self, partition: PartitionId, how: Arrival) -> None:
        read = read_marks(self.store.marks(partition))
        shards, version = np.array(read.watermarks, "<i8").tobytes(), self.version
        self._append(
            lambda seq, at: AcquiredRecord(seq, partition, how, read.seq, shards, read.fingerprint, at, version)
        )

    def _log_released(self, partition: PartitionId, partition_seq: int) -> None:
        self._append(lambda seq, at: ReleasedRecord(seq, partition, partition_seq, at))

    def _load(self, partition: PartitionId, checkpoint: int) -> None:
        """Load one snapshot, in a thread of its own: it is tried again while its place cannot be read and it is of any
        use."""
        for wait_s in backoff(0.2, 5.0):
            time.sleep(wait_s)
            if self.failure or self._finished:
                return
            with self.mirrors.lock:
                wanted = self.mirrors.machine.awaits_snapshot(partition, checkpoint)
            if not wanted:
                with self.mirrors.transition() as m:
                    m.loaded(partition, checkpoint, there=False)
                return
            try:
                if self.load is None:
                    raise InternalError(f"partition {partition} is to be loaded, but nothing says from where")
                self.load(partition, checkpoint)
            except StorageError as error:
                logger.warning(
                    "partition %s of checkpoint %s cannot be read, trying again: %s", partition, checkpoint, error
                )
                continue
            except Exception as error:  # also ours: the master decides who tries it next, if anybody
                if not isinstance(error, EverstepError):
                    logger.exception("partition %s of checkpoint %s", partition, checkpoint)
                text = str(error) if isinstance(error, EverstepError) else f"{type(error).__name__}: {error}"
                self._not_loaded(partition, checkpoint, text)
                return
            with self.mirrors.transition() as m:
                m.loaded(partition, checkpoint)
            return

    def _not_loaded(self, partition: PartitionId, checkpoint: int, error: str) -> None:
        logger.error("partition %s of checkpoint %s cannot be loaded: %s", partition, checkpoint, error)
        with self.mirrors.transition() as m:
            version = m.version
            m.loaded(partition, checkpoint, there=False, failed=True)
        if self.on_load_failed is not None:
            self.on_load_failed(version, partition, checkpoint, error)

    def expire(self) -> None:
        """Free rows that nobody pushed for longer than their table says: a bounded piece of every partition."""
        if not any(spec.expire_batches or spec.expire_s for spec in self.store.specs()):
            return
        now_s = int(time.time())
        for partition in self._owned.tolist():
            with self._gate.shared():
                if not self._finished and self.mirrors.machine.serves(partition):
                    self.store.expire(partition, now_s)

    # ------------------------------------------------------------ the audit log

    def cut(self) -> None:
        """Log the fingerprints of all owned partitions, consistent with the pushes logged before. PlatformError:
        disk."""
        with self._gate.exclusive():
            if self._log is not None and not self._finished and not self.failure:
                self._log_cut(CutRecord)

    def finish(self) -> None:
        """Log the final cut and close the log durably; later pushes are Bad. May be called twice.

        Raises PlatformError when the log cannot be written, or could not be before.
        """
        self.mirrors.close()
        with self._gate.exclusive():
            if self._finished:
                return
            self._finished = True
            if self._log is None:
                return
            if self.failure:
                raise PlatformError(self.failure)
            self._log_cut(FinalCutRecord)
            self._log.close()

    def _log_cut(self, kind: type[CutRecord] | type[FinalCutRecord]) -> None:
        fingerprints = self.store.fingerprints()[self._owned].astype("<u8").tobytes()
        self._append(lambda seq, at: kind(seq, fingerprints, at))

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

    @property
    def follows(self) -> bool:
        """Not with fault points: a death between two steps of ``handle`` is counted in Python."""
        return not faultpoints.armed("ps", self.slot)

    def follow(self, fd: int, ahead: bytes) -> _native.ReceiverConnection:
        """Return what reads a connection of another ps, and takes what it can. ``ahead``: what was read of the first
        frame."""
        return _native.ReceiverConnection(self._receiver, fd, ahead)

    def handle(self, request: DataRequest, body: memoryview, arena: memoryview | None) -> Reply:
        """Answer one request. ``body``: what came behind its header; ``arena``: the connection's shared memory.

        Arrays are used in place: neither may change before this returns. Nothing of the answer refers to them.
        """
        if self.failure:
            return Bad(self.failure), []
        began, cpu_s = time.perf_counter(), time.thread_time() if self.slowdown.on else 0.0
        reply: Reply | None = None
        try:
            reply = self._answer(request, body, arena)
            return reply
        except KeyError as error:
            return Bad(str(error.args[0]) if error.args else "unknown key"), []
        except Full as error:
            return Bad(f"out of memory at ps:{self.slot}: {error}"), []
        except (ValueError, TypeError, EverstepError) as error:
            return Bad(str(error).partition("\n")[0]), []
        except MemoryError:
            if self.mirrors.on_memory is not None:
                self.mirrors.on_memory()
            return Bad("this parameter server is out of memory"), []
        finally:
            own_s = self.meter.own(time.perf_counter() - began)
            if self.slowdown.on and cpu_s and isinstance(request, Pull | Push):  # a slowdown on purpose
                # (of its work: a machine that is busy with other things would be made slow many times over)
                own_s += self.slowdown.pause(time.thread_time() - cpu_s)
            if reply is not None and isinstance(request, Pull | Push) and isinstance(reply[0], Pulled | Pushed):
                size = sum(part.n * (8 + 4 * self.store.dim(part.table)) for part in request.parts)
                held_s = time.perf_counter() - began
                self.load_of.served(own_s)
                self.meter.served(own_s, held_s, *((size, 0) if isinstance(request, Push) else (0, size)))

    def _answer(self, request: DataRequest, body: memoryview, arena: memoryview | None) -> Reply:
        match request:
            case Push():
                return self._push(request, body, arena), []
            case Pull():
                return self._pull(request, body, arena)
            case Append():
                return self.mirrors.append(request, body), []
            case OpenShard():
                return self._open(request), []
            case OpenShards():
                return self._open_all(request), []
            case Declare():
                return self._declare(request), []
            case Put():
                return self._put(request, body, arena), []
            case Scan():
                return self._scan(request)
            case Peek():
                return self._peek(request)
            case Stat():
                return self._stat(), []
            case FetchContents():
                return self.mirrors.fetch_contents(request), []
            case FetchLog():
                return self.mirrors.fetch_log(request)
            case TransferOwnership():
                return self.mirrors.hand_over(request), []
            case _:
                return Bad(f"a parameter server has no answer to {type(request).__name__}"), []

    def _declare(self, request: Declare) -> Declared:
        with self.mirrors.lock:  # not in the middle of a piece of a full sync
            for spec in request.tables:
                self.store.declare(spec)
        # A table counts as initialised where every partition that is to be here says so.
        initialised = set(self.store.initialised()) if self.mirrors.rebuilt and len(self._owned) else set()
        return Declared(self.incarnation, tuple(spec.id in initialised for spec in request.tables))

    def _open(self, request: OpenShard) -> Opened | ShardClosed | Moved:
        one = ShardToOpen(request.shard, request.start, request.lease)
        before = self.store.outbox_ticket()
        answer = self._open_all(OpenShards((one,), request.version))
        if isinstance(answer, Moved):
            return answer
        (marks,) = answer.watermarks
        if marks is None:
            return ShardClosed(LEASE_CLOSED)
        if request.mirrored and not self._flushed(before, request.version):
            return Moved(self.route)
        return Opened(answer.incarnation, answer.partitions, marks)

    def _open_all(self, request: OpenShards) -> AllOpened | Moved:
        if len(request.shards) > OPEN_TOGETHER:
            raise ValueError(f"{len(request.shards)} shards to open at once: at most {OPEN_TOGETHER}")
        if not self.route:
            return Moved(0)  # no placement yet: the worker's is from the future
        self.mirrors.wait_placed(request.version)
        deadline = time.monotonic() + self.wait_s
        if request.version not in (0, self.route) or not self.mirrors.wait_whole(deadline):
            return Moved(self.route)
        with self._gate.shared():
            route = self.route
            if request.version not in (0, route) or not self.mirrors.rebuilt:
                return Moved(route)
            before = self.store.outbox_ticket()
            opened = [self.store.open(one.shard, one.start, one.lease) for one in request.shards]
        marks = tuple(found[1].astype("<i8").tobytes() if found is not None else None for found in opened)
        partitions = next((found[0] for found in opened if found is not None), None)
        if partitions is None:
            return AllOpened(self.incarnation, b"", marks)
        # What is before the watermarks is not pushed again: they are as good as an acknowledgement.
        if not self._confirm(before, b"", route, deadline):
            return Moved(self.route)
        if route == self.route and not np.array_equal(partitions, self.mirrors.mine):
            # By all that is known here this cannot be: no worker could go on with such an answer.
            self._limit.warning(
                f"ps:{self.slot} has partitions {partitions.tolist()}, the map says {self.mirrors.mine.tolist()}"
            )
            return Moved(self.route)
        return AllOpened(self.incarnation, partitions.astype("<i4").tobytes(), marks)

    def _pull(self, request: Pull, body: memoryview, arena: memoryview | None) -> Reply:
        deadline = time.monotonic() + self.wait_s
        self.mirrors.wait_placed(request.version)
        while request.version == self.route:
            if request.since and not self._wait_for_pushes(request):
                break
            try:
                return self._pull_once(request, body, arena)
            except KeyError:
                # Not here yet, or not any more: then the map is newer.
                if not self._wait_changed(deadline):
                    break
            except Recovering:
                if not self._wait_for_rows(request.parts, _memory(body, arena, request.shm), deadline):
                    break
        return Moved(self.route), []

    def _wait_for_pushes(self, request: Pull | Peek) -> bool:
        """Return whether everything below ``request.since`` is applied here, soon."""
        deadline = time.monotonic() + _SINCE_S
        with self._pushed:
            while request.version == self.route:
                found = self.store.watermarks(request.shard)
                if found is not None and len(found[0]) == len(self._owned) and min(found[1]) >= request.since:
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._pushed.wait(left)
        return False

    def _wait_for_rows(self, parts: Sequence[RowsPart], source: memoryview, deadline: float) -> bool:
        """Have rows that are being rebuilt brought out of turn, and wait for the next change. False: it is too late."""
        wanted = [(part.table, _keys(part, source)) for part in parts]
        admitting = {spec.id: spec.candidates_id for spec in self.store.specs() if spec.admit_after}
        wanted += [(admitting[table], keys) for table, keys in wanted if table in admitting]
        return not self.mirrors.demand(wanted) or self._wait_changed(deadline, _ROWS_S)

    def _wait_changed(self, deadline: float, most_s: float | None = None) -> bool:
        with self.meter.waiting():
            limits = (deadline,) if most_s is None else (deadline, most_s)
            return self.mirrors.wait_changed(*limits)

    def _pull_once(self, request: Pull, body: memoryview, arena: memoryview | None) -> Reply:
        source = _memory(body, arena, request.shm)
        if self.load_of.request():
            self._count(request.parts, source)
        if request.shm:
            self.store.pull_at(request.parts, source)
            return Pulled(), []
        work = [(part, _keys(part, source), self.store.dim(part.table)) for part in request.parts]
        if sum(len(keys) * dim for _, keys, dim in work) * 4 > _ANSWER_MAX_BYTES:
            raise ValueError(f"the rows of one pull are over {_ANSWER_MAX_BYTES} bytes: ask for fewer at a time")
        buffers: list[Any] = []
        for part, keys, dim in work:
            out: NDArray[np.float32] = np.empty((len(keys), dim), np.float32)
            self.store.pull(part.table, keys, out)
            buffers.append(out)
        return Pulled(), buffers

    def _count(self, parts: Sequence[RowsPart], source: memoryview) -> None:
        with suppress(KeyError):  # (a table that nobody has declared: the request will say so)
            self.load_of.count([(p.table, _keys(p, source), 8 + 4 * self.store.dim(p.table)) for p in parts])

    def _serves(self, partitions: bytes) -> bool:
        """Return whether all addressed partitions (a bitmap; b"": all of this ps) are served."""
        if self.mirrors.rebuilt or not partitions:
            return self.mirrors.rebuilt
        return all(self.mirrors.machine.answers(PartitionId(b)) for b in bitmap_partitions(partitions))

    def _push(self, request: Push, body: memoryview, arena: memoryview | None) -> DataAnswer:
        """Apply a push, log it, have the mirrors confirm it; Moved: ask again, maybe with a newer map."""
        if request.token.ps_incarnation != self.incarnation:
            return Pushed(0, 0, fenced=True)
        deadline = time.monotonic() + self.wait_s
        self.mirrors.wait_placed(request.version)
        while request.version == self.route:
            if not self._serves(request.partitions):
                if not self._wait_changed(deadline):
                    break
                continue
            if not self._has_room(deadline) or not self._has_memory(deadline):
                break
            faultpoints.reach("before_apply")
            before = self.store.outbox_ticket()
            try:
                answer = self._apply(request, body, arena)
            except Recovering:  # nothing was applied
                if not self._wait_for_rows(request.parts, _memory(body, arena, request.shm), deadline):
                    break
                continue
            faultpoints.reach("after_apply")
            with self._pushed:
                self._pushed.notify_all()
            if answer is None:
                continue
            self._cut_if_due()
            if not isinstance(answer, Pushed) or not (answer.applied or answer.repeats):
                return answer
            if not self._confirm(before, request.partitions, request.version, deadline):
                break
            faultpoints.reach("after_ack")
            return answer
        return Moved(self.route)

    def _has_room(self, deadline: float) -> bool:
        """Wait for mirrors that are too far behind. That is not this ps' own time. False: they still are."""
        if self.mirrors.has_room():
            return True
        with self.meter.waiting():
            return self.mirrors.wait_room(deadline)

    def _has_memory(self, deadline: float) -> bool:
        """Wait for room for new rows, if somebody makes it. False: there is none yet."""
        gate = self.memory_gate
        if gate is None or gate.admits():
            return True
        with self.meter.waiting():
            return gate.room(deadline)

    def _confirm(self, before: int, partitions: bytes, version: int, deadline: float) -> bool:
        """Wait until the mirrors have what was in the outbox, if pushes wait for them. False: that can not be said."""
        if self.mirrors.lag is not None:
            return True  # what it changed is open
        if not self.acked:
            if not self.mirrors.streams.is_done(self.store.outbox_ticket()):
                self.mirrors.drain()
            return True
        return self._mirrored(before, partitions, version, deadline)

    def _mirrored(self, before: int, partitions: bytes, version: int, deadline: float) -> bool:
        """Wait until the mirrors have what was in the outbox, whatever pushes wait for. False: that can not be said."""
        after = self.store.outbox_ticket()
        if self.mirrors.streams.is_done(after):
            return True
        faultpoints.reach("before_ack")
        with self.meter.waiting():
            confirmed = self.mirrors.confirmed(before, after, deadline)
        # Who stopped serving meanwhile may have done so because a mirror refused something.
        return confirmed and version == self.route and self._serves(partitions)

    def _apply(self, request: Push, body: memoryview, arena: memoryview | None) -> DataAnswer | None:
        """None: the partitions are not served any more."""
        token = request.token
        source = _memory(body, arena, request.shm)
        if self.load_of.request():
            self._count(request.parts, source)
        stripes = {hash(shard) % _STRIPES for shard in (token.shard, *(span.shard for span in request.more))}
        with self._gate.shared(), ExitStack() as held:
            for number in sorted(stripes):
                held.enter_context(self._stripes[number])
            if self._finished:
                return Bad("this parameter server has finished")
            if self.failure:
                return Bad(self.failure)
            if request.version != self.route or not self._serves(request.partitions):
                return None
            before = self.rows.before([(p.table, _keys(p, source)) for p in request.parts]) if self.rows.due() else ()
            try:
                done = self._push_in(request, source)
            except (ValueError, KeyError, TypeError, Recovering):
                raise  # refused whole, before anything was applied
            except BaseException as error:
                # Some partitions may have it, the log does not: nothing of this ps can be vouched for any more.
                if isinstance(error, MemoryError) and self.mirrors.on_memory is not None:
                    self.mirrors.on_memory()
                self._fail(f"ps:{self.slot} failed inside a push: {type(error).__name__}: {error}")
                return Bad(self.failure)
            if before and done.applied:
                self.rows.after(before)
            if done.applied:
                first = Span(token.shard, token.lo, token.hi, token.lease, not request.skipped)
                spans = (first, *request.more)
                some = request.left_out or any(span.learnt for span in spans)
                for n, span in enumerate(spans):
                    left_out = some and not span.learnt
                    self._append(partial(self._applied, token, span, done, left_out, n > 0))
            if done.moved:
                return None  # what was applied answers "repeat" when it is sent again
            mirrored = self._mirrored_up_to(request, done)
            return Pushed(done.applied, done.repeats, done.gap, done.fenced, done.nonfinite, mirrored)

    def _mirrored_up_to(self, request: Push, done: PushResult) -> PushEnd:
        """Note a push for mirrors that may lag. Return which one they have; no partition may come here meanwhile."""
        lag = self.mirrors.lag
        if lag is None:
            return NOTHING
        if (done.applied or done.repeats) and done.gap < 0 and not done.fenced and not request.partitions:
            last = request.more[-1] if request.more else request.token
            lag.pushes.pushed((last.shard, last.hi))
        return lag.pushes.mirrored

    def _applied(
        self, token: Token, span: Span, done: PushResult, left_out: bool, joined: bool, seq: int, at: float
    ) -> Applied:
        """Return the record of one span of a push."""
        who = token.worker, token.worker_incarnation
        of = span.shard, span.lo, span.hi, span.lease
        return Applied(seq, *of, *who, done.applied, done.partitions, not span.learnt, at, left_out, joined)

    def _push_in(self, request: Push, source: memoryview) -> PushResult:
        token = request.token
        of = (token.shard, token.lo, token.hi, token.lease)
        more = [(span.shard, span.lo, span.hi, span.lease, span.learnt) for span in request.more]
        now_s = int(time.time())
        if not request.partitions:
            return self.store.push_at(*of, request.parts, source, request.skipped, now_s, request.step, more)
        parts = [
            (part.table, _keys(part, source), _rows(part, source, self.store.dim(part.table)), part.lr, part.options)
            for part in request.parts
        ]
        return self.store.push(*of, request.partitions, parts, request.skipped, now_s, request.step, more)

    def _cut_if_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._cut_due_at:
                return
            self._cut_due_at = now + self._cut_every_s
        self.cut()

    def _put(self, request: Put, body: memoryview, arena: memoryview | None) -> DataAnswer:
        deadline = time.monotonic() + self.wait_s
        source = _memory(body, arena, request.shm)
        part = request.part
        if not self.mirrors.wait_whole(deadline) or not self._has_room(deadline):
            return Moved(self.route)
        before = self.store.outbox_ticket()
        with self._gate.shared():
            if request.version != self.route or not self.mirrors.rebuilt:
                return Moved(self.route)
            rows = _rows(part, source, self.store.dim(part.table))
            self.store.put_absent(part.table, _keys(part, source), rows, int(time.time()))
            if request.replace:
                self.store.assign(part.table, _keys(part, source), rows)
            if request.last:
                self.store.initialise(part.table)
        # Nobody makes first rows once more: also where pushes do not wait for mirrors, these do.
        return LogTaken() if self._flushed(before, request.version, deadline) else Moved(self.route)

    def _flushed(self, before: int, version: int, deadline: float = 0.0) -> bool:
        """Send mirrors all that they lack, and wait until they have it. False: that can not be said."""
        if self.mirrors.lag is not None:
            self.store.flush_older(0.0, self.store.n_partitions)
        return self._mirrored(before, b"", version or self.route, deadline or time.monotonic() + self.wait_s)

    def _scan(self, request: Scan) -> Reply:
        width = 8 + 4 * (self.store.dim(request.table) + self.store.state_floats(request.table))
        limit = min(request.limit, max(1, _SCAN_MAX_BYTES // width))
        with self._gate.shared():
            if request.partition not in self._owned:
                return Moved(self.route), []  # it left, or is not here yet: its new owner goes on from the same slot
            try:
                keys, values, state, next_slot = self.store.scan(
                    request.table, request.partition, request.slot, limit, request.state
                )
            except Recovering:
                return Moved(self.route), []
        return Scanned(len(keys), next_slot), [keys, values] if state is None else [keys, values, state]

    def _peek(self, request: Peek) -> Reply:
        if len(request.keys) % 8:
            raise ValueError(f"{len(request.keys)} bytes are no keys of 8 bytes each")
        keys = np.frombuffer(request.keys, np.int64)
        width = 9 + 4 * (self.store.dim(request.table) + self.store.state_floats(request.table))
        if len(keys) * width > _ANSWER_MAX_BYTES:
            raise ValueError(f"the rows of one peek are over {_ANSWER_MAX_BYTES} bytes: ask for fewer at a time")
        if request.version == self.route and (not request.since or self._wait_for_pushes(request)):
            # No push of this shard meanwhile: rows and watermarks belong together.
            with self._gate.shared(), self._stripes[hash(request.of) % _STRIPES]:
                if request.version == self.route and self._serves(b""):
                    with suppress(KeyError, Recovering):
                        return self._peek_once(request, keys)
        return Moved(self.route), []

    def _peek_once(self, request: Peek, keys: NDArray[np.int64]) -> Reply:
        store, n, dim = self.store, self.store.n_partitions, self.store.dim(request.table)
        keys, _, counts = unique_route(keys, n, request.table, np.arange(n, dtype=np.int32), n)
        slots = np.empty(len(keys), np.int64)
        store.locate(request.table, keys, slots)
        found = store.watermarks(request.of)
        marks = dict(zip(*(each.tolist() for each in found), strict=True)) if found is not None else {}
        there = np.flatnonzero(slots >= 0)
        values = np.empty((len(there), dim), np.float32)
        states = np.empty((len(there), store.state_floats(request.table)), np.float32)
        done = np.empty(len(there), np.uint8)
        partitions = np.repeat(np.arange(n), counts)[there].tolist()
        for i, (partition, slot) in enumerate(zip(partitions, slots[there].tolist(), strict=True)):
            _, values[i], state, _ = store.scan(request.table, partition, slot, 1, True)
            if state is not None:
                states[i] = state
            done[i] = marks.get(partition, 0) >= request.until
        return Peeked(len(there)), [keys[there], values, states, done]

    def _stat(self) -> PsStats:
        stats = self.store.stats()
        return PsStats(stats.rows, stats.bytes, stats.pushes, stats.pulls, self.meter.own_s)


# ---------------------------------------------------------------- arrays of a request


def _memory(body: memoryview, arena: memoryview | None, shm: bool) -> memoryview:
    if not shm:
        return body
    if arena is None:
        raise ValueError("the request points into shared memory, but none is attached")
    return arena


def _array(source: memoryview, at: int, count: int, dtype: type[Any], what: str) -> NDArray[Any]:
    """Return ``count`` items at byte ``at``, in place. ValueError if they do not lie within ``source``, aligned."""
    size = np.dtype(dtype).itemsize
    if at < 0 or count < 0 or at + count * size > source.nbytes:
        raise ValueError(f"{what} at {at} do not fit into the {source.nbytes} bytes that came with the request")
    if count == 0:
        return np.empty(0, dtype)
    found = np.frombuffer(source, dtype, count, at)
    if not found.flags.aligned:
        raise ValueError(f"{what} at {at} are not aligned")
    return found


def _keys(part: RowsPart, source: memoryview) -> NDArray[np.int64]:
    return _array(source, part.keys_at, part.n, np.int64, "keys")


def _rows(part: RowsPart, source: memoryview, dim: int) -> NDArray[np.float32]:
    return _array(source, part.rows_at, part.n * dim, np.float32, "rows").reshape(part.n, dim)
