"""Injects faults (``everstep chaos``): the master passes each on to the process that is to suffer, and remembers which
ones last."""

from __future__ import annotations

from collections.abc import Callable

from everstep.brain.brain import Brain
from everstep.brain.events import Ok, Refused
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.decision import Decision
from everstep.model.job_view import RunningFault
from everstep.model.member import Member, MemberKey, Role
from everstep.net.messages import FaultAsked, OrderType, SignalProcess, SlowDown

FACTOR_MAX = 1000.0
FOR_MAX_S = 86_400.0


class FaultInjector:
    """Passes faults on: ``order(member, order)`` and ``order_agent(node, order)`` return whether somebody is there to
    get it. Soft state; a fault ends by itself at the member, also when the master is gone, and with its process."""

    def __init__(
        self,
        brain: Brain,
        order: Callable[[MemberKey, OrderType], bool],
        order_agent: Callable[[NodeId, OrderType], bool],
        note: Callable[[float, str, Decision], None],
    ) -> None:
        self._brain, self._order, self._order_agent, self._note = brain, order, order_agent, note
        self._running: dict[MemberKey, tuple[Incarnation, RunningFault]] = {}

    def __repr__(self) -> str:
        return f"<{len(self._running)} faults>"

    def running(self, at: float) -> tuple[RunningFault, ...]:
        self._running = {k: (no, d) for k, (no, d) in self._running.items() if d.until > at and self._is(k, no)}
        return tuple(d for _, d in self._running.values())

    def ask(self, fault: FaultAsked, at: float) -> Ok | Refused:
        """Begin or end one, at ``at``."""
        if (refused := _refusal(fault)) is not None:
            return Refused(refused)
        if fault.what == "heal" and not fault.target:
            for record in self._brain.members.all():  # all: those of an earlier master, nobody here knows
                if record.running:
                    self._heal(record.member.key, record.member)
            self._running.clear()
            self._note(at, "", Decision("fault", "all members are healed"))
            return Ok()
        key = _key(fault.target)
        member = self._member(key) if key is not None else None
        if key is None or member is None:
            return Refused(f"{fault.target!r} is not a running member; name one as worker:1 or ps:0 (everstep status)")
        words = {
            "slow": f"{fault.factor:g} times slower for {fault.for_s:g} s",
            "kill": "killed",
            "stop": f"stopped for {fault.for_s:g} s",
            "heal": "healed",
        }[fault.what]
        if not self._send(fault, key, member):
            return Refused(f"{fault.target} cannot be reached now: its connection is gone; try again")
        if fault.what in ("slow", "stop"):
            running = RunningFault(fault.target, fault.what, fault.factor, at + fault.for_s)
            self._running[key] = member.incarnation, running
        else:
            self._running.pop(key, None)
        inputs: dict[str, str | int | float | bool] = {"factor": fault.factor, "for_s": fault.for_s}
        self._note(at, fault.target, Decision("fault", words, inputs))
        return Ok()

    def _send(self, fault: FaultAsked, key: MemberKey, member: Member) -> bool:
        who = (member.role, member.slot, member.incarnation)
        match fault.what:
            case "slow":
                return self._order(key, SlowDown(fault.factor, fault.for_s, fault.burn))
            case "kill":
                return self._order_agent(member.node, SignalProcess(*who, "kill"))
            case "stop":
                return self._order_agent(member.node, SignalProcess(*who, "stop", fault.for_s))
            case "heal":
                self._heal(key, member)
                return True

    def _heal(self, key: MemberKey, member: Member) -> None:
        self._order_agent(member.node, SignalProcess(member.role, member.slot, member.incarnation, "go"))
        self._order(key, SlowDown(1.0, 0.0))

    def _member(self, key: MemberKey) -> Member | None:
        record = self._brain.members.of(key.role).get(key.slot)
        return record.member if record is not None and record.running else None

    def _is(self, key: MemberKey, incarnation: Incarnation) -> bool:
        member = self._member(key)
        return member is not None and member.incarnation == incarnation


def _key(target: str) -> MemberKey | None:
    role, _, slot = target.partition(":")
    if role not in ("worker", "ps") or not slot.isascii() or not slot.isdigit() or len(slot) > 9:
        return None
    return MemberKey(Role(role), Slot(int(slot)))


def _refusal(fault: FaultAsked) -> str | None:
    if fault.what == "slow" and not 1.0 < fault.factor <= FACTOR_MAX:
        return f"factor {fault.factor:g}: must be above 1 and at most {FACTOR_MAX:g}"
    if fault.what in ("slow", "stop") and not 0.0 < fault.for_s <= FOR_MAX_S:
        return f"for {fault.for_s:g} s: must be above 0 and at most a day"
    return None
