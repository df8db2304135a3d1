"""Drives the worker's protocol machine: its actions become requests to the ps and the master, the answers go back in.

Three kinds of threads meet here: the script's, a reader's (where rows are pulled ahead), and those of the links and of
the control connection, which bring answers. The machine and the admission of steps are touched under one lock; actions
run under it too, so that pushes leave in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from everstep.api.listeners import WorkerRuntime
from everstep.api.loop_ending import LoopEnding
from everstep.brain.events import Answer, ShardAsked, ShardDone, ShardReturned
from everstep.errors import EverstepError, FencedError, InternalError, NonFiniteGradientError
from everstep.ids import LeaseNo, Slot, TableId
from everstep.model.placement import Placement
from everstep.model.shard import Lease, split_key
from everstep.model.step_schedule import StepSchedule
from everstep.net import messages
from everstep.net.messages import (
    LEASE_CLOSED,
    OPEN_TOGETHER,
    AllOpened,
    Bad,
    DataAnswer,
    Moved,
    OpenShards,
    Push,
    Pushed,
    RowsPart,
    ShardToOpen,
)
from everstep.net.retry import backoff
from everstep.tables.computed_step import ComputedStep, StepKey, StepPayload, key_of
from everstep.tables.inputs import Inputs
from everstep.tables.step_admission import Judged, LateStep, StepAdmission
from everstep.tables.worker_protocol import (
    AskLater,
    AskShard,
    BatchFinished,
    Drop,
    Halt,
    RangeWork,
    SendDone,
    SendGiveBack,
    SendOpen,
    SendPush,
    WorkerAction,
    WorkerProtocol,
    WorkFinished,
    marks_of,
    partitions_of,
)

_OPEN_AGAIN_S = 0.05  # a ps that has not heard of the newest map does so soon; then twice as long each time
_OPEN_AGAIN_MAX_S = 1.0
_TICK_S = 0.2


class OpenTogether(msgspec.Struct, frozen=True, gc=False):
    """Is several ``SendOpen`` to one ps, in one request."""

    ps: Slot
    leases: tuple[Lease, ...]


def together(actions: Sequence[WorkerAction]) -> list[WorkerAction | OpenTogether]:
    """Return the same with the leases that are to be opened at one ps in one request, ``OPEN_TOGETHER`` at most, where
    the first of them was: a new map has a worker open all that it holds, at every ps."""
    by_ps: dict[Slot, list[Lease]] = {}
    for action in actions:
        if isinstance(action, SendOpen):
            by_ps.setdefault(action.ps, []).append(action.lease)
    out: list[WorkerAction | OpenTogether] = []
    for action in actions:
        if not isinstance(action, SendOpen):
            out.append(action)
            continue
        leases = by_ps.pop(action.ps, [])
        for at in range(0, len(leases), OPEN_TOGETHER):
            out.append(OpenTogether(action.ps, tuple(leases[at : at + OPEN_TOGETHER])))
    return out


class ProtocolDriver:
    """See the top of this file. ``changed`` is notified whenever a wait may be over; it is a condition of ``lock``."""

    def __init__(self, runtime: WorkerRuntime, admission: StepAdmission, name_of: Callable[[TableId], str]) -> None:
        """Take ``name_of``: a table's name, for messages."""
        self.runtime, self.client = runtime, runtime.client
        self.protocol = WorkerProtocol(worker=runtime.slot, incarnation=runtime.incarnation, batch_samples=1)
        self.admission = admission
        if admission.sync:
            self.protocol.ask_ahead = 0  # all take the same number of batches, and none goes on without the master
        self.ending = LoopEnding()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.samples = 0  # applied, by this process
        self.tells = False  # the script has begun a loop: the master is told where we are
        self._inputs: Inputs[WorkerAction | OpenTogether] = Inputs(self.changed, self._do)
        self._payloads: dict[StepKey, StepPayload] = {}
        self._name_of = name_of

    def __repr__(self) -> str:
        return f"<ProtocolDriver {self.protocol} {len(self._payloads)} payloads>"

    # ------------------------------------------------------------ what the master orders; any thread

    def placed(self, placement: Placement) -> None:
        self.feed(lambda: self.protocol.placement(placement))

    def revoked(self, lease: LeaseNo) -> None:
        self.feed(lambda: self.protocol.revoked(lease))

    def scheduled(self, schedule: StepSchedule) -> None:
        """Take the master's word of who may go on (consistency sync and bounded)."""
        if self.admission.gate is None:
            return
        with self.lock:
            self._carry_out(self.admission.schedule(schedule))
            self.report_clock()
            self.changed.notify_all()

    def welcomed(self) -> None:
        """Said hello to a master, perhaps another one than before: it may know nothing of where we are."""
        with self.lock:
            self.report_clock(again=True)

    def fail(self, error: EverstepError) -> None:
        """End whatever waits, here and in the script's thread, with ``error``."""
        self.client.fail(error)
        with self.lock:
            self.ending.failure = self.ending.failure or error
            self.changed.notify_all()

    def held(self) -> tuple[Lease, ...]:
        with self.lock:
            return self.protocol.held()

    # ------------------------------------------------------------ steps

    def ready(self, step: ComputedStep, more: bool = False) -> None:
        """A step is computed: it goes to the ps once it is admitted. ``more``: its iteration goes on. With the lock
        held."""
        if step.payload is not None:
            self._payloads[step.key] = step.payload
            step.payload.route(self.client.router)
        if not self.admission.sync:
            self.hand_over(step)
            return
        admitted = self.admission.ready(step, more)
        if not self.admission.open:
            self._closed(admitted)

    def close_part(self, more: bool = False) -> None:
        """Sync: nothing will be added to this worker's part of the step under way. With the lock held."""
        if self.admission.open:
            self._closed(self.admission.close(more))

    def hand_over(self, step: ComputedStep) -> None:
        """Give a step to the machine, which pushes it. With the lock held."""
        self.feed(partial(self.protocol.step, step.works, skipped=step.skipped))

    @property
    def on_their_way(self) -> bool:
        """Return whether some of what was pushed is not acknowledged."""
        return bool(self.protocol.unacknowledged or self._payloads)

    def settle(self) -> None:
        """Wait until all that was pushed is acknowledged, or the script is to end. Raises the failure."""
        ending = self.ending
        with self.lock:
            while self.on_their_way and not ending.over and not ending.stopping:
                self.changed.wait(_TICK_S)
        ending.check()

    def report_clock(self, again: bool = False) -> None:
        """Tell the master where we are, if it needs to know. With the lock held."""
        clock = self.admission.due(again) if self.tells else None
        if clock is not None:
            self.runtime.ask(messages.ClockReported(clock), lambda answer: None)

    def _closed(self, admitted: tuple[Judged, ...]) -> None:
        self._carry_out(admitted)
        self.report_clock()

    def _carry_out(self, admitted: Iterable[Judged]) -> None:
        for found in admitted:
            step = found.step
            if isinstance(found, LateStep):
                for work, _ in step.works:
                    self.feed(partial(self.protocol.late, work))
                self._drop_payload(step.key)
                continue
            if step.payload is not None:
                step.payload.step = found.number
                if found.weight != 1.0:
                    step.payload.weigh(found.weight)
            self.hand_over(step)

    def _drop_payload(self, key: StepKey) -> None:
        payload = self._payloads.pop(key, None)
        if payload is not None:
            payload.settle()

    # ------------------------------------------------------------ the machine

    def feed(self, event: Callable[[], list[WorkerAction]]) -> None:
        """Give the machine an input and do what it wants."""
        self._inputs.feed(lambda: together(event()))
        if self.admission.gate is not None:
            with self.lock:
                self.report_clock()

    def _do(self, action: WorkerAction | OpenTogether) -> None:
        machine = self.protocol
        if isinstance(action, SendPush):
            self._send_push(action)
        elif isinstance(action, BatchFinished):
            self._finished(action)
        elif isinstance(action, AskShard):
            ask = action.ask
            request = ShardAsked(action.dataset, action.until_epoch, ask, action.pending)
            self.runtime.ask(request, lambda answer: self.feed(lambda: machine.answered(ask, answer)))
        elif isinstance(action, AskLater):
            ask = action.ask
            self.runtime.later(action.after_s, lambda: self.feed(lambda: machine.ask_again(ask)))
        elif isinstance(action, OpenTogether):
            self._send_open(action.ps, action.leases)
        elif isinstance(action, SendDone):
            lease = action.lease
            done = ShardDone(lease.shard, lease.no, action.servers, action.skipped, action.route)
            self.runtime.ask(done, lambda answer: self._done_answered(lease, answer))
        elif isinstance(action, SendGiveBack):
            lease = action.lease
            back = ShardReturned(lease.shard, lease.no, action.reason, action.late)
            self.runtime.ask(back, lambda answer: self.feed(lambda: machine.given_back(lease.no)))
        elif isinstance(action, Halt):
            self.fail(FencedError(action.reason))
        elif not isinstance(action, Drop | WorkFinished):
            raise InternalError(f"no way to do {action!r}")

    def _finished(self, action: BatchFinished) -> None:
        self._drop_payload(key_of(action.work))
        gate = self.admission.gate
        if gate is not None:
            for work in (action.work, *action.others):
                gate.finished(work)
        if action.applied:
            self.samples += sum(w.hi - w.lo for w in (action.work, *action.others))

    def _done_answered(self, lease: Lease, answer: Answer) -> None:
        self.feed(lambda: self.protocol.done_answered(lease.no, answer))
        # That shard may have been the one that our own pending request waits for.
        self.feed(lambda: self.protocol.ask_again(self.protocol.asked))

    def _send_open(self, ps: Slot, leases: tuple[Lease, ...], waits: Iterator[float] | None = None) -> None:
        waits = waits or backoff(_OPEN_AGAIN_S, _OPEN_AGAIN_MAX_S, at_once=False)

        def then(answer: DataAnswer, body: memoryview) -> None:
            if isinstance(answer, AllOpened):
                self.feed(lambda: self._opened(ps, leases, answer))
                if self._awaited(ps, leases):  # it has not heard of our map, or we not of its
                    self.runtime.later(next(waits), again)
            elif not isinstance(answer, Moved):  # a newer map is here: the leases will be opened by that
                self._unexpected(ps, answer)

        def again() -> None:
            with self.lock:
                left = self._awaited(ps, leases)
                if left:
                    self._send_open(ps, left, waits)

        client = self.client
        if client.router.version == self.protocol.route:
            shards = tuple(ShardToOpen(lease.shard, lease.start, lease.no) for lease in leases)
            client.submit(ps, OpenShards(shards, client.router.version), then)

    def _opened(self, ps: Slot, leases: tuple[Lease, ...], answer: AllOpened) -> list[WorkerAction]:
        out: list[WorkerAction] = []
        partitions = partitions_of(answer.partitions)
        for lease, encoded in zip(leases, answer.watermarks, strict=True):
            if encoded is None:
                out += self.protocol.closed(ps, lease.no, LEASE_CLOSED)
            else:
                out += self.protocol.opened(ps, lease.no, answer.incarnation, partitions, marks_of(encoded))
        return out

    def _awaited(self, ps: Slot, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        return tuple(lease for lease in leases if self.protocol.awaits_open(ps, lease.no))

    def _send_push(self, action: SendPush) -> None:
        ps, token, life = action.ps, action.token, action.life
        router = self.client.router
        if router.version != self.protocol.route:
            return  # the machine is about to hear of a newer map, and will say this anew
        payload = self._payloads.get(key_of(action.work))
        parts: tuple[RowsPart, ...] = ()
        step = -1
        if payload is not None:
            step = payload.step
            payload.route(router)
            parts = tuple(payload.parts[router.slots.index(ps)])
            payload.sent()
        fate = action.skipped, step, action.left_out, action.more
        message = Push(router.version, token, parts, True, action.bitmap, *fate)

        def then(answer: DataAnswer, body: memoryview) -> None:
            with self.lock:
                if payload is not None:
                    payload.landed()
            if isinstance(answer, Pushed):
                if answer.nonfinite >= 0:
                    name = self._name_of(TableId(answer.nonfinite))
                    self.fail(nonfinite_error(name, action.work, action.work))
                self.feed(lambda: self.protocol.pushed(ps, token, answer, life))
            elif not isinstance(answer, Moved):  # a newer map is here: what is owed is said anew by that
                self._unexpected(ps, answer)

        self.client.submit(ps, message, then, router)

    def _unexpected(self, ps: Slot, answer: DataAnswer) -> None:
        text = answer.error if isinstance(answer, Bad) else repr(answer)
        self.fail(InternalError(f"ps:{ps} refused: {text}"))


def nonfinite_error(table: str, first: RangeWork, last: RangeWork) -> NonFiniteGradientError:
    """Return what is said of a gradient of ``table`` that is not finite, from ``first`` to ``last``."""
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
