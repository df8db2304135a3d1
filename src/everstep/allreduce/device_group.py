"""Connects a group whose members' models may be on GPUs: gloo, and beside it what ``devices.choose`` says.

Tensors on the CPU, votes and marks always go as in any group. So do they break: the end of gloo's sockets is the end of
the group, whatever else it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from everstep.allreduce.collective import CONNECT_S, CollectiveError, GlooCollective
from everstep.allreduce.devices import Choice, Way, choose, give_up_nccl, nccl_backend, place_of
from everstep.allreduce.group_store import GroupStore
from everstep.allreduce.nccl import NcclGroup
from everstep.allreduce.staged import HostStaged
from everstep.allreduce.step import GroupWork
from everstep.errors import PlatformError, ScriptError
from everstep.net.log import logger
from everstep.net.retry import Deadline

NCCL_CONNECT_S = 60.0
"""Until NCCL has connected all members; then it is not used by this process any more."""


class DeviceCollective(GlooCollective):
    """Does as ``GlooCollective`` does. ``devices``: those of this member's model. ``chosen``: once it is connected."""

    def __init__(self, rank: int, size: int, host: str, name: str, devices: Iterable[torch.device] = ()) -> None:
        super().__init__(rank, size, host, name)
        self._devices = sorted(set(devices), key=str)
        self._staged = HostStaged(super().reduce, super().send, super().recv)
        self._nccl: NcclGroup | None = None
        self.chosen = Choice(Way.HOST)

    def connect(self, store: GroupStore, timeout_s: float = CONNECT_S) -> None:
        try:
            store.place = place_of(self._devices)
        except RuntimeError as error:
            on = ", ".join(map(str, self._devices))
            raise PlatformError(f"{on} of this worker does not answer: {str(error).partition(chr(10))[0]}") from None
        super().connect(store, timeout_s)
        try:
            self.chosen = choose(store.places())
        except ScriptError:
            self.close()
            raise
        if self.chosen.way is Way.NCCL and self.tunnels is not None:
            words = "tls: all, and NCCL sends gradients in the clear (--tls control lets it)"
            self.chosen = Choice(Way.STAGED, words)
        self.host_sums = self.chosen.way is not Way.NCCL
        self.short_sums = self.chosen.way is Way.HOST  # else a peer's bucket of that size may be on its device
        if self.chosen.way is Way.NCCL:
            self._connect_nccl()
        if self.chosen.way is not Way.HOST:
            logger.warning("%s", self.describe())  # (what is not a warning is not shown)

    def _connect_nccl(self) -> None:
        """Connect NCCL: where it does not come about at one member this attempt at a group fails for all, at once; in
        the next one that member says that it has no NCCL. Raises CollectiveError."""
        nccl = self._nccl = NcclGroup(self, self._devices[0], nccl_backend())
        try:
            if nccl.connect(Deadline(NCCL_CONNECT_S)):
                return
            give_up_nccl()
            self.abort(f"NCCL did not connect: {nccl.why}")
            logger.warning("group %s: NCCL did not connect, and is not tried again: %s", self.name, nccl.why)
            raise self.error(None)
        except CollectiveError:
            self.close()
            raise

    def describe(self) -> str:
        """Return one line for people: which way gradients go."""
        on = ", ".join(map(str, self._devices)) or "cpu"
        if self.chosen.way is Way.NCCL:
            return f"group {self.name}: gradients on {on} are reduced over NCCL"
        return f"group {self.name}: gradients on {on} go by way of the host's memory and gloo: {self.chosen.why}"

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> GroupWork:  # type: ignore[override]
        if tensor.device.type == "cpu":
            self._staged.begin_all()
            return super().allreduce(tensor, op)
        if self._nccl is not None:
            return self._nccl.allreduce(tensor, op)
        return self._staged.allreduce(tensor, op)

    def send(self, tensor: torch.Tensor, peer: int) -> GroupWork:  # type: ignore[override]
        """Send, between devices too by way of the host: two members that send to each other need not agree who is
        first."""
        if tensor.device.type == "cpu":
            self._staged.begin_all()
            return super().send(tensor, peer)
        return self._staged.send(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> GroupWork:  # type: ignore[override]
        if tensor.device.type == "cpu":
            self._staged.begin_all()
            return super().recv(tensor, peer)
        return self._staged.recv(tensor, peer)

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._staged.begin_all()
        return super().exchange(tensor)

    def abort(self, why: str = "given up") -> None:
        super().abort(why)  # first: who waits in NCCL is to see why
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        super().close()
        if self._nccl is not None:
            self._nccl.abort()
