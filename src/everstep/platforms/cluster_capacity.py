"""Gets machines of a cluster (``--on ray``, ``--on slurm``), whose nodes start their agents by themselves."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, CapacityStep, Grant, Market, Offer
from everstep.platforms.agents import AgentEnded
from everstep.platforms.cluster_nodes import AddNodes, CancelNode, ClusterNodes, NodeAction, NodeState, SeenNode
from everstep.storage.atomic import write_atomic

STATE_FILE = "platform.json"
LEAD_S = 60.0
"""A node whose end is known (a time limit, a drain) is emptied so long before it."""
_LOOK_S = 0.2


class ClusterPort(Protocol):
    """Is how a cluster is talked to. Every call may take some seconds, and raises PlatformError with one line."""

    name: str
    every_s: float

    def offers(self) -> tuple[Offer, ...]:
        """Return what could be had now."""
        ...

    def look(self) -> Sequence[SeenNode]:
        """Return all nodes of the job, and those that have ended while they can still be seen."""
        ...

    def add(self, nodes: Sequence[NodeId]) -> None:
        """Ask for nodes, together. Each starts its agent."""
        ...

    def cancel(self, node: NodeId) -> None:
        """Give up a node. Harmless when repeated, and where it is gone."""
        ...

    def close(self) -> None:
        """Leave nothing of the job behind, and let go of the cluster."""
        ...


class ClusterState(msgspec.Struct):
    """Is what ``RUN_DIR/platform.json`` keeps for an ``everstep run`` that is started again. ``group``: the name that
    all nodes of the job bear in the cluster. ``at``: HOST:PORT of the master that they know. ``number``: of the newest
    node. ``held``: nodes of which the journal says that the job has them. ``forgot``: all nodes up to this number were
    given back together, which the journal does not say of each."""

    group: str
    at: str
    number: int = 0
    held: dict[NodeId, Offer] = {}
    forgot: int = 0


_decoder = msgspec.json.Decoder(ClusterState)


def read_state(run_dir: Path) -> ClusterState | None:
    """Return what an earlier ``everstep run`` of this job kept; None: there was none."""
    try:
        return _decoder.decode((run_dir / STATE_FILE).read_bytes())
    except (OSError, *MALFORMED):
        return None


def new_state(name: str, at: str, before: ClusterState | None = None) -> ClusterState:
    """Return the state of a job that has no nodes in its group yet. ``name``: of the job. ``before``: of its group of
    before, whose nodes are gone, which its journal does not say yet."""
    group = f"everstep-{name}-{secrets.token_hex(4)}"
    if before is None:
        return ClusterState(group, at)
    return ClusterState(group, at, before.number, before.held, before.forgot)


def write_state(run_dir: Path, state: ClusterState) -> None:
    """Write it, durable on return. Raise PlatformError."""
    write_atomic(run_dir / STATE_FILE, msgspec.json.encode(state))


class ClusterMemory:
    """Is ``RUN_DIR/platform.json`` while its ``everstep run`` lives. Any thread may call it."""

    def __init__(self, run_dir: Path, state: ClusterState) -> None:
        self._run_dir, self._state, self._lock = run_dir, state, threading.Lock()
        write_state(run_dir, state)

    def __repr__(self) -> str:
        return f"<memory of {self._state.group}, {len(self._state.held)} held>"

    def keep(self, number: int) -> None:
        """Keep the number of the newest node, durable on return. Raise PlatformError."""
        with self._lock:
            self._state.number = number
            write_state(self._run_dir, self._state)

    def has(self, node: NodeId, step: CapacityStep) -> bool:
        """Return whether the journal has this fact, since an earlier ``everstep run`` told it."""
        with self._lock:
            return step is CapacityStep.GRANTED and node in self._state.held

    def recorded(self, node: NodeId, step: CapacityStep, offer: Offer) -> None:
        """Note that the journal has this fact now. Raise PlatformError."""
        with self._lock:
            if step is CapacityStep.GRANTED:
                self._state.held[node] = offer
            elif step is CapacityStep.WARNED or self._state.held.pop(node, None) is None:
                return
            write_state(self._run_dir, self._state)

    def forget(self) -> None:
        """The job is suspended or over: it holds nothing, and its journal says so. Raise PlatformError."""
        with self._lock:
            if self._state.held or self._state.forgot != self._state.number:
                self._state.held.clear()
                self._state.forgot = self._state.number
                write_state(self._run_dir, self._state)


class ClusterCapacity:
    """Is the capacity of a cluster: ``ClusterNodes`` decides, ``port`` does it."""

    def __init__(
        self,
        port: ClusterPort,
        nodes: ClusterNodes,
        keep: Callable[[int], None],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """``keep`` makes the number of the newest node durable, before the cluster hears of it. ``forget``: the job
        holds nothing any more."""
        self._forget = forget
        self._port, self._nodes, self._keep, self._say, self._now = port, nodes, keep, say, now
        self.name, self.every_s = port.name, port.every_s
        self._news: list[CapacityNews] = []

    def __repr__(self) -> str:
        return f"<{self._nodes!r} of {self.name}>"

    def going(self) -> dict[NodeId, float | None]:
        """Return the nodes that go, with the seconds that each has left; None: nobody says."""
        return self._nodes.going(self._now())

    def up(self) -> int:
        """Return how many nodes run. Asks for none and takes none back."""
        return sum(s.state in (NodeState.RUNNING, NodeState.LEAVING) for s in self._port.look())

    def offers(self) -> tuple[Offer, ...]:
        return self._port.offers()

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        """Nodes are of one kind: ``market`` on_demand gives none."""
        if market is Market.ON_DEMAND:
            return
        self._nodes.request(count)
        if not count:
            self._look()
            self._forget()

    def release(self, node: NodeId) -> None:
        self._do(self._nodes.release(node))

    def watch(self) -> tuple[CapacityNews, ...]:
        """Return the news. If the cluster refuses something, they are told with the next call."""
        self._look()
        news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        self._port.close()

    def _look(self) -> None:
        look = self._nodes.look(self._now(), self._port.look())
        self._news += look.news
        self._do(look.actions)

    def _do(self, actions: Sequence[NodeAction]) -> None:
        for action in actions:
            match action:
                case AddNodes(nodes):
                    try:
                        self._keep(self._nodes.number)
                        self._port.add(nodes)
                    except PlatformError:
                        self._nodes.refused(self._now(), nodes)
                        raise
                case CancelNode(node):
                    self._port.cancel(node)
                case _:
                    self._say(f"capacity: {self.name}: {action.text}")


class ClusterAgents:
    """Stands for agents that nodes of a cluster start by themselves. ``drain`` has the master empty a node."""

    def __init__(self, capacity: ClusterCapacity, drain: Callable[[NodeId, float | None], None]) -> None:
        self._capacity, self._drain = capacity, drain

    def __repr__(self) -> str:
        return f"<agents of {self._capacity.name}>"

    def start(self, grant: Grant, life: int) -> None:
        """The node does it."""

    def warn(self, node: NodeId, in_s: float | None) -> None:
        self._drain(node, in_s)

    def stop(self, node: NodeId) -> None:
        """The node is gone, and its agent with it."""

    def ended(self) -> tuple[AgentEnded, ...]:
        return ()  # (the cluster shows it)

    def close(self, wait_s: float) -> None:
        """Wait for agents that end with the job: they write the last of their state."""
        end = time.monotonic() + wait_s
        with contextlib.suppress(PlatformError):
            while self._capacity.up() and time.monotonic() < end:
                time.sleep(_LOOK_S)
