"""Journals and dumps that an earlier release recorded are read, and give the same instructions.

``recorded/``: journals of real jobs with kills (``ps``: parity, checkpoints, another master, scale and drain; ``sync``:
backups, eager parity, a policy; ``allreduce`` and ``resumed``; ``hybrid``), the instructions that they gave then
(msgpack, as plain values), and dumps of the brain (number of the event behind which, state). ``transcripts.gz``: every
story of ``tests/brain/transcripts`` as that release encoded it: name, (event, digest, instructions) ..., and a dump
behind the twelfth event.

Where this fails because a struct within an instruction got a field: add it to ``everstep.brain.earlier``, or ``everstep
replay`` calls journals of before wrong.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.earlier import as_then, decode_event
from everstep.cli.replay import replay
from everstep.monitor.facts import JournalReader
from everstep.storage.journal import agrees, read_journal

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
        assert list(as_then(brain.handle(entry.event)))[-1] == old, entry.event
    with JournalReader(run_dir / "journal.sqlite") as reader:  # (the audit's)
        reader.advance()
        assert reader.facts.brain.snapshot() == brain.snapshot()
        assert bool(reader.facts.grants) is (name in ("ps", "sync"))
    for seq, dump in unpacked(f"{name}.dumps.gz"):  # and from a dump of then, the same again
        brain = Brain.restore(dump)
        for entry, old in zip(entries[seq:], wanted[seq:], strict=True):
            assert list(as_then(brain.handle(entry.event)))[-1] == old, (seq, entry.event)


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
            assert agrees(got, digest) and list(as_then(got))[-1] == old, f"{name}: {event}"
            assert restored is None or restored.handle(event) == got, f"{name}: {event}"
    assert len(kinds) == 33
