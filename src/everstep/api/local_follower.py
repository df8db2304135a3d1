"""Connects a process that is not its worker's leader to the job: the leader has the connection to the master."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.allreduce.replica_group import VARIABLE
from everstep.api.listeners import Listener
from everstep.api.worker_runtime import ProcessRuntime
from everstep.brain.events import Answer, Ok, PlanRegistered, Registered
from everstep.net.messages import RequestType


def is_follower(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one."""
    place = environment.get(VARIABLE, "")
    return bool(place) and not place.startswith("0/")


class LocalFollower(ProcessRuntime):
    """See the top of this file. What a script asks the master for is answered here: the leader asks it, too."""

    def start(self, listener: Listener) -> None:
        self._listener = listener

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        return Registered(0) if isinstance(request, PlanRegistered) else Ok()

    def ask(self, request: RequestType, then: Callable[[Answer], None]) -> None:
        then(self.call(request, 0.0))

    def chief(self) -> bool:
        return False

    def close(self, error: str) -> None:
        """Nothing is open."""
