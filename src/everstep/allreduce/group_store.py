"""Lets the members of a new group learn each other's addresses: a torch store on the control connection.

Only members with the job's secret can read or write it, and it is forgotten with the generation. Gloo asks for its
peers' addresses one by one; they are fetched in one request.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from torch._C._distributed_c10d import Store

from everstep.allreduce.devices import DevicePlace
from everstep.allreduce.exchange import Door
from everstep.allreduce.tunnel import ENTRY, NEVER, TunnelDoor, Tunnels, TunnelService
from everstep.net import messages
from everstep.net.messages import RequestType, StoreValues

_SLICE_S = 0.5
"""So long the master keeps a question open; then we look whether the attempt is still wanted, and ask again."""

_FAILED = "failed"


class Asking(Protocol):
    def ask(self, request: RequestType, then: Callable[[Any], None]) -> None: ...


class _StoreValue(msgspec.Struct, frozen=True, array_like=True):
    """Is the value of a gloo address in the store: where the device listens (to cut its sockets), and gloo's own bytes;
    where the member listens for votes (0: nowhere), and the key to that; where its tunnels end; what its model is
    on."""

    host: str
    port: int
    blob: bytes
    vote_port: int = 0
    vote_key: bytes = b""
    place: DevicePlace = DevicePlace()
    tunnel: TunnelDoor = TunnelDoor()


_entry_decoder = msgspec.msgpack.Decoder(_StoreValue)


class GroupStore(Store):
    """Stores the keys of one attempt to connect one generation. Every wait ends: after ``timeout_s``, by ``cancel``, or
    when a peer said that its attempt failed; then RuntimeError is raised (torch turns every other error into one)."""

    def __init__(self, runtime: Asking, generation: int, attempt: int, host: str, size: int, timeout_s: float) -> None:
        super().__init__()
        self.locate: Callable[[bytes], int] = lambda blob: 0
        self.address: tuple[str, int] | None = None  # of our device, as soon as gloo has said it
        self.door: Door | None = None  # to say along with it
        self.place = DevicePlace()  # this too
        self.tunnels: Tunnels | None = None  # by which members on other nodes are reached
        self._runtime = runtime
        self._generation, self._attempt, self._host = generation, attempt, host
        self._size, self._timeout_s = size, timeout_s
        self._changed = threading.Condition()
        self._cancelled = False
        self._mine: dict[str, bytes] = {}
        self._theirs: dict[str, _StoreValue] = {}

    def __repr__(self) -> str:
        return f"<GroupStore {self._generation}.{self._attempt} {len(self._theirs)} of {self._size} known>"

    @property
    def peer_addresses(self) -> list[tuple[str, int]]:
        """Return where connections of ours to the others go."""
        with self._changed:
            theirs = {int(key.rpartition("/")[2]): entry for key, entry in self._theirs.items()}
        return [self._address_of(rank, entry) for rank, entry in theirs.items()]

    def _address_of(self, rank: int, entry: _StoreValue) -> tuple[str, int]:
        """Return where gloo is to believe that a member listens."""
        tunnels = self.tunnels
        if tunnels is None or not tunnels.far(entry.tunnel):
            return entry.host, entry.port
        if rank > tunnels.rank:
            return NEVER, entry.port
        return ENTRY, tunnels.entry(rank, entry.tunnel, TunnelService.GLOO)

    def _by_rank(self) -> list[_StoreValue]:
        with self._changed:
            entry = {int(key.rpartition("/")[2]): s for key, s in self._theirs.items()}
        return [s for _, s in sorted(entry.items())]

    def places(self) -> list[DevicePlace]:
        """Return what the members' models are on, by rank. Once gloo is connected."""
        return [s.place for s in self._by_rank()]

    def doors(self) -> list[Door]:
        """Return the doors of all members, by rank. RuntimeError: one has none."""
        doors = [self._vote_door(rank, s) for rank, s in enumerate(self._by_rank()) if s.vote_key]
        if len(doors) != self._size:
            raise RuntimeError(f"{len(doors)} of {self._size} members said where they listen for votes")
        return doors

    def _vote_door(self, rank: int, entry: _StoreValue) -> Door:
        tunnels = self.tunnels
        if tunnels is None or rank >= tunnels.rank or not tunnels.far(entry.tunnel):
            return Door(entry.host, entry.vote_port, entry.vote_key)
        return Door(ENTRY, tunnels.entry(rank, entry.tunnel, TunnelService.VOTES), entry.vote_key)

    def cancel(self) -> None:
        """End every wait now, also later ones."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def say_again(self) -> None:
        """A new master has an empty store: put there what we said."""
        with self._changed:
            mine = dict(self._mine)
        if mine:
            self._runtime.ask(messages.StoreSet(self._generation, str(self._attempt), mine), lambda answer: None)

    def say_failed(self) -> None:
        """Tell the peers that this attempt came to nothing here, so that they go on to the next one."""
        self._runtime.ask(messages.StoreSet(self._generation, str(self._attempt), {_FAILED: b"1"}), lambda answer: None)

    # ------------------------------------------------------------ what gloo calls

    def set(self, key: str, value: Any) -> None:
        blob = value.encode() if isinstance(value, str) else bytes(value)
        port = self.locate(blob)
        vote_port, vote_key = (self.door.port, self.door.key) if self.door is not None else (0, b"")
        tunnel = TunnelDoor()
        if self.tunnels is not None:
            self.tunnels.ports.update({TunnelService.GLOO: port, TunnelService.VOTES: vote_port})
            tunnel = self.tunnels.door
        entry = _StoreValue(self._host, port, blob, vote_port, vote_key, self.place, tunnel)
        with self._changed:
            self.address = (self._host, port)
            self._mine[key] = msgspec.msgpack.encode(entry)
        self.say_again()

    def get(self, key: str) -> bytes:
        self.wait([key])
        entry = self._theirs[key]
        if self.tunnels is None:
            return entry.blob
        try:
            return moved(entry.blob, (entry.host, entry.port), self._address_of(int(key.rpartition("/")[2]), entry))
        except OSError as error:
            raise RuntimeError(f"no tunnel: {error}") from None

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        end = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                missing = [k for k in keys if k not in self._theirs]
                if self._cancelled:
                    raise RuntimeError("given up")
            if not missing:
                return
            if time.monotonic() >= end:
                raise RuntimeError(f"no word of {', '.join(missing)} within {self._timeout_s:g} s")
            found = self._fetch(_siblings(missing[0], self._size), _SLICE_S)
            if all(k in found for k in missing):
                continue
            if self._fetch((_FAILED,), 0.0):
                raise RuntimeError("the attempt failed at a peer")
            self.say_again()

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(k in self._theirs for k in keys)

    def set_timeout(self, timeout: Any) -> None:
        pass

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, value: int) -> int:
        raise RuntimeError("this store does not count")

    def delete_key(self, key: str) -> bool:
        return False

    def num_keys(self) -> int:
        return len(self._theirs)

    # ------------------------------------------------------------ the master

    def _fetch(self, keys: tuple[str, ...], wait_s: float) -> frozenset[str]:
        """Return which of ``keys`` the master has; addresses are remembered. Returns empty-handed when it does not
        answer."""
        answers: list[Any] = []

        def answered(answer: Any) -> None:
            with self._changed:
                answers.append(answer)
                self._changed.notify_all()

        self._runtime.ask(messages.StoreGet(self._generation, str(self._attempt), keys, wait_s), answered)
        with self._changed:
            self._changed.wait_for(lambda: bool(answers) or self._cancelled, wait_s + self._timeout_s)
            if not answers or not isinstance(answers[0], StoreValues):
                return frozenset()
            values = answers[0].values
            for key, value in values.items():
                if key != _FAILED:
                    self._theirs[key] = _entry_decoder.decode(value)
            return frozenset(values)


def moved(blob: bytes, old: tuple[str, int], new: tuple[str, int]) -> bytes:
    """Return gloo's bytes with another socket address (of IPv4: port and host, one behind the other)."""
    before, after = (struct.pack(">H", port) + socket.inet_aton(host) for host, port in (old, new))
    if blob.count(before) != 1:
        raise RuntimeError(
            f"no socket address {old[0]}:{old[1]} in gloo's {len(blob)} bytes: another version of torch?"
        )
    return blob.replace(before, after)


def _siblings(key: str, size: int) -> tuple[str, ...]:
    """Gloo's keys are PREFIX/RANK: those of all ranks."""
    prefix, slash, rank = key.rpartition("/")
    return tuple(f"{prefix}/{r}" for r in range(size)) if slash and rank.isdigit() else (key,)
