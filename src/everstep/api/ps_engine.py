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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from everstep.api.dense import DenseGroup, FlatGroup, PsOptimizer, StaleValues
from everstep.api.firing import TableFiring
from everstep.api.ps_buffers import BufferGroup, ConstantBuffer, find_buffers
from everstep.api.rows import BatchTable, TableParameter, is_table
from everstep.api.schedule import JobSchedule
from everstep.api.seat import WorkerRuntime
from everstep.api.tables import BatchItem, TableSet
from everstep.brain.events import (
    Answer,
    Fenced,
    PlanRegistered,
    Refused,
    Registered,
    ShardAsked,
    ShardDone,
    ShardReturned,
)
from everstep.config.consistency import parse_consistency
from everstep.data.loader import Loader
from everstep.data.random_streams import STREAMS, seed_range
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
from everstep.model.table import OWN, Rate, TableSpec
from everstep.model.turn import BatchShare, Turn
from everstep.monitor import stepclock
from everstep.monitor.process_readings import ProcessReadings
from everstep.native import gather_rows, isfinite_all
from everstep.net import messages
from everstep.net.messages import Bad, DataAnswer, LeaseClosed, Moved, Opened, OpenShard, Push, Pushed, RowsPart
from everstep.net.retry import backoff
from everstep.tables.inputs import Inputs
from everstep.tables.routing import BatchRows, HeldRows, Router, TableRows, parts_by_ps
from everstep.tables.staleness_gate import Late, StalenessGate, Verdict
from everstep.tables.worker_protocol import (
    AskLater,
    AskShard,
    Drop,
    Halt,
    RangeWork,
    SendDone,
    SendGiveBack,
    SendOpen,
    SendPush,
    Settled,
    WorkerAction,
    WorkerProtocol,
    WorkFinished,
    watermarks_of,
    wholes_of,
)

_LEAVE_S = 10.0  # for pushes on their way and leases to give back, at the end of a loop
_MASTER_S = 300.0  # a master may be away so long
_MASTER_AWAY_S = 1.0  # a killed master grants again after 0.3 to 0.6 s
_OPEN_AGAIN_S = 0.05  # a ps that has not heard of the newest map does so soon; then twice as long each time
_OPEN_AGAIN_MAX_S = 1.0
_PATIENCE_S = 0.15  # three times as long as the master lets a worker wait before it asks again
_SAY_AGAIN_S = 1.0  # where we are, while we wait for the others: a word may have been lost
_AHEAD_BATCHES_MAX = 500  # of tiny batches: what a lost worker gives back stays small


StepKey = tuple[LeaseNo, int, int]
"""Of a step: lease, its life and the first sample of the first work."""


def key_of(work: RangeWork) -> StepKey:
    return work.lease.no, work.life, work.lo


class _Kept:
    """A batch that the script is through with, and that no step has consumed. ``learnt``: it has a gradient that is not
    zeroed."""

    __slots__ = ("learnt", "work")

    def __init__(self, work: RangeWork, learnt: bool) -> None:
        self.work, self.learnt = work, learnt


class _StepInHand(NamedTuple):
    """A computed step. ``payload``: None where there is nothing to apply. ``counted``: samples that it has learnt from
    (sync: workers' steps are weighed by them)."""

    works: tuple[tuple[RangeWork, bool], ...]
    payload: _Payload | None
    counted: int = 0
    skipped: bool = False

    @property
    def key(self) -> StepKey:
        return key_of(self.works[0][0])

    @property
    def samples(self) -> int:
        return sum(w.hi - w.lo for w, _ in self.works)


class _Payload(HeldRows):
    """The gradients of one push, kept until every ps has acknowledged them, and no link holds them any more."""

    __slots__ = ("bad", "parts", "rates", "router", "seen", "step", "tables")

    def __init__(
        self, tables: list[TableRows], holders: list[BatchRows], router: Router, rates: dict[TableId, Rate]
    ) -> None:
        super().__init__(holders)
        self.tables, self.router, self.rates = tables, router, rates
        self.parts: list[list[RowsPart]] = []
        self.step = -1  # sync: of which this is one push of several
        self.bad = ""  # the table whose gradient is not finite
        self.seen: list[TableRows] = []  # of ``tables``: lie where the script sees its gradient

    def weigh(self, weight: float) -> None:
        """Scale the gradients, before they are sent. What the script sees stays as it is: it may step with it again."""
        for i, rows in enumerate(self.tables):
            own = rows
            if any(rows is seen for seen in self.seen):
                batch = BatchRows(rows.batch.memory, rows.router)
                self.hold(batch)
                (own,) = batch.add([(rows.spec, rows.keys, rows.counts)], values=False)
                own.touched = True
                self.tables[i] = own
                self.parts = []
            np.multiply(rows.grads, np.float32(weight), out=own.grads)
        self.seen = []


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
        self.ready: queue.SimpleQueue[BatchItem | BaseException | None] = queue.SimpleQueue()
        self.permits = threading.Semaphore(ahead)
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None


class PsEngine:
    """See the top of this file."""

    def __init__(self, seat: WorkerRuntime, tables: TableSet) -> None:
        self.seat, self.tables = seat, tables
        self.protocol = WorkerProtocol(worker=seat.slot, incarnation=seat.incarnation, batch_samples=1)
        self.optimizers: list[PsOptimizer] = []
        self.failure: EverstepError | None = None
        self.samples = 0  # applied, by this process
        self.batches = 0  # given to the script
        self.skipped = 0  # batches whose gradient was not finite
        self.left_out = 0  # samples that the script has not stepped with
        self.values: dict[str, float] = {}
        self.compute_s = 0.0  # seconds between two waits
        self._batch_s = 0.0  # the same of one batch, smoothed
        self.clock = tables.clock
        self._process = ProcessReadings()
        self._watched: set[TableId] = set()  # dense groups whose gradients tell the clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inputs = Inputs(self._changed, self._do)
        self._payloads: dict[StepKey, _Payload] = {}
        self._epochs_done: dict[str, int] = {}
        self._kept: list[_Kept] = []  # batches before the one in hand that no step has consumed
        self._left: RangeWork | None = None  # of the batch in hand: what no step has consumed
        self._captured: _Payload | None = None  # of a step of this iteration, to be pushed at its end
        self._steps_here = 0  # of this iteration
        self._pushed = False  # a step of this loop
        self._behind = False  # what is in hand was pulled ahead, and may lack a step that is pushed
        self._pulled = False  # sync: all workers have pulled what a change by hand is about to replace
        self._grads_before: list[tuple[int, int]] = []  # which gradients there were when the iteration began
        self._probe: tuple[torch.nn.Parameter, torch.Tensor] | None = None  # a gradient that kept batches are in
        self.models: list[torch.nn.Module] = []  # of the script
        self._buffers: list[BufferGroup] = []
        self._buffered: list[int] = []  # the models whose buffers are known
        self._constant: list[ConstantBuffer] = []  # buffers that must not change
        self.schedule = JobSchedule()
        self._lrs_seen: list[float] = []
        self._told_schedule = False
        self.firing = TableFiring(tables)
        self._stopping = False
        self._job_over = False
        self._looping = False
        self._exit_status = 0
        consistency = parse_consistency(seat.spec.consistency)
        if consistency.kind == "sync":
            self.protocol.ask_ahead = 0  # all take the same number of batches, and none goes on without the master
        self.gate = StalenessGate(consistency, seat.slot, seat.incarnation) if consistency.kind != "async" else None
        self._sync = self.gate is not None and self.gate.sync
        self._ahead = 0 if self._sync else seat.prefetch  # sync: rows are pulled when the step before is applied
        self._part: list[_StepInHand] = []  # sync: computed for the step under way, and not said to be ready
        self._judged: list[_StepInHand] = []  # sync: the part that waits for its verdict
        self._portion = _Portion()  # sync: what is to be taken of a step
        self._accumulates = False  # the script steps less often than once a batch
        self.registered = 0  # loops begun
        self.loader_batch = self._largest_batch = 0  # samples; the latter fit into this worker at once, 0: unknown
        self.in_hand = 0  # samples of the batch that the script is at, or raised in
        self._stale = StaleValues(self._freshen)
        tables.before_refresh = self._before_refresh
        tables.keeps_outside = lambda: self._only
        self._began_at = time.monotonic()
        self._rate: deque[tuple[float, int]] = deque([(self._began_at, 0)], maxlen=12)

    @property
    def in_loop(self) -> bool:
        return self.tables.current is not None

    @property
    def step_number(self) -> int:
        """Of the iteration in hand, from 0; behind the loop, how many there were. Sync: of the job, else of this
        worker."""
        behind = 0 if self.in_loop else 1
        if self.gate is not None and self._sync:
            return self.gate.iteration + behind
        return self.batches - 1 + behind

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

    def place(self) -> tuple[int, int, int, int] | None:
        """Of the batch in hand: the loop of the script (from 1), dataset, epoch, and 0: gradients are not averaged with
        others', or over a number that nobody knows yet. None: there is no batch."""
        work = self._left
        if work is None:
            return None
        dataset, epoch, _ = split_key(work.lease.shard)
        return self.registered, dataset, epoch, 0

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
            "left_out": float(self.left_out),
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
        idle_s = self.clock.idle_s if progress or self.clock.phase != stepclock.DATA else 0.0  # (no shard: it waits)
        return messages.Beat(progress, readings, dict(self.values), idle_s, self.clock.inside)

    # ------------------------------------------------------------ the machine

    def feed(self, event: Callable[[], list[WorkerAction]]) -> None:
        """Give the machine an input and do what it wants."""
        self._inputs.feed(event)
        if self.gate is not None:
            with self._lock:
                self._say_place()

    def _do(self, action: WorkerAction) -> None:
        machine = self.protocol
        if isinstance(action, SendPush):
            self._send_push(action)
        elif isinstance(action, Settled):
            payload = self._payloads.pop(key_of(action.work), None)
            if payload is not None:
                payload.settle()
            if self.gate is not None:
                for work in (action.work, *action.others):
                    self.gate.settled(work)
            if action.applied:
                self.samples += sum(w.hi - w.lo for w in (action.work, *action.others))
        elif isinstance(action, AskShard):
            ask = action.ask
            request = ShardAsked(action.dataset, action.until_epoch, ask, action.pending)
            self.seat.ask(request, lambda answer: self.feed(lambda: machine.answered(ask, answer)))
        elif isinstance(action, AskLater):
            ask = action.ask
            self.seat.later(action.after_s, lambda: self.feed(lambda: machine.ask_again(ask)))
        elif isinstance(action, SendOpen):
            self._send_open(action)
        elif isinstance(action, SendDone):
            lease = action.lease
            done = ShardDone(lease.shard, lease.no, action.servers, action.skipped, action.route)
            self.seat.ask(done, lambda answer: self._done_answered(lease, answer))
        elif isinstance(action, SendGiveBack):
            lease = action.lease
            back = ShardReturned(lease.shard, lease.no, action.reason, action.late)
            self.seat.ask(back, lambda answer: self.feed(lambda: machine.given_back(lease.no)))
        elif isinstance(action, Halt):
            self.fail(FencedError(action.reason))
        elif not isinstance(action, Drop | WorkFinished):
            raise InternalError(f"no way to do {action!r}")

    def _done_answered(self, lease: Lease, answer: Answer) -> None:
        self.feed(lambda: self.protocol.done_answered(lease.no, answer))
        # That shard may have been the one that our own pending request waits for.
        self.feed(lambda: self.protocol.ask_again(self.protocol.asked))

    def _send_open(self, action: SendOpen, waits: Iterator[float] | None = None) -> None:
        ps, lease = action.ps, action.lease
        waits = waits or backoff(_OPEN_AGAIN_S, _OPEN_AGAIN_MAX_S, at_once=False)

        def then(answer: DataAnswer, body: memoryview) -> None:
            if isinstance(answer, Opened):
                buckets, marks = watermarks_of(answer)
                self.feed(lambda: self.protocol.opened(ps, lease.no, answer.incarnation, buckets, marks))
                if self.protocol.awaits_open(ps, lease.no):  # it has not heard of our map, or we not of its
                    self.seat.later(next(waits), again)
            elif isinstance(answer, LeaseClosed):
                self.feed(lambda: self.protocol.closed(ps, lease.no, answer.reason))
            elif not isinstance(answer, Moved):  # a newer map is here: the lease will be opened by that
                self._unexpected(ps, answer)

        def again() -> None:
            with self._lock:
                if self.protocol.awaits_open(ps, lease.no):
                    self._send_open(action, waits)

        client = self.tables.client
        if client.router.version == self.protocol.route:
            client.submit(ps, OpenShard(lease.shard, lease.start, lease.no, client.router.version), then)

    def _send_push(self, action: SendPush) -> None:
        ps, token, life = action.ps, action.token, action.life
        router = self.tables.client.router
        if router.version != self.protocol.route:
            return  # the machine is about to hear of a newer map, and will say this anew
        payload = self._payloads.get(key_of(action.work))
        parts: tuple[RowsPart, ...] = ()
        step = -1
        if payload is not None:
            step = payload.step
            self._route(payload, router)
            parts = tuple(payload.parts[router.slots.index(ps)])
            payload.sent()
        fate = action.skipped, step, action.left_out, action.more
        message = Push(router.version, token, parts, True, action.bitmap, *fate)

        def then(answer: DataAnswer, body: memoryview) -> None:
            with self._lock:
                if parts_held is not None:
                    parts_held.landed()
            if isinstance(answer, Pushed):
                if answer.nonfinite >= 0:
                    self.fail(self._nonfinite(self._name_of(answer.nonfinite), action.work, action.work))
                self.feed(lambda: self.protocol.pushed(ps, token, answer, life))
            elif not isinstance(answer, Moved):  # a newer map is here: what is owed is said anew by that
                self._unexpected(ps, answer)

        parts_held = payload
        self.tables.client.submit(ps, message, then, router)

    def _route(self, payload: _Payload, router: Router) -> None:
        """Group the gradients by ``router``, if they are not."""
        if payload.router.version == router.version and payload.parts:
            return
        for i, rows in enumerate(payload.tables):
            if rows.router.version != router.version:
                payload.tables[i] = regrouped = self._regroup(rows, router)
                payload.hold(regrouped.batch)
        payload.router = router
        payload.parts = parts_by_ps(payload.tables, len(router.slots), grads=True, rates=payload.rates)

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
        part, self._judged = self._judged, []
        counted = sum(step.counted for step in part)
        for step in part:
            if isinstance(verdict, Late):
                for work, _ in step.works:
                    self.feed(partial(self.protocol.late, work))
                self._drop_payload(step)
                continue
            weight = verdict.weight * (self._portion.samples or counted) / max(1, counted)
            if step.payload is not None:
                step.payload.step = verdict.step
                if weight != 1.0:
                    step.payload.weigh(weight)
            self._hand_over(step)

    def _drop_payload(self, step: _StepInHand) -> None:
        payload = self._payloads.pop(step.key, None)
        if payload is not None:
            payload.settle()

    def _hand_over(self, step: _StepInHand) -> None:
        """To the machine, which pushes it. With the lock held."""
        self.feed(partial(self.protocol.step, step.works, skipped=step.skipped))

    def _ready(self, step: _StepInHand, more: bool = False) -> None:
        """A step is computed. ``more``: its iteration goes on. With the lock held."""
        if step.payload is not None:
            self._payloads[step.key] = step.payload
            self._route(step.payload, self.tables.client.router)
        if not self._sync:
            self._hand_over(step)
            return
        self._part.append(step)
        if self._done() >= self._portion.samples:
            self._close_part(more)

    def _done(self) -> int:
        """Sync: samples of the step that are computed, or in hand."""
        in_hand = [k.work for k in self._kept] + ([self._left] if self._left is not None else [])
        return sum(step.samples for step in self._part) + sum(w.hi - w.lo for w in in_hand)

    def _close_part(self, more: bool = False) -> None:
        """Sync: nothing will be added to this part. ``more``: its iteration goes on with the next step. With the lock
        held."""
        part, self._part = self._part, []
        if part:
            assert self.gate is not None
            self._judged = part
            wholes = [wholes_of(work for work, _ in step.works) for step in part]
            works = tuple(work for found in wholes for work in found)
            nothing = (step.skipped or step.payload is None for step in part)
            dropped = [work for found, none in zip(wholes, nothing, strict=True) if none for work in found]
            self._judge(self.gate.ready(works, dropped, sum(step.counted for step in part), more))
            self._say_place()

    def _fits(self, work: RangeWork) -> bool:
        """Sync: whether ``work`` is as large as this step wants it. False: it was put back, and will be cut anew. With
        the lock held."""
        assert self.gate is not None
        if not self._part and not self._kept:
            self._portion = self._of_a_step(None if self._accumulates else self.gate.portion())
        wanted = self._portion.next(self._done()) if self._portion.samples else self._one_pass()
        if wanted == self.protocol.batch_samples or not self.protocol.put_back(work):
            return True
        self.protocol.set_batch_samples(wanted)
        return False

    def _of_a_step(self, told: BatchShare | None) -> _Portion:
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

    def _await_turn(self, run: _Run, work: RangeWork) -> bool:
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

    @property
    def _immediate(self) -> bool:
        """Whether a step is pushed at once, and the new values are pulled before the script goes on: alone, as plain
        PyTorch does; and with several optimizers, where what follows in the iteration is computed with them."""
        return self._alone or len(self.optimizers) > 1

    @property
    def _alone(self) -> bool:
        return self.seat.embedded and self.gate is None

    def stepped(self, optimizer: PsOptimizer) -> None:
        self._check()
        if not self.in_loop and not self._kept:
            if not any(held.table.has_grad for held in self.firing.fired(optimizer)) and not any(
                group.has_grad() for group in optimizer.groups
            ):
                return  # nothing to apply, as in plain PyTorch
            raise ScriptError(
                "opt.step() outside of job.steps() with a gradient of none of its batches: gradients belong to a batch "
                "of the loop"
            )
        self.clock.switch(stepclock.PUSH)
        self._keep_edits()
        if self._captured is not None:
            captured, self._captured = self._captured, None
            self._push_piece(captured, consumed=True)
        payload = self._capture([optimizer])
        if payload is not None:
            self._steps_here += 1
            if self._immediate or not self.in_loop:
                self._push_piece(payload)
                self._settle()
                if self.gate is not None and not self.in_loop:
                    with self._lock:
                        self.gate.leave()
                        self._say_place()
                self.tables.renew()
                self._behind = False
            else:
                if self._kept and self._was_zeroed():
                    self._leave_out()
                self._captured = payload
                self._stale.watch(self.tables.dense, self.tables.batches.values())
        self.clock.switch(stepclock.UPDATE)

    def _freshen(self) -> None:
        """The script uses values that its own step of this iteration has changed: the step is pushed now, and the new
        values are pulled."""
        self._stale.clear()
        captured, self._captured = self._captured, None
        if captured is None or not self.in_loop:
            return
        phase = self.clock.switch(stepclock.PUSH)
        self._push_piece(captured, consumed=True)
        self._settle()
        self.tables.renew()
        self._behind = False
        self.clock.switch(phase)

    def _before_refresh(self) -> None:
        """The newest values are about to be brought: first what the script has stepped with, or changed."""
        if self._captured is not None and self.in_loop:
            self._freshen()
        self._keep_edits()

    def hold(self, optimizer: PsOptimizer, of_torch: torch.optim.Optimizer) -> None:
        tables = (p.everstep_table for g in of_torch.param_groups for p in g["params"] if isinstance(p, TableParameter))
        twice = next((name for name in tables if name in self.firing.names), None)
        if twice is not None:
            raise ScriptError(f"two optimizers hold the weight of table {twice!r}: leave it out of one of them")
        self.firing.hold(optimizer, of_torch)

    def check_tables(self) -> None:
        """Before the first batch: every table has one optimizer that fires it. Raises ScriptError."""
        if len(self.optimizers) > 1 and (free := self.firing.free):
            raise ScriptError(
                f"table {free[0]!r} is in none of the {len(self.optimizers)} optimizers, so no step() is its own: give "
                "its weight to the optimizer that shall step it (model.parameters() has it after job.sparse)"
            )

    def _capture(self, optimizers: Sequence[PsOptimizer | None]) -> _Payload | None:
        """What ``grad`` holds now, ready to be pushed; None: nothing. Raises NonFiniteGradientError (policy raise)."""
        router = self.tables.client.router
        out: list[TableRows] = []
        holders: list[BatchRows] = []
        seen: list[TableRows] = []
        rates: dict[TableId, Rate] = {}
        try:
            for optimizer in optimizers:
                if optimizer is not None:
                    self._declare_thawed(optimizer)
                    for group in optimizer.groups:
                        dense = group.gradient()
                        if dense is not None:
                            rates[group.spec.id] = group.twin.rate()
                            out.append(self._rows_of(group.spec, dense.keys, dense.grads, group, router, holders))
                for held in self.firing.fired(optimizer):
                    found = held.table.take()
                    if found is None:
                        continue
                    spec = self.tables.infos[held.table.name].spec
                    rates[spec.id] = held.rate()
                    if held.maximize:
                        out.append(self._rows_of(spec, found.keys, -found.grads, None, router, holders))
                    elif found.rows is not None and found.rows.router.version == router.version:
                        holders.append(found.rows.batch.retain())
                        found.rows.touched = True
                        out.append(found.rows)
                        seen.append(found.rows)
                    else:
                        out.append(self._rows_of(spec, found.keys, found.grads, None, router, holders))
            if out:
                self.schedule.stepped()
                for buffers in () if self._alone else self._buffers:
                    if (change := buffers.gradient()) is not None:
                        out.append(self._rows_of(buffers.spec, None, change, buffers, router, holders))
        except BaseException:
            for holder in holders:
                holder.close()
            raise
        if not out:
            return None
        payload = _Payload(out, holders, router, rates)
        payload.seen = seen
        bad = next((rows for rows in out if not isfinite_all(rows.grads)), None)
        payload.bad = bad.spec.name if bad is not None else ""
        return payload

    def _rows_of(
        self,
        spec: TableSpec,
        keys: NDArray[np.int64] | None,
        grads: NDArray[np.float32],
        group: FlatGroup | None,
        router: Router,
        holders: list[BatchRows],
    ) -> TableRows:
        """A copy of gradients where they can be pushed from."""
        batch = BatchRows(self.tables.client.memory, router)
        holders.append(batch)
        if keys is None and group is not None:
            order = group.order(router)
            (rows,) = batch.add([order.found], values=False)
            gather_rows(grads, order.index, rows.grads)
        else:
            assert keys is not None
            routed, inverse, counts = router.route(spec.id, keys)
            (rows,) = batch.add([(spec, routed, counts)], values=False)
            rows.grads[inverse] = grads
        rows.touched = True
        return rows

    def _declare_thawed(self, optimizer: PsOptimizer) -> None:
        """Parameters that were frozen when the optimizer was made, and learn now, get a table of their own."""
        new = optimizer.thawed()
        if new:
            self.tables.dense += new
            self.tables.declare()

    def zeroed(self, optimizer: PsOptimizer) -> None:
        """``zero_grad``: batches that no step has consumed are left out, once all of their gradients are gone. Tables
        that follow the only optimizer are zeroed with it."""
        for held in self.firing.fired(optimizer):
            held.table.zero()
        if self._kept and not self._any_grad():
            self._leave_out()

    def _any_grad(self) -> bool:
        return any(t.has_grad for t in self.tables.batches.values()) or any(
            group.has_grad() for optimizer in self.optimizers for group in optimizer.groups
        )

    def _leave_out(self) -> None:
        if self._captured is not None:  # the step in hand has consumed them, whatever becomes of gradients now
            return
        for kept in self._kept:
            kept.learnt = False
        self._probe = None

    def dense_state(self, group: DenseGroup) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Keys and optimizer state (float32 [rows, floats]) of a group as they are on the ps now."""
        self._freshen()
        self.tables.declare()
        keys, _, state = self.tables.scan(group.spec)
        if len(keys) != group.n_rows:
            raise InternalError(f"{group.spec.name} has {len(keys)} rows instead of {group.n_rows}")
        return keys, state

    # ------------------------------------------------------------ the loop

    def steps(self, loader: Loader) -> Iterator[Any]:
        """Batches of ``loader``, each with its rows in place; what the script computes from them is pushed."""
        if self.tables.current is not None:
            raise ScriptError(
                "job.steps() inside the loop of another job.steps(): end the outer loop first, or read the second "
                "source beside the loop by other.read(epoch, lo, hi) of its loader"
            )
        self._check()
        if not self._sync and 0 < loader.largest_batch < loader.batch_size:
            raise ScriptError(
                f"largest_batch={loader.largest_batch} is below batch_size={loader.batch_size}: in mode ps "
                f"({self.seat.spec.consistency}) each batch is applied alone, so it has to fit; use a smaller "
                "batch_size, or --consistency sync"
            )
        plan = loader.plan()
        first = self._epochs_done.get(plan.name, 0)
        until = first + loader.epochs
        dataset = self._register(plan, first, until)
        self.registered += 1
        self._epochs_done[plan.name] = until
        self.check_tables()
        self._keep_buffers()
        self._keep_edits()
        self.tables.declare()
        self.tables.forget_asides()
        self._watch_backward()
        with self._lock:
            self.loader_batch, self._largest_batch = loader.batch_size, loader.largest_batch
            self.protocol.set_batch_samples(self._one_pass())
        self.feed(lambda: self.protocol.begin(dataset, until))
        ahead = 0 if any(table.renorms for table in self.tables.batches.values()) else self._ahead
        self.tables.ahead = ahead > 0
        self._pushed = False
        run = _Run(loader, ahead)
        if ahead:
            run.thread = threading.Thread(target=self._read_ahead, args=(run,), name="everstep-reader", daemon=True)
            run.thread.start()
        complete = False
        draws = loader.may_draw
        if draws:
            STREAMS.take()
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
            if draws:
                STREAMS.give()
            self.clock.switch(stepclock.OUTSIDE)
            self._looping = False
            self._end_of_loop(run, complete)

    def _keep_buffers(self) -> None:
        """Give the buffers of the models a place on the ps."""
        counts = self.schedule.used and not self._alone
        found = [id(m) for m in self.models] + [0] * counts
        if found == self._buffered:
            return
        self._buffered = found
        kept, self._constant = find_buffers(self.models)
        if counts:
            kept += [(f"{OWN}{key}", self.schedule.count, key) for key in ("steps", "by_step")]
        known = {(id(module), key) for group in self._buffers for _, module, key in group.places}
        new = [place for place in kept if (id(place[1]), place[2]) not in known]
        if new:
            group = BufferGroup(f"buffers/{len(self._buffers)}", new)
            self._buffers.append(group)
            self.tables.dense.append(group)

    def _watch_backward(self) -> None:
        """The last parameters of a model get their gradients first: there the clock hears of backward."""
        for group in self.tables.dense:
            if isinstance(group, DenseGroup) and group.params and group.spec.id not in self._watched:
                self._watched.add(group.spec.id)
                hook = group.params[-1].register_post_accumulate_grad_hook
                hook(lambda _: self.clock.first_gradient())  # type: ignore[no-untyped-call]

    def _look_ahead(self, spent_s: float) -> None:
        """Hold leases for ``_MASTER_AWAY_S`` of work, so that a restart of the master finds nobody without one."""
        if self.seat.embedded or self._sync:
            return
        self._batch_s = 0.8 * self._batch_s + 0.2 * spent_s if self._batch_s else spent_s
        batches = int(_MASTER_AWAY_S / max(self._batch_s, 1e-4))
        self.protocol.ask_ahead = min(max(2, batches), _AHEAD_BATCHES_MAX)

    def _register(self, plan: Any, begin: int, until: int) -> int:
        answer = self.seat.call(PlanRegistered(plan, self.registered + 1, begin, until), _MASTER_S)
        if isinstance(answer, Registered):
            return answer.dataset
        if isinstance(answer, Refused):
            raise DataError(answer.error)
        if isinstance(answer, Fenced):
            raise FencedError(answer.reason)
        raise InternalError(f"Register was answered with {answer!r}")

    def _next(self, run: _Run) -> BatchItem | None:
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
            if self._kept and not self._goes_on(item.work):
                self._cut_step()
            self.tables.take(item)
            run.permits.release()
            self._left = item.work
            self._behind = run.thread is not None and self._pushed
            self._steps_here = 0
            if self.gate is not None and self._sync and not (self._portion.samples and self._part):
                with self._lock:
                    self.gate.iterate()
            self._begin_schedule()
            self._grads_before = self._grad_marks()
            self.batches += 1
            if not self.seat.embedded:
                dataset, epoch, _ = split_key(item.work.lease.shard)
                seed_range(self.seat.spec.seed, epoch, item.work.lo, dataset)
            return item

    def _wanted(self, item: BatchItem, run: _Run) -> bool:
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

    def _read(self, run: _Run) -> BatchItem | None:
        """Take work, read its batch, ask for its rows. None when all data is done."""
        while (work := self._await_work(run)) is not None:
            _, epoch, _ = split_key(work.lease.shard)
            batch = run.loader.read(epoch, work.lo, work.hi)
            if self._await_turn(run, work):
                return self.tables.prepare(work, batch, create=True)
        return None

    def _await_work(self, run: _Run) -> RangeWork | None:
        nothing_at = time.monotonic()
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
                over = self.protocol.waiting or self.protocol.finished
                if self._part and over and not self._kept:
                    self._close_part()  # it stays smaller
                waits = self._sync and over and self._kept and self.protocol.pending
                if waits and self._rests(nothing_at) and self.gate is not None:
                    self.gate.leave(keeps=True)  # the others need not wait for a step that we may never make
                    self._say_place()
                if (
                    self.gate is not None
                    and not self.gate.pending
                    and (self.protocol.waiting or self.protocol.finished)
                    and self._rests(nothing_at)
                ):
                    self.gate.rest()
                    self._say_place()
                if self.protocol.finished or self.protocol.ended:
                    return None
                self._changed.wait(_PATIENCE_S if self._sync else 0.2)

    def _rests(self, since: float) -> bool:
        """Sync: whether a worker that has had nothing to do ``since`` is not to be waited for any more: the next epoch
        begins as soon as all are through with this one, and shall not begin without it."""
        return not self._sync or self.protocol.ended or time.monotonic() > since + _PATIENCE_S

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

    def _from_reader(self, run: _Run) -> BatchItem | None:
        begin = time.perf_counter()
        while True:
            try:
                with STREAMS.lent():
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

    def _end_of_iteration(self, item: BatchItem) -> None:
        self._stale.clear()
        self._check()
        self._keep_edits()
        self._end_schedule()
        if not self.optimizers:
            self._captured = self._capture([None])  # tables alone, and nobody who steps: each batch is a step
            if self._captured is not None:
                for table in self.tables.batches.values():
                    table.zero()
        left, self._left = self._left, None
        self.tables.release(item)
        if self._captured is not None:
            captured, self._captured = self._captured, None
            assert left is not None and item.work is not None
            kept = self._take_kept(consumed=True)
            counted = sum(w.hi - w.lo for w, learnt in kept if learnt) + item.work.hi - item.work.lo
            self._push([*kept, (left, True)], captured, counted)
        elif self._steps_here:
            if left is not None:
                self._push([(left, True)], None)
        elif left is not None:
            self._without_step(left)
        item.close()

    def _begin_schedule(self) -> None:
        if self._alone:
            return
        self.schedule.begin()
        self._lrs_seen = [float(g["lr"]) for o in self.optimizers for g in o.param_groups]

    def _end_schedule(self) -> None:
        """Schedules count the job's steps; of one that the job does not know this is said once."""
        if self._alone:
            return
        self.schedule.end()
        if self.schedule.used or self._told_schedule or self.seat.spec.workers == 1:
            return
        if self._lrs_seen != [float(g["lr"]) for o in self.optimizers for g in o.param_groups]:
            self._told_schedule = True
            print(
                "everstep: the learning rate changes in the loop by something that the job does not know, so each "
                "worker counts its own iterations: job.track(scheduler=scheduler) makes it one schedule for the job",
                flush=True,
            )

    def _without_step(self, work: RangeWork) -> None:
        """An iteration is over in which the script has not stepped."""
        marks = self._grad_marks()
        learnt = any(m[0] for m in marks) and marks != self._grads_before
        if self._kept and self._was_zeroed():
            self._leave_out()
        if learnt:
            self._accumulates = True
        self._kept.append(_Kept(work, learnt))
        if not any(kept.learnt for kept in self._kept):
            self._push(self._take_kept(), None)
            return
        self._probe = self._find_probe()
        if self.gate is not None and not self._sync:
            with self._lock:  # a later step will push it: until then it must not count as one that is under way
                self.gate.settled(work)
        self.feed(lambda: self.protocol.hold_back(work))

    def _grad_marks(self) -> list[tuple[int, int]]:
        """Of each gradient: which it is, and how often it was changed; (0, 0): there is none."""
        out = [(int(t.has_grad), t.backwards) for t in self.tables.batches.values()]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if not is_table(p):
                        out.append((0, 0) if (g := p.grad) is None else (id(g), g._version))
        return out

    def _find_probe(self) -> tuple[torch.nn.Parameter, torch.Tensor] | None:
        """The smallest dense gradient. It is kept alive, so that another one in its place is seen to be another."""
        found = [p for o in self.optimizers for group in o.groups for p in group.params if p.grad is not None]
        smallest = min(found, key=lambda p: p.numel(), default=None)
        return None if smallest is None or smallest.grad is None else (smallest, smallest.grad)

    def _was_zeroed(self) -> bool:
        """Whether the gradients of the kept batches are gone, by whatever way."""
        if self._probe is None:
            return not self._any_grad()
        p, grad = self._probe
        return p.grad is not grad

    def _take_kept(self, consumed: bool = False) -> list[tuple[RangeWork, bool]]:
        """``consumed``: by a step that was captured before, when their gradients were there."""
        if self._kept and not consumed and self._was_zeroed():
            self._leave_out()
        kept, self._kept, self._probe = self._kept, [], None
        return [(k.work, k.learnt) for k in kept]

    def _goes_on(self, work: RangeWork) -> bool:
        """Whether one step can consume the kept batches and ``work``: the same buckets want them."""
        with self._lock:
            return self.protocol.alike([*(k.work for k in self._kept), work])

    def _cut_step(self) -> None:
        """What was accumulated cannot be pushed with what comes: some buckets have consumed some of it before, with a
        worker that was lost. It is a step by itself."""
        self.tables.over()  # (the rows of the last batch are no more where its keys were)
        payload = self._capture(list(self.optimizers) or [None])
        kept = [(k.work, k.learnt) for k in self._kept]
        self._kept, self._probe = [], None
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for table in self.tables.batches.values():
            table.zero()
        self._push(kept, payload)

    def _keep_edits(self) -> None:
        """Values that the script changed by itself are stored on the ps, as plain PyTorch keeps them, where no other
        worker's steps can be lost by that: alone, as the only worker, and in consistency sync, where all workers make
        the change between the same two steps. Else they are refused. Raises ScriptError."""
        if self._ending():
            return
        for constant in self._constant:
            constant.check()
        for group in self.tables.dense:
            if isinstance(group, BufferGroup) and not self._alone:
                continue  # it goes with the next step
            if not group.changed():
                continue
            if isinstance(group, BufferGroup):
                self.tables.put(group.spec, None, group.store(), replace=True)
                continue
            if not self._edits_are_kept:
                if not self.in_loop:
                    raise ScriptError(
                        "the script changed parameters outside of the loop (an average, say, was copied into the "
                        "model), and job.eval, job.steps or state_dict would overwrite them with those of the ps: "
                        "evaluate with model.eval() and torch.no_grad() instead of job.eval, and put the old values "
                        "back afterwards, or change them in the loop and run with --consistency sync"
                    )
                item = self.tables.current
                names = group.changed_names(item.dense.get(group.spec.id)) if item is not None else []
                raise ScriptError(
                    f"the script changed parameter {names[0] if names else group.spec.name!r} in place (not through an "
                    "optimizer): with several workers and no common step, steps of the others would be lost by that; "
                    "run with --consistency sync or --mode allreduce, or put the change into the loss"
                )
            self._check_fresh("parameters")
            self._await_pulls()
            self.tables.put(group.spec, None, group.initial(), replace=True)
            group.seen()
        for name, table in self.tables.batches.items():
            if not self.in_loop or not len(table.keys) or not (table.changed() or self._renormed(table)):
                continue
            if table.renormed and not self._edits_are_kept:
                raise ScriptError(
                    f"max_norm of table {name!r} changes rows in forward: with several workers and no common step, "
                    "steps of the others would be lost by that; run with --consistency sync, with --mode allreduce "
                    "without ps, or leave it out"
                )
            if not self._edits_are_kept:
                raise ScriptError(
                    f"the script changed rows of table {name!r} in place (not through an optimizer): with several "
                    "workers and no common step, steps of the others would be lost by that; run with --consistency "
                    "sync, with --mode allreduce without ps, or put the change into the loss"
                )
            spec = self.tables.infos[name].spec
            self._check_fresh(f"rows of table {name!r}")
            self._await_pulls()
            self.tables.put(spec, table.keys, table.values, replace=True)
            table.seen()
            table.renormed = False
        self._pulled = False

    def _check_fresh(self, what: str) -> None:
        """Values that lack a step may not be stored over those that have it. Raises ScriptError."""
        if self._behind and self.in_loop:
            raise ScriptError(
                f"the script changed {what} in place before opt.step(), and their values were pulled ahead: the step "
                "of the batch before would be lost by that; change them behind opt.step(), or set EVERSTEP_PREFETCH=0"
            )

    def _renormed(self, table: BatchTable) -> bool:
        """Sync: each worker's lookups change rows of its own; all take the step that lies before such changes."""
        return table.renormed and self._sync and not self._alone

    @property
    def _only(self) -> bool:
        """Whether no other worker steps."""
        return self.seat.embedded or (self.seat.spec.workers == 1 and self.seat.slot == 0)

    @property
    def _edits_are_kept(self) -> bool:
        return self._only or (self._sync and self.in_loop)

    def _await_pulls(self) -> None:
        """Before a change by hand is stored: what was pushed is at the ps. Sync: a step of the job without gradients
        lies between, so that all workers have pulled the values that all of them change, and none has pushed since."""
        if self._pulled:
            return
        left = self._left
        if self._sync and not self._alone:
            if self._kept or left is None or left.hi - left.lo < 2:
                raise ScriptError(
                    "the script changed weights in place, and its batch has too few samples left, or is a part of an "
                    "accumulated step: change them behind opt.step(), and use larger batches or drop_last=True"
                )
            self._push_piece(None)
            self._pulled = True
        self._settle()

    def _end_of_loop(self, run: _Run, complete: bool) -> None:
        """Let pushes arrive; when the loop ended early, give back what is not finished."""
        run.stop.set()
        self._stale.clear()
        failed = self.failure is not None
        item, left = self.tables.current, None
        if item is not None and not failed:
            try:
                self._keep_edits()
                left = self._left
                if (self._captured is not None or self._steps_here) and left is not None:
                    # The script stepped, then left the loop.
                    captured, self._captured = self._captured, None
                    kept = self._take_kept(consumed=True) if captured is not None else []
                    self._push([*kept, (left, True)], captured)
                    with self._lock:
                        self._close_part()
            except (NonFiniteGradientError, ScriptError) as error:
                self.fail(error)
        self._left = None
        if item is not None:
            self.tables.over()
            item.close()
        self.tables.current = None
        self.tables.over()
        self._drop_captured()
        if run.thread is not None:
            with self._lock:
                self._changed.notify_all()
            run.permits.release()
            run.thread.join(timeout=5.0)
            while not run.ready.empty():
                unread = run.ready.get()
                if isinstance(unread, BatchItem):
                    unread.close()
        if complete:
            if self.gate is not None and self._kept:
                with self._lock:
                    self.gate.leave(keeps=True)
                    self._say_place()
            self._settle()
            self.tables.refresh_dense()
            return
        self.leave("the loop ended early" if not failed else "the script failed")

    def leave(self, reason: str) -> None:
        """Wait a little for pushes on their way, then give all leases back. Batches that no step has consumed are left
        out: their gradient was never stepped with."""
        limit = time.monotonic() + _LEAVE_S
        if self._kept and not self._ending():
            self._leave_out()
            kept = self._take_kept()
            self.left_out += sum(w.hi - w.lo for w, _ in kept)
            with self._lock:
                self._close_part()
                while self._judged and not self._ending() and time.monotonic() < limit:
                    self._changed.wait(0.1)
                self._hand_over(_StepInHand(tuple(kept), None))  # nothing is applied, so it is nobody's turn
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

    def _push(
        self, works: Sequence[tuple[RangeWork, bool]], payload: _Payload | None, counted: int = -1, more: bool = False
    ) -> None:
        """Consume ``works`` (with each, whether something was learnt from it) with one optimizer step of ``payload``.
        ``counted``: samples that it has learnt from; -1: those of ``works``. ``more``: the iteration goes on.

        Raises NonFiniteGradientError (policy raise)."""
        skipped = False
        if payload is not None and payload.bad:
            payload.settle()
            if self.seat.spec.nonfinite == "raise":
                error = self._nonfinite(payload.bad, works[0][0], works[-1][0])
                self.fail(error)
                raise error
            self.skipped += 1
            payload, skipped = None, True
            works = [(work, False) for work, _ in works]
        if payload is not None and self._portion.samples:
            payload.weigh(sum(w.hi - w.lo for w, _ in works) / self._portion.samples)
        self.left_out += 0 if skipped else sum(w.hi - w.lo for w, learnt in works if not learnt)
        if payload is None or counted < 0:
            counted = sum(w.hi - w.lo for w, learnt in works if learnt) if payload is not None else 0
        self._pushed = self._pushed or payload is not None
        with self._lock:
            self._ready(_StepInHand(tuple(works), payload, counted, skipped), more)

    def _push_piece(self, payload: _Payload | None, consumed: bool = False) -> None:
        """Consume the kept batches, and one sample of the batch in hand: what is left of it goes with what follows in
        the iteration. Raises ScriptError where nothing is left."""
        works = self._take_kept(consumed)
        left = self._left
        counted = sum(w.hi - w.lo for w, learnt in works if learnt) + self.in_hand
        if self._sync and not self.in_loop and works:
            self._begin_behind(works[0][0])
        if left is not None:
            first, rest = left, None
            if left.hi - left.lo > 1:
                with self._lock:
                    halves = self.protocol.split(left, left.lo + 1)
                    if self.gate is not None:
                        self.gate.cut(left, left.lo + 1)
                if halves is not None:
                    first, rest = halves
            works.append((first, True))
            self._left = rest
        if not works:
            raise ScriptError(
                "opt.step() was called more often in one iteration than its batch has samples: use larger batches, or "
                "drop_last=True"
            )
        self._push(works, payload, counted, more=self._left is not None)
        if self._sync and self.in_loop:
            self._next_turn()
        elif self._sync:
            with self._lock:
                self._close_part()

    def _begin_behind(self, work: RangeWork) -> None:
        """Sync: a step behind the loop belongs to the next step of the job, too."""
        gate = self.gate
        assert gate is not None
        with self._lock:
            while True:
                self._check()
                if self._stopping or gate.may_begin():
                    gate.begin(work)
                    return
                self._say_place(again=True)
                self._changed.wait(0.2)

    def _next_turn(self) -> None:
        """Sync: what follows in the iteration belongs to the next step of the job; wait until that may begin."""
        gate, left = self.gate, self._left
        assert gate is not None
        with self._lock:
            self._close_part(more=left is not None)
            while left is not None:
                self._check()
                if self._stopping or not self.protocol.current(left):
                    return
                if gate.may_begin(goes_on=True):
                    gate.begin(left)
                    return
                self._say_place(again=True)
                self._changed.wait(0.2)

    def _settle(self) -> None:
        """Wait until all that was pushed is acknowledged."""
        with self._lock:
            while (self.protocol.unacknowledged or self._payloads) and not self._ending() and not self._stopping:
                self._changed.wait(0.2)
        self._check()

    def _drop_captured(self) -> None:
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.settle()

    def _regroup(self, rows: TableRows, router: Router) -> TableRows:
        """The same gradients, grouped by ``router``."""
        return self._rows_of(rows.spec, rows.keys, rows.grads, None, router, [])

    def _nonfinite(self, table: str, first: RangeWork, last: RangeWork) -> NonFiniteGradientError:
        _, epoch, _ = split_key(first.lease.shard)
        what = (
            "the dense part"
            if table.startswith("dense/")
            else "a buffer"
            if table.startswith("buffers/")
            else f"table {table!r}"
        )
        return NonFiniteGradientError(
            f"the gradient of {what} has NaN or Inf in samples {first.lo}..{last.hi} of epoch {epoch}; nothing of that "
            "batch was applied: lower the learning rate or clip gradients, or run with --nonfinite skip"
        )

    def _name_of(self, table: int) -> str:
        names = [i.spec for i in self.tables.infos.values()] + [g.spec for g in self.tables.dense]
        return next((s.name for s in names if s.id == table), f"#{table}")
