"""Runs a worker process of a job: the master over the control connection, the ps over data connections."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

from everstep.api.listeners import GroupListener, Listener, ScheduleListener
from everstep.api.script_exit import ScriptExit, ask_again_when_lost
from everstep.brain.events import (
    Answer,
    ChiefAsked,
    Fenced,
    FinishJob,
    MemberJoined,
    PublishGroup,
    PublishPlacement,
    RevokeLease,
    Welcome,
    Yes,
)
from everstep.config.load import read_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, FencedError, PlatformError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Role
from everstep.model.placement import Placement, PsPlace
from everstep.net import messages
from everstep.net.arena import Arena
from everstep.net.auth import Identity, load_secret, worker_identity
from everstep.net.control import ControlClient
from everstep.net.data import DataClient
from everstep.net.messages import OrderType, RequestType
from everstep.net.rendezvous import SECRET_FILE, master_address
from everstep.protect.home_files import HomeLink, link_home
from everstep.storage.space import be_patient
from everstep.tables.client import DataLink, PsClient, SocketLink

_ARENA_BYTES = 1 << 30  # of addresses; memory is taken as it is touched
_MASTER_AWAY_S = 300.0  # leases and pushes go on so long without a master
_PLACED_S = 120.0  # until every ps has said hello
_CHIEF_S = 300.0  # the answer decides who saves the result: a master may be away so long
_CHIEF_AGAIN_S = 1.0  # in the loop; behind it every question is asked
_GROUP_BEAT_S = 0.5  # a member of a group that stopped holds up all others: found by its silence


class ProcessRuntime:
    """See the top of this file."""

    embedded = False

    def __init__(
        self, spec: JobSpec, run_dir: Path, slot: Slot, incarnation: Incarnation, node: NodeId, prefetch: int
    ) -> None:
        self.spec, self.run_dir = spec, run_dir
        be_patient(spec.disk_full_s)
        self.slot, self.incarnation, self.node = slot, incarnation, node
        self.prefetch = prefetch
        self.arena = Arena(_ARENA_BYTES)
        self.client = PsClient(self.arena)
        self.control: ControlClient | None = None
        self._secret = load_secret(run_dir / SECRET_FILE)
        self._listener: Listener | None = None
        self.on_replica: Callable[[messages.TakeReplica], None] | None = None  # mode allreduce: write the state
        self._placed = threading.Event()
        self._chief_asks = 0
        self._chief, self._chief_until = False, 0.0  # what the master said, and until when it is not asked again
        self._failure: EverstepError | None = None
        self._home: HomeLink | None = None
        self._timers: set[threading.Timer] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WorkerSeat worker:{self.slot} #{self.incarnation} on {self.node} {self.control}>"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ProcessRuntime:
        """Make the runtime from the environment, as the agent starts workers. Raises ConfigError where a variable is
        missing or wrong."""
        try:
            run_dir = Path(environment["EVERSTEP_RUN_DIR"])
            slot = Slot(int(environment["EVERSTEP_SLOT"]))
            incarnation = Incarnation(int(environment["EVERSTEP_INCARNATION"]))
            node = NodeId(environment.get("EVERSTEP_NODE", "node0"))
            prefetch = int(environment.get("EVERSTEP_PREFETCH", "1"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the environment of this worker is incomplete ({error}): start the script with everstep run, or "
                "unset EVERSTEP_RUN_DIR to run it alone"
            ) from None
        return cls(read_spec(run_dir), run_dir, slot, incarnation, node, prefetch)

    # ------------------------------------------------------------ Runtime

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self.control = ControlClient(
            address=lambda: master_address(self.run_dir),
            run_dir=self.run_dir,
            secret=self._secret,
            identity=self._identity("control"),
            hello=self._hello,
            on_order=self._ordered,
            on_welcome=self._welcomed,
            on_fenced=lambda fenced: self._fail(FencedError(fenced.reason)),
            beat=listener.beat,
            beat_s=_GROUP_BEAT_S if self.spec.grouped else 1.0,
            news=lambda: listener.clock.news,
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave_on_term)
            ask_again_when_lost()
        waited_s = 0.0
        while not self._placed.wait(0.5):
            waited_s += 0.5
            if self._failure is not None:
                raise self._failure
            if self.control.failed is not None:
                raise self.control.failed
            if waited_s > _PLACED_S:
                raise PlatformError(f"no placement of the ps after {_PLACED_S:.0f} s: see logs/master.log and ps logs")

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        assert self.control is not None
        answer = self.control.call(request, timeout_s)
        assert isinstance(answer, Answer)
        return answer

    def ask(self, request: RequestType, then: Callable[[Answer], None]) -> None:
        assert self.control is not None

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                then(future.result())
            elif isinstance(error, EverstepError):
                self._fail(error)

        self.control.submit(request, _MASTER_AWAY_S).add_done_callback(answered)

    def home_link(self) -> HomeLink | None:
        with self._lock:
            if self._home is None:
                self._home = link_home(self.spec, master_address(self.run_dir), self._secret, self._identity("data"))
            return self._home

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(after_s, action)
        timer.daemon = True
        timer.start()

    def chief(self) -> bool:
        """Return whether this is the chief, by the master's word (``brain.duty``): who was told that it is stays it, so
        it need not ask again."""
        if not self._chief and time.monotonic() >= self._chief_until:
            self._chief_asks += 1
            answer = self.call(ChiefAsked(self._chief_asks), _CHIEF_S)
            if isinstance(answer, Fenced):
                raise FencedError(answer.reason)
            self._chief = isinstance(answer, Yes) and answer.yes
            in_loop = self._listener is not None and self._listener.in_loop
            self._chief_until = time.monotonic() + (_CHIEF_AGAIN_S if in_loop else 0.0)
        return self._chief

    def close(self, error: str) -> None:
        if self.control is not None:
            with contextlib.suppress(EverstepError):
                if self._listener is not None and not error:
                    self.control.call(self._listener.beat(), 2.0)
            self.control.close()

    # ------------------------------------------------------------ the master

    def _identity(self, purpose: Literal["control", "data"]) -> Identity:
        return worker_identity(self.slot, self.incarnation, self.node, purpose)

    def _hello(self) -> RequestType:
        assert self._listener is not None
        return MemberJoined(
            Role.WORKER, self.slot, self.incarnation, self.node, os.getpid(), None, self._listener.held()
        )

    def _welcomed(self, answer: Any) -> None:
        if isinstance(answer, Fenced):
            self._fail(FencedError(answer.reason))
        if not isinstance(answer, Welcome) or self._listener is None:
            return
        if answer.placement is not None:
            self._set_placement(answer.placement)
        else:
            self.later(0.2, self._hello_again)  # a ps may have come between hello and now: the order would be lost
        for lease in answer.revoked:
            self._listener.revoked(lease)
        if self._group is not None:
            self._group.welcomed()
        else:
            cast(ScheduleListener, self._listener).welcomed()

    def _hello_again(self) -> None:
        if not self._placed.is_set() and self.control is not None:
            self.ask(self._hello(), self._welcomed)

    def _ordered(self, order: OrderType) -> None:
        listener = self._listener
        if listener is None:
            return
        if isinstance(order, PublishPlacement):
            self._set_placement(order.placement)
        elif isinstance(order, PublishGroup):
            if self._group is not None:
                self._group.grouped(order.group)
        elif isinstance(order, messages.NewSchedule):
            if self._group is None:
                cast(ScheduleListener, listener).scheduled(order.schedule)
        elif isinstance(order, messages.TakeReplica):
            if self.on_replica is not None:
                self.on_replica(order)
        elif isinstance(order, RevokeLease):
            listener.revoked(order.lease)
        elif isinstance(order, messages.SlowDown):
            listener.clock.slowdown.order(order.factor, order.for_s, order.burn)
        elif isinstance(order, FinishJob):
            if order.exit_code:
                self._fail(FencedError(f"the job is over: {order.error}"))
            else:
                listener.finish()

    def _set_placement(self, placement: Placement) -> None:
        assert self._listener is not None
        with self._lock:
            self.client.set_placement(placement, self._link)
        self._listener.placed(placement)
        self._placed.set()

    def _fail(self, error: EverstepError) -> None:
        self._failure = self._failure or error
        if self._listener is not None:
            self._listener.fail(error)

    @property
    def _group(self) -> GroupListener | None:
        return cast(GroupListener, self._listener) if self.spec.grouped else None

    # ------------------------------------------------------------ the ps

    def _link(self, place: PsPlace) -> SocketLink:
        return SocketLink(place, self.arena, self.client.dims, self._connect, self._fail)

    def _connect(self, place: PsPlace) -> tuple[DataLink, bool]:
        """Return a data connection; on the same node the ps maps our memory."""
        client = DataClient(
            place.address,
            secret=self._secret,
            identity=self._identity("data"),
            run_dir=self.run_dir,
            tls=self.spec.tls,
            expect=(place.slot, place.incarnation),
        )
        shared = client.shm and os.environ.get("EVERSTEP_SHM", "1") != "0"
        if shared:
            client.attach(self.arena)
        return client, shared

    def _leave_on_term(self, signo: int, frame: FrameType | None) -> None:
        """Leave when asked to go (scale-in, stop): end the script, inside the loop after the batch in hand, so that no
        push is torn; leases are given back. The status says by whom: a worker that nobody wanted to end is replaced. A
        second signal ends the script at once."""
        status = 128 + signo
        if self._listener is None or not self._listener.leave_soon(status):
            raise ScriptExit(status)
