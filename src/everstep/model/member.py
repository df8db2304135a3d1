"""Describes members: the processes of a job and the nodes that they run on."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.bounds import HostName, SocketPath, Whole
from everstep.ids import Incarnation, NodeId, Slot


class Role(StrEnum):
    MASTER = "master"
    WORKER = "worker"
    PS = "ps"


class MemberState(StrEnum):
    STARTING = "starting"  # ordered from an agent, has not said hello yet
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for a while; keeps its leases
    LOST = "lost"  # dead or declared dead; fenced
    LEFT = "left"  # left on purpose: script finished, or scaled in


class MemberKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names a place in the job: ``worker:1``."""

    role: Role
    slot: Slot

    def __str__(self) -> str:
        return f"{self.role}:{self.slot}"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Says where a member listens. Same node: ``unix`` (path relative to the run directory); else ``host:port``."""

    node: NodeId
    unix: SocketPath = ""
    host: HostName = ""
    port: Whole = 0


class Member(msgspec.Struct, kw_only=True):
    """Holds what is known of one process."""

    role: Role
    slot: Slot
    incarnation: Incarnation
    node: NodeId
    state: MemberState = MemberState.STARTING
    pid: int = 0
    address: Address | None = None
    since: float = 0.0  # seconds, when it entered this state

    @property
    def key(self) -> MemberKey:
        return MemberKey(self.role, self.slot)

    def __repr__(self) -> str:
        return f"<{self.role}:{self.slot} #{self.incarnation} on {self.node} {self.state} pid={self.pid}>"
