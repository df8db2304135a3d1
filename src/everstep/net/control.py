"""Is the client of the control plane: one connection to the master, whatever happens to it.

A background thread owns the connection: it connects, proves who we are, says hello, receives, and does so again when
the connection or the master dies. ``call`` may be used from any thread; a call in flight when the connection breaks
is sent again on the next one (requests are idempotent), until its own deadline.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

from everstep.brain.events import Fenced
from everstep.errors import DeadlineError, EverstepError, InternalError, WireError
from everstep.model.member import Address
from everstep.net.auth import AUTH_S, Identity, Secret, SecretError, VersionError
from everstep.net.beat_times import BeatTimes
from everstep.net.client_callbacks import ClientCallbacks
from everstep.net.control_link import ControlLink, call_frame, connect_control, request_name
from everstep.net.log import logger
from everstep.net.messages import Answered, Beat, OrderType, RequestType, Return
from everstep.net.pending_calls import PendingCall, PendingCalls
from everstep.net.retry import Deadline, backoff

_HELLO_S = 10.0
_SILENCE_S = 10.0
"""With calls waiting and not one byte for so long, the connection is given up for a new one."""

_STABLE_S = 1.0
"""A connection that breaks sooner (a request that the master chokes on) is not followed by the next one at once."""


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
        self._hello, self._beat_s, self._news = hello, beat_s, news
        self._callbacks = ClientCallbacks(on_welcome, on_order, on_fenced, beat)
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # guards what follows, and the order of what is sent
        self._pending = PendingCalls()
        self._link: ControlLink | None = None  # set only while calls may be sent on it
        self._connecting: ControlLink | None = None
        self._fatal: EverstepError | None = None
        self._why = "not connected yet"
        self._connects = 0
        self._since = time.monotonic()  # of being connected, or not
        self._heard = time.monotonic()
        self._refused = 0.0  # since when
        self._stop = threading.Event()
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
        deadline = Deadline(timeout_s, f"the master's answer to {request_name(request)}")
        call_id = next(self._ids)
        pending = PendingCall(call_frame(call_id, request), deadline, isinstance(request, Beat))
        with self._lock:
            if self._fatal is not None:
                pending.future.set_exception(self._fatal)
                return pending.future
            if self._stop.is_set():
                pending.future.set_exception(WireError("the connection to the master was closed"))
                return pending.future
            self._pending.add(call_id, pending)
            if self._link is not None:
                self._send(self._link, pending.frame)
        return pending.future

    @property
    def connected(self) -> bool:
        """Return whether the master has welcomed us on a connection that is up as far as we know."""
        return self._link is not None

    @property
    def connects(self) -> int:
        """Return how often a connection was made and greeted."""
        return self._connects

    @property
    def away_s(self) -> float:
        """Return seconds without a connection; 0 while connected."""
        return 0.0 if self._link is not None else time.monotonic() - self._since

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
        while self._link is None:
            if self._fatal is not None:
                raise self._fatal
            if self._stop.wait(min(0.01, deadline.left_s)):
                raise WireError("the connection to the master was closed")
            deadline.check(self._why)

    def reconnect(self) -> None:
        """Drop the connection, so that hello is said again on the next one."""
        with self._lock:
            if self._link is not None:
                self._link.shutdown()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread and the connection; calls in flight fail. Harmless when repeated."""
        self._stop.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            for link in (self._link, self._connecting):
                if link is not None:
                    link.shutdown()
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
                link = self._connect()
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
                self._greet(link)
                greeted = True
                self._heard = time.monotonic()
                self._receive(link)
            except EverstepError as error:
                self._why = str(error)
            except Exception as error:
                logger.exception("control client of %s: %s", self._identity, error)
                self._why = str(error)
            finally:
                with self._lock:
                    if self._link is not None:
                        self._since = time.monotonic()
                    self._link = self._connecting = None
                    self._pending.drop_stale()
                link.close()
            if greeted and time.monotonic() - begun > _STABLE_S:
                waits = backoff(limit_s=limit_s)  # it was a good connection: the next attempt comes at once
        self._fail_all(WireError("the connection to the master was closed"))

    def _connect(self) -> ControlLink:
        address = self._address()
        if address is None:
            raise WireError("the master has not said where it is")
        deadline = Deadline(AUTH_S, "the handshake with the master")
        link = connect_control(address, self._run_dir, self._secret, self._identity.node, deadline)
        self._connecting = link
        try:
            link.prove(self._secret, self._identity, deadline)
        except BaseException:
            self._connecting = None
            link.close()
            raise
        return link

    def _greet(self, link: ControlLink) -> None:
        """Say hello, hand its answer on, then send what waits."""
        if self._hello is not None:
            deadline = Deadline(_HELLO_S, "the master's answer to hello")
            answer, later = link.ask(next(self._ids), self._hello(), deadline, self._idle)
            self._callbacks.answered(answer)
            self._callbacks.welcome(answer)
            for order in later:
                self._callbacks.order(order)
        with self._lock:
            self._connecting = None
            self._link = link
            self._connects += 1
            if waiting := self._pending.frames():
                self._send(link, waiting)
        if self._stop.is_set():
            link.shutdown()

    def _receive(self, link: ControlLink) -> None:
        """Receive until the connection ends: deliver answers and orders, send beats, expire calls."""
        heard = time.monotonic()
        times = BeatTimes(self._beat_s, self._news)
        while not self._stop.is_set():
            if self._callbacks.beats and times.due(time.monotonic()):
                self._send_beat()
            messages = link.messages()
            if messages is None:
                self._expire()
                if self._pending and time.monotonic() - heard > _SILENCE_S:
                    raise WireError(f"the master was silent for {_SILENCE_S:g} s")
                continue
            self._heard = heard = time.monotonic()
            for message in messages:
                self._deliver(message)

    def _idle(self) -> None:
        self._expire()
        if self._stop.is_set():
            raise WireError("the connection to the master was closed")

    def _deliver(self, message: Return | OrderType) -> None:
        if not isinstance(message, Return):
            self._callbacks.order(message)
            return
        with self._lock:
            pending = self._pending.take(message.id)
        self._callbacks.answered(message.answer)
        if pending is not None:
            pending.answer(message.answer)

    def _send_beat(self) -> None:
        beat = self._callbacks.beat()
        if beat is not None:
            self.submit(beat, max(5.0, 2 * self._beat_s)).add_done_callback(_ignore)

    def _send(self, link: ControlLink, frames: bytes) -> None:
        """With the lock held. A failure ends the connection; the frames are sent again on the next one."""
        try:
            link.send(frames, Deadline(5.0, "sending to the master"))
        except EverstepError as error:
            self._why = str(error)
            link.shutdown()

    def _expire(self) -> None:
        with self._lock:
            late = self._pending.take_late()
        for pending in late:
            pending.fail(pending.deadline.error(self._state()))

    def _state(self) -> str:
        return "it is connected, but slow or stuck" if self._link is not None else f"not connected: {self._why}"

    def _late(self, request: RequestType, timeout_s: float) -> DeadlineError:
        return Deadline(timeout_s, f"the master's answer to {request_name(request)}").error(self._state())

    def _give_up(self, error: EverstepError) -> None:
        with self._lock:
            self._fatal = error
            self._why = str(error)
        logger.error("control client of %s: %s", self._identity, error)
        self._fail_all(error)

    def _fail_all(self, error: EverstepError) -> None:
        with self._lock:
            failed = self._pending.take_all()
        for pending in failed:
            pending.fail(error)


def _ignore(future: Future[Answered]) -> None:
    """Ignore a beat's answer: it matters only when it is Fenced, which every answer is looked at for."""
    if not future.cancelled():
        future.exception()
