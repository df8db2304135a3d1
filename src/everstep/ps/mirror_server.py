"""Is the shell round the machine of mirrors: its locks, its threads, its connections to other ps.

Locks, in this order: the service's *gate* (pushes and appends share it, whatever changes what is served or mirrored
holds it alone), then ``lock``, which guards the machine (but for appends, which have the gate). Nobody waits for the
network with either.

Differences that come as they should never come here: what a push made is brought to the mirrors by
``ReplicationSender.carry``, and taken there by ``StreamFollower``, both in C++ and without the interpreter. Here is
everything else: contents, connections, answers that say no, peers of other nodes (TLS is Python's), and whatever the
follower hands on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep import faultpoints
from everstep.errors import EverstepError, WireError
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.placement import Placement, PsPlace
from everstep.native import Store, _native
from everstep.net.data import answer_of
from everstep.net.log import LineLimit
from everstep.net.messages import (
    Append,
    Appended,
    Bad,
    DataAnswer,
    DataRequest,
    FetchContents,
    FetchLog,
    LogFetched,
    LogTaken,
    Moved,
    OwnershipTransferred,
    TransferOwnership,
)
from everstep.protect.machine import Ask, Machine, MirrorAction, MirrorDiscarded, ReportProgress
from everstep.protect.port import Body, StorePort
from everstep.protect.replication import AppendCode, Batch, Blob, PeerKey, StreamKind
from everstep.protect.replication_sender import CarryOutcome, EventKind, PeerEvent, ReplicationSender
from everstep.ps.lag_flusher import LagFlusher
from everstep.ps.push_waits import PushWaits
from everstep.ps.rebuild_pacer import RebuildPacer
from everstep.ps.rw_lock import RwLock

APPEND_BYTES = 4 << 20
"""Largest message to a peer, but for single entries that are larger."""

STREAM_BYTES = 1 << 20
"""The same, where several messages are on their way at once."""

STREAM_AHEAD_BYTES = 8 << 20
"""So much may be on its way to a peer before its oldest message is answered."""

UNSENT_BYTES = 256 << 20
"""While more than this waits for one peer, pushes wait before they are applied."""

PLACED_S = 0.05
"""How long a request waits for the placement by which it was made, before it is answered Moved."""

_FLUSHED_S = 0.02  # ... and a hand-over for what is on its way
_FLUSHED_LOOK_S = 0.002
_IDLE_DRAIN_S = 0.05  # what nobody waits for may lie so long
_ASK_AGAIN_S = 0.01
_ASK_AGAIN_MAX_S = 0.05
_ASKS_AHEAD = 32  # wishes for contents that are on their way to a peer before the first is answered
_ANSWER_S = 30.0
_LOOK_S = 0.5
_LATE_LOOK_S = 0.05
_STREAM_S = 0.25  # then whoever asks the same peer has a turn
_STREAM_ITEMS = 64  # in one message
_BUNDLE_S = 0.0005  # of reading contents, with the lock
_CONTENTS_LOOK_S = 0.005  # whether there is more to send, while contents are on their way

logger = logging.getLogger("everstep.ps")


class PeerLink(Protocol):
    """Is the part of ``everstep.net.data.DataClient`` that is used."""

    @property
    def plain_fd(self) -> int:
        """Return the socket's descriptor, if what is sent there is sent as it is; else -1."""

    def send(self, message: DataRequest, buffers: Sequence[Any] = (), *, timeout_s: float = 30.0) -> None: ...

    def receive(self, *, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]: ...

    def request(self, message: DataRequest, *, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]: ...

    def close(self) -> None: ...


Connect = Callable[[PsPlace], PeerLink]


class _Peer:
    """Is a life of a ps (it may be this one) and what leads there. ``link`` and ``told`` belong to who has claimed it
    (``ReplicationSender.claim``): one thread at a time sends there and takes the answers."""

    __slots__ = ("announced", "key", "link", "place")

    def __init__(self, place: PsPlace) -> None:
        self.place = place
        self.key: PeerKey = (place.slot, place.incarnation)
        self.link: PeerLink | None = None
        self.announced: set[int] = set()  # ids of the tables that it heard of from us


class _Received(MutableMapping[PeerKey, tuple[int, int]]):
    """Knows how far each sender's stream has come; the receiver keeps it."""

    def __init__(self, receiver: _native.ReplicationReceiver) -> None:
        self._receiver = receiver

    def __getitem__(self, sender: PeerKey) -> tuple[int, int]:
        stream, number = self._receiver.received(sender)
        if stream < 0:
            raise KeyError(sender)
        return stream, number

    def __setitem__(self, sender: PeerKey, received: tuple[int, int]) -> None:
        self._receiver.set_received(sender, received)

    def __delitem__(self, sender: PeerKey) -> None:
        self._receiver.forget(sender)

    def __iter__(self) -> Iterator[PeerKey]:
        return iter(self._receiver.senders())

    def __len__(self) -> int:
        return len(self._receiver.senders())


class _ReceiverLog:
    """Gives the ``RetainedLog`` of the receiver."""

    def __init__(self, receiver: _native.ReplicationReceiver) -> None:
        self._receiver = receiver

    def keep(self, partition: PartitionId, seq: int, blob: Blob) -> None:
        self._receiver.retain(partition, seq, blob)

    def confirm(self, partition: PartitionId, seq: int) -> None:
        self._receiver.confirm_retained(partition, seq)

    def after(self, partition: PartitionId, seq: int) -> list[tuple[int, Blob]]:
        return self._receiver.retained_after(partition, seq)

    def drop(self, partition: PartitionId) -> None:
        self._receiver.drop_retained(partition)

    def clear(self) -> None:
        self._receiver.drop_all_retained()


class MirrorServer:
    """Keeps mirrors for other ps, and knows what others keep for this one. Thread-safe.

    ``do(actions)``: carries out the machine's actions, in order, with the gate held alone. ``on_failure(line)``: a
    promise between mirrors is broken: this ps must end.
    """

    def __init__(
        self,
        store: Store,
        slot: Slot,
        incarnation: Incarnation,
        gate: RwLock,
        receiver: _native.ReplicationReceiver,
        do: Callable[[list[MirrorAction]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._store, self._gate, self._receiver, self._do, self._on_failure = store, gate, receiver, do, on_failure
        self.streams = ReplicationSender(store, (slot, incarnation))
        self.machine = Machine(
            slot, incarnation, StorePort(store), self.streams, _Received(receiver), _ReceiverLog(receiver)
        )
        self._slot = slot
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # what is served
        self._peers: dict[PeerKey, _Peer] = {}
        self._contents = threading.Condition(self.lock)  # there are contents to be read
        self._asks: list[Ask] = []
        self._connect: Connect | None = None
        self._threads: dict[PeerKey | str, threading.Thread] = {}
        self._unfollowed = False  # a peer's thread could not be started
        self._closing = False
        self._limit = LineLimit()
        self.on_memory: Callable[[], None] | None = None
        """Is called when there is no memory left, in the middle of anything."""
        self.lag: LagFlusher | None = None
        self.push_waits = PushWaits()
        self.pacer = RebuildPacer(1.0)
        self.contents_bytes = 0
        """Of contents that came here, for rebuilds, mirrors and moves."""
        self.rebuilt = False
        """Whether everything that the placement gives to this ps answers, if not for every row at once."""
        self.mine: NDArray[np.int32] = np.zeros(0, np.int32)
        """What the placement gives to this ps."""

    def __repr__(self) -> str:
        return f"<Keeper {self.machine!r} {self.streams!r}>"

    # ------------------------------------------------------------ changes

    @contextmanager
    def transition(self) -> Iterator[Machine]:
        """Hold the machine for whatever may change what is served or mirrored here."""
        with self._gate.exclusive(), self.lock:
            before = self.machine.version, self.rebuilt
            try:
                yield self.machine
                if self.machine.dirty:
                    self.machine.settle()
            except Exception as error:
                # Half a step of the machine, or of the store, was done: nothing here can be vouched for any more.
                self._failed(f"ps:{self._slot} failed with its mirrors", error)
                raise
            finally:
                actions = self.machine.take_actions()
                self._do(actions)
                self.rebuilt = self.machine.answering
                self._asks = self.machine.asks()
                self._receiver.publish(self.machine.version, self.machine.followed())
                served = any(not isinstance(action, ReportProgress | MirrorDiscarded) for action in actions)
                if served or self.machine.arrived or before != (self.machine.version, self.rebuilt):
                    # Requests wait for nothing else: each that wakes in vain takes the interpreter from the rebuild.
                    self.machine.arrived = False
                    self._changed.notify_all()
                self._wake_peers()

    def _wake_peers(self) -> None:
        """There may be something to ask, or a row to send. ``lock`` is held. Who has nothing to do is left asleep: what
        a rebuild does in a hundred small steps would wake all threads at each."""
        self._contents.notify_all()
        asked = {ask.peer for ask in self._asks}
        for key in self._peers:
            if key in asked or self.streams.native.waits(key) or not self._is_placed(key):
                self.streams.native.poke(key)

    def place(self, placement: Placement) -> None:
        with self.transition() as machine:
            machine.place(placement)
            assert machine.placement is not None
            self.mine = np.array(machine.placement.owned_by(self._slot), np.int32)
            self.pacer.emptied = self._slot in machine.placement.emptied
        self._follow_peers()

    def wait_whole(self, deadline: float) -> bool:
        """Wait until everything is served, until ``deadline`` (time.monotonic)."""
        with self._changed:
            while not self.rebuilt:
                if not self._pause(self._changed, deadline):
                    return False
        return True

    def wait_placed(self, version: int) -> None:
        """Wait a moment for the placement of a request that was made by a newer one: the master tells all of it at
        about the same time."""
        if self.machine.version >= version:
            return
        deadline = time.monotonic() + PLACED_S
        with self._changed:
            while self.machine.version < version and self._pause(self._changed, deadline):
                pass

    def wait_changed(self, deadline: float, most_s: float = _LOOK_S) -> bool:
        """Wait for any change, ``most_s`` at most. False: it is too late."""
        with self._changed:
            return self._pause(self._changed, deadline, most_s)

    def _pause(self, condition: threading.Condition, deadline: float, most_s: float = _LOOK_S) -> bool:
        """Wait on ``condition``, which is held, for a while. False, at once: it is too late, or this ps is ending."""
        left = deadline - time.monotonic()
        if left <= 0 or self._closing:
            return False
        condition.wait(min(left, most_s))
        return True

    def _failed(self, what: str, error: Exception) -> None:
        """Say that this ps can not keep its promises any more; what is half done is not served."""
        if isinstance(error, MemoryError) and self.on_memory is not None:
            self.on_memory()
        self._on_failure(f"{what}: {type(error).__name__}: {error}")

    # ------------------------------------------------------------ pushes

    def demand(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> bool:
        """Have the rows of these keys, by table, that are being rebuilt here folded out of turn. Returns at once.
        False: all are here."""
        slots: dict[tuple[PartitionId, int], list[int]] = {}
        for table, keys in wanted:
            for partition, slot in self._store.missing_all(table, keys):
                slots.setdefault((PartitionId(partition), table), []).append(slot)
        with self.lock:
            new = [self.machine.demand(partition, table, some) for (partition, table), some in slots.items()]
            if any(new):
                self._asks = self.machine.asks()
                self._wake_peers()
        return bool(slots)

    def may_lag(self, lag_s: float, requests: Callable[[], int]) -> None:
        """Let mirrors be so far behind (``protect: lag``). ``requests()``: how many pulls and pushes there were."""
        self.lag = LagFlusher(
            self._store, lag_s, lambda: self.streams.done_ticket, self.drain, requests, self._by_holder
        )

    def _by_holder(self) -> dict[PeerKey, list[PartitionId]]:
        """Return the partitions that have mirrors, by the ps that has the first one."""
        found: dict[PeerKey, list[PartitionId]] = {}
        with self.lock:
            for partition, peers in self.streams.routes.items():
                if peers:
                    found.setdefault(peers[0], []).append(partition)
        return found

    def has_room(self) -> bool:
        """Return whether not too much is unsent, and mirrors are not too far behind."""
        if (self.lag is not None and self.lag.late) or not self.streams.native.room(UNSENT_BYTES, 0.0):
            return False
        self._end_overload()
        return True

    def wait_room(self, deadline: float) -> bool:
        """Wait until there is room; False: there still is none."""
        with self.push_waits.wait():
            if not self._wait_room(deadline):
                return False
        self._end_overload()
        return True

    def _end_overload(self) -> None:
        if took_s := self.push_waits.passed():
            self._limit.warning(f"ps:{self._slot}: mirrors have caught up; pushes waited {took_s:.1f} s, together")

    def _wait_room(self, deadline: float) -> bool:
        while self.lag is not None and self.lag.late:
            behind = f"mirrors are {self.lag.behind_s:.1f} s behind, {self.lag.bound_s:g} s at most"
            behind += f", and need {self.lag.drain_s:.1f} s" if self.lag.drain_s > self.lag.bound_s else ""
            self._limit.warning(f"ps:{self._slot}: {behind}: pushes wait")
            if not self.wait_changed(deadline, _LATE_LOOK_S):
                return False
        if not self.streams.native.room(UNSENT_BYTES, 0.0):
            self._limit.warning(f"ps:{self._slot}: {UNSENT_BYTES >> 20} MiB wait to be sent to mirrors: pushes wait")
        return self.streams.native.room(UNSENT_BYTES, max(0.0, deadline - time.monotonic()))

    def drain(self) -> None:
        """Deal out what the outbox holds, and have the peers' threads send it."""
        self.streams.native.drain(True)

    def confirmed(self, before: int, after: int, deadline: float) -> bool:
        """Wait until all mirrors have what the outbox held up to ticket ``after``, and what was there before (a push
        may repeat what the partition's old owner applied). False: too late, or a mirror refused something from
        ``before`` on."""
        while True:
            left = deadline - time.monotonic()
            outcome, events = self.streams.carry(before, after, max(0.0, left))
            if outcome is not CarryOutcome.EVENTS:
                return outcome is CarryOutcome.CONFIRMED
            self._see_to(events, left)

    def _see_to(self, events: Sequence[PeerEvent], timeout_s: float) -> None:
        """Send to the peers that are claimed for us, and take their answers."""
        with self.lock:
            known = [(self._peers.get(e.peer), e) for e in events]
        sent: list[tuple[_Peer, Batch]] = []
        try:
            for peer, event in known:
                if peer is None or (peer.link is None and event.kind is not EventKind.BROKEN):
                    continue
                match event.kind:
                    case EventKind.YOURS:
                        batch = self.streams.batch(peer.key, APPEND_BYTES)
                        if batch is not None and self._attempt(self._send, peer, batch):
                            sent.append((peer, batch))
                    case EventKind.BROKEN:
                        self._cut(peer)
                    case _:
                        self._attempt(self._hear, peer, event)
            for peer, batch in sent:
                self._attempt(self._take_answer, peer, batch, max(0.1, timeout_s))
        finally:
            for event in events:
                self.streams.native.release(event.peer)

    def _hear(self, peer: _Peer, event: PeerEvent) -> None:
        if event.kind is EventKind.CODES:
            self._judged(peer, event.first, event.payload)
        else:
            self._answered(peer, event.first, None, answer_of(event.payload, f"ps:{peer.key[0]}"))

    def _cut(self, peer: _Peer) -> None:
        """Its connection does not hold. The peer's thread makes another, and sends again what is owed."""
        self.streams.native.unlink(peer.key)
        if peer.link is not None:
            peer.link.close()
            peer.link = None
        self.streams.native.poke(peer.key)

    def _attempt(self, what: Callable[..., object], peer: _Peer, *args: Any) -> bool:
        """False: the connection did not hold; what it was to bring is sent again by the peer's thread."""
        try:
            what(peer, *args)
        except EverstepError:
            self._cut(peer)
            return False
        except Exception as error:
            self._failed(f"the stream to ps:{peer.key[0]} failed", error)
            raise
        return True

    # ------------------------------------------------------------ messages of other ps

    def append(self, request: Append, body: memoryview) -> Appended | Moved:
        """Take in entries of a peer's stream."""
        faultpoints.reach("before_append")
        self.wait_placed(request.version)
        if request.tables:
            with self.lock:  # not in the middle of a piece of a full sync
                for spec in request.tables:
                    self._store.declare(spec)
        blobs = Body(body, [e.size_bytes for e in request.entries])
        self.contents_bytes += contents_bytes(request)
        sender = (request.sender, request.incarnation)
        with self._gate.shared():
            self._receiver.lock(sender)
            try:
                answer = self.machine.append(request, blobs)
            finally:
                self._receiver.unlock(sender)
        if self.machine.dirty:
            with self.transition():
                pass
        elif self.machine.arrived:
            self.machine.arrived = False
            with self._changed:
                self._changed.notify_all()
        faultpoints.reach("mid_rebuild" if self.machine.rebuilding else "after_append")
        return answer

    def fetch_contents(self, request: FetchContents) -> LogTaken | Moved:
        """Answer a ps that wants contents of a partition."""
        self.wait_placed(request.version)
        if request.purpose != "other":  # nothing that is served or mirrored here changes
            with self.lock:
                answer = self.machine.fetch_contents(request)
                self._asks = self.machine.asks()
                self._wake_peers()
                return answer
        with self.transition() as machine:
            return machine.fetch_contents(request)

    def fetch_log(self, request: FetchLog) -> tuple[LogFetched | Moved, list[Any]]:
        self.wait_placed(request.version)
        with self.transition() as machine:
            return machine.fetch_log(request)

    def hand_over(self, request: TransferOwnership) -> OwnershipTransferred | Moved:
        faultpoints.reach("before_hand_over")
        self.wait_placed(request.version)
        self.drain()
        until = time.monotonic() + _FLUSHED_S
        while not self._flushed(request) and time.monotonic() < until and not self._closing:
            time.sleep(_FLUSHED_LOOK_S)
        with self.transition() as machine:
            return machine.hand_over(request)

    def _flushed(self, request: TransferOwnership) -> bool:
        """Return whether there is nothing to wait for: mirrors have all that this ps made of the partition."""
        with self.lock:
            return self.machine.may_hand_over(request.partition)

    # ------------------------------------------------------------ threads

    def start(self, connect: Connect) -> None:
        """Begin to talk to other ps. ``connect(place)``: a new connection to that life; raises EverstepError."""
        with self.lock:  # (the master's first placement may come meanwhile, on another thread)
            self._connect = connect
            runs = [("outbox", self._drain_for_ever), ("sweep", self._sync_for_ever)]
            if self.lag is not None:
                runs.append(("lag", self._flush_for_ever))
            for name, run in runs:
                self._threads[name] = threading.Thread(target=run, name=f"everstep-{name}", daemon=True)
                self._threads[name].start()
            self._follow_peers()

    def close(self, timeout_s: float = 2.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._contents.notify_all()
            self.streams.native.stop()
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
            self._peers = {k: p for k, p in self._peers.items() if k in self._threads}
            for place in placement.servers:
                key = (place.slot, place.incarnation)
                if key not in self._threads:
                    peer = self._peers[key] = _Peer(place)
                    name = f"everstep-to-ps-{place.slot}"
                    thread = threading.Thread(target=self._serve_peer, args=(peer,), name=name, daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as error:  # no memory for its stack
                        self._limit.warning(f"ps:{place.slot} waits: {error}; it is tried again")
                        del self._peers[key]
                        self._unfollowed = True
                        return
                    self._threads[key] = thread
            self._unfollowed = False

    def _drain_for_ever(self) -> None:
        """Drain what nobody waits for: a push drains for itself, all its partitions at once."""
        while not self._closing:
            self.streams.native.drain_idle(_LOOK_S, _IDLE_DRAIN_S)

    def _flush_for_ever(self) -> None:
        assert self.lag is not None
        try:
            while not self._closing:
                time.sleep(self.lag.look())
        except Exception as error:
            # Mirrors would be behind for ever.
            self._failed(f"ps:{self._slot} cannot send to its mirrors", error)
            raise

    def _sync_for_ever(self) -> None:
        while not self._closing:
            self.drain()
            if self._unfollowed:
                self._follow_peers()
            if self.machine.dirty:
                with self.transition():
                    pass
            with self._contents:
                pause_s = self._send_contents()
                if pause_s:
                    self._contents.wait(pause_s)
            time.sleep(0)  # let the pushes that wait for the lock go first

    def _send_contents(self) -> float:
        """Put the next piece of contents into the streams, if its time has come. Return how long to wait then."""
        pacer = self.pacer
        if not self.machine.syncing and not pacer.turning:
            return _LOOK_S
        wait_s = pacer.wait_s(self.streams.sync_bytes)
        if not wait_s:
            pacer.begin()
        if self._sync(urgent=wait_s > 0):
            return 0.0
        if not wait_s:
            pacer.rest(self.streams.sync_bytes)
        return min(wait_s, _CONTENTS_LOOK_S) or _CONTENTS_LOOK_S

    def _sync(self, urgent: bool) -> bool:
        """Put the next pieces into the streams, as many as ``_BUNDLE_S`` allows, so that the peers' threads wake once
        for all of them. False: there is none."""
        until = time.monotonic() + _BUNDLE_S
        try:
            if not self.machine.sync(urgent):
                return False
            while time.monotonic() < until and self.machine.sync(urgent):
                pass
            self.streams.native.drain(False)
            for key in self._peers:
                if self.streams.native.waits(key):
                    self.streams.native.poke(key)
            return True
        except Exception as error:
            self._failed(f"ps:{self._slot} cannot read its partitions", error)
            raise

    # ------------------------------------------------------------ one peer

    def _serve_peer(self, peer: _Peer) -> None:
        """Ask this life, and send it what it is owed and nobody else brings, until it is gone from the placement."""
        wait_s, ask_at, failures, pause_s = _ASK_AGAIN_S, 0.0, 0, 0.0
        again: list[Ask] = []  # what it answered with Moved: asked again at ``ask_at``
        streams = self.streams.native
        try:
            while True:
                streams.wait(peer.key, pause_s)
                with self.lock:
                    if self._closing or not self._is_placed(peer.key):
                        return
                    left = ask_at - time.monotonic()
                    asks = [a for a in self._asks if a.peer == peer.key]
                pause_s = left if asks and 0 < left < _LOOK_S else _LOOK_S
                asks = asks if left <= 0 else [a for a in asks if a not in again]
                if (not asks and not streams.waits(peer.key)) or not streams.claim(peer.key):
                    continue
                try:
                    if peer.key != self.machine.me and peer.link is None:
                        self._link(peer)
                    self._append_to(peer)
                    moved = self._ask_all(peer.link, asks)
                    failures, pause_s = 0, 0.0
                    if asks and left <= 0:
                        again = []
                        wait_s = min(wait_s * 2, _ASK_AGAIN_MAX_S) if all(moved) else _ASK_AGAIN_S
                        ask_at = time.monotonic() + wait_s
                    again += [ask for ask, says in zip(asks, moved, strict=True) if says]
                except EverstepError as error:
                    self._cut(peer)
                    failures += 1
                    pause_s = min(0.02 * 2 ** min(failures, 5), 0.5)
                    if failures > 3:
                        self._limit.warning(f"ps:{peer.key[0]} #{peer.key[1]} cannot be reached: {error}")
                finally:
                    streams.release(peer.key)
                if failures and peer.key != self.machine.me:
                    self._pause_link(pause_s)
                    pause_s = 0.0
        except Exception as error:
            logger.exception("the stream to ps:%s failed", peer.key[0])
            self._failed(f"the stream to ps:{peer.key[0]} failed", error)
        finally:
            streams.unlink(peer.key)
            if peer.link is not None:
                peer.link.close()  # a push that waits for an answer from there waits no longer
            streams.forget(peer.key)

    def _link(self, peer: _Peer) -> None:
        assert self._connect is not None
        peer.link, peer.announced = self._connect(peer.place), set()
        # A death that a fault point wants between two messages is counted in Python.
        fd = -1 if faultpoints.armed("ps", self._slot) else peer.link.plain_fd
        self.streams.native.link(peer.key, fd, 0)

    def _pause_link(self, pause_s: float) -> None:
        with self._changed:
            if not self._closing:
                self._changed.wait(pause_s)

    def _is_placed(self, key: PeerKey) -> bool:
        placement = self.machine.placement
        return placement is not None and any((s.slot, s.incarnation) == key for s in placement.servers)

    def _append_to(self, peer: _Peer) -> None:
        """Send to a peer that is claimed. EverstepError: the connection does not hold."""
        if peer.link is not None:
            for event in self.streams.flight(peer.key, _ANSWER_S):
                match event.kind:
                    case EventKind.YOURS:
                        self._stream(peer)
                    case EventKind.BROKEN:
                        raise WireError(event.payload.decode(errors="replace"))
                    case _:
                        self._hear(peer, event)
            return
        batch = self.streams.batch(peer.key, APPEND_BYTES)
        if batch is not None:
            with self.lock:
                request = self.machine.append_of(batch)
            self._answered(peer, batch.first, batch, self._append_ourselves(request, batch))

    def _stream(self, peer: _Peer) -> None:
        """Send what a claimed peer is owed, several messages on their way at once, for ``_STREAM_S`` at most."""
        assert peer.link is not None
        until = time.monotonic() + _STREAM_S
        on_way: deque[Batch] = deque()
        items = size = 0
        while True:
            batch = None
            if size < STREAM_AHEAD_BYTES and items < 8 * _STREAM_ITEMS and time.monotonic() < until:
                batch = self.streams.batch(peer.key, STREAM_BYTES, _STREAM_ITEMS, items)
            if batch is not None:
                self._send(peer, batch)
                on_way.append(batch)
            elif not on_way:
                return
            elif not self._take_answer(peer, on_way.popleft(), _ANSWER_S):
                for _ in on_way:  # nor did it take those behind
                    peer.link.receive(timeout_s=_ANSWER_S)
                return
            items = sum(len(b.items) for b in on_way)
            size = sum(i.size_bytes for b in on_way for i in b.items)

    def _send(self, peer: _Peer, batch: Batch) -> None:
        assert peer.link is not None
        request = self.machine.append_of(batch)
        tables, specs = self._store.declared()
        if len(specs) > len(peer.announced):
            request = msgspec.structs.replace(request, tables=tuple(s for s in specs if s.id not in peer.announced))
        faultpoints.reach("before_send")
        peer.link.send(request, [i.blob for i in batch.items], timeout_s=_ANSWER_S)
        faultpoints.reach("after_send")
        peer.announced.update(spec.id for spec in request.tables)
        self.streams.native.told(peer.key, tables)

    def _take_answer(self, peer: _Peer, batch: Batch, timeout_s: float) -> bool:
        """False: nothing was taken, it is to be sent again."""
        assert peer.link is not None
        answer, _ = peer.link.receive(timeout_s=min(timeout_s, _ANSWER_S))
        return self._answered(peer, batch.first, batch, answer)

    def _answered(self, peer: _Peer, first: int, batch: Batch | None, answer: DataAnswer) -> bool:
        """False: nothing was taken."""
        if isinstance(answer, Moved):
            time.sleep(_ASK_AGAIN_S)  # it does not know our placement yet
            return False
        if batch is None or not isinstance(answer, Appended) or len(answer.applied) != len(batch.items):
            error = answer.error if isinstance(answer, Bad) else f"{answer!r}"
            raise WireError(f"ps:{peer.key[0]} does not take our differences: {error}")
        self._judged(peer, first, answer.applied)
        return True

    def _judged(self, peer: _Peer, first: int, codes: bytes) -> None:
        """Take in a code for each entry from number ``first`` of the stream on."""
        if AppendCode.REFUSED in codes or AppendCode.GAP in codes:
            with self.transition() as machine:
                for partition, ticket in self.streams.answered(peer.key, first, codes).items():
                    machine.refused(partition, ticket)
            return
        self.streams.answered(peer.key, first, codes)

    def _append_ourselves(self, request: Append, batch: Batch) -> Appended | Moved:
        self.contents_bytes += contents_bytes(request)
        with self._gate.shared():
            answer = self.machine.append(request, [i.blob for i in batch.items])
        if self.machine.dirty:
            with self.transition():
                pass
        return answer

    def _ask_all(self, link: PeerLink | None, asks: Sequence[Ask]) -> list[bool]:
        """Ask a peer all of this, in order. Return of each whether the peer wants to be asked again. Wishes for
        contents that follow each other go out together: their answers are a word each."""
        moved: list[bool] = []
        while len(moved) < len(asks):
            left = asks[len(moved) :]
            wishes = list(takewhile(lambda ask: isinstance(ask.request, FetchContents), left[:_ASKS_AHEAD]))
            if link is not None and len(wishes) > 1:
                moved += self._wish_all(link, wishes)
            else:
                moved.append(self._ask(link, left[0]))
        return moved

    def _wish_all(self, link: PeerLink, asks: Sequence[Ask]) -> list[bool]:
        for ask in asks:
            link.send(ask.request, timeout_s=_ANSWER_S)
        answers = [link.receive(timeout_s=_ANSWER_S)[0] for _ in asks]
        moved = [self._is_moved(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
        if not all(moved):
            with self.transition() as machine:
                for ask, answer, again in zip(asks, answers, moved, strict=True):
                    if not again:
                        machine.answered(ask, answer)
        return moved

    def _is_moved(self, ask: Ask, answer: DataAnswer) -> bool:
        """Return whether the peer wants to be asked again."""
        if isinstance(answer, Bad):
            self._limit.warning(f"ps:{ask.peer[0]} does not take {type(ask.request).__name__}: {answer.error}")
        return isinstance(answer, Moved | Bad)

    def _ask(self, link: PeerLink | None, ask: Ask) -> bool:
        """True: the peer wants to be asked again."""
        blobs: Sequence[Any] = ()
        answer: DataAnswer
        if link is not None:
            answer, body = link.request(ask.request, timeout_s=_ANSWER_S)
            if isinstance(answer, LogFetched):
                blobs = Body(body, [e.size_bytes for e in answer.entries])
        else:
            match ask.request:
                case FetchContents() as fetch:
                    answer = self.fetch_contents(fetch)
                case FetchLog() as wanted:
                    answer, blobs = self.fetch_log(wanted)
                case TransferOwnership() as hand_over:
                    answer = self.hand_over(hand_over)
        if self._is_moved(ask, answer):
            return True
        if isinstance(answer, OwnershipTransferred):
            faultpoints.reach("mid_move")
        with self.transition() as machine:
            machine.answered(ask, answer, blobs)
        return False


def contents_bytes(request: Append) -> int:
    """Return how many bytes of it are contents of partitions."""
    return sum(entry.size_bytes for entry in request.entries if entry.kind != StreamKind.CHANGE)
