"""Virtual time, processes that can be killed or stopped, and a network that loses, repeats, delays and cuts.

Everything random comes from one ``random.Random(seed)``, so the same seed and code give the same run; ``crc`` is a
running checksum over all that happened (order and time), the run's identity.

The control plane is modelled as TCP does it: a connection delivers in order until it breaks, and then nothing of it
arrives any more. The data plane is treated harsher: single messages may be lost, repeated or late.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any
from zlib import crc32

Handler = Callable[..., None]


class Violation(AssertionError):
    """A promise was broken; the message says which, with the values."""


class Kernel:
    """Is the event queue. ``now``: virtual seconds."""

    __slots__ = ("crc", "events", "heap", "lines", "now", "number", "random", "rng", "stopped")

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = 0.0
        self.number = 0
        self.events = 0
        self.crc = 0
        self.heap: list[tuple[float, int, Handler, tuple[Any, ...]]] = []
        self.lines: list[str] | None = [] if trace else None
        self.stopped = False

    def at(self, time: float, handler: Handler, *args: Any) -> None:
        """Call ``handler(*args)`` at ``time``; at equal times in the order of these calls."""
        self.number += 1
        heappush(self.heap, (time, self.number, handler, args))

    def after(self, delay: float, handler: Handler, *args: Any) -> None:
        self.number += 1
        heappush(self.heap, (self.now + delay, self.number, handler, args))

    def run(self, until: float) -> None:
        """Until nothing is left, somebody sets ``stopped``, or virtual time reaches ``until``."""
        heap = self.heap
        crc, events = self.crc, 0
        try:
            while heap and not self.stopped:
                time, number, handler, args = heap[0]
                if time > until:
                    break
                heappop(heap)
                self.now = time
                events += 1
                crc = crc32(b"%d %d" % (number, int(time * 1e6)), crc)
                handler(*args)
        finally:
            self.crc = crc
            self.events += events

    def say(self, who: object, text: str) -> None:
        """Write a line of the trace. Guard with ``if kernel.lines is not None`` where building ``text`` costs."""
        if self.lines is not None:
            self.lines.append(f"{self.now:9.4f}  {who!s:<14} {text}")


class SimProcess:
    """Something that runs on a node, may be stopped for a while (SIGSTOP) and dies once."""

    alive = True
    paused_until = 0.0
    held_until = 0.0

    def __init__(self, kernel: Kernel, name: str, node: str) -> None:
        self.kernel, self.name, self.node = kernel, name, node

    def __str__(self) -> str:
        return self.name

    def later(self, delay: float, handler: Handler, *args: Any) -> None:
        """A timer of this process: never fires once it is dead, and late if it is stopped."""
        kernel = self.kernel
        kernel.number += 1
        heappush(kernel.heap, (kernel.now + delay, kernel.number, self.fire, (handler, args)))

    def fire(self, handler: Handler, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        kernel = self.kernel
        if self.paused_until > kernel.now:
            kernel.number += 1
            heappush(kernel.heap, (self.paused_until, kernel.number, self.fire, (handler, args)))
            return
        handler(*args)

    def pause(self, seconds: float) -> None:
        self.paused_until = max(self.paused_until, self.kernel.now + seconds)

    def hold(self, seconds: float) -> None:
        """Do as ``pause``, but it runs: its script holds the interpreter."""
        self.pause(seconds)
        self.held_until = max(self.held_until, self.kernel.now + seconds)

    @property
    def runs(self) -> bool:
        """Return whether it runs, as seen from outside."""
        return self.alive and (self.paused_until <= self.kernel.now or self.held_until >= self.paused_until)


class SimClient(SimProcess):
    """Is a process with a control connection to the master."""

    conn: Conn | None = None

    def connection_lost(self, conn: Conn) -> None:
        raise NotImplementedError


class Conn:
    """Is one control connection: in order until it breaks. ``greeted``: the master took the hello."""

    __slots__ = ("client", "down_last", "greeted", "opened_at", "server", "up", "up_last")

    def __init__(self, client: SimClient, server: SimProcess, now: float) -> None:
        self.client, self.server = client, server
        self.up = True
        self.greeted = False
        self.opened_at = now
        self.up_last = self.down_last = 0.0  # arrival of the newest message, each way


class Network:
    """Says who reaches whom, and how badly. Probabilities are per message."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.loss = self.duplicate = self.straggle = 0.0
        self.delay_s = 0.001
        self.jitter_s = 0.004
        self.notice_s = 0.02  # until a broken connection is noticed
        self.timeout_s = 1.0  # until a silent partition is noticed
        self.cut: set[tuple[str, str]] = set()  # (from, to), names of processes or nodes
        self.sent = self.dropped = self.repeated = 0

    def reaches(self, a: SimProcess, b: SimProcess) -> bool:
        if not self.cut:
            return True
        cut = self.cut
        return (a.name, b.name) not in cut and (a.node, b.node) not in cut

    def partition(self, a: str, b: str, both: bool) -> None:
        """Cut processes or nodes ``a`` -> ``b`` (and back, if ``both``)."""
        self.cut.add((a, b))
        if both:
            self.cut.add((b, a))

    # ------------------------------------------------------------ data plane

    def send(self, source: SimProcess, target: SimProcess, handler: Handler, *args: Any) -> None:
        """One message, on its own: may be lost, late or repeated."""
        kernel = self.kernel
        random = kernel.random
        self.sent += 1
        if (self.cut and not self.reaches(source, target)) or (self.loss and random() < self.loss):
            self.dropped += 1
            return
        delay = self.delay_s + self.jitter_s * random()
        if self.straggle and random() < self.straggle:
            delay += 2.0 * random()
        kernel.number += 1
        heappush(kernel.heap, (kernel.now + delay, kernel.number, target.fire, (handler, args)))
        if self.duplicate and random() < self.duplicate:
            self.repeated += 1
            kernel.after(delay + 3.0 * random(), target.fire, handler, args)

    # ------------------------------------------------------------ control plane

    def connect(self, client: SimClient, server: SimProcess) -> Conn:
        return Conn(client, server, self.kernel.now)

    def to_server(self, conn: Conn, handler: Handler, *args: Any) -> None:
        if conn.up and self._arrives(conn, conn.client, conn.server):
            conn.up_last = self._deliver(conn, conn.server, conn.up_last, handler, args)

    def to_client(self, conn: Conn, handler: Handler, *args: Any) -> None:
        if conn.up and self._arrives(conn, conn.server, conn.client):
            conn.down_last = self._deliver(conn, conn.client, conn.down_last, handler, args)

    def _arrives(self, conn: Conn, source: SimProcess, target: SimProcess) -> bool:
        self.sent += 1
        if self.cut and not self.reaches(source, target):
            self.dropped += 1
            self.sever(conn, self.timeout_s)
            return False
        if self.loss and self.kernel.random() < self.loss:
            self.dropped += 1
            self.sever(conn, self.notice_s)
            return False
        return True

    def _deliver(self, conn: Conn, target: SimProcess, last: float, handler: Handler, args: tuple[Any, ...]) -> float:
        kernel = self.kernel
        random = kernel.random
        time = kernel.now + self.delay_s + self.jitter_s * random()
        if time < last:
            time = last
        kernel.number += 1
        heappush(kernel.heap, (time, kernel.number, target.fire, (handler, args)))
        if self.duplicate and random() < self.duplicate:  # as if said again over an older connection
            self.repeated += 1
            kernel.after(time - kernel.now + 3.0 * random(), target.fire, handler, args)
        return time

    def sever(self, conn: Conn, notice_s: float) -> None:
        """Let nothing more pass; the client learns of it in up to ``notice_s``. What is under way still arrives."""
        if conn.up:
            conn.up = False
            conn.client.later(notice_s * (0.5 + 0.5 * self.kernel.random()), conn.client.connection_lost, conn)
