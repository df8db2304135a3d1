"""Sends to mirrors by C++ (native/replication_sender.h), for real ps: the threads that wait for mirrors bring them what
they are owed without the interpreter. ``protect/replication.py`` says what it all means and is its oracle; the
simulator runs that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from everstep.ids import PartitionId
from everstep.native import Store, _native
from everstep.protect.replication import Batch, Outgoing, PeerKey, StreamItem, SyncTarget

_ALL_BYTES = 1 << 62


class CarryOutcome(IntEnum):
    """Says what ``carry`` came to."""

    LATE = 0
    CONFIRMED = 1
    DENIED = 2
    EVENTS = 3


class EventKind(IntEnum):
    CODES = 0  # ``payload``: a code for each entry; not all were taken
    ANSWER = 1  # ``payload``: the header of another answer
    BROKEN = 2  # the connection; ``payload``: why
    YOURS = 3  # send to it yourself


class PeerEvent(NamedTuple):
    """Of a peer that the caller has claimed now, and has to ``release``."""

    peer: PeerKey
    kind: EventKind
    first: int
    payload: bytes


class _Routes(MutableMapping[PartitionId, tuple[PeerKey, ...]]):
    """Who gets differences of a partition, told to the native side at every change."""

    def __init__(self, native: _native.ReplicationSender) -> None:
        self._native = native
        self._known: dict[PartitionId, tuple[PeerKey, ...]] = {}

    def __getitem__(self, partition: PartitionId) -> tuple[PeerKey, ...]:
        return self._known[partition]

    def __setitem__(self, partition: PartitionId, peers: tuple[PeerKey, ...]) -> None:
        if self._known.get(partition) != peers:
            self._native.set_route(partition, list(peers))
        self._known[partition] = peers

    def __delitem__(self, partition: PartitionId) -> None:
        del self._known[partition]
        self._native.set_route(partition, [])

    def __iter__(self) -> Iterator[PartitionId]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class ReplicationSender:
    """See ``streams.Streams`` for what it has from there. Thread-safe.

    A peer has a *link* (``link``, ``unlink``); who sends there, here or in Python, has *claimed* it. A peer's thread
    waits in ``wait`` until it is *poked*: there is something for it that nobody brings.
    """

    def __init__(self, store: Store, me: PeerKey) -> None:
        self.native = _native.ReplicationSender(store, me)
        self.routes: MutableMapping[PartitionId, tuple[PeerKey, ...]] = _Routes(self.native)
        # By peer: the stream, and what is to be said to it as confirmed with the next batch.
        self._unsaid: dict[PeerKey, tuple[int, dict[PartitionId, int]]] = {}

    def __repr__(self) -> str:
        done, _, next_ticket, _, waiting, _ = self.native.counts()
        return f"<ReplicationSender done={done}/{next_ticket} waiting={waiting} bytes>"

    # ------------------------------------------------------------ streams

    @property
    def done_ticket(self) -> int:
        return self.native.counts()[0]

    @property
    def refused_ticket(self) -> int:
        return self.native.counts()[1]

    @property
    def next_ticket(self) -> int:
        return self.native.counts()[2]

    @property
    def sync_bytes(self) -> int:
        return self.native.counts()[3]

    @property
    def waiting_bytes(self) -> int:
        return self.native.counts()[4]

    @property
    def levelling(self) -> int:
        return self.native.counts()[5]

    @property
    def peers(self) -> list[PeerKey]:
        return self.native.peers()

    def is_done(self, ticket: int) -> bool:
        """Whether all up to there is, and nothing older is being levelled."""
        counts = self.native.counts()
        return counts[0] == ticket and not counts[5]

    def sync(self, partition: PartitionId, from_ticket: int, targets: Sequence[SyncTarget]) -> None:
        self.native.sync(partition, from_ticket, list(targets))

    def widen(self, partition: PartitionId, from_ticket: int, target: SyncTarget) -> None:
        self.native.widen(partition, from_ticket, target)

    def end_syncs(self, partition: PartitionId) -> None:
        self.native.end_syncs(partition)

    def some(self, partition: PartitionId, target: SyncTarget) -> None:
        self.native.some(partition, target)

    def append(self, first_ticket: int, entries: Iterable[Outgoing]) -> set[PeerKey]:
        """Append entries, for tests: ``drain`` takes them from the outbox itself."""
        return set(self.native.append(first_ticket, [(e.partition, e.seq, int(e.kind), e.blob) for e in entries]))

    def send(self, peer: PeerKey, item: StreamItem) -> None:
        self.native.send(peer, item.partition, item.seq, int(item.kind), item.mirror, item.sync, item.blob)

    def batch(self, peer: PeerKey, max_bytes: int, max_items: int = 4096, skip: int = 0) -> Batch | None:
        found = self.native.batch(peer, _ALL_BYTES if skip else max_bytes, max_items + skip)
        if found is None:
            return None
        stream, first, items, confirmed = found
        known, unsaid = self._unsaid.pop(peer, (stream, {}))
        to_say = {**(unsaid if known == stream else {}), **{PartitionId(b): s for b, s in confirmed}}
        if len(items) <= skip:
            self._unsaid[peer] = stream, to_say
            return None
        chosen: list[StreamItem] = []
        size = 0
        for item in (StreamItem(*i) for i in items[skip:]):
            if chosen and size + item.size_bytes > max_bytes:
                break
            chosen.append(item)
            size += item.size_bytes
        return Batch(stream, first + skip, tuple(chosen), tuple(to_say.items()))

    def waits(self, peer: PeerKey) -> bool:
        return self.native.waits(peer)

    def answered(self, peer: PeerKey, first: int, codes: Sequence[int]) -> dict[PartitionId, int]:
        return {PartitionId(b): ticket for b, ticket in self.native.answered(peer, first, bytes(codes))}

    def live(self, peers: set[PeerKey], version: int) -> None:
        self.native.set_version(version)
        self.native.live(list(peers), version)

    def owes(self, partition: PartitionId) -> bool:
        return self.native.owes(partition)

    # ------------------------------------------------------------ carrying

    def carry(self, before: int, after: int, timeout_s: float) -> tuple[CarryOutcome, list[PeerEvent]]:
        """Deal out what the outbox holds and send it, until all mirrors have what it held up to ticket ``after``.
        DENIED: a mirror refused something from ``before`` on. EVENTS: see to them, and call again."""
        outcome, events = self.native.carry(before, after, timeout_s)
        return CarryOutcome(outcome), [_event(e) for e in events]

    def flight(self, peer: PeerKey, timeout_s: float) -> list[PeerEvent]:
        """Send one batch to a claimed peer, and take the answer."""
        return [_event(e) for e in self.native.flight(peer, timeout_s)]


def _event(found: tuple[Any, int, int, bytes]) -> PeerEvent:
    peer, kind, first, payload = found
    return PeerEvent(peer, EventKind(kind), first, payload)
