"""The thread of ``everstep run`` that has machines come and go: asks the source, does what ``Fleet`` says."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from everstep.errors import EverstepError, PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import Market
from everstep.net.retry import backoff
from everstep.platforms.capacity import AgentPlatform, Capacity
from everstep.platforms.fleet import (
    Complain,
    Fleet,
    FleetAction,
    ReleaseMachine,
    Remember,
    StartAgent,
    StopAgent,
    WarnAgent,
)

_TURN_S = 0.1
_STAND_INS_S = 1.0
_AGENTS_END_S = 15.0
_BACK_OFF_MAX_S = 60.0


class StandIns(NamedTuple):
    """Is what the job wants in place of spot machines: ``machines`` on-demand ones; it wants ``emptied`` no more.
    ``nodes``: machines that it wants of the source, None: as many as at first. ``empty``: these are to be emptied, each
    within so many seconds."""

    machines: int
    emptied: tuple[NodeId, ...] = ()
    nodes: int | None = None
    empty: tuple[tuple[NodeId, float], ...] = ()


class FleetRunner:
    """Is run from ``start`` to ``close``. ``ready()``: whether the master can be joined. ``remember`` has the journal
    say what became of a machine; it may take long, and is called on a thread of its own. ``say``: a line for people.
    ``stand_ins``: asks the job what it wants in place of spot machines, None: it does not answer; None: it never wants
    any."""

    def __init__(
        self,
        source: Capacity,
        platform: AgentPlatform,
        most: int,
        ready: Callable[[], bool],
        remember: Callable[[Remember], None],
        say: Callable[[str], None],
        stand_ins: Callable[[], StandIns | None] | None = None,
    ) -> None:
        self._stand_ins, self._asked, self._look_at = stand_ins, 0, 0.0
        self._held = most
        self._source, self._platform, self._most = source, platform, most
        self._ready, self._remember, self._say = ready, remember, say
        self._fleet = Fleet()
        self._over = threading.Event()
        self._late: list[tuple[float, StartAgent]] = []
        self._facts: queue.SimpleQueue[Remember | None] = queue.SimpleQueue()
        self._shown: dict[str, str] = {}
        self._thread = self._teller = threading.current_thread()  # (until it is started)
        self._closed = False

    def __repr__(self) -> str:
        return f"<{self._fleet!r} from {self._source.name}>"

    def start(self) -> None:
        """Get machines, from now on; also once more after ``pause``."""
        self._over.clear()
        self._late, self._facts = [], queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="capacity", daemon=True)
        self._teller = threading.Thread(target=self._tell, args=(self._facts,), name="capacity-journal", daemon=True)
        self._thread.start()
        self._teller.start()

    def pause(self) -> None:
        """End, perhaps not for good: wait for agents, which end with it, and give every machine back."""
        self._over.set()
        self._facts.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_AGENTS_END_S + 3 * _BACK_OFF_MAX_S)

    def close(self) -> None:
        """The job is over: as ``pause``, and let go of the source."""
        self.pause()
        if not self._closed:
            self._closed = True
            self._source.close()

    def on_offer(self) -> int:
        """Return how many machines could be had, while this is paused. Raise nothing: a source that fails has none."""
        try:
            self._source.watch()
            return sum(offer.count for offer in self._source.offers())
        except PlatformError as error:
            self._complain("source", f"{self._source.name}: {error}; it is asked again")
            return 0

    @property
    def every_s(self) -> float:
        """Return how often the source wants to be asked."""
        return self._source.every_s

    def _run(self) -> None:
        waits = backoff(2 * self._source.every_s, _BACK_OFF_MAX_S, spread=0.0, at_once=False)
        requested, ask_at = False, 0.0
        try:
            while not self._over.is_set() and not self._ready():
                self._over.wait(_TURN_S)
            while not self._over.is_set():
                now = time.monotonic()
                if now >= ask_at:
                    try:
                        if not requested:
                            self._source.request(self._most)
                            self._held, requested = self._most, True
                        news = self._source.watch()
                    except PlatformError as error:
                        self._complain("source", f"{self._source.name}: {error}; it is asked again")
                        ask_at = now + next(waits)
                    else:
                        if self._shown.pop("source", ""):
                            self._say(f"capacity: {self._source.name}: it answers again")
                        waits = backoff(2 * self._source.every_s, _BACK_OFF_MAX_S, spread=0.0, at_once=False)
                        ask_at = now + self._source.every_s
                        for one in news:
                            self._do(self._fleet.handle(one))
                for node, status, lived_s in ((e.node, e.status, e.lived_s) for e in self._platform.ended()):
                    self._do(self._fleet.ended(node, status, lived_s))
                self._look_at_stand_ins(now)
                due = [start for at, start in self._late if at <= now]
                self._late = [(at, start) for at, start in self._late if at > now]
                self._do([s for s in due if self._fleet.starts(s)], late=True)
                self._over.wait(min(_TURN_S, self._source.every_s))
        finally:
            self._platform.close(_AGENTS_END_S)
            with contextlib.suppress(EverstepError):
                self._source.request(0)
                if self._asked:
                    self._source.request(0, Market.ON_DEMAND)
            self._asked = 0
            self._do(self._fleet.over())

    def _look_at_stand_ins(self, now: float) -> None:
        """Ask for as many on-demand machines as the job wants now, and give back those that it has emptied."""
        if self._stand_ins is None or now < self._look_at:
            return
        self._look_at = now + _STAND_INS_S
        wanted = self._stand_ins()
        if wanted is None:
            return
        try:
            if wanted.machines != self._asked:
                self._source.request(wanted.machines, Market.ON_DEMAND)
                self._asked = wanted.machines
            if wanted.nodes is not None and wanted.nodes != self._held:
                self._source.request(wanted.nodes)
                self._held = wanted.nodes
        except PlatformError as error:
            self._complain("source", f"{self._source.name}: {error}; it is asked again")
        for node in wanted.emptied:
            self._do(self._fleet.unwanted(node))
        self._do([WarnAgent(node, in_s) for node, in_s in wanted.empty])

    def _do(self, actions: Sequence[FleetAction], late: bool = False) -> None:
        for action in actions:
            try:
                match action:
                    case StartAgent(grant, life, after_s):
                        if after_s > 0 and not late:
                            self._late.append((time.monotonic() + after_s, action))
                        else:
                            self._platform.start(grant, life)
                    case WarnAgent(node, in_s):
                        self._platform.warn(node, in_s)
                    case StopAgent(node):
                        self._platform.stop(node)
                    case ReleaseMachine(node):
                        self._source.release(node)
                    case Remember():
                        self._facts.put(action)
                    case Complain(text):
                        self._say(f"capacity: {text}")
            except EverstepError as error:
                self._complain(type(action).__name__, str(error))

    def _complain(self, about: str, text: str) -> None:
        """Complain once for each kind of failure."""
        if self._shown.get(about) != text:
            self._shown[about] = text
            self._say(f"capacity: {text}")

    def _tell(self, facts: queue.SimpleQueue[Remember | None]) -> None:
        while (fact := facts.get()) is not None:
            if self._over.is_set():
                return
            try:
                self._remember(fact)
            except EverstepError as error:
                self._complain("journal", f"not noted: {error}")
