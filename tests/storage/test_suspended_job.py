"""What a suspended job needs is kept beside its checkpoints: whole, in the order of its worth, and for one taker."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from everstep.errors import ConfigError, PlatformError, StorageError
from everstep.storage.places import LocalPlace, NewFile
from everstep.storage.suspended_job import (
    INDEX,
    fetch_suspended,
    keep_suspended,
    mark_taken,
    read_suspended,
    where_words,
)


def suspended_run(folder: Path) -> Path:
    """A run directory as a suspended job leaves it; the last transaction of its journal is in the write-ahead log."""
    (folder / "audit").mkdir(parents=True)
    for name in ("secret", "job.json", "summary.json", "events.jsonl", "audit/ps-0.1.log", "audit/worker-1.2.log"):
        (folder / name).write_text(f"{name} of the job")
    (folder / "audit" / "notes.txt").write_text("not ours")
    db = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY)")
    db.execute("INSERT INTO events VALUES (7)")
    with sqlite3.connect(folder / "journal.sqlite"):  # (held open, so that the log stays a log)
        pass
    return folder


class DiskThatEnds(LocalPlace):
    """A place whose machine goes after so many files."""

    def __init__(self, root: Path, files: int) -> None:
        super().__init__(root)
        self.left = files

    def create(self, path: str) -> NewFile:
        self.left -= 1
        if self.left < 0:
            raise StorageError("the machine is gone")
        return super().create(path)


def test_it_goes_there_and_comes_back_whole(tmp_path: Path) -> None:
    run_dir, place = suspended_run(tmp_path / "old"), LocalPlace(tmp_path / "place")
    index = keep_suspended(place, run_dir, "flights", 1)
    assert index.complete and read_suspended(place) == index
    assert [file.path for file in index.files[:4]] == ["secret", "job.json", "summary.json", "journal.sqlite"]
    assert [file.path for file in index.files[4:]] == ["audit/ps-0.1.log", "audit/worker-1.2.log", "events.jsonl"]
    assert (tmp_path / "place" / "suspended").stat().st_mode & 0o077 == 0, "the secret is the user's alone"
    new = tmp_path / "new"
    new.mkdir()
    fetch_suspended(place, index, new)
    for name in ("secret", "job.json", "audit/ps-0.1.log", "audit/worker-1.2.log"):
        assert (new / name).read_bytes() == (run_dir / name).read_bytes()
        assert (new / name).stat().st_mode & 0o077 == 0
    with contextlib.closing(sqlite3.connect(new / "journal.sqlite")) as db:
        assert db.execute("SELECT seq FROM events").fetchall() == [(7,)], "also what is in the write-ahead log alone"
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".kept")] == []


def test_the_next_suspension_replaces_it(tmp_path: Path) -> None:
    run_dir, place = suspended_run(tmp_path / "old"), LocalPlace(tmp_path / "place")
    keep_suspended(place, run_dir, "flights", 1)
    mark_taken(place, 1, tmp_path / "elsewhere")
    taken = read_suspended(place)
    assert taken is not None and taken.taken is not None and "elsewhere" in where_words(taken)
    index = keep_suspended(place, run_dir, "flights", 2)
    assert index.taken is None
    mark_taken(place, 1, tmp_path / "too-late")
    assert read_suspended(place) == index, "word of an earlier suspension says nothing of this one"
    assert not [path for path in place.sizes() if path.startswith("suspended/1/")]


@pytest.mark.parametrize("seed", range(10))
def test_of_takers_in_the_same_moment_one_has_the_job(tmp_path: Path, seed: int) -> None:
    """Four takers at once, each of which waits a random moment behind each step at the place."""
    url = tmp_path / "place"
    keep_suspended(LocalPlace(url), suspended_run(tmp_path / "old"), "flights", 1)
    begin = threading.Barrier(4)

    class Slow(LocalPlace):
        def __init__(self, number: int) -> None:
            super().__init__(url)
            self.rng = random.Random(f"{seed} {number}")

        def sizes(self) -> dict[str, int]:
            time.sleep(self.rng.random() * 0.02)
            found = super().sizes()
            time.sleep(self.rng.random() * 0.02)
            return found

        def put(self, path: str, data: bytes) -> None:
            time.sleep(self.rng.random() * 0.02)
            super().put(path, data)

    def take(number: int) -> str:
        begin.wait(30)
        try:
            mark_taken(Slow(number), 1, tmp_path / f"taker-{number}")
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(take, range(4)))
    assert found.count("") == 1, found
    index = read_suspended(LocalPlace(url))
    assert index is not None and index.taken is not None
    winner = f"taker-{found.index('')}"
    assert index.taken.run_dir.endswith(winner)
    assert all(f"it went on at {index.taken.host}" in line and winner in line for line in found if line), found
    assert not [p for p in LocalPlace(url).sizes() if "claim" in p], "claims are taken back"
    mark_taken(LocalPlace(url), 1, tmp_path / winner)  # the one that has it may say so again


def test_a_claim_that_was_left_is_named(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "place")
    keep_suspended(place, suspended_run(tmp_path / "old"), "flights", 1)
    place.put("suspended/1/claim-of-a-dead-one", b"host")
    with pytest.raises(ConfigError, match="if nobody does, delete suspended/1/claim-of-a-dead-one there"):
        mark_taken(place, 1, tmp_path / "here", wait_s=0.0)
    index = read_suspended(place)
    assert index is not None and index.taken is None


def test_a_machine_that_goes_meanwhile_leaves_a_job_that_goes_on_or_none(tmp_path: Path) -> None:
    run_dir = suspended_run(tmp_path / "old")
    for files in range(10):
        place = DiskThatEnds(tmp_path / f"place-{files}", files)
        with contextlib.suppress(StorageError):
            keep_suspended(place, run_dir, "flights", 1)
        index = read_suspended(place)
        assert (index is not None) == (files >= 5), "four files without which it cannot go on, and the index"
        if index is not None:
            new = tmp_path / f"new-{files}"
            new.mkdir()
            fetch_suspended(place, index, new)
            assert (new / "journal.sqlite").exists() and index.complete == (files >= 9)


def test_what_is_damaged_is_refused_in_one_line(tmp_path: Path) -> None:
    run_dir, place = suspended_run(tmp_path / "old"), LocalPlace(tmp_path / "place")
    assert read_suspended(place) is None
    index = keep_suspended(place, run_dir, "flights", 1)
    kept = tmp_path / "place" / "suspended" / "1"
    for name, text, words in (
        ("audit/ps-0.1.log", "another log of it!", "is not what its index says"),
        ("audit/ps-0.1.log", "longer than it was, by far, and more", "is not what its index says"),
        ("secret", "", "is not what its index says"),
    ):
        before = (kept / name).read_bytes()
        (kept / name).write_text(text)
        new = tmp_path / f"new-{len(list(tmp_path.iterdir()))}"
        new.mkdir()
        with pytest.raises(PlatformError, match=words):
            fetch_suspended(place, index, new)
        (kept / name).write_bytes(before)
    (kept / "secret").unlink()
    new = tmp_path / "new-gone"
    new.mkdir()
    with pytest.raises(PlatformError, match="is gone"):
        fetch_suspended(place, index, new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": [["../../.ssh/authorized_keys", 3, ""]]}, "does not belong there"),
        ({"files": [["audit/../../x-1.1.log", 3, ""]]}, "does not belong there"),
        ({"files": []}, "it has no secret"),
        ({"version": 9}, "is of version 9"),
        ({"number": 0}, "does not belong there"),
        ({"files": "all of them"}, "is damaged"),
    ],
)
def test_an_index_of_a_stranger_is_judged(tmp_path: Path, change: dict[str, object], words: str) -> None:
    place = LocalPlace(tmp_path / "place")
    index = keep_suspended(place, suspended_run(tmp_path / "old"), "flights", 1)
    place.put(INDEX, msgspec.json.encode({**msgspec.to_builtins(index), **change}))
    with pytest.raises(ConfigError, match=words):
        read_suspended(place)
