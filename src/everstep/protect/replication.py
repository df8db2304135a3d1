"""Knows what a ps owes to the mirrors of its partitions, in order, and how far they have confirmed it. Pure.

Theory
------
The store's outbox numbers its entries (*tickets*); entries of one partition stand there in the order of their seq.
``append`` deals them out: a difference goes once to every ps that has a mirror of its partition (``routes``), contents
go to those that wanted them (``Sweep``). Each peer life, ``(slot, incarnation)``, has one *stream*: entries numbered
from 0 that are sent, and sent again after a lost connection, in order until they are answered; the receiver skips
numbers that it has seen. So nothing is lost, doubled or turned round between two lives, and a seq is needed only to
bring two mirrors to the same point.

A ticket is *done* when every peer it was dealt to has answered it, or is gone from the placement. ``done_ticket`` is
the first that is not: what an acknowledged push waits for. An entry that a peer refused (another ps owns the partition)
is done, but ``refused_ticket`` says that nothing up to there may be acknowledged any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple, Protocol

from everstep.ids import Incarnation, PartitionId, Slot

PeerKey = tuple[Slot, Incarnation]
"""One life of a ps."""

Blob = Any
"""One entry's bytes; only the store looks into them."""


class StreamKind(IntEnum):
    """Is the kind of an entry; as in native/blob.h."""

    CHANGE = 1
    HEADS = 2
    BODIES = 3
    MARKS = 4
    SOME = 5  # contents (BODIES) of single slots, out of turn: a blob of that kind, but for one peer alone


class AppendCode(IntEnum):
    """Is the code of an entry in an answer to Append."""

    APPLIED = 0
    REPEAT = 1
    GAP = 2
    NO_MIRROR = 3
    REFUSED = 4


class Outgoing(NamedTuple):
    """Is an entry as it leaves the outbox."""

    partition: PartitionId
    seq: int
    kind: int
    blob: Blob
    size_bytes: int


class StreamItem(NamedTuple):
    """Is an entry in a stream. ``mirror`` 0: every mirror there that has the partition. ``ticket`` -1: not of the
    outbox."""

    ticket: int
    partition: PartitionId
    seq: int
    kind: int
    mirror: int
    sync: int
    blob: Blob
    size_bytes: int


class SyncTarget(NamedTuple):
    """Says who wanted a partition's contents: mirror ``mirror`` at ``peer``, its wish number ``sync``."""

    peer: PeerKey
    mirror: int
    sync: int


class Batch(NamedTuple):
    """What to send next: ``items`` are number ``first`` and following of the stream."""

    stream: int  # number of the stream itself: the placement under which it began
    first: int
    items: tuple[StreamItem, ...]
    confirmed: tuple[tuple[PartitionId, int], ...]


class _Stream:
    """Is the stream to one peer life."""

    __slots__ = ("confirmed", "first", "number", "queue")

    def __init__(self, number: int) -> None:
        self.number = number
        self.first = 0  # number of queue[0]
        self.queue: deque[StreamItem] = deque()
        self.confirmed: dict[PartitionId, int] = {}  # to be said with the next batch


class Flow(Protocol):
    """Is what the machine of mirrors needs of ``PythonReplicationSender``, or of their twin in C++
    (``protect/replication_sender.py``)."""

    routes: MutableMapping[PartitionId, tuple[PeerKey, ...]]

    @property
    def done_ticket(self) -> int: ...
    @property
    def next_ticket(self) -> int: ...
    def sync(self, partition: PartitionId, from_ticket: int, targets: Sequence[SyncTarget]) -> None: ...
    def widen(self, partition: PartitionId, from_ticket: int, target: SyncTarget) -> None: ...
    def end_syncs(self, partition: PartitionId) -> None: ...
    def some(self, partition: PartitionId, target: SyncTarget) -> None: ...
    def send(self, peer: PeerKey, item: StreamItem) -> None: ...
    def live(self, peers: set[PeerKey], version: int) -> None: ...
    def owes(self, partition: PartitionId) -> bool: ...


class PythonReplicationSender:
    """Holds all streams of one ps. Not thread-safe: the driver holds one lock around it."""

    def __init__(self) -> None:
        self.routes: MutableMapping[PartitionId, tuple[PeerKey, ...]] = {}
        self.done_ticket = 0
        self.refused_ticket = -1
        self.next_ticket = 0
        self.sync_bytes = 0  # contents that wait, in all streams
        self.waiting_bytes = 0  # all that waits
        self.levelling = 0  # differences on their way that are older than what this ps made itself
        self._streams: dict[PeerKey, _Stream] = {}
        self._pending: dict[int, int] = {}  # ticket -> answers that it lacks
        self._owed: dict[PartitionId, int] = {}  # items of the partition that wait
        self._several: dict[
            int, tuple[PartitionId, int]
        ] = {}  # ticket -> (partition, seq), where more than one mirror has it
        self._syncs: dict[PartitionId, deque[list[tuple[int, SyncTarget]]]] = {}  # since which ticket, who
        self._some: dict[PartitionId, deque[SyncTarget]] = {}  # who gets the partition's next SOME

    def __repr__(self) -> str:
        waiting = {f"ps:{slot}.{life}": len(s.queue) for (slot, life), s in self._streams.items()}
        return f"<Streams done={self.done_ticket}/{self.next_ticket} waiting={waiting}>"

    # ------------------------------------------------------------ in

    def sync(self, partition: PartitionId, from_ticket: int, targets: Sequence[SyncTarget]) -> None:
        """Send contents of ``partition`` that stand in the outbox from ``from_ticket`` on, up to the next MARKS that no
        earlier sweep takes, to ``targets``."""
        self._syncs.setdefault(partition, deque()).append([(from_ticket, t) for t in targets])

    def widen(self, partition: PartitionId, from_ticket: int, target: SyncTarget) -> None:
        """Send the sweep of ``partition`` that was begun last to ``target`` as well, from ``from_ticket`` on."""
        self._syncs[partition][-1].append((from_ticket, target))

    def end_syncs(self, partition: PartitionId) -> None:
        """Send contents of this partition that are still to come to nobody."""
        self._syncs.pop(partition, None)

    def some(self, partition: PartitionId, target: SyncTarget) -> None:
        """The partition's next entry SOME that has no target yet goes to ``target``: it is put into the outbox next."""
        self._some.setdefault(partition, deque()).append(target)

    def append(self, first_ticket: int, entries: Iterable[Outgoing]) -> set[PeerKey]:
        """Deal out entries of the outbox, which must come in order. Returns the peers that got something."""
        if first_ticket != self.next_ticket:
            raise AssertionError(f"outbox entries from {first_ticket}, {self.next_ticket} was to come")
        reached: set[PeerKey] = set()
        for e in entries:
            ticket = self.next_ticket
            self.next_ticket += 1
            if e.kind == StreamKind.CHANGE:
                peers = self.routes.get(e.partition, ())
                for peer in peers:
                    self._put(peer, StreamItem(ticket, e.partition, e.seq, e.kind, 0, 0, e.blob, e.size_bytes))
                reached.update(peers)
                if len(peers) > 1:
                    self._several[ticket] = (e.partition, e.seq)
                continue
            if e.kind == StreamKind.SOME:
                t = self._some[e.partition].popleft()
                self._put(
                    t.peer, StreamItem(ticket, e.partition, e.seq, e.kind, t.mirror, t.sync, e.blob, e.size_bytes)
                )
                reached.add(t.peer)
                continue
            syncs = self._syncs.get(e.partition)
            if not syncs or ticket < syncs[0][0][0]:
                continue
            for t in [target for since, target in syncs[0] if ticket >= since]:
                self._put(
                    t.peer, StreamItem(ticket, e.partition, e.seq, e.kind, t.mirror, t.sync, e.blob, e.size_bytes)
                )
                reached.add(t.peer)
            if e.kind == StreamKind.MARKS:
                syncs.popleft()
                if not syncs:
                    del self._syncs[e.partition]
        self._advance()
        return reached

    def send(self, peer: PeerKey, item: StreamItem) -> None:
        """Send an entry that is not from the outbox (``ticket`` -1), behind all that waits for ``peer``."""
        self._put(peer, item)

    def _put(self, peer: PeerKey, item: StreamItem) -> None:
        stream = self._streams.get(peer)
        if stream is None:
            return  # it is gone
        stream.queue.append(item)
        self.waiting_bytes += item.size_bytes
        self.levelling += item.ticket < 0 and item.kind == StreamKind.CHANGE
        self._owed[item.partition] = self._owed.get(item.partition, 0) + 1
        if item.ticket >= 0:
            self._pending[item.ticket] = self._pending.get(item.ticket, 0) + 1
        if item.kind != StreamKind.CHANGE:
            self.sync_bytes += item.size_bytes

    # ------------------------------------------------------------ out

    def batch(self, peer: PeerKey, max_bytes: int, max_items: int = 4096, skip: int = 0) -> Batch | None:
        """Return the oldest items for ``peer``, at least one and else at most ``max_bytes``; None: nothing waits. The
        same again until ``answered``. ``skip``: so many of the oldest are on their way already."""
        stream = self._streams.get(peer)
        if stream is None or len(stream.queue) <= skip:
            return None
        items: list[StreamItem] = []
        size = 0
        for item in islice(stream.queue, skip, None):
            if items and (size + item.size_bytes > max_bytes or len(items) >= max_items):
                break
            items.append(item)
            size += item.size_bytes
        confirmed, stream.confirmed = tuple(stream.confirmed.items()), {}
        return Batch(stream.number, stream.first + skip, tuple(items), confirmed)

    def waits(self, peer: PeerKey) -> bool:
        """Return whether something waits for ``peer``."""
        stream = self._streams.get(peer)
        return stream is not None and bool(stream.queue)

    def answered(self, peer: PeerKey, first: int, codes: Sequence[int]) -> dict[PartitionId, int]:
        """Take in that ``peer`` answered the items from number ``first`` on. Returns partitions that it refuses to take
        from us, with the newest ticket that it refused."""
        refused: dict[PartitionId, int] = {}
        stream = self._streams.get(peer)
        if stream is None:
            return refused
        for number, code in enumerate(codes, first):
            if number < stream.first:
                continue  # answered before
            if number > stream.first or not stream.queue:
                raise AssertionError(f"answer to entry {number}, {stream.first} was to come")
            item = stream.queue.popleft()
            stream.first += 1
            if item.kind == StreamKind.CHANGE and code in (AppendCode.REFUSED, AppendCode.GAP):
                self.refused_ticket = max(self.refused_ticket, item.ticket)
                self._several.pop(item.ticket, None)  # not all have it: who has it must keep it
                if code == AppendCode.REFUSED:
                    ticket = item.ticket if item.ticket >= 0 else self.next_ticket  # levelling: what is served now
                    refused[item.partition] = max(ticket, refused.get(item.partition, -1))
            self._settle(item)
        self._advance()
        return refused

    def live(self, peers: set[PeerKey], version: int) -> None:
        """These lives are in the placement ``version``; to all others nothing is owed any more."""
        for peer in peers - self._streams.keys():
            self._streams[peer] = _Stream(version)
        for peer in self._streams.keys() - peers:
            stream = self._streams.pop(peer)
            for item in stream.queue:
                self._settle(item)
        self._advance()

    def _settle(self, item: StreamItem) -> None:
        self.waiting_bytes -= item.size_bytes
        self.levelling -= item.ticket < 0 and item.kind == StreamKind.CHANGE
        if item.kind != StreamKind.CHANGE:
            self.sync_bytes -= item.size_bytes
        owed = self._owed[item.partition] - 1
        if owed:
            self._owed[item.partition] = owed
        else:
            del self._owed[item.partition]
        if item.ticket < 0:
            return
        left = self._pending[item.ticket] - 1
        if left:
            self._pending[item.ticket] = left
            return
        del self._pending[item.ticket]
        several = self._several.pop(item.ticket, None)
        if several is not None:
            partition, seq = several
            for peer in self.routes.get(partition, ()):
                known = self._streams.get(peer)
                if known is not None:
                    known.confirmed[partition] = seq

    def _advance(self) -> None:
        while self.done_ticket < self.next_ticket and self.done_ticket not in self._pending:
            self.done_ticket += 1

    # ------------------------------------------------------------ looking

    @property
    def peers(self) -> list[PeerKey]:
        return list(self._streams)

    def owes(self, partition: PartitionId) -> bool:
        """Return whether something of ``partition`` waits to be confirmed."""
        return partition in self._owed
