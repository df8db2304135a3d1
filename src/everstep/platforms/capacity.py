"""Defines ports: where machines come from (``Capacity``), and how agents are started on them (``AgentPlatform``).

A source of machines tells what may be had, is asked for a number of machines, is given machines back, and tells what
it has granted, warned of and taken back. ``everstep run`` holds the machine that it runs on through ``ThisMachine``,
hosts that join by hand through ``JoinedHosts``, and further ones by ``--capacity`` (``traces``, ``command_capacity``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, Grant, Market, Offer
from everstep.policies.node_selection import HOME_NODE


class Capacity(Protocol):
    """Is a source of machines. Every call may take some seconds, and raises PlatformError with one line."""

    name: str
    every_s: float
    """How often it wants to be asked what there is to tell."""

    def offers(self) -> tuple[Offer, ...]:
        """Return what could be had now, beyond what is held."""
        ...

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        """Ask for ``count`` machines, those that are held among them. Harmless when repeated. ``market`` on_demand: of
        those that stay, beside the others; a source that has none gives none."""
        ...

    def release(self, node: NodeId) -> None:
        """Give a machine back. Harmless when repeated."""
        ...

    def watch(self) -> tuple[CapacityNews, ...]:
        """Return what has happened since this was asked last, in order."""
        ...

    def close(self) -> None:
        """Let go of what this process holds for the source. The job is over."""
        ...


class EndedAgent(Protocol):
    """Is an agent that has ended by itself."""

    @property
    def node(self) -> NodeId: ...

    @property
    def status(self) -> int:
        """Return the exit code, or minus the signal's number."""
        ...

    @property
    def lived_s(self) -> float: ...


class AgentPlatform(Protocol):
    """Is what starts and stops the agents of granted machines."""

    def start(self, grant: Grant, life: int) -> None:
        """Start the agent of a machine. ``life``: counts the machines of this name, from 0."""
        ...

    def warn(self, node: NodeId, in_s: float | None) -> None:
        """Tell the agent that its machine goes in ``in_s`` seconds (None: soon)."""
        ...

    def stop(self, node: NodeId) -> None:
        """End the agent at once, with all that it has started: its machine is gone."""
        ...

    def ended(self) -> tuple[EndedAgent, ...]:
        """Return the agents that have ended by themselves since this was asked last."""
        ...

    def close(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` seconds for agents that end with the job, then end the others."""
        ...


class ThisMachine:
    """The machine that ``everstep run`` runs on: there is one, the job has it, and it stays."""

    name = "this machine"
    every_s = 60.0

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._news: list[CapacityNews] = []
        self._held = False

    def __repr__(self) -> str:
        return f"<{self.name}: {'held' if self._held else 'free'}>"

    def offers(self) -> tuple[Offer, ...]:
        return () if self._held else (self._offer,)

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        if count > 0 and not self._held:
            self._held = True
            self._news.append(Grant(HOME_NODE, self._offer))

    def release(self, node: NodeId) -> None:
        """Do nothing: the machine of the job's master stays until the job is over."""

    def watch(self) -> tuple[CapacityNews, ...]:
        news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        self._held = False


class JoinedHosts:
    """Hosts that people give to the job by hand. Asking for one says how, once, through ``say``. The master hears of
    such a host by the hello of its agent, and of its end by its silence, so there is no news to tell."""

    name = "joined hosts"
    every_s = 60.0

    def __init__(self, at: str, secret_file: str, say: Callable[[str], None]) -> None:
        """``at``: HOST:PORT of the master."""
        self._how = f"other nodes: everstep agent --join {at} --secret-file (a copy of {secret_file})"
        self._say = say
        self._warned = False

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def offers(self) -> tuple[Offer, ...]:
        return ()

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        if count > 0 and not self._warned:
            self._warned = True
            self._say(self._how)

    def release(self, node: NodeId) -> None:
        """Do nothing: whoever brought a host takes it away."""

    def watch(self) -> tuple[CapacityNews, ...]:
        return ()

    def close(self) -> None:
        pass


def first_machine(hardware: str, zone: str, market: Market) -> Grant:
    """Return the grant of this machine: the job's first one."""
    here = ThisMachine(Offer(hardware, zone, market))
    here.request(1)
    (grant,) = here.watch()
    assert isinstance(grant, Grant)
    return grant
