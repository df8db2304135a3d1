"""The journal: durable, restorable, owned by one master."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from journal_story import ONE, story

from everstep.brain.brain import Brain
from everstep.brain.events import Event, PlanMade
from everstep.cli.explain import explain
from everstep.cli.replay import replay
from everstep.errors import ConfigError, EverstepError, FencedError, PlatformError
from everstep.model.decision import Decision
from everstep.model.plan import Plan
from everstep.monitor.journal_fold import JournalReader
from everstep.storage.journal import Journal, digest_of, read_journal, vouch


def write(path: Path, events: list[Event], **options: int) -> Brain:
    brain = Brain()
    journal = Journal(path, **options)  # type: ignore[arg-type]
    for event in events:
        journal.append(event, brain.handle(event))
        journal.maybe_snapshot(brain)
    journal.flush()
    journal.close()
    return brain


def test_restore_is_the_fold_of_all_events(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    brain = write(path, story(50))
    journal = Journal(path)
    restored = journal.restore()
    journal.close()
    assert restored.brain.snapshot() == brain.snapshot()
    assert (restored.seq, restored.replayed, restored.at) == (105, 105, 55.5)
    assert journal.incarnation == 2


def test_snapshots_shorten_the_replay_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    brain = write(path, story(50), snapshot_every=30)
    journal = Journal(path)
    restored = journal.restore()
    journal.close()
    assert restored.replayed < 30
    assert restored.brain.snapshot() == brain.snapshot()
    db = sqlite3.connect(path)
    assert db.execute("SELECT COUNT(*) FROM snapshots").fetchone() == (2,)
    db.close()
    assert len(list(read_journal(path))) == 105


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    brain = write(path, story(50), snapshot_every=30)
    db = sqlite3.connect(path)
    db.execute("UPDATE snapshots SET state = x'00'")
    db.commit()
    db.close()
    journal = Journal(path)
    restored = journal.restore()
    journal.close()
    assert restored.replayed == 105
    assert restored.brain.snapshot() == brain.snapshot()


def test_nothing_undurable_is_called_durable(tmp_path: Path) -> None:
    """What a second reader sees at the moment of ``on_durable`` holds at least that event."""
    path = tmp_path / "journal.sqlite"
    seen: list[tuple[int, int]] = []
    reader = sqlite3.connect(path, check_same_thread=False)

    def durable(seq: int) -> None:
        seen.append((seq, reader.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()[0]))

    journal = Journal(path, on_durable=durable)
    for event in story(50):
        journal.append(event)
    journal.flush()
    journal.close()
    reader.close()
    assert seen and seen[-1][0] == 105
    assert all(there >= told for told, there in seen)
    assert len(seen) < 105  # groups: not one sync an event


def test_waiting_for_one_event(tmp_path: Path) -> None:
    async def wait_for_one() -> int:
        journal = Journal(tmp_path / "journal.sqlite")
        seqs = [journal.append(event) for event in story(5)]
        await asyncio.gather(*(journal.durable(seq) for seq in seqs))
        await journal.durable(seqs[0])
        durable = journal.durable_seq
        journal.close()
        return durable

    assert asyncio.run(wait_for_one()) == 15


def test_a_second_master_fences_the_first(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    told: list[EverstepError] = []
    old = Journal(path, on_error=told.append)
    old.append(story(50)[0])
    old.flush()
    new = Journal(path)
    old.append(story(50)[1])
    with pytest.raises(FencedError, match=r"#1 was replaced.*belongs to #2"):
        old.flush()
    with pytest.raises(FencedError):
        old.append(story(50)[2])
    new.append(story(50)[1])
    new.flush()
    assert isinstance(told[0], FencedError)
    old.close()
    new.close()
    assert [entry.seq for entry in read_journal(path)] == [1, 2]


def test_a_given_incarnation_must_be_newer(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path, ONE).close()
    with pytest.raises(FencedError):
        Journal(path, ONE)


def test_a_full_disk_is_one_clear_line_and_nothing_after_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    told: list[EverstepError] = []
    journal = Journal(path, on_error=told.append)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(PlatformError, match="disk is full") as caught:
        for event in story(5000):
            journal.append(event)
        journal.flush()
    assert "\n" not in str(caught.value)
    assert told
    with pytest.raises(PlatformError):
        journal.append(story(50)[0])
    journal.close()


def test_files_that_are_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is not a database, and longer than a header" * 100)
    with pytest.raises(PlatformError, match="damaged or no journal"):
        Journal(path)
    with pytest.raises(PlatformError):
        list(read_journal(path))
    with pytest.raises(ConfigError, match="does not exist"):
        list(read_journal(tmp_path / "nothing.sqlite"))
    with pytest.raises(PlatformError):
        Journal(tmp_path / "no" / "folder" / "journal.sqlite")


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = 99 WHERE key = 'version'")
    db.commit()
    db.close()
    words = r"journal version 99, this everstep reads 2 to 3: a later everstep reads it"
    with pytest.raises(ConfigError, match=words):
        Journal(path)
    with pytest.raises(ConfigError, match=words):
        list(read_journal(path))
    with JournalReader(path) as reader, pytest.raises(ConfigError, match=words):
        reader.advance()


def test_replay_agrees_and_stops_at_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, story(50))
    assert replay(tmp_path).ok
    db = sqlite3.connect(path)
    other = digest_of([])
    for seq, raw in db.execute("SELECT seq, event FROM events WHERE seq IN (40, 60)").fetchall():
        db.execute("UPDATE events SET digest = ? WHERE seq = ?", (other + vouch(seq, raw + other), seq))
    db.commit()
    db.close()
    result = replay(tmp_path)
    assert result.difference is not None
    assert result.difference.seq == 40
    assert result.difference.expected == digest_of([]).hex() != result.difference.actual
    assert "event 40" in result.lines()[0]


def test_explain_gives_reasons(tmp_path: Path) -> None:
    why = Decision("scale", "worker:0 is slow", {"worker:0": "9 ms"})
    write(tmp_path / "journal.sqlite", [*story(2), Event(9.0, PlanMade("mine:own", Plan(actions=(), decision=why)))])
    text = "\n".join(explain(tmp_path))
    assert "place partitions: all 1 ps have joined" in text
    assert "epoch finished: 'd' epoch 0: all 2 shards are done" in text
    worker = "\n".join(explain(tmp_path, "worker:0"))
    assert "start: the job wants this worker" in worker
    assert "place partitions" not in worker
    assert "scale: worker:0 is slow" in worker and "worker:0=9 ms" in worker, "its numbers led to it"
    with pytest.raises(ConfigError, match="worker:7 is not part of this job"):
        list(explain(tmp_path, "worker:7"))
