"""Which ended processes count as out of memory: the kernel's counter rose, and nobody else had killed them."""

from __future__ import annotations

import signal

from everstep.agent.memory_deaths import CLAIM_S, MemoryDeaths
from everstep.model.memory_limit import MEMORY_STATUS, MemoryLimit, OutOfMemory
from everstep.monitor.cgroup_memory import LimitRead

KILLED = -signal.SIGKILL


class Group:
    def __init__(self, kills: int | None = 4, limit: LimitRead | None = None) -> None:
        self.n, self.read = kills, limit

    def kills(self) -> int | None:
        return self.n

    def limit(self) -> LimitRead | None:
        return self.read


def test_a_kill_that_the_counter_knows_is_of_memory() -> None:
    group = Group(limit=LimitRead(1 << 30, 1 << 20))
    deaths = MemoryDeaths(group)
    assert deaths.why(KILLED, False) is None, "somebody killed it"
    group.n = 6
    assert deaths.why(KILLED, True) is None, "this agent killed it"
    assert deaths.why(-signal.SIGTERM, False) is None and deaths.why(1, False) is None
    died = OutOfMemory(MemoryLimit.CONTAINER, 1 << 30)
    assert deaths.why(KILLED, False) == deaths.why(KILLED, False) == died
    assert deaths.why(KILLED, False) is None, "two kills are two deaths"


def test_a_ps_says_itself_that_it_got_no_memory() -> None:
    assert MemoryDeaths(Group(None)).why(MEMORY_STATUS, False) == OutOfMemory(MemoryLimit.PROCESS)


def test_without_a_counter_nothing_is_claimed() -> None:
    assert MemoryDeaths(Group(None)).why(KILLED, False) is None
    group = Group(2)
    deaths = MemoryDeaths(group)
    group.n = 3
    assert deaths.why(KILLED, False) == OutOfMemory(MemoryLimit.MACHINE), "no limit of a container"


def test_a_kill_that_nobody_claims_is_forgotten() -> None:
    group = Group()
    deaths = MemoryDeaths(group)
    group.n = 5  # a helper of a script
    deaths.look(100.0)
    deaths.look(100.0 + CLAIM_S + 1)
    assert deaths.why(KILLED, False) is None
    group.n = 0  # another counter: the cgroup was made anew
    deaths.look(200.0)
    group.n = 1
    assert deaths.why(KILLED, False) is not None
