"""The history of jobs: many writers, and files that cannot be used."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest

from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, PlatformError
from everstep.monitor.job_history import JobHistory, args_digest, history_path, script_digest
from everstep.sizing.past_jobs import PastJob


def job(name: str = "flights", at: float = 1.0, **more: object) -> PastJob:
    base = {"script": "train.py", "script_id": "s", "args_id": "a", "mode": "ps", "workers": 2, "ps": 1}
    return PastJob(at, name, **{**base, **more})  # type: ignore[arg-type]


def write_many(path: str, n: int) -> None:
    history = JobHistory(Path(path), busy_s=60.0)
    for i in range(n):
        history.add(job(f"job-{os.getpid()}-{i}"))


def test_what_was_added_is_there(tmp_path: Path) -> None:
    history = JobHistory(tmp_path / "deep" / "history.sqlite")
    assert history.jobs() == [] and history.forget(None) == 0, "no file is made by looking"
    assert not (tmp_path / "deep").exists()
    first, second = history.add(job("a")), history.add(job("b", script_id="t"))
    assert [k.number for k in history.jobs()] == [first, second]
    assert [k.job.name for k in history.jobs("t")] == ["b"]
    assert (tmp_path / "deep" / "history.sqlite").stat().st_mode & 0o777 == 0o600
    assert history.forget([first]) == 1
    assert [k.job.name for k in history.jobs()] == ["b"]
    assert history.add(job("c")) > second, "a number is not given twice"
    assert history.forget(None) == 2


def test_many_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(path), 10)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [w.exitcode for w in writers] == [0, 0, 0, 0]
    assert len({k.job.name for k in JobHistory(path).jobs()}) == 40


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    path.write_bytes(b"no database at all" * 1000)
    for use in (lambda: JobHistory(path).add(job()), JobHistory(path).jobs, lambda: JobHistory(path).forget(None)):
        with pytest.raises(PlatformError, match=r"history .*: cannot be used: .*; move it away"):
            use()
    assert path.read_bytes().startswith(b"no database"), "it is left as it is"


def test_a_damaged_record(tmp_path: Path) -> None:
    history = JobHistory(tmp_path / "history.sqlite")
    history.add(job())
    with sqlite3.connect(history.path) as db:
        db.execute("UPDATE jobs SET record = ?", (b"\xff{",))
    with pytest.raises(PlatformError, match="a record in it is damaged"):
        history.jobs()


def test_another_version(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=7")
        db.execute("CREATE TABLE jobs (x)")
    for use in (lambda: JobHistory(path).add(job()), JobHistory(path).jobs):
        with pytest.raises(ConfigError, match=r"is of version 7, this everstep reads 1"):
            use()


def test_another_file_of_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    with pytest.raises(PlatformError, match="no history of everstep"):
        JobHistory(path).jobs()


def test_a_locked_file(tmp_path: Path) -> None:
    history = JobHistory(tmp_path / "history.sqlite", busy_s=0.05)
    history.add(job())
    holder = sqlite3.connect(history.path)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(PlatformError, match="database is locked"):
        history.add(job())
    assert len(history.jobs()) == 1, "reading goes on"
    holder.rollback()
    holder.close()
    history.add(job())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match=r"cannot be used: Not a directory|File exists"):
        JobHistory(tmp_path / "file" / "history.sqlite").add(job())
    with pytest.raises(PlatformError, match="cannot be used: unable to open"):
        JobHistory(Path("/proc/history.sqlite")).add(job())


def test_where_it_is() -> None:
    home = {"HOME": "/home/a"}
    assert history_path(home) == Path("/home/a/.local/state/everstep/history.sqlite")
    assert history_path({**home, "XDG_STATE_HOME": "/x"}) == Path("/x/everstep/history.sqlite")
    assert history_path({**home, "XDG_STATE_HOME": "relative"}) == history_path(home)
    assert history_path({**home, "EVERSTEP_HISTORY": "/y/h.db"}) == Path("/y/h.db")
    assert history_path({**home, "EVERSTEP_HISTORY": "off"}) is None


def test_digests_tell_scripts_and_arguments_apart(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "b.py").write_text("b")
    assert script_digest(tmp_path / "a.py") != script_digest(tmp_path / "b.py")
    assert script_digest(tmp_path / "gone.py") == ""
    assert args_digest(["a", "b"]) != args_digest(["ab"])
    assert JobSpec().args == () and args_digest(()) == args_digest([])
