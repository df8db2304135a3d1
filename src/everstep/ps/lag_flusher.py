"""Decides when mirrors that may lag (``protect: lag``) are sent what they lack, and knows how far behind they are.

The store keeps a protected partition's changes open (native/lag.cpp); ``look`` flushes those that are due, a group at a
time, and the later the better: a row that is changed again meanwhile costs nothing more. A group is the partitions
whose mirrors are at one ps: what is flushed together is one message to it. A group may be flushed from ``EARLY`` of the
lag on, while no worker asks for anything or when its turn has come; at ``DUE`` it is flushed whoever asks. So the work
is spread over the lag, and yields to pulls and pushes. A push flushes what is older than ``LATE`` lags itself
(``Store.set_lag``), where this thread does not get to it.

``confirmed`` follows: all changes that were opened up to this number are at all mirrors. ``pushes`` learns from it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from everstep import faultpoints
from everstep.ids import PartitionId
from everstep.native import LagState, Store
from everstep.protect.replication import PeerKey
from everstep.ps.mirrored_pushes import MirroredPushes, SeenPush

EARLY, DUE, LATE = 0.7, 0.9, 2.0
"""Shares of the lag; see above."""

BOUND_LAGS = 5.0
BOUND_LEAST_S = 10.0
"""Mirrors that are further behind than so many lags, and than so many seconds, make pushes wait. So do mirrors that are
behind (``BEHIND_LAGS``) and would need so long for what they lack, at the speed of late: what is pushed until the
oldest change has that age would be older than that when it arrives."""

BEHIND_LAGS = 1.5

OPEN_BYTES, OPEN_BYTES_A_S, OPEN_MOST_BYTES = 3 << 20, 3 << 19, 16 << 20
"""Old records that a partition may have open: the least of it, for each second of the lag, and at most. A push flushes
what is more, and a flush holds the partition: 16 MiB take some 20 ms."""

OPEN_PUSHES = 1 << 20


def open_bytes(lag_s: float) -> int:
    """Return how many bytes of old records a partition may have open: with a longer lag, more batches shall become one
    difference."""
    return int(min(OPEN_MOST_BYTES, max(OPEN_BYTES, OPEN_BYTES_A_S * lag_s)))


class LagFlusher:
    """See the module's docstring. Thread-safe. ``done_ticket()``: up to which ticket of the outbox all mirrors have
    everything; ``send()``: what is in the outbox shall go out; ``requests()``: how many pulls and pushes there were;
    ``groups()``: the protected partitions by the ps that has their first mirror."""

    def __init__(
        self,
        store: Store,
        lag_s: float,
        done_ticket: Callable[[], int],
        send: Callable[[], None],
        requests: Callable[[], int],
        groups: Callable[[], Mapping[PeerKey, Sequence[PartitionId]]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lag_s = lag_s
        self.pushes = MirroredPushes()
        self.bound_s = max(BOUND_LEAST_S, BOUND_LAGS * lag_s)
        self.confirmed = 0
        self.behind_s = 0.0
        """Age of the oldest change that some mirror lacks, as of the last look."""
        self.drain_s = 0.0
        """How long mirrors need for what they lack, at their speed in the last half of the bound; 0: not known."""
        self._speeds: deque[tuple[float, int]] = deque()  # (a moment, what was confirmed then), while something lacks
        self._store, self._done_ticket, self._send, self._requests, self._now = store, done_ticket, send, requests, now
        self._groups = groups
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, int]] = deque()  # (all up to this number is in the outbox, its ticket then)
        self._opened: deque[tuple[int, float]] = deque()  # (number of the newest change, when it was seen first)
        self._asked, self._flushed_at = 0, now()
        self._flushed: dict[PeerKey, float] = {}  # when each group was
        store.set_lag(open_bytes(lag_s), OPEN_PUSHES, LATE * lag_s)

    def __repr__(self) -> str:
        return f"<mirrors {self.behind_s:.2f} s behind, {self.lag_s:g} s allowed>"

    @property
    def late(self) -> bool:
        """Return whether mirrors are so far behind that pushes have to wait."""
        behind = self.behind_s > BEHIND_LAGS * self.lag_s and self.drain_s > self.bound_s
        return behind or self.behind_s > self.bound_s

    def look(self) -> float:
        """Return in how many seconds to look again, after flushing what is due."""
        seen = self.pushes.newest()
        now, lag = self._now(), self._store.lag(sizes=False)
        asked = self._requests()
        idle, self._asked = asked == self._asked, asked
        flushed = 0
        if lag.partitions:
            groups = self._groups()
            self._flushed = {key: self._flushed.get(key, 0.0) for key in groups}
            due = lag.oldest_s >= DUE * self.lag_s
            if due or (lag.oldest_s >= EARLY * self.lag_s and (idle or now >= self._turn_at())):
                flushed = self._flush(groups, now, due)
        if flushed:
            self._flushed_at = now
            faultpoints.reach("after_flush")
            self._send()
            lag = self._store.lag(sizes=False)
        with self._lock:
            self._advance(now, seen, lag)
        return self._pause_s(now, lag)

    def _flush(self, groups: Mapping[PeerKey, Sequence[PartitionId]], now: float, due: bool) -> int:
        """Return how many partitions were flushed: of the group whose last flush is longest ago and that has something
        open, else one that is ``due``."""
        for key in sorted(groups, key=lambda key: (self._flushed[key], key)):
            self._flushed[key] = now
            if flushed := sum(self._store.flush(partition) for partition in groups[key]):
                return flushed
        return self._store.flush_older(DUE * self.lag_s, 1) if due else 0  # its mirrors are being placed

    def _turn_at(self) -> float:
        """Return when the next group has its turn, at equal distances within the lag."""
        return self._flushed_at + DUE * self.lag_s / max(1, len(self._flushed))

    def _pause_s(self, now: float, lag: LagState) -> float:
        """Return how long nothing can become due. Each look costs: it wakes a thread, and takes the mutexes of all
        partitions."""
        most_s = min(0.25, max(0.005, self.lag_s / 10))
        if not lag.partitions:
            return most_s
        early_s = EARLY * self.lag_s - lag.oldest_s
        due_s = min(self._turn_at() - now, DUE * self.lag_s - lag.oldest_s)
        return min(most_s, max(0.001, early_s, due_s))

    def advance(self) -> tuple[int, int]:
        """See how far the mirrors are. Return up to which number they have all changes, and the newest number."""
        with self._lock:
            return self._advance(self._now(), self.pushes.newest(), self._store.lag(sizes=False))

    def _advance(self, now: float, seen: SeenPush, lag: LagState) -> tuple[int, int]:
        """Return the same for ``lag``, which was read after ``seen``; ``_lock`` is held."""
        ticket = self._store.outbox_ticket()  # (after what is closed was read)
        self.pushes.made(seen, lag.opened, ticket)
        if lag.closed > (self._sent[-1][0] if self._sent else self.confirmed):
            self._sent.append((lag.closed, ticket))
        done = self._done_ticket()
        while self._sent and self._sent[0][1] <= done:
            self.confirmed = self._sent.popleft()[0]
        self.pushes.confirmed(self.confirmed, done)
        while self._opened and self._opened[0][0] <= self.confirmed:
            self._opened.popleft()
        if lag.opened > (self._opened[-1][0] if self._opened else self.confirmed):
            self._opened.append((lag.opened, now))
        self.behind_s = max(0.0, now - self._opened[0][1]) if self._opened else 0.0
        self.drain_s = self._drain_s(now, lag.opened)
        return self.confirmed, lag.opened

    def _drain_s(self, now: float, opened: int) -> float:
        if not self._opened:
            self._speeds.clear()
            return 0.0
        if not self._speeds or self.confirmed > self._speeds[-1][1]:
            self._speeds.append((now, self.confirmed))
        while len(self._speeds) > 2 and self._speeds[1][0] <= now - self.bound_s / 2:
            self._speeds.popleft()
        since, then = self._speeds[0]
        arrived = self.confirmed - then
        return (opened - self.confirmed) * (now - since) / arrived if arrived else 0.0
