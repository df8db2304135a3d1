"""The process that writes the journal is killed before and after every write, sync, truncation and deletion that SQLite
makes: the next master finds every event that was called durable, and none that was never appended."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from journal_story import story

from everstep.brain.brain import Brain
from everstep.storage.journal import Journal, read_journal

VICTIM = Path(__file__).with_name("journal_victim.py")
CALLS = "pwrite64,fsync,fdatasync,ftruncate,unlink,rename"

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def strace(where: Path, *options: str) -> int:
    where.mkdir()
    command = ["strace", "-f", "-qq", "-o", str(where / "log"), "-e", f"trace={CALLS}", *options]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, sys.executable, str(VICTIM), str(where)], env=environment, timeout=120, stderr=subprocess.DEVNULL
    )
    return done.returncode


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    where = tmp_path_factory.mktemp("whole") / "run"
    if strace(where):
        pytest.skip("strace may not trace here")
    lines = (where / "log").read_text().splitlines()
    calls = Counter((m[2], m[1]) for line in lines if (m := re.match(r"(\d+) +(\w+)\(", line)))
    most: dict[str, int] = {}  # strace counts each thread's calls apart
    for (name, _), n in calls.items():
        most[name] = max(n, most.get(name, 0))
    return [(name, k) for name, n in sorted(most.items()) for k in range(1, n + 1)]


def kill_at(name: str, k: int, where: Path) -> None:
    code = strace(where, "-e", f"inject={name}:signal=KILL:when={k}")
    assert code in (-9, 137), f"{name} {k}: {code}"
    noted = (where / "durable").read_text().split() if (where / "durable").exists() else []
    durable = max(map(int, noted), default=0)
    journal = Journal(where / "journal.sqlite")
    restored = journal.restore()
    journal.close()
    assert restored.seq >= durable, f"{name} {k}: event {durable} was durable, {restored.seq} are there"
    brain = Brain()
    events = story(30)[: restored.seq]
    for event in events:
        brain.handle(event)
    assert restored.brain.snapshot() == brain.snapshot(), f"{name} {k}"
    assert [entry.event for entry in read_journal(where / "journal.sqlite")] == events


def test_killed_at_some_moments(moments: list[tuple[str, int]], tmp_path: Path) -> None:
    for i, (name, k) in enumerate(random.Random(3).sample(moments, 5)):
        kill_at(name, k, tmp_path / str(i))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_moment(moments: list[tuple[str, int]], tmp_path: Path) -> None:
    assert {name for name, _ in moments} >= {"pwrite64", "unlink"}
    for name, k in moments:
        where = tmp_path / f"{name}-{k}"
        kill_at(name, k, where)
        shutil.rmtree(where)
