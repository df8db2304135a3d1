"""Drives the worker's protocol machine: its actions become requests, the answers go back in.

Three kinds of threads meet here. The *main* thread runs the script. A *reader* (when rows are pulled ahead) takes the
next work, reads its batch and asks for its rows. The links' and the master's threads bring answers. The machine is
touched under one lock; actions run under it too, so that pushes leave in order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.api.dense import DenseGroup, PsOptimizer
from everstep.api.seat import Seat
from everstep.api.tables import Item, TableSet
from everstep.brain.events import Answer, Fenced, Refused, Registered
from everstep.config.consistency import parse_consistency
from everstep.data.loader import Loader
from everstep.errors import (
    DataError,
    EverstepError,
    FencedError,
    InternalError,
    NonFiniteGradientError,
    ScriptError,
)
from everstep.ids import LeaseNo, Slot, TableId
from everstep.model.placement import Placement
from everstep.model.shard import Lease, split_key
from everstep.model.turn import Portion, Turn
from everstep.monitor import stepclock
from everstep.monitor.process import ProcessReadings
from everstep.native import bag_backward, isfinite_all
from everstep.net import messages
from everstep.net.messages import Bad, Closed, DataAnswer, Moved, Opened, OpenShard, Part, Push, Pushed
from everstep.tables.gate import Gate, Late, Verdict
from everstep.tables.inputs import Inputs
from everstep.tables.protocol import (
    Action,
    AskLater,
    AskShard,
    Drop,
    Finished,
    Halt,
    SendDone,
    SendGiveBack,
    SendOpen,
    SendPush,
    Settled,
    Work,
    WorkerProtocol,
    watermarks_of,
)
from everstep.tables.routing import BatchRows, HeldRows, Router, TableRows, parts_by_ps

_LEAVE_S = 10.0  # for pushes on their way and leases to give back, at the end of a loop
_MASTER_S = 300.0  # a master may be away so long
_MASTER_AWAY_S = 1.0  # a killed master grants again after 0.3 to 0.6 s
_OPEN_AGAIN_S = 0.05  # a ps that has not heard of the newest map does so soon; then twice as long each time
_OPEN_AGAIN_MAX_S = 1.0
_SAY_AGAIN_S = 1.0  # where we are, while we wait for the others: a word may have been lost
_AHEAD_BATCHES_MAX = 500  # of tiny batches: what a lost worker gives back stays small


class _Payload(HeldRows):
    """The gradients of one push, kept until every ps has acknowledged them, and no link holds them any more."""

    __slots__ = ("lrs", "parts", "router", "step", "tables")

    def __init__(
        self, tables: list[TableRows], holders: list[BatchRows], router: Router, lrs: dict[TableId, float]
    ) -> None:
        super().__init__(holders)
        self.tables, self.router, self.lrs = tables, router, lrs
        self.parts: list[list[Part]] = []
        self.step = -1  # sync: of which this is one push of several

    def weigh(self, weight: float) -> None:
        """Scale the gradients, in place. Before they are sent."""
        for rows in self.tables:
            np.multiply(rows.grads, np.float32(weight), out=rows.grads)


class _Portion(NamedTuple):
    """Samples of this worker's part of a step, and of the largest batch of it. 0: no plan says so."""

    samples: int = 0
    batch: int = 0

    def next(self, done: int) -> int:
        """Samples of the next batch of a part that has ``done``: batches as alike as they can be."""
        left = max(1, self.samples - done)
        return -(-left // -(-left // self.batch))


class _Run:
    """One pass through ``job.steps``: what its reader thread and the main thread share."""

    def __init__(self, loader: Loader, ahead: int) -> None:
        self.loader = loader
        self.ready: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self.permits = threading.Semaphore(ahead)
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None


class Engine:
    """See the top of this file."""

    def __init__(self, seat: Seat, tables: TableSet) -> None:
        self.seat, self.tables = seat, tables
        self.protocol = WorkerProtocol(worker=seat.slot, incarnation=seat.incarnation, batch_samples=1)
        self.optimizers: list[PsOptimizer] = []
        self.failure: EverstepError | None = None
        self.samples = 0  # applied, by this process
        self.batches = 0  # given to the script
        self.skipped = 0  # batches whose gradient was not finite
        self.values: dict[str, float] = {}
        self.compute_s = 0.0  # seconds between two waits
        self._batch_s = 0.0  # the same of one batch, smoothed
        self.clock = tables.clock
        self._process = ProcessReadings()
        self._watched: set[TableId] = set()  # dense groups whose gradients tell the clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inputs = Inputs(self._changed, self._do)
        self._payloads: dict[tuple[LeaseNo, int, int, int], _Payload] = {}
        self._epochs_done: dict[str, int] = {}
        self._group: list[Item] = []  # batches whose gradients go out together, the current one last
        self._stepped = False  # the script stepped since the group began
        self._lrs: dict[TableId, float] = {}
        self._stopping = False
        self._job_over = False
        self._looping = False
        self._exit_status = 0
        consistency = parse_consistency(seat.spec.consistency)
        self.gate = Gate(consistency, seat.slot, seat.incarnation) if consistency.kind != "async" else None
        self._sync = self.gate is not None and self.gate.sync
        self._ahead = 0 if self._sync else seat.prefetch  # sync: rows are pulled when the step before is applied
        self._part: list[Work] = []  # sync: computed for the step under way, and not said to be ready
        self._portion = _Portion()  # sync: what is to be taken of a step
        self._dropped: set[tuple[LeaseNo, int, int, int]] = set()  # sync: works whose gradient is not finite
        self._accumulates = False  # the script steps less often than once a batch
        self.registered = 0  # loops begun
        self.loader_batch = self._largest_batch = 0  # samples; the latter fit into this worker at once, 0: unknown
        self.in_hand = 0  # samples of the batch that the script is at, or raised in
        self._began_at = time.monotonic()
        self._rate: deque[tuple[float, int]] = deque([(self._began_at, 0)], maxlen=12)

    @property
    def in_loop(self) -> bool:
        return self.tables.current is not None

    # ------------------------------------------------------------ Listener: what the master orders

    def placed(self, placement: Placement) -> None:
        self.feed(lambda: self.protocol.placement(placement))

    def revoked(self, lease: LeaseNo) -> None:
        self.feed(lambda: self.protocol.revoked(lease))

    def fail(self, error: EverstepError) -> None:
        """Ends whatever waits, here and in the main thread, with ``error``."""
        self.tables.client.fail(error)
        with self._lock:
            self.failure = self.failure or error
            self._changed.notify_all()

    def turned(self, turn: Turn) -> None:
        """Consistency sync and bounded: who may go on."""
        if self.gate is None:
            return
        with self._lock:
            self._judge(self.gate.turn(turn))
            self._say_place()
            self._changed.notify_all()

    def welcomed(self) -> None:
        """Said hello to a master, perhaps another one than before: it may know nothing of where we are."""
        with self._lock:
            self._say_place(again=True)

    def finish(self) -> None:
        """The job is over: the loop ends the script after the batch in hand, and waits for nobody (the ps and the
        master are leaving too)."""
        self._stopping = self._job_over = True

    def leave_soon(self, status: int) -> bool:
        """From a signal handler: whether the loop will end the script by itself, with ``status``. False the second
        time."""
        if not self._looping or self._stopping:
            return False
        self._stopping, self._exit_status = True, status
        return True

    def held(self) -> tuple[Lease, ...]:
        with self._lock:
            return self.protocol.held()

    def beat(self) -> messages.Beat:
        with self._lock:
            progress = self.protocol.progress()
            samples, retried = self.samples, self.protocol.retried
        now = time.monotonic()
        then, before = self._rate[0]
        self._rate.append((now, samples))
        busy = self.compute_s + self.tables.wait_s
        readings = {
            "samples": float(samples),
            "batches": float(self.batches),
            "samples_per_s": (samples - before) / (now - then) if now > then else 0.0,
            "retried": float(retried),
            "skipped": float(self.skipped),
            "wait_fraction": self.tables.wait_s / busy if busy else 0.0,
            "accum": 2.0 if self._accumulates else 1.0,  # by the script, not by a plan
            "loader_batch": float(self.loader_batch),
            "memory_batch": float(self._largest_batch),
            **self.clock.readings(),
            **self._process.readings(),
            **self.tables.client.carried(),
        }
        slot, stalled_s = self.tables.client.stalled()
        if slot >= 0:
            readings.update(stalled_ps=float(slot), stalled_s=stalled_s)
        if "loss" in self.values:
            readings["loss"] = self.values["loss"]
        return messages.Beat(progress, readings, dict(self.values))

    # ------------------------------------------------------------ the machine

    def feed(self, event: Callable[[], list[Action]]) -> None:
        """Give the machine an input and do what it wants."""
        self._inputs.feed(event)
        if self.gate is not None:
            with self._lock:
                self._say_place()

    def _do(self, action: Action) -> None:
        machine = self.protocol
        if isinstance(action, SendPush):
            self._send_push(action)
        elif isinstance(action, Settled):
            payload = self._payloads.pop(action.work.key, None)
            if payload is not None:
                payload.settle()
            if self.gate is not None:
                self.gate.settled(action.work)
            if action.applied:
                self.samples += action.work.hi - action.work.lo
        elif isinstance(action, AskShard):
            ask = action.ask
            request = messages.AskShard(action.dataset, action.until_epoch, ask)
            self.seat.ask(request, lambda answer: self.feed(lambda: machine.answered(ask, answer)))
        elif isinstance(action, AskLater):
            ask = action.ask
            self.seat.later(action.after_s, lambda: self.feed(lambda: machine.ask_again(ask)))
        elif isinstance(action, SendOpen):
            self._send_open(action)
        elif isinstance(action, SendDone):
            lease = action.lease
            done = messages.Done(lease.shard, lease.no, action.servers, action.skipped, action.route)
            self.seat.ask(done, lambda answer: self._done_answered(lease, answer))
        elif isinstance(action, SendGiveBack):
            lease = action.lease
            back = messages.GiveBack(lease.shard, lease.no, action.reason)
            self.seat.ask(back, lambda answer: self.feed(lambda: machine.given_back(lease.no)))
        elif isinstance(action, Halt):
            self.fail(FencedError(action.reason))
        elif not isinstance(action, Drop | Finished):
            raise InternalError(f"no way to do {action!r}")

    def _done_answered(self, lease: Lease, answer: Answer) -> None:
        self.feed(lambda: self.protocol.done_answered(lease.no, answer))
        # That shard may have been the one that our own pending request waits for.
        self.feed(lambda: self.protocol.ask_again(self.protocol.asked))

    def _send_open(self, action: SendOpen, again_s: float = _OPEN_AGAIN_S) -> None:
        ps, lease = action.ps, action.lease

        def then(answer: DataAnswer, body: memoryview) -> None:
            if isinstance(answer, Opened):
                buckets, marks = watermarks_of(answer)
                self.feed(lambda: self.protocol.opened(ps, lease.no, answer.incarnation, buckets, marks))
                if self.protocol.awaits_open(ps, lease.no):  # it has not heard of our map, or we not of its
                    self.seat.later(again_s, again)
            elif isinstance(answer, Closed):
                self.feed(lambda: self.protocol.closed(ps, lease.no, answer.reason))
            elif not isinstance(answer, Moved):  # a newer map is here: the lease will be opened by that
                self._unexpected(ps, answer)

        def again() -> None:
            with self._lock:
                if self.protocol.awaits_open(ps, lease.no):
                    self._send_open(action, min(2 * again_s, _OPEN_AGAIN_MAX_S))

        client = self.tables.client
        if client.router.version == self.protocol.route:
            client.submit(ps, OpenShard(lease.shard, lease.start, lease.no, client.router.version), then)

    def _send_push(self, action: SendPush) -> None:
        ps, token, life = action.ps, action.token, action.life
        router = self.tables.client.router
        if router.version != self.protocol.route:
            return  # the machine is about to hear of a newer map, and will say this anew
        payload = self._payloads.get(action.work.key)
        parts: tuple[Part, ...] = ()
        step = -1
        if payload is not None and not action.skipped:
            step = payload.step
            self._route(payload, router)
            parts = tuple(payload.parts[router.slots.index(ps)])
            payload.sent()
        message = Push(router.version, token, parts, True, action.bitmap, action.skipped, step)

        def then(answer: DataAnswer, body: memoryview) -> None:
            with self._lock:
                if parts_held is not None:
                    parts_held.landed()
            if isinstance(answer, Pushed):
                if answer.nonfinite >= 0:
                    self.fail(self._nonfinite(self._name_of(answer.nonfinite), action.work))
                self.feed(lambda: self.protocol.pushed(ps, token, answer, life))
            elif not isinstance(answer, Moved):  # a newer map is here: what is owed is said anew by that
                self._unexpected(ps, answer)

        parts_held = payload if not action.skipped else None
        self.tables.client.submit(ps, message, then, router)

    def _route(self, payload: _Payload, router: Router) -> None:
        """Group the gradients by ``router``, if they are not."""
        if payload.router.version == router.version and payload.parts:
            return
        for i, rows in enumerate(payload.tables):
            if rows.router.version != router.version:
                merged = self._merge([rows], router)
                payload.hold(merged.batch)
                payload.tables[i] = merged
        payload.router = router
        payload.parts = parts_by_ps(payload.tables, len(router.slots), grads=True, lrs=payload.lrs)

    # ------------------------------------------------------------ whose turn it is (sync, bounded)

    def _say_place(self, again: bool = False) -> None:
        """Tell the master where we are, if it needs to know. With the lock held."""
        place = self.gate.due(again) if self.gate is not None and self.registered else None
        if place is not None:
            self.seat.ask(messages.TellPlace(place), lambda answer: None)

    def _judge(self, verdict: Verdict | None) -> None:
        """Do what was decided about the part in hand. With the lock held."""
        if verdict is None:
            return
        counted = sum(w.hi - w.lo for w in verdict.works if w.key not in self._dropped)
        for work in verdict.works:
            if isinstance(verdict, Late):
                self._dropped.discard(work.key)
                self.feed(partial(self.protocol.late, work))
                continue
            weight = verdict.weight * (self._portion.samples or counted) / max(1, counted)
            payload = self._payloads.get(work.key)
            if payload is not None:
                payload.step = verdict.step
            if payload is not None and weight != 1.0:
                payload.weigh(weight)
            dropped = work.key in self._dropped
            self._dropped.discard(work.key)
            self.feed(partial(self.protocol.computed, work, dropped))

    def _ready(self, work: Work, dropped: bool = False, more: bool = False) -> None:
        """Gradients of ``work`` are computed (``dropped``: not finite; ``more``: of the same step, too). With the lock
        held."""
        if not self._sync:
            self.feed(lambda: self.protocol.computed(work, dropped))
            return
        if dropped:
            self._dropped.add(work.key)
        self._part.append(work)
        if not more and self._done() >= self._portion.samples:
            self._close_part()

    def _done(self) -> int:
        """Sync: samples of the step that are computed, or in hand."""
        return sum(w.hi - w.lo for w in (*self._part, *(item.work for item in self._group)) if w is not None)

    def _close_part(self) -> None:
        """Sync: nothing will be added to this part. With the lock held."""
        part, self._part = tuple(self._part), []
        if part:
            assert self.gate is not None
            self._judge(self.gate.ready(part, [w for w in part if w.key in self._dropped]))
            self._say_place()

    def _fits(self, work: Work) -> bool:
        """Sync: whether ``work`` is as large as this step wants it. False: it was put back, and will be cut anew. With
        the lock held."""
        assert self.gate is not None
        if not self._part and not self._group:
            self._portion = self._of_a_step(None if self._accumulates else self.gate.portion())
        wanted = self._portion.next(self._done()) if self._portion.samples else self._one_pass()
        if wanted == self.protocol.batch_samples or not self.protocol.put_back(work):
            return True
        self.protocol.set_batch_samples(wanted)
        return False

    def _of_a_step(self, told: Portion | None) -> _Portion:
        """What to take of a step: by a plan, or in several passes because a batch of the loader does not fit; else it
        is one batch of the loader."""
        batch, fits = self.loader_batch, self._largest_batch
        if told is None:
            return _Portion() if self._accumulates or self._one_pass() == batch else _Portion(batch, fits)
        largest = -(-told.samples // told.in_passes(batch))
        return _Portion(told.samples, min(largest, fits) if fits else largest)

    def _one_pass(self) -> int:
        """Samples of the loader's batch that fit at once."""
        return min(self.loader_batch, self._largest_batch or self.loader_batch)

    def _await_turn(self, run: _Run, work: Work) -> bool:
        """Wait until the rows of ``work`` may be pulled. False: it is not wanted any more, or the loop is to end."""
        gate = self.gate
        if gate is None:
            return True
        say_at = time.monotonic() + _SAY_AGAIN_S
        phase = self.clock.switch(stepclock.BARRIER) if run.thread is None else -1
        try:
            with self._lock:
                while True:
                    self._check()
                    if run.stop.is_set() or self._stopping:
                        return False
                    if not self.protocol.current(work):
                        self.feed(lambda: self.protocol.computed(work))
                        return False
                    if gate.may_begin():
                        if self._sync and not self._fits(work):
                            return False
                        gate.begin(work)
                        return True
                    if time.monotonic() >= say_at:
                        say_at = time.monotonic() + _SAY_AGAIN_S
                        self._say_place(again=True)
                    self._changed.wait(0.2)
        finally:
            if run.thread is None:
                self.clock.switch(phase)

    def _unexpected(self, ps: Slot, answer: DataAnswer) -> None:
        text = answer.error if isinstance(answer, Bad) else repr(answer)
        self.fail(InternalError(f"ps:{ps} refused: {text}"))

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------ Stepper: what optimizers tell

    def stepped(self, groups: list[DenseGroup]) -> None:
        item = self.tables.current
        if item is None or item.work is None:
            raise ScriptError("opt.step() outside of job.steps(): gradients belong to a batch of the loop")
        self._stepped = True
        self.clock.switch(stepclock.PUSH)
        for group in groups:
            self._capture(group, item)
        self.clock.switch(stepclock.UPDATE)

    def _capture(self, group: DenseGroup, item: Item) -> None:
        rows = item.dense.get(group.spec.id)
        if rows is None:
            raise ScriptError("job.optimizer() was called inside the loop: create optimizers before job.steps()")
        if group.capture(rows):
            self._lrs[group.spec.id] = group.lr

    def zeroed(self) -> None:
        """``zero_grad`` drops gradients that no ``step`` took: those of the dense part and those of the tables."""
        if len(self.optimizers) == 1 and not self._stepped:
            for item in self._group:
                for rows in item.rows.tables:
                    rows.touched = False

    def dense_state(self, group: DenseGroup) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Keys and optimizer state (float32 [rows, floats]) of a group as they are on the ps now."""
        self.tables.declare()
        keys, _, state = self.tables.scan(group.spec)
        if len(keys) != group.n_rows:
            raise InternalError(f"{group.spec.name} has {len(keys)} rows instead of {group.n_rows}")
        return keys, state

    # ------------------------------------------------------------ the loop

    def steps(self, loader: Loader) -> Iterator[Any]:
        """Batches of ``loader``, each with its rows in place; what the script computes from them is pushed."""
        if not isinstance(loader, Loader):
            raise ScriptError(f"job.steps needs what job.loader returned, not {type(loader).__name__}")
        if self.tables.current is not None or self._group:
            raise ScriptError("job.steps() inside the loop of another job.steps() is not possible")
        self._check()
        if not self._sync and 0 < loader.largest_batch < loader.batch_size:
            raise ScriptError(
                f"largest_batch={loader.largest_batch} is below batch_size={loader.batch_size}: in mode ps "
                f"({self.seat.spec.consistency}) each batch is applied alone, so it has to fit; use a smaller "
                "batch_size, or --consistency sync"
            )
        plan = loader.plan()
        dataset = self._register(plan)
        self.registered += 1
        until = self._epochs_done.get(plan.name, 0) + loader.epochs
        self._epochs_done[plan.name] = until
        self.tables.declare()
        self.tables.forget_asides()
        self._watch_backward()
        with self._lock:
            self.loader_batch, self._largest_batch = loader.batch_size, loader.largest_batch
            self.protocol.set_batch_samples(self._one_pass())
        self.feed(lambda: self.protocol.begin(dataset, until))
        run = _Run(loader, self._ahead)
        if self._ahead:
            run.thread = threading.Thread(target=self._read_ahead, args=(run,), name="everstep-reader", daemon=True)
            run.thread.start()
        complete = False
        self._looping = True
        self.clock.switch(stepclock.DATA)
        try:
            while (item := self._next(run)) is not None:
                begin = time.perf_counter()
                assert item.work is not None
                self.clock.begin(item.work.hi - item.work.lo)
                self.in_hand = item.work.hi - item.work.lo
                yield item.batch
                self.in_hand = 0
                self.clock.computed(item.work.hi - item.work.lo)
                self.clock.switch(stepclock.PUSH)
                spent_s = time.perf_counter() - begin
                self.compute_s += spent_s
                self._look_ahead(spent_s)
                self._end_of_iteration(item)
                self.clock.switch(stepclock.DATA)
            complete = True
        finally:
            self.clock.switch(stepclock.OUTSIDE)
            self._looping = False
            self._end_of_loop(run, complete)

    def _watch_backward(self) -> None:
        """The last parameters of a model get their gradients first: there the clock hears of backward."""
        for group in self.tables.dense:
            if group.params and group.spec.id not in self._watched:
                self._watched.add(group.spec.id)
                hook = group.params[-1].register_post_accumulate_grad_hook
                hook(lambda _: self.clock.first_gradient())  # type: ignore[no-untyped-call]

    def _look_ahead(self, spent_s: float) -> None:
        """Hold leases for ``_MASTER_AWAY_S`` of work, so that a restart of the master finds nobody without one."""
        if self.seat.embedded:
            return
        self._batch_s = 0.8 * self._batch_s + 0.2 * spent_s if self._batch_s else spent_s
        batches = int(_MASTER_AWAY_S / max(self._batch_s, 1e-4))
        self.protocol.ask_ahead = min(max(2, batches), _AHEAD_BATCHES_MAX)

    def _register(self, plan: Any) -> int:
        answer = self.seat.call(messages.Register(plan), _MASTER_S)
        if isinstance(answer, Registered):
            return answer.dataset
        if isinstance(answer, Refused):
            raise DataError(answer.error)
        if isinstance(answer, Fenced):
            raise FencedError(answer.reason)
        raise InternalError(f"Register was answered with {answer!r}")

    def _next(self, run: _Run) -> Item | None:
        """The next batch, its rows in place and the parameters up to date; None at the end of the data."""
        while True:
            item = self._read(run) if run.thread is None else self._from_reader(run)
            if self._stopping:  # scaled in, or the job was stopped: this is a clean end of the script
                if item is not None:
                    item.close()
                raise SystemExit(self._exit_status)
            if item is None:
                return None
            assert item.work is not None
            if not self._wanted(item, run):
                continue
            if self._group:
                last = self._group[-1].work
                assert last is not None
                if not last.joins(item.work):
                    self._push_group(more=True)
            self.tables.take(item)
            run.permits.release()
            self._group.append(item)
            self.batches += 1
            return item

    def _wanted(self, item: Item, run: _Run) -> bool:
        """False, and the item is given up, where its lease is gone or was opened anew meanwhile."""
        work = item.work
        assert work is not None
        with self._lock:
            if self.protocol.current(work):
                return True
            item.close()
            run.permits.release()
            self.feed(lambda: self.protocol.computed(work))
            return False

    def _read(self, run: _Run) -> Item | None:
        """Take work, read its batch, ask for its rows. None when all data is done."""
        while (work := self._await_work(run)) is not None:
            _, epoch, _ = split_key(work.lease.shard)
            batch = run.loader.read(epoch, work.lo, work.hi)
            if self._await_turn(run, work):
                return self.tables.prepare(work, batch, create=True)
        return None

    def _await_work(self, run: _Run) -> Work | None:
        with self._lock:
            while True:
                self._check()
                if run.stop.is_set() or self._stopping:
                    return None
                if self._sync and self._portion.samples:
                    self.protocol.set_batch_samples(self._portion.next(self._done()))
                work = self.protocol.next_work()
                self.feed(self.protocol.more)
                if work is not None:
                    if self.gate is not None:
                        self.gate.work()
                        self._say_place()
                    return work
                if self._part and (self.protocol.waiting or self.protocol.finished):
                    self._close_part()  # it stays smaller
                if (
                    self.gate is not None
                    and not self.gate.pending
                    and (self.protocol.waiting or self.protocol.finished)
                ):
                    self.gate.rest()
                    self._say_place()
                if self.protocol.finished:
                    return None
                self._changed.wait(0.2)

    def _read_ahead(self, run: _Run) -> None:
        try:
            while True:
                while not run.permits.acquire(timeout=0.5):
                    if run.stop.is_set() or self.failure is not None:
                        return
                item = None if run.stop.is_set() else self._read(run)
                run.ready.put(item)
                if item is None:
                    return
        except BaseException as error:
            run.ready.put(error)

    def _from_reader(self, run: _Run) -> Item | None:
        begin = time.perf_counter()
        while True:
            try:
                got = run.ready.get(timeout=0.2)
                break
            except queue.Empty:
                self._check()
                if self._stopping:
                    return None
        self.tables.wait_s += time.perf_counter() - begin
        if isinstance(got, BaseException):
            raise got
        return got

    def _end_of_iteration(self, item: Item) -> None:
        self._check()
        self.tables.release(item)
        work = item.work
        assert work is not None
        if self.optimizers and not self._stepped and work.hi < work.lease.stop:
            self._accumulates = True
        if self._portion.samples:
            share = np.float32((work.hi - work.lo) / self._portion.samples)
            for rows in item.rows.tables:
                if rows.touched:
                    np.multiply(rows.grads, share, out=rows.grads)
        whole = (self._stepped or not self.optimizers) and self._done() >= self._portion.samples
        if whole or work.hi >= work.lease.stop:
            self._push_group()
        elif len(self._group) > 1 and all(any(r.touched for r in i.rows.tables) for i in self._group[-2:]):
            self._fold_group()

    def _end_of_loop(self, run: _Run, complete: bool) -> None:
        """Let pushes arrive; when the loop ended early, give back what is not finished."""
        run.stop.set()
        failed = self.failure is not None
        if self.tables.current is not None and self._stepped and not complete and not failed:
            try:
                self.tables.release(self.tables.current)
                self._push_group()  # the script stepped, then left the loop
                with self._lock:
                    self._close_part()
            except NonFiniteGradientError as error:
                self.fail(error)
        self.tables.current = None
        self._drop_group()
        if run.thread is not None:
            with self._lock:
                self._changed.notify_all()
            run.permits.release()
            run.thread.join(timeout=5.0)
            while not run.ready.empty():
                left = run.ready.get()
                if isinstance(left, Item):
                    left.close()
        if complete:
            self.tables.refresh_dense()
            return
        self.leave("the loop ended early" if not failed else "the script failed")

    def leave(self, reason: str) -> None:
        """Wait a little for pushes on their way, then give all leases back."""
        limit = time.monotonic() + _LEAVE_S
        with self._lock:
            while (self.protocol.unacknowledged or self._payloads) and not self._ending() and time.monotonic() < limit:
                self._changed.wait(0.1)
            if self.gate is not None:
                self.gate.leave()
                self._say_place()
            if self._job_over or self.protocol.finished or not (self.protocol.held() or self.protocol.asking):
                return
            self.feed(lambda: self.protocol.leave(reason))
            while not self.protocol.finished and not self._ending() and time.monotonic() < limit:
                self._changed.wait(0.1)

    def _ending(self) -> bool:
        return self._job_over or self.failure is not None

    # ------------------------------------------------------------ pushing

    def _push_group(self, more: bool = False) -> None:
        """Push the gradients of all batches of the group as one. Raises NonFiniteGradientError (policy raise).

        ``more``: another batch of the same step is in hand."""
        group, self._group = self._group, []
        stepped, self._stepped = self._stepped, False
        work = group[0].work
        assert work is not None
        for item in group[1:]:
            assert item.work is not None
            work = work.join(item.work)
        if not stepped and self.optimizers:
            # A shard ends without a step: what was accumulated goes out now, and must not go out twice.
            for optimizer in self.optimizers:
                for dense in optimizer.groups:
                    if dense.spec.id not in group[-1].dense:
                        order = dense.order(group[-1].rows.router)
                        (added,) = group[-1].rows.add([order.found], values=False)
                        added.order = order
                        group[-1].dense[dense.spec.id] = added
                    self._capture(dense, group[-1])
                    for p in dense.params:
                        p.grad = None
        tables: dict[TableId, list[TableRows]] = {}
        for item in group:
            for rows in item.rows.tables:
                if rows.touched:
                    rows.drop_padding()
                    tables.setdefault(rows.table, []).append(rows)
        holders = [item.rows for item in group]
        bad = next((r for found in tables.values() for r in found if not isfinite_all(r.grads)), None)
        if bad is not None:
            for holder in holders:
                holder.close()
            if self.seat.spec.nonfinite == "raise":
                error = self._nonfinite(bad.spec.name, work)
                self.fail(error)
                raise error
            self.skipped += 1
            with self._lock:
                self._ready(work, dropped=True, more=more)
            return
        out = []
        router = self.tables.client.router
        for found in tables.values():
            if len(found) == 1:
                out.append(found[0])
            else:
                merged = self._merge(found, router)
                holders.append(merged.batch)
                out.append(merged)
        with self._lock:
            self._payloads[work.key] = payload = _Payload(out, holders, router, dict(self._lrs))
            self._route(payload, router)
            self._ready(work, more=more)

    def _fold_group(self) -> None:
        """Gradient accumulation: add the newest batch's gradients to those before, so that memory stays bounded."""
        before, item = self._group[-2], self._group[-1]
        by_table: dict[TableId, list[TableRows]] = {}
        for part in (before, item):
            for rows in part.rows.tables:
                if rows.touched:
                    by_table.setdefault(rows.table, []).append(rows)
        assert before.work is not None and item.work is not None
        router = self.tables.client.router
        folded = Item(before.work.join(item.work), None, BatchRows(self.tables.client.memory, router))
        for found in by_table.values():
            self._merge(found, router, folded.rows)
        before.close()
        item.close()
        self._group[-2:] = [folded]

    def _merge(self, found: list[TableRows], router: Router, into: BatchRows | None = None) -> TableRows:
        """One TableRows, grouped by ``router``, with the sum of several gradients of the same table."""
        keys, grads = [], []
        for rows in found:
            rows.drop_padding()
            keys.append(rows.keys)
            grads.append(rows.grads)
        all_keys, all_grads = np.concatenate(keys), np.concatenate(grads)
        routed, inverse, counts = router.route(found[0].table, all_keys)
        batch = BatchRows(self.tables.client.memory, router) if into is None else into
        (merged,) = batch.add([(found[0].spec, routed, counts)], values=False)
        bag_backward(all_grads, inverse, None, "sum", None, merged.u, merged.grads)
        merged.touched = True
        return merged

    def _drop_group(self) -> None:
        with self._lock:
            for work in self._part:
                self._dropped.discard(work.key)
                if (payload := self._payloads.pop(work.key, None)) is not None:
                    payload.settle()
            self._part = []
        group, self._group = self._group, []
        self._stepped = False
        for item in group:
            item.close()

    def _nonfinite(self, table: str, work: Work) -> NonFiniteGradientError:
        _, epoch, _ = split_key(work.lease.shard)
        what = "the dense part" if table.startswith("dense/") else f"table {table!r}"
        return NonFiniteGradientError(
            f"the gradient of {what} has NaN or Inf in samples {work.lo}..{work.hi} of epoch {epoch}; nothing of that "
            "batch was applied: lower the learning rate or clip gradients, or run with --nonfinite skip"
        )

    def _name_of(self, table: int) -> str:
        names = [i.spec for i in self.tables.infos.values()] + [g.spec for g in self.tables.dense]
        return next((s.name for s in names if s.id == table), f"#{table}")
