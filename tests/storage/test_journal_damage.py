"""A journal with a changed bit is refused in one line, or reads exactly as if it had not been changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    BrainEvent,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    PlanRegistered,
    ShardAsked,
    ShardDone,
)
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, PlatformError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.shard import Plan, lease_no, shard_key
from everstep.monitor.facts import JournalReader
from everstep.storage.journal import Journal, read_journal

ONE = Incarnation(1)
NODE = NodeId("node0")
FLIPS = 1000


def story(shards: int) -> list[BrainEvent]:
    out: list[BrainEvent] = [
        MasterStarted(1.0, ONE, JobSpec(workers=1, ps=1, buckets=4)),
        NodeJoined(2.0, NODE, "", 0, 0),
        MemberJoined(3.0, Role.PS, Slot(0), ONE, NODE, 1, Address(NODE, "x")),
        MemberJoined(4.0, Role.WORKER, Slot(0), ONE, NODE, 2),
        PlanRegistered(5.0, Slot(0), ONE, Plan(name="d", samples=10 * shards, shard_samples=10, seed=0)),
    ]
    for n in range(shards):
        lease = lease_no(1, n + 1)
        out.append(ShardAsked(6.0 + n, Slot(0), ONE, 0, 1, n + 1))
        out.append(ShardDone(6.5 + n, Slot(0), ONE, shard_key(0, 0, n), lease, ((Slot(0), ONE),)))
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A journal of 405 events with two snapshots, closed."""
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    brain = Brain()
    journal = Journal(path, snapshot_every=150)
    for event in story(200):
        journal.append(event, brain.handle(event))
        journal.maybe_snapshot(brain)
    journal.flush()
    journal.close()
    return path.read_bytes()


def taken_over(path: Path) -> tuple[bytes, int, float, int]:
    """What a new master would go on from."""
    journal = Journal(path)
    try:
        restored = journal.restore()
        return restored.brain.snapshot(), restored.seq, restored.at, journal.incarnation
    finally:
        journal.close()


def outcome(path: Path, data: bytes) -> tuple[object, ...]:
    """What the master, ``replay`` and ``audit`` read of a copy, each a value or the class and line of an error."""
    out: list[object] = []
    for read in (
        taken_over,
        lambda p: [(e.seq, e.event, e.digest) for e in read_journal(p)],
        facts_of,
    ):
        for stale in path.parent.glob(path.name + "*"):
            stale.unlink()
        path.write_bytes(data)
        try:
            out.append(read(path))
        except (PlatformError, ConfigError) as error:
            assert "\n" not in str(error) and str(path) in str(error)
            out.append(error)
    return tuple(out)


def facts_of(path: Path) -> object:
    with JournalReader(path) as reader:
        reader.advance()
        return sorted(reader.facts.done), len(reader.facts.plans)


@pytest.mark.parametrize("flips", [100, pytest.param(FLIPS, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_or_changes_nothing(whole: bytes, tmp_path: Path, flips: int) -> None:
    path = tmp_path / "journal.sqlite"
    good = outcome(path, whole)
    assert not any(isinstance(x, Exception) for x in good)
    rng = random.Random(6)
    found = 0
    for _ in range(flips):
        bit = rng.randrange(len(whole) * 8)
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        for expected, got in zip(good, outcome(path, bytes(data)), strict=True):
            assert isinstance(got, EverstepError) or got == expected, f"bit {bit} of {len(whole) * 8}"
            found += isinstance(got, EverstepError)
    assert found > flips


def test_a_cut_journal_is_found(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    good = outcome(path, whole)
    for size in (50, 4096, len(whole) // 2):
        assert all(isinstance(x, EverstepError) for x in outcome(path, whole[:size])), size
    for expected, got in zip(good, outcome(path, whole[:-1]), strict=True):
        assert isinstance(got, EverstepError) or got == expected
