"""Workers whose script makes no progress: where it is is asked for in time, and told. Soft state: a new master asks
again. That such a worker is lost in the end is the watch's word (``MemberSilent.why``)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.brain.events import MemberSilent
from everstep.brain.watch import HeartbeatWatch
from everstep.ids import Incarnation, NodeId
from everstep.model.decision import Decision
from everstep.model.member import MemberKey, Role
from everstep.net.messages import OrderType, StackTaken, TakeStack

LEAD_S = 2.0  # before a worker is given up, its stack is taken once more
LEAD_SHARE = 0.1  # at most, of the limit
FRAMES_SHOWN = 12


class _Case(msgspec.Struct):
    incarnation: Incarnation
    asked: int = 0  # 1: at half of the time, 2: shortly before the end
    place: str = ""
    announced: bool = False
    idle_s: float = 0.0


class Hangs:
    """Finds scripts without progress; ``reach(node, order)``: whether that agent is there to hear it, ``note``: for
    people. ``note``: for people."""

    def __init__(
        self,
        watch: HeartbeatWatch,
        reach: Callable[[NodeId, OrderType], bool],
        note: Callable[[float, str, Decision], None],
    ) -> None:
        self._watch, self._reach, self._note = watch, reach, note
        self._cases: dict[MemberKey, _Case] = {}

    def __repr__(self) -> str:
        return f"<hangs {sorted(map(str, self._cases))}>"

    def tick(self, at: float) -> None:
        """Before the watch's."""
        limit_s = self._watch.progress_s
        idle = {i.key: i for i in self._watch.idle(at)}
        for key, case in list(self._cases.items()):
            if key not in idle or idle[key].incarnation != case.incarnation:
                del self._cases[key]
                if case.announced and self._watch.counts(key, case.incarnation):
                    words = f"its script had done nothing for {case.idle_s:.0f} s"
                    self._note(at, str(key), Decision("goes on", words))
        for key, one in idle.items():
            case = self._cases.setdefault(key, _Case(one.incarnation))
            case.idle_s = one.idle_s
            stage = 2 if one.idle_s >= limit_s - min(LEAD_S, LEAD_SHARE * limit_s) else 1
            if stage > case.asked and self._reach(one.node, TakeStack(key.slot, one.incarnation, one.idle_s)):
                case.asked = stage

    def taken(self, taken: StackTaken, at: float) -> None:
        """An agent found out where the script is."""
        key = MemberKey(Role.WORKER, taken.slot)
        case = self._cases.get(key)
        if case is None or case.incarnation != taken.incarnation:
            return
        case.place = taken.place
        if case.announced:
            return
        case.announced = True
        where = f"it is at {taken.place}" if taken.place else "where it is could not be found out"
        limit_s = self._watch.progress_s
        words = f"its script has done nothing for {taken.idle_s:.0f} s: {where}"
        inputs: dict[str, str | int | float | bool] = {"idle_s": round(taken.idle_s, 1), "progress_timeout_s": limit_s}
        if taken.stack:
            inputs["stack"] = "\n".join(taken.stack)
        rejected = (f"replace it now: it may go on (replaced after progress_timeout = {limit_s:g} s)",)
        self._note(at, str(key), Decision("no progress", words, inputs, rejected))
        if len(taken.stack) > 1:
            for line in taken.stack[-FRAMES_SHOWN:]:
                self._note(at, str(key), Decision("stack", line))

    def complete(self, event: MemberSilent) -> MemberSilent:
        """Complete the event with the place in its reason."""
        case = self._cases.get(MemberKey(event.role, event.slot))
        if not event.why or case is None or case.incarnation != event.incarnation or not case.place:
            return event
        return msgspec.structs.replace(event, why=f"{event.why}, at {case.place}")
