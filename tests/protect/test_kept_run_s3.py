"""What a job of a cluster leaves is written to an S3-compatible store (``--out s3://...``), and read from there."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from s3_server import S3, needs_s3, s3

from everstep.cli.main import cli
from everstep.cli.pod import JOB, pod_out
from everstep.errors import ConfigError, EverstepError, StorageError
from everstep.storage.kept_run import fetched_run, read_kept
from everstep.storage.places import open_place

__all__ = ["s3"]  # (a fixture)
pytestmark = needs_s3
OUT = "s3://models/team/flights"


def environment(uid: str = "uid-1") -> dict[str, str]:
    job = {"metadata": {"name": "flights", "uid": uid}, "spec": {}, "status": {"phase": "Succeeded"}}
    return {JOB: json.dumps(job)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    for folder in ("audit", "logs"):
        (made / folder).mkdir(parents=True)
    with sqlite3.connect(made / "journal.sqlite") as journal:
        journal.execute("create table entries (n)")
    for name in ("job.json", "secret", "audit/ps-0.1.log"):
        (made / name).write_text(f"{name}: 1")
    return made


def test_a_run_goes_there_and_back(s3: S3, run_dir: Path) -> None:
    assert pod_out(run_dir, OUT, environment()) == 0
    (run_dir / "audit/ps-0.1.log").write_text("second")
    assert pod_out(run_dir, OUT, environment()) == 0
    with fetched_run(OUT) as here:
        assert (here / "audit/ps-0.1.log").read_text() == "second"
        assert sqlite3.connect(here / "journal.sqlite").execute("select count(*) from entries").fetchone() == (0,)
        assert not (here / "secret").exists()
    assert {path.split("/")[1] for path in open_place(OUT).sizes()} == {"index.json", "2"}, "the first copy is gone"


def test_the_verbs_read_it(s3: S3, run_dir: Path) -> None:
    pod_out(run_dir, OUT, environment())
    done = CliRunner().invoke(cli, ["status", "--json", OUT], catch_exceptions=False)
    assert json.loads(done.output)["cluster"]["metadata"]["name"] == "flights"
    with pytest.raises(ConfigError, match="s3://models/none: no run is kept there"):
        CliRunner().invoke(cli, ["status", "s3://models/none"], catch_exceptions=False, standalone_mode=False)


def test_another_job_of_the_name_is_refused(s3: S3, run_dir: Path) -> None:
    pod_out(run_dir, OUT + "-2", environment())
    with pytest.raises(ConfigError, match=r"has what job flights left on .*; name another place"):
        pod_out(run_dir, OUT + "-2", environment("uid-2"))


def test_a_store_that_is_away_is_one_line_and_leaves_what_was_kept(s3: S3, run_dir: Path) -> None:
    place = OUT + "-3"
    pod_out(run_dir, place, environment())
    s3.stop()
    try:
        with pytest.raises(StorageError) as error:
            pod_out(run_dir, place, environment())
        assert place in str(error.value) and "\n" not in str(error.value)
    finally:
        s3.start()
    kept = read_kept(open_place(place))
    assert kept is not None and kept.number == 1


def test_a_bucket_that_is_not_there_is_one_line(s3: S3, run_dir: Path) -> None:
    with pytest.raises(EverstepError) as error:
        pod_out(run_dir, "s3://nosuchbucket/x", environment())
    assert "s3://nosuchbucket/x" in str(error.value) and "\n" not in str(error.value)
