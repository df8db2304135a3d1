"""Connects groups: gloo between the members of one generation, and nothing for one that is alone. Votes and short sums
go over connections of our own (``exchange``).

Gloo's own ``abort`` does nothing on the CPU: whoever waits for a stopped peer, or for one behind a cut network, waits
until gloo's time-out. What gets everybody out at once is the end of the sockets, so ``abort`` finds the sockets of
this group (by the address that its device listens on) and shuts them down; gloo then reports each peer as gone. It
also reaches the peers: a group that is given up by one member is broken for all, without a word from the master.

Nearly always, that is: where a connection ends while a message is half written or half read, gloo may forget to wake
who waits for it, for ever, and its loop then spins on the dead socket. So nobody waits for gloo alone (see
``GlooWork.wait``), and of a group that was forgotten the sockets are taken out of the loop (``park``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, ReduceOp

from everstep.allreduce.exchange import MEMBERS_MAX, VALUES_MAX, Exchange, Total
from everstep.allreduce.group_store import GroupStore
from everstep.allreduce.tunnel import Tunnels
from everstep.errors import DeadlineError, EverstepError, InternalError, PlatformError, WireError
from everstep.net.retry import Deadline

CONNECT_S = 20.0
"""Until all members of a new group are connected; then they try again."""

COLLECTIVE_S = 24 * 3600.0
"""Gloo's own time-out: members that wait are freed by ``abort``, long before it."""

_LOOK_S = 0.1
"""Who waits in a collective looks so often whether its group was broken meanwhile."""

_FORGOTTEN_S = 0.2
"""So long after its group broke gloo may take to end a collective; then it has forgotten it."""

_THREADS = 2
OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
_SHORT = (torch.float32, torch.float64)  # what a short sum may be of

# What is garbage when a process forks (a loader's workers, say) may hold groups and works of gloo. In the fork their
# destructors wait for threads that are not there, or crash, so there it is left alone.
os.register_at_fork(after_in_child=gc.freeze)


class CollectiveError(EverstepError):
    """A collective failed, or was aborted: the group of this generation is broken."""

    exit_code = 4


class _Finished:
    """Is a collective that was over before it began."""

    def wait(self, timeout_s: float | None = None) -> None:
        pass


class Alone:
    """Is the group of one member: nothing to exchange, nothing to break."""

    rank, size = 0, 1
    host_sums = True
    waiting_since = 0.0

    def __repr__(self) -> str:
        return "<Alone>"

    def allreduce(self, tensor: Any, op: str = "sum") -> _Finished:
        return _Finished()

    def send(self, tensor: Any, peer: int) -> _Finished:
        raise InternalError(f"a group of one cannot send to rank {peer}")

    def recv(self, tensor: Any, peer: int) -> _Finished:
        raise InternalError(f"a group of one cannot receive from rank {peer}")

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def vote(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def abort(self, why: str = "") -> None:
        pass

    def close(self) -> None:
        pass


class GlooWork:
    """Is a collective in flight. Keeps its tensors until it is over."""

    __slots__ = ("_collective", "_tensors", "_work")

    def __init__(self, collective: GlooCollective, work: Any, tensors: Any) -> None:
        self._collective, self._work, self._tensors = collective, work, tensors

    def wait(self, timeout_s: float | None = None) -> None:
        """Raises CollectiveError where it failed, was aborted, or took longer than ``timeout_s`` seconds. After that
        nobody may use its tensors any more: gloo may still write into them."""
        collective = self._collective
        now = time.monotonic()
        end = now + (COLLECTIVE_S if timeout_s is None else timeout_s)
        collective.waiting_since = now
        try:
            while not self._ended(min(_LOOK_S, end - now)):
                now = time.monotonic()
                if collective.forgotten(now):
                    collective.park()
                    raise collective.error(None)
                if now >= end:
                    raise collective.error(None)
        except RuntimeError as error:
            raise collective.error(error) from None
        finally:
            collective.waiting_since = 0.0

    def _ended(self, wait_s: float) -> bool:
        """Wait so long. Raises RuntimeError where it failed."""
        try:
            self._work.wait(timedelta(seconds=max(wait_s, 0.001)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # in the last moment: its own error, if it has one
        self._collective.landed(self._work)
        return True


class ShortSum:
    """Is an all-reduce of a few bytes, over the group's own connections (``exchange``)."""

    __slots__ = ("_collective", "_total")

    def __init__(self, collective: GlooCollective, total: Total) -> None:
        self._collective, self._total = collective, total

    def wait(self, timeout_s: float | None = None) -> None:
        """Raises CollectiveError where the group is broken. Waits until then: who has not come is found by others."""
        self._collective.end_sum(self._total)


class GlooPassed(GlooWork):
    """Is a send or a receive. A wait for one that gloo gives up ends the connection (for other collectives it does
    not), so there is a thread of the group that waits without giving up, for one after the other."""

    __slots__ = ("_error", "_over")

    def __init__(self, collective: GlooCollective, work: Any, tensors: Any) -> None:
        super().__init__(collective, work, tensors)
        self._over = threading.Event()
        self._error: RuntimeError | None = None

    def attend(self) -> None:
        """Wait for it, on the group's thread."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._over.set()

    def _ended(self, wait_s: float) -> bool:
        if not self._over.wait(max(wait_s, 0.001)):
            return False
        if self._error is not None:
            raise self._error
        self._collective.landed(self._work)
        return True


class GlooCollective:
    """Is one generation's group over TCP. Made unconnected; ``connect`` blocks, ``abort`` works at any time.

    ``host``: the address of this node to listen on and to be reached by: 127.0.0.1 where all members are on one
    machine. ``waiting_since``: since when a thread waits in a collective (monotonic seconds), 0.0: none does."""

    def __init__(self, rank: int, size: int, host: str, name: str) -> None:
        self.rank, self.size, self.host, self.name = rank, size, host, name
        self.host_sums = True
        self.short_sums = True  # sums of a few bytes go over our own connections, at all members
        self.waiting_since = 0.0
        self.broken = ""  # why it is; "": it is not, as far as known
        self._broken_at = 0.0
        self._flying: dict[int, tuple[Any, Any]] = {}  # works that nobody saw the end of, and their tensors
        self._sockets: frozenset[int] = frozenset()  # inodes
        self._ip = resolve(host)
        self._store: GroupStore | None = None
        self.tunnels: Tunnels | None = None  # to members on other nodes, where nothing may go there in the clear
        self._group: Any = None
        self._exchange: Exchange | None = None
        self._passed: queue.SimpleQueue[GlooPassed | None] | None = None  # sends and receives that are waited for
        self._lock = threading.Lock()
        self._watched: select.poll | None = None  # ends of connections, without anybody reading them
        self._watching: list[int] = []
        self._parted = False
        self._sent = [0] * size
        self._received = [0] * size
        self._process = os.getpid()

    def __repr__(self) -> str:
        state = f" broken: {self.broken}" if self.broken else ""
        return f"<GlooCollective {self.name} rank {self.rank} of {self.size}{state}>"

    def __del__(self) -> None:
        # Not by its own end: that would wait, in whichever thread collects garbage, for works that gloo has forgotten.
        if getattr(self, "_group", None) is None:
            return
        if os.getpid() == self._process:
            self.close()
        else:  # a copy in a fork: gloo's threads are not here, and the connections are the other process's to cut
            keep_for_ever(self._group, self._flying)

    def connect(self, store: GroupStore, timeout_s: float = CONNECT_S) -> None:
        """Wait until everybody is connected with everybody. Raises CollectiveError: not within ``timeout_s``, or
        aborted."""
        self._store = store
        store.tunnels = self.tunnels
        self.waiting_since = time.monotonic()
        deadline = Deadline(timeout_s, "connecting to the other members")
        try:
            if self.size <= MEMBERS_MAX:
                self._exchange = Exchange(self.rank, self.size, self.name, self._ip)
                store.door = self._exchange.door
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=self._ip)]
            options._threads = _THREADS
            options._timeout = timedelta(seconds=timeout_s)
            store.locate = lambda blob: port_in(blob, self._ip)
            group = ProcessGroupGloo(store, self.rank, self.size, options)
            group.set_timeout(timedelta(seconds=COLLECTIVE_S))
            if store.address is not None:
                self._sockets = find_sockets((self._ip, store.address[1]), store.peer_addresses)
            if self._exchange is not None:
                self._exchange.connect(store.doors(), deadline)
        except (WireError, DeadlineError) as error:
            self.abort(f"could not be connected: {error}")
            raise self.error(error) from None
        except EverstepError:
            raise
        except Exception as error:  # torch passes on whatever the store raised
            self.abort(f"could not be connected: {_first_line(error)}")
            raise self.error(error) from None
        finally:
            self.waiting_since = 0.0
            if self.broken and self._exchange is not None:
                self._exchange.close()
        self._group = group
        if self.broken:  # aborted in the last moment
            self.abort()
            raise self.error(None)

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> GlooWork | ShortSum:
        exchange = self._exchange
        short = op == "sum" and self.short_sums and tensor.dtype in _SHORT
        if short and exchange is not None and exchange.takes_sum(tensor.nbytes):
            return self._begin_sum(exchange, tensor)
        return self.reduce(tensor, op)

    def _begin_sum(self, exchange: Exchange, tensor: torch.Tensor) -> ShortSum:
        if self.broken:
            raise self.error(None)
        try:
            return ShortSum(self, exchange.begin_sum(tensor.numpy()))
        except WireError as error:
            raise self.error(error) from None

    def end_sum(self, total: Total) -> None:
        """End a sum, for ``ShortSum``."""
        exchange = self._exchange
        assert exchange is not None
        self.waiting_since = time.monotonic()
        try:
            exchange.end_sum(total)
        except WireError as error:
            raise self.error(error) from None
        finally:
            self.waiting_since = 0.0

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> GlooWork:
        """Reduce as ``allreduce`` does, over gloo whatever its size."""
        return self._launch(lambda g: g.allreduce([tensor], OPS[op], timedelta(seconds=COLLECTIVE_S)), tensor)

    def send(self, tensor: torch.Tensor, peer: int) -> GlooWork:
        tag = self._sent[peer] = (self._sent[peer] + 1) % (1 << 30)
        return self._pass(lambda g: g.send([tensor], peer, tag), tensor)

    def recv(self, tensor: torch.Tensor, peer: int) -> GlooWork:
        tag = self._received[peer] = (self._received[peer] + 1) % (1 << 30)
        return self._pass(lambda g: g.recv([tensor], peer, tag), tensor)

    def _pass(self, start: Any, tensor: torch.Tensor) -> GlooWork:
        work = GlooPassed(self, self._start(start, tensor), tensor)
        if self._passed is None:
            self._passed = queue.SimpleQueue()
            threading.Thread(
                target=_attend, args=(self._passed,), name=f"everstep-gloo-{self.name}", daemon=True
            ).start()
        self._passed.put(work)
        return work

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return everybody's ``values`` (as many int64 at each member), by rank. Raises CollectiveError."""
        if self._exchange is not None and len(values) <= VALUES_MAX:
            return [list(row) for row in self._tell(self._exchange, values)]
        mine = torch.tensor(list(values), dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        self._launch(lambda g: g.allgather([out], [mine]), (out, mine)).wait()
        return [[int(v) for v in t.tolist()] for t in out]

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return everybody's ``tensor``, of one shape and type at all members, by rank. Raises CollectiveError."""
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self._launch(lambda g: g.allgather([out], [tensor]), (out, tensor)).wait()
        return out

    def vote(self, values: Sequence[int]) -> list[int]:
        """Return the largest of everybody's, for each of ``values`` (int64, as many at each member). Who gets it knows
        that everybody has come. Raises CollectiveError."""
        if self._exchange is not None:
            return [max(column) for column in zip(*self._tell(self._exchange, values), strict=True)]
        ballot = torch.tensor(list(values), dtype=torch.int64)
        self.reduce(ballot, "max").wait()
        return [int(v) for v in ballot.tolist()]

    def _tell(self, exchange: Exchange, values: Sequence[int]) -> list[tuple[int, ...]]:
        if self.broken:
            raise self.error(None)
        self.waiting_since = time.monotonic()
        try:
            return exchange.gather(values)
        except WireError as error:
            raise self.error(error) from None
        finally:
            self.waiting_since = 0.0

    def abort(self, why: str = "given up") -> None:
        """Get everybody out of every collective of this group, here and at the peers. From any thread; harmless when
        repeated."""
        self._break(why)
        if self._exchange is not None:
            self._exchange.abort()
        if self.tunnels is not None:
            self.tunnels.close()
        store = self._store
        if store is None:
            return
        store.cancel()
        if store.address is not None:
            # While it connects, its sockets come and go; later they are known: a port may be another's by then.
            cut_sockets(self._sockets or find_sockets((self._ip, store.address[1]), store.peer_addresses))

    def close(self) -> None:
        """Give the connections back. Nobody may use this group any more."""
        self.abort("closed")
        with self._lock:
            group, self._group = self._group, None
            flying = [work for work, _ in self._flying.values()]
            watching, self._watching, self._watched = self._watching, [], select.poll()
        for fd in watching:
            os.close(fd)
        if self._passed is not None:
            self._passed.put(None)
        if self._exchange is not None:
            self._exchange.close()
        if group is not None and not _all_end(flying):
            # Its threads wait for what gloo forgot, and its end would wait for them: it stays, until the process ends.
            keep_for_ever(group, self._flying)
            self.park()

    def error(self, error: Exception | None) -> CollectiveError:
        """Return what to raise for gloo's ``error``."""
        self._break("it failed" if error is None else _first_line(error))
        return CollectiveError(f"the group of generation {self.name} is broken: {self.broken}")

    def parted(self) -> bool:
        """Return whether a peer has ended its connections: who waits for something other than gloo has to look."""
        with self._lock:
            if self._watched is None:
                self._watched = select.poll()
                self._watching = [] if self.broken else _duplicates(self._sockets)
                for fd in self._watching:
                    self._watched.register(fd, select.POLLRDHUP)
                self._parted = len(self._watching) < len(self._sockets)  # gloo closes what a peer has ended
            return self._parted or any(events for _, events in self._watched.poll(0))

    def forgotten(self, now: float) -> bool:
        """Return whether gloo had time enough to end what was in flight when the group broke."""
        return bool(self.broken) and now - self._broken_at > _FORGOTTEN_S

    def park(self) -> None:
        """Gloo has forgotten what was in flight: its loop is not to spin on sockets that nobody reads any more."""
        silence(self._sockets)

    def landed(self, work: Any) -> None:
        self._flying.pop(id(work), None)

    def _break(self, why: str) -> None:
        with self._lock:
            if not self.broken:
                self.broken, self._broken_at = why or "given up", time.monotonic()

    def _launch(self, start: Any, tensors: Any) -> GlooWork:
        return GlooWork(self, self._start(start, tensors), tensors)

    def _start(self, start: Any, tensors: Any) -> Any:
        group = self._group
        if self.broken or group is None:
            raise self.error(None)
        try:
            work = start(group)
        except RuntimeError as error:
            raise self.error(error) from None
        self._flying[id(work)] = work, tensors
        return work


def _attend(passed: queue.SimpleQueue[GlooPassed | None]) -> None:
    """Run a group's thread, until None comes."""
    while (work := passed.get()) is not None:
        work.attend()
        del work  # it holds the group


def keep_for_ever(group: Any, flying: Any) -> None:
    """Keep it until the process ends: without the destructor of the group, and without that of what is in flight."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((group, flying)))


def _all_end(works: Sequence[Any]) -> bool:
    """Return whether gloo ends them all, now that their group is broken."""
    end = time.monotonic() + _FORGOTTEN_S
    while not all(work.is_completed() for work in works):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def _first_line(error: Exception) -> str:
    """Return gloo's error without the source file that it begins with, and the advice that it ends with."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return (line.partition("] ")[2] or line).partition(". This is typically")[0][:200]


# ---------------------------------------------------------------- addresses and sockets


def resolve(host: str) -> str:
    """Return the numeric address of ``host``. Raises PlatformError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise PlatformError(f"this node's address {host!r} cannot be resolved ({error}): see --bind") from None


def port_in(blob: bytes, ip: str) -> int:
    """Return the port in a gloo address, which holds the socket address (sockaddr_in or sockaddr_in6) with ``ip``.

    Raises InternalError where it is not found: then a group could not be aborted, and must not be used."""
    packed = ipaddress.ip_address(ip).packed
    family, behind = (socket.AF_INET, 2) if len(packed) == 4 else (socket.AF_INET6, 6)
    at = blob.find(packed)
    while at >= 0:
        start = at - behind - 2
        if start >= 0 and struct.unpack_from("<H", blob, start)[0] == family:
            return int(struct.unpack_from(">H", blob, at - behind)[0])
        at = blob.find(packed, at + 1)
    raise InternalError(
        f"no socket address with {ip} in gloo's address of {len(blob)} bytes: another version of torch?"
    )


def find_sockets(mine: tuple[str, int], peers: Sequence[tuple[str, int]]) -> frozenset[int]:
    """Return the inodes of this process's TCP connections that were accepted at ``mine`` or go to one of ``peers``."""
    others = set(peers)

    def ours(sock: socket.socket) -> bool:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False  # gloo's listener: its thread does not expect an end
        return sock.getsockname()[:2] == mine or sock.getpeername()[:2] in others

    return frozenset(_with_sockets(None, ours))


def cut_sockets(inodes: frozenset[int]) -> int:
    """Shut down these of this process's connections; how many."""

    def cut(sock: socket.socket) -> bool:
        sock.shutdown(socket.SHUT_RDWR)
        return True

    return len(_with_sockets(inodes, cut))


def _duplicates(inodes: frozenset[int]) -> list[int]:
    """Return descriptors of our own, one for each of these that is still a connection of this process."""
    found: dict[int, int] = {}

    def keep(sock: socket.socket) -> bool:
        inode = os.fstat(sock.fileno()).st_ino
        if inode not in found:  # (another thread may hold a second descriptor for a moment)
            found[inode] = os.dup(sock.fileno())
        return True

    _with_sockets(inodes, keep)
    return list(found.values())


def silence(inodes: frozenset[int]) -> int:
    """Take these sockets out of every epoll of this process; how many were in one."""
    done = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if str(path.readlink()) != "anon_inode:[eventpoll]":
                continue
            with select.epoll.fromfd(os.dup(int(path.name))) as poll:
                for fd in _polled(Path(f"/proc/self/fdinfo/{path.name}").read_text(), inodes):
                    with contextlib.suppress(OSError):  # closed by now
                        poll.unregister(fd)
                        done += 1
    return done


def _polled(fdinfo: str, inodes: frozenset[int]) -> list[int]:
    """Return the descriptors of these inodes in what the kernel says of an epoll: "tfd: 13 events: 19 data: 0
    ino:190d7f"."""
    found = []
    for line in fdinfo.splitlines():
        if line.startswith("tfd:") and "ino:" in line:
            fd, inode = int(line.split()[1]), int(line.partition("ino:")[2].split()[0], 16)
            if inode in inodes:
                found.append(fd)
    return found


def _with_sockets(inodes: frozenset[int] | None, do: Callable[[socket.socket], bool]) -> list[int]:
    """Call ``do`` with each of these sockets (None: with all of this process); return the inodes where it said yes."""
    done = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            link = str(path.readlink())
            if not link.startswith("socket:") or (inodes is not None and int(link[8:-1]) not in inodes):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as sock:
                inode = os.fstat(sock.fileno()).st_ino  # the descriptor may be another's by now
                if (inodes is None or inode in inodes) and do(sock):
                    done.append(inode)
    return done
