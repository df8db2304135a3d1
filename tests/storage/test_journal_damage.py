"""A journal with a changed bit is refused in one line, or reads exactly as if it had not been changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from journal_story import story

from everstep.brain.brain import Brain
from everstep.errors import ConfigError, EverstepError, PlatformError
from everstep.monitor.journal_fold import JournalReader
from everstep.storage.journal import Journal, read_journal

FLIPS = 1000


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
        fold_of,
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


def fold_of(path: Path) -> object:
    with JournalReader(path) as reader:
        reader.advance()
        return sorted(reader.fold.done), len(reader.fold.plans)


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


def test_a_flipped_bit_in_the_log_of_a_killed_master_is_found_or_cuts_the_last_commit(tmp_path: Path) -> None:
    """A master that was killed leaves its last events in the -wal file."""
    (tmp_path / "from").mkdir()
    path = tmp_path / "from" / "journal.sqlite"
    journal = Journal(path)
    brain = Brain()
    for event in story(30):
        journal.append(event, brain.handle(event))
        journal.flush()
    data, wal = path.read_bytes(), path.with_name("journal.sqlite-wal").read_bytes()
    journal.close()
    (tmp_path / "to").mkdir()
    copy = tmp_path / "to" / "journal.sqlite"

    def read(log: bytes) -> int:
        for stale in copy.parent.iterdir():
            stale.unlink()
        copy.write_bytes(data)
        copy.with_name("journal.sqlite-wal").write_bytes(log)
        return taken_over(copy)[1]

    last = len(story(30))
    assert read(wal) == last
    rng = random.Random(8)
    found = 0
    for _ in range(100):
        bit = rng.randrange(len(wal) * 8)
        changed = bytearray(wal)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert read(bytes(changed)) >= last - 1, f"bit {bit} of {len(wal) * 8}"
        except PlatformError as error:
            assert "\n" not in str(error)
            found += 1
    assert found > 90
