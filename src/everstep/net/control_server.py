"""Is the master's side of the control plane, for asyncio (uvloop).

One ``asyncio.Protocol`` a connection round the sans-io decoder and handshake: no task, stream or lock a message.
Answers of one turn of the loop go out in one write.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

import msgspec

from everstep.errors import WireError
from everstep.net.auth import AUTH_S, Identity, Secret, ServerAuth
from everstep.net.frames import AUTH_LIMITS, CONTROL_LIMITS, Frame, FrameDecoder, FrameKind, decode_header, preamble
from everstep.net.log import LineLimit, logger
from everstep.net.messages import Answered, Call, OrderType, RequestType, Return
from everstep.net.strangers import SPEAK_S, Strangers, address_of, scarce

Handler = Callable[["Peer", RequestType], "Answered | Later | Awaitable[Answered | None] | None"]

_CALL, _RETURN = int(FrameKind.CALL), int(FrameKind.RETURN)  # (an enum's member takes longer to find)
_preamble = functools.lru_cache(maxsize=4096)(preamble)
_encoder = msgspec.msgpack.Encoder()
_call_decoder = msgspec.msgpack.Decoder(Call)


class Later:
    """Is an answer that is given later, once. The handler makes one and returns it; :meth:`give` answers, from the
    loop's thread, at any time after. It does what a future would, for a tenth of the work: a master makes one for every
    request that waits for the disk."""

    __slots__ = ("_call", "_connection", "given")

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._call = 0
        self.given: Answered | None = None

    def __repr__(self) -> str:
        return f"<answer to call {self._call}, {'given' if self.given is not None else 'awaited'}>"

    def give(self, answer: Answered) -> None:
        """Answer. The first one counts; to a connection that is gone: dropped."""
        if self.given is None:
            self.given = answer
            if self._connection is not None:
                self._connection.answer_later(self._call, answer)

    def take(self, connection: _Connection, call: int) -> None:
        """Say whose answer this is; for the server."""
        self._connection, self._call = connection, call
        if self.given is not None:
            connection.answer_later(call, self.given)


class Peer:
    """Is one authenticated connection. ``tag`` is the handler's own (e.g. the member's key). ``number``: grows with
    every connection of this server, so that an old one's late words can be told from a new one's."""

    __slots__ = ("_connection", "identity", "number", "tag")

    _numbers = itertools.count(1)

    def __init__(self, connection: _Connection, identity: Identity) -> None:
        self._connection = connection
        self.identity = identity
        self.number = next(Peer._numbers)
        self.tag: object = None

    def send(self, order: OrderType) -> None:
        """Queue an order; never waits. To a peer that is gone or does not read: dropped, it hears at its hello."""
        self._connection.write(FrameKind.ORDER, _encoder.encode(order))

    def send_encoded(self, order: bytes) -> None:
        """Queue an order that is encoded already, as ``send`` does."""
        self._connection.write(FrameKind.ORDER, order)

    def close(self) -> None:
        """Close once everything queued is sent."""
        self._connection.finish()

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def __repr__(self) -> str:
        return f"<Peer {self.identity} {'closed' if self.closed else 'open'}>"


def broadcast(peers: Iterable[Peer], order: OrderType) -> None:
    """Queue one order to many peers; it is encoded once."""
    encoded = b""
    for peer in peers:
        if not peer.closed:
            encoded = encoded or _encoder.encode(order)
            peer.send_encoded(encoded)


class ControlServer:
    """Serves the control plane: ``handler(peer, request)`` returns the answer, a :class:`Later` that gets it, an
    awaitable of it (which costs more), or None for no answer (the caller runs into its deadline). It is called in the
    order in which one peer's requests arrive; their answers may come in any order. An exception ends the peer's
    connection, with a traceback in the log.

    ``on_connect(peer)`` after the handshake, ``on_disconnect(peer)`` when its connection has ended.
    """

    def __init__(
        self,
        secret: Secret,
        identity: Identity,
        handler: Handler,
        *,
        on_connect: Callable[[Peer], None] | None = None,
        on_disconnect: Callable[[Peer], None] | None = None,
        max_queue_bytes: int = 16 << 20,
        max_connections: int = 16384,
        max_strangers: int = 256,
        max_local_strangers: int = 4096,
        max_calls: int = 4096,
        auth_s: float = AUTH_S,
    ) -> None:
        self.secret, self.identity, self.handler = secret, identity, handler
        self.on_connect, self.on_disconnect = on_connect, on_disconnect
        self.max_queue_bytes, self.max_connections = max_queue_bytes, max_connections
        self.max_calls, self.auth_s = max_calls, auth_s
        self.limit = LineLimit()
        self.connections: set[_Connection] = set()
        # Connections that have not proved themselves yet, local ones and others.
        self.waiting = {True: Strangers(max_local_strangers), False: Strangers(max_strangers)}
        self._accepting: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.AbstractServer] = []

    async def listen(self, sock: socket.socket) -> None:
        """Serve a listening socket of ``sockets.listen_unix`` or ``sockets.listen_tcp`` (that one with TLS)."""
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(self._make, sock=sock, backlog=1024))
            return
        from everstep.net.tls import server_context

        context: ssl.SSLContext = server_context(self.secret)
        sock.setblocking(False)
        self._keep(loop.create_task(self._accept(sock, context)))

    def _make(self) -> _Connection:
        return _Connection(self)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _accept(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections over TCP, counted from here on: one that says nothing holds a place, and a descriptor,
        too."""
        loop = asyncio.get_running_loop()
        with sock:
            while True:
                try:
                    conn, peer = await loop.sock_accept(sock)
                except OSError as error:  # out of descriptors or the like: said, and tried again
                    self.limit.warning(f"cannot take a connection over TCP: {error.strerror or error}")
                    await asyncio.sleep(0.1)
                    continue
                if scarce(conn) or len(self.connections) >= self.max_connections:
                    self.limit.warning("a connection over TCP refused: too many connections")
                    conn.close()
                    continue
                connection = _Connection(self, local=False)
                securing = loop.create_task(self._secure(connection, conn, context))
                self._keep(securing)
                connection.enter(address_of(peer), securing)

    async def _secure(self, connection: _Connection, conn: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, conn, ssl=context, ssl_handshake_timeout=min(SPEAK_S, self.auth_s)
            )
        except (OSError, asyncio.CancelledError):  # asyncio closes the connection without a word to anyone
            if not connection.dropped:
                self.limit.warning(
                    "a connection over TCP closed: its TLS handshake failed (another job's secret, or not everstep)"
                )
            conn.close()
        finally:
            if not connection.made:
                connection.left()

    @property
    def strangers(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def peers(self) -> list[Peer]:
        return [c.peer for c in self.connections if c.peer is not None]

    async def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening, send what is queued, close. Connections that do not end in time are cut."""
        for server in self._servers:
            server.close()
        for task in list(self._accepting):
            task.cancel()
        for connection in list(self.connections):
            connection.finish()
        end = asyncio.get_running_loop().time() + timeout_s
        while self.connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    def __repr__(self) -> str:
        return f"<ControlServer {len(self.connections)} connections, {self.strangers} of strangers>"


class _Connection(asyncio.Protocol):
    def __init__(self, server: ControlServer, local: bool = True) -> None:
        self.server = server
        self.local, self.made, self.dropped = local, False, False
        self._place, self._address = 0, ""  # among the strangers
        self._securing: asyncio.Task[None] | None = None
        self.peer: Peer | None = None
        self.closed = True
        self._decoder = FrameDecoder(AUTH_LIMITS)
        self._auth: ServerAuth | None = ServerAuth(server.secret, server.identity)
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._out: list[bytes] = []
        self._calls = 0  # in the handler's hands
        self._paused = False
        self._tasks: set[asyncio.Future[Answered | None]] = set()

    # ------------------------------------------------------------ before it has proved itself

    def enter(self, address: str, securing: asyncio.Task[None] | None = None) -> None:
        """Take a place among the strangers; ``securing``: its TLS handshake."""
        self._securing, self._address = securing, address
        self._place = self.server.waiting[self.local].enter(address, self._drop)

    def left(self) -> None:
        """It is a stranger no more."""
        self.server.waiting[self.local].leave(self._place)

    def _drop(self) -> None:
        self.dropped = True
        self.server.limit.warning(f"connection from {self._where()} closed: too many that had not proved themselves")
        if self._transport is not None:
            self.abort()
        elif self._securing is not None:
            self._securing.cancel()

    # ------------------------------------------------------------ asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses of it
        self._transport = transport
        self.closed = False
        server = self.server
        server.connections.add(self)
        self.made = True
        if self.local:  # (others from their accept on)
            self.enter("")
        elif self.dropped:
            transport.abort()
            return
        # From here on only max_queue_bytes counts; asyncio's own flow control would call us at 64 KiB.
        transport.set_write_buffer_limits(high=server.max_queue_bytes)
        if len(server.connections) > server.max_connections:
            server.limit.warning(f"connection from {self._where()} refused: too many connections")
            self.abort()
            return
        self._cancel_timer()
        self._timer = self._loop.call_later(server.auth_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            if self._auth is not None:
                data = self._authenticate(data)
                if self._auth is not None:
                    return
            for frame in self._decoder.feed(data):
                self._take(frame)
            if self._decoder.error is not None:
                raise self._decoder.error
        except WireError as error:
            self._refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        self.server.connections.discard(self)
        if self._auth is not None:
            self.left()
            if self._timer is not None and not self.dropped:
                self.server.limit.warning(f"{self._where()} left before it proved itself")
            self._cancel_timer()
        for task in list(self._tasks):
            task.cancel()
        if self.peer is not None and self.server.on_disconnect is not None:
            self.server.on_disconnect(self.peer)

    def pause_writing(self) -> None:
        """The transport holds more than max_queue_bytes: the peer does not read."""
        self.server.limit.warning(
            f"{self._where()} does not read: dropped with more than {self.server.max_queue_bytes} bytes queued"
        )
        self.abort()

    # ------------------------------------------------------------ handshake

    def _authenticate(self, data: bytes) -> bytes:
        """Feed the handshake; returns what is left for the decoder."""
        assert self._auth is not None and self._transport is not None
        frames = self._decoder.feed(data, most=1)
        while frames:
            frame = frames[0]
            try:
                reply = self._auth.take(frame)
            except WireError:
                if self._auth.refusal:
                    self._transport.write(self._auth.refusal)
                raise
            if reply:
                self._transport.write(reply)
            if self._auth.done:
                assert self._auth.client is not None
                self.peer = Peer(self, self._auth.client)
                self._auth = None
                self.left()
                self._cancel_timer()
                self._decoder.limits = CONTROL_LIMITS
                if self.server.on_connect is not None:
                    self.server.on_connect(self.peer)
                return b""
            frames = self._decoder.feed(b"", most=1)
        if self._decoder.error is not None:
            raise self._decoder.error
        return b""

    def _too_slow(self) -> None:
        self._refuse(f"no handshake within {self.server.auth_s:g} s")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------ requests and answers

    def _take(self, frame: Frame) -> None:
        if frame.kind != _CALL:
            raise WireError(f"unexpected frame of kind {frame.kind}")
        call = decode_header(_call_decoder, frame.header, "request")
        assert self.peer is not None
        try:
            answer = self.server.handler(self.peer, call.request)
        except Exception:
            self._handler_failed(call)
            return
        if answer is None:
            return
        if isinstance(answer, Later):
            self._begun()
            answer.take(self, call.id)
            return
        if isinstance(answer, msgspec.Struct):
            self.write(_RETURN, _encoder.encode(Return(call.id, answer)))
            return
        future = asyncio.ensure_future(answer)
        self._tasks.add(future)
        self._begun()
        call_id = call.id

        def answered(done: asyncio.Future[Answered | None]) -> None:
            self._ended()
            self._tasks.discard(done)
            if done.cancelled():
                return
            if done.exception() is not None:
                self._handler_failed(call, done.exception())
                return
            result = done.result()
            if result is not None:
                self.write(_RETURN, _encoder.encode(Return(call_id, result)))

        future.add_done_callback(answered)

    def _begun(self) -> None:
        """One more call is in the handler's hands: at some number of them nothing more is read."""
        self._calls += 1
        if self._calls >= self.server.max_calls and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _ended(self) -> None:
        self._calls -= 1
        if self._paused and self._calls < self.server.max_calls // 2 and not self.closed:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def answer_later(self, call: int, answer: Answered) -> None:
        """Answer a call whose handler returned a :class:`Later`."""
        self._ended()
        self.write(_RETURN, _encoder.encode(Return(call, answer)))

    def _handler_failed(self, call: Call, error: BaseException | None = None) -> None:
        logger.error("request %s of %s failed", call.request, self._where(), exc_info=error or True)
        self.abort()

    def write(self, kind: int, header: bytes) -> None:
        if self.closed:
            return
        if len(header) > CONTROL_LIMITS.header_bytes:
            logger.error("message of %d bytes to %s is beyond the wire's limit: dropped", len(header), self._where())
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(_preamble(kind, len(header)))
        self._out.append(header)

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            data = b"".join(self._out)
            self._out.clear()
            self._transport.write(data)
        self._out.clear()

    # ------------------------------------------------------------ ends

    def _refuse(self, why: str) -> None:
        self.server.limit.warning(f"connection from {self._where()} closed: {why}")
        self._cancel_timer()
        self._end()
        if self._transport is not None:
            self._transport.close()

    def finish(self) -> None:
        self._flush()
        self._end()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._cancel_timer()
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self.closed = True
        self._out.clear()

    def _where(self) -> str:
        if self.peer is not None:
            return str(self.peer.identity)
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return (
            f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else self._address or "a local process"
        )
