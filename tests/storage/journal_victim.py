"""Writes a journal with snapshots, takes it over once, notes what was called durable: to be killed at any moment."""

import os
import sys
from pathlib import Path

from journal_story import story

from everstep.brain.brain import Brain
from everstep.storage.journal import Journal


def main(where: Path) -> None:
    note = os.open(where / "durable", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    events = story(30)
    for _ in range(2):
        journal = Journal(where / "journal.sqlite", snapshot_every=20)
        brain = journal.restore().brain
        end = min(len(events), journal.seq + 40)
        while journal.seq < end:
            event = events[journal.seq]
            journal.append(event, brain.handle(event))
            journal.maybe_snapshot(brain)
            if journal.seq % 5 == 0:
                journal.flush()
                os.write(note, f"{journal.seq}\n".encode())
        journal.close()
    assert isinstance(brain, Brain)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
