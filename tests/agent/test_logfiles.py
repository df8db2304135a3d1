"""Logs are bounded, and give way to the journal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.agent import logfiles
from everstep.agent.logfiles import LEFT_BYTES, DiskWatch, give_way, keep_bounded


def test_a_log_that_grew_too_large_is_cut_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for round_ in range(5):
        os.write(fd, b"%d" % round_ * 2000)
        keep_bounded(tmp_path, most=1500)
        os.write(fd, b"after %d\n" % round_)
    os.close(fd)
    assert log.read_bytes() == b"after 4\n"
    assert (tmp_path / "worker-0.log.1").read_bytes() == b"after 3\n" + b"4" * 2000
    assert len(list(tmp_path.iterdir())) == 2


def test_give_way_leaves_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"a" * 1_000_000 + b"the end\n")
    (tmp_path / "worker-0.log.1").write_bytes(b"b" * 1000)
    (tmp_path / "ps-0.log").write_bytes(b"short\n")
    assert give_way(tmp_path) > 900_000
    assert (tmp_path / "worker-0.log").stat().st_size == LEFT_BYTES
    assert (tmp_path / "worker-0.log").read_bytes().endswith(b"the end\n")
    assert not (tmp_path / "worker-0.log.1").exists()
    assert (tmp_path / "ps-0.log").read_bytes() == b"short\n"


def test_a_full_disk_is_said_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    said: list[str] = []
    full, now = True, 1000.0
    monkeypatch.setattr(logfiles, "disk_is_full", lambda path: full)
    monkeypatch.setattr(logfiles.time, "monotonic", lambda: now)
    watch = DiskWatch(tmp_path, 240.0, said.append)
    for _ in range(130):
        watch.look()
        now += 1.0
    assert len(said) == 3 and "within 240 s" in said[0] and "within 180 s" in said[1]
    full = False
    watch.look()
    watch.look()
    assert len(said) == 4 and "space again" in said[3]
