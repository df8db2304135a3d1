"""Journals and dumps that an earlier release recorded are read, and give the same instructions.

``recorded/``: journals of real jobs with kills (``ps``: parity, checkpoints, another master, scale and drain; ``sync``:
backups, eager parity, a policy; ``allreduce`` and ``resumed``; ``hybrid``), the instructions that they gave then
(msgpack, as plain values), and dumps of the brain (number of the event behind which, state). ``transcripts.gz``: every
story of ``tests/brain/transcripts`` as that release encoded it: name, (event, digest, instructions) ..., and a dump
behind the twelfth event.
"""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.earlier import decode_event
from everstep.brain.events import Event, MasterStarted, StopAsked
from everstep.brain.shapes import SHAPES_2, in_shape, shapes_now
from everstep.cli.replay import replay
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation
from everstep.monitor.journal_fold import JournalReader
from everstep.storage.journal import Journal, agrees, digest_of, read_journal

RECORDED = Path(__file__).parent / "recorded"
JOBS = sorted(path.name.removesuffix(".sqlite.gz") for path in RECORDED.glob("*.sqlite.gz"))


def unpacked(name: str) -> Any:
    return msgspec.msgpack.decode(gzip.decompress((RECORDED / name).read_bytes()))


@pytest.fixture
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (tmp_path / "journal.sqlite").write_bytes(gzip.decompress((RECORDED / f"{request.param}.sqlite.gz").read_bytes()))
    return tmp_path


@pytest.mark.parametrize(("name", "run_dir"), [(name, name) for name in JOBS], indirect=["run_dir"], ids=JOBS)
def test_a_recorded_job_gives_the_same_instructions(name: str, run_dir: Path) -> None:
    assert replay(run_dir).ok
    wanted = unpacked(f"{name}.instructions.gz")
    entries = list(read_journal(run_dir / "journal.sqlite"))
    brain = Brain()
    for entry, old in zip(entries, wanted, strict=True):
        assert in_shape(brain.handle(entry.event), SHAPES_2, words=True) == old, entry.event
    with JournalReader(run_dir / "journal.sqlite") as reader:  # (the audit's)
        reader.advance()
        assert reader.fold.brain.snapshot() == brain.snapshot()
        assert bool(reader.fold.grants) is (name in ("ps", "sync"))
    for seq, dump in unpacked(f"{name}.dumps.gz"):  # and from a dump of then, the same again
        brain = Brain.restore(dump)
        for entry, old in zip(entries[seq:], wanted[seq:], strict=True):
            assert in_shape(brain.handle(entry.event), SHAPES_2, words=True) == old, (seq, entry.event)


def test_every_recorded_story_gives_the_same_instructions() -> None:
    kinds = set()
    for name, events, dump in unpacked("transcripts.gz"):
        brain, restored = Brain(), None
        for i, (raw, digest, old) in enumerate(events):
            if i == 12:
                restored = Brain.restore(dump)
            event = decode_event(raw)
            kinds.add(type(event.fact))
            got = brain.handle(event)
            assert agrees(got, digest, SHAPES_2) and in_shape(got, SHAPES_2, words=True) == old, f"{name}: {event}"
            assert restored is None or restored.handle(event) == got, f"{name}: {event}"
    assert len(kinds) == 33


def test_a_journal_keeps_the_shapes_by_which_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release has fields that this one has not: what this one wrote is replayed without them."""
    now = shapes_now()
    assert {"JobSpec", "Manifest", "Placement", "Group", "Decision"} <= set(now)
    before = {name: tuple(f for f in fields if f != "rejected") for name, fields in now.items()}
    journal = Journal(tmp_path / "journal.sqlite")
    monkeypatch.setattr("everstep.storage.journal.digest_of", lambda done: digest_of(in_shape(done, before)))
    monkeypatch.setattr("everstep.storage.journal.shapes_now", lambda: before)
    brain = Brain()
    for event in (Event(1.0, MasterStarted(Incarnation(1), JobSpec())), Event(2.0, StopAsked("enough"))):
        journal.append(event, brain.handle(event))
    journal.close()
    monkeypatch.undo()
    assert not replay(tmp_path).ok
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    db.execute("UPDATE shapes SET fields = ?", (msgspec.msgpack.encode(before),))
    db.commit()
    db.close()
    assert replay(tmp_path).ok
