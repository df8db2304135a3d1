"""Gives places to connections that have not proved themselves yet: few places, which the newest get, and never the last
descriptors.

Whoever connects and says nothing holds a place and a descriptor until its time is over; with enough of them nobody else
would get in. So no newcomer is turned away: if all places are taken, the oldest connection of the address that has most
of them is dropped. A member proves itself within milliseconds; to push it out in that time, a stranger at the same
address has to fill all places anew, and one at another address cannot. Used by every server that listens.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Callable
from typing import Final

SPEAK_S: Final = 3.0
"""So long a connection over TCP may take for its TLS handshake, or for a request without one."""
RESERVE: Final = 256
"""Descriptors that strangers over TCP do not get (an eighth of all, where there are few): for members on this machine,
files, and what a process needs to say that it has run out."""

Drop = Callable[[], None]


class Strangers:
    """Gives places to connections that have not proved themselves. Used from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._number = 0
        self._by: dict[str, dict[int, Drop]] = {}  # address -> its connections, the oldest first
        self._where: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __repr__(self) -> str:
        return f"<strangers: {len(self)} of {self.most}>"

    def enter(self, address: str, drop: Drop) -> int:
        """A connection was accepted; returns the number of its place. ``drop()`` ends it; it is called, once, if
        another one needs the place, by who enters then."""
        with self._lock:
            self._number += 1
            number = self._number
            self._by.setdefault(address, {})[number] = drop
            self._where[number] = address
            dropped = self._leave(self._oldest()) if len(self._where) > self.most else None
        if dropped is not None:
            dropped()
        return number

    def leave(self, number: int) -> None:
        """It has proved itself, or ended; harmless if it was dropped."""
        with self._lock:
            self._leave(number)

    def _leave(self, number: int) -> Drop | None:
        address = self._where.pop(number, None)
        if address is None:
            return None
        drop = self._by[address].pop(number)
        if not self._by[address]:
            del self._by[address]
        return drop

    def _oldest(self) -> int:
        most = max(self._by.values(), key=len)
        return next(iter(most))


def scarce(sock: socket.socket) -> bool:
    """Return whether a connection just accepted over TCP has one of the descriptors kept back (a new one is always the
    lowest that is free)."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and sock.fileno() >= limit - min(RESERVE, limit // 8)


def allow_many_descriptors() -> None:
    """This process may open as many files as the machine lets it: a server has one for each member."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def address_of(peer: object) -> str:
    """Return the host that a connection came from (``accept``); all of a Unix socket's are one."""
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
