"""A run is kept at a place that outlives its run directory: whole, or as it was kept before."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from everstep.errors import ConfigError, PlatformError, StorageError
from everstep.storage.kept_run import INDEX, fetched_run, is_kept_run, keep_run, names_in, read_kept
from everstep.storage.places import LocalPlace, NewFile, open_place


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    for folder in ("audit", "logs", "nodes/w-0", "sock", "checkpoints"):
        (made / folder).mkdir(parents=True)
    with sqlite3.connect(made / "journal.sqlite") as journal:
        journal.execute("create table entries (n)")
    for name in ("job.json", "secret", "lock", "metrics.token", "audit/ps-0.1.log", "checkpoints/1.manifest"):
        (made / name).write_text(name)
    (made / "nodes/w-0/worker-0.log").write_text("loss 1")
    (made / "logs/link.log").symlink_to(made / "secret")
    return made


def test_what_is_kept_is_read_again_without_secrets(run_dir: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    keep_run(open_place(out), run_dir, "flights", "uid-1")
    assert is_kept_run(out) and not is_kept_run(str(run_dir))
    with fetched_run(out) as here:
        assert names_in(here) == ["job.json", "journal.sqlite", "audit/ps-0.1.log", "nodes/w-0/worker-0.log"]
        assert (here / "nodes/w-0/worker-0.log").read_text() == "loss 1"
        assert sqlite3.connect(here / "journal.sqlite").execute("select count(*) from entries").fetchone() == (0,)
    assert not here.exists()
    kept = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert not [p for p in kept if "secret" in p.read_bytes().decode(errors="replace") and p.name != "index.json"]


class Broken(LocalPlace):
    """Fails at the n-th file."""

    def __init__(self, root: Path, after: int) -> None:
        super().__init__(root)
        self.left = after

    def create(self, path: str) -> NewFile:
        self.left -= 1
        if self.left < 0:
            raise StorageError("killed here")
        return super().create(path)


@pytest.mark.parametrize("after", range(6))
def test_a_writer_that_dies_leaves_what_was_kept_before(run_dir: Path, tmp_path: Path, after: int) -> None:
    out = tmp_path / "out"
    keep_run(LocalPlace(out), run_dir, "flights", "uid-1")
    (run_dir / "nodes/w-0/worker-0.log").write_text("loss 2")
    try:
        keep_run(Broken(out, after), run_dir, "flights", "uid-1")
    except StorageError:
        assert after < 5
    with fetched_run(str(out)) as here:
        assert (here / "nodes/w-0/worker-0.log").read_text() == ("loss 1" if after < 5 else "loss 2")
    keep_run(LocalPlace(out), run_dir, "flights", "uid-1")
    with fetched_run(str(out)) as here:
        assert (here / "nodes/w-0/worker-0.log").read_text() == "loss 2"
    index = read_kept(LocalPlace(out))
    assert index is not None
    folders = {path.split("/")[1] for path in LocalPlace(out).sizes()}
    assert folders == {"index.json", str(index.number)}, "what was kept before is gone"


def test_a_place_of_another_job_is_refused(run_dir: Path, tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "out")
    keep_run(place, run_dir, "flights", "uid-1")
    with pytest.raises(ConfigError, match=r"has what job flights left on .*; name another place"):
        keep_run(place, run_dir, "flights", "uid-2")


def test_damage_is_said(run_dir: Path, tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "out")
    with pytest.raises(ConfigError, match="no run is kept there"), fetched_run(place.url):
        pass
    keep_run(place, run_dir, "flights", "uid-1")
    log = tmp_path / "out/run/1/nodes/w-0/worker-0.log"
    log.write_text("loss 9")
    with pytest.raises(PlatformError, match="is damaged"), fetched_run(place.url):
        pass
    raw = place.read(INDEX, 1 << 20)
    for bad in (raw.replace(b"nodes/w-0", b"../../w-0"), raw.replace(b'"version":1', b'"version":9'), raw[:-3]):
        place.put(INDEX, bad)
        with pytest.raises(ConfigError, match=r"damaged|version 9"):
            read_kept(place)
