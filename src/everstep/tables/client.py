"""One line of requests to each ps: in order, repeated over reconnects until answered, or the map names another ps.

A request names rows by offsets into the worker's memory (``RowsPart`` with ``shm``). On the same node the ps reads and
writes that memory itself; over TCP the link sends and receives the same pieces behind the header. Requests of one
link are answered in order, so a pull sent after a push sees it applied.

A ps that is lost is waited for: a newer map will name who has its partitions now, and its link is closed then. Whatever
was asked by an old map, of a link that was closed or of a ps that has the newer map already, ends with ``Moved``: who
asked routes it anew.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from everstep.errors import DeadlineError, EverstepError, InternalError, PlatformError, ServerLostError, WireError
from everstep.ids import ShardKey, Slot, TableId
from everstep.model.placement import Placement, PsPlace
from everstep.model.table import TableSpec
from everstep.net.messages import (
    Bad,
    DataAnswer,
    DataRequest,
    Declare,
    Moved,
    OpenShard,
    OpenShards,
    Peek,
    Pull,
    Pulled,
    Push,
    Pushed,
    Put,
    RowsPart,
    Scan,
    Stat,
)
from everstep.net.retry import backoff
from everstep.tables.routing import Memory, Router, TableRows, parts_by_ps

Then = Callable[[DataAnswer, memoryview], None]
"""Called once with the answer and its body, on the link's thread."""

Sendable = Declare | OpenShard | OpenShards | Peek | Pull | Push | Put | Scan | Stat

GONE = Moved(0)  # the link is closed; the request was not sent
ADRIFT = Moved(-1)  # the link was closed with the request on its way: a ps with our memory may still write into it

_LOST_S = 300.0  # without a newer map
_AGAIN_S = 0.02  # the first time; then twice as long each time
_AGAIN_MAX_S = 0.5


class Link(Protocol):
    """Is what the worker needs of a connection to one ps."""

    slot: Slot

    def submit(self, message: Sendable, then: Then) -> None: ...

    def close(self, wait_s: float = 2.0) -> None: ...


class DataLink(Protocol):
    """Is the part of ``everstep.net.data.DataClient`` that a link uses."""

    def request(
        self, message: DataRequest, buffers: Any = (), *, into: memoryview | None = None, timeout_s: float = 30.0
    ) -> tuple[DataAnswer, memoryview]: ...

    def close(self) -> None: ...


class SocketLink:
    """Links to one ps over a data connection, with one thread that sends a request and waits for its answer.

    ``dims``: width of every declared table's rows (it may grow while the link lives).
    ``connect(place) -> (connection, shared)``: a new authenticated connection; ``shared``: the ps maps this memory.
    A lost connection is made again for ``give_up_s`` seconds and the request repeated (every request is harmless when
    repeated); then ``on_lost(error)`` is called, once, and nothing is answered any more. What is not answered when the
    link is closed is answered GONE or ADRIFT.
    """

    def __init__(
        self,
        place: PsPlace,
        memory: Memory,
        dims: Mapping[TableId, int],
        connect: Callable[[PsPlace], tuple[DataLink, bool]],
        on_lost: Callable[[EverstepError], None],
        *,
        give_up_s: float = _LOST_S,
        answer_s: float = 60.0,
    ) -> None:
        self.slot = place.slot
        self.place = place
        self._memory = memory
        self._dims = dims
        self._connect = connect
        self._on_lost = on_lost
        self._give_up_s, self._answer_s = give_up_s, answer_s
        self._queue: queue.SimpleQueue[tuple[Sendable, Then] | None] = queue.SimpleQueue()
        self._connection: DataLink | None = None
        self._shared = False
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._over = False  # nobody takes from the queue any more
        self._scratch = bytearray()
        self.busy_s = 0.0  # seconds with a request on its way
        self._thread = threading.Thread(target=self._run, name=f"everstep-ps-{place.slot}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<SocketLink ps:{self.slot} {'shm' if self._shared else 'wire'}>"

    def submit(self, message: Sendable, then: Then) -> None:
        with self._lock:
            if not self._over:
                self._queue.put((message, then))
                return
        then(GONE, memoryview(b""))

    def close(self, wait_s: float = 2.0) -> None:
        """Close the link, from any thread. Whatever waits is answered on the link's thread."""
        self._closing.set()
        self._queue.put(None)
        connection = self._connection
        if connection is not None:
            connection.close()
        if wait_s and self._thread is not threading.current_thread():
            self._thread.join(timeout=wait_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                message, then = job
                if self._closing.is_set():
                    then(GONE, memoryview(b""))
                    continue
                begin = time.perf_counter()
                try:
                    answer, body = self._exchange(message)
                except EverstepError:
                    if not self._closing.is_set():
                        raise
                    answer, body = (ADRIFT if self._shared else GONE), memoryview(b"")
                self.busy_s += time.perf_counter() - begin
                then(answer, body)
        except EverstepError as error:
            self._on_lost(error)
        except Exception as error:  # a bug of ours must end the job, not leave it waiting
            self._on_lost(WireError(f"talking to ps:{self.slot} failed: {type(error).__name__}: {error}"))
        finally:
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        with self._lock:
            self._over = True
        while not self._queue.empty():
            left = self._queue.get()
            if left is not None:
                left[1](GONE, memoryview(b""))

    def _exchange(self, message: Sendable) -> tuple[DataAnswer, memoryview]:
        """Send until answered. Raises ServerLostError when the ps can not be reached for too long."""
        lost_at = 0.0
        for pause_s in backoff(0.01, 0.5):
            if pause_s:
                self._closing.wait(pause_s)
            try:
                if self._connection is None:
                    connection, self._shared = self._connect(self.place)
                    self._connection = connection
                    if self._closing.is_set():  # ``close`` found no connection to close
                        raise WireError("closed")
                return self._once(self._connection, message)
            except (WireError, DeadlineError, PlatformError, OSError) as error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                now = time.monotonic()
                lost_at = lost_at or now
                if now - lost_at > self._give_up_s or self._closing.is_set():
                    raise ServerLostError(
                        f"ps:{self.slot} did not answer for {now - lost_at:.0f} s ({error}), and no other ps was "
                        "given its partitions"
                    ) from error
        raise AssertionError("backoff never ends")

    def _once(self, connection: DataLink, message: Sendable) -> tuple[DataAnswer, memoryview]:
        if self._shared or not isinstance(message, Pull | Push | Put):
            answer, body = connection.request(message, timeout_s=self._answer_s)
            return answer, memoryview(bytes(body))  # its buffer is the connection's, good until the next answer
        if isinstance(message, Pull):
            return self._pull(connection, message)
        buffers: list[memoryview] = []
        parts = message.parts if isinstance(message, Push) else (message.part,)
        moved = _in_body(parts, self._memory, buffers, self._dims)
        if isinstance(message, Push):
            message = msgspec.structs.replace(message, parts=tuple(moved), shm=False)
        else:
            message = msgspec.structs.replace(message, part=moved[0], shm=False)
        return connection.request(message, buffers, timeout_s=self._answer_s)

    def _pull(self, connection: DataLink, message: Pull) -> tuple[DataAnswer, memoryview]:
        """Rows come in the answer's body, in the order of the parts: straight to their place where that is one run."""
        buffers: list[memoryview] = []
        sizes = [4 * p.n * self._dims[p.table] for p in message.parts]
        at, moved = 0, []
        for part in message.parts:
            buffers.append(_bytes(self._memory, part.keys_at, 8 * part.n))
            moved.append(RowsPart(part.table, part.n, at, 0, part.lr))
            at += 8 * part.n
        total = sum(sizes)
        first = message.parts[0].rows_at if message.parts else 0
        runs = [first]
        for size in sizes:
            runs.append(runs[-1] + size)
        one_run = all(p.rows_at == r for p, r in zip(message.parts, runs, strict=False))
        if one_run:
            into = _bytes(self._memory, first, total)
        else:
            if len(self._scratch) < total:
                self._scratch = bytearray(total + total // 4)
            into = memoryview(self._scratch)[:total]
        request = msgspec.structs.replace(message, parts=tuple(moved), shm=False)
        answer, body = connection.request(request, buffers, into=into, timeout_s=self._answer_s)
        if isinstance(answer, Pulled):
            if len(body) != total:
                return Bad(f"ps:{self.slot} answered a pull with {len(body)} bytes instead of {total}"), memoryview(b"")
            if not one_run:
                for part, size, run in zip(message.parts, sizes, runs, strict=False):
                    _bytes(self._memory, part.rows_at, size)[:] = body[run - first : run - first + size]
        return answer, memoryview(b"")


def _bytes(memory: Memory, at: int, size: int) -> memoryview:
    return memory.array(at, size, np.uint8).data


def _in_body(
    parts: tuple[RowsPart, ...], memory: Memory, buffers: list[memoryview], dims: Mapping[TableId, int]
) -> list[RowsPart]:
    """The same parts with offsets into a body made of ``buffers``."""
    at, moved = 0, []
    for part in parts:
        dim = dims[part.table]
        keys_at, at = at, at + 8 * part.n
        rows_at, at = at, at + 4 * dim * part.n
        pad = -at % 8  # keys must lie aligned
        at += pad
        buffers += [_bytes(memory, part.keys_at, 8 * part.n), _bytes(memory, part.rows_at, 4 * dim * part.n)]
        if pad:
            buffers.append(memoryview(bytes(pad)))
        moved.append(RowsPart(part.table, part.n, keys_at, rows_at, part.lr, part.options))
    return moved


class Ticket:
    """Is a wait for answers that are still to come. ``wait`` raises what went wrong."""

    def __init__(self, client: PsClient, n: int) -> None:
        self._client = client
        self._left = n
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._after: list[Callable[[], None]] = []
        self.answers: list[tuple[Slot, DataAnswer, memoryview]] = []
        if n == 0:
            self._event.set()

    def arrived(self, ps: Slot, answer: DataAnswer, body: memoryview) -> None:
        with self._lock:
            self.answers.append((ps, answer, body))
            self._left -= 1
            if self._left > 0:
                return
            self._event.set()
            after, self._after = self._after, []
        for action in after:
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` once everything is answered: now, or on a link's thread."""
        with self._lock:
            if not self._event.is_set():
                self._after.append(action)
                return
        action()

    @property
    def ready(self) -> bool:
        return self._event.is_set()

    @property
    def moved(self) -> bool:
        """Some of it was asked by an old map: route it by the new one and ask again."""
        return any(isinstance(answer, Moved) for _, answer, _ in self.answers)

    @property
    def adrift(self) -> bool:
        """Return whether a ps that is given up may still write into the rows of this pull: that memory must not be used
        again."""
        return any(answer == ADRIFT for _, answer, _ in self.answers)

    def wait(self) -> None:
        """Return when everything is answered (see ``moved``). Raises InternalError where a ps says that the request
        was wrong."""
        while not self._event.wait(0.5):
            if self._client.failure is not None:
                raise self._client.failure
            if self._client.on_wait is not None:
                self._client.on_wait()
        for ps, answer, _ in self.answers:
            if isinstance(answer, Bad):
                raise InternalError(f"ps:{ps} refused: {answer.error}")


class PsClient:
    """Speaks with all ps of the job as with one: it knows the map and waits for answers.

    ``moved_give_up_s``: so long may a ps have another map than we, or a partition no owner that is up.
    """

    def __init__(self, memory: Memory, *, moved_give_up_s: float = _LOST_S) -> None:
        self.memory = memory
        self.dims: dict[TableId, int] = {}
        self.links: dict[Slot, Link] = {}
        self.failure: EverstepError | None = None
        self.on_wait: Callable[[], None] | None = None  # called by who waits for answers, twice a second
        self._specs: dict[TableId, TableSpec] = {}
        self._router: Router | None = None
        self._moved_give_up_s = moved_give_up_s
        self._moved_since: dict[Slot, float] = {}  # since when a ps has answered nothing but Moved
        self._lock = threading.RLock()  # of the map with its links and the tables they were told of
        self._later: dict[threading.Timer, Callable[[], None]] = {}  # requests that are made again after a while
        self._bytes_in = self._bytes_out = 0  # keys and rows of answered pulls, of answered pushes
        self._bytes_lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<PsClient {self._router} {list(self.links.values())}>"

    @property
    def router(self) -> Router:
        if self._router is None:
            raise InternalError("no placement map yet")
        return self._router

    @property
    def placed(self) -> bool:
        return self._router is not None

    def set_placement(self, placement: Placement, make_link: Callable[[PsPlace], Link]) -> None:
        """Take a newer routing. A new life of a ps gets a new link, and is told of all tables before anything else; a
        ps that is not in the map any more loses its link."""
        with self._lock:
            if self._router is not None and placement.route <= self._router.version:
                return
            old = self._router.placement.servers if self._router is not None else ()
            links: dict[Slot, Link] = {}
            for place in placement.servers:
                if place in old and place.slot in self.links:
                    links[place.slot] = self.links[place.slot]
                else:
                    links[place.slot] = make_link(place)
                    self._tell(links[place.slot])
            gone = [link for slot, link in self.links.items() if links.get(slot) is not link]
            self.links = links
            self._router = Router(placement)
        for link in gone:
            link.close(0.0)
        for timer in list(self._later):
            again = self._later.pop(timer, None)
            if again is not None:  # (else it has just begun)
                timer.cancel()
                self._after(0.0, again)

    def _after(self, wait_s: float, again: Callable[[], None]) -> None:
        """Call ``again`` after a while, on another thread; at once when a newer map comes."""

        def due() -> None:
            if self._later.pop(timer, None) is not None:
                again()

        timer = threading.Timer(wait_s, due)
        timer.daemon = True
        self._later[timer] = again
        timer.start()

    def declare(self, specs: Sequence[TableSpec]) -> Ticket:
        """Make tables exist at every ps, also at those that will join. Harmless when repeated."""
        with self._lock:
            self._specs.update({s.id: s for s in specs})
            self.dims.update({s.id: s.dim for s in specs})
            return self.everywhere(lambda i, slot: Declare(tuple(specs)))

    def _tell(self, link: Link) -> None:
        if self._specs:
            link.submit(Declare(tuple(self._specs.values())), lambda answer, body: self._declared(link.slot, answer))

    def _declared(self, ps: Slot, answer: DataAnswer) -> None:
        if isinstance(answer, Bad):
            self.fail(InternalError(f"ps:{ps} refused: {answer.error}"))

    def fail(self, error: EverstepError) -> None:
        """End everything that waits with ``error``."""
        self.failure = self.failure or error

    def close(self) -> None:
        self._closed = True
        for link in self.links.values():
            link.close()

    # ------------------------------------------------------------ requests

    def submit(
        self,
        ps: Slot,
        message: Sendable,
        then: Then,
        router: Router | None = None,
        began_at: float = 0.0,
        waits: Iterator[float] | None = None,
    ) -> None:
        """Send to one ps; ``then`` gets the final answer, on the link's thread. It is Moved when there is a newer map
        than ``router``, by which it was routed (default: today's)."""
        began_at = began_at or time.monotonic()
        waits = waits or backoff(_AGAIN_S, _AGAIN_MAX_S, at_once=False)
        router = router or self.router
        version = router.version

        def answered(answer: DataAnswer, body: memoryview) -> None:
            if self._closed:
                return
            if not isinstance(answer, Moved) or self.router.version != version:
                self._moved_since.pop(ps, None)
                if isinstance(answer, Pulled | Pushed):
                    self._count(message)
                then(answer, body)
            elif time.monotonic() - began_at > self._moved_give_up_s:
                self.fail(DeadlineError(f"ps:{ps} has had another placement map for {self._moved_give_up_s:.0f} s"))
            else:
                # The ps may not have heard of our map yet, or we not of its: both hear from the master soon.
                self._moved_since.setdefault(ps, time.monotonic())
                self._after(next(waits), again)

        def again() -> None:
            if self.router.version != version:
                then(GONE, memoryview(b""))
            else:
                self.submit(ps, message, then, router, began_at, waits)

        link = self.links.get(ps) if self.router.version == version else None
        if link is None:
            answered(GONE, memoryview(b""))
        else:
            link.submit(message, answered)

    def _count(self, message: Sendable) -> None:
        if isinstance(message, Pull | Push):
            size = sum(part.n * (8 + 4 * self.dims[part.table]) for part in message.parts)
            with self._bytes_lock:
                if isinstance(message, Pull):
                    self._bytes_in += size
                else:
                    self._bytes_out += size

    def carried(self) -> dict[str, float]:
        """Return, for the beat, the bytes of keys and rows that were pulled and pushed so far."""
        return {"bytes_in": float(self._bytes_in), "bytes_out": float(self._bytes_out)}

    def stalled(self) -> tuple[Slot, float]:
        """Return the ps that has kept us waiting longest with another map than ours, or with partitions that are not
        there yet, and for how many seconds; (-1, 0.0): none."""
        now = time.monotonic()
        waits = [(now - since, slot) for slot, since in list(self._moved_since.items())]
        longest, slot = max(waits, default=(0.0, Slot(-1)))
        return slot, longest

    def everywhere(self, message_for: Callable[[int, Slot], Sendable | None], router: Router | None = None) -> Ticket:
        """Send one request to every ps of ``router`` (default: today's): ``message_for(position, slot)``, None for
        nothing to say."""
        router = router or self.router
        messages = [(slot, message_for(i, slot)) for i, slot in enumerate(router.slots)]
        wanted = [(slot, message) for slot, message in messages if message is not None]
        ticket = Ticket(self, len(wanted))
        for slot, message in wanted:
            self.submit(
                slot,
                message,
                lambda answer, body, slot=slot: ticket.arrived(slot, answer, body),  # type: ignore[misc]
                router,
            )
        return ticket

    def pull(
        self,
        rows: Sequence[TableRows],
        router: Router,
        *,
        create: bool,
        since: tuple[ShardKey, int] = (ShardKey(0), 0),
    ) -> Ticket:
        """Ask every ps for its part of the values: one message each, for all tables. ``router``: routed ``rows``.
        ``since``: as they are once all positions of a shard below one are applied."""
        parts = parts_by_ps(rows, len(router.slots), grads=False)
        return self.everywhere(
            lambda i, _: Pull(router.version, tuple(parts[i]), True, create, *since) if parts[i] else None, router
        )
