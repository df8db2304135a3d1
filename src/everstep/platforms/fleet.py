"""Decides what is done about the machines of a job as they come and go. Pure: no clock, no processes."""

from __future__ import annotations

from typing import Final

import msgspec

from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, CapacityStep, Gone, Grant, Warned

STARTS: Final = 3
"""So many agents of one machine in a row may end within ``STEADY_S``; then the machine is given back."""
STEADY_S: Final = 60.0
_FIRST_WAIT_S: Final = 1.0


class StartAgent(msgspec.Struct, frozen=True):
    """Start the agent of a machine, after ``after_s`` seconds. ``life``: of all agents of that name, from 0."""

    grant: Grant
    life: int
    after_s: float = 0.0


class WarnAgent(msgspec.Struct, frozen=True):
    """Tell an agent that its machine goes."""

    node: NodeId
    in_s: float | None


class StopAgent(msgspec.Struct, frozen=True):
    """End the agent of a machine that is gone, and all that it has started."""

    node: NodeId


class ReleaseMachine(msgspec.Struct, frozen=True):
    """Give a machine back to its source."""

    node: NodeId


class Remember(msgspec.Struct, frozen=True):
    """Have the journal say what became of a machine."""

    grant: Grant
    step: CapacityStep
    recorded_s: float | None = None
    life: int = 0


class Complain(msgspec.Struct, frozen=True):
    """Is a line for people."""

    text: str


FleetAction = StartAgent | WarnAgent | StopAgent | ReleaseMachine | Remember | Complain


class HeldMachine(msgspec.Struct):
    """Is a machine that is held. ``life``: of its newest agent. ``starts``: of its agents. ``quick``: ends in a row
    soon after the start. ``warned``: it goes, and its agent need not come back."""

    grant: Grant
    life: int
    starts: int = 1
    quick: int = 0
    warned: bool = False


class Fleet:
    """Holds the machines that a job holds beside its first one."""

    def __init__(self) -> None:
        self._held: dict[NodeId, HeldMachine] = {}
        self._lives: dict[NodeId, int] = {}

    def __repr__(self) -> str:
        return f"<fleet of {len(self._held)}>"

    @property
    def held(self) -> tuple[NodeId, ...]:
        """Return nodes that are held now, in the order in which they came."""
        return tuple(self._held)

    def handle(self, news: CapacityNews) -> list[FleetAction]:
        """A source of machines tells something. What is done about it."""
        match news:
            case Grant(node):
                if node in self._held:
                    return [Complain(f"{node} is granted, and the job has it already: nothing is done")]
                life = self._next_life(node)
                self._held[node] = HeldMachine(news, life)
                return [Remember(news, CapacityStep.GRANTED, news.recorded_s, life), StartAgent(news, life)]
            case Warned(node, in_s, recorded_s):
                held = self._held.get(node)
                if held is None or held.warned:
                    return []
                held.warned = True
                return [Remember(held.grant, CapacityStep.WARNED, recorded_s, held.life), WarnAgent(node, in_s)]
            case Gone(node, recorded_s):
                held = self._held.pop(node, None)
                if held is None:
                    return [Complain(f"{node} is gone, and the job does not have it: nothing is done")]
                return [StopAgent(node), Remember(held.grant, CapacityStep.TAKEN_BACK, recorded_s, held.life)]

    def unwanted(self, node: NodeId) -> list[FleetAction]:
        """The job has emptied this machine, and wants it no more: it is given back. Harmless when repeated."""
        held = self._held.pop(node, None)
        if held is None:
            return []
        gone = Remember(held.grant, CapacityStep.GIVEN_BACK, life=held.life)
        return [StopAgent(node), ReleaseMachine(node), gone]

    def ended(self, node: NodeId, status: int, lived_s: float) -> list[FleetAction]:
        """The agent of a machine has ended by itself, with ``status``, after ``lived_s`` seconds."""
        held = self._held.get(node)
        if held is None or held.warned or status == 0:  # 0: the job is over
            return []
        held.quick = held.quick + 1 if lived_s < STEADY_S else 1
        words = f"the agent of {node} ended with {status} after {lived_s:.0f} s"
        if held.quick >= STARTS:
            del self._held[node]
            return [
                Complain(f"{words}, {held.quick} times in a row: its machine is given back"),
                ReleaseMachine(node),
                Remember(held.grant, CapacityStep.GIVEN_BACK, life=held.life),
            ]
        held.starts, held.life = held.starts + 1, self._next_life(node)
        wait_s = _FIRST_WAIT_S * 4 ** (held.quick - 1)
        return [
            Complain(f"{words}: it is started again in {wait_s:.0f} s"),
            StartAgent(held.grant, held.life, wait_s),
        ]

    def starts(self, action: StartAgent) -> bool:
        """Whether that start, which had to wait, is still wanted."""
        held = self._held.get(action.grant.node)
        return held is not None and held.grant == action.grant and not held.warned

    def over(self) -> list[FleetAction]:
        """The job is over: all machines are given back."""
        nodes, self._held = tuple(self._held), {}
        return [ReleaseMachine(node) for node in nodes]

    def _next_life(self, node: NodeId) -> int:
        life = self._lives.get(node, 0)
        self._lives[node] = life + 1
        return life
