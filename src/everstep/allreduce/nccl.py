"""Reduces over NCCL for one generation of a group, beside its gloo (``device_group``).

A work of NCCL is waited for by asking whether it is over, never by a stream or an event: kernels that wait for a lost
peer would hold up everything behind them. Meanwhile the waiting thread looks whether the group was broken, here or by
the end of a peer's connections, which NCCL itself does not notice. Then the communicator is aborted, in a thread of its
own (that may take long, or for ever), and what it might still write to is kept until its kernels are over.

NCCL's unique id goes from rank 0 to the others over the group's gloo, so a master that is away is not needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ReduceOp

from everstep.allreduce.collective import COLLECTIVE_S, OPS, keep_for_ever
from everstep.allreduce.environment import NCCL_ENVIRONMENT
from everstep.errors import EverstepError
from everstep.net.retry import Deadline

_ID_KEY = "0"  # under which torch puts the unique id of a process group's first communicator
_ID_BYTES_MAX = 1024
_POLL_S = 20e-6  # between two looks, at first ...
_POLL_MAX_S = 5e-4  # ... and later: each one takes the interpreter from others
_PEERS_S = 0.05  # between two looks at the peers' connections
_LOST_S = 0.5  # after an error, until the end of a lost peer's connections has come here
_ENDING_S = 30.0  # after an abort, until its kernels are over


class Host(Protocol):
    """Is the group over gloo, for what is said between members, and for what breaks it."""

    rank: int
    size: int
    name: str
    broken: str
    waiting_since: float

    def exchange(self, tensor: Tensor) -> list[Tensor]: ...

    def parted(self) -> bool:
        """Return whether a peer has ended its connections."""
        ...

    def abort(self, why: str = "") -> None: ...

    def error(self, error: Exception | None) -> EverstepError: ...


class NcclWork:
    """Is an all-reduce in flight."""

    __slots__ = ("_group", "_work")

    def __init__(self, group: NcclGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the result is there for whatever this thread asks of the device next. Raises CollectiveError; the
        tensor must not be used any more then."""
        group, host = self._group, self._group.host
        host.waiting_since = time.monotonic()
        try:
            group.poll(self._work, Deadline(COLLECTIVE_S if timeout_s is None else timeout_s))
            self._work.wait()  # over: this only orders the stream; raises what NCCL has met with
            if host.broken:  # an aborted kernel is over too
                raise host.error(None)
        except RuntimeError as error:
            host.abort(_first_line(error))
            raise host.error(None) from None
        finally:
            host.waiting_since = 0.0
        group.landed(self._work)


class NcclGroup:
    """Is the communicator of one member. Made unconnected. ``make``: torch's ProcessGroupNCCL, or a stand-in."""

    def __init__(self, host: Host, device: torch.device, make: Any) -> None:
        self.host, self.device, self._make = host, device, make
        self.why = ""  # it did not come about
        self._group: Any = None
        self._flying: dict[int, tuple[Any, Tensor]] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "connected" if self._group is not None else self.why or "unconnected"
        return f"<NcclGroup {self.host.name} rank {self.host.rank} of {self.host.size} on {self.device} {state}>"

    # ------------------------------------------------------------ connecting

    def connect(self, deadline: Deadline) -> bool:
        """Connect; all members call it. Whether it came about here: a first sum was right. Raises CollectiveError where
        the group broke meanwhile."""
        for name, value in NCCL_ENVIRONMENT.items():
            if os.environ.get(name) != value:  # the script's doing, or no agent's worker
                os.environ[name] = value
        try:
            return self._connect(deadline)
        except RuntimeError as error:  # of the store in this process
            self.host.abort(_first_line(error))
            raise self.host.error(None) from None
        finally:
            self.host.waiting_since = 0.0

    def _connect(self, deadline: Deadline) -> bool:
        self.host.waiting_since = time.monotonic()
        store = HashStore()
        identified = threading.Event()
        maker = threading.Thread(
            target=self._build, args=(store, deadline, identified), name=f"everstep-nccl-{self.host.name}", daemon=True
        )
        if self.host.rank == 0:
            maker.start()
            while maker.is_alive() and not store.check([_ID_KEY]) and not deadline.expired:
                self._look()
                time.sleep(_POLL_MAX_S)
        id_ = _spread(self.host, bytes(store.get(_ID_KEY)) if store.check([_ID_KEY]) else b"")
        if not id_:
            self.why = self.why or "rank 0 got no unique id of NCCL"
            return False
        if self.host.rank != 0:
            store.set(_ID_KEY, id_)  # type: ignore[arg-type]
            maker.start()
        self.host.waiting_since = time.monotonic()
        while not identified.is_set():
            self._look()
            if deadline.expired:
                self.why = f"not connected after {deadline.seconds:g} s"
                return False
            identified.wait(_POLL_MAX_S)
        if self.why:  # perhaps because a member was lost, which is nothing against NCCL
            until = Deadline(_LOST_S)
            while not until.expired:
                self._look()
                time.sleep(_POLL_MAX_S)
        return not self.why

    def _build(self, store: Any, deadline: Deadline, identified: threading.Event) -> None:
        """Build it on a thread of its own: parts of it wait for peers inside of NCCL."""
        try:
            with _current(self.device):
                options = self._make.Options()
                options._timeout = timedelta(seconds=COLLECTIVE_S)
                options.config.blocking = 0  # so that ``abort`` ends the connecting too
                group = self._make(store, self.host.rank, self.host.size, options)
                with self._lock:
                    self._group = group
                    late = self._aborted
                if late:
                    self._end(group)
                    raise RuntimeError("given up")
                group.eager_connect_single_device(self.device)
                probe = torch.ones(1, device=self.device)
                work = group.allreduce([probe], ReduceOp.SUM, timedelta(seconds=COLLECTIVE_S))
                self.poll(work, deadline)
                work.wait()
                if float(probe.item()) != self.host.size:
                    raise RuntimeError(f"a sum over {self.host.size} ones came out as {probe.item():g}")
        except Exception as error:  # whatever it is: the group then goes by way of the host
            self.why = self.why or _first_line(error)
        finally:
            identified.set()

    # ------------------------------------------------------------ use

    def allreduce(self, tensor: Tensor, op: str = "sum") -> NcclWork:
        """Reduce in place, over a contiguous tensor on this device; begins behind what computes it."""
        host, group = self.host, self._group
        if host.broken or self._aborted:
            raise host.error(None)
        try:
            work = group.allreduce([tensor], OPS[op], timedelta(seconds=COLLECTIVE_S))
        except RuntimeError as error:
            host.abort(_first_line(error))
            raise host.error(None) from None
        self._flying[id(work)] = work, tensor
        return NcclWork(self, work)

    def poll(self, work: Any, deadline: Deadline) -> None:
        """Return when ``work`` is over, well or not. Raises CollectiveError where the group is broken before."""
        pause, peers_at = _POLL_S, time.monotonic() + _PEERS_S
        while not work.is_completed():
            if self.host.broken or self._aborted:
                raise self.host.error(None)
            now = time.monotonic()
            if now >= peers_at:
                self._look()
                peers_at = now + _PEERS_S
            if deadline.expired:
                raise RuntimeError(f"not over after {deadline.seconds:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_MAX_S)

    def _look(self) -> None:
        """Raises CollectiveError: the group is broken, here or at a peer."""
        if not self.host.broken and self.host.parted():
            self.host.abort("a member has left it")
        if self.host.broken:
            raise self.host.error(None)

    def landed(self, work: Any) -> None:
        self._flying.pop(id(work), None)

    # ------------------------------------------------------------ end

    def abort(self) -> None:
        """Abort, from any thread; returns at once. Harmless when repeated."""
        with self._lock:
            first, self._aborted = not self._aborted, True
            group = self._group
        if first and group is not None:
            threading.Thread(target=self._end, args=(group,), name="everstep-nccl-abort", daemon=True).start()

    def _end(self, group: Any) -> None:
        """Abort it, and let go of it once nothing of it runs. What does not end is kept until the process ends: a
        destructor would wait for it, in whichever thread."""
        with contextlib.suppress(Exception):
            group.abort()
            until = time.monotonic() + _ENDING_S
            while not all(_over(work) for work, _ in list(self._flying.values())):
                if time.monotonic() > until:
                    break
                time.sleep(_POLL_MAX_S)
            else:
                self._flying.clear()
                with self._lock:
                    self._group = None
                return
        keep_for_ever(group, self._flying)


def _over(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True


def _spread(host: Host, mine: bytes) -> bytes:
    """Return rank 0's bytes, at every member. Raises CollectiveError."""
    room = torch.zeros(_ID_BYTES_MAX, dtype=torch.uint8)
    if host.rank == 0 and 0 < len(mine) <= _ID_BYTES_MAX - 2:
        room[0], room[1] = len(mine) // 256, len(mine) % 256
        room[2 : 2 + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    row = bytes(host.exchange(room)[0].numpy())
    return row[2 : 2 + row[0] * 256 + row[1]]


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
