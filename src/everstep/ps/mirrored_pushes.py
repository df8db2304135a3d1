"""Knows up to which push all mirrors of this ps have everything, where pushes do not wait for them (``protect: lag``).

A worker that keeps what it pushed may forget it then (``tables/step_pushes.py``). What is told holds for all partitions
that this ps has. One that comes from elsewhere may be behind; so nothing that was seen before counts after it came.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from everstep.ids import ShardKey

PushEnd = tuple[ShardKey, int]
"""Says where a push ended: its last shard, and the position up to which all partitions have it."""

NOTHING: PushEnd = (ShardKey(0), 0)


class SeenPush(NamedTuple):
    """Is the newest push at some moment, and the life of this knowledge."""

    end: PushEnd
    life: int


class MirroredPushes:
    """See the module's docstring. Thread-safe."""

    def __init__(self) -> None:
        self.mirrored = NOTHING
        self._lock = threading.Lock()
        self._newest, self._life = NOTHING, 0
        self._made: deque[tuple[PushEnd, int, int]] = deque()  # a push, and numbers of before which its changes are

    def __repr__(self) -> str:
        return f"<pushes, at mirrors up to {self.mirrored}>"

    def pushed(self, end: PushEnd) -> None:
        """All partitions here have everything up to ``end``. The caller keeps partitions from coming meanwhile."""
        with self._lock:
            self._newest = end

    def came(self) -> None:
        """A partition has come, which may be behind. The caller keeps pushes from being applied meanwhile."""
        with self._lock:
            self._life += 1
            self._newest = self.mirrored = NOTHING
            self._made.clear()

    def newest(self) -> SeenPush:
        """Return the newest push, to be given to ``made`` with numbers that are read after this."""
        with self._lock:
            return SeenPush(self._newest, self._life)

    def made(self, seen: SeenPush, change: int, ticket: int) -> None:
        """Take in that all of ``seen`` is in changes up to this number, and in the outbox before this ticket."""
        with self._lock:
            known = self._made[-1][0] if self._made else self.mirrored
            if seen.life == self._life and seen.end != known:
                self._made.append((seen.end, change, ticket))

    def confirmed(self, change: int, ticket: int) -> None:
        """All mirrors have all changes up to this number, and the outbox up to this ticket."""
        with self._lock:
            while self._made and self._made[0][1] <= change and self._made[0][2] <= ticket:
                self.mirrored = self._made.popleft()[0]
