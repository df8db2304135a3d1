"""Connects workers and ps: the data plane. Blocking sockets, a thread a connection, requests answered in order.

Measured choice: with kernels that run without the GIL, one thread a connection serves several million rows a second
from one process, at a fraction of the CPU of any RPC library. Rows of clients on the same node lie in the client's
shared memory (``arena.py``); from other nodes they travel as the frame's body.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from everstep.errors import EverstepError, WireError
from everstep.model.member import Address
from everstep.net.append_frames import decode_append
from everstep.net.arena import Arena, map_arena
from everstep.net.auth import AUTH_S, Identity, Secret, authenticate_client, authenticate_server
from everstep.net.frames import (
    AUTH_LIMITS,
    DATA_LIMITS,
    Buffer,
    ClosedError,
    Frame,
    FrameKind,
    FrameSocket,
    Limits,
    decode_header,
)
from everstep.net.log import LineLimit, logger
from everstep.net.messages import Appended, Attach, Bad, DataAnswer, DataRequest, LogTaken
from everstep.net.retry import Deadline
from everstep.net.sockets import connect, is_local
from everstep.net.strangers import SPEAK_S, Strangers, address_of, scarce

if TYPE_CHECKING:
    import ssl

MAX_ARENA_BYTES = 256 << 30  # address space, not memory: the client pays for the pages
_SEND_S = 30.0
_SLOW_BYTES_PER_S = 1e6
"""A client that does not take an answer within ``_SEND_S`` seconds and its bytes at this speed is cut off."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[DataRequest] = msgspec.msgpack.Decoder(DataRequest)
_answer_decoder: msgspec.msgpack.Decoder[DataAnswer] = msgspec.msgpack.Decoder(DataAnswer)


class DataService(Protocol):
    """Is what a ``DataServer`` serves. Called from many threads at once."""

    def handle(
        self, request: DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[DataAnswer, Sequence[Buffer]]:
        """Return the answer and the buffers behind it. ``body`` is good until it returns; the buffers until sent."""
        ...


class StreamFollower(Protocol):
    """Reads a connection of a ps in place of its ``FrameSocket``, and takes what goes without saying."""

    def next(self) -> tuple[int, int, bytes, Buffer] | None:
        """Return kind, flags, header and body (good until the next call) of a frame for the service; None: the peer
        closed the connection. Raises native ``Broken``."""
        ...


@runtime_checkable
class FollowingService(Protocol):
    """Is a service that may have a connection's frames read by another object."""

    @property
    def follows(self) -> bool:
        """Return whether it has them read so."""
        ...

    def follow(self, fd: int, ahead: bytes) -> StreamFollower: ...


class DataServer:
    """Serves ``service`` on listening sockets until ``close``; TCP ones with TLS when ``tls``.

    A client that breaks the protocol loses its connection, with one log line; all others go on.
    """

    def __init__(
        self,
        service: DataService,
        listeners: Sequence[socket.socket],
        secret: Secret,
        identity: Identity,
        *,
        tls: bool = True,
        limits: Limits = DATA_LIMITS,
        max_connections: int = 4096,
        max_strangers: int = 64,
        max_local_strangers: int = 1024,
        auth_s: float = AUTH_S,
    ) -> None:
        self._service, self._secret, self._identity = service, secret, identity
        self._limits, self._auth_s = limits, auth_s
        self._max_connections = max_connections
        self._listeners = list(listeners)
        self._context: ssl.SSLContext | None = None
        if tls and any(sock.family != socket.AF_UNIX for sock in listeners):
            from everstep.net.tls import server_context

            self._context = server_context(secret)
        self._lock = threading.Lock()
        self._streams: set[FrameSocket] = set()
        self._threads: set[threading.Thread] = set()
        self._strangers = {True: Strangers(max_local_strangers), False: Strangers(max_strangers)}  # local ones, others
        self._closing = False
        self._limit = LineLimit()
        self._acceptors = [
            threading.Thread(target=self._accept, args=(sock,), name="everstep-accept", daemon=True)
            for sock in self._listeners
        ]
        for thread in self._acceptors:
            thread.start()

    # ------------------------------------------------------------ accepting

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors or the like: said, and tried again; the connections that are up go on.
                self._limit.warning(f"cannot take a connection: {error.strerror or error}")
                threading.Event().wait(0.1)
                continue
            where = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a local process"
            local = listener.family == socket.AF_UNIX
            with self._lock:
                # (threads of those that were dropped end by and by)
                full = len(self._threads) >= self._max_connections + 2 * self._strangers[local].most
                full = full or len(self._streams) >= self._max_connections
            if full or (not local and scarce(sock)):
                self._limit.warning(f"connection from {where} refused: too many connections")
                sock.close()
                continue
            place = self._strangers[local].enter(address_of(peer), functools.partial(self._drop, sock, where))
            thread = threading.Thread(target=self._serve, args=(sock, where, place), name="everstep-data", daemon=True)
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # no memory for its stack; whoever connects tries again
                with self._lock:
                    self._threads.discard(thread)
                self._strangers[local].leave(place)
                self._limit.warning(f"connection from {where} refused: {error}")
                sock.close()
                threading.Event().wait(0.1)

    def _drop(self, sock: socket.socket, where: str) -> None:
        self._limit.warning(f"connection from {where} closed: too many that had not proved themselves")
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # its thread ends

    def _serve(self, sock: socket.socket, where: str, place: int) -> None:
        stream: FrameSocket | None = None
        strangers = self._strangers[sock.family == socket.AF_UNIX]
        try:
            deadline = Deadline(self._auth_s, f"the handshake with {where}")
            stream = self._wrap(sock, deadline)
            client = authenticate_server(stream, self._secret, self._identity, deadline, seal=True)
            where = str(client)
            strangers.leave(place)
            stream.limits = self._limits
            stream.set_ticks(0.0, 1.0)  # a worker may think as long as it likes between two requests
            self._converse(stream, client)
        except ClosedError:
            pass  # the client left
        except EverstepError as error:
            if not self._closing:
                self._limit.warning(f"connection from {where} closed: {error}")
        except MemoryError:
            raise  # (a ps without memory ends; see ps/ps_process.py)
        except Exception:
            logger.exception("connection from %s failed", where)
        finally:
            strangers.leave(place)
            with self._lock:
                if stream is not None:
                    self._streams.discard(stream)
                self._threads.discard(threading.current_thread())
            if stream is not None:
                stream.close()
            sock.close()

    def _wrap(self, sock: socket.socket, deadline: Deadline) -> FrameSocket:
        sock.settimeout(None)
        local = sock.family == socket.AF_UNIX
        if local or self._context is None:
            stream = FrameSocket(sock, AUTH_LIMITS, fds=local)
            self._keep(stream)
            return stream
        from everstep.net.tls import TlsSocket

        wrapped = TlsSocket(sock, self._context, server_side=True)
        stream = FrameSocket(wrapped, AUTH_LIMITS)
        self._keep(stream)
        try:
            wrapped.handshake(Deadline(min(SPEAK_S, deadline.left_s), "the TLS handshake"))
        except BaseException:
            with self._lock:
                self._streams.discard(stream)
            raise
        return stream

    def _keep(self, stream: FrameSocket) -> None:
        with self._lock:
            self._streams.add(stream)
            closing = self._closing
        if closing:
            stream.shutdown()

    # ------------------------------------------------------------ serving

    def _converse(self, stream: FrameSocket, client: Identity) -> None:
        arena: memoryview | None = None
        follower: StreamFollower | None = None
        service, plain = self._service, client.role == "ps" and stream.plain_fd >= 0
        if plain and isinstance(service, FollowingService) and service.follows:
            follower = service.follow(stream.plain_fd, stream.take_buffered())
        while True:
            frame = stream.recv() if follower is None else _next_of(follower)
            if frame.kind == FrameKind.APPEND and client.role == "ps":
                self._hand_on(stream, frame)
                continue
            if frame.kind != FrameKind.REQUEST:
                raise WireError(f"unexpected frame of kind {frame.kind}")
            request = decode_header(_request_decoder, frame.header, "request")
            answer: DataAnswer
            buffers: Sequence[Buffer]
            if isinstance(request, Attach):
                fd = stream.take_fd()
                if fd is None:
                    raise WireError("shared memory was announced, but no descriptor came along")
                arena = map_arena(fd, request.size_bytes, MAX_ARENA_BYTES)
                answer, buffers = LogTaken(), ()
            else:
                answer, buffers = self._handle(request, memoryview(frame.body), arena)
            stream.send(
                FrameKind.ANSWER,
                _encoder.encode(answer),
                buffers,
                deadline=Deadline(_send_s(buffers), "taking the answer"),
            )

    def _hand_on(self, stream: FrameSocket, frame: Frame) -> None:
        """Hand on a message that is no plain case."""
        answer, _ = self._handle(decode_append(frame.header), memoryview(frame.body), None)
        appended = isinstance(answer, Appended)
        header = answer.applied if isinstance(answer, Appended) else _encoder.encode(answer)
        kind = FrameKind.APPENDED if appended else FrameKind.ANSWER
        stream.send(kind, header, deadline=Deadline(_SEND_S, "taking the answer"))

    def _handle(
        self, request: DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[DataAnswer, Sequence[Buffer]]:
        try:
            return self._service.handle(request, body, arena)
        except Exception as error:
            # Whatever it was, nothing of it was acknowledged; the client decides whether to go on.
            logger.exception("request %s failed", type(request).__name__)
            text = str(error) or type(error).__name__
            return Bad(f"{type(error).__name__}: {text}" if not isinstance(error, EverstepError) else text), ()

    # ------------------------------------------------------------ end

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._streams)

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening, cut every connection (a request being handled ends first), wait for the threads."""
        with self._lock:
            self._closing = True
            streams, threads = list(self._streams), list(self._threads)
        for sock in self._listeners:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept
            sock.close()
        for stream in streams:
            stream.shutdown()
        deadline = Deadline(timeout_s)
        for thread in [*self._acceptors, *threads]:
            if thread is not threading.current_thread():
                thread.join(deadline.left_s)

    def __repr__(self) -> str:
        return f"<DataServer {self._identity}, {self.connections} connections>"


class DataClient:
    """Is one connection to one ps. Several requests may be in flight; answers come in order.

    One thread may ``send`` while another ``receive``s. After any error but a ``Bad`` answer the client is closed:
    make a new one and ask again (requests are idempotent). Raises WireError when the connection breaks or the ps is
    not the ``expect``-ed one, DeadlineError when it does not answer in time.
    """

    def __init__(
        self,
        address: Address,
        *,
        secret: Secret,
        identity: Identity,
        run_dir: Path | None = None,
        tls: Literal["all", "control"] = "all",
        expect: tuple[int, int] | None = None,
        limits: Limits = DATA_LIMITS,
        connect_timeout_s: float = AUTH_S,
    ) -> None:
        """Connect; ``expect``: (slot, incarnation) that must answer at the address."""
        self.address, self.identity = address, identity
        self.shm = is_local(address, identity.node, run_dir)
        self.closed = False
        self._send_lock, self._recv_lock = threading.Lock(), threading.Lock()
        self._arena: Arena | None = None
        self._attached_bytes = 0
        self._flight: deque[bool] = deque()  # per request on its way: whether its answer is ours to swallow
        self._stash: deque[Frame] = deque()  # received while a send had to wait
        deadline = Deadline(connect_timeout_s, f"a connection to {_where(address)}")
        self._stream = connect(
            address,
            node=identity.node,
            run_dir=run_dir,
            secret=secret,
            limits=AUTH_LIMITS,
            tls=tls == "all",
            deadline=deadline,
        )
        try:
            self.server = authenticate_client(self._stream, secret, identity, deadline, seal=True)
            if expect is not None and (self.server.slot, self.server.incarnation) != expect:
                wanted = f"{self.server.role}:{expect[0]} #{expect[1]}"
                raise WireError(f"{_where(address)} is {self.server} now, not {wanted}")
        except BaseException:
            self.close()
            raise
        self._stream.limits = limits

    def attach(self, arena: Arena) -> None:
        """Share ``arena`` from the next request on, and again whenever it grew. Unix connections only."""
        if not self.shm:
            raise WireError(f"{_where(self.address)} is another node: no shared memory with it")
        self._arena = arena
        self._attached_bytes = 0

    # ------------------------------------------------------------ asking

    def request(
        self,
        message: DataRequest,
        buffers: Sequence[Buffer] = (),
        *,
        into: memoryview | None = None,
        timeout_s: float = 30.0,
    ) -> tuple[DataAnswer, memoryview]:
        """Send and receive; see ``receive`` for the body."""
        deadline = Deadline(timeout_s, f"an answer of {self.server}")
        self._send(message, buffers, deadline)
        return self._receive(into, deadline)

    def send(self, message: DataRequest, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> None:
        """Send without waiting for the answer; ``buffers`` (C-contiguous) are the body, free again on return."""
        self._send(message, buffers, Deadline(timeout_s, f"sending to {self.server}"))

    def receive(self, *, into: memoryview | None = None, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]:
        """Return the answer to the oldest request on its way. Its body is in ``into`` if that is large enough, else in
        a buffer that is good until the next ``receive``."""
        return self._receive(into, Deadline(timeout_s, f"an answer of {self.server}"))

    @property
    def plain_fd(self) -> int:
        """See ``FrameSocket.plain_fd``. Whoever writes and reads there itself does so between two requests."""
        return self._stream.plain_fd

    @property
    def in_flight(self) -> int:
        """Requests sent whose answers were not received yet."""
        return sum(not ours for ours in list(self._flight))

    def _send(self, message: DataRequest, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        header = _encoder.encode(message)
        with self._send_lock:
            self._check_open()
            try:
                arena = self._arena
                if arena is not None and arena.size != self._attached_bytes:
                    size = arena.size
                    self._flight.append(True)
                    attach = _encoder.encode(Attach(size))
                    self._stream.send(FrameKind.REQUEST, attach, deadline=deadline, fds=[arena.fd])
                    self._attached_bytes = size
                self._flight.append(False)
                self._stream.send(FrameKind.REQUEST, header, buffers, deadline=deadline, on_wait=self._make_room)
            except BaseException:
                self.close()
                raise

    def _receive(self, into: memoryview | None, deadline: Deadline) -> tuple[DataAnswer, memoryview]:
        with self._recv_lock:
            try:
                while True:
                    self._check_open()
                    if not self._flight:
                        raise WireError("an answer was awaited without a request")
                    frame = self._next(into, deadline)
                    if frame.kind != FrameKind.ANSWER:
                        raise WireError(f"unexpected frame of kind {frame.kind} from {self.server}")
                    answer = decode_header(_answer_decoder, frame.header, f"answer of {self.server}")
                    if not self._flight.popleft():
                        return answer, memoryview(frame.body)
                    if not isinstance(answer, LogTaken):
                        raise WireError(f"{self.server} did not take the shared memory: {answer}")
            except BaseException:
                self.close()
                raise

    def _next(self, into: memoryview | None, deadline: Deadline) -> Frame:
        if not self._stash:
            return self._stream.recv(deadline=deadline, into=into)
        frame = self._stash.popleft()
        if into is not None and 0 < len(frame.body) <= into.nbytes:
            place = into.cast("B")[: len(frame.body)]
            place[:] = frame.body
            frame = msgspec.structs.replace(frame, body=place)
        return frame

    def _make_room(self) -> None:
        """Take answers while the ps takes nothing of what we send. It may be waiting for us to take its answers: do
        that meanwhile, or a thread that sends several requests before it receives would wait for itself."""
        if not self._recv_lock.acquire(blocking=False):
            return  # somebody receives already
        try:
            if self._flight and self._stream.readable():
                frame = self._stream.recv(deadline=Deadline(AUTH_S, f"the rest of an answer of {self.server}"))
                self._stash.append(Frame(frame.kind, frame.flags, frame.header, bytes(frame.body)))
        finally:
            self._recv_lock.release()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the connection to {_where(self.address)} is closed")

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Close the connection, from any thread; whoever waits in send or receive finds out at once. Harmless when
        repeated."""
        self.closed = True
        self._stream.close()

    def __enter__(self) -> DataClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        way = "unix" if self.shm else "tcp"
        return f"<DataClient to {_where(self.address)} {way} {'closed' if self.closed else 'open'}>"


def answer_of(header: bytes, server: str) -> DataAnswer:
    """Return the answer in the header of a frame. WireError: it is none."""
    return decode_header(_answer_decoder, header, f"answer of {server}")


def _next_of(follower: StreamFollower) -> Frame:
    from everstep.native._native import Broken

    try:
        found = follower.next()
    except Broken as error:
        raise WireError(str(error)) from None
    if found is None:
        raise ClosedError("the peer closed the connection")
    return Frame(*found)


def _send_s(buffers: Sequence[Buffer]) -> float:
    """How long a client may take for an answer: a slow network is not a stuck client."""
    return _SEND_S + sum(memoryview(b).nbytes for b in buffers) / _SLOW_BYTES_PER_S


def _where(address: Address) -> str:
    return f"{address.host}:{address.port}" if address.host else address.unix
