"""Pushes wait while a ps has almost no memory left, as long as somebody may make room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.policies.memory_growth import MOVING
from everstep.ps.memory_gate import HOLD_S, SHARED_BYTES, MemoryGate, reserve_of

LIMIT = 10 * MOVING


class Memory:
    """Is a process' limit under a clock of its own."""

    def __init__(self) -> None:
        self.at, self.left, self.looks, self.kind = 0.0, float(LIMIT), 0, MemoryLimit.PROCESS

    def read(self) -> dict[str, float]:
        self.looks += 1
        kind = float(LIMITS.index(self.kind))
        return {"limit_bytes": float(LIMIT), "limit_used_bytes": LIMIT - self.left, "limit_kind": kind}

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
