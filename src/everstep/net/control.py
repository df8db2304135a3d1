"""Is the client of the control plane: one connection to the master, whatever happens to it.

A background thread owns the connection: it connects, proves who we are, says hello, receives, and does so again when
the connection or the master dies. ``call`` may be used from any thread; a call in flight when the connection breaks
is sent again on the next one (requests are idempotent), until its own deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import msgspec

from everstep.brain.events import Fenced
from everstep.errors import DeadlineError, EverstepError, InternalError, WireError
from everstep.model.member import Address
from everstep.net.auth import AUTH_S, Identity, Secret, SecretError, VersionError, authenticate_client
from everstep.net.frames import (
    AUTH_LIMITS,
    CONTROL_LIMITS,
    FrameDecoder,
    FrameKind,
    FrameSocket,
    decode_header,
    encode_frame,
)
from everstep.net.log import LineLimit, logger
from everstep.net.messages import Answered, Beat, Call, OrderType, RequestType, Return
from everstep.net.retry import Deadline, backoff
from everstep.net.sockets import connect

_TICK_S = 0.1
_HELLO_S = 10.0
_SILENCE_S = 10.0
"""With calls waiting and not one byte for so long, the connection is given up for a new one."""

_STABLE_S = 1.0
"""A connection that breaks sooner (a request that the master chokes on) is not followed by the next one at once."""

_encoder = msgspec.msgpack.Encoder()
_return_decoder = msgspec.msgpack.Decoder(Return)
_order_decoder: msgspec.msgpack.Decoder[OrderType] = msgspec.msgpack.Decoder(OrderType)


class _Pending:
    __slots__ = ("deadline", "frame", "future", "once")

    def __init__(self, frame: bytes, deadline: Deadline, once: bool) -> None:
        self.frame = frame
        self.deadline = deadline
        self.once = once  # beats: stale on the next connection
        self.future: Future[Answered] = Future()


class ControlClient:
    """``address()`` is asked before each attempt to connect (None: the master has not said yet where it is).

    Callbacks run on the client's thread, one at a time, and must not wait for a ``call`` (that raises
    InternalError): ``on_welcome(answer)`` after each (re)connect with the answer to ``hello()`` (Welcome, Refused,
    ...), ``on_order(order)``, ``on_fenced(answer)`` once when any answer says that we were replaced. ``beat()`` is
    asked every ``beat_s`` seconds while connected; None: no beat this time. Where ``news()`` says so
    one more comes in between, within a tick of the thread.

    Make it after a fork, never before: threads do not survive one.
    """

    def __init__(
        self,
        *,
        address: Callable[[], Address | None],
        run_dir: Path | None,
        secret: Secret,
        identity: Identity,
        hello: Callable[[], RequestType] | None = None,
        on_order: Callable[[OrderType], None] | None = None,
        on_welcome: Callable[[Answered], None] | None = None,
        on_fenced: Callable[[Fenced], None] | None = None,
        beat: Callable[[], Beat | None] | None = None,
        beat_s: float = 1.0,
        news: Callable[[], bool] | None = None,
    ) -> None:
        self._address, self._run_dir = address, run_dir
        self._secret, self._identity = secret, identity
        self._hello, self._on_order, self._on_welcome, self._on_fenced = hello, on_order, on_welcome, on_fenced
        self._beat, self._beat_s, self._news = beat, beat_s, news
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # guards what follows, and the order of what is sent
        self._pending: dict[int, _Pending] = {}
        self._stream: FrameSocket | None = None  # set only while calls may be sent on it
        self._connecting: FrameSocket | None = None
        self._fatal: EverstepError | None = None
        self._fenced: Fenced | None = None
        self._why = "not connected yet"
        self._connects = 0
        self._since = time.monotonic()  # of being connected, or not
        self._heard = time.monotonic()
        self._refused = 0.0  # since when
        self._stop = threading.Event()
        self._limit = LineLimit()
        self._thread = threading.Thread(target=self._run, name="everstep-control", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for any thread

    def call(self, request: RequestType, timeout_s: float) -> Answered:
        """Ask the master and wait for its answer.

        Raises DeadlineError, SecretError or VersionError (the master will never take us), WireError after close."""
        if threading.current_thread() is self._thread:
            raise InternalError("ControlClient.call inside one of its callbacks would wait for itself")
        future = self.submit(request, timeout_s)
        try:
            return future.result(timeout_s)
        except FutureTimeout:  # on time even while the thread is busy connecting
            future.cancel()
            raise self._late(request, timeout_s) from None

    def submit(self, request: RequestType, timeout_s: float) -> Future[Answered]:
        """Do as ``call`` does, but return at once; the future's callbacks run on the client's thread."""
        if os.getpid() != self._pid:
            raise InternalError("this ControlClient was made before a fork: make a new one in the child")
        deadline = Deadline(timeout_s, f"the master's answer to {_name(request)}")
        call_id = next(self._ids)
        pending = _Pending(_call_frame(call_id, request), deadline, isinstance(request, Beat))
        with self._lock:
            if self._fatal is not None:
                pending.future.set_exception(self._fatal)
                return pending.future
            if self._stop.is_set():
                pending.future.set_exception(WireError("the connection to the master was closed"))
                return pending.future
            self._pending[call_id] = pending
            if self._stream is not None:
                self._send(self._stream, pending.frame)
        return pending.future

    @property
    def connected(self) -> bool:
        """Return whether the master has welcomed us on a connection that is up as far as we know."""
        return self._stream is not None

    @property
    def connects(self) -> int:
        """Return how often a connection was made and greeted."""
        return self._connects

    @property
    def away_s(self) -> float:
        """Return seconds without a connection; 0 while connected."""
        return 0.0 if self._stream is not None else time.monotonic() - self._since

    @property
    def unheard_s(self) -> float:
        """Return seconds since anything came from the master, on whatever connection."""
        return time.monotonic() - self._heard

    @property
    def refused_s(self) -> float:
        """For so long every attempt to connect was refused: its machine answers, and nobody listens there."""
        return time.monotonic() - self._refused if self._refused else 0.0

    @property
    def failed(self) -> EverstepError | None:
        """Return why no connection will ever be made (wrong secret, other version)."""
        return self._fatal

    def wait_connected(self, timeout_s: float) -> None:
        """Wait for the first (or next) welcome. Raises DeadlineError, SecretError, VersionError."""
        deadline = Deadline(timeout_s, "a connection to the master")
        while self._stream is None:
            if self._fatal is not None:
                raise self._fatal
            if self._stop.wait(min(0.01, deadline.left_s)):
                raise WireError("the connection to the master was closed")
            deadline.check(self._why)

    def reconnect(self) -> None:
        """Drop the connection, so that hello is said again on the next one."""
        with self._lock:
            if self._stream is not None:
                self._stream.shutdown()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread and the connection; calls in flight fail. Harmless when repeated."""
        self._stop.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            for stream in (self._stream, self._connecting):
                if stream is not None:
                    stream.shutdown()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._fail_all(WireError("the connection to the master was closed"))

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "connected" if self.connected else self._why
        return f"<ControlClient {self._identity} {state}, {len(self._pending)} calls waiting>"

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        # A socket file on this machine is tried for nothing; a whole cluster must not hammer a restarted master.
        limit_s = 0.2 if self._run_dir is not None else 0.5
        waits = backoff(limit_s=limit_s)
        while not self._stop.wait(next(waits)):
            try:
                stream, decoder = self._connect()
            except (SecretError, VersionError) as error:
                self._give_up(error)
                return
            except EverstepError as error:
                self._why = str(error)
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                self._refused = (self._refused or time.monotonic()) if refused else 0.0
                self._expire()
                continue
            except Exception as error:  # a callback of the user's (address, hello) failed
                logger.exception("control client of %s: %s", self._identity, error)
                self._why = str(error)
                continue
            self._refused = 0.0
            greeted, begun = False, time.monotonic()
            try:
                self._greet(stream, decoder)
                greeted = True
                self._heard = time.monotonic()
                self._receive(stream, decoder)
            except EverstepError as error:
                self._why = str(error)
            except Exception as error:
                logger.exception("control client of %s: %s", self._identity, error)
                self._why = str(error)
            finally:
                with self._lock:
                    if self._stream is not None:
                        self._since = time.monotonic()
                    self._stream = self._connecting = None
                    self._drop_beats()
                stream.close()
            if greeted and time.monotonic() - begun > _STABLE_S:
                waits = backoff(limit_s=limit_s)  # it was a good connection: the next attempt comes at once
        self._fail_all(WireError("the connection to the master was closed"))

    def _connect(self) -> tuple[FrameSocket, FrameDecoder]:
        address = self._address()
        if address is None:
            raise WireError("the master has not said where it is")
        deadline = Deadline(AUTH_S, "the handshake with the master")
        stream = connect(
            address,
            node=self._identity.node,
            run_dir=self._run_dir,
            secret=self._secret,
            limits=AUTH_LIMITS,
            tls=True,
            deadline=deadline,
        )
        self._connecting = stream
        try:
            authenticate_client(stream, self._secret, self._identity, deadline)
        except BaseException:
            self._connecting = None
            stream.close()
            raise
        stream.set_ticks(_TICK_S, 1.0)
        return stream, FrameDecoder(CONTROL_LIMITS)

    def _greet(self, stream: FrameSocket, decoder: FrameDecoder) -> None:
        """Say hello, hand its answer on, then send what waits."""
        if self._hello is not None:
            call_id = next(self._ids)
            deadline = Deadline(_HELLO_S, "the master's answer to hello")
            stream.send_raw(_call_frame(call_id, self._hello()), deadline=deadline)
            later: list[OrderType] = []
            answer: Answered | None = None
            while answer is None:
                for message in self._next(stream, decoder, deadline):
                    if not isinstance(message, Return):
                        later.append(message)
                    elif message.id == call_id:
                        answer = message.answer
            self._check_fenced(answer)
            self._give(self._on_welcome, answer)
            for order in later:
                self._give(self._on_order, order)
        with self._lock:
            self._connecting = None
            self._stream = stream
            self._connects += 1
            pending = [self._pending[i] for i in sorted(self._pending)]
            waiting = b"".join(p.frame for p in pending if not (p.deadline.expired or p.future.cancelled()))
            if waiting:
                self._send(stream, waiting)
        if self._stop.is_set():
            stream.shutdown()

    def _receive(self, stream: FrameSocket, decoder: FrameDecoder) -> None:
        """Receive until the connection ends: deliver answers and orders, send beats, expire calls."""
        heard = beat_at = time.monotonic()
        between = False  # there was a beat between this one and the next
        while not self._stop.is_set():
            now = time.monotonic()
            if self._beat is not None and now >= beat_at:
                beat_at, between = now + self._beat_s, False
                self._send_beat()
            elif not between and self._news is not None and self._news():
                between = True
                self._send_beat()
            data = stream.recv_bytes()
            if data is None:
                self._expire()
                if self._pending and time.monotonic() - heard > _SILENCE_S:
                    raise WireError(f"the master was silent for {_SILENCE_S:g} s")
                continue
            if data == b"":
                raise WireError("the master closed the connection")
            self._heard = heard = time.monotonic()
            for frame in decoder.feed(data):
                self._deliver(_decode_message(frame.kind, frame.header))

    def _next(self, stream: FrameSocket, decoder: FrameDecoder, deadline: Deadline) -> list[Return | OrderType]:
        while True:
            data = stream.recv_bytes()
            if data == b"":
                raise WireError("the master closed the connection")
            if data is not None:
                return [_decode_message(frame.kind, frame.header) for frame in decoder.feed(data)]
            self._expire()
            if self._stop.is_set():
                raise WireError("the connection to the master was closed")
            deadline.check()

    def _deliver(self, message: Return | OrderType) -> None:
        if not isinstance(message, Return):
            self._give(self._on_order, message)
            return
        with self._lock:
            pending = self._pending.pop(message.id, None)
        self._check_fenced(message.answer)
        if pending is not None:  # else: answered before, or given up
            with contextlib.suppress(InvalidStateError):  # cancelled
                pending.future.set_result(message.answer)

    def _check_fenced(self, answer: Answered) -> None:
        if isinstance(answer, Fenced) and self._fenced is None:
            self._fenced = answer
            self._give(self._on_fenced, answer)

    def _give(self, callback: Callable[..., None] | None, message: object) -> None:
        if callback is None:
            return
        try:
            callback(message)
        except Exception:
            # The thread must live: without it no heartbeat, and the master would declare us lost.
            logger.exception("callback of the control client failed on %s", message)

    def _send_beat(self) -> None:
        assert self._beat is not None
        try:
            beat = self._beat()
        except Exception:
            logger.exception("the heartbeat's readings failed; sending an empty one")
            beat = Beat()
        if beat is not None:
            self.submit(beat, max(5.0, 2 * self._beat_s)).add_done_callback(_ignore)

    def _send(self, stream: FrameSocket, frames: bytes) -> None:
        """With the lock held. A failure ends the connection; the frames are sent again on the next one."""
        try:
            stream.send_raw(frames, deadline=Deadline(5.0, "sending to the master"))
        except EverstepError as error:
            self._why = str(error)
            stream.shutdown()

    def _expire(self) -> None:
        late: list[_Pending] = []
        with self._lock:
            for call_id in [i for i, pending in self._pending.items() if pending.deadline.expired]:
                late.append(self._pending.pop(call_id))
        for pending in late:
            with contextlib.suppress(InvalidStateError):
                pending.future.set_exception(pending.deadline.error(self._state()))

    def _state(self) -> str:
        return "it is connected, but slow or stuck" if self._stream is not None else f"not connected: {self._why}"

    def _late(self, request: RequestType, timeout_s: float) -> DeadlineError:
        return Deadline(timeout_s, f"the master's answer to {_name(request)}").error(self._state())

    def _drop_beats(self) -> None:
        for call_id in [i for i, pending in self._pending.items() if pending.once]:
            del self._pending[call_id]

    def _give_up(self, error: EverstepError) -> None:
        with self._lock:
            self._fatal = error
            self._why = str(error)
        logger.error("control client of %s: %s", self._identity, error)
        self._fail_all(error)

    def _fail_all(self, error: EverstepError) -> None:
        with self._lock:
            failed = list(self._pending.values())
            self._pending.clear()
        for pending in failed:
            with contextlib.suppress(InvalidStateError):
                pending.future.set_exception(error)


def _call_frame(call_id: int, request: RequestType) -> bytes:
    header = _encoder.encode(Call(call_id, request))
    if len(header) > CONTROL_LIMITS.header_bytes:
        raise InternalError(f"{_name(request)} of {len(header)} bytes is beyond the wire's limit")
    return encode_frame(FrameKind.CALL, header)


def _decode_message(kind: int, header: bytes) -> Return | OrderType:
    if kind == FrameKind.RETURN:
        return decode_header(_return_decoder, header, "answer of the master")
    if kind == FrameKind.ORDER:
        return decode_header(_order_decoder, header, "order of the master")
    raise WireError(f"unexpected frame of kind {kind} from the master")


def _name(request: RequestType) -> str:
    return str(request.__struct_config__.tag)


def _ignore(future: Future[Answered]) -> None:
    """Ignore a beat's answer: it matters only when it is Fenced, which every answer is looked at for."""
    if not future.cancelled():
        future.exception()
