"""Pushes wait while a ps has almost no memory left, as long as somebody may make room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.policies.memory_growth import MOVING
from everstep.ps.memory_gate import ASKED_S, HOLD_S, SHARED_BYTES, MemoryGate, reserve_of

LIMIT = 10 * MOVING


class Memory:
    """Is a process' limit under a clock of its own."""

    def __init__(self) -> None:
        self.at, self.left, self.looks, self.kind = 0.0, float(LIMIT), 0, MemoryLimit.PROCESS
        self.limit = LIMIT

    def read(self) -> dict[str, float]:
        self.looks += 1
        kind = float(LIMITS.index(self.kind))
        return {"limit_bytes": float(self.limit), "limit_used_bytes": self.limit - self.left, "limit_kind": kind}

    def now(self) -> float:
        return self.at


@pytest.fixture
def memory() -> Iterator[Memory]:
    yield Memory()


def test_pushes_wait_for_room_and_go_on_when_it_is_there(memory: Memory) -> None:
    gate = MemoryGate(memory.read, memory.now)
    assert gate.admits()
    memory.at, memory.left = 1.0, MOVING - 1.0
    assert not gate.admits()
    assert not gate.room(deadline=1.0), "too late"
    memory.at, memory.left = 2.0, MOVING + 1.0
    assert gate.admits() and gate.room(deadline=2.0)


def test_it_looks_more_often_when_little_is_left(memory: Memory) -> None:
    gate = MemoryGate(memory.read, memory.now)
    for left, most in ((5.0 * MOVING, 3), (2.0 * MOVING, 21)):
        memory.left, memory.looks = left, 0
        begin = memory.at
        while memory.at < begin + 1.0:
            memory.at += 0.01
            gate.admits()
        assert most // 2 <= memory.looks <= most, left


def test_if_nobody_makes_room_pushes_go_on_until_room_was_there_again(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    gate = MemoryGate(memory.read, memory.now)
    memory.left = 1e6
    assert not gate.admits()
    memory.at = HOLD_S - 1.0
    assert not gate.admits()
    memory.at = HOLD_S + 1.0
    assert gate.admits()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "pushes wait until partitions have moved away",
        "no room was made; pushes go on until there is none",
    ]
    memory.at, memory.left = HOLD_S + 10.0, float(LIMIT)
    assert gate.admits()
    memory.at, memory.left = HOLD_S + 20.0, 1e6
    assert not gate.admits()


def test_without_a_limit_nothing_waits() -> None:
    gate = MemoryGate(dict)
    assert gate.admits() and gate.held_s == 0.0


def test_what_is_kept_free_depends_on_the_limit() -> None:
    assert reserve_of(MemoryLimit.PROCESS, 1e9) == MOVING
    assert reserve_of(MemoryLimit.STORE, 1e8) == pytest.approx(3e6)
    assert reserve_of(MemoryLimit.CONTAINER, 1e11) == SHARED_BYTES


def test_without_a_policy_pushes_wait_a_moment_for_a_higher_limit_and_once_for_each_height(memory: Memory) -> None:
    asked: list[tuple[int, int]] = []
    gate = MemoryGate(memory.read, memory.now, lambda limit, used: asked.append((limit, used)))
    assert gate.admits() and not asked
    memory.at, memory.left = 1.0, MOVING - 1.0
    assert not gate.admits()
    assert asked == [(LIMIT, LIMIT - MOVING + 1)]
    memory.at = 1.0 + 0.9 * ASKED_S
    assert not gate.admits() and len(asked) == 1
    memory.at = 1.0 + ASKED_S + 0.1
    assert gate.admits(), "nobody gave any: it takes what there is"
    memory.at, memory.left = 20.0, float(LIMIT)
    assert gate.admits()
    memory.at, memory.left = 30.0, 1e6
    assert gate.admits() and len(asked) == 1, "this limit was asked for"
    memory.at, memory.limit, memory.left = 40.0, 2 * LIMIT, MOVING - 1.0
    assert not gate.admits() and asked[1][0] == 2 * LIMIT
    memory.at, memory.left = 40.5, float(LIMIT)
    assert gate.admits(), "there is room again"


@pytest.mark.parametrize("kind", [MemoryLimit.STORE, MemoryLimit.CONTAINER, MemoryLimit.MACHINE])
def test_limits_that_are_not_of_the_process_are_not_asked_for(memory: Memory, kind: MemoryLimit) -> None:
    asked: list[int] = []
    gate = MemoryGate(memory.read, memory.now, lambda limit, used: asked.append(limit))
    memory.kind, memory.left = kind, 1.0
    assert gate.admits() and not asked
