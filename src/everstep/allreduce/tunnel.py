"""Connects a group between nodes, where everything between nodes is to be encrypted (``tls: all``).

Gloo can neither encrypt nor tell who sends. So it never leaves its node: it listens on a loopback address, and where it
would call a member of another node it calls an entry on loopback. The entry calls that member's door: TLS with the
job's certificate, then proof of the key that the member has put into the group's store. The door calls the member's own
gloo. Votes go the same way. Gloo lets the member with the smaller address listen, so each is told addresses of the
others by which the lower rank is the smaller one.

A connection that ends is ended at both sides, so a loss is noticed as without a tunnel.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import threading
from enum import IntEnum
from typing import Any, Final, NamedTuple

from everstep.errors import EverstepError
from everstep.ids import Incarnation, Slot
from everstep.net.auth import AUTH_S, Identity, Secret, authenticate_client, authenticate_server
from everstep.net.frames import AUTH_LIMITS, FrameSocket
from everstep.net.log import LineLimit
from everstep.net.retry import Deadline
from everstep.net.strangers import Strangers, address_of
from everstep.net.tls import TlsSocket, client_context, server_context

INSIDE: Final = "127.0.0.2"
"""Where gloo listens."""
ENTRY: Final = "127.0.0.1"
"""Where it calls a member of a lower rank on another node: a smaller address than its own."""
NEVER: Final = "127.0.0.3"
"""What it is told of a member of a higher rank, which calls it."""

_BUFFER_BYTES = 256 * 1024
_WELCOME = b"\x01"
_ACCEPT_S = 0.5


class TunnelService(IntEnum):
    """Is what a member offers behind its door."""

    GLOO = 1
    VOTES = 2


class TunnelDoor(NamedTuple):
    """Says where a member's tunnels end, and the key (32 bytes) that opens them. ``node``: its own; port 0: it has
    none."""

    node: str = ""
    host: str = ""
    port: int = 0
    key: bytes = b""


class Tunnels:
    """Holds the tunnels of one member of one group. ``close`` at any time, from any thread; it ends all connections."""

    def __init__(self, rank: int, secret: Secret, node: str, host: str) -> None:
        """Listens at ``host`` from now on. OSError: it cannot."""
        self.rank, self._secret = rank, secret
        self.ports: dict[
            TunnelService, int
        ] = {}  # of what this member offers, on loopback; before anybody knows the door
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._entries: dict[tuple[int, TunnelService], int] = {}
        self._limit = LineLimit()
        self._strangers = Strangers(64)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self.door = TunnelDoor(node, host, int(listener.getsockname()[1]), secrets.token_bytes(32))
        self._start(self._listen, listener)

    def __repr__(self) -> str:
        return f"<Tunnels of rank {self.rank}, {len(self._open)} sockets{' closed' if self._closed else ''}>"

    def far(self, door: TunnelDoor) -> bool:
        """Return whether the member with this door is on another node."""
        return door.node != self.door.node

    def entry(self, peer: int, door: TunnelDoor, service: TunnelService) -> int:
        """Return the port on loopback of a tunnel to what rank ``peer`` offers. OSError: there can be none."""
        known = self._entries.get((peer, service))
        if known is None:
            listener = socket.create_server((ENTRY, 0))
            known = self._entries[peer, service] = int(listener.getsockname()[1])
            self._start(self._enter, listener, door, service)
        return known

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sockets = list(self._open)
        _cut(*sockets)

    # ------------------------------------------------------------ threads

    def _start(self, run: Any, sock: socket.socket, *more: Any) -> None:
        """Start ``run(sock, *more)`` on a thread that has ``sock``."""
        if not self._keep(sock):
            sock.close()
            return
        threading.Thread(target=self._run, args=(run, sock, *more), name="everstep-tunnel", daemon=True).start()

    def _run(self, run: Any, sock: socket.socket, *more: Any) -> None:
        try:
            run(sock, *more)
        except (OSError, EverstepError) as error:
            if not self._closed:
                self._limit.warning(f"a connection between members of a group ended: {error}")
        finally:
            self._end(sock)

    def _keep(self, sock: socket.socket) -> bool:
        with self._lock:
            if not self._closed:
                self._open.add(sock)
            return not self._closed

    def _end(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    def _accept(self, listener: socket.socket) -> tuple[socket.socket, Any] | None:
        """None: this is at its end."""
        listener.settimeout(_ACCEPT_S)
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                sock, peer = listener.accept()
                sock.settimeout(None)
                return sock, peer
        return None

    # ------------------------------------------------------------ our side of a call

    def _enter(self, listener: socket.socket, door: TunnelDoor, service: TunnelService) -> None:
        """Take in the one connection that gloo, or the exchange of votes, makes to this entry."""
        accepted = self._accept(listener)
        self._end(listener)
        if accepted is None:
            return
        inside, _ = accepted
        if not self._keep(inside):
            inside.close()
            return
        try:
            deadline = Deadline(AUTH_S * 2, "the tunnel to a member")
            raw = socket.create_connection((door.host, door.port), deadline.left_s)
            raw.settimeout(None)
            if not self._keep(raw):
                raw.close()
                return
            try:
                outside = TlsSocket(raw, client_context(self._secret), server_side=False)
                stream = FrameSocket(outside, AUTH_LIMITS)
                outside.handshake(deadline)
                me = _identity(self.rank, service)
                authenticate_client(stream, Secret(door.key), me, deadline)
                welcome = bytearray(1)
                while True:  # (nothing of ours may be read with the handshake)
                    with contextlib.suppress(BlockingIOError):
                        if not outside.recv_into(memoryview(welcome)):
                            return
                        break
                    deadline.check()
                self._join(inside, stream, outside)
            finally:
                self._end(raw)
        finally:
            self._end(inside)

    # ------------------------------------------------------------ their side

    def _listen(self, listener: socket.socket) -> None:
        context = server_context(self._secret)
        while (accepted := self._accept(listener)) is not None:
            raw, peer = accepted
            place = self._strangers.enter(address_of(peer), functools.partial(_cut, raw))
            self._start(self._answer, raw, context, place)

    def _answer(self, raw: socket.socket, context: Any, place: int) -> None:
        try:
            deadline = Deadline(AUTH_S, "the handshake of a tunnel")
            outside = TlsSocket(raw, context, server_side=True)
            stream = FrameSocket(outside, AUTH_LIMITS)
            outside.handshake(deadline)
            client = authenticate_server(
                stream, Secret(self.door.key), _identity(self.rank, TunnelService.GLOO), deadline
            )
        finally:
            self._strangers.leave(place)
        port = self.ports[TunnelService(client.incarnation)]
        inside = socket.create_connection((INSIDE, port), deadline.left_s)
        inside.settimeout(None)
        if not self._keep(inside):
            inside.close()
            return
        try:
            stream.send_raw(_WELCOME, deadline=deadline)
            self._join(inside, stream, outside)
        finally:
            self._end(inside)

    # ------------------------------------------------------------ both

    def _join(self, inside: socket.socket, stream: FrameSocket, outside: TlsSocket) -> None:
        """Pass on, both ways, until one side ends."""
        stream.set_ticks(0.0, 0.0)
        raw = outside.raw
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for sock in (inside, raw):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        out = threading.Thread(target=_out, args=(inside, outside), name="everstep-tunnel", daemon=True)
        out.start()
        try:
            _in(outside, inside)
        finally:
            _cut(inside, raw)
            out.join()


def _identity(rank: int, service: TunnelService) -> Identity:
    return Identity(purpose="data", role="worker", slot=Slot(rank), incarnation=Incarnation(int(service)))


def _cut(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _out(inside: socket.socket, outside: TlsSocket) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with contextlib.suppress(OSError):
        while size := inside.recv_into(buffer):
            rest = buffer[:size]
            while rest:
                rest = rest[outside.sendmsg([rest]) :]
    _cut(inside, outside.raw)


def _in(outside: TlsSocket, inside: socket.socket) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while size := outside.recv_into(buffer):
        inside.sendall(buffer[:size])
