"""The shell round the machine of mirrors: its locks, its threads, its connections to other ps.

Locks, in this order: the service's *gate* (pushes and feeds share it, whatever changes what is served or mirrored
holds it alone), then ``lock``, which guards the machine (but for feeds, which have the gate) and the streams. Nobody
waits for the network with either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from everstep.errors import EverstepError, InternalError, WireError
from everstep.ids import BucketId, Incarnation, Slot
from everstep.model.placement import Placement, PsPlace
from everstep.native import Store
from everstep.net.log import LineLimit
from everstep.net.messages import (
    Bad,
    DataAnswer,
    DataRequest,
    Fed,
    Feed,
    HandedOver,
    HandOver,
    Moved,
    Tail,
    Tailed,
    Taken,
    Want,
)
from everstep.protect.machine import Action, Ask, Machine
from everstep.protect.port import Body, StorePort
from everstep.protect.streams import Batch, Code, Outgoing, PeerKey, Streams
from everstep.ps import faults
from everstep.ps.gate import Gate

FEED_BYTES = 4 << 20
"""Largest message to a peer, but for single entries that are larger."""

TAKE_BYTES = 8 << 20
SWEEP_AHEAD_BYTES = 8 << 20
"""Contents are put into the streams only while less than this waits there: differences go first."""

UNSENT_BYTES = 256 << 20
"""While more than this waits for one peer, pushes wait before they are applied."""

_ASK_AGAIN_S = 0.01
_ASK_AGAIN_MAX_S = 0.05
_ANSWER_S = 30.0
_LOOK_S = 0.5

logger = logging.getLogger("everstep.ps")


class Connection(Protocol):
    """The part of ``everstep.net.data.DataClient`` that is used."""

    def request(
        self, message: DataRequest, buffers: Sequence[Any] = (), *, timeout_s: float = 30.0
    ) -> tuple[DataAnswer, memoryview]: ...

    def close(self) -> None: ...


Connect = Callable[[PsPlace], Connection]


class Keeper:
    """What a ps keeps for others, and what others keep for it. Thread-safe.

    ``do(actions)``: carries out the machine's actions, in order, with the gate held alone. ``on_failure(line)``: a
    promise between mirrors is broken: this ps must end.
    """

    def __init__(
        self,
        store: Store,
        slot: Slot,
        incarnation: Incarnation,
        gate: Gate,
        do: Callable[[list[Action]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._store, self._gate, self._do, self._on_failure = store, gate, do, on_failure
        self.streams = Streams()
        self.machine = Machine(slot, incarnation, StorePort(store), self.streams)
        self._slot = slot
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # what is served
        self._acks = threading.Condition(self.lock)  # what is confirmed
        self._work = threading.Condition(self.lock)  # what there is to send
        self._asks: list[Ask] = []
        self._senders: dict[PeerKey, threading.Lock] = {}
        self._connect: Connect | None = None
        self._threads: dict[PeerKey | str, threading.Thread] = {}
        self._closing = False
        self._limit = LineLimit()
        self.whole = False
        """Whether everything that the placement gives to this ps is served."""

    def __repr__(self) -> str:
        return f"<Keeper {self.machine!r} {self.streams!r}>"

    # ------------------------------------------------------------ changes

    @contextmanager
    def transition(self) -> Iterator[Machine]:
        """For whatever may change what is served or mirrored here."""
        with self._gate.exclusive(), self.lock:
            try:
                yield self.machine
                if self.machine.dirty:
                    self.machine.settle()
            except Exception as error:
                # Half a step of the machine, or of the store, was done: nothing here can be vouched for any more.
                self._on_failure(f"ps:{self._slot} failed with its mirrors: {type(error).__name__}: {error}")
                raise
            finally:
                self._do(self.machine.take_actions())
                self.whole = self.machine.placement is not None and not self.machine.lacking
                self._asks = self.machine.asks()
                for condition in (self._changed, self._acks, self._work):
                    condition.notify_all()

    def place(self, placement: Placement) -> None:
        with self.transition() as machine:
            machine.place(placement)
        self._follow_peers()

    def wait_whole(self, deadline: float) -> bool:
        """Wait until everything is served, until ``deadline`` (time.monotonic)."""
        with self._changed:
            while not self.whole:
                if not self._pause(self._changed, deadline):
                    return False
        return True

    def wait_changed(self, deadline: float) -> bool:
        """Wait for any change. False: it is too late."""
        with self._changed:
            return self._pause(self._changed, deadline)

    def _pause(self, condition: threading.Condition, deadline: float) -> bool:
        """Wait on ``condition``, which is held, for a while. False, at once: it is too late, or this ps is ending."""
        left = deadline - time.monotonic()
        if left <= 0 or self._closing:
            return False
        condition.wait(min(left, _LOOK_S))
        return True

    # ------------------------------------------------------------ pushes

    def room(self, deadline: float) -> bool:
        """Wait until not too much is unsent; False: it still is."""
        if self._store.outbox_bytes() + self.streams.waiting_bytes <= UNSENT_BYTES:
            return True
        with self._acks:
            while self._store.outbox_bytes() + self.streams.waiting_bytes > UNSENT_BYTES:
                if not self._pause(self._acks, deadline):
                    return False
        return True

    def drain(self) -> None:
        """Deal out what the outbox holds."""
        with self.lock:
            while True:
                first, entries, data = self._store.take_outbox(TAKE_BYTES)
                if not entries:
                    return
                whole = memoryview(data)  # type: ignore[arg-type]  # an ndarray is a buffer
                self.streams.append(
                    first,
                    [
                        Outgoing(BucketId(bucket), seq, kind, whole[at : at + size], size)
                        for bucket, seq, kind, at, size in entries
                    ],
                )
                self._work.notify_all()

    def confirmed(self, before: int, after: int, deadline: float) -> bool:
        """Wait until all mirrors have what the outbox held up to ticket ``after``, and what was there before (a push
        may repeat what the bucket's old owner applied). False: too late, or a mirror refused something from ``before``
        on."""
        with self._acks:
            while self.streams.done_ticket < after or self.streams.levelling:
                if not self._pause(self._acks, deadline):
                    return False
            return self.streams.refused_ticket < before

    # ------------------------------------------------------------ messages of other ps

    def feed(self, request: Feed, body: memoryview) -> Fed | Moved:
        """ValueError: malformed."""
        faults.step(self._slot, "before_feed")
        if request.tables:
            with self.lock:  # not in the middle of a step of a sweep
                for spec in request.tables:
                    self._store.declare(spec)
        blobs = Body(body, [e.size_bytes for e in request.entries])
        sender = (request.sender, request.incarnation)
        with self.lock:
            one_at_a_time = self._senders.setdefault(sender, threading.Lock())
        try:
            with self._gate.shared(), one_at_a_time:
                answer = self.machine.feed(request, blobs)
        except InternalError as error:
            self._on_failure(str(error))
            raise
        if self.machine.dirty:
            with self.transition():
                pass
        faults.step(self._slot, "mid_rebuild" if self.machine.rebuilding else "after_feed")
        return answer

    def want(self, request: Want) -> Taken | Moved:
        with self.transition() as machine:
            return machine.want(request)

    def tail(self, request: Tail) -> tuple[Tailed | Moved, list[Any]]:
        with self.transition() as machine:
            return machine.tail(request)

    def hand_over(self, request: HandOver) -> HandedOver | Moved:
        faults.step(self._slot, "before_hand_over")
        self.drain()
        with self.transition() as machine:
            return machine.hand_over(request)

    # ------------------------------------------------------------ threads

    def start(self, connect: Connect) -> None:
        """Begin to talk to other ps. ``connect(place)``: a new connection to that life; raises EverstepError."""
        self._connect = connect
        for name, run in (("outbox", self._drain_for_ever), ("sweep", self._sweep_for_ever)):
            self._threads[name] = threading.Thread(target=run, name=f"everstep-{name}", daemon=True)
            self._threads[name].start()
        self._follow_peers()

    def close(self, timeout_s: float = 2.0) -> None:
        with self._changed:
            self._closing = True
            for condition in (self._changed, self._acks, self._work):
                condition.notify_all()
            threads = list(self._threads.values())
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _follow_peers(self) -> None:
        with self.lock:
            placement = self.machine.placement
            if self._connect is None or placement is None or self._closing:
                return
            self._threads = {k: t for k, t in self._threads.items() if t.is_alive()}
            for place in placement.servers:
                key = (place.slot, place.incarnation)
                if key not in self._threads:
                    name = f"everstep-to-ps-{place.slot}"
                    self._threads[key] = threading.Thread(
                        target=self._serve_peer, args=(place,), name=name, daemon=True
                    )
                    self._threads[key].start()

    def _drain_for_ever(self) -> None:
        while not self._closing:
            if self._store.wait_outbox(_LOOK_S):
                self.drain()

    def _sweep_for_ever(self) -> None:
        while not self._closing:
            self.drain()
            with self._work:
                busy = self.machine.sweeping and self.streams.sweep_bytes < SWEEP_AHEAD_BYTES
                if not busy or not self._sweep():
                    self._work.wait(_LOOK_S if not self.machine.sweeping else 0.02)
            time.sleep(0)  # let the pushes that wait for the lock go first

    def _sweep(self) -> bool:
        try:
            return self.machine.sweep()
        except Exception as error:
            self._on_failure(f"ps:{self._slot} cannot read its buckets: {type(error).__name__}: {error}")
            raise

    # ------------------------------------------------------------ one peer

    def _serve_peer(self, place: PsPlace) -> None:
        """Send this life what it is owed and asked, until it is gone from the placement."""
        key = (place.slot, place.incarnation)
        link: Connection | None = None
        told: set[int] = set()
        wait_s, ask_at, failures = _ASK_AGAIN_S, 0.0, 0
        try:
            while True:
                with self._work:
                    batch, asks = self._next(key, ask_at)
                    if batch is None and not asks:
                        if self._closing or not self._is_placed(key):
                            return
                        left = ask_at - time.monotonic()
                        self._work.wait(left if 0 < left < _LOOK_S else _LOOK_S)
                        continue
                try:
                    if key != self.machine.me and link is None:
                        assert self._connect is not None
                        link, told = self._connect(place), set()
                    if batch is not None:
                        self._send(key, link, batch, told)
                    moved = [self._ask(link, ask) for ask in asks]
                    failures = 0
                    if asks:
                        wait_s = min(wait_s * 2, _ASK_AGAIN_MAX_S) if all(moved) else _ASK_AGAIN_S
                        ask_at = time.monotonic() + wait_s
                except EverstepError as error:
                    if link is not None:
                        link.close()
                        link = None
                    failures += 1
                    if failures > 3:
                        self._limit.warning(f"ps:{place.slot} #{place.incarnation} cannot be reached: {error}")
                    with self._work:
                        if self._closing or not self._is_placed(key):
                            return
                        if self.machine.me != key:
                            self._work.wait(min(0.02 * 2 ** min(failures, 5), 0.5))
        except Exception as error:
            logger.exception("the stream to ps:%s failed", place.slot)
            self._on_failure(f"the stream to ps:{place.slot} failed: {type(error).__name__}: {error}")
        finally:
            if link is not None:
                link.close()

    def _next(self, key: PeerKey, ask_at: float) -> tuple[Batch | None, list[Ask]]:
        if self._closing or not self._is_placed(key):
            return None, []
        batch = self.streams.batch(key, FEED_BYTES)
        asks = [a for a in self._asks if a.peer == key] if time.monotonic() >= ask_at else []
        return batch, asks

    def _is_placed(self, key: PeerKey) -> bool:
        placement = self.machine.placement
        return placement is not None and any((s.slot, s.incarnation) == key for s in placement.servers)

    def _send(self, key: PeerKey, link: Connection | None, batch: Batch, told: set[int]) -> None:
        with self.lock:
            request = self.machine.feed_of(batch)
        answer: DataAnswer
        if link is None:
            answer = self._feed_ourselves(request, batch)
        else:
            new = tuple(spec for spec in self._store.specs() if spec.id not in told)
            if new:
                request = msgspec.structs.replace(request, tables=new)
            answer, _ = link.request(request, [i.blob for i in batch.items], timeout_s=_ANSWER_S)
            told.update(spec.id for spec in new)
        if isinstance(answer, Moved):
            time.sleep(_ASK_AGAIN_S)  # it does not know our placement yet
            return
        if not isinstance(answer, Fed) or len(answer.applied) != len(batch.items):
            error = answer.error if isinstance(answer, Bad) else f"{answer!r}"
            raise WireError(f"ps:{key[0]} does not take our differences: {error}")
        if Code.REFUSED in answer.applied or Code.GAP in answer.applied:
            with self.transition() as machine:
                for bucket in self.streams.answered(key, batch.first, answer.applied):
                    machine.refused(bucket)
        else:
            with self._acks:
                before = self.streams.done_ticket, self.streams.levelling
                self.streams.answered(key, batch.first, answer.applied)
                if (self.streams.done_ticket, self.streams.levelling) != before:
                    self._acks.notify_all()

    def _feed_ourselves(self, request: Feed, batch: Batch) -> Fed | Moved:
        with self._gate.shared():
            answer = self.machine.feed(request, [i.blob for i in batch.items])
        if self.machine.dirty:
            with self.transition():
                pass
        return answer

    def _ask(self, link: Connection | None, ask: Ask) -> bool:
        """True: the peer wants to be asked again."""
        blobs: Sequence[Any] = ()
        answer: DataAnswer
        if link is not None:
            answer, body = link.request(ask.request, timeout_s=_ANSWER_S)
            if isinstance(answer, Tailed):
                blobs = Body(body, [e.size_bytes for e in answer.entries])
        else:
            match ask.request:
                case Want() as want:
                    answer = self.want(want)
                case Tail() as tail:
                    answer, blobs = self.tail(tail)
                case HandOver() as hand_over:
                    answer = self.hand_over(hand_over)
        if isinstance(answer, Moved):
            return True
        if isinstance(answer, Bad):
            self._limit.warning(f"ps:{ask.peer[0]} does not take {type(ask.request).__name__}: {answer.error}")
            return True
        if isinstance(answer, HandedOver):
            faults.step(self._slot, "mid_move")
        with self.transition() as machine:
            machine.answered(ask, answer, blobs)
        return False
