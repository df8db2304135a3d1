"""The ps process: a ``PsService`` behind the data plane's sockets, told what to do by the master.

It outlives masters: without one it keeps serving (workers hold leases and the placement), and ends only when none
has come back for ``MASTER_GONE_S``. It ends at once, changing nothing more, when it hears that it was replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from everstep import faultpoints
from everstep.brain.events import (
    DrainAsked,
    Fenced,
    FinishJob,
    LoadFailed,
    MemberJoined,
    MemoryShort,
    MirrorsReady,
    PartitionsReady,
    PublishPlacement,
    Refused,
    ReleaseShards,
    SnapshotsWritten,
    Welcome,
)
from everstep.config.load import read_spec
from everstep.config.spec import JobSpec
from everstep.errors import EverstepError, FencedError, PlatformError
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.member import Address, Role
from everstep.model.memory_limit import MEMORY_STATUS
from everstep.model.partition_load import PartitionReading
from everstep.model.placement import Placement, PsPlace
from everstep.model.reasons import Arrival
from everstep.model.snapshot import PartitionSnapshot
from everstep.monitor.memory_room import MemoryRoom
from everstep.monitor.process_readings import ProcessReadings
from everstep.net.auth import Identity, load_secret
from everstep.net.control import ControlClient
from everstep.net.data import DataClient, DataServer
from everstep.net.messages import Answered, Beat, OrderType, SlowDown, TakeSnapshots
from everstep.net.rendezvous import SECRET_FILE, master_address, ps_socket
from everstep.net.retry import StoppedError, retry
from everstep.net.sockets import listen_tcp, listen_unix
from everstep.protect.home_files import link_home, place_opener
from everstep.protect.restore import load_partition
from everstep.protect.snapshots import SnapshotWriter
from everstep.protect.sources import SnapshotSources
from everstep.ps.memory_gate import MAKES_ROOM, MemoryGate
from everstep.ps.service import PsService
from everstep.storage.space import be_patient
from everstep.units import seconds

MASTER_GONE_S = 600.0
LEAVE_S = 30.0  # SIGTERM from outside: so long others may take to take over what is here
PIECE_BYTES = 1 << 20  # of snapshots in one message to the master
_TELL_S = 60.0
_TOGETHER_S = 0.01
_LOOK_S = 1.0

logger = logging.getLogger("everstep.ps")


class PsProcess:
    """``run`` serves until the job is over, it was asked to end, or this ps was replaced; returns when all is written.

    ``host``: address by which other nodes reach this one; used where the spec has ``bind``.
    """

    def __init__(
        self,
        run_dir: Path,
        slot: Slot,
        incarnation: Incarnation,
        node: NodeId,
        host: str = "",
        master: Callable[[], Address | None] | None = None,
    ) -> None:
        """Raises ConfigError (job.json, secret), PlatformError (sockets, audit log)."""
        self.slot, self.incarnation, self.node = slot, incarnation, node
        spec = read_spec(run_dir)
        be_patient(spec.disk_full_s)
        secret = load_secret(run_dir / SECRET_FILE)
        self._over = threading.Event()
        self._asked_to_go = False
        self._go_until = 0.0
        self._error: EverstepError | None = None
        self._process, self._room = ProcessReadings(), MemoryRoom()
        self.service = PsService.create(
            n_partitions=spec.partitions,
            seed=spec.seed,
            slot=slot,
            incarnation=incarnation,
            run_dir=run_dir,
            acked=spec.protect == "acked",
            lag_s=seconds(spec.protect_lag) if spec.protect == "lag" else 0.0,
            rebuild_share=spec.rebuild_share,
            on_failure=lambda why: self._fail(PlatformError(why)),
        )
        if spec.ps_limit_bytes:
            self.service.limit(spec.ps_limit_bytes, spec.on_full, spec.cold_dir)
        find = master if master is not None else lambda: master_address(run_dir)
        self._home = link_home(spec, find(), secret, self._identity("data"))
        places = place_opener(self._home, spec)
        self.snapshots = SnapshotWriter(self.service.store, run_dir, slot=slot, incarnation=incarnation, places=places)
        self._sources = SnapshotSources(spec, run_dir, secret.checkpoint_key, places)
        self.service.load = self._load
        self.service.on_load_failed = self._load_failed
        self._news = threading.Event()  # something is whole here that was not
        self._again = False  # all of it is to be told, not only what is new
        self.service.on_report = self._news.set
        self.service.on_released = self.snapshots.forget
        self._run_dir, self._secret, self._spec = run_dir, secret, spec
        self._bound_memory(spec)
        listeners = [listen_unix(run_dir / ps_socket(slot))]
        port = 0
        if spec.bind and host:
            listeners.append(listen_tcp(host, 0))
            port = listeners[-1].getsockname()[1]
        self.address = Address(node, ps_socket(slot), host if port else "", port)
        self.server = DataServer(
            self.service, listeners, secret, self._identity("data"), tls=spec.tls == "all" and bool(port)
        )
        self.control = ControlClient(
            address=find,
            run_dir=run_dir,
            secret=secret,
            identity=self._identity("control"),
            hello=self._hello,
            on_order=self._ordered,
            on_welcome=self._welcomed,
            on_fenced=self._fenced,
            beat=self._beat,
        )
        self.service.mirrors.start(self._connect)
        self._reporter = threading.Thread(target=self._report_for_ever, name="everstep-report", daemon=True)
        self._reporter.start()

    def _bound_memory(self, spec: JobSpec) -> None:
        """Have pushes wait for room where a policy makes some, else for a higher limit for a moment. End at once if
        there is no memory at all."""
        self.service.mirrors.on_memory = _end_for_memory
        evicts = bool(spec.ps_limit_bytes) and spec.on_full == "evict"
        if not MAKES_ROOM.isdisjoint(spec.policy.split("+")):
            self.service.memory_gate = MemoryGate(self._limit_readings) if not evicts else None
        else:
            self.service.memory_gate = MemoryGate(
                self._limit_readings, ask=lambda limit, used: self._tell(MemoryShort(limit, used))
            )

    def _limit_readings(self) -> dict[str, float]:
        store = self.service.store
        return self._room.readings(store.used_bytes(), store.stats().bytes, self._ceiling())

    def _ceiling(self) -> int:
        """Return the bytes that rows may have, where more than that is a problem: not if the rest goes to disk."""
        cold = self.service.cold
        return self._spec.ps_limit_bytes if cold is None or cold.errno else 0

    def __repr__(self) -> str:
        return f"<PsProcess ps:{self.slot} #{self.incarnation} {self.service!r} {self.control!r}>"

    # ------------------------------------------------------------ life

    def run(self) -> None:
        """Raises FencedError, PlatformError (audit log not writable, master gone for good), SecretError."""
        while not self._over.wait(_LOOK_S):
            self._expire()
            self._go_if_asked()
            if self.control.failed is not None:
                self._fail(self.control.failed)
            elif self.control.away_s > MASTER_GONE_S:
                self._fail(PlatformError(f"no master for {MASTER_GONE_S:.0f} s: ps:{self.slot} gives up"))
        try:
            # Fenced: somebody else is this ps now; the log ends where it is.
            if not isinstance(self._error, FencedError):
                self.service.finish()
        finally:
            if self.service.cold is not None:
                self.service.cold.close()
            self.snapshots.close()
            if self._home is not None:
                self._home.close()
            self.service.mirrors.close()
            self.server.close()
            self.control.close()
        if self._error is not None:
            raise self._error

    def _expire(self) -> None:
        try:
            self.service.expire()
        except EverstepError as error:
            self._fail(error)
        except (ValueError, KeyError) as error:
            logger.warning("rows could not be freed: %s", error)

    def stop(self) -> None:
        """End in order, as after Finish. Safe in a signal handler."""
        self._over.set()

    def leave(self) -> None:
        """SIGTERM: end once others have what is here; at once the second time. Safe in a signal handler."""
        if self._asked_to_go:
            self._over.set()
        self._asked_to_go = True

    def _go_if_asked(self) -> None:
        """Who ends a ps from outside (a node that is taken away, a person) is no reason to lose what it has: it asks to
        be emptied, and another one to be started; its own end comes by the master, or after ``LEAVE_S``."""
        if not self._asked_to_go:
            return
        machine = self.service.mirrors.machine
        if self._go_until:
            if time.monotonic() > self._go_until:
                logger.warning(
                    "ps:%s ends with %s partitions: nobody took them in time", self.slot, len(machine.serving)
                )
                self.stop()
        elif self.control.away_s > 0 or not (machine.serving or machine.complete):
            self.stop()
        else:
            self._go_until = time.monotonic() + LEAVE_S
            request = DrainAsked(f"ps:{self.slot}", LEAVE_S, again=True)
            self.control.submit(request, LEAVE_S).add_done_callback(self._may_go)

    def _may_go(self, answered: Future[Any]) -> None:
        refused = answered.exception() or isinstance(answered.result(), Refused)
        if refused:  # nobody else could take it: then its loss is told at once
            self.stop()

    def _fail(self, error: EverstepError) -> None:
        if self._error is None:
            self._error = error
        self._over.set()

    # ------------------------------------------------------------ the master

    def _identity(self, purpose: str) -> Identity:
        return Identity(
            purpose="control" if purpose == "control" else "data",
            role="ps",
            slot=self.slot,
            incarnation=self.incarnation,
            node=self.node,
            pid=os.getpid(),
        )

    def _hello(self) -> MemberJoined:
        mirrors = self.service.mirrors
        with mirrors.lock:
            holds = mirrors.machine.holdings()
        return MemberJoined(Role.PS, self.slot, self.incarnation, self.node, os.getpid(), self.address, (), holds)

    def _welcomed(self, answer: Answered) -> None:
        match answer:
            case Welcome(placement=Placement() as placement):
                self._place(placement)
                self._again = True
                self._news.set()
            case Refused(error=error):
                self._fail(PlatformError(f"the master refused ps:{self.slot}: {error}"))

    def _fenced(self, answer: Fenced) -> None:
        self._fail(FencedError(f"ps:{self.slot} #{self.incarnation} was replaced: {answer.reason}"))

    def _ordered(self, order: OrderType) -> None:
        match order:
            case PublishPlacement(placement=placement):
                self._place(placement)
            case ReleaseShards(shards=shards):
                self.service.release(shards)
            case TakeSnapshots(checkpoint=checkpoint, since=since, url=url):
                partitions = self.service.mirrors.machine.serving
                self.snapshots.take(checkpoint, since, url, partitions, self._snapshots_written)
            case SlowDown(factor=factor, for_s=for_s, burn=burn):
                self.service.slowdown.order(factor, for_s, burn)
            case FinishJob():
                self.stop()

    def _place(self, placement: Placement) -> None:
        try:
            if not self.service.set_placement(placement):
                self._fail(FencedError(f"ps:{self.slot} #{self.incarnation} was replaced"))
        except EverstepError as error:
            self._fail(error)

    # ------------------------------------------------------------ what the master is told

    def _report_for_ever(self) -> None:
        """Tell the master what became whole, a little later: much of it comes together. After a hello, all of it."""
        mirrors = self.service.mirrors
        announced: tuple[set[int], dict[PartitionId, tuple[int, Arrival]], set[int]] = (set(), {}, set())
        stuck: tuple[int, tuple[PartitionId, ...]] = (0, ())
        while not self._over.is_set():
            if not self._news.wait(_LOOK_S):
                with mirrors.lock:
                    before, stuck = stuck, (mirrors.machine.version, mirrors.machine.stuck)
                if stuck[1] and stuck == before:  # no other placement came
                    self._tell(PartitionsReady(*stuck, Arrival.STUCK))
                continue
            self._over.wait(_TOGETHER_S)
            self._news.clear()
            if self._again:
                self._again = False
                announced = (set(), {}, set())
            with mirrors.lock:
                complete, gained = set(mirrors.machine.complete), dict(mirrors.machine.gained)
                inconsistent = set(mirrors.machine.inconsistent)
            filled, lacking = tuple(sorted(complete - announced[0])), tuple(sorted(inconsistent - announced[2]))
            if filled or lacking:
                self._tell(MirrorsReady(filled, lacking))
            new: dict[tuple[int, Arrival], list[PartitionId]] = {}
            for partition, key in sorted(gained.items()):
                if announced[1].get(partition) != key:
                    new.setdefault(key, []).append(partition)
            for (version, how), partitions in new.items():
                self._tell(PartitionsReady(version, tuple(partitions), how))
            announced = (complete, gained, inconsistent)

    def _snapshots_written(self, written: SnapshotsWritten) -> None:
        faultpoints.reach("mid_image")
        for piece in in_pieces(written):
            self._tell(piece)

    def _load_failed(self, version: int, partition: PartitionId, checkpoint: int, error: str) -> None:
        """Until somebody has heard it: nothing else says why this partition does not come."""
        request = LoadFailed(version, partition, checkpoint, error)
        with contextlib.suppress(StoppedError):
            retry(
                lambda: self.control.call(request, _TELL_S),
                EverstepError,
                again=lambda _: True,
                first_s=0.2,
                limit_s=5.0,
                wait=self._over.wait,
            )

    def _tell(self, request: MirrorsReady | PartitionsReady | SnapshotsWritten | MemoryShort) -> None:
        """Tell the master without waiting; what is lost is said again after the next hello."""
        with contextlib.suppress(EverstepError):
            self.control.submit(request, _TELL_S)

    # ------------------------------------------------------------ other ps, snapshots

    def _connect(self, place: PsPlace) -> DataClient:
        return DataClient(
            place.address,
            secret=self._secret,
            identity=self._identity("data"),
            run_dir=self._run_dir,
            tls=self._spec.tls,
            expect=(place.slot, place.incarnation),
        )

    def _load(self, partition: PartitionId, checkpoint: int) -> None:
        place, snapshot = self._sources.snapshot(partition, checkpoint)
        load_partition(self.service.store, place, snapshot)

    def _beat(self) -> Beat:
        stats, row_bytes = self.service.store.stats(), self.service.store.used_bytes()
        mirrors = self.service.mirrors
        machine, streams, lag = mirrors.machine, mirrors.streams, mirrors.lag
        # In this order: what is confirmed is never more than what was made.
        done, made, open_bytes = streams.done_ticket, self.service.store.outbox_ticket(), 0
        behind: dict[str, float] = {}
        if lag is not None:
            done, made = lag.advance()
            open_bytes = self.service.store.lag().bytes
            behind["behind_s"] = lag.behind_s
        return Beat(
            readings={
                **self._process.readings(),
                **self.service.meter.readings(),
                "rows": float(sum(stats.rows.values())),
                "store_bytes": float(stats.bytes),
                "row_bytes": float(row_bytes),
                **self._room.readings(row_bytes, stats.bytes, self._ceiling()),
                "pushes": float(stats.pushes),
                "pulls": float(stats.pulls),
                "connections": float(self.server.connections),
                "buckets": float(len(machine.partitions)),
                "buckets_lacking": float(len(machine.lacking)),
                "mirrors": float(len(machine.complete)),
                "sweeping": float(machine.syncing),
                "outbox_done": float(done),
                "outbox_ticket": float(made),
                "unconfirmed_bytes": float(streams.waiting_bytes + self.service.store.outbox_bytes() + open_bytes),
                **behind,
                "pushes_waiting": float(mirrors.push_waits.waiting),
                "pushes_waited_s": mirrors.push_waits.total_s,
                "contents_bytes": float(mirrors.contents_bytes),
                "contents_busy_s": mirrors.pacer.busy_s,
                **(self.service.cold.readings() if self.service.cold is not None else {}),
                "image_bytes": float(self.snapshots.bytes_written),
                "load": self.service.load_of.total(machine.serving),
            },
            rows=self.service.rows.readings(),
            partitions=self._partition_readings(),
        )

    def _partition_readings(self) -> tuple[PartitionReading, ...]:
        store = self.service.store
        names = {spec.id: spec.name for spec in store.specs()}
        return self.service.load_of.readings(self.service.mirrors.machine.serving, store.partition_bytes, names)


def in_pieces(written: SnapshotsWritten, piece_bytes: int = PIECE_BYTES) -> Iterator[SnapshotsWritten]:
    """The same as several messages of about ``piece_bytes`` each, or less: one has to fit into a control message,
    however many partitions and open shards there are. The first one has the tables."""
    some: list[PartitionSnapshot] = []
    size = 0
    tables = written.tables
    for snapshot in written.snapshots:
        its = len(msgspec.msgpack.encode(snapshot))
        if some and size + its > piece_bytes:
            yield msgspec.structs.replace(written, snapshots=tuple(some), tables=tables)
            some, size, tables = [], 0, ()
        some.append(snapshot)
        size += its
    yield msgspec.structs.replace(written, snapshots=tuple(some), tables=tables)


NO_THREAD = "can't start new thread"
"""Is what Python says where it gets no memory for a thread's stack."""

_NO_MEMORY = b"everstep: this ps gets no memory any more; it ends, and what others keep of it goes on\n"


def _end_for_memory() -> None:
    """End at once: what is half done must not be served. The agent knows this exit status."""
    with contextlib.suppress(OSError):
        os.write(2, _NO_MEMORY)  # (made before: there is no memory now)
    os._exit(MEMORY_STATUS)


def end_threads_for_memory() -> None:
    """From now on a thread that gets no memory ends this process: nobody would notice that the thread is gone."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not None and issubclass(args.exc_type, MemoryError):
            _end_for_memory()
        if args.exc_type is RuntimeError and NO_THREAD in str(args.exc_value):  # there is none for a stack
            _end_for_memory()
        before(args)

    threading.excepthook = hook


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the agent ends; nobody would take note of this process any more."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
