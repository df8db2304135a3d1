"""A process that died of its memory: the reason is in the journal, and all who show the job say so."""

from __future__ import annotations

import msgspec
import pytest

from everstep.brain.events import ProcessExited
from everstep.cli.view_text import failures_text
from everstep.ids import Incarnation, Slot
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit, OutOfMemory
from everstep.model.words import memory_words


def test_journals_of_before_have_no_such_reason() -> None:
    died = ProcessExited(Role.PS, Slot(1), Incarnation(2), -9, memory=OutOfMemory(MemoryLimit.CONTAINER, 1 << 31))
    raw = msgspec.msgpack.encode(died)
    assert msgspec.msgpack.decode(raw, type=ProcessExited) == died
    before = msgspec.msgpack.encode(msgspec.msgpack.decode(raw)[:-1])
    assert msgspec.msgpack.decode(before, type=ProcessExited).memory is None


@pytest.mark.parametrize("limit", list(MemoryLimit))
def test_each_limit_says_what_to_do(limit: MemoryLimit) -> None:
    line = memory_words(OutOfMemory(limit, 1 << 31), Role.PS)
    assert line.startswith("out of memory: it reached ") and "(2.0 GiB); " in line and "more ps" in line
    assert "\n" not in line and len(line) < 250
    assert "smaller batches" in memory_words(OutOfMemory(limit), Role.WORKER)


def test_failures_of_memory_are_shown_and_not_counted_twice() -> None:
    assert failures_text({"worker": 1, "ps": 2, "out_of_memory": 2}) == "2 ps, 1 worker (2 out of memory)"
    assert failures_text({"worker": 0, "out_of_memory": 0}) == ""
