"""Which ended processes count as out of memory: the kernel's counter rose, and nobody else had killed them."""

from __future__ import annotations

import signal

from everstep.agent.memory_deaths import CLAIM_S, MemoryDeaths, died_of_own_limit
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


def test_a_death_of_its_own_limit_says_how_high_that_was() -> None:
    assert MemoryDeaths(Group(None)).why(MEMORY_STATUS, False, 1 << 28) == OutOfMemory(MemoryLimit.PROCESS, 1 << 28)


def test_a_script_without_memory_has_reached_its_limit_if_it_has_one_and_no_gpu_is_full() -> None:
    assert died_of_own_limit("memory", "MemoryError", 1 << 30) == OutOfMemory(MemoryLimit.PROCESS, 1 << 30)
    for cause, error, limit in (
        ("memory", "MemoryError", 0),
        ("memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0", 1 << 30),
        ("script", "ValueError", 1 << 30),
    ):
        assert died_of_own_limit(cause, error, limit) is None  # type: ignore[arg-type]
