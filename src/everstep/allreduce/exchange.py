"""Everybody tells everybody a few numbers: votes and marks, over connections of our own between the members of a group.

A collective of gloo costs several changes of thread at each member (its pool, its loop, and back), which is most of
what a vote takes. Here the thread that votes sends its 64 bytes to every peer and reads theirs: one wait. With many
members that would be many messages, so a large group votes over gloo. Gradients of a few KB are summed up in the same
way: gloo hands them round in 2 (n - 1) messages one after the other, each of which waits for two threads to wake up.

Whoever connects proves, by the handshake of ``net.auth``, that it knows the key that the listener put into the group's
store, which only processes of the job can read. The end of one connection is the end of the group, as with gloo's.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import select
import socket
import struct
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.errors import DeadlineError, WireError
from everstep.ids import Slot
from everstep.native import hear, talk, tell
from everstep.net.auth import Identity, Secret, authenticate_client, authenticate_server
from everstep.net.frames import AUTH_LIMITS, FrameSocket
from everstep.net.retry import Deadline

MEMBERS_MAX: Final = 16
"""Groups of more members have none: n - 1 messages of each member would take longer than a tree."""

LOOPBACK: Final = "127.0.0.1"

VALUES_MAX: Final = 512
"""int64 of one exchange: all of a member's messages fit the sockets' buffers, so nobody waits for a reader to send."""

SUM_BYTES_MAX: Final = 16 << 10
"""Of a sum: as above, and so is one of the next step, which who is quick sends before others have read its vote."""

_ANSWER_S = 2.0  # in which one that connected has to prove itself; strangers hold up the others for so long
_TICK_S = 1.0
_LEFT_S = 0.5  # when a member has left that said its word: the others' words are on their way, or it was given up
_QUICK_MS = 100  # so long one waits without looking around
_SPIN_US = 50  # of that without going to sleep: votes are often answered so soon, and waking up takes as long
_WELCOME = b"\x01"


@functools.lru_cache(maxsize=64)
def _form(values: int) -> struct.Struct:
    return struct.Struct(f"<{values}q")


class Door(NamedTuple):
    """Says where a member listens, and the key (32 bytes) that opens it. Of ``LOOPBACK`` it is a Unix socket, port 0: a
    message there takes a third of the processor time."""

    host: str
    port: int
    key: bytes

    def unix_name(self) -> str:
        """In Linux's abstract namespace: no file is left over. The key cannot be read from it."""
        return "\0everstep-" + blake2b(self.key, digest_size=16).hexdigest()

    def listen(self) -> socket.socket:
        """OSError: it cannot."""
        if self.host != LOOPBACK:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=MEMBERS_MAX)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.unix_name())
        listener.listen(MEMBERS_MAX)
        return listener

    def call(self, timeout_s: float) -> socket.socket:
        """OSError: nobody is there."""
        if self.port:
            return socket.create_connection((self.host, self.port), timeout_s)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(timeout_s)
            link.connect(self.unix_name())
        except BaseException:
            link.close()
            raise
        return link


class Total:
    """A sum in flight: this member has said its part."""

    __slots__ = ("array", "mine", "over")

    def __init__(self, array: NDArray[Any], mine: bytes) -> None:
        self.array, self.mine = array, mine
        self.over = False


class Exchange:
    """Holds the connections of one member. Made unconnected; ``gather`` and sums are for one thread, ``abort`` for
    any."""

    def __init__(self, rank: int, size: int, name: str, ip: str) -> None:
        """Listens at ``ip`` from now on. OSError: it cannot."""
        self.rank, self.size, self.name = rank, size, name
        self._lock = threading.Lock()
        self._aborted = False
        self._links: dict[int, socket.socket] = {}
        self._fds: list[int] = []  # of ``_links``, once all are there; in the order of the ranks
        self._open: list[socket.socket] = []
        self._total: Total | None = None  # in flight
        door = Door(ip, 0, secrets.token_bytes(32))
        self._listener = door.listen()
        unix = self._listener.family == socket.AF_UNIX
        self.door = door if unix else door._replace(port=int(self._listener.getsockname()[1]))

    def __repr__(self) -> str:
        return f"<Exchange {self.name} rank {self.rank}, {len(self._links)} of {self.size - 1} peers>"

    def connect(self, doors: Sequence[Door], deadline: Deadline) -> None:
        """To everybody: those of a lower rank are called, in order, those of a higher one call us; so nobody waits in a
        circle. ``doors``: by rank. Raises WireError, DeadlineError."""
        try:
            for peer, door in enumerate(doors[: self.rank]):
                self._links[peer] = self._call(peer, door, deadline)
            while len(self._links) < self.size - 1:
                self._accept(deadline)
            self._links = dict(sorted(self._links.items()))
            self._fds = [link.fileno() for link in self._links.values()]
        except OSError as error:
            raise WireError(f"a member cannot be reached: {error.strerror or error}") from None
        finally:
            self._listener.close()

    def _call(self, peer: int, door: Door, deadline: Deadline) -> socket.socket:
        deadline.check()
        link = self._keep(door.call(deadline.left_s))
        link.settimeout(None)
        stream = FrameSocket(link, AUTH_LIMITS)
        authenticate_client(stream, Secret(door.key), self._identity(self.rank), deadline)
        while True:  # its welcome: nothing of ours may be read with the handshake
            deadline.check()
            with contextlib.suppress(BlockingIOError):
                if link.recv(1) != _WELCOME:
                    raise WireError(f"rank {peer} did not take the connection")
                break
        stream.set_ticks(_TICK_S, _TICK_S)
        return link

    def _accept(self, deadline: Deadline) -> None:
        """Accept one more peer; or a stranger, who is sent away."""
        self._listener.settimeout(0.1)
        try:
            link = self._keep(self._listener.accept()[0])
        except TimeoutError:
            deadline.check()
            with self._lock:
                if self._aborted:
                    raise WireError("given up") from None
            return
        link.settimeout(None)
        stream = FrameSocket(link, AUTH_LIMITS)
        within = Deadline(min(_ANSWER_S, deadline.left_s))
        try:
            peer = int(authenticate_server(stream, Secret(self.door.key), self._identity(self.rank), within).slot)
        except (WireError, DeadlineError):
            link.close()
            return
        if not self.rank < peer < self.size or peer in self._links:
            link.close()
            return
        stream.set_ticks(_TICK_S, _TICK_S)
        link.sendall(_WELCOME)
        self._links[peer] = link

    def _identity(self, rank: int) -> Identity:
        return Identity(purpose="data", role="worker", slot=Slot(rank))

    def _keep(self, link: socket.socket) -> socket.socket:
        with self._lock:
            self._open.append(link)
            aborted = self._aborted
        if aborted:
            raise WireError("given up")
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    # ------------------------------------------------------------ use

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return everybody's ``values`` (int64, as many at each member, at most ``VALUES_MAX``), by rank. Waits until
        all have come; ``abort``, here or at a peer, ends that. Raises WireError."""
        assert len(values) <= VALUES_MAX
        self._end_sum()
        form = _form(len(values))
        mine = form.pack(*values)
        sent, came = talk(self._fds, mine, _SPIN_US, _QUICK_MS)
        received = self._complete(mine, sent, came)
        return [form.unpack(message) for message in received]

    def takes_sum(self, size: int) -> bool:
        """Return whether a sum of ``size`` bytes goes this way; the same at all members."""
        return size <= SUM_BYTES_MAX and self._total is None

    def begin_sum(self, array: NDArray[Any]) -> Total:
        """Say this member's part of the sum over everybody's ``array`` (of one shape and type). Raises WireError."""
        assert self.takes_sum(array.nbytes)
        mine = array.tobytes()
        sent = tell(self._fds, mine)
        if min(sent) < len(mine):
            try:
                self._send_rest(mine, sent)
            except OSError as error:
                raise WireError(f"a member is gone: {error.strerror or error}") from None
        self._total = Total(array.reshape(-1), mine)
        return self._total

    def end_sum(self, total: Total) -> None:
        """Have the sum in its array: the parts are added in the order of the ranks, so that all members have the same
        bits. Waits as ``gather`` does, which also ends a sum that nobody waited for. Raises WireError."""
        if not total.over:
            self._end_sum()

    def _end_sum(self) -> None:
        total, self._total = self._total, None
        if total is None:
            return
        total.over = True
        size = len(total.mine)
        came = hear(self._fds, size, _SPIN_US, _QUICK_MS)
        parts = self._complete(total.mine, [size] * len(came), came)
        array = total.array
        array[:] = np.frombuffer(parts[0], array.dtype)
        for part in parts[1:]:
            array += np.frombuffer(part, array.dtype)

    def _complete(self, mine: bytes, sent: list[int], came: list[bytes]) -> list[bytes]:
        """Return what everybody says, by rank; by now so many bytes of ours are ``sent`` and those ``came``, by
        link."""
        size = len(mine)
        if min(map(len, came)) < size or min(sent) < size:
            received = dict(zip(self._links, came, strict=True))
            try:
                self._send_rest(mine, sent)
                self._receive(size, received)
            except OSError as error:
                raise WireError(f"a member is gone: {error.strerror or error}") from None
            came = list(received.values())
        return [*came[: self.rank], mine, *came[self.rank :]]

    def _send_rest(self, mine: bytes, sent: list[int]) -> None:
        for link, n in zip(self._links.values(), sent, strict=True):
            self._send(link, mine[n:])

    def _send(self, link: socket.socket, data: bytes) -> None:
        while data:
            try:
                data = data[link.send(data) :]
            except BlockingIOError:
                self._check()

    def _receive(self, size: int, received: dict[int, bytes]) -> None:
        """Receive ``size`` bytes of each peer, and not more: who is quick has sent the next ones already. ``received``:
        what came so far, by peer; completed. Who leaves without a word ends it for all; who leaves after it may have
        been content: the others' words are on their way then."""
        poll = select.poll()
        peers = {link.fileno(): (peer, link) for peer, link in self._links.items()}
        for fd, (peer, _) in peers.items():
            poll.register(fd, select.POLLIN if len(received[peer]) < size else select.POLLRDHUP)
        missing = sum(len(message) < size for message in received.values())
        gone: Deadline | None = None
        while missing:
            ready = poll.poll((_TICK_S if gone is None else _LEFT_S) * 1e3)
            if not ready:
                self._check()
            for fd, _ in ready:
                peer, link = peers[fd]
                if len(received[peer]) == size:
                    poll.unregister(fd)
                    gone = Deadline(_LEFT_S)
                    continue
                more = link.recv(size - len(received[peer]))
                if not more:
                    raise WireError(f"rank {peer} closed its connection")
                received[peer] += more
                if len(received[peer]) == size:
                    missing -= 1
                    poll.register(fd, select.POLLRDHUP)
            if gone is not None and missing and gone.expired:
                raise WireError("a member left the group")

    def _check(self) -> None:
        with self._lock:
            if self._aborted:
                raise WireError("given up")

    def abort(self) -> None:
        """Get whoever waits out of it, here and at the peers. Harmless when repeated."""
        with self._lock:
            self._aborted = True
            links = list(self._open)
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connections back. Nobody may use them any more."""
        self.abort()
        with self._lock:
            links, self._open = self._open, []
        for link in (*links, self._listener):
            link.close()
