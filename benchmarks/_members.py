"""Plays agents and workers of many nodes towards a real master: real connections, and no process behind any of them.

``python -m benchmarks._members RUN_DIR FIRST LAST PLACES`` is one process of it: nodes FIRST to LAST - 1, each with an
agent and PLACES workers, over TCP with TLS as other machines connect. It takes one word a line from standard input and
answers each with one line of JSON (:class:`Told`): ``look``: what happened since the last look; ``notice N AT``: the
first N of its nodes get a reclaim notice at ``time.monotonic()`` AT, and the answer comes when their workers have left;
``vanish N AT``: the connections of N nodes are cut. It ends with its standard input.

Each agent and worker beats every second, as real ones do, with the readings that a real one sends. A worker holds one
shard, reports it done after ``SHARD_S`` and asks for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._measure import ROOT
from everstep.brain.events import (
    DrainAsked,
    Granted,
    MemberJoined,
    NodeJoined,
    Ok,
    PlanRegistered,
    ProcessExited,
    ShardAsked,
    ShardDone,
    ShardReturned,
    StartProcess,
    StopProcess,
    Wait,
)
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.capacity import Market
from everstep.model.member import Address, Role
from everstep.model.shard import Lease, ShardSchedule
from everstep.net.auth import ClientAuth, Identity, load_secret
from everstep.net.control_link import call_frame
from everstep.net.frames import AUTH_LIMITS, CONTROL_LIMITS, FrameDecoder, FrameKind
from everstep.net.messages import Beat, OrderType, RequestType, Return
from everstep.net.rendezvous import read_master
from everstep.net.tls import SERVER_NAME, client_context

BEAT_S = 1.0
SHARD_S = 20.0
FORK_S = 0.5  # from the order to start a worker until it connects
HOME = NodeId("node0")  # the master's node, which takes nobody
SERVERS = NodeId("servers")  # the node that stays, with the only ps
CONNECTS_AT_ONCE = 16
TRIES = 20  # to connect
_READINGS = (
    *("samples", "batches", "samples_per_s", "retried", "skipped", "left_out", "wait_fraction", "accum", "loss"),
    *(
        "loader_batch",
        "memory_batch",
        "per_sample_s",
        "computed",
        "compute_s",
        "phase.data",
        "phase.pull",
        "phase.push",
    ),
    *("cpu_s", "throttled_s", "rss_bytes", "bytes_in", "bytes_out"),
)

_returns = msgspec.msgpack.Decoder(Return)
_orders: msgspec.msgpack.Decoder[OrderType] = msgspec.msgpack.Decoder(OrderType)


class BrokenLink(Exception):
    """Says that a connection ended before the master had welcomed its member."""


class Told(msgspec.Struct, kw_only=True):
    """Is what one process saw since the last word. Times by ``time.monotonic()``, durations in seconds."""

    beats_s: list[float] = []  # from a beat until its answer
    unanswered: int = 0  # beats that still wait
    workers: int = 0  # connected and welcomed
    agents: int = 0
    shards: int = 0  # reported done
    refused: int = 0  # answers that are none of those expected
    broken: int = 0  # connections that ended without anybody's wish
    answered_at: float = 0.0  # the last notice
    ordered_at: float = 0.0  # the last order to end a worker
    empty_at: float = 0.0  # the last report of an ended worker


class Link(asyncio.Protocol):
    """Is one member's connection: proves itself, says hello, beats; orders go to ``ordered``."""

    def __init__(self, all_: Members, identity: Identity, hello: Callable[[], RequestType]) -> None:
        self.all, self.identity, self.hello = all_, identity, hello
        self.welcomed = asyncio.get_running_loop().create_future()
        self.ordered: Callable[[OrderType], None] = lambda order: None
        self.beat: Callable[[], Beat] = Beat
        self._auth: ClientAuth | None = ClientAuth(all_.secret, identity)
        self._decoder = FrameDecoder(AUTH_LIMITS)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._number = 0
        self._beating: asyncio.TimerHandle | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        assert self._auth is not None
        transport.write(self._auth.begin())  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            if self._auth is not None:
                assert self._transport is not None
                self._transport.write(self._auth.answer(frame))
                self._auth, self._decoder.limits = None, CONTROL_LIMITS
                self.ask(self.hello(), self._is_welcome)
            elif frame.kind == FrameKind.RETURN:
                answer = _returns.decode(frame.header)
                self._waiting.pop(answer.id, lambda _: None)(answer.answer)
            elif frame.kind == FrameKind.ORDER:
                self.ordered(_orders.decode(frame.header))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed and self.welcomed.done():
            self.all.told.broken += 1
        self.close()
        if not self.welcomed.done():
            self.welcomed.set_exception(BrokenLink("the master ended the connection"))

    def ask(self, request: RequestType, then: Callable[[Any], None]) -> None:
        """Send a request; ``then`` gets its answer."""
        self._number += 1
        self._waiting[self._number] = then
        if self._transport is not None and not self.closed:
            self._transport.write(call_frame(self._number, request))

    async def answer_to(self, request: RequestType) -> Any:
        """Send a request and wait for its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ask(request, lambda answer: None if future.done() else future.set_result(answer))
        return await future

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        if self._beating is not None:
            self._beating.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _is_welcome(self, answer: Any) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result(answer)
        self._later_beat(random.random() * BEAT_S)

    def _later_beat(self, after_s: float) -> None:
        self._beating = asyncio.get_running_loop().call_later(after_s, self._beat)

    def _beat(self) -> None:
        began, told = time.monotonic(), self.all
        told.waiting_beats += 1

        def answered(answer: Any) -> None:
            told.waiting_beats -= 1
            told.told.beats_s.append(time.monotonic() - began)
            told.told.refused += not isinstance(answer, Ok)

        self.ask(self.beat(), answered)
        self._later_beat(BEAT_S)


class Worker:
    """Is one worker: asks for shards, reports them done, gives them back when it is to end."""

    def __init__(self, node: PlayedNode, order: StartProcess) -> None:
        self.node, self.slot, self.incarnation = node, order.slot, order.incarnation
        self.link: Link | None = None
        self.lease: Lease | None = None
        self.asks = self.samples = 0
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        await asyncio.sleep(FORK_S * (0.5 + random.random()))
        who = {"slot": self.slot, "incarnation": self.incarnation, "node": self.node.name}
        identity = Identity(purpose="control", role="worker", **who)
        hello = MemberJoined(Role.WORKER, self.slot, self.incarnation, self.node.name, self._pid)
        self.link = link = await self.node.all.connect(identity, lambda: hello)
        link.beat = self._beat
        self.node.all.told.workers += 1
        plan = ShardSchedule(name="played", samples=10**9, shard_samples=1000, seed=0)
        number = (await link.answer_to(PlanRegistered(plan))).dataset
        await asyncio.sleep(random.random() * SHARD_S)  # (their steps do not keep time with each other)
        while True:
            self.asks += 1
            answer = await link.answer_to(ShardAsked(number, 1, self.asks))
            while isinstance(answer, Wait):
                await asyncio.sleep(answer.retry_after_s)
                answer = await link.answer_to(ShardAsked(number, 1, self.asks))
            if not isinstance(answer, Granted):
                self.node.all.told.refused += 1
                return
            self.lease = answer.lease
            await asyncio.sleep(SHARD_S)
            done = ShardDone(self.lease.shard, self.lease.no, ((Slot(0), Incarnation(1)),))
            self.lease = None
            if isinstance(await link.answer_to(done), Ok):
                self.samples += 1000
                self.node.all.told.shards += 1

    @property
    def _pid(self) -> int:
        return 1000 + self.slot

    def _beat(self) -> Beat:
        progress = ((self.lease.no, self.lease.start + self.samples % 997),) if self.lease is not None else ()
        readings = dict.fromkeys(_READINGS, float(self.samples + 1))
        return Beat(progress, readings, {"loss": 1.0}, 0.0, True)

    async def end(self) -> None:
        """Give the shard back, and end."""
        self.task.cancel()
        if self.link is not None and self.lease is not None:
            await self.link.answer_to(ShardReturned(self.lease.shard, self.lease.no, "asked to leave"))
        if self.link is not None:
            self.link.close()


class PlayedNode:
    """Is one node: its agent, and the workers that the master starts there."""

    def __init__(self, all_: Members, name: NodeId, places: int, ps_places: int = 0) -> None:
        self.all, self.name, self.places, self.ps_places = all_, name, places, ps_places
        self.workers: dict[Slot, Worker] = {}
        self.link: Link | None = None
        self._ending: set[asyncio.Future[None]] = set()

    async def join(self) -> None:
        """Connect the agent."""
        identity = Identity(purpose="control", role="agent", incarnation=Incarnation(1), node=self.name)
        self.link = await self.all.connect(identity, self._hello, self._ordered)
        self.link.beat = self._beat
        self.all.told.agents += 1

    def _hello(self) -> NodeJoined:
        market = Market.SPOT if self.places else Market.ON_DEMAND
        return NodeJoined(self.name, "127.0.0.1", self.places, self.ps_places, market=market)

    def _beat(self) -> Beat:
        runs = tuple((Role.WORKER, w.slot, w.incarnation, time.monotonic()) for w in self.workers.values())
        return Beat(readings={"load1": 1.0, "cores": 8.0}, runs=runs)

    def _ordered(self, order: OrderType) -> None:
        if isinstance(order, StartProcess) and order.role is Role.WORKER and order.slot not in self.workers:
            self.workers[order.slot] = Worker(self, order)
        elif isinstance(order, StartProcess) and order.role is Role.PS:
            self._keep(self._serve(order))
        elif isinstance(order, StopProcess) and order.slot in self.workers:
            self.all.told.ordered_at = time.monotonic()
            self._keep(self._end(self.workers.pop(order.slot)))

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _serve(self, order: StartProcess) -> None:
        who = {"slot": order.slot, "incarnation": order.incarnation, "node": self.name}
        place = Address(self.name, "sock/ps-0.sock", "127.0.0.1", 1)
        hello = MemberJoined(Role.PS, order.slot, order.incarnation, self.name, 2, place)
        await self.all.connect(Identity(purpose="control", role="ps", **who), lambda: hello)

    async def _end(self, worker: Worker) -> None:
        await worker.end()
        assert self.link is not None
        await self.link.answer_to(ProcessExited(Role.WORKER, worker.slot, worker.incarnation, 0))
        self.all.told.empty_at = time.monotonic()

    async def notice(self, at: float, deadline_s: float = 15.0) -> None:
        """Do what an agent does on a reclaim notice that comes at ``at``: ask to be emptied, leave when that is so."""
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        assert self.link is not None
        answer = await self.link.answer_to(DrainAsked(self.name, deadline_s))
        self.all.told.refused += not isinstance(answer, Ok)
        self.all.told.answered_at = time.monotonic()
        while self.workers or self._ending:
            await asyncio.sleep(0.02)
        self.link.close()

    async def vanish(self, at: float) -> None:
        """End all of it without a word."""
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        for worker in self.workers.values():
            worker.task.cancel()
            if worker.link is not None:
                worker.link.close()
        assert self.link is not None
        self.link.close()


class Members:
    """Holds the nodes of this process, and what they saw."""

    def __init__(self, run_dir: Path, first: int, last: int, places: int) -> None:
        self.run_dir, self.secret = run_dir, load_secret(run_dir / "secret")
        self.told = Told()
        self.waiting_beats = 0
        self._context = client_context(self.secret)
        self._places = asyncio.Semaphore(CONNECTS_AT_ONCE)
        stay = [PlayedNode(self, HOME, 0), PlayedNode(self, SERVERS, 0, 1)] if first == 0 else []
        self.nodes = [PlayedNode(self, NodeId(f"spot-{n}"), places) for n in range(first, last)]
        self.all_nodes = stay + self.nodes

    async def connect(
        self,
        identity: Identity,
        hello: Callable[[], RequestType],
        ordered: Callable[[OrderType], None] = lambda order: None,
    ) -> Link:
        """Connect until the master has welcomed this one; as real members, several times where it is too busy."""
        info = read_master(self.run_dir)
        assert info is not None
        tls: dict[str, Any] = {"ssl": self._context, "server_hostname": SERVER_NAME}
        address = info.host or "127.0.0.1", info.port
        loop = asyncio.get_running_loop()

        def make() -> Link:
            made = Link(self, identity, hello)
            made.ordered = ordered
            return made

        for _ in range(TRIES):
            async with self._places:
                with contextlib.suppress(OSError, BrokenLink):
                    _, link = await loop.create_connection(make, *address, **tls)
                    await link.welcomed
                    return link
            await asyncio.sleep(random.random())
        raise BrokenLink(f"{identity} did not get in within {TRIES} tries")

    async def run(self) -> None:
        """Join, and do as standard input says until its end."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        joining = [asyncio.create_task(node.join()) for node in self.all_nodes]
        await asyncio.gather(*joining)
        self._say()
        while line := (await lines.readline()).decode().split():
            if line[0] == "notice":
                at = float(line[2])
                await asyncio.gather(*(node.notice(at) for node in self._next(int(line[1]))))
            elif line[0] == "vanish":
                at = float(line[2])
                await asyncio.gather(*(node.vanish(at) for node in self._next(int(line[1]))))
            self._say()

    def _next(self, count: int) -> list[PlayedNode]:
        taken, self.nodes = self.nodes[:count], self.nodes[count:]
        return taken

    def _say(self) -> None:
        self.told.unanswered = self.waiting_beats
        print(msgspec.json.encode(self.told).decode(), flush=True)
        self.told = Told(workers=self.told.workers, agents=self.told.agents)


class Crowd:
    """Starts processes of this file and talks to them; for the benchmark and its test. Ends them with ``close``."""

    def __init__(self, run_dir: Path, nodes: int, places: int, processes: int) -> None:
        command = [sys.executable, "-m", "benchmarks._members", str(run_dir)]
        bounds = [round(nodes * n / processes) for n in range(processes + 1)]
        self._sizes = [b - a for a, b in itertools.pairwise(bounds)]
        self._processes = [
            subprocess.Popen(
                [*command, str(a), str(b), str(places)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for a, b in itertools.pairwise(bounds)
        ]

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answers(self) -> list[Told]:
        """Return what each process says next."""
        out = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a process that plays members ended: {process.wait(10)}")
            out.append(msgspec.json.decode(line, type=Told))
        return out

    def say(self, word: str, *values: list[int] | float) -> list[Told]:
        """Say one word to all; a list has a value for each of them. Return their answers."""
        for number, process in enumerate(self._processes):
            words = [str(value[number]) if isinstance(value, list) else str(value) for value in values]
            assert process.stdin is not None
            process.stdin.write(" ".join([word, *words]) + "\n")
            process.stdin.flush()
        return self.answers()

    def shares(self, nodes: int) -> list[int]:
        """Return how many of ``nodes`` each process has, evenly."""
        total = sum(self._sizes)
        bounds = [round(nodes * sum(self._sizes[:n]) / total) for n in range(len(self._sizes) + 1)]
        return [b - a for a, b in itertools.pairwise(bounds)]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            with contextlib.suppress(OSError, ValueError):
                process.communicate(timeout=10)


def main(argv: list[str]) -> None:
    """Be one process of it."""
    import uvloop

    run_dir, first, last, places = argv

    async def play() -> None:
        await Members(Path(run_dir), int(first), int(last), int(places)).run()

    uvloop.run(play())


if __name__ == "__main__":
    main(sys.argv[1:])
