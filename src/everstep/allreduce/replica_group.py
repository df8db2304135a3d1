"""Connects the processes of one worker (``agent.unit``): what its leader tells the others, and what they answer.

The leader alone is a member of the group: it connects, votes and keeps the state for peers and checkpoints. Its
followers do what it says, at two places of their script: between two steps (train this step; help to read out or to
load the state; the loop is over; leave) and at the end of backward (the gradient is reduced; the step is committed, or
not). So all processes of a worker leave an iteration with the same outcome, and what the script then does with all of
them (the norm of a sharded gradient is a collective) meets.

Messages are small, over socket pairs; state goes over the worker's own torch process group, gradients lie in memory
that a follower shares with its leader. A wait here ends at the latest with the process on the other side, whose end
ends this one (``agent.unit``).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from everstep.allreduce.step import StepWork
from everstep.errors import ConfigError, InternalError, PlatformError
from everstep.model.group import Micro
from everstep.model.stage_spans import WaitUse

VARIABLE: Final = "EVERSTEP_UNIT"  # as in agent.unit
_MAX_BYTES: Final = 160 << 10  # of a message: one packet
_FDS: Final = 1

# Before scripts are kept from calling it (``api.group_trainer``).
_init_process_group: Final[Callable[..., None]] = dist.init_process_group


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Do this step. ``chief``: as in ``Over``."""

    step: StepWork
    chief: bool


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The loop is over. ``chief``: the worker is the one to evaluate and save; the others: see ``step.BehindLoop``."""

    chief: bool
    lr_factor: float
    passing: bool


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Says that the script ends, with ``status``."""

    status: int


class ReadOut(msgspec.Struct, frozen=True, tag="read"):
    """Asks to help the leader to read the state: whole tensors take everybody. ``what``: snapshot, digest, or
    parameters."""

    what: str


class LoadState(msgspec.Struct, frozen=True, tag="load"):
    """The leader has a state for everybody: bytes of its header, and of its body."""

    header_bytes: int
    body_bytes: int
    what: str


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    """Answer with a digest of your own part of the state."""


class GradientsReduced(msgspec.Struct, frozen=True, tag="reduced"):
    """The gradients in your memory are those of the group now; not ``ok``: the group broke."""

    ok: bool
    finite: bool


class Voted(msgspec.Struct, frozen=True, tag="voted"):
    """Says how a vote ended; ``outcome``: of ``step.Outcome``."""

    outcome: str


class Full(msgspec.Struct, frozen=True, tag="full"):
    """From a follower: the gradients of the step are in its memory. ``tensors``: elements and dtype of each tensor in
    there, one after the other, where the memory is new (it comes along then); ``tail``: elements at the end of the
    last."""

    tail: int
    tensors: tuple[tuple[int, str], ...] = ()


class Summed(msgspec.Struct, frozen=True, tag="summed"):
    """Answers ``Sum``, from a follower."""

    digest: int


class Part(msgspec.Struct, frozen=True, tag="part"):
    """Return what a follower has of the state, packed, in memory that comes along: the header, and the body behind
    it."""

    header_bytes: int
    body_bytes: int


Message = Train | Over | Leave | ReadOut | LoadState | Sum | GradientsReduced | Voted | Full | Summed | Part
M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Waits(Protocol):
    """Is what uses the time while a process waits for another one of its worker."""

    def wait_begins(self) -> None: ...

    def wait_ends(self) -> WaitUse: ...


class Unit:
    """Is the processes of this worker, seen from one of them. ``index``: its own, 0 is the leader."""

    def __init__(self, index: int, size: int, links: list[socket.socket]) -> None:
        """Take ``links``: of the leader, to followers 1, 2, ...; of a follower, to the leader."""
        self.index, self.size = index, size
        self.chief = False  # as the leader said last: the same in all processes
        self._links = links
        self._ordering = threading.RLock()
        self._mesh: DeviceMesh | None = None
        self.waits: Waits | None = None

    def __repr__(self) -> str:
        return f"<Unit process {self.index} of {self.size}>"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Unit:
        """Return the unit of this process; alone if it has no others. Raises ConfigError."""
        text = environment.get(VARIABLE, "")
        if not text:
            return cls(0, 1, [])
        try:
            place, _, fds = text.partition(":")
            index, _, size = place.partition("/")
            return cls(int(index), int(size), [socket.socket(fileno=int(fd)) for fd in fds.split(",")])
        except (ValueError, OSError) as error:
            raise ConfigError(f"{VARIABLE} = {text!r}: set by everstep for its own processes only ({error})") from None

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def followers(self) -> range:
        """Return the indices of the others, as the leader sees them."""
        return range(1, self.size)

    # ------------------------------------------------------------ words

    def tell(self, follower: int, message: Message) -> None:
        """Tell the followers, as the leader."""
        self._send(self._links[follower - 1], message, None)

    def tell_all(self, message: Message) -> None:
        for follower in self.followers:
            self.tell(follower, message)

    def answer(self, message: Message, fd: int | None = None) -> None:
        """Answer the leader, as a follower; ``fd``: goes along."""
        self._send(self._links[0], message, fd)

    def hear(self, kind: type[M], follower: int = 1) -> M:
        """Return the next message, which has to be of this kind: from the leader, or from this follower."""
        message, fds = self._receive(follower)
        for fd in fds:
            os.close(fd)
        if not isinstance(message, kind):
            raise InternalError(f"{self!r} expected {kind.__name__} and got {message!r}")
        return message

    def hear_any(self) -> Message:
        """Return the leader's next word, as a follower."""
        return self._receive(1)[0]

    def hear_full(self, follower: int) -> tuple[Full, int | None]:
        """Of the leader: a follower has its gradients ready; with the memory, if that is new."""
        message, fds = self._receive(follower)
        if not isinstance(message, Full):
            raise InternalError(f"process {follower} of this worker says {message!r} at the end of backward")
        return message, fds[0] if fds else None

    def hear_part(self, follower: int) -> tuple[Part, int]:
        """Return, in the leader, a follower's part of the state."""
        message, fds = self._receive(follower)
        if not isinstance(message, Part) or len(fds) != 1:
            raise InternalError(f"process {follower} of this worker says {message!r} for its part of the state")
        return message, fds[0]

    @contextmanager
    def ordered(self, message: Message) -> Iterator[None]:
        """Of the leader: followers do this now, and the caller with them. One thing at a time; from any thread."""
        with self._ordering:
            self.tell_all(message)
            yield

    def _send(self, link: socket.socket, message: Message, fd: int | None) -> None:
        data = _encoder.encode(message)
        if len(data) > _MAX_BYTES:
            raise InternalError(f"a {type(message).__name__} of {len(data)} bytes for a process of the same worker")
        try:
            if fd is None:
                link.send(data)
            else:
                socket.send_fds(link, [data], [fd])
        except OSError as error:
            raise PlatformError(f"a process of this worker is gone ({error})") from None

    def _receive(self, follower: int) -> tuple[Message, list[int]]:
        link = self._links[follower - 1 if self.leads else 0]
        waits = self.waits
        if waits is not None:
            waits.wait_begins()
        try:
            data, fds, _, _ = socket.recv_fds(link, _MAX_BYTES, _FDS)
        except OSError as error:
            raise PlatformError(f"a process of this worker is gone ({error})") from None
        finally:
            if waits is not None:
                waits.wait_ends()
        if not data:
            raise PlatformError("a process of this worker is gone")
        return _decoder.decode(data), fds

    # ------------------------------------------------------------ torch

    @property
    def meshed(self) -> bool:
        """Return whether torch's process group is ours."""
        return self._mesh is not None

    @property
    def mesh_made(self) -> DeviceMesh | None:
        return self._mesh

    def mesh(self, file: Path) -> DeviceMesh:
        """Return a mesh over the processes of this worker, for ``fully_shard``. Made at the first call, which every
        process has to make: gloo on the loopback interface; ``file``: by which they find each other, of this life of
        the worker."""
        if self._mesh is None:
            store: Store = HashStore()
            if self.size > 1:
                store = FileStore(str(file), self.size)
            before = os.environ.get("GLOO_SOCKET_IFNAME")
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            try:
                _init_process_group("gloo", store=store, rank=self.index, world_size=self.size)
            finally:
                if before is None:
                    del os.environ["GLOO_SOCKET_IFNAME"]
                else:
                    os.environ["GLOO_SOCKET_IFNAME"] = before
            self._mesh = init_device_mesh("cpu", (self.size,), mesh_dim_names=("shard",))
        return self._mesh

    def share(self, tensor: torch.Tensor) -> None:
        """Everybody gets the leader's, in place."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(tensor, 0)

    def close(self) -> None:
        if self._mesh is not None and dist.is_initialized():
            dist.destroy_process_group()
            self._mesh = None


def split(micro: Micro, index: int, size: int) -> Micro:
    """Return what process ``index`` of ``size`` has of a worker's micro-batch; the first ones have more, some perhaps
    none."""
    count = micro.hi - micro.lo
    lo, hi = (micro.lo + -(-count * i // size) for i in (index, index + 1))
    return Micro(lo, hi, micro.part)
