"""Has pushes wait while a ps has almost no memory left and other ps will take a part of its partitions.

A new ps takes seconds to start. Tables may grow by more than the room that is left in that time. So a job whose policy
makes room (``memory``, ``auto``) waits for it: rows are new only in pushes. In other jobs a ps asks for a higher limit
of its process, and waits for that for a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.net.log import LineLimit
from everstep.policies.memory_growth import MARGIN, MOVING
from everstep.units import human_bytes

HOLD_S: Final = 120.0
"""If nobody has made room for so long, nobody will: pushes go on until there is none."""

ASKED_S: Final = 3.0
"""So long a ps waits for a higher limit that it asked for; after that it takes what there is."""

SHARED_BYTES: Final = 64_000_000
"""What is kept free, at most, of a limit that counts resident memory."""

_LOOK_S: Final = 0.5  # between two looks while there is room
_NEAR_LOOK_S: Final = 0.05  # ... and while there is little
_WAIT_S: Final = 0.02

MAKES_ROOM: Final = frozenset({"memory", "auto"})
"""Policies that give a ps help before it is full."""


def reserve_of(kind: MemoryLimit, limit_bytes: float) -> float:
    """Return the bytes that moves of partitions need of a limit."""
    if kind is MemoryLimit.PROCESS:
        return float(MOVING)
    return min(MARGIN * limit_bytes, SHARED_BYTES)


class MemoryGate:
    """Admits pushes; thread-safe. ``read()``: the readings of ``monitor.memory_room``, {} if there is no limit.
    ``ask(limit_bytes, used_bytes)``: asks for a higher limit of the process, without waiting. Pushes wait once for each
    height of that limit, and not for other limits. None: a policy makes room."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]],
        now: Callable[[], float] = time.monotonic,
        ask: Callable[[int, int], None] | None = None,
    ) -> None:
        self._read, self._now, self._ask = read, now, ask
        self._asked_bytes = 0.0  # the highest limit for which there was a wait
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._full = False
        self._since = -1.0  # when pushes began to wait; below 0: they do not
        self._gave_up = False
        self._limit = LineLimit()
        self.held_s = 0.0  # that pushes have waited, together

    def __repr__(self) -> str:
        return f"<gate of memory: {'full' if self._full else 'open'}, {self.held_s:.1f} s held>"

    def room(self, deadline: float) -> bool:
        """Wait until a push may make rows; False: at ``deadline`` (``time.monotonic``) it still may not."""
        while not self.admits():
            if self._now() >= deadline:
                return False
            time.sleep(_WAIT_S)
            self.held_s += _WAIT_S
        return True

    def admits(self) -> bool:
        """Return whether a push may make rows now."""
        with self._lock:
            at = self._now()
            if at >= self._look_at:
                self._look(at)
            return not self._full or self._gave_up

    def _look(self, at: float) -> None:
        found = self._read()
        kind = LIMITS[int(found["limit_kind"])] if found else MemoryLimit.NONE
        room = found["limit_bytes"] - found["limit_used_bytes"] if found else 0.0
        reserve = reserve_of(kind, found["limit_bytes"]) if found else 0.0
        self._full = bool(found) and room < reserve
        self._look_at = at + (_NEAR_LOOK_S if found and room < 4 * reserve else _LOOK_S)
        if self._ask is not None:
            self._full = self._full and self._waits_for(self._ask, found, at)
        elif not self._full:
            self._since, self._gave_up = -1.0, False
        elif self._since < 0:
            self._since = at
            self._limit.warning(f"{human_bytes(room)} of memory are left: pushes wait until partitions have moved away")
        elif at - self._since > HOLD_S and not self._gave_up:
            self._gave_up = True
            words = "no room was made; pushes go on until there is none"
            self._limit.warning(f"{human_bytes(room)} of memory are left after {HOLD_S:.0f} s: {words}")

    def _waits_for(self, ask: Callable[[int, int], None], found: Mapping[str, float], at: float) -> bool:
        """Return whether pushes of a full ps wait for a higher limit of its process. Ask for it first."""
        limit = found["limit_bytes"]
        if LIMITS[int(found["limit_kind"])] is not MemoryLimit.PROCESS:
            return False
        if limit > self._asked_bytes:
            self._asked_bytes, self._since = limit, at
            ask(int(limit), int(found["limit_used_bytes"]))
        return at - self._since <= ASKED_S
